"""Tests of moe-workspace in the engine's own model, on the CPU with the reference kernels.

These tests do not cover column slices, because a CPU server never runs the Triton runner's fused-MoE function. This
function runs in Triton's interpreter in test/unit/changes/test_moe_workspace.py, and on a GPU in test/gpu.
"""

from __future__ import annotations

import importlib
from types import FunctionType, SimpleNamespace

import pytest
import torch
from common.triton_on_cpu import triton_runner
from conftest import DEFAULT_ENGINE_ONLY, installed
from harness import find_experts, load_unquantized, run_experts
from patching import patched_by
from sglang_moe_patches.changes import deferred_shared_experts, moe_workspace
from sglang_moe_patches.changes.moe_workspace import marlin, streams, triton
from sglang_moe_patches.core import runners
from sglang_moe_patches.core.engine import Unsupported
from sglang_moe_patches.core.patch import PatchError, Plan, plan_for
from sglang_moe_patches.core.variables import STRICT

# --- Blocks that run other code beside their routed experts ----------------------------------------------------------


@pytest.mark.every_release
@pytest.mark.parametrize(
    ("module", "block", "uses_stream"),
    [
        ("deepseek_v2", "DeepseekV2MoE", True),
        ("glm4_moe", "Glm4MoeSparseMoeBlock", True),
        ("hunyuan_v3", "HYV3MoEFused", True),
        ("nemotron_h", "NemotronHMoE", True),
        ("sarvam_moe", "SarvamMoESparseMoeBlock", True),
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock", False),
        ("minimax_m2", "MiniMaxM2MoE", False),
    ],
)
def test_blocks_that_use_another_stream_are_detected_from_their_code(engine, module, block, uses_stream):
    found = pytest.importorskip(f"sglang.srt.models.{module}", reason="not in this release", exc_type=ImportError)
    assert streams.switches_streams(getattr(found, block)) == uses_stream


@pytest.fixture
def load_built_model(monkeypatch):
    """Function that calls ``ModelRunner.load_model`` for a model that is already built, without loading anything."""
    module = importlib.import_module("sglang.srt.model_executor.model_runner")
    loaded = FunctionType((lambda self: None).__code__, vars(module))  # a function that looks like the engine's own
    monkeypatch.setattr(module.ModelRunner, "load_model", loaded)
    return lambda model: module.ModelRunner.load_model(SimpleNamespace(model=model))


@pytest.mark.every_release
@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_model_with_unfused_shared_experts_has_a_concurrent_reader(
    engine, checkpoint, load_built_model, fused
):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    model = engine.load(checkpoint())
    for layer in model.modules():
        if fused and isinstance(layer, FusedMoE):
            layer.num_fused_shared_experts = 1
    with installed(moe_workspace.CHANGE):
        assert not streams.has_concurrent_reader
        load_built_model(model)
        assert streams.has_concurrent_reader != fused
    assert not streams.has_concurrent_reader


def test_a_failed_inspection_assumes_a_concurrent_reader(engine, checkpoint, load_built_model, monkeypatch):
    monkeypatch.setattr(streams, "switches_streams", lambda block: block.has_not)
    with installed(moe_workspace.CHANGE):
        load_built_model(engine.load(checkpoint()))
        assert streams.has_concurrent_reader


def test_unknown_loading_code_assumes_a_concurrent_reader(engine, monkeypatch):
    runner = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner
    monkeypatch.setattr(runner, "load_model", lambda self: None)
    with installed(moe_workspace.CHANGE):
        assert streams.has_concurrent_reader
    assert not streams.has_concurrent_reader


@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize("backend", ["marlin", "cutlass", "flashinfer_cutedsl"])
def test_servers_of_other_runners_are_not_skipped_because_bf16_experts_run_on_triton(engine, checkpoint, backend):
    with engine.override_arguments(quantization=None, moe_runner_backend=backend):
        assert runners.find_runner(find_experts(engine.load(checkpoint(quantized=False)))) == "triton"
    server_args = SimpleNamespace(device="cuda", moe_runner_backend=backend)
    assert moe_workspace.CHANGE.skip(server_args) is None


@pytest.mark.every_release
def test_a_top_k_of_1_is_scaled_by_the_factor(engine, checkpoint, monkeypatch):
    """The output is multiplied by the routed scaling factor even if top-k is 1. Up to 0.5.17, the stock engine's output
    is wrong in this case, because the engine sums a tensor that no kernel has written.
    """
    triton_runner(monkeypatch)
    load_unquantized(monkeypatch)
    with engine.override_arguments(moe_runner_backend="triton"):
        experts = find_experts(engine.load(checkpoint(quantized=False, top_k=1)))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, experts.hidden_size, generator=generator).bfloat16()
    ids = torch.randint(experts.num_experts, (40, 1), generator=generator)

    def run(factor):
        monkeypatch.setattr(experts.moe_runner_config, "routed_scaling_factor", factor)
        return run_experts(experts, x, ids, torch.full((40, 1), 0.5))

    with installed(moe_workspace.CHANGE):
        plain = run(1.0)
        assert plain.isfinite().all()
        assert torch.equal(run(2.5), plain * 2.5)


@pytest.mark.every_release
@pytest.mark.parametrize("backend", ["flashinfer_cutedsl", "flashinfer_mxfp4", "aiter"])
def test_shared_experts_are_deferred_if_the_routed_experts_run_on_triton(engine, checkpoint, backend, monkeypatch):
    """The shared experts of BF16 layers are deferred with any value of --moe-runner-backend, because BF16 experts
    always run on Triton. An example is the BF16 draft model of an NVFP4 model.
    """
    change = deferred_shared_experts.CHANGE
    load_unquantized(monkeypatch)
    plan = plan_for(change, {change.name}, SimpleNamespace(device="cuda", moe_runner_backend=backend))
    with patched_by(plan.install), engine.override_arguments(moe_runner_backend=backend):
        model = engine.load(checkpoint(quantized=False))
    block = model.model.layers[1].mlp
    assert runners.find_runner(block.experts) == "triton"
    assert getattr(block, deferred_shared_experts._DEFERS)


@pytest.mark.parametrize(
    ("unsupported", "strict", "is_refused"), [("triton", "1", True), ("marlin", "1", False), ("triton", "0", False)]
)
def test_strict_refuses_an_unsupported_runner_only_if_the_model_uses_it(
    unsupported, strict, is_refused, engine, checkpoint, load_built_model, monkeypatch, caplog
):
    def plan():
        raise Unsupported("its code is another one")

    for runner in (triton, marlin):
        monkeypatch.setattr(runner, "plan", lambda: Plan.applied(lambda patcher: None))
    monkeypatch.setattr({"triton": triton, "marlin": marlin}[unsupported], "plan", plan)
    monkeypatch.setenv(STRICT.name, strict)
    load_unquantized(monkeypatch)
    with engine.override_arguments(moe_runner_backend="triton"):
        model = engine.load(checkpoint(quantized=False))
    with installed(moe_workspace.CHANGE):
        if is_refused:
            with pytest.raises(
                PatchError, match="run on triton, which cannot run column slices: its code is another one"
            ):
                load_built_model(model)
        else:
            load_built_model(model)
    assert caplog.text.count("layers of this model run on triton, which cannot run") == (
        unsupported == "triton" and not is_refused
    )
