"""Tests of the dependencies in pyproject.toml. A server needs only wrapt, and the command line also typer and rich. All
other dependencies belong to extras."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import releases
from sglang_moe_patches import __version__

ROOT = releases.FILE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REGISTER_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({absent}))
from sglang_moe_patches import plugin
plugin.register()
"""


def import_names(requirements: list[str]) -> set[str]:
    """Return the names with which the required packages are imported."""
    return {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in requirements}


EXTRAS = {name for extra in PROJECT["optional-dependencies"].values() for name in import_names(extra)}


def register_without(absent: set[str]) -> subprocess.CompletedProcess[str]:
    script = REGISTER_WITHOUT.format(absent=sorted(absent))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_installing_the_package_adds_only_its_three_dependencies():
    assert import_names(PROJECT["dependencies"]) == {"wrapt", "typer", "rich"}


def test_a_server_needs_wrapt_alone():
    done = register_without(EXTRAS | {"typer", "rich"})
    assert done.returncode == 0, done.stderr
    assert "wrapt" in register_without({"wrapt"}).stderr


def test_the_version_is_stated_once():
    assert "version" not in PROJECT
    assert "version" in PROJECT["dynamic"]
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
