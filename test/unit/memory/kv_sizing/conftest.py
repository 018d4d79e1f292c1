"""A server's ranks without an engine, for the tests of this folder."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import prometheus_client
import pytest
from kv_servers import MEASURED, SMALL, Rank, Scheduler
from sglang_moe_patches.core import log
from sglang_moe_patches.memory.kv_sizing import eligibility, hooks, launcher, record, rehearsal
from sglang_moe_patches.memory.kv_sizing.facts import GIB


@pytest.fixture(autouse=True)
def metrics_that_count(monkeypatch):
    """Tests run two rehearsals in one process, or end none: what they mute counts again afterwards."""
    for name, methods in rehearsal.METRICS.items():
        kind = getattr(prometheus_client, name)
        for method in methods:
            monkeypatch.setattr(kind, method, getattr(kind, method))


@pytest.fixture
def scheduler(monkeypatch):
    """Makes schedulers; of the one that was made last the GPU's memory is read."""
    for name, value in {
        "server_facts": lambda runner: SimpleNamespace(hybrid=""),
        "limits_of": lambda scheduler, facts: SMALL,
        "batch_facts": lambda batch: batch,
        "make_abort": lambda: "abort",
        "make_flush": lambda: "flush",
        "make_request": lambda name, prompt, new, phase, **more: SimpleNamespace(name=name, phase=phase),
    }.items():
        monkeypatch.setattr(rehearsal, name, value)
    monkeypatch.setattr(launcher, "warmup_limit_s", lambda: None)

    def make(**given):
        made = Scheduler(**given)
        monkeypatch.setattr(rehearsal.gpu_memory, "read", lambda gpu: made.read())
        return made

    return make


@pytest.fixture
def world(monkeypatch):
    """The engine's group of all ranks, in which this process is ``world.rank_in_group``."""
    group = SimpleNamespace(rank_in_group=0)
    state = SimpleNamespace(get_world_group=lambda: group)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", state)
    return group


@pytest.fixture
def metric(monkeypatch, world):
    """Looks a metric of this rank up by its name and labels."""
    registry, gauge = prometheus_client.CollectorRegistry(), prometheus_client.Gauge
    monkeypatch.setattr(prometheus_client, "Gauge", lambda *args, **more: gauge(*args, **more, registry=registry))

    def find(name, gpu="0", **labels):
        return registry.get_sample_value(name, {"gpu": gpu, "rank": str(world.rank_in_group), **labels})

    return find


class Asked(Exception):
    """A rank has said what it knows."""


@pytest.fixture
def start(monkeypatch, caplog, world):
    """Has ranks size their pools; see ``begin``."""

    def run(number, rank, ranks, agree, *, by_user, config, images, arguments):
        world.rank_in_group = number
        of_all = {"model_path": "m", "tp_size": ranks, "mem_fraction_static": 0.8}
        given = SimpleNamespace(**{**of_all, **arguments}, **{launcher.MARK: not by_user})
        given.node_rank = given.base_gpu_id = number if arguments.get("nnodes") else 0  # one rank a machine
        runner = SimpleNamespace(server_args=given, gpu_id=number, mem_fraction_static=0.8, is_multimodal=images)
        runner.pre_model_load_memory, runner.max_total_num_tokens = rank.before / GIB, 5
        runner.model_config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: json.loads(config)))
        state = hooks.State(rank.path)
        monkeypatch.setattr(hooks.coordination, "all_gather", agree)
        hooks._make_init_memory_pool(lambda runner: None, state, False)(runner)
        assert runner.mem_fraction_static == given.mem_fraction_static
        assert not hasattr(given, launcher.MARK)  # `/server_info` shows all of them
        return state, runner.mem_fraction_static

    def begin(*ranks, agree=None, by_user=False, config="{}", images=False, mode="auto", **arguments):
        """:returns: of each rank its state, and the fraction that the engine divides by; and what was said."""
        monkeypatch.setenv(eligibility.KV_SIZING.name, mode)
        monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: ranks[gpu].read())
        monkeypatch.setattr(hooks.gpu_memory, "device", lambda gpu: ranks[gpu].device)
        reports: list[object] = []

        def say(report):
            reports.append(report)
            raise Asked

        def all_run(agree):
            how = {"by_user": by_user, "config": config, "images": images, "arguments": arguments}
            for number, rank in enumerate(ranks):
                with suppress(Asked):
                    yield run(number, rank, len(ranks), agree, **how)

        if agree is None:
            list(all_run(say))
        caplog.clear()
        with caplog.at_level("INFO", logger=log.logger.name):
            states, fractions = zip(*all_run(agree or (lambda report: reports)), strict=True)
        world.rank_in_group = 0
        return states, set(fractions), [each.message.removeprefix(log.of("kv-sizing", "")) for each in caplog.records]

    return begin


@pytest.fixture
def recorded(tmp_path, start):
    """A file with the record of a server with two ranks."""
    path = tmp_path / "kv.json"
    (first, _), _, _ = start(Rank(path), Rank(path))
    record.update(path, first.key, lambda old: MEASURED)
    return path


@pytest.fixture
def two_machines(monkeypatch, start, tmp_path):
    """A server of two ranks on two machines, whose files are the first's record and another."""
    monkeypatch.setattr(hooks.coordination, "all_machines_take_part", lambda: True)
    paths = [tmp_path / "one.json", tmp_path / "other.json"]

    def begin():
        return start(*map(Rank, paths), nnodes=2)

    (one, other), _, _ = begin()
    assert one.key == other.key
    record.update(paths[0], one.key, lambda old: replace(MEASURED, fingerprint_inputs=one.fingerprint_inputs))
    return paths, one.key, begin
