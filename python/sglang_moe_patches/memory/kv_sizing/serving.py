"""While a server with a sized KV cache serves, watch its free memory and limit its requests.

If free memory runs short, the server shrinks its KV cache to a smaller size, the *goal*, and goes on serving. The slots
after the goal are the *tail*. A slot of the tail is *held* while a request or a cached prefix uses it. A free slot of
the tail is *withdrawn*: removed from the engine's free lists, so that no request gets it. A running request is never
touched. Memory is unmapped when none of its slots is held any more.

A *turn* is one iteration of the scheduler's event loop. An *order* is a message of rank 0, which all ranks carry out in
the same turn. The *margin* is the memory that should stay free on each GPU. The *floor* is the size below which the KV
cache does not shrink.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches.core import log
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing import token_count
from sglang_moe_patches.memory.kv_sizing.pools import ElasticPools
from sglang_moe_patches.memory.kv_sizing.ranks import Board, Order, Orders, is_idle
from sglang_moe_patches.memory.kv_sizing.sizing import LOW_MARGIN_FRACTION, format_megabytes
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts, parts_of, set_allocator_size

SAMPLE_INTERVAL_S = 1.0
"""Seconds between two readings of the free memory. A reading also shows the memory of forward passes that have ended,
because PyTorch's allocator keeps it."""
SHORT_REPORT, HELD_REPORT = "memory is short", "only cached prefixes use slots of the tail"
"""Names of two flags by which a rank reports to rank 0 on the board (:class:`.ranks.Board`): the rank is short of
memory, or cached prefixes still use slots that the rank must free. The number of earlier orders is appended to each
name, so that rank 0 can ignore old reports."""
FREE_LISTS = ("free_pages", "release_pages")
"""Attributes of the engine's allocator that are tensors with the numbers of free pages. From 0.5.21 on,
``staged_pages`` is a list of further such tensors."""


@dataclass(frozen=True)
class Retire(Order):
    """Order to shrink the KV cache.

    :param tokens: KV cache size after the order, in tokens.
    """

    tokens: int


@dataclass(frozen=True)
class EvictPrefixes(Order):
    """Order to the ranks: free the slots of the tail that only cached prefixes use. The *tail* is the slots that the
    shrinking KV cache gives up.

    An idle rank flushes its prefix cache. A busy rank evicts prefixes, the least recently used first, until it has
    evicted as many tokens as the tail has slots in use.
    """


class FreeMemory:
    """Reader of the free memory of one rank's GPU, and the time of its next reading.

    :param read: function that returns the bytes that are free now.
    :param margin: bytes that must stay free.
    :param clock: function that returns the time in seconds.
    """

    def __init__(self, read: Callable[[], Memory], margin: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self.margin, self.clock = read, margin, clock
        self.lowest = read().free
        self.next_reading = clock()
        """Time of the next reading, as ``clock`` counts it, in seconds."""

    def schedule_next_reading(self) -> None:
        """Set the time of the next reading to :data:`SAMPLE_INTERVAL_S` from now."""
        self.next_reading = self.clock() + SAMPLE_INTERVAL_S

    def measure_shortage(self) -> int:
        """Read the free memory, and return the number of bytes to free until the whole margin is free again. If at
        least half of the margin is free, nothing needs to be freed, and the result is 0."""
        free = self._read().free
        self.lowest = min(self.lowest, free)
        return self.margin - free if free < LOW_MARGIN_FRACTION * self.margin else 0


# --- Metrics ----------------------------------------------------------------------------------------------------------

PREFIX = "sglang_moe_patches:"
TOKENS, BY_RULE, NEED, LOWEST_FREE, GIVEN_BACK, STATE = (
    PREFIX + name
    for name in ("kv_tokens", "kv_tokens_by_rule", "need_bytes", "lowest_free_bytes", "given_back_bytes", "kv_state")
)
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    TOKENS: ("Tokens of the KV cache.", ()),
    BY_RULE: ("Tokens of the KV cache by the engine's own rule.", ()),
    NEED: ("Bytes of forward passes and graphs in addition to weights and KV cache, on the rank that needs most.", ()),
    LOWEST_FREE: ("Lowest free memory of a rank's GPU since the server began to serve, in bytes.", ()),
    GIVEN_BACK: ("Bytes of KV cache memory that were freed while serving.", ()),
    STATE: (
        "Always 1. The label state is grown, shrunk or rule; the label reason says why the size is not measured.",
        ("state", "reason"),
    ),
}
"""Help text and labels of each metric. The key is the metric's name. The labels ``gpu`` and ``rank`` are left out."""


