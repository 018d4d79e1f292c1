"""What tests do with the engine's own model runner in their process, and with its preparation of forwards."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from common.in_process import InProcess
from sglang_moe_patches.regression import observe

__all__ = ["InProcess", "Kernels", "graph_arguments", "padded_tokens", "triton_runner"]


class Kernels:
    """Watches FlashInfer's MoE kernels: poisons their outputs, counts allocations, runs a check at each call."""

    def __init__(self, monkeypatch, tmp_path):
        import flashinfer.fused_moe

        self.observer = observe.Observer(str(tmp_path), [])
        self.at_entry = lambda: None
        self.calls = []
        self.marked = []
        for name in observe.KERNELS:
            monkeypatch.setattr(flashinfer.fused_moe, name, self._watch(getattr(flashinfer.fused_moe, name)))

    def _watch(self, kernel):
        @functools.wraps(kernel)
        def run(*args, **kwargs):
            self.observer.kernel_starts(kwargs["output"])
            self.calls.append(kwargs["output"].untyped_storage().data_ptr())
            self.marked.append(hasattr(kwargs["output"], "_sglang_needs_allreduce_fusion"))
            self.at_entry()
            kwargs["output"].fill_(float("nan"))  # whoever still reads what was there before will show it
            return kernel(*args, **kwargs)

        return run

    def buffers_of(self, forward):
        """(MoE kernel calls, distinct output allocations) of one forward."""
        self.observer.forward_starts(0, cuda=False)
        forward()
        return self.observer.kernels, self.observer.buffers


def graph_arguments(requests: int, piecewise_tokens: int | None = None) -> dict[str, Any]:
    """Server arguments that capture decodes of up to so many requests and, unless ``None``, prefills of so many tokens,
    in the words of the installed release."""
    from sglang.srt.server_args import ServerArgs

    if "cuda_graph_config" not in ServerArgs.__dataclass_fields__:
        return {
            "cuda_graph_max_bs": requests,
            "disable_piecewise_cuda_graph": piecewise_tokens is None,
            "piecewise_cuda_graph_max_tokens": piecewise_tokens,
        }
    from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig

    prefill = Backend.DISABLED if piecewise_tokens is None else Backend.TC_PIECEWISE
    return {
        "cuda_graph_config": CudaGraphConfig(
            decode=PhaseConfig(backend=Backend.FULL, max_bs=requests),
            prefill=PhaseConfig(backend=prefill, max_bs=piecewise_tokens),
        )
    }


def padded_tokens(monkeypatch: Any, counts: list[int], attn_tp: int, extend: bool) -> list[int]:
    """Tokens of each data-parallel rank as the engine's own preparation of a forward pads them.

    :param counts: tokens that each rank's scheduler brings.
    :param attn_tp: tensor-parallel ranks within a data-parallel one.
    """
    from sglang.srt.batch_overlap import two_batch_overlap
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.utils import cp_utils
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    batch = SimpleNamespace(
        global_num_tokens_cpu=list(counts),
        global_num_tokens_for_logprob_cpu=list(counts),
        global_num_tokens_gpu=torch.zeros(len(counts), dtype=torch.int64),
        is_extend_in_batch=extend,
        batch_size=counts[0],
        forward_mode=ForwardMode.EXTEND if extend else ForwardMode.DECODE,
        spec_info=None,
        tbo_children=None,
        _pad_inputs_to_size=lambda *args: None,
    )
    tensor = torch.tensor
    with monkeypatch.context() as patch:
        patch.setattr(two_batch_overlap.TboForwardBatchPreparer, "prepare", lambda **kwargs: None)
        for name in ("get_attention_tp_size", "get_attention_dp_rank"):
            patch.setattr(forward_batch_info, name, lambda n=name: attn_tp if "tp" in n else 0)
        # Newer releases ask for the ranks of context parallelism through another module.
        for module in (forward_batch_info, cp_utils):
            if hasattr(module, "get_attention_cp_size"):
                patch.setattr(module, "get_attention_cp_size", lambda: 1)
        patch.setattr(dp_attention, "get_attention_dp_size", lambda: len(counts))
        # Pinned memory needs a GPU.
        patch.setattr(torch, "tensor", lambda data, pin_memory=False, **kwargs: tensor(data, **kwargs))
        ForwardBatch.prepare_mlp_sync_batch(batch, SimpleNamespace(is_draft_worker=False))
    return list(dp_attention.get_dp_global_num_tokens())


def triton_runner(monkeypatch: Any) -> None:
    """The engine's Triton runner on the CPU: its own sequence, with its GEMM and its CUDA functions in plain PyTorch.

    Sums are in float64, so that a slice of columns has the bits of the whole.
    """
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang_moe_patches.kernels import moe_sum

    def gemm(*arguments: Any, **kwargs: Any) -> None:
        rows, weights, _, output, _, _, _, topk_weights, topk_ids, _, _, _, weighted, top_k = arguments[:14]
        rows = rows.repeat_interleave(top_k, 0) if top_k > 1 else rows[: topk_ids.numel()]
        into = output.view(-1, output.shape[-1])
        for expert in range(len(weights)):
            mine = topk_ids.view(-1) == expert
            product = rows[mine].double() @ weights[expert].double().T
            if weighted:
                product *= topk_weights.view(-1, 1)[mine]
            into[mine] = product.to(into.dtype)

    def silu_and_mul(x: Any, out: Any, **how: Any) -> None:
        gate, up = x.double().chunk(2, dim=-1)
        out.copy_((torch.nn.functional.silu(gate) * up).to(out.dtype))

    def run(self: Any, layer: Any, dispatch_output: Any, *rest: Any) -> Any:
        weights = TritonMoeQuantInfo(w13_weight=layer.w13_weight, w2_weight=layer.w2_weight)
        with monkeypatch.context() as patch:  # not before: changes look at what is there
            patch.setattr(fused_moe, "invoke_fused_moe_kernel", gemm)
            patch.setattr(fused_moe, "moe_sum_reduce", moe_sum.moe_sum_torch, raising=False)
            return self.runner.run(dispatch_output, weights)

    def prepare(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}, *tiles)

    def fused_experts(
        hidden_states: Any, w1: Any, w2: Any, topk_output: Any, moe_runner_config: Any, **kwargs: Any
    ) -> Any:
        """Without the operators in between, which are registered for GPUs."""
        return fused_moe.fused_experts_impl(
            *(hidden_states, w1, w2, topk_output[0], topk_output[1]),
            inplace=moe_runner_config.inplace,
            routed_scaling_factor=moe_runner_config.routed_scaling_factor,
            filter_expert=False,
        )

    # As many as this release unpacks: the second GEMM's configuration, flags for TMA, and the tiles.
    unpacked = inspect.getsource(fused_moe.fused_experts_impl).split(") = _prepare_fused_moe_run(")[0].rsplit("(", 1)[1]
    names = [name.strip() for name in unpacked.split(",") if name.strip()]
    tiles = [False if "tma" in name else None for name in names[1:]]
    monkeypatch.setattr(fused_moe, "fused_experts", fused_experts)
    monkeypatch.setattr(fused_moe, "_is_cuda", True)
    monkeypatch.setattr(fused_moe, "_prepare_fused_moe_run", prepare)
    monkeypatch.setattr(fused_moe, "silu_and_mul", silu_and_mul, raising=False)
    monkeypatch.setattr(moe_sum, "moe_sum", moe_sum.moe_sum_torch)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "apply", run)
