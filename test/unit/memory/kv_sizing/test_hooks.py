"""A start of several ranks: who decides by which record, and what the engine is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from kv_servers import GB, MEASURED, SIZED, START, Rank, a_pool
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.core.patch import Plan, Status
from sglang_moe_patches.memory.kv_sizing import eligibility, hooks, images, record, sizing
from sglang_moe_patches.memory.kv_sizing.facts import GIB
from sglang_moe_patches.memory.kv_sizing.record import Record

MARGIN = f"{START.margin / 1e6:,.0f}"
RULE = "using the engine's default fraction 0.8000: "


def change(path, **changed):
    """Of the one record in a file."""
    (key,) = record.read(path)
    record.update(path, key, lambda old: replace(MEASURED, **changed))


def test_all_ranks_are_sized_by_what_the_first_has_read_whatever_another_would(recorded, start):
    for path in (recorded, recorded.parent / "none.json", recorded.parent):
        states, fractions, (said,) = start(Rank(recorded), Rank(path))
        assert fractions == {SIZED}
        assert [(state.fraction, state.record) for state in states] == [(SIZED, MEASURED)] * 2
        sized = "0.9285 instead of 0.8000: 5 tokens instead of 382,206"
        assert said.startswith(f"{sized}; {MARGIN} MB of margin, measured ")
        assert set(record.read(recorded)[states[0].key].unserved) == {states[0].process}  # until it serves


@pytest.mark.parametrize(("kept", "of"), [("unfinished", "0 of {}"), ("unserved", "{}")])
def test_launches_that_are_alive_are_no_failures_and_those_that_ended_are(kept, of, recorded, start):
    both = Rank(recorded), Rank(recorded)
    own = start(*both)[0][0].process
    for launches, fractions in ((("another", own), {SIZED}), (("another", "a third"), {0.8})):
        # One that ended alone is no reason to keep the rule, but a start that did makes the next smaller.
        change(recorded, **{kept: tuple(map(of.format, launches[kept == "unserved" and own in launches :]))})
        assert start(*both)[1] == fractions


def test_a_server_that_takes_images_keeps_what_the_rule_keeps_for_them(recorded, start, monkeypatch):
    monkeypatch.setattr(images, "factor", lambda config: 0.95)
    monkeypatch.setattr(images, "cache_gib", lambda arguments: 0.5)
    states, (fraction,), (said,) = start(Rank(recorded), Rank(recorded), images=True)
    kept = (0.8 / 0.95 - 0.8) * 140 * GB + GIB / 2
    assert [state.launch.images for state in states] == [pytest.approx(kept, abs=1)] * 2
    assert fraction == pytest.approx(SIZED - kept / (140 * GB), abs=2 * sizing.FRACTION_STEP)
    assert f"{kept / 1e6:,.0f} MB the engine's for images" in said


@pytest.mark.parametrize(
    ("factor", "graphs", "why"),
    [(1.0, "", ", and the rule keeps nothing for them"), (0.9, "1", f", nor what {images.GRAPHS} captures of them")],
)
def test_where_nothing_is_kept_for_images_the_rule_stands(factor, graphs, why, recorded, start, monkeypatch):
    monkeypatch.setattr(images, "factor", lambda config: factor)
    monkeypatch.setenv(images.GRAPHS, graphs)
    states, fractions, said = start(Rank(recorded), Rank(recorded), images=True)
    assert (fractions, said) == ({0.8}, [f"{RULE}images are not rehearsed yet{why}"])
    assert [state.launch for state in states] == [None, None]


@pytest.mark.parametrize("text", ['{"format": 3, "records": {"a', "\0", None])
def test_where_the_first_rank_cannot_read_all_start_by_the_rule(text, recorded, start):
    recorded.unlink()
    if text is None:
        recorded.mkdir()
    else:
        recorded.write_text(text)
    states, fractions, (said,) = start(Rank(recorded), Rank(recorded))
    assert fractions == {0.8}
    assert said.startswith(f"{RULE}{recorded} ")
    assert said.endswith("; measuring during this start")
    assert all(state.decision.rehearse for state in states)


CORE = "sglang_moe_patches.core"
VARIABLES = "sglang_moe_patches.memory.kv_sizing.fingerprint.variables_of"


@pytest.mark.parametrize(
    ("rank", "arguments", "patched"),
    [
        pytest.param({"device": "B200"}, {}, (), id="GPU"),
        pytest.param({"total": 282 * GB}, {}, (), id="GPU of the kind with more memory"),
        pytest.param({}, {"config": '{"layers": 2}'}, (), id="model"),
        pytest.param({}, {"chunked_prefill_size": 64}, (), id="argument"),
        pytest.param({}, {}, (VARIABLES, lambda environ: {"SGLANG_X": "1"}), id="variable"),
        pytest.param({}, {}, (f"{CORE}.gpu_memory.driver", lambda: "another"), id="driver"),
        pytest.param({}, {}, (f"{CORE}.engine.version", lambda: "another"), id="engine"),
        pytest.param({}, {}, ("torch.__version__", "another"), id="PyTorch"),
        pytest.param({}, {}, ("sglang_moe_patches.__version__", "another"), id="package"),
        pytest.param({}, {}, ("sglang_moe_patches.memory.kv_sizing.sizing.LaunchMemory.margin", 1 * GB), id="margin"),
        pytest.param({}, {}, (f"{CORE}.patch.in_force", lambda: {"a": Plan(Status.APPLIED)}), id="changes"),
    ],
)
def test_a_record_of_another_is_none(rank, arguments, patched, recorded, start, monkeypatch):
    if patched:
        monkeypatch.setattr(*patched)
    states, fractions, said = start(*[Rank(recorded, **rank)] * 2, **arguments)
    assert (fractions, said) == ({0.8}, [f"{RULE}no record for this configuration; measuring during this start"])
    assert all(state.decision.rehearse for state in states)


def test_where_there_is_no_record_the_nearest_one_is_named(recorded, start):
    change(recorded, fingerprint_inputs=start(Rank(recorded), Rank(recorded))[0][0].fingerprint_inputs)
    for chunk in (64, 128):
        _, _, (said,) = start(*[Rank(recorded)] * 2, chunked_prefill_size=chunk)
        nearest = "(the nearest record differs in arguments.chunked_prefill_size)"
        assert said == f"{RULE}no record for this configuration {nearest}; measuring during this start"


def test_beside_a_second_server_on_a_gpu_all_start_by_the_rule(recorded, start):
    states, fractions, said = start(Rank(recorded), Rank(recorded, before=100 * GB))
    why = "other processes hold 41,000 MB of the GPU, 1,000 MB when it was measured"
    assert (fractions, said) == ({0.8}, [RULE + why])
    assert not any(state.decision.rehearse for state in states)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"device": "H100"}, "the ranks differ in: device"),
        ({"silent": True}, "RuntimeError: the driver does not answer"),
    ],
)
def test_where_one_rank_cannot_tell_all_start_by_the_rule_and_nothing_is_recorded(other, why, recorded, start):
    for both in ((Rank(recorded), Rank(recorded, **other)), (Rank(recorded, **other), Rank(recorded))):
        states, fractions, said = start(*both)
        assert (fractions, said) == ({0.8}, [RULE + why])
        assert [state.launch for state in states] == [None, None]


@pytest.mark.parametrize(
    ("changed", "advice", "rehearses", "level"),
    [
        ({}, f"18,000 MB of the reserve were never needed: {SIZED} would give 343,985 more tokens", False, "INFO"),
        (
            {"need": 27 * GB},
            f"1,000 MB too little: the largest forward plus a {MARGIN} MB margin does not fit; 0.7928 would be safe",
            *(False, "WARNING"),
        ),
        (
            {"missed": ("mixed chunk",), "rehearsals": 1},
            "the rehearsal did not reach: mixed chunk; measuring during this start",
            *(True, "INFO"),
        ),
        ({"need": 0}, "no record for this configuration; measuring during this start", True, "INFO"),
    ],
)
def test_a_given_fraction_is_used_unchanged_and_what_it_leaves_is_said(
    changed, advice, rehearses, level, recorded, start, caplog
):
    change(recorded, **changed)
    states, fractions, said = start(Rank(recorded), Rank(recorded), by_user=True)
    line = f"using the given --mem-fraction-static 0.8000: it is used unchanged; {advice}"
    assert (fractions, said, caplog.records[0].levelname) == ({0.8}, [line], level)
    assert {state.decision.rehearse for state in states} == {rehearses}


def test_always_has_the_record_decide_beside_a_given_fraction(recorded, start):
    assert start(Rank(recorded), Rank(recorded), by_user=True, mode="always")[1] == {SIZED}


@pytest.mark.parametrize(
    ("free", "stages", "limit", "aside"),
    [(60, 1, 0, 28), (60, 2, 0, 40), (40, 2, 0, 28), (None, 2, 0, 28), (60, 1, 5, 40)],
)
def test_a_rank_may_have_more_left_than_the_fraction_says(free, stages, limit, aside, start, tmp_path, monkeypatch):
    """A stage with fewer layers, and a KV cache of 20 GB that the user limits."""
    rank = Rank(tmp_path / "kv.json")
    monkeypatch.setattr(hooks, "server_facts", lambda runner: SimpleNamespace(kv_bytes=20 * GB))
    # Twice when it says what it knows; the third fails where ``free`` is ``None``.
    readings = iter([rank.read, rank.read, lambda: Memory(free * GB, 141 * GB)])
    rank.read = lambda: next(readings)()
    (state,), _, _ = start(rank, pp_size=stages, max_total_tokens=limit)
    assert state.rank_reserve == pytest.approx(aside * GB, abs=1)


def test_a_drafts_pool_is_not_sized(tmp_path, monkeypatch):
    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    state, draft = hooks.State(tmp_path / "kv.json"), SimpleNamespace(is_draft_worker=True, pool=a_pool("Pool"))
    assert hooks._make_init_memory_pool(lambda draft: draft.pool, state, False)(draft) is draft.pool
    assert (state.launch, state.draft_runners) == (None, [draft])


# --- Several machines ------------------------------------------------------------------------------------------------


def test_where_machines_do_not_decide_together_nobody_is_waited_for(tmp_path, start, monkeypatch):
    def waits(report):
        raise AssertionError("another rank was waited for")

    for found in (lambda: False, lambda: 1 // 0):
        monkeypatch.setattr(hooks.coordination, "all_machines_take_part", found)
        states, fractions, said = start(*[Rank(tmp_path / "kv.json")] * 2, nnodes=2, agree=waits)
        assert fractions == {0.8}
        assert all(state.decision.monitor for state in states)
        assert len(said) == 2  # by the first rank of each machine
        assert all("using the engine's default fraction 0.8000 because of --nnodes, " in line for line in said)


def test_what_another_machine_has_seen_while_serving_counts_for_all(two_machines):
    (_, path), key, begin = two_machines
    assert begin()[1] == {SIZED}
    record.update(path, key, lambda old: record.with_serving(Record({"model": "m"}), 12 * GB, GB))
    states, (less,), _ = begin()
    assert less == pytest.approx(1 - (11 * GB + START.margin) / (140 * GB), abs=2 * sizing.FRACTION_STEP)
    assert [state.record.lowest_free_serving for state in states] == [GB] * 2
    record.update(path, key, record.with_out_of_memory)
    (after_one,) = begin()[1]
    assert after_one < less
    record.update(path, key, record.with_out_of_memory)
    assert begin()[1] == {0.8}
