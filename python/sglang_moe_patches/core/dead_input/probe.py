"""Find the decoder layers of each model that may offer their dead input, and the channel for these offers."""

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
from sglang_moe_patches.core.patch import Patcher, around, format_reason

_installed: Offers | None = None

LOADER = "sglang.srt.model_loader.loader"
INITIALIZE = "_initialize_model"
"""Name of the engine's function that builds every model. The module :data:`LOADER` defines the function."""


@dataclass(frozen=True)
class LayerFacts:
    """Facts about a class of decoder layers whose inputs are dead, read from the source code of the class.

    :param layer: the class that defines ``forward``.
    :param parameters: the names of the positional parameters of ``forward``.
    :param residual_of: function that receives the batch and the argument ``residual``, and returns the residual that
        belongs to a layer's input.
    :param tensor_of: function that receives a layer's input and returns its tensor.
    :param attention: the submodules and attributes that ``forward`` uses up to the norm after attention. The source
        code of ``forward`` does not show the classes of these submodules. :func:`require_attention_input_dies`
        therefore checks the submodules later, in each layer that was built.
    """

    layer: Any
    parameters: tuple[str, ...]
    residual_of: Callable[[Any, Any], Any]
    tensor_of: Callable[[Any], Any]
    attention: proofs.AttentionFacts

    @property
    def family(self) -> str:
        """Name of the engine's module that defines the class, such as ``deepseek_v2``."""
        return str(self.layer.__module__).rpartition(".")[2]


@dataclass(frozen=True)
class Offers:
    """Object whose :meth:`install` makes decoder layers offer their dead inputs. :func:`probe_offers` returns it.

    :param note: reason why the layers of DeepSeek's family cannot offer their input, for ``doctor``. It is empty if
        they can. The layers of other families are probed only when a model is built.
    :param channel: the engine's own mechanism that hands an offered buffer from a layer to a runner, or ``None`` if the
        engine has none.
    """

    note: str
    channel: Channel | None

    def install(self, patcher: Patcher) -> None:
        """Install this package's offers and disable the engine's own offers, for every model that is built from now on.

        Several changes need the offers, so each of them calls this method. Only the first call in a process has an
        effect.
        """
        if _installed is not None:
            return
        patcher.add(sys.modules[__name__], "_installed", self)
        if self.channel is not None:
            patcher.add(channel, "_channel", self.channel)
            for module in _find_modules_exposing(getattr(engine.import_module(ENGINE_MODULE), ENGINE_OFFER)):
                patcher.wrap(module, ENGINE_OFFER, offer.make_empty_offer)
            # For every offered buffer, the engine's runner searches the pool of NCCL symmetric memory for the buffer.
            # The search is slow, and this package offers buffers in more layers than the engine does. Therefore, the
            # results are cached.
            pool = engine.import_module(runners.SYMMETRIC_MEMORY_MODULE)
            is_in_pool = runners.cache_pool_addresses(getattr(pool, runners.POOL_QUERY))
            for module in _find_pool_query_modules():
                patcher.replace(module, runners.POOL_QUERY, is_in_pool)
        probe_new_model = functools.partial(probe_model, patcher=patcher, wrapped=set())
        for module in _find_modules_exposing(getattr(engine.import_module(LOADER), INITIALIZE), INITIALIZE):
            patcher.wrap(module, INITIALIZE, around(functools.partial(offer.initialize_and_probe, probe_new_model)))


def has_engine_offer() -> bool:
    """Return whether the engine itself offers layer inputs in some layers, through a channel of its own."""
    return hasattr(engine.import_module(ENGINE_MODULE), ENGINE_OFFER)


def probe_offers() -> Offers:
    """Check that layers of this engine can offer their dead inputs, and return the :class:`Offers` to install.

    All changes of a process share one such object. If one is installed already, the function returns it.

    :raises engine.Unsupported: the engine's function that builds models is missing or patched, or the engine offers
        buffers itself in a way that this package does not know.
    """
    if _installed is not None:
        return _installed
    engine_channel = _find_engine_channel() if has_engine_offer() else None
    engine.require_unpatched(engine.import_module(LOADER), INITIALIZE)
    try:
        module = engine.import_module(f"{families.MODELS}.{DEEPSEEK}")
        probe_layer(engine.require_unpatched(module, "DeepseekV2DecoderLayer"))
        require_loop(engine.require_unpatched(module, "DeepseekV2Model"))
    except Exception as error:  # models of other families may still offer their inputs
        return Offers(
            f"layers of DeepSeek models do not offer their dead input: {format_reason(error)}", engine_channel
        )
    return Offers("", engine_channel)


# --- A model that was built ------------------------------------------------------------------------------------------


