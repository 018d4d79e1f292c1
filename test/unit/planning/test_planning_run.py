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
from sglang_moe_patches.planning import load, plan

STANDIN = ROOT / "test/standins/engine_for_plan"
GPU = """
from sglang_moe_patches.reference import environment
environment.has_gpu = lambda: True
from sglang_moe_patches import cli
cli.main()
"""


class Given(Command):
    def __init__(self, tmp_path: Path) -> None:
        super().__init__("plan", STANDIN, tmp_path, tmp_path)

    def here(self, monkeypatch, *more: str, wrong: tuple[str, ...] = ()) -> int:
        """The exit code of the command in this process."""
        monkeypatch.setattr(plan.machine, "has_gpu", lambda: True)
        monkeypatch.setattr(plan.gpu, "used_mib", dict)
        monkeypatch.setattr(load, "ENDING_S", 1.0)
        return self.run_here(monkeypatch, *more, wrong=wrong)

    def written(self) -> dict:
        return json.loads((self.output / "plan.json").read_text())


@pytest.fixture
def given(tmp_path):
    given = Given(tmp_path)
    with given.nothing_left():
        yield given


def values(server: dict) -> list[float | None]:
    return [value["fraction"] for value in server["recommendations"]]


def test_both_servers_are_planned_and_the_worst_rank_decides(given, monkeypatch, capsys) -> None:
    assert given.here(monkeypatch) == 0, capsys.readouterr()
    found = given.written()
    assert [server["server"] for server in found["servers"]] == ["stock", "patched"]
    for server in found["servers"]:
        # The second GPU keeps 4,096 tokens of 1.5 MB; with log-probabilities 2 MB more each. And the margin of 1 GB.
        assert values(server) == [pytest.approx(0.927), pytest.approx(0.845)]
        assert server["trials"][0]["fraction"] == 0.8
        seen = {phase["name"]: phase["seen"] for phase in server["trials"][0]["phases"]}
        assert seen == dict.fromkeys(
            [
                "prefill chunk",
                "prefill chunk behind the longest prefix",
                "8 requests behind one prefix",
                "captured decode of 16 requests",
                "eager decode of 40 requests",
                "prompts of many lengths",
                "prompt log-probabilities",
            ],
            True,
        )
        assert {rank["name"]: rank["forwards"] for rank in server["trials"][0]["ranks"]} == {
            "GPU 0": 4096 * 10**6,
            "GPU 1 (TP rank 1)": 6144 * 10**6,
        }
    terms = [(term["name"], round(term["mib"])) for term in found["rule"]["terms"]]
    assert terms[0] == ("prefill chunk beyond 2048 tokens", 10_000)
    assert "0.927" in (given.output / "plan.html").read_text()
    assert "--mem-fraction-static 0.927" in capsys.readouterr().out.replace("\n", "")
    assert list(given.output.glob("1-stock-*.jsonl"))


@pytest.mark.product
def test_a_server_that_runs_out_of_memory_lowers_the_value_and_ends_nothing_else(given, monkeypatch) -> None:
    # 8,192 tokens with log-probabilities want 28.7 GB: more than the engine's own fraction leaves.
    code = given.here(monkeypatch, "--only", "patched", "--", "--chunked-prefill-size", "8192")
    (server,) = given.written()["servers"]
    assert server["trials"][0]["ran_out"] == "prompt log-probabilities"
    assert values(server) == [pytest.approx(0.865), pytest.approx(0.7, abs=0.0011)]
    assert code == 0


