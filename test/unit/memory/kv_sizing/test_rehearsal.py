"""Tests of a rehearsal in the scheduler of one rank. The rehearsal runs every phase, ends in time, and restores the
scheduler."""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kv_servers import (
    GB,
    PLAIN_TABLE,
    SMALL,
    FlushCacheReqOutput,
    OneRank,
    Scheduler,
    make_pool,
    make_runner,
    rehearse,
    snapshot_state,
)
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.memory.kv_sizing import engine_objects, phases, ranks, rehearsal, sizing
from sglang_moe_patches.memory.kv_sizing.phases import Batch, Plant
from sglang_moe_patches.memory.kv_sizing.pools import GIB

LOW = sizing.MIN_FREE_BYTES - 1
PHASES = [phase.name for phase in phases.derive_phases(SMALL)]


def test_a_rehearsal_runs_every_phase_and_restores_the_scheduler(scheduler):
    instance = scheduler(free=lambda forwards: (5 if forwards == 5 else 9) * GB)
    result = rehearse(instance)
    assert set(result.seconds) == {*PHASES, rehearsal.WHOLE_REHEARSAL}
    assert (result.missed, result.failure, result.stopped, result.lowest) == ({}, "", False, 5 * GB)
    assert instance.send_to_detokenizer.sent == instance.send_to_tokenizer.sent == []


def test_the_limits_of_a_rehearsal_are_read_from_the_scheduler(monkeypatch):
    monkeypatch.setattr(engine_objects, "server_facts", lambda runner: phases.ServerFacts(1, 1, 5000))
    monkeypatch.setattr(engine_objects, "can_plant", lambda scheduler: True)
    server_args = SimpleNamespace(chunked_prefill_size=1024, prefill_max_requests=3, max_running_requests=500)
    numbers = {"max_prefill_tokens": 2048, "max_total_num_tokens": 20_000, "max_running_requests": 300}
    sizes = {"chunked_prefill_size": 512, "max_req_input_len": 3000, **numbers}
    instance = SimpleNamespace(**sizes, server_args=server_args, tp_worker=SimpleNamespace(model_runner=None))
    limits = engine_objects.limits_of(instance)
    # A prompt may have one token fewer than ``max_req_input_len``. The engine refuses that number.
    assert (limits.input_tokens, limits.chunk, limits.prefill_tokens, limits.prefill_requests) == (2999, 512, 2048, 3)
    assert (limits.cache_tokens, limits.requests, limits.plants, limits.stop_token) == (20_000, 300, True, False)
    assert engine_objects.limits_of(instance, 40).requests == 40


# Tensors grow more than the reserved memory in the second case, because the graphs left reserved memory unused.
@pytest.mark.parametrize(("taken_gb", "tensors", "slack"), [(3, 2, 1), (1, 2, 0)])
def test_the_result_has_tensors_and_slack(taken_gb, tensors, slack, scheduler):
    """A rehearsal measures the growth of the tensors, up to their peak, and the *slack*. The slack is the memory that
    PyTorch's allocator reserves in addition to this growth. For example, if the tensors grow by 2 GB and the reserved
    memory by 3 GB, the slack is 1 GB."""
    instance = scheduler()
    instance.tp_worker.model_runner.graph_memory_usage = {"decode": 1, "target_verify": 2, "prefill": 4, "draft": 8}

    def read():
        large = PHASES[2] in instance.did.phases
        reserved, peak = (5 + taken_gb * large) * GB, (4 + tensors * large) * GB
        return Memory(9 * GB, reserved, allocated=4 * GB, peak=peak)

    instance.read = read
    result = rehearse(instance)
    assert (result.graphs, result.phases[PHASES[2]], result.slack) == (3 * GIB, tensors * GB, slack * GB)
    assert (result.free, max(result.phases.values())) == (9 * GB, tensors * GB)
    assert result.lowest == (9 - taken_gb) * GB  # memory that other processes freed meanwhile does not count as free


def test_a_rehearsal_ends_before_memory_runs_out(scheduler):
    instance = scheduler(free=lambda forwards: 9 * GB if forwards < 5 else LOW)
    result = rehearse(instance)
    assert (result.stopped, bool(result.missed), instance.forwards < 10) == (True, True, True)