def probe_model(model: Any, patcher: Patcher, wrapped: set[Any]) -> None:
    """Make each decoder layer of a new model offer its input if the input is proved to be dead.

    The other layers offer nothing, and one line is logged with the reasons.

    :param wrapped: the classes of layers whose ``forward`` is wrapped already. This function adds each class that it
        wraps.
    """
    for stack, dead in probe_stacks(model):
        stage = offer.find_stage_layers(stack)
        producers = {layer: producer for producer, layer in itertools.pairwise(stage)}
        for layer, facts, experts in dead.layers:
            if facts.layer not in wrapped:
                patcher.wrap(facts.layer, "forward", make_forward_wrapper(facts))
                wrapped.add(facts.layer)
            offer.mark_offering(layer, producers[layer], experts)
        if dead.skip_reasons:
            name, reasons = type(stack).__name__, "; ".join(dead.skip_reasons)
            message = f"{log.PREFIX}layers of {name} do not offer their dead input: {reasons}"
            log.log_once(logging.INFO, message, "%s", message)


def find_offers(model: Any) -> tuple[list[Any], list[str]]:
    """Find the decoder layers that offer their dead input, in a model that was built after :meth:`Offers.install`.

    :returns: two lists: the routed experts of these layers, and the reasons why other layers with routed experts offer
        nothing.
    """
    offering: list[Any] = []
    reasons: dict[str, None] = {}
    for _, dead in probe_stacks(model):
        offering += [experts for layer, _, experts in dead.layers if offer.is_offering(layer)]
        reasons |= dict.fromkeys(dead.skip_reasons)
    return offering, list(reasons)


def make_forward_wrapper(facts: LayerFacts) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that wraps the ``forward`` of decoder layers, so that the layers offer their dead input.

    :meth:`Patcher.wrap` receives the returned function as ``make_wrapper``.
    """
    import torch

    return functools.partial(
        offer.make_layer_forward,
        is_compiling=torch.compiler.is_compiling,
        parameters=facts.parameters,
        residual_of=facts.residual_of,
        tensor_of=facts.tensor_of,
    )


@dataclass(frozen=True)
class StackFacts:
    """Result of the proofs for one stack of decoder layers, such as the layers of a ``DeepseekV2Model``.

    :param layers: one entry for each layer with a dead input: the layer, the facts about its class, its routed experts.
    :param skip_reasons: reasons why other layers with routed experts cannot offer their input.
    """

    layers: list[tuple[Any, LayerFacts, Any]]
    skip_reasons: list[str]


def probe_stacks(model: Any) -> Iterator[tuple[Any, StackFacts]]:
    """Yield each stack of decoder layers with routed experts in a model, and the result of the proofs for the stack.

    A stack is a module with a ``ModuleList`` named ``layers``. The first layer of a pipeline stage is left out, because
    its input belongs to the caller or to another stage.
    """
    from torch.nn import ModuleList

    routed_experts = engine.get(engine.import_module("sglang.srt.layers.moe.fused_moe_triton.layer"), "FusedMoE")
    for stack in list(model.modules()):
        if not isinstance(getattr(stack, "layers", None), ModuleList):
            continue
        stage = offer.find_stage_layers(stack)
        sparse = [
            (producer, layer, experts)
            for producer, layer in itertools.pairwise(stage)
            if (experts := [module for module in layer.modules() if isinstance(module, routed_experts)])
        ]
        if sparse:
            yield stack, _probe_stack(stack, sparse)


def _probe_stack(stack: Any, sparse: list[tuple[Any, Any, list[Any]]]) -> StackFacts:
    """Prove which decoder layers of a stack have a dead input.

    :param stack: the module that runs the layers in its ``forward``.
    :param sparse: one entry for each layer with routed experts: the previous layer, the layer, its ``FusedMoE``
        modules.
    """

    @functools.cache  # most layers of a stack have the same class, and a proof takes milliseconds
    def probe_class(kind: type) -> LayerFacts | Exception:
        try:
            return probe_layer(kind)
        except Exception as error:
            return error

    require_methods = functools.cache(require_unpatched_methods)
    require_parts = functools.cache(functools.partial(require_unpatched_parts, require_methods=require_methods))
    try:
        require_loop(type(stack))
    except Exception as error:
        return StackFacts([], [format_reason(error)])
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
            engine.require(_has_plain_sum(layer), proofs.NO_PLAIN_SUM.format(name))
            require_attention_input_dies(layer, facts.attention, type(experts[0]))
            for part in (producer, layer):
                require_parts(part)
            layers.append((layer, facts, experts[0]))
        except Exception as error:  # layers of other classes may still offer their inputs
            skip_reasons[format_reason(error)] = None
    return StackFacts(layers, list(skip_reasons))


def probe_layer(layer: type) -> LayerFacts:
    """Prove that the inputs of a class of decoder layers are dead, and return the facts about the class.

    :raises engine.Unsupported: a proof fails, or the code is not the engine's own.
    """
    name = layer.__name__
    for kind in layer.__mro__:  # a subclass from another package may override methods or have other submodules
        home = kind.__module__.partition(".")[0]
        engine.require(
            home in ("sglang", "torch", "builtins"),
            f"{name} has code of another package: {kind.__module__}.{kind.__qualname__}",
        )

    def method_of(attribute: str) -> Any:
        is_method = isinstance(inspect.getattr_static(layer, attribute, None), FunctionType)
        return engine.require_unpatched(layer, attribute) if is_method else None

    kind = next(kind for kind in layer.__mro__ if "forward" in vars(kind))
    forward = engine.require_unpatched(kind, "forward")
    reason = proofs.find_layer_skip_reason(name, forward, method_of)
    engine.require(reason is None, str(reason))
    attention = proofs.follow_attention(forward, method_of)
    assert attention is not None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    names = tuple(parameter.name for parameter in parameters if parameter.kind in positional)[1:]
    return LayerFacts(kind, names, _choose_residual_of(name, names), _choose_tensor_of(forward), attention)


def require_attention_input_dies(layer: Any, attention: proofs.AttentionFacts, experts: type) -> None:
    """Check that a layer's submodules do not return attention's input, and do not run the routed experts too early.

    The routed experts may overwrite the memory of attention's input. The proof about the layer's class does not cover
    the submodules, so this function checks them.

    :param attention: the result of the proof about the layer's class (:func:`.proofs.follow_attention`).
    :param experts: the class of the layer's routed experts.
    :raises engine.Unsupported: one of these holds:

        - The routed experts may run before the norm after attention. Attention could then read overwritten memory.
        - A submodule may return its own input.
        - A submodule's code is not the engine's own.
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
            returns_new_tensor = (
                is_engines
                and "forward" not in vars(module)
                and _returns_own_memory(engine.require_unpatched(type(module), "forward"), places)
            )
            engine.require(returns_new_tensor, f"{name} passes attention's input to {attribute}, which may return it")


