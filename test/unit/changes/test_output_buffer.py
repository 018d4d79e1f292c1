"""Tests of the change output-buffer, without an engine. The change offers a layer's dead input to MoE kernels as memory
for their output. A dead input is a tensor that no code reads any more.
"""

from __future__ import annotations

import ast
import sys
import threading
from contextlib import nullcontext
from contextvars import copy_context
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.changes import output_buffer
from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.dead_input import channel, offer, probe, proofs, takers
from sglang_moe_patches.core.dead_input.channel import fits, moe_output_buffer_ctx, shares_storage
from sglang_moe_patches.core.dead_input.offer import may_offer
from sglang_moe_patches.core.patch import replace_globals

CPU = torch.device("cpu")
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(
    SHAPES, SHAPES, st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([torch.bfloat16, torch.float16])
)
def test_fits_only_the_same_shape_and_dtype(shape, wanted, dtype, wanted_dtype):
    buffer = torch.empty(shape, dtype=dtype)
    assert fits(buffer, wanted, wanted_dtype, CPU) == (shape == wanted and dtype == wanted_dtype)


def test_a_buffer_must_be_contiguous_whole_and_not_empty():
    whole = torch.empty(4, 6)
    assert fits(whole, (4, 6), torch.float32, CPU)
    assert not fits(torch.empty(6, 4).T, (4, 6), torch.float32, CPU)
    # A view does not fit, because the rest of its base tensor may be in use.
    assert not fits(torch.empty(8, 6)[:4], (4, 6), torch.float32, CPU)
    assert not fits(torch.empty(25)[1:].view(4, 6), (4, 6), torch.float32, CPU)
    assert not fits(torch.empty(0, 6), (0, 6), torch.float32, CPU)
    assert not fits(whole, (4, 6), torch.float32, torch.device("meta"))


def test_a_layer_input_that_is_the_residual_is_not_offered():
    hidden = torch.empty(3, 4)
    assert may_offer(hidden, torch.empty(3, 4))
    assert not may_offer(hidden, None)
    assert not may_offer(hidden, hidden)
    assert not may_offer(hidden, hidden.view(4, 3))
    assert not may_offer(hidden[:2], hidden)
    assert not may_offer(SimpleNamespace(value=hidden), torch.empty(3, 4))  # a handle of a sum that is computed later
    assert shares_storage(hidden[:1], hidden[2:])


# --- The runner ------------------------------------------------------------------------------------------------------

torch_of_the_runner = torch  # ``runner_of_the_engine`` uses this name in place of ``torch``
scale = 1


class Dispatched(NamedTuple):
    hidden_states: torch.Tensor


def runner_of_the_engine(dispatch_output, factor=2, *, extra=0):
    """Stand-in for the engine's TRT-LLM runner. It allocates an output tensor and writes a result into the tensor."""
    hidden = dispatch_output.hidden_states
    output = torch_of_the_runner.empty(*hidden.shape, dtype=hidden.dtype, device=hidden.device)
    torch_of_the_runner.mul(hidden, factor * scale + extra, out=output)
    return output


@pytest.fixture
def run(symmetric_memory, patcher):
    # The change replaces the name ``torch`` in the engine's module. Here it replaces ``torch_of_the_runner``, so that
    # this test keeps its own ``torch``.
    allocator = takers.TrtllmTorch(torch, runners.SymmetricMemory(symmetric_memory))
    runner: Any = runner_of_the_engine
    into_buffer = replace_globals(runner, sys.modules[__name__], patcher, torch_of_the_runner=allocator)
    return takers.make_trtllm_runner(runner, into_buffer, torch.compiler.is_compiling)


def test_one_offer_serves_one_kernel_as_a_new_tensor(run):
    hidden, buffer = torch.ones(2, 3), torch.full((2, 3), float("nan"))
    buffer.mark = True
    with moe_output_buffer_ctx(buffer):
        first, second = run(Dispatched(hidden), 3, extra=1), run(Dispatched(hidden), 2)
    assert shares_storage(first, buffer)
    assert torch.equal(first, torch.full((2, 3), 4.0))
    assert not hasattr(first, "mark")
    assert not shares_storage(second, buffer)
    assert torch.equal(second, torch.full((2, 3), 2.0))


def test_the_offer_ends_with_its_block_also_after_an_error(run):
    with pytest.raises(ZeroDivisionError), moe_output_buffer_ctx(torch.empty(2, 3)):
        raise ZeroDivisionError
    assert channel.get_offered_buffer() is None


def test_the_output_context_is_the_pools_unless_it_is_disabled_or_already_entered(symmetric_memory):
    """``output_context`` returns the context manager in which an output is allocated.

    If the server uses NCCL's symmetric memory, ``output_context`` returns the engine's context manager, which allocates
    from the pool of symmetric memory. In two cases ``output_context`` returns a context manager that does nothing:

    - The server does not use symmetric memory.
    - The engine has already entered its own context manager, which cannot be entered twice.
    """
    entered = nullcontext()
    memory = runners.SymmetricMemory(symmetric_memory, lambda: entered)
    assert memory.output_context() is not entered
    symmetric_memory.is_symmetric_memory_enabled = lambda: True
    assert memory.output_context() is entered
    symmetric_memory._active_symmetric_memory_context = object()
    assert memory.output_context() is not entered


