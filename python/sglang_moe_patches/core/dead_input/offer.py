"""Wrapper around a decoder layer's ``forward`` that offers the layer's dead input to the runner of its experts.

The wrapper acts only on marked layers. :mod:`.probe` calls :func:`mark_offering` for each layer whose input is proved
to be dead.
"""

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

_MIN_OFFER_BYTES_ATTRIBUTE = "_moe_patches_offers_its_input_from"
"""Name of the attribute that marks a decoder layer: a layer with this attribute offers its dead input. The attribute's
value is the size in bytes of the smallest input that the layer offers."""
_PRODUCER = "_moe_patches_producer"
"""Name of the attribute that stores the previous layer, whose output is this layer's input. Each decoder layer that
offers its dead input has this attribute. Its value is a tuple with the previous layer as the only element. Without the
tuple, PyTorch would register the previous layer as a submodule of this layer."""
_HOOKS = "_moe_patches_forward_hooks"
"""Name of the attribute that stores where forward hooks are registered. Each decoder layer that offers its dead input
has this attribute after its first forward pass. The value is a list of PyTorch's dictionaries of forward hooks. These
dictionaries belong to the layer, to the previous layer and to all submodules of both layers. The list also contains
PyTorch's global dictionaries of forward hooks."""
MIN_SLICED_OFFER_BYTES = 1 << 20
"""Smallest input, in bytes, that a decoder layer offers to Marlin or to in-place Triton.

These runners use an offered buffer only while they compute in column slices. By default they do so if the expert
outputs [tokens, top-k, hidden] have at least 192 MiB. An input [tokens, hidden] of less than 1 MiB is far too small for
that: with a top-k of 8, its expert outputs have less than 8 MiB."""


def may_offer(hidden_states: Any, residual: Any) -> bool:
    """Return whether a layer's input may be overwritten once attention has read it.

    :param hidden_states: the layer's input, [tokens, hidden]. Some releases pass another object, which is never
        offered.
    :param residual: the residual that belongs to the input. If it is ``None``, the input *becomes* the residual and
        must not be overwritten.
    """
    return (
        residual is not None
        and hasattr(hidden_states, "untyped_storage")
        and is_whole(hidden_states)
        and not shares_storage(hidden_states, residual)
    )


def has_hooks(layer: Any) -> bool:
    """Return whether a forward hook may see the layer's input.

    Such a hook is registered on the layer, on the previous layer or on one of their submodules, or globally in PyTorch.
    It may keep a tensor and read it later. The check runs in each forward pass, because hooks can be registered at any
    time. The engine registers the hooks of ``--forward-hooks`` after it has built the model.
    """
    hooks = getattr(layer, _HOOKS, None)
    # Collected in the first forward pass, because adapters may replace modules after the model was built.
    if hooks is None:
        hooks = _list_forward_hooks(layer)
        setattr(layer, _HOOKS, hooks)
    if not any(hooks):
        return False
    name = type(layer).__name__
    message = log.PREFIX + "%s does not offer its dead input, because it or the previous layer has forward hooks"
    log.log_once(logging.INFO, f"forward hooks {name}", message, name)
    return True


def _list_forward_hooks(layer: Any) -> list[Any]:
    from torch.nn.modules import module as torch_module

    modules = [module for part in (layer, *getattr(layer, _PRODUCER, ())) for module in part.modules()]
    return [
        *(torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks),
        *(kind for module in modules for kind in (module._forward_hooks, module._forward_pre_hooks)),
    ]


def get_residual_argument(forward_batch: Any, residual: Any) -> Any:
    """Return the residual that the decoder layer receives as its argument ``residual``.

    This function is the default for the parameter ``residual_of`` of :func:`make_layer_forward`.
    """
    return residual


def find_stream_residual(forward_batch: Any, residual: Any) -> Any:
    """Return the residual that belongs to a layer's input, in releases where the batch keeps the residual.

    In these releases ``forward_batch.residual_stream`` contains the residual. Its attribute ``pending`` contains the
    output of the previous layer until the engine adds this output to the residual.

    :returns: the residual, or ``None`` if the layer's input must not be offered. There are two such cases:

        - No output is pending. The layer's input is then the residual itself, or becomes the residual.
        - The engine may do more with the pending output than add it to the residual. The layer's input may then become
          the residual.
    """
    stream = forward_batch.residual_stream
    pending = None if stream is None else stream.pending
    return stream.residual if pending is not None and is_plain_addition(pending.update) else None


def is_plain_addition(update: Any) -> bool:
    """Return whether an update of the residual is an addition and nothing else.

    :param update: the engine's description of the update. It has the attribute ``is_plain_add`` or ``adds_plainly``,
        depending on the release.
    """
    return bool(getattr(update, "is_plain_add", False) or getattr(update, "adds_plainly", False))


def is_plain_norm(read: Any) -> bool:
    """Return whether attention reads the residual only through the norm before attention.

    The norm's kernel may also add the layer's input to the residual.

    :param read: the engine's description of how attention reads the residual. It has the attribute ``is_plain_norm`` or
        ``norms_plainly``, depending on the release.
    """
    return bool(getattr(read, "is_plain_norm", False) or getattr(read, "norms_plainly", False))


