"""Without this package the engine is the stock engine: nothing stays behind, and not being asked changes nothing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch
from conftest import installed
from sglang_moe_patches.core import patch
from sglang_moe_patches.registry import CHANGES
from snapshot import contents, differences

pytestmark = pytest.mark.every_release
PROMPTS = [[11, 7, 300, 42] * 9, list(range(40, 140))]


def install_all(patcher: patch.Patcher) -> list[str]:
    """All changes, with what they do in the launcher: the names of those that install anything on this release."""
    plans = {change.name: patch.probe(change) for change in CHANGES}
    for change in CHANGES:
        for module, hook in change.launcher_hooks:
            hook(importlib.import_module(module), patcher)
        if plans[change.name].install is not None:
            plans[change.name].install(patcher)
    return [name for name, plan in plans.items() if plan.install is not None]


@pytest.mark.usefixtures("engine")
def test_probing_and_undoing_all_changes_leave_every_module_and_class_unchanged():
    """Not only what the patcher remembers: everything that the engine and FlashInfer hold, name by name."""
    for change in CHANGES:
        patch.probe(change)  # imports what it looks at
        for module, _ in change.launcher_hooks:
            importlib.import_module(module)
    before = contents()
    for change in CHANGES:
        patch.probe(change)
    assert differences(before) == []
    patcher = patch.Patcher()
    assert install_all(patcher)
    assert differences(before)
    patcher.undo()
    assert differences(before) == []


def test_undoing_all_changes_restores_the_answers(engine, checkpoint):
    path = checkpoint()
    before = engine.generate(engine.load(path), PROMPTS, 4)
    with installed(*CHANGES):
        engine.generate(engine.load(path), PROMPTS, 4)
    after = engine.generate(engine.load(path), PROMPTS, 4)
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])


def test_an_engine_whose_plugin_list_leaves_this_plugin_out_loads_no_module_of_it():
    """Whatever patches the engine later on is ours, and would be loaded by then."""
    code = (
        "import sys; from sglang.srt.plugins import load_plugins; load_plugins(); "
        "print([n for n in sys.modules if n.startswith('sglang_moe_patches')])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_MOE_PATCHES")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "SGLANG_PLUGINS": "somebody_else"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr[-2000:]
