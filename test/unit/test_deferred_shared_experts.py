"""The decision and the promise of deferred-shared-experts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang_moe_patches.changes import deferred_shared_experts
from sglang_moe_patches.changes.deferred_shared_experts import SharedExpertsLater, may_defer

FACTS = ("inplace", "runner_is_trtllm", "overlapped", "fused", "present")


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=5)))
def test_may_defer(values):
    facts = dict(zip(FACTS, values, strict=True))
    reasons_not_to = [
        not facts["present"],
        facts["fused"],
        facts["overlapped"],
        facts["inplace"] and not facts["runner_is_trtllm"],
    ]
    assert may_defer(**facts) == (not any(reasons_not_to))


def test_the_promise_is_kept_when_it_is_added_and_in_place():
    computed = []

    def compute():
        computed.append(True)
        return torch.full((2, 3), 2.0)

    routed = torch.ones(2, 3)
    promise = SharedExpertsLater(compute)
    assert promise is not None
    assert not computed
    alias = routed
    routed += promise
    assert routed is alias
    assert torch.equal(routed, torch.full((2, 3), 3.0))
    assert computed == [True]


@pytest.mark.parametrize(
    "use",
    [
        lambda t, p: torch.add(t, p),
        lambda t, p: t.add_(p, alpha=2),
        lambda t, p: t.mul_(p),
        lambda t, p: torch.cat([t, p]),
    ],
)
def test_any_other_use_is_an_error_that_says_what_to_do(use):
    with pytest.raises(TypeError, match="SGLANG_MOE_PATCHES"):
        use(torch.ones(2, 3), SharedExpertsLater(lambda: torch.ones(2, 3)))


def test_the_wrappers_are_transparent_to_torch_compile(monkeypatch):
    """Traced whole, as piecewise CUDA graphs do: a graph break would end the server."""
    is_compiling = torch.compiler.is_compiling

    class Layer(torch.nn.Module):
        def _forward_shared_experts(self, hidden_states):
            return hidden_states * 2

        def forward_normal(self, hidden_states):
            shared = self._forward_shared_experts(hidden_states)
            routed = hidden_states + 1
            routed += shared
            return routed

        def forward(self, hidden_states):
            return self.forward_normal(hidden_states)

    for name in ("forward_normal", "_forward_shared_experts"):
        make = getattr(deferred_shared_experts, f"_make_{name.lstrip('_')}")
        monkeypatch.setattr(Layer, name, make(getattr(Layer, name), is_compiling))
    layer = Layer()
    setattr(layer, deferred_shared_experts._DEFERS, True)
    hidden = torch.ones(2, 3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden), layer(hidden))


@pytest.mark.parametrize("trtllm", [True, False])
def test_where_shared_experts_wait_no_kernel_writes_over_their_input(trtllm):
    class Layer:
        def __init__(self):
            self.experts = SimpleNamespace(
                moe_runner_config=SimpleNamespace(inplace=True), use_flashinfer_trtllm_moe=trtllm
            )
            self._fuse_shared_experts_inside_sbo, self.num_fused_shared_experts = False, 0
            self.shared_experts = None

    layer = Layer.__new__(Layer)
    deferred_shared_experts._make_init(Layer.__init__)(layer)
    assert getattr(layer, deferred_shared_experts._DEFERS) == trtllm
    assert layer.experts.moe_runner_config.inplace == (not trtllm)