def test_a_rehearsal_ends_before_memory_runs_out_on_any_rank(scheduler):
    other_scheduler = scheduler(reads=False, free=lambda forwards: LOW if forwards > 1 else 3 * GB)
    rank = OneRank(other_scheduler, leads=False)
    rank.begin()
    for low in ([], [f"{rehearsal.LOW_MEMORY_FLAG} 1"]):
        other_scheduler.tp_worker.model_runner.forward(Batch("EXTEND", tokens=1, requests=1))
        assert rank.low_reports == low
    first = scheduler()
    result = rehearse(first, low=lambda: True)
    assert (result.stopped, first.forwards) == (False, 0)  # only the other rank reports that it stopped


CAPTURED, EAGER = "captured decode of 150 requests", "eager decode of 300 requests"


@pytest.mark.parametrize(
    ("free", "has_default_requests", "earlier", "graphs", "requests", "stopped", "lowest", "arguments"),
    [
        # 300 requests have no memory, so the server admits 150.
        (5, True, {}, 0, 150, False, 5, {}),
        # The user asked for 300 requests, so the rehearsal stops. Their estimated memory counts as taken.
        (5, False, {}, 0, 0, True, -1, {}),
        # They would leave no free memory.
        (6, False, {}, 0, 0, True, 0, {}),
        # The estimate uses the measurement of this rehearsal, not that of an earlier one.
        (5, False, {CAPTURED: 3 * GB}, 0, 0, True, -1, {}),
        # Unless the user sets the number, 300 requests run only if they cost little, even if another phase needs more
        # memory: the allocator may not be able to use that memory for them.
        (50, True, {}, 0, 150, False, 50, {}),
        (50, True, {"prefill chunk": 6 * GB}, 0, 150, False, 50, {}),
        # The estimate includes the memory of the graphs: 1 GB, which the decode of 300 requests would need twice.
        (50, True, {}, 1, 150, False, 50, {"bytes_per_token": 1_920_000}),
        (50, False, {}, 1, 0, False, 50, {}),
        # 300 requests cost 3 GB more than 150, which is 1/32 of the KV cache of 50,000 tokens.
        (50, True, {}, 0, 0, False, 50, {"bytes_per_token": 1_920_000}),
        (50, True, {}, 0, 150, False, 50, {"bytes_per_token": 1_900_000}),
        # 600 requests cost 9 GB: 3 GB that 300 requests have reserved, and 6 GB more. 1/32 of the KV cache is 8.9 GB,
        # and in the next case 9 GB.
        (50, True, {}, 0, 300, False, 44, {"bytes_per_token": 5_700_000, "most": 600}),
        (50, True, {}, 0, 0, False, 38, {"bytes_per_token": 5_760_000, "most": 600}),
        (
            50,
            True,
            {},
            0,
            300,
            False,
            42,
            {"bytes_per_token": 6_400_000, "most": 600, "kept_gb": 2},
        ),  # the allocator keeps 2 GB more, so 600 requests cost 11 GB, but 10 GB are allowed
        (
            9,
            True,
            {},
            0,
            150,
            False,
            9,
            {"bytes_per_token": 1_920_000, "margin": 3 * GB},
        ),  # 300 requests would leave less than the margin and 1 GB
    ],
    ids=str,
)
def test_a_large_decode_is_rehearsed_if_it_fits_and_without_a_user_limit_only_if_it_costs_little(
    free, has_default_requests, earlier, graphs, requests, stopped, lowest, arguments, scheduler, monkeypatch
):
    """The rehearsal runs a large decode only if 1 GB stays free. Without a user's limit of concurrent requests, there
    are two more conditions.

    - The margin must stay free, too.
    - The decode may cost at most 1/32 of the KV cache. The cost is the memory that the decode takes in addition to
      a decode with half as many requests. If the rehearsal has already run a smaller one of these large decodes, the
      cost also contains the memory that the allocator reserved for it.

    In this test, each request of a decode takes 20 MB. So a decode of 300 requests takes 6 GB, which is 3 GB more than
    a decode of 150 requests: it costs 3 GB. A decode of 600 requests after it takes 12 GB, which is 6 GB more. If the
    allocator keeps the 3 GB that it has reserved for the decode of 300 requests, the decode of 600 costs 9 GB.

    :param free: free memory in GB when the rehearsal starts.
    :param has_default_requests: whether the user has set no limit of concurrent requests.
    :param earlier: peak memory of each phase in an earlier rehearsal, in bytes. The key is the phase's name.
    :param graphs: memory of the decode graphs in GiB.
    :param requests: limit of concurrent requests that the rehearsal sets; 0 if it sets none.
    :param stopped: whether the rehearsal ends because a decode that the user asked for does not fit.
    :param lowest: lowest free memory in GB. It is measured, or estimated if a decode does not fit. An estimate may be
        negative.
    :param arguments: arguments of the rehearsal, and two settings of the stand-in:

        - ``most``: number of requests in the largest decode (default 300). If it is set, the allocator never returns
          reserved memory.
        - ``kept_gb``: GB that the allocator reserves in addition, from the decode of 300 requests on.
    """
    arguments, reserves = dict(arguments), "most" in arguments
    most, kept_gb = arguments.pop("most", 300), arguments.pop("kept_gb", 0)
    limits = replace(SMALL, requests=most, captured=150, cache_tokens=50_000, has_default_requests=has_default_requests)
    instance = scheduler()
    instance.tp_worker.model_runner.graph_memory_usage = {"decode": graphs}
    derived = [phase for each in (most, 300, 150) for phase in phases.derive_phases(replace(limits, requests=each))]
    by_name = {phase.name: phase.bound.requests for phase in derived}
    ran, since, peaks, original = list[str](), [0], list[int](), instance.process_input_requests

    def take_in(read):
        original(read)
        ran.extend(instance.did.phases[len(ran) :])

    instance.process_input_requests = take_in
    run = instance.run
    instance.run = lambda runner: SimpleNamespace(
        can_run_graph=run(runner) is not None
    )  # the rehearsal sees each decode immediately
    monkeypatch.setattr(rehearsal.gpu_memory, "reset_peak", lambda gpu: since.append(len(ran)))

    def read():
        peak = 20_000_000 * max((by_name[name] for name in ran[since[-1] :]), default=0)
        peaks.append(peak)
        reserved = max(peaks) + (kept_gb * GB if EAGER in ran else 0)
        return Memory(free * GB, reserved=reserved if reserves else 0, peak=peak)

    instance.read = read
    result = rehearse(instance, limits=limits, peaks=earlier, **arguments)
    assert (result.fewer_requests, result.stopped) == (requests, stopped)
    assert reserves or result.lowest == free * GB
    assert min(result.lowest, result.expected) == lowest * GB
    assert CAPTURED in ran
    assert (EAGER in ran) == (requests != 150 and not stopped)
    assert not stopped or EAGER in result.missed


