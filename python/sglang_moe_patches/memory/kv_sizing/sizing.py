"""Decisions on the KV cache size as pure functions, and the limits that they use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_moe_patches.memory.kv_sizing.phases import PhaseKind

MIN_FREE_BYTES = 1_000_000_000
"""Least free memory after a forward pass. With less, the rehearsal ends, because the next forward pass might run out of
memory. Its need is not known then, so the server keeps as many more bytes free."""
MIN_GAIN_FRACTION = 0.02
"""Least growth, as a fraction of the KV cache. For less, a server keeps the number of tokens of its rehearsal."""
LOW_MARGIN_FRACTION = 0.5
"""Fraction of the margin. With less free while serving, the server gives memory back until the margin is free again."""
FRACTION_STEP = 0.0001
"""Step to which a fraction is rounded down: 15 MB of an H200's 150,109,880,320 bytes."""
MAX_PASSES = 3
"""Most rehearsals in one start; a first one that starts over does not count. With another number of tokens, some
forward passes are larger, or can be reached at all."""
SHOWN_PHASES = 3
"""Number of the largest phases that the log names."""


@dataclass(frozen=True)
class LaunchMemory:
    """Memory of a rank before the engine makes its pools, in bytes.

    :param failure: why the rank does not know it; "": the rank does.
    :param free_before_load: free memory before the weights were loaded, on the rank with the least.
    :param free: free memory of this rank now.
    :param fraction: the engine's own fraction, or the given ``--mem-fraction-static``.
    :param images: the engine's allowance for images, which are not rehearsed.
    """

    failure: str = ""
    free_before_load: int = 0
    free: int = 0
    fraction: float = 0.0
    images: int = 0

    @property
    def set_aside(self) -> float:
        """Bytes that the fraction leaves beside weights and KV cache."""
        return self.free_before_load * (1 - self.fraction)


def least_fraction(launches: Sequence[LaunchMemory], cache_bytes: int, margin: int) -> float | None:
    """Return the fraction with which the KV cache begins if the engine's own leaves it less than ``cache_bytes``.

    :param launches: memory of all ranks; the rank with the least free memory counts.
    :param cache_bytes: bytes that a rehearsal needs in the KV cache of each rank.
    :param margin: bytes that, with :data:`MIN_FREE_BYTES`, must stay for forward passes.
    :returns: ``None``: the engine's own fraction stays. It leaves enough, or too little would stay for forward passes.
    """
    launch = launches[0]
    free = min(each.free for each in launches)
    if free - launch.set_aside >= cache_bytes or free - cache_bytes < margin + MIN_FREE_BYTES:
        return None
    # Rounded up, so that the KV cache has these bytes.
    return math.ceil((1 - (free - cache_bytes) / launch.free_before_load) / FRACTION_STEP) * FRACTION_STEP


@dataclass(frozen=True)
class RankNeed:
    """Need of a rank, which it publishes after a rehearsal. Rank 0 alone knows ``missed`` and the fields behind it.

    :param fits: tokens of the KV cache that fit beside the need and the margin.
    :param need: bytes that forwards and graphs took beside weights and KV cache.
    :param failure: why the need is not known; "" if it is known.
    :param stopped: the rehearsal ended early, before memory ran out.
    :param missed: phases that were not reached, by their names.
    :param fewer_requests: largest number of requests at once that has memory; 0: as many as the server allows.
    :param fallback: the next smaller number of requests at once, if more have run than anybody asked for; else 0.
    :param can_limit_penalized: fewer penalized requests would run if they were limited as without
        ``--max-running-requests``.
    :param admitted: requests in a batch, and in a batch with penalties; 0 if the engine limits them alone.
    """

    fits: int = 0
    need: int = 0
    failure: str = ""
    stopped: bool = False
    missed: Mapping[str, PhaseKind] = field(default_factory=dict)
    fewer_requests: int = 0
    fallback: int = 0
    can_limit_penalized: bool = False
    admitted: tuple[int, int] = (0, 0)


def decide(needs: Sequence[RankNeed], now: int, most: int, least: int) -> tuple[int, str]:
    """Return the KV cache size of a server in tokens, and why it is not the size that fits.

    All ranks get the same size: the tokens that fit on the rank with the least memory.

    :param now: tokens with memory.
    :param most: tokens with addresses, within the user's limit.
    :param least: tokens below which a KV cache does not shrink.
    :returns: the reason is "" if the size fits.
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
    """Format bytes as megabytes."""
    return f"{size / 1e6:,.0f} MB"


def largest_phases(phases: Mapping[str, int]) -> str:
    """Format the phases with the most bytes of tensors, the largest first."""
    ordered = sorted(phases.items(), key=lambda phase: -phase[1])[:SHOWN_PHASES]
    return ", ".join(f"{name} {megabytes(size)}" for name, size in ordered)


def pinned_fraction(launch: LaunchMemory, more_bytes: float) -> float | None:
    """Return the ``--mem-fraction-static`` with which the engine's rule gives the same KV cache.

    :param more_bytes: bytes of the KV cache beyond those of the rule, by the engine's arithmetic.
    :returns: the fraction, rounded down; ``None``: no fraction gives it.
    """
    fraction = launch.fraction + more_bytes / launch.free_before_load
    rounded = math.floor(fraction / FRACTION_STEP) * FRACTION_STEP
    return round(rounded, 4) if 0 < rounded < 1 else None
