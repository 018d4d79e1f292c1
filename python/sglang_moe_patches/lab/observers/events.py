"""Records that a server's processes write about themselves, and the records' file format.

The observers write records with :func:`write`. ``regress`` and the benchmarks read the records with :func:`collect`. In
tests, a stand-in for a server writes the same records.
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
    """Memory figures of one model process. A figure is ``None`` if it was not observed.

    A *MoE kernel* is one of ``forwards.KERNELS`` or CuteDSL's wrapper. A call of any other MoE runner, such as Triton,
    counts as one MoE kernel with an unknown output tensor.
    """

    device: str | None = None
    """Type of the device: 'cpu' or 'cuda'; ``None`` before the first forward pass."""
    peak_forward_bytes: int | None = None
    """Peak of the bytes that the forward pass with the most tokens allocates; ``None`` without CUDA. If several forward
    passes have this number of tokens, the smallest of their peaks counts. The peak of the first forward pass may be
    larger, because a library may then allocate a workspace that it keeps."""
    live_at_kernel_bytes: int | None = None
    """Bytes that a forward pass has allocated at the start of a MoE kernel; the maximum of all MoE kernels of the pass.
    The figure is for the forward pass with the most tokens. If several forward passes have this number of tokens, the
    figure is the minimum of their maxima."""
    tokens: int = 0
    """Number of tokens of the largest forward pass. A forward pass that replays a CUDA graph does not count. In such a
    pass the observer sees no MoE kernel. So once a MoE kernel was observed, passes without one are left out."""
    forwards: int = 0
    moe_layers: int | None = None
    """Largest number of MoE kernels that ran in one forward pass."""
    output_buffers: int | None = None
    """Largest number of different buffers into which the MoE kernels of one forward pass wrote their outputs. A forward
    pass counts only if the output tensors of all its MoE kernels are known. ``None`` if no forward pass counts."""
    kernel_buffer_bytes: int | None = None
    """Bytes of the buffers that CuteDSL's wrapper objects keep between forward passes; ``None`` if they keep none."""
    cache_token_bytes: float | None = None
    """Bytes of one token in the KV cache of one rank; ``None`` if the model has KV caches of several kinds."""
    reserved_bytes: int | None = None
    """Growth of the memory that PyTorch's allocator reserves: the largest reserved memory after a forward pass, minus
    the reserved memory at the start of the first forward pass; ``None`` without CUDA."""
    slack_bytes: int | None = None
    """Part of ``reserved_bytes`` that tensors never used; ``None`` without CUDA."""
    gpu: str = ""
    """Name of the GPU model; empty without CUDA."""


class MoeInput(NamedTuple):
    """Sizes of a tensor [tokens, hidden]: the input of the routed experts of a MoE layer.

    :param top_k: number of experts to which each token is routed.

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
    """Record of one action of a change in one MoE layer; see :class:`sglang_moe_patches.core.patch.Count`.

    :param name: name of the action.
    :param layer: index of the MoE layer; ``None`` if the action happened outside of all layers, mostly while the model
        was built.
    :param captured: whether the action happened while a CUDA graph was captured. Replays of the graph are not counted.
    :param times: number of calls that performed the action.
    :param most: largest amount of one call, such as bytes. The ``Count`` defines the amount.
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
    """Actions of all changes in one process.

    :param layers: indices of the MoE layers that ran.
    :param acts: one record for each action and layer. Actions during the capture of a CUDA graph have their own record.
    :param largest: sizes of the MoE input with the most :attr:`MoeInput.expert_rows_bytes`.
    """

    layers: tuple[int, ...] = ()
    acts: tuple[Act, ...] = ()
    largest: MoeInput | None = None


@dataclass
class Process:
    """Record of one model process.

    :param changes: status of each change.
    :param memory: memory figures.
    :param acted: actions of the changes. If actions only repeat, the record is written every hundred forward passes, so
        it may lack the last actions.
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
    changes = tuple(ChangeStatus(*status) for status in document["changes"])
    return Process(changes, Memory(**document["memory"]), parse_acts(document["acted"]), document.get("failure", ""))


def parse_acts(document: Mapping[str, Any]) -> Acts:
    largest = document["largest"]
    acts = tuple(Act(*act) for act in document["acts"])
    return Acts(tuple(document["layers"]), acts, None if largest is None else MoeInput(*largest))


def collect(folder: Path) -> Process | None:
    """Read the records of a server's processes.

    :param folder: folder with one ``*.json`` file per process (one process per tensor-parallel rank).
    :returns: the record of the process that used the most memory, with the actions of all processes; ``None`` if the
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
    """Merge the actions of several processes into one record.

    If several processes performed an action in the same layer, the record has one entry for it. The entry's ``times``,
    ``most`` and ``total`` are the largest values among the processes. They are not sums, because tensor-parallel ranks
    perform the same actions: if two ranks both acted 10 times, the entry has 10 times.
    """
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
