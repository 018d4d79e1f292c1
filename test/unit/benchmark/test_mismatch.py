"""Tests of ``test/tools/mismatch.py``. The tool says whether this package or the engine causes differences between
answers."""

from __future__ import annotations

import mismatch
import pytest
from mismatch import Answer, Request

REQUESTS = [Request(9, 1, 3), *mismatch.make_simultaneous_requests(8, 2)]
STOCK = [Answer([5, 6, 7], [-0.5, -0.25, -1.0]), Answer([3], [-0.125]), Answer([4], [-2.0])]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Answer([5, 8, 7], [-0.5, -0.25, -1.0]), "token 1: (6, -0.25) and (8, -0.25)"),
        (Answer([5, 6, 7], [-0.5, -0.25, -1.0000001]), "token 2: (7, -1.0) and (7, -1.0000001)"),
        (Answer([5, 6], [-0.5, -0.25]), "token 2: (7, -1.0) and None"),
    ],
    ids=["token", "log-probability", "end"],
)
def test_the_first_token_or_log_probability_that_differs_is_named(other, difference):
    (result,) = mismatch.find_differences(REQUESTS, STOCK, [other, *STOCK[1:]])
    assert str(result) == f"request 0 (9 tokens, seed 1), {difference}"
    assert mismatch.find_differences(REQUESTS, STOCK, STOCK) == []


@pytest.mark.parametrize(
    ("stock", "patched", "verdict"),
    [
        (0, 6, "OURS: stock and patched differed in 6 of 30 runs, stock and stock in 0 of 30 (p = 0.012)"),
        (5, 6, "THE ENGINE'S: stock and patched differed in 6 of 30 runs, stock and stock in 5 of 30"),
        (1, 0, "THE ENGINE'S"),
        (0, 2, "OPEN: stock and patched differed in 2 of 30 runs, stock and stock in 0 of 30"),
        (0, 0, "NOT SEEN: "),
    ],
)
def test_the_cause_of_differences_is_judged_by_their_frequencies(stock, patched, verdict):
    runs = [[number < count for number in range(30)] for count in (stock, patched)]
    result = mismatch.find_cause(*runs)
    assert result.startswith(verdict)
    assert ("less than 10 and 10 % of runs do" in result) == (stock == patched == 0)
