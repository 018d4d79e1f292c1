"""Tests that probing changes nothing, and that undoing all changes restores the stock engine."""

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
from snapshot import find_differences, take_snapshot

pytestmark = pytest.mark.every_release
PROMPTS = [[11, 7, 300, 42] * 9, list(range(40, 140))]


def install_all(patcher: patch.Patcher) -> list[str]:
    """Install all changes and their launcher hooks.

    :returns: names of the changes that have an installer on this release.
    """
    plans = {change.name: patch.probe(change) for change in CHANGES}
    for change in CHANGES:
        for module, hook in change.launcher_hooks:
            hook(importlib.import_module(module), patcher)
        if plans[change.name].install is not None:
            plans[change.name].install(patcher)
    return [name for name, plan in plans.items() if plan.install is not None]


@pytest.mark.usefixtures("engine")
def test_probing_and_undoing_all_changes_leave_every_module_and_class_unchanged():
    """Every module and class of the engine and of FlashInfer is unchanged after all changes were probed, and after they
    were installed and undone. The test compares snapshots, and does not rely on the patcher's records."""
    for change in CHANGES:
        patch.probe(change)  # probing imports engine modules, which must be in the snapshot
        for module, _ in change.launcher_hooks:
            importlib.import_module(module)
    before = take_snapshot()
    for change in CHANGES:
        patch.probe(change)
    assert find_differences(before) == []
    patcher = patch.Patcher()
    assert install_all(patcher)
    assert find_differences(before)
    patcher.undo()
    assert find_differences(before) == []


def test_undoing_all_changes_restores_the_answers(engine, checkpoint):
    path = checkpoint()
    before = engine.generate(engine.load(path), PROMPTS, 4)
    with installed(*CHANGES):
        engine.generate(engine.load(path), PROMPTS, 4)
    after = engine.generate(engine.load(path), PROMPTS, 4)
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])


def test_an_engine_whose_plugin_list_leaves_this_plugin_out_loads_no_module_of_it():
    """If ``SGLANG_PLUGINS`` does not name this package's plugin, the engine loads no module of this package. So nothing
    is patched.
    """
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
