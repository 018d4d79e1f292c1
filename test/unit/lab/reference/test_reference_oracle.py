"""A second opinion: FlashInfer's own PyTorch references of its kernels, written by nobody here, against the stand-ins.

They read weights and block scales as a checkpoint has them, and the stand-ins what the engine's own preparation makes
of these: so layout, order of the block scales, which half is the gate, and the routing are compared. They do not
quantize the intermediate, and know no output scales: both are made to have no effect here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from sglang_moe_patches.lab.reference import flashinfer_kernels as kernels
from sglang_moe_patches.lab.reference import nvfp4
from test_reference_kernels import (
    Layer,
    engine_prepare,
    interleave_on_the_cpu,  # noqa: F401 - a fixture
    pack,
    routing,
)

flashinfer = pytest.importorskip("flashinfer")
WHY = "this FlashInfer ships no PyTorch references of its kernels (from 0.6.11, SGLang 0.5.12, on it does)"
templates = pytest.importorskip("flashinfer.trace.templates.moe", reason=WHY)
quantization = pytest.importorskip("flashinfer.trace.templates.quantize", reason=WHY)
RUN_EXPERTS = templates._fp4_moe_run_experts

pytestmark = pytest.mark.every_release


class PlainLayer(Layer):
    """Output scales that do nothing, and values of about one: in the references the block scales stand alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        w13, w13_scale, w2, w2_scale = self.stored
        for scale in (w13_scale, w2_scale):
            scale.copy_(scale.float() / 2048)
        prepared = engine_prepare()(
            w13, w2, w13_scale, w2_scale, self.hidden, self.intermediate, self.experts, is_gated=self.gated
        )
        names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
        scales = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
        self.prepared = dict(zip(names, prepared, strict=True)) | dict.fromkeys(scales, torch.ones(self.experts))

    def tokens(self, n: int, seed: int = 1) -> dict[str, torch.Tensor]:
        x = torch.randn(n, self.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
        packed, scales = kernels.fp4_quantize(x, is_sf_swizzled_layout=False)
        return {"hidden_states": packed, "hidden_states_scale": scales.view(torch.float8_e4m3fn)}

    def call(self, tokens: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
        """The intermediate goes into the second product as it is."""
        decode = nvfp4.decode
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvfp4, "quantize", lambda x, scale: (x, None))
            patch.setattr(nvfp4, "decode", lambda x, scale: x if scale is None else decode(x, scale))
            return super().call(tokens, **arguments)


def checkpoint(layer: Layer, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The arguments of a reference: what is stored, and no biases."""
    w13, w13_scale, w2, w2_scale = layer.stored
    return {
        **tokens,
        "gemm1_weights": w13,
        "gemm1_weights_scale": w13_scale,
        "gemm1_bias": None,
        "gemm2_weights": w2,
        "gemm2_weights_scale": w2_scale,
        "gemm2_bias": None,
    }


def assert_same(got: torch.Tensor, expected: torch.Tensor, top_k: int) -> None:
    """But for float32 sums, and bfloat16 rounding of the result and, here alone, of the routing weights."""
    assert got.dtype == expected.dtype == torch.bfloat16
    got, expected = got.double(), expected.double()
    size = expected.abs().max().item()
    assert size > 0.05
    torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=top_k * 2.0**-9 * size)


LAYERS: list[dict[str, Any]] = [{"experts": 8}, {"experts": 8, "hidden": 384, "intermediate": 192, "seed": 5}]


@pytest.mark.parametrize("sizes", LAYERS, ids=["even", "uneven"])
def test_experts_of_given_tokens(sizes: dict[str, Any]) -> None:
    layer = PlainLayer(**sizes)
    tokens, (ids, weights) = layer.tokens(33), routing(33, 16, 3)
    expected = RUN_EXPERTS(
        **checkpoint(layer, tokens), weights=weights.float(), topk_idx=ids.long(), local_expert_offset=4, E_global=16
    )
    arguments = {"num_experts": 16, "local_expert_offset": 4, "local_num_experts": 8}
    for topk in (pack(ids, weights), (ids, weights.float())):
        assert_same(layer.call(tokens, topk_ids=topk, **arguments), expected, 3)


def halves_exchanged(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.view(torch.uint8).chunk(2, dim=1)[::-1], dim=1).view(tensor.dtype)


@pytest.mark.parametrize("names", [("gemm1_weights", "gemm1_weights_scale"), ("gemm1_weights_scale",)])
def test_the_halves_are_told_apart(names: tuple[str, ...]) -> None:
    """Otherwise the comparison above would not see which of them is the gate."""
    layer = PlainLayer()
    tokens, (ids, weights) = layer.tokens(8), routing(8, 4, 2)
    arguments = checkpoint(layer, tokens)
    arguments |= {name: halves_exchanged(arguments[name]) for name in names}
    other = RUN_EXPERTS(**arguments, weights=weights.float(), topk_idx=ids.long(), local_expert_offset=0, E_global=4)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(layer.call(tokens, topk_ids=pack(ids, weights)), other, 2)


ROUTINGS: list[tuple[str, int, dict[str, Any]]] = [
    ("default", 0, {}),
    ("renormalize", 1, {}),
    ("ds", 2, {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    ("ds", 2, {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
    ("llama4", 3, {"top_k": 1}),
    ("renormalize_naive", 4, {}),
]


@pytest.mark.parametrize(("name", "method", "options"), ROUTINGS)
def test_routing(name: str, method: int, options: dict[str, Any]) -> None:
    reference: Callable[..., torch.Tensor] = getattr(templates, f"_trtllm_fp4_block_scale_moe_{name}_routing_reference")
    layer = PlainLayer(experts=8)
    tokens = layer.tokens(40)
    generator = torch.Generator().manual_seed(3)
    options = {"top_k": 3, "routed_scaling_factor": None, **options}
    options["routing_logits"] = torch.randn(40, 8, generator=generator) * 2
    options["routing_bias"] = torch.randn(8, generator=generator).bfloat16() if name == "ds" else None
    expected = reference(**checkpoint(layer, tokens), **options, local_expert_offset=0)
    assert_same(layer.call(tokens, **options, routing_method_type=method), expected, options["top_k"])


@pytest.mark.parametrize("given", [(), ("gemm1_alpha",), ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")])
def test_situ(given: tuple[str, ...]) -> None:
    if "activation_type" not in inspect.signature(RUN_EXPERTS).parameters:
        pytest.skip("this FlashInfer's references know SwiGLU only (from 0.6.18, SGLang 0.5.19, on also SiTU)")
    layer = PlainLayer(experts=4)
    tokens, (ids, weights) = layer.tokens(20), routing(20, 4, 2)
    options = {name: torch.tensor([0.5, 1.0, 1.5, 2.0]) + i for i, name in enumerate(given)}
    options["activation_type"] = kernels.ACTIVATION_SITU
    expected = RUN_EXPERTS(
        **checkpoint(layer, tokens),
        **options,
        weights=weights.float(),
        topk_idx=ids.long(),
        local_expert_offset=0,
        E_global=4,
    )
    assert_same(layer.call(tokens, topk_ids=pack(ids, weights), **options), expected, 2)


# --- Quantization ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [None, 1.0, 300.0])
def test_fp4_quantize(multiplier: float | None) -> None:
    if multiplier not in (None, 1.0) and Version(flashinfer.__version__) < Version("0.6.12"):
        pytest.skip("the reference of FlashInfer before 0.6.12 (SGLang 0.5.13) leaves the multiplier out of the values")
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 16:32] = 0
    scale = None if multiplier is None else torch.tensor([multiplier])
    packed, scales = kernels.fp4_quantize(x, scale, is_sf_swizzled_layout=False)
    expected, expected_scales = quantization._fp4_quantize_reference(x, scale)
    # 448 / 6 of the multiplier: nothing here is so large that the scales saturate, where the reference overflows.
    assert expected_scales.float().max() < nvfp4.E4M3_MAX
    assert torch.equal(scales.view(torch.float8_e4m3fn).float(), expected_scales.float())
    different = packed != expected
    # Halfway between two codes the reference takes the smaller, the kernel the even one.
    values = x.float() * (multiplier or 1.0) / expected_scales.float().repeat_interleave(16, -1).clamp(min=2**-9)
    halfway = torch.isin(values.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert not (different & ~halfway.unflatten(-1, (-1, 2)).any(-1)).any()
    assert different.float().mean() < 0.05


def test_swizzled_scales_go_where_flashinfer_reads_them() -> None:
    """By way of the layout that it documents for them, which its own code takes apart again."""
    utils = pytest.importorskip("flashinfer.cute_dsl.utils", reason="no CuteDSL helpers in this FlashInfer")
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, linear = kernels.fp4_quantize(x, torch.tensor(300.0), is_sf_swizzled_layout=False)
    _, swizzled = kernels.fp4_quantize(x, torch.tensor(300.0))
    mma = utils.convert_sf_to_mma_layout(swizzled.flatten(), m=256, k=512, num_groups=1)
    # [32, 4, row tiles, 4, column tiles, groups]: row is tile, then 32s, then within; a column 4 of a tile.
    groups = mma.permute(5, 2, 1, 0, 4, 3).reshape(256, 32)
    assert torch.equal(groups.view(torch.uint8), linear)


# --- CuteDSL ---------------------------------------------------------------------------------------------------------


def test_cutedsl_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its intermediate cannot be left unquantized: about as far off as NVFP4 is, and far from the halves exchanged."""
    names = ("_cute_dsl_fused_moe_reference", "_cute_dsl_fused_moe_nvfp4_reference")  # the second before 0.7
    reference = next(getattr(templates, name) for name in names if hasattr(templates, name))
    # Skips by itself where the kernels cannot be imported.
    cutedsl: Any = importlib.import_module("test_reference_cutedsl")
    cutedsl.stand_ins.__wrapped__(monkeypatch)
    layer = Layer(experts=8, hidden=384, intermediate=192)
    # So that the largest intermediate still is an NVFP4 number.
    layer.prepared["output2_scale_scalar"] *= float(layer.dense["multiplier"]) / 64
    layer.dense["multiplier"] = np.array(64.0)
    tokens, (ids, weights) = layer.tokens(40), routing(40, 8, 3)
    prepared = cutedsl.prepare(layer)
    got = cutedsl.run(cutedsl.make_wrapper(layer, 3), prepared, tokens, ids, weights).float()
    w13, w13_scale, w2, w2_scale = layer.stored

    def theirs(w13: torch.Tensor, w13_scale: torch.Tensor) -> torch.Tensor:
        return reference(
            x=tokens["hidden_states"],
            x_sf=tokens["hidden_states_scale"],
            token_selected_experts=ids,
            token_final_scales=weights.float(),
            w1_weight=w13,
            w1_weight_sf=w13_scale,
            w1_alpha=prepared["w1_alpha"],
            fc2_input_scale=prepared["fc2_input_scale"],
            w2_weight=w2,
            w2_weight_sf=w2_scale,
            w2_alpha=prepared["w2_alpha"] * 64,
            num_experts=8,
            top_k=3,
        ).float()

    expected = theirs(w13, w13_scale)
    assert (got - expected).norm() < 0.12 * expected.norm()
    exchanged = theirs(halves_exchanged(w13), halves_exchanged(w13_scale))
    assert (got - exchanged).norm() > 0.5 * exchanged.norm()
