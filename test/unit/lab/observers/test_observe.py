"""Tests of the observer, which runs in an engine process with the model. The observer records memory figures, and how
often each change acts. An error in the observer must not end a forward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.lab.observers import counting, forwards
from sglang_moe_patches.lab.observers.events import ChangeStatus, Memory, Process, collect, write
from sglang_moe_patches.lab.observers.forwards import KERNELS, Observer, cache_token_bytes

MIB = 1 << 20
APPLIED = ChangeStatus("output-buffer", "applied", "")


def make_observer(tmp_path):
    return Observer(str(tmp_path), (APPLIED,))


def run_forward(observer, tokens, *outputs, extra_bytes=0):
    """Run one forward pass. It allocates a tensor of ``extra_bytes`` bytes, and then starts its MoE kernels.

    :param outputs: one function for each MoE kernel. The function returns the kernel's output tensor.
    :returns: the tensor of ``extra_bytes`` bytes.
    """
    observer.start_forward(tokens, cuda=False)
    extra = torch.zeros(extra_bytes, dtype=torch.uint8)
    for make_output in outputs:
        observer.start_kernel(make_output())
    observer.end_forward()
    return extra


def test_allocations_are_counted_by_object_not_by_address(tmp_path):
    observer = make_observer(tmp_path)
    # Each output is freed before the next is allocated, probably at the same address. They are still five buffers.
    run_forward(observer, 1, *[lambda: torch.empty(64, 64)] * 5)
    assert observer.memory.output_buffers == 5
    shared = torch.empty(64, 64)
    observer = make_observer(tmp_path)
    for _ in range(2):  # each forward pass counts the storage as one buffer
        run_forward(observer, 1, *[lambda: shared.detach()] * 5)
    assert (observer.memory.output_buffers, observer.memory.moe_layers) == (1, 5)


def test_live_bytes_belong_to_the_largest_forward_pass(tmp_path):
    observer = make_observer(tmp_path)
    output = torch.empty(4, 4)
    run_forward(observer, 10, lambda: output, extra_bytes=4 * MIB)
    run_forward(observer, 100, lambda: output, extra_bytes=2 * MIB)
    run_forward(observer, 50, lambda: output, extra_bytes=8 * MIB)
    found = collect(tmp_path)
    figures = found.memory
    assert figures.tokens == 100
    assert 2 * MIB <= figures.live_at_kernel_bytes < 3 * MIB
    assert found.changes == (APPLIED,)


class Wrapper:
    """Stand-in for FlashInfer's CuteDslMoEWrapper. Its buffers are in attributes of the same names."""

    def __init__(self, sort: torch.Tensor) -> None:
        self._moe_sort_buffers = {"a": sort, "size": 3}
        self._gemm1_output = torch.empty(100, dtype=torch.uint8)
        self._moe_output = None
        self.max_num_tokens = 7


def test_workspaces_between_forward_passes_count_shared_storages_once(tmp_path):
    observer, output, sort = make_observer(tmp_path), torch.empty(4, 4), torch.empty(10, dtype=torch.int32)
    run_forward(observer, 1, lambda: output)
    assert observer.memory.kernel_buffer_bytes is None
    wrappers = [Wrapper(sort), Wrapper(sort)]
    observer.wrappers.update(wrappers)
    run_forward(observer, 1, lambda: output)
    assert observer.memory.kernel_buffer_bytes == 2 * 100 + 40


def test_the_rank_that_used_the_most_memory_is_reported_but_never_an_idle_process(tmp_path):
    assert collect(tmp_path) is None
    for pid, live, count in ((3, 99, 0), (1, 10, 3), (2, 30, 3)):
        write(Process((), Memory("cpu", live_at_kernel_bytes=live, forwards=count)), tmp_path / f"{pid}.json")
        assert collect(tmp_path).memory.live_at_kernel_bytes == live  # process 3 ran no forward pass


# --- In a process of the engine ---------------------------------------------------------------------------------------


def kernel(**arguments: Any) -> list[torch.Tensor]:
    """Stand-in for FlashInfer's kernels. It writes its output into ``output``, or into a new tensor. With
    ``do_finalize=False``, it returns three parts from which a later kernel makes the output."""
    tokens = arguments["hidden_states"].shape[0]
    if not arguments.get("do_finalize", True):
        return [torch.empty(8 * tokens, 4), torch.empty(tokens, 8), torch.empty(8 * tokens, dtype=torch.int32)]
    return [torch.empty(tokens, 4) if arguments.get("output") is None else arguments["output"]]


