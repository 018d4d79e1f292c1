"""What the engine answers when it is asked for a model on a GPU that is not there."""

from __future__ import annotations

import argparse
import json
import os

import pytest
from sglang.srt.server_args import ServerArgs
from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB
from sglang_moe_patches.lab.predict import engine_query, model_report
from whole import models


@pytest.fixture(autouse=True)
def _select_all(monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "all")


@pytest.fixture
def folder_of(tmp_path):
    def write(source):
        served = next(model for model in models.served() if model["source"] == source)
        (tmp_path / "config.json").write_text(json.dumps(served["config"]))
        return str(tmp_path)

    return write


def test_qwen3_in_fp8_runs_triton_on_a_hopper_gpu_and_is_predicted(folder_of):
    found = model_report.examine(
        folder_of("Qwen/Qwen3-235B-A22B-FP8"), ["--tp", "4", "--chunked-prefill-size", "16384"], "h200"
    )
    server = found["server"]
    assert (server["runner"], server["format"], server["family"]) == ("triton", "FP8 in blocks", "qwen3_moe")
    assert server["layout"] == {"tp": 4, "ep": 1, "dp": 1}
    columns = next(change for change in found["changes"] if change["name"] == "moe-workspace")
    assert not columns["acts"]
    assert f"costs more than 2 % of the layer's time; {MOE_WORKSPACE_MB.name}=" in columns["reason"]
    assert found["stock"]["peak"] == pytest.approx(1634.6e6, rel=0.01)  # as measured: docs/benchmarks/peak-memory.md


def test_the_engine_imports_the_modules_that_name_the_models_classes_and_no_others(monkeypatch):
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")  # else nothing is restored
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
    engine_query._leave_out_other_models(["NobodysForCausalLM"])
    assert "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ
    engine_query._leave_out_other_models(["Qwen3MoeForCausalLM"])
    left_out = os.environ["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "deepseek_v2" in left_out
    assert "qwen3_moe" not in left_out


@pytest.mark.every_release
def test_what_a_query_leaves_out_changes_no_answer(folder_of):
    """A model with eyes, whose classes name most of what is left out."""
    asked = {"gpu": "h200", "language_model": False}
    asked["arguments"] = ["--model-path", folder_of("Qwen/Qwen3-VL-30B-A3B-Instruct-FP8"), "--random-seed", "1"]
    environ = model_report.query_environment()
    lean, whole = (engine_query._query_once(asked | {"leave_out_unused": out}, environ) for out in (True, False))
    assert lean["layer"]
    assert lean == whole


@pytest.mark.product
def test_deepseeks_shared_expert_is_a_routed_one_there(folder_of):
    found = model_report.examine(folder_of("deepseek-ai/DeepSeek-R1"), ["--tp", "8"], "h200")
    assert (found["sizes"]["experts"], found["sizes"]["top_k"], found["sizes"]["shared_experts"]) == (257, 9, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ["--tp", "3"],  # when a layer is built
            "divisible by 3|% attn_tp_size == 0|% tensor_parallel_size == 0",
            marks=pytest.mark.every_release,
        ),
        (["--tp", "8", "--dp", "3", "--enable-dp-attention"], r"AssertionError: assert .*tp_size % "),
        (["--served-model-name", "a:b"], "served_model_name cannot contain a colon"),  # check_server_args
        (["--served-model-name", "a", "b"], "unrecognized arguments: b$"),
        (["--mem-fraction-statics", "0.8"], "--mem-fraction-statics.*; this release has --mem-fraction-static$"),
    ],
    ids=["ranks", "attention's ranks", "check_server_args", "two names", "misspelt"],
)
def test_what_the_engine_refuses_is_quoted_in_one_line(arguments, said):
    with pytest.raises(engine_query.Refused, match=said) as caught:
        model_report.examine("Qwen/Qwen3-30B-A3B-FP8", arguments, "h200")
    assert "\n" not in str(caught.value)


@pytest.mark.every_release
def test_an_option_of_another_release_is_refused_with_the_options_of_this_one():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--cuda-graph-max-bs" in parser._option_string_actions:
        pytest.skip("this release has it")
    with pytest.raises(engine_query.Refused, match="--cuda-graph-max-bs-decode"):
        model_report.examine("Qwen/Qwen3-30B-A3B-FP8", ["--cuda-graph-max-bs", "8"], "h200")


@pytest.mark.every_release
def test_a_draft_that_is_not_at_hand_leaves_the_target_known():
    draft = "nvidia/gpt-oss-120b-Eagle3"
    speculates = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft]
    steps = [f"--speculative-{each}" for each in ("num-steps=3", "eagle-topk=1", "num-draft-tokens=4")]
    found = model_report.examine("openai/gpt-oss-120b", ["--tp", "8", *speculates, *steps], "h200")
    assert found["server"]["runner"]
    assert f"the draft model {draft}: its config.json is not at hand" in found["unknown"]


@pytest.fixture
def in_bf16(tmp_path):
    """Qwen3-30B, for which the engine has files of tuned tiles on an H200."""
    content = next(dict(each["config"]) for each in models.served() if each["source"] == "Qwen/Qwen3-30B-A3B-FP8")
    del content["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path)


@pytest.mark.every_release
def test_tiles_are_those_of_the_tokens_that_data_parallel_ranks_gather(in_bf16):
    attention = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--chunked-prefill-size", "1024"]
    server = model_report.examine(in_bf16, attention, "h200")["server"]
    assert (server["tokens"], server["layout"]["dp"]) == (512, 2)
    assert server["tiles"]["BLOCK_SIZE_M"] == 128  # 64 for 512 tokens


@pytest.mark.every_release
def test_a_cut_costs_what_it_does_with_the_tiles_that_the_engine_loads_on_that_gpu(in_bf16):
    """The tensor stays whole."""
    found = model_report.examine(in_bf16, ["--tp", "1", "--chunked-prefill-size", "16384"], "h200")
    assert found["server"]["tiles"]["BLOCK_SIZE_M"] == 128
    assert found["patched"]["peak"] == found["stock"]["peak"] == pytest.approx(945e6, rel=0.01)
    row = next(change for change in found["changes"] if change["name"] == "moe-workspace")
    assert row["advice"]["saved_bytes"] > 100e6
    assert found["kv_cache"]["weight_bytes"] == pytest.approx(61e9, rel=0.01)
