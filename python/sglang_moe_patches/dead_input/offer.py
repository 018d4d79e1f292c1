"""How a decoder layer offers its input where it is dead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches import runners
from sglang_moe_patches.dead_input import channel
from sglang_moe_patches.dead_input.channel import is_whole, shares_storage

_KNOWN = "_moe_patches_knows_the_input"
_OFFERS = "_moe_patches_offers_its_input"
_LEAST = "_moe_patches_least_bytes_of_its_input"
SMALLEST_SCRATCH_BYTES = 1 << 20
"""Of the input of a layer whose runner takes it as scratch memory for large batches alone: a decode's is smaller, and
what the runner makes of one so small is far below what moe-workspace acts on, gathered from many ranks, too."""

_withheld: ContextVar[bool] = ContextVar("moe_output_buffer_withheld", default=False)


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


def make_layer_forward(
    original: Callable[..., Any],
    is_compiling: Callable[[], bool],
    residual_of: Callable[..., Any] = residual_argument,
    engine_offers: bool = False,
) -> Callable[..., Any]:
    """Offer the layer's input where it is dead.

    :param engine_offers: the engine does so by itself in layers of this class, and too often.
    """

    @functools.wraps(original)
    def forward(self: Any, positions: Any, hidden_states: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or (
            not engine_offers and getattr(hidden_states, "nbytes", 0) < getattr(self, _LEAST, 0)  # nobody would take it
        ):
            return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
        residual = residual_of(forward_batch, *args, **kwargs)
        if (
            getattr(self, _OFFERS, False)
            and may_offer(hidden_states, residual)
            # A batch without requests may pass by attention, and its input on to the experts.
            and not (forward_batch is not None and forward_batch.forward_mode.is_idle())
        ):
            # A new tensor object: a runner may return the one that it is given, with whatever marks are on it.
            before = channel.exchange(hidden_states.detach())
            try:
                return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
            finally:
                channel.exchange(before)
        if not engine_offers or (residual is not None and (getattr(self, _KNOWN, False) or _only_engine_takes(self))):
            return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
        token = _withheld.set(True)
        try:
            return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
        finally:
            _withheld.reset(token)

    return forward


def _only_engine_takes(layer: Any) -> bool:
    """Whether what the engine offers in a layer reaches nobody but its own TRT-LLM runner."""
    return bool(getattr(getattr(layer.mlp, "experts", None), "use_flashinfer_trtllm_moe", False))


def make_model_init(original: Callable[..., None], loop: Any, layers: dict[Any, str], engine_offers: Any) -> Any:
    """Mark the layers whose input is dead when the model is built.

    :param loop: the ``forward`` that was looked at; a subclass with one of its own is left alone.
    :param layers: the classes that were looked at, and the name of their MoE block.
    :param engine_offers: the classes among them in which the engine offers what a runner that is not in place may take.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self).forward is not loop:
            return
        for layer in self.layers[self.start_layer + 1 : self.end_layer]:
            known = next((k for k in layers if isinstance(layer, k) and type(layer).forward is k.forward), None)
            experts = getattr(getattr(layer, layers[known], None), "experts", None) if known else None
            if experts is not None:
                setattr(layer, _KNOWN, True)
                setattr(layer, _OFFERS, known not in engine_offers or experts.moe_runner_config.inplace)
                setattr(layer, _LEAST, SMALLEST_SCRATCH_BYTES if _is_triton_in_place(experts) else 0)

    return __init__


def _is_triton_in_place(experts: Any) -> bool:
    config = getattr(experts, "moe_runner_config", None)
    return config is not None and bool(config.inplace) and runners.runner_of(experts) == "triton"


def make_engine_offer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def moe_output_buffer_ctx(buf: Any) -> Any:
        return original(None if _withheld.get() else buf)

    return moe_output_buffer_ctx
