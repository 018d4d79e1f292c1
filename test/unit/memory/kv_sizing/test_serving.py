"""Tests of a running server whose KV cache was sized. If GPU memory becomes short, rank 0 sends all ranks an *order* to
unmap the end of the KV cache (the *tail*). The server also limits the number of concurrent requests."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_servers import GB
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.memory.kv_sizing import serving
from sglang_moe_patches.memory.kv_sizing.serving import EvictPrefixes, FreeMemory, Retire, Retirement, Serving
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts, resize_allocator, set_token_count


@pytest.mark.parametrize(("free", "shortage"), [(9, 0), (1.1, 0), (1, 0), (0.9, 1.1), (0, 2)])
def test_below_half_of_the_margin_memory_is_short_by_the_rest_of_the_whole_margin(free, shortage):
    left = [9 * GB, int(free * GB)]
    memory = FreeMemory(lambda: Memory(free=left.pop(0)), 2 * GB)
    assert memory.measure_shortage() == pytest.approx(shortage * GB)
    assert memory.lowest == int(free * GB)


class Pools:
    """Stand-in for KV cache pools. Each token takes 1 MB, and memory is mapped in pieces of 100 tokens."""

    page = 1

    def __init__(self, tokens):
        self.counts = self.top = TokenCounts(tokens)
        self.unmapped = []

    def counts_for(self, tokens):
        return TokenCounts(tokens)

    def backing_bytes(self, counts):
        return -(-counts.tokens // 100) * 100_000_000

    def tokens_within(self, budget):
        return int(budget // 1_000_000)

    def unmap_from(self, counts):
        given_back, self.counts = self.backing_bytes(self.counts) - self.backing_bytes(counts), counts
        self.unmapped.append(counts.tokens)
        return given_back


class Allocator:
    """Stand-in for the engine's allocator of KV cache pages. It allocates pages from the front of its free list. Freed
    pages go to the end of the list. If ``lifo`` is true, freed pages go to the front."""

    def __init__(self, size, page=1, lifo=False):
        self.size, self.page_size, self.lifo = size, page, lifo
        if page > 1:
            self.num_pages = size // page
        self.clear()

    def clear(self):
        self.free_pages = torch.arange(1, self.size // self.page_size + 1)
        self.release_pages = torch.empty(0, dtype=torch.int64) if self.page_size > 1 else None

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def alloc(self, pages):
        allocated, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return allocated

    def free(self, pages):
        self.free_pages = torch.cat((pages, self.free_pages) if self.lifo else (self.free_pages, pages))
        assert self.available_size() <= self.size  # the engine's allocator for sliding windows has this assertion, too


def request(prompt, new, computed=0):
    sampling = SimpleNamespace(max_new_tokens=new)
    return SimpleNamespace(
        origin_input_ids=range(prompt), output_ids=[], kv_committed_len=computed, sampling_params=sampling
    )


EXTRA_TOKENS = 9
"""Number of KV cache tokens that a request takes in addition to its prompt and its new tokens. The tests expect
room for one token more, because the engine admits a request only if one further token is free. For example, a request
with 5 prompt tokens and 9,200 new tokens needs a KV cache of 5 + 9,200 + 9 + 1 = 9,215 tokens."""


class Flags(set):
    raise_flag = set.add
    is_raised = set.__contains__

    def raised(self, prefix):
        return [flag for flag in self if flag.startswith(prefix)]


@pytest.fixture
def make_rank(monkeypatch):
    """Return a function that makes ranks of one server, whose KV cache has 10,000 tokens.

    The argument ``free`` is the free memory of the rank's GPU. ``leads`` says whether the rank is rank 0. Other
    arguments become attributes of the rank's scheduler.
    """
    board = Flags()

    def record_size(scheduler, counts, longest_request):
        scheduler.published.append((counts.tokens, longest_request))

    def make(free, *, leads=True, **scheduler):
        allocator, clock = Allocator(10_000), itertools.count()
        has = {"chunked_prefill_size": 100, "max_req_input_len": 5000, "is_fully_idle": lambda: False}
        has |= {"token_to_kv_pool_allocator": allocator, "published": [], "flushes": [], "evicted": []}
        engine = SimpleNamespace(**{**has, **scheduler})
        engine.flush_cache = lambda: engine.flushes.append(allocator.clear())
        evict = lambda params: engine.evicted.append(params.num_tokens)  # noqa: E731
        engine.tree_cache = SimpleNamespace(evict=evict, evictable_size=lambda: 0)
        rank = SimpleNamespace(free=free, board=board, pools=Pools(10_000), orders=[], published=engine.published)
        rank.scheduler, rank.allocator = engine, allocator
        memory = FreeMemory(lambda: Memory(free=rank.free), 2 * GB, lambda: next(clock))
        gauges, orders = SimpleNamespace(show=lambda name, value: None), SimpleNamespace(send=rank.orders.append)
        rank.serving = Serving(
            engine, rank.pools, memory, orders, board, gauges, leads=leads, extra_tokens=EXTRA_TOKENS
        )
        return rank

    monkeypatch.setattr(serving.token_count, "set_token_count", record_size)
    return make


def test_free_memory_is_read_once_a_second(make_rank):
    rank, now, readings = make_rank(9 * GB), [0.0], list[float]()

    def read():
        readings.append(now[0])
        return Memory(free=9 * GB)

    rank.serving._memory = FreeMemory(read, 2 * GB, lambda: now[0])
    readings.clear()
    for now[0] in (0.0, 0.5, 0.9, 1.0, 1.9, 2.1):
        rank.serving.run_turn()
    assert readings == [0.0, 1.0, 2.1]


def obey_order(order, *ranks):
    for rank in ranks:
        rank.serving.obey(order)
        rank.serving.run_turn()


def test_the_tail_is_freed_until_the_whole_margin_is_free(make_rank, caplog):
    rank = make_rank(9 * GB)
    rank.serving.run_turn()
    assert rank.orders == []
    rank.free = int(0.5 * GB)
    rank.serving.run_turn()
    assert rank.orders == [Retire(10_000 - 1500)]
    rank.serving.run_turn()
    assert len(rank.orders) == 1  # the rank sends one order at a time
    rank.serving.obey(rank.orders[0])
    assert rank.published == [(10_000, 8490)]  # from now on, longer requests are refused
    rank.free = 2 * GB
    rank.serving.run_turn()
    assert (rank.published[1:], rank.pools.unmapped, rank.pools.counts.tokens) == ([(8500, 8490)], [8500], 8500)
    assert "KV cache shrunk from 10,000 to 8,500 tokens; 1,500 MB freed since the server started" in caplog.text
    assert rank.allocator.size == 8500
    rank.serving.run_turn()
    assert len(rank.orders) == 1


def test_held_slots_are_withdrawn_later_and_all_of_them_after_a_flush(make_rank):
    rank = make_rank(int(0.5 * GB))
    held_slots, rank.allocator.free_pages = rank.allocator.free_pages[8000:], rank.allocator.free_pages[:8000]
    rank.serving.run_turn()
    obey_order(rank.orders.pop(), rank)
    assert rank.pools.unmapped == []  # requests still hold the slots of the tail
    rank.allocator.free(held_slots[1000:])
    rank.serving.run_turn()
    assert (rank.published[-1], rank.pools.unmapped[-1]) == ((9000, 8490), 9000)
    rank.orders.clear()
    rank.free = 2 * GB
    rank.serving.run_turn()
    assert rank.orders == []
    rank.scheduler.is_fully_idle = lambda: True
    rank.serving.run_turn()
    assert rank.orders == [EvictPrefixes()]
    obey_order(rank.orders.pop(), rank)
    assert (rank.published[-1], rank.pools.counts.tokens, len(rank.scheduler.flushes)) == ((8500, 8490), 8500, 1)


def test_prefixes_in_the_tail_are_evicted_while_memory_is_short(make_rank):
    """Prefixes in the radix cache use slots of the tail (the end of the KV cache, which shall be unmapped). A busy
    server cannot flush its radix cache, so rank 0 orders all ranks to evict these prefixes."""
    rank = make_rank(int(0.5 * GB))
    rank.allocator.free_pages = rank.allocator.free_pages[:8700]
    rank.serving.run_turn()
    obey_order(rank.orders.pop(), rank)
    assert rank.orders == [EvictPrefixes()]
    obey_order(rank.orders.pop(), rank)
    assert (rank.scheduler.evicted, rank.scheduler.flushes) == ([1300], [])


def test_a_pipeline_stage_with_a_running_prefill_is_not_flushed(make_rank):
    """The radix cache must not be flushed while a prefill runs. Up to engine release 0.5.12.post1, the scheduler of a
    pipeline stage reports that it is idle even then."""
    rank = make_rank(2 * GB, is_fully_idle=lambda: True, mbs=[None, SimpleNamespace(reqs=[request(3, 4)])])
    rank.allocator.free_pages = rank.allocator.free_pages[:8700]
    obey_order(Retire(8500), rank)
    obey_order(EvictPrefixes(), rank)
    assert rank.scheduler.flushes == []


def test_with_mixed_chunks_decoding_requests_keep_slots_for_the_rest_of_the_prompt(make_rank):
    """While a prompt is computed in mixed chunks, the slots that its remaining chunks need must not be withdrawn.

    - The rest of the prompt takes 900 slots, and 12 chunks: a chunk of 100 tokens has 80 tokens of the prompt, and one
      token of each of 20 decoding requests.
    - Each decoding request takes 14 slots: one for each of the 12 chunks, one more, and a page of one slot.
    - Two more pages of one slot stay free.

    So 8,818 of the 10,000 free slots may be withdrawn: 10,000 - 900 - 20 x 14 - 2.
    """
    batch = SimpleNamespace(reqs=[request(3, 4)] * 20)
    rank = make_rank(0, chunked_req=request(1000, 5, 100), is_mixed_chunk=True, running_batch=batch)
    assert serving.spare_tokens(rank.scheduler) == 10_000 - 900 - 20 * 14 - 2


def test_sliding_window_layers_keep_room_for_a_window_and_a_prefill():
    pools = SimpleNamespace(top=TokenCounts(900, 900, 90), page=4, tokens_with_window=lambda window: 10 * window)
    runner = SimpleNamespace(model_runner=SimpleNamespace(sliding_window_size=400))
    scheduler = SimpleNamespace(chunked_prefill_size=100, tp_worker=runner, tree_cache=None)
    assert serving.floor_tokens(scheduler, pools) == 10 * (100 + 400 + 12)
    pools.tokens_with_window = lambda window: 0
    assert serving.floor_tokens(scheduler, pools) == 200


def test_slots_stay_withdrawn_if_the_driver_cannot_unmap(make_rank, caplog):
    """If CUDA's driver cannot unmap the memory of withdrawn slots on one rank, this rank still must not use these slots
    again. All ranks must use the same slots, and the other ranks have unmapped the memory of these slots."""
    rank = make_rank(9 * GB)

    def fail(counts):
        rank.pools.counts = counts
        raise RuntimeError("no driver")

    rank.pools.unmap_from = fail
    obey_order(Retire(8500), rank)
    rank.serving.run_turn()
    assert (rank.allocator.size, rank.published[-1], rank.pools.counts.tokens) == (8500, (8500, 8490), 8500)
    assert caplog.text.count("the server goes on: no driver") == 1


def raise_not_implemented():
    raise NotImplementedError


@pytest.mark.parametrize("cache", ["plain", "beside states"])
@pytest.mark.parametrize(("computed", "evictable", "withdrawn"), [(100, 0, 498), (300, 50, 748), (100, 900, 1300)])
def test_slots_that_a_chunked_prompt_needs_are_not_withdrawn(computed, evictable, withdrawn, cache, make_rank):
    """The engine computes the next chunk of a prompt without checking for free slots. So an order to shrink the KV
    cache must not withdraw free slots that the rest of this prompt needs.

    In this test, 1,300 slots are free in the tail (the part of the KV cache to be unmapped), and 100 slots before the
    tail. For example, 100 of the prompt's 1,000 tokens are computed. The rest needs 900 slots, and two more must stay
    free (two pages of one slot). 100 of these 902 slots are free before the tail, so 802 slots of the tail must stay,
    and 498 are withdrawn.

    :param computed: tokens of the prompt that are computed.
    :param evictable: slots of the radix cache that the engine can evict. They count as free.
    """
    rank = make_rank(0, chunked_req=request(1000, 5, computed))
    says = {
        "evictable_size": lambda: evictable,
        "full_evictable_size": lambda: 0,
    }  # methods of the engine's radix caches
    if cache == "beside states":
        says = {"evictable_size": raise_not_implemented, "full_evictable_size": lambda: evictable}
    vars(rank.scheduler.tree_cache).update(says)
    rank.allocator.free_pages = rank.allocator.free_pages[8400:9800]
    obey_order(Retire(8500), rank)
    assert rank.allocator.size == 10_000 - withdrawn


def test_a_second_order_is_obeyed_after_the_first(make_rank):
    """If a second order arrives while a rank still executes the first one, the rank must execute both, one after the
    other. This can happen with data-parallel attention: rank 0 has finished the first order, but requests of another
    rank still use slots to be unmapped."""
    rank = make_rank(9 * GB, leads=False)
    held_slots, rank.allocator.free_pages = rank.allocator.free_pages[7000:], rank.allocator.free_pages[:7000]
    for tokens in (8500, 7500):
        obey_order(Retire(tokens), rank)
    rank.allocator.free(held_slots)
    rank.serving.run_turn()
    rank.serving.run_turn()
    assert (rank.pools.unmapped, rank.published[-1], rank.pools.counts.tokens) == ([8500, 7500], (7500, 7490), 7500)
    assert (rank.allocator.size, "clear" in vars(rank.allocator)) == (7500, False)
    assert rank.allocator.free_pages.tolist() == list(range(1, 7501))


TWO_WAIT = {"waiting_queue": [request(9100, 0), request(5, 9200)]}


@pytest.mark.parametrize(
    ("scheduler", "ordered"),
    [
        ({"chunked_prefill_size": 4800}, [Retire(9600)]),
        ({"chunked_prefill_size": None, "max_req_input_len": 4700}, [Retire(9400)]),
        (TWO_WAIT, [Retire(9215)]),
        (
            {"waiting_queue": [request(9980, 0)]},
            [],
        ),  # 10 tokens are fewer than a piece of memory has, so unmapping them frees nothing
        ({"chunked_prefill_size": 6000}, []),
    ],
    ids=str,
)
def test_the_kv_cache_keeps_room_for_two_prefills_and_rank_0s_longest_request(scheduler, ordered, make_rank, caplog):
    """2 GB are missing, so the KV cache should shrink from 10,000 to 8,000 tokens. But it must keep room for two of the
    largest prefills, and for the longest request on rank 0. Rank 0 orders the larger of these two sizes, or nothing if
    this frees no memory. The log must say once that memory is short."""
    rank = make_rank(0, **scheduler)
    rank.serving.run_turn()
    assert rank.orders == ordered
    assert caplog.text.count("memory is short by 2,000 MB, but the KV cache keeps ") == 1


@pytest.mark.parametrize(
    ("scheduler", "least"),
    [
        ({"running_batch": SimpleNamespace(reqs=[request(9000, 300)])}, 9310),
        (TWO_WAIT, 9215),
        ({"chunked_req": request(9900, 5, 9000)}, 9915),
        ({"mbs": [None, SimpleNamespace(reqs=[request(9500, 1)])]}, 9511),
        ({"grammar_manager": SimpleNamespace(grammar_queue=[request(9600, 2)])}, 9612),
    ],
    ids=str,
)
def test_each_rank_keeps_room_for_its_own_longest_request_until_it_has_ended(scheduler, least, make_rank):
    first, second = make_rank(int(0.5 * GB)), make_rank(0, leads=False, **scheduler)
    first.serving.run_turn()
    obey_order(first.orders[0], first, second)
    assert (first.pools.counts.tokens, second.pools.counts.tokens, second.published[-1]) == (8500, least, (least, 8490))
    second.serving.run_turn()
    assert not second.board.raised(serving.SHORT_REPORT)  # the order is not finished, because a request holds its slots
    vars(second.scheduler).update(dict.fromkeys(scheduler))
    second.serving.run_turn()
    assert second.pools.counts.tokens == 8500
    second.serving.run_turn()
    assert second.board.raised(serving.SHORT_REPORT)


def session_of(name):
    return SimpleNamespace(session_id=name, streaming=True)


def in_session(name, *lengths):
    rank = request(*lengths)
    rank.session = session_of(name)
    return rank


SLOTS = {"a": SimpleNamespace(kv_allocated_len=3000), "b": SimpleNamespace(kv_allocated_len=4000)}
RECORDS = {"a": SimpleNamespace(kv_allocated_len=3000), "b": SimpleNamespace(kv_allocated_len=4000)}


@pytest.mark.parametrize(
    "prefixes",
    [
        {"slots": SLOTS},  # up to engine release 0.5.13
        {"session": SimpleNamespace(slots={name: SimpleNamespace(kv=slot) for name, slot in SLOTS.items()})},
        {"session": SimpleNamespace(slots={**SLOTS, "empty": SimpleNamespace(kv=None)})},
        {"session_records": lambda: RECORDS},  # engine release 0.5.23
    ],
    ids=["wrapper", "0.5.17", "unified", "records"],
)
@pytest.mark.parametrize(
    ("waiting", "least"),
    [
        ([], 7200),  # 7,000 of the sessions and two chunks
        ([request(900, 100)], 8010),
        ([request(900, 100), in_session("a", 3500, 500)], 9010),  # session a grows from 3,000 to 4,000 tokens
        ([in_session("c", 200, 100)], 7310),
        ([request(50, 50)], 7200),
    ],
    ids=["none waits", "one waits", "one of a session waits", "one of a new session waits", "a short one waits"],
)
def test_slots_of_streaming_sessions_are_never_freed(waiting, least, prefixes, make_rank):
    """An order must leave enough slots for all streaming sessions and, in addition, for the longest waiting request.
    The engine never frees a session's slots for another request. If the other slots were too few for a waiting request,
    the engine would abort this request."""
    rank = make_rank(0, waiting_queue=waiting)
    vars(rank.scheduler.tree_cache).update(prefixes)
    rank.scheduler.chunked_prefill_size = 100
    rank.pools.backing_bytes = lambda counts: (
        counts.tokens * 100_000
    )  # a token takes 100 kB, so the missing 2 GB are more than the KV cache
    rank.serving.run_turn()
    (order,) = rank.orders
    assert order.tokens == least


def test_prefixes_of_another_rank_are_flushed_when_it_is_idle(make_rank):
    """An idle rank must report to rank 0 if prefixes in its radix cache still use slots that shall be unmapped. Rank 0
    then orders all ranks to evict prefixes. Without the report, rank 0 would not know: with data-parallel attention,
    the same slots of rank 0 may already be unmapped."""
    first, second = make_rank(2 * GB), make_rank(2 * GB, leads=False)
    second.allocator.free_pages = second.allocator.free_pages[:8000]
    obey_order(Retire(8500), first, second)
    assert (first.pools.counts.tokens, second.pools.counts.tokens, len(second.board)) == (8500, 10_000, 0)
    second.scheduler.is_fully_idle = lambda: True
    second.serving.run_turn()
    first.serving.run_turn()
    assert first.orders == [EvictPrefixes()]
    first.scheduler.is_fully_idle = lambda: True
    obey_order(EvictPrefixes(), first, second)
    assert (second.pools.counts.tokens, first.scheduler.flushes, first.orders) == (8500, [], [EvictPrefixes()])


@pytest.mark.parametrize(("waiting", "goal"), [([], 9000), ([request(9900, 100)], 10_000)], ids=str)
def test_rank_0_orders_once_if_another_rank_is_short(waiting, goal, make_rank):
    """If another rank reports that its memory is short, rank 0 sends one order to all ranks. The report has no number
    of bytes, so the order is to free half of the margin: here 1 GB, or 1,000 of 10,000 tokens. If no tokens can be
    freed, the order contains the current number of tokens."""
    first, second = make_rank(9 * GB, waiting_queue=waiting), make_rank(0, leads=False)
    second.serving.run_turn()
    assert (second.orders, len(second.board)) == ([], 1)
    first.serving.run_turn()
    assert first.orders == [Retire(goal)]
    second.free, first.scheduler.waiting_queue = 9 * GB, []
    obey_order(first.orders[0], second, first)
    first.serving.run_turn()
    assert (len(first.orders), first.pools.counts.tokens) == (1, goal)


def test_a_failing_gpu_driver_ends_only_the_watch_of_free_memory(make_rank, caplog):
    """If the GPU driver fails, the rank stops reading its free memory. It still executes rank 0's orders, because all
    ranks must have the same KV cache size."""
    rank = make_rank(9 * GB)
    del rank.free
    rank.serving.run_turn()
    obey_order(Retire(8500), rank)
    assert caplog.text.count("free memory is not watched any more") == 1
    assert rank.pools.counts.tokens == 8500


def test_metrics_have_the_labels_of_their_rank_and_their_own_labels(metric):
    gauges, silent = (serving.Metrics({"enable_metrics": on}, gpu) for on, gpu in ((True, 3), (False, 0)))
    for each in (gauges, silent):
        each.show(serving.TOKENS, 5)
        each.show(serving.STATE, 1, state="rule", reason="a reason")
    assert (metric(serving.TOKENS, gpu="3"), metric(serving.TOKENS, gpu="0")) == (5, None)
    assert metric(serving.STATE, gpu="3", state="rule", reason="a reason") == 1


# --- Giving back the tail ---------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from(["alloc", "free", "turn", "flush"]), st.integers(1, 9)), max_size=40)


@given(STEPS, st.sampled_from([1, 4]), st.booleans(), st.integers(10, 30), st.integers(0, 10**6))
@settings(max_examples=300)
def test_in_every_turn_free_and_held_slots_add_up_to_the_engines_number(steps, page, lifo, wanted, seed):
    draw = random.Random(seed)
    allocator, published = Allocator(40 * page, page, lifo), [40 * page]
    held_slots = [allocator.alloc(draw.randrange(1, 8)) for _ in range(draw.randrange(6))]
    now, left = TokenCounts(40 * page), TokenCounts(wanted * page)
    retirement = Retirement(allocator, now, left, lambda counts: published.append(counts.tokens))
    for action, number in [*steps, ("turn", 1)]:
        if action == "alloc" and len(allocator.free_pages) >= number:
            held_slots.append(allocator.alloc(number))
        elif action == "free" and held_slots:
            allocator.free(held_slots.pop(draw.randrange(len(held_slots))))
        elif action == "flush":
            held_slots.clear()
            allocator.clear()
        elif action == "turn":
            retirement.advance()
            assert not (allocator.free_pages > wanted).any()
        in_use = torch.cat([*held_slots, allocator.free_pages]).tolist()
        assert len(set(in_use)) == len(in_use)  # no slot appears twice
        assert len(in_use) * page == published[-1] == allocator.size
        assert max(in_use, default=0) * page <= retirement.mapped_counts().tokens  # each slot has memory
        assert set(range(1, wanted + 1)) <= set(in_use)  # no slot is lost
    assert retirement.is_done == (published[-1] == wanted * page)


def test_after_the_tail_is_freed_the_allocator_equals_a_new_one_of_that_size():
    allocator = Allocator(40)
    held_slots = allocator.alloc(40)
    retirement = Retirement(allocator, TokenCounts(40), TokenCounts(25), lambda counts: None)

    def turn():
        return (
            retirement.advance(),
            retirement.usable_counts().tokens,
            retirement.mapped_counts().tokens,
            retirement.is_done,
        )

    assert turn() == (False, 40, 40, False)
    allocator.free(held_slots[10:38])
    assert turn() == (True, 27, 40, False)
    allocator.free(held_slots[39:])
    assert turn() == (True, 26, 39, False)
    allocator.free(held_slots[38:39])
    assert turn() == (True, 25, 25, True)
    assert (allocator.size, "clear" in vars(allocator)) == (25, False)
    allocator.free(held_slots[:10])
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 26))


@pytest.mark.parametrize("flushed", [True, False])
def test_both_parts_of_a_sliding_window_cache_are_withdrawn(flushed):
    full, window = Allocator(100), Allocator(50)
    held_slots = full.alloc(90), window.alloc(45)
    allocator = SimpleNamespace(full_attn_allocator=full, swa_attn_allocator=window, page_size=1)
    allocator.clear = lambda: (full.clear(), window.clear())
    published: list[TokenCounts] = []
    retirement = Retirement(allocator, TokenCounts(100, 100, 50), TokenCounts(60, 60, 30), published.append)
    retirement.advance()
    assert published[-1] == TokenCounts(90, 90, 45)
    if flushed:
        allocator.clear()
    else:
        full.free(held_slots[0])
        window.free(held_slots[1])
    retirement.advance()
    assert (published[-1], retirement.mapped_counts(), retirement.is_done) == (TokenCounts(60, 60, 30),) * 2 + (True,)
    assert (allocator._size_full, allocator._size_swa) == (60, 30)
    assert (len(full.free_pages), len(window.free_pages)) == (60, 30)


@pytest.mark.parametrize("page", [1, 64])
def test_a_resized_allocator_has_each_slot_once(page):
    allocator = Allocator(640, page)
    allocator.alloc(3)
    for tokens in (1280, 128):
        resize_allocator(allocator, TokenCounts(tokens))
        assert allocator.free_pages.tolist() == list(range(1, tokens // page + 1))
        assert getattr(allocator, "num_pages", tokens) == tokens // page


def test_a_request_that_would_not_fit_at_the_goal_is_refused():
    """The *goal* is the smaller size to which the KV cache shrinks. While it shrinks, the engine must already refuse
    requests that are too long for the goal. Such a request would wait forever, and all later requests would wait behind
    it."""
    numbers = {"max_total_num_tokens": 900, "max_req_len": 899, "chunked_prefill_size": 64}
    scheduler = SimpleNamespace(**numbers, model_config=SimpleNamespace(context_len=5000))
    set_token_count(scheduler, TokenCounts(800), 300)
    assert (scheduler.max_total_num_tokens, scheduler.max_req_len) == (800, 299)
    set_token_count(scheduler, TokenCounts(700))
    assert (scheduler.max_total_num_tokens, scheduler.max_req_len) == (700, 699)


def test_an_allocator_that_already_has_the_size_is_not_cleared():
    """If the allocator already has the new size, it must keep its allocated slots. Requests of an abandoned rehearsal
    may still use them."""
    allocator = Allocator(40)
    held_slots = allocator.alloc(7)
    resize_allocator(allocator, TokenCounts(40))
    assert not set(held_slots.tolist()) & set(allocator.free_pages.tolist())
    resize_allocator(allocator, TokenCounts(50))
    assert allocator.free_pages.tolist() == list(range(1, 51))


# --- How many requests are admitted -----------------------------------------------------------------------------------

PLAIN = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
PLAIN |= {"min_p": 0.0, "logit_bias": None}


class Request:
    """Stand-in for the engine's request. Two requests are equal only if they are the same object. The same holds in the
    engine."""

    def __init__(self, return_logprob=False, **sampling):
        self.sampling_params, self.return_logprob = SimpleNamespace(**{**PLAIN, **sampling}), return_logprob
        self.custom_logit_processor = self.beam_group = None

    def finished(self):
        return False


def batch_of(*requests, **sampling):
    """Return a running batch of these requests.

    :param sampling: attributes of the batch's ``SamplingBatchInfo`` that differ from those of plain requests.
    """
    info: dict[str, object] = {"need_min_p_sampling": False, "logit_bias": None, "has_custom_logit_processor": False}
    info |= {"penalizer_orchestrator": SimpleNamespace(is_required=False)}
    return SimpleNamespace(
        reqs=list(requests), return_logprob=False, sampling_info=SimpleNamespace(**{**info, **sampling})
    )


class Scheduler:
    """Stand-in for the engine's scheduler, with room for 1,000 requests."""

    def __init__(self):
        self.waiting_queue, self.running_batch, self.chunked_req = [], SimpleNamespace(reqs=[]), None
        self.beam_coordinator = SimpleNamespace(_num_live_groups=0)

    def _add_request_to_queue(self, req, is_retracted=False):
        self.waiting_queue.append(req)
        self.retracted = is_retracted

    def get_num_allocatable_reqs(self, running_bs, beam_width=None):
        return (beam_width or 1000) - running_bs

    def get_new_batch_prefill(self, running_batch=None):
        return running_batch


