"""Tests of the decision on the KV cache size. Some tests call functions without an engine, and some start two simulated
ranks. The engine's *rule* is the engine's own computation of the size from ``--mem-fraction-static``. A rank's *need*
is the memory that it uses in addition to weights and KV cache, as measured or estimated by a rehearsal."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_servers import GB, PLAIN_TABLE, make_pool
from sglang_moe_patches.memory.kv_sizing import engine_rule, hooks, sizing, start
from sglang_moe_patches.memory.kv_sizing.phases import Limits, PhaseKind
from sglang_moe_patches.memory.kv_sizing.pools import ElasticPools
from sglang_moe_patches.memory.kv_sizing.rehearsal import Measured
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory, RankNeed
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts
from tells_memory import HostMemory

MISSED = {"a": PhaseKind.MIXED, "b": PhaseKind.VARIED}
TOO_FEW = "the largest forward pass and the margin leave memory for 0 KV tokens, too few to serve"


@pytest.mark.parametrize(
    ("needs", "tokens", "reason"),
    [
        ([RankNeed(fits=300)], 300, ""),
        ([RankNeed(fits=300), RankNeed(fits=250)], 250, ""),
        ([RankNeed(fits=900)], 500, ""),  # the cache has addresses for 500 tokens
        ([RankNeed(fits=201)], 200, ""),  # it grows by at least 2 %
        ([RankNeed(fits=204)], 204, ""),
        ([RankNeed(fits=150)], 150, ""),
        ([RankNeed(fits=199)], 199, ""),  # it shrinks even by a single token
        ([RankNeed(fits=150, missed=MISSED)], 150, ""),
        ([RankNeed(fits=300, missed=MISSED)], 200, "the rehearsal did not measure: a, b"),
        ([RankNeed(fits=300), RankNeed(failure="no driver")], 200, "the rehearsal failed: rank 1: no driver"),
        ([RankNeed(fits=300), RankNeed(fits=-9)], 120, TOO_FEW),  # it keeps 120 tokens, which are two prefill chunks
    ],
    ids=str,
)
def test_all_ranks_get_the_size_that_fits_on_the_rank_with_least_memory(needs, tokens, reason):
    assert sizing.decide(needs, 200, 500, 120) == (tokens, reason)


@pytest.mark.parametrize(("free", "least"), [(40, None), (25, 0.85), (15, 0.95), (12.9, None)])
def test_a_larger_first_fraction_gives_the_rehearsal_enough_kv_cache(free, least):
    """If the rule's KV cache is smaller than a rehearsal needs (10 GB), the server starts with a larger fraction.

    Before loading, 100 GB are free. The rule's fraction, 0.8, therefore reserves 20 GB for forward passes.

    :param free: free GB after loading, including the reserved GB. A second rank has 5 GB more.
    :param least: the larger fraction, or ``None`` if the server keeps 0.8. With 25 free GB, the fraction is 0.85: it
        reserves 15 GB and leaves 10 GB for the KV cache. With 40 free GB, 0.8 suffices. With 12.9 free GB, no fraction
        leaves 10 GB for the KV cache and 3 GB in reserve.
    """
    launches = [LaunchMemory("", 100 * GB, int(each * GB), 0.8) for each in (free + 5, free)]
    found = sizing.find_larger_fraction(launches, 10 * GB, 2 * GB)
    assert found == (None if least is None else pytest.approx(least))
    if found is not None:  # the engine's formula: free memory minus the memory that the fraction sets aside
        assert 10 * GB <= int(free * GB) - 100 * GB * (1 - found) < 10.02 * GB


@pytest.mark.parametrize(
    ("has_images", "reserved_gib", "expected"),
    [(False, 1.0, 204 * 1e6), (True, 1.0, 204 * 1e6 + 2**30), (True, None, 204 * 1e6)],
)
def test_a_larger_first_fraction_also_gives_room_to_the_caches_for_images(
    has_images, reserved_gib, expected, monkeypatch
):
    """Some releases put the caches for images (here 1 GiB) into the memory that the fraction leaves to the KV cache.
    With these releases, the larger fraction must leave 1 GiB more. The KV cache itself needs 204 tokens of 1 MB: two
    prefill chunks of 100 tokens, and two pages of 2 tokens."""
    asked: list[int] = []
    monkeypatch.setattr(engine_rule, "bytes_per_token", lambda maker: 1e6)
    monkeypatch.setattr(engine_rule, "arguments_of", lambda arguments: {"chunked_prefill_size": 100})
    monkeypatch.setattr(engine_rule, "reserved_by_configurator_gib", lambda arguments: reserved_gib)
    monkeypatch.setattr(sizing, "find_larger_fraction", lambda launches, cache, margin: asked.append(cache))
    config = SimpleNamespace(context_len=1000, is_multimodal=has_images)
    engine_rule.find_rehearsal_fraction(SimpleNamespace(server_args=None, model_config=config, page_size=2), [], 0)
    assert asked == [expected]


@pytest.mark.parametrize(("added", "pinned"), [(5 * GB, 0.85), (-5 * GB, 0.75), (123_456_789, 0.8012), (21 * GB, None)])
def test_the_fraction_for_the_same_size_is_rounded_down(added, pinned):
    assert sizing.pinned_fraction(LaunchMemory("", 100 * GB, 50 * GB, 0.8), added) == pinned


def test_the_three_largest_phases_are_named():
    phases = {"a": 1_000_000, "b": 2_500_000_000, "c": 30_000_000, "d": 40_000_000}
    assert sizing.largest_phases(phases) == "b 2,500 MB, d 40 MB, c 30 MB"


# --- Two ranks -------------------------------------------------------------------------------------------------------

RULE, TOP, MARGIN = 1000, 9000, 2 * GB
BYTES_PER_TOKEN = 1_000_000.0
SMALL_LIMITS = Limits(2048, 8192, 40_000, 20, 0)
DEFAULT_REQUESTS = Limits(2048, 8192, 40_000, 2000, 256, has_default_requests=True)


@pytest.fixture(autouse=True)
def log_everything(caplog):
    caplog.set_level("INFO")


class Pools:
    """Stand-in for a rank's KV cache pools. Each token takes 1 MB.

    :param map_error: exception that :meth:`map` raises; ``None`` if there is enough memory.
    """

    page, unmap_fails = 1, False

    def __init__(self, map_error):
        self.first = self.counts = TokenCounts(RULE)
        self.top, self.backed, self._map_error = TokenCounts(TOP), RULE, map_error

    def counts_for(self, tokens):
        return TokenCounts(tokens)

    def backing_bytes(self, counts):
        return counts.tokens * 1_000_000

    def tokens_within(self, budget):
        return min(TOP, int(budget // 1_000_000))

    def map(self, counts):
        if self._map_error is not None:
            raise self._map_error
        self.counts, self.backed = counts, counts.tokens

    def unmap_from(self, counts):
        self.counts = counts
        if self.unmap_fails:
            raise RuntimeError("the driver does not answer")
        self.backed = min(self.backed, counts.tokens)


class Rehearsal:
    """Stand-in for a rehearsal. It ends when the test calls :meth:`finish`."""

    on_end: Any

    def __init__(self, scheduler, gpu, board, number, derive, limits, *, leads, **arguments):
        self.arguments, self.derive, self.limits, self.leads = arguments, derive, limits, leads
        self.poll = self.read_turn_memory = list
        self.ended = False

    def begin(self):
        pass

    def end(self):
        self.ended = True

    def finish(self, measured):
        self.end()
        self.on_end(measured)


class Ranks:
    """Two ranks whose rehearsals have begun.

    :param map_error: exception that rank 1 raises when it maps memory; ``None`` if there is enough memory.
    :param silent_topics: topics on which rank 1 publishes nothing.
    :param refused_tokens: KV cache size in tokens that the engine refuses.
    :param rehearses_twice: whether a second rehearsal follows, because a phase has become larger after the first one.
    :param limits: limits of the forward passes.
    """

    def __init__(
        self,
        monkeypatch,
        map_error=None,
        silent_topics=(),
        refused_tokens=0,
        rehearses_twice=False,
        limits=SMALL_LIMITS,
    ):
        self.larger_phases = ["a phase"] if rehearses_twice else []
        self.published: dict[tuple[str, int], object] = {}
        self.serving: list[start.ServerStart] = []
        self.set_tokens: tuple[list[int], list[int]] = ([], [])
        self.pools = [Pools(None), Pools(map_error)]
        facts = SimpleNamespace(fixed_bytes=0, hybrid="")
        for owner, name, value in (
            (start, "arguments_of", lambda arguments: {}),
            (start.ranks, "all_gather", lambda told, kind: [told]),
            (start.ranks, "share_secret", bytes),
            (start, "EXCHANGE_WAIT_S", -1.0),
            (start, "Rehearsal", Rehearsal),
            (start, "limits_of", lambda scheduler, fewer_requests: limits),
            (start, "server_facts", lambda runner: facts),
            (start.ServerStart, "_serve", lambda one: self.serving.append(one)),
            (start.token_count, "resize_allocator", lambda allocator, counts: None),
            (start.token_count, "set_token_count", self._set_token_count),
            (start.phases, "derive_second_pass", lambda *given: list(self.larger_phases)),
        ):
            monkeypatch.setattr(owner, name, value)
        self._refused, self.starts = refused_tokens, list[Any]()
        for rank in range(2):
            monkeypatch.setattr(start.ranks, "Board", lambda secret, rank=rank: self._board(rank, silent_topics))
            orders = SimpleNamespace(open=lambda: None, close=lambda: None)
            monkeypatch.setattr(start.ranks, "Orders", lambda *given, orders=orders, **more: orders)
            pools: Any = self.pools[rank]
            launch = LaunchMemory("", 80 * GB, 20 * GB, 0.8)
            reservation = start.Reservation(pools, launch, 0, rank == 0, MARGIN, BYTES_PER_TOKEN, 0, 0, False)
            has = {
                "server_args": None,
                "token_to_kv_pool_allocator": None,
                "chunked_prefill_size": 50,
                "tree_cache": None,
            }
            scheduler = SimpleNamespace(rank=rank, tp_worker=SimpleNamespace(model_runner=None), **has)
            self.starts.append(start.ServerStart(scheduler, reservation, lambda: None))
            self.starts[rank].begin("")

    def _set_token_count(self, scheduler, counts):
        if counts.tokens == self._refused:
            raise TypeError("frozen")
        self.set_tokens[scheduler.rank].append(counts.tokens)

    def _board(self, rank, silent_topics):
        def publish(topic, value):
            if not (rank and topic.split()[0] in silent_topics):
                self.published[topic, rank] = value

        def collect(topic, kind):
            return [self.published.get((topic, each)) for each in range(2)]

        return SimpleNamespace(publish=publish, collect=collect, ranks=2, raise_flag=print, is_raised=bool)

    def measure(self, *spare_mb, **measured):
        """End the rehearsal of both ranks, and execute all orders.

        :param spare_mb: MB of each rank that stay free beyond the margin.
        :param measured: other fields of the result (:class:`Measured`).
        """
        for rank_start, spare in zip(self.starts, spare_mb, strict=True):
            rank_start._rehearsal.finish(Measured(lowest=MARGIN + spare * 1_000_000, **measured))
        for _ in range(9):
            assert self.starts[1].orders.read_instead() == []
            self.obey()

    def obey(self):
        for broadcast in self.starts[0].orders.read_instead():
            for order in broadcast.items:
                for rank_start in self.starts:
                    rank_start.obey(order)

    def rehearsals(self):
        return [start._rehearsal for start in self.starts]

    def tokens(self):
        """Return three token counts: the KV cache size, the number of tokens with memory, and the size that was set in
        the engine. First check that both ranks have the same three counts."""
        first, second = [
            (pools.counts.tokens, pools.backed, sizes[-1])
            for pools, sizes in zip(self.pools, self.set_tokens, strict=True)
        ]
        assert first == second
        return first


@pytest.mark.parametrize(
    ("settings", "spare_mb", "tokens", "message"),
    [
        ({}, (500, 300), 1300, "KV cache grown from 1,000 to 1,300 tokens; 2,000 MB stay free"),
        ({}, (500, -400), 600, "KV cache shrunk from 1,000 to 600 tokens"),
        ({}, (99_000, 99_000), TOP, "KV cache grown from 1,000 to 9,000 tokens"),  # all addresses
        (
            {"map_error": RuntimeError("nothing is left")},
            (500, 500),
            RULE,
            "could not map memory for a larger KV cache: nothing is left",
        ),
        ({"map_error": MemoryError()}, (500, 500), RULE, "could not map memory for a larger KV cache: MemoryError"),
        (
            {"silent_topics": ("mapped",)},
            (500, 500),
            RULE,
            "not every rank has reported that it mapped memory for a larger KV cache",
        ),
        ({"silent_topics": ("measured",)}, (500, 500), RULE, "not every rank has reported its measured memory"),
        (
            {"refused_tokens": 1500},
            (500, 500),
            RULE,
            "an object of the engine did not accept the new KV cache size: frozen",
        ),
    ],
    ids=str,
)
def test_all_ranks_grow_to_the_same_size_or_no_rank_grows(settings, spare_mb, tokens, message, monkeypatch, caplog):
    ranks = Ranks(monkeypatch, **settings)
    ranks.measure(*spare_mb)
    assert ranks.tokens() == (tokens,) * 3
    assert message in caplog.text
    assert len(ranks.serving) == 2


def test_all_ranks_shrink_together_if_the_driver_of_one_rank_cannot_unmap(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    ranks.pools[1].unmap_fails = True
    ranks.measure(500, -400)
    assert [(pools.counts.tokens, told[-1]) for pools, told in zip(ranks.pools, ranks.set_tokens, strict=True)] == [
        (600, 600)
    ] * 2
    assert len(ranks.serving) == 2
    assert caplog.text.count("the server goes on: the driver does not answer") == 1


def test_a_rank_that_is_silent_after_growth_restores_the_engines_size(monkeypatch, caplog):
    """If a rank does not report its need after the KV cache has grown, all ranks must restore the engine's size."""
    silent_topics: list[str] = []
    ranks = Ranks(monkeypatch, rehearses_twice=True, silent_topics=silent_topics)
    ranks.measure(500, 500)
    assert ranks.tokens() == (1500,) * 3
    silent_topics.append("measured")
    ranks.measure(500, 500)
    assert ranks.tokens() == (RULE,) * 3
    assert len(ranks.serving) == 2
    assert "not every rank has reported its measured memory" in caplog.text


