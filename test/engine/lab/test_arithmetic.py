"""Run ``regress`` as a user does, with this repository's tiny model, which can do arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import RELEASE
from releases import DEFAULT
from servers import (
    MAX_ANSWER_TOKENS,
    NATIVE_BUFFER,
    PRELOADED,
    QUESTION_COUNT,
    ROUTED,
    SERVER,
    SHIPPED,
    check_figures,
    prepend_to_path,
    regress,
    shortest_questions,
)
from sglang_moe_patches.lab.observers import events

pytestmark = [
    pytest.mark.ci,
    pytest.mark.long("two servers, started by `regress`, answer as many questions as accuracy needs"),
]


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    """Return the folder with the report of ``regress`` about the tiny model."""
    folder = tmp_path_factory.mktemp("arithmetic")
    output, data = folder / "report", folder / "test.jsonl"
    data.write_text("\n".join(shortest_questions(QUESTION_COUNT + 1)) + "\n")
    evaluation = ["--data-path", str(data), "--num-questions", str(QUESTION_COUNT), "--num-shots", "1"]
    evaluation += ["--max-new-tokens", str(MAX_ANSWER_TOKENS)]
    servers = ["--model", str(SHIPPED / "model"), *evaluation, "--output", str(output), "--", *SERVER, ROUTED]
    # On the default release, servers spawn their processes. This is how a user's servers start.
    process = regress(*servers, **({} if RELEASE == DEFAULT else {"PYTHONPATH": prepend_to_path(PRELOADED)}))
    assert process.returncode == 0, process.stdout + process.stderr
    return output


# On releases with a native output buffer, other tests start servers.
ON_RELEASES = pytest.mark.product if NATIVE_BUFFER else pytest.mark.every_release


@ON_RELEASES
def test_the_patched_server_gives_the_same_right_answers(arithmetic):
    results = json.loads((arithmetic / "report.json").read_text())["results"]
    assert results["accuracy"]["stock"] >= 0.85
    assert results["accuracy_can_tell"]
    assert results["token_identical"]


@ON_RELEASES
def test_the_report_has_answers_memory_and_changes_of_both_servers(arithmetic):
    report = json.loads((arithmetic / "report.json").read_text())
    stock, patched = report["runs"]["stock"], report["runs"]["patched"]
    assert [a["tokens"] for a in stock["answers"]] == [a["tokens"] for a in patched["answers"]]
    assert len(stock["answers"]) == QUESTION_COUNT
    names = ("changes", "memory", "acted")
    processes = (events.parse_process({name: run[name] for name in names}) for run in (stock, patched))
    check_figures(*processes, moe_layers=3)
    assert (arithmetic / "report.html").stat().st_size > 10_000
