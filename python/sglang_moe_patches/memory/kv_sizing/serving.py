"""A server whose KV cache was sized, while it serves: free memory, and how many requests run at once.

A server that meets a load which no rehearsal brought about loses capacity, not its life: where free memory runs short,
the tail of the KV cache is given back. A running request is never touched: slots of the tail that are free are not
handed out any more, those that come back are kept back, and the memory behind them goes as soon as nobody holds a slot
of it.
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
from sglang_moe_patches.memory.kv_sizing.sizing import LOW_MARGIN_FRACTION, megabytes
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts, parts_of, set_allocator_size

SAMPLE_INTERVAL_S = 1.0
"""Between two readings. What a forward takes the allocator keeps, so that it is there to be seen."""
SHORT, HELD = "memory is short", "only prefixes hold what is to be given back"
"""What a rank tells the first on the board: after so many orders of each kind, so that an old word counts no more."""
FREE_LISTS = ("free_pages", "release_pages")
"""Attributes of an allocator with numbers of free pages; 0.5.21 on also a list of such tensors, ``staged_pages``."""


@dataclass(frozen=True)
class Retire(Order):
    """Give back the KV cache's tail, down to so many tokens."""

    tokens: int


@dataclass(frozen=True)
class EvictPrefixes(Order):
    """Empty the cache of prefixes where nothing runs: so what was retired comes back at once. Else evict as many tokens
    as are still to come back, of the prefixes that were used least recently."""


