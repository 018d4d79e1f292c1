"""A long cached prefix without computing it: slots in the radix cache that hold whatever their memory holds.

How much memory a chunk behind a prefix takes depends on the prefix's length, not on what the cache has of it. The
answers of a rehearsal are thrown away, and the flush at its end empties the cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

CACHES = ("RadixCache", "UnifiedRadixCache")
"""The engine's caches that take a prefix and its slots alone, by their class. Those of sliding windows and of states
want more with them, and those of external stores would hand them on."""
ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")


def can_plant(scheduler: Any) -> bool:
    """Whether this scheduler's cache takes a prefix that was not computed; alike on all ranks of a server."""
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    parts = [getattr(part, "name", str(part)) for part in getattr(tree, "tree_components", ("FULL",))]
    return (
        type(tree).__name__ in CACHES
        and type(allocator).__name__ in ALLOCATORS
        and not tree.disable
        and parts == ["FULL"]
        and int(tree.page_size) == int(allocator.page_size)
        and getattr(tree, "cache_controller", None) is None  # a hierarchical cache's
        and getattr(tree, "linker", None) is None  # an external store's
    )


def plant(scheduler: Any, tokens: Sequence[int]) -> bool:
    """Have the radix cache hold a prefix, as if a request with it had ended; what it has of it already stays.

    To be called on every rank in the same turn of its loop, outside a forward.

    :param tokens: the prefix; what is left of it behind its last whole page is not held. For EAGLE, whose keys are
        pairs of tokens, one token less is.
    :returns: whether the cache holds it now; ``False``: it cannot, or has no room, and is as before except for what it
        evicted.
    """
    if not can_plant(scheduler):
        return False
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    wants_array = "array" in str(RadixKey.__init__.__annotations__["token_ids"])
    pairs = bool(getattr(tree, "tree_core", tree).is_eagle)

    def key() -> Any:  # the engine changes those that it is given
        return RadixKey(array("q", tokens) if wants_array else list(tokens), None, is_bigram=pairs)

    def held() -> int:
        match = tree.match_prefix(MatchPrefixParams(key=key()))
        told = getattr(match, "device_prefix_len", None)  # 0.5.23's match has no indices
        return len(match.device_indices) if told is None else int(told)

    whole = key().page_aligned(allocator.page_size)
    lacking = len(whole) - held() - allocator.available_size()
    if lacking > 0:
        tree.evict(EvictParams(num_tokens=lacking))
    before = held()  # what was evicted may have been of it
    if before == len(whole):
        return True
    slots = allocator.alloc(len(whole) - before)
    if slots is None:
        return False
    # The cache keeps its own slots of what it has: it reads none of those that are given for them, and frees none.
    value = torch.cat([slots.new_zeros(before), slots])
    tree.insert(InsertParams(key=whole, value=value, prev_prefix_len=before))
    return held() == len(whole)