class Metrics:
    """Metrics of one rank. With ``--enable-metrics``, the endpoint ``/metrics`` reports them.

    :param arguments: the server's resolved arguments.
    :param gpu: number of the rank's GPU. It is a label of each metric, because ranks of two replicas may have the same
        rank number.
    """

    def __init__(self, arguments: Mapping[str, Any], gpu: int) -> None:
        self._gauges: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        if not arguments.get("enable_metrics"):
            return
        try:
            # Import after the engine has chosen the folder in which its processes share their metrics.
            from prometheus_client import Gauge
            from sglang.srt.distributed.parallel_state import get_world_group

            self._labels = {"gpu": str(gpu), "rank": str(get_world_group().rank_in_group)}
            for name, (text, labels) in GAUGES.items():
                # "mostrecent": if several processes set the metric of one rank, the latest value is reported.
                names = (*self._labels, *labels)
                self._gauges[name] = Gauge(name, text, labelnames=names, multiprocess_mode="mostrecent")
        except Exception as error:
            log.logger.warning(
                log.format_line(
                    "kv-sizing", "the metrics of kv-sizing are off; the engine's metrics are not affected: %s"
                ),
                error,
            )
            self._gauges = {}

    def show(self, name: str, value: float, **labels: str) -> None:
        """Set a metric to a value.

        :param name: name of the metric, a key of :data:`GAUGES`.
        :param labels: values of the metric's own labels.
        """
        if name in self._gauges:
            self._gauges[name].labels(**self._labels, **labels).set(value)


# --- Watching free memory --------------------------------------------------------------------------------------------


