"""Looking at the engine: which dead inputs can be offered, and through which channel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from sglang_moe_patches import engine, runners
from sglang_moe_patches.dead_input import channel, offer, proofs
from sglang_moe_patches.dead_input.channel import ENGINE_MODULE, ENGINE_OFFER, Channel
from sglang_moe_patches.dead_input.families import DEEPSEEK, FAMILIES, Family
from sglang_moe_patches.patch import Patcher, said

_installed: Offers | None = None


@dataclass(frozen=True)
class Known:
    """A family of which the code was looked at: its layers' inputs die.

    :param layer: the decoder layer's class.
    :param model: the layer stack's class.
    :param residual_of: how the residual is found that comes with an input.
    :param tensor_of: how an input's tensor is found.
    """

    family: Family
    layer: Any
    model: Any
    residual_of: Callable[..., Any]
    tensor_of: Callable[[Any], Any]


@dataclass(frozen=True)
class Offers:
    """The dead inputs that can be offered on this engine.

    :param known: the families.
    :param changed: families whose code is not as expected, or not the engine's own, each with the reason.
    :param way: the engine's own channel, where it has one.
    """

    known: tuple[Known, ...]
    changed: tuple[str, ...]
    way: Channel | None

    @property
    def families(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(known.family.name for known in self.known)

    @property
    def note(self) -> str:
        """What ``doctor`` says of families that are left out."""
        return f"some models are left alone: {'; '.join(self.changed)}" if self.changed else ""

    def install(self, patcher: Patcher) -> None:
        """Make ours the only offers, unless another change has."""
        import torch

        if _installed is not None:
            return
        patcher.add(sys.modules[__name__], "_installed", self)
        if self.way is not None:
            patcher.add(channel, "_channel", self.way)
            for module in _holders(getattr(engine.module(ENGINE_MODULE), ENGINE_OFFER)):
                patcher.wrap(module, ENGINE_OFFER, offer.make_no_offer)
            # Its runner asks this of every buffer that we offer, in layers too where it has none of its own.
            pool = engine.module(runners.SYMMETRIC_MEMORY_MODULE)
            asks = runners.remembering(getattr(pool, runners.IN_POOL))
            for module in _asking():
                patcher.replace(module, runners.IN_POOL, asks)
        for known in self.known:
            how = {"residual_of": known.residual_of, "tensor_of": known.tensor_of}
            make = functools.partial(offer.make_layer_forward, is_compiling=torch.compiler.is_compiling, **how)
            patcher.wrap(known.layer, "forward", make)
        for model in dict.fromkeys(known.model for known in self.known):
            blocks = {known.layer: known.family.block for known in self.known if known.model is model}
            patcher.wrap(model, "__init__", functools.partial(offer.make_model_init, loop=model.forward, blocks=blocks))


def engine_offers() -> bool:
    """Whether the engine itself offers inputs in some layers, and has a channel of its own."""
    return hasattr(engine.module(ENGINE_MODULE), ENGINE_OFFER)


def out_of_place() -> list[str]:
    """The families of which the engine, by itself, has the routed experts beside shared ones leave their input alone.

    Found without importing them.
    """
    told = []
    for family in FAMILIES:
        spec = util.find_spec(_module_of(family)) if engine.has_module(_module_of(family)) else None
        if spec and spec.origin and proofs.is_told_out_of_place(Path(spec.origin).read_text(encoding="utf-8")):
            told.append(family.name)
    return told


def offers() -> Offers:
    """What can be offered on this engine, or what another change has found already.

    :raises engine.Unsupported: no family is as expected; or the engine's channel is not, or DeepSeek's beside it.
    """
    if _installed is not None:
        return _installed
    way = _engines_channel() if engine_offers() else None
    known: list[Known] = []
    changed: list[str] = []
    for family in FAMILIES:
        if engine.has_module(_module_of(family)):
            try:
                known.append(_look_at(family))
            except Exception as error:  # whatever becomes of one family takes nothing else with it
                reason = str(error) if isinstance(error, engine.Unsupported) else f"{family.models}: {said(error)}"
                # With the engine's own offer withheld, and none of ours, they would need more memory than without us.
                engine.require(family.name != DEEPSEEK or way is None, reason)
                changed.append(reason)
    engine.require(known, "; ".join(changed))
    return Offers(tuple(known), tuple(changed), way)


# --- A family --------------------------------------------------------------------------------------------------------


def _module_of(family: Family) -> str:
    return f"sglang.srt.models.{family.name}"


def _look_at(family: Family) -> Known:
    """:raises engine.Unsupported: an input may be used again, or by others; or the code is not the engine's own."""
    layer = engine.own(engine.module(_module_of(family)), family.layer)
    model = engine.own(engine.module(f"sglang.srt.models.{family.model[0]}"), family.model[1])
    forward, loop = engine.own(layer, "forward"), engine.own(model, "forward")
    residual_of = _find_residual(layer, forward)
    engine.require("forward" in vars(layer), f"{family.layer} has no forward of its own")
    engine.require(proofs.input_dies(forward), f"{family.layer} may still use its input")
    engine.require(proofs.loop_keeps_nothing(loop), f"{family.model[1]} may keep its layers' inputs")
    engine.require_mentions(engine.own(model, "__init__"), "layers", "start_layer")
    return Known(family, layer, model, residual_of, _find_tensor(forward))


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


def _find_tensor(forward: Any) -> Callable[[Any], Any]:
    """How to find the tensor of a layer's input: as the layer itself does to offer it, or the input as it is.

    :raises engine.Unsupported: the engine's function for that is not the engine's own.
    """
    access, name = proofs.TENSOR_OF_HANDLE.split(".")
    if not engine.mentions(forward, access, name):
        return offer.the_input_itself
    return engine.own(forward.__globals__[access], name)


# --- The engine's own offer ------------------------------------------------------------------------------------------


def _engines_channel() -> Channel:
    """The engine's own channel.

    :raises engine.Unsupported: it is kept neither in a variable of that module nor in the forward's flags, or is not
        the engine's own.
    """
    base = engine.module(ENGINE_MODULE)
    engine.own(base, ENGINE_OFFER)
    for module in (engine.module(runners.SYMMETRIC_MEMORY_MODULE), *_asking()):
        engine.own(module, runners.IN_POOL)
    if hasattr(base, "_moe_output_buf"):
        return Channel(base._moe_output_buf.get, base._moe_output_buf.set)
    flags = engine.get(engine.module("sglang.srt.runtime_context"), "get_forward")
    engine.require(hasattr(flags(), "moe_output_buffer"), "the forward's flags have no moe_output_buffer")
    engine.get(flags(), "set")
    return Channel(lambda: flags().moe_output_buffer, lambda buffer: flags().set("moe_output_buffer", buffer))


def _holders(engines_offer: Any) -> list[Any]:
    """The modules in which the engine's offer goes by its name: its own, and those that imported it."""
    return [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(ENGINE_OFFER) is engines_offer]


def _asking() -> list[Any]:
    """The engine's modules that ask whether a tensor lies in the pool of NCCL symmetric memory."""
    engines = [module for name, module in list(sys.modules.items()) if name.startswith("sglang.")]
    return [module for module in engines if runners.IN_POOL in getattr(module, "__dict__", {})]
