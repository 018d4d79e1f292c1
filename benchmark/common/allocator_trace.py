"""Engine plugin that records the memory of PyTorch's allocator after each forward pass of a server.

The plugin (``register``) appends one line per forward pass to a file. The environment variable ``VARIABLE`` has the
path of the file. The plugin does not synchronize with the device: PyTorch's counters are on the host, and the driver
returns the free memory.
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
"""Name of the environment variable with the path of the file to which the plugin appends a line per forward pass."""


@dataclass(frozen=True)
class Line:
    """Memory before, during and after one forward pass, in bytes.

    :param at: time at which the host had queued the whole forward pass, in seconds since the epoch.
    :param allocated: allocated memory before the forward pass.
    :param peak: peak of the allocated memory from the previous line to the end of this forward pass.
    :param reserved: memory reserved by the allocator after the forward pass.
    :param free: free memory of the GPU after the forward pass.
    """

    at: float
    allocated: int
    peak: int
    reserved: int
    free: int


@dataclass(frozen=True)
class Slack:
    """Growth of a server's memory while it computes forward passes, in bytes.

    :param tensors: peak of the allocated memory, minus the allocated memory before the first forward pass.
    :param reserved: largest memory that the allocator reserved, minus its reserved memory after the first forward pass.
    :param lowest_free: lowest free memory of the GPU after a forward pass.
    :param grown: growth of the reserved memory during the load of random prompts: its largest value in the second half
        of the load, minus its largest value in the first half.
    """

    tensors: int
    reserved: int
    lowest_free: int
    grown: int

    @property
    def slack(self) -> int:
        """Bytes that the allocator reserved and no tensor used."""
        return self.reserved - self.tensors


def compute_slack(lines: Sequence[Line], random_lines: Sequence[Line] = ()) -> Slack:
    """Compute :class:`Slack` from the lines of all forward passes.

    :param random_lines: lines of the forward passes during the load of random prompts, for :attr:`Slack.grown`.
    """
    first, later = lines[0], lines[1:] or lines
    half = len(random_lines) // 2
    grown = max((line.reserved for line in random_lines[half:]), default=0) - max(
        (line.reserved for line in random_lines[:half]), default=0
    )
    return Slack(
        # The peak of the first line includes the server's start, so it is left out.
        tensors=max(line.peak for line in later) - first.allocated,
        reserved=max(line.reserved for line in lines) - first.reserved,
        lowest_free=min(line.free for line in lines),
        grown=max(grown, 0) if half else 0,
    )


def read(path: Path) -> list[Line]:
    """Read the lines that the plugin has written so far."""
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


# --- In the servers --------------------------------------------------------------------------------------------------


def register() -> None:
    """Entry point of the engine plugin. It wraps the model runner."""
    import wrapt

    wrapt.register_post_import_hook(_record_forwards, "sglang.srt.model_executor.model_runner")


def _record_forwards(module: Any) -> None:
    import torch

    path = Path(os.environ[VARIABLE])
    original = module.ModelRunner.forward
    file: Any = None

    def read_counters() -> dict[str, int]:
        """Read the allocator's counters. The result is empty without CUDA."""
        return dict(torch.cuda.memory_stats()) if torch.cuda.is_initialized() else {}

    @functools.wraps(original)
    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal file
        # All ranks have the same path of the file, so only rank 0 writes.
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
        counters = read_counters()
        free = torch.cuda.mem_get_info()[0] if counters else 0
        peak, reserved = counters.get("allocated_bytes.all.peak", 0), counters.get("reserved_bytes.all.current", 0)
        line = Line(time.time(), allocated, peak, reserved, free)
        file.write(json.dumps(asdict(line)) + "\n")
        if counters:
            torch.cuda.reset_peak_memory_stats()
        return result

    module.ModelRunner.forward = forward
