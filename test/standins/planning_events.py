"""What a server's process might have recorded for ``plan``, on a GPU of 100 GB."""

from __future__ import annotations

from typing import Any

GB = 10**9
TOTAL = 100 * GB


def memory(free: float, allocated: float = 0, reserved: float = 0, peak: float = 0, **more: int) -> dict[str, int]:
    """In GB, on a GPU of 100 GB."""
    sizes = {"free": free, "allocated": allocated, "reserved": reserved, "peak": max(peak, allocated), "total": 100}
    return {name: round(size * GB) for name, size in sizes.items()} | {"retries": 0, "ooms": 0} | more


def forward(before: dict, after: dict, **facts: Any) -> dict[str, Any]:
    batch = {"mode": "EXTEND", "tokens": 1024, "requests": 1, "prefix": 0, "longest_prefix": 0, "logprobs": 0}
    return {"event": "forward", "draft": False, "graph": False, "all_ranks": 0, **batch, **facts} | {
        "before": before,
        "memory": after,
        "pools": {},
    }


def process() -> list[dict[str, Any]]:
    """1 GB in use before, 30 of weights, 40 of KV cache, 4 of graphs and tables; forwards take 3 of 5 GB of tensors."""
    rank = {"gpu": 3, "tp": 1, "pp": 0, "draft": False}
    ready = memory(25, allocated=72, reserved=73)
    return [
        {"event": "start", "changes": [["output-buffer", "applied", ""]]},
        {"event": "stage", "name": "load_model", "when": "before", **rank, "memory": memory(99)},
        {"event": "stage", "name": "load_model", "when": "after", **rank, "memory": memory(66, 30, 33)},
        {"event": "sized", "before_load": 99 * GB, "for_kv": 40 * GB, "memory": memory(69, 30, 30)},
        {"event": "stage", "name": "init_device_graphs", "when": "after", **rank, "memory": memory(25, 72, 73, 74)},
        {"event": "ready", **rank, "kv_bytes": 40 * GB, "pools": {"0.0": 1}, "memory": ready},
        forward(ready, memory(20, 72, 77, 75)),
        forward(memory(20, 72, 77, 76), memory(19.5, 72, 77, 74)),
    ]