def test_the_next_smaller_request_limit_is_known_if_a_decode_leaves_little_memory(scheduler):
    limits = replace(SMALL, requests=300, captured=150, has_default_requests=True)
    instance = scheduler()
    instance.read = lambda: Memory(LOW if EAGER in instance.did.phases else 9 * GB)
    result = rehearse(instance, limits=limits)
    assert (result.stopped, result.restart_requests) == (True, 150)


def test_a_prompt_without_memory_is_not_sent(scheduler):
    """A prompt is not sent if less than 1 GB would stay free. Each token takes 100 MB, and 5 GB are free. The prompt of
    40 tokens leaves 1 GB, so it is sent. The next prompt, of 48 tokens, would leave 0.2 GB, so it is not sent.

    The phase of these prompts is still not reported as missed, because each forward pass of the stand-in has the
    largest size of its phase. All later phases are missed.
    """
    instance = scheduler()
    longest = 0

    def take_in(read):
        nonlocal longest
        longest = max([longest, *(len(each.prompt) for each in read if hasattr(each, "prompt"))])
        original(read)

    original, instance.process_input_requests = instance.process_input_requests, take_in
    instance.read = lambda: Memory(5 * GB, peak=100_000_000 * longest)
    result = rehearse(instance)
    assert (longest, result.stopped, [*result.missed], result.expected) == (40, True, PHASES[1:], 200_000_000)


def no_answer(scheduler):
    if scheduler.forwards > 3:
        raise RuntimeError("no answer")
    return Memory(9 * GB)


def no_answer_between_forwards(scheduler):
    before, scheduler.did.read_after = getattr(scheduler.did, "read_after", None), scheduler.forwards
    return no_answer(scheduler) if before == scheduler.forwards else Memory(9 * GB)


def divide_by_zero(*given):
    return 1 / 0


