"""The decision and the promise of deferred-shared-experts."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_moe_patches.changes import deferred_shared_experts
from sglang_moe_patches.changes.deferred_shared_experts import DeferredSharedExperts, may_defer
from sglang_moe_patches.core import log, runners, triton_sequence
from sglang_moe_patches.core.dead_input import channel, takers
from sglang_moe_patches.core.dead_input.channel import moe_output_buffer_ctx, shares_storage
from sglang_moe_patches.core.patch import Patcher, with_globals

FACTS = ("inplace", "leaves_input_alone", "overlapped", "fused", "present", "lora", "all_to_all")


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=7)))
def test_may_defer(values):
    facts = dict(zip(FACTS, values, strict=True))
    reasons_not_to = [
        not facts["present"],
        facts["fused"],
        facts["overlapped"],
        facts["all_to_all"],
        facts["inplace"] and (facts["lora"] or not facts["leaves_input_alone"]),
    ]
    assert may_defer(**facts) == (not any(reasons_not_to))


def test_the_promise_is_kept_when_it_is_added_and_in_place():
    computed = []

    def compute():
        computed.append(True)
        return torch.full((2, 3), 2.0)

    routed = torch.ones(2, 3)
    promise = DeferredSharedExperts(compute)
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
        use(torch.ones(2, 3), DeferredSharedExperts(lambda: torch.ones(2, 3)))


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
        make = getattr(deferred_shared_experts, f"_wrap_{name.lstrip('_')}")
        monkeypatch.setattr(Layer, name, make(getattr(Layer, name), is_compiling))
    layer = Layer()
    setattr(layer, deferred_shared_experts._DEFERS, True)
    hidden = torch.ones(2, 3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden), layer(hidden))


@pytest.mark.parametrize("leaves_it_alone", [True, False])
def test_where_shared_experts_wait_no_kernel_writes_over_their_input(leaves_it_alone, monkeypatch):
    class Layer:
        def __init__(self):
            self.experts = SimpleNamespace(moe_runner_config=SimpleNamespace(inplace=True))
            self._fuse_shared_experts_inside_sbo = self._enable_a2a_moe = False
            self.num_fused_shared_experts, self.shared_experts = 0, object()

    monkeypatch.setattr(runners, "leaves_its_input_alone", lambda experts: leaves_it_alone)
    monkeypatch.setattr(runners, "serves_lora", lambda: False)
    layer = Layer.__new__(Layer)
    deferred_shared_experts._wrap_init(Layer.__init__, deferred_shared_experts._clear_inplace)(layer)
    assert getattr(layer, deferred_shared_experts._DEFERS) == leaves_it_alone
    assert layer.experts.moe_runner_config.inplace == (not leaves_it_alone)


def test_a_layer_that_is_built_otherwise_keeps_its_order(monkeypatch, caplog):
    class Layer:
        def __init__(self):
            self.experts = SimpleNamespace(moe_runner_config=SimpleNamespace(inplace=True))

    monkeypatch.setattr(log, "_logged", set())
    layer = Layer.__new__(Layer)
    deferred_shared_experts._wrap_init(Layer.__init__, deferred_shared_experts._clear_inplace)(layer)
    assert not hasattr(layer, deferred_shared_experts._DEFERS)
    assert layer.experts.moe_runner_config.inplace
    assert "the order of experts in Layer is left alone: AttributeError" in caplog.text


@dataclasses.dataclass
class Config:
    """A runner's configuration."""

    inplace: bool = True


def test_a_runner_is_out_of_place_for_those_that_ask_for_it_alone():
    """Forwards in many contexts read one configuration. While a graph is traced nobody asks."""
    waiting = ContextVar("waiting", default=False)
    config, other = Config(), Config()
    runners.out_of_place_while(config, waiting.get)
    elsewhere = copy_context()
    waiting.set(True)
    assert (config.inplace, other.inplace, elsewhere.run(lambda: config.inplace)) == (False, True, True)
    assert dataclasses.replace(config).inplace is False
    config.inplace = False
    assert elsewhere.run(lambda: config.inplace) is False
    assert isinstance(config, Config)
    experts_of = [SimpleNamespace(moe_runner_config=one) for one in (other, config, Config(False))]
    assert [runners.is_in_place(one) for one in experts_of] == [True, False, False]


# --- Triton's output -------------------------------------------------------------------------------------------------

torch_of_the_sequence = torch  # stands in for the engine module's name `torch`


def sequence_of_the_engine(hidden_states, w1, w2, topk_weights, topk_ids, *, inplace, hooks=None):
    """What the engine's function does, in small: choose an output, write into it."""
    output = hidden_states if inplace else torch_of_the_sequence.empty_like(hidden_states)
    activations = torch_of_the_sequence.mul(hidden_states, w1)
    output.copy_(activations + hidden_states)
    return output


@pytest.fixture
def sequence(symmetric_memory):
    patcher = Patcher()
    function: Any = sequence_of_the_engine
    memory = runners.SymmetricMemory(symmetric_memory)
    into_buffer = with_globals(
        function, sys.modules[__name__], patcher, torch_of_the_sequence=takers.OutputTorch(torch, memory)
    )
    wrapped = triton_sequence.wrap_sequence(function, takers.make_triton_route(into_buffer, memory))
    yield lambda hidden_states, weight, **how: wrapped(hidden_states, weight, None, None, None, **how)
    patcher.undo()


