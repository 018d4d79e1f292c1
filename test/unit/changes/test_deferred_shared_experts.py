"""Tests of the change deferred-shared-experts, which runs a layer's shared experts after its routed experts.

The tests check in which layers the change acts, and which runners preserve their input. They also check
``DeferredSharedExperts``, a placeholder for the shared experts' output. The engine receives the placeholder first, and
the shared experts run when the engine adds it to the routed experts' output.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from contextvars import ContextVar, copy_context
from types import SimpleNamespace

import pytest
import torch
from sglang_moe_patches.changes import deferred_shared_experts
from sglang_moe_patches.changes.deferred_shared_experts import (
    DeferredSharedExperts,
    find_reason_to_run_first,
)
from sglang_moe_patches.core import runners
from sglang_moe_patches.core.dead_input import takers
from sglang_moe_patches.core.dead_input.channel import moe_output_buffer_ctx
from sglang_moe_patches.core.patch import SHARED_LAST, BuiltModel

FACTS = (
    *("inplace", "preserves_input", "is_overlapped", "is_fused"),
    *("has_shared_experts", "serves_lora", "uses_all_to_all"),
)


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=7)))
def test_shared_experts_are_deferred_unless_there_is_a_reason(values):
    facts = dict(zip(FACTS, values, strict=True))
    reasons_not_to = [
        not facts["has_shared_experts"],
        facts["is_fused"],
        facts["is_overlapped"],
        facts["uses_all_to_all"],
        facts["inplace"] and (facts["serves_lora"] or not facts["preserves_input"]),
    ]
    assert (not find_reason_to_run_first(**facts)) == (not any(reasons_not_to))
    assert bool(find_reason_to_run_first(**facts)) == any(reasons_not_to)


class _Layer(torch.nn.Module):
    def __init__(self, reason: str | None) -> None:
        super().__init__()
        setattr(self, deferred_shared_experts._REASON_TO_RUN_FIRST, reason)


@pytest.mark.parametrize(
    ("orders", "effects", "reason"),
    [
        ([], (), "the model has no MoE layers of DeepSeek's architecture"),
        (["", ""], (SHARED_LAST,), ""),
        (["the runner may", ""], (SHARED_LAST,), ""),
        ([None, None], (), "the engine itself runs the shared experts last here"),
        (["b", "a"], (), "a; b"),
    ],
)
def test_the_decision_combines_the_reasons_of_all_layers(orders, effects, reason) -> None:
    model = torch.nn.Sequential(*(_Layer(reason) for reason in orders))
    decision = deferred_shared_experts.decide(BuiltModel(model, tokens=1))
    assert (decision.effects, decision.reason) == (effects, reason)


@pytest.mark.parametrize(
    "use",
    [
        lambda t, p: torch.add(t, p),
        lambda t, p: t.add_(p, alpha=2),
        lambda t, p: t.mul_(p),
        lambda t, p: torch.cat([t, p]),
    ],
)
def test_any_other_use_of_the_stand_in_is_an_error_with_advice(use):
    with pytest.raises(TypeError, match="SGLANG_MOE_PATCHES"):
        use(torch.ones(2, 3), DeferredSharedExperts(lambda: torch.ones(2, 3)))


def test_the_wrappers_are_transparent_to_torch_compile(monkeypatch):
    """``torch.compile`` traces a wrapped layer without a graph break. A graph break would end a server with piecewise
    CUDA graphs.
    """
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
        make = getattr(deferred_shared_experts, f"_wrap_{name.lstrip('_')}")
        monkeypatch.setattr(Layer, name, make(getattr(Layer, name), is_compiling))
    layer = Layer()
    setattr(layer, deferred_shared_experts._DEFERS, True)
    hidden = torch.ones(2, 3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden), layer(hidden))


class Experts:
    """Stand-in for the engine's MoE layer ``DeepseekV2MoE``. Its constructor sets the attributes that the change
    reads.
    """

    def __init__(self):
        self.experts = SimpleNamespace(moe_runner_config=SimpleNamespace(inplace=True))
        self._fuse_shared_experts_inside_sbo = self._enable_a2a_moe = False
        self.num_fused_shared_experts, self.shared_experts = 0, object()


class OtherExperts:
    """Stand-in for a MoE layer without the attributes that the change reads."""

    def __init__(self):
        self.experts = SimpleNamespace(moe_runner_config=SimpleNamespace(inplace=True))


@pytest.mark.parametrize(
    ("kind", "leaves_it_alone", "defers"), [(Experts, True, True), (Experts, False, False), (OtherExperts, True, None)]
)
def test_no_kernel_overwrites_the_input_of_deferred_shared_experts(kind, leaves_it_alone, defers, monkeypatch, caplog):
    monkeypatch.setattr(runners, "preserves_input", lambda experts: leaves_it_alone)
    monkeypatch.setattr(runners, "serves_lora", lambda: False)
    layer = kind.__new__(kind)
    clear = deferred_shared_experts._clear_inplace
    deferred_shared_experts._construct_layer(clear, lambda experts: False, kind.__init__, layer)
    assert getattr(layer, deferred_shared_experts._DEFERS, None) == defers
    assert layer.experts.moe_runner_config.inplace == (not defers)
    message = "deferring the shared experts in OtherExperts failed and is skipped: AttributeError"
    assert (message in caplog.text) == (defers is None)


@dataclasses.dataclass
class Config:
    """Stand-in for the configuration of an MoE runner. ``inplace`` permits the runner to write its output into its
    input.
    """

    inplace: bool = True


def test_a_runner_is_out_of_place_only_in_contexts_that_ask_for_it():
    """``disable_inplace_while`` makes ``inplace`` False only in the ``contextvars`` contexts in which its function
    returns True. Other forward passes read the same configuration in their own contexts, and must find the original
    value."""
    waiting = ContextVar("waiting", default=False)
    config, other = Config(), Config()
    runners.disable_inplace_while(config, waiting.get)
    elsewhere = copy_context()
    waiting.set(True)
    assert (config.inplace, other.inplace, elsewhere.run(lambda: config.inplace)) == (False, True, True)
    assert dataclasses.replace(config).inplace is False
    config.inplace = False
    assert elsewhere.run(lambda: config.inplace) is False
    assert isinstance(config, Config)
    experts_of = [SimpleNamespace(moe_runner_config=one) for one in (other, config, Config(False))]
    assert [runners.is_in_place(one) for one in experts_of] == [True, False, False]


# --- Triton's output: on the engine's own sequence in test/gpu/test_moe_workspace_cuda.py ----------------------------


@pytest.mark.parametrize(
    ("how", "offer", "taken"),
    [
        pytest.param({}, lambda hidden: torch.empty(2, 3), True, id="a dead input"),
        pytest.param({"inplace": True}, lambda hidden: torch.empty(2, 3), False, id="in place"),
        pytest.param({"hooks": object()}, lambda hidden: torch.empty(2, 3), False, id="LoRA's hooks"),
        pytest.param({}, lambda hidden: hidden, False, id="the MoE input"),
        pytest.param({}, lambda hidden: hidden.view(3, 2), False, id="the MoE input's storage"),
        pytest.param({}, lambda hidden: None, False, id="none offered"),
    ],
)
def test_tritons_output_goes_only_into_the_dead_input(symmetric_memory, how, offer, taken):
    route = takers.make_triton_route("into the buffer", runners.SymmetricMemory(symmetric_memory))
    hidden = torch.ones(2, 3)
    with moe_output_buffer_ctx(offer(hidden)):
        assert route(hidden, None, {"inplace": False, **how}) == ("into the buffer" if taken else None)


# --- Which runners ---------------------------------------------------------------------------------------------------


class UnknownMethod(SimpleNamespace):
    """Quantization method that this package does not know."""


class KTEPWrapperMethod(UnknownMethod):
    """Class with the name of the engine's quantization method that runs experts on GPU and CPU."""


