"""What a server's processes write down for whoever started them: the records, and all that is known of their format.

:func:`write` writes the state of a process, :func:`collect` reads those of a server. The observers write; ``regress``
and the benchmarks read; what stands in for a server in tests makes the same records.

Memory is in bytes, and zero where there is no CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple


class ChangeStatus(NamedTuple):
    """What became of a change in this process; see :class:`sglang_moe_patches.core.patch.Plan`."""

    change: str
    status: str
    reason: str


@dataclass
class Memory:
    """What a model process used. Figures that were not seen are ``None``: another kernel ran, or one that leaves its
    output to somebody else."""

    device: str | None = None
    """'cpu' or 'cuda'; ``None`` before the first forward."""
    peak_forward_bytes: int | None = None
    """CUDA: the allocator's peak of one forward, beyond what was allocated before it; see ``tokens``."""
    live_at_kernel_bytes: int | None = None
    """Bytes of tensors alive when a routed-experts kernel, or a runner that is not looked into, starts, beyond those
    alive when its forward started; the most over the layers, see ``tokens``."""
    tokens: int = 0
    """Of the largest forward. The two above are of one with so many; of several such the least, so that workspaces
    which libraries allocate once do not count."""
    forwards: int = 0
    moe_layers: int | None = None
    """Calls of such kernels and runners in one forward."""
    output_buffers: int | None = None
    """The most distinct allocations that kernels which are looked into wrote their output into during one forward."""
    kernel_buffer_bytes: int | None = None
    """What CuteDSL's wrappers hold between forwards; ``None`` where they hold none."""
    cache_token_bytes: float | None = None
    """Bytes of one token in a rank's KV cache; ``None`` where there are caches of several kinds."""
    reserved_bytes: int | None = None
    """CUDA: what PyTorch's allocator took from the driver since the first forward began, at the most."""
    slack_bytes: int | None = None
    """Of those, what was never a tensor: less the most that was allocated at once since then."""
    gpu: str = ""
    """CUDA: what its maker calls the device."""


class MoeInput(NamedTuple):
    """[tokens, hidden] of a MoE layer, each routed to ``top_k`` experts; ``itemsize`` in bytes."""

    tokens: int
    top_k: int
    hidden: int
    itemsize: int

    @property
    def bytes(self) -> int:
        """Of the [tokens, top-k, hidden] tensor."""
        return self.tokens * self.top_k * self.hidden * self.itemsize


class Act(NamedTuple):
    """How often a change did something in one MoE layer; see :class:`sglang_moe_patches.core.patch.Count`.

    :param name: of what is counted.
    :param layer: ``None``: it was done outside of any, when the model was built above all.
    :param captured: while a CUDA graph was captured. What a graph does when it is replayed, Python does not see.
    :param most: of what is counted, in one go; ``total``: in all.
    """

    name: str
    layer: int | None
    captured: bool
    times: int
    most: int
    total: int


@dataclass(frozen=True)
class Acted:
    """What the changes did in a process.

    :param layers: the MoE layers that ran.
    :param largest: the input with the largest [tokens, top-k, hidden] tensor.
    """

    layers: tuple[int, ...] = ()
    acts: tuple[Act, ...] = ()
    largest: MoeInput | None = None


@dataclass
class Process:
    """What a model process recorded of itself.

    :param acted: counts may be some forwards old.
    :param failure: why observing ended early, or "".
    """

    changes: tuple[ChangeStatus, ...]
    memory: Memory = field(default_factory=Memory)
    acted: Acted = field(default_factory=Acted)
    failure: str = ""


def write(process: Process, path: Path) -> None:
    """Write the state of a process, whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(process)), encoding="utf-8")
    partial.replace(path)


def read(written: Mapping[str, Any]) -> Process:
    """The process whose state is a JSON document."""
    changes = tuple(ChangeStatus(*each) for each in written["changes"])
    return Process(changes, Memory(**written["memory"]), read_acted(written["acted"]), written.get("failure", ""))


def read_acted(written: Mapping[str, Any]) -> Acted:
    """What the changes did, of a JSON document."""
    largest = written["largest"]
    acts = tuple(Act(*each) for each in written["acts"])
    return Acted(tuple(written["layers"]), acts, None if largest is None else MoeInput(*largest))


def collect(folder: Path) -> Process | None:
    """The state of the process that used most, with what the changes did in any; ``None`` when none was observed.

    :param folder: of ``*.json``, one file a process (a tensor-parallel rank).
    """
    found = [read(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]

    def used(process: Process) -> tuple[bool, int, int]:
        memory = process.memory
        return memory.forwards > 0, memory.peak_forward_bytes or 0, memory.live_at_kernel_bytes or 0

    if not found:
        return None
    return replace(max(found, key=used), acted=of_all([process.acted for process in found]))


def of_all(found: Sequence[Acted]) -> Acted:
    """What was done by any of several processes: pipeline stages have layers of their own, other ranks do the same."""
    acts: dict[tuple[Any, ...], Act] = {}
    for act in (act for each in found for act in each.acts):
        known = acts.get(act[:3], act)
        acts[act[:3]] = Act(*act[:3], *map(max, act[3:], known[3:]))
    inputs = [each.largest for each in found if each.largest is not None]
    layers = sorted({layer for each in found for layer in each.layers})
    return Acted(tuple(layers), tuple(acts.values()), max(inputs, key=lambda one: one.bytes, default=None))