def test_a_size_that_no_fraction_gives_is_used_and_logged_without_a_fraction(monkeypatch, caplog):
    monkeypatch.setattr(sizing, "pinned_fraction", lambda launch, more_bytes: None)
    ranks = Ranks(monkeypatch)
    ranks.measure(500, 500)
    assert (ranks.tokens(), len(ranks.serving)) == ((1500,) * 3, 2)
    assert "KV cache grown from 1,000 to 1,500 tokens; 2,000 MB stay free" in caplog.text
    assert "--mem-fraction-static" not in caplog.text


def test_phases_that_became_larger_are_rehearsed_again_and_the_kv_cache_shrinks(monkeypatch, caplog):
    ranks = Ranks(monkeypatch, rehearses_twice=True)
    ranks.measure(500, 500, phases={"a": 5_000_000}, seconds={"a": 1.0})
    assert (ranks.tokens(), ranks.serving) == ((1500,) * 3, [])
    ranks.larger_phases = []
    ranks.measure(-100, 7, phases={"a": 3_000_000, "b": 9_000_000}, seconds={"b": 2.0})
    assert (ranks.tokens(), len(ranks.serving)) == ((1400,) * 3, 2)
    assert "largest forward passes: b 9 MB, a 5 MB" in caplog.text


def test_the_need_of_an_earlier_rehearsal_still_counts_after_a_later_one(monkeypatch, caplog):
    """A later rehearsal runs only the phases that have become larger. The need must still contain the allocator's slack
    of the earlier rehearsal, although this slack was freed between the rehearsals. The *slack* is memory that PyTorch's
    allocator keeps in addition to the tensors."""
    ranks = Ranks(monkeypatch, rehearses_twice=True)
    without_forwards = 20_000_000_000 - RULE * BYTES_PER_TOKEN
    ranks.measure(500, 500, slack=300_000_000, seconds={"a": 1.0}, free=int(without_forwards) - 70_000_000)
    needed = 20_000 - RULE - MARGIN // 1_000_000 - 500
    ranks.measure(3000, 3000, slack=4_000_000, free=1_000_000_000)
    assert ranks.tokens() == (1500,) * 3
    assert f"needed in addition to weights and KV cache: {needed:,} MB, on the rank" in caplog.text
    assert "; 70 MB CUDA graphs and buffers" in caplog.text
    assert "; 300 MB allocator slack" in caplog.text


