"""Tests that the package's child processes import no module from the user's current folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sglang_moe_patches.core import patch
from sglang_moe_patches.lab import doctor, without_gpu
from sglang_moe_patches.lab.predict import engine_query
from sglang_moe_patches.lab.servers.supervisor import Supervised

STRAY = "raise ImportError('stray module')"


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder of the test. It contains modules with the names of ``json``, ``torch`` and others. Each of these
    modules raises an exception when it is imported."""
    for name in ("json", "signal", "torch", "triton"):
        (tmp_path / f"{name}.py").write_text(STRAY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_query_imports_no_module_from_the_users_folder():
    """The child process that asks the engine must ignore the modules in the user's folder. In this test, the query is
    not valid JSON, so the child process ends before it imports the engine."""
    process = engine_query.run_query("no JSON", dict(os.environ))
    assert "JSONDecodeError" in process.stderr
    assert "stray module" not in process.stderr


def test_doctor_imports_no_module_from_the_users_folder(monkeypatch):
    """The child process in which ``doctor`` examines the changes must ignore the modules in the user's folder. With
    ``SGLANG_MOE_PATCHES=none`` no change is selected, so the child process does not import the engine."""
    monkeypatch.setenv(patch.SELECT_VARIABLE, "none")
    monkeypatch.setattr(without_gpu, "variables", lambda environment: {})
    assert {change["status"] for change in doctor.examine()["changes"]} == {"not selected"}


def test_a_supervisor_imports_no_module_from_the_users_folder(user_folder: Path):
    log_path = user_folder / "log"
    with log_path.open("wb") as log:
        supervised = Supervised(["true"], dict(os.environ), log)
    try:
        while supervised.exit_code() is None:
            time.sleep(0.01)
    finally:
        supervised.end()
    assert (supervised.exit_code(), log_path.read_text()) == (0, "")
