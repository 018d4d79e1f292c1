"""The recipes of docs/development, done: a toy in a copy of the repository, by the files of a recipe's table alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from filecmp import cmp
from pathlib import Path

import pytest
from releases import ALL, DEFAULT, ROOT

Write = Callable[[str], str]
"""What a file becomes, of what it was; "" for one that was not there."""
GENERATED = "generated: "
COPIED = ("python", "test", "docs")
"""Folders that the recipes are about."""


def table(recipe: str) -> dict[str, str]:
    """The files of a recipe, by the name of its page, and what goes into each."""
    rows = (
        (ROOT / "docs" / "development" / f"{recipe}.md")
        .read_text()
        .partition("| file | what goes there |\n| --- | --- |\n")[2]
        .partition("\n\n")[0]
        .splitlines()
    )
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {file: what for names, what in cells for file in re.findall(r"`([^`]+)`", names)}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the recipes are about; the rest is linked."""
    root = tmp_path / "copy"
    root.mkdir()
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in (*ROOT.glob("*.md"), ROOT / "releases.toml", ROOT / "pyproject.toml"):
        shutil.copy(file, root)
    for name in ("benchmark", "LICENSE", "Makefile"):
        (root / name).symlink_to(ROOT / name)
    return root


def python(copy: Path, *arguments: str) -> str:
    """Run in the copy; its output.

    :raises AssertionError: it fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**environment, "PYTHONPATH": str(copy / "python"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def follow(copy: Path, files: dict[str, str], toy: dict[str, Write]) -> None:
    """Write each file of the recipe, and have the generated ones made."""
    written = [file for file, what in files.items() if not what.startswith(GENERATED) or file in toy]
    assert set(written) == set(toy)
    for file in written:
        path = copy / file
        before = path.read_text() if path.exists() else ""
        path.write_text(toy[file](before))
        assert path.read_text() != before, file
    python(copy, "test/tools/pages.py")


def changed(copy: Path) -> set[str]:
    """The files that are not as in the repository."""
    everything = [*copy.glob("*"), *(path for name in COPIED for path in (copy / name).rglob("*"))]
    files = [path.relative_to(copy) for path in everything if path.is_file()]
    known = {file for file in files if (ROOT / file).exists()}
    return {str(file) for file in files if file not in known or not cmp(ROOT / file, copy / file, shallow=False)}


def run_tests(copy: Path, *arguments: str) -> None:
    """Run the tests of the copy, but for what asks the engine.

    :raises AssertionError: one fails.
    """
    found = python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not every_release", *arguments)
    assert re.search(r"\d+ passed", found), found


# --- A change --------------------------------------------------------------------------------------------------------

MODULE = '''"""toy-change: nothing.

Why
    To see whether the recipe is complete.
"""

from __future__ import annotations

from sglang_moe_patches.core.patch import Change, Plan
from sglang_moe_patches.core.variables import Variable, zero_or_one

CHANGE = Change(
    name="toy-change",
    summary="nothing",
    plan=lambda: Plan.native("there is nothing to do"),
    variables=(Variable("SGLANG_MOE_PATCHES_TOY", "1: nothing", zero_or_one, "0"),),
)
'''
UNIT_TEST = """from sglang_moe_patches.core import patch
from sglang_moe_patches.registry import CHANGES


def test_it_is_selected_by_its_name():
    assert patch.selected(CHANGES, {patch.SELECT_VARIABLE: "toy-change"}) == {"toy-change"}