class ModelProcess:
    """Stand-in for a model process: its model runner, its MoE layer and its kernels."""

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
        monkeypatch.setitem(sys.modules, counting.LAYER[0], SimpleNamespace(FusedMoE=FusedMoE))
        monkeypatch.setattr(forwards.runners, "find_runner", lambda layer: layer.runner)
        monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", self.kernels)

    def forward(self, tokens: int = 3) -> Process:
        self.runner.forward(SimpleNamespace(input_ids=torch.zeros(tokens, dtype=torch.int64)))
        return collect(self.folder)


def install(process: ModelProcess) -> None:
    forwards.install(str(process.folder), {"output-buffer": SimpleNamespace(status="applied", reason="")})


@pytest.fixture
def model_process(monkeypatch, tmp_path):
    """Model process with stand-ins for the engine and its kernels. No observer is installed in it."""
    return ModelProcess(monkeypatch, tmp_path)


@pytest.fixture
def process(model_process):
    """Model process in which the observer is installed."""
    install(model_process)
    return model_process


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_observed_in_every_way_in_which_the_engine_calls_it(process, name):
    output = torch.empty(3, 4)
    call = getattr(process.kernels, name)
    process.layers = lambda x: call(
        hidden_states=x, do_finalize=False
    )  # the kernel writes no output, because a later kernel does
    found = process.forward()
    assert (found.memory.moe_layers, found.memory.output_buffers, found.failure) == (1, None, "")

    def layers(hidden_states):
        for _ in range(3):
            assert call(hidden_states=hidden_states, output=output)[0] is output
        call(hidden_states=hidden_states)  # the kernel allocates its output
        call(hidden_states=hidden_states, output=None)

    process.layers = layers
    found = process.forward()
    assert (found.memory.moe_layers, found.memory.output_buffers, found.failure) == (5, 3, "")


def test_capturing_a_graph_does_not_count_as_a_forward_pass(process):
    process.forward()
    for _ in range(9):  # a graph capture calls the model directly, not ``ModelRunner.forward``
        process.kernels.trtllm_fp4_block_scale_moe(hidden_states=torch.empty(3, 4), do_finalize=False)
    process.layers = lambda x: process.kernels.trtllm_fp4_block_scale_moe(hidden_states=x, output=x)
    assert process.forward().memory.moe_layers == 1


def test_bytes_of_a_kv_token_are_recorded_if_there_is_one_kind_of_kv_cache(process):
    process.runner.token_to_kv_pool, process.runner.max_total_num_tokens = SimpleNamespace(mem_usage=2.0), 1 << 20
    assert process.forward().memory.cache_token_bytes == 2048
    process.runner.is_draft_worker = True
    assert process.forward().memory.cache_token_bytes == 2048  # the KV cache of a draft model does not count

    class HybridLinearKVPool:
        mem_usage = 2.0

    hybrid = SimpleNamespace(token_to_kv_pool=HybridLinearKVPool(), max_total_num_tokens=1 << 20)
    assert cache_token_bytes(hybrid) is None
    assert cache_token_bytes(SimpleNamespace(token_to_kv_pool=None, max_total_num_tokens=1)) is None


@pytest.mark.parametrize(("runner", "kernels"), [("triton", 2), ("marlin", 2), ("flashinfer_trtllm", None)])
def test_a_runner_without_observed_kernels_counts_as_one_kernel_with_unknown_output(process, runner, kernels):
    process.layer.runner = runner

    def layers(hidden_states):
        for _ in range(2):
            process.layer.run_moe_core(SimpleNamespace(hidden_states=hidden_states))

    process.layers = layers
    found = process.forward()
    assert (found.memory.moe_layers, found.memory.output_buffers, found.failure) == (kernels, None, "")
    assert (found.memory.live_at_kernel_bytes is None) == (kernels is None)
    assert found.acted.layers == (3,)


def test_the_record_is_written_when_a_change_does_something_new(process, monkeypatch):
    """The test runs four forward passes, in which a change acts in 1, 1, 2 and 2 MoE layers. The observer must write
    the record only after the first and the third pass. A server may run a million forward passes, so the observer must
    not write after each of them."""
    process.forward(9)
    writes = []
    monkeypatch.setattr(forwards.events, "write", lambda process, path: writes.append(process.acted))
    offered = {"layers": 0}

    def layers(hidden_states):
        for layer in range(offered["layers"]):
            process.layer.layer_id = layer
            before = channel.replace_offer(torch.empty(3, 4))
            process.layer.run_moe_core(SimpleNamespace(hidden_states=hidden_states))
            channel.replace_offer(before)

    process.layers = layers
    for offered["layers"] in (1, 1, 2, 2):
        process.runner.forward(SimpleNamespace(input_ids=torch.zeros(3, dtype=torch.int64)))
    assert [acted.layers for acted in writes] == [(0,), (0, 1)]
    assert [[act.times for act in acted.acts] for acted in writes] == [[1], [3, 1]]


