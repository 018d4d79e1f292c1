"""What the allocator of a server holds, forward by forward.

A plugin of the engine (``register``) for the servers that a benchmark starts. It appends a line for each forward to the
file that ``VARIABLE`` names. Nothing waits for the device: PyTorch's counters are the host's, and the free memory is
the driver's.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "MOE_PATCHES_BENCHMARK_HELD"


@dataclass(frozen=True)
class Line:
    """A forward; bytes.

    :param at: the host's clock when it had been started, in seconds.
    :param allocated: before it. ``peak``: the most since the line before, this forward included.
    :param reserved: by the allocator afterwards. ``free``: of the GPU, the driver says.
    """

    at: float
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
    """``random``: the lines of the long run, whose halves are compared."""
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


def read(path: Path) -> list[Line]:
    """The lines so far."""
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


# --- In the servers --------------------------------------------------------------------------------------------------


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    import wrapt

    wrapt.register_post_import_hook(_watch, "sglang.srt.model_executor.model_runner")


def _watch(module: Any) -> None:
    import torch

    path = Path(os.environ[VARIABLE])
    original = module.ModelRunner.forward
    file: Any = None

    def read_counters() -> dict[str, int]:
        """The allocator's counters; none where there is no CUDA."""
        return dict(torch.cuda.memory_stats()) if torch.cuda.is_initialized() else {}

    @functools.wraps(original)
    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal file
        # The file is of all ranks together: the first one writes.
        if (
            torch.distributed.get_rank()
            or getattr(self, "is_draft_worker", False)
            or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        ):
            return original(self, batch, *args, **kwargs)
        allocated = read_counters().get("allocated_bytes.all.current", 0)
        if file is None:
            file = path.open("a", buffering=1)
        result = original(self, batch, *args, **kwargs)
        now = read_counters()
        free = torch.cuda.mem_get_info()[0] if now else 0
        peak, reserved = now.get("allocated_bytes.all.peak", 0), now.get("reserved_bytes.all.current", 0)
        line = Line(time.time(), allocated, peak, reserved, free)
        file.write(json.dumps(asdict(line)) + "\n")
        if now:
            torch.cuda.reset_peak_memory_stats()
        return result

    module.ModelRunner.forward = forward