"""
ENGINE_TEST = "def test_nothing_changes(engine):\n    assert engine\n"


def asked(found: str) -> str:
    """docs/compatibility.json after ``compatibility.py --doctor`` on the default release."""
    facts = json.loads(found)
    facts[DEFAULT]["changes"]["toy-change"] = ["native", "there is nothing to do"]
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def unreleased(changelog: str) -> str:
    return changelog.replace("## Unreleased\n", "## Unreleased\n\n### Added\n\n- toy-change, which does nothing.\n", 1)


CHANGE: dict[str, Write] = {
    "python/sglang_moe_patches/changes/<name>.py": lambda old: MODULE,
    "python/sglang_moe_patches/registry.py": lambda old: (
        old.replace("    output_buffer,\n", "    output_buffer,\n    toy_change,\n", 1)
        .replace("\n)\n", "\n    toy_change.CHANGE,\n)\n")
        .replace("toy_change,\n    toy_change.CHANGE", "toy_change")
    ),
    "test/unit/changes/test_<name>.py": lambda old: UNIT_TEST,
    "test/engine/changes/test_<name>.py": lambda old: ENGINE_TEST,
    "docs/development/guards.md": lambda old: old.rstrip() + "\n| Nothing | `test_nothing_changes` | |\n",
    "docs/development/new-release.md": lambda old: old.replace("\n| families |", "\n| toy-change | | |\n| families |"),
    "docs/changes/<name-with-hyphens>.md": lambda old: "# toy-change\n\nIt does nothing.\n",
    "CHANGELOG.md": unreleased,
    "docs/compatibility.json": asked,
}


def named(text: str) -> str:
    return text.replace("<name>", "toy_change").replace("<name-with-hyphens>", "toy-change")


@pytest.mark.parametrize("forgotten", [None, "docs/development/guards.md", "CHANGELOG.md"])
def test_a_toy_change_takes_the_files_of_the_recipe_and_no_others(copy: Path, forgotten: str | None):
    files = {named(file): what for file, what in table("new-change").items()}
    follow(copy, files, {named(file): write for file, write in CHANGE.items()})
    assert changed(copy) == set(files)
    for file in ("README.md", "docs/compatibility.md"):
        assert "toy-change" in (copy / file).read_text(), file
    looping = [f"test/unit/docs/test_{name}.py" for name in ("docs", "guards", "compatibility", "releases")]
    selected = [*looping, "test/unit/core/test_patch.py", "test/unit/changes/test_toy_change.py"]
    if forgotten is None:
        run_tests(copy, *selected)
    else:
        shutil.copy(ROOT / forgotten, copy / forgotten)
        with pytest.raises(AssertionError, match=r"1 failed"):
            run_tests(copy, *looping[1:3])


# --- A release -------------------------------------------------------------------------------------------------------


def test_a_toy_release_takes_the_files_of_the_recipe_and_no_others(copy: Path):
    files = {file.replace("<release>", "9.9.9"): what for file, what in table("new-release").items()}

    def found(old: str) -> str:
        facts = json.loads(old)
        return json.dumps({**facts, "9.9.9": facts[ALL[-1]]}, indent=1, ensure_ascii=False) + "\n"

    toy: dict[str, Write] = {
        "releases.toml": lambda old: old.replace(f'  "{ALL[-1]}",\n]', f'  "{ALL[-1]}",\n  "9.9.9",\n]'),
        "test/constraints/9.9.9.txt": lambda old: "sglang==9.9.9\n",
        "docs/compatibility.json": found,
    }
    follow(copy, files, toy)
    pages = {str(page.relative_to(copy)) for page in copy.glob("docs/**/*.md")}
    assert set(toy) | {"README.md", "docs/compatibility.md"} <= changed(copy) <= {*files, *pages} - {"docs/**/*.md"}
    looping = [f"test/unit/docs/test_{name}.py" for name in ("docs", "compatibility", "releases")]
    run_tests(copy, *looping)


# --- A family of models ----------------------------------------------------------------------------------------------


def test_a_toy_family_takes_the_files_of_the_recipe_and_no_others(copy: Path):
    files = table("new-family")

    def found(old: str) -> str:
        facts = json.loads(old)
        facts[ALL[-1]]["families"]["toy_moe"] = ""
        return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"

    toy: dict[str, Write] = {
        "test/engine/architectures.py": lambda old: old.replace(
            "CONFIGS = {\n", 'CONFIGS = {\n    "toy-moe": config("ToyMoeForCausalLM", "toy_moe"),\n'
        ),
        "CHANGELOG.md": unreleased,
        "docs/compatibility.json": found,
    }
    follow(copy, files, toy)
    assert changed(copy) == set(files)
    rows = (copy / "docs/compatibility.md").read_text().splitlines()
    assert any("`toy_moe`" in row and f"from {ALL[-1]}" in row for row in rows)
    run_tests(copy, "test/unit/docs/test_docs.py", "test/unit/docs/test_guards.py", "-k", "docs or guards")
