"""Giving back the tail of a KV cache while requests run, slot by slot as they come back.

Nothing of the allocator is replaced but ``clear``, by which a flush makes every slot free at once. Free slots of the
tail are taken out of its free lists between two turns of the scheduler, and the engine is told the slots that are left
and those of the tail that somebody still holds. Its own check, that free, cached and running tokens add up, holds in
every turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts, parts_of, set_allocator_size

FREE_LISTS = ("free_pages", "release_pages")
"""Attributes of an allocator with numbers of free pages; 0.5.21 on also a list of such tensors, ``staged_pages``."""


class _Tail:
    """The tail of one part, in pages: those after ``kept``, up to ``size``.

    ``held``: whether each is held by somebody, or free and not yet taken out.
    """

    def __init__(self, allocator: Any, size: int, wanted: int) -> None:
        import torch

        self.allocator, self.page = allocator, int(allocator.page_size)
        self.kept, self.size = wanted // self.page, size // self.page
        self.held = torch.ones(max(0, self.size - self.kept), dtype=torch.bool)

    def take_out(self) -> bool:
        """Take free pages of the tail out of the free lists. :returns: whether there were any."""
        taken = False
        for name in FREE_LISTS:
            pages = getattr(self.allocator, name, None)
            if pages is not None and len(pages):
                kept, gone = self._split(pages)
                if len(gone):
                    setattr(self.allocator, name, kept)
                    taken = True
        staged = getattr(self.allocator, "staged_pages", None)
        if staged:
            split = [self._split(each) for each in staged]
            if any(len(gone) for _, gone in split):
                self.allocator.staged_pages = [kept for kept, _ in split if len(kept)]
                self.allocator.num_staged_pages = sum(len(kept) for kept, _ in split)
                taken = True
        return taken

    def _split(self, pages: Any) -> tuple[Any, Any]:
        in_tail = pages > self.kept
        gone = pages[in_tail]
        self.held[gone.cpu() - self.kept - 1] = False
        return (pages[~in_tail] if len(gone) else pages), gone

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
        self._own_clear = vars(allocator).get("clear")  # another plugin may have put one there
        self._clear = allocator.clear
        allocator.clear = self._clear_all
        self.done = self._flushed = False

    def go_on(self) -> bool:
        """Take out what is free of the tail; between two turns of the scheduler, with no free group open.

        :returns: whether less of the tail is held than before.
        """
        if self.done:
            return False
        taken = [each.take_out() for each in self._tails.values()]  # of every one, also if the first has had some
        changed = any(taken) or self._flushed
        self._flushed = False
        if changed:
            self._told()
        if not any(bool(each.held.any()) for each in self._tails.values()):
            self.end()
        return changed

    def end(self) -> None:
        """Leave the allocator as it is."""
        if not self.done:
            self.done = True
            del self._allocator.clear
            if self._own_clear is not None:
                self._allocator.clear = self._own_clear

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
