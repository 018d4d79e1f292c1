"""Stand-ins in plain PyTorch for MoRI's expert-parallel dispatch and AITER's fused MoE, with the vendors' signatures.

:class:`Network` moves rows between simulated ranks. :class:`EpDispatchCombineOp` has MoRI's Python interface to this
network, for ranks that are threads of one process. :func:`fused_moe` stands in for ``aiter.fused_moe.fused_moe``. These
stand-ins behave as the hardware does, so that faults of the tested code show:

- Rows after the received rows contain NaN and valid expert ids.
- Rows arrive in random order.
- The kernel writes no output for rows that it does not receive.
- Combine reads every received row.

Signatures: ``mori/ops/dispatch_combine.py`` of ROCm/mori, ``aiter/fused_moe.py`` of ROCm/aiter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# --- The network -----------------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """Rows that one rank sends.

    :param rows: [n, ...] of any dtype.
    :param ids: expert ids, numbered over all ranks, [n, top-k]. -1 is no expert (a padding row).
    :param weights: routing weights, [n, top-k], or ``None``.
    :param scales: scales of quantized rows, [n, ...], or ``None``.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclass
class Received:
    """Receive buffer of one rank after a dispatch.

    :param rows: [buffer, ...].
    :param ids: expert ids, int32 [buffer, top-k].
    :param weights: routing weights, float32 [buffer, top-k].
    :param scales: [buffer, ...], or ``None``.
    :param count: number of received rows, int32 [1].
    :param sources: rank and row number at the sender of each received row, int64 [count, 2].
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    count: torch.Tensor
    sources: torch.Tensor


class Network:
    """Network of one expert-parallel group.

    :param ranks: number of ranks.
    :param experts_per_rank: number of experts on each rank. Expert ``e`` is on rank ``e // experts_per_rank``.
    :param max_rows_per_rank: largest number of rows that a rank sends.
    :param buffer_rows: rows of each receive buffer. The default is the worst case, ``ranks * max_rows_per_rank``.
    :param seed: seed of the order in which rows arrive.
    """

    def __init__(
        self,
        ranks: int,
        experts_per_rank: int,
        max_rows_per_rank: int,
        buffer_rows: int | None = None,
        seed: int = 0,
    ) -> None:
        self.ranks = ranks
        self.experts_per_rank = experts_per_rank
        self.max_rows_per_rank = max_rows_per_rank
        self.buffer_rows = buffer_rows or ranks * max_rows_per_rank
        self.lost_rows = 0
        """Number of received rows without an output in :meth:`combine`."""
        self.generator = torch.Generator().manual_seed(seed)

    def dispatch(self, sent: Sequence[Sent]) -> list[Received]:
        """Send the rows of all ranks to the ranks of their experts. Return each rank's receive buffer. A rank receives
        a row only once, even if it has several of the row's experts.

        :raises RuntimeError: a rank sends or receives more rows than its buffer has. MoRI raises the same error.
        """
        if too_many := [len(s.rows) for s in sent if len(s.rows) > self.max_rows_per_rank]:
            raise RuntimeError(f"a rank sends {too_many[0]} rows, its buffer holds {self.max_rows_per_rank}")
        origins = [
            torch.stack([torch.full((len(s.rows),), i), torch.arange(len(s.rows))], 1) for i, s in enumerate(sent)
        ]
        everything = {
            "sources": torch.cat(origins),
            "rows": _gathered([s.rows for s in sent]),
            "ids": _gathered([s.ids for s in sent], torch.int32),
            "weights": _gathered([s.weights for s in sent], torch.float32),
            "scales": _gathered([s.scales for s in sent]),
        }
        home = torch.cat([torch.where(s.ids >= 0, s.ids // self.experts_per_rank, -1) for s in sent])
        return [self._receive(rank, (home == rank).any(dim=1), everything) for rank in range(self.ranks)]

    def _receive(self, rank: int, arrives: torch.Tensor, everything: dict[str, Any]) -> Received:
        arrived = arrives.nonzero()[:, 0]
        if len(arrived) > self.buffer_rows:
            raise RuntimeError(f"rank {rank} receives {len(arrived)} rows, its buffer holds {self.buffer_rows}")
        arrived = arrived[torch.randperm(len(arrived), generator=self.generator)]

        def buffer(name: str) -> Any:
            if everything[name] is None:
                return None
            data, dtype = everything[name]
            # All bits are set. This is NaN in every float type that has a NaN.
            filled = torch.full((self.buffer_rows, data.shape[1]), 0xFF, dtype=torch.uint8)
            filled[: len(arrived)] = data[arrived]
            return filled.view(dtype)

        ids, weights = buffer("ids"), buffer("weights")
        ids[len(arrived) :] = rank * self.experts_per_rank
        return Received(
            rows=buffer("rows"),
            ids=ids,
            weights=torch.full(ids.shape, float("nan")) if weights is None else weights,
            scales=buffer("scales"),
            count=torch.tensor([len(arrived)], dtype=torch.int32),
            sources=everything["sources"][arrived],
        )

    def combine(self, outputs: Sequence[torch.Tensor], received: Sequence[Received]) -> list[torch.Tensor]:
        """Send the output of every received row back to its sender, and add up the outputs of each row.

        :param outputs: output of each rank, [at least the received rows, hidden]. Missing rows are counted in
            :attr:`lost_rows` and contribute nothing. The hardware would read the memory after the tensor instead.
        :returns: [``max_rows_per_rank``, hidden] for each rank. Rows without any output are NaN.
        """
        places = self.ranks * self.max_rows_per_rank
        combined = torch.zeros(places, outputs[0].shape[1], dtype=outputs[0].dtype)
        returned = torch.zeros(places, dtype=torch.bool)
        for output, buffer in zip(outputs, received, strict=True):
            place = buffer.sources[:, 0] * self.max_rows_per_rank + buffer.sources[:, 1]
            returned[place] = True
            there = min(len(place), len(output))
            self.lost_rows += len(place) - there
            combined.index_add_(0, place[:there], output[:there])
        combined[~returned] = float("nan")
        return list(combined.view(self.ranks, self.max_rows_per_rank, -1))


def _gathered(tensors: list[Any], dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.dtype] | None:
    """Concatenate the ranks' tensors as bytes, because PyTorch cannot index tensors of some types.

    :returns: the bytes and the tensors' type, or ``None`` if a rank has no tensor.
    """
    if any(tensor is None for tensor in tensors):
        return None
    typed = [tensor if dtype is None else tensor.to(dtype) for tensor in tensors]
    parts = [t.contiguous().view(torch.uint8).reshape(t.shape[0], t.shape[1] * t.element_size()) for t in typed]
    return torch.cat(parts), typed[0].dtype


# --- MoRI's interface ------------------------------------------------------------------------------------------------


class EpDispatchCombineKernelType(Enum):
    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4


@dataclass
class EpDispatchCombineConfig:
    """Stand-in for ``mori.ops.EpDispatchCombineConfig`` with the fields that the tests use.

    The engine sets only fields that the class has.
    """

    rank: int
    world_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    max_total_recv_tokens: int = 0
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode


class EpDispatchCombineOp:
    """Stand-in for ``mori.ops.EpDispatchCombineOp`` of one rank.

    Each rank is a thread. The threads exchange their rows in a :class:`_Meeting`.
    """

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self.config = config
        self._meeting = _Meeting.of(config)
        self._received: Received | None = None

    def dispatch(
        self, input: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Send this rank's rows and receive the rows of its experts.

        :returns: rows, weights, scales and ids, which fill the receive buffer, and the number of received rows.
        """
        sent = Sent(input, indices, weights, scales)
        mine = self._received = self._meeting.meet(self.config.rank, sent, self._meeting.network.dispatch)
        return mine.rows, mine.weights, mine.scales, mine.ids, mine.count

    dispatch_send = dispatch

    def dispatch_recv(self) -> None:
        pass

    def combine(
        self, input: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send the outputs back, and receive the sums for this rank's rows.

        :returns: [``max_num_inp_token_per_rank``, hidden], and ``None`` for the weights.
        """
        network = self._meeting.network
        mine = (input, self._received)
        return self._meeting.meet(self.config.rank, mine, lambda all: network.combine(*zip(*all, strict=True))), None

    combine_send = combine
    combine_recv = dispatch_recv


class _Meeting:
    """Point at which the threads of one simulated group wait for each other. Each thread brings its rank's data, and
    one thread computes the results for all ranks."""

    _all: dict[tuple[int, int, int], _Meeting] = {}  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, network: Network) -> None:
        self.network = network
        self._barrier = threading.Barrier(network.ranks, timeout=60)
        self._given: list[Any] = [None] * network.ranks
        self._result: list[Any] = []

    @classmethod
    def of(cls, config: EpDispatchCombineConfig) -> _Meeting:
        key = (config.world_size, config.num_experts_per_rank, config.max_num_inp_token_per_rank)
        with cls._lock:
            if key not in cls._all:
                cls._all[key] = cls(Network(*key, buffer_rows=config.max_total_recv_tokens or None))
            return cls._all[key]

    def meet(self, rank: int, mine: Any, together: Callable[[list[Any]], list[Any]]) -> Any:
        self._given[rank] = mine
        if self._barrier.wait() == 0:
            self._result = together(list(self._given))
        self._barrier.wait()
        return self._result[rank]


def list_networks() -> list[Network]:
    """Return the simulated networks that were created since :func:`forget_networks`. All dispatch and combine
    operations with the same sizes share one network."""
    return [meeting.network for meeting in _Meeting._all.values()]


def forget_networks() -> None:
    """Forget all simulated networks. Operations that are created later get a new network, even for the same sizes."""
    _Meeting._all.clear()


# --- AITER's interface ------------------------------------------------------------------------------------------------


class QuantType(IntEnum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class ActivationType(IntEnum):
    Silu = 0
    Gelu = 1
    Swiglu = 2


def get_hip_quant(quant_type: QuantType) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Stand-in for ``aiter.get_hip_quant``. It returns the function that quantizes rows to FP8 or FP4."""
    return {QuantType.per_1x128: _quantize_fp8, QuantType.per_1x32: _quantize_fp4}[quant_type]


def _quantize_fp8(x: torch.Tensor, quant_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.float().view(x.shape[0], -1, 128)
    scale = blocks.abs().amax(dim=-1).clamp_min(1e-12) / torch.finfo(quant_dtype).max
    return (blocks / scale[..., None]).view(x.shape).to(quant_dtype), scale


def _quantize_fp4(x: torch.Tensor, shuffle: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    assert not shuffle
    blocks = x.float().view(x.shape[0], -1, 32)
    exponent = (blocks.abs().amax(dim=-1).clamp_min(1e-12) / 6.0).log2().ceil()
    scaled = (blocks / exponent.exp2()[..., None]).view(x.shape)
    code = (scaled.abs()[..., None] - torch.tensor(_FP4_VALUES)).abs().argmin(dim=-1) + 8 * (scaled < 0)
    packed = (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)
    return packed.view(torch.float4_e2m1fn_x2), (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def dequantize(rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Undo the quantization by a function of :func:`get_hip_quant`. Return [n, hidden] in ``dtype``."""
    if rows.dtype == torch.float4_e2m1fn_x2:
        assert scales is not None
        packed = rows.view(torch.uint8).long()
        code = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        values = torch.tensor(_FP4_VALUES, dtype=dtype)[code & 7] * torch.where(code > 7, -1, 1)
        scale = (scales.view(torch.uint8).to(dtype) - 127).exp2()
        return values * scale.repeat_interleave(32, dim=1)
    if scales is not None:
        return rows.to(dtype) * scales.to(dtype).repeat_interleave(128, dim=1)
    return rows.to(dtype)


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    a1_scale: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> torch.Tensor:
    """Stand-in for ``aiter.fused_moe.fused_moe`` with unquantized weights.

    :param hidden_states: [M, hidden]. FP8 and packed FP4 rows have their block scales in ``a1_scale``.
    :param w1: gate and up weights, [local experts, 2 * intermediate, hidden].
    :param w2: down weights, [local experts, hidden, intermediate].
    :param topk_ids: expert ids, numbered over all ranks, [M, top-k].
    :param expert_mask: [experts of all ranks], 1 for the local experts.
    :param num_local_tokens: number of rows to compute, int32 [1].
    :param others: scales of weights, biases and padding, which must be empty.
    :returns: [M, hidden] in ``dtype``. Rows that are not computed are NaN.
    """
    assert not any(others.values())
    rows, dtype = topk_ids.shape[0], dtype or hidden_states.dtype
    assert hidden_states.shape[0] == topk_weight.shape[0] == rows
    assert a1_scale is None or a1_scale.shape[0] == rows
    output = torch.full((rows, w2.shape[1]), float("nan"), dtype=dtype)
    valid = rows if num_local_tokens is None else min(rows, int(num_local_tokens))
    if not valid:
        return output
    exact = torch.float64
    x = dequantize(hidden_states[:valid], None if a1_scale is None else a1_scale[:valid], exact)
    ids, weights = topk_ids[:valid].long(), topk_weight[:valid].to(exact)
    mask = torch.ones(w1.shape[0], dtype=torch.int32) if expert_mask is None else expert_mask
    local = torch.where(mask.bool(), mask.cumsum(0) - 1, -1)[ids.clamp_min(0)].masked_fill(ids < 0, -1)
    act = torch.nn.functional.silu if activation == ActivationType.Silu else torch.nn.functional.gelu
    result = torch.zeros(valid, w2.shape[1], dtype=exact)
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        row, slot = (local == expert).nonzero(as_tuple=True)
        gate, up = (x[row] @ w1[expert].to(exact).T).chunk(2, dim=-1)
        result.index_add_(0, row, weights[row, slot, None] * (act(gate) * up @ w2[expert].to(exact).T))
    output[:valid] = result.to(dtype)
    return output


# --- Modules for the engine ------------------------------------------------------------------------------------------


def modules(fused_moe: Callable[..., torch.Tensor]) -> dict[str, ModuleType]:
    """Make modules ``mori``, ``aiter`` and ``aiter.fused_moe`` for ``sys.modules``.

    :param fused_moe: :func:`fused_moe`, or a wrapper around it.
    """
    mori, aiter, aiter_fused_moe = (ModuleType(name) for name in ("mori", "aiter", "aiter.fused_moe"))
    mori.ops = SimpleNamespace(  # type: ignore[attr-defined]
        EpDispatchCombineConfig=EpDispatchCombineConfig,
        EpDispatchCombineKernelType=EpDispatchCombineKernelType,
        EpDispatchCombineOp=EpDispatchCombineOp,
    )
    mori.shmem = SimpleNamespace(shmem_torch_process_group_init=lambda name: None)  # type: ignore[attr-defined]
    for value in (QuantType, ActivationType, get_hip_quant):
        setattr(aiter, value.__name__, value)
    aiter_fused_moe.fused_moe = fused_moe  # type: ignore[attr-defined]
    aiter.fused_moe = aiter_fused_moe  # type: ignore[attr-defined]
    return {"mori": mori, "aiter": aiter, "aiter.fused_moe": aiter_fused_moe}