class Serving:
    """Watch the free memory of one rank, from the first user's request on.

    If memory is short, rank 0 orders all ranks to shrink their KV cache to the same size, the goal. Each rank keeps
    room for its own longest request until this request has ended, so a rank may reach the goal later than rank 0.

    :param board: board on which ranks report to rank 0.
    :param metrics: metrics of the rank.
    :param leads: whether this is rank 0.
    :param extra_tokens: tokens of the KV cache that a request takes in addition to its prompt and its new tokens.
    """

    def __init__(
        self,
        scheduler: Any,
        pools: ElasticPools,
        memory: FreeMemory,
        orders: Orders,
        board: Board,
        metrics: Metrics,
        *,
        leads: bool,
        extra_tokens: int,
    ) -> None:
        self._scheduler, self._pools, self._memory = scheduler, pools, memory
        self._orders, self._board, self._metrics, self._leads = orders, board, metrics, leads
        # The engine admits a request only if more tokens are free than it may take. Else the request waits for ever.
        self._extra_tokens_per_request = extra_tokens + 1
        self._goal = pools.counts.tokens
        self._retirement: Retirement | None = None
        self._order_is_pending = self._is_shrinking = self._is_at_bound = False
        self._failures: set[str] = set()
        self._freed_bytes = self._retire_orders = self._evict_orders = 0
        metrics.show(GIVEN_BACK, 0)

    def run_turn(self) -> None:
        """Read the free memory every :data:`SAMPLE_INTERVAL_S` seconds. While the KV cache shrinks, remove the free
        slots after its new size from the allocator's free lists. The scheduler's event loop calls this method in every
        turn."""
        memory = self._memory
        is_due = memory.clock() >= memory.next_reading
        if is_due or self._is_shrinking:
            self._run_steps(is_due)

    def _run_steps(self, is_due: bool) -> None:
        if is_due:
            self._memory.schedule_next_reading()
        # All ranks must withdraw slots in the same turns. So a rank goes on withdrawing slots even if it cannot read
        # its free memory.
        steps = ((self._withdraw, "KV cache memory is not freed"), (self._sample, "free memory is not watched"))
        for step, failure in steps if is_due else steps[:1]:
            if failure in self._failures:
                continue
            try:
                step()
            except Exception as error:
                self._failures.add(failure)
                log.logger.warning(
                    log.format_line("kv-sizing", "%s any more, so memory may run out: %s"), failure, error
                )
        self._is_shrinking = self._retirement is not None or self._goal < self._pools.counts.tokens

    def _sample(self) -> None:
        shortage = self._memory.measure_shortage()
        self._metrics.show(LOWEST_FREE, self._memory.lowest)
        prefixes_hold_tail = False
        if self._goal < self._pools.counts.tokens:  # the slots that the last order withdraws are still held
            shortage, prefixes_hold_tail = 0, bool(shortage) or is_idle(self._scheduler)
        short_report = f"{SHORT_REPORT} {self._retire_orders}"
        held_report = f"{HELD_REPORT} {self._retire_orders} {self._evict_orders}"
        if not self._leads:
            if shortage:
                self._board.raise_flag(short_report)
            if prefixes_hold_tail:
                self._board.raise_flag(held_report)
            return
        if prefixes_hold_tail or self._board.is_raised(held_report):
            self._orders.send(EvictPrefixes())
        another_is_short = self._board.is_raised(short_report)
        if not self._order_is_pending and (shortage or another_is_short):
            # A report does not say how many bytes are missing. After half of the margin was freed, the reporting rank
            # is no longer short.
            missing_bytes = max(shortage, int(self._memory.margin * LOW_MARGIN_FRACTION))
            self._send_goal(missing_bytes, repeat=another_is_short)

    def _send_goal(self, missing_bytes: int, *, repeat: bool) -> None:
        """Order all ranks to free ``missing_bytes`` of the KV cache.

        The KV cache never becomes smaller than a *bound*: the size for the longest request, or the floor
        (:func:`floor_tokens`) if it is larger. The bound falls when the longest request ends. At the bound, the server
        frees nothing, warns once and goes on. A forward pass may then run out of memory.

        :param repeat: send the order even if no memory can be freed. A rank that is still short then reports again.
        """
        behind_goal = self._pools.backing_bytes(self._pools.counts_for(self._goal))
        within = self._pools.tokens_within(behind_goal - missing_bytes)
        # The later stages of a pipeline learn later that a request has ended. So the longest request of rank 0 counts
        # for all stages.
        bound = max(self._longest_request(), floor_tokens(self._scheduler, self._pools))
        wanted = self._counts_in_whole_pages(max(within, bound))
        frees = self._pools.backing_bytes(wanted) < behind_goal
        is_at_bound = within < bound
        if is_at_bound and not self._is_at_bound:
            tokens = f"{min(wanted.tokens, self._goal):,} tokens"
            short = f"memory is short by {format_megabytes(missing_bytes)}, but the KV cache keeps {tokens}"
            why = "two prefill chunks or the longest request need them; free GPU memory of other processes"
            log.logger.warning(log.format_line("kv-sizing", "%s: %s"), short, why)
        self._is_at_bound = is_at_bound
        if frees or repeat:
            self._order_is_pending = True
            self._orders.send(Retire(wanted.tokens if frees else self._goal))

    def _longest_request(self) -> int:
        """Return the smallest KV cache size, in tokens, with which the longest request can be admitted and can end; 0
        if there is neither a request nor a session.

        The size includes the tokens of streaming sessions, because a session keeps the tokens of its request after the
        request has ended.
        """
        session_tokens, longest, page = tokens_of_sessions(self._scheduler.tree_cache), 0, self._pools.page
        for request in requests_of(self._scheduler):
            session, tokens = getattr(request, "session", None), tokens_of(request)
            if session is not None and session.streaming:
                session_tokens[session.session_id] = max(tokens, session_tokens.get(session.session_id, 0))
            else:
                longest = max(longest, tokens)
        needed = longest + round_up_to_pages(session_tokens.values(), page)
        return needed + self._extra_tokens_per_request if needed else 0

    def _counts_in_whole_pages(self, tokens: int) -> TokenCounts:
        """Round ``tokens`` up to whole pages, and return the token counts of a KV cache of this size."""
        return self._pools.counts_for(tokens + self._pools.page - 1)

    def obey(self, order: Order) -> None:
        """Execute an order of rank 0, between two turns.

        :param order: a :class:`Retire` or an :class:`EvictPrefixes`.
        """
        if isinstance(order, EvictPrefixes):
            self._evict_orders += 1
            if self._retirement is None:  # another rank still has held slots in its tail, this rank has none
                return
            if is_idle(self._scheduler):
                self._scheduler.flush_cache()
            else:
                evict_prefixes(self._scheduler.tree_cache, self._retirement.held_tokens())
        elif isinstance(order, Retire):
            self._order_is_pending, self._retire_orders = False, self._retire_orders + 1
            self._goal, self._is_shrinking = min(self._goal, order.tokens), True
            self._publish_size(self._retirement.usable_counts() if self._retirement is not None else self._pools.counts)

    def _publish_size(self, counts: TokenCounts) -> None:
        """Set the engine's number of KV cache tokens. The engine then rejects requests that would not fit into the
        smaller KV cache that rank 0 has ordered."""
        goal = self._pools.counts_for(self._goal)
        longest_request = (goal.full or goal.tokens) - self._extra_tokens_per_request
        token_count.set_token_count(self._scheduler, counts, longest_request)

    def _withdraw(self) -> None:
        """While the KV cache shrinks, withdraw the free slots after its new size: remove these slots from the
        allocator's free lists. Unmap the memory after the last slot that is not withdrawn."""
        now = self._pools.counts
        if self._retirement is None and self._goal < now.tokens:
            wanted = self._counts_in_whole_pages(max(self._goal, self._longest_request()))
            if wanted.tokens < now.tokens:
                self._tokens_before = now.tokens
                allocator = self._scheduler.token_to_kv_pool_allocator
                self._retirement = Retirement(allocator, now, wanted, self._publish_size)
        retirement = self._retirement
        if retirement is None or not retirement.advance(spare_tokens(self._scheduler)):
            return
        self._freed_bytes += unmap_or_warn(self._pools, retirement.mapped_counts())
        self._metrics.show(GIVEN_BACK, self._freed_bytes)
        self._metrics.show(TOKENS, retirement.usable_counts().tokens)
        if not retirement.is_done:
            return
        self._retirement = None
        if self._leads:
            tokens = f"KV cache shrunk from {self._tokens_before:,} to {self._pools.counts.tokens:,} tokens"
            freed = f"{format_megabytes(self._freed_bytes)} freed since the server started"
            log.logger.warning(log.format_line("kv-sizing", "memory was short: %s; %s"), tokens, freed)


