"""Compare the report of ``doctor --model`` with the expectation for many servers that people start, on the installed
engine. The expected figures come from public facts: a model's ``config.json``, a GPU's memory, and the formulas in the
engine's code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from common import doctor_answers, dummy_models
from conftest import RELEASE
from releases import ALL, ROOT
from sglang_moe_patches.lab.predict import config, room, terminal

Report = dict[str, Any]


def public(name: str, **changed: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a published model, with some fields changed."""
    return config.load_model(name)[0] | changed


def row(report: Report, change: str) -> dict[str, Any]:
    return next(each for each in report["changes"] if each["name"] == change)


def expert_bytes(model: dict[str, Any], ranks: int) -> float:
    """Return the bytes of the routed experts of all layers, divided by the number of ranks. Each expert has three
    matrices, with one byte per weight."""
    layers = model["num_hidden_layers"] - model["first_k_dense_replace"]
    return layers * model["n_routed_experts"] * 3 * model["hidden_size"] * model["moe_intermediate_size"] / ranks


R1, V4 = "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V4-Flash"


def does_not_start(report: Report, least: float | None) -> None:
    """Check that doctor reports that the server does not start because memory is too small. If a larger
    ``--mem-fraction-static`` helps, the report must name the smallest value that suffices. It must also say whether the
    user or the engine chose the present value.

    :param least: smallest ``--mem-fraction-static`` that suffices; ``None`` if no value suffices.
    """
    fit = report["fit"]
    assert not fit["starts"]
    assert fit["least_fraction"] == least
    line = terminal.describe_verdict(report)
    assert line.startswith("Does not start: ")
    if least is not None:
        assert f"the {'given' if fit['given'] else 'engine'}" in line
        assert f"at least {least}" in line


def a_given_fraction_below_the_weights(report: Report) -> None:
    does_not_start(report, 0.57)
    assert report["fit"]["given"]
    experts = expert_bytes(public(R1), 8)
    assert experts < report["fit"]["weights"] < 1.05 * experts


def a_rule_that_leaves_nothing(report: Report) -> None:
    """Check that the server does not start, because the engine's rule gives weights and KV cache less memory than the
    weights need. The rule reserves 1.5 MB for each token of the prefill chunk, whatever the number of ranks."""
    fit = report["fit"]
    does_not_start(report, math.ceil(fit["weights"] / fit["memory"] * 100) / 100)
    assert not fit["given"]
    assert fit["memory"] * fit["fraction"] == pytest.approx(75.5e9, rel=0.03)
    assert fit["weights"] == pytest.approx(107.1e9, rel=0.02)


def begins_below_the_rule(report: Report) -> None:
    """Check that the patched server starts although the engine's rule leaves no memory for a KV cache. kv-sizing begins
    with a KV cache for one request of the largest length."""
    fit = report["fit"]
    assert fit["starts"]
    assert fit["memory"] * fit["begins_with"] > fit["weights"] + fit["loading"] > fit["memory"] * fit["fraction"]
    assert report["room"]["stock"]["verdict"] == room.DOES_NOT_START
    assert "Patched starts" in terminal.describe_verdict(report)


def loading_result(name: str, server: str) -> dict[str, Any]:
    path = ROOT / f"benchmark/results/loading/{name}.json"
    return json.loads(path.read_text())["figures"]["servers"][server]


def loads_only_with_fp4_weights(tokens: int, error: float) -> Callable[[Report], None]:
    """Return a function that checks gpt-oss-120b on one H100. The stock server runs out of memory while it loads. The
    patched server starts.

    :param tokens: measured KV cache size of the patched server, in tokens.
    :param error: largest relative error of the KV cache size that doctor predicts.
    """

    def check(report: Report) -> None:
        line = terminal.describe_verdict(report)
        assert line.startswith("Stock does not start: loading the weights takes about ")
        assert "Patched starts" in line
        stock, new = (loading_result("gpt-oss-120b", server) for server in ("stock-zeros", "new"))
        for fit, measured in ((report["stock_fit"], stock), (report["fit"], new)):
            assert fit["weights"] + fit["loading"] == pytest.approx(measured["reserved"], rel=0.01)
            assert fit["least_memory"] == pytest.approx(measured["peak_reserved"], rel=0.01)
        assert report["room"]["patched"]["tokens"] == pytest.approx(tokens, rel=error)
        does("fp4-weights", "MB more are free on each GPU")(report)

    return check


