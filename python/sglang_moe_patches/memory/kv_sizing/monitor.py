"""The lowest free memory while serving, and whether memory ran out: read now and then, never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from sglang_moe_patches.core import log
from sglang_moe_patches.core.gpu_memory import Memory

SAMPLE_INTERVAL_S = 1.0
"""Between two readings. What a forward takes the allocator keeps, so that it is there to be seen."""
SAVE_INTERVAL_S = 60.0
MIN_FALL_BYTES = 16_000_000
"""Bytes by which the lowest must have fallen."""


class FreeMemoryMonitor:
    """Of one rank.

    :param read: the memory now.
    :param save: takes the lowest free memory, and whether the allocator has given up since the last time; says whether
        there was a place for it.
    :param show: takes the lowest free memory, each time.
    """

    def __init__(
        self,
        read: Callable[[], Memory],
        save: Callable[[int, bool], bool],
        clock: Callable[[], float] = time.monotonic,
        show: Callable[[int], None] = lambda lowest: None,
    ) -> None:
        self._read, self._save, self._clock, self._show = read, save, clock, show
        first = read()
        self._lowest = first.free
        self._saved: int | None = None
        self._ooms = self._saved_ooms = first.ooms
        self._next = self._next_save = clock()
        self._failed = self._unsaved = False

    def sample(self) -> None:
        """Called in every turn of the loop; most times it only reads the clock."""
        now = self._clock()
        if now < self._next or self._failed:
            return
        self._next = now + SAMPLE_INTERVAL_S
        try:
            self._take()
            self._show(self._lowest)
        except Exception as error:
            self._failed = True
            log.logger.warning(log.of("kv-sizing", "free memory is not monitored any more: %s"), error)
            return
        if now >= self._next_save:
            self._next_save = now + SAVE_INTERVAL_S
            try:
                self._keep()
            except Exception as error:  # it is tried again; the metric goes on
                if not self._unsaved:
                    log.logger.warning(log.of("kv-sizing", "free memory is not recorded: %s"), error)
                self._unsaved = True

    def _take(self) -> None:
        memory = self._read()
        self._lowest = min(self._lowest, memory.free)
        self._ooms = max(self._ooms, memory.ooms)

    def end(self, ran_out: bool = False) -> None:
        """The server ends.

        :param ran_out: for want of memory.
        """
        if self._failed:
            return
        with suppress(Exception):
            self._take()  # the last second before an out-of-memory counts most
        try:
            self._keep(ran_out, worth=0)
        except Exception as error:
            log.logger.warning(log.of("kv-sizing", "what was seen while serving is lost: %s"), error)

    def _keep(self, ran_out: bool = False, worth: int = MIN_FALL_BYTES) -> None:
        ran_out = ran_out or self._ooms > self._saved_ooms
        due = ran_out or self._saved is None or self._saved - self._lowest > worth
        if due and self._save(self._lowest, ran_out):
            self._saved, self._saved_ooms = self._lowest, self._ooms
