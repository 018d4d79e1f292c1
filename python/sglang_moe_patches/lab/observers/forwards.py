"""What a model process records of itself while ``regress`` evaluates it; active only where ``regress`` asks for it.

Figures are written to ``<folder>/<pid>.json`` at once, and whenever one of them grows, so they survive a server that is
killed. Observing never ends a server: the first thing that goes wrong is written down, and nothing is observed from
then on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sglang_moe_patches.core import runners
from sglang_moe_patches.core.log import logger
from sglang_moe_patches.core.patch import Patcher, Plan
from sglang_moe_patches.lab.observers import acted, events
from sglang_moe_patches.memory.kv_sizing.pools import hybrid, pool_bytes, pools_of

KERNELS = ("trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe")

_MARK = "_moe_patches_seen_in_forward"


class Observer:
    """Memory of one model process (:class:`events.Memory`)."""

    def __init__(self, folder: str, changes: tuple[events.ChangeStatus, ...]) -> None:
        self.path = Path(folder) / f"{os.getpid()}.json"
        self.process = events.Process(changes)
        self.memory = self.process.memory
        self.before = 0
        self.at: tuple[int, int] | None = None
        """Bytes allocated and reserved when the first forward began."""
        self.most = 0
        """Bytes allocated at once, since then."""
        self.tokens = 0
        self.measuring = False
        self.kernels = 0
        self.buffers = 0
        self.unseen = 0
        """Kernels of this forward whose output was not seen."""
        self.live = 0
        self.wrappers: WeakSet[Any] = WeakSet()
        self.tally: acted.Tally | None = None

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        """Observe one step; whatever goes wrong with it, the server goes on unobserved."""
        if self.process.failure:
            return
        try:
            step(*args)
        except Exception as error:
            self.process.failure = f"observing failed: {type(error).__name__}: {error}"
            logger.warning("sglang-moe-patches: %s", self.process.failure)
            with contextlib.suppress(Exception):  # the folder is gone or full: the warning has to do
                self.write()

    def write(self) -> None:
        events.write(self.process, self.path)

    def forward_starts(self, tokens: int, cuda: bool) -> None:
        import torch

        self.memory.device = "cuda" if cuda else "cpu"
        if cuda and not self.memory.gpu:
            self.memory.gpu = torch.cuda.get_device_name()
        self.memory.forwards += 1
        self.tokens, self.kernels, self.buffers, self.unseen, self.live = tokens, 0, 0, 0, 0
        if cuda:
            self.before, self.measuring = torch.cuda.memory_allocated(), tokens >= self.memory.tokens
            if self.at is None:
                self.at = self.before, torch.cuda.memory_reserved()
            else:  # what came between two forwards counts too, sampling above all
                self.most = max(self.most, torch.cuda.max_memory_allocated() - self.at[0])
            torch.cuda.reset_peak_memory_stats()
        else:
            # Walking the heap takes a while: only for a forward larger than all before.
            self.measuring = tokens > self.memory.tokens
            self.before = _live_bytes() if self.measuring else 0

    def kernel_starts(self, output: Any = None) -> None:
        """:param output: the tensor it will write, where that is known by now."""
        import torch

        self.kernels += 1
        if output is not None:
            self.output_seen(output)
        if self.measuring:
            alive = torch.cuda.memory_allocated() if self.memory.device == "cuda" else _live_bytes()
            self.live = max(self.live, alive - self.before)

    def layer_starts(self, layer: Any) -> None:
        """:param layer: the engine's ``FusedMoE``. Where its kernel is not looked into, its runner counts as one."""
        if runners.runner_of(layer) not in (*runners.TRTLLM, runners.CUTEDSL):
            self.kernel_starts()
            self.kernel_returned(None)

    def kernel_returned(self, result: Any) -> None:
        """:param result: the tensor, alone or first in a list, that a kernel without an ``output`` of its own has
        returned; ``None``: it left the sum over the top-k, and with it the layer's output, to somebody else."""
        if result is None:
            self.unseen += 1
        else:
            self.output_seen(result[0] if isinstance(result, list | tuple) else result)

    def output_seen(self, output: Any) -> None:
        # An address may be used again within a forward; the storage object is what tells allocations apart.
        storage = output.untyped_storage()
        if getattr(storage, _MARK, None) != self.memory.forwards:
            setattr(storage, _MARK, self.memory.forwards)
            self.buffers += 1

    def forward_ends(self) -> None:
        import torch

        kept, memory = replace(self.memory), self.memory
        # Where no observed kernel has ever run, every forward counts; else those alone in which they did: a replayed
        # graph allocates nothing.
        if self.at:
            self.most = max(self.most, torch.cuda.max_memory_allocated() - self.at[0])
            memory.reserved_bytes = max(memory.reserved_bytes or 0, torch.cuda.memory_reserved() - self.at[1])
            memory.slack_bytes = max(0, memory.reserved_bytes - self.most)
        if self.measuring and (self.kernels or not memory.moe_layers):
            peak = torch.cuda.max_memory_allocated() - self.before if memory.device == "cuda" else None
            same = self.tokens == memory.tokens
            memory.live_at_kernel_bytes = _least(
                self.live if self.kernels else None, memory.live_at_kernel_bytes if same else None
            )
            memory.peak_forward_bytes = _least(peak, memory.peak_forward_bytes if same else None)
            memory.tokens = self.tokens
        if self.kernels:
            memory.moe_layers = max(self.kernels, memory.moe_layers or 0)
            if not self.unseen:
                memory.output_buffers = max(self.buffers, memory.output_buffers or 0)
            if self.wrappers and (held := _held_bytes(self.wrappers)):
                memory.kernel_buffer_bytes = held
        before = self.process.acted
        if self.tally is not None:
            self.process.acted = self.tally.acted
        news = _kinds(before) != _kinds(self.process.acted)
        if news or memory != replace(kept, forwards=memory.forwards) or memory.forwards % 100 == 1:
            self.write()


