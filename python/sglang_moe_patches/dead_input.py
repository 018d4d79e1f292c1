"""Which decoder layers have a dead input, and how it is offered to their routed experts (:mod:`.handoff`).

A layer's input is dead as soon as attention has read it: the layer rebinds its local name, and only the loop of the
model keeps the tensor, unread, until the layer returns. Not where the layer starts without a residual: its input
*becomes* the residual, which the next norm updates in place and everything downstream reads. And not in the first layer
of a pipeline stage, whose input is somebody else's: the caller's ``input_embeds``, or the buffers in which another
stage's output arrives.

A family of models is a line in :data:`FAMILIES`. The code of its layer and of its model's loop is looked at, and a
family that changed is left alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches import engine, handoff, runners
from sglang_moe_patches.handoff import Channel, is_whole, shares_storage
from sglang_moe_patches.patch import Patcher

ENGINE_OFFER = "moe_output_buffer_ctx"
"""The engine's own hand-off, in ``moe_runner.base`` where there is one."""
_BASE = "sglang.srt.layers.moe.moe_runner.base"
_KNOWN = "_moe_patches_knows_the_input"
_OFFERS = "_moe_patches_offers_its_input"
_LEAST = "_moe_patches_least_bytes_of_its_input"
SMALLEST_SCRATCH_BYTES = 1 << 20
"""Of the input of a layer whose runner takes it as scratch memory for large batches alone: a decode's is smaller, and
what the runner makes of one so small is far below what moe-workspace acts on, gathered from many ranks, too."""


@dataclass(frozen=True)
class Family:
    """Models whose decoder layers have a dead input.

    :param models: what they are called.
    :param name: of the module with the layer.
    :param layer: the decoder layer's class.
    :param model: module and class of the layer stack, whose ``forward`` has the loop over the layers.
    :param block: the layer's attribute with the MoE block, whose ``experts`` are the routed ones.
    """

    models: str
    name: str
    layer: str
    model: tuple[str, str]
    block: str = "mlp"


DEEPSEEK = "deepseek_v2"
"""The family whose shared experts can run last, and whose attention inputs are held."""
FAMILIES = (
    Family("DeepSeek-V2/V3", DEEPSEEK, "DeepseekV2DecoderLayer", (DEEPSEEK, "DeepseekV2Model")),
    Family("Qwen2-MoE", "qwen2_moe", "Qwen2MoeDecoderLayer", ("qwen2_moe", "Qwen2MoeModel")),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeDecoderLayer", ("qwen2_moe", "Qwen2MoeModel")),
    Family("GLM-4-MoE", "glm4_moe", "Glm4MoeDecoderLayer", ("glm4_moe", "Glm4MoeModel")),
    Family(
        "MiniMax-M2", "minimax_m2", "MiniMaxM2DecoderLayer", ("minimax_m2", "MiniMaxM2Model"), block="block_sparse_moe"
    ),
)
#: Layers beside those above in which the engine itself offers: what is not dead is withheld there, too.
_OFFERING_LAYERS = (("glm5_next", "Glm5NextDecoderLayer"),)

#: The norms before attention, with the residual's addition: after them nobody but the loop has the layer's input.
_CONSUMERS = frozenset(
    {
        "self.layer_communicator.prepare_attn",
        "self.layer_communicator.prepare_attn_and_capture_last_layer_outputs",
        "self.attn_boundary.prepare",
    }
)

_withheld: ContextVar[bool] = ContextVar("moe_output_buffer_withheld", default=False)
_installed: Offers | None = None


# --- The decisions ---------------------------------------------------------------------------------------------------


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


def input_dies(forward: Callable[..., Any]) -> bool:
    """Whether a decoder layer's ``forward`` gives up its input with the first statement that uses it.

    That is an assignment of a norm's result (:data:`_CONSUMERS`) to the name ``hidden_states`` itself: from there on
    the name means something else, and no other name ever meant the input.
    """
    (definition,) = ast.parse(engine.source(forward)).body
    assert isinstance(definition, ast.FunctionDef)
    first = next(
        (
            statement
            for statement in definition.body
            if any(isinstance(node, ast.Name) and node.id == "hidden_states" for node in ast.walk(statement))
        ),
        None,
    )
    if not isinstance(first, ast.Assign) or len(first.targets) != 1 or not isinstance(first.value, ast.Call):
        return False
    (target,) = first.targets
    assigned = target.elts if isinstance(target, ast.Tuple) else [target]
    given = [*first.value.args, *(keyword.value for keyword in first.value.keywords)]
    used = [node for node in ast.walk(first.value) if isinstance(node, ast.Name) and node.id == "hidden_states"]
    return (
        any(isinstance(name, ast.Name) and name.id == "hidden_states" for name in assigned)
        and ast.unparse(first.value.func) in _CONSUMERS
        and bool(used)
        and all(name in given for name in used)
    )


def loop_keeps_nothing(forward: Callable[..., Any]) -> bool:
    """Whether the loop over the layers, in a model's ``forward``, keeps no layer's input but in the name
    ``hidden_states``, to which it assigns the layer's result.

    Hidden states that are captured on the way are sums with the residual, which are tensors of their own.
    """
    loops = [
        loop
        for loop in ast.walk(ast.parse(engine.source(forward)))
        if isinstance(loop, ast.For) and any(_is_layer(node) for node in ast.walk(loop))
    ]
    if len(loops) != 1:
        return False
    (loop,) = loops
    parents = {child: node for node in ast.walk(loop) for child in ast.iter_child_nodes(node)}
    uses = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == "hidden_states"]
    assigned = 0
    for use in uses:
        around = parents[use]
        if isinstance(use.ctx, ast.Store):
            statement = parents[around] if isinstance(around, ast.Tuple) else around
            if not (isinstance(statement, ast.Assign) and _is_layer(statement.value)):
                return False
            assigned += 1
        elif isinstance(around, ast.BinOp) and isinstance(around.op, ast.Add):
            continue
        elif not _is_layer(parents[around] if isinstance(around, ast.keyword) else around):
            return False
    return assigned == 1


