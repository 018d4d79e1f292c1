"""One NVFP4 MoE layer without a model, to test the engine's ``create_weights`` and
``process_weights_after_loading``."""

from __future__ import annotations

import types

import torch

#: Names of the tensors that the engine's shuffle returns, in order.
RESULTS = ("gemm1 weights", "gemm1 scales", "gemm2 weights", "gemm2 scales")


def random_layer(
    experts, hidden, intermediate, is_gated=True, seed=0, *, scale_dtype=torch.float8_e4m3fn, device="cpu"
):
    """Return random weights and block scales of both GEMMs, in the order of the engine's arguments. All random bytes
    are valid weights."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = (2 if is_gated else 1) * intermediate

    def randint(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)

    return (
        randint(experts, rows, hidden // 2),
        randint(experts, hidden, intermediate // 2),
        randint(experts, rows, hidden // 16).view(scale_dtype),
        randint(experts, hidden, intermediate // 16).view(scale_dtype),
    )


def differences(got, expected):
    """Return the names of the results that differ in shape, dtype or any byte."""
    return [
        name
        for name, a, b in zip(RESULTS, got, expected, strict=True)
        if a.shape != b.shape
        or a.dtype != b.dtype
        or not torch.equal(a.view(torch.uint8).cpu(), b.view(torch.uint8).cpu())
    ]


class Layer(torch.nn.Module):
    """Stand-in for a ``FusedMoE`` layer, with the attributes that the engine's NVFP4 method reads."""

    def __init__(self, experts, is_gated):
        super().__init__()
        self.num_local_experts = self.num_experts = experts
        self.moe_ep_size, self.moe_ep_rank = 1, 0
        self.moe_runner_config = types.SimpleNamespace(is_gated=is_gated)
        self.dispatcher = types.SimpleNamespace(set_quant_config=lambda config: None)


def nvfp4_method(modelopt, trtllm):
    method = object.__new__(modelopt.ModelOptNvFp4FusedMoEMethod)  # its __init__ requires a Blackwell GPU
    method.quant_config = types.SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)
    method.enable_flashinfer_trtllm_moe = trtllm
    return method


def create(modelopt, monkeypatch, experts=3, hidden=256, intermediate=128, is_gated=True, trtllm=True):
    if not torch.cuda.is_available():  # the engine's swizzle moves tensors to the GPU
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)
    layer = Layer(experts, is_gated)
    method = nvfp4_method(modelopt, trtllm)
    method.create_weights(layer, experts, hidden, intermediate, torch.bfloat16, weight_loader=lambda *a, **k: None)
    return layer, method


def load(layer, seed):
    """Write raw weights into the layer's parameters, as a weight loader does."""
    generator = torch.Generator(device=layer.w13_weight.device).manual_seed(seed)
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
        data = getattr(layer, name).data.view(torch.uint8)
        data.copy_(torch.randint(0, 120, data.shape, dtype=torch.uint8, generator=generator, device=data.device))
    for name in ("w13_weight_scale_2", "w2_weight_scale_2", "w13_input_scale", "w2_input_scale"):
        getattr(layer, name).data.fill_(0.5)


def choose_trtllm(monkeypatch, modelopt):
    """Make the engine choose the TRT-LLM runner."""
    backend = types.SimpleNamespace(
        is_flashinfer_trtllm=lambda: True,
        is_flashinfer_cutlass=lambda: False,
        is_flashinfer_cutedsl=lambda: False,
    )
    monkeypatch.setattr(modelopt, "get_moe_runner_backend", lambda: backend)
    from sglang.srt.layers import moe

    monkeypatch.setattr(moe, "get_moe_runner_backend", lambda: backend)
    monkeypatch.setattr(modelopt, "should_use_flashinfer_cutlass_moe_fp4_allgather", lambda: False, raising=False)
