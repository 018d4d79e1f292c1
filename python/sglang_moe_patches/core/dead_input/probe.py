"""Probe the engine: which dead inputs can be offered, and through which channel."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from sglang_moe_patches.core import engine, log, runners
from sglang_moe_patches.core.dead_input import channel, families, offer, proofs
from sglang_moe_patches.core.dead_input.channel import ENGINE_MODULE, ENGINE_OFFER, Channel
from sglang_moe_patches.core.dead_input.families import DEEPSEEK
from sglang_moe_patches.core.patch import Patcher, around, error_reason

_installed: Offers | None = None

LOADER = "sglang.srt.model_loader.loader"
INITIALIZE = "_initialize_model"
"""The engine's function in that module that builds a model, whichever it is."""


@dataclass(frozen=True)
class LayerFacts:
    """A class of decoder layers with dead inputs, by its code.

    :param layer: the class that has the ``forward``.
    :param takes: the names of the arguments that it takes by their place.
    :param residual_of: how the residual is found that comes with an input.
    :param tensor_of: how an input's tensor is found.
    :param attention: what its ``forward`` does until the norm after attention; what its submodules return then is
        proved for each layer (:func:`require_attention_lets_go`).
    """

    layer: Any
    takes: tuple[str, ...]
    residual_of: Callable[[Any, Any], Any]
    tensor_of: Callable[[Any], Any]
    attention: proofs.AttentionFacts

    @property
    def family(self) -> str:
        """The engine's module that has it."""
        return str(self.layer.__module__).rpartition(".")[2]


@dataclass(frozen=True)
class Offers:
    """The dead inputs that can be offered on this engine.

    :param note: what ``doctor`` says if DeepSeek's family, which is probed before a model is built, is not as expected.
    :param channel: the engine's own channel, where it has one.
    """

    note: str
    channel: Channel | None

    def install(self, patcher: Patcher) -> None:
        """Make ours the only offers, in every model that is built from now on, unless another change has."""
        if _installed is not None:
            return
        patcher.add(sys.modules[__name__], "_installed", self)
        if self.channel is not None:
            patcher.add(channel, "_channel", self.channel)
            for module in _modules_exposing(getattr(engine.module(ENGINE_MODULE), ENGINE_OFFER)):
                patcher.wrap(module, ENGINE_OFFER, offer.make_empty_offer)
            # Its runner asks this of every buffer that we offer, in layers too where it has none of its own.
            pool = engine.module(runners.SYMMETRIC_MEMORY_MODULE)
            asks = runners.remember_pool_addresses(getattr(pool, runners.IN_POOL))
            for module in _pool_query_modules():
                patcher.replace(module, runners.IN_POOL, asks)
        built = functools.partial(probe_model, patcher=patcher, wrapped=set())
        for module in _modules_exposing(getattr(engine.module(LOADER), INITIALIZE), INITIALIZE):
            patcher.wrap(module, INITIALIZE, around(functools.partial(offer.initialize_and_probe, built)))


def has_engine_offer() -> bool:
    """Whether the engine itself offers inputs in some layers, and has a channel of its own."""
    return hasattr(engine.module(ENGINE_MODULE), ENGINE_OFFER)


def probe_offers() -> Offers:
    """What can be offered on this engine, or what another change has found already.

    :raises engine.Unsupported: the engine builds its models in another way, or its own channel is not as expected.
    """
    if _installed is not None:
        return _installed
    engines_channel = _engines_channel() if has_engine_offer() else None
    engine.require_unpatched(engine.module(LOADER), INITIALIZE)
    try:
        module = engine.module(f"{families.MODELS}.{DEEPSEEK}")
        probe_layer(engine.require_unpatched(module, "DeepseekV2DecoderLayer"))
        require_loop(engine.require_unpatched(module, "DeepseekV2Model"))
    except Exception as error:  # one broken family takes nothing else with it
        return Offers(f"some models are left alone: {error_reason(error, f'{DEEPSEEK}: ')}", engines_channel)
    return Offers("", engines_channel)


# --- A model that was built ------------------------------------------------------------------------------------------


