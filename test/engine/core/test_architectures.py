"""Tests of the dead input on every architecture with routed experts that the engine can build on the CPU.

A layer's input is dead when no code reads it any more. The layer then offers it as a buffer for the experts' output.
Stock and patched answers must be equal. The decoder layers, their norms and the loop over them are the engine's own.
Simple arithmetic replaces the kernels of attention and of the experts, because not all of them run on the CPU. The
replaced experts first fill an offered buffer with NaN, and then write their output into it. Code that still read the
dead input would therefore read NaN.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import family_scan
import pytest
import torch
from architectures import CONFIGS, register_config
from conftest import RELEASE, installed, without_buffer
from harness import load_unquantized, same_answers
from releases import DEFAULT
from sglang_moe_patches.changes import output_buffer
from sglang_moe_patches.core import log
from sglang_moe_patches.core.dead_input import channel, families, offer, probe
from sglang_moe_reference.environment import _norm_in_place, as_its_own

pytestmark = [pytest.mark.every_release, pytest.mark.product]

PROMPTS = [[11, 7, 300, 42] * 3, [5], list(range(40, 60))]
STEPS = 2
LINEAR = ("Qwen3GatedDeltaNet", "Qwen3_5GatedDeltaNet")
MUST_OFFER = {
    *("qwen3-moe", "qwen3-next", "gpt-oss", "llama4", "glm4-moe-lite", "glm4.6v", "qwen3-vl-moe", "kimi-k2.5"),
    *("bailing-moe", "mimo-v2", "step3.5", "sarvam-moe"),
}
"""Architectures whose layers must offer their dead input on every release."""


def attention(self: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement for the kernels of attention. It returns a new tensor with the shape of attention's output."""
    return torch.tanh(q.reshape(len(q), self.tp_q_head_num, -1)[..., : self.v_head_dim]).flatten(1)


