"""Tests of ``lab/predict/unused_imports.py``. ``doctor`` first asks the engine in a process in which some slow packages
are replaced by stand-ins. If this query finds no layer, refuses the model or fails, the query is repeated with all
packages."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
from sglang_moe_patches.lab.predict import engine_query, unused_imports


@pytest.fixture
def replaced_packages(monkeypatch):
    """Replace the package ``xmlrpc`` by a stand-in during the test. The list of packages to replace also names the
    package ``no_such_package``. This package is not installed, so it must get no stand-in."""
    monkeypatch.setattr(unused_imports, "UNUSED", ("xmlrpc", "no_such_package"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.split(".")[0] == "xmlrpc"]:
        del sys.modules[name]
    unused_imports.replace_packages()
    yield
    sys.modules.clear()
    sys.modules.update(before)


def test_a_replaced_package_has_every_attribute_and_a_missing_package_stays_missing(replaced_packages):
    module: Any = importlib.import_module("xmlrpc.anything")
    decorate = module.decorate
    mine = type("Mine", (module.Base,), {"__annotations__": {"field": module.Anything | None}}, option=1)

    @decorate(option=1)
    def function():
        return 5

    assert function() == 5
    assert isinstance(decorate(5), decorate)
    assert mine(1, b=2).attribute.another
    assert importlib.util.find_spec("xmlrpc")
    assert importlib.util.find_spec("no_such_package") is None
    with pytest.raises(ImportError):
        importlib.import_module("no_such_package")


def test_an_already_imported_package_is_not_replaced(monkeypatch):
    monkeypatch.setattr(unused_imports, "UNUSED", ("json",))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    unused_imports.replace_packages()
    assert importlib.import_module("json.decoder").JSONDecoder is json.JSONDecoder


LAYER, NO_LAYER = {"layer": {"runner": "triton"}}, {"layer": None, "unknown": "TypeError"}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param([LAYER], LAYER, id="an answer is taken"),
        pytest.param([NO_LAYER, LAYER], LAYER, id="without a layer it is asked again with every package"),
        pytest.param([NO_LAYER, NO_LAYER], NO_LAYER, id="and then believed"),
        pytest.param([None, LAYER], LAYER, id="so is a query that failed"),
        pytest.param([{"model_refused": "no class"}, LAYER], LAYER, id="and one that refused the model"),
        pytest.param([None, None], engine_query.CannotAsk, id="unless both did"),
        pytest.param([{"refused": "--tp 0"}], engine_query.Refused, id="what refuses the arguments is believed"),
        pytest.param(
            [{"model_refused": "x"}, {"model_refused": "x"}],
            engine_query.ModelRefused,
            id="or both do",
        ),
    ],
)
def test_a_query_that_may_need_an_unused_package_is_repeated_with_all_packages(answers, expected, monkeypatch):
    asked = []

    def run_query(question, environ):
        asked.append(json.loads(question)["leave_out_unused"])
        answer = answers[len(asked) - 1]
        return subprocess.CompletedProcess([], answer is None, "" if answer is None else json.dumps(answer), "Error: x")

    monkeypatch.setattr(engine_query, "run_query", run_query)
    if isinstance(expected, type):
        with pytest.raises(expected) as caught:
            engine_query.ask("m", [], "h200", {})
        assert type(caught.value) is expected
    else:
        assert engine_query.ask("m", [], "h200", {}) == expected
    assert asked == [True, False][: len(answers)]