def test_all_ranks_get_the_request_limit_of_rank_0(monkeypatch):
    """The rehearsal of rank 0 finds the limit of concurrent requests, and all ranks must use this limit. In this test,
    rank 1 could not begin its last rehearsal, and has no memory to grow."""
    ranks, limited = Ranks(monkeypatch, rehearses_twice=True, limits=DEFAULT_REQUESTS), []
    for one in ranks.rehearsals():  # the rehearsal needs both to decide how many requests have memory
        assert (one.arguments["bytes_per_token"], one.arguments["margin"]) == (BYTES_PER_TOKEN, MARGIN)
    monkeypatch.setattr(start.serving, "limit_requests", lambda one, *numbers: limited.append((one.rank, *numbers)))
    ranks.measure(500, 500)
    ranks.larger_phases, ranks.starts[1]._limits, ranks.pools[1]._map_error = [], None, RuntimeError("nothing is left")
    ranks.measure(900, 900, fewer_requests=512)
    assert (ranks.tokens(), limited) == ((1500,) * 3, [(0, 512, 256), (1, 512, 256)])


AGAIN = "rehearses again with at most 256 requests at once: more requests left too little memory for the KV cache"


@pytest.mark.parametrize(
    ("spare_mb", "seen", "begins_again"),
    [
        ([-1, 700], {}, True),  # one token fewer than by the rule
        ([9000, 9000], {"stopped": True}, True),  # some phases did not run, so their need is not known
        ([0, 0], {}, False),
        ([-1, 700], {"restart_requests": 0}, False),  # no decode had more requests than the user asked for
        ([-1, 700], {"failure": "no driver", "stopped": True}, False),
    ],
)
def test_a_rehearsal_starts_over_if_unrequested_requests_make_the_kv_cache_too_small(
    spare_mb, seen, begins_again, monkeypatch, caplog
):
    ranks = Ranks(monkeypatch, rehearses_twice=True, limits=DEFAULT_REQUESTS)
    monkeypatch.setattr(start.serving, "limit_requests", lambda scheduler, *numbers: None)
    ranks.measure(*spare_mb, **{"restart_requests": 256} | seen)
    whole = [not one.ended and one.derive == start.phases.derive_phases for one in ranks.rehearsals()]
    assert (AGAIN in caplog.text, whole) == (begins_again, [begins_again] * 2)
    assert not begins_again or ranks.tokens()[0] == RULE