def probe_model(model: Any, patcher: Patcher, wrapped: set[Any]) -> None:
    """Have the layers of a model offer their inputs where every proof holds; one line says of others why not.

    :param wrapped: the classes of layers that have been made to offer before, and that are from now on.
    """
    for stack, dead in probe_stacks(model):
        stage = offer.stage_layers(stack)
        producers = {layer: producer for producer, layer in itertools.pairwise(stage)}
        for layer, facts, experts in dead.layers:
            if facts.layer not in wrapped:
                patcher.wrap(facts.layer, "forward", make_offering(facts))
                wrapped.add(facts.layer)
            offer.mark_offering(layer, producers[layer], experts)
        if dead.skip_reasons:
            name, reasons = type(stack).__name__, "; ".join(dead.skip_reasons)
            message = f"{log.PREFIX}layers of {name} do not offer their dead input: {reasons}"
            log.once(logging.INFO, message, "%s", message)


def find_offers(model: Any) -> tuple[list[Any], list[str]]:
    """The routed experts of layers that offer their dead input, in a model that was built since :meth:`Offers.install`;
    and why other layers with routed experts offer none."""
    offering: list[Any] = []
    reasons: dict[str, None] = {}
    for _, dead in probe_stacks(model):
        offering += [experts for layer, _, experts in dead.layers if offer.is_offering(layer)]
        reasons |= dict.fromkeys(dead.skip_reasons)
    return offering, list(reasons)


def make_offering(facts: LayerFacts) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes a layer's ``forward`` offer its input, for :meth:`Patcher.wrap`."""
    import torch

    return functools.partial(
        offer.make_layer_forward,
        is_compiling=torch.compiler.is_compiling,
        takes=facts.takes,
        residual_of=facts.residual_of,
        tensor_of=facts.tensor_of,
    )


@dataclass(frozen=True)
class StackFacts:
    """What is dead in a stack of layers.

    :param layers: each layer with a dead input, the facts of its class, and its routed experts.
    :param skip_reasons: why other layers with routed experts offer nothing.
    """

    layers: list[tuple[Any, LayerFacts, Any]]
    skip_reasons: list[str]


def probe_stacks(model: Any) -> Iterator[tuple[Any, StackFacts]]:
    """Each stack of decoder layers in a model, or in what it wraps, that has routed experts.

    The first layer of a pipeline stage does not count: its input is the caller's, or another stage's.
    """
    from torch.nn import ModuleList

    routed_experts = engine.get(engine.module("sglang.srt.layers.moe.fused_moe_triton.layer"), "FusedMoE")
    for stack in list(model.modules()):
        if not isinstance(getattr(stack, "layers", None), ModuleList):
            continue
        stage = offer.stage_layers(stack)
        sparse = [
            (producer, layer, experts)
            for producer, layer in itertools.pairwise(stage)
            if (experts := [module for module in layer.modules() if isinstance(module, routed_experts)])
        ]
        if sparse:
            yield stack, _probe_stack(stack, sparse)


def _probe_stack(stack: Any, sparse: list[tuple[Any, Any, list[Any]]]) -> StackFacts:
    """:param sparse: the layer before each layer with routed experts, that layer, and those."""

    @functools.cache  # most layers of a stack are of one class, and its code is a matter of milliseconds
    def probe_class(kind: type) -> LayerFacts | Exception:
        try:
            return probe_layer(kind)
        except Exception as error:
            return error

    own_parts = functools.cache(
        functools.partial(require_unpatched_parts, own_methods=functools.cache(require_unpatched_methods))
    )
    try:
        require_loop(type(stack))
    except Exception as error:
        return StackFacts([], [error_reason(error)])
    layers: list[tuple[Any, LayerFacts, Any]] = []
    skip_reasons: dict[str, None] = {}
    for producer, layer, experts in sparse:
        kind: Any = type(layer)
        name = kind.__name__
        try:
            engine.require(len(experts) == 1, proofs.TOO_MANY_EXPERTS.format(name, len(experts)))
            facts = probe_class(kind)
            if isinstance(facts, Exception):
                raise facts
            engine.require(_sums_plainly(layer), proofs.NO_PLAIN_SUM.format(name))
            require_attention_lets_go(layer, facts.attention, type(experts[0]))
            for part in (producer, layer):
                own_parts(part)
            layers.append((layer, facts, experts[0]))
        except Exception as error:  # one broken class of layers takes nothing else with it
            skip_reasons[error_reason(error)] = None
    return StackFacts(layers, list(skip_reasons))