@pytest.mark.parametrize("in_wrapper", [True, False], ids=["up to FlashInfer 0.6.13", "from 0.6.14"])
def test_cutedsls_output_is_observed_inside_and_outside_of_its_wrapper(process, in_wrapper):
    wrapper = process.kernels.CuteDslMoEWrapper()
    if in_wrapper:
        wrapper._moe_output = torch.empty(3, 4)

    def layers(hidden_states):
        for _ in range(2):
            wrapper.run(hidden_states)

    process.layers = layers
    found = process.forward()
    figures = found.memory
    assert (figures.moe_layers, figures.output_buffers, found.failure) == (2, 1 if in_wrapper else 2, "")
    assert figures.kernel_buffer_bytes == (3 * 4 * 4 if in_wrapper else None)


def test_a_process_without_flashinfer_is_observed(model_process, monkeypatch):
    for name in ("flashinfer", "flashinfer.fused_moe"):
        monkeypatch.setitem(sys.modules, name, None)
    install(model_process)
    found = model_process.forward(5)
    figures = found.memory
    assert (figures.forwards, figures.tokens, found.failure) == (1, 5, "")
    assert figures.moe_layers is figures.output_buffers is figures.live_at_kernel_bytes is None


@pytest.mark.parametrize("step", ["start_forward", "start_kernel", "end_kernel", "end_forward", "write"])
def test_the_server_goes_on_after_an_error_in_any_step_of_observing(process, monkeypatch, caplog, step):
    def fail(self, *args):
        raise AttributeError("not here any more")

    monkeypatch.setattr(Observer, step, fail)
    ran = []
    process.layers = lambda x: ran.append(process.kernels.trtllm_fp4_block_scale_moe(hidden_states=x))
    for _ in range(3):
        found = process.forward()
    assert len(ran) == 3
    assert caplog.text.count("observing the server failed: AttributeError: not here any more") == 1
    if step != "write":
        assert found.failure == "observing the server failed: AttributeError: not here any more"
    assert found.changes == (APPLIED,)


def test_an_engine_that_cannot_be_observed_starts(model_process, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.model_runner", SimpleNamespace())
    install(model_process)
    found = collect(model_process.folder)
    assert "ImportError" in found.failure
    assert found.changes == (APPLIED,)


@pytest.fixture
def set_gpu_memory(process, monkeypatch):
    """Make the GPU's allocator report invented memory statistics. At the start of each forward pass, it reports 50
    allocated bytes.

    :returns: a function that sets the other statistics. Its two arguments are lists with one number for each forward
        pass: the peak of the allocated bytes in the pass, and the reserved bytes after the pass.
    """
    peaks, reserved = [0], [100]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.pop(0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved.pop(0) if len(reserved) > 1 else reserved[0])
    process.runner.device = "cuda"

    def set_memory(peaks_of_forwards, reserved_after=()):
        peaks.extend(peaks_of_forwards)
        reserved.extend(reserved_after)

    return set_memory


def test_slack_is_the_reserved_memory_that_no_tensor_ever_used(process, set_gpu_memory):
    """The slack is the growth of the reserved bytes minus the growth of the peak of allocated bytes. Both start at the
    first forward pass, when 100 bytes are reserved and 50 bytes are allocated."""
    set_gpu_memory([700, 500, 900], reserved_after=[1000, 1000, 1400])
    figures_of = [process.forward(10).memory for _ in range(3)]
    assert [(figures.reserved_bytes, figures.slack_bytes) for figures in figures_of] == [
        (900, 250),
        (900, 250),
        (1300, 450),
    ]
    assert figures_of[-1].gpu == "NVIDIA H200"


def test_the_peak_of_the_largest_forward_pass_is_recorded_without_observed_kernels(process, set_gpu_memory):
    """The observer does not observe the kernels of some runners, such as Triton. It must still record the peak of the
    forward pass with the most tokens, as PyTorch's allocator reports it."""
    set_gpu_memory([700, 500, 900, 100])
    figures_of = [process.forward(tokens).memory for tokens in (10, 10, 20, 3)]
    # The record has the smaller peak of the two forward passes with 10 tokens.
    assert [(figures.tokens, figures.peak_forward_bytes) for figures in figures_of] == [
        (10, 650),
        (10, 450),
        (20, 850),
        (20, 850),
    ]


def test_a_replayed_graph_does_not_count_once_a_kernel_was_observed(process, set_gpu_memory):
    set_gpu_memory([700, 60])
    process.layers = lambda x: process.kernels.trtllm_fp4_block_scale_moe(hidden_states=x)
    process.forward(10)
    process.layers = lambda x: None
    assert process.forward(10).memory.peak_forward_bytes == 650