def test_a_rehearsal_that_starts_over_has_fewer_requests_and_two_more_passes(monkeypatch, caplog):
    """If a rehearsal starts over with fewer requests, its earlier measurements no longer count. As after any first
    rehearsal, two further rehearsals may follow. The server later admits only the smaller number of requests."""
    ranks, limited = Ranks(monkeypatch, rehearses_twice=True, limits=DEFAULT_REQUESTS), list[tuple[int, int]]()
    monkeypatch.setattr(start.serving, "limit_requests", lambda scheduler, *numbers: limited.append(numbers))
    ranks.measure(-1, 700, restart_requests=256, slack=9_000_000, phases={"a": 9_000_000}, free=900_000_000)
    few = {"slack": 4_000_000, "phases": {"b": 3_000_000}, "seconds": {"b": 1.0}}
    ranks.measure(500, 400, **few, free=int(20 * GB - RULE * BYTES_PER_TOKEN) - 50_000_000)
    for tokens in (400, 300):  # second and third of the three rehearsals
        assert ranks.serving == []
        ranks.measure(900, 900, stopped=True, restart_requests=128, missed={"a phase": PhaseKind.MIXED})
        assert ranks.tokens() == (tokens,) * 3
    assert (len(ranks.serving), limited, caplog.text.count(AGAIN)) == (2, [(256, 256)] * 2, 1)
    assert "largest forward passes: b 3 MB; 50 MB CUDA graphs" in caplog.text
    assert "; 4 MB allocator slack" in caplog.text


