"""What kv-sizing did, beside the engine's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sglang_moe_patches.core import log

PREFIX = "sglang_moe_patches:"
LOWEST_FREE, FRACTION, SUGGESTED, STATE = (
    PREFIX + name for name in ("lowest_free_bytes", "kv_fraction", "kv_suggested_fraction", "kv_state")
)
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    LOWEST_FREE: ("The lowest free memory of a rank's GPU since the server serves, in bytes.", ()),
    FRACTION: ("The fraction by which the KV cache is sized.", ()),
    SUGGESTED: ("The --mem-fraction-static that the record of this configuration gives.", ()),
    STATE: ("1 for where the fraction comes from, and why it is not the record's.", ("source", "reason")),
}
"""By their names: what each says, and its labels beside the rank's."""


class Source(StrEnum):
    """Where the fraction in force comes from."""

    DEFAULT = "default"
    GIVEN = "given"
    RECORD = "record"


class Metrics:
    """Of one rank: ``/metrics`` has them where ``--enable-metrics`` is on.

    :param arguments: of the server, as resolved.
    :param gpu: of this rank, by which replicas are told apart.
    """

    def __init__(self, arguments: Mapping[str, Any], gpu: int) -> None:
        self._gauges: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        if not arguments.get("enable_metrics"):
            return
        try:
            # Not before the engine has said where the metrics of its processes come together.
            from prometheus_client import Gauge
            from sglang.srt.distributed.parallel_state import get_world_group

            self._labels = {"gpu": str(gpu), "rank": str(get_world_group().rank_in_group)}
            for name, (says, labels) in GAUGES.items():
                # Of what several processes say of one rank, the latest counts.
                names = (*self._labels, *labels)
                self._gauges[name] = Gauge(name, says, labelnames=names, multiprocess_mode="mostrecent")
        except Exception as error:
            log.logger.warning(log.of("kv-sizing", "no metrics: %s"), error)
            self._gauges = {}

    def show_lowest_free(self, lowest: int) -> None:
        self._set(LOWEST_FREE, lowest)

    def show_sizing(self, fraction: float | None, suggested: float | None, source: Source, reason: str) -> None:
        """Show the fraction in use, that of the record, and which of them rules.

        :param fraction: ``None``: not known.
        :param suggested: ``None``: no record gives one.
        :param reason: why it is not the record's; "" where it is.
        """
        for name, value in ((FRACTION, fraction), (SUGGESTED, suggested)):
            if value is not None:
                self._set(name, value)
        self._set(STATE, 1, source=str(source), reason=reason)

    def _set(self, name: str, value: float, **labels: str) -> None:
        if name in self._gauges:
            self._gauges[name].labels(**self._labels, **labels).set(value)
