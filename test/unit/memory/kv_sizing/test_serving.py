"""Free memory while serving: when it is read, what is given back, and what is kept for running requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kv_servers import GB
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.memory.kv_sizing import serving
from sglang_moe_patches.memory.kv_sizing.serving import FreeMemory, Retire, Serving
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts


def test_memory_is_read_once_a_second():
    clock, reads = [0.0], []
    memory = FreeMemory(lambda: reads.append(1) or Memory(free=9 * GB), 2 * GB, lambda: clock[0])
    due = []
    for now in (0.0, 0.5, 0.9, 1.0, 1.9, 2.1):
        clock[0] = now
        due.append(memory.is_due())
    assert due == [True, False, False, True, False, True]


@pytest.mark.parametrize(("free", "shortage"), [(9, 0), (1.1, 0), (1, 0), (0.9, 1.1), (0, 2)])
def test_short_is_less_than_half_the_margin_and_what_lacks_is_all_of_it(free, shortage):
    left = [9 * GB, int(free * GB)]
    memory = FreeMemory(lambda: Memory(free=left.pop(0)), 2 * GB)
    assert memory.shortage() == pytest.approx(shortage * GB)
    assert memory.lowest == int(free * GB)


class Pools:
    """A token takes 1 MB."""

    page = 1

    def __init__(self, tokens):
        self.counts, self.unmapped = TokenCounts(tokens), []

    def counts_for(self, tokens):
        return TokenCounts(tokens)

    def bytes_behind(self, counts):
        return counts.tokens * 1_000_000

    def tokens_within(self, budget):
        return int(budget // 1_000_000)

    def unmap_from(self, counts):
        given, self.counts = self.bytes_behind(self.counts) - self.bytes_behind(counts), counts
        self.unmapped.append(counts.tokens)
        return given


class Allocator:
    page_size = 1

    def __init__(self, size):
        self.size, self.free_pages = size, torch.arange(1, size + 1)

    def clear(self):
        self.free_pages = torch.arange(1, self.size + 1)


def request(prompt, new):
    return SimpleNamespace(origin_input_ids=[1] * prompt, sampling_params=SimpleNamespace(max_new_tokens=new))


class Flags(set):
    raise_flag = set.add
    is_raised = set.__contains__


@pytest.fixture
def served(monkeypatch):
    """Makes a rank that serves with 10,000 tokens, and the free memory that it is told."""

    def make(free, *, leads=True, board=None, **scheduler):
        allocator = Allocator(10_000)
        has = {"chunked_prefill_size": 100, "max_req_input_len": 5000, "is_fully_idle": lambda: False}
        has |= {"token_to_kv_pool_allocator": allocator, "flushes": []}
        made = SimpleNamespace(**{**has, **scheduler})
        made.flush_cache = lambda: made.flushes.append(allocator.clear())
        pools = Pools(10_000)
        given: list[object] = []
        made.told = []
        memory = FreeMemory(lambda: Memory(free=free[0]), 2 * GB, lambda: next(ticks))
        shown, orders = SimpleNamespace(show=lambda name, value: None), SimpleNamespace(give=given.append)
        one = Serving(made, pools, memory, orders, Flags() if board is None else board, shown, leads=leads)
        return SimpleNamespace(
            one=one, pools=pools, given=given, told=made.told, allocator=allocator, scheduler=made, free=free
        )

    def tell(scheduler, counts, soon):
        scheduler.told.append((counts.tokens, soon.tokens))

    monkeypatch.setattr(serving.token_count, "set_token_count", tell)
    ticks = iter(range(10_000))
    return make


def test_the_tail_goes_until_the_margin_is_free_again(served, caplog):
    made = served([9 * GB])
    made.one.look()
    assert made.given == []
    made.free[0] = int(0.5 * GB)
    made.one.look()
    assert made.given == [Retire(10_000 - 1500)]
    made.one.look()
    assert len(made.given) == 1  # one at a time
    made.one.obey(made.given[0])
    assert made.told == [(10_000, 8500)]  # no longer request is taken in
    made.free[0] = 2 * GB
    made.one.look()
    assert (made.told[1:], made.pools.unmapped, made.pools.counts.tokens) == ([(8500, 8500)], [8500], 8500)
    assert "8,500 KV tokens instead of 10,000; 1,500 MB given back" in caplog.text
    assert made.allocator.size == 8500
    made.one.look()
    assert len(made.given) == 1


def test_slots_that_are_held_come_back_later_and_a_flush_brings_all(served):
    made = served([int(0.5 * GB)])
    held, made.allocator.free_pages = made.allocator.free_pages[8000:], made.allocator.free_pages[:8000]
    made.one.look()
    made.one.obey(made.given.pop())
    made.one.look()
    assert made.pools.unmapped == []  # nothing of the tail was free
    made.allocator.free_pages = torch.cat((made.allocator.free_pages, held[1000:]))
    made.one.look()
    assert (made.told[-1], made.pools.unmapped[-1]) == ((9000, 8500), 9000)
    assert made.given == []
    made.scheduler.is_fully_idle = lambda: True
    made.one.look()
    assert made.given == [serving.Flush()]
    made.one.obey(made.given.pop())
    made.one.look()
    assert (made.told[-1], made.pools.counts.tokens, len(made.scheduler.flushes)) == ((8500, 8500), 8500, 1)


def test_what_is_ordered_meanwhile_comes_after_what_is_under_way(served):
    """With data-parallel attention the first rank is done, and orders more, while another's slots are held."""
    made = served([9 * GB], leads=False)
    held, made.allocator.free_pages = made.allocator.free_pages[7000:], made.allocator.free_pages[:7000]
    for tokens in (8500, 7500):
        made.one.obey(Retire(tokens))
        made.one.look()
    made.allocator.free_pages = torch.cat((made.allocator.free_pages, held))
    made.one.look()
    made.one.look()
    assert (made.pools.unmapped, made.told[-1], made.pools.counts.tokens) == ([8500, 7500], (7500, 7500), 7500)
    assert (made.allocator.size, "clear" in vars(made.allocator)) == (7500, False)
    assert made.allocator.free_pages.tolist() == list(range(1, 7501))


