"""Which tensors a server's allocator held when it held most, by PyTorch's record of it.

The engine writes that record itself: ``/start_profile`` with the activity ``MEM``, on CUDA.
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
"""Whose frames stand below every allocation, and say nothing of it."""
STOP_S = 300.0
"""Seconds in which the engine writes the record."""
Change = tuple[int, int, str]
"""Address, bytes and function of an allocation; 0 bytes: it became free."""


@contextmanager
def recorded(client: Client, folder: Path) -> Iterator[dict[str, int]]:
    """What :func:`held_at_peak` says of the block; filled in at its end.

    :raises RuntimeError: the engine has written nothing.
    """
    held: dict[str, int] = {}
    folder.mkdir(parents=True)
    client.post("/start_profile", {"output_dir": str(folder), "activities": ["MEM"]})
    try:
        yield held
    finally:
        client.post("/stop_profile", {}, patience_s=STOP_S)
    found = sorted(folder.glob("*memory*.pickle"))
    if not found:
        raise RuntimeError(f"the engine has written no record of its memory into {folder}")
    with found[0].open("rb") as file:
        held |= held_at_peak(pickle.load(file)["device_traces"])


def held_at_peak(traces: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, int]:
    """Bytes that were allocated since the record's begin when these were most, by the engine's function.

    :param traces: of each GPU its events, in PyTorch's form; that of the GPU with the largest peak counts.
    """
    best, most = dict[str, int](), 0
    for changes in (list(_changes(trace)) for trace in traces):
        peak, end = _peak(changes)
        if peak > most:
            best, most = _held(changes[:end]), peak
    return best


def _changes(trace: Iterable[Mapping[str, Any]]) -> Iterator[Change]:
    for event in trace:
        if event["action"] == "alloc":
            yield event["addr"], event["size"], function_of(event.get("frames") or [])
        elif event["action"] == "free_completed":
            yield event["addr"], 0, ""


def _peak(changes: list[Change]) -> tuple[int, int]:
    """The most bytes, and how many changes had come by then."""
    sizes, total, most, end = dict[int, int](), 0, 0, 0
    for place, (address, size, _) in enumerate(changes, 1):
        total += size - sizes.pop(address, 0)
        if size:
            sizes[address] = size
        if total > most:
            most, end = total, place
    return most, end


def _held(changes: list[Change]) -> dict[str, int]:
    sizes = dict[int, tuple[int, str]]()
    for address, size, function in changes:
        sizes.pop(address, None)
        if size:
            sizes[address] = size, function
    held: dict[str, int] = {}
    for size, function in sizes.values():
        held[function] = held.get(function, 0) + size
    return dict(sorted(held.items(), key=lambda each: -each[1]))


def function_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """The engine's innermost function in a stack, as ``sampler.py: forward, line 120``; "elsewhere": there is none.

    :param frames: the innermost first.
    """
    for frame in frames:
        file = str(frame["filename"])
        if ENGINE in file and not file.endswith(OUTERMOST):
            return f"{Path(file).name}: {frame['name']}, line {frame['line']}"
    return "elsewhere"
