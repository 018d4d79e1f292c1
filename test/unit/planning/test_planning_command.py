"""The command ``plan`` itself: what it refuses before it starts anything, and what it prints and writes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import typer
from planning_events import GB, process
from releases import ROOT
from rich.console import Console
from sglang_moe_patches import cli
from sglang_moe_patches.changes.kv_sizing.script import PhaseKind
from sglang_moe_patches.planning import measure, plan, report, rule, survive
from sglang_moe_patches.planning.measure import Measured, PhaseNeed, Verified
from sglang_moe_patches.planning.result import MB, Plan, Recommendation, ServerPlan

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
        (("--enable-memory-saver",), "--enable-memory-saver: memory comes and goes"),
        (("--cpu-offload-gb", "4"), "--cpu-offload-gb: weights come and go"),
        (("--disaggregation-mode", "prefill"), "--disaggregation-mode: one half of a pair"),
        (("--lora-paths", "a"), "--lora-paths: adapters"),
        (("--nnodes", "2"), "--nnodes: plan starts, watches and ends processes on this machine only"),
        (("--enable-pdmux",), "--enable-pdmux: prefill and decode run at the same time"),
        (("--max-queued-requests", "8"), "--max-queued-requests: the load is longer than the queue"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(command, arguments, reason) -> None:
    code, said = command(servers=arguments)
    assert code == 2
    assert reason in one_line(said)


@pytest.mark.parametrize(
    "arguments",
    [("--cpu-offload-gb", "0"), ("--disaggregation-mode", "null"), ("--nnodes", "1"), ("--offload-group-size", "-1")],
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


def test_sizing_after_capture_is_refused(command, monkeypatch) -> None:
    monkeypatch.setenv(plan.POST_CAPTURE, "1")
    code, said = command()
    assert code == 2
    assert plan.POST_CAPTURE in one_line(said)


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


def test_a_patched_server_without_patches_is_refused(command, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "none")
    code, said = command("--only", "patched")
    assert code == 2
    assert "with SGLANG_MOE_PATCHES=none nothing is patched" in one_line(said)


def test_a_trial_of_an_unknown_server_is_refused(tmp_path) -> None:
    command = [sys.executable, "-m", "sglang_moe_patches.planning.survive", "--model", "m", "--fraction", "0.9"]
    done = subprocess.run([*command, "--only", "Stock"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (2, "survive: --only Stock: give stock or patched\n")


def test_a_trial_that_meets_an_unforeseen_error_does_not_say_that_the_server_ended(monkeypatch, capsys) -> None:
    monkeypatch.setattr(plan, "check", lambda *args: 1 / 0)
    with pytest.raises(typer.Exit) as ended:
        survive.main("m", 0.9)
    assert ended.value.exit_code == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_unknown_server_is_refused(command) -> None:
    code, said = command("--only", "neither")
    assert code == 2
    assert "give stock or patched" in one_line(said)


def test_help_names_every_argument_that_is_refused_for_what_it_does(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sglang-moe-patches", "plan", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    said = " ".join(capsys.readouterr().out.split())
    for argument in ("--mem-fraction-static", "--enable-memory-saver", "--cpu-offload-gb", "--enable-pdmux", "--port"):
        assert argument in said
        assert argument in plan.REFUSED


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


# --- what it prints and writes ----------------------------------------------------------------------------------------


def found(**verified) -> Plan:
    rank = measure.rank(process(), 40 * GB)
    phases = (
        PhaseNeed(PhaseKind.PREFILL, "prefill chunk", True, "EXTEND: 8,192 tokens", 4 * GB, 5 * GB, 19 * GB, "GPU 3"),
    )
    first = Measured(
        "patched", 0.8, 99 * GB, 1_000_000, 40 * GB, context=10_000, lowest_free=19 * GB, ranks=(rank,), phases=phases,
        not_driven=("images: they are not sent",),
    )  # fmt: skip
    held = Verified(fraction=0.95, **verified) if verified else None
    value = Recommendation(False, 0.95, 0.952, 1_300_000, 130.0, "python -m sglang.launch_server <b>", held)
    none = Recommendation(True, None, 0.7)
    servers = (ServerPlan("patched", (first,), (value, none), ("--max-running-requests: 1",)),)
    terms = (rule.Term("prefill chunk beyond 2048 tokens", 9216.0), rule.Term(rule.REST, 10240.0))
    resolved = rule.Rule(140_000.0, 1 - 19456 / 140_000, terms, {})
    return Plan("0.0.0", "m", ("--tp", "2"), 1000 * MB, resolved, servers)


def test_the_table_says_the_value_its_need_and_the_command() -> None:
    out = io.StringIO()
    report.print_table(found(), Console(file=out, width=200))
    said = out.getvalue()
    for text in ("0.950", "1,300,000 tokens (+30.0 %)", "9,664 MB", "20,401 MB", "4,000 MB", "launch_server <b>"):
        assert text in said
    assert "none found, none above 0.700 fits" in said
    assert "Not driven: images: they are not sent." in said


def test_the_table_says_what_the_allocator_took_and_what_of_it_was_never_a_tensor() -> None:
    (server,) = found().servers
    rank = replace(server.default.ranks[0], tensors=3 * GB, slack=2 * GB)
    rows = dict(report.server_rows(replace(server, trials=(replace(server.default, ranks=(rank,)),))))
    assert rows["taken by PyTorch's allocator then"] == "5,000 MB, 2,000 MB never a tensor (slack)"


def test_the_table_says_how_well_a_value_is_known_and_what_a_kv_cache_is_of() -> None:
    (server,) = found().servers
    value = replace(server.recommendations[0], ceiling=0.97)
    first = replace(server.default, settings={"dp_size": 8})
    rows = dict(report.server_rows(replace(server, trials=(first,), recommendations=(value,))))
    assert rows["not known more closely"] == "none above 0.970 fits; more servers would tell"
    assert rows["KV cache"] == "1,300,000 tokens on each of 8 data-parallel ranks (+30.0 %)"
    closely = dict(report.server_rows(server))
    assert "not known more closely" not in closely
    assert closely["KV cache"] == "1,300,000 tokens (+30.0 %)"
    unknown = replace(server, recommendations=(Recommendation(True, None, 0.0),))
    assert dict(report.server_rows(unknown))["fraction with prompt log-probabilities"] == "not known: it was not driven"


def test_a_value_that_did_not_hold_is_the_verdict_and_the_exit_code() -> None:
    assert found(held=True).exit_code == 0
    broken = found(held=False, reasons=("the server ran out of memory",))
    assert broken.exit_code == 1
    assert "NOT VERIFIED" in report.verdict(broken)
    assert "verified" not in report.verdict(found())


def test_the_page_stands_alone_and_escapes_what_it_is_given(tmp_path) -> None:
    page = report.write(found(held=True), tmp_path).read_text()
    assert not re.search(r'(src|href)="', page.replace("xlink:href", ""))
    assert "&lt;b&gt;" in page
    assert "launch_server <b>" not in page
    assert page.count("<svg") == 1
    for _, label, _ in report.PARTS:
        assert label in page
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["servers"][0]["recommendations"][0]["fraction"] == 0.95
    assert written["rule"]["reserve_mib"] == pytest.approx(19456)


def test_the_bars_of_the_plot_are_as_long_as_the_gpu() -> None:
    (_, rank), *_ = report.bars(found())
    assert report._before(rank, report.PARTS) == rank.total
