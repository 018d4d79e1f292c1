"""Looking at the engine: which dead inputs can be offered."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches import engine
from sglang_moe_patches.dead_input import channel, offer, proofs
from sglang_moe_patches.dead_input.channel import ENGINE_MODULE, ENGINE_OFFER, Channel
from sglang_moe_patches.dead_input.families import FAMILIES, OFFERING_LAYERS
from sglang_moe_patches.patch import Patcher

_installed: Offers | None = None


@dataclass(frozen=True)
class Offers:
    """The dead inputs that can be offered on this engine.

    :param families: their names.
    :param changed: families whose code is not as expected, or not the engine's own, each with the reason.
    """

    families: tuple[str, ...]
    changed: tuple[str, ...]
    _install: Callable[[Patcher], None]

    def install(self, patcher: Patcher) -> None:
        """Wrap layers and models, unless another change has."""
        if _installed is None:
            patcher.add(sys.modules[__name__], "_installed", self)
            self._install(patcher)

    @property
    def note(self) -> str:
        """What ``doctor`` says of families that are left out."""
        return f"some models are left alone: {'; '.join(self.changed)}" if self.changed else ""


def _find_residual(layer: type, forward: Callable[..., Any]) -> Callable[..., Any]:
    """How to find the residual that comes with a layer's input.

    :raises engine.Unsupported: it is neither an argument nor carried by the batch.
    """
    if engine.takes(forward, ["self", "positions", "hidden_states", "forward_batch", "residual"]):
        return offer.residual_argument
    engine.require(
        engine.takes(forward, ["self", "positions", "hidden_states", "forward_batch"])
        and _batches_carry_the_residual(),
        f"where the residual of {layer.__name__} is kept is not known here",
    )
    return offer.residual_of_stream


def _batches_carry_the_residual() -> bool:
    batches = engine.module("sglang.srt.model_executor.forward_batch_info")
    try:
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
    except ImportError:
        return False
    fields = getattr(engine.get(batches, "ForwardBatch"), "__dataclass_fields__", {})
    return "residual_stream" in fields and {"pending", "residual"} <= set(getattr(ResidualStream, "__slots__", ()))


def _engines_channel(base: Any) -> Channel:
    """The engine's own hand-off.

    :raises engine.Unsupported: it is kept neither in a variable of that module nor in the forward's flags.
    """
    if hasattr(base, "_moe_output_buf"):
        return Channel(base._moe_output_buf.get, base._moe_output_buf.set)
    flags = engine.get(engine.module("sglang.srt.runtime_context"), "get_forward")
    engine.require(hasattr(flags(), "moe_output_buffer"), "the forward's flags have no moe_output_buffer")
    engine.get(flags(), "set")
    return Channel(lambda: flags().moe_output_buffer, lambda buffer: flags().set("moe_output_buffer", buffer))


def engine_has_a_hand_off() -> bool:
    """Whether the engine has a way of its own from decoder layers to runners."""
    return hasattr(engine.module(ENGINE_MODULE), ENGINE_OFFER)


def offers() -> Offers:
    """What can be offered on this engine, or what another change has found already.

    :raises engine.Unsupported: no family is as expected; or one is not in which the engine offers, or the engine's
        hand-off.
    """
    import torch

    if _installed is not None:
        return _installed

    base = engine.module(ENGINE_MODULE)
    way = None
    if hasattr(base, ENGINE_OFFER):
        engine.own(base, ENGINE_OFFER)
        way = _engines_channel(base)
    is_compiling = torch.compiler.is_compiling
    found: list[str] = []
    changed: list[str] = []
    layers: dict[type, tuple[str, Callable[..., Any], bool]] = {}
    models: dict[type, list[type]] = {}
    for family in FAMILIES:
        name = f"sglang.srt.models.{family.name}"
        if not engine.has_module(name):
            continue
        module = engine.module(name)
        try:
            layer = engine.own(module, family.layer)
            model = engine.own(engine.module(f"sglang.srt.models.{family.model[0]}"), family.model[1])
            forward, loop = engine.own(layer, "forward"), engine.own(model, "forward")
            residual_of = _find_residual(layer, forward)
            offers_itself = engine.mentions(forward, ENGINE_OFFER)
            engine.require("forward" in vars(layer), f"{family.layer} has no forward of its own")
            engine.require(offers_itself or proofs.input_dies(forward), f"{family.layer} may still use its input")
            engine.require(proofs.loop_keeps_nothing(loop), f"{family.model[1]} may keep its layers' inputs")
            engine.require_mentions(engine.own(model, "__init__"), "layers", "start_layer")
        except engine.Unsupported as error:
            # Where the engine itself offers, what is not dead would not be withheld.
            engine.require(ENGINE_OFFER not in inspect.getsource(module), str(error))
            changed.append(str(error))
            continue
        found.append(family.name)
        layers[layer] = (family.block, residual_of, offers_itself and proofs.offers_regardless_of_the_residual(forward))
        models.setdefault(model, []).append(layer)
    offering = {layer for layer, (_, _, offers) in layers.items() if offers}
    for name, class_name in OFFERING_LAYERS:
        if engine.has_module(f"sglang.srt.models.{name}"):
            layer = engine.own(engine.module(f"sglang.srt.models.{name}"), class_name)
            forward = engine.own(layer, "forward")
            if proofs.offers_regardless_of_the_residual(forward):
                layers[layer] = ("mlp", _find_residual(layer, forward), True)
                offering.add(layer)
    for layer in offering:
        engine.require(
            not hasattr(inspect.getmodule(layer), ENGINE_OFFER),
            f"{layer.__module__} does not ask for {ENGINE_OFFER} when called",
        )
    engine.require(found, "; ".join(changed))

    def install(patcher: Patcher) -> None:
        if way is not None:
            patcher.add(channel, "_channel", way)
        if offering:
            patcher.wrap(base, ENGINE_OFFER, offer.make_engine_offer)
        for layer, (_, residual_of, offers) in layers.items():
            patcher.wrap(
                layer,
                "forward",
                functools.partial(
                    offer.make_layer_forward, is_compiling=is_compiling, residual_of=residual_of, engine_offers=offers
                ),
            )
        blocks = {layer: block for layer, (block, _, _) in layers.items()}
        for model, of_model in models.items():
            patcher.wrap(
                model,
                "__init__",
                functools.partial(
                    offer.make_model_init,
                    loop=model.forward,  # type: ignore[attr-defined]
                    layers={layer: blocks[layer] for layer in of_model},
                    engine_offers=offering,
                ),
            )

    return Offers(tuple(found), tuple(changed), install)
