"""Everything in the engine that holds the number of tokens of the KV cache, so that all of it can be told another.

Not among it is a pool's own ``size``: from 0.5.13 on graphs have it baked in as a bound of what they write, so that it
stays the address space's for ever. A model runner's tensors by tokens (0.5.14 on: the inputs of eager forwards) stay
as large as they were, and bound a request's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "SWATokenToKVPoolAllocator")
"""Allocators whose sizes are known, by the engine's names."""
REQUEST_MARGIN_TOKENS = 5
"""By which the engine's longest prompt is shorter than its longest request."""


class TokenCounts(NamedTuple):
    """Tokens of a KV cache.

    :param tokens: what the engine calls ``max_total_num_tokens``.
    :param full: of the layers that attend to everything, and ``window``: of those with a sliding window; 0 where the
        cache is of one kind.
    """

    tokens: int
    full: int = 0
    window: int = 0


COUNTS: Mapping[str, str] = {
    "max_total_num_tokens": "tokens",
    "full_max_total_num_tokens": "full",
    "swa_max_total_num_tokens": "window",
    "full_tokens_per_layer": "full",
    "swa_tokens_per_layer": "window",
}
"""The engine's attributes, and the part of :class:`TokenCounts` that they hold."""
HOLDERS = (
    "",
    *("tp_worker", "tp_worker.model_runner", "tp_worker.model_runner.memory_pool_config"),
    *("draft_worker", "draft_worker.model_runner", "draft_worker.draft_worker", "draft_worker.draft_runner"),
    *("draft_worker.draft_worker.draft_runner", "draft_worker.draft_model_runner", "draft_worker.draft_tp_worker"),
    *("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher"),
)
"""Objects that have some of them, from the scheduler on; a release has no more than half of these."""
REQUEST_LENGTHS = ("", "tp_worker", "beam_coordinator")
"""Objects that bound a request's length by it, from the scheduler on."""


def unknown_allocator(allocator: Any) -> str:
    """Why an allocator's size cannot be set; "": it can."""
    name = type(allocator).__name__
    if name not in ALLOCATORS:
        return f"allocators of the kind {name} are not known"
    if getattr(allocator, "_swa_req_ring", False):
        return "sliding windows of this kind have a ring for each request, whose size goes with requests"
    return ""


def parts_of(allocator: Any) -> list[tuple[str, Any]]:
    """The parts of :class:`TokenCounts` that an allocator hands out, each with what hands it out."""
    if hasattr(allocator, "full_attn_allocator"):
        return [("full", allocator.full_attn_allocator), ("window", allocator.swa_attn_allocator)]
    return [("tokens", allocator)]


def set_allocator_size(allocator: Any, counts: TokenCounts) -> None:
    """Set an allocator's size; which slots are free does not change until it is cleared."""
    for part, each in parts_of(allocator):
        each.size = getattr(counts, part)
        if hasattr(each, "num_pages"):
            each.num_pages = each.size // each.page_size
    if hasattr(allocator, "full_attn_allocator"):
        allocator._size_full, allocator._size_swa = counts.full, counts.window


def resize_allocator(allocator: Any, counts: TokenCounts) -> None:
    """Have an allocator hand out the slots of so many tokens. Nobody may hold one, if that is another number."""
    if any(each.size != getattr(counts, part) for part, each in parts_of(allocator)):
        set_allocator_size(allocator, counts)
        allocator.clear()


def set_token_count(scheduler: Any, counts: TokenCounts, longest_request: int | None = None) -> None:
    """Tell a number of tokens to whatever holds one, but to the allocators.

    :param longest_request: tokens; a longer one is not taken in any more. ``None``: as long as the KV cache.
    """
    for path in HOLDERS:
        _set(_find(scheduler, path), {name: getattr(counts, part) for name, part in COUNTS.items()})
    bound = (counts.full or counts.tokens) if longest_request is None else longest_request
    longest = min(scheduler.model_config.context_len, bound) - 1
    if most := getattr(_find(scheduler, "tp_worker.model_runner.eager_runner._eager_registry"), "max_num_tokens", 0):
        longest = min(longest, int(most)) if not (scheduler.chunked_prefill_size or 0) > 0 else longest
    lengths = {"max_req_len": longest, "max_req_input_len": longest - REQUEST_MARGIN_TOKENS}
    for path in REQUEST_LENGTHS:
        _set(_find(scheduler, path), lengths)
    _tell_metrics(scheduler, counts)


def _find(owner: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, None)
    return owner


def _set(owner: Any, values: Mapping[str, int]) -> None:
    """Set those of the values that an object has: some of the engine's are frozen once they are made."""
    for name, value in values.items():
        if value and isinstance(getattr(owner, name, None), int):
            try:
                setattr(owner, name, value)
            except AttributeError:  # a frozen dataclass
                object.__setattr__(owner, name, value)


def _tell_metrics(scheduler: Any, counts: TokenCounts) -> None:
    """Metrics that the engine writes once, when it starts."""
    if callable(tell := getattr(scheduler, "emit_metrics_constants", None)):  # from 0.5.17 on
        tell()
        return
    for name in ("metrics_collector", "metrics_reporter.metrics_collector"):
        collector = _find(scheduler, name)
        if hasattr(collector, "_log_gauge") and getattr(scheduler, "enable_metrics", True):
            collector._log_gauge(collector.max_total_num_tokens, counts.tokens)
            if hasattr(collector, "num_pages"):
                page = scheduler.token_to_kv_pool_allocator.page_size
                collector._log_gauge(collector.num_pages, counts.tokens // page)
            return


def init_info(info: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """What a scheduler tells its launcher, with the numbers that it has now."""
    names = {"max_total_num_tokens", "max_req_input_len"} & info.keys()
    return {**info, **{name: getattr(scheduler, name) for name in names}}
