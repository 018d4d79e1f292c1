"""From what was needed to a number of tokens."""

from __future__ import annotations

import pytest
from releases import ROOT
from sglang_moe_patches.memory.kv_sizing import eligibility, sizing
from sglang_moe_patches.memory.kv_sizing.phases import PhaseKind
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory, RankNeed

GB = 1_000_000_000


def test_the_page_says_the_margin():
    page = (ROOT / "docs/changes/kv-sizing.md").read_text()
    assert f"a *margin*: {int(eligibility.KV_MARGIN.default):,} MB" in page


MISSED = {"a": PhaseKind.MIXED, "b": PhaseKind.VARIED}
TOO_FEW = "beside the largest forward and the margin fit 0 tokens, too few to serve"


@pytest.mark.parametrize(
    ("needs", "tokens", "reason"),
    [
        ([RankNeed(fits=300)], 300, ""),
        ([RankNeed(fits=300), RankNeed(fits=250)], 250, ""),
        ([RankNeed(fits=900)], 500, ""),  # to the end of its addresses
        ([RankNeed(fits=201)], 200, ""),  # not for less than 2 %
        ([RankNeed(fits=204)], 204, ""),
        ([RankNeed(fits=150)], 150, ""),
        ([RankNeed(fits=199)], 199, ""),  # it shrinks by whatever it must
        ([RankNeed(fits=150, missed=MISSED)], 150, ""),
        ([RankNeed(fits=300, missed=MISSED)], 200, "the rehearsal did not reach: a, b"),
        ([RankNeed(fits=300), RankNeed(failure="no driver")], 200, "the rehearsal failed: rank 1: no driver"),
        ([RankNeed(fits=300), RankNeed(fits=-9)], 120, TOO_FEW),  # two chunks stay
    ],
    ids=str,
)
def test_all_ranks_have_what_fits_on_the_one_with_the_least(needs, tokens, reason):
    assert sizing.decide(needs, 200, 500, 120) == (tokens, reason)


@pytest.mark.parametrize(
    ("free", "cache", "least"),
    [
        (40, 10, None),  # the rule leaves more
        (25, 10, 0.85),
        (15, 10, 0.95),
        (12.9, 10, None),  # nothing is left for forwards
    ],
)
def test_a_cache_begins_with_one_longest_request_where_the_rule_leaves_less(free, cache, least):
    """The rule sets aside 20 of 100 GB; on the rank with the least are ``free`` beside the weights."""
    launches = [LaunchMemory("", 100 * GB, int(each * GB), 0.8) for each in (free + 5, free)]
    found = sizing.least_fraction(launches, cache * GB, 2 * GB)
    assert found == (None if least is None else pytest.approx(least))
    if found is not None:  # as the engine reckons: free memory less what the fraction sets aside
        left = int(free * GB) - 100 * GB * (1 - found)
        assert cache * GB <= left < (cache + 0.02) * GB


@pytest.mark.parametrize(("more", "pinned"), [(5 * GB, 0.85), (-5 * GB, 0.75), (123_456_789, 0.8012), (21 * GB, None)])
def test_the_fraction_that_gives_as_much_is_rounded_down(more, pinned):
    assert sizing.pinned_fraction(LaunchMemory("", 100 * GB, 50 * GB, 0.8), more) == pinned


def test_the_three_largest_phases_are_named():
    phases = {"a": 1_000_000, "b": 2_500_000_000, "c": 30_000_000, "d": 40_000_000}
    assert sizing.largest_phases(phases) == "b 2,500 MB, d 40 MB, c 30 MB"
