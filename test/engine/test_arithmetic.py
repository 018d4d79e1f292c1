"""What a user runs: `regress` starts both servers of the shipped model, and they can do arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servers import ARITHMETIC, NATIVE_BUFFER, ROUTED, SERVER, check_figures, regress
from sglang_moe_patches.observers import events
from sglang_moe_patches.regression.compare import Comparison
from tiny_moe.mutations import SHIPPED


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    """The folder of the report on the shipped model, both servers started by ``regress``."""
    output = tmp_path_factory.mktemp("arithmetic") / "report"
    model = str(SHIPPED / "model")
    done = regress("--model", model, *ARITHMETIC, "--output", str(output), "--", *SERVER, ROUTED)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


# Where the engine has a buffer of its own, real servers are started for what it does wrong.
ON_RELEASES = pytest.mark.product if NATIVE_BUFFER else pytest.mark.every_release


@ON_RELEASES
def test_a_model_that_can_do_arithmetic_loses_no_answer(arithmetic):
    results = json.loads((arithmetic / "report.json").read_text())["results"]
    assert results["accuracy"]["stock"] >= 0.85
    assert results["accuracy_can_tell"]
    assert results["token_identical"]


@ON_RELEASES
def test_the_report_has_both_runs_answers_memory_and_changes(arithmetic):
    report = json.loads((arithmetic / "report.json").read_text())
    stock, patched = report["runs"]["stock"], report["runs"]["patched"]
    assert [a["tokens"] for a in stock["answers"]] == [a["tokens"] for a in patched["answers"]]
    assert len(stock["answers"]) == 24
    found = Comparison.from_dict(report)
    processes = (events.Process(run.changes, run.memory, run.acted) for run in (found.stock, found.patched))
    check_figures(*processes, moe_layers=3)
    assert (arithmetic / "report.html").stat().st_size > 10_000