def _kinds(found: events.Acted) -> Any:
    """What is done, but for how often."""
    return found.layers, found.largest, {act._replace(times=0, total=0) for act in found.acts}


def _least(now: int | None, before: int | None) -> int | None:
    return now if now is None or before is None else min(now, before)


def _held_bytes(wrappers: Iterable[Any]) -> int:
    """Bytes of the tensors that the wrappers hold, one storage counted once."""
    import torch

    storages = {}
    for wrapper in wrappers:
        for value in vars(wrapper).values():
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
    statuses = (events.ChangeStatus(name, str(plan.status), plan.reason) for name, plan in plans.items())
    observer = Observer(folder, tuple(statuses))
    observer.attempt(observer.write)
    observer.attempt(_observe_forwards, observer)
    observer.attempt(_observe_kernels, observer)
    observer.attempt(_observe_changes, observer)


def _observe_forwards(observer: Observer) -> None:
    """Every forward of a model in this process, but for those that a draft model's graph captures."""
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.forward

    def starts(runner: Any, batch: Any) -> None:
        if observer.memory.cache_token_bytes is None:
            observer.memory.cache_token_bytes = cache_token_bytes(runner)
        observer.forward_starts(0 if batch.input_ids is None else batch.input_ids.shape[0], runner.device == "cuda")

    @functools.wraps(original)
    def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return original(self, forward_batch, *args, **kwargs)
        observer.attempt(starts, self, forward_batch)
        result = original(self, forward_batch, *args, **kwargs)
        observer.attempt(observer.forward_ends)
        return result

    ModelRunner.forward = run


def cache_token_bytes(runner: Any) -> float | None:
    """Bytes that a token takes in the KV cache of this rank; ``None`` where there is more than one kind of cache."""
    pool, table = pools_of(runner)
    if hybrid(pool, table) or not pool_bytes(pool) or getattr(runner, "is_draft_worker", False):
        return None
    return pool_bytes(pool) / int(runner.max_total_num_tokens)


def _observe_changes(observer: Observer) -> None:
    counts = [count for of_change in acted.declared(observer.process.changes).values() for count in of_change]
    observer.tally = acted.Tally(counts, observer.attempt)
    observer.tally.install(Patcher(), observer.layer_starts)


def _observe_kernels(observer: Observer) -> None:
    try:
        import flashinfer
        import flashinfer.fused_moe
    except ImportError:  # AMD: other kernels run there
        return
    for module in (flashinfer, flashinfer.fused_moe):  # both give them away
        for name in KERNELS:
            if hasattr(module, name):
                kernel = getattr(module, name)
                setattr(module, name, _observed(observer, kernel, lambda *args, output=None, **kwargs: output))

    def held_by(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        observer.attempt(observer.wrappers.add, wrapper)
        return getattr(wrapper, "_moe_output", None)  # FlashInfer kept its output in the wrapper up to 0.6.13

    wrapper = getattr(flashinfer.fused_moe, "CuteDslMoEWrapper", None)
    if wrapper is not None:
        wrapper.run = _observed(observer, wrapper.run, held_by)


def _observed(observer: Observer, original: Callable[..., Any], given_of: Callable[..., Any]) -> Callable[..., Any]:
    """:param given_of: the tensor that it will write, from its arguments; ``None``: one that it makes."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = given_of(*args, **kwargs)
        observer.attempt(observer.kernel_starts, given)
        result = original(*args, **kwargs)
        if given is None:
            observer.attempt(observer.kernel_returned, result if kwargs.get("do_finalize", True) else None)
        return result

    return run
