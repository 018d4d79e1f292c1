"""Tests of deferred-shared-experts on the engine's own model: the shared experts run after the routed experts, with the
same result.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from conftest import installed, without_buffer
from sglang_moe_patches.changes import deferred_shared_experts, output_buffer
from sglang_moe_patches.core.patch import Status, probe

pytestmark = pytest.mark.every_release

PROMPTS = [[11, 7, 300, 42] * 9, [5]]
CHANGE = deferred_shared_experts.CHANGE


@pytest.fixture
def run_order(monkeypatch):
    """List of "shared" and "routed", in the order in which the shared and the routed experts have run."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.models.deepseek_v2 import DeepseekV2MLP

    order = []

    def watch(cls, name, label):
        original = getattr(cls, name)

        def forward(self, *args, **kwargs):
            order.append(label)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, forward)

    watch(FusedMoE, "forward", "routed")
    watch(DeepseekV2MLP, "forward", "shared")
    return order


@pytest.mark.compatibility
def test_shared_experts_run_last_with_the_same_result(engine, checkpoint, run_order):
    path = checkpoint(layers=2, dense_layers=0)
    with without_buffer():
        stock = engine.generate(engine.load(path), PROMPTS, 4)
    run_order.clear()
    with installed(output_buffer.CHANGE, CHANGE):
        model = engine.load(path)
        patched = engine.generate(model, PROMPTS, 4)
    assert run_order == ["routed", "shared"] * 2 * 5
    assert patched[0] == stock[0]
    assert torch.equal(patched[1], stock[1])


@pytest.fixture
def require_package_deferral():
    if probe(CHANGE).status is not Status.APPLIED:
        pytest.skip("this engine release defers the shared experts itself")


@pytest.mark.usefixtures("require_package_deferral")
def test_the_order_stays_with_a_runner_that_overwrites_its_input(engine, checkpoint, run_order, monkeypatch):
    path = checkpoint(layers=2, dense_layers=0)
    decide = deferred_shared_experts.find_reason_to_run_first
    monkeypatch.setattr(
        deferred_shared_experts,
        "find_reason_to_run_first",
        lambda **facts: decide(**facts | {"preserves_input": False}),
    )
    with installed(CHANGE):
        engine.generate(engine.load(path), PROMPTS, 0)
    assert run_order == ["shared", "routed"] * 2


@pytest.mark.usefixtures("require_package_deferral")
def test_these_tests_detect_deferral_behind_a_runner_that_overwrites_its_input(engine, checkpoint, monkeypatch):
    """Test of these tests: if the shared experts read an overwritten input, the comparison of logits detects it.

    The test makes the routed experts overwrite their input. The change does not know this, and still runs the shared
    experts last, so the logits must differ from the stock engine's. Then the test makes ``find_reason_to_run_first``
    return a reason. The shared experts now run first, and the logits must be equal.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    path = checkpoint(layers=2, dense_layers=0)
    original = FusedMoE.forward

    def mutating(self, hidden_states, topk_output):
        result = original(self, hidden_states, topk_output)
        hidden_states.copy_(result)
        return result

    monkeypatch.setattr(FusedMoE, "forward", mutating)
    stock = engine.generate(engine.load(path), PROMPTS, 2)
    with installed(CHANGE):
        assert not torch.equal(engine.generate(engine.load(path), PROMPTS, 2)[1], stock[1])
    monkeypatch.setattr(deferred_shared_experts, "find_reason_to_run_first", lambda **facts: "it mutates")
    with installed(CHANGE):
        assert torch.equal(engine.generate(engine.load(path), PROMPTS, 2)[1], stock[1])


@pytest.mark.usefixtures("require_package_deferral")
def test_empty_batches_and_other_paths_are_unchanged(engine, checkpoint, monkeypatch):
    from sglang.srt.models import deepseek_v2

    with installed(CHANGE):
        moe = engine.load(checkpoint()).model.layers[1].mlp
        assert getattr(moe, deferred_shared_experts._DEFERS)
        nothing = torch.empty(0, 256, dtype=torch.bfloat16)
        assert moe._forward_shared_experts(nothing) is None
        some = torch.randn(3, 256).to(torch.bfloat16)
        # Outside forward_normal (dual stream, single-batch overlap, all-to-all) the output is computed at once.
        assert isinstance(moe._forward_shared_experts(some), torch.Tensor)
        # The engine's code for Intel AMX computes the shared experts by itself.
        monkeypatch.setattr(deepseek_v2, "use_intel_amx_backend", lambda layer: True)
        monkeypatch.setattr(type(moe), "forward_cpu", lambda self, hidden, fuse: hidden + 1)
        assert torch.equal(moe.forward_normal(some), some + 1)


@pytest.mark.parametrize("skips", [False, True])
def test_deepseek_v4_runs_its_shared_experts_last_and_as_often_as_stock(
    engine, checkpoint, run_order, monkeypatch, skips
):
    """DeepSeek-V4's shared experts run after the routed experts, and as often as with the stock engine. If
    ``SGLANG_DP_SHARED_EXPERT_LOCAL`` is set, the decoder layer itself runs them, and the MoE block must not run them a
    second time.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    if "is_deepseek_v4" not in inspect.signature(DeepseekV2MoE.__init__).parameters:
        pytest.skip("this release has no DeepSeek-V4")
    if skips and "skip_shared_experts" not in inspect.signature(DeepseekV2MoE.forward_normal).parameters:
        pytest.skip("here no decoder layer runs the shared experts itself")

    def routed(self, hidden_states, topk_output, **more):
        run_order.append("routed")
        return torch.tanh(hidden_states * 3)

    monkeypatch.setattr(FusedMoE, "forward", routed)
    config = copy.copy(engine.runner.model.config)
    for name, value in (("num_hash_layers", 0), ("n_hash_layers", 0), ("swiglu_limit", None)):
        setattr(config, name, value)

    def run():
        run_order.clear()
        torch.manual_seed(0)
        block = DeepseekV2MoE(config, layer_id=1, is_deepseek_v4=True, prefix="model.layers.1.mlp")
        for parameter in block.parameters():
            if parameter.is_floating_point():
                parameter.data.normal_(0, 0.1)
        # These functions need a GPU, and their results are not used.
        block.gate.forward = block.topk.forward = lambda *args, **more: None
        hidden = torch.randn(5, config.hidden_size).to(next(block.shared_experts.parameters()).dtype)
        more = {"skip_shared_experts": True} if skips else {}
        return block.forward_normal(hidden, **more), list(run_order)

    expected, first = run()
    with installed(CHANGE):
        result, last = run()
    assert torch.equal(result, expected)
    assert last == (["routed"] if skips else ["routed", "shared"])
    assert sorted(first) == sorted(last)
