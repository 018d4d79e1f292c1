"""Tests of the functions that probe the engine: ``core/engine.py``."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.engine import Unsupported


def copy_into_module(function, name):
    """Return a copy of ``function`` that seems to be defined in the module ``name``."""
    return types.FunctionType(function.__code__, {**function.__globals__, "__name__": name})


def template(hidden_states, residual=None):
    layers = list(range(3))
    hidden_states.mark = residual
    return layers, hidden_states.shape


def wrap_by(name, function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    moved = types.FunctionType(wrapper.__code__, {"__name__": name}, closure=wrapper.__closure__)
    return functools.wraps(function)(moved)


@pytest.fixture
def module():
    new_module: Any = types.ModuleType("sglang.srt.made_up")
    new_module.run = copy_into_module(template, "sglang.srt.made_up")
    new_module.Layer = type("Layer", (), {"__module__": "sglang.srt.made_up", "forward": new_module.run})
    return new_module


def test_a_missing_module_or_attribute_is_named(module):
    with pytest.raises(Unsupported, match=r"sglang\.srt\.made_up has no walk"):
        engine.require_unpatched(module, "walk")
    with pytest.raises(Unsupported, match="Layer has no backward"):
        engine.get(module.Layer, "backward")
    with pytest.raises(Unsupported, match=r"the engine has no sglang_moe_patches\.a or sglang_moe_patches\.b"):
        engine.import_module("sglang_moe_patches.a", "sglang_moe_patches.b")


OURS = "sglang_moe_patches.changes.first"


@pytest.mark.parametrize(
    ("wrappers", "own"),
    [
        ([OURS, "sglang_moe_patches.changes.second"], 0),
        (["torch.utils._contextlib", "sglang.srt.utils"], 2),
        (["somebody_else.plugin"], "somebody_else.plugin"),
        (["somebody_else.plugin", OURS], "somebody_else.plugin"),
        (["sglang.srt.plugins.hook_registry", OURS], "another plugin's hook"),
    ],
    ids=["ours", "the engine's and PyTorch's", "another plugin's", "ours around it", "ours around a hook"],
)
def test_wrappers_decide_whether_a_function_is_the_engines_own(module, wrappers, own):
    """``require_unpatched`` removes this package's wrappers, keeps the wrappers of the engine and PyTorch, and raises
    an exception for a wrapper of another package.

    :param wrappers: modules whose wrappers surround the engine's function, from the innermost to the outermost.
    :param own: the expected result. A number N: ``require_unpatched`` returns the engine's function with its N
        innermost wrappers. A text: ``require_unpatched`` raises an exception. In its message, this text follows the
        words "is wrapped or replaced by".
    """
    functions = [module.run]
    for name in wrappers:
        functions.append(wrap_by(name, functions[-1]))
    module.run = functions[-1]
    if isinstance(own, int):
        assert engine.require_unpatched(module, "run") is functions[own]
    else:
        with pytest.raises(Unsupported, match=f"run is wrapped or replaced by {own}"):
            engine.require_unpatched(module, "run")


def test_a_replaced_function_is_not_the_engines_own(module):
    module.run = copy_into_module(template, "somebody_else")
    with pytest.raises(Unsupported, match="replaced by somebody_else"):
        engine.require_unpatched(module, "run")


def test_a_replaced_class_is_not_the_engines_own(module):
    module.Layer = type("Better", (module.Layer,), {"__module__": "somebody_else"})
    with pytest.raises(Unsupported, match=r"made_up.Layer is replaced by somebody_else.Better"):
        engine.require_unpatched(module, "Layer")


def test_mentions_reads_inner_functions_and_decorated_functions(module):
    for function in (module.run, wrap_by("sglang.srt.utils", module.run)):
        assert engine.mentions(function, "hidden_states", "mark", "range", "layers", "shape")
        assert not engine.mentions(function, "hidden_states", "nothing_of_the_kind")
    assert engine.mentions(lambda: (lambda: template.deep)(), "deep")  # type: ignore[attr-defined]
    assert not engine.mentions(None, "mark")
    with pytest.raises(Unsupported, match="template does not use nothing"):
        engine.require_mentions(template, "mark", "nothing")


def test_sets_attribute_ignores_reads():
    assert engine.sets_attribute(template, "mark")
    assert not engine.sets_attribute(template, "shape")


def test_require_parameters_checks_the_first_or_all_parameters():
    engine.require_parameters(template, ["hidden_states"])
    with pytest.raises(Unsupported, match=r", expected \(hidden_states\)$"):
        engine.require_parameters(template, ["hidden_states"], exactly=True)
    with pytest.raises(Unsupported, match=r"template takes \(hidden_states, residual\), expected \(residual, \.\.\.\)"):
        engine.require_parameters(template, ["residual"])
