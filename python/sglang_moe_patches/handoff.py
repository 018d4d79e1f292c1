"""The output buffer on its way from the decoder layer, which offers it, to the runner, which takes it.

Releases from 0.5.13 have a hand-off of their own between those two of their parts that know of it; what this package
adds on any release goes through this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_offered: ContextVar[torch.Tensor | None] = ContextVar("moe_output_buffer", default=None)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether writing into one of the tensors may show in the other."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


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

    It must be contiguous and own the whole of its storage (what a view's base holds beside the view belongs to somebody
    else), have at least one token, and lie in the NCCL symmetric-memory pool where a fresh tensor would.
    """
    return (
        buffer.shape == shape
        and buffer.dtype == dtype
        and buffer.device == device
        and buffer.is_contiguous()
        and buffer.nbytes > 0
        and buffer.untyped_storage().nbytes() == buffer.nbytes
        and (not needs_symmetric_memory or in_symmetric_memory(buffer))
    )


@contextmanager
def moe_output_buffer_ctx(buffer: torch.Tensor | None) -> Iterator[None]:
    """Offer ``buffer`` as the output of the next routed-experts kernel run in this context.

    :param buffer: [tokens, hidden]; nobody may read its present contents any more. ``None`` withdraws an offer.
    """
    token = _offered.set(buffer)
    try:
        yield
    finally:
        _offered.reset(token)


def offered() -> torch.Tensor | None:
    """The buffer on offer in this context, which stays on offer; ``None`` without one."""
    return _offered.get()


def withdraw_if_shared(moe_input: torch.Tensor) -> None:
    """Withdraw the offer if writing into it would show in ``moe_input``, which the shared experts may still read."""
    buffer = _offered.get()
    if buffer is not None and shares_storage(buffer, moe_input):
        _offered.set(None)


def take(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **conditions: Any) -> torch.Tensor | None:
    """The offered buffer as a new tensor, if it fits; a second call in the same offer gets ``None``.

    :param conditions: the keyword arguments of :func:`fits`.
    """
    buffer = _offered.get()
    if buffer is None or not fits(buffer, shape, dtype, device, **conditions):
        return None
    # One offer serves one kernel: a second one in the same layer must not overwrite the first one's output.
    _offered.set(None)
    # A new tensor on the same storage. The engine marks tensor *objects* (_sglang_needs_allreduce_fusion), and the
    # mark of the layer below must not travel into this layer's output.
    return buffer.detach()
