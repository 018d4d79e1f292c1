"""How ranks exchange what they know, and how the first has all of them do something."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import zmq
from kv_servers import read_inbox
from sglang_moe_patches.memory.kv_sizing import ranks


@pytest.fixture
def store(monkeypatch):
    """PyTorch's, by which ranks found one another, of as many ranks as ``store.ranks``; each thread is one."""
    made, here = torch.distributed.HashStore(), threading.local()
    world = SimpleNamespace(ranks=2, here=here)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: here.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world.ranks)
    return world


def test_what_ranks_publish_is_found_when_all_have(store):
    def board(rank):
        store.here.rank = rank
        return ranks.Board()

    first, other = board(0), board(1)
    assert (first.collect("a"), first.is_raised("low")) == (None, False)
    other.publish("a", {"x": 2})
    other.raise_flag("low")
    assert (first.collect("a"), first.is_raised("low"), first.is_raised("low 2")) == (None, True, False)
    first.publish("a", {"x": 1})
    assert (first.collect("a"), first.collect("b")) == ([{"x": 1}, {"x": 2}], None)


def test_the_store_is_not_asked_in_each_turn_where_there_is_one_rank(store, monkeypatch):
    store.ranks, store.here.rank = 1, 0
    board = ranks.Board()
    monkeypatch.setattr(torch.distributed.HashStore, "check", None)
    assert not board.is_raised("low")
    board.raise_flag("low")
    assert board.is_raised("low")


class Note(ranks.Order):
    pass


class Socket:
    """As a scheduler's, up to 0.5.12.post1."""

    fileno = 7

    def __init__(self, *waiting):
        self.waiting = list(waiting)

    def recv_pyobj(self, *flags):
        if not self.waiting:
            raise zmq.Again()
        return self.waiting.pop(0)


class Loop:
    """A scheduler's turns: what each has taken in."""

    def __init__(self, *waiting):
        self.recv_from_tokenizer, self.turns = Socket(*waiting), []

    def process_input_requests(self, read):
        self.turns.append(list(read))

    def turn(self, limit=100):
        self.process_input_requests(read_inbox(self, limit))


def test_orders_come_before_users_requests_and_not_to_the_engine():
    loop = Loop("a", "b")
    obeyed: list[object] = []
    before = loop.recv_from_tokenizer, loop.process_input_requests
    orders = ranks.Orders(loop, obeyed.append)
    orders.open()
    assert loop.recv_from_tokenizer.fileno == 7
    note = Note()
    orders.give(note, "c")
    loop.turn()
    loop.turn()
    assert (obeyed, loop.turns) == ([note], [["c"], ["a", "b"]])
    orders.close()
    assert (loop.recv_from_tokenizer, loop.process_input_requests) == before


def test_an_order_waits_for_no_empty_socket_if_a_turn_reads_few_requests():
    """``SGLANG_SCHEDULER_MAX_RECV_PER_POLL`` ends a turn's reading before the socket is empty."""
    loop, obeyed = Loop(*range(9)), list[object]()
    orders = ranks.Orders(loop, obeyed.append)
    orders.open()
    for _ in range(2):
        loop.turn(limit=2)
    orders.give(Note(), "a")
    orders.give("b")
    orders.give("c")
    for _ in range(3):
        loop.turn(limit=2)
    assert loop.turns == [[0, 1], [2, 3], ["a", "b"], ["c", 4], [5, 6]]
    assert len(obeyed) == 1
    orders.close()


def test_meanwhile_users_requests_wait_and_each_turn_asks_once():
    loop, polls = Loop("a"), iter([[], [ranks.Broadcast(("x", "y"))], []])
    seen = []
    orders = ranks.Orders(loop, print)
    orders.open()
    orders.instead, orders.each_turn = lambda: next(polls), lambda: seen.append(1)
    for _ in range(3):
        loop.turn()
    orders.instead = None
    loop.turn()
    assert loop.turns == [[], ["x", "y"], [], ["a"]]
    assert len(seen) == 4
    orders.close()


@pytest.fixture
def machines_of(store, monkeypatch):
    """What ranks find out of one another, those that ask."""
    monkeypatch.setattr(ranks, "WAIT_S", 0.5)

    def ask(rank):
        store.here.rank = rank
        return ranks.all_machines_take_part()

    def found(*asks):
        store.ranks = len(asks)
        with ThreadPoolExecutor() as pool:
            return set(pool.map(ask, (rank for rank, each in enumerate(asks) if each)))

    return found


@pytest.mark.parametrize(
    ("asks", "together"),
    [((True, True, True), True), ((True, True, False), False), ((False, True, True), False)],
)
def test_machines_decide_together_or_none_does(asks, together, machines_of, monkeypatch):
    if together:  # which none of them waits for
        monkeypatch.setattr(ranks, "WAIT_S", 60.0)
    assert machines_of(*asks) == {together}
    assert machines_of(True, True, True) == {together}  # whoever comes too late finds what was decided