def weighs_too_much_for_an_h100(report: Report) -> None:
    does_not_start(report, None)
    assert report["fit"]["weights"] == pytest.approx(expert_bytes(public(R1), 2) * 16 / 58, rel=0.05)


def weighs_between(least: float, most: float) -> Callable[[Report], None]:
    def check(report: Report) -> None:
        assert least < report["fit"]["weights"] < most

    return check


def takes_nothing_to_load(report: Report) -> None:
    assert report["fit"]["loading"] == 0
    assert report["fit"]["tokens"] > 600_000


def does_not_start_and_is_not_sized(report: Report) -> None:
    assert report["room"]["patched"]["verdict"] == room.DOES_NOT_START
    does_nothing("kv-sizing", "the server does not start")(report)


def runs_out_in(*places: str) -> Callable[[Report], None]:
    """Return a function that checks that doctor predicts an out-of-memory error of the stock server.

    :param places: moments at which doctor may predict the error: a kind of forward pass, or the capture of CUDA graphs.
        An error at one of these moments suffices. If this moment is the capture, the verdict must be that the server
        does not start. Otherwise, the verdict must be that the server starts with too little room.
    """

    def check(report: Report) -> None:
        found = report["room"]["stock"]
        place = next(place for place in places if place in found["short_of"])
        assert found["free"] < found["need"]["graphs"] + found["need"]["forwards"].get(place, 0)
        assert found["verdict"] == (room.DOES_NOT_START if place == room.GRAPHS else room.LITTLE_ROOM)

    return check


def has_a_range(least: float, above: float, below: float) -> Callable[[Report], None]:
    """Return a function that checks the values of ``--mem-fraction-static`` that doctor advises: a smallest and a
    largest value for the stock server, and the same for the patched server.

    The smallest value is just large enough for the weights. The largest value leaves free the predicted memory of
    forward passes and CUDA graphs, and the margin.

    :param least: expected smallest value, for both servers.
    :param above: number above which the largest value of each server must lie.
    :param below: number below which the largest value of each server must lie.
    """

    def check(report: Report) -> None:
        for found in report["room"].values():
            assert found["verdict"] == room.STARTS
            assert found["least_fraction"] == least
            assert above < found["highest_fraction"] < below

    return check


def loads_as_mxfp4(layers: int, ranks: int) -> Callable[[Report], None]:
    """Return a function that checks the memory of DeepSeek-V4's MXFP4 experts on Marlin, after and during loading.

    A packed weight has half a byte, and 32 weights share a scale of one byte. Up to 0.5.13 the engine loads the scales
    in float32. A stock server then keeps the float32 scales allocated, too.
    """

    def check(report: Report) -> None:
        model = public(V4)
        weights = layers * model["n_routed_experts"] * 3 * model["hidden_size"] * model["moe_intermediate_size"] / ranks
        assert report["server"]["format"] == "MXFP4"
        assert (0.5 + 1 / 32) * weights < report["fit"]["weights"] < 1.1 * (0.5 + 1 / 32) * weights
        keeps = RELEASE in ("0.5.12.post1", "0.5.13")
        assert report["stock_fit"]["loading"] == pytest.approx(weights / 8 * keeps, rel=0.001)
        assert report["fit"]["loading"] == 0
        assert report["fit"]["layout"] < report["stock_fit"]["layout"] / 5
        does("fp4-weights", "the peak while loading is")(report)

    return check


def has_weights_and_tokens(least: float, most: float) -> Callable[[Report], None]:
    def check(report: Report) -> None:
        is_known(report)
        assert least < report["fit"]["weights"] < most
        assert report["fit"]["tokens"] > 0

    return check


def weighs(size: float) -> Callable[[Report], None]:
    """Return a function that checks the bytes of the weights on a GPU. They must exceed ``size``, the bytes of the
    experts, by at most a sixth."""

    def check(report: Report) -> None:
        assert size < report["fit"]["weights"] < 7 / 6 * size

    return check


def tokens_of(size: float) -> Callable[[Report], None]:
    """Return a function that checks the KV cache size in tokens.

    The KV cache gets all memory that ``--mem-fraction-static`` allows, except the weights and the memory that stays
    allocated after loading.

    :param size: bytes of one token in the KV cache.
    """

    def check(report: Report) -> None:
        fit = report["fit"]
        left = fit["memory"] * fit["fraction"] - fit["weights"] - fit["loading"]
        assert fit["tokens"] == pytest.approx(left / size, rel=0.001)

    return check


