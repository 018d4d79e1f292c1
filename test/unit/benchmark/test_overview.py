"""Tests of ``common.overview``, which draws README's table and the summary page's charts from stored results."""

from __future__ import annotations

import itertools
import json

import pytest
from common import headlines, output, overview
from memory.first_starts import ROWS

STOCK = {"tokens": 1_000, "total_throughput": 50.0, "median_tpot_ms": 20.0}
PATCHED = {
    "tokens": 1_500,
    "total_throughput": 60.0,
    "median_tpot_ms": 30.0,
    "said": ["rehearsed in 3 s: prefill chunk 2.1 s, captured decode of 8 requests 0.5 s; x"],
}
SWEPT = [{"prompts": 2, "total_throughput": 40.0, "median_tpot_ms": 15.0}]
LOAD = {"prompts": 4, "input": [200, 400], "output": 100}
NAMES = list(ROWS)[:3]
OLDER_RESULTS = {f"serving/{name}": output.load(f"serving/{name}") for name in headlines.LAUNCHED}
"""Results for ``overview.make_older_table``. They are loaded here, because tests replace the folder of results."""


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Function that stores first starts. Its arguments are commits: the first row of the README's table gets a result
    of the first commit, the second row a result of the second commit, and so on. It returns ``output.load``."""
    monkeypatch.setattr(output, "RESULTS", tmp_path)

    def write(*commits, names=NAMES, stock=STOCK, patched=PATCHED, **figures):
        (tmp_path / overview.FOLDER).mkdir()
        for name, commit in zip(names, commits, strict=False):
            servers = {name: server for name, server in (("stock", stock), ("grown", patched)) if server}
            conditions = {"commit": commit, "engine": "0.5.12.post1", "date": "2026-11-29"}
            result = {"conditions": conditions, "figures": {**LOAD, **figures, "servers": servers}}
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
    assert lines[2] == f"| {overview.readme_label(NAMES[0])} | 1,000 -> 1,500 | 50 -> **60** | 20 -> 30 |"
    assert lines[4] == "", "a header, its rule, and a line for each result"


@pytest.mark.parametrize(("prompts", "speed"), [(2, "50 -> 60"), (3, "50 -> **60**")])
def test_tokens_per_second_are_bold_if_the_load_overflows_the_stock_kv_cache(prompts, speed, store):
    assert f"| {speed} |" in overview.table(store("a", prompts=prompts))


def test_the_gpu_of_readmes_table_is_in_its_header_alone(store):
    header, _, *rows = overview.table(store(*"aaaaa", names=overview.CHART_ROWS)).strip().splitlines()
    assert overview.README_GPU in header
    assert all(overview.README_GPU in ROWS[name].server for name in overview.CHART_ROWS)
    assert not any(overview.README_GPU in row for row in rows)


def test_readmes_settings_name_the_release_and_are_absent_without_a_first_start(store, monkeypatch):
    load = store("a")
    assert "SGLang 0.5.12.post1, random weights" in overview.make_readme_settings(load)
    monkeypatch.setattr(overview, "stored_rows", list)
    assert overview.make_readme_settings(load) == ""


def test_readme_has_some_rows_and_the_summary_page_all(store):
    load = store(*"a" * len(ROWS), names=ROWS)
    readme, summary = overview.table(load), overview.make_gains(load)
    assert sum(line.startswith("| ") for line in readme.splitlines()) == 1 + len(overview.CHART_ROWS)
    assert all(f"| {row.server} | {row.as_run} | 1,000 -> 1,500 |" in summary for row in ROWS.values())


def test_a_stock_server_that_does_not_start_is_named_so(store):
    load = store("a", stock=None)
    assert "| does not start -> 1,500 | - -> **60** | - -> 30 |" in overview.table(load)
    chart = overview.kv_cache_chart(load)
    assert "stock does not start" in chart
    assert "1,500 tokens<" in chart, "there is no ratio"


def test_a_patched_server_that_does_not_start_is_named_so(store):
    load = store("a", patched=None)
    assert "| 1,000 -> does not start | 50 | 20 |" in overview.table(load)
    assert "patched does not start" in overview.kv_cache_chart(load)
    assert overview.rehearsals(load) == {}


def test_tables_behind_charts_have_the_figures_and_one_column_of_predictions(store):
    load = store("a")
    assert overview.kv_cache_table(load).splitlines()[2].endswith("| whole | 1,000 | 1,500 | 1.50 | 159,000 |")
    assert overview.rehearsal_table(load).splitlines()[::2] == [
        "| server | prefill, s | other decode, s | all, s |",
        f"| {ROWS[NAMES[0]].server} | 2.1 | 0.5 | 3 |",
    ]


def test_throughput_is_shown_for_each_number_of_concurrent_requests(store):
    load = store("a", stock={**STOCK, "sweep": SWEPT}, patched={**PATCHED, "sweep": SWEPT})
    assert overview.concurrency_table(load).splitlines()[2:] == [
        "| 2 | 40 | 40 | 1.00 | 15.0 | 15.0 |",
        "| 4 | 50 | 60 | 1.20 | 20.0 | 30.0 |",
    ]
    assert "60 tokens/s (1.20x)" in overview.concurrency_chart(load)


@pytest.mark.parametrize(
    ("stock", "patched", "missing"),
    [
        (STOCK, PATCHED, {"throughput-by-requests.svg"}),
        (None, {**PATCHED, "sweep": SWEPT}, {"throughput-by-requests.svg"}),
        ({**STOCK, "sweep": SWEPT}, {**PATCHED, "said": [], "sweep": SWEPT}, {"rehearsal-by-phase.svg"}),
    ],
    ids=["no sweep", "no stock server", "no rehearsal"],
)
def test_a_chart_without_figures_is_left_out(stock, patched, missing, store):
    store("a", stock=stock, patched=patched)
    assert set(overview.CHARTS) - set(overview.drawings()) == missing


def test_without_first_starts_the_older_table_remains_and_their_charts_are_left_out(tmp_path, monkeypatch):
    load = OLDER_RESULTS.__getitem__
    monkeypatch.setattr(output, "RESULTS", tmp_path)
    assert overview.make_launched(load) == headlines.launched(load)
    assert overview.make_readme_chart(load) == ""
    assert "README's first table takes" in overview.make_older_table(load)
    assert list(overview.drawings()) == ["forward-pass-by-change.svg", "need-predicted-and-measured.svg"]
    assert headlines.launched_table(load) in overview.make_gains(load)


def test_with_first_starts_the_older_table_moves_to_the_earlier_measurements(store):
    store("a")
    assert headlines.launched_table(OLDER_RESULTS.__getitem__) in overview.make_older_table(OLDER_RESULTS.__getitem__)


def test_each_rehearsed_phase_counts_once():
    phases = ["prefill chunk", "8 requests behind one prefix", "2 of the longest prompts", "prompts of many lengths"]
    phases += ["decode of 8 requests with penalties and a logit bias", "captured decode of 8 requests", "something"]
    kinds = [next(kind for kind, pattern in overview.PHASES.items() if pattern.search(phase)) for phase in phases]
    assert [kind for kind, _ in itertools.groupby(kinds)] == list(overview.PHASES)
    assert kinds[:3] == ["prefill"] * 3


def test_seconds_of_each_phase_are_read_from_the_log_line():
    assert overview.phase_seconds(PATCHED["said"]) == {"prefill chunk": 2.1, "captured decode of 8 requests": 0.5}
    assert (
        overview.phase_seconds(["the KV cache keeps the engine's size and is not measured because of --pp-size"]) == {}
    )


def test_each_chart_of_the_summary_page_has_a_folded_table_of_at_most_six_columns():
    text = overview.make_charts(output.load)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(headings) == text.count("<details>") == text.count("</details>") == text.count("![")
    assert all(line.count("|") <= 7 for line in text.splitlines())
