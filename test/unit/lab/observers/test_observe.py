"""What a model process records of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.lab.observers import acted, forwards
from sglang_moe_patches.lab.observers.events import ChangeStatus, Memory, Process, collect, write
from sglang_moe_patches.lab.observers.forwards import KERNELS, Observer, cache_token_bytes

MIB = 1 << 20
APPLIED = ChangeStatus("output-buffer", "applied", "")


def observer(tmp_path):
    return Observer(str(tmp_path), (APPLIED,))


def forward(watch, tokens, *outputs, extra_bytes=0):
    """One forward whose kernels start with ``extra_bytes`` more alive than when it began."""
    watch.forward_starts(tokens, cuda=False)
    extra = torch.zeros(extra_bytes, dtype=torch.uint8)
    for make in outputs:
        watch.kernel_starts(make())
    watch.forward_ends()
    return extra


def test_allocations_are_counted_by_object_not_by_address(tmp_path):
    watch = observer(tmp_path)
    # Freed and allocated again, most likely at the same address: still another buffer each time.
    forward(watch, 1, *[lambda: torch.empty(64, 64)] * 5)
    assert watch.memory.output_buffers == 5
    one = torch.empty(64, 64)
    watch = observer(tmp_path)
    for _ in range(2):  # the same storage in the next forward counts again, and is one
        forward(watch, 1, *[lambda: one.detach()] * 5)
    assert (watch.memory.output_buffers, watch.memory.moe_layers) == (1, 5)


def test_live_bytes_are_those_of_the_largest_forward(tmp_path):
    watch = observer(tmp_path)
    output = torch.empty(4, 4)
    forward(watch, 10, lambda: output, extra_bytes=4 * MIB)
    forward(watch, 100, lambda: output, extra_bytes=2 * MIB)
    forward(watch, 50, lambda: output, extra_bytes=8 * MIB)
    found = collect(tmp_path)
    figures = found.memory
    assert figures.tokens == 100
    assert 2 * MIB <= figures.live_at_kernel_bytes < 3 * MIB
    assert found.changes == (APPLIED,)


class Wrapper:
    """Holds buffers as FlashInfer's CuteDslMoEWrapper does."""

    def __init__(self, sort: torch.Tensor) -> None:
        self._moe_sort_buffers = {"a": sort, "size": 3}
        self._gemm1_output = torch.empty(100, dtype=torch.uint8)
        self._moe_output = None
        self.max_num_tokens = 7


def test_what_kernels_hold_between_forwards_counts_shared_storages_once(tmp_path):
    watch, output, sort = observer(tmp_path), torch.empty(4, 4), torch.empty(10, dtype=torch.int32)
    forward(watch, 1, lambda: output)
    assert watch.memory.kernel_buffer_bytes is None
    wrappers = [Wrapper(sort), Wrapper(sort)]
    watch.wrappers.update(wrappers)
    forward(watch, 1, lambda: output)
    assert watch.memory.kernel_buffer_bytes == 2 * 100 + 40


def test_the_rank_that_used_most_is_reported_and_idle_processes_are_not(tmp_path):
    assert collect(tmp_path) is None
    for pid, live, count in ((3, 99, 0), (1, 10, 3), (2, 30, 3)):
        write(Process((), Memory("cpu", live_at_kernel_bytes=live, forwards=count)), tmp_path / f"{pid}.json")
        assert collect(tmp_path).memory.live_at_kernel_bytes == live  # 99: observed, but it ran nothing


# --- In a process of the engine ---------------------------------------------------------------------------------------


def kernel(**arguments: Any) -> list[torch.Tensor]:
    """Called as FlashInfer's: whole into ``output`` or a new tensor, or three parts that somebody else adds up."""
    tokens = arguments["hidden_states"].shape[0]
    if not arguments.get("do_finalize", True):
        return [torch.empty(8 * tokens, 4), torch.empty(tokens, 8), torch.empty(8 * tokens, dtype=torch.int32)]
    return [torch.empty(tokens, 4) if arguments.get("output") is None else arguments["output"]]


