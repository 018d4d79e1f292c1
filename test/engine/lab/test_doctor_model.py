"""What the engine answers when it is asked for a model on a GPU that is not there."""

from __future__ import annotations

import json

import pytest
from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB
from sglang_moe_patches.lab.predict import model_report
from whole import models


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "all")

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
    assert f"costs more than 2 % of the layer's time; {MOE_WORKSPACE_MB.name} asks for it" in columns["reason"]
    assert found["stock"]["peak"] == pytest.approx(1634.6e6, rel=0.01)  # as measured: docs/benchmarks/peak-memory.md


@pytest.mark.product
def test_deepseeks_shared_expert_is_a_routed_one_there(folder_of):
    found = model_report.examine(folder_of("deepseek-ai/DeepSeek-R1"), ["--tp", "8"], "h200")
    assert (found["sizes"]["experts"], found["sizes"]["top_k"], found["sizes"]["shared_experts"]) == (257, 9, 0)


@pytest.mark.product
def test_what_the_engine_refuses_is_quoted_in_one_line(folder_of):
    with pytest.raises(model_report.CannotAsk, match="invalid int value: 'two'") as caught:
        model_report.examine(folder_of("Qwen/Qwen3-30B-A3B-FP8"), ["--tp", "two"], "h200")
    assert "\n" not in str(caught.value)