def has_tokens_as_measured(result: str, server: str, fit: str = "fit") -> Callable[[Report], None]:
    """Return a function that compares the predicted KV cache size with a measured one. The sizes may differ by 1.8 GB,
    because CUDA and NCCL need more memory on some machines than on others.

    :param fit: section of the report with the prediction: ``fit`` for the patched server, ``stock_fit`` for the stock
        server.
    """
    path = ROOT / f"benchmark/results/serving/{result}.json"
    measured = json.loads(path.read_text())["figures"]["servers"][server]["tokens"]

    def check(report: Report) -> None:
        tokens = report[fit]["tokens"]
        assert abs(tokens - measured) * report[fit]["token_bytes"] < 1.8e9, (tokens, measured)

    return check


def bytes_at_four_fifths(columns: int, whole: int, windows: int) -> float:
    """Return the KV cache bytes of one token on one rank, for a model with sliding windows.

    Each layer of the rank has one head of keys and one head of values, with two bytes for each element. A layer with a
    sliding window has room for only four fifths of the tokens, so its bytes count with the factor 0.8. For example, a
    layer with 64 columns has 2 * 64 * 2 = 256 bytes. A model with 18 whole layers and 18 windows then has
    256 * (18 + 0.8 * 18) = 8,294.4 bytes.

    :param columns: number of elements of a head.
    :param whole: number of layers with full attention.
    :param windows: number of layers with a sliding window.
    """
    return 2 * 2 * columns * (whole + 0.8 * windows)


def names_prefill_graphs(whether: bool) -> Callable[[Report], None]:
    """Return a function that checks whether doctor reports the memory of prefill graphs as unknown. This memory is
    unknown if a prefill chunk runs in a CUDA graph.

    :param whether: whether doctor must report the memory as unknown.
    """

    def check(report: Report) -> None:
        lines = [line for line in report["unknown"] if "prefill graphs" in line]
        assert bool(lines) == whether, report["unknown"]
        assert all("prefills of up to 8,192 tokens" in line for line in lines)

    return check


def is_not_sized_because(reason: str, *, given: bool = False) -> Callable[[Report], None]:
    def check(report: Report) -> None:
        sizing = row(report, "kv-sizing")
        assert not sizing["acts"]
        assert reason in sizing["reason"]
        assert sizing["reason"].startswith(f"the {'given' if given else 'engine'}")

    return check


def fewer_tokens_than_a_request(report: Report) -> None:
    fit = report["fit"]
    assert 0 < fit["tokens"] < fit["context"] == 202_752
    assert (
        "fewer than the longest request (202,752 tokens); to allow only shorter requests, set --context-length"
        in terminal.describe_short_cache(report)
    )


def says(acts: bool | None, change: str, words: str) -> Callable[[Report], None]:
    """Return a function that checks a change's row of the report.

    :param acts: whether the change acts; ``None`` if doctor does not know.
    :param words: text that the row's effect or reason contains.
    """

    def check(report: Report) -> None:
        found = row(report, change)
        assert found["acts"] is acts, found
        assert words in found["does" if acts else "reason"]
        assert acts is not None or found["reason"].startswith("not known: ")

    return check


does, does_nothing, is_not_known = (partial(says, acts) for acts in (True, False, None))


def is_known(report: Report) -> None:
    """Check that doctor knows of every change whether it acts. This requires that the engine could build the model's
    layers."""
    assert report["server"]["runner"]
    assert [each["name"] for each in report["changes"] if each["acts"] is None] == []


def does_not_say(change: str, words: str) -> Callable[[Report], None]:
    def check(report: Report) -> None:
        found = row(report, change)
        assert words not in found["does"] + found["reason"]

    return check


def sizes_cutedsl(report: Report) -> None:
    """Check that cutedsl-sizing acts, unless the engine of this release sizes the buffers itself."""
    if row(report, "cutedsl-sizing")["status"] != "native":
        does("cutedsl-sizing", OUTPUT)(report)


def peaks(stock: int, patched: int) -> Callable[[Report], None]:
    """Return a function that checks the peak memory of a forward pass in MB, stock and patched. The peak consists of
    [tokens, hidden] tensors in 16 bits, and of the runner's memory."""

    def check(report: Report) -> None:
        found = [report[server]["peak"] / 1e6 for server in ("stock", "patched")]
        assert found == pytest.approx([stock, patched], abs=0.6)

    return check