def test_tritons_output_goes_into_the_dead_input(sequence):
    hidden, dead = torch.ones(2, 3), torch.full((2, 3), float("nan"))
    dead.mark = True
    with moe_output_buffer_ctx(dead):
        output = sequence(hidden, 2, inplace=False)
        again = sequence(hidden, 3, inplace=False)
    assert shares_storage(output, dead)
    assert not hasattr(output, "mark")
    assert torch.equal(output, torch.full((2, 3), 3.0))
    assert not shares_storage(again, dead)
    assert torch.equal(hidden, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda hidden: torch.full((2, 3), 7.0), {"inplace": True}),
        (lambda hidden: torch.full((2, 3), 7.0), {"inplace": False, "hooks": object()}),
        (lambda hidden: hidden, {"inplace": False}),
        (lambda hidden: hidden.view(3, 2), {"inplace": False}),
        (lambda hidden: torch.full((3, 3), 7.0), {"inplace": False}),
        (lambda hidden: None, {"inplace": False}),
    ],
    ids=["in place", "LoRA's hooks", "the MoE input", "its storage", "other shape", "none offered"],
)
def test_anything_else_is_the_engines(sequence, make, how):
    hidden = torch.ones(2, 3)
    dead = make(hidden)
    before = None if dead is None else dead.clone()
    with moe_output_buffer_ctx(dead):
        output = sequence(hidden, 2, **how)
    assert torch.equal(output, torch.full((2, 3), 3.0))
    assert shares_storage(output, hidden) == how["inplace"]
    assert dead is None or torch.equal(dead, before)


def test_of_the_moe_input_nothing_is_lost_that_is_read_after_it(sequence, monkeypatch):
    """The check removed: shared experts that run last would read what the routed ones have written."""
    hidden = torch.ones(2, 3)
    monkeypatch.setattr(channel, "shares_storage", lambda a, b: False)
    with moe_output_buffer_ctx(hidden):
        sequence(hidden, 2, inplace=False)
    assert not torch.equal(hidden, torch.ones(2, 3))


# --- Which runners ---------------------------------------------------------------------------------------------------


class UnknownMethod(SimpleNamespace):
    """A quantization method."""


class KTEPWrapperMethod(UnknownMethod):
    """The engine's, whose experts run on GPU and CPU."""


class Fp8MoEMethod(UnknownMethod):
    """The engine's, which calls CUTLASS without a runner."""


def experts(method, trtllm=False, **more):
    return SimpleNamespace(quant_method=method, use_flashinfer_trtllm_moe=trtllm, **more)


def with_runner(name):
    return SimpleNamespace(runner_backend=SimpleNamespace(value=name))


@pytest.mark.parametrize(
    ("layer", "asked", "expected"),
    [
        (experts(UnknownMethod(runner=with_runner("triton"))), "auto", True),
        (experts(UnknownMethod(runner=with_runner("marlin"))), "auto", True),
        (experts(UnknownMethod(runner=with_runner("flashinfer_cutlass"))), "auto", True),
        (experts(UnknownMethod(runner=with_runner("deep_gemm"))), "auto", False),
        (experts(UnknownMethod(runner=with_runner("aiter"))), "auto", False),
        (experts(UnknownMethod(), scheme=UnknownMethod(runner=with_runner("marlin"))), "auto", True),
        (
            experts(UnknownMethod(), scheme=UnknownMethod(kernel=UnknownMethod(runner=with_runner("marlin")))),
            "auto",
            True,
        ),
        (experts(UnknownMethod()), "triton", False),
        (experts(UnknownMethod()), "cutlass", False),
        (experts(Fp8MoEMethod(runner=None)), "cutlass", True),
        (experts(Fp8MoEMethod(runner=None)), "triton", False),
        (experts(Fp8MoEMethod(runner=with_runner("deep_gemm"))), "cutlass", False),
        (experts(KTEPWrapperMethod(runner=with_runner("triton"))), "auto", False),
        (experts(UnknownMethod(), trtllm=True), "flashinfer_trtllm", True),
        # Of a method that is not the engine's: any object, a function, a backend by its name.
        (experts(UnknownMethod(runner=object())), "triton", False),
        (experts(Fp8MoEMethod(runner=print)), "cutlass", False),
        (experts(UnknownMethod(runner=SimpleNamespace(runner_backend="triton"))), "triton", False),
    ],
)
def test_runners_that_leave_their_input_alone(layer, asked, expected, monkeypatch):
    moe = SimpleNamespace(get_moe_runner_backend=lambda: SimpleNamespace(value=asked))
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe", moe)
    assert runners.leaves_its_input_alone(layer) == expected


def test_on_amd_triton_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7")
    monkeypatch.setattr(runners, "runner_of", lambda experts: "triton")
    assert not runners.leaves_its_input_alone(experts(UnknownMethod()))


@pytest.mark.parametrize(
    ("runner", "reason"),
    [("triton", None), ("auto", None), ("marlin", None), ("deep_gemm", "--moe-runner-backend is deep_gemm")],
)
def test_a_runner_that_is_not_on_the_list_is_left_alone(runner, reason):
    assert deferred_shared_experts.CHANGE.skip_reason(SimpleNamespace(moe_runner_backend=runner)) == reason
