"""Read the KV cache size that kv-sizing chose from a server's ``/metrics``, and kv-sizing's lines from the log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

STAND_IN = Path(__file__).parents[2] / "test/standins/tells_memory.py"
"""Source of an engine plugin for machines without a GPU. It answers in place of the driver when kv-sizing reads free
memory.
"""
METRICS_FLAG = "--enable-metrics"
"""Server argument that ``/metrics`` needs."""
METRIC_PREFIX = "sglang_moe_patches:"
LOG_PREFIX = "sglang-moe-patches: kv-sizing: "
"""Text that begins each log line of kv-sizing, after the engine's time and rank."""
REHEARSAL = re.compile(r"\brehears\w* \w+ (?P<seconds>\d+(?:\.\d+)?) s\b")
"""Matches the duration of the rehearsal in a log line of kv-sizing, as in "rehearsed in 12 s". No metric has this
number.
"""


class Growth(NamedTuple):
    """Result of kv-sizing in one server's start.

    :param tokens: KV cache size that the server uses.
    :param rule_tokens: KV cache size by the engine's own rule, or by the given ``--mem-fraction-static``.
    :param need_bytes: memory of the largest forward pass, CUDA graphs and buffers, not counting weights and KV cache.
    """

    tokens: int
    rule_tokens: int
    need_bytes: int


def read_gauges(metrics: str) -> dict[str, float]:
    """Read kv-sizing's gauges.

    :param metrics: text of ``/metrics``.
    :returns: the smallest value of each gauge on any rank, by the gauge's name without ``METRIC_PREFIX``.
    """
    from prometheus_client.parser import text_string_to_metric_families

    smallest = dict[str, float]()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith(METRIC_PREFIX):
                name = sample.name.removeprefix(METRIC_PREFIX)
                smallest[name] = min(sample.value, smallest.get(name, sample.value))
    return smallest


def read_growth(metrics: str) -> Growth | None:
    """Read the KV cache size that kv-sizing chose.

    :param metrics: text of ``/metrics``. It must be read before the server frees a part of its KV cache.
    :returns: ``None`` if kv-sizing did not measure, or kept the size of the engine's rule.
    """
    gauges = read_gauges(metrics)
    if "need_bytes" not in gauges or gauges["kv_tokens"] == gauges["kv_tokens_by_rule"]:
        return None
    return Growth(*(int(gauges[name]) for name in ("kv_tokens", "kv_tokens_by_rule", "need_bytes")))


def kv_sizing_lines(log: str) -> list[str]:
    """Find the log lines of kv-sizing. Return each line without the text up to ``LOG_PREFIX``."""
    return [line.partition(LOG_PREFIX)[2] for line in log.splitlines() if LOG_PREFIX in line]


def rehearsal_seconds(lines: list[str]) -> float | None:
    """Read the duration of the rehearsal from :func:`kv_sizing_lines`. ``None``: no rehearsal ran."""
    match = next(filter(None, map(REHEARSAL.search, lines)), None)
    return float(match["seconds"]) if match else None
