"""What kv-sizing says of a start in a server's log: how far the KV cache grew, and what rehearsing took."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

STAND_IN = Path(__file__).parents[2] / "test/standins/tells_memory.py"
"""A plugin that says what the driver would say, where there is no GPU: the source of its module, of that name."""
SAYS = "sglang-moe-patches: kv-sizing: "
"""In front of each of its lines, behind the engine's time and rank."""
GROWN = re.compile(
    r"(?P<tokens>[\d,]+) KV tokens instead of (?P<rule_tokens>[\d,]+); forwards need (?P<need>[\d,]+) MB, "
    r"(?P<margin>[\d,]+) MB of margin stay free(?:.*; the same as --mem-fraction-static (?P<fraction>[\d.]+))?"
)
REHEARSED = re.compile(r"rehearsed in (?P<seconds>\d+(?:\.\d+)?) s")


class Growth(NamedTuple):
    """The line of a server whose KV cache was sized in its start.

    :param rule_tokens: what the engine's rule, or the given fraction, has room for.
    :param need_bytes: what the largest forwards take beside weights and KV cache.
    :param fraction: the ``--mem-fraction-static`` that is worth the same; ``None``: there is none.
    """

    tokens: int
    rule_tokens: int
    need_bytes: int
    margin_bytes: int
    fraction: float | None


def said(log: str) -> list[str]:
    """Each line of kv-sizing's, without what stands in front of it."""
    return [line.partition(SAYS)[2] for line in log.splitlines() if SAYS in line]


def growth(lines: list[str]) -> Growth | None:
    """The first line of :func:`said` that tells of a sizing; ``None``: the server was not sized."""
    found = next(filter(None, map(GROWN.search, lines)), None)
    if found is None:
        return None
    tokens, rule_tokens, need, margin = (int(found[name].replace(",", "")) for name in list(GROWN.groupindex)[:4])
    fraction = found["fraction"] and float(found["fraction"])
    return Growth(tokens, rule_tokens, need * 10**6, margin * 10**6, fraction)


def rehearsed_s(lines: list[str]) -> float | None:
    """Seconds of the rehearsal; ``None``: there was none."""
    found = next(filter(None, map(REHEARSED.search, lines)), None)
    return float(found["seconds"]) if found else None
