"""Facts about the installed engine, found by looking at it, not by comparing versions."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from importlib import metadata, util
from typing import Any

PLUGIN_MODULE = "sglang.srt.plugins"


def version() -> str | None:
    """The installed SGLang release, or ``None``. For display only: decisions look at the code."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def loads_us() -> bool:
    """Whether the engine will find this package: it must be installed, being importable is not enough."""
    return any(e.name == "moe_patches" for e in metadata.entry_points(group=PLUGIN_MODULE))


def has_plugin_framework() -> bool:
    """Whether the engine can load us at all. Found without importing the engine."""
    spec = util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return False
    from pathlib import Path

    return any((Path(place) / "srt" / "plugins" / "__init__.py").is_file() for place in spec.submodule_search_locations)


def has_module(name: str) -> bool:
    """Whether the module is there, found without importing it (its parent packages are imported)."""
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of ``function``'s parameters, in order."""
    return list(inspect.signature(function).parameters)


def missing_parameters(function: Callable[..., Any], expected: Sequence[str]) -> str | None:
    """Why ``function`` does not start with the ``expected`` parameters, or ``None`` when it does."""
    found = parameters(function)
    if found[: len(expected)] == list(expected):
        return None
    return f"{function.__qualname__} takes ({', '.join(found)}), expected ({', '.join(expected)}, ...)"


def source(function: Callable[..., Any]) -> str:
    """The source of ``function``, starting at column 0."""
    return textwrap.dedent(inspect.getsource(function))


def calls(function: Callable[..., Any], dotted: str) -> list[ast.Call]:
    """Every call of ``dotted`` (such as ``torch.empty``) in the source of ``function``."""
    tree = ast.parse(source(function))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == dotted]


def mentions(function: Callable[..., Any], attribute: str) -> bool:
    """Whether the source of ``function`` reads or sets an attribute or name called ``attribute``."""
    tree = ast.parse(source(function))
    return any(
        (isinstance(node, ast.Attribute) and node.attr == attribute)
        or (isinstance(node, ast.Name) and node.id == attribute)
        for node in ast.walk(tree)
    )
