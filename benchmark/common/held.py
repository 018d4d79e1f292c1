"""What the allocator of a server holds, forward by forward, and in the end by what holds it.

A plugin of the engine (``register``) for the servers that a benchmark starts. It appends a line for each forward to the
file that ``VARIABLE`` names. Nothing waits for the device: PyTorch's counters are the host's, and the free memory is
the driver's. Where a file ``<that file>.ask`` appears, the next forward says what the reserved memory consists of.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "MOE_PATCHES_BENCHMARK_HELD"


@dataclass(frozen=True)
class Line:
    """A forward; bytes.

    :param at: the host's clock when it had been started, in seconds.
    :param mode: of its batch, in the engine's words.
    :param allocated: before it. ``peak``: the most since the line before, this forward included.
    :param reserved: by the allocator afterwards. ``free``: of the GPU, the driver says.
    """

    at: float
    mode: str
    tokens: int
    requests: int
    allocated: int
    peak: int
    reserved: int
    free: int


@dataclass(frozen=True)
class Slack:
    """What forwards took beyond what was there when the first began, in bytes.

    :param tensors: the most that was allocated at once. ``reserved``: what the allocator took from the driver for it.
    :param lowest_free: of the GPU, at the worst moment.
    :param grown: by how much the allocator held more in the second half of the lines than ever in the first.
    """

    tensors: int
    reserved: int
    lowest_free: int
    grown: int

    @property
    def slack(self) -> int:
        return self.reserved - self.tensors


def slack(lines: Sequence[Line], random: Sequence[Line] = ()) -> Slack:
    """
    :param lines: all, from the first forward on.
    :param random: those of the long run, whose halves are compared.
    """
    first, later = lines[0], lines[1:] or lines
    half = len(random) // 2
    grown = max((line.reserved for line in random[half:]), default=0) - max(
        (line.reserved for line in random[:half]), default=0
    )
    return Slack(
        # The first line's peak is of the start.
        tensors=max(line.peak for line in later) - first.allocated,
        reserved=max(line.reserved for line in lines) - first.reserved,
        lowest_free=min(line.free for line in lines),
        grown=max(grown, 0) if half else 0,
    )


def parts(segments: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The allocator's segments by pool, stream and kind, the largest first: bytes, and how many of them.

    :param segments: ``torch.cuda.memory_snapshot()``.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for segment in segments:
        pool = ".".join(map(str, segment.get("segment_pool_id", (0, 0))))
        kind = "expandable" if segment.get("is_expandable") else "ordinary"
        key = ("common" if pool == "0.0" else f"pool {pool}", segment["segment_type"], kind, segment["stream"] % 10**6)
        part = found.setdefault(
            key, {"pool": key[0], "size": key[1], "kind": kind, "segments": 0, "reserved": 0, "allocated": 0}
        )
        part["segments"] += 1
        part["reserved"] += segment["total_size"]
        part["allocated"] += segment["allocated_size"]
    return sorted(found.values(), key=lambda part: -part["reserved"])


def read(path: Path) -> list[Line]:
    """The lines so far."""
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def ask(path: Path) -> None:
    """Have the next forward say what holds the memory."""
    path.with_name(f"{path.name}.ask").touch()


def answered(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What it said: ``first`` of the first forward, ``last`` of the one that was asked."""
    told = path.with_name(f"{path.name}.parts")
    return {name: each for line in told.read_text().splitlines() for name, each in json.loads(line).items()}


# --- In the servers --------------------------------------------------------------------------------------------------


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    import wrapt

    wrapt.register_post_import_hook(_watch, "sglang.srt.model_executor.model_runner")


def _watch(module: Any) -> None:
    import torch

    path = Path(os.environ[VARIABLE])
    asked, told = path.with_name(f"{path.name}.ask"), path.with_name(f"{path.name}.parts")
    original = module.ModelRunner.forward
    file: Any = None

    def counted() -> dict[str, int]:
        """The allocator's counters; none where there is no CUDA."""
        return dict(torch.cuda.memory_stats()) if torch.cuda.is_initialized() else {}

    def peak_and_reserved(counters: dict[str, int]) -> tuple[int, int]:
        return counters.get("allocated_bytes.all.peak", 0), counters.get("reserved_bytes.all.current", 0)

    def tell(name: str) -> None:
        segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else []
        with told.open("a") as lines:
            lines.write(json.dumps({name: parts(segments)}) + "\n")

    @functools.wraps(original)
    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal file
        if getattr(self, "is_draft_worker", False) or (
            torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        ):
            return original(self, batch, *args, **kwargs)
        allocated = counted().get("allocated_bytes.all.current", 0)
        if file is None:
            file = path.open("a", buffering=1)
            tell("first")
        result = original(self, batch, *args, **kwargs)
        now = counted()
        free = torch.cuda.mem_get_info()[0] if now else 0
        tokens = 0 if batch.input_ids is None else int(batch.input_ids.shape[0])
        of_batch = batch.forward_mode.name, tokens, batch.batch_size
        line = Line(time.time(), *of_batch, allocated, *peak_and_reserved(now), free)
        file.write(json.dumps(asdict(line)) + "\n")
        if now:
            torch.cuda.reset_peak_memory_stats()
        if asked.exists():
            asked.unlink()
            tell("last")
        return result

    module.ModelRunner.forward = forward
