"""Tests of planted prefixes. To plant a prefix, kv-sizing puts it into the prefix cache without computing it. The
caches and allocators are the engine's own, on each release."""

from __future__ import annotations

import inspect
from array import array
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.memory.kv_sizing import phases
from sglang_moe_patches.memory.kv_sizing.phases import PhaseKind
from sglang_moe_patches.memory.kv_sizing.planted_prefix import ALLOCATORS, can_plant, plant

MEM_CACHE = "sglang.srt.mem_cache."
SIZE = 64 * 300
LIMITS = phases.Limits(2048, 8192, SIZE, 9, 0, plants=True)


def allocator_of(page: int, name: str = "") -> Any:
    module = engine_code.import_module(MEM_CACHE + "allocator")
    kind = getattr(module, name or ALLOCATORS[page > 1])
    pages = {"page_size": page} if page > 1 else {}
    return kind(size=SIZE, **pages, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False)


def scheduler_of(kind: str, page: int, eagle: bool = False, *, disable: bool = False) -> Any:
    """Make a stand-in for a scheduler that has only the engine's prefix cache and allocator."""
    params = engine_code.import_module(MEM_CACHE + "cache_init_params").CacheInitParams
    allocator = allocator_of(page)
    given: dict[str, Any] = {"disable": disable, "req_to_token_pool": None, "page_size": page, "is_eagle": eagle}
    if "tree_components" in {each.name for each in fields(params)}:
        module = (
            "unified_cache.component_type"
            if engine_code.has_module(MEM_CACHE + "unified_cache")
            else "unified_radix_cache"
        )
        given["tree_components"] = (engine_code.import_module(MEM_CACHE + module).ComponentType.FULL,)
    cache = getattr(
        engine_code.import_module(MEM_CACHE + ("radix_cache" if kind == "RadixCache" else "unified_radix_cache")), kind
    )
    tree = cache(params(token_to_kv_pool_allocator=allocator, **given))
    return SimpleNamespace(tree_cache=tree, token_to_kv_pool_allocator=allocator)


def make_key(tokens: list[int]) -> Any:
    kind = engine_code.import_module(MEM_CACHE + "radix_cache").RadixKey
    wants_array = "array" in str(kind.__init__.__annotations__["token_ids"])
    return kind(array("q", tokens) if wants_array else tokens, None)


def cached_prefix_tokens(scheduler: Any, prompt: list[int]) -> int:
    """Return how many tokens at the beginning of a prompt are in the prefix cache."""
    match = scheduler.tree_cache.match_prefix(
        engine_code.import_module(MEM_CACHE + "base_prefix_cache").MatchPrefixParams(key=make_key(prompt))
    )
    return match.device_prefix_len if hasattr(match, "device_prefix_len") else len(match.device_indices)


def checked_cache_tokens(scheduler: Any) -> int:
    """Return the number of tokens in the prefix cache. First check that free and cached tokens add up to all tokens.
    The engine uses the same check to find leaks."""
    tree, free = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator.available_size()
    cached_tokens = tree.evictable_size() + tree.protected_size()
    assert free + cached_tokens == SIZE
    return cached_tokens


CACHES = [
    pytest.param(kind, page, eagle, id=f"{kind}-{page}{'-eagle' * eagle}")
    for kind in ("RadixCache", "UnifiedRadixCache")
    for page in (1, 64)
    for eagle in (False, True)
]


@pytest.mark.every_release
@pytest.mark.parametrize(("kind", "page", "eagle"), CACHES)
def test_requests_find_as_much_of_a_planted_prefix_as_their_phase_needs(kind, page, eagle):
    """The requests of a phase find as many tokens of a planted prefix in the cache as the phase needs. With EAGLE, the
    keys of the engine's cache are pairs of tokens, so the cache finds one token less."""
    limits = replace(LIMITS, page=page, draft_tokens=4, draft_slots=8)
    driven = {phase.kind: phase for phase in phases.derive_phases(limits)}
    scheduler = scheduler_of(kind, page, eagle)
    for each in (PhaseKind.BEHIND_PREFIX, PhaseKind.SHARED_PREFIX, PhaseKind.LONG_AMONG_SHORT):
        phase = driven[each]
        assert plant(scheduler, phases.shared_prefix(phase.shared, limits))
        shared, fresh = max(phase.prompts, key=sum)
        longest = phases.shared_prefix(shared, limits) + phases.Tokens("behind", 1000).draw(fresh)
        had, rest = cached_prefix_tokens(scheduler, longest), len(longest) - cached_prefix_tokens(scheduler, longest)
        if each is PhaseKind.BEHIND_PREFIX:
            assert had >= phase.bound.longest_prefix > limits.input_tokens // 2
            assert rest >= phase.bound.tokens == limits.chunk
        elif each is PhaseKind.SHARED_PREFIX:
            assert phase.bound.requests * had >= phase.bound.prefix
            assert limits.chunk >= phase.bound.requests * rest >= phase.bound.tokens
        else:
            assert 0 <= rest - fresh <= page + eagle
    checked_cache_tokens(scheduler)


