"""The project's NVFP4 quantizer against FlashInfer's own, on a GPU that has FP4."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (10, 0):
    pytest.skip(
        "needs compute capability 10.0 (Blackwell): on older GPUs FlashInfer's fp4_quantize runs and returns garbage",
        allow_module_level=True,
    )
flashinfer = pytest.importorskip("flashinfer")

from sglang_moe_patches.reference import flashinfer_kernels, nvfp4  # noqa: E402


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("shape", [(128, 256), (384, 7168), (1, 16), (77, 512)])
def test_the_quantizer_agrees_with_flashinfers(shape, scale):
    x = (torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * scale).bfloat16()
    multiplier = nvfp4.global_scale_for(x)
    ours = flashinfer_kernels.fp4_quantize(x, multiplier, is_sf_swizzled_layout=False)
    theirs = flashinfer.fp4_quantize(x, multiplier.reshape(1), is_sf_swizzled_layout=False)
    assert torch.equal(ours[1], theirs[1].view(torch.uint8).view_as(ours[1]))
    codes = [torch.stack((packed & 15, packed >> 4), -1).int() for packed in (ours[0], theirs[0].view(torch.uint8))]
    apart = (codes[0] - codes[1]).abs()
    # The device divides by an approximate reciprocal: within its error of a tie, either neighbour is right.
    assert apart.max() <= 1
    assert apart.ne(0).float().mean() < 1e-3
