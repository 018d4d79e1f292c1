"""Tests of two exchanges between the ranks of a server: values through PyTorch's store, and orders of rank 0 to all
ranks."""

from __future__ import annotations

import math
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from kv_servers import read_inbox
from sglang_moe_patches.memory.kv_sizing import ranks
from sglang_moe_patches.memory.kv_sizing.phases import PhaseKind
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory, RankNeed
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts


@pytest.fixture
def store(monkeypatch):
    """Key-value store of ``torch.distributed``, shared by ``store.ranks`` ranks. ``store.here.rank`` is the rank that
    the current thread simulates."""
    made, here = torch.distributed.HashStore(), threading.local()
    world = SimpleNamespace(ranks=2, here=here, made=made)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: here.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world.ranks)
    return world


SECRET = b"of this start"
NEED = RankNeed(fits=-5, need=7, failure="no driver", stopped=True, missed={"a phase": PhaseKind.MIXED})


def board(store, rank, secret=SECRET):
    store.here.rank = rank
    return ranks.Board(secret)


def test_values_are_collected_from_all_ranks(store):
    first, second = board(store, 0), board(store, 1)
    assert (first.collect("a", RankNeed), first.is_raised("low")) == ([None, None], False)
    second.publish("a", NEED)
    second.raise_flag("low")
    assert first.collect("a", RankNeed) == [None, NEED]
    assert (first.is_raised("low"), first.is_raised("low 2")) == (True, False)
    first.publish("a", replace(NEED, fits=9))
    assert (first.collect("a", RankNeed), first.collect("b", str)) == ([replace(NEED, fits=9), NEED], [None, None])
    assert first.wait_for_all("a", RankNeed, 0) == [replace(NEED, fits=9), NEED]
    assert first.wait_for_all("b", str, 0) == [None, None]


def keys_of(store):
    """Return the two entries (key and bytes) that rank 1 writes to the store: one for a value, and one for a flag."""
    entries: dict[str, bytes] = {}
    rank_1 = board(store, 1)
    rank_1._store = SimpleNamespace(set=entries.__setitem__)
    rank_1.publish("a", "told")
    rank_1.raise_flag("low")
    return list(entries.items())


@pytest.mark.parametrize(
    "forge",
    [
        lambda value, flag: value + b"?",
        lambda value, flag: value[1:],
        lambda value, flag: b"",
        lambda value, flag: b"absent",
        lambda value, flag: b"\xff" * 80,
        lambda value, flag: pickle.dumps(Bomb()),
        lambda value, flag: b"\0" * 32 + b'"told"',
        lambda value, flag: value[:32] + b'"told" ',
    ],
)
def test_a_key_that_another_process_writes_has_no_effect(forge, store):
    """Another process writes forged values into the store: under the real keys of rank 1, and under keys that it could
    guess without the ranks' secret. The ranks ignore these values."""
    first = board(store, 0)
    first.publish("a", "told")
    (value_key, value), (flag_key, flag) = keys_of(store)
    for key in (value_key, flag_key, f"{ranks._KEY}a 1", f"{ranks._KEY}low"):
        store.made.set(key, forge(value, flag))
    assert (first.collect("a", str), first.is_raised("low")) == (["told", None], False)
    board(store, 1).publish("a", "told")
    board(store, 1).raise_flag("low")
    assert (first.collect("a", str), first.is_raised("low")) == (["told", "told"], True)


