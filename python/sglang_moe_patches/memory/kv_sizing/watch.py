"""The lowest free memory while serving, and whether memory ran out: read now and then, never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.core.log import logger

EVERY_S = 1.0
"""Between two readings. What a forward takes the allocator keeps, so that it is there to be seen."""
SAVED_EVERY_S = 60.0
WORTH_SAVING = 16_000_000
"""Bytes by which the lowest must have fallen."""


class Watch:
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
        self._failed = False

    def look(self) -> None:
        """Called often; mostly it only looks at the clock."""
        now = self._clock()
        if now < self._next or self._failed:
            return
        self._next = now + EVERY_S
        try:
            found = self._read()
            self._lowest = min(self._lowest, found.free)
            self._ooms = max(self._ooms, found.ooms)
            self._show(self._lowest)
            if now >= self._next_save:
                self._next_save = now + SAVED_EVERY_S
                self._keep()
        except Exception as error:
            self._failed = True
            logger.warning("sglang-moe-patches: kv-sizing: free memory is not watched any more: %s", error)

    def end(self, ran_out: bool = False) -> None:
        """The server ends.

        :param ran_out: for want of memory.
        """
        if self._failed:
            return
        try:
            self._keep(ran_out, worth=0)
        except Exception as error:
            logger.warning("sglang-moe-patches: kv-sizing: what was seen while serving is lost: %s", error)

    def _keep(self, ran_out: bool = False, worth: int = WORTH_SAVING) -> None:
        ran_out = ran_out or self._ooms > self._saved_ooms
        due = ran_out or self._saved is None or self._saved - self._lowest > worth
        if due and self._save(self._lowest, ran_out):
            self._saved, self._saved_ooms = self._lowest, self._ooms