def test_what_was_not_seen_at_its_bound_is_said(given, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "none")  # the stock server alone
    arguments = ("--no-prompt-logprobs", "--json")
    assert given.here(monkeypatch, *arguments, wrong=("fewer",)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["not_driven"] == ["eager decode of 40 requests: seen at most EXTEND: 320 tokens, 40 requests"]
    assert [(server["server"], len(values(server))) for server in shown["servers"]] == [("stock", 1)]


@pytest.mark.product
def test_where_a_chunk_is_longer_than_the_context_the_longest_prompt_is_driven_and_verified(given, monkeypatch) -> None:
    more = ("--only", "patched", "--no-prompt-logprobs", "--verify", "--verify-seconds", "1")
    assert given.here(monkeypatch, *more, "--", "--chunked-prefill-size", "20000") == 0
    (server,) = given.written()["servers"]
    # With the engine's own fraction there is no memory for it.
    phases = {phase["name"]: phase["seen"] for phase in server["trials"][-1]["phases"]}
    assert phases["prefill chunk"]
    assert all(phases.values())
    assert server["recommendations"][0]["verified"]["held"]


def test_prompt_logprobs_that_the_server_refuses_have_no_value(given, monkeypatch) -> None:
    assert given.here(monkeypatch, "--only", "patched", wrong=("no logprobs",)) == 0
    (server,) = given.written()["servers"]
    assert values(server) == [pytest.approx(0.927), None]
    assert "no log-probabilities here" in given.written()["not_driven"][0]


def test_a_value_with_prompt_logprobs_for_which_the_weights_are_too_large_ends_no_plan(given, monkeypatch) -> None:
    more = ("--only", "patched", "--", "--chunked-prefill-size", "8192")
    assert given.here(monkeypatch, *more, wrong=("large weights",)) == 0
    (server,) = given.written()["servers"]
    assert values(server) == [pytest.approx(0.865), None]


def test_a_server_that_finds_a_port_taken_is_started_once_more(given, monkeypatch) -> None:
    assert given.here(monkeypatch, "--only", "patched", "--no-prompt-logprobs", wrong=("port taken",)) == 0
    assert (given.folder / "taken").exists()


def test_a_value_that_holds_is_said_with_the_lowest_free_memory(given, monkeypatch, capsys) -> None:
    arguments = ("--only", "patched", "--no-prompt-logprobs", "--verify", "--verify-seconds", "1")
    assert given.here(monkeypatch, *arguments) == 0
    (value,) = given.written()["servers"][0]["recommendations"]
    assert value["verified"]["held"]
    assert value["verified"]["lowest_free"]["GPU 1 (TP rank 1)"] >= 1000 * 10**6
    assert "verified" in capsys.readouterr().out


@pytest.fixture
def one_odd_prompt(monkeypatch) -> None:
    """A verification that asks what no plan does."""
    original = plan.verify._Load.random

    def random(self, number, stop):
        self.ask([[5] * 77], 1, stop)
        original(self, number, stop)

    monkeypatch.setattr(plan.verify._Load, "random", random)


@pytest.mark.usefixtures("one_odd_prompt")
def test_a_value_that_the_verification_shows_to_be_too_high_is_lowered(given, monkeypatch, capsys) -> None:
    arguments = ("--only", "patched", "--no-prompt-logprobs", "--verify", "--verify-seconds", "1")
    assert given.here(monkeypatch, *arguments, wrong=("retries above 0.9",)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "patched: verification: GPU 0: the allocator gave memory back and tried again" in said
    assert "patched: verification: held" in said
    # Of each server, whoever waits is told why another one starts.
    assert said.count("not enough memory for verification") == 2
    assert said.count(": lowest free memory") == len(given.written()["servers"][0]["trials"]) - 2
    (server,) = given.written()["servers"]
    (value,) = server["recommendations"]
    assert [trial["ran_out"] for trial in server["trials"] if trial["fraction"] > 0.9] == ["verification"] * 2
    assert 0.86 < value["fraction"] <= 0.9
    assert value["verified"]["held"]


@pytest.mark.usefixtures("one_odd_prompt")
def test_the_engine_s_own_fraction_is_lowered_too_where_it_does_not_hold(given, monkeypatch) -> None:
    # With this margin the search is at its end with it, which it has not verified.
    arguments = ("--only", "patched", "--no-prompt-logprobs", "--margin", "13600", "--verify", "--verify-seconds", "1")
    assert given.here(monkeypatch, *arguments, wrong=("retries above 0.75",)) == 0
    (server,) = given.written()["servers"]
    (value,) = server["recommendations"]
    fractions = [trial["fraction"] for trial in server["trials"]]
    assert fractions[:2] == [pytest.approx(0.8)] * 2
    assert next(trial["ran_out"] for trial in server["trials"][1:] if trial["fraction"] > 0.75) == "verification"
    assert 0.73 < value["fraction"] <= 0.75
    assert value["verified"]["held"]


@pytest.mark.usefixtures("one_odd_prompt")
def test_a_value_that_does_not_hold_is_exit_code_1(given, monkeypatch) -> None:
    monkeypatch.setattr(plan.need, "MOST_TRIALS", 2)
    arguments = ("--only", "patched", "--no-prompt-logprobs", "--verify", "--verify-seconds", "1")
    assert given.here(monkeypatch, *arguments, wrong=("retries",)) == 1
    (value,) = given.written()["servers"][0]["recommendations"]
    assert "tried again" in value["verified"]["reasons"][0]
    assert value["command"] == ""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("cannot start", "the stock server ended with exit code 1 at start-up"),
        ("dies", "ValueError: something else"),
        ("ports taken", "EADDRINUSE"),
        ("hybrid", "the model has Mamba pools beside its KV cache"),
    ],
)
def test_a_server_that_cannot_be_planned_gives_exit_2_with_its_log(given, monkeypatch, capsys, wrong, said) -> None:
    given.output.mkdir()
    (given.output / "plan.json").write_text("of an earlier plan")
    assert given.here(monkeypatch, "--", "--no-such-thing") == 2
    assert (given.output / "plan.json").exists()  # no server was started: it is lost for nothing
    assert given.here(monkeypatch, wrong=(wrong,)) == 2
    assert said in capsys.readouterr().err
    assert (given.output / "1-stock.log").exists()
    assert not (given.output / "plan.json").exists()


def test_arguments_that_the_engine_refuses_are_refused_in_its_words(given, monkeypatch, capsys) -> None:
    assert given.here(monkeypatch, "--", "--no-such-thing") == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: --no-such-thing" in error
    assert error.count("\n") == 1
    assert not given.output.exists()


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT, signal.SIGTERM]])
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
