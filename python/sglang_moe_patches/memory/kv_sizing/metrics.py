"""What kv-sizing did, beside the engine's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_moe_patches.core import log

PREFIX = "sglang_moe_patches:"
TOKENS, BY_RULE, NEED, LOWEST_FREE, GIVEN_BACK, STATE = (
    PREFIX + name
    for name in ("kv_tokens", "kv_tokens_by_rule", "need_bytes", "lowest_free_bytes", "given_back_bytes", "kv_state")
)
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    TOKENS: ("Tokens of the KV cache.", ()),
    BY_RULE: ("Tokens of the KV cache by the engine's own rule.", ()),
    NEED: ("Bytes that forwards and graphs take beside weights and KV cache, on the rank that needs most.", ()),
    LOWEST_FREE: ("The lowest free memory of a rank's GPU since the server serves, in bytes.", ()),
    GIVEN_BACK: ("Bytes of the KV cache that were given back while serving.", ()),
    STATE: ("1 for what became of the KV cache, with the reason where it was not measured.", ("state", "reason")),
}
"""By their names: what each says, and its labels beside the rank's."""


class Metrics:
    """Of one rank, ``need_bytes`` of the first alone: ``/metrics`` has them where ``--enable-metrics`` is on.

    :param arguments: of the server, as resolved.
    :param gpu: of this rank, by which replicas are told apart.
    """

    def __init__(self, arguments: Mapping[str, Any], gpu: int) -> None:
        self._gauges: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        self._state: dict[str, str] = {}
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

    def show(self, name: str, value: float) -> None:
        """:param name: one of :data:`GAUGES` but :data:`STATE`."""
        if name in self._gauges:
            self._gauges[name].labels(**self._labels).set(value)

    def show_state(self, state: str, reason: str = "") -> None:
        """:param state: "rule", "grown" or "shrunk"; ``reason``: why it is the rule's, or another than fits."""
        if STATE not in self._gauges:
            return
        gauge = self._gauges[STATE]
        if self._state:
            gauge.labels(**self._labels, **self._state).set(0)
        self._state = {"state": state, "reason": reason}
        gauge.labels(**self._labels, **self._state).set(1)
