"""Plant a prefix: insert a long prefix into the radix cache without computing it.

The slots of a planted prefix contain arbitrary bytes. A rehearsal measures the memory of a prefill chunk that follows a
long cached prefix. That memory depends on the length of the prefix, not on its values. No user's request finds the
prefix, because a flush at the end of the rehearsal empties the cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

CACHES = ("RadixCache", "UnifiedRadixCache")
"""Names of the engine's cache classes into which a prefix can be planted. These classes need only the prefix and its
slots. Caches with sliding windows or states need more. Caches with an external store would copy the prefix to the
store."""
ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
"""Names of the engine's allocator classes that allocate the slots of a single KV cache."""


def can_plant(scheduler: Any) -> bool:
    """Return whether a prefix can be planted into the cache of this scheduler. The result is the same on all ranks."""
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
    """Insert a prefix into the radix cache, as if a request with the prefix had ended.

    Every rank must call this function in the same turn (iteration of the scheduler's event loop), outside a forward
    pass.

    :param tokens: the prefix. Only whole pages are inserted, so tokens after the last whole page are left out. With
        EAGLE the cache's keys are pairs of tokens, so one more token is left out.
    :returns: whether the cache has the prefix now; ``False`` if this cache does not support planting, or if the KV
        cache has no room for the prefix. Prefixes that were evicted to make room stay evicted.
    """
    if not can_plant(scheduler):
        return False
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    wants_array = "array" in str(RadixKey.__init__.__annotations__["token_ids"])
    pairs = bool(getattr(tree, "tree_core", tree).is_eagle)

    def key() -> Any:  # a new key for each call, because the engine changes the key
        return RadixKey(array("q", tokens) if wants_array else list(tokens), None, is_bigram=pairs)

    def cached_tokens() -> int:
        match = tree.match_prefix(MatchPrefixParams(key=key()))
        length = getattr(match, "device_prefix_len", None)  # in 0.5.23, the result of a match has no indices
        return len(match.device_indices) if length is None else int(length)

    whole = key().page_aligned(allocator.page_size)
    missing = len(whole) - cached_tokens() - allocator.available_size()
    if missing > 0:
        tree.evict(EvictParams(num_tokens=missing))
    before = cached_tokens()  # the cache may have evicted a part of this prefix
    if before == len(whole):
        return True
    slots = allocator.alloc(len(whole) - before)
    if slots is None:
        return False
    # For tokens that the cache already has, the cache keeps its own slots. It ignores the zeros in `value`.
    value = torch.cat([slots.new_zeros(before), slots])
    tree.insert(InsertParams(key=whole, value=value, prev_prefix_len=before))
    return cached_tokens() == len(whole)
