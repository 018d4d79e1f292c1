"""The bytes in use over one forward: the CUDA allocator's own history, from the first allocation to the last.

Which code allocated what is not kept: PyTorch's ``torch.cuda.memory._dump_snapshot`` writes that, and shows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.observers.forwards import Observer

TOKENS = "BENCHMARK_HISTORY_TOKENS"
"""Environment variable of a server: of the second forward with so many tokens the history is recorded (CUDA)."""
_GRANULE = 512
"""The allocator hands out multiples of this many bytes."""
_MOST_EVENTS = 1_000_000


def replay(events: Iterable[Mapping[str, Any]]) -> list[int]:
    """Follow a record of allocations and releases.

    :param events: of the allocator: ``action``, ``addr``, ``size`` in bytes.
    :returns: bytes in use beyond those at the start, after each allocation and release.
    """
    line: list[int] = []
    alive: dict[int, int] = {}
    in_use = 0
    for event in events:
        if event["action"] not in ("alloc", "free_requested"):
            continue
        size = -(-event["size"] // _GRANULE) * _GRANULE
        if event["action"] == "alloc":
            alive[event["addr"]] = size
            in_use += size
        else:  # a block from before the start is not in ``alive``
            in_use -= alive.pop(event["addr"], size)
        line.append(in_use)
    return line


class Recorder:
    """Records the current device's allocator from its making until :meth:`finish`."""

    def __init__(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS, clear_history=True)

    def finish(self) -> list[int]:
        """What :func:`replay` makes of the record."""
        import torch

        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        return replay(events)


def register() -> None:
    """Entry point of an engine plugin: the observer of each model process records the forward that is asked for."""
    wanted = int(os.environ[TOKENS])
    recorder: Recorder | None = None
    starts, ends = Observer.forward_starts, Observer.forward_ends

    def forward_starts(self: Observer, tokens: int, cuda: bool) -> None:
        nonlocal wanted, recorder
        starts(self, tokens, cuda)
        if cuda and tokens == wanted == self.memory.tokens:
            wanted, recorder = 0, Recorder()

    def forward_ends(self: Observer) -> None:
        nonlocal recorder
        if recorder:
            line, recorder = recorder.finish(), None
            self.path.with_suffix(".history").write_text(json.dumps(line))
        ends(self)

    # By name: an assignment to a method of a class is not typed.
    for name, method in {"forward_starts": forward_starts, "forward_ends": forward_ends}.items():
        setattr(Observer, name, method)


def collect(folder: Path) -> list[int] | None:
    """The line of the rank whose forward used most; ``None``: none was recorded."""
    lines = [json.loads(path.read_text()) for path in sorted(folder.glob("*.history"))]
    return max(lines, key=max, default=None)