@pytest.mark.every_release
@pytest.mark.parametrize(("kind", "page", "eagle"), CACHES)
def test_planting_loses_no_slot_and_duplicates_none_whatever_is_cached(kind, page, eagle):
    scheduler = scheduler_of(kind, page, eagle)
    prefix = phases.shared_prefix(5000, LIMITS)
    whole = (len(prefix) - eagle) // page * page
    # Plant another prompt with the same beginning, then a part of the prefix, the whole prefix, and the whole prefix
    # again.
    others = [prefix[:1000] + phases.Tokens("other", 1000).draw(300), prefix[:3000], prefix, prefix]
    taken = []
    for tokens in others:
        assert plant(scheduler, tokens)
        assert cached_prefix_tokens(scheduler, [*tokens, 1]) == (len(tokens) - eagle) // page * page
        taken.append(checked_cache_tokens(scheduler))
    assert taken[3] == taken[2] == whole + taken[0] - (1000 - eagle) // page * page
    # If there is no room, planting evicts other prefixes. This prefix needs all but 1,000 tokens of the cache.
    rest = phases.Tokens("rest", 1000).draw(SIZE - 1000)
    assert plant(scheduler, rest)
    assert cached_prefix_tokens(scheduler, [*rest, 1]) == (len(rest) - eagle) // page * page
    checked_cache_tokens(scheduler)
    assert not plant(scheduler, phases.Tokens("too long", 1000).draw(SIZE + 2 * page))
    checked_cache_tokens(scheduler)
    # Empty the cache and the allocator as a flush of the engine does.
    scheduler.tree_cache.reset()
    scheduler.token_to_kv_pool_allocator.clear()
    assert (checked_cache_tokens(scheduler), cached_prefix_tokens(scheduler, prefix)) == (0, 0)
    assert scheduler.token_to_kv_pool_allocator.available_size() == SIZE


@pytest.mark.every_release
@pytest.mark.parametrize("kind", ["RadixCache", "UnifiedRadixCache"])
def test_a_planted_prefix_has_its_own_slots(kind):
    """Each slot of a planted prefix returns to the allocator exactly once when the prefix is evicted. A planted prefix
    was inserted into the radix cache with slots of the KV cache, but without computing its keys and values."""
    scheduler = scheduler_of(kind, 1)
    allocator = scheduler.token_to_kv_pool_allocator
    in_use = allocator.alloc(100)
    prefix = phases.shared_prefix(3000, LIMITS)
    for count in (1000, 3000):
        assert plant(scheduler, prefix[:count])
    scheduler.tree_cache.evict(engine_code.import_module(MEM_CACHE + "base_prefix_cache").EvictParams(num_tokens=3000))
    assert cached_prefix_tokens(scheduler, prefix) == 0
    free = allocator.alloc(allocator.available_size())
    assert sorted([*free.tolist(), *in_use.tolist()]) == list(range(1, SIZE + 1))


@pytest.mark.every_release
def test_nothing_is_planted_into_a_cache_that_needs_more_than_a_prefix():
    def of(**changed: Any) -> Any:
        made = scheduler_of("RadixCache", 1)
        return SimpleNamespace(**{**vars(made), **changed})

    unified = scheduler_of("UnifiedRadixCache", 1)
    assert can_plant(of())
    assert can_plant(unified)
    windows = SimpleNamespace(name="SWA")
    unified.tree_cache.tree_components = (*unified.tree_cache.tree_components, windows)
    attached = scheduler_of("RadixCache", 1)
    attached.tree_cache.cache_controller = object()
    other_pages = of(token_to_kv_pool_allocator=allocator_of(64))
    chunked = inspect.getattr_static(engine_code.import_module(MEM_CACHE + "radix_cache"), "RadixCache")
    derived = of()
    derived.tree_cache.__class__ = type("HiRadixCache", (chunked,), {})
    for refused in (unified, attached, other_pages, derived, scheduler_of("RadixCache", 1, disable=True)):
        assert not can_plant(refused)
        assert not plant(refused, [3, 4, 5])