def requests_of(scheduler: Any) -> Iterator[Any]:
    """Yield the requests that run or wait on a scheduler. The same request may be yielded more than once."""
    yield from getattr(scheduler, "waiting_queue", None) or ()
    yield from getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "last_batch", "cur_batch")]
    batches += [*(getattr(scheduler, "mbs", None) or ()), *(getattr(scheduler, "running_mbs", None) or ())]
    for batch in batches:
        yield from getattr(batch, "reqs", None) or ()
    if (chunked := getattr(scheduler, "chunked_req", None)) is not None:
        yield chunked


def tokens_of(request: Any) -> int:
    """Return the number of KV cache tokens that a request takes at most: its prompt and its new tokens.

    The number does not include the tokens of drafts, and is not rounded up to whole pages. The beams of a request share
    its prompt, and have their own new tokens.
    """
    new = int(request.sampling_params.max_new_tokens or 0)
    return len(request.origin_input_ids) + new * beam_width(request)


def unmap_or_warn(pools: ElasticPools, counts: TokenCounts) -> int:
    """Unmap the memory of all slots after the first ``counts`` tokens. If CUDA's driver cannot unmap it, only log a
    warning: the other ranks go on with the smaller KV cache, so this rank must go on, too.

    :returns: freed bytes.
    """
    try:
        return pools.unmap_from(counts)
    except Exception as error:
        problem = "could not unmap KV cache memory on this rank, so its free memory stays low; the server goes on"
        log.logger.warning(log.format_line("kv-sizing", "%s: %s"), problem, error)
        return 0


