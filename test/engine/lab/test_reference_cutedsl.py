"""Tests of ``--moe-runner-backend flashinfer_cutedsl`` on the CPU. All code is the engine's own, except for the
kernels."""

from __future__ import annotations

import random
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import without_buffer
from safetensors.torch import load_file, save_file
from sglang_moe_patches.changes import cutedsl_sizing
from sglang_moe_patches.changes.cutedsl_sizing.wrapper import keeps_buffers
from sglang_moe_patches.core.patch import Status, probe
from sglang_moe_patches.lab.observers.forwards import workspace_bytes

pytestmark = pytest.mark.every_release

BENCHMARK = Path(__file__).parents[3] / "benchmark" / "changes" / "cutedsl_memory.py"
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 700) for _ in range(length)] for length in (5, 40, 130, 1)]
CUTEDSL = {"moe_runner_backend": "flashinfer_cutedsl"}


@pytest.fixture(scope="module")
def exact_scales(checkpoint, tmp_path_factory) -> Path:
    """Return a tiny checkpoint whose global scales are powers of two, so that scaling never rounds.

    TRT-LLM's kernel receives the product of an input scale and a weight scale, and CuteDSL's kernel receives each scale
    by itself. For CuteDSL the engine also divides by reciprocals of scales. With other scales, the results of the two
    kernels would differ by rounding.
    """
    folder = tmp_path_factory.mktemp("models") / "exact"
    shutil.copytree(checkpoint(dense_layers=0), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith((".weight_scale_2", ".input_scale")):
            tensors[name] = tensor.log2().round().exp2()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def bfloat16_weights(monkeypatch):
    """Round all routing weights to bfloat16. SGLang 0.5.17 rounds them for TRT-LLM's kernel, but not for CuteDSL's."""
    from sglang.srt.layers.moe import topk

    select = topk.select_experts

    def select_experts(*args, **kwargs):
        selected = select(*args, **kwargs)
        return selected._replace(topk_weights=selected.topk_weights.bfloat16().float())

    monkeypatch.setattr(topk, "select_experts", select_experts)


@pytest.mark.usefixtures("bfloat16_weights")
def test_cutedsl_and_trtllm_give_the_same_logits(engine, exact_scales, monkeypatch):
    """The stand-ins for CuteDSL's and for TRT-LLM's kernels give the same logits to the last bit, although their weight
    layouts and scales differ."""
    # Newer releases round each expert's output by default, and add up the experts in a separate step.
    monkeypatch.setenv("SGLANG_FLASHINFER_MOE_FUSED_FINALIZE", "1")
    with without_buffer():  # TRT-LLM's kernel would write into the native buffer, and CuteDSL's would not
        tokens, logits = engine.generate(engine.load(exact_scales), PROMPTS, 6)
    with engine.override_arguments(**CUTEDSL):
        model = engine.load(exact_scales)
        cutedsl_tokens, cutedsl_logits = engine.generate(model, PROMPTS, 6)
    assert all(hasattr(layer.mlp.experts, "_cutedsl_wrapper") for layer in model.model.layers)
    assert not torch.isnan(logits).any()
    assert tokens == cutedsl_tokens
    assert torch.equal(logits, cutedsl_logits)


@pytest.fixture
def has_buffers():
    """Return whether the installed FlashInfer's CuteDSL wrapper keeps buffers between calls."""
    from flashinfer import CuteDslMoEWrapper

    return keeps_buffers(CuteDslMoEWrapper)


@pytest.fixture
def needs_buffers(has_buffers):
    if not has_buffers:
        pytest.skip("this FlashInfer's wrapper keeps no buffers")


@pytest.mark.usefixtures("needs_buffers")
def test_each_layer_has_its_own_buffers_and_their_old_content_does_not_matter(engine, checkpoint):
    with engine.override_arguments(**CUTEDSL):
        model = engine.load(checkpoint(dense_layers=0))
        tokens, logits = engine.generate(model, PROMPTS, 2)
        wrappers = [layer.mlp.experts._cutedsl_wrapper for layer in model.model.layers]
        assert len({wrapper._moe_output.data_ptr() for wrapper in wrappers}) == len(wrappers) == 4
        for wrapper in wrappers:
            wrapper._gemm1_output.fill_(255)
            wrapper._gemm1_output_scale.fill_(255)  # NaN
            wrapper._moe_output.fill_(float("nan"))
        assert engine.generate(model, PROMPTS, 2)[0] == tokens
        assert torch.equal(engine.generate(model, PROMPTS, 2)[1], logits)


def test_a_wrapper_without_buffers_runs_forward_passes_of_any_size(engine, checkpoint, has_buffers):
    """If FlashInfer's wrapper keeps no buffers, it limits no forward pass, and cutedsl-sizing has nothing to do."""
    if has_buffers:
        pytest.skip("this FlashInfer's wrapper keeps buffers: test_a_larger_forward_runs_in_slices_with_one_warning")
    path = checkpoint(dense_layers=0)
    with engine.override_arguments(**CUTEDSL):
        expected, expected_logits = engine.generate(engine.load(path), PROMPTS, 2)
    # If the wrapper keeps buffers, the engine computes their size from these two arguments.
    with engine.override_arguments(**CUTEDSL, chunked_prefill_size=64, max_prefill_tokens=64):
        model = engine.load(path)
        tokens, logits = engine.generate(model, PROMPTS, 2)
    assert tokens == expected
    assert torch.equal(logits, expected_logits)
    assert workspace_bytes({layer.mlp.experts._cutedsl_wrapper for layer in model.model.layers}) == 0
    outcome = probe(cutedsl_sizing.CHANGE)
    assert outcome.status is Status.NATIVE
    assert "has no buffers and accepts forward passes of any size" in outcome.reason


@pytest.mark.usefixtures("needs_buffers")
def test_the_benchmark_computes_the_memory_of_the_buffers():
    """The benchmark computes the right size of each layer's output buffer and of the buffer for the result of GEMM1.
    The expected MB were computed by hand from FlashInfer's shapes.

    From FlashInfer 0.6.12 on, GEMM1's buffer has room for tiles of 256 rows instead of 128. This adds 128 rows of
    intermediate * 9 / 16 bytes for each local expert.
    """
    from flashinfer.fused_moe.cute_dsl import fused_moe

    benchmark = runpy.run_path(str(BENCHMARK))
    models, measure, stock = benchmark["MODELS"], benchmark["measure_buffers"], benchmark["stock"]
    for name, tp, ep, tokens, megabytes, larger_tiles in (
        ("kimi-k2.5", 4, 1, 16_384, 287, 301),
        ("kimi-k2.5", 4, 4, 65_536, 1_558, 1_572),
        ("deepseek-v3", 4, 1, 16_384, 282, 291),
    ):
        buffers, ours = measure(models[name], tp, ep, tokens)
        expected = larger_tiles if hasattr(fused_moe, "VALID_TILE_SIZES") else megabytes
        assert round((buffers.output + buffers.gemm1) / 1e6) == expected
        assert buffers.sorting < 0.01 * buffers.total
        assert ours == replace(buffers, output=0)
    # The engine's own sizes: data-parallel attention divides the chunk size, but not the gathered batch.
    kimi = models["kimi-k2.5"]
    assert stock(kimi, 4, 1, 1, 16_384, 512) == measure(kimi, 4, 1, 16_384)[0]
    if probe(cutedsl_sizing.CHANGE).status is Status.HARDENED:  # sized by --max-prefill-tokens, which is not divided
        assert stock(kimi, 4, 4, 4, 256, 512) == measure(kimi, 4, 4, 65_536)[0]
        assert stock(kimi, 4, 1, 1, 256, 20_000) == measure(kimi, 4, 1, 20_000)[0]
    else:
        assert stock(kimi, 4, 4, 4, 16_384, 512) == measure(kimi, 4, 4, 4_096)[0]
        assert stock(kimi, 4, 1, 1, 256, 512) == measure(kimi, 4, 1, 512)[0]
