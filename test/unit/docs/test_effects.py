"""What each change does to a part of a layer, as the table of families says it."""

from __future__ import annotations

import pytest
from effects import ATTENTION, EFFECTS, Layer, effect
from sglang_moe_patches.core import runners
from sglang_moe_patches.core.dead_input.families import DEEPSEEK
from sglang_moe_patches.core.patch import ACTIVE, Status
from sglang_moe_patches.registry import CHANGES

PARTS = (*runners.TRTLLM, runners.CUTEDSL, *runners.OUT_OF_PLACE, ATTENTION)


def test_every_name_in_the_table_is_that_of_a_change_which_does_something():
    assert set(EFFECTS) <= {change.name for change in CHANGES}
    layers = [Layer(DEEPSEEK, shared, part) for shared in (False, True) for part in PARTS]
    for name in EFFECTS:
        assert any(effect(name, layer, Status.APPLIED) for layer in layers), name


@pytest.mark.parametrize("status", [*(status for status in Status if status not in ACTIVE), "not asked", ""])
def test_a_change_that_installs_nothing_has_no_effect(status: str):
    assert {effect(name, Layer(DEEPSEEK, True, part), status) for name in EFFECTS for part in PARTS} == {""}


def test_the_engine_drops_attentions_inputs_itself_where_output_buffer_is_hardened():
    told = {status: effect("output-buffer", Layer(DEEPSEEK, True, ATTENTION), status) for status in ACTIVE}
    assert told == {Status.APPLIED: "dropped", Status.EXTENDED: "", Status.HARDENED: ""}