class FreeMemory:
    """The free memory of one rank.

    :param read: the memory now.
    :param margin: bytes that are to stay free.
    """

    def __init__(self, read: Callable[[], Memory], margin: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self.margin, self._clock = read, margin, clock
        self.lowest = read().free
        self._next = clock()

    def is_due(self) -> bool:
        """Whether it is time for a reading; most times this only reads the clock."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + SAMPLE_INTERVAL_S
        return True

    def shortage(self) -> int:
        """Read the memory.

        :returns: bytes that lack until the margin is free again; 0: more than half of it is.
        """
        free = self._read().free
        self.lowest = min(self.lowest, free)
        return self.margin - free if free < LOW_MARGIN_FRACTION * self.margin else 0


# --- What /metrics has ------------------------------------------------------------------------------------------------

PREFIX = "sglang_moe_patches:"
TOKENS, BY_RULE, NEED, LOWEST_FREE, GIVEN_BACK, STATE = (
    PREFIX + name
    for name in ("kv_tokens", "kv_tokens_by_rule", "need_bytes", "lowest_free_bytes", "given_back_bytes", "kv_state")
)
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    TOKENS: ("Tokens of the KV cache.", ()),
    BY_RULE: ("Tokens of the KV cache by the engine's own rule.", ()),
    NEED: ("Bytes that forwards and graphs take beside weights and KV cache, on the rank that needs most.", ()),
    LOWEST_FREE: ("The lowest free memory of a rank's GPU since the server serves, in bytes.", ()),
    GIVEN_BACK: ("Bytes of the KV cache that were given back while serving.", ()),
    STATE: ("1 for what became of the KV cache, with the reason where it was not measured.", ("state", "reason")),
}
"""By their names: what each says, and its labels beside the rank's."""


class Metrics:
    """Of one rank, ``need_bytes`` of the first alone: ``/metrics`` has them where ``--enable-metrics`` is on.

    :param arguments: of the server, as resolved.
    :param gpu: of this rank, by which replicas are told apart.
    """

    def __init__(self, arguments: Mapping[str, Any], gpu: int) -> None:
        self._gauges: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        if not arguments.get("enable_metrics"):
            return
        try:
            # Not before the engine has said where the metrics of its processes come together.
            from prometheus_client import Gauge
            from sglang.srt.distributed.parallel_state import get_world_group

            self._labels = {"gpu": str(gpu), "rank": str(get_world_group().rank_in_group)}
            for name, (says, labels) in GAUGES.items():
                # Of what several processes say of one rank, the latest counts.
                names = (*self._labels, *labels)
                self._gauges[name] = Gauge(name, says, labelnames=names, multiprocess_mode="mostrecent")
        except Exception as error:
            log.logger.warning(log.format_line("kv-sizing", "no metrics: %s"), error)
            self._gauges = {}

    def show(self, name: str, value: float, **labels: str) -> None:
        """:param name: one of :data:`GAUGES`, whose ``labels`` are its own."""
        if name in self._gauges:
            self._gauges[name].labels(**self._labels, **labels).set(value)


# --- Watching free memory --------------------------------------------------------------------------------------------


class Serving:
    """One rank, from its first request on.

    All ranks are ordered down to the same goal. Each keeps room for the longest request that it has itself until that
    has ended: with data-parallel attention another rank may have a longer one than the first.

    :param board: of the server's ranks.
    :param shown: takes what ``/metrics`` has.
    :param beside: tokens of the KV cache that a request takes beside its own.
    """

    def __init__(
        self,
        scheduler: Any,
        pools: ElasticPools,
        memory: FreeMemory,
        orders: Orders,
        board: Board,
        shown: Metrics,
        *,
        leads: bool,
        beside: int,
    ) -> None:
        self._scheduler, self._pools, self._memory = scheduler, pools, memory
        self._orders, self._board, self._shown, self._leads = orders, board, shown, leads
        # The engine admits a request only where more is free than it may come to, and never says that it will not.
        self._beside = beside + 1
        self._goal = pools.counts.tokens
        self._retirement: Retirement | None = None
        self._ordered = False
        self._failed: set[str] = set()
        self._given_back = self._told = self._evictions = 0
        shown.show(GIVEN_BACK, 0)

    def look(self) -> None:
        """Called in every turn of the loop."""
        # Ranks withdraw slots in step: one that cannot read its free memory any more goes on withdrawing.
        for step, what in ((self._withdraw, "memory is not given back"), (self._sample, "free memory is not watched")):
            if what in self._failed:
                continue
            try:
                step()
            except Exception as error:
                self._failed.add(what)
                log.logger.warning(log.format_line("kv-sizing", "%s any more: %s"), what, error)

    def _sample(self) -> None:
        if not self._memory.is_due():
            return
        shortage = self._memory.shortage()
        self._shown.show(LOWEST_FREE, self._memory.lowest)
        held = False
        if self._goal < self._pools.counts.tokens:  # what was ordered has not come back yet
            shortage, held = 0, bool(shortage) or is_idle(self._scheduler)
        short_flag, held_flag = f"{SHORT} {self._told}", f"{HELD} {self._told} {self._evictions}"
        if not self._leads:
            if shortage:
                self._board.raise_flag(short_flag)
            if held:
                self._board.raise_flag(held_flag)
            return
        if held or self._board.is_raised(held_flag):
            self._orders.send(EvictPrefixes())
        another = self._board.is_raised(short_flag)
        if not self._ordered and (shortage or another):
            # What another rank lacks it does not say: half of the margin brings it back to where it is not short.
            self._order(max(shortage, int(self._memory.margin * LOW_MARGIN_FRACTION)), answer=another)

    def _order(self, shortage: int, *, answer: bool) -> None:
        """Have all ranks give back what lacks, as far as the longest request and two prefills leave it.

        :param shortage: bytes that lack.
        :param answer: order the same goal again where no memory can go: it makes what other ranks have told old, and
            one that is still short tells it anew.
        """
        behind_goal = self._pools.bytes_behind(self._pools.counts_for(self._goal))
        within = self._pools.tokens_within(behind_goal - shortage)
        # Stages of a pipeline learn one after another that a request has ended: the first one's longest counts for all.
        least = max(self._longest_request(), least_tokens(self._scheduler, self._pools))
        wanted = self._whole_pages(max(within, least))
        frees = self._pools.bytes_behind(wanted) < behind_goal
        if frees or answer:
            self._ordered = True
            self._orders.send(Retire(wanted.tokens if frees else self._goal))

    def _longest_request(self) -> int:
        """Tokens with which the longest request is admitted and comes to its end, beside what sessions hold.

        A session keeps the tokens of its request when that has ended.
        """
        held, longest, page = tokens_of_sessions(self._scheduler.tree_cache), 0, self._pools.page
        for request in requests_of(self._scheduler):
            session, tokens = getattr(request, "session", None), tokens_of(request)
            if session is not None and session.streaming:
                held[session.session_id] = max(tokens, held.get(session.session_id, 0))
            else:
                longest = max(longest, tokens)
        needed = longest + whole_pages(held.values(), page)
        return needed + self._beside if needed else 0

    def _whole_pages(self, tokens: int) -> TokenCounts:
        """At least so many tokens."""
        return self._pools.counts_for(tokens + self._pools.page - 1)

    def obey(self, order: Order) -> None:
        """:param order: :class:`Retire` or :class:`EvictPrefixes`."""
        if isinstance(order, EvictPrefixes):
            self._evictions += 1
            if self._retirement is None:  # another rank has something to give back
                return
            if is_idle(self._scheduler):
                self._scheduler.flush_cache()
            else:
                evict_prefixes(self._scheduler.tree_cache, self._retirement.held())
        elif isinstance(order, Retire):
            self._ordered, self._told = False, self._told + 1
            self._goal = min(self._goal, order.tokens)
            self._tell(self._retirement.in_use() if self._retirement is not None else self._pools.counts)

    def _tell(self, counts: TokenCounts) -> None:
        """Tell the engine its number of tokens, and to take in no request that would not fit at the goal."""
        goal = self._pools.counts_for(self._goal)
        token_count.set_token_count(self._scheduler, counts, (goal.full or goal.tokens) - self._beside)

    def _withdraw(self) -> None:
        """Take out what has come back since the last turn, and give back the memory behind it."""
        now = self._pools.counts
        if self._retirement is None and self._goal < now.tokens:
            wanted = self._whole_pages(max(self._goal, self._longest_request()))
            if wanted.tokens < now.tokens:
                self._began_with = now.tokens
                allocator = self._scheduler.token_to_kv_pool_allocator
                self._retirement = Retirement(allocator, now, wanted, self._tell)
        retirement = self._retirement
        if retirement is None or not retirement.go_on(spare_tokens(self._scheduler)):
            return
        try:
            self._given_back += self._pools.unmap_from(retirement.backed())
        except Exception as error:  # the other ranks go on taking slots out, and so must this one
            log.logger.warning(log.format_line("kv-sizing", "memory is not given back: %s"), error)
        self._shown.show(GIVEN_BACK, self._given_back)
        self._shown.show(TOKENS, retirement.in_use().tokens)
        if not retirement.done:
            return
        self._retirement = None
        if self._leads:
            tokens = f"{self._pools.counts.tokens:,} KV tokens instead of {self._began_with:,}"
            given_back = f"{megabytes(self._given_back)} given back until now"
            log.logger.warning(log.format_line("kv-sizing", "memory was short: %s; %s"), tokens, given_back)


def requests_of(scheduler: Any) -> Iterator[Any]:
    """The requests that a scheduler has taken in: those that run, and those that wait."""
    yield from getattr(scheduler, "waiting_queue", None) or ()
    yield from getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "last_batch", "cur_batch")]
    batches += [*(getattr(scheduler, "mbs", None) or ()), *(getattr(scheduler, "running_mbs", None) or ())]
    for batch in batches:
        yield from getattr(batch, "reqs", None) or ()
    if (chunked := getattr(scheduler, "chunked_req", None)) is not None:
        yield chunked


