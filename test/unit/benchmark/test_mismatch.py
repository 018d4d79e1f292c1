"""What is kept of answers that differ, and whose doing it is."""

from __future__ import annotations

import json

import pytest
from common import mismatch
from common.mismatch import Answer, Asked

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


def test_a_request_among_others_is_named_as_such():
    (found,) = mismatch.differences(REQUESTS, STOCK, [*STOCK[:2], Answer([9], [-2.0])])
    assert str(found).startswith("request 2 (8 tokens, seed 2, among others), token 0")


def test_all_that_is_needed_to_look_again_is_kept_and_nothing_overwritten(tmp_path):
    log = tmp_path / "stock.log"
    log.write_text("a log")
    other = [Answer([5, 8, 7], [-0.5, -0.25, -1.0]), *STOCK[1:]]
    found = mismatch.differences(REQUESTS, STOCK, other)
    given = (found, {"stock": STOCK, "patched": other}, [log, tmp_path / "none.log"])
    first, second = (mismatch.keep(tmp_path / "kept" / "pipeline", *given) for _ in range(2))
    assert (first.name, second.name) == ("pipeline", "pipeline-2")
    assert (first / "stock.log").read_text() == "a log"
    kept = json.loads((first / "mismatch.json").read_text())
    assert kept["answers"]["patched"][0] == {"tokens": [5, 8, 7], "logprobs": [-0.5, -0.25, -1.0]}
    (difference,) = kept["differences"]
    assert (difference["position"], difference["one"], difference["other"]) == (1, [6, -0.25], [8, -0.25])
    assert difference["asked"] == {"tokens": 9, "seed": 1, "new_tokens": 3, "together": False, "more": {}}


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
