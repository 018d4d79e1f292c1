"""How a decoder layer offers its input where it is dead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from sglang_moe_patches import runners
from sglang_moe_patches.dead_input import channel
from sglang_moe_patches.dead_input.channel import is_whole, shares_storage
from sglang_moe_patches.patch import left_alone_if_it_fails

_OFFERS_FROM = "_moe_patches_offers_its_input_from"
"""Of a layer whose input may be offered: how many bytes it must have for anybody to take it."""
SMALLEST_SCRATCH_BYTES = 1 << 20
"""Of the input of a layer whose runner takes it as scratch memory for large batches alone: a decode's is smaller, and
what the runner makes of one so small is far below what moe-workspace acts on, gathered from many ranks, too."""


def may_offer(hidden_states: Any, residual: Any) -> bool:
    """Whether a layer's input is dead once attention has read it, and may be written over.

    :param hidden_states: the layer's input, [tokens, hidden]; or what a release passes instead of a tensor.
    :param residual: the residual that comes with it. When it is ``None``, the input *becomes* the residual.
    """
    return (
        residual is not None
        and hasattr(hidden_states, "untyped_storage")
        and is_whole(hidden_states)
        and not shares_storage(hidden_states, residual)
    )


def residual_argument(forward_batch: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where it is an argument of the layer."""
    return residual


def residual_of_stream(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where the batch carries it, or ``None``.

    Without a pending contribution the input *is* the residual, or becomes it at the start of the stack.
    """
    stream = forward_batch.residual_stream
    return None if stream is None or stream.pending is None else stream.residual


def the_input_itself(hidden_states: Any) -> Any:
    """The tensor of a layer's input, where that is one."""
    return hidden_states


def make_layer_forward(
    original: Callable[..., Any],
    is_compiling: Callable[[], bool],
    residual_of: Callable[..., Any] = residual_argument,
    tensor_of: Callable[[Any], Any] = the_input_itself,
) -> Callable[..., Any]:
    """Offer the layer's input where it is dead.

    :param residual_of: the residual that comes with the input, of what follows it among the arguments.
    :param tensor_of: the tensor of the input, or something else that is not offered.
    """

    @functools.wraps(original)
    def forward(self: Any, positions: Any, hidden_states: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        least = None if is_compiling() else getattr(self, _OFFERS_FROM, None)
        if least is not None:
            tensor = tensor_of(hidden_states)
            if (
                getattr(tensor, "nbytes", 0) >= least
                and may_offer(tensor, residual_of(forward_batch, *args, **kwargs))
                # A batch without requests may pass by attention, and its input on to the experts.
                and not (forward_batch is not None and forward_batch.forward_mode.is_idle())
            ):
                # A new tensor object: a runner may return the one that it is given, with whatever marks are on it.
                before = channel.exchange(tensor.detach())
                try:
                    return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
                finally:
                    channel.exchange(before)
        return original(self, positions, hidden_states, forward_batch, *args, **kwargs)

    return forward


def make_model_init(original: Callable[..., None], loop: Any, blocks: dict[Any, str]) -> Any:
    """Mark the layers whose input is dead when the model is built.

    :param loop: the ``forward`` that was looked at; a subclass with one of its own is left alone.
    :param blocks: the layers' classes that were looked at, and the name of their MoE block.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self).forward is not loop:
            return
        with left_alone_if_it_fails(f"the dead input of {type(self).__name__}'s layers"):
            for layer in self.layers[self.start_layer + 1 : self.end_layer]:
                known = next((k for k in blocks if isinstance(layer, k) and type(layer).forward is k.forward), None)
                experts = getattr(getattr(layer, blocks[known], None), "experts", None) if known else None
                if experts is not None:
                    setattr(layer, _OFFERS_FROM, SMALLEST_SCRATCH_BYTES if _is_triton_in_place(experts) else 0)

    return __init__


def _is_triton_in_place(experts: Any) -> bool:
    return runners.is_in_place(experts) and runners.runner_of(experts) == "triton"


def make_no_offer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's own offer withheld, in whatever layer: it does not ask whether the input is dead. Ours does."""

    @functools.wraps(original)
    def moe_output_buffer_ctx(buf: Any) -> Any:
        return nullcontext()

    return moe_output_buffer_ctx