@pytest.mark.parametrize(("spare_mb", "limited"), [([-1, -1], [(256, 256)] * 2), ([0, 0], [])])
def test_a_server_of_unchanged_size_has_the_stock_request_limit_unless_it_started_over(spare_mb, limited, monkeypatch):
    ranks, found = Ranks(monkeypatch, limits=DEFAULT_REQUESTS), list[tuple[int, int]]()
    monkeypatch.setattr(start.serving, "limit_requests", lambda scheduler, *numbers: found.append(numbers))
    ranks.measure(*spare_mb, restart_requests=256)
    if not ranks.serving:
        ranks.measure(0, 0)
    assert ([pools.counts.tokens for pools in ranks.pools], found) == ([RULE] * 2, limited)


GIVEN_REQUESTS = replace(DEFAULT_REQUESTS, has_default_requests=False)


@pytest.mark.parametrize(
    ("limits", "spare_mb", "begins_again"),
    [
        (GIVEN_REQUESTS, [-488, 700], True),  # 512 tokens instead of 1,000
        (GIVEN_REQUESTS, [0, 700], False),
        (replace(GIVEN_REQUESTS, requests=256), [-488, 700], False),  # without the argument, as many would run
    ],
    ids=["a sliver", "enough", "few requests"],
)
def test_penalized_requests_never_make_the_kv_cache_smaller_than_the_engines_own(
    limits, spare_mb, begins_again, monkeypatch, caplog
):
    ranks, limited = Ranks(monkeypatch, limits=limits), list[tuple[int, int]]()
    monkeypatch.setattr(start.serving, "limit_requests", lambda scheduler, *numbers: limited.append(numbers))
    ranks.measure(*spare_mb)
    assert [one.limits.limits_penalized for one in ranks.rehearsals()] == [begins_again] * 2
    if begins_again:
        assert "rehearses again with at most 2,000 requests at once, and 256 in a batch with penalties" in caplog.text
        ranks.measure(500, 500)
        assert ranks.tokens() == (1500,) * 3
        assert "memory for 2,000 such requests would make the KV cache smaller" in caplog.text
    assert limited == ([(2000, 256)] * 2 if begins_again else [])