def probe_layer(layer: type) -> LayerFacts:
    """What is known of a class of decoder layers, by its code.

    :raises engine.Unsupported: an input may be used again, or by others; or the code is not the engine's own.
    """
    name = layer.__name__
    for kind in layer.__mro__:  # a subclass from another package may have other parts
        home = kind.__module__.partition(".")[0]
        engine.require(home in ("sglang", "torch", "builtins"), f"{name} is {kind.__module__}.{kind.__qualname__}")

    def method_of(attribute: str) -> Any:
        is_method = isinstance(inspect.getattr_static(layer, attribute, None), FunctionType)
        return engine.require_unpatched(layer, attribute) if is_method else None

    kind = next(kind for kind in layer.__mro__ if "forward" in vars(kind))
    forward = engine.require_unpatched(kind, "forward")
    reason = proofs.layer_skip_reason(name, forward, method_of)
    engine.require(reason is None, str(reason))
    attention = proofs.follow_attention(forward, method_of)
    assert attention is not None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    takes = tuple(parameter.name for parameter in parameters if parameter.kind in positional)[1:]
    return LayerFacts(kind, takes, _find_residual(name, takes), _find_tensor(forward), attention)


def require_attention_lets_go(layer: Any, attention: proofs.AttentionFacts, experts: type) -> None:
    """Prove of a layer what its class does not show: what its submodules do until the norm after attention.

    :param experts: the class of its routed experts.
    :raises engine.Unsupported: they run by then, and attention may still read what they write over; or a submodule may
        return what it is given, or its code is not the engine's own.
    """
    from torch.nn import Module, ModuleList

    name = type(layer).__name__
    for attribute in attention.attributes:
        value = getattr(layer, attribute, None)
        has_experts = isinstance(value, Module) and any(isinstance(module, experts) for module in value.modules())
        engine.require(not has_experts, f"{name} may run its routed experts before attention, in {attribute}")
    for attribute, places in attention.submodules.items():
        submodule = getattr(layer, attribute)
        for module in submodule if isinstance(submodule, ModuleList) else [submodule]:
            is_engines = isinstance(module, Module) and type(module).__module__.partition(".")[0] == "sglang"
            returns_own = (
                is_engines
                and "forward" not in vars(module)
                and _returns_own(engine.require_unpatched(type(module), "forward"), places)
            )
            engine.require(returns_own, f"{name} may get from {attribute} what it gave it")


#: Most layers of a stack have submodules of one class.
_returns_own = functools.cache(proofs.returns_own_memory)


def require_unpatched_parts(layer: Any, own_methods: Callable[[type], None]) -> None:
    """Prove that nobody else sees what a layer is given, computes and returns: another plugin's wrapper around a norm
    may keep the memory in which the layer's input lies.

    :param own_methods: :func:`require_unpatched_methods`, which may remember the classes that it has seen.
    :raises engine.Unsupported: a module of the layer, or what moves its data between ranks, has code that is not the
        engine's own.
    """
    for module in layer.modules():
        own_methods(type(module))
        for name, value in vars(module).items():
            if isinstance(value, FunctionType | MethodType):  # put on the instance, or chosen when it was made
                engine.require_unpatched(module, name)
            elif name in _HANDLES_TENSORS:
                own_methods(type(value))


#: What a module has besides modules that is given its tensors: the norms' callers, and what runs its kernels.
_HANDLES_TENSORS = ("layer_communicator", "attn_boundary", "ffn_boundary", "quant_method")


def require_unpatched_methods(kind: type) -> None:
    """:raises engine.Unsupported: a class of the engine's, or of PyTorch's, has methods that are not their own."""
    for base in kind.__mro__:
        engine.require(_home(base) in _HOMES, f"{kind.__name__} is {base.__module__}.{base.__qualname__}")
        for name, value in vars(base).items() if _home(base) == "sglang" else ():
            is_method = isinstance(value, FunctionType | staticmethod | classmethod)
            if is_method and (name == "__call__" or not name.startswith("__")):
                engine.require_unpatched(base, name)