def tokens_of_sessions(prefixes: Any) -> dict[str, int]:
    """Return the number of KV cache tokens of each streaming session. The key is the session's name.

    The engine does not free these tokens for another request. It also keeps them if it retracts the session's request.

    :param prefixes: the scheduler's ``tree_cache``.
    """
    if hasattr(prefixes, "session_records"):  # only 0.5.23 has this attribute
        records = prefixes.session_records()
    else:
        records = getattr(getattr(prefixes, "session", prefixes), "slots", None) or {}
    # Up to 0.5.13, the number is an attribute of the session's record. Later releases have it in the attribute `kv` of
    # the record.
    owners = {name: getattr(record, "kv", record) for name, record in records.items()}
    return {name: int(getattr(owner, "kv_allocated_len", 0) or 0) for name, owner in owners.items()}


def round_up_to_pages(tokens: Iterable[int], page: int) -> int:
    """Round each of several numbers of tokens up to whole pages, and return the sum."""
    return sum(-(-number // page) * page for number in tokens)


def floor_tokens(scheduler: Any, pools: ElasticPools) -> int:
    """Return the floor: the size below which the KV cache does not shrink, in tokens.

    The floor has room for two of the largest prefills of one request, and for the streaming sessions. In layers with a
    sliding window, it has room for one window, one of the largest prefills, three pages, and the streaming sessions.
    """
    largest = int(scheduler.chunked_prefill_size or scheduler.max_req_input_len)
    session_tokens = round_up_to_pages(tokens_of_sessions(scheduler.tree_cache).values(), pools.page)
    if not pools.top.window:
        return 2 * largest + session_tokens
    window = int(scheduler.tp_worker.model_runner.sliding_window_size or 0)
    return max(
        2 * largest + session_tokens, pools.tokens_with_window(largest + window + 3 * pools.page + session_tokens)
    )


def spare_tokens(scheduler: Any) -> float:
    """Return the number of KV cache tokens that can be withdrawn without taking room from a partly computed prompt. The
    number counts free tokens and evictable tokens.

    The engine computes the next chunk of such a prompt without checking whether there is room. The number is infinite
    if no prompt is partly computed, or if the engine checks for room, as it does with sliding windows.
    """
    chunked = getattr(scheduler, "chunked_req", None)
    if chunked is None:
        return math.inf
    allocator = scheduler.token_to_kv_pool_allocator
    if hasattr(allocator, "full_attn_allocator"):  # with this allocator, the engine checks for room
        return math.inf
    try:
        evictable = scheduler.tree_cache.evictable_size()
    except NotImplementedError:  # this cache counts the states of Mamba layers separately
        evictable = scheduler.tree_cache.full_evictable_size()
    available = int(allocator.available_size()) + int(evictable)
    holders = (chunked, getattr(chunked, "kv", None))  # from 0.5.18 on, `kv` has the number
    computed = max(int(getattr(holder, "kv_committed_len", 0) or 0) for holder in holders)
    needed_tokens, page = len(chunked.origin_input_ids) + len(chunked.output_ids) - computed, int(allocator.page_size)
    if getattr(scheduler, "is_mixed_chunk", False):  # a mixed chunk also has one token of each decoding request
        rows = len(scheduler.running_batch.reqs)
        chunk = max(1, int(scheduler.chunked_prefill_size or 1) - rows)
        needed_tokens += rows * (-(-needed_tokens // chunk) + 1 + page)
    return max(0, available - needed_tokens - 2 * page)


def evict_prefixes(prefixes: Any, tokens: int) -> None:
    """Evict prefixes with ``tokens`` tokens from the prefix cache. If the engine raises an error, the prefixes stay in
    the cache.

    :param prefixes: the scheduler's ``tree_cache``.
    """
    try:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        prefixes.evict(EvictParams(num_tokens=tokens, swa_num_tokens=tokens))
    except Exception as error:
        log.logger.warning(
            log.format_line("kv-sizing", "cached prefixes could not be evicted, so their memory is not freed: %s"),
            error,
        )


# --- Giving back the tail of the KV cache ----------------------------------------------------------------------------
# Between two turns of the scheduler, free slots of the tail are withdrawn: removed from the allocator's free lists. The
# engine's number of tokens counts the slots before the tail, and the held slots of the tail. The engine
# checks that free, cached and running tokens add up to this number. The check passes in every turn. The only patched
# method of the allocator is ``clear``, because a flush frees every slot at once.


class _Tail:
    """Tail of the KV cache, for one kind of layers: the pages that the smaller KV cache does not have. These are the
    pages after page ``kept``, up to page ``size``.

    The attribute ``held`` has one boolean for each page of the tail. The boolean is true until the page is withdrawn
    (removed from the allocator's free lists). So it is also true for a free page that is not withdrawn yet.

    :param allocator: the allocator of these layers' slots.
    :param size: present KV cache size of these layers, in tokens.
    :param wanted: smaller KV cache size of these layers, in tokens.
    """

    def __init__(self, allocator: Any, size: int, wanted: int) -> None:
        import torch

        self.allocator, self.page = allocator, int(allocator.page_size)
        self.kept, self.size = wanted // self.page, size // self.page
        self.held = torch.ones(max(0, self.size - self.kept), dtype=torch.bool)

    def withdraw(self, spare: float) -> bool:
        """Remove free pages of the tail from the allocator's free lists.

        :param spare: limit of the tokens to withdraw.
        :returns: whether any pages were removed.
        """
        before = int(self.held.sum())

        def without_tail(pages: Any) -> Any:
            return self._withdraw_from(pages, spare / self.page - before + int(self.held.sum()))

        for name in FREE_LISTS:
            pages = getattr(self.allocator, name, None)
            if pages is not None and len(pages):
                setattr(self.allocator, name, without_tail(pages))
        if staged := getattr(self.allocator, "staged_pages", None):
            kept = [pages for pages in map(without_tail, staged) if len(pages)]
            self.allocator.staged_pages, self.allocator.num_staged_pages = kept, sum(map(len, kept))
        return int(self.held.sum()) < before

    def _withdraw_from(self, pages: Any, most: float) -> Any:
        """Withdraw free pages that lie in the tail of the KV cache, at most ``most`` of them: remove them from the list
        ``pages`` of free pages. Return the rest of the list."""
        in_tail = pages > self.kept
        in_tail &= in_tail.cumsum(0) <= most
        withdrawn = pages[in_tail]
        self.held[withdrawn.cpu() - self.kept - 1] = False
        return pages[~in_tail] if len(withdrawn) else pages

    def count_usable(self) -> int:
        """Return the number of tokens that the engine may use: the tokens before the tail, and the held tokens of the
        tail."""
        return (self.kept + int(self.held.sum())) * self.page

    def count_mapped(self) -> int:
        """Return the number of tokens that need memory: the tokens up to the last held page of the tail, or the tokens
        before the tail if no page of the tail is held."""
        held = self.held.nonzero()
        return (self.kept + (int(held[-1]) + 1 if len(held) else 0)) * self.page


class Retirement:
    """One step to a smaller KV cache. The step ends when no slot of the tail (the slots after the smaller size) is in
    use.

    :param allocator: the scheduler's allocator.
    :param now: token counts before the step.
    :param wanted: token counts after the step.
    :param publish: function that sets the engine's token counts. It is called whenever the token counts change.
    """

    def __init__(
        self, allocator: Any, now: TokenCounts, wanted: TokenCounts, publish: Callable[[TokenCounts], None]
    ) -> None:
        self._allocator, self._wanted, self._publish = allocator, wanted, publish
        self._tails = {
            part: _Tail(owner, getattr(now, part), getattr(wanted, part)) for part, owner in parts_of(allocator)
        }
        self._clear, self._patcher = allocator.clear, Patcher()
        self._patcher.add(allocator, "clear", self._clear_all)
        self.is_done = self._was_flushed = False

    def advance(self, spare: float = math.inf) -> bool:
        """Withdraw the free slots of the tail: remove them from the allocator's free lists.

        Call this method only between two turns of the scheduler. Do not call it between the allocator's
        ``free_group_begin`` and ``free_group_end``.

        :param spare: limit of the tokens to withdraw, for each kind of layers.
        :returns: whether fewer slots of the tail are held than before.
        """
        if self.is_done:
            return False
        # a list and no generator, so that every tail is withdrawn
        withdrawals = [tail.withdraw(spare) for tail in self._tails.values()]
        has_changed = any(withdrawals) or self._was_flushed
        self._was_flushed = False
        if has_changed:
            self._publish_counts()
        if not any(bool(tail.held.any()) for tail in self._tails.values()):
            self.is_done = True
            self._patcher.undo()  # this also restores the `clear` method of another plugin
        return has_changed

    def held_tokens(self) -> int:
        """Return the number of held tokens in the tail. If there are two kinds of layers, return the larger number."""
        return max(int(tail.held.sum()) * tail.page for tail in self._tails.values())

    def usable_counts(self) -> TokenCounts:
        """Return the KV cache size that the engine may use now: all slots except those that were already withdrawn
        (removed from the allocator's free lists)."""
        return self._counts(_Tail.count_usable)

    def mapped_counts(self) -> TokenCounts:
        """Return, for each kind of layers, the number of tokens that need memory: all tokens up to the last slot that
        is not withdrawn yet. The memory of all later slots can be unmapped."""
        return self._counts(_Tail.count_mapped)

    def _counts(self, count: Callable[[_Tail], int]) -> TokenCounts:
        counts = {part: count(tail) for part, tail in self._tails.items()}
        # If there are two kinds of layers, the KV cache size is that of the layers with full attention.
        return TokenCounts(**{"tokens": counts.get("full", 0), **counts})

    def _publish_counts(self) -> None:
        set_allocator_size(self._allocator, self.usable_counts())
        self._publish(self.usable_counts())

    def _clear_all(self) -> None:
        """Replacement for the allocator's ``clear`` in a flush. Only the slots before the tail become free."""
        for tail in self._tails.values():
            tail.held[:] = False
        set_allocator_size(self._allocator, self._wanted)
        self._clear()
        self._was_flushed = True
        self._publish_counts()


# --- The limit of requests --------------------------------------------------------------------------------------------
# The engine's default limit is thousands of requests. Sampling with penalties may allocate eighteen numbers for each
# request and each token of the vocabulary: 22 GB for 2,048 requests and 151,936 tokens. A stock server then ends with
# an out-of-memory error. The rehearsal runs such sampling with as many requests as the largest decode graph has. A
# batch gets no more requests than this graph while a request of the batch, or a waiting request, asks for such
# sampling. Without such requests, a batch has more requests if these cost at most a thirty-second of the KV cache.


def is_penalized(request: Any) -> bool:
    """Return whether a request is penalized. Because of a penalized request, sampling allocates numbers for every
    request of the batch and every token of the vocabulary. Examples are a request with a logit bias, and a request with
    beams.

    :param request: the engine's ``Req``.
    """
    sampling = request.sampling_params
    return bool(
        request.return_logprob
        or getattr(request, "custom_logit_processor", None)
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.min_p
        or sampling.min_new_tokens
        or sampling.logit_bias is not None
        or beam_width(request) > 1
    )


def beam_width(request: Any) -> int:
    """Return the number of rows that a request takes in a decode batch: one, or the number of its beams (0.5.23 has
    beam search)."""
    group = getattr(request, "beam_group", None)
    return 1 if group is None else int(group.beam_width)


def batch_is_penalized(batch: Any) -> bool:
    """Return whether a batch is penalized: its sampling allocates numbers for every request of the batch and every
    token of the vocabulary. An example is a batch in which one request has a logit bias.

    The engine keeps the tensors of a logit bias and of ``min_p`` until the batch is empty, even if the request that
    asked for them has ended. This function reads only attributes of the batch, so that its time does not depend on the
    number of requests.

    :param batch: the engine's ``ScheduleBatch``.
    """
    if not batch.reqs:
        return False
    sampling = batch.sampling_info
    return bool(
        batch.return_logprob
        or sampling.penalizer_orchestrator.is_required
        or sampling.need_min_p_sampling
        or sampling.logit_bias is not None
        or sampling.has_custom_logit_processor
    )


class RequestLimit:
    """Limit of the requests in a batch. It is derived again in each turn of the event loop.

    The limit depends only on the waiting requests and on the running batch. These requests are the same on all ranks,
    so all ranks admit the same requests.

    :param scheduler: the engine's scheduler.
    :param requests: limit of requests in a batch.
    :param penalized: limit of requests in a batch while the batch or a waiting request is penalized.
    """

    def __init__(self, scheduler: Any, requests: int, penalized: int) -> None:
        self._scheduler, self._requests, self._penalized = scheduler, requests, penalized
        self._beams = getattr(scheduler, "beam_coordinator", None)
        self._penalized_queue: deque[Any] = deque()
        """Penalized requests, in the order of their arrival. A request that no longer waits is removed when it is at
        the front of the queue."""
        self.batch: Any = None
        """The running batch, into which the engine merges the requests that it admits in this turn."""
        self.rows: int | None = None
        """Limit of the rows in the batch, as the engine counts them; ``None`` if the limit has not been derived in this
        turn. A running request with beams has one row for each beam, but the engine counts only one row. So the
        request's other rows are subtracted from this limit. For example, the limit is 97 instead of 100 if a request
        with four beams runs."""
        self.widest = 1
        """Number of rows of the widest request that may join the batch: 1, or the number of its beams."""

    def add(self, request: Any) -> None:
        """Record a request that has begun to wait."""
        if is_penalized(request):
            self._penalized_queue.append(request)
            self.rows = None

    def derive(self) -> int:
        """Derive ``rows`` and ``widest`` from the waiting and running requests of this turn. Return ``rows``."""
        scheduler, penalized = self._scheduler, self._penalized_queue
        while penalized and penalized[0] not in scheduler.waiting_queue:
            penalized.popleft()
        chunked = scheduler.chunked_req  # between two chunks of its prompt, this request neither waits nor runs
        self.widest = 1
        if self._beams is not None and self._beams._num_live_groups:
            rows = self._derive_with_beams()
        elif penalized or batch_is_penalized(self.batch) or (chunked is not None and is_penalized(chunked)):
            rows = self._penalized
        else:
            rows = self._requests
        self.rows = rows
        return rows

    def _derive_with_beams(self) -> int:
        """Return the limit of rows for requests that have beams. Each beam counts as a penalized request.

        An empty batch admits a request that has more beams than the limit. Otherwise this request and all requests
        after it would wait for ever.
        """
        scheduler, running = self._scheduler, self.batch.reqs
        joining = [*scheduler.waiting_queue, *filter(None, [scheduler.chunked_req])]
        self.widest = max(map(beam_width, joining), default=1)
        rows = self._penalized - sum(beam_width(request) - 1 for request in running)
        return rows if running else max(rows, self.widest)


def limit_requests(scheduler: Any, requests: int, penalized: int) -> None:
    """Limit the requests that a scheduler admits to a batch (:class:`RequestLimit`), by wrapping three methods."""
    limit = RequestLimit(scheduler, requests, penalized)
    queue, get_batch = scheduler._add_request_to_queue, scheduler.get_new_batch_prefill
    allocatable = scheduler.get_num_allocatable_reqs

    @functools.wraps(queue)
    def add_request_to_queue(req: Any, *args: Any, **kwargs: Any) -> Any:
        limit.add(req)
        return queue(req, *args, **kwargs)

    # Both of the following functions run in every turn that admits requests. So they make as few calls as possible.

    @functools.wraps(get_batch)
    def get_new_batch_prefill(*args: Any, **kwargs: Any) -> Any:
        # Releases after 0.5.13 pass the running batch as an argument.
        limit.batch = args[0] if args else kwargs["running_batch"] if kwargs else scheduler.running_batch
        limit.rows = None
        return get_batch(*args, **kwargs)

    @functools.wraps(allocatable)
    def get_num_allocatable_reqs(running_bs: int, *args: Any, **kwargs: Any) -> int:
        rows = limit.rows
        if rows is None:
            rows = limit.derive()
        free = rows - running_bs
        if limit.widest > 1:
            free //= limit.widest
        # No tested release passes further arguments. Unpacking none of them would still take time in every turn.
        by_engine: int = allocatable(running_bs, *args, **kwargs) if args or kwargs else allocatable(running_bs)
        return free if free < by_engine else by_engine

    scheduler._add_request_to_queue = add_request_to_queue
    scheduler.get_new_batch_prefill = get_new_batch_prefill
    scheduler.get_num_allocatable_reqs = get_num_allocatable_reqs