#: The result is cached, because most layers of a stack have submodules of the same class.
_returns_own_memory = functools.cache(proofs.returns_own_memory)


def require_unpatched_parts(layer: Any, require_methods: Callable[[type], None]) -> None:
    """Check that no other plugin's code sees a layer's tensors.

    A wrapper of another plugin, for example around a norm, may keep a tensor that shares memory with the layer's input.

    :param require_methods: :func:`require_unpatched_methods`, or a cached version of it.
    :raises engine.Unsupported: a module of the layer, or an object such as its communicator (:data:`_TENSOR_HANDLERS`),
        has code that is not the engine's own.
    """
    for module in layer.modules():
        require_methods(type(module))
        for name, value in vars(module).items():
            if isinstance(value, FunctionType | MethodType):  # set on the instance, or chosen by its constructor
                engine.require_unpatched(module, name)
            elif name in _TENSOR_HANDLERS:
                require_methods(type(value))


#: Names of a module's attributes whose values are not modules, but objects that receive the module's tensors. These
#: objects call the module's norms or run its kernels.
_TENSOR_HANDLERS = ("layer_communicator", "attn_boundary", "ffn_boundary", "quant_method")


def require_unpatched_methods(kind: type) -> None:
    """Check that all methods of a class, and of its base classes, are the engine's or PyTorch's own.

    :raises engine.Unsupported: a method was replaced or wrapped, or a base class comes from another package.
    """
    for base in kind.__mro__:
        engine.require(
            _find_package(base) in _PACKAGES,
            f"{kind.__name__} has code of another package: {base.__module__}.{base.__qualname__}",
        )
        for name, value in vars(base).items() if _find_package(base) == "sglang" else ():
            is_method = isinstance(value, FunctionType | staticmethod | classmethod)
            if is_method and (name == "__call__" or not name.startswith("__")):
                engine.require_unpatched(base, name)


#: Names of the packages whose classes may be base classes of a module.
_PACKAGES = ("sglang", "torch", "builtins", "abc", "typing")


def _find_package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def require_loop(model: type) -> None:
    """Prove that a model's loop over its decoder layers keeps no reference to a layer's input.

    :param model: the class that defines the loop in its ``forward``.
    :raises engine.Unsupported: the proof fails, or the code is not the engine's own.
    """
    home = model.__module__
    engine.require(
        home.partition(".")[0] == "sglang",
        f"{model.__name__} has code of another package: {home}.{model.__qualname__}",
    )
    reason = proofs.find_loop_skip_reason(model.__name__, engine.require_unpatched(model, "forward"))
    engine.require(reason is None, str(reason))


