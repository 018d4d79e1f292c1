"""nvfp4-weights: expert weights are shuffled for the TRT-LLM kernels in place, without a second copy of the layer.

Why
    After loading, the engine permutes every expert's NVFP4 weights and block scales into the layout that the TRT-LLM
    MoE kernel reads, expert by expert, through lists and ``torch.stack``: thousands of allocations a layer, which
    fragment the memory pool, and for a moment more than a second copy of the layer. And ``create_weights`` allocates
    swizzled block scales for every layer that only other backends ever read (264 MB a layer for Kimi-K2.5 at TP=4).

How
    * ``prepare_static_weights_for_trtllm_fp4_moe`` is replaced, in ``quantization.utils`` and where it was imported by
      name, by ``kernels.nvfp4_shuffle``: same arguments, same results, but written into the tensors that came in.
      ``align_fp4_moe_weights_for_flashinfer_trtllm`` then copies each result into the parameter it was made from.
      Nothing is needed to avoid that copy: ``Tensor.copy_`` returns at once when source and destination are the same
      view of the same storage (PyTorch checks storage, offset, strides, sizes and dtype, not object identity), and
      ``contiguous()`` returns its input. Where the engine pads the intermediate size first, the padded tensors are
      fresh ones, which are shuffled in place and rebound.
    * While ``ModelOptNvFp4FusedMoEMethod.create_weights`` runs for a TRT-LLM backend, and only in that context,
      ``swizzle_blockscale`` as that module sees it answers with a placeholder of one byte per expert. One byte and not
      none: the engine's shared-memory weight offloader cannot map zero bytes. The placeholder keeps the number of
      experts as its first dimension, which the offloader divides by the number of ranks. From 0.5.12 on the engine
      aliases both attributes to the block scales after loading; in 0.5.11 they stay as they are, unread. Where the
      engine allocates none for TRT-LLM itself (from 0.5.13 on), this part has nothing to do.

    A reload writes raw weights into the same parameters and prepares them again, as with the engine's own function.
    ``create_weights`` does not run again.

Upstream
    sglang preallocates the outputs of the shuffle from release 0.5.13 on (no fragmentation, but still a second copy of
    the layer, and slower); frees the placeholders after loading from 0.5.12 on, and makes none from 0.5.13 on.

Remove when
    the engine shuffles in place, or within a bounded scratch, and does not allocate the placeholders for TRT-LLM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches import engine
from sglang_moe_patches.patch import TRTLLM_RUNNERS, Change, Outcome, Patcher, Status, runner_needed

_UTILS = "sglang.srt.layers.quantization.utils"
_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant"
_COMPRESSED_TENSORS = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe"
_RUNNER = "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm"

_FUNCTION = "prepare_static_weights_for_trtllm_fp4_moe"
_FUNCTION_PARAMETERS = (
    "gemm1_weights",
    "gemm2_weights",
    "gemm1_scales_linear_fp4_bytes",
    "gemm2_scales_linear_fp4_bytes",
    "hidden_size",
    "intermediate_size",
    "num_experts",
    "is_gated",
)
_METHOD = "ModelOptNvFp4FusedMoEMethod"
_SWIZZLE = "swizzle_blockscale"

# Set while create_weights runs for a backend whose swizzled block scales nobody reads. A ContextVar, so that another
# thread that swizzles block scales at the same moment gets real ones.
_no_swizzled_scales: ContextVar[bool] = ContextVar("sglang_moe_patches_no_swizzled_scales", default=False)


def _mentions(function: Any, *names: str) -> bool:
    """Whether a Python function's own code refers to all of these globals, attributes and modules.

    Its compiled code is asked and not its source, in which an imported module is no name.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and set(names) <= set(code.co_names)


