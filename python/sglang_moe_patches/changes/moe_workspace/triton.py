"""Column slices in the Triton runner: run the engine's own fused-MoE function with three replaced globals.

:func:`install` wraps the engine's function. In every call, the wrapper asks the function ``route`` whether the expert
outputs are large enough for slices. If they are, ``run_in_columns`` receives the call. It may then run a copy of the
engine's function in which three global names have other values: ``torch`` (:class:`_FusedMoeTorch`), the GEMM
(``invoke``) and the sum (``sum_slices``).

In this copy the first GEMM runs as usual. The call of the second GEMM is only recorded. ``sum_slices`` then runs the
second GEMM and this package's sum for one column slice after the other (:mod:`.deferred_tensor`).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices, deferred_tensor, streams
from sglang_moe_patches.changes.moe_workspace.column_slices import LayerShape, TritonGemm
from sglang_moe_patches.changes.moe_workspace.deferred_tensor import (
    DeferredTensor,
    FusedMoeCall,
    QuantizedOnce,
    SecondGemm,
)
from sglang_moe_patches.core import engine, fused_moe_call, runners
from sglang_moe_patches.core.dead_input import channel, takers
from sglang_moe_patches.core.engine import require
from sglang_moe_patches.core.patch import Patcher, Plan, replace_globals

FUSED_MOE = fused_moe_call.NAME
COMBINE = "moe_combine_topk"
INVOKE = "invoke_fused_moe_kernel"
SUM = "moe_sum_reduce"

#: Source texts in the engine's fused-MoE function that use the expert outputs. A function with other uses is not
#: supported. Some of these uses run only in calls without column slices (top-k of 2, LoRA hooks, a deferred sum).
#: :class:`DeferredTensor` supports the others.
_EXPECTED_USES = {
    "intermediate_cache3.view",
    "intermediate_cache3.shape",
    "intermediate_cache3[:, 0]",
    "intermediate_cache3[:, 1]",
    "intermediate_cache3 if _use_intermediate else out_hidden_states.unsqueeze(0)",
    "hooks.after_down(intermediate_cache2, intermediate_cache3, topk_weights, topk_ids)",
    "intermediate_cache3=intermediate_cache3",
    "return intermediate_cache3",
}
#: Names of functions that quantize the activations inside the engine's GEMM.
_QUANTIZERS = {
    "scaled_fp8_quant",
    "sglang_per_token_group_quant_fp8",
    "per_token_group_quant_fp8",
    "per_token_quant_int8",
    "sglang_per_token_group_quant_int8",
    "per_token_group_quant_int8",
}
#: Largest number of tokens for which the engine compiles the sum. A compiled sum adds in another order.
_MAX_COMPILED_SUM_TOKENS = 32


class _FusedMoeTorch(takers.OutputTorch):
    """Stand-in for the module ``torch`` inside the fused-MoE function. It does not allocate the expert outputs.

    If the layer offers its dead input, one of two tensors is placed in this memory:

    - the activation's output, if the layer works in place. The layer's output then overwrites the MoE input, so the
      layer's output needs no memory of its own.
    - the layer's output, if the layer does not work in place.
    """

    def empty(self, size: tuple[int, ...], *, device: Any, dtype: Any) -> Any:
        """Replacement for ``torch.empty`` inside the fused-MoE function.

        The result depends on the tensor that the engine allocates:

        - expert outputs, the only tensor with three dimensions: a :class:`DeferredTensor`,
        - activation's output of a layer that works in place: the offered dead input, if the tensor fits into it,
        - any other tensor: a new tensor, as usual.
        """
        if len(size) == 3:
            return DeferredTensor(size, device, dtype)
        call = deferred_tensor.current_call.get()
        if call.inplace and size[1] == call.gate_columns // 2:
            memory = channel.take_scratch(size, dtype, device)
            if memory is not None:
                call.dead_input_address = memory.data_ptr()
                return memory
        return self._torch.empty(size, device=device, dtype=dtype)


# --- Running it in columns -------------------------------------------------------------------------------------------


def can_run_in_columns(tokens: int, top_k: int, hooks: Any, defer_sum: Any) -> bool:
    """Return whether a call with large expert outputs may run in column slices.

    These calls run without slices:

    - calls with LoRA hooks (``hooks``), because the hooks need the whole expert outputs,
    - calls with ``defer_sum``, because the caller sums the expert outputs later,
    - calls with a top-k of 1 or 2, because the engine does not call its sum,
    - calls with at most 32 tokens, because the engine's compiled sum adds in another order.
    """
    return tokens > _MAX_COMPILED_SUM_TOKENS and top_k > 2 and not hooks and not defer_sum


def estimate_local_row_fraction(filter_expert: Any) -> float:
    """Return the fraction of the expert outputs' rows whose expert is on this rank, for evenly loaded experts.

    :param filter_expert: whether the call skips experts of other ranks (expert parallelism).
    :returns: 1 without expert parallelism. The result is 0 if the number of ranks is unknown. The layer's time is then
        estimated without GEMM operations, so slices seem to cost a larger share of it than they do.
    """
    if not filter_expert:
        return 1.0
    try:
        from sglang.srt.distributed import get_moe_expert_parallel_world_size

        return 1.0 / float(get_moe_expert_parallel_world_size())
    except Exception:  # the engine has no such function, or expert parallelism is not set up
        return 0.0


def install(patcher: Patcher, module: ModuleType, kernels: ModuleType) -> None:
    """Wrap the engine's fused-MoE function, so that calls with large expert outputs run in column slices.

    :param module: the engine's module with the fused-MoE function.
    :param kernels: the engine's module with the GEMM that the function calls.
    """
    original: FunctionType = engine.require_unpatched(module, FUSED_MOE)
    symmetric_memory = runners.probe_symmetric_memory()
    by_columns = _build_fused_moe_in_columns(original, patcher, module, kernels, symmetric_memory)
    max_bytes = column_slices.read_max_bytes()
    names = engine.list_parameters(original)
    config, down_config = names.index("config"), names.index("down_config")

    def run_in_columns(*args: Any, **kwargs: Any) -> Any:
        hidden_states, w1, w2 = args[:3]
        positional = args + tuple(kwargs[name] for name in names[len(args) : down_config + 1])
        inplace, row_fraction = kwargs["inplace"], estimate_local_row_fraction(kwargs.get("filter_expert"))
        gate_columns, weight_bytes = w1.shape[1], w1.nbytes + w2.nbytes
        uses_staging = inplace and streams.has_concurrent_reader
        # If the expert outputs are not cut, the engine's own function runs, except in three cases:
        # - A dead input is offered. by_columns places the activation's output or the layer's output there.
        # - The caller sets no_combine. by_columns does not allocate a tensor that the engine never writes.
        # - The layer's output must be in symmetric memory. by_columns allocates it there.
        needs_pool = not inplace and symmetric_memory.is_enabled
        if channel.get_offered_buffer() is None and not kwargs.get("no_combine") and not needs_pool:
            tokens, top_k = positional[4].shape
            sizes = (tokens, top_k, w2.shape[1], w2.shape[2], hidden_states.itemsize)
            layer = LayerShape(*sizes, gate_columns, weight_bytes, row_fraction)
            tiles = positional[down_config] or positional[config]
            gemm = TritonGemm(tiles, deferred_tensor.quantizes(kwargs), uses_staging=uses_staging)
            if column_slices.choose_slice_width(layer, gemm, max_bytes) == layer.hidden:
                return original(*args, **kwargs)
        # The kernels still read the MoE input while they write the dead input, so they must not be the same memory.
        channel.withdraw_if_shared(hidden_states)
        call = FusedMoeCall(gate_columns, weight_bytes, row_fraction, inplace, uses_staging, max_bytes)
        token = deferred_tensor.current_call.set(call)
        try:
            output = by_columns(*args, **kwargs)
        finally:
            deferred_tensor.current_call.reset(token)
        return output.tensor if isinstance(output, DeferredTensor) else output

    def route(hidden_states: Any, topk_ids: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
        tokens, top_k = topk_ids.shape
        if top_k * hidden_states.nbytes < column_slices.compute_min_tensor_bytes(max_bytes):
            return None
        may_run = can_run_in_columns(tokens, top_k, options.get("hooks"), options.get("defer_sum"))
        return run_in_columns if may_run else None

    # This route comes first, so that a call whose output goes into the dead input runs in columns, too.
    fused_moe_call.add_route(patcher, route, first=True)
    if has_unwritten_sum(original):
        fused_moe_call.add_route(patcher, make_top_1_route(module), first=True)


def has_unwritten_sum(fused_moe: FunctionType) -> bool:
    """Return whether the engine's fused-MoE function sums a tensor that it never writes.

    This fault exists up to 0.5.17 at least, if the top-k is 1 and the routed scaling factor is not 1. The GEMM then
    writes the correct output, and the sum overwrites it with the sum of uninitialized memory.
    """
    return "_use_intermediate = not no_combine and (topk != 1 or hooks)\n" in engine.read_source(fused_moe)


def make_top_1_route(module: ModuleType) -> fused_moe_call.Route:
    """Return a route (:data:`.fused_moe_call.Route`) that corrects calls with a top-k of 1.

    Some releases compute these calls wrongly (:func:`has_unwritten_sum`). The route calls the fused-MoE function with a
    routed scaling factor of 1, and then multiplies the output by the real factor.
    """
    following = getattr(module, FUSED_MOE)

    def scale_afterwards(*args: Any, **kwargs: Any) -> Any:
        factor = kwargs["routed_scaling_factor"]
        return following(*args, **{**kwargs, "routed_scaling_factor": 1.0}).mul_(factor)

    def route(hidden_states: Any, topk_ids: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
        if topk_ids.shape[1] != 1 or options.get("routed_scaling_factor") in (None, 1.0):
            return None
        return None if options.get("no_combine") or options.get("hooks") else scale_afterwards

    return route


def _build_fused_moe_in_columns(
    original: FunctionType,
    patcher: Patcher,
    module: ModuleType,
    kernels: ModuleType,
    symmetric_memory: runners.SymmetricMemory,
) -> FunctionType:
    """Return a copy of the engine's fused-MoE function that runs the second GEMM and the sum in column slices.

    In the copy, the globals for ``torch``, the GEMM and the sum are replaced.
    """
    import torch

    from sglang_moe_patches.changes.moe_workspace.kernels.moe_sum import moe_sum

    def make_quantizer(name: str) -> Callable[..., Any]:
        def quantize(activations: Any, *args: Any, **kwargs: Any) -> Any:
            engine_quantize = getattr(kernels, name)
            if isinstance(activations, QuantizedOnce):
                return activations.quantize(engine_quantize, args, kwargs)
            return engine_quantize(activations, *args, **kwargs)

        return quantize

    gemm = getattr(kernels, INVOKE)
    quantizers = {name: make_quantizer(name) for name in sorted(_QUANTIZERS & set(gemm.__code__.co_names))}
    invoke_quantized = replace_globals(gemm, kernels, patcher, **quantizers)

    def invoke(activations: Any, weights: Any, bias: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(output, DeferredTensor):
            activations_scale, weights_scale, zero_points, *rest = args
            scales = (activations_scale, weights_scale, zero_points)
            output.gemm = SecondGemm(activations, weights, bias, *scales, tuple(rest), kwargs)
        else:
            getattr(module, INVOKE)(activations, weights, bias, output, *args, **kwargs)

    def sum_slices(expert_outputs: Any, output: Any, scale: float) -> None:
        whole_sum = getattr(module, SUM)
        if isinstance(expert_outputs, DeferredTensor):
            deferred_tensor.run_gemm_and_sum(
                expert_outputs,
                output,
                scale,
                invoke=getattr(module, INVOKE),
                invoke_quantized=invoke_quantized,
                whole_sum=whole_sum,
                slice_sum=moe_sum,
            )
        else:
            whole_sum(expert_outputs, output, scale)

    stand_ins = {"torch": _FusedMoeTorch(torch, symmetric_memory), INVOKE: invoke}
    if SUM in original.__code__.co_names:
        return replace_globals(original, module, patcher, **stand_ins, **{SUM: sum_slices})
    combine = replace_globals(getattr(module, COMBINE), module, patcher, **{SUM: sum_slices})
    return replace_globals(original, module, patcher, **stand_ins, **{COMBINE: combine})


# --- Probing the engine ----------------------------------------------------------------------------------------------


def _require_globals(function: Any, *names: str) -> None:
    """Check that a function uses each of ``names`` only as a global of its module."""
    for name in names:
        require(
            name in function.__code__.co_names and engine.is_only_a_global(function, name),
            f"{function.__name__} uses {name} for something else than its module's global",
        )


def plan() -> Plan:
    """Return the plan for the Triton runner: how to install the column slices, or why they are not needed.

    :raises engine.Unsupported: the code of the engine's fused-MoE function, GEMM or sum is not as expected.
    """
    if getattr(engine.import_module(fused_moe_call.MODULE), "_is_hip", False):
        return Plan.not_needed("AMD's sums over the top-k have not been tried")
    module, fused_moe = fused_moe_call.probe()
    require(engine.has_module("triton"), "Triton is not installed")
    gemm = engine.require_unpatched(module, INVOKE)
    kernels = engine.import_module(gemm.__module__)
    require(
        engine.require_unpatched(kernels, INVOKE) is gemm,
        f"{module.__name__} has another {INVOKE} than {gemm.__module__}",
    )
    engine.require_parameters(gemm, deferred_tensor.GEMM_PARAMETERS)
    config = deferred_tensor.CONFIG
    require(engine.list_parameters(gemm)[config] == "config", f"parameter {config} of {INVOKE} is not its config")
    quantizers = {name for name in gemm.__code__.co_names if "quant" in name}
    require(
        quantizers <= _QUANTIZERS,
        f"{INVOKE} quantizes with unknown functions: {', '.join(sorted(quantizers - _QUANTIZERS))}",
    )
    _require_globals(gemm, *quantizers)

    summing = fused_moe if SUM in fused_moe.__code__.co_names else engine.require_unpatched(module, COMBINE)
    _require_globals(fused_moe, "torch", INVOKE, *([] if summing is fused_moe else [COMBINE]))
    _require_globals(summing, SUM)
    require(
        {"config", "down_config"} <= set(engine.list_parameters(fused_moe)),
        f"{FUSED_MOE} takes no config, or no down_config",
    )
    uses = engine.find_uses(fused_moe, "intermediate_cache3") | engine.find_uses(summing, "intermediate_cache3")
    unknown = ", ".join(sorted(uses - _EXPECTED_USES))
    require(not unknown, f"{FUSED_MOE} uses intermediate_cache3 in an unexpected way: {unknown}")
    allocated = [ast.unparse(call.args[0]) for call in engine.find_calls(fused_moe, "torch.empty")]
    three_dimensional = [size for size in allocated if size.count(",") > 1]
    require(
        "(total_tokens, N // 2)" in allocated
        and allocated.count("(num_tokens, topk, w2.shape[1])") == 2
        and len(set(three_dimensional)) == 1,
        f"{FUSED_MOE} allocates tensors of unexpected sizes: {', '.join(allocated)}",
    )
    runners.probe_symmetric_memory()
    return Plan.applied(functools.partial(install, module=module, kernels=kernels))
