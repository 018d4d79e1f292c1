"""What a model process records of itself while ``regress`` evaluates it; active only where ``regress`` asks for it.

Figures are written to ``<folder>/<pid>.json`` whenever one of them grows, so they survive a server that is killed.
"""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sglang_moe_patches.patch import Plan
from sglang_moe_patches.regression.history import Recorder

VARIABLE = "SGLANG_MOE_PATCHES_OBSERVE"
HISTORY_VARIABLE = "SGLANG_MOE_PATCHES_OBSERVE_HISTORY"
"""A number of tokens: of the second forward with so many, what is alive when, and which code made it (CUDA)."""
KERNELS = ("trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe")

_MARK = "_moe_patches_seen_in_forward"


class Observer:
    """Memory of one model process.

    ``live_at_kernel_bytes``: bytes of tensors alive when a routed-experts kernel starts, beyond those alive when its
    forward started; the most over the layers. ``peak_forward_bytes`` (CUDA): the allocator's peak of a forward beyond
    what was allocated before it. Both are of the forward with the most ``tokens``, and of several such the least, so
    that workspaces which libraries allocate once do not count. ``output_buffers``: most distinct allocations that the
    routed-experts kernels of one forward wrote their output into. ``kernel_buffer_bytes``: what CuteDSL wrappers hold
    between forwards; ``None`` without any.
    """

    def __init__(self, folder: str, changes: list[tuple[str, str, str]]) -> None:
        self.path = Path(folder) / f"{os.getpid()}.json"
        self.figures: dict[str, Any] = {
            "device": None,
            "peak_forward_bytes": None,
            "live_at_kernel_bytes": None,
            "tokens": 0,
            "forwards": 0,
            "moe_layers": 0,
            "output_buffers": 0,
            "kernel_buffer_bytes": None,
            "changes": changes,
        }
        self.before = 0
        self.tokens = 0
        self.measuring = False
        self.kernels = 0
        self.buffers = 0
        self.live = 0
        self.wrappers: WeakSet[Any] = WeakSet()
        self.history_tokens = int(os.environ.get(HISTORY_VARIABLE, "0"))
        self.history: Recorder | None = None

    def forward_starts(self, tokens: int, cuda: bool) -> None:
        import torch

        self.figures["device"] = "cuda" if cuda else "cpu"
        self.figures["forwards"] += 1
        self.tokens, self.kernels, self.buffers, self.live = tokens, 0, 0, 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before, self.measuring = torch.cuda.memory_allocated(), tokens >= self.figures["tokens"]
            if tokens == self.history_tokens == self.figures["tokens"]:
                self.history_tokens, self.history = 0, Recorder()
        else:
            # Walking the heap takes a while: only for a forward larger than all before.
            self.measuring = tokens > self.figures["tokens"]
            self.before = _live_bytes() if self.measuring else 0

    def kernel_starts(self, output: Any) -> None:
        import torch

        self.kernels += 1
        # An address may be used again within a forward; the storage object is what tells allocations apart.
        storage = output.untyped_storage()
        if getattr(storage, _MARK, None) != self.figures["forwards"]:
            setattr(storage, _MARK, self.figures["forwards"])
            self.buffers += 1
        if self.measuring:
            alive = torch.cuda.memory_allocated() if output.is_cuda else _live_bytes()
            self.live = max(self.live, alive - self.before)
        if self.history:
            self.history.mark()

    def forward_ends(self) -> None:
        import torch

        kept = dict(self.figures)
        if self.history:
            self.figures["history"], self.history = self.history.finish(), None
        if self.measuring and self.kernels:
            measured = {"live_at_kernel_bytes": self.live, "peak_forward_bytes": None}
            if self.figures["device"] == "cuda":
                measured["peak_forward_bytes"] = torch.cuda.max_memory_allocated() - self.before
            if self.tokens == self.figures["tokens"]:
                for name, value in measured.items():
                    if value is not None:
                        measured[name] = min(value, self.figures[name])
            self.figures |= {**measured, "tokens": self.tokens}
        self.figures["moe_layers"] = max(self.kernels, self.figures["moe_layers"])
        self.figures["output_buffers"] = max(self.buffers, self.figures["output_buffers"])
        if self.wrappers and self.kernels:
            self.figures["kernel_buffer_bytes"] = _held_bytes(self.wrappers)
        if {**self.figures, "forwards": 0} != {**kept, "forwards": 0} or self.figures["forwards"] % 100 == 1:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.figures))
            partial.replace(self.path)


def _held_bytes(wrappers: Iterable[Any]) -> int:
    """Bytes of the tensors that the wrappers hold, one storage counted once."""
    import torch

    storages = {}
    for wrapper in wrappers:
        held = [value for value in vars(wrapper).values() if isinstance(value, torch.Tensor | dict)]
        for value in held:
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, torch.Tensor):
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _live_bytes() -> int:
    import torch

    storages = {}
    for candidate in gc.get_objects():
        # type(), not isinstance(): asking a lazy proxy for its __class__ runs code of its own.
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
            try:
                storage = candidate.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # no memory: meta, fake or wrapper tensors
    return sum(storages.values())


def install(folder: str, plans: Mapping[str, Plan]) -> None:
    """Record this process's memory, and what each change answered, into ``folder``, which must exist."""
    import flashinfer.fused_moe
    from sglang.srt.model_executor.model_runner import ModelRunner

    observer = Observer(folder, [(name, str(o.status), o.reason) for name, o in plans.items()])

    def observed_kernel(kernel: Any) -> Any:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            observer.kernel_starts(kwargs["output"])
            return kernel(*args, **kwargs)

        return run

    def observed_forward(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            observer.forward_starts(forward_batch.input_ids.shape[0], self.device == "cuda")
            result = forward(self, forward_batch, *args, **kwargs)
            observer.forward_ends()
            return result

        return run

    def observed_wrapper(original: Any) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            observer.wrappers.add(self)
            if self._moe_output is not None:
                observer.kernel_starts(self._moe_output)
            return original(self, *args, **kwargs)

        return run

    wrapper = getattr(flashinfer.fused_moe, "CuteDslMoEWrapper", None)
    if wrapper is not None:
        wrapper.run = observed_wrapper(wrapper.run)
    for name in KERNELS:
        setattr(flashinfer.fused_moe, name, observed_kernel(getattr(flashinfer.fused_moe, name)))
    ModelRunner.forward = observed_forward(ModelRunner.forward)


def collect(folder: Path) -> dict[str, Any] | None:
    """The figures of the process that used most, or ``None`` when no process ran a forward.

    ``changes`` in them is (name, status, reason) of each change.

    :param folder: where :func:`install` wrote; one file a process (a tensor-parallel rank).
    """
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    files = [figures for figures in files if figures["forwards"]]
    if not files:
        return None
    return max(files, key=lambda f: (f["peak_forward_bytes"] or 0, f["live_at_kernel_bytes"] or 0))