class ModelProcess:
    """A model process: its runner, its kernels, and what :func:`install` put around them."""

    def __init__(self, monkeypatch, folder: Path) -> None:
        self.folder = folder
        self.layers: Callable[[torch.Tensor], None] = lambda hidden_states: None
        process = self

        class ModelRunner:
            device = "cpu"

            def forward(self, forward_batch):
                process.layers(torch.empty(len(forward_batch.input_ids), 4))

        class CuteDslMoEWrapper:
            def run(self, x, **arguments):
                return kernel(hidden_states=x, output=getattr(self, "_moe_output", None))[0]

        self.runner = ModelRunner()
        self.kernels = SimpleNamespace(CuteDslMoEWrapper=CuteDslMoEWrapper, **dict.fromkeys(KERNELS, kernel))
        flashinfer = SimpleNamespace(fused_moe=self.kernels, **dict.fromkeys(KERNELS, kernel))
        monkeypatch.setitem(
            sys.modules, "sglang.srt.model_executor.model_runner", SimpleNamespace(ModelRunner=ModelRunner)
        )
        monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)

        class FusedMoE:
            layer_id, runner = 3, "flashinfer_trtllm"

            def run_moe_core(self, dispatched):
                return dispatched

        self.layer = FusedMoE()
        monkeypatch.setitem(sys.modules, acted.LAYER[0], SimpleNamespace(FusedMoE=FusedMoE))
        monkeypatch.setattr(forwards.runners, "runner_of", lambda layer: layer.runner)
        monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", self.kernels)

    def forward(self, tokens: int = 3) -> Process:
        self.runner.forward(SimpleNamespace(input_ids=torch.zeros(tokens, dtype=torch.int64)))
        return collect(self.folder)


def install(process: ModelProcess) -> None:
    forwards.install(str(process.folder), {"output-buffer": SimpleNamespace(status="applied", reason="")})


@pytest.fixture
def unobserved(monkeypatch, tmp_path):
    return ModelProcess(monkeypatch, tmp_path)


@pytest.fixture
def process(unobserved):
    install(unobserved)
    return unobserved


@pytest.mark.parametrize("name", KERNELS)
def test_every_form_in_which_the_engine_calls_a_kernel(process, name):
    given = torch.empty(3, 4)
    call = getattr(process.kernels, name)
    process.layers = lambda x: call(hidden_states=x, do_finalize=False)  # leaves the sum to another
    found = process.forward()
    assert (found.memory.moe_layers, found.memory.output_buffers, found.failure) == (1, None, "")

    def layers(hidden_states):
        for _ in range(3):
            assert call(hidden_states=hidden_states, output=given)[0] is given
        call(hidden_states=hidden_states)  # allocates its output
        call(hidden_states=hidden_states, output=None)

    process.layers = layers
    found = process.forward()
    assert (found.memory.moe_layers, found.memory.output_buffers, found.failure) == (5, 3, "")


def test_a_captured_graph_is_no_forward(process):
    process.forward()
    for _ in range(9):  # the engine calls the model, not the runner
        process.kernels.trtllm_fp4_block_scale_moe(hidden_states=torch.empty(3, 4), do_finalize=False)
    process.layers = lambda x: process.kernels.trtllm_fp4_block_scale_moe(hidden_states=x, output=x)
    assert process.forward().memory.moe_layers == 1


def test_a_token_of_the_kv_cache_is_counted_where_there_is_one_kind_of_cache(process):
    process.runner.token_to_kv_pool, process.runner.max_total_num_tokens = SimpleNamespace(mem_usage=2.0), 1 << 20
    assert process.forward().memory.cache_token_bytes == 2048
    process.runner.is_draft_worker = True
    assert process.forward().memory.cache_token_bytes == 2048  # a draft model's is another

    class HybridLinearKVPool:
        mem_usage = 2.0

    fresh = SimpleNamespace(token_to_kv_pool=HybridLinearKVPool(), max_total_num_tokens=1 << 20)
    assert cache_token_bytes(fresh) is None
    assert cache_token_bytes(SimpleNamespace(token_to_kv_pool=None, max_total_num_tokens=1)) is None


@pytest.mark.parametrize(("runner", "seen"), [("triton", 2), ("marlin", 2), ("flashinfer_trtllm", None)])
def test_a_runner_that_is_not_looked_into_counts_as_a_kernel_without_a_known_output(process, runner, seen):
    process.layer.runner = runner

    def layers(hidden_states):
        for _ in range(2):
            process.layer.run_moe_core(SimpleNamespace(hidden_states=hidden_states))

    process.layers = layers
    found = process.forward()
    assert (found.memory.moe_layers, found.memory.output_buffers, found.failure) == (seen, None, "")
    assert (found.memory.live_at_kernel_bytes is None) == (seen is None)
    assert found.acted.layers == (3,)


