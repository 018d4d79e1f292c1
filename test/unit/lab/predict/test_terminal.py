"""Tests of the report of ``doctor --model`` on a terminal: its first line, the rows of its tables, and values to
copy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from doctor_reports import FIT, GB, NEED, WHOLE, advise
from releases import ROOT
from sglang_moe_patches import cli
from sglang_moe_patches.lab import doctor
from sglang_moe_patches.lab.predict import engine_pools, forward, model_report, room, terminal
from sglang_moe_patches.lab.predict.room import Room
from sglang_moe_patches.memory.kv_sizing import eligibility
from typer.testing import CliRunner

Report = dict[str, Any]


def report_of(stock: Room, patched: Room | None = None) -> Report:
    """Return a report on a stock server and a patched server with the given memory.

    :param patched: memory of the patched server; ``None`` if it equals the stock server's.
    """
    rooms = {"stock": stock, "patched": patched or stock}
    fits = {name: engine_pools.describe(each.fit) for name, each in rooms.items()}
    named = {"model": "a/b", "gpu": "h200", "engine": "0.5", "fit": fits["patched"], "stock_fit": fits["stock"]}
    return advise() | named | {"room": {name: each.describe() for name, each in rooms.items()}}


ROOM = Room(FIT, NEED, decodes=room.Decodes(1000, 256, 512, 256))


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {},
            "Starts. Room in addition to weights and KV cache: 15.0 GB; need of forward passes and CUDA graphs: "
            "about 8.0 GB.",
        ),
        (
            {"given": True, "fraction": 0.97},
            "Starts, but with too little room: expect out-of-memory in a prefill of 16,384 tokens and in a decode of "
            "256 requests with penalties. Room in addition to weights and KV cache: 4.5 GB; need of forward passes and "
            "CUDA graphs: about 8.0 GB.",
        ),
        (
            {"given": True, "fraction": 0.99},
            "Does not start: the capture of CUDA graphs takes about 2.0 GB, but the given --mem-fraction-static 0.990 "
            "leaves only 1.5 GB in addition to weights and KV cache.",
        ),
        (
            {"given": True, "fraction": 0.5, "tokens": None},
            "Does not start: the given --mem-fraction-static 0.500 allows only 75.0 GB, too little for a KV "
            "cache in addition to 90.0 GB of weights; set at least 0.60.",
        ),
        (
            {"weights": 150 * GB + 1},
            "Does not start: 150.0 GB of weights are too much for 150.0 GB of free memory on each GPU.",
        ),
        (
            {"loading": 45 * GB},
            "in addition to 90.0 GB of weights and about 45.0 GB still allocated after loading them; set",
        ),
        (
            {"loading": 10 * GB, "layout": 51 * GB},
            "Does not start: loading the weights takes about 151.0 GB at its peak, more than the 150.0 GB that are "
            "free on each GPU.",
        ),
        (
            {"refusal": "No room for states"},
            "allows 135.0 GB for 90.0 GB of weights and for a KV cache, but the engine makes no KV cache. The engine's "
            "error: No room for states.",
        ),
    ],
)
def test_the_first_line_compares_room_and_need(facts: dict[str, Any], text: str) -> None:
    line = terminal.describe_verdict(report_of(replace(ROOM, fit=replace(FIT, **facts))))
    assert text in line
    assert "None" not in line


def test_the_first_line_names_stock_first_if_the_verdicts_differ() -> None:
    tight = replace(FIT, fraction=0.96)
    patched = Room(tight, replace(NEED, forwards=NEED.forwards | {room.PREFILL: GB}, held=0), decodes=ROOM.decodes)
    assert terminal.describe_verdict(report_of(replace(ROOM, fit=tight), patched)) == (
        "Stock starts, but with too little room: expect out-of-memory in a prefill of 16,384 tokens. Patched starts. "
        "Room in addition to weights and KV cache: 6.0 GB; need of forward passes and CUDA graphs: about 8.0 GB stock, "
        "5.0 GB patched."
    )


def test_the_first_line_says_that_the_need_is_not_known() -> None:
    line = terminal.describe_verdict(report_of(Room(FIT, unknown="there is no formula for all-to-all by deepep")))
    assert line.startswith(
        "Starts; whether enough memory stays free is not known (there is no formula for all-to-all by deepep)."
    )
    assert "need of" not in line


def test_a_kv_cache_smaller_than_the_longest_request_is_reported() -> None:
    short = terminal.describe_short_cache(report_of(replace(ROOM, fit=replace(FIT, tokens=99_999))))
    assert "has 99,999 tokens, fewer than the longest request (100,000 tokens); to allow only shorter requests" in short
    assert terminal.describe_short_cache(report_of(ROOM)) == ""


@pytest.mark.parametrize(("fraction", "code"), [(0.9, 0), (0.5, 1), (0.99, 1)])
def test_a_server_that_does_not_start_gives_exit_code_1(fraction: float, code: int, monkeypatch) -> None:
    report = report_of(replace(ROOM, fit=replace(FIT, fraction=fraction)))
    monkeypatch.setattr(model_report, "examine", lambda *asked: report)
    result = CliRunner().invoke(cli.app, ["doctor", "--model", "a/b"])
    assert (result.exit_code, result.stdout.splitlines()[0]) == (code, terminal.describe_verdict(report))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_settings_and_names_are_never_truncated(columns: int, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = report_of(ROOM)
    row = {"name": "moe-workspace", "status": "applied", "acts": False, "does": ""}
    report["changes"] = [
        row | {"reason": "it costs more; SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB=3072 cuts them all the same: 1 MB"}
    ]
    report["changes"].append(
        row | {"name": "kv-sizing", "reason": f"X=auto turns kv-sizing on; {model_report.WOULD_SIZE}"}
    )
    terminal.show(report)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for value in (
        *("--mem-fraction-static 0.93", "SGLANG_MOE_PATCHES_KV_SIZING=auto"),
        "SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB=3072",
    ):
        assert value in lines
    assert any("moe-workspace" in line for line in lines)
    assert any("about 500,000 KV tokens (484,000 to 516,000)" in line for line in lines)


def test_no_fraction_is_advised_if_none_leaves_enough_room(capsys) -> None:
    terminal.show(report_of(replace(ROOM, fit=replace(FIT, weights=141 * GB, fraction=0.95))))
    printed = capsys.readouterr().out
    assert "The stock server has too little memory for weights, KV cache and need" in printed
    assert "--mem-fraction-static 0" not in printed.partition("To copy")[2]


def test_the_printed_terms_add_up_to_the_peak():
    report = json.loads(json.dumps(advise()))
    rows = {title.strip(): (stock, patched) for title, stock, patched in terminal.list_memory_rows(report)}
    assert rows["peak"] == ("3,027.2", "1,168.1")
    for column, server in enumerate(("stock", "patched")):
        parts = report[server]["parts"]
        assert rows[f"at {forward.MOE}"][column] == f"{sum(parts.values()) / 1e6:,.1f}"
        assert rows[forward.PARTS["workspace"]][column] == f"{parts['workspace'] / 1e6:,.1f}"


@pytest.mark.parametrize(("padded", "text"), [(1536, "1536"), (2048, "1536, padded to 2048")])
def test_the_printed_intermediate_size_is_that_of_config_json(padded: int, text: str) -> None:
    assert terminal._describe_intermediate({"published_intermediate": 1536, "moe_intermediate": padded}) == text


def recorded_reasons() -> set[str]:
    """Return all reasons that are stored in docs/compatibility.json and in the results for published recipes."""
    releases = json.loads((ROOT / "docs/compatibility.json").read_text()).values()
    reasons = {reason for release in releases for _, reason in release["changes"].values()}
    for file in (ROOT / "benchmark/results/recipes").glob("*.json"):
        answers = [recipe["found"] for recipe in json.loads(file.read_text())["figures"]["recipes"]]
        reasons |= {answer.get("refused") or answer["reason"] for answer in answers}
    return reasons


def test_every_reason_is_printed_unchanged(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    facts: tuple[dict[str, Any], ...] = (
        {},
        {"layer": None},
        {"decided": WHOLE},
        {"moe_a2a_backend": "deepep"},
    )
    rows = [change for each in facts for change in advise(**each)["changes"]]
    reasons = recorded_reasons() | {row["reason"] for row in rows} | {"[/b] closes nothing"}
    reasons |= {f"because of {kind.name}: {kind.reason}" for kind in eligibility.UNSIZED}
    row = {"name": "a", "summary": "", "status": "unsupported", "acts": False, "does": ""}
    report = advise() | {"model": "a[/b]", "gpu": "h200", "engine": "0.5", "torch": "2", "python": "3", "package": "0"}
    report |= {"gpus": ["a[/b]"], "variables": {"A": "[/b]"}, "unread": ["[/b]"]}
    report["changes"] = [row | {"reason": reason} for reason in sorted(reasons)]
    for module in (terminal, doctor):
        module.show(report)
        printed = capsys.readouterr().out
        assert "a[/b]" in printed
        assert [reason for reason in reasons if reason not in printed] == []
