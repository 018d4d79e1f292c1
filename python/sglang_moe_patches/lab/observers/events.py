"""Records that a server's processes write about themselves, and the records' file format.

The observers write records with :func:`write`. ``regress`` and the benchmarks read them with :func:`collect`. The
server's stand-in in tests writes the same records.

Memory sizes are in bytes. Without CUDA, they are zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple


class ChangeStatus(NamedTuple):
    """Status of a change in one process, with its reason; see :class:`sglang_moe_patches.core.patch.Plan`.

    :param change: name of the change.
    :param status: text of the :class:`~sglang_moe_patches.core.patch.Status`, such as ``applied``.
    """

    change: str
    status: str
    reason: str


@dataclass
class Memory:
    """Memory figures of one model process.

    A figure is ``None`` if it was not observed. There are two reasons: a kernel ran that is not observed, or a kernel
    left the sum over the top-k to a later kernel.

    An *observed kernel* is one of ``forwards.KERNELS`` or CuteDSL's wrapper. For any other MoE runner, the whole call
    of the runner counts as one kernel, whose output is unknown.
    """

    device: str | None = None
    """Type of the device: 'cpu' or 'cuda'; ``None`` before the first forward pass."""
    peak_forward_bytes: int | None = None
    """Peak of the bytes that one forward pass of ``tokens`` tokens allocates. Memory that was allocated before the
    forward pass does not count. Only on CUDA. If there are several such forward passes, the smallest figure counts, so
    that workspaces which a library allocates once are left out."""
    live_at_kernel_bytes: int | None = None
    """Bytes of tensors that are alive when a MoE kernel starts. Tensors that were alive when the forward pass started
    do not count. The figure is the largest of all layers, in a forward pass of ``tokens`` tokens. If there are several
    such forward passes, the smallest figure counts."""
    tokens: int = 0
    """Number of tokens in the largest forward pass."""
    forwards: int = 0
    """Number of forward passes."""
    moe_layers: int | None = None
    """Number of MoE kernels that ran in one forward pass."""
    output_buffers: int | None = None
    """Number of distinct allocations for the outputs of the observed kernels, in the forward pass with the most
    allocations."""
    kernel_buffer_bytes: int | None = None
    """Bytes of the buffers that CuteDSL's wrappers keep between forward passes; ``None`` if they keep none."""
    cache_token_bytes: float | None = None
    """Bytes of one token in the KV cache of one rank; ``None`` if the model has KV caches of several kinds."""
    reserved_bytes: int | None = None
    """Growth of the bytes that PyTorch's allocator reserves, from the first forward pass to the largest value. Only on
    CUDA."""
    slack_bytes: int | None = None
    """Part of ``reserved_bytes`` that tensors never used. It is ``reserved_bytes`` minus the growth of allocated
    memory, from the first forward pass to its peak. Only on CUDA."""
    gpu: str = ""
    """Name of the GPU model. Only on CUDA."""


class MoeInput(NamedTuple):
    """Sizes of the input of a MoE layer's routed experts, [tokens, hidden]. Each token is routed to ``top_k`` experts.

    :param itemsize: bytes of one element.
    """

    tokens: int
    top_k: int
    hidden: int
    itemsize: int

    @property
    def expert_rows_bytes(self) -> int:
        """Bytes of a tensor [tokens, top-k, hidden] with the dtype of the layer's input."""
        return self.tokens * self.top_k * self.hidden * self.itemsize


class Act(NamedTuple):
    """Record that a change did one thing in one MoE layer; see :class:`sglang_moe_patches.core.patch.Count`.

    :param name: name of the ``Count``.
    :param layer: index of the MoE layer; ``None`` if the act happened outside of all layers, mostly while the model was
        built.
    :param captured: whether the act happened while a CUDA graph was captured. Replays of the graph are not counted.
    :param times: number of calls.
    :param most: largest amount of one call, such as bytes; see the ``Count``.
    :param total: sum of the amounts of all calls.
    """

    name: str
    layer: int | None
    captured: bool
    times: int
    most: int
    total: int


@dataclass(frozen=True)
class Acts:
    """All acts of the changes in a process.

    :param layers: indices of the MoE layers that ran.
    :param acts: records of the acts: one for each ``Count`` and layer. Acts during a capture have their own record.
    :param largest: sizes of the input with the largest [tokens, top-k, hidden] tensor.
    """

    layers: tuple[int, ...] = ()
    acts: tuple[Act, ...] = ()
    largest: MoeInput | None = None


@dataclass
class Process:
    """Record of one model process.

    :param changes: status of each change.
    :param memory: memory figures.
    :param acted: acts of the changes. The last few forward passes may be missing in their counts.
    :param failure: error that ended the observation; empty if there was no error.
    """

    changes: tuple[ChangeStatus, ...]
    memory: Memory = field(default_factory=Memory)
    acted: Acts = field(default_factory=Acts)
    failure: str = ""


def write(process: Process, path: Path) -> None:
    """Write the record of a process. A reader sees either the old record or the new record, never a part."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(process)), encoding="utf-8")
    partial.replace(path)


def parse_process(document: Mapping[str, Any]) -> Process:
    """Make a process's record from its JSON document."""
    changes = tuple(ChangeStatus(*status) for status in document["changes"])
    return Process(changes, Memory(**document["memory"]), parse_acts(document["acted"]), document.get("failure", ""))


def parse_acts(document: Mapping[str, Any]) -> Acts:
    """Make the acts of the changes from their JSON document."""
    largest = document["largest"]
    acts = tuple(Act(*act) for act in document["acts"])
    return Acts(tuple(document["layers"]), acts, None if largest is None else MoeInput(*largest))


def collect(folder: Path) -> Process | None:
    """Read the records of a server's processes.

    :param folder: folder with one ``*.json`` file per process (one process per tensor-parallel rank).
    :returns: the record of the process that used the most memory, with the acts of all processes; ``None`` if the
        folder has no record.
    """
    processes = [parse_process(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]

    def used_memory(process: Process) -> tuple[bool, int, int]:
        memory = process.memory
        return memory.forwards > 0, memory.peak_forward_bytes or 0, memory.live_at_kernel_bytes or 0

    if not processes:
        return None
    return replace(max(processes, key=used_memory), acted=merge([process.acted for process in processes]))


def merge(records: Sequence[Acts]) -> Acts:
    """Merge the acts of several processes. Tensor-parallel ranks do the same in the same layers. Therefore, if several
    processes recorded the same act, the largest numbers are taken, and not the sum. Pipeline stages have different
    layers."""
    acts: dict[tuple[Any, ...], Act] = {}
    for act in (act for record in records for act in record.acts):
        known = acts.get(act[:3], act)
        acts[act[:3]] = Act(*act[:3], *map(max, act[3:], known[3:]))
    inputs = [record.largest for record in records if record.largest is not None]
    layers = sorted({layer for record in records for layer in record.layers})
    return Acts(
        tuple(layers),
        tuple(acts.values()),
        max(inputs, key=lambda moe_input: moe_input.expert_rows_bytes, default=None),
    )
