"""A server with a sized KV cache while it serves: its free memory, what it gives back, how many requests it admits."""

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


def test_memory_is_read_once_a_second():
    clock = iter((0.0, 0.0, 0.5, 0.9, 1.0, 1.9, 2.1))
    memory = FreeMemory(lambda: Memory(free=9 * GB), 2 * GB, lambda: next(clock))
    assert [memory.is_due() for _ in range(6)] == [True, False, False, True, False, True]


@pytest.mark.parametrize(("free", "shortage"), [(9, 0), (1.1, 0), (1, 0), (0.9, 1.1), (0, 2)])
def test_short_is_less_than_half_the_margin_and_what_lacks_is_all_of_it(free, shortage):
    left = [9 * GB, int(free * GB)]
    memory = FreeMemory(lambda: Memory(free=left.pop(0)), 2 * GB)
    assert memory.measure_shortage() == pytest.approx(shortage * GB)
    assert memory.lowest == int(free * GB)


class Pools:
    """A token takes 1 MB, and memory comes in pieces for 100 of them."""

    page = 1

    def __init__(self, tokens):
        self.counts = self.top = TokenCounts(tokens)
        self.unmapped = []

    def counts_for(self, tokens):
        return TokenCounts(tokens)

    def bytes_behind(self, counts):
        return -(-counts.tokens // 100) * 100_000_000

    def tokens_within(self, budget):
        return int(budget // 1_000_000)

    def unmap_from(self, counts):
        given_back, self.counts = self.bytes_behind(self.counts) - self.bytes_behind(counts), counts
        self.unmapped.append(counts.tokens)
        return given_back


class Allocator:
    """As the engine's, page by page: free ones are taken from the front, and come back where ``lifo`` says."""

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
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return taken

    def free(self, pages):
        self.free_pages = torch.cat((pages, self.free_pages) if self.lifo else (self.free_pages, pages))
        assert self.available_size() <= self.size  # as the engine's of sliding windows


def request(prompt, new, computed=0):
    sampling = SimpleNamespace(max_new_tokens=new)
    return SimpleNamespace(
        origin_input_ids=range(prompt), output_ids=[], kv_committed_len=computed, sampling_params=sampling
    )


BESIDE = 9
"""Tokens that a request takes beside its own; it is admitted where more than that is free."""


class Flags(set):
    raise_flag = set.add
    is_raised = set.__contains__

    def said(self, what):
        return [flag for flag in self if flag.startswith(what)]


@pytest.fixture
def served(monkeypatch):
    """Makes ranks of one server that serve with 10,000 tokens, each with what is ``free`` on its GPU."""
    board = Flags()

    def tell(scheduler, counts, longest_request):
        scheduler.told.append((counts.tokens, longest_request))

    def make(free, *, leads=True, **scheduler):
        allocator, clock = Allocator(10_000), itertools.count()
        has = {"chunked_prefill_size": 100, "max_req_input_len": 5000, "is_fully_idle": lambda: False}
        has |= {"token_to_kv_pool_allocator": allocator, "told": [], "flushes": [], "evicted": []}
        engine = SimpleNamespace(**{**has, **scheduler})
        engine.flush_cache = lambda: engine.flushes.append(allocator.clear())
        evict = lambda params: engine.evicted.append(params.num_tokens)  # noqa: E731
        engine.tree_cache = SimpleNamespace(evict=evict, evictable_size=lambda: 0)
        made = SimpleNamespace(free=free, board=board, pools=Pools(10_000), given=[], told=engine.told)
        made.scheduler, made.allocator = engine, allocator
        memory = FreeMemory(lambda: Memory(free=made.free), 2 * GB, lambda: next(clock))
        shown, orders = SimpleNamespace(show=lambda name, value: None), SimpleNamespace(send=made.given.append)
        made.one = Serving(engine, made.pools, memory, orders, board, shown, leads=leads, beside=BESIDE)
        return made

    monkeypatch.setattr(serving.token_count, "set_token_count", tell)
    return make


def have_obeyed(order, *ranks):
    for each in ranks:
        each.one.obey(order)
        each.one.look()


def test_the_tail_goes_until_the_margin_is_free_again(served, caplog):
    made = served(9 * GB)
    made.one.look()
    assert made.given == []
    made.free = int(0.5 * GB)
    made.one.look()
    assert made.given == [Retire(10_000 - 1500)]
    made.one.look()
    assert len(made.given) == 1  # one at a time
    made.one.obey(made.given[0])
    assert made.told == [(10_000, 8490)]  # no longer request is taken in
    made.free = 2 * GB
    made.one.look()
    assert (made.told[1:], made.pools.unmapped, made.pools.counts.tokens) == ([(8500, 8490)], [8500], 8500)
    assert "8,500 KV tokens instead of 10,000; 1,500 MB given back" in caplog.text
    assert made.allocator.size == 8500
    made.one.look()
    assert len(made.given) == 1


def test_slots_that_are_held_come_back_later_and_a_flush_brings_all(served):
    made = served(int(0.5 * GB))
    held, made.allocator.free_pages = made.allocator.free_pages[8000:], made.allocator.free_pages[:8000]
    made.one.look()
    have_obeyed(made.given.pop(), made)
    assert made.pools.unmapped == []  # nothing of the tail was free
    made.allocator.free(held[1000:])
    made.one.look()
    assert (made.told[-1], made.pools.unmapped[-1]) == ((9000, 8490), 9000)
    made.given.clear()
    made.free = 2 * GB
    made.one.look()
    assert made.given == []
    made.scheduler.is_fully_idle = lambda: True
    made.one.look()
    assert made.given == [EvictPrefixes()]
    have_obeyed(made.given.pop(), made)
    assert (made.told[-1], made.pools.counts.tokens, len(made.scheduler.flushes)) == ((8500, 8490), 8500, 1)


def test_while_memory_is_short_prefixes_let_go_of_as_much_as_is_still_to_come(served):
    """On a server that always has something to do, nothing else would bring them back."""
    made = served(int(0.5 * GB))
    made.allocator.free_pages = made.allocator.free_pages[:8700]
    made.one.look()
    have_obeyed(made.given.pop(), made)
    assert made.given == [EvictPrefixes()]
    have_obeyed(made.given.pop(), made)
    assert (made.scheduler.evicted, made.scheduler.flushes) == ([1300], [])


def test_a_stage_of_a_pipeline_with_a_prefill_under_way_is_not_flushed(served):
    """Up to 0.5.12.post1 its scheduler says that it is idle."""
    made = served(2 * GB, is_fully_idle=lambda: True, mbs=[None, SimpleNamespace(reqs=[request(3, 4)])])
    made.allocator.free_pages = made.allocator.free_pages[:8700]
    have_obeyed(Retire(8500), made)
    have_obeyed(EvictPrefixes(), made)
    assert made.scheduler.flushes == []


def test_in_mixed_chunks_each_request_that_decodes_keeps_its_tokens(served):
    """900 tokens in chunks of 100, of which 20 are of requests that decode: 12 chunks, one more, and a page each."""
    batch = SimpleNamespace(reqs=[request(3, 4)] * 20)
    made = served(0, chunked_req=request(1000, 5, 100), is_mixed_chunk=True, running_batch=batch)
    assert serving.spare_tokens(made.scheduler) == 10_000 - 900 - 20 * 14 - 2


def test_with_windows_a_cache_keeps_one_and_a_prefill_behind_it():
    pools = SimpleNamespace(top=TokenCounts(900, 900, 90), page=4, tokens_with_window=lambda window: 10 * window)
    runner = SimpleNamespace(model_runner=SimpleNamespace(sliding_window_size=400))
    scheduler = SimpleNamespace(chunked_prefill_size=100, tp_worker=runner, tree_cache=None)
    assert serving.least_tokens(scheduler, pools) == 10 * (100 + 400 + 12)
    pools.tokens_with_window = lambda window: 0
    assert serving.least_tokens(scheduler, pools) == 200


def test_a_driver_that_gives_nothing_back_leaves_slots_taken_out(served, caplog):
    """As on the other ranks, whose driver does."""
    made = served(9 * GB)

    def fail(counts):
        made.pools.counts = counts
        raise RuntimeError("no driver")

    made.pools.unmap_from = fail
    have_obeyed(Retire(8500), made)
    made.one.look()
    assert (made.allocator.size, made.told[-1], made.pools.counts.tokens) == (8500, (8500, 8490), 8500)
    assert caplog.text.count("memory is not given back: no driver") == 1


def not_said():
    raise NotImplementedError


@pytest.mark.parametrize("cache", ["plain", "beside states"])
@pytest.mark.parametrize(("computed", "evictable", "taken"), [(100, 0, 498), (300, 50, 748), (100, 900, 1300)])
def test_what_a_prompt_needs_whose_first_chunks_are_computed_is_not_taken_out(
    computed, evictable, taken, cache, served
):
    """The engine computes the next chunk without asking whether there is room. The prompt has 1,000 tokens; 1,300 of
    the tail are free, and 100 below it."""
    made = served(0, chunked_req=request(1000, 5, computed))
    says = {"evictable_size": lambda: evictable, "full_evictable_size": lambda: 0}  # as the engine's caches
    if cache == "beside states":
        says = {"evictable_size": not_said, "full_evictable_size": lambda: evictable}
    vars(made.scheduler.tree_cache).update(says)
    made.allocator.free_pages = made.allocator.free_pages[8400:9800]
    have_obeyed(Retire(8500), made)
    assert made.allocator.size == 10_000 - taken


def test_what_is_ordered_meanwhile_comes_after_what_is_under_way(served):
    """With data-parallel attention the first rank is done, and orders more, while another's slots are held."""
    made = served(9 * GB, leads=False)
    held, made.allocator.free_pages = made.allocator.free_pages[7000:], made.allocator.free_pages[:7000]
    for tokens in (8500, 7500):
        have_obeyed(Retire(tokens), made)
    made.allocator.free(held)
    made.one.look()
    made.one.look()
    assert (made.pools.unmapped, made.told[-1], made.pools.counts.tokens) == ([8500, 7500], (7500, 7490), 7500)
    assert (made.allocator.size, "clear" in vars(made.allocator)) == (7500, False)
    assert made.allocator.free_pages.tolist() == list(range(1, 7501))


TWO_WAIT = {"waiting_queue": [request(9100, 0), request(5, 9200)]}


@pytest.mark.parametrize(
    ("scheduler", "ordered"),
    [
        ({"chunked_prefill_size": 4800}, [Retire(9600)]),
        ({"chunked_prefill_size": None, "max_req_input_len": 4700}, [Retire(9400)]),
        (TWO_WAIT, [Retire(9215)]),
        ({"waiting_queue": [request(9980, 0)]}, []),  # less would go than a piece of memory has
        ({"chunked_prefill_size": 6000}, []),
    ],
    ids=str,
)
def test_two_prefills_and_the_first_ranks_longest_request_keep_their_room(scheduler, ordered, served):
    made = served(0, **scheduler)
    made.one.look()
    assert made.given == ordered


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
def test_each_rank_keeps_room_for_its_own_longest_request_until_it_has_ended(scheduler, least, served):
    first, other = served(int(0.5 * GB)), served(0, leads=False, **scheduler)
    first.one.look()
    have_obeyed(first.given[0], first, other)
    assert (first.pools.counts.tokens, other.pools.counts.tokens, other.told[-1]) == (8500, least, (least, 8490))
    other.one.look()
    assert not other.board.said(serving.SHORT_REPORT)  # what was ordered is still to come
    vars(other.scheduler).update(dict.fromkeys(scheduler))
    other.one.look()
    assert other.pools.counts.tokens == 8500
    other.one.look()
    assert other.board.said(serving.SHORT_REPORT)


def session_of(name):
    return SimpleNamespace(session_id=name, streaming=True)


def in_session(name, *lengths):
    made = request(*lengths)
    made.session = session_of(name)
    return made


SLOTS = {"a": SimpleNamespace(kv_allocated_len=3000), "b": SimpleNamespace(kv_allocated_len=4000)}
RECORDS = {"a": SimpleNamespace(kv_allocated_len=3000), "b": SimpleNamespace(kv_allocated_len=4000)}


@pytest.mark.parametrize(
    "prefixes",
    [
        {"slots": SLOTS},  # up to 0.5.13
        {"session": SimpleNamespace(slots={name: SimpleNamespace(kv=slot) for name, slot in SLOTS.items()})},
        {"session": SimpleNamespace(slots={**SLOTS, "empty": SimpleNamespace(kv=None)})},
        {"session_records": lambda: RECORDS},  # 0.5.23
    ],
    ids=["wrapper", "0.5.17", "unified", "records"],
)
@pytest.mark.parametrize(
    ("waiting", "least"),
    [
        ([], 7200),  # two chunks
        ([request(900, 100)], 8010),
        ([request(900, 100), in_session("a", 3500, 500)], 9010),  # it holds 4,000 afterwards
        ([in_session("c", 200, 100)], 7310),
        ([request(50, 50)], 7200),
    ],
    ids=["none waits", "one waits", "one of a session waits", "one of a new session waits", "a short one waits"],
)
def test_what_streaming_sessions_hold_is_never_given_back(waiting, least, prefixes, served):
    """The engine frees it for no request, and a request that finds nothing else to retract is aborted."""
    made = served(0, waiting_queue=waiting)
    vars(made.scheduler.tree_cache).update(prefixes)
    made.scheduler.chunked_prefill_size = 100
    made.pools.bytes_behind = lambda counts: counts.tokens * 100_000  # 2 GB are more than all
    made.one.look()
    (order,) = made.given
    assert order.tokens == least


def test_what_prefixes_hold_on_another_rank_comes_back_when_nothing_runs(served):
    """With data-parallel attention the first rank may have given all back, and knows nothing of the other's cache."""
    first, other = served(2 * GB), served(2 * GB, leads=False)
    other.allocator.free_pages = other.allocator.free_pages[:8000]
    have_obeyed(Retire(8500), first, other)
    assert (first.pools.counts.tokens, other.pools.counts.tokens, len(other.board)) == (8500, 10_000, 0)
    other.scheduler.is_fully_idle = lambda: True
    other.one.look()
    first.one.look()
    assert first.given == [EvictPrefixes()]
    first.scheduler.is_fully_idle = lambda: True
    have_obeyed(EvictPrefixes(), first, other)
    assert (other.pools.counts.tokens, first.scheduler.flushes, first.given) == (8500, [], [EvictPrefixes()])


@pytest.mark.parametrize(("waiting", "goal"), [([], 9000), ([request(9900, 100)], 10_000)], ids=str)
def test_the_first_rank_orders_once_what_another_one_lacks(waiting, goal, served):
    """Half of the margin, as it does not know how much. Where nothing can go, the same goal: what was told is done."""
    first, other = served(9 * GB, waiting_queue=waiting), served(0, leads=False)
    other.one.look()
    assert (other.given, len(other.board)) == ([], 1)
    first.one.look()
    assert first.given == [Retire(goal)]
    other.free, first.scheduler.waiting_queue = 9 * GB, []
    have_obeyed(first.given[0], other, first)
    first.one.look()
    assert (len(first.given), first.pools.counts.tokens) == (1, goal)


def test_a_driver_that_does_not_answer_ends_the_watch_and_not_the_server(served, caplog):
    """Its slots are withdrawn as on the other ranks."""
    made = served(9 * GB)
    del made.free
    made.one.look()
    have_obeyed(Retire(8500), made)
    assert caplog.text.count("free memory is not watched any more") == 1
    assert made.pools.counts.tokens == 8500


def test_metrics_have_their_ranks_labels_and_their_own(metric):
    shown, silent = (serving.Metrics({"enable_metrics": on}, gpu) for on, gpu in ((True, 3), (False, 0)))
    for each in (shown, silent):
        each.show(serving.TOKENS, 5)
        each.show(serving.STATE, 1, state="rule", reason="a reason")
    assert (metric(serving.TOKENS, gpu="3"), metric(serving.TOKENS, gpu="0")) == (5, None)
    assert metric(serving.STATE, gpu="3", state="rule", reason="a reason") == 1


# --- Giving back the tail ---------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from(["alloc", "free", "turn", "flush"]), st.integers(1, 9)), max_size=40)


@given(STEPS, st.sampled_from([1, 4]), st.booleans(), st.integers(10, 30), st.integers(0, 10**6))
@settings(max_examples=300)
def test_in_every_turn_free_and_held_slots_add_up_to_what_the_engine_believes(steps, page, lifo, wanted, seed):
    draw = random.Random(seed)
    allocator, told = Allocator(40 * page, page, lifo), [40 * page]
    held = [allocator.alloc(draw.randrange(1, 8)) for _ in range(draw.randrange(6))]
    now, left = TokenCounts(40 * page), TokenCounts(wanted * page)
    retirement = Retirement(allocator, now, left, lambda counts: told.append(counts.tokens))
    for what, number in [*steps, ("turn", 1)]:
        if what == "alloc" and len(allocator.free_pages) >= number:
            held.append(allocator.alloc(number))
        elif what == "free" and held:
            allocator.free(held.pop(draw.randrange(len(held))))
        elif what == "flush":
            held.clear()
            allocator.clear()
        elif what == "turn":
            retirement.advance()
            assert not (allocator.free_pages > wanted).any()
        in_use = torch.cat([*held, allocator.free_pages]).tolist()
        assert len(set(in_use)) == len(in_use)  # none twice
        assert len(in_use) * page == told[-1] == allocator.size
        assert max(in_use, default=0) * page <= retirement.mapped_counts().tokens  # memory is behind each
        assert set(range(1, wanted + 1)) <= set(in_use)  # none lost
    assert retirement.is_done == (told[-1] == wanted * page)


def test_when_nobody_holds_a_slot_of_the_tail_the_allocator_is_as_one_of_that_size():
    allocator = Allocator(40)
    held = allocator.alloc(40)
    retirement = Retirement(allocator, TokenCounts(40), TokenCounts(25), lambda counts: None)

    def turn():
        return (
            retirement.advance(),
            retirement.usable_counts().tokens,
            retirement.mapped_counts().tokens,
            retirement.is_done,
        )

    assert turn() == (False, 40, 40, False)
    allocator.free(held[10:38])
    assert turn() == (True, 27, 40, False)
    allocator.free(held[39:])
    assert turn() == (True, 26, 39, False)
    allocator.free(held[38:39])
    assert turn() == (True, 25, 25, True)
    assert (allocator.size, "clear" in vars(allocator)) == (25, False)
    allocator.free(held[:10])
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 26))


