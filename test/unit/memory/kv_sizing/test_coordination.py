"""How ranks exchange what they know, and which launches are under way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from sglang_moe_patches.memory.kv_sizing import coordination, record
from sglang_moe_patches.memory.kv_sizing.rehearsal import RankResult


@pytest.fixture
def store(monkeypatch):
    """PyTorch's, by which ranks found one another, of as many ranks as ``store.ranks``; each thread is one."""
    made, here = torch.distributed.HashStore(), threading.local()
    world = SimpleNamespace(ranks=2, here=here)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: here.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world.ranks)
    return world


def test_what_ranks_leave_is_found_when_all_have(store):
    made = []
    for rank in range(2):
        store.here.rank = rank
        made.append(coordination.RankResults())
    first, other = made
    assert first.collect() is None
    assert not first.any_rank_low_on_memory()
    other.publish(RankResult(lowest=2))
    other.report_low_memory()
    assert first.any_rank_low_on_memory()
    assert first.collect() is None
    first.publish(RankResult(lowest=1))
    assert [each.lowest for each in first.collect()] == [1, 2]


@pytest.fixture
def machines_of(store, monkeypatch):
    """What ranks find out of one another, those that ask."""
    monkeypatch.setattr(coordination, "WAIT_S", 0.5)

    def ask(rank):
        store.here.rank = rank
        return coordination.all_machines_take_part()

    def found(*asks):
        store.ranks = len(asks)
        with ThreadPoolExecutor() as pool:
            return set(pool.map(ask, (rank for rank, each in enumerate(asks) if each)))

    return found


@pytest.mark.parametrize(
    ("asks", "together"),
    [((True, True, True), True), ((True, True, False), False), ((False, True, True), False)],
    ids=str,
)
def test_machines_decide_together_or_none_does(asks, together, machines_of, monkeypatch):
    if together:  # which none of them waits for
        monkeypatch.setattr(coordination, "WAIT_S", 60.0)
    assert machines_of(*asks) == {together}


def test_a_machine_that_comes_too_late_finds_that_the_others_have_given_up(machines_of):
    assert machines_of(False, True) == {False}
    assert machines_of(True, True) == {False}


def test_replicas_that_one_process_launches_have_one_launch_and_other_servers_one_each():
    code = "from sglang_moe_patches.memory.kv_sizing import record; import sys\n"
    code += "print(*(record.current_launch(is_replica=each) for each in (True, False)))"
    command = [sys.executable, "-c", code]
    found = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(2)]
    (replica, alone), (another, other) = found
    assert replica == another == record.current_launch(is_replica=False)
    assert f":{os.getpid()}@" in replica
    assert len({replica, alone, other}) == 3
    assert [record.is_alive(each) for each in (replica, alone, other)] == [True, False, False]


def test_another_process_of_the_same_number_is_another_launch():
    host, _, created = record.current_launch(is_replica=False).rpartition("@")
    assert [record.is_alive(f"{host}@{float(created) - age_s:.2f}") for age_s in (0, 5)] == [True, False]


@pytest.mark.parametrize("launch", ["", "a third", "host:pid@1.0", "host:1"])
def test_what_is_no_launch_has_ended(launch):
    assert not record.is_alive(launch)


@pytest.mark.parametrize(("age_s", "alive"), [(60, True), (3600, False)])
def test_a_launch_on_another_machine_counts_as_ended_after_half_an_hour(age_s, alive):
    assert record.is_alive(f"another:1@{time.time() - age_s:.2f}") is alive
