"""The decisions of output-buffer, as functions of plain values, and its wiring without an engine."""

from __future__ import annotations

import sys
import threading
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches import engine, handoff
from sglang_moe_patches.changes.output_buffer import lend
from sglang_moe_patches.changes.output_buffer.lend import may_offer
from sglang_moe_patches.handoff import fits, moe_output_buffer_ctx, shares_storage
from sglang_moe_patches.patch import Patcher, with_globals

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
    # A view: what its base holds beside it belongs to somebody else.
    assert not fits(torch.empty(8, 6)[:4], (4, 6), torch.float32, CPU)
    assert not fits(torch.empty(25)[1:].view(4, 6), (4, 6), torch.float32, CPU)
    assert not fits(torch.empty(0, 6), (0, 6), torch.float32, CPU)
    assert not fits(whole, (4, 6), torch.float32, torch.device("meta"))


@pytest.mark.parametrize(("needed", "inside"), [(False, False), (False, True), (True, False), (True, True)])
def test_symmetric_memory_is_asked_for_only_where_needed(needed, inside):
    buffer = torch.empty(2, 2)
    asked = []
    result = fits(
        buffer,
        (2, 2),
        torch.float32,
        CPU,
        needs_symmetric_memory=needed,
        in_symmetric_memory=lambda tensor: asked.append(tensor) or inside,
    )
    assert result == (inside or not needed)
    assert bool(asked) == needed


def test_a_layer_input_that_is_the_residual_is_not_offered():
    hidden = torch.empty(3, 4)
    assert may_offer(hidden, torch.empty(3, 4))
    assert not may_offer(hidden, None)
    assert not may_offer(hidden, hidden)
    assert not may_offer(hidden, hidden.view(4, 3))
    assert not may_offer(hidden[:2], hidden)
    assert shares_storage(hidden[:1], hidden[2:])


# --- The runner ------------------------------------------------------------------------------------------------------

torch_of_the_runner = torch  # stands in for the engine module's name `torch`
scale = 1


class Dispatched(NamedTuple):
    hidden_states: torch.Tensor


def runner_of_the_engine(dispatch_output, factor=2, *, extra=0):
    """What the engine's function does, in small: allocate an output, write into it."""
    hidden = dispatch_output.hidden_states
    output = torch_of_the_runner.empty(*hidden.shape, dtype=hidden.dtype, device=hidden.device)
    torch_of_the_runner.mul(hidden, factor * scale + extra, out=output)
    return output


@pytest.fixture
def symmetric_memory():
    return SimpleNamespace(_active_symmetric_memory_context=None, is_tensor_in_symmetric_mempool=lambda tensor: False)


@pytest.fixture
def run(symmetric_memory):
    # The change replaces the name `torch`; this stand-in uses another one, so that the test keeps its own.
    patcher = Patcher()
    allocator = lend._OutputAllocator(torch, symmetric_memory)
    runner: Any = runner_of_the_engine
    into_buffer = with_globals(runner, sys.modules[__name__], patcher, torch_of_the_runner=allocator)
    yield lend._make_runner(runner, into_buffer, torch.compiler.is_compiling)
    patcher.undo()


def test_the_output_goes_into_the_offered_buffer_as_a_new_tensor(run):
    hidden, buffer = torch.ones(2, 3), torch.full((2, 3), float("nan"))
    buffer.mark = True
    with moe_output_buffer_ctx(buffer):
        output = run(Dispatched(hidden), 3, extra=1)
    assert shares_storage(output, buffer)
    assert torch.equal(output, torch.full((2, 3), 4.0))
    assert not hasattr(output, "mark")


def test_one_offer_serves_one_kernel(run):
    hidden, buffer = torch.ones(2, 3), torch.empty(2, 3)
    with moe_output_buffer_ctx(buffer):
        first = run(Dispatched(hidden), 1)
        second = run(Dispatched(hidden), 2)
    assert shares_storage(first, buffer)
    assert not shares_storage(second, buffer)
    assert torch.equal(first, hidden)


def test_the_offer_ends_with_its_block_also_after_an_error(run):
    with pytest.raises(ZeroDivisionError), moe_output_buffer_ctx(torch.empty(2, 3)):
        raise ZeroDivisionError
    assert handoff.offered() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda hidden: None,
        lambda hidden: hidden,
        lambda hidden: torch.empty(3, 3),
        lambda hidden: torch.empty(2, 3, dtype=torch.float64),
        lambda hidden: torch.empty(4, 3)[:2],
    ],
    ids=["none offered", "the input itself", "other shape", "other dtype", "a view"],
)
def test_anything_else_gets_a_fresh_output(run, make):
    hidden = torch.ones(2, 3)
    buffer = make(hidden)
    with moe_output_buffer_ctx(buffer):
        output = run(Dispatched(hidden), 2)
    assert torch.equal(output, torch.full((2, 3), 2.0))
    assert torch.equal(hidden, torch.ones(2, 3))
    assert buffer is None or not shares_storage(output, buffer)


