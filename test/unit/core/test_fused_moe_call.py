"""Tests of the wrapper around the engine's fused-MoE function: which function receives a call, and how a change is
undone."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from sglang_moe_patches.core import engine, fused_moe_call
from sglang_moe_patches.core.patch import Patcher

CALL = ("hidden", "w1", "w2", "weights", "ids")


def engine_fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, config=None, *, inplace, hooks=None):
    return "the engine's", hidden_states, w1, w2, topk_weights, topk_ids, config, inplace, hooks


@pytest.fixture
def module(monkeypatch):
    module = ModuleType(fused_moe_call.MODULE)
    setattr(module, fused_moe_call.NAME, engine_fused_moe)
    monkeypatch.setattr(engine, "import_module", lambda name: module)
    return module


def make_route(name, accepts=lambda how: True):
    def replacement(*args, **kwargs):
        return name, *engine_fused_moe(*args, **kwargs)[1:]

    return lambda hidden_states, topk_ids, how: replacement if accepts(how) else None


IN_PLACE = make_route("in place", lambda how: how["inplace"])
HOOKED = make_route("hooked", lambda how: how.get("hooks"))
FIRST = {IN_PLACE: True, HOOKED: False}
"""The two routes of the tests. A route is a change's function that decides whether to replace a call of the fused-MoE
function. Each route maps to the value of ``first`` with which a test adds the route (``add_route``). The wrapper
asks a route with ``first=True`` before the routes that were added earlier."""


def find_answerer(module, **how):
    name, *operands = getattr(module, fused_moe_call.NAME)(*CALL, 7, **how)
    assert operands == [*CALL, 7, how["inplace"], how.get("hooks")]
    return name


@pytest.mark.parametrize("order", list(itertools.permutations([IN_PLACE, HOOKED])), ids=["as given", "reversed"])
def test_two_changes_share_one_wrapper_in_any_order(module, order):
    patchers = []
    for route in order:
        patchers.append(Patcher())
        fused_moe_call.add_route(patchers[-1], route, first=FIRST[route])
    assert getattr(module, fused_moe_call.NAME).__wrapped__ is engine_fused_moe
    assert find_answerer(module, inplace=False) == "the engine's"
    assert find_answerer(module, inplace=True) == "in place"
    assert find_answerer(module, inplace=True, hooks="hooks") == "in place"
    assert find_answerer(module, inplace=False, hooks="hooks") == "hooked"
    patchers[1].undo()
    assert find_answerer(module, inplace=True, hooks="hooks") == ("in place" if order[0] is IN_PLACE else "hooked")
    assert find_answerer(module, inplace=order[0] is HOOKED) == "the engine's"
    patchers[0].undo()
    assert getattr(module, fused_moe_call.NAME) is engine_fused_moe


def test_undoing_changes_in_another_order_leaves_no_wrapper(module):
    patchers = [Patcher(), Patcher()]
    for patcher, route in zip(patchers, FIRST, strict=True):
        fused_moe_call.add_route(patcher, route)
    for patcher in patchers:
        patcher.undo()
    assert getattr(module, fused_moe_call.NAME) is engine_fused_moe
    fused_moe_call.add_route(Patcher(), HOOKED)
    assert find_answerer(module, inplace=True) == "the engine's"


@pytest.mark.parametrize("by_place", range(6))
def test_arguments_may_be_keywords(module, by_place):
    fused_moe_call.add_route(Patcher(), IN_PLACE)
    names = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "config")
    arguments = dict(zip(names, (*CALL, 7), strict=True))
    call = [arguments.pop(name) for name in names[:by_place]]
    run = getattr(module, fused_moe_call.NAME)
    assert run(*call, **arguments, inplace=True) == ("in place", *CALL, 7, True, None)
    assert run(*call, **arguments, inplace=False) == ("the engine's", *CALL, 7, False, None)


def test_no_route_is_called_while_tracing():
    """While ``torch.compile`` traces the fused-MoE function, the wrapper calls no route. (A route is a change's
    function that decides whether to replace a call.) A route may read an offered buffer from a ``ContextVar``, which
    ``torch.compile`` cannot trace.
    """

    def sequence(hidden_states, w1, w2, topk_weights, topk_ids, *, inplace):
        return hidden_states * 2

    wrapped = fused_moe_call.wrap_fused_moe(sequence, lambda *call: pytest.fail("asked while tracing"))
    compiled = torch.compile(wrapped, backend="eager", fullgraph=True)
    ones = torch.ones(2)
    assert torch.equal(compiled(ones, ones, ones, ones, ones, inplace=True), ones * 2)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("hidden_states, w1, w2, topk_weights, topk_ids, *, inplace, hooks, defer_sum=False", None),
        ("hidden_states, w1, w2, topk_ids, topk_weights, *, inplace, hooks", "takes (hidden_states, w1, w2, topk_ids"),
        (
            "hidden_states, w1, w2, topk_weights, topk_ids, *, inplace",
            "has no parameter inplace, or no parameter hooks",
        ),
        (
            "hidden_states, w1, w2, topk_weights, topk_ids, inplace, *, hooks",
            "accepts inplace as a positional argument",
        ),
        (
            "hidden_states, w1, w2, topk_weights, topk_ids, defer_sum, *, inplace, hooks",
            "accepts defer_sum as a positional argument",
        ),
    ],
)
def test_a_fused_moe_function_with_other_parameters_is_unsupported(module, monkeypatch, parameters, reason):
    monkeypatch.setattr(engine, "require_unpatched", lambda owner, name: eval(f"lambda {parameters}: None"))
    if reason is None:
        assert fused_moe_call.probe()[0] is module
    else:
        with pytest.raises(engine.Unsupported) as refused:
            fused_moe_call.probe()
        assert reason in str(refused.value)
