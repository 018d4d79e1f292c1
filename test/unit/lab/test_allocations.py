"""Tests of ``lab/allocations.py``: the simulation of PyTorch's caching allocator, and the recorder of the memory that a
function allocates and frees."""

from __future__ import annotations

import pytest
import torch
from sglang_moe_patches.lab.allocations import EMPTY_CACHE, Allocator, Event, record

MIB = 1 << 20


def replay(text: str, max_split_size: int | None = None) -> Allocator:
    """Return the allocator after the steps of ``text``. For example, ``a30 b0.5 -a empty`` allocates 30 MiB as a and
    half a MiB as b, frees a, and empties the cache."""
    allocator, keys = Allocator(max_split_size), dict[str, int]()
    for step in text.split():
        if step == "empty":
            allocator.run([EMPTY_CACHE])
        elif step.startswith("-"):
            allocator.run([Event(keys[step[1:]])])
        else:
            keys[step[0]] = len(keys)
            allocator.run([Event(keys[step[0]], int(float(step[1:]) * MIB))])
    return allocator


REPLAYS = {
    "a small tensor takes a segment of 2 MiB": ("a0.5", 2, 0.5),
    "a medium tensor takes a segment of 20 MiB": ("a5 b5", 20, 10),
    "a large tensor takes a segment in steps of 2 MiB": ("a31", 32, 31),
    "a rest of 1 MiB is not split off": ("a31 b0.9", 34, 32.9),
    "a larger rest is": ("a30.5 b1.2", 32, 31.7),
    "a freed segment stays": ("a30 -a", 30, 0),
    "and is returned": ("a30 -a empty", 0, 0),
    "the smallest block that is large enough": ("a60 b40 -a -b c40 -c empty", 0, 0),
    "a tensor in a freed block keeps its segment": ("a60 -a b30 empty", 60, 30),
    "neighbours become one block": ("a60 -a b30 c30 -b -c d60 empty", 60, 60),
}


@pytest.mark.parametrize("replayed", REPLAYS.values(), ids=REPLAYS)
def test_the_allocator_reserves_and_splits_as_pytorch_does(replayed):
    text, reserved, allocated = replayed
    allocator = replay(text)
    assert (allocator.reserved / MIB, allocator.allocated / MIB) == (reserved, pytest.approx(allocated, abs=1))
    assert allocator.holes == allocator.reserved - allocator.allocated


def test_blocks_beyond_the_limit_are_not_split():
    assert replay("a60 -a b30 empty", 20 * MIB).reserved == 30 * MIB
    assert replay("a60 -a b55 empty", 20 * MIB).reserved == 60 * MIB  # too little of the block would be lost


def test_memory_is_recorded_in_the_order_in_which_it_is_allocated_and_freed():
    def function():
        first = torch.zeros(1000, dtype=torch.uint8)
        second = first + 1
        del first
        torch.cuda.empty_cache()
        return second.view(10, 100)[2:]

    result, events = record(function)
    assert [event.size for event in events] == [1000, 1000, 0, 0]
    assert [event.key for event in events] == [0, 1, 0, None]
    assert len(result) == 8
