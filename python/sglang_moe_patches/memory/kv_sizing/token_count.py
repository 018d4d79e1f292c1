"""Set the KV cache size in every object of the engine that stores the number of KV cache tokens.

Two kinds of numbers stay as they are. The ``size`` attribute of a pool stays the number of tokens that have addresses,
because from 0.5.13 on CUDA graphs contain this number as a bound of their writes. A model runner's tensors with a row
for each token (from 0.5.14 on the inputs of eager forward passes) keep their size, and bound the length of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "SWATokenToKVPoolAllocator")
"""Names of the engine's allocator classes whose sizes this module can set. An allocator allocates the slots of a KV
cache to requests."""
REQUEST_MARGIN_TOKENS = 5
"""Number of tokens by which the engine's longest prompt is shorter than its longest request."""


class TokenCounts(NamedTuple):
    """KV cache size, in tokens.

    :param tokens: the engine's ``max_total_num_tokens``.
    :param full: tokens in the layers with full attention; 0 if all layers are of one kind.
    :param window: tokens in the layers with a sliding window; 0 if all layers are of one kind.
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
"""Names of the fields of :class:`TokenCounts`. The key is the name of the engine's attribute with the same number. For
example, ``swa_max_total_num_tokens`` of an engine's object is the field ``window``."""
HOLDERS = (
    "",
    *("tp_worker", "tp_worker.model_runner", "tp_worker.model_runner.memory_pool_config"),
    *("draft_worker", "draft_worker.model_runner", "draft_worker.draft_worker", "draft_worker.draft_runner"),
    *("draft_worker.draft_worker.draft_runner", "draft_worker.draft_model_runner", "draft_worker.draft_tp_worker"),
    *("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher"),
)
"""Paths to the objects of the engine that store a number of KV cache tokens, such as ``max_total_num_tokens``. A path
is a chain of attribute names that begins at the scheduler. The empty path is the scheduler itself. Each release has
only about half of these objects."""
REQUEST_LENGTHS = ("", "tp_worker", "beam_coordinator")
"""Paths to the objects of the engine that limit the length of a request by the number of KV cache tokens. A path is a
chain of attribute names, as in :data:`HOLDERS`."""


def unknown_allocator(allocator: Any) -> str:
    """Return the reason why the size of an allocator cannot be set; empty if it can be set."""
    name = type(allocator).__name__
    if name not in ALLOCATORS:
        return f"kv-sizing does not support KV cache allocators of the kind {name}"
    if getattr(allocator, "_swa_req_ring", False):
        return "the KV cache of sliding-window layers has a ring for each request, so its size depends on their number"
    return ""


def parts_of(allocator: Any) -> list[tuple[str, Any]]:
    """Return the allocators of which ``allocator`` consists. Each is paired with the name of the :class:`TokenCounts`
    field that gives its size. An allocator for sliding windows consists of two allocators (fields ``full`` and
    ``window``). Any other allocator is its own single part (field ``tokens``)."""
    if hasattr(allocator, "full_attn_allocator"):
        return [("full", allocator.full_attn_allocator), ("window", allocator.swa_attn_allocator)]
    return [("tokens", allocator)]


def set_allocator_size(allocator: Any, counts: TokenCounts) -> None:
    """Set the size attribute of an allocator. The allocator's free lists do not change until its ``clear`` method is
    called."""
    for part, owner in parts_of(allocator):
        owner.size = getattr(counts, part)
        if hasattr(owner, "num_pages"):
            owner.num_pages = owner.size // owner.page_size
    if hasattr(allocator, "full_attn_allocator"):
        allocator._size_full, allocator._size_swa = counts.full, counts.window


def resize_allocator(allocator: Any, counts: TokenCounts) -> None:
    """If an allocator has another size than ``counts``, set its size and free all of its slots. No request may use a
    slot then."""
    if any(owner.size != getattr(counts, part) for part, owner in parts_of(allocator)):
        set_allocator_size(allocator, counts)
        allocator.clear()


def set_token_count(scheduler: Any, counts: TokenCounts, longest_request: int | None = None) -> None:
    """Set the number of KV cache tokens in every object of the engine that stores it, except the allocators.

    :param longest_request: tokens of the longest request that the engine admits. ``None`` if a request may use the
        whole KV cache.
    """
    for path in HOLDERS:
        _set_attributes(_follow_path(scheduler, path), {name: getattr(counts, part) for name, part in COUNTS.items()})
    bound = (counts.full or counts.tokens) if longest_request is None else longest_request
    longest = min(scheduler.model_config.context_len, bound) - 1
    if most := getattr(
        _follow_path(scheduler, "tp_worker.model_runner.eager_runner._eager_registry"), "max_num_tokens", 0
    ):
        longest = min(longest, int(most)) if not (scheduler.chunked_prefill_size or 0) > 0 else longest
    lengths = {"max_req_len": longest, "max_req_input_len": longest - REQUEST_MARGIN_TOKENS}
    for path in REQUEST_LENGTHS:
        _set_attributes(_follow_path(scheduler, path), lengths)
    _update_metrics(scheduler, counts)


def _follow_path(owner: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, None)
    return owner


def _set_attributes(owner: Any, values: Mapping[str, int]) -> None:
    """Set integer attributes of an object, which may be a frozen dataclass. An attribute that the object does not have,
    or whose present value is not an integer, is not set. A new value of 0 is not set, either."""
    for name, value in values.items():
        if value and isinstance(getattr(owner, name, None), int):
            try:
                setattr(owner, name, value)
            except AttributeError:  # the object is a frozen dataclass
                object.__setattr__(owner, name, value)


def _update_metrics(scheduler: Any, counts: TokenCounts) -> None:
    """Update the metrics with the number of tokens. The engine writes these metrics only in its start."""
    if callable(emit := getattr(scheduler, "emit_metrics_constants", None)):  # only releases from 0.5.17 on
        emit()
        return
    for name in ("metrics_collector", "metrics_reporter.metrics_collector"):
        collector = _follow_path(scheduler, name)
        if hasattr(collector, "_log_gauge") and getattr(scheduler, "enable_metrics", True):
            collector._log_gauge(collector.max_total_num_tokens, counts.tokens)
            if hasattr(collector, "num_pages"):
                page = scheduler.token_to_kv_pool_allocator.page_size
                collector._log_gauge(collector.num_pages, counts.tokens // page)
            return


def update_init_info(info: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """Return the message from a scheduler to its launcher, with the scheduler's present numbers of tokens."""
    names = {"max_total_num_tokens", "max_req_input_len"} & info.keys()
    return {**info, **{name: getattr(scheduler, name) for name in names}}