_HOMES = ("sglang", "torch", "builtins", "abc", "typing")


def _home(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def require_loop(model: type) -> None:
    """:raises engine.Unsupported: a model's loop over its layers may keep their inputs, or is not the engine's own."""
    home = model.__module__
    engine.require(home.partition(".")[0] == "sglang", f"{model.__name__} is {home}.{model.__qualname__}")
    reason = proofs.loop_skip_reason(model.__name__, engine.require_unpatched(model, "forward"))
    engine.require(reason is None, str(reason))


def _sums_plainly(layer: Any) -> bool:
    """Whether what comes into a layer is added to the residual and read from there as its norm, and no more.

    Each contribution is asked for its part in the forward itself (:func:`.offer.residual_of_stream`).
    """
    boundary = getattr(layer, "attn_boundary", None)
    if boundary is not None:
        return offer.is_plain_norm(boundary.declaration.read)
    communicators = engine.module("sglang.srt.layers.communicator")
    prepare = engine.require_unpatched(engine.require_unpatched(communicators, "LayerCommunicator"), "prepare_attn")
    return engine.require_unpatched(type(layer.layer_communicator), "prepare_attn") is prepare


def _find_residual(layer: str, takes: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """How to find the residual that comes with a layer's input.

    :raises engine.Unsupported: it is neither an argument nor carried by the batch.
    """
    if "residual" in takes:
        return offer.residual_argument
    engine.require(_batches_carry_the_residual(), f"where the residual of {layer} is kept is not known here")
    return offer.residual_of_stream


def _batches_carry_the_residual() -> bool:
    batches = engine.module("sglang.srt.model_executor.forward_batch_info")
    try:
        from sglang.srt.layers.layer_boundary.residual.stream import Contribution, ResidualStream
    except ImportError:
        return False
    fields = getattr(engine.get(batches, "ForwardBatch"), "__dataclass_fields__", {})
    has = {"pending", "residual"} <= set(getattr(ResidualStream, "__slots__", ()))
    return has and "residual_stream" in fields and "update" in getattr(Contribution, "__annotations__", {})


def _find_tensor(forward: Any) -> Callable[[Any], Any]:
    """How to find the tensor of a layer's input: as the layer itself does to offer it, or the input as it is.

    :raises engine.Unsupported: the engine's function for that is not the engine's own.
    """
    access, name = proofs.TENSOR_OF_HANDLE.split(".")
    if not engine.mentions(forward, access, name):
        return offer.return_unchanged
    return engine.require_unpatched(forward.__globals__[access], name)


# --- The engine's own offer ------------------------------------------------------------------------------------------


def _engines_channel() -> Channel:
    """The engine's own channel.

    :raises engine.Unsupported: it is kept neither in a variable of that module nor in the forward's flags, or is not
        the engine's own.
    """
    base = engine.module(ENGINE_MODULE)
    engine.require_unpatched(base, ENGINE_OFFER)
    for module in (engine.module(runners.SYMMETRIC_MEMORY_MODULE), *_pool_query_modules()):
        engine.require_unpatched(module, runners.IN_POOL)
    if hasattr(base, "_moe_output_buf"):
        return Channel(base._moe_output_buf.get, base._moe_output_buf.set)
    flags = engine.get(engine.module("sglang.srt.runtime_context"), "get_forward")
    engine.require(hasattr(flags(), "moe_output_buffer"), "the forward's flags have no moe_output_buffer")
    engine.get(flags(), "set")
    return Channel(lambda: flags().moe_output_buffer, lambda buffer: flags().set("moe_output_buffer", buffer))


def _modules_exposing(function: Any, name: str = ENGINE_OFFER) -> list[Any]:
    """The modules in which a function of the engine's goes by its name: its own, and those that imported it."""
    return [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]


def _pool_query_modules() -> list[Any]:
    """The engine's modules that ask whether a tensor lies in the pool of NCCL symmetric memory."""
    engines = [module for name, module in list(sys.modules.items()) if name.startswith("sglang.")]
    return [module for module in engines if runners.IN_POOL in getattr(module, "__dict__", {})]