@pytest.mark.parametrize("flushed", [True, False])
def test_both_kinds_of_a_sliding_window_cache_come_back(flushed):
    full, window = Allocator(100), Allocator(50)
    held = full.alloc(90), window.alloc(45)
    allocator = SimpleNamespace(full_attn_allocator=full, swa_attn_allocator=window, page_size=1)
    allocator.clear = lambda: (full.clear(), window.clear())
    told: list[TokenCounts] = []
    retirement = Retirement(allocator, TokenCounts(100, 100, 50), TokenCounts(60, 60, 30), told.append)
    retirement.advance()
    assert told[-1] == TokenCounts(90, 90, 45)
    if flushed:
        allocator.clear()
    else:
        full.free(held[0])
        window.free(held[1])
    retirement.advance()
    assert (told[-1], retirement.mapped_counts(), retirement.is_done) == (TokenCounts(60, 60, 30),) * 2 + (True,)
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


def test_what_would_not_fit_at_the_goal_is_not_taken_in_before_it():
    """Or it would wait for ever, and all behind it."""
    numbers = {"max_total_num_tokens": 900, "max_req_len": 899, "chunked_prefill_size": 64}
    scheduler = SimpleNamespace(**numbers, model_config=SimpleNamespace(context_len=5000))
    set_token_count(scheduler, TokenCounts(800), 300)
    assert (scheduler.max_total_num_tokens, scheduler.max_req_len) == (800, 299)
    set_token_count(scheduler, TokenCounts(700))
    assert (scheduler.max_total_num_tokens, scheduler.max_req_len) == (700, 699)


