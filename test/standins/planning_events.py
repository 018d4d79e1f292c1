"""What a server's process might have recorded for ``plan``, on a GPU of 100 GB."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_moe_patches.lab.observers.events import (
    Batch,
    ChangeStatus,
    Device,
    Event,
    Forward,
    Place,
    Ready,
    ServerFacts,
    Sized,
    Stage,
    Start,
)

GB = 10**9
TOTAL = 100 * GB
FACTS = ServerFacts(
    kv_bytes=40 * GB,
    kv_tokens=1_000_000,
    page=1,
    table_bytes=8,
    table_requests=40,
    context=20_000,
    vocabulary=5000,
)


def memory(free: float, allocated: float = 0, reserved: float = 0, peak: float = 0, **more: int) -> Device:
    """In GB, on a GPU of 100 GB."""
    sizes = {"free": free, "allocated": allocated, "reserved": reserved, "peak": max(peak, allocated), "total": 100}
    return Device(**{name: round(size * GB) for name, size in sizes.items()}, **more)


def forward(before: Device, after: Device, *, graph: bool = False, **facts: Any) -> Forward:
    batch = Batch(**{"mode": "EXTEND", "tokens": 1024, "requests": 1, **facts})
    return Forward(Place(), batch, graph, before, after)


def process() -> list[Event]:
    """1 GB in use before, 30 of weights, 40 of KV cache, 4 of graphs and tables; forwards take 3 of 5 GB of tensors."""
    place = Place(gpu=3, tp=1)
    ready = memory(25, allocated=72, reserved=73)
    return [
        Start((ChangeStatus("output-buffer", "applied", ""),)),
        Stage("load_model", False, place, memory(99)),
        Stage("load_model", True, place, memory(66, 30, 33)),
        Sized(99 * GB, 40 * GB, memory(69, 30, 30)),
        Stage("init_device_graphs", True, place, memory(25, 72, 73, 74)),
        Ready(place, FACTS, ready, {"0.0": 1}),
        forward(ready, memory(20, 72, 77, 75)),
        forward(memory(20, 72, 77, 76), memory(19.5, 72, 77, 74)),
    ]


def changed(event: Any, reading: str = "memory", **counts: int) -> Any:
    """The event with another reading of the device."""
    return replace(event, **{reading: replace(getattr(event, reading), **counts)})