def test_a_failed_rehearsal_logs_no_need(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    ranks.measure(-2000, -2000, failure="it ended", seconds={"a": 1.0})
    assert ranks.tokens() == (RULE,) * 3
    assert "rehearsed in " in caplog.text
    assert "measured " not in caplog.text


@pytest.mark.parametrize("stopped", [False, True])
def test_a_failed_later_rehearsal_restores_the_engines_size(stopped, monkeypatch):
    """If the second rehearsal fails, the need with the larger KV cache is not known. All ranks must restore the
    engine's size, and no third rehearsal follows.

    :param stopped: whether the failed rehearsal had also ended early, because little memory was left.
    """
    ranks = Ranks(monkeypatch, rehearses_twice=True)
    ranks.measure(500, 500)
    ranks.measure(500, 500, failure="AssertionError: a forward pass", stopped=stopped)
    assert ranks.tokens() == (RULE,) * 3
    assert len(ranks.serving) == 2


@pytest.mark.parametrize(
    ("raise_alike", "stages", "running", "goes_on"),
    [(True, 1, True, True), (False, 1, True, False), (True, 2, True, False), (True, 1, False, False)],
)
def test_a_rehearsed_forward_pass_that_raises_on_all_ranks_does_not_end_the_server(
    raise_alike, stages, running, goes_on, monkeypatch
):
    """The server goes on only if every rank has raised the exception. Otherwise rank 1 may still wait in a collective.
    The requests of the rehearsal are dropped before the event loop runs again."""
    monkeypatch.setattr(Rehearsal, "is_running", running, raising=False)
    did: list[str] = []
    monkeypatch.setattr(Rehearsal, "fail", lambda rehearsal, problem: did.append(problem), raising=False)
    monkeypatch.setattr(start, "drop_requests", lambda scheduler: did.append("dropped"))
    first = Ranks(monkeypatch, limits=replace(SMALL_LIMITS, stages=stages)).starts[0]
    first.board.wait_for_all = lambda topic, kind, seconds: ["", ""] if raise_alike else ["", None]
    monkeypatch.setattr(first, "begin", lambda problem: did.append("begun"))
    monkeypatch.setattr(hooks, "ServerStart", lambda scheduler, reservation, release: first)
    process = hooks.SchedulerHooks()
    process.reservation = first.reservation

    def run_event_loop(scheduler):
        did.append("runs")
        if did.count("runs") == 1:
            raise AssertionError("a forward pass")
        return "ended"

    if not goes_on:
        with pytest.raises(AssertionError):
            process.run(run_event_loop, first.scheduler)
        assert did == ["begun", "runs"]
        return
    assert process.run(run_event_loop, first.scheduler) == "ended"
    assert did == ["begun", "runs", "dropped", "AssertionError: a forward pass", "runs"]


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    ("fraction", "line"),
    [
        (0.93, "0.8000 leaves too little KV cache for the rehearsal; the rehearsal starts with 0.9300"),
        (None, ""),
        (ZeroDivisionError("no token"), "so the KV cache starts with the value in force: ZeroDivisionError: no token"),
    ],
)
def test_a_fraction_that_leaves_less_than_two_chunks_is_raised_and_logged(
    is_given, fraction, line, monkeypatch, caplog
):
    process = hooks.SchedulerHooks()

    def gather(maker, before):
        process.reason, process.leads, process.fraction_is_given = "", True, is_given
        process.launch = LaunchMemory("", 80 * GB, 20 * GB, 0.8)
        return []

    def find(maker, launches, margin):
        if isinstance(fraction, Exception):
            raise fraction
        return fraction

    reserved: list[float] = []
    monkeypatch.setattr(process, "_gather_launch_memory", gather)
    monkeypatch.setattr(process, "_reserve_addresses", lambda maker, config, raised: reserved.append(raised))
    monkeypatch.setattr(engine_rule, "find_rehearsal_fraction", find)
    maker = SimpleNamespace(is_draft_worker=False, mem_fraction_static=0.8, server_args=SimpleNamespace())
    used = process.resolve_config(lambda maker, before: maker.mem_fraction_static, maker, 80.0)
    is_raised = fraction == 0.93
    assert (used, maker.mem_fraction_static) == (0.93 if is_raised else 0.8, 0.8)
    assert reserved == [pytest.approx(0.13 if is_raised else 0)]
    assert line in caplog.text
    source = "given" if is_given else "engine's default"
    assert (f"the {source} --mem-fraction-static" in caplog.text) == is_raised