def test_an_allocator_that_has_its_size_is_not_cleared():
    """A rehearsal that was given up may have left requests, which hold slots."""
    allocator = Allocator(40)
    held = allocator.alloc(7)
    resize_allocator(allocator, TokenCounts(40))
    assert not set(held.tolist()) & set(allocator.free_pages.tolist())
    resize_allocator(allocator, TokenCounts(50))
    assert allocator.free_pages.tolist() == list(range(1, 51))


# --- How many requests are admitted -----------------------------------------------------------------------------------

PLAIN = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
PLAIN |= {"min_p": 0.0, "logit_bias": None}


class Request:
    """Stand-in for the engine's request, which compares as an object does."""

    def __init__(self, return_logprob=False, **sampling):
        self.sampling_params, self.return_logprob = SimpleNamespace(**{**PLAIN, **sampling}), return_logprob
        self.custom_logit_processor = self.beam_group = None

    def finished(self):
        return False


def batch_of(*requests, **sampling):
    """A running batch; ``sampling``: attributes of its ``SamplingBatchInfo`` that differ from a plain one."""
    info: dict[str, object] = {"need_min_p_sampling": False, "logit_bias": None, "has_custom_logit_processor": False}
    info |= {"penalizer_orchestrator": SimpleNamespace(is_required=False)}
    return SimpleNamespace(
        reqs=list(requests), return_logprob=False, sampling_info=SimpleNamespace(**{**info, **sampling})
    )


