"""Where one forward's memory goes: the CUDA allocator's own history, from the first allocation to the last.

The allocator records each allocation and release with the Python stack that asked for it. Replaying the record gives
the bytes in use at every moment, and what is alive at any of them, each block with the line of code that made it.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.observers.forwards import Observer

TOKENS = "BENCHMARK_HISTORY_TOKENS"
"""Environment variable of a server: of the second forward with so many tokens the history is recorded (CUDA)."""
_GRANULE = 512
"""The allocator hands out multiples of this many bytes."""
_MOST_EVENTS = 1_000_000


@dataclass(frozen=True)
class Block:
    """Memory that was allocated during a forward and is alive.

    :param code: the engine's part of the stack that asked for it, innermost first.
    :param after_mark: how many kernels had started before.
    """

    bytes: int
    code: tuple[str, ...]
    after_mark: int


@dataclass(frozen=True)
class Moment:
    """``bytes`` in use beyond those at a forward's start, less than the sum of ``blocks`` where some from before were
    released; and the blocks that are alive, largest first."""

    bytes: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class History:
    """Where one forward's memory went.

    :param line: (milliseconds since the first allocation, bytes in use beyond those at the start).
    :param alive: when each kernel started.
    """

    line: tuple[tuple[float, int], ...]
    alive: tuple[Moment, ...]
    at_peak: Moment


def replay(events: Sequence[Mapping[str, Any]], marks: Sequence[int]) -> tuple[list[tuple[float, int]], list[Moment]]:
    """Follow a record of allocations and releases.

    :param events: of the allocator: ``action``, ``addr``, ``size`` in bytes, ``time_us``, ``frames``.
    :param marks: moments, each the number of events before it.
    :returns: the line of (milliseconds since the first event, bytes in use beyond those at the start), and, for each
        mark and then for the moment of the peak, what is alive then.
    """
    line: list[tuple[float, int]] = []
    alive: dict[int, dict[str, Any]] = {}
    moments: list[tuple[int, list[dict[str, Any]]]] = []
    peak: tuple[int, list[dict[str, Any]]] = 0, []
    in_use = 0
    for index, event in enumerate([*events, None]):
        while len(moments) < len(marks) and marks[len(moments)] <= index:
            moments.append((in_use, list(alive.values())))
        if event is None:
            break
        size = -(-event["size"] // _GRANULE) * _GRANULE
        if event["action"] == "alloc":
            alive[event["addr"]] = {"bytes": size, "frames": event["frames"], "after_mark": len(moments)}
            in_use += size
        elif event["action"] == "free_requested":
            # Not ours: a block from before the start is released.
            in_use -= alive.pop(event["addr"], {"bytes": size})["bytes"]
        else:
            continue
        line.append(((event["time_us"] - events[0]["time_us"]) / 1000, in_use))
        if in_use > peak[0]:
            peak = in_use, list(alive.values())
    return line, [Moment(size, _described(blocks)) for size, blocks in [*moments, peak]]


def _described(blocks: list[dict[str, Any]]) -> tuple[Block, ...]:
    return tuple(
        Block(block["bytes"], describe(block["frames"]), block["after_mark"])
        for block in sorted(blocks, key=lambda block: -block["bytes"])
    )


def describe(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The engine's part of a stack, innermost first: ``module.py:line function: source``, at most four of them."""
    found = []
    for frame in frames:
        path = frame["filename"]
        if "/sglang/srt/" not in path or any(folder in path for folder in ("/srt/model_executor/", "/srt/plugins/")):
            continue
        source = linecache.getline(path, frame["line"]).strip()
        found.append(f"{Path(path).name}:{frame['line']} {frame['name']}: {source}")
    return tuple(found[:4])


class Recorder:
    """Records the current device's allocator from its making until :meth:`finish`."""

    def __init__(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=_MOST_EVENTS, clear_history=True
        )
        self.marks: list[int] = []

    def _events(self) -> list[dict[str, Any]]:
        import torch

        events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        return [event for event in events if event["action"] != "snapshot"]

    def mark(self) -> None:
        self.marks.append(len(self._events()))

    def finish(self) -> History:
        """What :func:`replay` makes of the record."""
        import torch

        events = self._events()
        torch.cuda.memory._record_memory_history(enabled=None)
        line, moments = replay(events, self.marks)
        return History(tuple(line), tuple(moments[:-1]), moments[-1])


def register() -> None:
    """Entry point of an engine plugin: the observer of each model process records the forward that is asked for."""
    wanted = int(os.environ[TOKENS])
    recorder: Recorder | None = None
    starts, kernel_starts, ends = Observer.forward_starts, Observer.kernel_starts, Observer.forward_ends

    def forward_starts(self: Observer, tokens: int, cuda: bool) -> None:
        nonlocal wanted, recorder
        starts(self, tokens, cuda)
        if cuda and tokens == wanted == self.memory.tokens:
            wanted, recorder = 0, Recorder()

    def marked_kernel_starts(self: Observer, output: Any = None) -> None:
        kernel_starts(self, output)
        if recorder:
            recorder.mark()

    def forward_ends(self: Observer) -> None:
        nonlocal recorder
        if recorder:
            history, recorder = recorder.finish(), None
            self.path.with_suffix(".history").write_text(events.to_json(history))
        ends(self)

    # By name: an assignment to a method of a class is not typed.
    for name, method in {
        "forward_starts": forward_starts,
        "kernel_starts": marked_kernel_starts,
        "forward_ends": forward_ends,
    }.items():
        setattr(Observer, name, method)


def collect(folder: Path) -> History | None:
    """That of the rank whose forward used most; ``None``: none was recorded."""
    recorded = [events.record(History, path.read_text()) for path in sorted(folder.glob("*.history"))]
    return max(recorded, key=lambda history: history.at_peak.bytes, default=None)