def test_the_number_of_remembered_pool_addresses_is_limited(monkeypatch):
    monkeypatch.setattr(runners, "_MAX_ADDRESSES", 2)
    lookups = []
    asks = runners.cache_pool_addresses(lambda tensor: lookups.append(tensor) is None)
    tensors = [torch.empty(1) for _ in range(3)]
    assert all(asks(tensor) for tensor in (*tensors, tensors[2], tensors[0]))
    assert len(lookups) == 4  # the first address was forgotten and looked up again


def test_addresses_outside_the_pool_are_checked_again():
    """``cache_pool_addresses`` caches which addresses lie in the pool of NCCL symmetric memory. It must not cache that
    an address lies outside the pool, because the pool may grow and contain this address later. With an outdated cache,
    only some of the ranks would allocate from the pool."""
    answers = [False, False, True]
    asks = runners.cache_pool_addresses(lambda tensor: answers.pop(0))
    tensor = torch.empty(1)
    assert [asks(tensor) for _ in range(4)] == [False, False, True, True]


def test_unreplaced_globals_are_looked_up_at_call_time(run, monkeypatch):
    hidden, buffer = torch.ones(2, 3), torch.empty(2, 3)
    monkeypatch.setitem(globals(), "scale", 5)
    with moe_output_buffer_ctx(buffer):
        assert not shares_storage(runner_of_the_engine(Dispatched(hidden)), buffer)
        assert torch.equal(run(Dispatched(hidden), 1), torch.full((2, 3), 5.0))
    assert torch_of_the_runner is torch


def test_names_that_are_not_only_globals_are_detected():
    def attribute():
        return scale, torch.torch_of_the_runner

    def imported():
        import torch

        return torch

    assert engine.is_only_a_global(runner_of_the_engine, "torch_of_the_runner")
    assert not engine.is_only_a_global(attribute, "torch_of_the_runner")
    assert not engine.is_only_a_global(imported, "torch")


def test_offers_stay_in_their_own_context():
    """An offered buffer is visible only to the forward pass that offers it. Another forward pass may run at the same
    time, in another thread or in another context of the same thread.
    """
    offers: list[Any] = []

    def elsewhere():
        offers.append(channel.get_offered_buffer())
        offers.append(channel.take_output((2, 3), torch.float32, CPU))

    empty_context, mine = copy_context(), torch.empty(2, 3)
    with moe_output_buffer_ctx(mine):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        empty_context.run(elsewhere)
        assert channel.get_offered_buffer() is mine
    assert offers == [None] * 4


def test_the_wrappers_are_transparent_to_torch_compile(run, monkeypatch):
    """``torch.compile`` traces the patched layer as a whole, without a graph break. The graph computes the same as the
    engine's own function, and uses no offered buffer.
    """

    class Layer(torch.nn.Module):
        def forward(self, positions, hidden_states, forward_batch, residual):
            return run(Dispatched(hidden_states), 2)

    monkeypatch.setattr(Layer, "forward", offer.make_layer_forward(Layer.forward, torch.compiler.is_compiling))
    layer = Layer()
    setattr(layer, offer._MIN_OFFER_BYTES_ATTRIBUTE, 0)
    hidden, residual = torch.ones(2, 3), torch.zeros(2, 3)
    eager = layer(None, hidden.clone(), None, residual)
    monkeypatch.setattr(channel, "fits", lambda *args, **kwargs: pytest.fail("asked for a buffer while tracing"))
    monkeypatch.setattr(offer, "may_offer", lambda *args: pytest.fail("offered a buffer while tracing"))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(None, hidden, None, residual), eager)
    assert torch.equal(hidden, torch.ones(2, 3))


class PPMissingLayer:
    """Stand-in for the engine's placeholder of a layer in another pipeline stage. The change recognizes it by its
    name."""


def test_a_pipeline_stage_has_only_its_own_layers():
    layers = [PPMissingLayer(), "a", "b", "c", "d", PPMissingLayer()]
    assert offer.find_stage_layers(SimpleNamespace(layers=layers, start_layer=1, end_layer=5)) == ["a", "b", "c", "d"]
    assert offer.find_stage_layers(SimpleNamespace(layers=layers)) == ["a", "b", "c", "d"]
    assert offer.find_stage_layers(SimpleNamespace(layers=layers, start_layer=2, end_layer=4)) == ["b", "c"]


class NvFp4Method(SimpleNamespace):
    """Quantization method with NVFP4 weights. The change recognizes it by its name."""


class Fp8Method(SimpleNamespace):
    """Quantization method without NVFP4 weights."""