class Scheduler:
    """Has room for 1,000 requests, and keeps those that wait."""

    def __init__(self):
        self.waiting_queue, self.running_batch, self.chunked_req = [], SimpleNamespace(reqs=[]), None

    def _add_request_to_queue(self, req, is_retracted=False):
        self.waiting_queue.append(req)
        self.retracted = is_retracted

    def get_num_allocatable_reqs(self, running_bs, beam_width=None):
        return (beam_width or 1000) - running_bs

    def get_new_batch_prefill(self, running_batch=None):
        return running_batch


@pytest.fixture
def limited():
    """A scheduler that admits 900 requests, and 256 while one is penalized."""
    made = Scheduler()
    serving.limit_requests(made, requests=900, penalized=256)
    return made


def admitted(scheduler, running=100):
    """Requests that the scheduler admits in a turn of its own."""
    scheduler.get_new_batch_prefill()
    return scheduler.get_num_allocatable_reqs(running)


def test_what_allocates_for_the_vocabulary_is_known_by_its_parameters():
    for plain in ({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}):
        assert not serving.is_penalized(Request(**plain))
    penalties = {"frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.05}
    others = {"min_new_tokens": 1, "min_p": 0.05, "logit_bias": {"7": 1.0}, "return_logprob": True}
    for name, value in {**penalties, **others}.items():
        assert serving.is_penalized(Request(**{name: value})), name
    assert serving.is_penalized(Request(logit_bias={})), "the engine makes a tensor for it, too"


def test_fewer_requests_are_admitted_while_a_penalized_one_waits(limited):
    assert (admitted(limited), admitted(limited, running=950)) == (800, -50)
    assert limited.get_num_allocatable_reqs(3, beam_width=5) == 2
    limited._add_request_to_queue(Request(min_p=0.1), is_retracted=True)
    assert limited.retracted
    assert limited.get_num_allocatable_reqs(100) == 156, "in the turn in which it arrives"
    assert (admitted(limited), admitted(limited, running=300)) == (156, -44)
    limited._add_request_to_queue(Request(presence_penalty=1.0))
    del limited.waiting_queue[0]
    assert admitted(limited) == 156
    limited.waiting_queue = [Request(), *limited.waiting_queue]
    assert admitted(limited) == 156


def test_a_penalized_request_that_waits_no_more_counts_no_more_whoever_still_refers_to_it(limited):
    """A session keeps an aborted request alive. How long the garbage collector needs differs between ranks."""
    session = Request(min_p=0.1)
    limited._add_request_to_queue(session)
    limited._add_request_to_queue(Request())
    assert admitted(limited) == 156
    del limited.waiting_queue[0]
    assert admitted(limited) == 800


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
def test_fewer_requests_are_admitted_to_a_batch_that_has_numbers_for_the_vocabulary(sampling, limited):
    """The engine keeps them when the request has ended, and makes them for each request that joins."""
    limited.running_batch = batch_of(Request(), **sampling)
    vars(limited.running_batch).update({name: True for name in sampling if name == "return_logprob"})
    assert admitted(limited) == 156
    limited.running_batch.reqs = []
    assert admitted(limited) == 800, "it is replaced by the batch that is admitted"
    limited.running_batch = batch_of(Request())
    assert admitted(limited) == 800


def test_the_batch_counts_to_which_requests_are_admitted(limited):
    """Releases after 0.5.13 hand it over, and a pipeline has several."""
    limited.running_batch = batch_of(Request(), need_min_p_sampling=True)
    other = batch_of(Request())
    assert limited.get_new_batch_prefill(other) is other
    assert limited.get_num_allocatable_reqs(100) == 800
    limited.get_new_batch_prefill(running_batch=limited.running_batch)
    assert limited.get_num_allocatable_reqs(100) == 156


def test_a_penalized_prompt_of_several_chunks_counts_until_it_joins_the_batch(limited):
    limited.chunked_req = Request(min_p=0.1)
    assert admitted(limited) == 156


def test_the_limit_is_derived_once_a_turn_and_no_queue_is_looked_through_without_a_penalized_request(limited):
    class Queue(list):
        looked = 0

        def __contains__(self, request):
            Queue.looked += 1
            return super().__contains__(request)

        __iter__ = None

    limited.waiting_queue = Queue([Request()])
    assert (admitted(limited), Queue.looked) == (800, 0)
    limited._add_request_to_queue(Request(min_p=0.1))
    assert ([admitted(limited), *map(limited.get_num_allocatable_reqs, (100, 100))], Queue.looked) == ([156] * 3, 1)


def beam(width):
    made: Any = Request()
    made.beam_group = SimpleNamespace(beam_width=width)
    return made


def test_the_beams_of_a_request_are_rows_of_the_batch_and_count_as_penalized(limited):
    limited.beam_coordinator = SimpleNamespace(_num_live_groups=0)
    assert admitted(limited) == 800
    limited.beam_coordinator._num_live_groups = 1
    limited._add_request_to_queue(Request())
    limited._add_request_to_queue(beam(50))
    assert serving.is_penalized(beam(50))
    assert admitted(limited, running=0) == 256 // 50, "however many of those that join have beams"
    limited.running_batch = batch_of(Request(), beam(50), beam(6))
    assert admitted(limited, running=3) == (256 - 3 - 49 - 5) // 50
    limited.waiting_queue = [Request()]
    assert admitted(limited, running=3) == 256 - 3 - 49 - 5
    limited.chunked_req = beam(100)
    assert admitted(limited, running=3) == 1


def test_a_request_with_more_beams_than_may_run_runs_alone(limited):
    limited.beam_coordinator = SimpleNamespace(_num_live_groups=1)
    limited._add_request_to_queue(beam(400))
    limited.running_batch = batch_of(Request())
    assert admitted(limited, running=1) == 0
    limited.running_batch = batch_of()
    assert admitted(limited, running=0) == 1


def test_each_beam_of_a_request_keeps_its_own_new_tokens(served):
    made = served(0, waiting_queue=[request(1000, 250)])
    made.scheduler.waiting_queue[0].beam_group = SimpleNamespace(beam_width=30)
    made.one.look()
    assert made.given == [Retire(1000 + 30 * 250 + BESIDE + 1)]
