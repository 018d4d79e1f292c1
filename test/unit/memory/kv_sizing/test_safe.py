"""kv-sizing is safe to leave on: what a scheduler does that ends, or whose file another process holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing import eligibility, fingerprint, hooks, launcher, phases, record, sizing
from sglang_moe_patches.memory.kv_sizing.record import Record

GB = 1_000_000_000
KEY = "0123456789abcdef"
MEASURED = Record(fingerprint_inputs={"model": "m"}, need=8 * GB, reserve=28 * GB)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hooks.State:
    """Of a server that the engine's rule has sized, with a record; 3 GB are free while it serves."""
    path = tmp_path / "kv.json"
    record.update(path, KEY, lambda old: MEASURED)
    monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: Memory(3 * GB, 141 * GB))
    launch = sizing.LaunchMemory(140 * GB, 141 * GB, 0.8)
    made = hooks.State(path, leader=True, key=KEY, fingerprint_inputs={"model": "m"}, launch=launch, record=MEASURED)
    made.rank_reserve = 28 * GB
    return made


def serve(state: hooks.State, loop, scheduler=None):
    scheduler = scheduler or SimpleNamespace(process_input_requests=lambda read: read)
    scheduler.server_args = SimpleNamespace()
    return hooks._make_run_event_loop(loop, state)(scheduler)


@pytest.mark.parametrize(
    ("error", "ooms"),
    [
        pytest.param(type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), 1, id="PyTorch's"),
        pytest.param(type("AcceleratorError", (RuntimeError,), {})("CUDA error: out of memory"), 1, id="the driver's"),
        pytest.param(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 1, id="cuBLAS's"),
        pytest.param(
            type("DistBackendError", (RuntimeError,), {})("Failed to CUDA calloc 6291456 bytes"), 1, id="NCCL's"
        ),
        pytest.param(RuntimeError("Triton Error [CUDA]: out of memory"), 1, id="Triton's"),
        pytest.param(RuntimeError("device-side assert triggered"), 0, id="another error"),
    ],
)
def test_a_loop_that_ends_for_want_of_memory_counts_and_the_next_start_takes_less(error, ooms, state):
    def loop(scheduler):
        scheduler.process_input_requests([])
        raise error

    with pytest.raises(type(error)):
        serve(state, loop)
    (kept,) = record.read(state.path).values()
    assert (kept.ooms, kept.lowest_free_serving) == (ooms, 3 * GB)


def test_a_second_rehearsal_that_runs_out_of_memory_makes_the_next_start_smaller(state, monkeypatch):
    monkeypatch.setattr(hooks.coordination, "RankResults", SimpleNamespace)
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda told: [told])
    monkeypatch.setattr(hooks.rehearsal, "Rehearsal", lambda *given, **more: SimpleNamespace(begin=lambda: None))
    state.decision = sizing.Decision(0.9, rehearse=True)

    def loop(scheduler):
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        serve(state, loop)
    (kept,) = record.read(state.path).values()
    assert (kept.ooms, kept.attempts) == (1, 1)


def test_a_turn_of_the_loop_waits_for_no_lock_and_what_it_saw_is_saved_later(state, monkeypatch, caplog):
    turns: list[object] = []

    def loop(scheduler):
        with record._locked(state.path, 0), monkeypatch.context() as held:
            held.setattr(record.time, "sleep", lambda seconds: pytest.fail("a turn waits for the lock"))
            scheduler.process_input_requests(["a request"])
        assert record.read(state.path)[KEY].lowest_free_serving is None

    serve(state, loop, SimpleNamespace(process_input_requests=turns.append))
    assert turns == [["a request"]]
    assert caplog.messages == []  # another process that writes is nothing to worry about
    assert record.read(state.path)[KEY].lowest_free_serving == 3 * GB


def test_the_lowest_of_a_turn_is_recorded_though_more_is_free_at_the_end(state, monkeypatch):
    free = [3 * GB]
    monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: Memory(free[0], 141 * GB))

    def loop(scheduler):
        free[0] = GB
        scheduler.process_input_requests([])
        free[0] = 3 * GB

    serve(state, loop)
    assert record.read(state.path)[KEY].lowest_free_serving == GB


class Backend(Enum):
    FULL = "full"
    DISABLED = "disabled"


@dataclass
class PhaseConfig:
    """As releases from 0.5.14 on have it, the arguments of a server that runs."""

    backend: Backend | str = Backend.FULL
    max_bs: int | None = 48


@dataclass
class Graphs:
    decode: PhaseConfig = field(default_factory=PhaseConfig)


@pytest.mark.parametrize(
    ("config", "captured"),
    [
        pytest.param(Graphs(), 48, id="a dataclass"),
        pytest.param(asdict(Graphs()), 48, id="nested dictionaries"),
        pytest.param(Graphs(PhaseConfig("full")), 48, id="whose back end is text"),
        pytest.param(Graphs(PhaseConfig(Backend.DISABLED)), 0, id="decodes are not captured"),
        pytest.param(Graphs(PhaseConfig(max_bs=None)), 0, id="nothing is asked for"),
    ],
)
def test_the_largest_captured_decode_is_driven_whatever_form_a_release_keeps_it_in(config, captured):
    facts = phases.ServerFacts(1, 5000, 1, 1, 64, 320, 1000)
    limits = phases.derive_limits({"cuda_graph_config": config}, facts)
    driven = {phase.kind: phase.bound.requests for phase in phases.derive_phases(limits).phases}
    assert driven.get(phases.PhaseKind.CAPTURED_DECODE, 0) == limits.captured == captured
    assert driven[phases.PhaseKind.EAGER_DECODE] == 64


NO_MATTER = {
    **{"decode_log_interval": 7, "download_dir": "/d", "enable_cache_report": True, "tokenizer_path": "/t"},
    **{"port": 5, "log_requests": True, "api_key": "x", "enable_metrics": True, "skip_server_warmup": True},
    **{"weight_version": "7", "extra_metric_labels": {"pod": "a-7"}, "enable_trace": True},
    **{"export_metrics_to_file": True, "export_metrics_to_file_dir": "/d", "otlp_traces_endpoint": "10.0.0.1:4317"},
    **{"enable_metrics_for_all_schedulers": True, "enable_request_time_stats_logging": True},
    **{"log_requests_format": "json", "uvicorn_access_log_exclude_prefixes": ["/health"]},
}


@pytest.mark.parametrize("name", NO_MATTER)
def test_what_a_restart_may_have_otherwise_is_no_other_configuration(name):
    assert fingerprint.lasting_arguments({"tp_size": 8, name: NO_MATTER[name]}) == {"tp_size": 8}


@pytest.mark.parametrize(
    ("device", "fraction", "marked"),
    [
        pytest.param("cuda", None, True, id="sized"),
        pytest.param("cuda", 0.9, False, id="given"),
        pytest.param("cpu", None, False, id="not sized, so that no scheduler would take it off"),
    ],
)
def test_arguments_are_marked_where_a_scheduler_takes_the_mark_off(device, fraction, marked, monkeypatch):
    class ServerArgs:
        def __init__(self) -> None:
            self.device, self.mem_fraction_static = device, fraction
            self.__post_init__()

        def __post_init__(self) -> None:
            self.mem_fraction_static = self.mem_fraction_static or 0.88

    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    patcher = Patcher()
    launcher.hook_server_args(SimpleNamespace(ServerArgs=ServerArgs), patcher)
    try:
        assert (launcher.MARK in vars(ServerArgs())) == marked
    finally:
        patcher.undo()
