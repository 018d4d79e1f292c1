"""What each forward of a server takes, and what the changes did in it.

A plugin of the engine (``register``) for the servers that a benchmark or a test starts. It writes a line for each
forward to the file that ``VARIABLE`` names: tokens, wall-clock milliseconds between two synchronizations, the
allocator's bytes, and what the changes did (:mod:`sglang_moe_patches.lab.observers.acted`). What they did outside of
any forward, while graphs were captured, gets a line of its own. With ``UNTIMED`` set it waits for no device and
says nothing of time and bytes: forwards, sends and receives overlap as they do without it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.moe_workspace import COLUMNS
from sglang_moe_patches.core.dead_input import counts
from sglang_moe_patches.core.patch import Count, Patcher
from sglang_moe_patches.lab.observers.acted import LAYER, Tally, acts_of
from sglang_moe_patches.lab.observers.events import Acted, parse_acted

VARIABLE = "MOE_PATCHES_BENCHMARK_FORWARDS"
UNTIMED = "MOE_PATCHES_BENCHMARK_UNTIMED"


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
    acted: Acted = field(default_factory=Acted)

    @property
    def slices(self) -> list[int]:
        """Of each [tokens, top-k, hidden] tensor that ran in columns."""
        return [act.most for act in acts_of(self.acted, COLUMNS.name) for _ in range(act.times)]

    @property
    def outputs(self) -> int:
        """Dead inputs that became a runner's output."""
        return self._times(counts.AS_OUTPUT)

    @property
    def scratch(self) -> int:
        """Dead inputs that became its scratch memory."""
        return self._times(counts.AS_SCRATCH)

    def _times(self, count: Count) -> int:
        return sum(act.times for act in acts_of(self.acted, count.name))

    @property
    def untouched(self) -> bool:
        """Nothing was done in it."""
        return not (self.slices or self.outputs or self.scratch)


def read(path: Path) -> list[Forward]:
    """The lines so far."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Forward(**line | {"acted": parse_acted(line["acted"])}) for line in lines]


# --- In the servers --------------------------------------------------------------------------------------------------

_tally = Tally([COLUMNS, counts.AS_OUTPUT, counts.AS_SCRATCH])


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    import wrapt

    wrapt.register_post_import_hook(_time_forwards, "sglang.srt.model_executor.model_runner")
    wrapt.register_post_import_hook(lambda module: _tally.install(Patcher()), LAYER[0])


def _write(forward: Forward) -> None:
    import torch.distributed

    forward.rank = torch.distributed.get_rank()
    with open(os.environ[VARIABLE], "a") as lines:
        lines.write(json.dumps(asdict(forward)) + "\n")


def _time_forwards(module: Any) -> None:
    import torch

    original = module.ModelRunner.forward
    cuda = torch.cuda.is_available() and UNTIMED not in os.environ

    @functools.wraps(original)
    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if (before_it := _tally.drain()).acts:
            _write(Forward(None, acted=before_it))
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        result = original(self, batch, *args, **kwargs)
        line = Forward(batch.input_ids.shape[0], batch.forward_mode.is_decode(), before=before)
        if cuda:
            torch.cuda.synchronize()
            line.peak, line.reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved()
        line.ms = (time.perf_counter() - started) * 1e3
        line.acted = _tally.drain()
        _write(line)
        return result

    module.ModelRunner.forward = forward
