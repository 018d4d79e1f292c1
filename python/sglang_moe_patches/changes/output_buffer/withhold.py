"""Where the engine has an output buffer of its own (releases from 0.5.13): withhold what is no dead tensor.

The engine offers the input of every MoE layer, also of one that starts without a residual: the first layer of a model,
a NextN/MTP draft layer. That input *becomes* the residual, the next norm updates it in place, and the output is written
over it. The decoder layer's ``forward`` notes that its input has no residual yet, and the engine's own
``moe_output_buffer_ctx`` then gets ``None``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches import engine
from sglang_moe_patches.changes.output_buffer import ENGINE_OFFER
from sglang_moe_patches.patch import Patcher, Plan

_OFFERING_LAYERS = (
    ("sglang.srt.models.deepseek_v2", "DeepseekV2DecoderLayer"),
    ("sglang.srt.models.glm5_next", "Glm5NextDecoderLayer"),
)

_withheld: ContextVar[bool] = ContextVar("moe_output_buffer_withheld", default=False)


def _residual_argument(forward_batch: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where it is an argument of the layer."""
    return residual


def _residual_of_stream(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where the batch carries it, or ``None``.

    Without a pending contribution the input *is* the residual, or becomes it at the start of the stack.
    """
    stream = forward_batch.residual_stream
    return None if stream is None or stream.pending is None else stream.residual


def _make_offering_forward(
    original: Callable[..., Any], residual_of: Callable[..., Any], is_compiling: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, positions: Any, hidden_states: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or residual_of(forward_batch, *args, **kwargs) is not None:
            return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
        token = _withheld.set(True)
        try:
            return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
        finally:
            _withheld.reset(token)

    return forward


def _make_engine_offer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def moe_output_buffer_ctx(buf: Any) -> Any:
        return original(None if _withheld.get() else buf)

    return moe_output_buffer_ctx


def _find_residual(layer: type, forward: Callable[..., Any]) -> Callable[..., Any]:
    """How to find the residual that comes with a layer's input.

    :raises engine.Unsupported: it is neither an argument nor carried by the batch.
    """
    if engine.takes(forward, ["self", "positions", "hidden_states", "forward_batch", "residual"]):
        return _residual_argument
    engine.require(
        engine.takes(forward, ["self", "positions", "hidden_states", "forward_batch"])
        and _batches_carry_the_residual(),
        f"the engine's own output buffer overwrites the residual where {layer.__name__} starts without one, and where "
        "that residual is kept is not known here",
    )
    return _residual_of_stream


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


def _batches_carry_the_residual() -> bool:
    batches = engine.module("sglang.srt.model_executor.forward_batch_info")
    try:
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
    except ImportError:
        return False
    fields = getattr(engine.get(batches, "ForwardBatch"), "__dataclass_fields__", {})
    return "residual_stream" in fields and {"pending", "residual"} <= set(getattr(ResidualStream, "__slots__", ()))


def plan(base: Any) -> Plan:
    """:param base: the module with the engine's own ``moe_output_buffer_ctx``.
    :raises engine.Unsupported: the engine is not what this expects.
    """
    import torch

    engine.own(base, ENGINE_OFFER)
    offering = []
    for name, class_name in _OFFERING_LAYERS:
        if not engine.has_module(name):
            continue
        module = engine.module(name)
        if not hasattr(module, class_name):
            continue
        layer = engine.own(module, class_name)
        forward = engine.own(layer, "forward")
        if offers_regardless_of_the_residual(forward):
            offering.append((layer, _find_residual(layer, forward)))
            engine.require(not hasattr(module, ENGINE_OFFER), f"{name} no longer looks {ENGINE_OFFER} up when called")
    if not offering:
        return Plan.native()
    is_compiling = torch.compiler.is_compiling

    def install(patcher: Patcher) -> None:
        patcher.wrap(base, ENGINE_OFFER, _make_engine_offer)
        for layer, residual_of in offering:
            patcher.wrap(
                layer,
                "forward",
                functools.partial(_make_offering_forward, residual_of=residual_of, is_compiling=is_compiling),
            )

    return Plan.hardened(install)
