"""``benchmark/plan.py``: whole runs with a stand-in for the engine, and the tables of what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import plan as benchmark
import pytest
from releases import ROOT

STANDIN = ROOT / "test/standins/engine_for_plan"
BELIEVES = """
from sglang_moe_patches.core import machine
machine.has_gpu = lambda: True
"""


def run(folder: Path, *arguments: str, gpu: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BELIEVES if gpu else BELIEVES.replace("True", "False"))
    paths = [str(folder), str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmark" / "plan.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "STANDIN_FOLDER": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


SERVED = ("--model", "qwen3-30b", "--layers", "2", "--chunk", "4096", "--verify-seconds", "1", "--only", "patched")


@pytest.mark.product
def test_a_plan_becomes_a_result_with_tables(tmp_path) -> None:
    done = run(tmp_path, *SERVED, "--json", str(tmp_path / "found.json"), "--logs", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    server = found["figures"]["servers"]["patched"]
    assert server["second"]["fraction"] == pytest.approx(0.9177)
    assert server["verdict"] == "held"
    # 20 % of 100,000 MiB set aside; the second GPU needs 6.144 GB, and 99 GB were free before.
    row = (
        "| qwen3-30b, 2 layers | 4,096 | patched | 21.0 GB | 6.1 GB | 0.8000: 49,200 | 0.9177: 60,852 (+24 %) | held |"
    )
    assert row in benchmark.tables([found])
    assert row in done.stdout
    assert (tmp_path / "logs" / "patched" / "plan.html").exists()
    assert (tmp_path / "logs" / "patched" / "1-patched.log").exists()


def test_without_a_gpu_one_line_says_so(tmp_path) -> None:
    done = run(tmp_path, *SERVED, gpu=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("plan.py: needs a GPU")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [*benchmark.VOCABULARY, *benchmark.SEEING])
def test_the_model_has_the_vocabulary_and_the_sizes_of_one_rank(tmp_path, name) -> None:
    written = json.loads((benchmark.write_model(tmp_path / "m", name, 2, 4, 4096) / "config.json").read_text())
    config, whole = benchmark.kinds.text(written), benchmark.kinds.CONFIGS.get(name)
    assert config["num_hidden_layers"] == 4
    assert config["max_position_embeddings"] == 4096
    assert config["vocab_size"] == benchmark.VOCABULARY.get(name, 151_936) > 150_000
    if whole is None:
        assert config["moe_intermediate_size"] * 2 == benchmark.MODELS[name].moe_intermediate
        assert config["hidden_size"] == benchmark.MODELS[name].hidden
    else:
        assert config["num_attention_heads"] * 2 == benchmark.kinds.text(whole)["num_attention_heads"]
    assert benchmark.layers(name) >= 36
