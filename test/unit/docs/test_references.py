"""Tests that docstrings and pages refer only to modules, functions and files that exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pages
import pytest

ROLE = re.compile(r":(?:mod|func|class|meth|data|attr):`~?([\w.]+)`")
PATH = re.compile(r"`([\w-]+(?:/[\w.-]+)+)`")
MEMBER = re.compile(r"`(?P<file>[\w/]+\.py):(?P<name>[\w.]+)`")
MEMBER_IN = re.compile(
    r"`(?P<name>[A-Za-z_][\w.]*)(?:\([^`\n]*\))?`+\s+(?:in\s+|\()\[?`+(?P<file>[\w/]+\.py)`"
    r"(?:\]\((?:\.\./)*(?P<link>[\w/.]+)\))?"
)
ROOTS = tuple(pages.ROOT / folder for folder in ("python", "benchmark", "test/reference_kernels", "test"))
TRACKED = subprocess.run(
    ["git", "-C", pages.ROOT, "ls-files"], capture_output=True, text=True, check=True
).stdout.splitlines()
OUR_FOLDERS = {path.split("/")[0] for path in TRACKED if "/" in path} | {
    folder for path in TRACKED if path.startswith("python/") for folder in Path(path).parts[:-1]
}
ENGINES = {"test/registered", "benchmark/one_batch.py"}
"""Known paths in the engine's repository that look like paths of this project, because their first folder has the same
name as a folder of this project.
"""


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def source(module: str) -> Path | None:
    """Return the file of a module of this project, or ``None`` if there is none."""
    paths = [root.joinpath(*module.split(".")) for root in ROOTS]
    return next(
        (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None
    )


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the names bound in the body of a module or class, including ``if`` branches and attributes of ``self``."""
    found: dict[str, ast.stmt] = {}
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name, body=inner) | ast.ClassDef(name=name, body=inner):
                if isinstance(statement, ast.FunctionDef):
                    text = ast.unparse(statement)
                    found |= dict.fromkeys(re.findall(r"\bself\.(\w+)[^=\n]* = ", text), statement)
                found[name] = statement
            case ast.If(body=inner, orelse=otherwise):
                found |= members([*inner, *otherwise])
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {name.asname or name.name: statement for name in names}
            case ast.Assign(targets=targets):
                found |= {
                    node.id: statement for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
                }
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = statement
    return found


def has_member(body: list[ast.stmt], names: list[str]) -> bool:
    """Return whether a dotted name exists in the body of a module or class."""
    found = members(body).get(names[0])
    if found is None or len(names) == 1:
        return found is not None
    return isinstance(found, ast.ImportFrom) or has_member(getattr(found, "body", []), names[1:])


def name_exists(name: str) -> bool:
    """Return whether a dotted name is a module or a member of a module. It may belong to another package."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if path := source(".".join(parts[:end])):
            return end == len(parts) or has_member(tree(path).body, parts[end:])
    owner, _, attribute = name.rpartition(".")
    home = importlib.util.find_spec(parts[0])
    places = [Path(folder, *parts[1:]) for folder in (home and home.submodule_search_locations) or ()]
    if any(place.is_dir() or place.with_suffix(".py").is_file() for place in places):
        return True  # found without an import, because importing the engine takes a minute
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is no package, but may be a module with such an attribute
        return bool(owner) and importlib.util.find_spec(owner) is not None and hasattr(import_module(owner), attribute)


def unknown_names(path: Path) -> list[str]:
    """Return the references in a module's text to names that do not exist.

    A reference may be relative to a class of the module, to the module or to its package, or absolute.
    """
    root = next(root for root in ROOTS if path.is_relative_to(root))
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    classes = [node.name for node in tree(path).body if isinstance(node, ast.ClassDef)]

    def is_known(reference: str) -> bool:
        name = reference.lstrip(".")
        near = [name, *(f"{kind}.{name}" for kind in classes)]
        anywhere = name_exists(f"{package}.{name}") if name != reference else name_exists(name)
        return anywhere or any(has_member(tree(path).body, each.split(".")) for each in near)

    return [reference for reference in ROLE.findall(path.read_text()) if not is_known(reference)]


def unknown_paths(path: Path) -> list[str]:
    """Return the paths in backticks that look like paths of this project, but belong to no file or folder."""
    ours = [reference for reference in PATH.findall(path.read_text()) if reference.split("/")[0] in OUR_FOLDERS]
    return [name for name in ours if name not in ENGINES and not any(f"/{name}/" in f"/{file}/" for file in TRACKED)]


def unknown_members(path: Path) -> list[str]:
    """Return the text's references ``file.py:NAME`` for which ``file.py`` defines no ``NAME``.

    A text may also write such a reference as *NAME in file.py* or as *NAME (file.py)*. If the reference is a link, the
    link's target is the file.

    :param path: file with the text: a page or a module.
    """
    text = path.read_text()
    found = [match.groupdict() for form in (MEMBER, MEMBER_IN) for match in form.finditer(text)]
    said = [(match.get("link") or match["file"], match["name"]) for match in found]
    return [
        f"{file}:{name}"
        for file, name in said
        if not any(
            has_member(tree(pages.ROOT / ours).body, name.split("."))
            for ours in TRACKED
            if f"/{ours}".endswith(f"/{file}")
        )
    ]


@pytest.mark.parametrize(
    ("suffixes", "unknown"),
    [((".py",), unknown_names), ((".md", ".py"), unknown_paths), ((".md", ".py"), unknown_members)],
)
def test_every_reference_exists(suffixes: tuple[str, ...], unknown: Callable[[Path], list[str]]):
    asked = [name for name in TRACKED if name.endswith(suffixes) and name != "test/unit/docs/test_references.py"]
    found = {name: unknown(pages.ROOT / name) for name in asked}
    assert {name: references for name, references in found.items() if references} == {}


def test_a_dangling_reference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = tmp_path / "module.py"
    quoted = [f":func:`{name}`" for name in ("here", "gone")] + [f"`core/{name}.py`" for name in ("patch", "gone")]
    module.write_text(f"{' '.join(quoted)!r}\nhere = 1\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOTS", (tmp_path, *ROOTS))
    assert (unknown_names(module), unknown_paths(module)) == (["gone"], ["core/gone.py"])
    there = "`core/patch.py:Plan`, `Plan` in [`patch.py`](../core/patch.py), `Plan.skipped(why)` (`core/patch.py`)"
    module.write_text(f"{there}, `core/patch.py:GONE` and `core/gone.py:Plan`")
    assert unknown_members(module) == ["core/patch.py:GONE", "core/gone.py:Plan"]
    # The first member does not exist. The others exist, but not in the linked file.
    other = "`INELIGIBLE` in [`eligibility.py`](../../memory/activation_segments/eligibility.py)"
    module.write_text(f"{there}, `GONE` in\n[`patch.py`](patch.py), `Plan` (`core/engine.py`), {other}")
    assert unknown_members(module) == [
        *("patch.py:GONE", "core/engine.py:Plan", "memory/activation_segments/eligibility.py:INELIGIBLE")
    ]
