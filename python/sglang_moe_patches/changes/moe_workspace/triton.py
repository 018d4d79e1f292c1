"""Columns in the Triton runner: the engine's own sequence, with the names through which it allocates and computes."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices, deferred_tensor, streams
from sglang_moe_patches.changes.moe_workspace.deferred_tensor import Call, Promise, Quantized
from sglang_moe_patches.core import engine, runners, triton_sequence
from sglang_moe_patches.core.dead_input import channel, takers
from sglang_moe_patches.core.engine import require
from sglang_moe_patches.core.patch import Patcher, Plan, with_globals

SEQUENCE = triton_sequence.NAME
COMBINE = "moe_combine_topk"
INVOKE = "invoke_fused_moe_kernel"
SUM = "moe_sum_reduce"

#: How the engine's sequence uses the [tokens, top-k, hidden] tensor: all that the promise below knows, and what is
#: reached only where columns are not used (top-k of 2, LoRA hooks, a deferred sum).
_KNOWN_USES = {
    "intermediate_cache3.view",
    "intermediate_cache3.shape",
    "intermediate_cache3[:, 0]",
    "intermediate_cache3[:, 1]",
    "intermediate_cache3 if _use_intermediate else out_hidden_states.unsqueeze(0)",
    "hooks.after_down(intermediate_cache2, intermediate_cache3, topk_weights, topk_ids)",
    "intermediate_cache3=intermediate_cache3",
    "return intermediate_cache3",
}
#: What quantizes the activations inside the engine's GEMM.
_QUANTIZERS = {
    "scaled_fp8_quant",
    "sglang_per_token_group_quant_fp8",
    "per_token_group_quant_fp8",
    "per_token_quant_int8",
    "sglang_per_token_group_quant_int8",
    "per_token_group_quant_int8",
}
#: Sums of at most this many tokens are compiled by the engine, in an order of their own. Their tensors are small.
_COMPILED_SUM_TOKENS = 32


class _Torch(takers.OutputTorch):
    """Stands in for the name ``torch`` inside the sequence: three-dimensional tensors are promised.

    The layer's dead input, where it is on offer, becomes the output of a sequence that is not in place. In one that is,
    the activation's output lies in it: at the runner's peak that is the first GEMM's output and this one.
    """

    def empty(self, size: tuple[int, ...], *, device: Any, dtype: Any) -> Any:
        if len(size) == 3:
            return Promise(size, device, dtype)
        call = deferred_tensor.current_call.get()
        if call.inplace and size[1] == call.gate_columns // 2:
            memory = channel.take_memory(size, dtype, device)
            if memory is not None:
                call.in_dead_input = True
                return memory
        return self._torch.empty(size, device=device, dtype=dtype)


# --- Putting them into the sequence ----------------------------------------------------------------------------------


def install(patcher: Patcher, module: ModuleType, kernels: ModuleType) -> None:
    """Wrap the engine's sequence.

    :param module: the engine's, with the sequence.
    :param kernels: the engine's, with the GEMM.
    """
    import torch

    from sglang_moe_patches.changes.moe_workspace.kernels.moe_sum import moe_sum

    def quantizer(name: str) -> Callable[..., Any]:
        def quantize(activations: Any, *args: Any, **kwargs: Any) -> Any:
            original = getattr(kernels, name)
            if isinstance(activations, Quantized):
                return activations.by(original, args, kwargs)
            return original(activations, *args, **kwargs)

        return quantize

    gemm = getattr(kernels, INVOKE)
    invoke_quantized = with_globals(
        gemm, kernels, patcher, **{name: quantizer(name) for name in sorted(_QUANTIZERS & set(gemm.__code__.co_names))}
    )

    def invoke(activations: Any, weights: Any, bias: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(output, Promise):
            output.gemm = ((activations, weights, bias, None, *args), kwargs)
        else:
            getattr(module, INVOKE)(activations, weights, bias, output, *args, **kwargs)

    def sum_(experts_output: Any, output: Any, scale: float) -> None:
        whole_sum = getattr(module, SUM)
        if isinstance(experts_output, Promise):
            deferred_tensor.gemm_and_sum(
                experts_output,
                output,
                scale,
                invoke=getattr(module, INVOKE),
                invoke_quantized=invoke_quantized,
                whole_sum=whole_sum,
                slice_sum=moe_sum,
            )
        else:
            whole_sum(experts_output, output, scale)

    original: FunctionType = engine.own(module, SEQUENCE)
    symmetric_memory = runners.symmetric_memory()
    stand_ins = {"torch": _Torch(torch, symmetric_memory), INVOKE: invoke}
    if SUM in original.__code__.co_names:
        by_columns = with_globals(original, module, patcher, **stand_ins, **{SUM: sum_})
    else:
        combine = with_globals(getattr(module, COMBINE), module, patcher, **{SUM: sum_})
        by_columns = with_globals(original, module, patcher, **stand_ins, **{COMBINE: combine})

    most_bytes = column_slices.most_bytes()
    places = engine.parameters(original)
    config, down_config = places.index("config"), places.index("down_config")

    def with_columns(*args: Any, **kwargs: Any) -> Any:
        hidden_states, w1, w2 = args[:3]
        given = args + tuple(kwargs[name] for name in places[len(args) : down_config + 1])
        inplace, part = kwargs["inplace"], share(kwargs.get("filter_expert"))
        weight_bytes, copied = w1.nbytes + w2.nbytes, inplace and streams.beside
        # Uncut it saves memory where the dead input holds the activation, or the engine never writes the tensor. The
        # engine's own sequence would make an output outside the pool of symmetric memory.
        makes_pooled_output = not inplace and symmetric_memory.is_on
        if (
            most_bytes is None
            and channel.offered() is None
            and not kwargs.get("no_combine")
            and not makes_pooled_output
        ):
            tokens, top_k = given[4].shape
            moved = 2 * top_k * hidden_states.nbytes
            slices = column_slices.affordable(
                tokens * top_k,
                w2.shape[1],
                w1.shape[1] + w2.shape[2],
                given[down_config] or given[config],
                activation_itemsize=1 if deferred_tensor.quantizes(kwargs) else 2,
                weight_bytes=weight_bytes,
                moved_bytes=moved,
                share=part,
                copied_bytes=2 * hidden_states.nbytes if copied else 0,
            )
            if slices < 2:
                return original(*args, **kwargs)
        channel.withhold_if_shared(hidden_states)
        call = Call(w1.shape[1], weight_bytes, share=part, inplace=inplace, copied=copied, most_bytes=most_bytes)
        token = deferred_tensor.current_call.set(call)
        try:
            output = by_columns(*args, **kwargs)
        finally:
            deferred_tensor.current_call.reset(token)
        return output.made if isinstance(output, Promise) else output

    def route(hidden_states: Any, topk_ids: Any, how: dict[str, Any]) -> Callable[..., Any] | None:
        tokens, top_k = topk_ids.shape
        if top_k * hidden_states.nbytes < column_slices.smallest_tensor(most_bytes):
            return None
        return with_columns if acts(tokens, top_k, how.get("hooks"), how.get("defer_sum")) else None

    # First: where the output goes into the dead input, it does so in columns, too.
    triton_sequence.add(patcher, route, first=True)


def share(filter_expert: Any) -> float:
    """Of the rows, those whose expert is on this rank, if all experts have as many."""
    if not filter_expert:
        return 1.0
    try:
        from sglang.srt.distributed import get_moe_expert_parallel_world_size

        return 1.0 / float(get_moe_expert_parallel_world_size())
    except Exception:  # where it is elsewhere, or not set up: then the weights are what counts
        return 0.0


def acts(tokens: int, top_k: int, hooks: Any, defer_sum: Any) -> bool:
    """Whether a sequence with a large tensor may run in columns.

    LoRA's hooks and whoever sums later read the tensor. A top-k of 1 or 2 has no sum, or a plain addition.
    """
    return tokens > _COMPILED_SUM_TOKENS and top_k > 2 and not hooks and not defer_sum


# --- Looking ---------------------------------------------------------------------------------------------------------


def _require_globals(function: Any, *names: str) -> None:
    for name in names:
        require(
            name in function.__code__.co_names and engine.only_a_global(function, name),
            f"in {function.__name__}, {name} is not a global of its module and nothing else",
        )


def plan() -> Plan:
    """Look at the sequence, its GEMM and its sum."""
    if getattr(engine.module(triton_sequence.MODULE), "_is_hip", False):
        return Plan.not_needed("AMD's sums over the top-k have not been tried")
    module, sequence = triton_sequence.look()
    require(engine.has_module("triton"), "there is no Triton")
    gemm = engine.own(module, INVOKE)
    kernels = engine.module(gemm.__module__)
    require(engine.own(kernels, INVOKE) is gemm, f"{INVOKE} is not what {gemm.__module__} has")
    engine.require_parameters(gemm, deferred_tensor.GEMM_PARAMETERS)
    require(
        engine.parameters(gemm)[deferred_tensor.CONFIG] == "config",
        f"parameter {deferred_tensor.CONFIG} of {INVOKE} is not its config",
    )
    quantizers = {name for name in gemm.__code__.co_names if "quant" in name}
    require(quantizers <= _QUANTIZERS, f"{INVOKE} quantizes by {', '.join(sorted(quantizers - _QUANTIZERS))}")
    _require_globals(gemm, *quantizers)

    summing = sequence if SUM in sequence.__code__.co_names else engine.own(module, COMBINE)
    _require_globals(sequence, "torch", INVOKE, *([] if summing is sequence else [COMBINE]))
    _require_globals(summing, SUM)
    require(
        {"config", "down_config"} <= set(engine.parameters(sequence)), f"{SEQUENCE} takes no config, or no down_config"
    )
    uses = engine.uses(sequence, "intermediate_cache3") | engine.uses(summing, "intermediate_cache3")
    require(uses <= _KNOWN_USES, f"{SEQUENCE} has another use for its tensor: {', '.join(sorted(uses - _KNOWN_USES))}")
    allocated = [ast.unparse(call.args[0]) for call in engine.calls(sequence, "torch.empty")]
    require("(total_tokens, N // 2)" in allocated, f"{SEQUENCE} allocates {', '.join(allocated)}")
    promised = [size for size in allocated if size == "(num_tokens, topk, w2.shape[1])"]
    require(
        len(promised) == 2 and len({size for size in allocated if size.count(",") > 1}) == 1,
        f"{SEQUENCE} allocates {', '.join(allocated)}",
    )
    runners.symmetric_memory()
    return Plan.applied(functools.partial(install, module=module, kernels=kernels))