def _is_layer(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "layer"


def offers_regardless_of_the_residual(forward: Callable[..., Any]) -> bool:
    """Whether a decoder layer's ``forward`` offers its input under a condition that does not look at the residual."""
    for node in ast.walk(ast.parse(engine.source(forward))):
        if isinstance(node, ast.If) and any(
            isinstance(call, ast.Call) and ast.unparse(call.func).endswith(ENGINE_OFFER)
            for statement in node.body
            for call in ast.walk(statement)
        ):
            return "residual" not in ast.unparse(node.test)
    return engine.mentions(forward, ENGINE_OFFER)


# --- The wrappers ----------------------------------------------------------------------------------------------------


def _residual_argument(forward_batch: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where it is an argument of the layer."""
    return residual


def _residual_of_stream(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where the batch carries it, or ``None``.

    Without a pending contribution the input *is* the residual, or becomes it at the start of the stack.
    """
    stream = forward_batch.residual_stream
    return None if stream is None or stream.pending is None else stream.residual


def _make_layer_forward(
    original: Callable[..., Any],
    is_compiling: Callable[[], bool],
    residual_of: Callable[..., Any] = _residual_argument,
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
            before = handoff.exchange(hidden_states.detach())
            try:
                return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
            finally:
                handoff.exchange(before)
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


def _make_model_init(original: Callable[..., None], loop: Any, layers: dict[Any, str], engine_offers: Any) -> Any:
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


def _make_engine_offer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def moe_output_buffer_ctx(buf: Any) -> Any:
        return original(None if _withheld.get() else buf)

    return moe_output_buffer_ctx


# --- Looking ---------------------------------------------------------------------------------------------------------


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
        return _residual_argument
    engine.require(
        engine.takes(forward, ["self", "positions", "hidden_states", "forward_batch"])
        and _batches_carry_the_residual(),
        f"where the residual of {layer.__name__} is kept is not known here",
    )
    return _residual_of_stream


def _batches_carry_the_residual() -> bool:
    batches = engine.module("sglang.srt.model_executor.forward_batch_info")
    try:
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
    except ImportError:
        return False
    fields = getattr(engine.get(batches, "ForwardBatch"), "__dataclass_fields__", {})
    return "residual_stream" in fields and {"pending", "residual"} <= set(getattr(ResidualStream, "__slots__", ()))


def _channel(base: Any) -> Channel:
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
    return hasattr(engine.module(_BASE), ENGINE_OFFER)


def look() -> Offers:
    """What can be offered on this engine, or what another change has found already.

    :raises engine.Unsupported: no family is as expected; or one is not in which the engine offers, or the engine's
        hand-off.
    """
    import torch

    if _installed is not None:
        return _installed

    base = engine.module(_BASE)
    channel = None
    if hasattr(base, ENGINE_OFFER):
        engine.own(base, ENGINE_OFFER)
        channel = _channel(base)
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
            offers = engine.mentions(forward, ENGINE_OFFER)
            engine.require("forward" in vars(layer), f"{family.layer} has no forward of its own")
            engine.require(offers or input_dies(forward), f"{family.layer} may still use its input")
            engine.require(loop_keeps_nothing(loop), f"{family.model[1]} may keep its layers' inputs")
            engine.require_mentions(engine.own(model, "__init__"), "layers", "start_layer")
        except engine.Unsupported as error:
            # Where the engine itself offers, what is not dead would not be withheld.
            engine.require(ENGINE_OFFER not in inspect.getsource(module), str(error))
            changed.append(str(error))
            continue
        found.append(family.name)
        layers[layer] = (family.block, residual_of, offers and offers_regardless_of_the_residual(forward))
        models.setdefault(model, []).append(layer)
    offering = {layer for layer, (_, _, offers) in layers.items() if offers}
    for name, class_name in _OFFERING_LAYERS:
        if engine.has_module(f"sglang.srt.models.{name}"):
            layer = engine.own(engine.module(f"sglang.srt.models.{name}"), class_name)
            forward = engine.own(layer, "forward")
            if offers_regardless_of_the_residual(forward):
                layers[layer] = ("mlp", _find_residual(layer, forward), True)
                offering.add(layer)
    for layer in offering:
        engine.require(
            not hasattr(inspect.getmodule(layer), ENGINE_OFFER),
            f"{layer.__module__} does not ask for {ENGINE_OFFER} when called",
        )
    engine.require(found, "; ".join(changed))

    def install(patcher: Patcher) -> None:
        if channel is not None:
            patcher.add(handoff, "_channel", channel)
        if offering:
            patcher.wrap(base, ENGINE_OFFER, _make_engine_offer)
        for layer, (_, residual_of, offers) in layers.items():
            patcher.wrap(
                layer,
                "forward",
                functools.partial(
                    _make_layer_forward, is_compiling=is_compiling, residual_of=residual_of, engine_offers=offers
                ),
            )
        blocks = {layer: block for layer, (block, _, _) in layers.items()}
        for model, of_model in models.items():
            patcher.wrap(
                model,
                "__init__",
                functools.partial(
                    _make_model_init,
                    loop=model.forward,  # type: ignore[attr-defined]
                    layers={layer: blocks[layer] for layer in of_model},
                    engine_offers=offering,
                ),
            )

    return Offers(tuple(found), tuple(changed), install)
