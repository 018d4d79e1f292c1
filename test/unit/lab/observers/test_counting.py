"""Tests of ``lab/observers/counting.py``, which counts how often each change acts, and writes the report's sentences
about the changes."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_moe_patches.changes.moe_workspace import COLUMNS, column_slices
from sglang_moe_patches.core.dead_input import channel, counts
from sglang_moe_patches.core.patch import Count, Patcher
from sglang_moe_patches.lab.observers import counting
from sglang_moe_patches.lab.observers.events import Act, Acts, ChangeStatus, MoeInput
from sglang_moe_patches.registry import CHANGES

WORKSPACE = (ChangeStatus("moe-workspace", "applied", ""),)
RANGES = [(0, 512), (512, 1024), (1024, 1100)]
OURS = "sglang_moe_patches."


@pytest.mark.parametrize("count", {count.name: count for change in CHANGES for count in change.counts}.values())
def test_every_counted_function_of_this_package_exists(count: Count) -> None:
    """A function of this package that a change declares to be counted must exist. ``Tally`` silently skips a missing
    function, so a report would say that the change did nothing."""
    if count.module.startswith(OURS):
        assert counting.find_owner(count) is not None


def test_different_counts_have_different_names() -> None:
    counts = [count for change in CHANGES for count in change.counts]
    assert len({count.name for count in counts}) == len(set(counts))


class FusedMoE:
    """Stand-in for the engine's MoE layer. The attribute ``work`` stands for the functions of changes that run inside
    the layer."""

    def __init__(self, layer_id: int, work: Any = lambda: None) -> None:
        self.layer_id, self.work = layer_id, work

    def run_moe_core(self, dispatch_output: Any) -> Any:
        self.work()
        return dispatch_output


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, counting.LAYER[0], SimpleNamespace(FusedMoE=FusedMoE))


@pytest.fixture
def tally(engine: None, monkeypatch: pytest.MonkeyPatch, patcher: Patcher) -> counting.Tally:
    monkeypatch.setattr(column_slices, "split_columns", lambda hidden, wanted: RANGES[:wanted])
    tally = counting.Tally([COLUMNS, counts.OFFERED, counts.AS_SCRATCH, counts.AS_OUTPUT])
    tally.install(patcher)
    return tally


def dispatch_output(tokens: int, top_k: int = 8, hidden: int = 64) -> Any:
    topk = SimpleNamespace(topk_ids=torch.zeros(tokens, top_k, dtype=torch.int32))
    return SimpleNamespace(hidden_states=torch.empty(tokens, hidden, dtype=torch.bfloat16), topk_output=topk)


def test_acts_are_counted_per_layer_and_calls_without_an_amount_are_not(tally: counting.Tally) -> None:
    for layer, slices in ((1, 3), (2, 1), (1, 2)):
        FusedMoE(layer, lambda slices=slices: column_slices.split_columns(0, slices)).run_moe_core(dispatch_output(5))
    assert tally.acted.acts == (Act("columns", 1, False, times=2, most=3, total=5),)
    assert tally.acted.layers == (1, 2)


def test_a_buffer_offered_before_a_layer_counts_for_that_layer(tally: counting.Tally) -> None:
    buffer = torch.empty(5, 64)
    before = channel.replace_offer(buffer)

    def take_buffer() -> None:
        assert channel.take_scratch((5,), torch.float32, buffer.device) is not None
        assert (
            channel.take_output((5, 64), torch.float32, buffer.device) is None
        )  # ``take_scratch`` has already taken it

    FusedMoE(7, take_buffer).run_moe_core(dispatch_output(5))
    channel.replace_offer(before)
    FusedMoE(8).run_moe_core(dispatch_output(5))
    assert tally.acted.acts == (Act("offered", 7, False, 1, 1, 1), Act("as scratch", 7, False, 1, 1, 1))
    assert tally.acted.layers == (7, 8)


def test_draining_the_tally_starts_counting_from_zero(tally: counting.Tally) -> None:
    layer = FusedMoE(1, lambda: column_slices.split_columns(0, 2))
    layer.run_moe_core(dispatch_output(5))
    assert tally.drain().acts
    assert tally.acted == Acts()
    layer.run_moe_core(dispatch_output(3))
    assert tally.drain() == Acts((1,), (Act("columns", 1, False, 1, 2, 2),), MoeInput(3, 8, 64, 2))


def test_acts_during_a_graph_capture_are_counted_separately(
    tally: counting.Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FusedMoE(1, lambda: column_slices.split_columns(0, 2))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        layer.run_moe_core(dispatch_output(5))
    assert [act.captured for act in tally.acted.acts] == [True, False]
    captured = Acts(tally.acted.layers, tally.acted.acts[:1])
    assert counting.describe_actions(WORKSPACE, captured)[0].endswith("up to 2 slices, while CUDA graphs were captured")
    assert counting.describe_actions(WORKSPACE, tally.acted)[0].endswith("up to 2 slices")


def test_the_largest_input_of_all_layers_is_recorded(tally: counting.Tally) -> None:
    for tokens in (5, 70, 9):
        FusedMoE(1).run_moe_core(dispatch_output(tokens))
    FusedMoE(1).run_moe_core(dispatch_output=dispatch_output(8))  # the engine passes the argument by keyword
    FusedMoE(1).run_moe_core(SimpleNamespace(hidden_states=None))  # the output of another dispatcher has other fields
    assert tally.acted.largest == MoeInput(70, 8, 64, 2)
    assert tally.acted.largest.expert_rows_bytes == 70 * 8 * 64 * 2


def test_an_error_while_counting_ends_no_forward_pass(engine: None, patcher: Patcher) -> None:
    errors = []

    def attempt(step: Any, *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            errors.append(error)

    counting.Tally([], attempt).install(patcher)
    assert FusedMoE("no number").run_moe_core(7) == 7
    assert isinstance(errors[0], ValueError)


UNOBSERVED = """
import sys
from sglang_moe_patches import plugin
from sglang_moe_patches.core import patch
patch.apply = lambda *args: {}
plugin.activate()
print([name for name in sys.modules if name.startswith("sglang_moe_patches.lab.observers.")])
"""


def test_a_process_without_observer_imports_no_observer_module() -> None:
    process = subprocess.run([sys.executable, "-c", UNOBSERVED], capture_output=True, text=True, check=False)
    assert process.stdout == "[]\n", process.stderr


# --- Sentences for a report -------------------------------------------------------------------------------------------


def test_a_sentence_says_in_how_many_layers_a_change_acted() -> None:
    acts = (
        *(Act("columns", layer, False, 10, layer + 1, 40) for layer in (1, 2, 3)),
        Act("offered", 2, False, 9, 1, 9),
    )
    found = Acts((1, 2, 3), acts, MoeInput(16384, 8, 7168, 2))
    assert counting.describe_actions(WORKSPACE, found) == [
        "moe-workspace: ran in columns in 3 of 3 MoE layers, up to 4 slices; "
        "offered the dead input in 1 of 3 MoE layers"
    ]


def test_a_sentence_says_why_a_change_did_nothing() -> None:
    small, large = (Acts((1,), (), MoeInput(tokens, 8, 7168, 2)) for tokens in (512, 16384))
    assert counting.describe_actions(WORKSPACE, small) == [
        "moe-workspace: did nothing: no forward pass was large enough: the largest [tokens, top-k, hidden] tensor "
        "had 58.7 MB, and tensors are cut from 201.3 MB on"
    ]
    assert counting.describe_actions(WORKSPACE, large) == [
        "moe-workspace: did nothing: the largest [tokens, top-k, hidden] tensor had 1,879.0 MB, which is large enough "
        "to cut; but either a second column slice would save no memory in any layer, or no layer can be cut (the log "
        "then says why a tensor stays uncut)"
    ]


def test_a_sentence_has_the_smallest_sliced_size_of_each_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(column_slices.MOE_WORKSPACE_MB.name, "300")

    def reason(tokens: int) -> str:
        return counting.describe_actions(WORKSPACE, Acts((1,), (), MoeInput(tokens, 10, 5000, 2)))[0].partition(
            "did nothing"
        )[2]

    starts = "and tensors are cut from 75.0 MB in Triton, 100.0 MB in Marlin on"
    assert (
        reason(749)
        == f": no forward pass was large enough: the largest [tokens, top-k, hidden] tensor had 74.9 MB, {starts}"
    )
    for tokens in (750, 999):
        assert reason(tokens).startswith(": no forward pass was large enough for Marlin: the largest")
        assert reason(tokens).endswith(starts)
    assert reason(1000).startswith(": the largest [tokens, top-k, hidden] tensor had 100.0 MB, which is large enough")


def test_only_active_changes_have_sentences_and_a_shared_count_appears_once() -> None:
    statuses = (
        ChangeStatus("output-buffer", "hardened", ""),
        ChangeStatus("deferred-shared-experts", "applied", ""),
        ChangeStatus("fp4-weights", "unsupported", "of something"),
    )
    found = Acts((3, 4), (Act("offered", 4, False, 1, 1, 1), Act("defers", None, False, 2, 1, 2)))
    assert counting.describe_actions(statuses, found) == [
        "output-buffer: offered the dead input in 1 of 2 MoE layers",
        "deferred-shared-experts: ran the shared experts last 2 times",
    ]
    assert counting.describe_actions(statuses, Acts()) == []
