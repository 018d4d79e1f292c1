"""The pure parts of ``plan``: from what servers left free to the fraction to set."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sglang_moe_patches.planning import need, resolve, rule
from sglang_moe_patches.planning.need import Trial

GB = 10**9
MEMORY = 140 * GB
MARGIN = 1 * GB


def search(needed: Callable[[float], int], margin: int = MARGIN, default: float = 0.8) -> list[Trial]:
    """What ``plan`` tries on a server that needs so many bytes after its KV cache is sized."""
    trials = [try_at(needed, default)]
    while (fraction := need.next_fraction(trials, margin)) is not None:
        trials.append(try_at(needed, fraction))
    return trials


def try_at(needed: Callable[[float], int], fraction: float) -> Trial:
    left = round((1 - fraction) * MEMORY) - needed(fraction)
    return Trial(fraction, MEMORY, left if left >= 0 else None)


def growing(fixed: int, slope: float, steps: list[tuple[float, int]]) -> Callable[[float], int]:
    """A need that never falls: a request table grows in proportion, a larger batch or graph comes all at once."""
    return lambda f: round(fixed + slope * f * MEMORY) + sum(size for at, size in steps if f >= at)


NEEDS = st.builds(
    growing,
    st.integers(0, 12 * GB),
    st.floats(0, 0.1),
    st.lists(st.tuples(st.floats(0.5, 1), st.integers(0, 4 * GB)), max_size=3),
)


@given(needed=NEEDS, margin=st.integers(0, 4 * GB), default=st.floats(0.3, 0.97).map(need.down))
def test_what_is_recommended_always_fits_with_its_margin(needed: Callable, margin: int, default: float) -> None:
    found = need.proven(search(needed, margin, default), margin)
    assume(found is not None)
    assert needed(found) + margin <= (1 - found) * MEMORY + 1


@given(needed=NEEDS, margin=st.integers(0, 4 * GB), default=st.floats(0.3, 0.97).map(need.down))
def test_the_search_ends_and_no_fraction_above_its_ceiling_fits(needed: Callable, margin: int, default: float) -> None:
    trials = search(needed, margin, default)
    assert len(trials) <= need.MOST_TRIALS
    above = need.ceiling(trials, margin) + 2 * need.STEP
    assert above > (need.proven(trials, margin) or 0)
    assert needed(above) + margin > (1 - above) * MEMORY


@given(fixed=st.integers(0, 20 * GB), slope=st.floats(0, 0.05), default=st.floats(0.5, 0.8).map(need.down))
def test_a_need_that_grows_in_proportion_is_met_within_the_tolerance(fixed: int, slope: float, default: float) -> None:
    needed = growing(fixed, slope, [])
    fixed_point = (MEMORY - fixed - MARGIN) / (MEMORY * (1 + slope))
    assume(fixed_point < need.HIGHEST)
    found = need.proven(search(needed, MARGIN, default), MARGIN)
    assert fixed_point - need.TOLERANCE - 2 * need.STEP <= found <= fixed_point + 1e-6


@given(needed=NEEDS, margin=st.integers(0, 3 * GB), more=st.integers(0, 3 * GB))
def test_a_larger_margin_or_need_never_raises_what_one_set_of_trials_proves(
    needed: Callable, margin: int, more: int
) -> None:
    trials = search(needed, margin)
    worse = [Trial(t.fraction, t.before_load, t.lowest_free and max(0, t.lowest_free - more)) for t in trials]
    for then in (need.proven(trials, margin + more), need.proven(worse, margin)):
        assert (then or 0) <= (need.proven(trials, margin) or 0)


def test_a_need_that_does_not_grow_takes_two_servers() -> None:
    trials = search(growing(3 * GB, 0, []))
    assert len(trials) == 2
    assert need.proven(trials, MARGIN) == pytest.approx(0.971)  # 4 of 140 GB are 0.02857 of it


def test_a_server_that_runs_out_of_memory_proves_nothing_and_a_lower_fraction_is_tried() -> None:
    first = [Trial(0.9, MEMORY, None)]
    assert need.proven(first, MARGIN) is None
    assert need.next_fraction(first, MARGIN) == pytest.approx(0.88)


def test_a_fraction_at_which_memory_ran_out_is_not_proven_by_a_trial_that_left_enough() -> None:
    # By another load: a verification's.
    trials = [Trial(0.8, MEMORY, 2 * GB), Trial(0.7, MEMORY, 2 * GB)]
    assert need.proven(trials, MARGIN) == pytest.approx(0.8)
    assert need.proven([*trials, Trial(0.8, MEMORY, None)], MARGIN) == pytest.approx(0.7)
    assert need.next_fraction([trials[0], Trial(0.8, MEMORY, None)], MARGIN) == pytest.approx(0.78)


def test_a_trial_that_leaves_less_than_the_margin_proves_only_what_leaves_it() -> None:
    assert need.proven([Trial(0.9, 100 * GB, GB // 2)], MARGIN) == pytest.approx(0.895)


def test_of_several_trials_the_one_that_allows_least_is_the_ceiling() -> None:
    assert need.ceiling([Trial(0.8, 100 * GB, 12 * GB), Trial(0.9, 100 * GB, 0)], MARGIN) == pytest.approx(0.9)
    assert need.ceiling([Trial(0.8, 100 * GB, 12 * GB), Trial(0.85, 100 * GB, None)], MARGIN) == pytest.approx(0.849)


@given(fraction=st.floats(0.001, 0.999))
def test_a_fraction_is_rounded_down_to_a_thousandth(fraction: float) -> None:
    rounded = need.down(fraction)
    assert rounded <= fraction + 1e-8
    assert fraction - rounded < need.STEP + 1e-8 or rounded == need.HIGHEST
    assert need.down(rounded) == rounded


def test_kv_tokens_follow_the_fraction_in_whole_pages() -> None:
    trial = Trial(0.8, 100 * GB, 10 * GB)
    assert need.kv_tokens(trial, 1_000_000, 50_000, 0.9) == 1_200_000
    assert need.kv_tokens(trial, 1_000_000, 50_000, 0.8001, page=64) == 1_000_192
    assert need.kv_tokens(trial, 1_000, 50_000, 0.5) == 0


# --- the rule, from an answer of the resolver -------------------------------------------------------------------------


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