@pytest.fixture
def scheduler():
    """Scheduler that runs at most 900 requests at once, and at most 256 requests while one of them is penalized. A
    *penalized* request has penalties, min_p, a logit bias or log-probabilities."""
    rank = Scheduler()
    serving.limit_requests(rank, requests=900, penalized=256)
    return rank


def count_admitted(scheduler, running=100):
    """Return the number of requests that the scheduler admits in a new turn while ``running`` requests run."""
    scheduler.get_new_batch_prefill()
    return scheduler.get_num_allocatable_reqs(running)


def test_penalized_requests_are_recognized_by_their_parameters():
    for plain in ({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}):
        assert not serving.is_penalized(Request(**plain))
    penalties = {"frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.05}
    others = {"min_new_tokens": 1, "min_p": 0.05, "logit_bias": {"7": 1.0}, "return_logprob": True}
    for name, value in {**penalties, **others}.items():
        assert serving.is_penalized(Request(**{name: value})), name
    assert serving.is_penalized(Request(logit_bias={})), "the engine makes a tensor for it, too"


def test_fewer_requests_are_admitted_while_a_penalized_one_waits(scheduler):
    assert (count_admitted(scheduler), count_admitted(scheduler, running=950)) == (800, -50)
    assert scheduler.get_num_allocatable_reqs(3, beam_width=5) == 2
    scheduler._add_request_to_queue(Request(min_p=0.1), is_retracted=True)
    assert scheduler.retracted
    assert scheduler.get_num_allocatable_reqs(100) == 156, "in the turn in which it arrives"
    assert (count_admitted(scheduler), count_admitted(scheduler, running=300)) == (156, -44)
    scheduler._add_request_to_queue(Request(presence_penalty=1.0))
    del scheduler.waiting_queue[0]
    assert count_admitted(scheduler) == 156
    scheduler.waiting_queue = [Request(), *scheduler.waiting_queue]
    assert count_admitted(scheduler) == 156


def test_a_penalized_request_that_left_the_queue_does_not_count_even_if_a_session_keeps_it(scheduler):
    """A penalized request that has left the queue, such as an aborted one, must no longer lower the request limit. This
    must hold even while a session still refers to the Python object. The ranks delete this object at different times,
    but all ranks must admit the same requests."""
    session = Request(min_p=0.1)
    scheduler._add_request_to_queue(session)
    scheduler._add_request_to_queue(Request())
    assert count_admitted(scheduler) == 156
    del scheduler.waiting_queue[0]
    assert count_admitted(scheduler) == 800


@pytest.mark.parametrize(
    "sampling",
    [
        {"penalizer_orchestrator": SimpleNamespace(is_required=True)},
        {"need_min_p_sampling": True},
        {"logit_bias": torch.zeros(1, 3)},
        {"has_custom_logit_processor": True},
        {"return_logprob": True},
    ],
    ids=str,
)
def test_fewer_requests_are_admitted_to_a_penalized_batch(sampling, scheduler):
    """At most 256 requests may run, instead of 900, as long as the batch has the tensors of a penalized request. These
    tensors have a row for each request. The engine keeps them after the penalized request has ended, and adds rows for
    new requests."""
    scheduler.running_batch = batch_of(Request(), **sampling)
    vars(scheduler.running_batch).update({name: True for name in sampling if name == "return_logprob"})
    assert count_admitted(scheduler) == 156
    scheduler.running_batch.reqs = []
    assert count_admitted(scheduler) == 800, "it is replaced by the batch that is admitted"
    scheduler.running_batch = batch_of(Request())
    assert count_admitted(scheduler) == 800


def test_the_limit_follows_the_batch_that_the_requests_join(scheduler):
    """A pipeline has several batches. The limit depends on the batch that the new requests join. Engine releases after
    0.5.13 pass this batch to ``get_new_batch_prefill`` as an argument."""
    scheduler.running_batch = batch_of(Request(), need_min_p_sampling=True)
    second = batch_of(Request())
    assert scheduler.get_new_batch_prefill(second) is second
    assert scheduler.get_num_allocatable_reqs(100) == 800
    scheduler.get_new_batch_prefill(running_batch=scheduler.running_batch)
    assert scheduler.get_num_allocatable_reqs(100) == 156


def test_a_penalized_prompt_of_several_chunks_counts_until_it_joins_the_batch(scheduler):
    scheduler.chunked_req = Request(min_p=0.1)
    assert count_admitted(scheduler) == 156


def test_the_limit_is_derived_once_a_turn_and_the_queue_is_searched_only_for_penalized_requests(scheduler):
    class Queue(list):
        looked = 0

        def __contains__(self, request):
            Queue.looked += 1
            return super().__contains__(request)

        __iter__ = None

    scheduler.waiting_queue = Queue([Request()])
    assert (count_admitted(scheduler), Queue.looked) == (800, 0)
    scheduler._add_request_to_queue(Request(min_p=0.1))
    assert ([count_admitted(scheduler), *map(scheduler.get_num_allocatable_reqs, (100, 100))], Queue.looked) == (
        [156] * 3,
        1,
    )


def beam(width):
    rank: Any = Request()
    rank.beam_group = SimpleNamespace(beam_width=width)
    return rank


def test_the_beams_of_a_request_are_rows_of_the_batch_and_count_as_penalized(scheduler):
    assert count_admitted(scheduler) == 800
    scheduler.beam_coordinator._num_live_groups = 1
    scheduler._add_request_to_queue(Request())
    scheduler._add_request_to_queue(beam(50))
    assert serving.is_penalized(beam(50))
    assert count_admitted(scheduler, running=0) == 256 // 50, "however many of those that join have beams"
    scheduler.running_batch = batch_of(Request(), beam(50), beam(6))
    assert count_admitted(scheduler, running=3) == (256 - 3 - 49 - 5) // 50
    scheduler.waiting_queue = [Request()]
    assert count_admitted(scheduler, running=3) == 256 - 3 - 49 - 5
    scheduler.chunked_req = beam(100)
    assert count_admitted(scheduler, running=3) == 1


def test_a_request_with_more_beams_than_may_run_runs_alone(scheduler):
    scheduler.beam_coordinator._num_live_groups = 1
    scheduler._add_request_to_queue(beam(400))
    scheduler.running_batch = batch_of(Request())
    assert count_admitted(scheduler, running=1) == 0
    scheduler.running_batch = batch_of()
    assert count_admitted(scheduler, running=0) == 1


def test_each_beam_of_a_request_keeps_its_own_new_tokens(make_rank):
    rank = make_rank(0, waiting_queue=[request(1000, 250)])
    rank.scheduler.waiting_queue[0].beam_group = SimpleNamespace(beam_width=30)
    rank.serving.run_turn()
    assert rank.orders == [Retire(1000 + 30 * 250 + EXTRA_TOKENS + 1)]
