"""Token slices, on request: no routed-experts kernel sees more than so many tokens at once.

For runners that keep their workspace inside (NVFP4 TRT-LLM, CuteDSL, CUTLASS, FlashInfer CUTLASS, Marlin) and for
data-parallel gathers. Each slice reads all weights again, so it costs time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_moe_patches.changes.moe_workspace import streams
from sglang_moe_patches.core import engine, log
from sglang_moe_patches.core.patch import Patcher, PatchError, Plan, around
from sglang_moe_patches.core.variables import STRICT, Variable, positive_number_parser

_LAYER_MODULE = "sglang.srt.layers.moe.fused_moe_triton.layer"
_DISPATCH_MODULE = "sglang.srt.layers.moe.token_dispatcher.standard"
_TOPK_MODULE = "sglang.srt.layers.moe.topk"
_ASKED = "_moe_patches_asked_for_token_slices"
"""Attribute of a layer whose first forward has shown whether it can be cut."""
_ALLOCATOR_MODULE = "sglang.srt.distributed.device_communicators.pynccl_allocator"

#: Quantization methods whose result for a row does not depend on the other rows: unquantized, static scales, or scales
#: of single rows and blocks. (A dynamic scale of the whole batch would differ from slice to slice.)
ROW_BY_ROW = frozenset(
    {
        "UnquantizedFusedMoEMethod",
        "ModelOptNvFp4FusedMoEMethod",
        "GPTQMarlinMoEMethod",
        "AWQMoEMethod",
        "MoeWNA16Method",
        "BlockInt8MoEMethod",
        "W8A8Int8MoEMethod",
        "W8A8FP8MoEMethod",
    }
)
#: The same for the scheme of a ``CompressedTensorsFusedMoEMethod``.
ROW_BY_ROW_SCHEMES = frozenset({"CompressedTensorsWNA16MoE", "CompressedTensorsW4A4Nvfp4MoE"})

MAX_MOE_TOKENS: Variable[int | None] = Variable(
    "SGLANG_MOE_PATCHES_MAX_MOE_TOKENS",
    "the most tokens that a routed-experts kernel gets at once",
    positive_number_parser("tokens"),
)


# --- What may be cut -------------------------------------------------------------------------------------------------


def split_tokens(tokens: int, max_tokens: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of as few token slices as possible of at most ``max_tokens``, all about as large.

    :param tokens: at least one.
    """
    count = -(-tokens // max_tokens)
    return [(index * tokens // count, (index + 1) * tokens // count) for index in range(count)]


def row_dependence_skip_reason(layer: Any) -> str | None:
    """Why a row of this ``FusedMoE`` layer's result may depend on the other rows; ``None``: it does not."""
    method = layer.quant_method
    name = type(method).__name__
    if name in ROW_BY_ROW:
        return None
    if name == "Fp8MoEMethod":
        if getattr(method, "block_quant", False) or getattr(layer, "w2_input_scale", None) is not None:
            return None
        return "a dynamic scale of the whole batch makes its rows depend on each other"
    if name == "CompressedTensorsFusedMoEMethod":
        name = type(getattr(layer, "scheme", None)).__name__
        if name in ROW_BY_ROW_SCHEMES:
            return None
    return f"its rows may depend on each other with {name}"


def dispatch_skip_reason(dispatch: Any, dispatch_type: Any, topk_type: Any) -> str | None:
    """Why the dispatcher's output cannot be cut by tokens; ``None``: go ahead.

    :param dispatch_type: the engine's ``StandardDispatchOutput``.
    :param topk_type: the engine's ``StandardTopKOutput``.
    """
    if type(dispatch) is not dispatch_type:
        return f"it gets a {type(dispatch).__name__}"
    if type(dispatch.topk_output) is not topk_type:
        return f"its routing is a {type(dispatch.topk_output).__name__}"
    tokens = len(dispatch.hidden_states)
    for name, value in dispatch._asdict().items():
        if name not in ("hidden_states", "topk_output") and value is not None:
            return f"it gets {name}"
    for name, value in dispatch.topk_output._asdict().items():
        if value is not None and len(value) != tokens:
            return f"{name} has {len(value)} rows for {tokens} tokens"
    return None


# --- Hook points -----------------------------------------------------------------------------------------------------


def run_slices(core: Callable[[Any], Any], dispatch: Any, max_tokens: int, keeps_input: bool = False) -> Any:
    """Run the layer's core once for each token slice.

    :param keeps_input: a core that works in place gets a copy of its slice: another stream may still read the input.
    :returns: what the core returns for one slice, with all rows: over the input where the core works in place there,
        else in a tensor that is allocated after the first slice.
    """
    whole = dispatch.hidden_states
    output = None
    for start, stop in split_tokens(len(whole), max_tokens):
        part = dispatch._replace(
            hidden_states=whole[start:stop].clone() if keeps_input else whole[start:stop],
            topk_output=type(dispatch.topk_output)(*(t if t is None else t[start:stop] for t in dispatch.topk_output)),
        )
        combine_input = core(part)
        result = combine_input.hidden_states
        if output is None:
            inplace = not keeps_input and result.data_ptr() == part.hidden_states.data_ptr()
            output = whole if inplace else result.new_empty((len(whole), *result.shape[1:]))
        if result.data_ptr() != output[start:stop].data_ptr():
            output[start:stop] = result
    return combine_input._replace(hidden_states=output)


def plan(max_tokens: int) -> Plan:
    """Probe ``FusedMoE.run_moe_core``, the hook point of all runners.

    :raises engine.Unsupported: the engine is not what this expects.
    """
    import torch

    layer = engine.require_unpatched(engine.module(_LAYER_MODULE), "FusedMoE")
    engine.require_parameters(
        engine.require_unpatched(layer, "run_moe_core"), ("self", "dispatch_output"), exactly=True
    )
    dispatch_type = engine.require_unpatched(engine.module(_DISPATCH_MODULE), "StandardDispatchOutput")
    topk_type = engine.require_unpatched(engine.module(_TOPK_MODULE), "StandardTopKOutput")
    combine_type = engine.require_unpatched(engine.module(_DISPATCH_MODULE), "StandardCombineInput")
    for type_, fields in (
        (dispatch_type, {"hidden_states", "topk_output"}),
        (topk_type, {"topk_weights", "topk_ids"}),
        (combine_type, {"hidden_states"}),
    ):
        engine.require(fields <= set(getattr(type_, "_fields", ())), f"{type_.__name__} is no tuple with {fields}")
    in_symmetric_memory = engine.get(engine.module(_ALLOCATOR_MODULE), "is_symmetric_memory_enabled")
    is_compiling = torch.compiler.is_compiling

    def wrap_run_moe_core(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run_moe_core(self: Any, dispatch_output: Any) -> Any:
            hidden_states = getattr(dispatch_output, "hidden_states", None)
            if is_compiling() or hidden_states is None:
                return original(self, dispatch_output)
            # A layer's first forward is asked whatever its size: a strict server ends while it starts, not later.
            is_large = len(hidden_states) > max_tokens
            if not is_large and _ASKED in vars(self):
                return original(self, dispatch_output)
            vars(self)[_ASKED] = True
            reason = dispatch_skip_reason(dispatch_output, dispatch_type, topk_type) or row_dependence_skip_reason(self)
            if reason is None and in_symmetric_memory():
                reason = "its output has to be in NCCL symmetric memory"
            if reason is not None:
                _report_skip_reason(reason)
            if reason is not None or not is_large:
                return original(self, dispatch_output)
            # As it is in this forward: deferred-shared-experts has some out of place.
            inplace = bool(getattr(getattr(self, "moe_runner_config", None), "inplace", False))
            keeps_input = streams.has_concurrent_reader and inplace
            return run_slices(functools.partial(original, self), dispatch_output, max_tokens, keeps_input)

        return run_moe_core

    lora_layer = _get_lora_layer()

    def install(patcher: Patcher) -> None:
        patcher.wrap(layer, "run_moe_core", wrap_run_moe_core)
        if lora_layer is not None:
            patcher.wrap(lora_layer, "__init__", _wrap_lora_init)

    return Plan.applied(install)


def _report_skip_reason(reason: str) -> None:
    """Log once that some routed experts get all tokens although slices were asked for.

    :raises PatchError: ``SGLANG_MOE_PATCHES_STRICT=1``.
    """
    message = log.format_line(
        "moe-workspace", f"{MAX_MOE_TOKENS.name}: a routed-experts kernel gets all tokens at once, because {reason}"
    )
    if STRICT.read():
        raise PatchError(f"{STRICT.name}=1, and {message}")
    log.once(logging.WARNING, f"token slices {reason}", "%s", message)


def _get_lora_layer() -> type | None:
    """The engine's wrapper of a layer with adapters, which runs a runner of its own instead of the layer's core."""
    try:
        lora_layer = engine.module("sglang.srt.lora.layers").FusedMoEWithLoRA
    except (engine.Unsupported, AttributeError):
        return None
    return lora_layer if isinstance(lora_layer, type) else None


@around
def _wrap_lora_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    _report_skip_reason("with LoRA adapters it is not FusedMoE.run_moe_core that runs it")
