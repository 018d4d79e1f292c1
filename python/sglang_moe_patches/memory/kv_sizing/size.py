"""What a record gives: from what was needed to the fraction for the engine. Pure functions of plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_moe_patches.memory.kv_sizing.record import Record

MARGIN = 2_000_000_000
"""Bytes that stay free beyond what was needed. Between two kinds of load need has differed by up to 1,180 MB in
fourteen servers that were measured, and once by 2 GB."""
LEAST_GAIN = 0.02
"""Of the rule's KV cache. Below that a server stays with the engine's own number."""
OTHERS = 0.01
"""Of the GPU's memory: what others may hold more or less of it than when it was measured."""
MOST_ATTEMPTS = 2
"""Rehearsals that ended with their server, after which none is tried."""
MOST_OOMS = 2
"""Servers that ran out of memory while serving, after which the rule counts."""
ENDS = 0.0001
"""What a fraction is rounded down to: 14 MB of a GPU with 141 GB."""


@dataclass(frozen=True)
class Start:
    """A server that starts, in bytes.

    :param before: free memory before its weights were loaded, of the rank with the least.
    :param total: memory of its GPU.
    :param fraction: by the engine's rule.
    :param images: what of that the rule keeps for images, which are not rehearsed.
    """

    before: int
    total: int
    fraction: float
    images: int = 0

    @property
    def reserve(self) -> float:
        """What the rule sets aside."""
        return self.before * (1 - self.fraction)


@dataclass(frozen=True)
class Decision:
    """How a server sizes its KV cache, and whether it rehearses.

    :param fraction: for the engine; ``None``: its own.
    :param why: the reason for the rule; "" where the record decides.
    :param reserve: what is set aside, in bytes; ``margin``: the part of it that nothing needed.
    :param watch: whether its free memory is recorded while it serves, though nothing else is.
    """

    fraction: float | None = None
    why: str = ""
    rehearse: bool = False
    reserve: float = 0.0
    margin: int = 0
    watch: bool = False


def decide(start: Start, record: Record | None, unreadable: str = "") -> Decision:
    """Never worse than the rule.

    :param unreadable: what is wrong with the file of records; "" where it could be read.
    """
    if start.before <= 0:
        return _rule(start, "no memory is free")
    if record is not None and record.attempts >= MOST_ATTEMPTS:
        return _rule(start, f"{record.attempts} rehearsals have begun and not ended")
    if record is None or not record.need:
        return _rule(start, unreadable or "nothing is recorded of this configuration", rehearse=True)
    if record.missed:
        return _rule(start, f"the rehearsal did not bring about: {', '.join(record.missed)}")
    if record.ooms >= MOST_OOMS:
        return _rule(start, f"{record.ooms} servers ran out of memory while serving")
    then, now = record.total - record.before, start.total - start.before
    if abs(then - now) > OTHERS * start.total:
        return _rule(start, f"{now / 1e6:,.0f} MB of the GPU are others', {then / 1e6:,.0f} MB when it was measured")
    margin = MARGIN * (1 + record.ooms)
    wanted = with_growth(start, record, max(record.need + start.images, record.serving_need) + margin)
    fraction = math.floor((1 - wanted / start.before) / ENDS) * ENDS
    reserve = start.before * (1 - fraction)
    if not 0 < fraction < 1 or start.reserve - reserve < LEAST_GAIN * rule_bytes(start, record):
        gained = (start.reserve - reserve) / max(1.0, rule_bytes(start, record))
        return _rule(start, f"the record would give {100 * gained:.1f} % more KV cache, less than {LEAST_GAIN:.0%}")
    return Decision(round(fraction, 4), rehearse=not record.proven, reserve=reserve, margin=margin)


def _rule(start: Start, why: str, *, rehearse: bool = False) -> Decision:
    return Decision(None, why, rehearse, start.reserve)


def rule_bytes(start: Start, record: Record) -> float:
    """The KV cache that the rule would give this server: the recorded one, by what was set aside beside it."""
    return record.kv_bytes + record.before * (1 - record.fraction) - start.reserve


def with_growth(start: Start, record: Record, wanted: float) -> float:
    """What is to be set aside with what grows with the KV cache, at most in proportion to it.

    That is the request table; and where requests follow the pools, all that was needed, which a decode of more of them
    may have taken.

    :param wanted: without that.
    """
    measured = record.kv_bytes
    if measured <= 0:
        return wanted
    larger = rule_bytes(start, record) + start.reserve - wanted
    grows = record.table_bytes + (max(record.need, record.serving_need) if record.requests_follow else 0)
    # It takes from the KV cache by which it grows: without that, a little more than is needed.
    return wanted + max(0.0, larger / measured - 1) * grows


def lowest(seen: int, began: int, reserved_growth: int) -> int:
    """The lowest free memory of a rank in bytes, that no other process's giving back has raised.

    :param seen: the driver's lowest; ``began``: free when the rehearsal began.
    :param reserved_growth: what this process's allocator took in between.
    """
    return min(seen, began - max(0, reserved_growth))
