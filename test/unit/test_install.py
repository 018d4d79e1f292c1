"""What pyproject.toml promises: serving needs wrapt, the command line typer and rich, and the rest are extras."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
import releases
from sglang_moe_patches import __version__

ROOT = releases.FILE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
{code}
"""


def names(requirements: list[str]) -> set[str]:
    """The packages that are required; each is imported by its own name."""
    return {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in requirements}


EXTRAS = {name for extra in PROJECT["optional-dependencies"].values() for name in names(extra)}


def run_without(absent: set[str], code: str) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(absent=sorted(absent), code=code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_nothing_but_these_three_is_installed_with_us():
    assert names(PROJECT["dependencies"]) == {"wrapt", "typer", "rich"}


def test_a_server_needs_wrapt_alone():
    done = run_without(EXTRAS | {"typer", "rich"}, "from sglang_moe_patches import plugin; plugin.register()")
    assert done.returncode == 0, done.stderr
    assert "wrapt" in run_without({"wrapt"}, "from sglang_moe_patches import plugin; plugin.register()").stderr


@pytest.mark.parametrize("arguments", [["--version"], ["regress", "--help"]])
def test_the_command_starts_without_any_extra(arguments: list[str]):
    code = f"sys.argv[1:] = {arguments}; from sglang_moe_patches.cli import main; main()"
    done = run_without(EXTRAS, code)
    assert done.returncode == 0, done.stderr


def test_the_version_is_stated_once():
    assert "version" not in PROJECT
    assert "version" in PROJECT["dynamic"]
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