def _has_plain_sum(layer: Any) -> bool:
    """Return whether the engine uses a decoder layer's input in a single way: it adds the input to the residual, and
    gives the normalized sum to attention.

    - In releases that keep the residual in the ``ForwardBatch``, this function checks only the norm. The addition is
      checked in each forward pass (:func:`.offer.find_stream_residual`).
    - In other releases, the engine's method ``LayerCommunicator.prepare_attn`` adds and normalizes. The result is true
      if the layer's communicator does not override this method.

    :raises engine.Unsupported: another plugin has patched ``prepare_attn``.
    """
    boundary = getattr(layer, "attn_boundary", None)
    if boundary is not None:
        return offer.is_plain_norm(boundary.declaration.read)
    communicators = engine.import_module("sglang.srt.layers.communicator")
    prepare = engine.require_unpatched(engine.require_unpatched(communicators, "LayerCommunicator"), "prepare_attn")
    return engine.require_unpatched(type(layer.layer_communicator), "prepare_attn") is prepare


def _choose_residual_of(layer: str, parameters: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """Return the function that finds the residual of a decoder layer's input.

    :raises engine.Unsupported: the residual is neither an argument of the layer nor kept in the batch.
    """
    if "residual" in parameters:
        return offer.get_residual_argument
    engine.require(_batches_carry_residual(), f"the residual of {layer} is neither an argument nor in the batch")
    return offer.find_stream_residual


def _batches_carry_residual() -> bool:
    """Return whether this release keeps the residual in the batch, in attributes whose names this package knows."""
    batches = engine.import_module("sglang.srt.model_executor.forward_batch_info")
    try:
        from sglang.srt.layers.layer_boundary.residual.stream import Contribution, ResidualStream
    except ImportError:
        return False
    fields = getattr(engine.get(batches, "ForwardBatch"), "__dataclass_fields__", {})
    has = {"pending", "residual"} <= set(getattr(ResidualStream, "__slots__", ()))
    return has and "residual_stream" in fields and "update" in getattr(Contribution, "__annotations__", {})


def _choose_tensor_of(forward: Any) -> Callable[[Any], Any]:
    """Return the function that finds the tensor of a layer's input.

    In some releases the input is a handle, and the layer's own ``forward`` finds the tensor by an engine function
    (:data:`.proofs.TENSOR_OF_HANDLE`). The result is then this engine function.

    :raises engine.Unsupported: another plugin has replaced or wrapped the engine function.
    """
    access, name = proofs.TENSOR_OF_HANDLE.split(".")
    if not engine.mentions(forward, access, name):
        return offer.return_unchanged
    return engine.require_unpatched(forward.__globals__[access], name)


# --- The engine's own offer ------------------------------------------------------------------------------------------


def _find_engine_channel() -> Channel:
    """Return the engine's own channel for offered buffers.

    The engine keeps the offered buffer in a context variable of :data:`ENGINE_MODULE`, or in the flags of the forward
    pass.

    :raises engine.Unsupported: the buffer is kept in neither place, or another plugin has patched the channel.
    """
    base = engine.import_module(ENGINE_MODULE)
    engine.require_unpatched(base, ENGINE_OFFER)
    for module in (engine.import_module(runners.SYMMETRIC_MEMORY_MODULE), *_find_pool_query_modules()):
        engine.require_unpatched(module, runners.POOL_QUERY)
    if hasattr(base, "_moe_output_buf"):
        return Channel(base._moe_output_buf.get, base._moe_output_buf.set)
    flags = engine.get(engine.import_module("sglang.srt.runtime_context"), "get_forward")
    engine.require(hasattr(flags(), "moe_output_buffer"), "the flags of the forward pass have no moe_output_buffer")
    engine.get(flags(), "set")
    return Channel(lambda: flags().moe_output_buffer, lambda buffer: flags().set("moe_output_buffer", buffer))


def _find_modules_exposing(function: Any, name: str = ENGINE_OFFER) -> list[Any]:
    """Return the module that defines an engine function, and all modules that have imported it by name."""
    return [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]


def _find_pool_query_modules() -> list[Any]:
    """Return the loaded modules of the engine that define or import the function :data:`.runners.POOL_QUERY`.

    This function of the engine returns whether a tensor lies in the pool of NCCL symmetric memory.
    """
    engines = [module for name, module in list(sys.modules.items()) if name.startswith("sglang.")]
    return [module for module in engines if runners.POOL_QUERY in getattr(module, "__dict__", {})]
