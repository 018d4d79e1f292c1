"""Engine plugin that records each forward pass of a server: its time, its memory, and what the changes did in it.

The plugin (``register``) appends one line per forward pass to a file. A line has the tokens, the wall-clock
milliseconds between two synchronizations, the allocator's bytes, and the *acts*: what the changes did
(:mod:`sglang_moe_patches.lab.observers.counting`). Acts between two forward passes, mostly while CUDA graphs are
captured, have a line of their own.

If the environment variable ``UNTIMED`` is set, the plugin does not synchronize. Its lines then have no bytes, and their
times are only those of the host. Forward passes, sends and receives then overlap as in a server without the plugin.
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
from sglang_moe_patches.lab.observers.counting import LAYER, Tally, select_acts
from sglang_moe_patches.lab.observers.events import Acts, parse_acts

VARIABLE = "MOE_PATCHES_BENCHMARK_FORWARDS"
"""Environment variable with the path of the file to which the plugin appends a line per forward pass."""
UNTIMED = "MOE_PATCHES_BENCHMARK_UNTIMED"
"""Environment variable. If it is set, the plugin does not synchronize, and measures no memory."""


@dataclass
class Forward:
    """One forward pass of one rank.

    :param tokens: tokens of the batch; ``None``: only ``acted`` counts, for the time between two forward passes.
    :param decode: whether the forward pass is a decode.
    :param ms: wall-clock milliseconds until the device has finished.
    :param before: bytes allocated at the start of the forward pass.
    :param peak: peak of the allocated bytes, minus ``before``.
    :param reserved: bytes that the allocator had reserved at the end of the forward pass.
    :param rank: rank of the process among all of the server's processes.
    :param acted: what the changes did.
    """

    tokens: int | None
    decode: bool = False
    ms: float = 0
    before: int = 0
    peak: int = 0
    reserved: int = 0
    rank: int = 0
    acted: Acts = field(default_factory=Acts)

    @property
    def slices(self) -> list[int]:
        """Number of column slices of each [tokens, top-k, hidden] tensor that was cut."""
        return [act.most for act in select_acts(self.acted, COLUMNS.name) for _ in range(act.times)]

    @property
    def outputs(self) -> int:
        """Number of dead inputs that became the output of a MoE runner."""
        return self._times(counts.AS_OUTPUT)

    @property
    def scratch(self) -> int:
        """Number of dead inputs that became scratch memory of a MoE runner."""
        return self._times(counts.AS_SCRATCH)

    def _times(self, count: Count) -> int:
        return sum(act.times for act in select_acts(self.acted, count.name))

    @property
    def is_untouched(self) -> bool:
        """Whether no change did anything in this forward pass."""
        return not (self.slices or self.outputs or self.scratch)


def read(path: Path) -> list[Forward]:
    """Read the lines that the plugin has written so far."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Forward(**line | {"acted": parse_acts(line["acted"])}) for line in lines]


# --- In the servers --------------------------------------------------------------------------------------------------

_tally = Tally([COLUMNS, counts.AS_OUTPUT, counts.AS_SCRATCH])


def register() -> None:
    """Entry point of the engine plugin. It wraps the model runner and counts what the changes do."""
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
        if (acts_between := _tally.drain()).acts:
            _write(Forward(None, acted=acts_between))
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