class Bomb:
    """Object that makes the test fail when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a foreign value is unpickled",)


@pytest.mark.parametrize("place", [("b", 1), ("a", 0), ("a 1", 1), ("low 2", ranks._ANY_RANK)])
def test_a_copied_value_under_another_topic_rank_or_start_is_ignored(place, store):
    """Another process can copy a value to another key in the store. If the key belongs to another topic, rank or server
    start, the ranks ignore the copy."""
    first = board(store, 0)
    (_, value), (_, flag) = keys_of(store)
    store.made.set(first._key(*place), flag if place[0].startswith("low") else value)
    assert first._read(*place) is None
    store.made.set(first._key("a", 1), value)
    assert first._read("a", 1) == '"told"'
    assert board(store, 0, b"of another start")._read("a", 1) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "1.5"),
        (int, "true"),
        (int, '"1"'),
        (bool, "1"),
        (str, "null"),
        (float, "NaN"),
        (float, "-Infinity"),
        (float, "1e999"),
        (float, "true"),
        (TokenCounts, "[1, 2]"),
        (TokenCounts, "[1, 2, 3, 4]"),
        (TokenCounts, '{"tokens": 1}'),
        (tuple[str, int], '["a", "b"]'),
        (RankNeed, "[]"),
        (RankNeed, '{"fits": 1}'),
        (RankNeed, ranks.encode(NEED)[:-1] + ', "more": 1}'),
        (RankNeed, ranks.encode(NEED).replace('"mixed"', '"no kind"')),
        (RankNeed, ranks.encode(NEED).replace("-5", "1e3")),
        (str, "{"),
        (str, ""),
    ],
    ids=str,
)
def test_a_published_value_of_another_type_is_refused(kind, text):
    with pytest.raises(ValueError):  # noqa: PT011 - json's messages and ours differ
        ranks.decode(kind, text)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (RankNeed, NEED),
        (LaunchMemory, LaunchMemory("", 80 * 10**9, 7, 0.875, 3)),
        (tuple[str, TokenCounts], ("", TokenCounts(5, 3, 2))),
        (float, 2.0),
        (int, -(10**15)),
    ],
    ids=str,
)
def test_a_value_is_unchanged_after_encoding_and_decoding(kind, value):
    assert ranks.decode(kind, ranks.encode(value)) == value
    with pytest.raises(ValueError, match="JSON"):
        ranks.encode((value, math.inf))


UNPICKLES = re.compile(r"\b(c?pickle|dill|marshal|shelve|\w+_object(_list)?\(|recv_pyobj\(|torch\.load|eval\(|exec\()")
READS = {
    # This module reads the engine's own socket with the engine's own method.
    "memory/kv_sizing/ranks.py": {"recv_pyobj("},
}


def test_nothing_that_another_process_can_write_is_unpickled():
    package = Path(ranks.__file__).parents[2]
    hits_by_name = {}
    for file in package.rglob("*.py"):
        name = file.relative_to(package).as_posix()
        lines = [line for line in file.read_text().splitlines() if not line.strip().startswith(("#", '"'))]
        if hits := {match[0] for line in lines for match in UNPICKLES.finditer(line)}:
            hits_by_name[name] = hits
    assert hits_by_name == READS


def test_a_server_of_one_rank_uses_no_store(store, monkeypatch):
    store.ranks, store.here.rank = 1, 0
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    alone = ranks.Board(SECRET)
    assert (alone.collect("a", str), alone.is_raised("low")) == ([None], False)
    alone.publish("a", "told")
    alone.raise_flag("low")
    assert (alone.collect("a", str), alone.is_raised("low")) == (["told"], True)


def gather_in_process(rank, folder, results):
    """Run one of two ranks in its own process. The rank gathers values through a Gloo group, as in the engine, and puts
    the gathered values into ``results``."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD, rank_in_group=rank)
    state = SimpleNamespace(get_world_group=lambda: group)
    sys.modules["sglang.srt.distributed.parallel_state"] = state  # type: ignore[assignment]
    values = ranks.all_gather("a long text " * rank, str), ranks.all_gather(("", TokenCounts(rank)), GATHERED)
    results.put((rank, values, ranks.share_secret()))
    torch.distributed.destroy_process_group()


GATHERED = tuple[str, TokenCounts]


def test_ranks_gather_values_and_share_a_secret(tmp_path):
    processes = torch.multiprocessing.get_context("fork")
    results = processes.Queue()
    children = [processes.Process(target=gather_in_process, args=(rank, tmp_path, results)) for rank in range(2)]
    for child in children:
        child.start()
    results_by_rank = {rank: rest for rank, *rest in (results.get(timeout=60) for _ in children)}
    for child in children:
        child.join()
    assert results_by_rank[0] == results_by_rank[1]
    values, secret = results_by_rank[0]
    assert values == (["", "a long text "], [("", TokenCounts(0)), ("", TokenCounts(1))])
    assert len(secret) == 32


class Note(ranks.Order):
    pass


class Socket:
    """Stand-in for a scheduler's socket, up to engine release 0.5.12.post1."""

    fileno = 7

    def __init__(self, *waiting):
        self.waiting = list(waiting)

    def recv_pyobj(self, *flags):
        if not self.waiting:
            raise zmq.Again()
        return self.waiting.pop(0)


class Loop:
    """Stand-in for a scheduler. It records the requests of each turn. A turn is one iteration of the event loop."""

    def __init__(self, *waiting):
        self.recv_from_tokenizer, self.turns = Socket(*waiting), []

    def process_input_requests(self, read):
        self.turns.append(list(read))

    def turn(self, limit=100):
        self.process_input_requests(read_inbox(self, limit))


