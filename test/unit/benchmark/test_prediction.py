"""The memory that a forward should need, against every forward that was measured (the results on the page)."""

from __future__ import annotations

import json

import peak_memory
import pytest
from common import output, prediction
from common.shapes import MODELS, Layout

#: Releases without an output buffer of their own: what "stock" is predicted for.
WITHOUT_BUFFER = ("0.5.11", "0.5.12", "0.5.12.post1")
FORWARDS = sorted(f"peak-memory/{path.stem}" for path in (output.RESULTS / "peak-memory").glob("*.json"))
RUNNERS = ("moe-workspace/h200", "moe-workspace/h200-more", "moe-workspace/h100")


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forwards_memory_was_as_its_sizes_say(name):
    """A release from 0.5.13 on drops the attention inputs by itself."""
    result = output.load(name)
    found = result["figures"]
    for server, figures in found["memory"].items():
        if server == "patched" or result["conditions"]["engine"] in WITHOUT_BUFFER:
            predicted = peak_memory.of_result(result, server)
            assert predicted.live == pytest.approx(figures["live_at_kernel_bytes"], rel=0.012), server
            assert predicted.peak == pytest.approx(figures["peak_forward_bytes"], rel=0.012), server


@pytest.mark.parametrize("name", RUNNERS)
def test_what_the_triton_runner_held_was_as_its_sizes_say(name):
    """The runner alone, nothing on offer. Up to 1.5 % more: rows that a tuned configuration pads (DeepSeek-V3 TP=8)."""
    cells = [cell for cell in output.load(name)["figures"]["cells"] if cell["tokens"] == 16384]
    assert cells
    for cell in cells:
        model = prediction.as_the_engine_runs(MODELS[cell["model"]], "triton")
        rank = model.per_rank(Layout(tp=int(cell["layout"].removeprefix("tp"))))
        for patched, measured in ((False, cell["stock_peak"]), (True, cell["peak"])):
            predicted = prediction.triton_workspace(
                rank, 16384, patched=patched, inplace=False, fp8=cell["weights"] == "fp8"
            )
            assert predicted == pytest.approx(measured, rel=0.015), cell


@pytest.mark.parametrize(
    ("model", "runner", "tp", "where"),
    [
        ("qwen3-235b", "triton", 4, prediction.MOE),
        ("kimi-k2.5", "triton", 4, "attention"),  # by the allocator's history: its output projection's output is alive
        ("kimi-k2.5", "flashinfer_trtllm_routed", 1, "the first layer's MLP"),
        ("deepseek-v3", "flashinfer_trtllm_routed", 1, "attention"),
        ("glm-4.5", "triton", 4, "the router"),
    ],
)
def test_the_place_of_a_patched_peak_is_named(model, runner, tp, where):
    whole = prediction.as_the_engine_runs(MODELS[model], runner)
    predicted = prediction.predicted(
        whole, whole.per_rank(Layout(tp=tp)), runner, 16384, patched=True, workspace=1536 * 2**20
    )
    assert predicted.where == where
    assert predicted.peak == max(predicted.places.values()) == predicted.places[where]


def test_a_share_of_a_model_needs_what_a_rank_of_all_does():
    whole = MODELS["kimi-k2.5"]
    share = whole.shard(4)
    assert prediction.predicted(
        whole, whole.per_rank(Layout(tp=4)), "triton", 16384, patched=True
    ) == prediction.predicted(share, share.per_rank(Layout()), "triton", 16384, patched=True)


def test_fp8_experts_hold_their_quantized_input_beside_the_tensor_of_the_top_k():
    """Qwen3-235B at TP=4: a byte for each element, and a float32 scale for every 128 of them."""
    model = MODELS["qwen3-235b"]
    bf16, fp8 = (
        prediction.predicted(
            model, model.per_rank(Layout(tp=4)), "triton", 16384, patched=False, quantization=quantization
        )
        for quantization in (None, "fp8")
    )
    assert fp8.peak - bf16.peak == 16384 * 8 * (384 + 4 * 3)
    assert fp8.live == bf16.live


def test_the_table_of_a_prediction_has_every_part_and_every_place():
    model = MODELS["glm-4.5"].fused()
    both = {
        name: prediction.predicted(model, model.per_rank(Layout(tp=4)), "triton", 16384, patched=name == "patched")
        for name in ("stock", "patched")
    }
    table = peak_memory.prediction_table({name: json.loads(json.dumps(vars(one))) for name, one in both.items()})
    assert all(f"| {text} |" in table for text in prediction.PARTS.values())

    def cells(place):
        return " | ".join(peak_memory.in_mb(one.places[place]) for one in both.values())

    assert f"| **sum** | **{cells(prediction.MOE).replace(' | ', '** | **')}** |" in table
    for place in ("attention", "the router", "the first layer's MLP"):
        assert f"| at another place: {place} | {cells(place)} |" in table
