"""Decisions on the KV cache size as pure functions, and the limits that they use.

A *rehearsal* runs a server's largest forward passes before its first request. Each run of the rehearsal is a *pass*.
The *need* is the memory that the server takes in addition to weights and KV cache. The *margin* is the memory that must
stay free. The engine's *fraction* is ``--mem-fraction-static``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_moe_patches.memory.kv_sizing.phases import PhaseKind

MIN_FREE_BYTES = 1_000_000_000
"""Least free memory after a forward pass of the rehearsal. With less, the rehearsal ends early, because the next
forward pass might run out of memory. The need of the forward passes that did not run is then not known, so the server
keeps this many bytes free in addition to the margin."""
MIN_GAIN_FRACTION = 0.02
"""Least growth of the KV cache, as a fraction of its size. If it could grow by less, it keeps the size that it had in
the rehearsal."""
LOW_MARGIN_FRACTION = 0.5
"""Fraction of the margin that must stay free while serving. With less, the server frees KV cache memory until the whole
margin is free again."""
FRACTION_STEP = 0.0001
"""Step to which a ``--mem-fraction-static`` is rounded. One step is 15 MB of an H200's 150,109,880,320 bytes."""
MAX_PASSES = 3
"""Most passes in one start. A first pass that starts over does not count. Another pass is needed if a new KV cache size
makes some forward passes larger, or makes some possible at all."""
SHOWN_PHASES = 3
"""Number of phases in the log line about the largest phases."""


@dataclass(frozen=True)
class LaunchMemory:
    """Memory of a rank before the engine makes its pools, in bytes.

    :param failure: reason why the server is not measured; "": the other fields are set.
    :param free_before_load: free memory before the weights were loaded, on the rank with the least.
    :param free: free memory of this rank now.
    :param fraction: fraction in force: the engine's own, or the given ``--mem-fraction-static``.
    :param images: bytes that the engine's rule reserves for images, which are not rehearsed.
    """

    failure: str = ""
    free_before_load: int = 0
    free: int = 0
    fraction: float = 0.0
    images: int = 0

    @property
    def set_aside(self) -> float:
        """Bytes that the fraction leaves free besides weights and KV cache."""
        return self.free_before_load * (1 - self.fraction)


def least_fraction(launches: Sequence[LaunchMemory], cache_bytes: int, margin: int) -> float | None:
    """Return a larger fraction for the rehearsal, if the engine's own leaves the KV cache less than ``cache_bytes``.

    :param launches: memory of all ranks; the rank with the least free memory counts.
    :param cache_bytes: bytes that a rehearsal needs in the KV cache of each rank.
    :param margin: bytes that must stay for forward passes, in addition to :data:`MIN_FREE_BYTES`.
    :returns: ``None`` if the engine's own fraction stays: it leaves enough, or a larger one would leave too little for
        forward passes.
    """
    launch = launches[0]
    free = min(each.free for each in launches)
    if free - launch.set_aside >= cache_bytes or free - cache_bytes < margin + MIN_FREE_BYTES:
        return None
    # Rounded up, so that the KV cache has these bytes.
    return math.ceil((1 - (free - cache_bytes) / launch.free_before_load) / FRACTION_STEP) * FRACTION_STEP


@dataclass(frozen=True)
class RankNeed:
    """Need of a rank, which the rank publishes after a rehearsal.

    Only rank 0 sets ``missed`` and the fields after it. A *phase* of the rehearsal runs one kind of the largest forward
    passes. A request is *penalized* if it has penalties, ``min_p``, a logit bias or log-probabilities.

    :param fits: tokens of the KV cache that fit into memory along with the need and the margin.
    :param need: bytes that forward passes, graphs and buffers took in addition to weights and KV cache.
    :param failure: reason why the need is not known; "": it is known.
    :param stopped: whether the rehearsal ended early, before memory ran out.
    :param missed: kinds of the phases that were not reached, by the phases' names.
    :param fewer_requests: largest number of requests at once for which there is memory; 0: as many as the server
        allows.
    :param restart_requests: number of requests at once for another rehearsal, if the last one costs KV tokens. 0: no
        decode had more requests than the user's settings ask for.
    :param can_limit_penalized: whether another rehearsal could run fewer penalized requests, by ignoring
        ``--max-running-requests`` for them.
    :param request_limits: two limits that this package enforces: most requests in a batch, and most in a batch with a
        penalized request. (0, 0): it enforces none.
    """

    fits: int = 0
    need: int = 0
    failure: str = ""
    stopped: bool = False
    missed: Mapping[str, PhaseKind] = field(default_factory=dict)
    fewer_requests: int = 0
    restart_requests: int = 0
    can_limit_penalized: bool = False
    request_limits: tuple[int, int] = (0, 0)


def decide(needs: Sequence[RankNeed], now: int, most: int, least: int) -> tuple[int, str]:
    """Return the KV cache size of a server in tokens, and the reason if it is not the size that fits.

    All ranks get the same size: the tokens that fit on the rank with the least memory.

    :param now: tokens that have memory now.
    :param most: tokens that have addresses, or the user's limit if that is less.
    :param least: tokens below which the KV cache does not shrink.
    :returns: the tokens and the reason, which is "" if the size fits.
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
    """Format the phases whose tensors took the most bytes, the largest first.

    :param phases: bytes of tensors at the peak of each phase, by the phase's name.
    """
    ordered = sorted(phases.items(), key=lambda phase: -phase[1])[:SHOWN_PHASES]
    return ", ".join(f"{name} {megabytes(size)}" for name, size in ordered)


def pinned_fraction(launch: LaunchMemory, more_bytes: float) -> float | None:
    """Return the ``--mem-fraction-static`` with which a stock server has the same KV cache size.

    :param more_bytes: bytes of the KV cache beyond the bytes that ``launch.fraction`` gives it, by the engine's
        arithmetic.
    :returns: the fraction, rounded down; ``None``: no fraction gives this size.
    """
    fraction = launch.fraction + more_bytes / launch.free_before_load
    rounded = math.floor(fraction / FRACTION_STEP) * FRACTION_STEP
    return round(rounded, 4) if 0 < rounded < 1 else None
