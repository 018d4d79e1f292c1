"""The command ``plan`` with a stand-in for the engine (``engine_for_plan``): its processes and records are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import Command
from releases import ROOT
from sglang_moe_patches.planning import plan, report, verify

STANDIN = ROOT / "test/standins/engine_for_plan"
GPU = """
from sglang_moe_patches.core import machine
machine.has_gpu = lambda: True
from sglang_moe_patches import cli
cli.main()
"""
SECOND = ("--verify-seconds", "1")


class Given(Command):
    def __init__(self, tmp_path: Path) -> None:
        super().__init__("plan", STANDIN, tmp_path, tmp_path)

    def here(self, monkeypatch, *more: str, wrong: tuple[str, ...] = ()) -> int:
        """The exit code of the command in this process."""
        monkeypatch.setattr(plan.machine, "has_gpu", lambda: True)
        monkeypatch.setattr(plan.gpu, "used_mib", dict)
        monkeypatch.setattr(verify, "ENDING_S", 1.0)
        return self.run_here(monkeypatch, *more, wrong=wrong)

    def written(self) -> dict:
        return json.loads((self.output / "plan.json").read_text())


@pytest.fixture
def given(tmp_path):
    given = Given(tmp_path)
    with given.nothing_left():
        yield given


def test_both_servers_are_sized_by_their_records_and_what_is_whose_is_said(given, monkeypatch, capsys) -> None:
    assert given.here(monkeypatch, "--stock", *SECOND) == 0, capsys.readouterr()
    said = " ".join(capsys.readouterr().out.split())
    assert said.index("4 server starts") < said.index("stock, sized by the engine's rule: ready")
    assert said.count("min left") == 4
    found = given.written()
    assert found["verdict"] == "held"
    assert [server["server"] for server in found["servers"]] == ["stock", "patched"]
    for server in found["servers"]:
        # The second GPU keeps 4,096 tokens of 1.5 MB, and 2 GB are the margin: 8.144 of 99 GB.
        assert server["record"]["need"] == pytest.approx(6.144e9, abs=1)
        assert server["first"]["fraction"] == 0.8
        assert server["second"]["fraction"] == pytest.approx(0.9177)
        assert server["verified"]["held"]
        assert server["record"]["driven"] == ["prefill chunk"]
    assert found["shares"]["sizing"] > 0 == found["shares"]["patches"]
    assert [server["command"].split()[0] for server in found["servers"]] == [
        "SGLANG_MOE_PATCHES=none",
        "SGLANG_MOE_PATCHES=output-buffer",
    ]
    terms = [(term["name"], round(term["mib"])) for term in found["rule"]["terms"]]
    assert terms[0] == ("prefill chunk beyond 2048 tokens", 10_000)
    assert "0.9177" in (given.output / "plan.html").read_text()
    assert {path.name for path in given.output.glob("*.records.json")} == {"stock.records.json", "patched.records.json"}


def test_prompt_logprobs_are_driven_and_the_second_start_leaves_room_for_them(given, monkeypatch) -> None:
    assert given.here(monkeypatch, "--prompt-logprobs", *SECOND) == 0
    (server,) = given.written()["servers"]
    # 2 MB more for each of 4,096 tokens.
    assert server["record"]["need"] == pytest.approx(6.144e9 + 8.192e9, abs=2)
    assert server["second"]["fraction"] == pytest.approx(0.8349)


@pytest.mark.parametrize(
    ("wrong", "more", "code", "said"),
    [
        ("--log-level error", SECOND, 3, "not brought about by the verification: a retraction"),
        ("", ("--no-verify",), 3, "not verified"),
        pytest.param(
            *(
                "no logprobs",
                ("--prompt-logprobs", *SECOND),
                3,
                "prompt log-probabilities were not seen at their bound",
            ),
            marks=pytest.mark.product,
        ),
        ("too large", SECOND, 1, "the server ran out of memory at start-up"),
        ("nothing is recorded", SECOND, 2, "nothing was recorded: the engine's rule, 0.8: images are not rehearsed"),
        pytest.param(
            *("not needed", SECOND, 2, "nothing was recorded: kv-sizing is not needed here: of --enable-eplb"),
            marks=pytest.mark.product,
        ),
        ("cannot start", SECOND, 2, "the patched server ended with exit code 1 at start-up"),
    ],
)
def test_every_verdict_has_its_exit_code_and_its_reason(given, monkeypatch, capsys, wrong, more, code, said) -> None:
    assert given.here(monkeypatch, *more, wrong=(wrong,)) == code, capsys.readouterr()
    (server,) = given.written()["servers"]
    assert said in "; ".join(server["reasons"])
    assert bool(server["command"]) == (code == 3)
    assert (given.output / "1-patched.log").exists()


def test_where_the_rule_leaves_no_kv_cache_a_higher_fraction_is_started_from(given, monkeypatch, capsys) -> None:
    assert given.here(monkeypatch, "--no-verify", wrong=("large weights",)) == 3
    (server,) = given.written()["servers"]
    assert (server["first"]["fraction"], server["first"]["given"]) == (0.9, True)
    assert server["second"]["fraction"] == pytest.approx(0.9177)
    assert "from 0.900 instead" in " ".join(capsys.readouterr().out.split())


@pytest.mark.product
def test_where_no_fraction_leaves_a_kv_cache_that_is_said(given, monkeypatch) -> None:
    assert given.here(monkeypatch, wrong=("large weights", "larger weights")) == 2
    assert "no fraction that was tried" in given.written()["servers"][0]["failure"]


def test_what_is_finished_stays_when_a_later_part_fails(given, monkeypatch) -> None:
    given.output.mkdir()
    (given.output / "plan.json").write_text("of an earlier plan")
    assert given.here(monkeypatch, "--stock", "--no-verify", wrong=("cannot start twice",)) == 2
    stock, patched = given.written()["servers"]
    assert stock["first"]["tokens"] == patched["first"]["tokens"] > 0
    assert stock["record"]["need"] == patched["record"]["need"] > 0
    assert "ended with exit code 1" in patched["failure"]
    (earlier,) = given.output.glob("plan-*.json")
    assert earlier.read_text() == "of an earlier plan"


def test_a_plan_that_starts_nothing_leaves_an_earlier_one_as_it_is(given, monkeypatch) -> None:
    given.output.mkdir()
    (given.output / "plan.json").write_text("of an earlier plan")
    assert given.here(monkeypatch, "--", "--no-such-thing") == 2
    assert [path.name for path in given.output.iterdir()] == ["plan.json"]


def test_a_page_that_cannot_be_made_loses_no_figure(given, monkeypatch, capsys) -> None:
    monkeypatch.setattr(report, "render_html", lambda plan: 1 / 0)
    assert given.here(monkeypatch, "--no-verify") == 3
    assert given.written()["verdict"] == "incomplete"
    assert "plan.html could not be written: ZeroDivisionError" in capsys.readouterr().out


def test_a_server_that_finds_a_port_taken_is_started_once_more(given, monkeypatch) -> None:
    assert given.here(monkeypatch, "--no-verify", wrong=("port taken",)) == 3
    assert (given.folder / "taken").exists()


def test_dummy_weights_are_served_and_not_in_the_command(given, monkeypatch) -> None:
    assert given.here(monkeypatch, "--dummy-weights", "--no-verify", "--", "--tp-size", "2") == 3
    found = given.written()
    assert found["arguments"][-2:] == ["--load-format", "dummy"]
    assert "--load-format" not in found["servers"][0]["command"]
    assert "--tp-size 2 --mem-fraction-static" in found["servers"][0]["command"]


@pytest.fixture
def one_odd_prompt(monkeypatch) -> None:
    """A verification that asks what no rehearsal does."""
    original = plan.verify._Load.random

    def random(self, number, stop):
        self.ask([[5] * 77], 1, stop)
        original(self, number, stop)

    monkeypatch.setattr(plan.verify._Load, "random", random)


@pytest.mark.usefixtures("one_odd_prompt")
def test_a_value_that_does_not_hold_is_exit_code_1(given, monkeypatch) -> None:
    assert given.here(monkeypatch, *SECOND, wrong=("retries",)) == 1
    (server,) = given.written()["servers"]
    assert "tried again" in server["verified"]["reasons"][0]
    assert server["command"] == ""


def test_arguments_that_the_engine_refuses_are_refused_in_its_words(given, monkeypatch, capsys) -> None:
    assert given.here(monkeypatch, "--", "--no-such-thing") == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: --no-such-thing" in error
    assert error.count("\n") == 1
    assert not given.output.exists()


@pytest.mark.parametrize(
    "signals", [pytest.param([signal.SIGINT], marks=pytest.mark.product), [signal.SIGINT, signal.SIGTERM]]
)
def test_signals_end_the_servers_and_the_command(given, signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", GPU, *given.arguments],
        env={**os.environ, **given.environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (given.folder / "started").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    for number in signals:
        process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert given.processes() == []
