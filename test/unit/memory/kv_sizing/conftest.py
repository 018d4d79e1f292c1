"""Fixtures for tests that run the ranks of a server without an engine."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import prometheus_client
import pytest
from kv_servers import Scheduler
from sglang_moe_patches.memory.kv_sizing import engine_objects, rehearsal


@pytest.fixture(autouse=True)
def restore_metrics(monkeypatch):
    """Restore the methods of Prometheus metrics after each test. A rehearsal replaces these methods until it ends, and
    some tests do not end their rehearsal."""
    for name, methods in engine_objects.METRICS.items():
        kind = getattr(prometheus_client, name)
        for method in methods:
            monkeypatch.setattr(kind, method, getattr(kind, method))


@pytest.fixture
def scheduler(monkeypatch):
    """Return a function that makes a stand-in for the engine's scheduler. When a rehearsal reads the GPU's memory, it
    gets the figures of the last stand-in that was made."""
    for name, value in {
        "batch_facts": lambda batch: batch,
        "make_abort": lambda: "abort",
        "make_flush": lambda: "flush",
        "make_request": lambda name, prompt, new, phase, **more: SimpleNamespace(name=name, prompt=prompt, phase=phase),
    }.items():
        monkeypatch.setattr(rehearsal, name, value)
    monkeypatch.setattr(rehearsal, "warmup_limit_s", lambda: float("inf"))

    def make(**settings):
        instance = Scheduler(**settings)
        monkeypatch.setattr(rehearsal.gpu_memory, "read", lambda gpu: instance.read())
        return instance

    return make


@pytest.fixture
def world(monkeypatch):
    """Stand-in for the engine's process group of all ranks. This process is the rank ``world.rank_in_group``."""
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    state = SimpleNamespace(get_world_group=lambda: group)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", state)
    return group


@pytest.fixture
def metric(monkeypatch, world):
    """Return a function that reads a metric of this rank. Its arguments are the metric's name and labels."""
    registry, gauge = prometheus_client.CollectorRegistry(), prometheus_client.Gauge
    monkeypatch.setattr(prometheus_client, "Gauge", lambda *args, **more: gauge(*args, **more, registry=registry))

    def find(name, gpu="0", **labels):
        return registry.get_sample_value(name, {"gpu": gpu, "rank": str(world.rank_in_group), **labels})

    return find
