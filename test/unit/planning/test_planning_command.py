"""The command ``plan`` itself: what it refuses before it starts anything, and what it prints and writes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from planning_events import GB, process
from releases import ROOT
from rich.console import Console
from sglang_moe_patches import cli
from sglang_moe_patches.lab.observers.events import ChangeStatus
from sglang_moe_patches.memory.kv_sizing.record import Record
from sglang_moe_patches.planning import measure, plan, report, rule
from sglang_moe_patches.planning.measure import Verified
from sglang_moe_patches.planning.result import Plan, ServerPlan, Started, Verdict

SLOW = ROOT / "test/standins/engine_that_is_slow"
"""An engine that takes an hour to be imported."""


class Command:
    """``plan`` in this process, on a machine that believes in its GPU."""

    def __init__(self, monkeypatch, capsys, tmp_path) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.model = tmp_path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.output = tmp_path / "report"
        monkeypatch.setattr(plan.machine, "has_gpu", lambda: True)
        monkeypatch.setattr(cli, "require_engine", lambda: None)
        monkeypatch.setattr(rule, "resolve", lambda *args: pytest.fail("got as far as the resolver"))

    def __call__(self, *options: str, servers: tuple[str, ...] = ()) -> tuple[int, str]:
        arguments = ["plan", "--model", str(self.model), "--output", str(self.output), *options, "--", *servers]
        self.monkeypatch.setattr(sys, "argv", ["sglang-moe-patches", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code), self.capsys.readouterr().err


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    return Command(monkeypatch, capsys, tmp_path)


def one_line(said: str) -> str:
    assert said.startswith("sglang-moe-patches: ")
    assert said.count("\n") == 1
    return said


def test_without_a_gpu_one_line_says_so(command, monkeypatch) -> None:
    monkeypatch.setattr(plan.machine, "has_gpu", lambda: False)
    code, said = command()
    assert code == 2
    assert "no NVIDIA GPU here" in one_line(said)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--mem-fraction-static", "0.9"), "--mem-fraction-static: this is what plan finds; leave it out"),
        (("--mem-fraction-static=0.9",), "--mem-fraction-static: this is what plan finds; leave it out"),
        (("--mem-fraction", "0.9"), "--mem-fraction-static: this is what plan finds; leave it out"),
        (("--port", "1"), "--port: plan sets it"),
        (("--offload-group-size", "4"), "--offload-group-size: weights come and go"),
        (("--disaggregation-mode", "prefill"), "--disaggregation-mode: one half of a pair"),
        (("--nnodes", "2"), "--nnodes: plan starts, watches and ends processes on this machine only"),
        (("--max-queued-requests", "8"), "--max-queued-requests: the load is longer than the queue"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(command, arguments, reason) -> None:
    code, said = command(servers=arguments)
    assert code == 2
    assert reason in one_line(said)


@pytest.mark.parametrize(
    "arguments",
    [("--disaggregation-mode", "null"), ("--nnodes", "1"), ("--offload-group-size", "-1")],
)
def test_what_changes_nothing_is_not_refused(command, monkeypatch, arguments) -> None:
    def refuse(*given):
        raise rule.NotResolved("the engine refuses the server arguments: here the resolver would start")

    monkeypatch.setattr(rule, "resolve", refuse)
    code, said = command(servers=arguments)
    assert (code, "here the resolver would start" in said) == (2, True)


def test_a_port_in_use_is_refused(command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = command("--port", str(port))
    assert code == 2
    assert f"port {port} is in use" in one_line(said)


def test_a_signal_that_ended_the_resolver_is_no_refusal(command, monkeypatch) -> None:
    def resolve(*given):
        os.kill(os.getpid(), signal.SIGINT)
        raise rule.NotResolved("exit code -2")

    monkeypatch.setattr(rule, "resolve", resolve)
    code, said = command()
    assert code == 130
    assert "interrupted" in one_line(said)


def test_a_resolver_that_does_not_answer_is_named() -> None:
    with pytest.raises(rule.NotResolved, match="did not answer within 0 s"):
        rule.resolve([], os.environ, timeout=0.001)


def test_a_signal_ends_the_resolver() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rule.resolve([], {**os.environ, "PYTHONPATH": os.fspath(SLOW)}, None, interrupt)
    assert time.monotonic() - begin < 30


def test_help_names_every_argument_that_is_refused_for_what_it_does(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sglang-moe-patches", "plan", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    said = " ".join(capsys.readouterr().out.split())
    for argument in ("--mem-fraction-static", "--port"):
        assert argument in said
        assert argument in plan.REFUSED
    for argument in ("--enable-memory-saver", "--cpu-offload-gb"):
        assert argument in said
        assert argument in plan.decide.NEVER


def test_what_kv_sizing_leaves_to_the_rule_is_refused_before_a_server_starts(command, monkeypatch) -> None:
    resolved = rule.Rule(100.0, 0.8, (), {"device": "cuda", "enable_eplb": True})
    monkeypatch.setattr(rule, "resolve", lambda *given: resolved)
    code, said = command()
    assert code == 2
    assert "kv-sizing leaves this server to the engine's rule: of --enable-eplb, whose rebalance" in said


@pytest.mark.parametrize(
    ("log", "ran_out"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", True),
        ("RuntimeError: CUDA driver error: out of memory", True),
        ("CUDA_ERROR_OUT_OF_MEMORY", True),
        ("RuntimeError: CUDA error: out of memory", True),
        ("NCCL WARN Cuda failure 'out of memory'", True),
        ("lower --mem-fraction-static if you see out of memory errors", False),
        ("ValueError: no such model", False),
    ],
)
def test_a_server_that_ran_out_of_memory_is_told_from_one_that_died_of_something_else(log: str, ran_out: bool) -> None:
    assert plan.out_of_memory(log) is ran_out


# --- what it says -----------------------------------------------------------------------------------------------------


def started(fraction: float, tokens: int, **more) -> Started:
    rank = measure.rank(process(), 40 * GB)
    return Started(fraction, tokens, 60.0, context=10_000, ranks=(rank,), **more)


RECORD = Record(need=8 * GB, before=99 * GB, fraction=0.8, driven=("prefill chunk",), proven=True)
HELD = Verified(True, 0.9, lowest_free={"GPU 3": 2 * GB}, requests=10, retractions=1)


def server(name: str = "patched", tokens: int = 1_300_000, **more) -> ServerPlan:
    given = {
        "first": started(0.8, 1_000_000),
        "record": RECORD,
        "second": started(0.9, tokens),
        "verified": HELD,
        "command": "python -m sglang.launch_server <b>",
    }
    return ServerPlan(name, **{**given, **more})


def found(*servers: ServerPlan) -> Plan:
    terms = (rule.Term("prefill chunk beyond 2048 tokens", 9216.0), rule.Term(rule.REST, 10240.0))
    resolved = rule.Rule(140_000.0, 1 - 19456 / 140_000, terms, {})
    return Plan("0.0.0", "m", ("--tp", "2"), resolved, servers or (server(),))


def test_only_what_was_driven_sized_and_verified_has_held() -> None:
    assert server().judged == (Verdict.HELD, ())
    seen: dict[Verdict, list[dict[str, Any]]] = {
        Verdict.INCOMPLETE: [
            {"record": replace(RECORD, driven=())},
            {"record": replace(RECORD, missed=("x",))},
            {"record": replace(RECORD, proven=False)},
            {"verified": None},
            {"verified": replace(HELD, not_seen=("a retraction",))},
            {"logprobs": False},
        ],
        Verdict.COULD_NOT_BE_TRIED: [
            *({"first": None}, {"second": None}, {"record": None}, {"record": replace(RECORD, need=0)}),
            {"failure": "no such model"},
        ],
        Verdict.DID_NOT_HOLD: [
            {"verified": Verified(False, 0.9, ("x",))},
            {"second": None, "verified": Verified(False, 0)},
        ],
    }
    for verdict, changes in seen.items():
        for change in changes:
            assert server(**change).verdict == verdict, change
            assert server(**change).judged[1] or verdict is Verdict.DID_NOT_HOLD


def test_the_worst_server_is_the_verdict_of_all() -> None:
    bad = server("stock", failure="no such model")
    assert found(bad, server()).exit_code == 2
    assert found(bad, server(verified=Verified(False, 0.9))).exit_code == 1
    assert found(server("stock", verified=None), server()).exit_code == 3
    assert Plan("", "", (), found().rule, ()).exit_code == 2


def test_sizing_s_share_is_told_from_the_patches() -> None:
    both = found(server("stock", tokens=1_200_000), server())
    assert both.shares() == {"sizing": 200_000, "patches": 100_000}
    assert "200,000 are what sizing brings to the stock engine, and 100,000" in " ".join(report.notes(both))
    assert found().shares() == {}


def test_the_tables_say_the_rule_the_need_both_starts_and_the_command() -> None:
    out = io.StringIO()
    report.print_table(found(), Console(file=out, width=200))
    said = out.getvalue()
    for text in ("9,664 MB", "20,401 MB", "8,000 MB", "2,000 MB", "0.8000: 1,000,000 tokens", "+30.0 %"):
        assert text in said
    assert "0.9000: 1,300,000 tokens" in said
    assert "launch_server <b>" in said
    assert "held: patched 0.9000" in said


def test_what_is_unsupported_and_what_weights_were_served_is_said() -> None:
    changed = started(0.9, 1, changes=(ChangeStatus("moe-workspace", "unsupported", "no seam"),))
    said = " ".join(report.notes(replace(found(server(second=changed)), dummy_weights=True)))
    assert "moe-workspace is unsupported: no seam" in said
    assert "Random weights" in said


def test_each_data_parallel_rank_has_a_kv_cache_of_its_own() -> None:
    rows = dict(report.server_rows(server(second=started(0.9, 5, settings={"dp_size": 8}))))
    assert rows["by the record"] == "0.9000: 5 tokens on each of 8 data-parallel ranks"


def test_the_page_stands_alone_and_escapes_what_it_is_given(tmp_path) -> None:
    writer = report.Writer(tmp_path)
    writer.write(found())
    assert writer.page(found()) == ""
    page = (tmp_path / "plan.html").read_text()
    assert not re.search(r'(src|href)="', page.replace("xlink:href", ""))
    assert "&lt;b&gt;" in page
    assert "launch_server <b>" not in page
    assert page.count("<svg") == 1
    for _, label, _ in report.PARTS:
        assert label in page
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["servers"][0]["second"]["fraction"] == 0.9
    assert written["rule"]["reserve_mib"] == pytest.approx(19456)


def test_the_bars_of_the_plot_are_as_long_as_the_gpu() -> None:
    (_, rank), *_ = report.bars(found())
    assert report._before(rank, report.PARTS) == rank.total


def test_the_time_is_said_by_the_longest_start() -> None:
    clock = plan.Clock(4, 120)
    assert clock.said_first().startswith("4 server starts")
    assert [clock.started(seconds) for seconds in (60, 300, 60, 60)] == [
        *("about 7 min left", "about 14 min left"),
        *("about 7 min left", "about 2 min left"),
    ]


@pytest.mark.parametrize(
    ("name", "chosen", "selected"),
    [
        ("stock", "", "kv-sizing"),
        ("patched", "", "all"),
        ("patched", "output-buffer", "output-buffer,kv-sizing"),
        ("patched", "kv-sizing,output-buffer", "kv-sizing,output-buffer"),
    ],
)
def test_each_server_has_kv_sizing_beside_its_changes(name, chosen, selected) -> None:
    assert plan.selected(name, {"SGLANG_MOE_PATCHES": chosen}) == selected
