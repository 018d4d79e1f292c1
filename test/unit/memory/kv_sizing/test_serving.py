"""Free memory while serving: when it is read, what is given back, and what is kept for running requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kv_servers import GB
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.memory.kv_sizing import metrics, serving
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
        told: list[int] = []
        monkeypatch.setattr(
            serving.token_count, "set_token_count", lambda scheduler, counts: told.append(counts.tokens)
        )
        memory = FreeMemory(lambda: Memory(free=free[0]), 2 * GB, lambda: next(ticks))
        shown = SimpleNamespace(show=lambda name, value: made.flushes and None)
        orders = SimpleNamespace(give=given.append)
        one = Serving(made, pools, memory, orders, shown, leads=leads, ranks=1)
        one._board = board
        return SimpleNamespace(
            one=one, pools=pools, given=given, told=told, allocator=allocator, scheduler=made, free=free
        )

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
    assert (made.told, made.pools.unmapped, made.pools.counts.tokens) == ([8500], [8500], 8500)
    assert "8,500 KV tokens instead of 10,000; 1,500 MB given back" in caplog.text
    assert made.allocator.size == 8500
    made.free[0] = 2 * GB
    made.one.look()
    assert len(made.given) == 1


def test_slots_that_are_held_come_back_later_and_a_flush_brings_all(served):
    made = served([int(0.5 * GB)])
    held, made.allocator.free_pages = made.allocator.free_pages[8000:], made.allocator.free_pages[:8000]
    made.one.look()
    made.one.obey(made.given.pop())
    assert made.told == []  # nothing of the tail was free
    made.allocator.free_pages = torch.cat((made.allocator.free_pages, held[1000:]))
    made.one.look()
    assert (made.told[-1], made.pools.unmapped[-1]) == (9000, 9000)
    assert made.given == []
    made.scheduler.is_fully_idle = lambda: True
    made.one.look()
    assert made.given == [serving.Flush()]
    made.one.obey(made.given.pop())
    made.one.look()
    assert (made.told[-1], made.pools.counts.tokens, len(made.scheduler.flushes)) == (8500, 8500, 1)


@pytest.mark.parametrize(
    ("scheduler", "least"),
    [
        ({"chunked_prefill_size": 4800}, 9600),
        ({"chunked_prefill_size": None, "max_req_input_len": 4700}, 9400),
        ({"running_batch": SimpleNamespace(reqs=[request(9000, 300)])}, 9300),
        ({"waiting_queue": [request(9100, 0), request(5, 9200)]}, 9205),
        ({"chunked_req": request(9900, 5)}, 9905),
        ({"mbs": [None, SimpleNamespace(reqs=[request(9500, 1)])]}, 9501),
    ],
    ids=str,
)
def test_the_longest_request_and_two_prefills_keep_their_room(scheduler, least, served):
    made = served([0], **scheduler)
    made.one.look()
    assert made.given == [Retire(least)]


def test_where_nothing_can_go_nothing_is_ordered(served):
    made = served([0], chunked_prefill_size=6000)
    made.one.look()
    assert made.given == []


class Flags(set):
    raise_flag = set.add
    is_raised = set.__contains__


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
    assert len(first.given) == 1  # what was told is done


def test_a_driver_that_does_not_answer_ends_the_watch_and_not_the_server(served, caplog):
    made = served([9 * GB])
    made.free.clear()
    made.one.look()
    made.one.look()
    assert caplog.text.count("free memory is not watched any more") == 1


def test_metrics_have_one_state_at_a_time(metric):
    shown = metrics.Metrics({"enable_metrics": True}, 3)
    shown.show(metrics.TOKENS, 5)
    shown.show_state("rule", "a reason")
    shown.show_state("grown")
    assert metric(metrics.TOKENS, gpu="3") == 5
    assert metric(metrics.STATE, gpu="3", state="grown", reason="") == 1
    assert metric(metrics.STATE, gpu="3", state="rule", reason="a reason") == 0
    metrics.Metrics({}, 0).show_state("grown")
