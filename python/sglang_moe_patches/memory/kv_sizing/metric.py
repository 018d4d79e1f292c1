"""The lowest free memory beside the engine's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_moe_patches.core.log import logger

NAME = "sglang_moe_patches:lowest_free_bytes"


def of(arguments: Mapping[str, Any], gpu: int) -> Callable[[int], None]:
    """What takes the lowest free memory of this rank: ``/metrics`` has it, where ``--enable-metrics`` is on.

    :param arguments: of the server, as resolved.
    :param gpu: of this rank, by which replicas are told apart.
    """
    if not arguments.get("enable_metrics"):
        return lambda lowest: None
    try:
        # Not before the engine has said where the metrics of its processes come together.
        from prometheus_client import Gauge
        from sglang.srt.distributed.parallel_state import get_world_group

        gauge = Gauge(
            NAME,
            "The lowest free memory of a rank's GPU since the server serves, in bytes.",
            labelnames=("gpu", "rank"),
            multiprocess_mode="mostrecent",
        )
        return gauge.labels(gpu=str(gpu), rank=str(get_world_group().rank_in_group)).set
    except Exception as error:
        logger.warning("sglang-moe-patches: kv-sizing: no metric of the lowest free memory: %s", error)
        return lambda lowest: None
