"""What is kept of answers that differ, and whose doing it is."""

from __future__ import annotations

import mismatch
import pytest
from mismatch import Answer, Asked

REQUESTS = [Asked(9, 1, 3), *mismatch.at_once(8, 2)]
STOCK = [Answer([5, 6, 7], [-0.5, -0.25, -1.0]), Answer([3], [-0.125]), Answer([4], [-2.0])]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Answer([5, 8, 7], [-0.5, -0.25, -1.0]), "token 1: (6, -0.25) and (8, -0.25)"),
        (Answer([5, 6, 7], [-0.5, -0.25, -1.0000001]), "token 2: (7, -1.0) and (7, -1.0000001)"),
        (Answer([5, 6], [-0.5, -0.25]), "token 2: (7, -1.0) and None"),
    ],
    ids=["token", "log-probability", "end"],
)
def test_the_first_token_or_log_probability_that_differs_is_named(other, said):
    (found,) = mismatch.differences(REQUESTS, STOCK, [other, *STOCK[1:]])
    assert str(found) == f"request 0 (9 tokens, seed 1), {said}"
    assert mismatch.differences(REQUESTS, STOCK, STOCK) == []


@pytest.mark.parametrize(
    ("stock", "patched", "said"),
    [
        (0, 6, "OURS: stock and patched differed in 6 of 30 runs, stock and stock in 0 of 30 (p = 0.012)"),
        (5, 6, "THE ENGINE'S: stock and patched differed in 6 of 30 runs, stock and stock in 5 of 30"),
        (1, 0, "THE ENGINE'S"),
        (0, 2, "OPEN: stock and patched differed in 2 of 30 runs, stock and stock in 0 of 30"),
        (0, 0, "NOT SEEN: "),
    ],
)
def test_whose_doing_it_is(stock, patched, said):
    runs = [[number < count for number in range(30)] for count in (stock, patched)]
    found = mismatch.whose(*runs)
    assert found.startswith(said)
    assert ("less than 10 and 10 % of runs do" in found) == (stock == patched == 0)