@pytest.mark.parametrize(
    ("inplace", "runner", "least"),
    [
        *((True, None, 0), (True, "triton", offer.MIN_SLICED_OFFER_BYTES), (False, "triton", 0)),
        *((inplace, "marlin", offer.MIN_SLICED_OFFER_BYTES) for inplace in (True, False)),
        *((True, runner, 0) for runner in ("flashinfer_trtllm_routed", "flashinfer_cutedsl")),
        *((True, runner, None) for runner in ("deep_gemm", "cutlass", "flashinfer_cutlass", "aiter", "triton_kernel")),
    ],
)
def test_a_layer_offers_its_input_only_to_a_runner_that_uses_it(inplace, runner, least):
    backend = runner and SimpleNamespace(runner_backend=SimpleNamespace(value=runner))
    config = SimpleNamespace(inplace=inplace)
    for kind in (NvFp4Method, Fp8Method):
        layer, method = SimpleNamespace(), kind(runner=backend)
        offer.mark_offering(layer, None, SimpleNamespace(moe_runner_config=config, quant_method=method))
        # Only TRT-LLM's kernels for NVFP4 use an offered buffer.
        takes = kind is NvFp4Method or runner not in runners.TRTLLM
        assert getattr(layer, offer._MIN_OFFER_BYTES_ATTRIBUTE, None) == (least if takes else None)
        assert offer.is_offering(layer) == (takes and least is not None)
    scheme = SimpleNamespace(moe_runner_config=config, quant_method=Fp8Method(runner=backend), scheme=NvFp4Method())
    assert runners.is_nvfp4(scheme)


def test_models_are_inspected_after_construction_and_a_failure_does_not_stop_them(caplog):
    seen = []

    def fails(model):
        seen.append(model)
        raise AttributeError("no layers")

    built = offer.initialize_and_probe(fails, lambda config: f"a model of {config}", config="some size")
    assert seen == [built] == ["a model of some size"]
    assert "finding dead inputs in the layers of str failed and is skipped: AttributeError" in caplog.text


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("h", "b", "r"), {}),
        (("h", "b"), {"residual": "r"}),
        ((), {"hidden_states": "h", "forward_batch": "b", "residual": "r"}),
    ],
)
def test_arguments_are_found_by_position_and_by_name(args, kwargs, monkeypatch):
    asked = []
    monkeypatch.setattr(offer, "may_offer", lambda tensor, residual: asked.append((tensor, residual)))
    names = ("hidden_states", "forward_batch", "residual")
    how = {"tensor_of": lambda found: SimpleNamespace(found=found, nbytes=1)}
    forward = offer.make_layer_forward(lambda *args, **kwargs: "ran", lambda: False, names, lambda b, r: b + r, **how)
    assert forward(make_layer(), *args, **kwargs) == "ran"
    ((tensor, residual),) = asked
    assert (tensor.found, residual) == ("h", "br")


@pytest.mark.parametrize(
    ("update", "plain"),
    [({"is_plain_add": True}, True), ({"adds_plainly": True}, True), ({"is_plain_add": False}, False), ({}, False)],
)
def test_a_residual_that_is_more_than_a_sum_is_detected(update, plain):
    pending = SimpleNamespace(update=SimpleNamespace(**update))
    batch = SimpleNamespace(residual_stream=SimpleNamespace(pending=pending, residual="the residual"))
    assert offer.find_stream_residual(batch, None) == ("the residual" if plain else None)
    batch.residual_stream.pending = None
    assert offer.find_stream_residual(batch, None) is None


class Handle:
    """Stand-in for the engine's deferred sum, which a layer may receive as its input. The engine has not computed the
    sum yet, and will write it into ``tensor``."""

    def __init__(self, tensor):
        self.tensor = tensor


class PatchedForward:
    """Patched forward of a decoder layer. It records the buffer that is offered to the layer's experts.

    The original forward offers a buffer itself, as newer engine releases do. The change disables that offer.
    """

    def __init__(self, **how):
        withheld = offer.make_empty_offer(moe_output_buffer_ctx)

        def forward(layer, positions, hidden_states, forward_batch, residual):
            with withheld(hidden_states):
                self.seen = channel.get_offered_buffer()

        self.forward = offer.make_layer_forward(forward, lambda: False, **how)

    def makes_offer(self, layer, residual=True, idle=False, hidden=None):
        """Run a layer, and return whether the change offered the layer's input. Check that no other buffer was
        offered.

        :param residual: whether the layer receives a residual.
        :param idle: whether the rank is idle in this forward pass.
        :param hidden: the layer's input.
        """
        hidden = torch.empty(2, 3) if hidden is None else hidden
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: idle))
        self.forward(layer, None, hidden, batch, torch.empty(2, 3) if residual else None)
        assert channel.get_offered_buffer() is None
        assert self.seen is None or shares_storage(self.seen, getattr(hidden, "tensor", hidden))
        return self.seen is not None


