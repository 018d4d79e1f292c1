"""Tests of ``lab/regress/bound.py``, which computes the confidence interval of the drop in accuracy. The tests
enumerate all possible numbers of losses and gains (*tables*), and simulate runs. A *loss* is an answer that only the
stock server gets right. A *gain* is an answer that only the patched server gets right."""

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


def compute_score(n: int, losses: int, gains: int, drop: float) -> float:
    """Return the score statistic, computed by its definition. The most likely rate of gains is found by a numerical
    search."""

    def negative_log_likelihood(rate):
        parts = ((losses, rate + drop), (gains, rate), (n - losses - gains, 1 - 2 * rate - drop))
        return -sum(count * log(max(share, 1e-300)) for count, share in parts if count)

    bounds = (0, (1 - drop) / 2)
    minimum = minimize_scalar(negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-12})
    rate = min((0.0, minimum.x), key=negative_log_likelihood)
    return (n * drop - (losses - gains)) / (n * (2 * rate + drop - drop**2)) ** 0.5


def probability(n: int, losses: int, gains: int, loss: float, gain: float) -> float:
    """Return the probability of these losses and gains in ``n`` questions, with the true rates ``loss`` and
    ``gain``."""
    rest = n - losses - gains
    return comb(n, losses) * comb(n - losses, gains) * loss**losses * gain**gains * (1 - loss - gain) ** rest


@pytest.mark.parametrize(("n", "drop"), [(9, 0.1), (14, 0.25), (20, 0.03)])
def test_the_p_value_is_the_probability_of_all_tables_at_least_as_favourable(n, drop):
    tables = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    scores = {table: compute_score(n, *table, drop) for table in tables}
    rates = [(1 - drop) / 2 * (step / bound.GRID_RATES) ** 2 for step in range(bound.GRID_RATES)]
    for observed in ((0, 0), (1, 0), (0, 1), (2, 2), (3, 1)):
        favourable = [table for table in tables if scores[table] >= scores[observed] - 1e-6]
        worst = max(sum(probability(n, *table, rate + drop, rate) for table in favourable) for rate in rates)
        assert bound.p_value(n, *observed, drop) == pytest.approx(worst, rel=1e-6)


@functools.cache
def is_no_worse(n: int, losses: int, gains: int, drop: float = THREE) -> bool:
    return bound.p_value(n, losses, gains, drop) <= ALPHA


@pytest.mark.parametrize(("n", "drop"), [(100, THREE), (282, THREE), (127, 0.05)])
def test_a_worse_server_is_called_no_worse_with_a_probability_below_alpha(n, drop):
    """A server whose true drop equals the allowed drop must get the verdict *no worse* with a probability of at most
    alpha. The test computes this probability for several rates of gains. With low rates, few answers differ, and two
    common methods would exceed alpha: Tango's interval, and 1.64 standard errors."""
    passing, losses = [], 0
    for gains in range(26):  # more gains allow more losses
        while is_no_worse(n, losses, gains, drop):
            losses += 1
        passing += [(fewer, gains) for fewer in range(losses)]
    for gain in (0.0, 0.001, 0.003, 0.01, 0.02, 0.03):
        wrong = sum(probability(n, *table, gain + drop, gain) for table in passing)
        assert 0 < wrong <= ALPHA, gain


def test_simulated_runs_get_each_verdict_as_often_as_the_formulas_say():
    n, runs = bound.questions_for(THREE, ALPHA), 1000
    shares = {}
    for drop in (0.0, THREE, 0.05):
        draw = random.Random(25)
        verdicts = {"no worse": 0, "worse": 0}
        for _ in range(runs):
            numbers = [draw.randrange(2000) for _ in range(n)]
            losses = sum(number < 30 + 2000 * drop for number in numbers)  # rate of losses: 1.5 % plus the drop
            gains = sum(number >= 1970 for number in numbers)  # rate of gains: 1.5 %
            worse = losses > gains and mcnemar(losses, gains)[1] < ALPHA
            verdicts["worse" if worse else "no worse"] += worse or is_no_worse(n, losses, gains)
        shares[drop] = {verdict: count / runs for verdict, count in verdicts.items()}
    assert shares[0.0]["no worse"] == pytest.approx(bound.POWER, abs=0.03)
    assert shares[0.0]["worse"] <= ALPHA
    assert shares[THREE]["no worse"] <= ALPHA + 0.01
    assert shares[0.05]["no worse"] <= 0.01
    assert shares[0.05]["worse"] >= 0.7


@pytest.mark.parametrize(("drop", "questions"), [(0.03, 282), (0.02, 558), (0.01, 1971), (0.1, 46)])
def test_number_of_questions_for_a_drop(drop, questions):
    assert bound.questions_for(drop, ALPHA) == questions
    assert (questions > GSM8K) == (drop == 0.01)
    power = bound.pass_probability(questions, drop, ALPHA, bound.CHURN / 2, bound.CHURN / 2)
    assert bound.POWER - 0.02 <= power <= bound.POWER + 0.1  # the tables are discrete, so the probability jumps


def test_the_bound_without_losses_and_gains_is_binomial():
    for n in (60, 200, 1319):
        assert bound.largest_drop(n, 0, 0, ALPHA, threshold=THREE) == pytest.approx(1 - ALPHA ** (1 / n), abs=2e-4)
    assert bound.min_questions(THREE, ALPHA) == 99
    assert is_no_worse(99, 0, 0)
    assert not is_no_worse(98, 0, 0)


@pytest.mark.parametrize(("losses", "gains"), [(0, 0), (1, 0), (3, 3), (5, 2), (12, 4), (0, 9), (40, 0)])
def test_bound_and_verdict_agree(losses, gains):
    drop = bound.largest_drop(282, losses, gains, ALPHA, threshold=THREE)
    assert (drop <= THREE) == is_no_worse(282, losses, gains)
    assert drop >= max(0.0, (losses - gains) / 282)
    if drop:
        assert bound.p_value(282, losses, gains, drop + 3e-4) <= ALPHA
