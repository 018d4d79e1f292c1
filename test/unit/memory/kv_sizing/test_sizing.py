"""What a record gives: the fraction, or the reason why the engine's own applies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_servers import GB, MEASURED, SIZED, START
from releases import ROOT
from sglang_moe_patches.memory.kv_sizing import sizing
from sglang_moe_patches.memory.kv_sizing.record import Record

MARGIN = START.margin
STARTS, BEGUN = ("a", "b"), ("0 of a", "0 of b")


def test_the_page_says_the_margin():
    page = " ".join((ROOT / "docs/changes/kv-sizing.md").read_text().split())
    assert f"*margin*: {MARGIN / 1e6:,.0f} MB that stay free beyond the measured need, on a GPU of any size." in page


@pytest.mark.parametrize(
    ("changed", "images", "reserve"),
    [
        pytest.param({}, 0, 8 * GB + MARGIN, id="what was not needed goes to the KV cache but for the margin"),
        pytest.param({"ooms": 1}, 0, 8 * GB + 2 * MARGIN, id="after an out-of-memory a server takes less"),
        pytest.param({"serving_peak_need": 9 * GB}, 0, 9 * GB + MARGIN, id="what was taken while serving counts"),
        pytest.param({}, 6 * GB, 14 * GB + MARGIN, id="what the rule keeps for images is kept besides"),
        # What was taken while serving was taken by images too.
        pytest.param({"serving_peak_need": 12 * GB}, 6 * GB, 14 * GB + MARGIN, id="images took less while serving"),
        pytest.param({"serving_peak_need": 15 * GB}, 6 * GB, 15 * GB + MARGIN, id="images took more while serving"),
    ],
)
def test_a_record_gives_what_was_not_needed_but_for_the_margin(changed, images, reserve):
    found = sizing.decide(replace(START, images=images), replace(MEASURED, **changed))
    assert reserve <= found.reserve <= reserve + 140 * GB * sizing.FRACTION_STEP
    assert found.fraction == pytest.approx(1 - found.reserve / (140 * GB), abs=1e-9)
    assert found.margin == MARGIN * (1 + changed.get("ooms", 0))
    assert found.rehearse
    assert not sizing.decide(START, replace(MEASURED, **changed, proven=True)).rehearse


@pytest.mark.parametrize(
    ("known", "why", "rehearses"),
    [
        (None, "no record for this configuration", True),
        (Record(unfinished=("0 of a",)), "no record for this configuration", True),
        (Record(unfinished=BEGUN), "2 rehearsals have begun and not ended", False),
        (replace(MEASURED, unfinished=BEGUN), "2 rehearsals have begun and not ended", False),
        (replace(MEASURED, missed=("mixed chunk",), rehearsals=1), "did not reach: mixed chunk", True),
        (replace(MEASURED, missed=("mixed chunk",), rehearsals=2), "did not reach: mixed chunk", False),
        (replace(MEASURED, ooms=2), "2 servers ran out of memory", False),
        (replace(MEASURED, unserved=STARTS), "2 starts with the record's fraction ended before they served", False),
        (replace(MEASURED, before=130 * GB), "hold 1,000 MB of the GPU, 11,000 MB when it was measured", False),
        (replace(MEASURED, need=26 * GB), "0.0 % more KV cache", False),
        (replace(MEASURED, need=27 * GB), "1,000 MB too little: the largest forward plus the margin", False),
        (replace(MEASURED, serving_peak_need=26 * GB), "less than 2 %", False),
    ],
)
def test_the_rule_stands_with_a_reason(known, why, rehearses):
    found = sizing.decide(START, known)
    assert why in found.reason
    assert (found.fraction, found.rehearse, found.reserve) == (None, rehearses, START.reserve)


def test_where_no_memory_is_free_or_the_file_cannot_be_read_that_is_the_reason():
    assert sizing.decide(sizing.LaunchMemory(0, GB, 0.9), MEASURED).reason == "no memory is free"
    found = sizing.decide(START, None, "x.json is not whole JSON")
    assert (found.fraction, found.reason, found.rehearse) == (None, "x.json is not whole JSON", True)


@pytest.mark.parametrize(
    ("limit", "reserve", "need", "why"),
    [
        pytest.param(382_206, 28, 8, "--max-total-tokens 382,206 is used; 726,191 would fit", id="the rule gives it"),
        pytest.param(382_206, 60, 8, "--max-total-tokens 382,206 is used; 1,337,721 would fit", id="it gives more"),
        pytest.param(383_000, 28, 8, "--max-total-tokens 383,000 is used; 726,191 would fit", id="hardly less"),
        pytest.param(382_206, 60, 59, "1,000 MB too little: the largest forward plus", id="the need is larger"),
        pytest.param(800_000, 28, 8, "", id="more than fits"),
        pytest.param(500_000, 28, 8, "", id="more than the rule gives"),
    ],
)
def test_a_limit_of_the_users_is_the_reason_and_nothing_is_rehearsed_for_it(limit, reserve, need, why):
    launch = replace(START, max_tokens=limit)
    known = replace(MEASURED, reserve=reserve * GB, need=need * GB)
    found = sizing.decide(launch, known)
    assert found.reason.startswith(why)
    assert (found.fraction is None) == (not found.rehearse) == bool(why)
    advice, is_warning = sizing.advise(launch, known)
    assert is_warning == (need == 59)
    if limit == 383_000:  # a given fraction may be told of a little more
        assert "would give 794 more tokens" in advice
    elif not is_warning:
        more = min(limit, 726_191) - 382_206
        assert advice.startswith(why or f"18,000 MB of the reserve were never needed: {SIZED} would give {more:,} more")


@pytest.mark.parametrize(
    ("known", "fraction"),
    [(None, None), (replace(MEASURED, missed=("x",)), None), (MEASURED, SIZED), (Record(), None)],
)
def test_a_fraction_is_suggested_where_the_need_is_known(known, fraction):
    assert sizing.suggested_fraction(START, known) == fraction


def grown(**changed):
    """What a server sets aside more for this, by how much its KV cache grows."""
    plain, larger = sizing.decide(START, MEASURED), sizing.decide(START, replace(MEASURED, **changed))
    grows = (20 * GB + 28 * GB - plain.reserve) / (20 * GB) - 1
    return (larger.reserve - plain.reserve) / grows


@pytest.mark.parametrize("name", ["table_bytes", "draft_kv_bytes"])
def test_what_grows_with_the_kv_cache_is_paid_for(name):
    assert grown(**{name: 2 * GB}) == pytest.approx(2 * GB, abs=0.04 * GB)


def test_where_requests_follow_the_pools_all_that_was_needed_may_grow_with_them():
    assert grown(requests_grow=True) == pytest.approx(8 * GB, abs=0.04 * GB)
    assert grown(requests_grow=True, serving_peak_need=9 * GB) > 9 * GB


amounts = st.integers(0, 200 * GB)


@given(amounts, amounts, amounts, amounts, amounts, st.floats(0, 1), st.floats(0, 0.99), st.integers(0, 3))
def test_never_worse_than_the_rule_and_never_less_than_was_needed(need, serving, table, kv, before, f, rule, ooms):
    start = sizing.LaunchMemory(free_before_load=max(1, before), total=max(1, before), fraction=rule)
    known = Record(
        need=need,
        serving_peak_need=serving,
        table_bytes=table,
        kv_bytes=kv,
        before=before,
        total=start.total,
        reserve=int(before * (1 - f)),
        ooms=ooms,
    )
    found = sizing.decide(start, known)
    if found.fraction is not None:
        assert rule < found.fraction < 1
        assert start.free_before_load * (1 - found.fraction) >= max(need, serving) + start.margin * (1 + ooms) - 1
    else:
        assert found.reason


def test_memory_that_others_gave_back_meanwhile_is_not_taken_for_ours():
    assert sizing.lowest_free(seen=20 * GB, free_at_start=25 * GB, reserved_growth=4 * GB) == 20 * GB
    assert sizing.lowest_free(seen=24 * GB, free_at_start=25 * GB, reserved_growth=4 * GB) == 21 * GB
