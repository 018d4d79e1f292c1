"""How a decoder layer offers its input where it is dead."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from sglang_moe_patches.core import log, runners
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.core.dead_input.channel import is_whole, shares_storage
from sglang_moe_patches.core.patch import best_effort

_MIN_OFFER_BYTES = "_moe_patches_offers_its_input_from"
"""Attribute of a layer whose input may be offered: the least bytes of an input that is worth it."""
_PRODUCER = "_moe_patches_producer"
"""Of such a layer: the layer whose output its input is. In a tuple, as a module would become a part of this one."""
_HOOKS = "_moe_patches_forward_hooks"
"""Of such a layer, from its first forward: the forward hooks of whoever is given its input, or what is computed in its
place."""
MIN_SCRATCH_BYTES = 1 << 20
"""The least where the runner takes the input in column slices alone (Marlin), or as scratch memory for them (Triton in
place): a decode's input is smaller, and its expert outputs, gathered from many ranks, are below moe-workspace's
threshold."""


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


def has_hooks(layer: Any) -> bool:
    """Whether a forward hook may keep, or still read, what goes through a module of the layer or comes out of the one
    before it.

    Asked in each forward: the engine registers those of ``--forward-hooks`` after the model is built, others may come
    at any time. PyTorch's global ones see every module.
    """
    hooks = getattr(layer, _HOOKS, None)
    if hooks is None:  # not before: adapters replace modules once the model is built
        hooks = _forward_hooks(layer)
        setattr(layer, _HOOKS, hooks)
    if not any(hooks):
        return False
    name = type(layer).__name__
    message = log.PREFIX + "%s does not offer its dead input: it, or the layer before it, has forward hooks"
    log.once(logging.INFO, f"forward hooks {name}", message, name)
    return True


def _forward_hooks(layer: Any) -> list[Any]:
    from torch.nn.modules import module as torch_module

    modules = [module for part in (layer, *getattr(layer, _PRODUCER, ())) for module in part.modules()]
    return [
        *(torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks),
        *(kind for module in modules for kind in (module._forward_hooks, module._forward_pre_hooks)),
    ]


def residual_argument(forward_batch: Any, residual: Any) -> Any:
    """The residual that comes with a layer's input, where it is an argument of the layer."""
    return residual


def residual_of_stream(forward_batch: Any, residual: Any) -> Any:
    """The residual that comes with a layer's input, where the batch carries it, or ``None``.

    Without a pending contribution the input *is* the residual, or becomes it at the start of the stack. A contribution
    that is not simply added may become the residual, too.
    """
    stream = forward_batch.residual_stream
    pending = None if stream is None else stream.pending
    return stream.residual if pending is not None and is_plain_addition(pending.update) else None


def is_plain_addition(update: Any) -> bool:
    """Whether an update of the residual adds to it and does no more, as the engine says by one name or the other."""
    return bool(getattr(update, "is_plain_add", False) or getattr(update, "adds_plainly", False))


def is_plain_norm(read: Any) -> bool:
    """Whether a stage reads the residual's norm, with the sum before it in one kernel, or none of its own."""
    return bool(getattr(read, "is_plain_norm", False) or getattr(read, "norms_plainly", False))


def return_unchanged(hidden_states: Any) -> Any:
    """The tensor of a layer's input, where that is one."""
    return hidden_states


USUAL_PARAMETERS = ("positions", "hidden_states", "forward_batch", "residual")
"""What most decoder layers take, in this order."""


def make_layer_forward(
    original: Callable[..., Any],
    is_compiling: Callable[[], bool],
    takes: Sequence[str] = USUAL_PARAMETERS,
    residual_of: Callable[[Any, Any], Any] = residual_argument,
    tensor_of: Callable[[Any], Any] = return_unchanged,
) -> Callable[..., Any]:
    """Offer the layer's input where it is dead.

    :param takes: the names of the arguments that the layer takes by their place.
    :param residual_of: the residual that comes with the input, of the batch and the argument of that name.
    :param tensor_of: the tensor of the input, or something else that is not offered.
    """
    places = {name: index for index, name in enumerate(takes)}
    input_at, batch_at, residual_at = (
        places.get(name, sys.maxsize) for name in ("hidden_states", "forward_batch", "residual")
    )

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        min_bytes = None if is_compiling() else getattr(self, _MIN_OFFER_BYTES, None)
        if min_bytes is not None:
            # Written out three times: this is done for each layer of each step.
            by_place = len(args)
            hidden_states = args[input_at] if input_at < by_place else kwargs.get("hidden_states")
            batch = args[batch_at] if batch_at < by_place else kwargs.get("forward_batch")
            residual = args[residual_at] if residual_at < by_place else kwargs.get("residual")
            tensor: Any = hidden_states if tensor_of is return_unchanged else tensor_of(hidden_states)
            if (
                getattr(tensor, "nbytes", 0) >= min_bytes
                and may_offer(tensor, residual if residual_of is residual_argument else residual_of(batch, residual))
                # A batch without requests may pass by attention, and its input on to the experts.
                and not (batch is not None and batch.forward_mode.is_idle())
                and not has_hooks(self)
            ):
                # A new tensor object: a runner may return the one that it is given, with the marks that are on it.
                before = channel.replace_offer(tensor.detach())
                try:
                    return original(self, *args, **kwargs)
                finally:
                    channel.replace_offer(before)
        return original(self, *args, **kwargs)

    return forward


def initialize_and_probe(built: Callable[[Any], None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a model, and probe it.

    :param built: is given the model.
    """
    model = original(*args, **kwargs)
    with best_effort(f"the dead input of {type(model).__name__}'s layers"):
        built(model)
    return model


def stage_layers(stack: Any) -> list[Any]:
    """The layers of a stack that run in this stage of the pipeline, in order."""
    layers, start, end = stack.layers, getattr(stack, "start_layer", 0), getattr(stack, "end_layer", None)
    return [layer for layer in list(layers)[start:end] if type(layer).__name__ != "PPMissingLayer"]


def mark_offering(layer: Any, producer: Any, experts: Any) -> None:
    """From now on a layer offers its input, if its runner may take it.

    :param producer: the layer before it.
    :param experts: its routed experts.
    """
    runner = runners.runner_of(experts)
    if not runners.may_take_dead_input(experts, runner):
        return
    in_large_forwards = runner == "marlin" or (runner == "triton" and runners.is_in_place(experts))
    setattr(layer, _PRODUCER, (producer,))
    setattr(layer, _MIN_OFFER_BYTES, MIN_SCRATCH_BYTES if in_large_forwards else 0)


def is_offering(layer: Any) -> bool:
    """Whether a decoder layer offers its input where it is dead (:func:`mark_offering`)."""
    return hasattr(layer, _MIN_OFFER_BYTES)


def make_empty_offer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Withhold the engine's own offer, in every layer: it does not ask whether the input is dead. Ours does."""
    return functools.wraps(original)(lambda buf: nullcontext())
