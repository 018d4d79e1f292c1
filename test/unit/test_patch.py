"""Selecting, probing, applying and undoing changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang_moe_patches import patch
from sglang_moe_patches.patch import Change, Outcome, Patcher, PatchError, Status


class Owner:
    value = "stock"


def change(name="a", outcome=Outcome(Status.APPLIED), install=lambda patcher: None, **more):
    return Change(name, "", lambda: outcome, install, **more)


THREE = (change("one"), change("two"), change("three"))


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
def test_selected(value, expected):
    assert patch.selected(THREE, {} if value is None else {patch.SELECT_VARIABLE: value}) == expected


def test_an_unknown_name_is_an_error_that_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"SGLANG_MOE_PATCHES: unknown change 'tow'.*one, two, three"):
        patch.selected(THREE, {patch.SELECT_VARIABLE: "one,tow"})


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_strict(value, expected):
    assert patch.strict({patch.STRICT_VARIABLE: value}) is expected


def test_strict_refuses_other_values():
    with pytest.raises(ValueError, match="SGLANG_MOE_PATCHES_STRICT: expected 0 or 1, got 'yes'"):
        patch.strict({patch.STRICT_VARIABLE: "yes"})


@pytest.mark.parametrize("status", [s for s in Status if not Outcome(s).installs])
def test_only_applied_and_hardened_install(status):
    outcome = Outcome(status, "so")
    assert patch.apply([change(outcome=outcome, install=pytest.fail)], {"a"}) == {"a": outcome}


def test_an_engine_that_cannot_be_looked_at_is_unsupported():
    def probe():
        raise AttributeError("no seam")

    broken = Change("a", "", probe, lambda patcher: pytest.fail("installed"))
    outcome = patch.apply([broken], {"a"})["a"]
    assert outcome.status is Status.UNSUPPORTED
    assert "AttributeError: no seam" in outcome.reason


def test_not_selected_and_not_needed_are_told_apart():
    needless = change(needed=lambda server_args: f"backend is {server_args.backend}", install=pytest.fail)
    assert patch.apply([needless], set())["a"].status is Status.NOT_SELECTED
    outcome = patch.apply([needless], {"a"}, SimpleNamespace(backend="triton"))["a"]
    assert outcome == Outcome(Status.NOT_NEEDED, "backend is triton")


def test_an_installation_that_fails_half_way_is_undone():
    def install(patcher):
        patcher.replace(Owner, "value", "patched")
        patcher.replace(Owner, "missing", "patched")

    with pytest.raises(PatchError, match="a: installing failed and was undone"):
        patch.apply([change(install=install)], {"a"})
    assert Owner.value == "stock"


def test_undo_restores_what_was_there_in_reverse():
    patcher = Patcher()
    patcher.wrap(Owner, "value", lambda original: original + "+")
    patcher.wrap(Owner, "value", lambda original: original + "+")
    assert Owner.value == "stock++"
    patcher.undo()
    assert Owner.value == "stock"


@pytest.mark.parametrize(
    ("server", "needed"),
    [
        ({"moe_runner_backend": "flashinfer_trtllm"}, True),
        ({"moe_runner_backend": "auto"}, True),
        ({"moe_runner_backend": "triton"}, False),
        # Without speculation the engine may still name a backend for the draft model.
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
def test_a_runner_is_reached_by_the_model_or_by_its_draft_model(server, needed):
    reason = patch.runner_needed("flashinfer_trtllm", "flashinfer_trtllm_routed")(SimpleNamespace(**server))
    assert (reason is None) == needed
    assert needed or "triton" in reason
