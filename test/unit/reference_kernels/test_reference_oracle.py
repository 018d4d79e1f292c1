"""Compare the stand-ins for FlashInfer's MoE kernels with FlashInfer's own PyTorch references of these kernels.

The references read weights and block scales in a checkpoint's layout. The stand-ins read the same weights after the
engine's own preparation. The tests therefore compare the layout, the order of the block scales, the order of gate and
up, and the routing.

The references do not quantize the output of the activation function. They also do not multiply the result of each GEMM
by a number per expert (*output scale*). The tests therefore disable both steps in the stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from packaging.version import Version
from sglang_moe_reference import flashinfer_kernels as kernels
from sglang_moe_reference import nvfp4
from test_reference_kernels import Layer, interleave_on_the_cpu  # noqa: F401 - interleave_on_the_cpu is a fixture

flashinfer = pytest.importorskip("flashinfer")
WHY = "this FlashInfer ships no PyTorch references of its kernels (from 0.6.11, SGLang 0.5.12, on it does)"
templates = pytest.importorskip("flashinfer.trace.templates.moe", reason=WHY)
quantization = pytest.importorskip("flashinfer.trace.templates.quantize", reason=WHY)

pytestmark = pytest.mark.every_release


class PlainLayer(Layer):
    """Layer that FlashInfer's references can compute. The references multiply by block scales, but not by output scales
    (a number per expert). So all output scales of this layer are 1. Its block scales are so small that the largest
    weights are about 1."""

    multiplier_of_tokens: ClassVar = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for scale in self.stored[1::2]:
            scale.copy_(scale.float() / 2048)
        scales = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
        self.prepared = self.prepared_weights() | dict.fromkeys(scales, torch.ones(self.experts))

    def call(self, tokens: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
        """Return the stand-in's output, without quantizing the output of the activation function."""
        decode = nvfp4.decode
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvfp4, "quantize", lambda x, scale: (x, None))
            patch.setattr(nvfp4, "decode", lambda x, scale: x if scale is None else decode(x, scale))
            return super().call(tokens, **arguments)


def checkpoint(layer: Layer, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return arguments for FlashInfer's reference functions: the batch, the layer's weights and scales as a checkpoint
    stores them, and ``None`` for the biases."""
    names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
    stored = dict(zip(names, layer.stored, strict=True))
    return {**tokens, **stored, "gemm1_bias": None, "gemm2_bias": None}


def assert_same(got: torch.Tensor, expected: torch.Tensor, top_k: int) -> None:
    """Check that results are equal except for float32 sums and bfloat16 rounding.

    The stand-ins round the result and the routing weights to bfloat16. The references round only the result.
    """
    assert got.dtype == expected.dtype == torch.bfloat16
    got, expected = got.double(), expected.double()
    size = expected.abs().max().item()
    assert size > 0.05
    torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=top_k * 2.0**-9 * size)


ROUTINGS: list[tuple[str, int, dict[str, Any]]] = [
    ("default", 0, {}),
    ("renormalize", 1, {}),
    ("ds", 2, {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    ("ds", 2, {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
    ("llama4", 3, {"top_k": 1}),
    ("renormalize_naive", 4, {}),
]


@pytest.mark.parametrize(("name", "method", "options"), ROUTINGS)
def test_every_routing_method_equals_the_reference(name: str, method: int, options: dict[str, Any]) -> None:
    reference: Callable[..., torch.Tensor] = getattr(templates, f"_trtllm_fp4_block_scale_moe_{name}_routing_reference")
    layer = PlainLayer(experts=8)
    tokens = layer.tokens(40)
    generator = torch.Generator().manual_seed(3)
    options = {"top_k": 3, "routed_scaling_factor": None, **options}
    options["routing_logits"] = torch.randn(40, 8, generator=generator) * 2
    options["routing_bias"] = torch.randn(8, generator=generator).bfloat16() if name == "ds" else None
    expected = reference(**checkpoint(layer, tokens), **options, local_expert_offset=0)
    assert_same(layer.call(tokens, **options, routing_method_type=method), expected, options["top_k"])


@pytest.mark.parametrize("multiplier", [None, 1.0, 300.0])
def test_quantization_equals_the_reference_except_for_ties(multiplier: float | None) -> None:
    if multiplier not in (None, 1.0) and Version(flashinfer.__version__) < Version("0.6.12"):
        pytest.skip("the reference of FlashInfer before 0.6.12 (SGLang 0.5.13) leaves the multiplier out of the values")
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 16:32] = 0
    scale = None if multiplier is None else torch.tensor([multiplier])
    packed, scales = kernels.fp4_quantize(x, scale, is_sf_swizzled_layout=False)
    expected, expected_scales = quantization._fp4_quantize_reference(x, scale)
    # Block scales do not saturate, because no value is large enough. With saturated scales, the reference overflows.
    assert expected_scales.float().max() < nvfp4.E4M3_MAX
    assert torch.equal(scales.view(torch.float8_e4m3fn).float(), expected_scales.float())
    different = packed != expected
    # If a value lies halfway between two codes, the reference takes the smaller code, and the kernel the even code.
    values = x.float() * (multiplier or 1.0) / expected_scales.float().repeat_interleave(16, -1).clamp(min=2**-9)
    halfway = torch.isin(values.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert not (different & ~halfway.unflatten(-1, (-1, 2)).any(-1)).any()
    assert different.float().mean() < 0.05
