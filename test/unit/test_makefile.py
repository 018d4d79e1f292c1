"""Tests of the Makefile: installing a release without a constraints file, and the output of ``make test-releases``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import releases

ROOT = releases.FILE.parent
UNKNOWN = "99.9"


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``make``, and return the finished process. It does not get the variables that an outer ``make`` exports."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ENGINE")}
    command = ["make", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["env", "constraints"])
def test_a_release_without_a_constraints_file_can_be_installed(target: str):
    done = run_make("-n", target, f"ENGINE={UNKNOWN}")
    assert done.returncode == 0, done.stderr
    assert f'"sglang=={UNKNOWN}"' in done.stdout
    assert "--constraint " not in done.stdout
    assert f"releases.py overrides {UNKNOWN} > .venvs/{UNKNOWN}/overrides.txt" in done.stdout
    assert f"--override .venvs/{UNKNOWN}/overrides.txt" in done.stdout


def test_logs_of_parallel_releases_are_shown_one_after_another_and_a_failure_fails(tmp_path: Path):
    """``make test-releases`` tests several releases at once. It must print the log of each release in one piece, and
    fail if a release fails. Instead of the tests, it runs a script here. The script prints two lines with a pause
    between them, and fails on one release."""
    tests, failing = tmp_path / "tests", releases.EVERY_TIME[-1]
    tests.write_text(
        f"#!/bin/sh\nfor word; do case $word in ENGINE=*) release=${{word#ENGINE=}};; esac; done\n"
        f'echo "begin $release"; sleep 0.2; echo "=== 1 passed on $release in 0.2s ==="; [ $release != {failing} ]\n'
    )
    tests.chmod(0o755)
    done = run_make("test-releases", f"MAKE={tests}", f"UV={sys.executable}", f"LOGS={tmp_path / 'logs'}", "JOBS=3")
    others = [release for release in reversed(releases.EVERY_TIME) if release != releases.DEFAULT]
    shown = [line for line in done.stdout.splitlines() if "started" not in line]
    assert shown == [
        line
        for release in others
        # Three calls for each release: engine tests, environment and unit tests.
        for line in (f"== SGLang {release}", *3 * (f"begin {release}", f"=== 1 passed on {release} in 0.2s ==="))
    ]
    assert done.returncode
    passing = run_make("test-releases", "MAKE=true", f"UV={sys.executable}", f"LOGS={tmp_path / 'logs'}")
    assert passing.returncode == 0, passing.stderr