def linear_attention(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.tanh(hidden_states)


def experts(self: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    given = dispatch_output.hidden_states
    channel.withdraw_if_shared(given)
    buffer = channel.take_output(given.shape, given.dtype, given.device)
    TAKEN.append(buffer is not None)
    if buffer is not None:
        buffer.fill_(float("nan"))
    output = torch.tanh(given * 3 + 1)
    return StandardCombineInput(hidden_states=output if buffer is None else buffer.copy_(output))


TAKEN: list[bool] = []
"""List with one entry for each call of routed experts: whether the experts took an offered buffer for their output."""


@pytest.fixture(scope="module")
def reasons_by_family() -> dict[str, str]:
    return family_scan.scan(family_scan.models_folder())


@pytest.fixture
def run(engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Function that builds a model from its configuration, and returns its greedy tokens and logits."""
    from sglang.srt.configs import load_config
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers import layernorm, radix_attention
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    native = layernorm.GemmaRMSNorm.forward_native
    for kind, name, function in (
        (radix_attention.RadixAttention, "forward", attention),
        (FusedMoE, "run_moe_core", experts),
        (layernorm.GemmaRMSNorm, "forward_native", functools.partial(_norm_in_place, native)),
    ):
        monkeypatch.setattr(kind, name, as_its_own(kind, function))
    load_unquantized(monkeypatch)
    monkeypatch.setattr(load_config, "LoadConfig", lambda **how: LoadConfig(**{**how, "load_format": "dummy"}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")

    def use(model: Any) -> None:
        engine.runner.model = model
        engine.runner.support_pp = "pp_proxy_tensors" in inspect.signature(model.forward).parameters
        engine.runner.req_to_token_pool.clear()
        engine.runner.token_to_kv_pool_allocator.clear()

    monkeypatch.setattr(engine, "_use", use)

    def load(name: str) -> Any:
        config = CONFIGS[name]
        register_config(config["model_type"])
        (tmp_path / "config.json").write_text(json.dumps(config))
        with engine.override_arguments(moe_runner_backend="auto"):
            model = engine.load(tmp_path)
        for module in model.modules():
            if getattr(module, "is_mrope_enabled", False):
                module.is_mrope_enabled = False
            # A class of 0.5.12.post1 lacks this attribute if its shared experts are not fused, as on the CPU.
            if hasattr(module, "shared_experts") and not hasattr(module, "_shared_expert_tp1"):
                module._shared_expert_tp1 = False
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                mean, width = (1.0, 0.1) if parameter.dim() == 1 else (0.0, 0.1)
                drawn = torch.empty(parameter.shape).normal_(mean, width, generator=generator)
                parameter.data.copy_(drawn)
        for module in model.modules():
            if hasattr(module, "post_load_weights"):
                module.post_load_weights()
        return model

    def run(name: str) -> tuple[list[list[int]], torch.Tensor]:
        TAKEN.clear()
        model = load(name)
        # Replaced only after the model is built, because the proofs read the engine's own code.
        with monkeypatch.context() as patch:
            for module in list(sys.modules.values()):
                for kind in LINEAR:
                    if (getattr(module, "__name__", "") or "").startswith(families.MODELS) and hasattr(module, kind):
                        patch.setattr(getattr(module, kind), "forward", linear_attention)
            return engine.generate(model, PROMPTS, STEPS)

    run.load = load  # type: ignore[attr-defined]
    return run


def has_experts(layer: Any) -> bool:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return any(isinstance(module, FusedMoE) for module in layer.modules())


@contextlib.contextmanager
def skip_if_missing(name: str) -> Any:
    """Skip the test if this release lacks an architecture.

    The default release has all architectures, so a misspelt name fails there.
    """
    try:
        yield
    except ValueError as error:
        is_missing = "Cannot find model module" in str(error) or "no SGlang implementation" in str(error)
        if is_missing and RELEASE != DEFAULT:
            pytest.skip(f"this release has no {CONFIGS[name]['architectures'][0]}")
        raise
    except RuntimeError as error:
        if "0 active drivers" in str(error) or "Index tensor must have the same" in str(error):
            pytest.skip("this architecture needs a kernel that runs only on a GPU")
        raise


@pytest.mark.parametrize("name", CONFIGS)
def test_each_architecture_answers_as_stock_and_offers_or_gives_a_reason(
    name, run, reasons_by_family, monkeypatch, caplog
):
    with without_buffer(), skip_if_missing(name):
        stock = run(name)
    assert stock[1].isfinite().all()
    assert stock[1].unique().numel() > 100
    assert not any(TAKEN)
    stacks = list(probe.probe_stacks(run.load(name)))
    assert len(stacks) == 1, [type(module).__name__ for module in run.load(name).modules()]
    ((stack, dead),) = stacks
    family = type(stack).__module__.rpartition(".")[2]
    assert dead.skip_reasons == [reasons_by_family[family]] if reasons_by_family[family] else dead.skip_reasons == []
    assert (len(dead.layers) == len(stack.layers) - 1) == (not dead.skip_reasons)
    assert name not in MUST_OFFER or dead.layers

    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(offer, "MIN_SLICED_OFFER_BYTES", 1)
    with installed(output_buffer.CHANGE), caplog.at_level("INFO"):
        patched = run(name)
    assert same_answers(patched, stock)
    offering = [layer for layer, _, _ in dead.layers]
    offers_per_layer = [layer in offering for layer in stack.layers if has_experts(layer)]
    assert offers_per_layer * (STEPS + 1) == TAKEN
    assert all(reason in caplog.text for reason in dead.skip_reasons)
    if dead.skip_reasons or not has_experts(stack.layers[0]):
        return

    # Without the guard, the first layer offers its input, which becomes the residual.
    monkeypatch.setattr(offer, "may_offer", lambda hidden_states, residual: isinstance(hidden_states, torch.Tensor))
    monkeypatch.setattr(offer, "find_stream_residual", lambda *given: None)
    for kind in {type(layer) for layer in stack.layers}:
        monkeypatch.setattr(kind, offer._MIN_OFFER_BYTES_ATTRIBUTE, 0, raising=False)
    with installed(output_buffer.CHANGE):
        assert not same_answers(run(name), stock)
    assert TAKEN[0]
