"""Random NVFP4 MoE layers and batches in TRT-LLM's layout, as arguments of FlashInfer's routed kernel."""

from __future__ import annotations

from typing import Any

import torch
from sglang_moe_patches.changes.fp4_weights import shuffle as nvfp4_shuffle
from sglang_moe_reference import flashinfer_kernels, nvfp4


def random_scales(*shape: int, device: str, generator: torch.Generator) -> torch.Tensor:
    """Return random E4M3 block scales between 0.25 and 2. About 5 % of them are zero."""
    scale = 0.25 + 1.75 * torch.rand(*shape, device=device, generator=generator)
    scale[torch.rand(*shape, device=device, generator=generator) < 0.05] = 0
    return scale.to(torch.float8_e4m3fn)


def layer(
    experts: int, hidden: int, intermediate: int, gated: bool = True, device: str = "cuda", seed: int = 0
) -> dict[str, Any]:
    """Return random kernel arguments for a layer: weights, scales and sizes. All random bytes are valid weights,
    because each half of a byte is an E2M1 code."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = (2 if gated else 1) * intermediate

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)

    prepared = nvfp4_shuffle.prepare_static_weights_for_trtllm_fp4_moe(
        codes(experts, rows, hidden // 2),
        codes(experts, hidden, intermediate // 2),
        random_scales(experts, rows, hidden // 16, device=device, generator=generator),
        random_scales(experts, hidden, intermediate // 16, device=device, generator=generator),
        hidden,
        intermediate,
        experts,
        is_gated=gated,
    )
    spread = 0.5 + torch.rand(experts, device=device, generator=generator)
    return {
        "gemm1_weights": prepared[0],
        "gemm1_weights_scale": prepared[1],
        "gemm2_weights": prepared[2],
        "gemm2_weights_scale": prepared[3],
        # A random dot product of length n is about 9 * sqrt(n). With these scales the activation's argument is about 1,
        # and the intermediate tensor has values of a few hundred.
        "output1_scale_gate_scalar": spread / (9 * hidden**0.5),
        "output1_scale_scalar": 100 * spread.flip(0) / (9 * hidden**0.5),
        "output2_scale_scalar": spread / (300 * intermediate**0.5),
        "num_experts": experts,
        "intermediate_size": intermediate,
        "local_expert_offset": 0,
        "local_num_experts": experts,
        "activation_type": flashinfer_kernels.ACTIVATION_SWIGLU if gated else flashinfer_kernels.ACTIVATION_RELU2,
    }


def batch(
    tokens: int, experts: int, hidden: int, top_k: int, device: str = "cuda", seed: int = 1
) -> dict[str, torch.Tensor | int]:
    """Return random kernel arguments for a batch: NVFP4 activations and the experts of each token. ``topk_ids`` packs
    an expert id and its bfloat16 weight into one int32."""
    generator = torch.Generator(device).manual_seed(seed)
    packed, scale = nvfp4.quantize(torch.randn(tokens, hidden, device=device, generator=generator), 1.0)
    # The experts of a token are distinct, and the number of tokens differs very much between experts.
    favour = torch.rand(tokens, experts, device=device, generator=generator) ** torch.linspace(0.2, 5, experts).to(
        device
    )
    ids = favour.topk(top_k, dim=1).indices
    weights = torch.rand(tokens, top_k, device=device, generator=generator).bfloat16()
    return {
        "topk_ids": (ids.int() << 16) | weights.view(torch.int16).int(),
        "hidden_states": packed,
        "hidden_states_scale": scale,
        "top_k": top_k,
    }


def call_kernel(**arguments: Any) -> list[torch.Tensor]:
    """Call ``trtllm_fp4_block_scale_routed_moe`` with ``None`` for all optional arguments that are not passed."""
    nothing = ["routing_bias", "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias"]
    nothing += ["n_group", "topk_group", "routed_scaling_factor"]
    found: list[torch.Tensor] = flashinfer_kernels.trtllm_fp4_block_scale_routed_moe(
        **dict.fromkeys(nothing), **arguments
    )
    return found


def run_routed(**arguments: Any) -> torch.Tensor:
    return call_kernel(**arguments)[0]
