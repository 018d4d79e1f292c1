"""Compare the predicted memory of forward passes with every measurement in ``benchmark/results``."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from common import output
from common.shapes import MODELS, Layout, every_change, fuse_like_engine
from sglang_moe_patches.lab.predict import forward
from sglang_moe_patches.lab.predict.forward import MemoryEffects, Runner
from whole import peak_memory

MAX_RELATIVE_ERROR = 0.01
#: Bytes by which the measured memory of a runner may differ from the prediction. The formulas do not count the sorted
#: expert ids and their padding, which took up to this much.
UNCOUNTED_BYTES = 1.5e6
#: Releases in which the engine has no output buffer. Stock servers of later releases free attention's inputs early.
RELEASES_WITHOUT_BUFFER = ("0.5.11", "0.5.12", "0.5.12.post1")

#: Folders of results with the measured memory of a forward pass or of a runner.
COMPARED_FOLDERS = ("peak-memory", "triton-server", "moe-workspace", "moe-workspace-marlin")
#: The other folders of results, each with the reason why it has no measurement of a forward pass's memory.
OTHER_FOLDERS = {
    "cutedsl-memory": "computed by FlashInfer's own wrapper, nothing was measured",
    "engine-suite": "outcomes of SGLang's own tests",
    "first-starts": "tokens a second, and what was left of a GPU's memory",
    "launcher-cost": "times",
    "mori-rows": "rows and times",
    "mutations": "answers",
    "loading": "loading, not a forward",
    "marlin-repack": "loading, not a forward",
    "nvfp4-hopper": "what weights keep, beside its own prediction on the page",
    "overhead": "times",
    "regress": "answers, accuracy and the whole server's memory",
    "residual-hole": "answers",
    "serving": "tokens a second, and what was left of a GPU's memory",
    "segments": "the largest of minutes of mixed batches behind prefixes",
    "soak": "the largest of minutes of mixed batches, aborts and flushes",
    "weight-shuffle": "loading, not a forward",
}
#: Results whose patched servers are not compared. The value is the reason.
UNCOMPARED_RESULTS = {
    "triton-server/moe-workspace-eager": "patched: columns before the dead input was their memory",
    "triton-server/moe-workspace-graphs": "patched: the same",
    "triton-server/moe-workspace-h100": "patched: the same",
}


def results(benchmark: str) -> list[str]:
    return sorted(f"{benchmark}/{path.stem}" for path in (output.RESULTS / benchmark).glob("*.json"))


def approximately(measured: float, least: float = 0) -> object:
    return pytest.approx(measured, rel=MAX_RELATIVE_ERROR, abs=least)


def test_every_result_is_compared_or_has_a_reason_for_not_being_compared():
    benchmarks = {path.name for path in output.RESULTS.iterdir() if path.is_dir()}
    assert benchmarks == {
        *COMPARED_FOLDERS,
        *OTHER_FOLDERS,
        "models",
        "recipes",
        "room",
    }  # the last three are predictions
    assert all((output.RESULTS / f"{name}.json").exists() for name in UNCOMPARED_RESULTS)


@pytest.mark.parametrize("name", results("peak-memory"))
def test_predicted_memory_of_a_forward_pass_agrees_with_the_measurement(name):
    result = output.load(name)
    stored = result["figures"]
    assert result["conditions"]["engine"] in RELEASES_WITHOUT_BUFFER
    for server, figures in stored["memory"].items():
        predicted = peak_memory.predict_result(result, server)
        # On 0.5.11 a prefill did not free attention's buffer of the decode before it.
        released_bytes = -predicted.parts["released"] if result["conditions"]["engine"] == "0.5.11" else 0
        assert predicted.bytes_before_runner + released_bytes == approximately(figures["live_at_kernel_bytes"]), server
        assert predicted.peak + released_bytes == approximately(figures["peak_forward_bytes"]), server


@pytest.mark.parametrize("name", results("triton-server"))
def test_predicted_peak_of_a_whole_server_agrees_with_the_measurement(name):
    result = output.load(name)
    words = shlex.split(result["command"])
    option = dict(zip(words, [*words[1:], ""], strict=True))
    share = MODELS[option.get("--model", "kimi-k2.5")].shard(int(option.get("--shard", 4)))
    model = fuse_like_engine(share, "triton")
    newer = result["conditions"]["engine"] not in RELEASES_WITHOUT_BUFFER and model.q_lora_rank is not None
    stock = MemoryEffects(inputs_dropped=newer)
    for server, figures in result["figures"].items():
        # activation-segments changes no tensor of a forward pass.
        patched = server.startswith("patched") and option.get("--changes") != "activation-segments"
        if patched and name in UNCOMPARED_RESULTS:
            continue
        slices = figures["slices"][0] if figures["slices"] else 1
        predicted = forward.predict(
            model,
            Layout(tp=int(option.get("--tp", 1))),
            Runner("triton", forward.BLOCKS if "--fp8" in words else None),
            int(option.get("--tokens", 16384)),
            every_change(model, -(-model.hidden // (slices * 256)) * 256) if patched else stock,
            graphs="--graphs" in words,
            float_logits=newer,
        )
        assert predicted.peak == approximately(figures["peak"]), server


def cells_of(benchmark):
    return [name for name in results(benchmark) if "cells" in output.load(name)["figures"]]


@pytest.mark.parametrize("name", [*cells_of("moe-workspace"), *cells_of("moe-workspace-marlin")])
def test_predicted_memory_of_a_runner_agrees_with_the_measurement(name, monkeypatch):
    """The predicted peak of each runner, stock and patched, must agree with a measurement outside a server.

    For Marlin, the prediction takes two values from the measurement: the bytes per weight, and whether the output was
    written into a dead input.

    DeepSeek-V3 at TP=8 in FP8 on an H200 is left out, because the tuned configuration for this GPU pads rows. This
    takes up to 45 MB that the prediction does not count.
    """
    runner = "marlin" if name.startswith("moe-workspace-marlin/") else "triton"
    for cell in output.load(name)["figures"]["cells"]:
        kind = (cell["model"], cell["layout"], cell.get("weights"))
        if name.startswith("moe-workspace/h200") and kind == ("deepseek-v3-fused", "tp8", "fp8"):
            continue
        model = fuse_like_engine(MODELS[cell["model"]], runner)
        rank = model.per_rank(Layout(tp=int(cell["layout"].removeprefix("tp"))))
        if runner == "marlin":
            packed = cell["w2_bytes"] / (rank.experts * rank.hidden * rank.intermediate)
            monkeypatch.setattr(forward, "PACKED_BYTES", packed)
        quantization = forward.BLOCKS if cell.get("weights") == "fp8" else None
        runs, offered = Runner(runner, quantization), runner == "marlin" and cell.get("offered", False)
        stock = forward.runner_bytes(runs, rank, cell["tokens"], rank.hidden, dead_input=False)
        patched = forward.runner_bytes(runs, rank, cell["tokens"], cell["width"] or rank.hidden, dead_input=offered)
        assert stock == approximately(cell["stock_peak"], UNCOUNTED_BYTES), cell
        assert patched == approximately(cell["peak"], UNCOUNTED_BYTES), cell


@pytest.mark.parametrize(
    ("model", "runner", "tp", "where"),
    [
        ("qwen3-235b", "triton", 4, forward.MOE),
        (
            "kimi-k2.5",
            "triton",
            4,
            "attention",
        ),  # PyTorch's record of allocations shows this peak: the output projection's output is alive
        ("kimi-k2.5", "flashinfer_trtllm_routed", 1, "the first layer's MLP"),
        ("deepseek-v3", "flashinfer_trtllm_routed", 1, "attention"),
        ("glm-4.5", "triton", 4, "the router"),
    ],
)
def test_the_place_of_a_patched_peak_is_named(model, runner, tp, where):
    whole = fuse_like_engine(MODELS[model], runner)
    workspace = 1536 * 2**20 + peak_memory.REFERENCE_SCRATCH
    predicted = forward.predict(
        whole, Layout(tp=tp), Runner(runner, workspace=workspace), 16384, every_change(whole, 1024)
    )
    assert predicted.peak_place == where
    assert predicted.peak == max(predicted.places.values()) == predicted.places[where]


def test_a_model_with_one_ranks_sizes_has_the_same_peak_as_that_rank():
    whole = MODELS["kimi-k2.5"]
    acting = every_change(whole)
    assert forward.predict(whole, Layout(tp=4), Runner("triton"), 16384, acting) == forward.predict(
        whole.shard(4), Layout(), Runner("triton"), 16384, acting
    )


def test_expert_parallel_ranks_share_attention_and_not_their_experts():
    model = MODELS["kimi-k2.5"]
    tensor, expert = (
        forward.predict(model, layout, Runner("triton"), 16384, MemoryEffects())
        for layout in (Layout(8), Layout(8, ep=8))
    )
    assert expert.elsewhere == tensor.elsewhere
    assert expert.parts["workspace"] > tensor.parts["workspace"]


def test_fp8_experts_hold_their_quantized_input_beside_the_tensor_of_the_top_k():
    """The predicted peak of FP8 experts also contains the quantized input of the second GEMM and its float32 scales.

    The input has one row for each token and each of the token's 8 experts. In Qwen3-235B at TP=4, a row has 384 columns
    of one byte. If FP8 is in blocks, each 128 columns of a row have a scale: 3 scales, or 12 bytes. Otherwise, each row
    has one scale: 4 bytes.
    """
    plain, blocks, by_rows = (
        forward.predict(MODELS["qwen3-235b"], Layout(tp=4), Runner("triton", quantization), 16384, MemoryEffects())
        for quantization in (None, forward.BLOCKS, "rows")
    )
    assert blocks.peak - plain.peak == 16384 * 8 * (384 + 4 * 3)
    assert by_rows.peak - plain.peak == 16384 * 8 * (384 + 4)
    assert blocks.bytes_before_runner == plain.bytes_before_runner


def test_deferred_shared_experts_without_a_dead_input_add_an_output_tensor():
    model = MODELS["kimi-k2.5"]
    last = MemoryEffects(shared_last=True)
    alone, both = (
        forward.predict(model, Layout(tp=4), Runner("triton"), 16384, acting)
        for acting in (last, replace(last, dead_input=True))
    )
    assert alone.parts["hidden"] == both.parts["hidden"] + 2 * 16384 * model.hidden