def takes_while_it_works(size: float) -> Callable[[Report], None]:
    def check(report: Report) -> None:
        assert report["patched"]["parts"]["workspace"] == size

    return check


def all_of(*checks: Callable[[Report], None]) -> Callable[[Report], None]:
    def check(report: Report) -> None:
        for each in checks:
            each(report)

    return check


OUTPUT, SCRATCH = "output in the dead input", "the activation in the dead input"


@dataclass(frozen=True)
class Case:
    """A server, and the check of doctor's report about this server.

    :param check: function that checks the report.
    :param since: first release that has the model, or on which the check succeeds.
    :param env: further environment variables. All changes are on by default.
    """

    model: dict[str, Any]
    flags: str
    check: Callable[[Report], None]
    gpu: str = "h200"
    since: str = ALL[0]
    env: dict[str, str] = field(default_factory=dict)


POST_CAPTURE = {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}
OFF = {"SGLANG_MOE_PATCHES_KV_SIZING": "off"}
UNTRACED = " --disable-piecewise-cuda-graph" * (RELEASE == "0.5.12.post1")
"""Server argument that disables piecewise CUDA graphs on 0.5.12.post1; empty on other releases. By default,
0.5.12.post1 runs prefills of some models in such graphs. They are made by tracing the layers, and no traced layer
offers its dead input."""
ATTENTION = "--tp 8 --dp 8 --enable-dp-attention"
GLM = public("zai-org/GLM-5.2", quantization_config=public("zai-org/GLM-5.1-FP8")["quantization_config"])
NEXT_FP8 = public("Qwen/Qwen3-30B-A3B-FP8")["quantization_config"] | {
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in range(48))]
}
MAVERICK = public("meta-llama/Llama-4-Maverick-17B-128E-Instruct")
SCOUT = MAVERICK | {
    "text_config": MAVERICK["text_config"] | {"num_local_experts": 16, "interleave_moe_layer_step": 1},
}
INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 128, "budget": 2048, "compress_ratio": 4}


def compressed_keys(**text: Any) -> dict[str, Any]:
    """Return a configuration with the sizes of Qwen3-Next and the engine's indexer of compressed keys. No published
    model has such a configuration."""
    sizes = public("Qwen/Qwen3-Next-80B-A3B-Thinking", model_type="qwen4_exp_text", **text)
    sizes |= {f"indexer_{name}": value for name, value in INDEXER.items()}
    del sizes["architectures"]  # a text configuration is no model by itself
    model = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "vision_config": {}}
    return model | {"text_config": sizes}


def gpt_oss(layers: int) -> dict[str, Any]:
    return dummy_models.config("gpt-oss-120b-mxfp4", 1, layers, 131_072)


def gpt_oss_20b_in_bf16() -> dict[str, Any]:
    config = public("openai/gpt-oss-120b", num_hidden_layers=24, num_local_experts=32)
    del config["quantization_config"]
    return config | {"layer_types": ["sliding_attention", "full_attention"] * 12}


# Servers in docs/benchmarks/serving.md, which were measured with this release.
MEASURED = {
    "BF16 on an H100": Case(
        public("Qwen/Qwen3-30B-A3B"), "--tp 1", has_tokens_as_measured("qwen3-30b-default", "stock"), gpu="h100"
    ),
    "four ranks on H200s": Case(
        public("Qwen/Qwen3-235B-A22B-FP8"), "--tp 4", has_tokens_as_measured("qwen3-235b-fp8", "stock")
    ),
    "MXFP4 experts, whose loading leaves pieces": Case(
        gpt_oss(30),
        "--tp 1",
        has_tokens_as_measured("gpt-oss-120b-30-layers", "stock", fit="stock_fit"),
        gpu="h100",
        env=OFF,
    ),
    # Servers of docs/benchmarks/loading.md. The engine's fraction of an H100 is 0.83, too.
    "MXFP4 experts that the stock server cannot load": Case(
        gpt_oss(36), "--tp 1", loads_only_with_fp4_weights(42_222, 0.2), gpu="h100", env=OFF
    ),
    "the same with a cache that is grown": Case(
        gpt_oss(36), "--tp 1", loads_only_with_fp4_weights(122_879, 0.05), gpu="h100"
    ),
    "the same with a cache that is grown, and with no other change": Case(
        gpt_oss(36),
        "--tp 1",
        loads_only_with_fp4_weights(loading_result("gpt-oss-120b-as-h100", "new-grown")["tokens"], 0.05),
        gpu="h100",
        env={"SGLANG_MOE_PATCHES": "fp4-weights,kv-sizing"},
    ),
}