@pytest.mark.parametrize(
    ("scheduler", "least"),
    [
        ({"chunked_prefill_size": 4800}, 9600),
        ({"chunked_prefill_size": None, "max_req_input_len": 4700}, 9400),
        ({"waiting_queue": [request(9100, 0), request(5, 9200)]}, 9205),
    ],
    ids=str,
)
def test_two_prefills_and_the_first_ranks_longest_request_keep_their_room(scheduler, least, served):
    made = served([0], **scheduler)
    made.one.look()
    assert made.given == [Retire(least)]


@pytest.mark.parametrize(
    ("scheduler", "least"),
    [
        ({"running_batch": SimpleNamespace(reqs=[request(9000, 300)])}, 9300),
        ({"waiting_queue": [request(9100, 0), request(5, 9200)]}, 9205),
        ({"chunked_req": request(9900, 5)}, 9905),
        ({"mbs": [None, SimpleNamespace(reqs=[request(9500, 1)])]}, 9501),
        ({"grammar_manager": SimpleNamespace(grammar_queue=[request(9600, 2)])}, 9602),
    ],
    ids=str,
)
def test_each_rank_keeps_room_for_its_own_longest_request_until_it_has_ended(scheduler, least, served):
    board = Flags()
    first, other = served([int(0.5 * GB)], board=board), served([0], leads=False, board=board, **scheduler)
    first.one.look()
    for each in (first, other):
        each.one.obey(first.given[0])
        each.one.look()
    assert (first.pools.counts.tokens, other.pools.counts.tokens, other.told[-1]) == (8500, least, (least, 8500))
    other.one.look()
    assert len(board) == 0  # what was ordered is still to come
    vars(other.scheduler).update(dict.fromkeys(scheduler))
    other.one.look()
    assert other.pools.counts.tokens == 8500
    other.one.look()
    assert len(board) == 1


def test_what_prefixes_hold_on_another_rank_comes_back_when_nothing_runs(served):
    """With data-parallel attention the first rank may have given all back, and knows nothing of the other's cache."""
    board = Flags()
    first, other = served([2 * GB], board=board), served([2 * GB], leads=False, board=board)
    other.allocator.free_pages = other.allocator.free_pages[:8000]
    for each in (first, other):
        each.one.obey(Retire(8500))
        each.one.look()
    assert (first.pools.counts.tokens, other.pools.counts.tokens, len(board)) == (8500, 10_000, 0)
    other.scheduler.is_fully_idle = lambda: True
    other.one.look()
    first.one.look()
    assert first.given == [serving.Flush()]
    for each in (first, other):
        each.one.obey(serving.Flush())
        each.one.look()
    assert (other.pools.counts.tokens, first.scheduler.flushes, first.given) == (8500, [], [serving.Flush()])


def test_what_another_rank_lacked_once_is_not_given_back_for_ever(served):
    board = Flags()
    first, other = served([9 * GB], board=board), served([0], leads=False, board=board)
    first.scheduler.waiting_queue = [request(9900, 100)]
    other.one.look()
    first.one.look()
    for each in (first, other):
        each.one.obey(first.given[0])
    assert (first.given, first.pools.counts.tokens) == ([Retire(10_000)], 10_000)
    other.free[0], first.scheduler.waiting_queue = 9 * GB, []
    for each in (other, first):
        each.one.look()
    assert len(first.given) == 1


def test_what_would_free_no_memory_is_not_ordered(served):
    """A request that may come to nearly as many tokens as there are leaves less than a piece of memory has."""
    made = served([0], waiting_queue=[request(9990, 0)])
    made.pools.bytes_behind = lambda counts: -(-counts.tokens // 100) * 100_000_000
    made.one.look()
    assert made.given == []


def test_where_nothing_can_go_nothing_is_ordered(served):
    made = served([0], chunked_prefill_size=6000)
    made.one.look()
    assert made.given == []


def test_the_first_rank_orders_what_another_one_lacks(served):
    board = Flags()
    other = served([0], leads=False, board=board)
    other.one.look()
    assert (other.given, len(board)) == ([], 1)
    first = served([9 * GB], board=board)
    first.one.look()
    assert first.given == [Retire(9000)]  # half of the margin, as it does not know how much
    for each in (first, other):
        each.one.obey(first.given[0])
    first.one.look()
    first.one.look()
    assert len(first.given) == 1  # what was told is done


def test_a_driver_that_does_not_answer_ends_the_watch_and_not_the_server(served, caplog):
    """Its slots are withdrawn as on the other ranks."""
    made = served([9 * GB])
    made.free.clear()
    made.one.look()
    made.one.obey(Retire(8500))
    made.one.look()
    assert caplog.text.count("free memory is not watched any more") == 1
    assert made.pools.counts.tokens == 8500


def test_metrics_have_one_state_at_a_time(metric):
    shown = serving.Metrics({"enable_metrics": True}, 3)
    shown.show(serving.TOKENS, 5)
    shown.show_state("rule", "a reason")
    shown.show_state("grown")
    assert metric(serving.TOKENS, gpu="3") == 5
    assert metric(serving.STATE, gpu="3", state="grown", reason="") == 1
    assert metric(serving.STATE, gpu="3", state="rule", reason="a reason") == 0
    serving.Metrics({}, 0).show_state("grown")