def test_an_estimated_need_counts_until_the_phase_has_run(monkeypatch):
    ranks = Ranks(monkeypatch, rehearses_twice=True)
    ranks.measure(900, 900, stopped=True, missed={"a phase": PhaseKind.MIXED}, expected=MARGIN + 200_000_000)
    assert ranks.tokens() == (200,) * 3
    ranks.measure(1500, 1500)
    assert ranks.tokens() == (1700,) * 3


def test_rank_0_ends_a_rehearsal_that_it_does_not_drive(monkeypatch):
    """If rank 0 fails to begin the second rehearsal, rank 0 must order rank 1 to end the rehearsal. Otherwise rank 1
    would wait forever for the rehearsal's requests, which only rank 0 sends."""
    ranks = Ranks(monkeypatch, rehearses_twice=True)
    monkeypatch.setattr(Rehearsal, "begin", lambda one: divide_by_zero() if one.leads else None)
    for one, spare in zip(ranks.starts, (500, 500), strict=True):
        one._rehearsal.finish(Measured(lowest=MARGIN + spare * 1_000_000))
    for _ in range(2):  # rank 0 handles the measured need, then the mapped memory
        ranks.obey()
    first, other = ranks.rehearsals()
    assert (first.ended, other.ended, ranks.serving) == (True, False, [])
    ranks.obey()  # rank 0 ends the rehearsal of rank 1
    assert other.ended
    assert ranks.tokens() == (RULE,) * 3  # nobody knows the need with the larger KV cache
    assert len(ranks.serving) == 2


