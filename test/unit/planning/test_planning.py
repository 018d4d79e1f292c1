"""The engine's rule, from an answer of its resolver."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.planning import resolve, rule


def answer(fraction: float, *steps: float | None) -> dict:
    def one(value: float | None) -> dict | None:
        return None if value is None else {"resolved": {"mem_fraction_static": value}, "gpu_memory_mib": 100_000.0}

    filled = [*steps, *[None] * (len(rule.INPUTS) - len(steps))]
    return {"base": one(fraction), "steps": [one(step) for step in filled]}


def test_terms_are_what_the_reserve_falls_by_and_add_up_to_it() -> None:
    found = rule.read(answer(0.7, 0.85, None, 0.85, 0.86))
    assert [round(term.mib) for term in found.terms] == [15_000, 1_000, 14_000]
    assert found.terms[-1].name == rule.REST
    assert found.reserve_mib == pytest.approx(sum(term.mib for term in found.terms))


@given(st.floats(0.2, 0.99), st.lists(st.none() | st.floats(0.2, 0.99), max_size=len(rule.INPUTS)))
def test_terms_add_up_whatever_the_resolver_answers(fraction: float, steps: list[float | None]) -> None:
    found = rule.read(answer(fraction, *steps))
    assert sum(term.mib for term in found.terms) == pytest.approx(found.reserve_mib)


@pytest.mark.parametrize(
    ("without", "left"),
    [
        (["--dp"], ["--model-path", "m", "--speculative-algorithm", "EAGLE", "--speculative-num-steps=3"]),
        (["--speculative-*"], ["--model-path", "m", "--dp", "4"]),
        ([], ["--model-path", "m", "--dp", "4", "--speculative-algorithm", "EAGLE", "--speculative-num-steps=3"]),
    ],
)
def test_a_flag_is_taken_out_with_its_values(without: list[str], left: list[str]) -> None:
    given_arguments = [
        "--model-path",
        "m",
        "--dp",
        "4",
        "--speculative-algorithm",
        "EAGLE",
        "--speculative-num-steps=3",
    ]
    assert resolve.changed_arguments(given_arguments, without, ["--x"]) == [*left, "--x"]


class Engine:
    """Stands in for the engine's resolver: it sets a variable, and its fraction falls by ``drift`` each time."""

    def __init__(self, monkeypatch, drift: float) -> None:
        self.left, self.drift = 0.9, drift
        holds: dict[str, dict[str, Any]] = {
            "utils.common": {"get_device_memory_capacity": None},
            "server_args": {"prepare_server_args": self.prepare},
        }
        for name in ("", "srt", "srt.utils", *(f"srt.{module}" for module in holds)):
            module = ModuleType(f"sglang.{name}".rstrip("."))
            vars(module).update(holds.get(name.removeprefix("srt."), {}))
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def prepare(self, arguments: list[str]) -> Any:
        assert "RESOLVED_BEFORE" not in os.environ
        os.environ["RESOLVED_BEFORE"] = "1"
        if "--unknown" in arguments:
            raise SystemExit(2)
        self.left -= self.drift
        less = 0.1 * ("--less" in arguments)
        return SimpleNamespace(device="cuda", mem_fraction_static=self.left + less, none=None, many=[1])


STEPS = [
    [{"without": [], "add": ["--unknown"]}, {"without": [], "add": ["--less"]}],
    [{"without": [], "add": ["--unknown"]}],
]


def test_each_resolution_begins_with_the_environment_of_the_first(monkeypatch) -> None:
    Engine(monkeypatch, drift=0)
    found = resolve.answer({"arguments": [], "gpu_memory_mib": 1000.0, "steps": STEPS})
    assert found["base"]["resolved"] == {"device": "cuda", "mem_fraction_static": 0.9, "none": None}
    assert [step and step["resolved"]["mem_fraction_static"] for step in found["steps"]] == [1.0, None]
    assert "RESOLVED_BEFORE" not in os.environ


def test_terms_of_an_engine_that_answers_otherwise_the_second_time_are_not_believed(monkeypatch) -> None:
    Engine(monkeypatch, drift=0.01)
    found = resolve.answer({"arguments": [], "gpu_memory_mib": 1000.0, "steps": STEPS})
    assert found["steps"] == [None, None]
    assert found["base"]["resolved"]["mem_fraction_static"] == pytest.approx(0.89)
