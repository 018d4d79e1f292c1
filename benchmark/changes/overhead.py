"""Measure the host time that the changes add to each MoE layer, in microseconds.

    sglang-moe-reference exec -- python benchmark changes/overhead host       # any machine
    sglang-moe-reference exec -- python benchmark changes/overhead host --runner triton

The benchmark runs one decoder layer in eager mode, stock and patched in turn. The layer calls only the engine's own MoE
runner function, with the arguments of a real decode step. Attention does nothing, and kernels return at once, because
only the time of the host is measured. With `--runner triton`, output-buffer, deferred-shared-experts and moe-workspace
are on. Without a GPU, plain PyTorch replaces the runner's CUDA functions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import output, servers, timing
from sglang_moe_patches.core import fused_moe_call
from sglang_moe_patches.core.patch import Patcher

VERSIONS = (*servers.SERVERS, timing.CONTROL)


@dataclass(frozen=True)
class Skeleton:
    """Decoder layer without kernels: it runs only Python code of the engine and of the changes.

    :param layer: decoder layer of a model that was built with the changes.
    :param run: function that calls the MoE runner as a layer of a server does. Its argument is "stock" or "patched".
    """

    layer: Any
    run: Callable[[str], Any]
    hidden_states: Any


def trtllm_skeleton(engine: Any, folder: Path, install: Callable[[Patcher], None], around: Patcher) -> Skeleton:
    """Make a skeleton with the NVFP4 TRT-LLM runner. Quantization and the kernel return at once."""
    import flashinfer.fused_moe
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner
    from sglang_moe_patches.core.dead_input import takers

    patches = Patcher()
    install(patches)
    model = engine.load(folder)
    patches.undo()
    (positional, keywords), *_ = record_calls(engine, runner, takers.TRTLLM_RUNNER, [model])
    quantized = runner.quantize_hidden_states_fp4(positional[0].hidden_states, positional[1].w13_input_scale_quant)
    around.replace(runner, "quantize_hidden_states_fp4", lambda *args, **kwargs: quantized)
    around.replace(flashinfer.fused_moe, "trtllm_fp4_block_scale_routed_moe", lambda **kwargs: [kwargs["output"]])

    def run(server: str) -> Any:
        return getattr(runner, takers.TRTLLM_RUNNER)(*positional, **keywords).hidden_states

    return Skeleton(model.model.layers[1], run, positional[0].hidden_states)


def triton_skeleton(engine: Any, folder: Path, install: Callable[[Patcher], None], around: Patcher) -> Skeleton:
    """Make a skeleton with the Triton runner and unquantized weights. Its kernels do nothing.

    The stock runner writes in place. The patched runner writes into the layer's dead input.
    """
    import pytest
    import torch
    from common.triton_on_cpu import triton_runner
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    if not torch.cuda.is_available():
        triton_runner(pytest.MonkeyPatch())
    sequence = fused_moe_call.NAME
    patches = Patcher()
    with engine.override_arguments(quantization=None, moe_runner_backend="triton"):
        stock = engine.load(folder)
        install(patches)
        patched = engine.load(folder)
        patches.undo()
        calls = dict(zip(servers.SERVERS, record_calls(engine, fused_moe, sequence, [stock, patched]), strict=True))
    for name in ("invoke_fused_moe_kernel", "silu_and_mul", "moe_sum_reduce", "moe_sum_reduce_torch_compile"):
        if not hasattr(fused_moe, name):
            setattr(fused_moe, name, None)
        around.replace(fused_moe, name, lambda *args, **kwargs: None)

    def run(server: str) -> Any:
        positional, keywords = calls[server]
        return getattr(fused_moe, sequence)(*positional, **keywords)

    return Skeleton(patched.model.layers[1], run, calls["stock"][0][0])


SKELETONS = {"flashinfer_trtllm_routed": trtllm_skeleton, "triton": triton_skeleton}


def record_calls(engine: Any, module: Any, function: str, models: list[Any]) -> list[Any]:
    """Record the arguments of an engine function in one decode step of each model."""
    calls: list[Any] = []

    def record(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return original(*args, **kwargs)

        return call

    around = Patcher()
    around.wrap(module, function, record)
    last_calls = []
    for model in models:
        engine.generate(model, [[5, 6, 7, 8]], 1)
        last_calls.append(calls[-1])
    around.undo()
    return last_calls


def measure_host_time(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure the host time of one layer in turn: stock, patched and stock again."""
    import torch
    from common.in_process import InProcess
    from sglang_moe_patches.changes import deferred_shared_experts, moe_workspace, output_buffer
    from sglang_moe_patches.core.dead_input.probe import make_forward_wrapper, probe_layer
    from sglang_moe_patches.core.patch import SELECT_VARIABLE, probe
    from sglang_moe_reference.model import ModelSpec, make_model

    started, folder = work / "started", work / "model"
    make_model(started, ModelSpec(layers=2, dense_layers=1))
    make_model(folder, ModelSpec(layers=2, dense_layers=1, top_k=3), quantized=options.runner != "triton")
    gpu: dict[str, Any] = {
        "device": "cuda",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.9,
        "disable_piecewise_cuda_graph": True,
    }
    os.environ[SELECT_VARIABLE] = "none"  # layer_us() installs and removes the changes
    engine = InProcess(started, **(gpu if torch.cuda.is_available() else {}))

    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA, DeepseekV2DecoderLayer

    changes = [output_buffer.CHANGE]
    changes += [deferred_shared_experts.CHANGE, moe_workspace.CHANGE] if options.runner == "triton" else []
    installs = []
    for change in changes:
        plan = probe(change)
        if plan.install is None:
            raise SystemExit(f"overhead: {change.name} is {plan} on this engine: so there is nothing to time")
        installs.append(plan.install)

    def install(patcher: Patcher) -> None:
        for install_change in installs:
            install_change(patcher)

    patches, around = Patcher(), Patcher()
    skeleton = SKELETONS[options.runner](engine, folder, install, around)
    server = servers.SERVERS[0]

    def forward(self: Any, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        self.self_attn.forward()
        return skeleton.run(server)

    # In a server, the layers are wrapped when the model is built. This model is built only once, so layer_us() wraps
    # its layer.
    offering = make_forward_wrapper(probe_layer(DeepseekV2DecoderLayer))
    around.replace(DeepseekV2DecoderLayer, "forward", forward)
    around.replace(DeepseekV2AttentionMLA, "forward", lambda self: None)
    hidden_states = torch.empty_like(skeleton.hidden_states)
    residual = torch.empty_like(hidden_states)

    def layer_us(name: str) -> float:
        """Measure the processor time of one run of the layer, in microseconds."""
        nonlocal server
        server = "patched" if name == "patched" else "stock"
        if name == "patched":
            install(patches)
            patches.wrap(DeepseekV2DecoderLayer, "forward", offering)
        try:
            for _ in range(20):
                result = skeleton.layer.forward(None, hidden_states, None, residual)
            reused = result.data_ptr() == hidden_states.data_ptr()
            if reused != (name == "patched"):
                raise SystemExit(f"overhead: {name} {'used' if reused else 'did not use'} the layer's input")
            start = time.thread_time()  # processor time, which does not include the time of other processes
            for _ in range(options.steps):
                skeleton.layer.forward(None, hidden_states, None, residual)
            return (time.thread_time() - start) / options.steps * 1e6
        finally:
            patches.undo()

    samples = timing.run_in_turn({name: partial(layer_us, name) for name in VERSIONS}, options.rounds, warm_up=0)
    around.undo()

    def added(name: str) -> dict[str, Any]:
        differences = [other - stock for stock, other in zip(samples["stock"], samples[name], strict=True)]
        low, median, high = statistics.quantiles(differences, n=4)
        return {"added_us": median, "quartiles": [low, high]}

    return {
        "runner": options.runner,
        "stock_us": statistics.median(samples["stock"]),
        **added("patched"),
        "control": added(timing.CONTROL),
        "rounds": options.rounds,
        "steps": options.steps,
    }


def host_tables(results: Sequence[output.Result]) -> str:
    """Make a table of the host time per MoE layer, with a row per result."""
    rows = []
    for result in results:
        figures = result["figures"]
        low, high = figures["quartiles"]
        rows.append(
            (
                *(result["conditions"]["machine"], figures["runner"], f"{figures['stock_us']:.1f}"),
                *(f"{figures['added_us']:+.1f}", f"{low:.1f} .. {high:.1f} ({figures['rounds']})"),
                f"{figures['control']['added_us']:+.1f}",
            )
        )
    header = ("microseconds of host time per MoE layer", "runner", "stock", "added", "quartiles (rounds)")
    return output.table((*header, "stock again"), rows, left=2)


def added_host_time(results: Sequence[output.Result]) -> str:
    """Make the table of the host time that all changes together add, for the pages of single changes."""
    rows = [
        (result["conditions"]["machine"], f"`{result['figures']['runner']}`", f"{result['figures']['added_us']:.1f}")
        for result in results
    ]
    releases = ", ".join(dict.fromkeys(result["conditions"]["engine"] for result in results))
    text = (
        "All changes together add [host time](../benchmarks/overheads-and-checks.md#host-time) to each MoE layer of an "
        f"eager forward pass. With one token, on SGLang {releases}, they add:"
    )
    return f"{output.wrap_text(text)}\n\n{output.table(('machine', 'MoE runner', 'added microseconds'), rows, left=2)}"


def main() -> None:
    parser = output.parser(__doc__, quick={"rounds": 2, "steps": 8})
    parser.add_argument("what", choices=["host"], help="what to measure: the host time")
    parser.add_argument(
        "--runner", choices=list(SKELETONS), default="flashinfer_trtllm_routed", help="MoE runner (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each version (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of a measurement (%(default)s)")
    options = output.parse(parser)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as work:
        figures = measure_host_time(options, Path(work))
    output.finish(options, output.result("overhead", figures), lambda result: host_tables([result]))