def divide_by_zero():
    return 1 / 0


def test_a_rehearsal_that_ended_early_is_repeated_with_fewer_tokens_at_most_twice(monkeypatch):
    """If a rehearsal ends early, the need of the missed forward passes is not known. The KV cache then shrinks, so that
    one more GB stays free, and the rehearsal is repeated. After three rehearsals the server keeps the last size."""
    ranks = Ranks(monkeypatch, rehearses_twice=True)
    for tokens in (900, 800, 700):
        assert ranks.serving == []
        ranks.measure(900, 900, stopped=True, missed={"a phase": PhaseKind.MIXED})
        assert ranks.tokens() == (tokens,) * 3
    assert len(ranks.serving) == 2


def test_the_pools_of_a_draft_model_grow_with_the_models_pools():
    """A draft model has its own KV cache pool, but uses the same slot numbers as the model. If the draft model's pool
    did not grow, the engine would write past the end of this pool."""
    process, pools = hooks.SchedulerHooks(), ElasticPools(HostMemory(), TokenCounts(640), TokenCounts(6400), 64)
    process.reason = ""
    process.reservation = start.Reservation(pools, LaunchMemory(), 0, True, MARGIN, BYTES_PER_TOKEN, 0, 0, False)

    def init_pools(maker, **arguments):
        keys = torch.zeros((maker.max_total_num_tokens + 64, 4, 8), dtype=torch.bfloat16, device="cpu")
        maker.token_to_kv_pool = make_pool("MHATokenToKVPool", k_buffer=[keys], mem_usage=0.0)
        maker.req_to_token_pool = PLAIN_TABLE
        maker.token_to_kv_pool_allocator = make_pool("TokenToKVPoolAllocator", page_size=64, size=0, clear=list)

    makers = [SimpleNamespace(is_draft_worker=is_draft, max_total_num_tokens=640, device="cpu") for is_draft in (0, 1)]
    for maker in makers:
        process.make_pools(init_pools, maker)
        assert maker.max_total_num_tokens == 640
    assert process.reason == ""
    pools.map(TokenCounts(3200))
    for maker in makers:
        assert maker.token_to_kv_pool.k_buffer[0].shape[0] == 6464
        assert not maker.token_to_kv_pool.k_buffer[0][:3264].any()  # reading unmapped memory would end this process
