"""Find out which functions of the engine had allocated the tensors at the peak of a server's memory.

The engine itself writes PyTorch's record of all allocations: ``/start_profile`` with the activity ``MEM``, on CUDA.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.client import Client

ENGINE = "/sglang/srt/"
OUTERMOST = ("/managers/scheduler.py", "/managers/tp_worker.py", "/model_executor/model_runner.py")
"""Files with functions that are in the call stack of every allocation. The names of these functions say nothing about
an allocation, so :func:`function_of` skips them.
"""
STOP_TIMEOUT_S = 300.0
"""Timeout in seconds for the engine to write the record."""
AllocatorEvent = tuple[int, int, str]
"""Event of PyTorch's allocator: address, bytes and function of an allocation. 0 bytes: the allocation was freed."""


@contextmanager
def record_allocations(client: Client, folder: Path) -> Iterator[dict[str, int]]:
    """Record the server's allocations within the block.

    :param folder: new folder for the record.
    :returns: a dictionary that receives the result of :func:`bytes_at_peak` after the block.
    :raises RuntimeError: the engine did not write a record.
    """
    sizes: dict[str, int] = {}
    folder.mkdir(parents=True)
    client.post("/start_profile", {"output_dir": str(folder), "activities": ["MEM"]})
    try:
        yield sizes
    finally:
        client.post("/stop_profile", {}, timeout_s=STOP_TIMEOUT_S)
    records = sorted(folder.glob("*memory*.pickle"))
    if not records:
        raise RuntimeError(f"the engine wrote no record of its memory into {folder}")
    with records[0].open("rb") as file:
        sizes |= bytes_at_peak(pickle.load(file)["device_traces"])


def bytes_at_peak(traces: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, int]:
    """Compute how many bytes each function of the engine had allocated when the allocated memory was at its peak.

    Allocations from before the record are not known, and are not counted.

    :param traces: events of each GPU, in PyTorch's format. Only the GPU with the largest peak is used.
    """
    best, most = dict[str, int](), 0
    for events in (list(_allocator_events(trace)) for trace in traces):
        peak, end = _peak(events)
        if peak > most:
            best, most = _bytes_by_function(events[:end]), peak
    return best


def _allocator_events(trace: Iterable[Mapping[str, Any]]) -> Iterator[AllocatorEvent]:
    for event in trace:
        if event["action"] == "alloc":
            yield event["addr"], event["size"], function_of(event.get("frames") or [])
        elif event["action"] == "free_completed":
            yield event["addr"], 0, ""


def _peak(events: list[AllocatorEvent]) -> tuple[int, int]:
    """Find the peak of the allocated bytes.

    :returns: bytes at the peak, and the number of events up to the peak.
    """
    sizes, total, most, end = dict[int, int](), 0, 0, 0
    for place, (address, size, _) in enumerate(events, 1):
        total += size - sizes.pop(address, 0)
        if size:
            sizes[address] = size
        if total > most:
            most, end = total, place
    return most, end


def _bytes_by_function(events: list[AllocatorEvent]) -> dict[str, int]:
    sizes = dict[int, tuple[int, str]]()
    for address, size, function in events:
        sizes.pop(address, None)
        if size:
            sizes[address] = size, function
    by_function: dict[str, int] = {}
    for size, function in sizes.values():
        by_function[function] = by_function.get(function, 0) + size
    return dict(sorted(by_function.items(), key=lambda item: -item[1]))


def function_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the name of the engine's innermost function in a call stack, as in ``sampler.py: forward, line 120``.
    Functions in the files of ``OUTERMOST`` are skipped.

    :param frames: frames of the call stack, the innermost first.
    :returns: the name; "elsewhere" if the stack has no other function of the engine.
    """
    for frame in frames:
        file = str(frame["filename"])
        if ENGINE in file and not file.endswith(OUTERMOST):
            return f"{Path(file).name}: {frame['name']}, line {frame['line']}"
    return "elsewhere"
