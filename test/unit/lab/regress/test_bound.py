"""The interval of the drop: against all tables, and against simulated runs."""

from __future__ import annotations

import functools
import random
from math import comb, log

import pytest
from scipy.optimize import minimize_scalar
from sglang_moe_patches.lab.regress import bound
from sglang_moe_patches.lab.regress.compare import MAX_DROP, mcnemar
from sglang_moe_patches.lab.regress.gsm8k import GSM8K

ALPHA = 0.05
THREE = MAX_DROP / 100


def score(n: int, losses: int, gains: int, drop: float) -> float:
    """The statistic by its definition: the likeliest rate of gains found by looking for it."""

    def surprise(rate):
        parts = ((losses, rate + drop), (gains, rate), (n - losses - gains, 1 - 2 * rate - drop))
        return -sum(count * log(max(share, 1e-300)) for count, share in parts if count)

    found = minimize_scalar(surprise, bounds=(0, (1 - drop) / 2), method="bounded", options={"xatol": 1e-12})
    rate = min((0.0, found.x), key=surprise)
    return (n * drop - (losses - gains)) / (n * (2 * rate + drop - drop**2)) ** 0.5


def probability(n: int, losses: int, gains: int, loss: float, gain: float) -> float:
    rest = n - losses - gains
    return comb(n, losses) * comb(n - losses, gains) * loss**losses * gain**gains * (1 - loss - gain) ** rest


@pytest.mark.parametrize(("n", "drop"), [(9, 0.1), (14, 0.25), (20, 0.03)])
def test_p_is_that_of_all_tables_at_least_as_favourable(n, drop):
    tables = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    scores = {table: score(n, *table, drop) for table in tables}
    rates = [(1 - drop) / 2 * (step / bound.GRID) ** 2 for step in range(bound.GRID)]
    for seen in ((0, 0), (1, 0), (0, 1), (2, 2), (3, 1)):
        favourable = [table for table in tables if scores[table] >= scores[seen] - 1e-6]
        worst = max(sum(probability(n, *table, rate + drop, rate) for table in favourable) for rate in rates)
        assert bound.p_value(n, *seen, drop) == pytest.approx(worst, rel=1e-6)


@functools.cache
def no_worse(n: int, losses: int, gains: int, drop: float = THREE) -> bool:
    return bound.p_value(n, losses, gains, drop) <= ALPHA


@pytest.mark.parametrize(("n", "drop"), [(100, THREE), (282, THREE), (127, 0.05)])
def test_no_worse_is_said_of_a_server_that_is_worse_with_less_than_alpha(n, drop):
    """Where few differ, too: there Tango's interval and that of plus or minus 1.64 standard errors say it too often."""
    said, losses = [], 0
    for gains in range(26):  # the more are gained, the more may be lost
        while no_worse(n, losses, gains, drop):
            losses += 1
        said += [(fewer, gains) for fewer in range(losses)]
    for gain in (0.0, 0.001, 0.003, 0.01, 0.02, 0.03):
        wrong = sum(probability(n, *table, gain + drop, gain) for table in said)
        assert 0 < wrong <= ALPHA, gain


def test_simulated_runs_are_judged_as_is_claimed():
    n, runs = bound.questions_for(THREE, ALPHA), 1000
    found = {}
    for drop in (0.0, THREE, 0.05):
        draw = random.Random(25)
        judged = {"no worse": 0, "worse": 0}
        for _ in range(runs):
            numbers = [draw.randrange(2000) for _ in range(n)]
            losses = sum(number < 30 + 2000 * drop for number in numbers)  # 1.5 %, and the drop
            gains = sum(number >= 1970 for number in numbers)  # 1.5 %
            worse = losses > gains and mcnemar(losses, gains)[1] < ALPHA
            judged["worse" if worse else "no worse"] += worse or no_worse(n, losses, gains)
        found[drop] = {verdict: count / runs for verdict, count in judged.items()}
    assert found[0.0]["no worse"] == pytest.approx(bound.POWER, abs=0.03)
    assert found[0.0]["worse"] <= ALPHA
    assert found[THREE]["no worse"] <= ALPHA + 0.01
    assert found[0.05]["no worse"] <= 0.01
    assert found[0.05]["worse"] >= 0.7


@pytest.mark.parametrize(("drop", "questions"), [(0.03, 282), (0.02, 558), (0.01, 1971), (0.1, 46)])
def test_how_many_questions_it_takes(drop, questions):
    assert bound.questions_for(drop, ALPHA) == questions
    assert (questions > GSM8K) == (drop == 0.01)
    power = bound.shown(questions, drop, ALPHA, bound.CHURN / 2, bound.CHURN / 2)
    assert bound.POWER - 0.02 <= power <= bound.POWER + 0.1  # a table more or less is a jump


def test_where_nothing_differs_the_bound_is_that_of_a_binomial():
    for n in (60, 200, 1319):
        assert bound.largest_drop(n, 0, 0, ALPHA, looked_at=THREE) == pytest.approx(1 - ALPHA ** (1 / n), abs=2e-4)
    assert bound.fewest(THREE, ALPHA) == 99
    assert no_worse(99, 0, 0)
    assert not no_worse(98, 0, 0)


@pytest.mark.parametrize(("losses", "gains"), [(0, 0), (1, 0), (3, 3), (5, 2), (12, 4), (0, 9), (40, 0)])
def test_the_bound_lies_on_the_side_that_the_verdict_says(losses, gains):
    drop = bound.largest_drop(282, losses, gains, ALPHA, looked_at=THREE)
    assert (drop <= THREE) == no_worse(282, losses, gains)
    assert drop >= max(0.0, (losses - gains) / 282)
    if drop:
        assert bound.p_value(282, losses, gains, drop + 3e-4) <= ALPHA