def test_symmetric_memory_off_on_and_seen_once(run, symmetric_memory):
    hidden, buffer = torch.ones(2, 3), torch.empty(2, 3)
    lookups = []

    def call():
        with moe_output_buffer_ctx(buffer):
            return run(Dispatched(hidden), 2)

    symmetric_memory._active_symmetric_memory_context = object()
    symmetric_memory.is_tensor_in_symmetric_mempool = lambda tensor: lookups.append(tensor) or len(lookups) > 1
    assert not shares_storage(call(), buffer)
    assert shares_storage(call(), buffer)
    assert shares_storage(call(), buffer)
    assert len(lookups) == 2  # the walk over the pool is not made again for an address known to be in it


def test_names_that_are_not_replaced_are_looked_up_in_the_module_at_call_time(run, monkeypatch):
    hidden = torch.ones(2, 3)
    monkeypatch.setitem(globals(), "scale", 5)
    with moe_output_buffer_ctx(torch.empty(2, 3)):
        assert torch.equal(run(Dispatched(hidden), 1), torch.full((2, 3), 5.0))


def test_the_engines_own_function_stays_as_it_was(run):
    hidden, buffer = torch.ones(2, 3), torch.empty(2, 3)
    with moe_output_buffer_ctx(buffer):
        assert not shares_storage(runner_of_the_engine(Dispatched(hidden)), buffer)
    assert torch_of_the_runner is torch


def test_a_name_that_is_more_than_a_global_is_noticed():
    def attribute():
        return scale, torch.torch_of_the_runner

    def imported():
        import torch

        return torch

    assert engine.only_a_global(runner_of_the_engine, "torch_of_the_runner")
    assert not engine.only_a_global(attribute, "torch_of_the_runner")
    assert not engine.only_a_global(imported, "torch")


def test_offers_stay_in_their_own_context(run):
    """Two forwards in flight: in another thread, and in another context of the same thread."""
    mine, other = torch.empty(2, 3), torch.empty(2, 3)
    hidden = torch.ones(2, 3)
    seen: dict[Any, Any] = {}

    def elsewhere(name, buffer):
        seen[name, "before"] = handoff.offered()
        with moe_output_buffer_ctx(buffer):
            seen[name] = run(Dispatched(hidden), 7)

    empty_context = copy_context()
    with moe_output_buffer_ctx(mine):
        thread = threading.Thread(target=elsewhere, args=("thread", other))
        thread.start()
        thread.join()
        empty_context.run(elsewhere, "context", None)
        output = run(Dispatched(hidden), 2)
    assert seen["thread", "before"] is None
    assert shares_storage(seen["thread"], other)
    assert seen["context", "before"] is None
    assert not shares_storage(seen["context"], mine)
    assert shares_storage(output, mine)
    assert torch.equal(output, torch.full((2, 3), 2.0))


def test_the_wrappers_are_transparent_to_torch_compile(run, monkeypatch):
    """Traced whole, without a graph break, and as the engine's own function: the buffer stays out of the graph."""

    class Layer(torch.nn.Module):
        def forward(self, positions, hidden_states, forward_batch, residual):
            return run(Dispatched(hidden_states), 2)

    monkeypatch.setattr(Layer, "forward", lend._make_layer_forward(Layer.forward, torch.compiler.is_compiling))
    layer = Layer()
    setattr(layer, lend._OFFERS, True)
    hidden, residual = torch.ones(2, 3), torch.zeros(2, 3)
    eager = layer(None, hidden.clone(), None, residual)
    monkeypatch.setattr(handoff, "fits", lambda *args, **kwargs: pytest.fail("asked for a buffer while tracing"))
    monkeypatch.setattr(lend, "may_offer", lambda *args: pytest.fail("offered a buffer while tracing"))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(None, hidden, None, residual), eager)
    assert torch.equal(hidden, torch.ones(2, 3))


class ModelOptNvFp4FusedMoEMethod:
    def __init__(self, trtllm):
        self.enable_flashinfer_trtllm_moe = trtllm


def test_layers_that_offer_are_chosen_when_the_model_is_built():
    """Neither dense layers, nor other backends, nor the first layer of a pipeline stage, whose input is not ours."""

    def layer(kind):
        method = ModelOptNvFp4FusedMoEMethod(kind == "trtllm")
        experts = {} if kind == "dense" else {"experts": SimpleNamespace(quant_method=method)}
        return SimpleNamespace(mlp=SimpleNamespace(**experts))

    class Model:
        def __init__(self):
            kinds = ["trtllm", "trtllm", "trtllm", "dense", "trtllm", "cutlass", "trtllm"]
            self.layers = [layer(kind) for kind in kinds]
            self.start_layer, self.end_layer = 1, 6  # this stage's; the others are place holders

    Model.__init__ = lend._make_model_init(Model.__init__)
    offers = [getattr(layer, lend._OFFERS, False) for layer in Model().layers]
    assert offers == [False, False, True, False, True, False, False]
