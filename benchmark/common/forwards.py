"""What each forward of a server takes, and what the changes behind the Triton runner did in it.

A plugin of the engine (``register``) for the servers that a benchmark or a test starts. It writes a line for each
forward to the file that ``VARIABLE`` names: tokens, wall-clock milliseconds between two synchronizations, the
allocator's bytes, and what was seen at the seams. What was seen outside of any forward, while graphs were captured,
gets a line of its own. With ``UNTIMED`` set it does not wait for the device, and says nothing of time and bytes:
forwards, sends and receives overlap as they do without it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "MOE_PATCHES_BENCHMARK_FORWARDS"
UNTIMED = "MOE_PATCHES_BENCHMARK_UNTIMED"


@dataclass
class Seen:
    """At the seams of the changes.

    :param slices: of each [tokens, top-k, hidden] tensor that might run in columns.
    :param outputs: dead inputs that became a runner's output.
    :param scratch: dead inputs that became its scratch memory.
    """

    slices: list[int] = field(default_factory=list)
    outputs: int = 0
    scratch: int = 0


@dataclass
class Forward:
    """One forward of one rank.

    :param tokens: of its batch; ``None``: the line is about what was captured.
    :param decode: whether it is one.
    :param ms: wall-clock milliseconds, the device's work included.
    :param before: bytes allocated when it started.
    :param peak: the most bytes beyond those.
    :param reserved: bytes that the allocator held when it ended.
    :param rank: of the process, among all of the server's.
    """

    tokens: int | None
    decode: bool = False
    ms: float = 0
    before: int = 0
    peak: int = 0
    reserved: int = 0
    rank: int = 0
    seen: Seen = field(default_factory=Seen)


def read(path: Path) -> list[Forward]:
    """The lines so far."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [Forward(**{**line, "seen": Seen(**line["seen"])}) for line in lines]


# --- In the servers --------------------------------------------------------------------------------------------------

_seen = Seen()


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    import wrapt

    wrapt.register_post_import_hook(_time_forwards, "sglang.srt.model_executor.model_runner")
    wrapt.register_post_import_hook(_count_slices, "sglang_moe_patches.changes.moe_workspace.promise")
    wrapt.register_post_import_hook(_count_taken, "sglang_moe_patches.dead_input.channel")


def _count_slices(promise: Any) -> None:
    original = promise.column_ranges

    @functools.wraps(original)
    def column_ranges(*args: Any) -> Any:
        found = original(*args)
        _seen.slices.append(len(found))
        return found

    promise.column_ranges = column_ranges


def _count_taken(channel: Any) -> None:
    take, take_memory = channel.take, channel.take_memory

    @functools.wraps(take)
    def output(*args: Any, **kwargs: Any) -> Any:
        buffer = take(*args, **kwargs)
        _seen.outputs += buffer is not None
        return buffer

    @functools.wraps(take_memory)
    def scratch(*args: Any, **kwargs: Any) -> Any:
        memory = take_memory(*args, **kwargs)
        _seen.scratch += memory is not None
        return memory

    channel.take, channel.take_memory = output, scratch


def _write(forward: Forward) -> None:
    import torch.distributed

    global _seen
    forward.rank = torch.distributed.get_rank()
    with open(os.environ[VARIABLE], "a") as lines:
        lines.write(json.dumps(asdict(forward)) + "\n")
    _seen = Seen()


def _time_forwards(module: Any) -> None:
    import torch

    original = module.ModelRunner.forward
    cuda = torch.cuda.is_available() and UNTIMED not in os.environ

    @functools.wraps(original)
    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if _seen != Seen():
            _write(Forward(None, seen=_seen))
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        result = original(self, batch, *args, **kwargs)
        made = Forward(batch.input_ids.shape[0], batch.forward_mode.is_decode(), before=before, seen=_seen)
        if cuda:
            torch.cuda.synchronize()
            made.peak, made.reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved()
        made.ms = (time.perf_counter() - started) * 1e3
        _write(made)
        return result

    module.ModelRunner.forward = forward
