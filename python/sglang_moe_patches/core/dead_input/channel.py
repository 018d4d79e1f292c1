"""Channel through which a decoder layer offers a buffer to its MoE runner, and through which the runner takes the
buffer.

The buffer is usually the layer's dead input. A process uses one channel. If the engine has a channel of its own,
:mod:`.probe` finds it, and the process uses that channel. Otherwise the process uses this module's channel.
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
"""Name of the engine's own context manager that offers a buffer to a MoE runner. Only some releases define it, in the
module :data:`ENGINE_MODULE`."""


class Channel(NamedTuple):
    """Pair of functions that read and replace the buffer that is offered to the MoE runner.

    Each execution context (``contextvars``) has its own offered buffer.

    :param get: function that returns the offered buffer, or ``None`` if no buffer is offered.
    :param set: function that replaces the offered buffer. ``None`` withdraws the offer.
    """

    get: Callable[[], torch.Tensor | None]
    set: Callable[[torch.Tensor | None], Any]


_offered_buffer: ContextVar[torch.Tensor | None] = ContextVar("moe_output_buffer", default=None)
_channel = Channel(_offered_buffer.get, _offered_buffer.set)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors share a storage, so that a write into one tensor may change the other."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous, not empty, and fills its whole storage.

    A view fills only a part of its storage. Other tensors may own the rest, so a view must not be overwritten.
    """
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
    """Return whether ``buffer`` can replace a newly allocated tensor of this shape, dtype and device.

    The buffer must fill its storage (:func:`is_whole`).

    :param needs_symmetric_memory: whether a new tensor would come from the pool of NCCL symmetric memory. The buffer
        must then lie in that pool, too.
    :param in_symmetric_memory: function that returns whether a tensor lies in the pool of NCCL symmetric memory.
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
    """Offer ``buffer`` to the MoE runners that run inside this context manager, and restore the previous offer at the
    end.

    :param buffer: tensor [tokens, hidden] with values that no later code reads. ``None`` withdraws the present offer.
    """
    before = replace_offer(buffer)
    try:
        yield
    finally:
        replace_offer(before)


def replace_offer(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Offer ``buffer`` to the MoE runners in this execution context. ``None`` withdraws the present offer.

    :returns: the buffer that was offered before, or ``None``.
    """
    before = _channel.get()
    _channel.set(buffer)
    return before


def get_offered_buffer() -> torch.Tensor | None:
    """Return the buffer that is offered in this execution context, or ``None``. The buffer stays offered."""
    return _channel.get()


def withdraw_if_shared(moe_input: torch.Tensor) -> None:
    """Withdraw the offer if the offered buffer shares memory with ``moe_input``.

    The shared experts may read ``moe_input`` after the runner has written its output.
    """
    buffer = _channel.get()
    if buffer is not None and shares_storage(buffer, moe_input):
        _channel.set(None)


def take_output(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **conditions: Any
) -> torch.Tensor | None:
    """Take the offered buffer as an output tensor, and withdraw the offer.

    :param conditions: keyword arguments for :func:`fits`.
    :returns: a new tensor object on the buffer's memory. The result is ``None``, and the offer stays, if no buffer is
        offered or the buffer does not fit.
    """
    buffer = _channel.get()
    if buffer is None or not fits(buffer, shape, dtype, device, **conditions):
        return None
    # One offer serves one kernel. A second kernel in the same layer must not overwrite the first kernel's output.
    _channel.set(None)
    # Return a new tensor object on the same storage. The engine sets attributes on tensor objects
    # (_sglang_needs_allreduce_fusion), and an attribute that the previous layer set must not reach this layer's output.
    return buffer.detach()


def take_scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Take the memory of the offered buffer as scratch memory of any shape and dtype, and withdraw the offer.

    :returns: a tensor of this shape and dtype on the buffer's memory. If no buffer is offered, or the buffer cannot be
        used, the result is ``None`` and the offer stays. A buffer cannot be used if it is too small, on another device,
        or fills only a part of its storage.
    """
    buffer = _channel.get()
    needed = math.prod(shape) * dtype.itemsize
    if buffer is None or buffer.device != device or not is_whole(buffer) or not 0 < needed <= buffer.nbytes:
        return None
    _channel.set(None)
    return buffer.detach().view(-1).view(dtype)[: math.prod(shape)].view(shape)
