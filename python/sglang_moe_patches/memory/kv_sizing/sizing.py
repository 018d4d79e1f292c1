"""From what was needed to the number of tokens, as pure functions, and the limits by which they decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_moe_patches.memory.kv_sizing.phases import PhaseKind

MIN_FREE_BYTES = 1_000_000_000
"""With less left after a forward the rehearsal ends: the next one might not have them. As what that would have taken is
not known, so many more bytes are kept free then."""
MIN_GAIN_FRACTION = 0.02
"""Of the KV cache. For less, a server keeps the number of tokens that it has been rehearsed with."""
LOW_MARGIN_FRACTION = 0.5
"""Of the margin: with less free while serving, memory is given back until the margin is free again."""
FRACTION_STEP = 0.0001
"""What a fraction is rounded down to: 15 MB of an H200's 150,109,880,320 bytes."""
MAX_PASSES = 3
"""Rehearsals in one start, but for a first one that began again. With another number of tokens some forwards can be
larger, or be reached at all."""
SHOWN_PHASES = 3
"""The largest phases, which the log names."""


@dataclass(frozen=True)
class LaunchMemory:
    """What a rank knows before its pools are made; in bytes.

    :param failure: why it knows nothing; "" where it does.
    :param free_before_load: free before its weights were loaded, on the rank with the least.
    :param free: free now, on this rank.
    :param fraction: the engine's own, or the given ``--mem-fraction-static``.
    :param images: what the engine's rule keeps for images, which are not rehearsed.
    """

    failure: str = ""
    free_before_load: int = 0
    free: int = 0
    fraction: float = 0.0
    images: int = 0

    @property
    def set_aside(self) -> float:
        """What the fraction leaves beside weights and KV cache."""
        return self.free_before_load * (1 - self.fraction)


def least_fraction(launches: Sequence[LaunchMemory], cache_bytes: int, margin: int) -> float | None:
    """The fraction with which the KV cache begins where the engine's own leaves it less than ``cache_bytes``.

    :param launches: of all ranks; the one with the least free memory counts.
    :param cache_bytes: what the KV cache needs on each rank to be rehearsed with.
    :param margin: bytes that, with :data:`MIN_FREE_BYTES`, must be left for forwards.
    :returns: ``None``: the engine's own stays, because it leaves as much, or so little would be left for forwards.
    """
    launch = launches[0]
    free = min(each.free for each in launches)
    if free - launch.set_aside >= cache_bytes or free - cache_bytes < margin + MIN_FREE_BYTES:
        return None
    # Rounded up: what is needed must be there.
    return math.ceil((1 - (free - cache_bytes) / launch.free_before_load) / FRACTION_STEP) * FRACTION_STEP


@dataclass(frozen=True)
class RankNeed:
    """What a rank has measured in a rehearsal.

    :param fits: tokens of the KV cache beside what was needed and the margin.
    :param need: bytes that forwards and graphs took beside weights and KV cache.
    :param failure: why it is not known; "" where it is.
    :param stopped: the rehearsal ended early, before memory ran out.
    :param missed: phases that were not reached, by their names; only the first rank has them.
    """

    fits: int = 0
    need: int = 0
    failure: str = ""
    stopped: bool = False
    missed: Mapping[str, PhaseKind] = field(default_factory=dict)


def decide(needs: Sequence[RankNeed], now: int, most: int, least: int) -> tuple[int, str]:
    """The tokens of a server, the same on all ranks: as many as fit on the rank with the least.

    :param now: tokens that have memory.
    :param most: tokens that there are addresses for, which a limit of the user's bounds.
    :param least: tokens below which a KV cache is not made smaller.
    :returns: also why it is not what fits; "" where it is.
    """
    if failures := [f"rank {rank}: {need.failure}" for rank, need in enumerate(needs) if need.failure]:
        return now, f"the rehearsal failed: {'; '.join(failures)}"
    fits = min(need.fits for need in needs)
    if fits < (floor := min(now, least)):
        return floor, f"beside the largest forward and the margin fit {max(0, fits):,} tokens, too few to serve"
    if fits > now and needs[0].missed:
        return now, f"the rehearsal did not reach: {', '.join(needs[0].missed)}"
    return now if now <= fits < now * (1 + MIN_GAIN_FRACTION) else min(fits, most), ""


def megabytes(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 1e6:,.0f} MB"


def largest_phases(phases: Mapping[str, int]) -> str:
    """The phases with the most bytes of tensors, largest first, for people."""
    ordered = sorted(phases.items(), key=lambda each: -each[1])[:SHOWN_PHASES]
    return ", ".join(f"{name} {megabytes(taken)}" for name, taken in ordered)


def pinned_fraction(launch: LaunchMemory, more_bytes: float) -> float | None:
    """The ``--mem-fraction-static`` with which the engine's own rule gives as much.

    :param more_bytes: of the KV cache by the engine's reckoning, beyond what its rule gave.
    :returns: rounded down; ``None``: there is none.
    """
    fraction = launch.fraction + more_bytes / launch.free_before_load
    rounded = math.floor(fraction / FRACTION_STEP) * FRACTION_STEP
    return round(rounded, 4) if 0 < rounded < 1 else None
