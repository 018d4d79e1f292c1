"""Without this package the engine is the stock engine: nothing stays behind, and not being asked changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import installed
from sglang_moe_patches import patch
from sglang_moe_patches.changes import CHANGES

PROMPTS = [[11, 7, 300, 42] * 9, list(range(40, 140))]


class Recorder(patch.Patcher):
    """A patcher that remembers what it replaced."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def add(self, owner, name, new):
        self.seen.append((owner, name, vars(owner).get(name)))
        super().add(owner, name, new)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_taking_a_change_back_leaves_the_engines_own_objects(engine, change):
    plan = patch.look(change)
    if plan.install is None:
        pytest.skip(f"{change.name} installs nothing on this engine release")
    recorder = Recorder()
    plan.install(recorder)
    assert recorder.seen
    assert all(vars(owner)[name] is not original for owner, name, original in recorder.seen)
    recorder.undo()
    assert all(vars(owner).get(name) is original for owner, name, original in recorder.seen)


def test_answers_after_removal_are_those_before(engine, checkpoint):
    path = checkpoint()
    before = engine.generate(engine.load(path), PROMPTS, 4)
    with installed(*CHANGES):
        engine.generate(engine.load(path), PROMPTS, 4)
    after = engine.generate(engine.load(path), PROMPTS, 4)
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])


def test_an_engine_that_is_told_to_leave_us_out_loads_nothing_of_ours():
    code = (
        "import sys; from sglang.srt.plugins import load_plugins; load_plugins(); "
        "import sglang.srt.model_executor.model_runner as m; "
        "print([n for n in sys.modules if n.startswith('sglang_moe_patches')], m.ModelRunner.__init__.__module__)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_MOE_PATCHES")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "SGLANG_PLUGINS": "somebody_else"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().splitlines()[-1] == "[] sglang.srt.model_executor.model_runner", done.stderr[-2000:]
