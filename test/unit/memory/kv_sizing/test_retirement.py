"""Giving back the tail of a KV cache: no slot is lost, given twice, or used after its memory has gone."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_moe_patches.memory.kv_sizing.serving import Retirement
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts, resize_allocator, set_token_count


class Allocator:
    """As the engine's, page by page: free ones are taken from the front, and come back where ``lifo`` says."""

    def __init__(self, size, page, lifo):
        self.size, self.page_size, self.lifo = size, page, lifo
        if page > 1:
            self.num_pages = size // page
        self.clear()

    def clear(self):
        self.free_pages = torch.arange(1, self.size // self.page_size + 1)
        self.release_pages = torch.empty(0, dtype=torch.int64)

    def available_size(self):
        return (len(self.free_pages) + len(self.release_pages)) * self.page_size

    def alloc(self, pages):
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return taken

    def free(self, pages):
        self.free_pages = torch.cat((pages, self.free_pages) if self.lifo else (self.free_pages, pages))
        assert self.available_size() <= self.size  # as the engine's of sliding windows


STEPS = st.lists(st.tuples(st.sampled_from(["alloc", "free", "turn", "flush"]), st.integers(1, 9)), max_size=40)


@given(STEPS, st.sampled_from([1, 4]), st.booleans(), st.integers(10, 30), st.integers(0, 10**6))
@settings(max_examples=300)
def test_in_every_turn_free_and_held_slots_add_up_to_what_the_engine_believes(steps, page, lifo, wanted, seed):
    draw = random.Random(seed)
    allocator = Allocator(40 * page, page, lifo)
    held = [allocator.alloc(draw.randrange(1, 8)) for _ in range(draw.randrange(6))]
    told = [40 * page]
    retirement = Retirement(
        allocator, TokenCounts(40 * page), TokenCounts(wanted * page), lambda counts: told.append(counts.tokens)
    )
    for what, number in [*steps, ("turn", 1)]:
        if what == "alloc" and len(allocator.free_pages) >= number:
            held.append(allocator.alloc(number))
        elif what == "free" and held:
            allocator.free(held.pop(draw.randrange(len(held))))
        elif what == "flush":
            held.clear()
            allocator.clear()
        elif what == "turn":
            retirement.go_on()
            assert not (allocator.free_pages > wanted).any()
        in_use = torch.cat([*held, allocator.free_pages, allocator.release_pages]).tolist()
        assert len(set(in_use)) == len(in_use)  # none twice
        assert len(in_use) * page == told[-1] == allocator.size
        assert max(in_use, default=0) * page <= retirement.backed().tokens  # memory is behind each
        assert set(range(1, wanted + 1)) <= set(in_use)  # none lost
    assert retirement.done == (told[-1] == wanted * page)


def test_when_nobody_holds_a_slot_of_the_tail_the_allocator_is_as_one_of_that_size():
    allocator = Allocator(40, 1, False)
    held = allocator.alloc(40)
    retirement = Retirement(allocator, TokenCounts(40), TokenCounts(25), lambda counts: None)
    assert not retirement.go_on()  # every slot is held
    assert (retirement.in_use().tokens, retirement.backed().tokens) == (40, 40)
    allocator.free(held[10:38])
    assert retirement.go_on()
    assert (retirement.in_use().tokens, retirement.backed().tokens, retirement.done) == (27, 40, False)
    allocator.free(held[39:])
    assert retirement.go_on()
    assert (retirement.in_use().tokens, retirement.backed().tokens) == (26, 39)
    allocator.free(held[38:39])
    assert retirement.go_on()
    assert (retirement.done, allocator.size, "clear" in vars(allocator)) == (True, 25, False)
    allocator.free(held[:10])
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 26))


def hybrid(size_full, size_window):
    full, window = Allocator(size_full, 1, False), Allocator(size_window, 1, False)
    made = SimpleNamespace(full_attn_allocator=full, swa_attn_allocator=window, page_size=1)
    made._size_full, made._size_swa = size_full, size_window
    made.clear = lambda: (full.clear(), window.clear())
    return made


@pytest.mark.parametrize("flushed", [True, False])
def test_both_kinds_of_a_sliding_window_cache_come_back(flushed):
    allocator = hybrid(100, 50)
    held = allocator.full_attn_allocator.alloc(90), allocator.swa_attn_allocator.alloc(45)
    told: list[TokenCounts] = []
    retirement = Retirement(allocator, TokenCounts(100, 100, 50), TokenCounts(60, 60, 30), told.append)
    retirement.go_on()
    assert told[-1] == TokenCounts(90, 90, 45)
    if flushed:
        allocator.clear()
    else:
        allocator.full_attn_allocator.free(held[0])
        allocator.swa_attn_allocator.free(held[1])
    retirement.go_on()
    assert (told[-1], retirement.backed(), retirement.done) == (TokenCounts(60, 60, 30),) * 2 + (True,)
    assert (allocator._size_full, allocator._size_swa) == (60, 30)
    assert len(allocator.full_attn_allocator.free_pages), len(allocator.swa_attn_allocator.free_pages) == (60, 30)


@pytest.mark.parametrize("page", [1, 64])
def test_a_resized_allocator_has_each_slot_once(page):
    allocator = Allocator(640, page, False)
    allocator.alloc(3)
    for tokens in (1280, 128):
        resize_allocator(allocator, TokenCounts(tokens))
        assert allocator.free_pages.tolist() == list(range(1, tokens // page + 1))
        assert getattr(allocator, "num_pages", tokens) == tokens // page


def test_what_would_not_fit_at_the_goal_is_not_taken_in_before_it():
    """Or it would wait for ever, and all behind it."""
    numbers = {"max_total_num_tokens": 900, "max_req_len": 899, "chunked_prefill_size": 64}
    scheduler = SimpleNamespace(**numbers, model_config=SimpleNamespace(context_len=5000))
    set_token_count(scheduler, TokenCounts(800), TokenCounts(300))
    assert (scheduler.max_total_num_tokens, scheduler.max_req_len) == (800, 299)
    set_token_count(scheduler, TokenCounts(700))
    assert (scheduler.max_total_num_tokens, scheduler.max_req_len) == (700, 699)