def test_what_the_changes_did_is_written_when_it_is_something_new(process, monkeypatch):
    """Not each time: a server may run a million forwards."""
    process.forward(9)
    writes = []
    monkeypatch.setattr(forwards.events, "write", lambda process, path: writes.append(process.acted))
    taken = {"layers": 0}

    def layers(hidden_states):
        for layer in range(taken["layers"]):
            process.layer.layer_id = layer
            before = channel.replace_offer(torch.empty(3, 4))
            process.layer.run_moe_core(SimpleNamespace(hidden_states=hidden_states))
            channel.replace_offer(before)

    process.layers = layers
    for taken["layers"] in (1, 1, 2, 2):
        process.runner.forward(SimpleNamespace(input_ids=torch.zeros(3, dtype=torch.int64)))
    assert [acted.layers for acted in writes] == [(0,), (0, 1)]
    assert [[act.times for act in acted.acts] for acted in writes] == [[1], [3, 1]]


@pytest.mark.parametrize("kept", [True, False], ids=["up to FlashInfer 0.6.13", "from 0.6.14"])
def test_cutedsl_with_its_output_in_the_wrapper_or_not(process, kept):
    wrapper = process.kernels.CuteDslMoEWrapper()
    if kept:
        wrapper._moe_output = torch.empty(3, 4)

    def layers(hidden_states):
        for _ in range(2):
            wrapper.run(hidden_states)

    process.layers = layers
    found = process.forward()
    figures = found.memory
    assert (figures.moe_layers, figures.output_buffers, found.failure) == (2, 1 if kept else 2, "")
    assert figures.kernel_buffer_bytes == (3 * 4 * 4 if kept else None)


def test_a_process_without_flashinfer_is_observed(unobserved, monkeypatch):
    for name in ("flashinfer", "flashinfer.fused_moe"):
        monkeypatch.setitem(sys.modules, name, None)
    install(unobserved)
    found = unobserved.forward(5)
    figures = found.memory
    assert (figures.forwards, figures.tokens, found.failure) == (1, 5, "")
    assert figures.moe_layers is figures.output_buffers is figures.live_at_kernel_bytes is None


@pytest.mark.parametrize("step", ["forward_starts", "kernel_starts", "kernel_returned", "forward_ends", "write"])
def test_whatever_goes_wrong_with_observing_the_server_goes_on(process, monkeypatch, caplog, step):
    def broken(self, *args):
        raise AttributeError("not here any more")

    monkeypatch.setattr(Observer, step, broken)
    ran = []
    process.layers = lambda x: ran.append(process.kernels.trtllm_fp4_block_scale_moe(hidden_states=x))
    for _ in range(3):
        found = process.forward()
    assert len(ran) == 3
    assert caplog.text.count("observing failed: AttributeError: not here any more") == 1
    if step != "write":
        assert found.failure == "observing failed: AttributeError: not here any more"
    assert found.changes == (APPLIED,)


def test_an_engine_that_cannot_be_observed_starts(unobserved, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.model_runner", SimpleNamespace())
    install(unobserved)
    found = collect(unobserved.folder)
    assert "ImportError" in found.failure
    assert found.changes == (APPLIED,)


@pytest.fixture
def on_gpu(process, monkeypatch):
    """Observed, with an allocator that holds 50 bytes between forwards.

    :returns: takes what each forward's peak is, and what is reserved after it.
    """
    peaks, reserved = [0], [100]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.pop(0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved.pop(0) if len(reserved) > 1 else reserved[0])
    process.runner.device = "cuda"

    def forwards(of_each, kept=()):
        peaks.extend(of_each)
        reserved.extend(kept)

    return forwards


def test_on_a_gpu_slack_is_what_was_reserved_and_never_a_tensor(process, on_gpu):
    """As many bytes as the allocator took since the first forward began, less the most that was in use at once."""
    on_gpu([700, 500, 900], kept=[1000, 1000, 1400])
    seen = [process.forward(10).memory for _ in range(3)]
    assert [(figures.reserved_bytes, figures.slack_bytes) for figures in seen] == [(900, 250), (900, 250), (1300, 450)]
    assert seen[-1].gpu == "NVIDIA H200"


def test_on_a_gpu_any_runner_has_the_peak_of_its_largest_forward(process, on_gpu):
    """Triton's, say: none of the kernels that are watched."""
    on_gpu([700, 500, 900, 100])
    seen = [process.forward(tokens).memory for tokens in (10, 10, 20, 3)]
    # Of several with as many tokens the least.
    assert [(each.tokens, each.peak_forward_bytes) for each in seen] == [(10, 650), (10, 450), (20, 850), (20, 850)]


def test_where_a_watched_kernel_runs_a_replayed_graph_does_not_count(process, on_gpu):
    on_gpu([700, 60])
    process.layers = lambda x: process.kernels.trtllm_fp4_block_scale_moe(hidden_states=x)
    process.forward(10)
    process.layers = lambda x: None
    assert process.forward(10).memory.peak_forward_bytes == 650
