"""Tests of the layers of the package, called floors. No file may import from a higher floor, and no imports may be
circular.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from releases import ROOT

PACKAGE = "sglang_moe_patches"
FLOORS = (
    {"", "core"},
    {"changes", "memory"},
    {"registry"},
    {"lab"},
    {"plugin", "cli"},
)
"""Floors of the package from the bottom up, each with its modules and subpackages. A module may import from its own and
from lower floors. The engine imports ``plugin``, and the user runs ``cli``."""
LAB_FLOORS = (
    {"without_gpu", "observers"},
    {"predict", "servers"},
    {"regress"},
    {"doctor"},
)
"""Floors within the subpackage ``lab``, from the bottom up, each with its modules and subpackages."""
APART = {"changes": {"memory"}, "memory": {"changes"}}
"""Subpackages that must not import each other, although they are on the same floor. Key: a subpackage. Value: the
subpackages that it must not import."""

Imports = Mapping[str, set[str]]


def imports(package: Path) -> dict[str, set[str]]:
    """Return which modules of the package each of its modules imports, also inside functions. Key: the importing
    module. Value: the imported modules. Imports from other packages are left out."""
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: set(_imported(path, set(files))) for name, path in files.items()}


def _imported(path: Path, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            wholes = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            # In ``from package import name``, the name may be a module.
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for whole in wholes:
            if whole.split(".")[0] != PACKAGE:
                continue
            name = whole.removeprefix(PACKAGE).removeprefix(".")
            yield name if name in modules else name.rpartition(".")[0]


def floor(module: str) -> tuple[int, int]:
    """Return a module's floor as two numbers: the floor in the package, and the floor within ``lab`` (0 elsewhere)."""
    wing, _, rest = module.partition(".")
    number = next(number for number, names in enumerate(FLOORS) if wing in names)
    if wing != "lab" or not rest:
        return number, 0
    return number, next(number for number, names in enumerate(LAB_FLOORS) if rest.split(".")[0] in names)


def find_forbidden_imports(found: Imports) -> list[str]:
    """Return the imports that break a rule, as "MODULE imports MODULE". A module must not import a module from a higher
    floor of ``FLOORS``, or from a subpackage that ``APART`` forbids.

    :param found: the imported modules of each module.
    """
    wrong = []
    for module, others in found.items():
        for other in others:
            apart = other.split(".")[0] in APART.get(module.split(".")[0], ())
            if apart or floor(other) > floor(module):
                wrong.append(f"{module} imports {other}")
    return sorted(wrong)


@pytest.fixture(scope="module")
def package_imports() -> dict[str, set[str]]:
    """Return the imports of this package, by module."""
    return imports(ROOT / "python" / PACKAGE)


def test_every_module_has_a_floor(package_imports: Imports) -> None:
    assert {module.split(".")[0] for module in package_imports} == set().union(*FLOORS)


def test_no_import_goes_up_a_floor(package_imports: Imports) -> None:
    assert find_forbidden_imports(package_imports) == []


def test_no_files_import_each_other_in_a_circle(package_imports: Imports) -> None:
    TopologicalSorter(package_imports).prepare()  # its error names the circle


def test_upward_and_circular_imports_are_found(tmp_path: Path) -> None:
    """Upward and circular imports must be found inside functions and under TYPE_CHECKING, too."""
    for name, text in {
        "core/engine": "def f():\n    from sglang_moe_patches.lab.servers.client import Client\n",
        "changes/a": "from sglang_moe_patches.changes import b\nfrom sglang_moe_patches import memory\n",
        "changes/b": "if TYPE_CHECKING:\n    from sglang_moe_patches.changes.a import A\n",
        "memory/__init__": "import sglang_moe_patches.core.engine\n",
        "lab/servers/client": "from sglang_moe_patches.lab import doctor\n",
        "lab/doctor": "",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    found = imports(tmp_path)
    assert find_forbidden_imports(found) == [
        "changes.a imports memory",
        "core.engine imports lab.servers.client",
        "lab.servers.client imports lab.doctor",
    ]
    with pytest.raises(CycleError, match=r"changes\.a.*changes\.b"):
        TopologicalSorter(found).prepare()
    assert found["memory"] == {"core.engine"}
