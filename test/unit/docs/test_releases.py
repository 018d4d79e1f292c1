"""Tests that the engine releases are listed only in releases.toml."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import releases

ROOT = releases.FILE.parent
SENSIBLE: dict[str, Any] = {
    "default": "2",
    "every_time": ["2", "3"],
    "all": ["1", "2", "3"],
    "overrides": {"1": ["x==4"]},
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"all": ["1", "2", "3", "2"]}, "twice in all: 2"),
        ({"default": "4", "every_time": ["4"]}, "in default, but not in all: 4"),
        ({"every_time": ["2", "4"]}, "in every_time, but not in all: 4"),
        ({"overrides": {"4": ["x"]}}, "in overrides, but not in all: 4"),
        ({"default": "1"}, "the default is not in every_time"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: dict[str, Any], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        releases.check(SENSIBLE | change)


def test_pip_installs_a_supported_engine():
    """The extra ``engine`` in pyproject.toml must have the oldest release of releases.toml as its lower bound. The
    number is repeated there, because pip cannot read releases.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["engine"] == [f"sglang>={releases.ALL[0]}"]


def test_every_release_of_test_all_has_frozen_constraints():
    for release in releases.EVERY_TIME:
        assert (ROOT / "test" / "constraints" / f"{release}.txt").exists(), release
