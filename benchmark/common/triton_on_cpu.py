"""Run the engine's Triton MoE runner without a GPU. Only its kernels are replaced."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def triton_runner(monkeypatch: Any) -> None:
    """Make the engine's Triton runner work on the CPU: replace its GEMM and its CUDA functions by plain PyTorch.

    Sums are in float64, so that a slice of columns has the same bits as the whole tensor.

    :param monkeypatch: pytest's ``MonkeyPatch``, which undoes the replacement.
    """
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum
    from sglang_moe_reference.environment import as_its_own

    def gemm(*arguments: Any, **kwargs: Any) -> None:
        rows, weights, _, output, _, _, _, topk_weights, topk_ids, _, _, _, weighted, top_k = arguments[:14]
        rows = rows.repeat_interleave(top_k, 0) if top_k > 1 else rows[: topk_ids.numel()]
        into = output.view(-1, output.shape[-1])
        for expert in range(len(weights)):
            chosen = topk_ids.view(-1) == expert
            product = rows[chosen].double() @ weights[expert].double().T
            if weighted:
                product *= topk_weights.view(-1, 1)[chosen]
            into[chosen] = product.to(into.dtype)

    def silu_and_mul(x: Any, out: Any, **how: Any) -> None:
        gate, up = x.double().chunk(2, dim=-1)
        out.copy_((torch.nn.functional.silu(gate) * up).to(out.dtype))

    def run(self: Any, layer: Any, dispatch_output: Any, *rest: Any) -> Any:
        weights = TritonMoeQuantInfo(w13_weight=layer.w13_weight, w2_weight=layer.w2_weight)
        # Replace these functions only during the call, because changes check the engine's original functions.
        with monkeypatch.context() as patch:
            patch.setattr(fused_moe, "invoke_fused_moe_kernel", gemm)
            patch.setattr(fused_moe, "moe_sum_reduce", moe_sum.moe_sum_torch, raising=False)
            return self.runner.run(dispatch_output, weights)

    def prepare(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}, *tiles)

    def fused_experts(
        hidden_states: Any, w1: Any, w2: Any, topk_output: Any, moe_runner_config: Any, **kwargs: Any
    ) -> Any:
        """Call the engine's Python code directly, because its PyTorch operators are registered only for GPUs."""
        return fused_moe.fused_experts_impl(
            *(hidden_states, w1, w2, topk_output[0], topk_output[1]),
            inplace=moe_runner_config.inplace,
            routed_scaling_factor=moe_runner_config.routed_scaling_factor,
            filter_expert=False,
        )

    # prepare() must return as many values as this release unpacks from its ``_prepare_fused_moe_run``: the tile sizes
    # of the first GEMM, the configuration of the second GEMM, and flags for TMA.
    unpacked = inspect.getsource(fused_moe.fused_experts_impl).split(") = _prepare_fused_moe_run(")[0].rsplit("(", 1)[1]
    names = [name.strip() for name in unpacked.split(",") if name.strip()]
    tiles = [False if "tma" in name else None for name in names[1:]]
    monkeypatch.setattr(fused_moe, "fused_experts", fused_experts)
    monkeypatch.setattr(fused_moe, "_is_cuda", True)
    monkeypatch.setattr(fused_moe, "_prepare_fused_moe_run", prepare)
    monkeypatch.setattr(fused_moe, "silu_and_mul", silu_and_mul, raising=False)
    monkeypatch.setattr(moe_sum, "moe_sum", moe_sum.moe_sum_torch)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "apply", as_its_own(UnquantizedFusedMoEMethod, run))
