"""Tests of ``common.overview``, which draws README's table and the summary page's charts from stored results."""

from __future__ import annotations

import json

import pytest
from common import output, overview
from memory.first_starts import ROWS

STOCK = {"tokens": 1_000, "total_throughput": 50.0}
PATCHED = {
    "tokens": 1_500,
    "total_throughput": 60.0,
    "said": ["rehearsed in 3 s: prefill chunk 2.1 s, decode 0.5 s; x"],
}
NAMES = list(ROWS)[:3]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Function that stores one result for each given commit, and returns the function that loads a result."""
    monkeypatch.setattr(output, "RESULTS", tmp_path)

    def write(*commits, stock=STOCK):
        (tmp_path / overview.FOLDER).mkdir()
        for name, commit in zip(NAMES, commits, strict=False):
            servers = {"grown": PATCHED} | ({"stock": stock} if stock else {})
            result = {"conditions": {"commit": commit}, "figures": {"servers": servers}}
            (tmp_path / overview.FOLDER / f"{name}.json").write_text(json.dumps(result))
        return output.load

    return write


@pytest.mark.parametrize("commits", [("a", "b"), ("a", None), (None,), ()], ids=str)
def test_results_of_several_commits_or_of_none_are_refused(commits, store):
    load = store(*commits)
    with pytest.raises(overview.MixedCommits):
        overview.table(load)
    with pytest.raises(overview.MixedCommits):
        overview.kv_cache_chart(load)


def test_a_row_has_stock_and_patched_figures(store):
    lines = overview.table(store("a", "a")).strip().splitlines()
    assert len(lines) == 4, "a header, its rule, and a line for each result"
    assert lines[2].startswith(f"| {ROWS[NAMES[0]].server} | {ROWS[NAMES[0]].as_run} | 1,000 | **1,500** | 50 | 60 |")


def test_a_stock_server_that_does_not_start_is_named_so(store):
    load = store("a", stock=None)
    assert "| does not start | **1,500** | - | 60 |" in overview.table(load)
    chart = overview.kv_cache_chart(load)
    assert "does not start" in chart
    assert "1,500 tokens<" in chart, "there is no ratio"


def test_seconds_of_each_phase_are_read_from_the_log_line():
    assert overview.phase_seconds(PATCHED["said"]) == {"prefill chunk": 2.1, "decode": 0.5}
    assert (
        overview.phase_seconds(["the KV cache keeps the engine's size and is not measured because of --pp-size"]) == {}
    )
