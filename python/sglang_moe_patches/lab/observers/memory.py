"""What a scheduler process records of its memory and its batches under ``plan``; active only there.

One line for each event (:mod:`.events`), appended to ``<folder>/<pid>.jsonl``, so that nothing is lost with a server
that dies. Nothing waits for the device: PyTorch's counters are the host's, and the free memory is the driver's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang_moe_patches.core.patch import Plan
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.observers.events import Device, Place
from sglang_moe_patches.lab.observers.observer import Observing, observe_forwards, said_of
from sglang_moe_patches.memory.kv_sizing.facts import GIB, batch_facts, server_facts

STAGES = (
    "load_model",
    "init_memory_pool",  # up to 0.5.14, with the sizing
    "alloc_memory_pool",  # from 0.5.15
    "init_attention_backend",
    "init_attention_backends",
    "kernel_warmup",
    "init_device_graphs",  # up to 0.5.14
    "init_piecewise_cuda_graphs",
    "init_decode_cuda_graph",  # from 0.5.15
    "init_prefill_cuda_graph",
)
"""Methods of ``ModelRunner``, of all releases; those that a release has are recorded."""


def read_device() -> Device:
    """Memory of this process and of its GPU."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return Device()
    counted = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return Device(
        allocated=counted.get("allocated_bytes.all.current", 0),
        peak=counted.get("allocated_bytes.all.peak", 0),
        reserved=counted.get("reserved_bytes.all.current", 0),
        free=free,
        total=total,
        retries=counted.get("num_alloc_retries", 0),
        ooms=counted.get("num_ooms", 0),
    )


def begin_peak() -> None:
    """Let ``peak`` begin anew."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def read_pools() -> dict[str, int]:
    """Reserved bytes of each private pool (a graph's), by PyTorch's name for it, and of the common one: ``0.0``."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    found: dict[str, int] = {}
    for segment in torch.cuda.memory_snapshot():
        name = ".".join(map(str, segment.get("segment_pool_id", (0, 0))))
        found[name] = found.get(name, 0) + segment["total_size"]
    return found


class Observer(Observing):
    """Appends the events of one process; see the module."""

    def __init__(self, folder: str, changes: tuple[events.ChangeStatus, ...]) -> None:
        self.path = Path(folder) / f"{os.getpid()}.jsonl"
        self.file = self.path.open("a", buffering=1, encoding="utf-8")
        self.ready: set[int] = set()
        self.reserved = -1
        self.write(events.Start(changes))

    def write(self, event: events.Event) -> None:
        self.file.write(events.to_json(event) + "\n")

    def write_failure(self) -> None:
        self.write(events.Failure(self.failure))

    def stage(self, runner: Any, name: str, ended: bool) -> None:
        self.write(events.Stage(name, ended, _place(runner), read_device()))
        begin_peak()

    def sized(self, before_load_gib: float, kv_bytes: int) -> None:
        self.write(events.Sized(int(before_load_gib * GIB), int(kv_bytes), read_device()))

    def forward_starts(self, runner: Any, batch: Any) -> None:
        if id(runner) not in self.ready:
            self.ready.add(id(runner))
            self.write(events.Ready(_place(runner), server_facts(runner), read_device(), read_pools()))
        # What came between two forwards, sampling above all, is the former's.
        self.before = read_device()
        self.batch = batch_facts(batch)
        begin_peak()

    def forward_ends(self, runner: Any, result: Any) -> None:
        now = read_device()
        pools = {}
        if now.reserved != self.reserved:  # a snapshot walks every block
            self.reserved, pools = now.reserved, read_pools()
        graph = bool(getattr(result, "can_run_graph", False))
        self.write(events.Forward(_place(runner), self.batch, graph, self.before, now, pools))


def _place(runner: Any) -> Place:
    return Place(
        gpu=int(getattr(runner, "gpu_id", 0) or 0),
        tp=int(getattr(runner, "tp_rank", 0) or 0),
        pp=int(getattr(runner, "pp_rank", 0) or 0),
        draft=bool(getattr(runner, "is_draft_worker", False)),
    )


def install(folder: str, plans: Mapping[str, Plan]) -> None:
    """Record this process's memory and batches, and what each change answered, into ``folder``, which must exist."""
    observer = Observer(folder, said_of(plans))
    observer.attempt(_observe_stages, observer)
    observer.attempt(_observe_sizing, observer)
    observer.attempt(observe_forwards, observer, observer.forward_starts, observer.forward_ends)


def _observe_stages(observer: Observer) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    for name in STAGES:
        if hasattr(ModelRunner, name):
            setattr(ModelRunner, name, _observed_stage(observer, name, getattr(ModelRunner, name)))


def _observed_stage(observer: Observer, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer.attempt(observer.stage, self, name, False)
        result = original(self, *args, **kwargs)
        observer.attempt(observer.stage, self, name, True)
        return result

    return run


def _observe_sizing(observer: Observer) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    owner: Any = ModelRunner
    if not hasattr(owner, "_profile_available_bytes"):  # from 0.5.18 on
        from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

        owner = KVCacheConfigurator
    original = owner._profile_available_bytes

    @functools.wraps(original)
    def run(self: Any, pre_model_load_memory: float, *args: Any, **kwargs: Any) -> Any:
        result = original(self, pre_model_load_memory, *args, **kwargs)
        observer.attempt(observer.sized, pre_model_load_memory, result)
        return result

    owner._profile_available_bytes = run
