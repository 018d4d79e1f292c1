"""The output buffer on its way from the decoder layer, which offers it, to the runner, which takes it.

There is one channel: the engine's own where it has one (:mod:`.probe` finds it), else ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


ENGINE_MODULE = "sglang.srt.layers.moe.moe_runner.base"
ENGINE_OFFER = "moe_output_buffer_ctx"
"""The engine's own offer, in that module where there is one."""


class Channel(NamedTuple):
    """Where the buffer on offer is kept: one value for each context."""

    get: Callable[[], torch.Tensor | None]
    set: Callable[[torch.Tensor | None], Any]


_offered_buffer: ContextVar[torch.Tensor | None] = ContextVar("moe_output_buffer", default=None)
_channel = Channel(_offered_buffer.get, _offered_buffer.set)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether writing into one of the tensors may show in the other."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, not empty, and all of its storage: the rest of a view's storage has other
    owners."""
    return tensor.is_contiguous() and tensor.nbytes > 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def fits(
    buffer: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    needs_symmetric_memory: bool = False,
    in_symmetric_memory: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> bool:
    """Whether ``buffer`` can stand in for a fresh tensor of this shape, dtype and device.

    It must be whole (:func:`is_whole`) and lie in the NCCL symmetric-memory pool where a fresh tensor would.
    """
    return (
        buffer.shape == shape
        and buffer.dtype == dtype
        and buffer.device == device
        and is_whole(buffer)
        and (not needs_symmetric_memory or in_symmetric_memory(buffer))
    )


@contextmanager
def moe_output_buffer_ctx(buffer: torch.Tensor | None) -> Iterator[None]:
    """Offer ``buffer`` as the output of the next routed-experts kernel run in this context.

    :param buffer: [tokens, hidden]; no later code reads what it holds now. ``None`` withholds one.
    """
    before = replace_offer(buffer)
    try:
        yield
    finally:
        replace_offer(before)


def replace_offer(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Put ``buffer`` on offer in this context, or nothing; returns what was on offer before."""
    before = _channel.get()
    _channel.set(buffer)
    return before


def offered_buffer() -> torch.Tensor | None:
    """The buffer on offer in this context, which stays on offer; ``None`` without one."""
    return _channel.get()


def withhold_if_shared(moe_input: torch.Tensor) -> None:
    """Withhold what is offered if writing into it would show in ``moe_input``, which shared experts may still read."""
    buffer = _channel.get()
    if buffer is not None and shares_storage(buffer, moe_input):
        _channel.set(None)


def take_output(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **conditions: Any
) -> torch.Tensor | None:
    """The offered buffer as a new tensor, if it fits; a second call in the same offer gets ``None``.

    :param conditions: the keyword arguments of :func:`fits`.
    """
    buffer = _channel.get()
    if buffer is None or not fits(buffer, shape, dtype, device, **conditions):
        return None
    # One offer serves one kernel: a second one in the same layer must not overwrite the first one's output.
    _channel.set(None)
    # A new tensor on the same storage. The engine marks tensor *objects* (_sglang_needs_allreduce_fusion), and the
    # mark of the layer below must not travel into this layer's output.
    return buffer.detach()


def take_scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """The memory of the offered buffer as a tensor of another shape and dtype, if it is enough; for scratch.

    A second call in the same offer, and :func:`take_output`, get ``None`` from then on.
    """
    buffer = _channel.get()
    needed = math.prod(shape) * dtype.itemsize
    if buffer is None or buffer.device != device or not is_whole(buffer) or not 0 < needed <= buffer.nbytes:
        return None
    _channel.set(None)
    return buffer.detach().view(-1).view(dtype)[: math.prod(shape)].view(shape)