CASES = {
    **(MEASURED if RELEASE == "0.5.12.post1" else {}),
    "a given fraction below the weights": Case(
        public(R1), "--tp 8 --mem-fraction-static 0.5", a_given_fraction_below_the_weights
    ),
    "the same, abbreviated": Case(public(R1), "--tp 8 --mem-fraction 0.5", a_given_fraction_below_the_weights),
    "more than a GPU has": Case(public(R1), "--tp 8", lambda report: does_not_start(report, None), gpu="h100"),
    "a rule that leaves nothing": Case(
        GLM, f"{ATTENTION} --chunked-prefill-size 32768", a_rule_that_leaves_nothing, since="0.5.12.post1", env=OFF
    ),
    "a rule that leaves nothing, and a cache that is grown": Case(
        GLM, f"{ATTENTION} --chunked-prefill-size 32768", begins_below_the_rule, since="0.5.12.post1"
    ),
    # The stages have 31 and 30 of the 61 layers. The first stage has the three layers without routed experts.
    "the last of two stages": Case(public(R1), "--tp 8 --pp-size 2", weighs(expert_bytes(public(R1), 8) * 30 / 58)),
    # Each stage has 15 or 16 layers. The first stage has 12 layers with experts and starts. The last stage has 16 of
    # them and does not.
    "the last of four stages": Case(
        public(R1), "--tp 2 --pp-size 4 --mem-fraction-static 0.88", weighs_too_much_for_an_h100, gpu="h100"
    ),
    "a fraction that leaves no room for graphs": Case(
        public("Qwen/Qwen3-30B-A3B"), "--tp 1 --mem-fraction-static 0.99", runs_out_in(room.GRAPHS), gpu="h100"
    ),
    # 3 % of an H200 are 4.5 GB. A chunk of 32,768 tokens needs 5.3 GB, and 3.1 GB with the patches.
    "a fraction that leaves too little for a prefill": Case(
        GLM, "--tp 8 --chunked-prefill-size 32768 --mem-fraction-static 0.97", runs_out_in(room.PREFILL, room.GRAPHS)
    ),
    "a fraction that leaves enough": Case(
        public("Qwen/Qwen3-30B-A3B"), "--tp 1", has_a_range(0.73, 0.85, 0.93), gpu="h100"
    ),
    "sliding windows": Case(
        public("openai/gpt-oss-120b"), "--tp 8", tokens_of(bytes_at_four_fifths(64, whole=18, windows=18)), gpu="h100"
    ),
    # Every fourth of the 48 layers has no rotary embeddings and keeps all tokens. If all layers did, a token would need
    # 18 % more bytes.
    "chunks that are sliding windows": Case(
        SCOUT, "--tp 8 --context-length 131072", tokens_of(bytes_at_four_fifths(128, whole=12, windows=36))
    ),
    "a context that is too long": Case(public("zai-org/GLM-4.7"), ATTENTION, fewer_tokens_than_a_request, env=OFF),
    "a KV cache of another kind": Case(
        public(V4),
        "--tp 4 --moe-runner-backend marlin",
        is_not_sized_because("kv-sizing does not support KV caches of the kind DeepSeekV4TokenToKVPool"),
        since="0.5.12.post1",
    ),
    "a KV cache of compressed keys": Case(
        compressed_keys(eos_token_id=0),
        "--tp 8",
        is_not_sized_because("kv-sizing does not support KV caches of the kind QSATokenToKVPool"),
        since="0.5.23",
    ),
    "a KV cache that the engine cannot be asked for": Case(
        compressed_keys(), "--tp 8", is_not_known("kv-sizing", "no attribute 'eos_token_id'"), since="0.5.23"
    ),
    # A tensor of 16,384 tokens and 4,096 columns has 134.2 MB. The peak has three or four such tensors, NVFP4
    # activations of 37.7 MB, router logits of 4.2 MB, and top-k ids and weights of 1 MB.
    "NVFP4 on TRT-LLM": Case(
        public("nvidia/Qwen3-235B-A22B-NVFP4"),
        # By default, 0.5.13 runs prefills in traced graphs here. Such graphs offer no dead input.
        "--tp 4 --chunked-prefill-size 16384" + " --disable-piecewise-cuda-graph" * (RELEASE == "0.5.13"),
        all_of(
            *(does("output-buffer", OUTPUT), does_not_say("output-buffer", "uses no output buffer"), peaks(580, 545)),
            does("fp4-weights", "lays out the experts"),
            # A weight has four bits, and 16 weights share a scale of eight bits.
            weighs(94 * 128 * 3 * 4096 * 1536 * (0.5 + 1 / 16) / 4),
        ),
        gpu="b200",
    ),
    # No release resolves `auto` for this GPU. Up to 0.5.13 the layer's attribute names TRT-LLM's runner, and its method
    # calls `cutlass_moe_fp4`.
    "NVFP4 with the runner auto": Case(
        public("nvidia/Qwen3-235B-A22B-NVFP4"),
        "--tp 4 --quantization modelopt_fp4 --moe-runner-backend auto",
        all_of(
            does_nothing("output-buffer", "cutlass uses no output buffer"),
            does_nothing("fp4-weights", "does not lay out NVFP4 experts for the runner cutlass"),
        )
        if RELEASE == "0.5.12.post1"
        else is_known,
        gpu="rtx-pro-6000",
    ),
    "NVFP4 on CuteDSL": Case(
        public(R1, quantization_config=public("nvidia/Qwen3-235B-A22B-NVFP4")["quantization_config"]),
        "--tp 8 --moe-runner-backend flashinfer_cutedsl",
        sizes_cutedsl,
        gpu="b200",
    ),
    "BF16 on TRT-LLM": Case(
        public("Qwen/Qwen3-235B-A22B"),
        "--tp 8 --chunked-prefill-size 16384",
        all_of(does_nothing("output-buffer", "uses no output buffer"), peaks(542, 542)),
        gpu="b200",
    ),
    # A tensor of 16,384 tokens and 7,168 columns has 234.9 MB. The shared experts run last. An FP8 activation with its
    # scales has 121.1 MB.
    "FP8 on TRT-LLM, which the engine defers behind": Case(
        public("deepseek-ai/DeepSeek-V3.2"),
        "--tp 8 --chunked-prefill-size 16384",
        all_of(
            does_nothing("output-buffer", "uses no output buffer"),
            does_nothing("deferred-shared-experts", "the engine itself runs the shared experts last here"),
            peaks(1079, 1079),
        ),
        gpu="b300",
        since="0.5.17",
    ),
    "DeepSeek-V4's experts on Marlin": Case(
        public(V4), "--tp 4 --moe-runner-backend marlin", loads_as_mxfp4(43, 4), since="0.5.12.post1"
    ),
    # No rank shares an expert here, and DeepEP is not installed. Attention and dense layers are whole on each rank.
    "DeepEP": Case(
        public(R1),
        f"{ATTENTION} --moe-a2a-backend deepep",
        has_weights_and_tokens(expert_bytes(public(R1), 8), 1.4 * expert_bytes(public(R1), 8)),
    ),
    "DeepSeek-V4's shared experts": Case(
        public(V4),
        "--tp 4 --moe-runner-backend marlin",
        does("deferred-shared-experts", "shared experts last"),
        gpu="h100",
        since="0.5.12.post1",
    ),
    # An output of 8,192 tokens and 4,096 columns has 67.1 MB. The stock runner allocates it, because it works out of
    # place.
    "out of place by the engine": Case(
        public("Qwen/Qwen3.5-397B-A17B"),
        "--tp 8 --chunked-prefill-size 8192",
        all_of(does("moe-workspace", OUTPUT), peaks(1037, 970)),
        since="0.5.17",
    ),
    # The figures are measured and predicted in docs/benchmarks/triton-server.md.
    "cut": Case(
        public(R1),
        "--tp 8 --chunked-prefill-size 32768",
        all_of(does("moe-workspace", "columns"), *([peaks(6024, 3620)] if RELEASE == "0.5.12.post1" else [])),
    ),
    "gathered from four ranks, 4,096 tokens each": Case(
        public("Qwen/Qwen3-235B-A22B-FP8"),
        "--tp 4 --dp 4 --enable-dp-attention --chunked-prefill-size 16384",
        all_of(
            # An activation has 8 x 384 columns for each gathered token. The dead input has the rank's own tokens alone,
            # which are 4,096 / 4 columns for each gathered token.
            does_nothing("moe-workspace", "only the rank's own tokens"),
            # The output of 4 x 4,096 tokens x 8 experts x 4,096 columns in bfloat16.
            does_nothing("moe-workspace", "are 1,074 MB on this server") if RELEASE == "0.5.12.post1" else is_known,
            does_nothing("output-buffer", "uses no output buffer"),
        ),
    ),
    # A dead input of 1,024 tokens and 5,120 columns has 10.5 MB. The gathered activation has 8 x 1,536 / 8 columns for
    # each token, 28.3 MB in all.
    "an input of one rank's tokens": Case(
        public("zai-org/GLM-4.7"),
        ATTENTION,
        does_not_say("moe-workspace", SCRATCH),
    ),
    # Column slices act in this prefill. The dead input is not used, because Dynamo traces the layers of a piecewise
    # graph.
    "the dead input in a traced prefill": Case(
        public("MiniMaxAI/MiniMax-M2.7"),
        "--tp 4",
        does_not_say("moe-workspace", SCRATCH) if RELEASE == "0.5.12.post1" else is_known,
        gpu="h100",
    ),
    "BF16 experts on MXFP4's runner": Case(
        gpt_oss_20b_in_bf16(),
        "--tp 1",
        takes_nothing_to_load,
        gpu="h100",
    ),
    # 71 GB of an H100's 84: the engine has no smaller fraction for a model with Mamba layers.
    "a Mamba hybrid that does not start": Case(
        public("Qwen/Qwen3.6-35B-A3B"), "--tp 1", does_not_start_and_is_not_sized, gpu="h100", since="0.5.12.post1"
    ),
    # The kernel has an output of its own, of 16,384 tokens and 7,168 columns. It is copied into a second tensor of this
    # size.
    "FP8 on TRT-LLM, whose output is copied": Case(
        public(R1),
        "--tp 8 --chunked-prefill-size 16384",
        peaks(1609, 1305) if RELEASE == "0.5.12.post1" else is_known,
        gpu="b200",
    ),
    "prefills beside EAGLE": Case(
        public("Qwen/Qwen3-30B-A3B-FP8"),
        "--tp 1 --chunked-prefill-size 8192 --speculative-algorithm EAGLE3 --speculative-draft-model-path a/b "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        names_prefill_graphs(False),
    ),
    # There is one byte for each of 30.5 billion weights, except for those of embeddings and head.
    "FP8 by loading": Case(public("Qwen/Qwen3-30B-A3B"), "--tp 1 --quantization fp8", weighs_between(30e9, 33e9)),
    "weights on the host": Case(
        public("Qwen/Qwen3-30B-A3B"), "--tp 1 --cpu-offload-gb 20", weighs_between(39e9, 40.5e9), gpu="h100"
    ),
    # A rank has 768 of the 1,536 columns of each expert. The activation of a token's eight experts has more columns
    # than the dead input's 4,096.
    "an activation that is too large for the dead input": Case(
        public("Qwen/Qwen3-235B-A22B-FP8"),
        "--tp 2 --chunked-prefill-size 32768" + UNTRACED,
        all_of(
            *(does_not_say("moe-workspace", words) for words in (SCRATCH, "the rank's own tokens")),
            does_nothing("output-buffer", "uses no output buffer"),
        ),
    ),
    "a top-k of 2": Case(
        public("mistralai/Mixtral-8x7B-v0.1"),
        "--tp 2 --chunked-prefill-size 32768",
        does_nothing("moe-workspace", "a top-k of 2 has no sum to cut"),
    ),
    "Marlin, where a slice costs too much": Case(
        public("moonshotai/Kimi-K2.5"),
        "--tp 8 --chunked-prefill-size 16384",
        all_of(
            does_nothing(
                "moe-workspace", "costs more than 2 % of the layer's time; SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB="
            ),
            does("deferred-shared-experts", "shared experts last"),
        ),
    ),
    # The expected memory is the activation of the eight experts of 16,384 tokens, one slice of their outputs, and the
    # slice's columns of 384 experts' weights. A slice has at most 1,024 columns if the output lies in the dead input,
    # else 256.
    "Marlin, cut because it is asked for": Case(
        public("moonshotai/Kimi-K2.5"),
        "--tp 8 --chunked-prefill-size 16384",
        all_of(
            does("moe-workspace", f"columns; {OUTPUT}"),
            takes_while_it_works(2 * 16384 * 8 * (256 + 1024) + 1024 * 384 * 256 * (0.5 + 2 / 32)),
        ),
        env={"SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB": "400"},
    ),
    # The eight outputs of each of 16,384 tokens, with 7,168 columns, have 1,879 MB.
    "Marlin, which may hold as much": Case(
        public("moonshotai/Kimi-K2.5"),
        "--tp 8 --chunked-prefill-size 16384",
        does_nothing("moe-workspace", "1,879 MB on this server, which SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB allows"),
        env={"SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB": "4000"},
    ),
    # The model's linear attention reads attributes that only quantized parameters have. The weights of in_proj_ba are
    # not quantized, because they have too few columns.
    "linear attention in FP8": Case(
        public("Qwen/Qwen3-Next-80B-A3B-Thinking", quantization_config=NEXT_FP8),
        "--tp 2",
        all_of(is_known, weighs(48 * 512 * 3 * 2048 * 512 / 2)),
    ),
    "a small chunk": Case(
        public(R1), "--tp 8 --chunked-prefill-size 1024", does_nothing("moe-workspace", "too small to cut")
    ),
    # The GPU's memory is also the host's memory. So free memory is not available to the server alone.
    "a GPU that shares its memory": Case(
        public("Qwen/Qwen3-30B-A3B-FP8"),
        "--tp 1",
        all_of(is_not_sized_because("the GPU shares its memory with the host"), tokens_of(48 * 2 * 4 * 128 * 2)),
        gpu="gb10",
    ),
    "graphs of prefills": Case(
        public("Qwen/Qwen3-30B-A3B-FP8"), "--tp 1 --chunked-prefill-size 8192", names_prefill_graphs(True)
    ),
    "no graphs of prefills": Case(
        public("Qwen/Qwen3-30B-A3B-FP8"), "--tp 1 --disable-cuda-graph", names_prefill_graphs(False)
    ),
    "graphs of prefills that are off by themselves": Case(
        public("Qwen/Qwen3-30B-A3B-FP8"),
        "--tp 1 --cuda-graph-backend-prefill disabled",
        names_prefill_graphs(False),
        since="0.5.17",
    ),
    "a chunk that is larger than the graphs of prefills": Case(
        public(R1), "--tp 8 --chunked-prefill-size 16384", names_prefill_graphs(False)
    ),
    # The engine itself sizes the KV cache after its graphs from 0.5.16 on, if a variable asks for that. With latent
    # attention the variable has no effect.
    "the engine sizes by itself": Case(
        public("Qwen/Qwen3-30B-A3B-FP8"),
        "--tp 1",
        is_not_sized_because("the engine itself sizes its KV cache after it captured its CUDA graphs"),
        since="0.5.17",
        env=POST_CAPTURE,
    ),
    "the engine's own sizing, set in vain": Case(
        public(R1), "--tp 8", does("kv-sizing", "measures the need of forward passes"), since="0.5.17", env=POST_CAPTURE
    ),
    "prefill alone": Case(
        public(R1),
        "--tp 8 --mem-fraction-static 0.8 --disaggregation-mode prefill",
        is_not_sized_because("of --disaggregation-mode", given=True),
    ),
}