def return_unchanged(hidden_states: Any) -> Any:
    """Return the layer's input, which is already a tensor.

    This function is the default for the parameter ``tensor_of`` of :func:`make_layer_forward`. In some releases the
    input is not a tensor, but a handle for a sum that is not computed yet. ``tensor_of`` is then another function: it
    returns the handle's tensor.
    """
    return hidden_states


USUAL_PARAMETERS = ("positions", "hidden_states", "forward_batch", "residual")
"""Names of the positional parameters of ``forward`` in most classes of decoder layers, in their order."""


def make_layer_forward(
    original: Callable[..., Any],
    is_compiling: Callable[[], bool],
    parameters: Sequence[str] = USUAL_PARAMETERS,
    residual_of: Callable[[Any, Any], Any] = get_residual_argument,
    tensor_of: Callable[[Any], Any] = return_unchanged,
) -> Callable[..., Any]:
    """Wrap a decoder layer's ``forward``, so that a layer offers its dead input while ``original`` runs.

    Only layers that :func:`mark_offering` has marked offer their input. They offer nothing if the input is not dead
    (:func:`may_offer`) or too small, if the batch is idle, or if a forward hook may see the input.

    :param is_compiling: function that returns whether ``torch.compile`` traces the call. Nothing is offered then.
    :param parameters: the names of the positional parameters of ``original``, without ``self``.
    :param residual_of: function that receives the batch and the argument ``residual``, and returns the residual.
    :param tensor_of: function that receives the layer's input and returns its tensor. If it returns an object without
        ``nbytes``, nothing is offered.
    """
    places = {name: index for index, name in enumerate(parameters)}
    input_at, batch_at, residual_at = (
        places.get(name, sys.maxsize) for name in ("hidden_states", "forward_batch", "residual")
    )

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        min_bytes = None if is_compiling() else getattr(self, _MIN_OFFER_BYTES_ATTRIBUTE, None)
        if min_bytes is not None:
            # The same expression three times instead of a helper: a call costs time in each layer of each forward pass.
            by_place = len(args)
            hidden_states = args[input_at] if input_at < by_place else kwargs.get("hidden_states")
            batch = args[batch_at] if batch_at < by_place else kwargs.get("forward_batch")
            residual = args[residual_at] if residual_at < by_place else kwargs.get("residual")
            tensor: Any = hidden_states if tensor_of is return_unchanged else tensor_of(hidden_states)
            if (
                getattr(tensor, "nbytes", 0) >= min_bytes
                and may_offer(
                    tensor, residual if residual_of is get_residual_argument else residual_of(batch, residual)
                )
                # A batch without requests may skip attention, and its experts may receive the input itself.
                and not (batch is not None and batch.forward_mode.is_idle())
                and not has_hooks(self)
            ):
                # Offer a new tensor object. A runner may return the offered object, with attributes that the engine
                # set.
                before = channel.replace_offer(tensor.detach())
                try:
                    return original(self, *args, **kwargs)
                finally:
                    channel.replace_offer(before)
        return original(self, *args, **kwargs)

    return forward


def initialize_and_probe(
    probe_model: Callable[[Any], None], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Build a model with the engine's function, mark the layers that may offer their dead input, and return the model.

    :param probe_model: function that marks these layers (:func:`.probe.probe_model`). If it raises an exception, one
        line is logged, and the model is returned nevertheless.
    :param original: the engine's function, which receives ``args`` and ``kwargs``.
    """
    model = original(*args, **kwargs)
    with best_effort(f"finding dead inputs in the layers of {type(model).__name__}"):
        probe_model(model)
    return model


def find_stage_layers(stack: Any) -> list[Any]:
    """Return the decoder layers that run in this process's pipeline stage, in order.

    :param stack: a module with a ``ModuleList`` named ``layers``, such as ``DeepseekV2Model``. In the list,
        placeholders stand for the layers of other stages.
    """
    layers, start, end = stack.layers, getattr(stack, "start_layer", 0), getattr(stack, "end_layer", None)
    return [layer for layer in list(layers)[start:end] if type(layer).__name__ != "PPMissingLayer"]


def mark_offering(layer: Any, producer: Any, experts: Any) -> None:
    """Mark a decoder layer, so that it offers its dead input from now on (:func:`make_layer_forward`).

    If the runner of the layer's experts takes no buffer, do nothing.

    :param producer: the previous layer, whose output is this layer's input.
    :param experts: the layer's routed experts, a ``FusedMoE``.
    """
    runner = runners.find_runner(experts)
    if not runners.may_take_dead_input(experts, runner):
        return
    in_large_forwards = runner == "marlin" or (runner == "triton" and runners.is_in_place(experts))
    setattr(layer, _PRODUCER, (producer,))
    setattr(layer, _MIN_OFFER_BYTES_ATTRIBUTE, MIN_SLICED_OFFER_BYTES if in_large_forwards else 0)


def is_offering(layer: Any) -> bool:
    """Return whether a decoder layer offers its dead input, because :func:`mark_offering` has marked it."""
    return hasattr(layer, _MIN_OFFER_BYTES_ATTRIBUTE)


def make_empty_offer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a context manager that offers nothing, as a replacement for the engine's context manager that offers a
    layer input.

    The engine offers inputs without a check that they are dead. :func:`make_layer_forward` makes this check.
    """
    return functools.wraps(original)(lambda buf: nullcontext())