class Fp8MoEMethod(UnknownMethod):
    """Stand-in with the name of the engine's FP8 quantization method. If the engine's method has no runner, it may call
    CUTLASS directly."""


def experts(method, trtllm=False, **more):
    return SimpleNamespace(quant_method=method, use_flashinfer_trtllm_moe=trtllm, **more)


def make_runner(name):
    return SimpleNamespace(runner_backend=SimpleNamespace(value=name))


def make_method(runner_name):
    """Return a stand-in for a quantization method, a scheme or a scheme's kernel. Its attribute ``runner`` is a runner
    whose backend is ``runner_name``.
    """
    return UnknownMethod(runner=make_runner(runner_name))


@pytest.mark.parametrize(
    ("layer", "asked", "expected"),
    [
        *((experts(make_method(name)), "auto", True) for name in ("triton", "marlin", "flashinfer_cutlass")),
        *((experts(make_method(name)), "auto", False) for name in ("deep_gemm", "aiter")),
        (experts(UnknownMethod(), scheme=make_method("marlin")), "auto", True),
        (experts(UnknownMethod(), scheme=UnknownMethod(kernel=make_method("marlin"))), "auto", True),
        (experts(UnknownMethod()), "triton", False),
        (experts(UnknownMethod()), "cutlass", False),
        (experts(Fp8MoEMethod(runner=None)), "cutlass", True),
        (experts(Fp8MoEMethod(runner=None)), "triton", False),
        (experts(Fp8MoEMethod(runner=make_runner("deep_gemm"))), "cutlass", False),
        (experts(KTEPWrapperMethod(runner=make_runner("triton"))), "auto", False),
        (experts(UnknownMethod(), trtllm=True), "flashinfer_trtllm", True),
        # The attribute ``runner`` of an unknown method may be of any type: an object, a function, or an object whose
        # backend is a text.
        (experts(UnknownMethod(runner=object())), "triton", False),
        (experts(Fp8MoEMethod(runner=print)), "cutlass", False),
        (experts(UnknownMethod(runner=SimpleNamespace(runner_backend="triton"))), "triton", False),
    ],
)
def test_the_runner_and_the_quantization_method_decide_whether_the_input_is_preserved(
    layer, asked, expected, monkeypatch
):
    moe = SimpleNamespace(get_moe_runner_backend=lambda: SimpleNamespace(value=asked))
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe", moe)
    assert runners.preserves_input(layer) == expected


def test_triton_does_not_preserve_its_input_on_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7")
    monkeypatch.setattr(runners, "find_runner", lambda experts: "triton")
    assert not runners.preserves_input(experts(UnknownMethod()))
