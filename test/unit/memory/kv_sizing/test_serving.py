"""The event loop of a server's ranks: a rehearsal where one is due, what is recorded of it, and what is seen later."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kv_servers import GB, MEASURED, SIZED, Notes, Rank, a_pool, a_runner, state_of
from sglang_moe_patches.core import log
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.lab import kv_records
from sglang_moe_patches.memory.kv_sizing import facts, hooks, metrics, record, rehearsal, sizing
from sglang_moe_patches.memory.kv_sizing.facts import GIB
from sglang_moe_patches.memory.kv_sizing.rehearsal import RankResult

PLAIN = {"hybrid": "", "kv_tokens": 900, "kv_bytes": 20 * GB, "table_bytes": GB}


@pytest.fixture
def state(tmp_path, start, caplog, monkeypatch):
    """Of the first rank of two that are to rehearse, with 28 GB beside its KV cache."""
    (state, _), _, _ = start(*[Rank(tmp_path / "kv.json")] * 2)
    state.rank_reserve = 28 * GB
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda problem: [problem])
    caplog.clear()
    caplog.set_level("INFO", logger=log.logger.name)
    return state


def said(caplog):
    return [each.message.removeprefix(log.of("kv-sizing", "")) for each in caplog.records]


def kept(state):
    """The record of its configuration."""
    return record.read(state.path).get(state.key)


@pytest.fixture
def rehearsed(state, scheduler, monkeypatch):
    """Begins to serve, and ends the rehearsal with a result if there is one; see ``begin``."""
    ends = []

    def a_rehearsal(scheduler, gpu, over, notes, *, leads):
        ends.append(over)
        return SimpleNamespace(begin=lambda: None, end=lambda: None)

    monkeypatch.setattr(rehearsal, "Rehearsal", a_rehearsal)
    monkeypatch.setattr(hooks, "server_facts", lambda runner: SimpleNamespace(**PLAIN))

    def begin(result=None, notes=None, runner=None, of=state):
        """:returns: the scheduler, or without a result what ends the rehearsal."""
        monkeypatch.setattr(hooks.coordination, "RankResults", lambda: notes or Notes())
        made = scheduler()
        made.tp_worker.model_runner = runner or made.tp_worker.model_runner
        hooks.Serving(of, made).begin()
        if result is None:
            return ends[0] if ends else None
        ends[0](result)
        return made

    return begin


@pytest.mark.parametrize(
    ("lowest", "notes", "line"),
    [
        (9 * GB, Notes(RankResult(failure="no")), "the rehearsal failed, and nothing is recorded: rank 1: no"),
        (
            50 * GB,
            Notes(RankResult(lowest=50 * GB, reserve=28 * GB)),
            "another process freed memory during the rehearsal; nothing is recorded",
        ),
        (
            9 * GB,
            Notes(looks=9),  # which the first rank does not wait for
            "the rehearsal failed, and nothing is recorded: not every rank has published its result",
        ),
    ],
)
def test_where_one_rank_fails_nothing_is_recorded(lowest, notes, line, rehearsed, state, caplog, monkeypatch):
    monkeypatch.setattr(rehearsal, "ABANDON_AFTER_S", 0.0)
    rehearsed(RankResult(lowest=lowest), notes)
    assert said(caplog)[-1] == line
    assert kept(state).need == 0


def test_the_first_rank_waits_for_what_others_have_seen_while_it_serves(rehearsed, state):
    tensors, own = record.NeedParts(tensors=2 * GB), record.NeedParts(tensors=GB, phase="mixed chunk")
    other = RankResult(lowest=5 * GB, reserve=30 * GB, parts=tensors)
    notes = Notes(other, looks=3)
    serves = rehearsed(RankResult(lowest=9 * GB, parts=own), notes)
    for _ in range(2):
        assert kept(state).need == 0
        serves.process_input_requests([])
    found = kept(state)
    assert (found.ranks, found.need, found.reserve) == ((19 * GB, 25 * GB), 25 * GB, 28 * GB)
    assert found.parts == replace(tensors, phase="mixed chunk")
    serves.process_input_requests([])
    assert notes.looks == 0  # it looks no more


def test_what_a_rehearsal_that_ended_early_did_not_run_is_kept_free_and_what_images_take_is_known(rehearsed, state):
    state.launch = replace(state.launch, images=GB)
    rehearsed(RankResult(lowest=9 * GB, stopped=True))
    found, not_run = kept(state), rehearsal.MIN_FREE_BYTES
    assert (found.need, found.parts.not_run, found.images) == (19 * GB + not_run, not_run, GB)
    assert (found.table_bytes, found.kv_bytes) == (GB, 20 * GB)


def test_what_states_and_drafts_took_is_recorded(rehearsed, state, monkeypatch):
    monkeypatch.setattr(hooks, "server_facts", facts.server_facts)
    state.draft_runners.append(a_runner(a_pool("MHATokenToKVPool", mem_usage=1)))
    table = a_pool("HybridReqToTokenPool", mamba_pool=SimpleNamespace(mem_usage=3))
    rehearsed(RankResult(lowest=9 * GB), runner=a_runner(a_pool("HybridLinearKVPool", mem_usage=2), table))
    found = kept(state)
    assert (found.kv_bytes, found.requests_grow, found.draft_kv_bytes, found.need) == (5 * GIB, True, GIB, 19 * GB)


@pytest.mark.parametrize(
    ("fraction", "result", "missed", "proven"),
    [
        pytest.param(SIZED, {}, (), True, id="all that a sized start may run"),
        pytest.param(None, {}, (), False, id="a start by the rule"),
        pytest.param(SIZED, {"stopped": True}, (), False, id="it ended before memory did"),
        pytest.param(SIZED, {}, ("mixed chunk",), False, id="a phase was not reached"),
    ],
)
def test_a_sizing_is_proven_by_a_start_of_its_size_that_ran_all(fraction, result, missed, proven, rehearsed, state):
    state.decision = replace(state.decision, fraction=fraction)
    rehearsed(RankResult(lowest=9 * GB, missed=missed, **result))
    assert kept(state).need
    assert kept(state).proven is proven


@pytest.mark.parametrize(
    ("out_of_time", "missed", "hinted"),
    [(True, ("mixed chunk",), True), (False, ("mixed chunk",), False), (True, (), False)],
)
def test_a_rehearsal_that_ran_out_of_time_says_what_takes_less(out_of_time, missed, hinted, rehearsed, caplog):
    rehearsed(RankResult(lowest=9 * GB, out_of_time=out_of_time, missed=missed))
    assert ("; not reached: mixed chunk; recorded in" in caplog.text) == bool(missed)
    assert ("a smaller --context-length takes less" in caplog.text) == hinted


@pytest.mark.parametrize("proven", [True, False])
def test_a_sized_start_is_crossed_off_when_requests_are_read(proven, state, start, rehearsed, monkeypatch):
    """Not while it rehearses: its largest forwards come then."""
    record.update(state.path, state.key, lambda old: replace(MEASURED, proven=proven))
    sized = start(*[Rank(state.path)] * 2)[0][0]
    assert kept(sized).unserved == (sized.process,)
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda problem: [problem])
    end = rehearsed(of=sized)
    if not proven:
        assert kept(sized).unserved == (sized.process,)
        end(RankResult(lowest=9 * GB))
    assert kept(sized).unserved == ()


def test_a_start_is_sized_and_serves_where_nothing_can_be_written(state, start, scheduler, caplog):
    """As by a record that is shipped read-only."""
    record.update(state.path, state.key, lambda old: replace(MEASURED, proven=True))
    lock = state.path.with_name(f"{state.path.name}.lock")
    lock.unlink()
    lock.mkdir()
    (sized, _), fractions, (note, line) = start(*[Rank(state.path)] * 2)
    assert fractions == {SIZED}
    assert note.startswith(f"this start is not written down: {state.path} cannot be written (")
    assert line.startswith("0.9285 instead of 0.8000: ")
    made = scheduler()
    hooks.Serving(sized, made).begin()
    made.process_input_requests([])
    assert kept(sized).unserved == ()


def no_file(state, scheduler):
    (state.path.parent / "file").write_text("")
    state.path = state.path.parent / "file" / "kv.json"
    return f"{state.path} cannot be written ("


def no_phases(state, scheduler):
    scheduler.tp_worker.model_runner.token_to_kv_pool = a_pool("UnifiedSWAKVPool")
    return "pools of the kind UnifiedSWAKVPool are not rehearsed yet"


@pytest.mark.parametrize("obstacle", [no_file, no_phases, None])
def test_where_one_rank_cannot_rehearse_none_does_and_all_serve(obstacle, state, scheduler, caplog, monkeypatch):
    made = scheduler()
    why = obstacle(state, made) if obstacle else "another rank's problem"
    monkeypatch.setattr(hooks.coordination, "RankResults", Notes)
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda problem: [problem if obstacle else why, problem])
    before = state_of(made)
    hooks.Serving(state, made).begin()
    (line,) = said(caplog)
    assert line.startswith(f"no rehearsal: {why}")
    assert state_of(made) == before
    assert obstacle is not no_phases or not state.path.exists()  # it is not counted as begun


# --- While serving ---------------------------------------------------------------------------------------------------


def serve(state, scheduler, free, error=None, **arguments):
    """One turn of its event loop, in which so much is free at the least."""
    made = scheduler(free=lambda forwards: free, **arguments)
    state.decision = replace(state.decision, rehearse=False)

    def loop(made):
        made.process_input_requests([])
        if error:
            raise error

    with suppress(RuntimeError):
        hooks._make_run_event_loop(loop, state)(made)


@pytest.fixture
def serving(state, monkeypatch):
    """Of a server that the rule has sized, with a record of the same need; 3 GB are free while it serves."""
    record.update(state.path, state.key, lambda old: replace(MEASURED, fingerprint_inputs=state.fingerprint_inputs))
    state.record, state.decision = MEASURED, replace(state.decision, rehearse=False)
    monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: Memory(3 * GB, 141 * GB))
    return state


def run_loop(state, loop, **scheduler):
    made = {"process_input_requests": lambda read: read, "server_args": SimpleNamespace(), **scheduler}
    hooks._make_run_event_loop(loop, state)(SimpleNamespace(**made))


def test_a_record_of_a_begun_rehearsal_says_what_the_start_had_and_what_the_next_does(state, rehearsed, monkeypatch):
    rehearsed()
    begun = kept(state)
    assert (begun.attempts, begun.need) == (1, 0)
    assert sizing.LaunchMemory.of_record(begun).margin == state.launch.margin
    assert (begun.total, begun.before) == (state.launch.total, state.launch.free_before_load)
    assert kv_records.advice(begun)["next_start"] == "no record for this configuration; measures during its start"
    assert "rehearses once more" in kv_records.advice(MEASURED)["next_start"]


def test_a_second_rehearsal_that_runs_out_of_memory_makes_the_next_start_smaller(serving, rehearsed, monkeypatch):
    monkeypatch.setattr(hooks.coordination, "RankResults", Notes)
    serving.decision = replace(serving.decision, rehearse=True)

    def loop(scheduler):
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run_loop(serving, loop)
    assert (kept(serving).ooms, kept(serving).attempts) == (1, 1)


def test_a_turn_of_the_loop_waits_for_no_lock_and_what_it_saw_is_saved_later(serving, monkeypatch, caplog):
    turns: list[object] = []

    def loop(scheduler):
        with record._locked(serving.path, 0), monkeypatch.context() as held:
            held.setattr(record.time, "sleep", lambda seconds: pytest.fail("a turn waits for the lock"))
            scheduler.process_input_requests(["a request"])
        assert kept(serving).lowest_free_serving is None

    run_loop(serving, loop, process_input_requests=turns.append)
    assert turns == [["a request"]]
    assert caplog.messages == []  # another process that writes is nothing to worry about
    assert kept(serving).lowest_free_serving == 3 * GB


def test_the_lowest_of_a_turn_is_recorded_though_more_is_free_at_the_end(serving, monkeypatch):
    free = [3 * GB]
    monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: Memory(free[0], 141 * GB))

    def loop(scheduler):
        free[0] = GB
        scheduler.process_input_requests([])
        free[0] = 3 * GB

    run_loop(serving, loop)
    assert kept(serving).lowest_free_serving == GB


@pytest.mark.parametrize(
    ("rank", "arguments", "known", "expected"),
    [
        pytest.param(0, {}, MEASURED, (SIZED, SIZED, "record"), id="sized"),
        pytest.param(0, {"by_user": True}, MEASURED, (0.8, SIZED, "given"), id="given"),
        pytest.param(0, {"max_total_tokens": 5}, MEASURED, (0.8, SIZED, "default"), id="limited"),
        pytest.param(0, {"attn_cp_size": 2}, None, (0.8, None, "default"), id="monitored"),
        pytest.param(0, {"device": "H100"}, None, (None, None, "default"), id="ranks differ"),
        pytest.param(1, {}, MEASURED, (None, None, None), id="the first says it for all"),
    ],
)
def test_a_servers_metrics_say_how_it_was_sized(rank, arguments, known, expected, tmp_path, start, metric, scheduler):
    path, others_device = tmp_path / "kv.json", arguments.get("device", "H200")
    ranks = Rank(path), Rank(path, device=others_device)
    states, _, lines = start(*ranks, **arguments)
    if known:
        record.update(path, states[0].key, lambda old: known)
        states, _, lines = start(*ranks, **arguments)
    state = states[rank]
    assert state.decision.reason in lines[0]
    serve(state, scheduler, 9 * GB, enable_metrics=True)
    source = metric(metrics.STATE, str(rank), source=str(state.source), reason=state.decision.reason) and str(
        state.source
    )
    assert (metric(metrics.FRACTION, str(rank)), metric(metrics.SUGGESTED, str(rank)), source) == expected


def test_a_server_that_is_not_driven_stays_with_the_rule_and_what_it_leaves_free_is_recorded(
    tmp_path, start, scheduler
):
    path = tmp_path / "kv.json"
    one, other = start(Rank(path), Rank(path, total=150 * GB), attn_cp_size=2)[0]
    assert one.key != other.key  # nobody waits for another
    because = "of --attn-cp-size, whose forwards are not rehearsed"
    line = f"using the engine's default fraction 0.8000 because {because}; free memory is recorded while it serves"
    for seen in ("", ": 7,000 MB were free at the worst moment until now"):
        states, fractions, lines = start(Rank(path), Rank(path), attn_cp_size=2)
        assert (fractions, lines) == ({0.8}, [line + seen])
        assert not any(each.decision.rehearse for each in states)
        for state, free in zip(states, (9 * GB, 7 * GB), strict=True):
            serve(state, scheduler, free)
    found = kept(states[0])
    assert (found.need, found.lowest_free_serving) == (0, 7 * GB)
    assert found.serving_peak_need == pytest.approx(21 * GB, abs=1)
    assert "7,000 MB of 28,000 MB stayed free at the worst moment seen" in "\n".join(kv_records.describe("x", found))


@pytest.mark.parametrize(("error", "ooms"), [("CUDA out of memory", 1), ("another", 0)])
def test_a_loop_that_ends_for_want_of_memory_counts_on_each_machine_in_its_own_file(
    error, ooms, two_machines, scheduler
):
    paths, _, begin = two_machines
    states = begin()[0]
    assert [each.path for each in states] == paths
    for state, need in zip(states, (MEASURED.need, 0), strict=True):
        serve(state, scheduler, 3 * GB, RuntimeError(error))
        found = kept(state)
        assert (found.lowest_free_serving, found.ooms, found.need) == (3 * GB, ooms, need)
    assert found.fingerprint_inputs == states[1].fingerprint_inputs


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (type("DistBackendError", (RuntimeError,), {})("NCCL error: Failed to CUDA calloc 4 bytes"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("cudaErrorMemoryAllocation"), True),
        (RuntimeError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (RuntimeError("device-side assert triggered"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=str,
)
def test_an_out_of_memory_is_known_by_any_name(error, is_memory):
    around = ValueError("a forward failed")
    around.__cause__ = error
    assert hooks.is_out_of_memory(error) is hooks.is_out_of_memory(around) is is_memory
