"""Decide on the KV cache size. The module has pure functions, and the limits that they use.

A *rehearsal* runs a server's largest forward passes before its first request. A start may have several rehearsals.
The *need* is the memory that the server takes in addition to weights and KV cache. The *margin* is the memory that must
stay free. The engine's *fraction* is ``--mem-fraction-static``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_moe_patches.memory.kv_sizing.phases import PhaseKind

MORE_REQUESTS_FRACTION = 1 / 32
"""Largest fraction of the KV cache that the server gives up to run more requests at once than the largest decode graph
has. A larger fraction would hardly help. A request takes about 2 MB in a decode, and tens of times as much in the KV
cache. So a decode of all requests that fit into the KV cache takes only a few percent of the KV cache's bytes."""
MIN_FREE_BYTES = 1_000_000_000
"""Free memory that a forward pass of the rehearsal must leave, in bytes. If it leaves less, the rehearsal ends early,
because the next forward pass might run out of memory. The need of the forward passes that did not run is then not
known, so the server keeps this many bytes free in addition to the margin."""
MIN_GAIN_FRACTION = 0.02
"""Smallest growth of the KV cache that is worth mapping memory, as a fraction of the cache's size. With a smaller
growth, the KV cache keeps the size that it had in the rehearsal."""
LOW_MARGIN_FRACTION = 0.5
"""Fraction of the margin that must stay free while serving. If less is free, the server frees KV cache memory until the
whole margin is free again."""
FRACTION_STEP = 0.0001
"""Step to which a ``--mem-fraction-static`` is rounded. One step is 15 MB of an H200's 150,109,880,320 bytes."""
MAX_PASSES = 3
"""Limit of rehearsals in one start. A first rehearsal that starts over does not count. Another rehearsal is needed if a
new KV cache size makes a forward pass larger, or makes a further kind of forward pass possible."""
SHOWN_PHASES = 3
"""Number of phases in the log line about the largest phases."""


@dataclass(frozen=True)
class LaunchMemory:
    """Memory of a rank before the engine makes its pools, in bytes.

    :param failure: reason why the server is not measured; empty if the other fields are set.
    :param free_before_load: free memory before the weights were loaded, on the rank with the least free memory.
    :param free: free memory of this rank after the weights were loaded.
    :param fraction: value of ``--mem-fraction-static``, chosen by the user or by the engine.
    :param images: bytes that the engine's rule reserves for images. A rehearsal has no images.
    """

    failure: str = ""
    free_before_load: int = 0
    free: int = 0
    fraction: float = 0.0
    images: int = 0

    @property
    def set_aside(self) -> float:
        """Bytes that ``--mem-fraction-static`` leaves free in addition to weights and KV cache."""
        return self.free_before_load * (1 - self.fraction)


def find_larger_fraction(launches: Sequence[LaunchMemory], cache_bytes: int, margin: int) -> float | None:
    """Return a larger ``--mem-fraction-static`` (*fraction*) for the rehearsal, if the engine's own fraction leaves too
    few bytes for the KV cache.

    :param launches: memory of all ranks; the rank with the least free memory counts.
    :param cache_bytes: bytes that a rehearsal needs in the KV cache of each rank.
    :param margin: bytes that must stay free for forward passes, in addition to :data:`MIN_FREE_BYTES`.
    :returns: ``None`` if the rehearsal uses the engine's own fraction. There are two reasons: this fraction leaves
        enough for the KV cache, or a larger fraction would leave too little for forward passes.
    """
    launch = launches[0]
    free = min(each.free for each in launches)
    if free - launch.set_aside >= cache_bytes or free - cache_bytes < margin + MIN_FREE_BYTES:
        return None
    # rounded up, so that the KV cache has at least ``cache_bytes`` bytes
    return math.ceil((1 - (free - cache_bytes) / launch.free_before_load) / FRACTION_STEP) * FRACTION_STEP


@dataclass(frozen=True)
class RankNeed:
    """Result of the rehearsal on one rank, which this rank publishes to the other ranks.

    Only rank 0 sets ``missed`` and the fields after it. A *phase* of the rehearsal runs one kind of the largest forward
    passes. A request is *penalized* if it has, for example, penalties, ``min_p``, a logit bias or log-probabilities
    (:func:`.serving.is_penalized`).

    :param fits: number of KV cache tokens that fit into memory in addition to the need and the margin.
    :param need: measured bytes of forward passes, CUDA graphs and buffers, in addition to weights and KV cache.
    :param failure: reason why the need is not known; empty if it is known.
    :param stopped: whether the rehearsal ended early because little memory was left.
    :param missed: phases that the rehearsal did not reach. The key is the phase's name, and the value is its kind.
    :param fewer_requests: largest number of concurrent requests for which there is memory; 0 if there is memory for as
        many requests as the server allows.
    :param restart_requests: smaller limit of concurrent requests for another rehearsal, in case this result makes the
        KV cache smaller; 0 if there is no such limit.
    :param can_limit_penalized: whether another rehearsal could run fewer penalized requests than
        ``--max-running-requests`` allows.
    :param request_limits: two limits that this package enforces: on the requests in a batch, and on the requests in a
        batch with a penalized request; (0, 0) if this package enforces no limits.
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
    """Decide on the KV cache size of a server, in tokens.

    All ranks get the same size. Usually this is the number of tokens that fits on the rank with the least memory.

    :param now: tokens for which memory is mapped now.
    :param most: largest KV cache size that is allowed.
    :param least: smallest KV cache size that is allowed.
    :returns: the number of tokens, and the reason for it, such as a failed rehearsal. The reason is empty if the number
        follows from the measured memory.
    """
    if failures := [f"rank {rank}: {need.failure}" for rank, need in enumerate(needs) if need.failure]:
        return now, f"the rehearsal failed: {'; '.join(failures)}"
    fits = min(need.fits for need in needs)
    if fits < (floor := min(now, least)):
        return (
            floor,
            f"the largest forward pass and the margin leave memory for {max(0, fits):,} KV tokens, too few to serve",
        )
    if fits > now and needs[0].missed:
        return now, f"the rehearsal did not measure: {', '.join(needs[0].missed)}"
    return now if now <= fits < now * (1 + MIN_GAIN_FRACTION) else min(fits, most), ""


def format_megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def largest_phases(phases: Mapping[str, int]) -> str:
    """Format a list of the phases whose tensors took the most bytes, beginning with the largest phase.

    :param phases: bytes of tensors at the peak of each phase. The key is the phase's name.
    """
    ordered = sorted(phases.items(), key=lambda phase: -phase[1])[:SHOWN_PHASES]
    return ", ".join(f"{name} {format_megabytes(size)}" for name, size in ordered)


def pinned_fraction(launch: LaunchMemory, more_bytes: float) -> float | None:
    """Return the ``--mem-fraction-static`` with which a stock server has the KV cache size of this server.

    :param more_bytes: number of bytes by which this server's KV cache is larger than with ``launch.fraction``; negative
        if it is smaller.
    :returns: the fraction, rounded down; ``None`` if no fraction gives this size.
    """
    fraction = launch.fraction + more_bytes / launch.free_before_load
    rounded = math.floor(fraction / FRACTION_STEP) * FRACTION_STEP
    return round(rounded, 4) if 0 < rounded < 1 else None
