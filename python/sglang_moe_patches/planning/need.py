"""From what a server left free to the fraction to set: pure functions of plain values.

The engine sizes the KV cache so that ``(1 - fraction) * before_load`` bytes stay free on the rank that has least
(``_profile_available_bytes``). What comes later is taken from that: request table, draft model, graphs, forwards. Some
of it grows with the fraction, so a fraction that has not been tried is only known to fit where a larger one did, or
where a larger need was left free: need never falls as the fraction rises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STEP = 0.001
"""The engine rounds its own fraction to this; so do we, always down."""
HIGHEST = 0.99
TOLERANCE = 0.003
"""How far below the highest fraction that could still fit a plan may stay, in parts of the free memory."""
OUT_OF_MEMORY_STEP = 0.02
"""How much lower to try after a server ran out of memory, which does not say by how much; twice that the next time."""
MOST_TRIALS = 5


@dataclass(frozen=True)
class Trial:
    """A server that was started and driven.

    :param fraction: its ``--mem-fraction-static``.
    :param before_load: bytes that were free before loading, on the rank that had least.
    :param lowest_free: bytes that were free at the worst moment, on the worst rank; ``None``: it ran out of memory.
    """

    fraction: float
    before_load: int
    lowest_free: int | None

    def bound(self, margin: int) -> float:
        """The fraction that this trial's need would have allowed, unrounded.

        :param margin: bytes that must stay free.
        """
        if self.lowest_free is None:
            return self.fraction - STEP
        return self.fraction + (self.lowest_free - margin) / self.before_load


def down(fraction: float) -> float:
    """``fraction``, rounded down to ``STEP`` and to ``HIGHEST``."""
    # The addend: 0.9 / 0.001 is a little less than 900.
    return min(math.floor(fraction / STEP + 1e-6) * STEP, HIGHEST) if fraction > 0 else 0.0


def proven(trials: Iterable[Trial], margin: int) -> float | None:
    """The highest fraction that is known to fit; ``None``: none is.

    Of a trial: its own fraction, where that left the margin free; else the one that its need allows, which is lower,
    and has no larger need. None at which memory ran out, with this load or another one.
    """
    trials = list(trials)
    out = min((t.fraction for t in trials if t.lowest_free is None), default=1.0)
    known = [down(min(t.fraction, t.bound(margin))) for t in trials if t.lowest_free is not None]
    return max((fraction for fraction in known if 0 < fraction < out - STEP / 2), default=None)


def ceiling(trials: Iterable[Trial], margin: int) -> float:
    """No fraction above this fits: above a trial's fraction, need is not less than that trial's."""
    return min(max(t.bound(margin), -1 if t.lowest_free is None else t.fraction) for t in trials)


def next_fraction(trials: Sequence[Trial], margin: int) -> float | None:
    """The fraction to try next; ``None``: enough is known.

    :param trials: those made, at least one.
    :param margin: bytes that must stay free.
    """
    if len(trials) >= MOST_TRIALS:
        return None
    low, high = proven(trials, margin), down(ceiling(trials, margin))
    tried = [t.fraction for t in trials]
    out = [t.fraction for t in trials if t.lowest_free is None]
    below = down(min(out) - 2 ** (len(out) - 1) * OUT_OF_MEMORY_STEP) if out else 0.0
    if low is None:
        return below if below > 0 else None
    if high - low <= TOLERANCE:
        return None
    wished = below if trials[-1].lowest_free is None else down(trials[-1].bound(margin))
    if not (low < wished <= high) or _among(wished, tried):
        wished = down((low + high) / 2)
    return None if _among(wished, tried) else wished


def _among(fraction: float, tried: Iterable[float]) -> bool:
    return any(abs(fraction - other) < STEP / 2 for other in tried)


def kv_tokens(trial: Trial, tokens: int, token_bytes: float, fraction: float, page: int = 1) -> int:
    """Tokens of the KV cache at another fraction, from a server that was started.

    :param tokens: of that server's KV cache.
    :param token_bytes: bytes that one token takes there, on one rank.
    :param page: tokens of a page of the cache.
    """
    more = (fraction - trial.fraction) * trial.before_load / token_bytes
    return max(0, math.floor(tokens + more) // page * page)
