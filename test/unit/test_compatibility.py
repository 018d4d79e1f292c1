"""docs/compatibility.md says what doctor says on the release that is installed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import compatibility
import pytest
from sglang_moe_patches import engine

FOUND = json.loads(compatibility.FOUND.read_text())


def test_the_page_is_made_from_what_was_found():
    assert compatibility.PAGE.read_text() == compatibility.render(FOUND, compatibility.releases_in_ci())


def test_every_release_was_looked_at_and_passed_its_tests():
    assert list(FOUND) == list(compatibility.RELEASES)
    for release, facts in FOUND.items():
        assert "passed" in facts["tests"], release
        assert "failed" not in facts["tests"], release


def test_the_releases_in_ci_are_in_the_table():
    assert set(compatibility.releases_in_ci()) <= set(FOUND)


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
    changes = {change["name"]: [change["status"], change["reason"]] for change in json.loads(done.stdout)["changes"]}
    assert changes == FOUND[release]["changes"]
