"""Tests of ``core/patch.py``: selecting, probing, applying and undoing changes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang_moe_patches.core import engine, patch, runners
from sglang_moe_patches.core.patch import Change, Patcher, PatchError, Plan, Skip, Status
from sglang_moe_patches.core.variables import RETIRED_VARIABLES, STRICT, Variable, parse_zero_or_one
from sglang_moe_patches.registry import CHANGES


class Owner:
    value = "stock"


def make_change(name="a", plan=Plan.applied(lambda patcher: None), **more):
    return Change(name, "", lambda: plan, **more)


THREE_CHANGES = (make_change("one"), make_change("two"), make_change("three"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {"one", "two", "three"}),
        ("", {"one", "two", "three"}),
        ("all", {"one", "two", "three"}),
        ("none", set()),
        ("two", {"two"}),
        (" three, one ,", {"one", "three"}),
    ],
)
def test_the_variable_selects_all_changes_none_or_the_named_ones(value, expected):
    assert patch.read_selected_names(THREE_CHANGES, {} if value is None else {patch.SELECT_VARIABLE: value}) == expected


def raise_for_cpu_server(server_args):
    raise engine.Unsupported("A_VARIABLE=on, but --device is cpu")


def probe_that_raises():
    raise AttributeError("no hook point")


@pytest.mark.parametrize(
    ("probe", "plan"),
    [
        *(
            (lambda plan=plan: plan, plan)
            for plan in (Plan(Status.NATIVE, "a"), Plan.not_needed("a"), Plan.unsupported("a"))
        ),
        (lambda: engine.get(Owner, "hook_point"), Plan.unsupported("Owner has no hook_point")),
        (
            probe_that_raises,
            Plan.unsupported("probing the engine failed: AttributeError: no hook point"),
        ),
    ],
)
def test_a_plan_without_installer_is_reported_and_an_unexpected_engine_is_unsupported(probe, plan):
    assert patch.apply([Change("a", "", probe)], {"a"}) == {"a": plan}


@pytest.mark.parametrize(
    ("selected", "skip", "plan"),
    [
        ({"b"}, pytest.fail, Plan(Status.NOT_SELECTED)),
        (
            {"a", "b"},
            lambda server_args: Skip(f"backend is {server_args.backend}"),
            Plan.not_needed("backend is triton"),
        ),
        (
            {"a", "b"},
            lambda server_args: Skip("A_VARIABLE is unset", can_be_enabled=True),
            Plan(Status.OFF, "A_VARIABLE is unset"),
        ),
        ({"a", "b"}, raise_for_cpu_server, Plan.unsupported("A_VARIABLE=on, but --device is cpu")),
        (
            {"a", "b"},
            lambda server_args: server_args.renamed,
            Plan.unsupported(
                "this server's arguments could not be read: AttributeError: "
                "'types.SimpleNamespace' object has no attribute 'renamed'"
            ),
        ),
    ],
    ids=["not selected", "not needed", "off", "enabled on a CPU server", "arguments not as expected"],
)
def test_a_skipped_change_has_its_reason_and_is_not_probed(selected, skip, plan):
    skipped = Change("a", "", pytest.fail, skip=skip)
    plans = patch.apply([skipped, make_change("b")], selected, SimpleNamespace(backend="triton"))
    assert plans["a"] == plan
    assert plans["b"].status is Status.APPLIED


def test_a_failed_optional_patch_is_logged_once_and_ends_only_a_strict_server(monkeypatch, caplog):
    for _ in range(2):
        with patch.best_effort("patching a layer"):
            raise AttributeError("no runner")
    assert [record.message for record in caplog.records] == [
        "sglang-moe-patches: patching a layer failed and is skipped: AttributeError: no runner"
    ]
    monkeypatch.setenv(STRICT.name, "1")
    with pytest.raises(PatchError, match="patching a layer failed: "), patch.best_effort("patching a layer"):
        raise AttributeError("no runner")


def test_a_failed_installation_is_undone_and_unsupported():
    def install(patcher):
        patcher.replace(Owner, "value", "patched")
        patcher.replace(Owner, "missing", "patched")

    plan = patch.apply([make_change(plan=Plan.applied(install))], {"a"})["a"]
    assert plan.status is Status.UNSUPPORTED
    assert "installing failed and was undone: AttributeError" in plan.reason
    assert Owner.value == "stock"


# --- Variables -------------------------------------------------------------------------------------------------------


SWITCH = Variable("A_SWITCH", "on or off", parse_zero_or_one, default="0")


def test_an_invalid_value_is_refused_only_if_its_change_is_selected():
    reads = make_change(variables=(SWITCH,))
    with pytest.raises(ValueError, match="A_SWITCH: expected 0 or 1, got 'on'"):
        patch.check_environment([reads], {"A_SWITCH": "on"})
    patch.check_environment([reads], {"A_SWITCH": "on", patch.SELECT_VARIABLE: "none"})
    patch.check_environment([reads], {"A_SWITCH": " 1 "})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "SGLANG_MOE_PATCHES_KV_RECORD",
            r"^SGLANG_MOE_PATCHES_KV_RECORD: removed, .* set the --mem-fraction-static",
        ),
        (
            "SGLANG_MOE_PATCHES_MAX_MOE_TOKENS",
            r"^SGLANG_MOE_PATCHES_MAX_MOE_TOKENS: removed; .* set --chunked-prefill-size",
        ),
    ],
)
def test_a_retired_variable_is_refused_with_its_replacement_if_its_change_is_selected(name, message):
    with pytest.raises(ValueError, match=message):
        patch.check_environment(CHANGES, {name: "4096"})
    patch.check_environment(CHANGES, {name: "4096", patch.SELECT_VARIABLE: "none"})
    patch.check_environment(CHANGES, {name: ""})


def test_every_variable_named_in_the_code_is_listed():
    package = Path(patch.__file__).parents[1]
    named = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"\b(SGLANG_MOE_PATCHES(?:_[A-Z]+)*)\b", file.read_text())
    }
    read = {v.name for _, v in patch.list_variables(CHANGES) if v.name.startswith(patch.SELECT_VARIABLE)}
    assert named == read | set(RETIRED_VARIABLES)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SGLANG_MOE_PATCHES_STRIKT", ["; did you mean SGLANG_MOE_PATCHES_STRICT?"]),
        ("SGLANG_MOE_PATCH", ["; did you mean SGLANG_MOE_PATCHES?"]),
        ("SGLANG_MOE_PATCHES_SOMETHING_ELSE_ALTOGETHER", [""]),
        ("SGLANG_MOE_PATCHES_STRICT", None),
        ("SGLANG_MOE_PADDING", None),
    ],
)
def test_an_unread_variable_with_our_prefix_is_reported(name, words):
    warnings = [f"{name} is set, but no code reads it{hint}" for hint in words or ()]
    assert patch.describe_unread_variables(CHANGES, {name: "1"}) == warnings


# --- The patcher -----------------------------------------------------------------------------------------------------


class Heir(Owner):
    pass


def test_an_inherited_attribute_is_replaced_on_the_subclass_alone():
    patcher = Patcher()
    patcher.wrap(Heir, "value", lambda original: original + "+")
    assert (Heir.value, Owner.value) == ("stock+", "stock")
    patcher.undo()
    assert "value" not in vars(Heir)


def test_undo_restores_attributes_in_reverse_order_and_removes_added_ones():
    patcher = Patcher()
    patcher.wrap(Owner, "value", lambda original: original + "+")
    patcher.wrap(Owner, "value", lambda original: original + "+")
    patcher.add(Owner, "added", 1)
    assert (Owner.value, vars(Owner)["added"]) == ("stock++", 1)
    patcher.undo()
    assert Owner.value == "stock"
    assert not hasattr(Owner, "added")


@pytest.mark.parametrize(
    ("server", "needed"),
    [
        ({"moe_runner_backend": "flashinfer_trtllm"}, True),
        ({"moe_runner_backend": "experimental_sgl_trtllm"}, True),
        ({"moe_runner_backend": "auto"}, True),
        ({"moe_runner_backend": "triton"}, False),
        # The engine may name a backend for the draft model even if it has no draft model.
        ({"moe_runner_backend": "triton", "speculative_moe_runner_backend": "auto"}, False),
        (
            {
                "moe_runner_backend": "triton",
                "speculative_algorithm": "EAGLE",
                "speculative_moe_runner_backend": "flashinfer_trtllm",
            },
            True,
        ),
        ({"moe_runner_backend": "triton", "speculative_algorithm": "EAGLE"}, False),
    ],
)
def test_a_change_is_needed_if_the_model_or_its_draft_model_uses_its_runner(server, needed):
    skip = runners.skip_unless_runner(*runners.TRTLLM)(SimpleNamespace(**server))
    assert (skip is None) == needed
    assert needed or "triton" in skip.reason
