"""Tests of ``lab/predict/model_report.py``, which makes the report of ``doctor --model``: the effects of the changes on
a server, the server's memory, and the parts of the memory that cannot be predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from common.shapes import MODELS, every_change
from doctor_reports import ALL, DECIDED, FIT, GB, LAYER, WHOLE, advise, asked
from sglang_moe_patches import cli
from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.patch import (
    COLUMNS,
    OUTPUT_IN_DEAD_INPUT,
    SCRATCH_IN_DEAD_INPUT,
    SHARED_LAST,
    Change,
    Decision,
    Skip,
)
from sglang_moe_patches.lab.predict import config, engine_query, forward, model_report
from sglang_moe_patches.lab.predict.config import ModelSizes
from sglang_moe_patches.lab.predict.engine_pools import describe
from sglang_moe_patches.lab.predict.forward import MemoryEffects
from sglang_moe_patches.lab.predict.model_report import Server, derive_effects
from sglang_moe_patches.lab.predict.shapes import Layout
from sglang_moe_patches.registry import CHANGES
from typer.testing import CliRunner

KIMI = Server("triton", None, "BF16", "deepseek_v2", Layout(tp=4), 16384)


def row_of(change: str, report: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in report["changes"] if row["name"] == change)


def test_all_changes_on_deepseeks_layers_are_what_the_benchmarks_predict():
    model = MODELS["kimi-k2.5"]
    assert derive_effects(KIMI, True, DECIDED) == (MemoryEffects(), every_change(model, 1024))
    report = advise()
    assert report["stock"]["peak"] == pytest.approx(3_027.7e6, rel=0.001)
    assert report["patched"]["peak"] == pytest.approx(1_168.0e6, rel=0.001)
    assert report["unknown"] == list(model_report.ALWAYS_UNKNOWN)


EVERYTHING = MemoryEffects(True, True, True, 1024)
QWEN = {"family": "qwen3_moe"}
NEWER = {"engine_drops": True}
TRTLLM = {"runner": "flashinfer_trtllm_routed"}
LAST, OUTPUT, CUT = Decision((SHARED_LAST,)), Decision((OUTPUT_IN_DEAD_INPUT,)), Decision((COLUMNS,), width=256)
SCRATCH = Decision((SCRATCH_IN_DEAD_INPUT,))


@pytest.mark.parametrize(
    ("server", "shared", "decided", "stock", "patched"),
    [
        (QWEN, False, {}, MemoryEffects(), MemoryEffects()),
        (QWEN, False, {"moe-workspace": CUT}, MemoryEffects(), MemoryEffects(columns=256)),
        (QWEN, False, {"moe-workspace": SCRATCH}, MemoryEffects(), MemoryEffects(dead_input=True)),
        (QWEN | TRTLLM, False, {"output-buffer": OUTPUT}, MemoryEffects(), MemoryEffects(dead_input=True)),
        # deferred-shared-experts keeps Triton from writing over its input. Triton then writes its output into any dead
        # input.
        (
            {},
            True,
            {"deferred-shared-experts": LAST},
            MemoryEffects(),
            MemoryEffects(shared_last=True, dead_input=True),
        ),
        ({"family": ""}, True, {"deferred-shared-experts": LAST}, MemoryEffects(), MemoryEffects(shared_last=True)),
        (
            {"runner": "marlin"},
            True,
            {"deferred-shared-experts": LAST},
            MemoryEffects(),
            MemoryEffects(shared_last=True),
        ),
        # The engine itself keeps Triton from writing over its input.
        (
            QWEN | {"in_place": False},
            True,
            {"moe-workspace": OUTPUT},
            MemoryEffects(out_of_place=True),
            MemoryEffects(dead_input=True, out_of_place=True),
        ),
        ({"in_place": False}, True, DECIDED, MemoryEffects(), EVERYTHING),
        # Newer releases have some of these effects without this package.
        (NEWER, True, {"deferred-shared-experts": LAST}, MemoryEffects(True), MemoryEffects(True, True, True)),
        (NEWER | TRTLLM, True, {}, *[MemoryEffects(True, True)] * 2),
        (NEWER | TRTLLM | {"format": "NVFP4"}, True, {}, *[MemoryEffects(True, True, True)] * 2),
    ],
)
def test_effects_in_the_report_follow_the_changes_decisions(server, shared, decided, stock, patched):
    assert derive_effects(replace(KIMI, **server), shared, decided) == (stock, patched)


@pytest.mark.parametrize(
    ("runner", "method", "blocks", "input_bytes", "outputs"),
    [
        ("flashinfer_trtllm", "ModelOptNvFp4FusedMoEMethod", False, 0.5 + 1 / 16, 1),
        ("flashinfer_trtllm", "UnquantizedFusedMoEMethod", False, 0, 1),
        ("flashinfer_trtllm", "Fp8MoEMethod", True, 1 + 4 / 128, 1),
        ("triton", "Fp8MoEMethod", True, 0, 0),
    ],
)
def test_input_bytes_of_trtllm_kernels_depend_on_the_format(runner, method, blocks, input_bytes, outputs) -> None:
    layer = LAYER | {"runner": runner, "method": method, "blocks": blocks}
    parts = advise(layer=layer, decided={})["stock"]["parts"]
    tokens, hidden = 16384, 7168
    assert parts["inputs"] == int(tokens * hidden * input_bytes)
    # Four tensors are alive: the residual, the layer's input, the MoE input and the shared experts' output. The
    # kernel's output is a fifth tensor.
    assert parts["hidden"] == (4 + outputs) * 2 * tokens * hidden


def test_effects_on_a_layer_that_could_not_be_built_are_unknown() -> None:
    report = advise(layer=None, moe_runner_backend="triton")
    acts = {change["name"]: change["acts"] for change in report["changes"]}
    decides = {change.name for change in CHANGES if change.decide}
    assert {name for name, each in acts.items() if each is None} == decides | {"fp4-weights"}
    assert all(change["reason"] == model_report.NOT_BUILT for change in report["changes"] if change["acts"] is None)
    assert report["stock"] is None


def test_a_change_that_is_not_applied_shows_its_reason_and_no_decision() -> None:
    report = advise(changes=ALL | {"output-buffer": "not needed here"})
    assert row_of("output-buffer", report)["acts"] is False


def test_only_deepseeks_router_computes_float32_logits():
    newer = asked() | {"float_logits": True}
    read = ModelSizes(MODELS["kimi-k2.5"])
    assert model_report.derive_report(read, newer)["server"]["float_logits"]
    newer["layer"] = LAYER | {"family": "qwen3_moe"}
    assert not model_report.derive_report(read, newer)["server"]["float_logits"]


def test_each_change_shows_its_effect_on_the_server_or_a_reason():
    changes = {change["name"]: change for change in advise()["changes"]}
    assert {name for name, change in changes.items() if change["acts"]} >= {
        *("output-buffer", "deferred-shared-experts", "moe-workspace"),
    }
    assert all(bool(change["does"]) == change["acts"] for change in changes.values())
    layer = LAYER | {"runner": "marlin", "method": "CompressedTensorsWNA16MoE", "family": "qwen3_moe"}
    marlin = advise(layer=layer, decided=WHOLE)
    assert row_of("moe-workspace", marlin)["reason"] == WHOLE["moe-workspace"].reason
    assert marlin["stock"] == marlin["patched"]


def test_marlins_workspace_is_predicted_without_and_with_column_slices():
    """The predicted workspace of Marlin equals a formula with the layer's sizes (Kimi-K2.5 in INT4 at TP=8). On the
    patched server, it contains slices of 1,024 columns and a copy of their weights, but no output: the output lies in
    the dead input."""
    report = advise(
        layer=LAYER | {"runner": "marlin", "method": "CompressedTensorsWNA16MoE", "intermediate": 256}, tp_size=8
    )
    workspace = {name: report[name]["parts"]["workspace"] for name in ("stock", "patched")}
    rows = 16384 * 8
    assert workspace["stock"] == rows * 2 * (256 + 7168) + 2 * 16384 * 7168
    assert workspace["patched"] == rows * 2 * 256 + 1024 * (2 * rows + 384 * 256 * 0.5625)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"layer": LAYER | {"runner": "deep_gemm"}}, "not predicted: there is no formula for the runner deep_gemm"),
        ({"layer": None}, "not predicted: the runner is not known"),
        ({"layer": LAYER | {"method": "SomethingNew"}}, "no formula for the quantized inputs of SomethingNew"),
        ({"moe_a2a_backend": "deepep"}, "not predicted: there is no formula for all-to-all by deepep"),
        ({"tp_size": 3}, "is not divisible by 3"),
    ],
    ids=["runner", "no layer", "format", "all-to-all", "ranks"],
)
def test_memory_without_a_formula_is_reported_as_not_predicted(facts, reason):
    report = advise(**facts)
    assert report["stock"] is report["patched"] is None
    assert any(reason in line for line in report["unknown"])


@pytest.mark.parametrize(
    "ranks", [{"dp_size": 4, "enable_dp_attention": True}, {"attn_dp_size": 4}], ids=["up to 0.5.19", "later"]
)
def test_data_parallel_attention_is_not_predicted(ranks):
    assert advise(**ranks)["server"]["layout"]["dp"] == 4
    reason = "there is no formula for data-parallel attention"
    assert f"{model_report.NOT_PREDICTED}{reason}" in advise(**ranks)["unknown"]


@pytest.mark.parametrize(
    ("method", "runner", "acts"),
    [
        ("ModelOptNvFp4FusedMoEMethod", "flashinfer_trtllm", True),
        ("ModelOptNvFp4FusedMoEMethod", "marlin", True),
        ("ModelOptNvFp4FusedMoEMethod", "cutlass", False),
        ("ModelOptNvFp4FusedMoEMethod", None, None),
        ("Mxfp4MoEMethod", "triton_kernel", True),
        ("Mxfp4MarlinMoEMethod", "marlin", True),
        ("Mxfp4MoEMethod", "flashinfer_mxfp4", False),
        ("Fp8MoEMethod", "flashinfer_trtllm", False),
        ("SomethingNew", "marlin", False),
    ],
)
def test_fp4_weights_acts_by_format_and_runner(method, runner, acts):
    assert row_of("fp4-weights", advise(layer=LAYER | {"method": method, "runner": runner}))["acts"] is acts


def test_a_variable_that_this_server_does_not_read_is_named():
    environ = {"SGLANG_MORI_MOE_MAX_INPUT_TOKENS": "abc", "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB": "400"}
    rows = [
        {"name": "mori-input-truncation", "status": "not needed here", "reason": "--moe-a2a-backend is none"},
        {"name": "moe-workspace", "status": "applied", "reason": ""},
    ]
    assert model_report.describe_unused_variables(rows, environ) == [
        "SGLANG_MORI_MOE_MAX_INPUT_TOKENS=abc is set, but this server does not read it: --moe-a2a-backend is none"
    ]
    rows[0]["status"] = "applied"
    assert model_report.describe_unused_variables(rows, environ) == []
    assert model_report.describe_unused_variables(rows, {}) == []


def test_fp4_weights_says_how_much_less_memory_loading_takes():
    stock = replace(FIT, loading=9 * GB, layout=8 * GB)
    layer = LAYER | {"runner": "triton_kernel", "method": "Mxfp4MoEMethod"}
    fits = {"stock_fit": describe(stock), "fit": describe(replace(stock, loading=2 * GB, layout=GB))}
    row = row_of("fp4-weights", model_report.derive_report(ModelSizes(MODELS["kimi-k2.5"]), asked(layer) | fits))
    assert row["does"].endswith(
        "; after loading, about 7,000 MB more are free on each GPU; the peak while loading is about 14,000 MB lower"
    )


def test_unsupported_attention_cannot_be_the_place_of_the_peak():
    read = ModelSizes(MODELS["kimi-k2.5"], attention="attends to keys that an indexer chooses")
    report = model_report.derive_report(read, asked())
    assert "attention" not in report["stock"]["elsewhere"]
    assert any(model_report.AT_LEAST in line for line in report["unknown"])


def test_the_report_names_the_kernels_workspace_as_additional_memory():
    layer = LAYER | {"runner": runners.TRTLLM[1], "method": "ModelOptNvFp4FusedMoEMethod"}
    report = advise(layer=layer)
    assert any(model_report.OWN_WORKSPACE in line for line in report["unknown"])
    assert report["patched"]["parts"]["workspace"] == 0


@pytest.mark.parametrize(
    ("method", "facts", "quantization", "words"),
    [
        ("UnquantizedFusedMoEMethod", {}, None, "BF16"),
        ("Fp8MoEMethod", {"blocks": True}, forward.BLOCKS, "FP8 in blocks"),
        ("Fp8MoEMethod", {"blocks": True, "mxfp4": True}, None, "MXFP4"),  # DeepSeek-V4's experts
        ("CompressedTensorsW8A8Fp8MoE", {}, "rows", "FP8 by rows"),
        ("CompressedTensorsWNA16MoE", {}, None, "INT4 or INT8 weights"),
        ("ModelOptNvFp4FusedMoEMethod", {}, None, "NVFP4"),
        ("Mxfp4MoEMethod", {}, None, "MXFP4"),
        ("Unheard", {}, "Unheard", "Unheard"),
    ],
)
def test_the_weight_format_follows_from_the_engines_quantization_class(method, facts, quantization, words):
    layer = {"method": method, "blocks": False, "mxfp4": False} | facts
    assert model_report._name_format(layer) == (quantization, words)


@pytest.mark.parametrize(
    ("arguments", "gpu", "variable", "message"),
    [
        (["--model-path", "x"], "h200", "", "give --model before the `--`"),
        (["--model=x"], "h200", "", "give --model before the `--`"),
        ([], "h30", "", "--gpu h30 is unknown; did you mean h"),
        ([], "h200", "WORKSPACE_MEGABYTES", "no code reads it; did you mean SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB"),
        ([], "h200", "", "SGLang is not installed in this environment"),
    ],
)
def test_a_question_that_doctor_cannot_answer_is_refused(arguments, gpu, variable, message, monkeypatch):
    monkeypatch.setattr(engine, "version", lambda: None)
    if variable:
        monkeypatch.setenv(f"SGLANG_MOE_PATCHES_MOE_{variable}", "700")
    with pytest.raises(model_report.CannotAdvise, match=message):
        model_report.examine("Qwen/Qwen3-30B-A3B-FP8", arguments, gpu)


def test_a_missing_draft_model_is_replaced_and_named(tmp_path):
    sizes = {"hidden_size": 64, "vocab_size": 100}
    for given in (["--speculative-draft-model-path", "a/b"], ["--speculative-draft-model-path=a/b"]):
        folder = tmp_path / str(len(given))
        arguments, missing = model_report._replace_missing_draft([*given, "--tp", "2"], {"text_config": sizes}, folder)
        assert missing == "a/b"
        assert arguments == ["--tp", "2", "--speculative-draft-model-path", str(folder)]
        assert json.loads((folder / "config.json").read_text()).items() >= sizes.items()
    there = ["--speculative-draft-model-path", str(tmp_path / "1"), "--tp", "2"]
    for kept in (there, ["--tp", "2"], ["--speculative-draft-model-path"]):
        assert model_report._replace_missing_draft(kept, sizes, tmp_path / "x") == (kept, "")
    read = ModelSizes(MODELS["kimi-k2.5"])
    report = model_report.derive_report(read, asked() | {"missing_draft": "a/b"})
    assert "the draft model a/b: its config.json was not found" in report["unknown"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (engine_query.Refused("tp_size must divide"), "the engine refuses this server: tp_size must divide"),
        (engine_query.CannotAsk("no driver"), "the engine could not examine this server without a GPU: no driver"),
        (model_report.CannotAdvise("is it this?"), "is it this?"),
        (config.NoConfig("a/b has no config.json"), "a/b has no config.json"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(error, message, monkeypatch):
    def refuse(*args: Any) -> None:
        raise error

    monkeypatch.setattr(model_report, "examine", refuse)
    result = CliRunner().invoke(cli.app, ["doctor", "--model", "a/b", "--", "--tp", "3"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"sglang-moe-patches: {message}\n")


def test_the_json_output_has_the_whole_report(monkeypatch):
    report = advise() | {"model": "a/b", "gpu": "h200", "engine": "0.5"}
    monkeypatch.setattr(model_report, "examine", lambda *asked: report)
    result = CliRunner().invoke(cli.app, ["doctor", "--model", "a/b", "--json"])
    assert json.loads(result.stdout) == json.loads(json.dumps(report))


def test_a_changes_status_in_the_report_equals_its_status_in_the_log(monkeypatch):
    left_out = Change("a", "", pytest.fail, skip=lambda server_args: Skip(f"{server_args.variable} is unset", True))
    monkeypatch.setattr(engine_query, "CHANGES", (left_out, replace(left_out, name="b", decide=pytest.fail)))
    plans = engine_query._apply_changes(SimpleNamespace(variable="A"))
    assert {name: (str(plan.status), plan.reason) for name, plan in plans.items()} == dict.fromkeys(
        ("a", "b"), ("off", "A is unset")
    )


@pytest.mark.parametrize(
    ("answer", "acts", "words"),
    [
        ({"mode": "auto"}, True, "measures the need of forward passes"),
        ({"mode": "auto", "given": True}, False, "the given --mem-fraction-static is used because it"),
        ({"mode": "always", "given": True}, True, "beginning with the given --mem-fraction-static"),
        ({"mode": ""}, False, "=auto turns kv-sizing on; kv-sizing would then set"),
        ({"mode": "", "given": True}, False, "=always turns kv-sizing on; kv-sizing would then set"),
        ({"mode": "", "skip_reason": "of --enable-eplb"}, False, "would be used because of --enable-eplb"),
        ({"mode": "auto", "skip_reason": "of --enable-lora"}, False, "is used because of --enable-lora"),
        (
            *({"mode": "auto", "given": True, "skip_reason": "of --moe-a2a-backend"}, False),
            "the given --mem-fraction-static is used because of --moe-a2a-backend",
        ),
        ({"mode": "auto", "unknown": "KeyError: a"}, None, "not known: the engine did not compute the KV cache size"),
        ({"mode": "auto", "unknown": "KeyError: a", "given": True}, False, "is used because it was given"),
        (
            {"mode": "", "unknown": "KeyError: a"},
            False,
            "whether kv-sizing would then set the KV cache size is not known",
        ),
    ],
)
def test_kv_sizings_row_shows_the_servers_own_decision(answer, acts, words) -> None:
    answers = asked() | {"kv_sizing": {"skip_reason": "", "given": False, "unknown": "", **answer}}
    report = model_report.derive_report(ModelSizes(MODELS["kimi-k2.5"]), answers)
    row = row_of("kv-sizing", report)
    assert row["acts"] is acts
    assert words in (row["does"] or row["reason"])