def parameters() -> list[Any]:
    """Return pytest parameters for all cases, by their names. Cases that need a later release are skipped."""
    later = {name: case.since for name, case in CASES.items() if ALL.index(case.since) > ALL.index(RELEASE)}
    return [
        pytest.param(name, marks=pytest.mark.skip(reason=f"it is so from {later[name]} on")) if name in later else name
        for name in CASES
    ]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> dict[str, Report]:
    """Return the reports of doctor for the cases that this test session runs."""
    mine = [item for item in request.session.items if item.path == request.path and not item.get_closest_marker("skip")]
    wanted = {item.callspec.params["name"] for item in mine if isinstance(item, pytest.Function)}
    servers = [
        {"model": name, "config": case.model, "gpu": case.gpu, "flags": case.flags.split(), "env": case.env}
        for name, case in CASES.items()
        if name in wanted
    ]
    return {server["model"]: report for server, report in doctor_answers.call_for_servers(servers)}


@pytest.mark.long("an engine query for each case, made when the first is looked at")
@pytest.mark.every_release
@pytest.mark.parametrize("name", parameters())
def test_doctor_reports_what_the_engine_would_do(name: str, reports: dict[str, Report]) -> None:
    report = reports[name]
    assert "refused" not in report, report
    CASES[name].check(report)