def unsupported_reason() -> str | None:
    """Why this change cannot be applied to the installed engine (whose modules it imports), or ``None`` if it can."""
    try:
        utils, modelopt, runner = (importlib.import_module(name) for name in (_UTILS, _MODELOPT, _RUNNER))
    except ImportError as error:
        return f"cannot import {error.name or 'the engine'}: {error}"
    try:
        from flashinfer.fused_moe import core
    except ImportError as error:
        return f"FlashInfer's row index helpers cannot be imported: {error}"

    helpers: tuple[tuple[str, frozenset[str]], ...] = (
        ("_maybe_get_cached_w3_w1_permute_indices", frozenset({"num_elts_per_sf", "is_gated_act_gemm"})),
        ("get_w2_permute_indices_with_cache", frozenset({"num_elts_per_sf"})),
    )
    for helper, keywords in helpers:
        function = getattr(core, helper, None)
        if function is None or not keywords <= set(engine.parameters(function)):
            return f"flashinfer.fused_moe.core.{helper} is missing or takes other arguments"

    function = getattr(utils, _FUNCTION, None)
    if function is None:
        return f"{_UTILS} has no {_FUNCTION}"
    if engine.parameters(function) != list(_FUNCTION_PARAMETERS):
        return f"{_FUNCTION} takes ({', '.join(engine.parameters(function))})"

    align = getattr(runner, "align_fp4_moe_weights_for_flashinfer_trtllm", None)
    if align is None:
        return f"{_RUNNER} has no align_fp4_moe_weights_for_flashinfer_trtllm"
    if hasattr(runner, _FUNCTION) or not _mentions(align, _UTILS, _FUNCTION):
        return f"align_fp4_moe_weights_for_flashinfer_trtllm no longer looks {_FUNCTION} up in {_UTILS} when called"
    if not _mentions(align, "copy_or_rebind_param"):
        return "align_fp4_moe_weights_for_flashinfer_trtllm no longer writes its results back into the parameters"

    method = getattr(modelopt, _METHOD, None)
    create_weights = getattr(method, "create_weights", None)
    if create_weights is None or engine.parameters(create_weights)[:2] != ["self", "layer"]:
        return f"{_METHOD}.create_weights is missing or takes other arguments"
    if _makes_no_placeholders_for_trtllm(create_weights):
        return None
    if getattr(modelopt, _SWIZZLE, None) is None or not _mentions(create_weights, _SWIZZLE):
        return f"{_METHOD}.create_weights no longer makes its placeholders with {_SWIZZLE}"
    if engine.parameters(getattr(modelopt, _SWIZZLE)) != ["scale"]:
        return f"{_SWIZZLE} takes ({', '.join(engine.parameters(getattr(modelopt, _SWIZZLE)))})"
    process = getattr(method, "process_weights_after_loading", None)
    for name in ("enable_flashinfer_trtllm_moe", "reorder_rows_for_gated_act_gemm", "shuffle_matrix_sf_a"):
        if not _mentions(process, name):
            return f"{_METHOD}.process_weights_after_loading no longer decides by {name}"
    return None


def _makes_no_placeholders_for_trtllm(create_weights: Any) -> bool:
    """Whether the engine itself leaves the swizzled block scales out for TRT-LLM."""
    return _mentions(create_weights, "enable_flashinfer_trtllm_moe")


def trtllm_replaces_swizzled_scales(
    enable_flashinfer_trtllm_moe: bool, reorder_rows_for_gated_act_gemm: Any, shuffle_matrix_sf_a: Any
) -> bool:
    """Whether the engine will prepare the layer for TRT-LLM, which reads no swizzled block scales of its own.

    The condition of ``process_weights_after_loading``: on anything else that method swizzles the block scales itself
    and compares shapes with the placeholder, which then has to be the engine's.
    """
    return (
        bool(enable_flashinfer_trtllm_moe)
        and reorder_rows_for_gated_act_gemm is not None
        and shuffle_matrix_sf_a is not None
    )


def _patch_shuffle(utils: Any, patcher: Patcher) -> None:
    from sglang_moe_patches.kernels import nvfp4_shuffle

    engine_function = getattr(utils, _FUNCTION)

    @functools.wraps(engine_function)
    def prepare_static_weights_for_trtllm_fp4_moe(*args: Any, **kwargs: Any) -> nvfp4_shuffle.Shuffled:
        return nvfp4_shuffle.prepare_static_weights_for_trtllm_fp4_moe(*args, engine_function=engine_function, **kwargs)

    patcher.replace(utils, _FUNCTION, prepare_static_weights_for_trtllm_fp4_moe)
    # Importing `utils` runs the quantization package, which imports the function by name before we get here.
    by_name = sys.modules.get(_COMPRESSED_TENSORS)
    if by_name is not None and getattr(by_name, _FUNCTION, None) is engine_function:
        patcher.replace(by_name, _FUNCTION, prepare_static_weights_for_trtllm_fp4_moe)


def _patch_placeholders(modelopt: Any, patcher: Patcher) -> None:
    engine_swizzle = getattr(modelopt, _SWIZZLE)
    method = getattr(modelopt, _METHOD)
    engine_create_weights = method.create_weights
    if _makes_no_placeholders_for_trtllm(engine_create_weights):
        return

    @functools.wraps(engine_swizzle)
    def swizzle_blockscale(scale: Any) -> Any:
        if _no_swizzled_scales.get():
            return scale.detach().new_zeros((scale.shape[0], 1, 1))
        return engine_swizzle(scale)

    @functools.wraps(engine_create_weights)
    def create_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _no_swizzled_scales.set(
            trtllm_replaces_swizzled_scales(
                getattr(self, "enable_flashinfer_trtllm_moe", False),
                modelopt.reorder_rows_for_gated_act_gemm,
                modelopt.shuffle_matrix_sf_a,
            )
        )
        try:
            return engine_create_weights(self, *args, **kwargs)
        finally:
            _no_swizzled_scales.reset(token)

    patcher.replace(modelopt, _SWIZZLE, swizzle_blockscale)
    patcher.replace(method, "create_weights", create_weights)


def _probe() -> Outcome:
    reason = unsupported_reason()
    return Outcome(Status.APPLIED) if reason is None else Outcome(Status.UNSUPPORTED, reason)


def _install(patcher: Patcher) -> None:
    _patch_shuffle(importlib.import_module(_UTILS), patcher)
    _patch_placeholders(importlib.import_module(_MODELOPT), patcher)


CHANGE = Change(
    name="nvfp4-weights",
    summary="NVFP4 expert weights are shuffled in place, without a second copy of the layer",
    probe=_probe,
    install=_install,
    needed=runner_needed(*TRTLLM_RUNNERS),
)
