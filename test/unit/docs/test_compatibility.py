"""Tests that docs/compatibility.json agrees with the output of ``doctor`` on the installed engine release."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import compatibility
import family_scan
import pages
import pytest
import releases
from sglang_moe_patches.core import engine
from sglang_moe_patches.registry import CHANGES

FOUND = json.loads(pages.FOUND.read_text())


def test_every_release_is_recorded_and_passed_its_tests():
    assert list(FOUND) == list(releases.ALL)
    for release, facts in FOUND.items():
        assert compatibility.has_passed(facts["tests"]), release


def test_every_release_has_a_record_of_every_released_change():
    """The record of each engine release must contain all released changes. An unreleased change may be missing, because
    its author installs only the default engine release."""
    names = [change.name for change in CHANGES]
    unreleased = (pages.ROOT / "CHANGELOG.md").read_text().partition("## Unreleased")[2].partition("\n## ")[0]
    new = {name for name in names if name in unreleased}
    for release, facts in FOUND.items():
        asked = list(facts["changes"])
        assert asked == [name for name in names if name in asked], release
        assert set(names) - set(asked) <= new, release


@pytest.mark.parametrize(
    ("summary", "passed"),
    [
        ("11 passed, 1 skipped, 56 deselected in 12.34s", True),
        ("=== 1 failed, 10 passed in 12.34s ===", False),
        ("10 passed, 1 error in 12.34s", False),
        ("no tests ran in 0.01s", False),
        ("56 deselected in 0.01s", False),
        ("Extension modules: one.passed, two.passed (total: 113)", False),
        ("", False),
    ],
)
def test_a_release_passes_where_tests_ran_and_none_failed(summary: str, passed: bool):
    assert compatibility.has_passed(compatibility.shorten_summary(summary)) == passed


@pytest.mark.long("doctor imports the whole engine in a process of its own, and probes it for every change")
@pytest.mark.every_release
def test_the_record_of_this_release_is_up_to_date():
    release = engine.version()
    if release not in FOUND:
        pytest.skip(f"SGLang {release} is not in the table")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_MOE_PATCHES")}
    done = subprocess.run(
        [sys.executable, "-m", "sglang_moe_patches.cli", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    changes = {change["name"]: list(change["engine"].values()) for change in found["changes"]}
    assert changes == FOUND[release]["changes"]
    assert family_scan.scan(family_scan.models_folder()) == FOUND[release]["families"]
    assert done.returncode == ("unsupported" in [status for status, _ in changes.values()])


def test_finished_parts_of_test_all_are_recorded_and_other_parts_keep_their_record(tmp_path):
    newest = releases.EVERY_TIME[-1]
    failed = "= 2 failed, 9 passed, 1 skipped, 4 deselected in 65.01s (0:01:05) =\nmake[1]: *** [unit] Error 1\n"
    (tmp_path / f"test-{newest}-unit.log").write_text(f"collected 12 items\n{failed}")
    (tmp_path / f"test-{newest}-engine-tests.log").write_text("collected 300 items\n....")
    known = {"date": "2026-01-01", "outcome": "300 passed"}
    found = compatibility.read_test_all(tmp_path, {newest: {"engine-tests": known, "unit": known}})
    assert list(found) == sorted(releases.EVERY_TIME, key=releases.ALL.index)
    assert (found[newest]["engine-tests"], found[newest]["unit"]["outcome"]) == (
        known,
        "2 failed · 9 passed · 1 skipped",
    )
    assert (
        pages.test_all_table(found)
        .splitlines()[-1]
        .startswith(f"| {newest} | 300 passed (2026-01-01) | 2 failed · 9 passed")
    )
    with pytest.raises(SystemExit, match="has a summary"):
        compatibility.read_test_all(tmp_path / "nothing", {})