def tokens_of(request: Any) -> int:
    """Return the most tokens of the KV cache that a request comes to, beside those that the engine adds for pages and
    drafts. The beams of a request share its prompt alone."""
    new = int(request.sampling_params.max_new_tokens or 0)
    return len(request.origin_input_ids) + new * beam_width(request)


def tokens_of_sessions(prefixes: Any) -> dict[str, int]:
    """Return the tokens that each streaming session holds, by the session's name.

    The engine frees them neither for another request nor when it retracts a request of the session.

    :param prefixes: the scheduler's ``tree_cache``.
    """
    if hasattr(prefixes, "session_records"):  # in 0.5.23
        records = prefixes.session_records()
    else:
        records = getattr(getattr(prefixes, "session", prefixes), "slots", None) or {}
    # The record of a session has the number itself up to 0.5.13.
    owners = {name: getattr(record, "kv", record) for name, record in records.items()}
    return {name: int(getattr(owner, "kv_allocated_len", 0) or 0) for name, owner in owners.items()}


def whole_pages(tokens: Iterable[int], page: int) -> int:
    """Return the tokens of all pages that so many tokens take, each number on pages of its own."""
    return sum(-(-number // page) * page for number in tokens)


def least_tokens(scheduler: Any, pools: ElasticPools) -> int:
    """Return the tokens below which a KV cache is not made smaller: two of the largest prefills of one request, beside
    what streaming sessions hold. With sliding windows their layers keep one window, a prefill behind it, some pages,
    and what sessions hold."""
    largest = int(scheduler.chunked_prefill_size or scheduler.max_req_input_len)
    held = whole_pages(tokens_of_sessions(scheduler.tree_cache).values(), pools.page)
    if not pools.top.window:
        return 2 * largest + held
    window = int(scheduler.tp_worker.model_runner.sliding_window_size or 0)
    return max(2 * largest + held, pools.tokens_with_window(largest + window + 3 * pools.page + held))


def spare_tokens(scheduler: Any) -> float:
    """Free tokens that a prompt does not need whose first chunks are computed: the engine computes the next one without
    asking whether there is room; infinite: there is none such."""
    chunked = getattr(scheduler, "chunked_req", None)
    if chunked is None:
        return math.inf
    allocator = scheduler.token_to_kv_pool_allocator
    if hasattr(allocator, "full_attn_allocator"):  # there it does ask
        return math.inf
    try:
        evictable = scheduler.tree_cache.evictable_size()
    except NotImplementedError:  # beside states of Mamba layers, which it counts by themselves
        evictable = scheduler.tree_cache.full_evictable_size()
    there = int(allocator.available_size()) + int(evictable)
    holders = (chunked, getattr(chunked, "kv", None))  # the second from 0.5.18 on
    computed = max(int(getattr(each, "kv_committed_len", 0) or 0) for each in holders)
    left, page = len(chunked.origin_input_ids) + len(chunked.output_ids) - computed, int(allocator.page_size)
    if getattr(scheduler, "is_mixed_chunk", False):  # each chunk comes with a token of each request that decodes
        rows = len(scheduler.running_batch.reqs)
        chunk = max(1, int(scheduler.chunked_prefill_size or 1) - rows)
        left += rows * (-(-left // chunk) + 1 + page)
    return max(0, there - left - 2 * page)


def evict_prefixes(prefixes: Any, tokens: int) -> None:
    """Have the engine's cache of prefixes free so many tokens that nobody uses; where it cannot, they stay.

    :param prefixes: the scheduler's ``tree_cache``.
    """
    try:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        prefixes.evict(EvictParams(num_tokens=tokens, swa_num_tokens=tokens))
    except Exception as error:
        log.logger.warning(log.format_line("kv-sizing", "prefixes keep what is to be given back: %s"), error)


# --- Giving back the tail of the KV cache ----------------------------------------------------------------------------
# Nothing of the allocator is replaced but ``clear``, by which a flush makes every slot free at once. Free slots of the
# tail are taken out of its free lists between two turns of the scheduler, and the engine is told the slots that are
# left and those of the tail that somebody still holds. Its own check, that free, cached and running tokens add up,
# holds in every turn.


class _Tail:
    """The tail of one part, in pages: those after ``kept``, up to ``size``.

    ``held``: whether each is held by somebody, or free and not yet taken out.
    """

    def __init__(self, allocator: Any, size: int, wanted: int) -> None:
        import torch

        self.allocator, self.page = allocator, int(allocator.page_size)
        self.kept, self.size = wanted // self.page, size // self.page
        self.held = torch.ones(max(0, self.size - self.kept), dtype=torch.bool)

    def take_out(self, spare: float) -> bool:
        """Take free pages of the tail out of the free lists.

        :param spare: at most so many tokens.
        :returns: whether there were any.
        """
        before = int(self.held.sum())

        def without_tail(pages: Any) -> Any:
            return self._without_tail(pages, spare / self.page - before + int(self.held.sum()))

        for name in FREE_LISTS:
            pages = getattr(self.allocator, name, None)
            if pages is not None and len(pages):
                setattr(self.allocator, name, without_tail(pages))
        if staged := getattr(self.allocator, "staged_pages", None):
            left = [each for each in map(without_tail, staged) if len(each)]
            self.allocator.staged_pages, self.allocator.num_staged_pages = left, sum(map(len, left))
        return int(self.held.sum()) < before

    def _without_tail(self, pages: Any, most: float) -> Any:
        """:returns: a list of free pages without those of the tail, at most ``most`` of which are taken out."""
        in_tail = pages > self.kept
        in_tail &= in_tail.cumsum(0) <= most
        gone = pages[in_tail]
        self.held[gone.cpu() - self.kept - 1] = False
        return pages[~in_tail] if len(gone) else pages

    def total(self) -> int:
        """Tokens that the engine has: those that are kept, and those of the tail that are held."""
        return (self.kept + int(self.held.sum())) * self.page

    def highest(self) -> int:
        """Tokens up to the last page that is kept, or held."""
        held = self.held.nonzero()
        return (self.kept + (int(held[-1]) + 1 if len(held) else 0)) * self.page


class Retirement:
    """One step down, from its beginning until nobody holds a slot of the tail.

    :param allocator: the scheduler's.
    :param now: its tokens, and ``wanted``: what is to be left.
    :param tell: called with the tokens that the engine must believe in, whenever they change.
    """

    def __init__(
        self, allocator: Any, now: TokenCounts, wanted: TokenCounts, tell: Callable[[TokenCounts], None]
    ) -> None:
        self._allocator, self._wanted, self._tell = allocator, wanted, tell
        self._tails = {
            part: _Tail(each, getattr(now, part), getattr(wanted, part)) for part, each in parts_of(allocator)
        }
        self._clear, self._patcher = allocator.clear, Patcher()
        self._patcher.add(allocator, "clear", self._clear_all)
        self.done = self._flushed = False

    def go_on(self, spare: float = math.inf) -> bool:
        """Take out what is free of the tail; between two turns of the scheduler, with no free group open.

        :param spare: at most so many tokens of each part.
        :returns: whether less of the tail is held than before.
        """
        if self.done:
            return False
        taken = [each.take_out(spare) for each in self._tails.values()]  # of every one, also if the first has had some
        changed = any(taken) or self._flushed
        self._flushed = False
        if changed:
            self._told()
        if not any(bool(each.held.any()) for each in self._tails.values()):
            self.done = True
            self._patcher.undo()  # another plugin may have had a clear of its own there
        return changed

    def held(self) -> int:
        """Tokens of the tail that have not come back yet, of the part with the most."""
        return max(int(each.held.sum()) * each.page for each in self._tails.values())

    def in_use(self) -> TokenCounts:
        """What the engine must believe in."""
        return self._counts(_Tail.total)

    def backed(self) -> TokenCounts:
        """Up to the last slot of each part that somebody may use: memory behind it can go."""
        return self._counts(_Tail.highest)

    def _counts(self, number: Callable[[_Tail], int]) -> TokenCounts:
        found = {part: number(tail) for part, tail in self._tails.items()}
        # Of two kinds the engine calls those of the full attention the cache's.
        return TokenCounts(**{"tokens": found.get("full", 0), **found})

    def _told(self) -> None:
        set_allocator_size(self._allocator, self.in_use())
        self._tell(self.in_use())

    def _clear_all(self) -> None:
        """A flush: nobody holds anything, and only the slots that are kept become free."""
        for each in self._tails.values():
            each.held[:] = False
        set_allocator_size(self._allocator, self._wanted)
        self._clear()
        self._flushed = True
        self._told()


# --- The limit of requests --------------------------------------------------------------------------------------------
# The engine's default admits thousands of requests. Sampling may allocate eighteen numbers for each request and each
# token of the vocabulary: 22 GB for 2,048 requests and 151,936 tokens. A stock server ends with an out-of-memory error
# then. The rehearsal runs such sampling with as many requests as the largest decode graph has. A batch is not larger
# while one of its requests, or one that waits, asks for such sampling. Of other requests as many run as need no more
# memory than the other forward passes.


def is_penalized(request: Any) -> bool:
    """Return whether a request needs numbers for every token of the vocabulary, for its whole batch.

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
    """Return the rows that a request takes in a batch that decodes; 0.5.23 has beam search."""
    group = getattr(request, "beam_group", None)
    return 1 if group is None else int(group.beam_width)


def batch_is_penalized(batch: Any) -> bool:
    """Return whether the engine has such numbers for a batch of requests.

    The engine keeps a logit bias and the numbers of ``min_p`` until the batch is empty, also when the request that
    asked for them has ended. This function reads the batch's own attributes, so that its time does not depend on the
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
    """Limit of the requests in a batch, derived anew in each turn of the event loop.

    The limit depends on the requests that wait and on the running batch alone. They are the same on all ranks, so all
    ranks admit the same requests.

    :param scheduler: the engine's.
    :param requests: largest number of requests in a batch.
    :param penalized: largest number while the running batch, or a request that waits, is penalized.
    """

    def __init__(self, scheduler: Any, requests: int, penalized: int) -> None:
        self._scheduler, self._requests, self._penalized = scheduler, requests, penalized
        self._penalized_queue: deque[Any] = deque()
        """Penalized requests in the order of their arrival. Requests that wait no more leave it at its front."""
        self._batch: Any = None
        self._limit: tuple[int, int] | None = None
        """Rows that the batch may have, less those of its beams that are no requests; rows of the widest request that
        may join."""

    def add(self, request: Any) -> None:
        """Notice a request that begins to wait."""
        if is_penalized(request):
            self._penalized_queue.append(request)
            self._limit = None

    def begin_turn(self, batch: Any) -> None:
        """Forget the limit of the turn before.

        :param batch: the running batch, into which the engine merges the requests that it admits.
        """
        self._batch, self._limit = batch, None

    def allocatable(self, running: int) -> int:
        """Return how many requests may join ``running`` requests; negative if too many run already."""
        if self._limit is None:
            self._limit = self._derive()
        rows, widest = self._limit
        return (rows - running) // widest

    def _derive(self) -> tuple[int, int]:
        scheduler, penalized = self._scheduler, self._penalized_queue
        while penalized and penalized[0] not in scheduler.waiting_queue:
            penalized.popleft()
        chunked = scheduler.chunked_req  # neither waits nor runs between two of its chunks
        if self._has_beams():
            return self._derive_with_beams()
        if penalized or batch_is_penalized(self._batch) or (chunked is not None and is_penalized(chunked)):
            return self._penalized, 1
        return self._requests, 1

    def _has_beams(self) -> bool:
        coordinator = getattr(self._scheduler, "beam_coordinator", None)
        return coordinator is not None and bool(coordinator._num_live_groups)

    def _derive_with_beams(self) -> tuple[int, int]:
        """Count a beam as a penalized request. A request with more beams than may run is admitted to an empty batch,
        or it and all behind it would wait for ever."""
        scheduler, running = self._scheduler, self._batch.reqs
        joining = [*scheduler.waiting_queue, *filter(None, [scheduler.chunked_req])]
        widest = max(map(beam_width, joining), default=1)
        rows = self._penalized - sum(beam_width(request) - 1 for request in running)
        return rows if running else max(rows, widest), widest


def limit_requests(scheduler: Any, requests: int, penalized: int) -> None:
    """Wrap three methods of a scheduler, so that a :class:`RequestLimit` bounds the requests that it admits."""
    limit = RequestLimit(scheduler, requests, penalized)
    queue, get_batch = scheduler._add_request_to_queue, scheduler.get_new_batch_prefill
    allocatable = scheduler.get_num_allocatable_reqs

    @functools.wraps(queue)
    def add_request_to_queue(req: Any, *args: Any, **kwargs: Any) -> Any:
        limit.add(req)
        return queue(req, *args, **kwargs)

    @functools.wraps(get_batch)
    def get_new_batch_prefill(*args: Any, **kwargs: Any) -> Any:
        # Releases after 0.5.13 hand the running batch over.
        limit.begin_turn(args[0] if args else kwargs.get("running_batch") or scheduler.running_batch)
        return get_batch(*args, **kwargs)

    @functools.wraps(allocatable)
    def get_num_allocatable_reqs(running_bs: int, *args: Any, **kwargs: Any) -> int:
        return min(allocatable(running_bs, *args, **kwargs), limit.allocatable(running_bs))

    scheduler._add_request_to_queue = add_request_to_queue
    scheduler.get_new_batch_prefill = get_new_batch_prefill
    scheduler.get_num_allocatable_reqs = get_num_allocatable_reqs