def test_orders_precede_requests_and_do_not_reach_the_engine():
    loop = Loop("a", "b")
    obeyed_orders: list[object] = []
    before = loop.recv_from_tokenizer, loop.process_input_requests
    orders = ranks.Orders(loop, obeyed_orders.append)
    orders.open()
    note = Note()
    orders.send(note, "c")
    assert loop.recv_from_tokenizer.fileno == 7
    loop.turn()
    loop.turn()
    assert (obeyed_orders, loop.turns) == ([note], [["c"], ["a", "b"]])
    orders.close()
    assert (loop.recv_from_tokenizer, loop.process_input_requests) == before


def test_orders_precede_waiting_requests_if_a_turn_reads_few_requests():
    """Rank 0's orders must be read before the requests that wait at the scheduler's socket. This must hold even if
    ``SGLANG_SCHEDULER_MAX_RECV_PER_POLL`` limits the number of requests that a turn reads."""
    loop, obeyed_orders = Loop(*range(9)), list[object]()
    orders = ranks.Orders(loop, obeyed_orders.append)
    orders.open()
    for _ in range(2):
        loop.turn(limit=2)
    orders.send(Note(), "a")
    orders.send("b")
    orders.send("c")
    for _ in range(3):
        loop.turn(limit=2)
    assert loop.turns == [[0, 1], [2, 3], ["a", "b"], ["c"], [4, 5]]
    assert len(obeyed_orders) == 1
    orders.close()


def test_the_scheduler_reads_its_own_socket_in_turns_without_broadcasts():
    loop = Loop("a")
    socket = loop.recv_from_tokenizer
    orders = ranks.Orders(loop, print)
    orders.open()
    assert loop.recv_from_tokenizer is socket
    orders.send("b")
    loop.turn()
    loop.turn()
    assert loop.recv_from_tokenizer is socket
    orders.send("c")
    loop.turn()
    assert loop.turns == [["b"], ["a"], ["c"]]
    orders.close()


def test_users_requests_wait_while_rank_0_broadcasts():
    loop, polls = Loop("a"), iter([[], [ranks.Broadcast(("x", "y"))], []])
    turns = []
    orders = ranks.Orders(loop, print)
    orders.open()
    orders.read_instead, orders.on_turn = lambda: next(polls), lambda: turns.append(1)
    for _ in range(3):
        loop.turn()
    orders.read_instead = None
    loop.turn()
    assert loop.turns == [[], ["x", "y"], [], ["a"]]
    assert len(turns) == 4
    orders.close()


@pytest.fixture
def ask_all_machines(store, monkeypatch):
    """Return a function that simulates several machines with one rank each. Each argument of the function stands for
    one rank: ``True`` if the rank calls ``all_machines_take_part``. The function returns the set of the calls' results.
    If a call raises ``RuntimeError``, its result is the string "RuntimeError".

    For example, ``(True, True, False)`` returns ``{False}``, because the last machine takes no part.
    """
    monkeypatch.setattr(ranks, "WAIT_S", 0.5)

    def ask(rank):
        store.here.rank = rank
        try:
            return ranks.all_machines_take_part()
        except RuntimeError:
            return "RuntimeError"

    def ask_ranks(*asks):
        store.ranks = len(asks)
        with ThreadPoolExecutor() as pool:
            return set(pool.map(ask, (rank for rank, is_asking in enumerate(asks) if is_asking)))

    return ask_ranks


@pytest.mark.parametrize(
    ("asks", "together"),
    [((True, True, True), True), ((True, True, False), False), ((False, True, True), False)],
)
def test_all_machines_take_part_or_no_machine_does(asks, together, ask_all_machines, monkeypatch):
    if together:  # all ranks ask, so none has to wait for the timeout
        monkeypatch.setattr(ranks, "WAIT_S", 60.0)
    assert ask_all_machines(*asks) == {together}
    if not together:
        assert ask_all_machines(True, True, True) == {together}  # ranks that ask later get the same decision


@pytest.mark.parametrize(
    ("foreign", "asks", "answer"),
    [
        ({"decided": "False"}, (True, True, True), False),
        ({"decided": "anything"}, (True, True, True), False),
        ({"decided": "True"}, (True, True, False), "RuntimeError"),
        ({"2 takes part": ""}, (True, True, False), "RuntimeError"),
    ],
)
def test_forged_answers_of_machines_turn_sizing_off_in_a_bounded_time(foreign, asks, answer, store, ask_all_machines):
    for name, value in foreign.items():
        store.made.set(f"{ranks._KEY}{name}", value)
    assert ask_all_machines(*asks) == {answer}
