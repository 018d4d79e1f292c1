"""docs/compatibility.md says what doctor says on the release that is installed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compatibility
import pages
import pytest
import releases
from sglang_moe_patches.core import engine
from sglang_moe_patches.registry import CHANGES

FOUND = json.loads(pages.FOUND.read_text())


def test_every_release_was_asked_and_passed_its_tests():
    assert list(FOUND) == list(releases.ALL)
    for release, facts in FOUND.items():
        assert compatibility.passed(facts["tests"]), release


def test_every_release_was_asked_about_every_change_but_those_of_the_next_version():
    """Who writes a change has the default release alone; who merges it has all of them."""
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
    assert compatibility.passed(compatibility.outcome(summary)) == passed


def test_an_outcome_says_nothing_of_tests_that_were_not_asked_for():
    summary = "11 passed, 1 skipped, 56 deselected, 3 warnings in 67.06s (0:01:07)"
    assert compatibility.outcome(summary) == "11 passed · 1 skipped"


def facts(buffer: tuple[str, str], tests: str) -> dict[str, Any]:
    return {"torch": "2", "changes": {"output-buffer": list(buffer)}, "tests": tests}


def test_what_differs_from_the_release_before_is_pointed_at():
    found = {
        "1": facts(("applied", ""), "2 passed"),
        "2": facts(("applied", ""), "2 passed"),
        "3": facts(("unsupported", "it is gone"), "1 passed"),
    }
    assert compatibility.differences("2", found) == [
        "SGLang 2, compared with 1:",
        "    output-buffer: applied (as before)",
        "    tests: 2 passed (as before)",
    ]
    assert compatibility.differences("3", found) == [
        "SGLang 3, compared with 2:",
        "  ! output-buffer: unsupported, because it is gone (was applied)",
        "  ! tests: 1 passed (before: 2 passed)",
    ]
    assert compatibility.differences("1", found)[1] == "  ! output-buffer: applied (new)"


def test_both_runs_of_a_release_are_recorded(tmp_path: Path):
    for release in releases.EVERY_TIME:
        (tmp_path / f"test-{release}.log").write_text(
            "== 1 in the log ==\n"
            "====== 5 passed, 1 skipped, 30 deselected, 2 warnings in 3.21s ======\n"
            "====== 2 failed, 7 passed in 83.21s (0:01:23) ======\n"
        )
    recorded = compatibility.record(tmp_path)
    assert list(recorded) == sorted(releases.EVERY_TIME, key=releases.ALL.index)
    assert {run["outcome"] for run in recorded.values()} == {"12 passed · 1 skipped · 2 failed"}


def test_a_release_without_a_log_is_not_recorded(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"run `make test-all` first"):
        compatibility.record(tmp_path)


@pytest.mark.every_release
def test_this_release_is_as_the_table_says():
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
    changes = {change["name"]: [change["status"], change["reason"]] for change in found["changes"]}
    assert changes == FOUND[release]["changes"]
    assert found["families"] == FOUND[release]["families"]
    assert found["out_of_place"] == FOUND[release]["out_of_place"]
    assert done.returncode == ("unsupported" in [status for status, _ in changes.values()])