def make_layer(least=0):
    return SimpleNamespace(modules=list, **({} if least is None else {offer._MIN_OFFER_BYTES_ATTRIBUTE: least}))


def test_a_layer_offers_its_input_where_it_is_dead():
    run, layer = PatchedForward(), make_layer()
    assert run.makes_offer(layer)
    assert not run.makes_offer(layer, residual=False)
    assert not run.makes_offer(layer, idle=True)
    assert not run.makes_offer(layer, hidden=torch.empty(4, 3)[:2])
    assert not run.makes_offer(layer, hidden=torch.empty(3, 2).T)
    assert run.makes_offer(make_layer(2 * 3 * 4))
    assert not run.makes_offer(make_layer(2 * 3 * 4 + 1))


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
@pytest.mark.parametrize("where", ["layer", "producer", "everywhere"])
def test_a_layer_offers_nothing_while_a_forward_hook_may_see_its_input(where, kind, caplog):
    layer, producer = (torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1))) for _ in range(2))
    offer.mark_offering(layer, producer, None)
    run = PatchedForward()
    assert run.makes_offer(layer)
    registers = {
        "layer": getattr(layer[0][0], f"register_{kind}"),
        "producer": getattr(producer[0][0], f"register_{kind}"),
        "everywhere": getattr(torch.nn.modules.module, f"register_module_{kind}"),
    }
    hook = registers[where](lambda module, *given: None)
    with caplog.at_level("INFO"):
        assert not run.makes_offer(layer)
        assert not run.makes_offer(layer)
    assert (
        caplog.text.count("Sequential does not offer its dead input, because it or the previous layer has forward") == 1
    )
    hook.remove()
    assert run.makes_offer(layer)


def test_the_engines_offer_is_withheld_in_unknown_layers():
    assert not PatchedForward().makes_offer(make_layer(None))
    assert not PatchedForward().makes_offer(make_layer(None), residual=False)


def test_the_tensor_of_a_deferred_sum_is_offered():
    hidden = Handle(torch.empty(2, 3))
    assert not PatchedForward().makes_offer(make_layer(), hidden=hidden)
    run = PatchedForward(tensor_of=lambda given: given.tensor)
    assert run.makes_offer(make_layer(), hidden=hidden)
    assert not run.makes_offer(make_layer(), hidden=hidden, residual=False)
    assert not run.makes_offer(make_layer(), hidden=Handle(None))  # the sum has no tensor yet


