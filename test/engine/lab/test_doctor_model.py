"""Tests of ``doctor --model`` for GPUs that this machine does not have. The installed engine answers each query."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any

import pytest
from common import doctor_answers
from sglang.srt.server_args import ServerArgs
from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB
from sglang_moe_patches.lab.predict import config, engine_query, model_report

QWEN, QWEN_LARGE = "Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-235B-A22B-FP8"
IN_BF16 = "QWEN in BF16"
"""Name in ``SERVERS`` for the model ``QWEN`` without quantization. The fixture ``answers`` creates a folder with this
model's ``config.json``, and replaces the name by the folder's path. The engine has a file with tuned tile sizes for the
model's MoE layer on an H200."""
CHUNK = "--chunked-prefill-size"
DRAFT = "nvidia/gpt-oss-120b-Eagle3"
STEPS = [f"--speculative-{each}" for each in ("num-steps=3", "eagle-topk=1", "num-draft-tokens=4")]
SERVERS = {
    # Traced prefill graphs offer no dead input.
    "FP8": (QWEN_LARGE, ["--tp", "4", CHUNK, "16384", "--disable-piecewise-cuda-graph"]),
    "DeepSeek": ("deepseek-ai/DeepSeek-R1", ["--tp", "8"]),
    "draft": (
        "openai/gpt-oss-120b",
        ["--tp", "8", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", DRAFT, *STEPS],
    ),
    "BF16": (IN_BF16, ["--tp", "1", CHUNK, "16384"]),
    "ranks": (QWEN, ["--tp", "3"]),  # the engine refuses this when it builds a layer
    "attention's ranks": (QWEN, ["--tp", "8", "--dp", "3", "--enable-dp-attention"]),
    "check_server_args": (QWEN, ["--served-model-name", "a:b"]),
    "misspelt": (QWEN, ["--mem-fraction-statics", "0.8", "--served-model-name", "a", "b"]),
    "another release's": (QWEN, ["--cuda-graph-max-bs", "8"]),
    "MoRI": ("deepseek-ai/DeepSeek-R1", ["--tp", "8", "--moe-a2a-backend", "mori", CHUNK, "4096"]),
}
ENVIRON = {"MoRI": {"SGLANG_MORI_MOE_MAX_INPUT_TOKENS": "abc"}}
"""Environment variables of servers that need any. The key is the server's name in ``SERVERS``."""


def examine(server: dict[str, Any]) -> dict[str, Any]:
    """Return the report of ``doctor --model``, or, if there is an error, its type and its text."""
    try:
        return model_report.examine(server["model"], server["flags"], server["gpu"])
    except engine_query.CannotAsk as error:
        return {type(error).__name__: str(error)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the report or the error for each entry of ``SERVERS``. The engine is imported only once for all
    entries."""
    folder = tmp_path_factory.mktemp("model")
    content, _ = config.load_model(QWEN)
    del content["quantization_config"]
    (folder / "config.json").write_text(json.dumps(content))
    servers = [
        {
            "model": str(folder) if model == IN_BF16 else model,
            "gpu": "h200",
            "flags": flags,
            "env": ENVIRON.get(name, {}),
        }
        for name, (model, flags) in SERVERS.items()
    ]
    found = doctor_answers.call_for_servers(servers, f"{__name__}:examine")
    return {name: answer for name, (_, answer) in zip(SERVERS, found, strict=True)}


def test_qwen3_in_fp8_runs_triton_on_a_hopper_gpu_and_is_predicted(answers):
    found = answers["FP8"]
    server = found["server"]
    assert (server["runner"], server["format"], server["family"]) == ("triton", "FP8 in blocks", "qwen3_moe")
    assert server["layout"] == {"tp": 4, "ep": 1, "dp": 1}
    columns = next(change for change in found["changes"] if change["name"] == "moe-workspace")
    # The activation of a token has 8 x 384 columns, which fit into the 4,096 columns of the dead input. The expert
    # outputs are not cut.
    assert columns["acts"]
    assert columns["does"].startswith("the activation in the dead input; ")
    assert f"costs more than 2 % of the layer's time; {MOE_WORKSPACE_MB.name}=" in columns["does"]
    assert found["stock"]["peak"] == pytest.approx(1634.6e6, rel=0.01)  # as measured: docs/benchmarks/peak-memory.md


def test_the_engine_imports_only_the_modules_that_name_the_models_classes(monkeypatch):
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")  # otherwise monkeypatch would restore nothing
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
    engine_query._leave_out_other_models(["NobodysForCausalLM"])
    assert "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ
    engine_query._leave_out_other_models(["Qwen3MoeForCausalLM"])
    left_out = os.environ["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "deepseek_v2" in left_out
    assert "qwen3_moe" not in left_out


@pytest.mark.every_release
@pytest.mark.long("two queries, of which one imports all that the engine does")
def test_packages_that_a_query_leaves_out_change_no_answer(tmp_path):
    """A query that replaces packages by stand-ins must have the same answer as a query that imports all packages. The
    replaced packages (``unused_imports.UNUSED``) are not needed for a report. The model of this test takes images, and
    its classes refer to most of these packages."""
    asked = {"gpu": "h200", "language_model": False, "top_k": 8}
    content, _ = config.load_model("Qwen/Qwen3-VL-30B-A3B-Instruct-FP8")
    (tmp_path / "config.json").write_text(json.dumps(content))
    asked["arguments"] = ["--model-path", str(tmp_path), "--random-seed", "1"]
    environ = model_report.query_environment() | doctor_answers.SELECTED
    lean, whole = (engine_query._query_once(asked | {"leave_out_unused": out}, environ) for out in (True, False))
    assert lean["layer"]
    assert lean == whole


@pytest.mark.product
def test_deepseeks_shared_expert_runs_as_a_routed_expert(answers):
    sizes = answers["DeepSeek"]["sizes"]
    assert (sizes["experts"], sizes["top_k"], sizes["shared_experts"]) == (257, 9, 0)


@pytest.mark.parametrize(
    ("server", "error", "pattern"),
    [
        pytest.param(
            "ranks",
            "ModelRefused",
            "divisible by 3|% attn_tp_size == 0|% tensor_parallel_size == 0",
            marks=[pytest.mark.every_release, pytest.mark.long("the servers of all of these are asked here")],
        ),
        ("attention's ranks", "Refused", r"AssertionError: assert .*tp_size % "),
        ("check_server_args", "Refused", "served_model_name cannot contain a colon"),
        ("MoRI", "Refused", "^SGLANG_MORI_MOE_MAX_INPUT_TOKENS: expected 0 .* got 'abc'$"),
        (
            *("misspelt", "Refused"),
            "unrecognized arguments: --mem-fraction-statics 0.8 b; "
            "similar in this release of SGLang: --mem-fraction-static$",
        ),
    ],
)
def test_the_engines_refusal_is_quoted_in_one_line(answers, server, error, pattern):
    assert re.search(pattern, answers[server][error])
    assert "\n" not in answers[server][error]


@pytest.mark.every_release
def test_an_option_of_another_release_is_refused_with_the_options_of_this_one(answers):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--cuda-graph-max-bs" in parser._option_string_actions:
        pytest.skip("this release has it")
    assert "--cuda-graph-max-bs-decode" in answers["another release's"]["Refused"]


@pytest.mark.every_release
def test_a_missing_draft_model_does_not_prevent_the_report(answers):
    assert answers["draft"]["server"]["runner"]
    assert f"the draft model {DRAFT}: its config.json was not found" in answers["draft"]["unknown"]


@pytest.mark.every_release
def test_the_predicted_cost_of_slices_uses_the_tile_file_of_the_gpu(answers):
    """``doctor`` must predict the time of column slices with the tile sizes in the engine's file for the GPU. By
    default, moe-workspace computes this model without slices. The report must name the setting for slices, their saving
    of memory, and their additional time."""
    found = answers["BF16"]
    assert found["patched"]["peak"] == found["stock"]["peak"] == pytest.approx(945e6, rel=0.01)
    row = next(change for change in found["changes"] if change["name"] == "moe-workspace")
    assert "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB=604 cuts them all the same: 134 MB less, about 1.0" in row["reason"]
    assert found["fit"]["weights"] == pytest.approx(61e9, rel=0.01)