@pytest.mark.parametrize(
    ("owner", "name", "answer", "failure"),
    [
        (Scheduler, "read", no_answer, "RuntimeError: no answer"),
        (Scheduler, "read", no_answer_between_forwards, "RuntimeError: no answer"),
        (rehearsal, "batch_facts", divide_by_zero, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_failing_gpu_driver_ends_the_rehearsal_but_not_the_server(
    owner, name, answer, failure, scheduler, monkeypatch
):
    monkeypatch.setattr(owner, name, answer)
    assert rehearse(scheduler()).failure == failure


def test_a_store_without_an_answer_and_an_unflushed_cache_fail_the_rehearsal(scheduler):
    assert rehearse(scheduler(), low=divide_by_zero).failure == "ZeroDivisionError: division by zero"
    assert (
        rehearse(scheduler(flushes=False)).failure
        == "SGLang did not flush its prefix cache, because requests were left"
    )


FULL, EMPTY = SimpleNamespace(is_empty=lambda: False), SimpleNamespace(is_empty=lambda: True)


@pytest.mark.parametrize(
    ("seconds", "changed", "idle", "stuck"),
    [
        (11, {}, True, True),
        (9, {}, True, False),
        (11, {"waiting_queue": []}, True, False),
        (11, {"running_batch": FULL}, True, False),
        (11, {"chunked_req": object()}, True, False),
        (11, {"mbs": [None, None]}, True, True),
        # A pipeline stage with running batches is not idle. If it were, their requests would count as lost.
        (11, {"mbs": [None, EMPTY], "running_mbs": [EMPTY, FULL]}, False, False),
    ],
)
def test_waiting_requests_count_as_stuck_after_a_long_time_without_a_batch(
    seconds, changed, idle, stuck, scheduler, monkeypatch
):
    instance, calls, now = scheduler(), [], [0.0]
    monkeypatch.setattr(rehearsal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rehearsal.LoadDriver, "next_requests", lambda driver, *arguments: calls.append(arguments) or [])
    OneRank(instance).begin()
    now[0] = 5.0
    instance.tp_worker.model_runner.forward(Batch("EXTEND", tokens=1, requests=1))
    vars(instance).update({"waiting_queue": ["one"], **changed})
    now[0] += seconds
    instance.turn()
    assert calls == [(idle, stuck)]


@pytest.mark.parametrize("planted", [False, True])
def test_a_rehearsal_times_out_unless_it_has_planted_a_prefix(planted, scheduler, monkeypatch):
    """After its timeout, a rehearsal ends at once, even if requests still run. There is one exception: the rehearsal
    has planted a prefix, which means that it has inserted the prefix into the radix cache without computing it. The
    rehearsal must then flush the radix cache, which is possible only when no request runs. So the rehearsal waits.
    Without a flush, a user's prompt with this prefix would read arbitrary keys and values."""
    instance, now = scheduler(), [0.0]
    monkeypatch.setattr(rehearsal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rehearsal, "plant", lambda scheduler, tokens: True)
    rank = OneRank(instance)
    rank.begin()
    if planted:
        rank.run.plant(Plant((1, 2, 3)))
    instance.is_fully_idle = lambda: False
    now[0] += rehearsal.REHEARSAL_TIMEOUT_S + rehearsal.ABANDON_AFTER_S + 1
    flushes = [ranks.Broadcast(("flush",))]
    assert (flushes in [rank.run.poll() for _ in range(5)]) is not planted
    instance.is_fully_idle = lambda: True
    assert (flushes in [rank.run.poll() for _ in range(5)]) is planted
    rank.end()


def test_a_rank_without_requests_ends_its_rehearsal_at_the_flush(scheduler):
    instance = scheduler(reads=False, free=lambda forwards: (9 - forwards) * GB)
    results: list[rehearsal.Measured] = []
    before = snapshot_state(instance)
    rank = OneRank(instance, results.append, leads=False)
    rank.begin()
    for _ in range(2):
        instance.tp_worker.model_runner.forward(Batch("EXTEND", tokens=1, requests=1))
    instance.send_to_tokenizer.send_output(FlushCacheReqOutput(True))
    rank.orders.close()
    assert snapshot_state(instance) == before
    assert [(each.lowest, each.failure) for each in results] == [(7 * GB, "")]


def test_attributes_that_other_plugins_set_are_restored(scheduler, caplog):
    instance = scheduler()
    instance.process_input_requests = another = print
    rank = OneRank(instance)
    rank.begin()
    assert instance.process_input_requests is not another
    del instance.send_to_tokenizer.send_output  # so that restoring it fails
    rank.end()  # must not raise, because other ranks wait for this rank
    assert instance.process_input_requests is another
    assert "a setting of the scheduler was not restored after the rehearsal" in caplog.text


def test_ranks_of_data_parallel_attention_receive_the_requests_of_rank_0_alone(scheduler):
    first, other_scheduler = scheduler(), scheduler()
    other_scheduler.real.recv_pyobj = lambda *flags: pytest.fail("a user's request is read")
    before = snapshot_state(other_scheduler)[0]
    results: list[rehearsal.Measured] = []
    ranks_of = [OneRank(rank, results.append, leads=rank is first) for rank in (first, other_scheduler)]
    for one in ranks_of:
        one.begin()
    while not results:
        assert other_scheduler.turn() == []
        read = first.turn()
        assert {type(each) for each in read} <= {ranks.Broadcast}  # the engine hands broadcasts to all ranks
        other_scheduler.process_input_requests(read)
    for one in ranks_of:
        one.orders.close()
    assert [each.failure for each in results] == ["", ""]
    assert other_scheduler.forwards == first.forwards > 0
    assert snapshot_state(other_scheduler)[0] == before


@pytest.mark.parametrize(
    ("chunk", "tokens", "refused"),
    [
        (64, 67, ""),
        (64, 66, "has 66 tokens, too few for a window of 16 tokens or a prefill of 64 tokens"),
        (None, 200, "has 200 tokens, too few for a window of 16 tokens or a prefill of 300 tokens"),
    ],
)
def test_sliding_windows_smaller_than_a_prefill_are_not_rehearsed(chunk, tokens, refused, scheduler):
    instance, limits = scheduler(), replace(SMALL, chunk=chunk, window=16, window_tokens=tokens)
    if not refused:
        assert rehearse(instance, limits=limits).missed == {}
        return
    rank, before = OneRank(instance, limits=limits), snapshot_state(instance)
    with pytest.raises(RuntimeError, match=f"^the KV cache of sliding-window layers {refused}$"):
        rank.begin()
    rank.end()
    assert snapshot_state(instance) == before


def owner_of(scheduler, name):
    """Return the engine object that has a counter: the scheduler, its metrics reporter, or the model runner."""
    scheduler.metrics_reporter = SimpleNamespace()
    return {"runner": scheduler.tp_worker.model_runner, "reporter": scheduler.metrics_reporter}.get(name, scheduler)


@pytest.mark.parametrize("owner", ["scheduler", "reporter", "runner"])
@pytest.mark.parametrize(
    ("name", "before"),
    [
        *((name, 7) for name in ("forward_ct", "forward_ct_decode", "num_generated_tokens", "last_gen_throughput")),
        *((name, 7) for name in ("num_retracted_reqs", "total_prefill_uncached_tokens", "total_prefill_busy_us")),
        *((name, 7) for name in ("spec_total_num_accept_tokens", "forward_pass_id", "max_prefill_bs")),
        ("decode_moment_totals", [1.0, 2.0]),  # a list that grows in place
        ("_prev_decode_launch_ts", None),  # otherwise the time since the rehearsal would count for the first decode
    ],
)
def test_counters_are_restored(owner, name, before, scheduler):
    """The rehearsal restores the counters that ``/v1/loads`` reports, and the counters that the scheduler itself reads.
    The object with these counters differs between engine releases."""
    instance = scheduler()
    owner, expected = owner_of(instance, owner), copy(before)
    setattr(owner, name, before)

    def count():
        if isinstance(before, list):
            before.append(5.0)
        else:
            setattr(owner, name, instance.forwards)

    instance.did.count = count
    rehearse(instance)
    assert (getattr(owner, name), instance.forwards > 7) == (expected, True)


@pytest.mark.parametrize(
    ("owner", "name", "before", "meanwhile"),
    [
        ("scheduler", "enable_metrics", True, False),
        ("reporter", "current_scheduler_metrics_enabled", True, False),
        ("scheduler", "max_queued_requests", 2, None),
    ],
)
def test_metrics_and_the_queue_limit_are_off_during_a_rehearsal(owner, name, before, meanwhile, scheduler):
    instance = scheduler()
    owner, values = owner_of(instance, owner), set()
    setattr(owner, name, before)
    instance.did.count = lambda: values.add(getattr(owner, name))
    rehearse(instance)
    assert (values, getattr(owner, name)) == ({meanwhile}, before)


def test_metrics_do_not_count_during_a_rehearsal_and_count_afterwards(scheduler):
    registry = CollectorRegistry()
    counter, gauge = Counter("c", "", ["x"], registry=registry), Gauge("g", "", registry=registry)
    histogram, summary = Histogram("h", "", registry=registry), Summary("s", "", registry=registry)

    def count():
        for change in (counter.labels(x="1").inc, histogram.observe, summary.observe, gauge.set, gauge.inc, gauge.dec):
            change(5)
            values = {each.name: each.value for metric in registry.collect() for each in metric.samples}
            yield tuple(values.get(name, 0) for name in ("c_total", "h_count", "s_count", "g"))

    instance, meanwhile = scheduler(), set()
    instance.did.count = lambda: meanwhile.update(count())
    rehearse(instance)
    assert meanwhile == {(0, 0, 0, 0)}
    all_counted = [(5, 0, 0, 0), (5, 1, 0, 0), (5, 1, 1, 0), (5, 1, 1, 5), (5, 1, 1, 10), (5, 1, 1, 5)]
    assert list(count()) == all_counted


PLAIN = make_pool("MHATokenToKVPool", mem_usage=2)
WINDOWS = make_pool("SWAKVPool", size_swa=70_000, mem_usage=2)  # number of addresses, most of which have no memory
TABLE = make_pool("HybridReqToTokenPool", mamba_pool=SimpleNamespace(mem_usage=3))
NUMBERS = {"cache_tokens": 20_000, "requests": 300, "input_tokens": 9999}
STATES = make_pool("HybridLinearKVPool", mem_usage=2), TABLE


@pytest.mark.parametrize(
    ("pools", "kind", "window", "fixed_gib"),
    [
        ((PLAIN, PLAIN_TABLE), "", (0, 0), 0),
        ((WINDOWS, PLAIN_TABLE), "sliding-window", (128, 700), 0),
        (STATES, "Mamba", (0, 0), 3),  # states belong to requests, so their number does not grow with the tokens
    ],
)
def test_server_facts_depend_on_the_kind_of_pool(pools, kind, window, fixed_gib):
    allocator = SimpleNamespace(**({"size_swa": 700} if pools[0] is WINDOWS else {}))
    facts = engine_objects.server_facts(
        make_runner(*pools, sliding_window_size=128, token_to_kv_pool_allocator=allocator)
    )
    assert (facts.hybrid, facts.window, facts.window_tokens, facts.fixed_bytes) == (kind, *window, fixed_gib * GIB)
    limits = phases.derive_limits({}, facts, **NUMBERS)
    assert (limits.window, limits.window_tokens, limits.states) == (*window, kind == "Mamba")


@pytest.mark.parametrize("name", ["decode_cuda_graph_runner", "graph_runner"])
def test_the_largest_captured_decode_is_read_from_the_captured_graphs(name):
    for graphs, captured in ((SimpleNamespace(max_bs=144), 144), (None, None)):
        assert engine_objects.server_facts(make_runner(PLAIN, **{name: graphs})).captured == captured


def test_graph_bytes_are_those_that_the_engine_measured():
    assert engine_objects.graph_bytes(SimpleNamespace()) == 0
    assert engine_objects.graph_bytes(SimpleNamespace(graph_mem_usage=2)) == 2 * GIB
    for usage, gib in (({"decode": 2}, 2), ({"decode": 1, "target_verify": 2, "prefill": 4, "draft": 8}, 3)):
        assert engine_objects.graph_bytes(SimpleNamespace(graph_memory_usage=usage)) == gib * GIB


@pytest.mark.parametrize(("warmup_s", "limits_s"), [(-1, (300, 60)), (60, (30, 15)), (3600, (300, 60))])
def test_a_rehearsal_ends_within_the_engines_own_warm_up(warmup_s, limits_s, monkeypatch):
    envs = SimpleNamespace(SGLANG_WARMUP_TIMEOUT=SimpleNamespace(get=lambda: warmup_s))
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", SimpleNamespace(envs=envs))
    assert (rehearsal.timeout_s(), rehearsal.abandon_after_s()) == limits_s