def test_a_withheld_offer_can_be_traced():
    withheld = offer.make_empty_offer(moe_output_buffer_ctx)

    def forward(hidden):
        with withheld(hidden):
            return hidden * 2

    assert torch.equal(torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


def test_the_engines_offer_is_withheld_under_every_imported_name(monkeypatch, patcher):
    """The engine's function that offers a buffer is replaced in every module that has imported it by name. Otherwise
    such a module would continue to offer a buffer.
    """
    modules = {name: ModuleType(name) for name in ("its_own", "a_models", "another_functions", "without")}
    for name in ("its_own", "a_models"):
        setattr(modules[name], channel.ENGINE_OFFER, moe_output_buffer_ctx)
        setattr(modules[name], runners.POOL_QUERY, lambda tensor: False)
        setattr(modules[name], probe.INITIALIZE, lambda config: None)
    setattr(modules["another_functions"], channel.ENGINE_OFFER, lambda buf: None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(engine, "import_module", lambda name: modules["its_own"])
    offered: list[Any] = []
    probe.Offers("", channel.Channel(lambda: None, offered.append)).install(patcher)
    for name in ("its_own", "a_models"):
        with getattr(modules[name], channel.ENGINE_OFFER)(torch.empty(2, 3)):
            assert offered == []
    patcher.undo()
    assert getattr(modules["a_models"], channel.ENGINE_OFFER) is moe_output_buffer_ctx


# --- Proofs of source code -------------------------------------------------------------------------------------------

PREPARE = "hidden_states, residual = self.layer_communicator.prepare_attn(hidden_states, residual, forward_batch)"
OFFER = "with moe_output_buffer_ctx(hidden_states_orig): return self.mlp(hidden_states), residual"


def parse_method(*lines, parameters="hidden_states, forward_batch, **kwargs"):
    """Return the syntax tree of a method with these lines as its body. The method is never run.

    A line that begins with spaces belongs to the line before it.
    """
    source = "\n".join((f"def forward(self, {parameters}):", *(f"  {line}" for line in lines)))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


@pytest.mark.parametrize(
    ("is_dead", "lines"),
    [
        (True, (PREPARE, "return self.mlp(hidden_states), residual")),
        (True, ("hidden_states_orig = hidden_states", PREPARE, OFFER)),
        (
            True,  # the input is the tensor of a handle
            (
                "hidden_states_orig = residual_access.buffer(hidden_states)",
                "hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)",
                "if isinstance(hidden_states_orig, Tensor) and hidden_states_orig.shape[0] == hidden_states.shape[0]:",
                f"  {OFFER}",
            ),
        ),
        (False, ("shortcut = hidden_states", PREPARE, "return self.mlp(hidden_states) + shortcut, residual")),
        (False, (PREPARE.replace("(hidden_states", "(hidden_states[1:]"), "return self.mlp(hidden_states), residual")),
        (False, (PREPARE.replace("hidden_states,", "normed,", 1), "return self.mlp(normed) + hidden_states, residual")),
        (False, ("hidden_states_orig = hidden_states", PREPARE, OFFER.replace("),", ") + hidden_states_orig,"))),
        (False, ("hidden_states_orig = hidden_states", "self.last = hidden_states_orig", PREPARE, OFFER)),
        (
            False,
            (
                *("hidden_states_orig = hidden_states", PREPARE),
                OFFER.replace("moe_output_buffer_ctx(", "self.scoped(moe_output_buffer="),
            ),
        ),
        (False, ("hidden_states_orig = hidden_states", OFFER.replace("),", ") + hidden_states,"))),
        (False, (PREPARE.replace("layer_communicator.prepare_attn", "remember"), "return self.mlp(hidden_states)")),
    ],
)
def test_layers_that_may_still_use_their_input_are_detected(is_dead, lines):
    assert proofs.input_dies(parse_method(*lines, parameters="hidden_states, forward_batch, residual")) == is_dead


def parse_forward(
    before="", between="pass", attends="hidden_states = self.self_attn(hidden_states)", norm="", after="pass"
):
    norm = norm or "hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)"
    prepared = "hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)"
    return parse_method(before or prepared, between, attends, norm, after, "return self.mlp(hidden_states)")


@pytest.mark.parametrize(
    "changed_lines",
    [
        {"attends": "with self.tp(forward_batch) as group: hidden_states = self.self_attn(hidden_states)"},
        {"between": "hs = hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states"},
        {"attends": "if hidden_states.shape[0] != 0: hidden_states = self.self_attn[1](x=hidden_states)"},
        {"attends": "try: hidden_states = self.self_attn(hidden_states)\n  finally: self.clear()"},
        {"norm": "hidden_states, residual = self.layer_communicator.prepare_mlp(hidden_states, None, forward_batch)"},
        {  # a function of the same module runs the rest of the layer
            "attends": "attended = self.linear_attn(hidden_states)",
            "norm": "hidden_states = self.attn_boundary.finish(attended)",
            "after": "return the_rest(self, hidden_states)",
        },
    ],
)
def test_other_ways_to_drop_the_input_are_recognized(changed_lines):
    assert proofs.attention_input_dies(parse_forward())
    assert proofs.attention_input_dies(parse_forward(**changed_lines))


@pytest.mark.parametrize(
    "keeping_lines",
    [
        {"between": "with self.keep(hidden_states) as kept: pass"},
        {"between": "with self.keep() as kept, self.keep(kept, x=[hidden_states]): pass"},
        {"attends": "with self.keep() as hidden_states: hidden_states = self.self_attn(hidden_states)"},
        {"attends": "hidden_states = self.self_attn(kept := hidden_states)"},
        {"attends": "hidden_states = self.self_attn(self.seen.append(hidden_states))"},
        {"between": "kept = self.seen.append(hidden_states)"},
        {"between": "kept = [keep(one) for one in (hidden_states,)]"},
        {"between": "kept = hidden_states.share()"},
        {"between": "kept = [hidden_states] + []", "after": "self.run(kept)"},
        {"between": "kept, *others = hidden_states, 1"},
        {"between": "[kept] = [hidden_states]"},
        {"between": "self.kept[0] = hidden_states"},
        {"between": "self.kept[hidden_states] = 1"},
        {"between": "kept: object = hidden_states"},
        {"between": "kept += [hidden_states]"},
        {"between": "del self.kept[hidden_states]"},
        {"between": "for kept in [hidden_states]: pass"},
        {"between": "if self.seen.append(hidden_states): pass"},
        {"between": "if (kept := hidden_states) is None: pass"},
        {"between": "while keep(hidden_states): pass"},
        {"between": "match hidden_states:\n    case kept: pass"},
        {"between": "try: keep(hidden_states)\n  except E as kept: pass"},
        {"between": "for i in kwargs: return i"},
        {"between": "kept = lambda: hidden_states"},
        {"between": "kept = lambda x=hidden_states: x"},
        {"between": "def kept(x=hidden_states): return x"},
        {"between": "class Kept: x = hidden_states"},
        {"between": "kept = (hidden_states for i in kwargs)"},
        {"between": "kept = locals()"},
        {"before": "global hidden_states; hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)"},
        {"before": "hidden_states, kept = self.attn_boundary.prepare(hidden_states)", "after": "self.run(kept)"},
        {"before": "hidden_states, self.kept = self.attn_boundary.prepare(hidden_states)"},
        {"before": "hidden_states, *kept = self.attn_boundary.prepare(hidden_states)"},
        {"attends": "if images.shape[0] != 0: hidden_states = self.self_attn(hidden_states)"},
        {"attends": "x = self.self_attn(hidden_states)", "norm": "x = self.ffn_boundary.prepare(x)"},
        {"between": "read = hidden_states", "after": "return self.mlp(hidden_states) + self.parallel(read)"},
        {"attends": "if self.attends: hidden_states = self.self_attn(hidden_states)"},
        {"between": "self.last = hidden_states"},
        {"between": "self.seen.append(hidden_states)"},
        {"norm": "pass"},  # the proof needs a norm after attention
    ],
    ids=lambda keeping_lines: "; ".join(keeping_lines.values()),
)
def test_layers_that_may_still_use_attentions_input_are_refused(keeping_lines):
    assert not proofs.attention_input_dies(parse_forward(**keeping_lines))


@pytest.mark.parametrize(
    "before",
    [
        "seen = lambda: hidden_states",
        "global hidden_states",
        "seen = locals()",
        "residual = (kept := hidden_states)",
    ],
)
def test_an_input_with_another_reference_is_not_dead(before):
    prepared = "hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)"
    assert not proofs.input_dies(parse_forward(before=f"{before}\n  {prepared}"))


@pytest.mark.parametrize(
    ("is_proved", "body"),
    [
        (True, "x = self.qkv(hidden_states); return self.o(x)"),
        (True, "n = hidden_states.shape[0]; x = self.qkv(hidden_states); return x.view(n, -1)"),
        (True, "if self.fused: return self.qkv(hidden_states)\n  return self.inner(hidden_states)"),
        (
            True,
            "if isinstance(hidden_states, tuple): hidden_states = pick(hidden_states)\n  return self.o(hidden_states)",
        ),
        (False, "return hidden_states"),
        (False, "return hidden_states if self.off else self.qkv(hidden_states)"),
        (False, "if self.off: return hidden_states\n  return self.qkv(hidden_states)"),
        (False, "x = hidden_states[0]; return x, 1"),
        (False, "return pick(hidden_states)"),
        (False, "return self.returns_it(hidden_states)"),
        (False, "return self.method(hidden_states)"),
        (False, "self.kept = hidden_states; return self.qkv(1)"),
        (False, "self.kept.append(hidden_states); return self.qkv(1)"),
        (False, "return self.takes_anything(hidden_states)"),
        (False, "return self.inner(*[hidden_states])"),
        (False, "return self.inner(1, 2, hidden_states)"),
        (False, "return (lambda: hidden_states)()"),
    ],
)
def test_methods_that_receive_the_tensor_are_inspected(is_proved, body):
    sources = {
        "method": f"self, hidden_states, batch=None):\n  {body}",
        "inner": "self, x):\n  return self.qkv(x)",
        "returns_it": "self, x):\n  return x",
        "takes_anything": "self, *x):\n  return self.qkv(1)",
    }
    methods = {name: ast.parse(f"def {name}({source}").body[0] for name, source in sources.items()}
    forward = parse_forward(attends="hidden_states = self.method(hidden_states)")
    assert proofs.attention_input_dies(
        forward
    )  # without the methods, ``method`` counts as a submodule, which is inspected later
    assert proofs.attention_input_dies(forward, methods.get) == is_proved


@pytest.mark.parametrize(
    ("returns_own_tensor", "body"),
    [
        (True, "return self.o(self.attn(self.qkv(x)))[0]"),
        (True, "if x.shape[0] == 0: return x\n  y, _ = self.quant.apply(self, x); return y.to(x.dtype)"),
        (True, "if forward_batch.forward_mode.is_idle(): return x\n  x = pick(x); return self.o(x)"),
        (False, "return x"),
        (False, "if self.off: return x\n  return self.o(x)"),
        (False, "return dropout(x)"),
        (False, "y: object = x.view(-1); return y"),
        (False, "for i in y:\n    return z\n    z = x"),
        (False, "for i in y:\n    if i: return z\n    z = x\n  return self.o(x)"),
        (False, "with self.tp(): y = x\n  return y"),
        (False, "try: y = self.o(x)\n  except E: y = x\n  return y"),
        (False, "return (lambda: x)()"),
        (False, "return (y := x)"),
    ],
)
def test_submodules_that_may_return_their_argument_are_detected(returns_own_tensor, body):
    (forward,) = ast.parse(f"def forward(self, x, forward_batch=None):\n  {body}").body
    assert proofs.returns_own_memory(forward, frozenset({0})) == returns_own_tensor
    assert proofs.returns_own_memory(forward, frozenset({"x"})) == returns_own_tensor
    assert not proofs.returns_own_memory(forward, frozenset({"y"}))
    assert not proofs.returns_own_memory(forward, frozenset({"*"}))


class ToyExperts(torch.nn.Module):
    """Stand-in for routed experts, which writes its output into the offered buffer."""

    def forward(self, x):
        channel.withdraw_if_shared(x)
        return torch.mul(x, 3, out=channel.take_output(x.shape, x.dtype, x.device))


class ToyAttention(torch.nn.Module):
    def forward(self, x):
        return self.attend(x)

    def attend(self, x):
        return x + 1


class ToySkip(ToyAttention):
    def forward(self, x):
        return x


class ToyNorms:
    """Stand-in for a layer's norms. They overwrite their input with their result, as kernels of the engine may."""

    def prepare_attn(self, x, residual):
        return x.mul_(2), residual

    def prepare_mlp(self, x, residual):
        return x * 2, x.add_(residual)


class ToyLayer(torch.nn.Module):
    def __init__(self, attention: Any = None) -> None:
        super().__init__()
        self.self_attn = attention or ToyAttention()
        self.mlp = ToyExperts()
        self.layer_communicator = ToyNorms()

    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.layer_communicator.prepare_attn(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.layer_communicator.prepare_mlp(hidden_states, residual)
        return self.mlp(hidden_states), residual


class ToyMethodLayer(ToyLayer):
    def attend(self, x):
        return x

    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.layer_communicator.prepare_attn(hidden_states, residual)
        hidden_states = self.attend(hidden_states)
        hidden_states, residual = self.layer_communicator.prepare_mlp(hidden_states, residual)
        return self.mlp(hidden_states), residual


class ToyExpertsFirstLayer(ToyLayer):
    def route(self, x):
        return self.mlp(x)

    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.layer_communicator.prepare_attn(hidden_states, residual)
        routed = self.route(positions)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.layer_communicator.prepare_mlp(hidden_states, residual)
        return routed + hidden_states, residual


for toy in (ToyAttention, ToySkip, ToyLayer, ToyMethodLayer, ToyExpertsFirstLayer):
    toy.__module__ = "sglang.toy"


def toy_answer(layer, patched):
    """Return the output of a layer for an input of ones.

    If a layer reads its input after the experts have overwritten it, the output of the patched layer is wrong.

    :param patched: whether the layer offers its input to the experts as memory for their output.
    """
    forward = offer.make_layer_forward(type(layer).forward, lambda: False) if patched else type(layer).forward
    offer.mark_offering(layer, layer, None)
    result, residual = forward(layer, torch.full((1, 1), 5.0), torch.ones(1, 1), None, torch.ones(1, 1))
    return (result + residual).item()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (ToyLayer(), ""),
        (ToyLayer(torch.nn.ModuleList([ToyAttention()])), ""),
        (ToyLayer(torch.nn.Identity()), "ToyLayer passes attention's input to self_attn, which may return it"),
        (ToyLayer(torch.nn.Dropout(0)), "ToyLayer passes attention's input to self_attn, which may return it"),
        (
            ToyLayer(torch.nn.ModuleList([ToyAttention(), torch.nn.Identity()])),
            "ToyLayer passes attention's input to self_attn",
        ),
        (ToyLayer(ToySkip()), "ToyLayer passes attention's input to self_attn, which may return it"),
        (ToyMethodLayer(), "ToyMethodLayer may read attention's input after attention"),
        (ToyExpertsFirstLayer(), "ToyExpertsFirstLayer may run its routed experts before attention, in mlp"),
    ],
)
def test_a_toy_layer_answers_as_stock_or_is_refused(layer, reason, monkeypatch):
    monkeypatch.setattr(engine, "require_unpatched", getattr)
    with pytest.raises(engine.Unsupported, match=reason) if reason else nullcontext():
        probe.require_attention_input_dies(layer, probe.probe_layer(type(layer)).attention, ToyExperts)
    if not isinstance(layer._modules["self_attn"], torch.nn.ModuleList):
        assert (toy_answer(layer, patched=True) == toy_answer(layer, patched=False)) == (not reason)


def test_layers_that_capture_hidden_states_are_detected():
    sums = parse_forward(
        "hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch, capture=capture_output, "
        "capture_gathered=captured_last_layer_outputs)"
    )
    by_itself = parse_forward(between="capture_output(hidden_states)")
    for layer in (sums, by_itself):
        layer.args.args += [ast.arg("captured_last_layer_outputs"), ast.arg("capture_output")]
    assert proofs.captures_only_sums(sums)
    assert not proofs.captures_only_sums(by_itself)
    assert proofs.find_layer_skip_reason("Layer", by_itself) == "Layer may read attention's input after attention"
    assert not proofs.captures_only_sums(parse_method("captured += [1]", parameters="captured"))
    assert not proofs.captures_only_sums(parse_forward(after="seen = kwargs['captured_outputs']"))


@pytest.mark.parametrize(
    ("may_keep", "after"),
    [
        (True, "self.last = hidden_states"),
        (True, "self.last: object = hidden_states"),
        (True, "self.seen[0] = self.mlp(hidden_states)"),
        (True, "self.seen += (hidden_states,)"),
        (True, "seen += [hidden_states]"),
        (True, "self.seen.append(hidden_states)"),
        (True, "result = self.mlp(hidden_states)\n  self.seen.append(result)"),
        (True, "for self.last in (hidden_states,): pass"),
        (True, "with self.keep(hidden_states): pass"),
        (True, "with self.keep() as self.last: pass"),
        (False, "hidden_states.mark = True"),
        (False, "note(forward_batch)"),
        (False, "with self.keep() as result: pass"),
    ],
)
def test_layers_that_may_keep_the_next_layers_input_are_detected(may_keep, after):
    layer = parse_forward(after=after)
    assert proofs.attention_input_dies(layer)
    assert proofs.find_layer_skip_reason("Layer", layer) == ("Layer may keep its result" if may_keep else None)


LAYER = "hidden_states, residual = layer(hidden_states, batch, residual=residual)"
ALONE = "hidden_states = layer(hidden_states, batch)"
BY_INDEX = "hidden_states, residual = self.layers[i](hidden_states, batch, residual)"
EACH = "for layer in self.layers:"
KEEPING_NOTHING = [
    (EACH, LAYER),
    (
        *("for i, layer in enumerate(self.layers):", "if i in self.layers_to_capture:"),
        *("  self.captured.append(hidden_states + residual)", "hidden_states = layer(hidden_states=hidden_states)"),
    ),
    (
        "for i in range(len(self.layers)):",
        *("self.captured.append(hidden_states if residual is None else hidden_states + residual)", BY_INDEX),
    ),
    (
        *(EACH, "if self.first:", f"  {ALONE}", "else:", f"  {ALONE}"),
        *("  hidden_states = residual_batch.add_to_output(hidden_states, batch, self.embeds)",),
        *("hidden_states.add_(self.embeds)", "self.captured.append(residual_batch.snapshot(hidden_states, batch))"),
    ),
    ("def capture(value): self.captured.append(value)\n  for layer in self.layers:", ALONE[:-1] + ", capture)"),
]
KEEPING_AN_INPUT = [
    (EACH, "self.captured.append(hidden_states)", LAYER),
    (EACH, "output, residual = layer(hidden_states, batch, residual)", "hidden_states = output + hidden_states"),
    (
        "for i in range(len(self.layers)):",
        *("self.captured.append(hidden_states if i == 0 else hidden_states + residual)", BY_INDEX),
    ),
    (
        *(EACH, ALONE, "kept = residual_batch.add_to_output(hidden_states, batch, self.embeds)"),
        "self.captured.append(kept)",
    ),
    (EACH, ALONE, "self.captured.append(hidden_states.add_(1))"),
    (EACH, f"kept = {ALONE}", "self.captured.append(kept)"),
    (
        *(EACH, "between = layer(hidden_states, batch)", "hidden_states = self.layers[1](between, batch)"),
        "self.captured.append(between)",
    ),
    (EACH, "self.captured.append(hidden_states.add_)", ALONE),
    ("def capture(): self.captured.append(hidden_states)\n  for layer in self.layers:", "capture()", ALONE),
    (EACH, "self.captured.append(locals())", ALONE),
    ("global hidden_states\n  for layer in self.layers:", ALONE),
    (EACH, "hidden_states = layer((kept := hidden_states), batch)", "self.captured.append(kept)"),
    ("for layer in hidden_states:", "hidden_states = layer(self.embeds, batch)"),
    (EACH, f"{ALONE}\n  {EACH}", ALONE),  # two loops over the layers, one in the other
    (
        "if self.layers:",
        "hidden_states = self.run(self.layers, hidden_states)",
    ),  # a method gets all layers, without a visible loop
]


@pytest.mark.parametrize(
    ("may_keep", "loop"),
    [*((False, loop) for loop in KEEPING_NOTHING), *((True, loop) for loop in KEEPING_AN_INPUT)],
    ids=lambda found: "; ".join(found[1:]) if isinstance(found, tuple) else None,
)
def test_loops_that_may_keep_an_input_are_detected(may_keep, loop):
    head, *inside = loop
    forward = parse_method(head, *(f"  {line}" for line in inside), "return hidden_states")
    assert proofs.loop_keeps_nothing(forward) == (not may_keep)


@pytest.mark.parametrize(("runner", "name"), [(None, "the method's own kernel"), ("cutlass", "cutlass")])
def test_the_reason_for_no_effect_names_the_kernel_also_if_the_layer_names_no_runner(runner, name, monkeypatch):
    monkeypatch.setattr(output_buffer.probe, "find_offers", lambda model: ([], []))
    monkeypatch.setattr(output_buffer.probe, "has_engine_offer", lambda: True)
    monkeypatch.setattr(output_buffer.runners, "find_layers", lambda model: [object()])
    monkeypatch.setattr(output_buffer.runners, "find_runner", lambda experts: runner)
    decision = output_buffer.decide(SimpleNamespace(model=None))
    assert decision.reason == f"{name} uses no output buffer here"
