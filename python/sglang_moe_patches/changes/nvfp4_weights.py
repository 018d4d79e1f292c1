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
import sys
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches import engine, runners
from sglang_moe_patches.patch import Change, Count, Install, Patcher, Plan

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


def _makes_no_placeholders_for_trtllm(create_weights: Any) -> bool:
    """Whether the engine itself leaves the swizzled block scales out for TRT-LLM."""
    return engine.mentions(create_weights, "enable_flashinfer_trtllm_moe")


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


def _make_prepare(engine_function: Any) -> Any:
    from sglang_moe_patches.kernels import nvfp4_shuffle

    @functools.wraps(engine_function)
    def prepare_static_weights_for_trtllm_fp4_moe(*args: Any, **kwargs: Any) -> nvfp4_shuffle.Shuffled:
        return nvfp4_shuffle.prepare_static_weights_for_trtllm_fp4_moe(*args, engine_function=engine_function, **kwargs)

    return prepare_static_weights_for_trtllm_fp4_moe


def _make_swizzle(engine_swizzle: Any) -> Any:
    @functools.wraps(engine_swizzle)
    def swizzle_blockscale(scale: Any) -> Any:
        if _no_swizzled_scales.get():
            return scale.detach().new_zeros((scale.shape[0], 1, 1))
        return engine_swizzle(scale)

    return swizzle_blockscale


def _make_create_weights(engine_create_weights: Any, modelopt: Any) -> Any:
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

    return create_weights


# --- The change ------------------------------------------------------------------------------------------------------


def _look_at_shuffle() -> Install:
    """:raises engine.Unsupported: the engine does not shuffle weights by the function that is replaced."""
    utils, runner = engine.module(_UTILS), engine.module(_RUNNER)
    core = engine.module("flashinfer.fused_moe.core")
    for helper, keywords in (
        ("_maybe_get_cached_w3_w1_permute_indices", {"num_elts_per_sf", "is_gated_act_gemm"}),
        ("get_w2_permute_indices_with_cache", {"num_elts_per_sf"}),
    ):
        found = engine.own(core, helper, "flashinfer")
        engine.require(keywords <= set(engine.parameters(found)), f"flashinfer's {helper} takes other arguments")
    engine.require_parameters(engine.own(utils, _FUNCTION), _FUNCTION_PARAMETERS, exactly=True)

    align = engine.own(runner, "align_fp4_moe_weights_for_flashinfer_trtllm")
    engine.require(
        not hasattr(runner, _FUNCTION) and engine.mentions(align, _UTILS, _FUNCTION),
        f"align_fp4_moe_weights_for_flashinfer_trtllm no longer looks {_FUNCTION} up in {_UTILS} when called",
    )
    engine.require(
        engine.mentions(align, "copy_or_rebind_param"),
        "align_fp4_moe_weights_for_flashinfer_trtllm no longer writes its results back into the parameters",
    )

    def install(patcher: Patcher) -> None:
        engine_function = getattr(utils, _FUNCTION)
        patcher.wrap(utils, _FUNCTION, _make_prepare)
        # Importing `utils` runs the quantization package, which imports the function by name before we get here.
        by_name = sys.modules.get(_COMPRESSED_TENSORS)
        if by_name is not None and getattr(by_name, _FUNCTION, None) is engine_function:
            patcher.replace(by_name, _FUNCTION, getattr(utils, _FUNCTION))

    return install


def _look_at_placeholders() -> Install:
    """:raises engine.Unsupported: where the swizzled block scales are made, or whether they are read, is not known."""
    modelopt = engine.module(_MODELOPT)
    method = engine.own(modelopt, _METHOD)
    create_weights = engine.own(method, "create_weights")
    engine.require_parameters(create_weights, ["self", "layer"])
    if _makes_no_placeholders_for_trtllm(create_weights):
        return lambda patcher: None
    engine.require_parameters(engine.own(modelopt, _SWIZZLE), ["scale"], exactly=True)
    engine.require_mentions(create_weights, _SWIZZLE)
    engine.require_mentions(
        engine.own(method, "process_weights_after_loading"),
        *("enable_flashinfer_trtllm_moe", "reorder_rows_for_gated_act_gemm", "shuffle_matrix_sf_a"),
    )

    def install(patcher: Patcher) -> None:
        patcher.wrap(modelopt, _SWIZZLE, _make_swizzle)
        patcher.wrap(method, "create_weights", lambda original: _make_create_weights(original, modelopt))

    return install


def _plan() -> Plan:
    if absent := runners.without_flashinfer():
        return absent
    shuffle, placeholders = _look_at_shuffle(), _look_at_placeholders()

    def install(patcher: Patcher) -> None:
        shuffle(patcher)
        placeholders(patcher)

    return Plan.applied(install)


CHANGE = Change(
    name="nvfp4-weights",
    summary="NVFP4 expert weights are shuffled in place, without a second copy of the layer",
    plan=_plan,
    unneeded=runners.unneeded_without(*runners.TRTLLM),
    looks_at=(
        (
            f"`layers/quantization/utils.py` (`{_FUNCTION}`), `moe_runner/flashinfer_trtllm.py` "
            "(`align_fp4_moe_weights_…`), `quantization/modelopt_quant.py` (`create_weights`)",
            "same parameters? looked up when called? `copy_or_rebind_param`? placeholders?",
        ),
    ),
    counts=(
        Count("shuffled", "shuffled a layer's weights in place", "sglang_moe_patches.kernels.nvfp4_shuffle", _FUNCTION),
    ),
)
