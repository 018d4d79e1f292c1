"""Free memory while serving: it is watched, and where it runs short the tail of the KV cache is given back.

A server that meets a load which no rehearsal brought about loses capacity, not its life. A running request is never
touched: slots of the tail that are free are not handed out any more, those that come back are kept back, and the memory
behind them goes as soon as nobody holds a slot of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches.core import log
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.memory.kv_sizing import metrics, token_count
from sglang_moe_patches.memory.kv_sizing.pools import ElasticPools
from sglang_moe_patches.memory.kv_sizing.ranks import Board, Order, Orders
from sglang_moe_patches.memory.kv_sizing.retirement import Retirement
from sglang_moe_patches.memory.kv_sizing.sizing import LOW_MARGIN_FRACTION

SAMPLE_INTERVAL_S = 1.0
"""Between two readings. What a forward takes the allocator keeps, so that it is there to be seen."""
SHORT = "memory is short"
"""What a rank tells the first on the board."""


@dataclass(frozen=True)
class Retire(Order):
    """Give back the KV cache's tail, down to so many tokens."""

    tokens: int


@dataclass(frozen=True)
class Flush(Order):
    """Empty the cache of prefixes, if nothing runs: so what was retired comes back at once."""


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


class Serving:
    """One rank, from its first request on.

    :param counts: of the KV cache; another number goes through :func:`.token_count.set_token_count`.
    """

    def __init__(
        self,
        scheduler: Any,
        pools: ElasticPools,
        memory: FreeMemory,
        orders: Orders,
        shown: metrics.Metrics,
        *,
        leads: bool,
        ranks: int,
    ) -> None:
        self._scheduler, self._pools = scheduler, pools
        self._memory, self._orders, self._shown, self._leads = memory, orders, shown, leads
        self._board = Board() if ranks > 1 else None
        self._retirement: Retirement | None = None
        self._ordered = self._failed = False
        self._given_back = self._told = 0
        shown.show(metrics.GIVEN_BACK, 0)

    def look(self) -> None:
        """Called in every turn of the loop."""
        if self._failed:
            return
        try:
            if self._retirement is not None:
                self._go_on(self._retirement)
            if self._memory.is_due():
                self._sample()
        except Exception as error:
            self._failed = True
            log.logger.warning(log.of("kv-sizing", "free memory is not watched any more: %s"), error)

    def _sample(self) -> None:
        shortage = self._memory.shortage()
        self._shown.show(metrics.LOWEST_FREE, self._memory.lowest)
        under_way = self._ordered or self._retirement is not None
        if under_way:
            if self._leads and self._retirement is not None and self._scheduler.is_fully_idle():
                self._orders.give(Flush())
            return
        if shortage and self._board is not None and not self._leads:
            self._board.raise_flag(f"{SHORT} {self._told}")
        if self._leads and (shortage or (self._board is not None and self._board.is_raised(f"{SHORT} {self._told}"))):
            # What another rank lacks it does not say: half of the margin brings it back to where it is not short.
            wanted = max(shortage, int(self._memory.margin * LOW_MARGIN_FRACTION))
            self._order(wanted)

    def _order(self, shortage: int) -> None:
        counts = self._pools.counts
        least = max(longest_request(self._scheduler), least_tokens(self._scheduler))
        tokens = max(self._pools.tokens_within(self._pools.bytes_behind(counts) - shortage), least)
        tokens = -(-tokens // self._pools.page) * self._pools.page
        if tokens < counts.tokens:
            self._ordered = True
            self._orders.give(Retire(tokens))

    def obey(self, order: Order) -> None:
        """:param order: :class:`Retire` or :class:`Flush`."""
        if isinstance(order, Flush):
            self._scheduler.flush_cache()
        elif isinstance(order, Retire):
            self._ordered, self._told = False, self._told + 1
            now, wanted = self._pools.counts, self._pools.counts_for(order.tokens)
            self._began_with, allocator = now.tokens, self._scheduler.token_to_kv_pool_allocator
            tell = functools.partial(token_count.set_token_count, self._scheduler)
            self._retirement = Retirement(allocator, now, wanted, tell)
            self._go_on(self._retirement)

    def _go_on(self, retirement: Retirement) -> None:
        """Take out what has come back since the last turn, and give back the memory behind it."""
        if not retirement.go_on():
            return
        self._given_back += self._pools.unmap_from(retirement.backed())
        self._shown.show(metrics.GIVEN_BACK, self._given_back)
        self._shown.show(metrics.TOKENS, retirement.in_use().tokens)
        if not retirement.done:
            return
        self._retirement = None
        if self._leads:
            log.logger.warning(
                log.of("kv-sizing", "memory was short: %s KV tokens instead of %s; %s MB given back until now"),
                f"{self._pools.counts.tokens:,}",
                f"{self._began_with:,}",
                f"{self._given_back / 1e6:,.0f}",
            )


def requests_of(scheduler: Any) -> Iterator[Any]:
    """The requests that a scheduler has taken in: those that run, and those that wait."""
    yield from getattr(scheduler, "waiting_queue", None) or ()
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "last_batch", "cur_batch")]
    batches += [*(getattr(scheduler, "mbs", None) or ()), *(getattr(scheduler, "running_mbs", None) or ())]
    for batch in batches:
        yield from getattr(batch, "reqs", None) or ()
    if (chunked := getattr(scheduler, "chunked_req", None)) is not None:
        yield chunked


def longest_request(scheduler: Any) -> int:
    """Tokens that the longest of a scheduler's requests may come to: the KV cache must stay as large."""
    return max(
        (len(each.origin_input_ids) + int(each.sampling_params.max_new_tokens or 0) for each in requests_of(scheduler)),
        default=0,
    )


def least_tokens(scheduler: Any) -> int:
    """Tokens below which a KV cache is not made smaller: two of the largest prefills of one request."""
    return 2 * int(scheduler.chunked_prefill_size or scheduler.max_req_input_len)
