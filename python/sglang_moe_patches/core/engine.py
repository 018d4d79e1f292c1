"""Functions that probe the installed engine. They inspect its code, never its version number.

A change probes with :func:`require_unpatched`, :func:`get` and :func:`require`. If the engine is not as expected, they
raise :class:`Unsupported`. The message of this exception becomes the change's reason.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from sglang_moe_patches.core.machine import PLUGIN_NAME

PLUGIN_MODULE = "sglang.srt.plugins"

_THIS_PACKAGE = __name__.partition(".")[0]
# Packages whose wrappers do not count as patches. :func:`require_unpatched` checks the wrapped function instead.
_TRANSPARENT_PACKAGES = ("torch", "contextlib", "functools")


class Unsupported(Exception):
    """Raised if the engine is not as a change expects. The message names the difference."""


# --- The installation ------------------------------------------------------------------------------------------------


def version() -> str | None:
    """Return the installed SGLang release, or ``None`` if SGLang is not installed.

    The release is only displayed: decisions depend on the engine's code.
    """
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def is_plugin_registered() -> bool:
    """Return whether the engine will find this package's plugin.

    The package must be installed with its entry point. An importable package on ``PYTHONPATH`` is not enough.
    """
    return any(e.name == PLUGIN_NAME for e in metadata.entry_points(group=PLUGIN_MODULE))


def is_plugin_left_out(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``SGLANG_PLUGINS`` is set and does not name this plugin.

    The engine then does not load the plugin.
    """
    plugins = environ.get("SGLANG_PLUGINS", "")
    return bool(plugins) and PLUGIN_NAME not in (name.strip() for name in plugins.split(","))


def has_plugin_framework() -> bool:
    """Return whether the installed engine can load plugins. The engine is not imported."""
    return has_file("srt", "plugins", "__init__.py")


def has_file(*parts: str) -> bool:
    """Return whether the engine's package contains a file. The engine is not imported.

    :param parts: the path of the file inside the package.
    """
    spec = util.find_spec("sglang")
    return spec is not None and any(Path(place, *parts).is_file() for place in spec.submodule_search_locations or ())


# --- Modules and their members ---------------------------------------------------------------------------------------


def require(condition: object, reason: str) -> None:
    """Raise an exception if a condition about the engine is false.

    :raises Unsupported: the condition is false. The exception's message is ``reason``.
    """
    if not condition:
        raise Unsupported(reason)


def resolve_arguments(server_args: Any) -> Any:
    """Return a server's arguments with the values that the engine has resolved.

    From 0.5.20 on, the attributes of ``ServerArgs`` keep the values from the command line. The result is then a new
    object with the values that ``ServerArgs.resolved_dict`` returns. In earlier releases the result is ``server_args``.
    """
    return SimpleNamespace(**server_args.resolved_dict()) if hasattr(server_args, "resolved_dict") else server_args


def has_module(name: str) -> bool:
    """Return whether a module exists. The module itself is not imported, but its parent packages are."""
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent package does not exist, or sys.modules has a module without a spec
        return False


def import_module(*names: str) -> ModuleType:
    """Import the first of these modules that exists, and return it.

    :raises Unsupported: none of the modules exists, or the module cannot be imported.
    """
    name = next((name for name in names if has_module(name)), "")
    require(name, f"the engine has no {' or '.join(names)}")
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import runs code of the engine and of its plugins, so any exception may occur
        raise Unsupported(f"cannot import {name}: {type(error).__name__}: {error}") from error


def get(owner: Any, name: str) -> Any:
    """Return the attribute ``owner.name``.

    :raises Unsupported: the attribute does not exist.
    """
    require(hasattr(owner, name), f"{_get_display_name(owner)} has no {name}")
    return getattr(owner, name)


def require_unpatched(owner: Any, name: str, package: str = "sglang") -> Any:
    """Return the function or class ``owner.name``, and check that no other plugin has wrapped or replaced it.

    Other plugins may wrap or replace the engine's functions (:mod:`sglang.srt.plugins.hook_registry`). A probe would
    then read code that the engine does not run, and a wrapper of this package might undo the other plugin's work.

    :param owner: a module or a class. A class must itself be a result of this function.
    :param package: the package that must define the function or class.
    :returns: the original function or class, without this package's own wrappers.
    :raises Unsupported: the attribute does not exist, or another package defines it.
    """
    value = get(owner, name)
    if isinstance(value, type):
        home = _find_top_level_package(value.__module__)
        require(
            home in (package, _THIS_PACKAGE),
            f"{_get_display_name(owner)}.{name} is replaced by {value.__module__}.{value.__qualname__}",
        )
        return value
    original = None
    for function in _follow_wrappers(value):
        home = _find_top_level_package(getattr(function, "__globals__", {}).get("__name__", ""))
        require(
            home in (package, _THIS_PACKAGE, *_TRANSPARENT_PACKAGES),
            f"{_get_display_name(owner)}.{name} is wrapped or replaced by {_describe_definition(function)}",
        )
        if original is None and home != _THIS_PACKAGE:
            original = function
    return value if original is None else original


def _follow_wrappers(function: Any) -> Iterator[Any]:
    """Yield a function and then all functions that it wraps, from the outermost wrapper to the innermost function."""
    before = set()
    while function is not None and id(function) not in before:
        before.add(id(function))
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _find_top_level_package(name: str) -> str:
    """Return the name of a module's top-level package.

    For a module of the engine's plugin framework, return the text "a plugin" instead of "sglang". The framework's
    wrappers run the code of other plugins, so :func:`require_unpatched` must not take them for the engine's own.
    """
    return "a plugin" if name.startswith(PLUGIN_MODULE) else name.partition(".")[0]


def _describe_definition(function: Any) -> str:
    code = getattr(function, "__code__", None)
    module_name = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    if module_name.startswith(PLUGIN_MODULE):
        return "another plugin's hook"
    return f"{module_name}.{code.co_qualname if isinstance(code, CodeType) else type(function).__qualname__}"


def _get_display_name(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__qualname__)


# --- The source code of a function -----------------------------------------------------------------------------------


def list_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, in order."""
    return list(inspect.signature(function).parameters)


def require_parameters(function: Callable[..., Any], expected: Sequence[str], *, exactly: bool = False) -> None:
    """Check the names of a function's first parameters.

    :param exactly: whether the function must have no other parameters.
    :raises Unsupported: the names do not begin with ``expected``, or the function has more parameters although
        ``exactly`` is set.
    """
    names = list_parameters(function)
    require(
        (names if exactly else names[: len(expected)]) == list(expected),
        f"{_get_display_name(function)} takes ({', '.join(names)}), "
        f"expected ({', '.join(expected)}{'' if exactly else ', ...'})",
    )


@functools.cache  # several changes probe the same functions, and reading a file takes milliseconds
def read_source(function: Callable[..., Any]) -> str:
    """Return a function's source code without its indentation."""
    return textwrap.dedent(inspect.getsource(function))


def find_calls(function: Callable[..., Any], dotted: str) -> list[ast.Call]:
    """Return all calls of a dotted name, such as ``torch.empty``, in a function's source code."""
    tree = ast.parse(read_source(function))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == dotted]


def find_uses(function: Callable[..., Any], name: str) -> set[str]:
    """Return the expressions and statements in a function's source code that read a local variable.

    :returns: the source text of each expression or statement that directly contains the variable, such as ``x + 1``.
    """
    return {
        ast.unparse(parent)
        for parent in ast.walk(ast.parse(read_source(function)))
        for child in ast.iter_child_nodes(parent)
        if isinstance(child, ast.Name) and child.id == name and isinstance(child.ctx, ast.Load)
    }


def load_definition(owner: ModuleType, name: str) -> FunctionType:
    """Return a function as a module's source code defines it, without its decorator.

    If a decorator replaces the function, the module's attribute refers to the replacement. This function therefore
    creates the original function from the module's compiled code. The parameters of the result have no default values.

    :raises Unsupported: the module defines no function of that name, or several.
    """
    get_code = getattr(getattr(owner.__spec__, "loader", None), "get_code", None)
    code = get_code(owner.__name__) if get_code else None
    inner = code.co_consts if isinstance(code, CodeType) else ()
    codes = [constant for constant in inner if isinstance(constant, CodeType) and constant.co_name == name]
    require(len(codes) == 1, f"the source of {owner.__name__} does not define {name} exactly once")
    return FunctionType(codes[0], vars(owner), name)


def mentions(function: Callable[..., Any] | None, *names: str) -> bool:
    """Return whether a function's compiled code refers to all of these names.

    The code includes the code of inner functions. A name may be a global, a local, an attribute or an imported module.
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return isinstance(code, CodeType) and set(names) <= _list_names(code)


def _list_names(code: CodeType) -> set[str]:
    inner = (_list_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}.union(*inner)


def sets_attribute(function: Callable[..., Any], attribute: str) -> bool:
    """Return whether a function's code assigns to an attribute of this name. The attribute may belong to any object."""
    return any(
        i.opname == "STORE_ATTR" and i.argval == attribute for i in dis.get_instructions(inspect.unwrap(function))
    )


def is_only_a_global(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function's code uses a name only for a global of its module, never for an attribute, a local
    variable or an import.
    """
    return all(i.opname == "LOAD_GLOBAL" for i in dis.get_instructions(function) if i.argval == name)


def require_mentions(function: Any, *names: str) -> None:
    """Check that a function's compiled code refers to all of these names (:func:`mentions`).

    :raises Unsupported: the code does not refer to one of the names.
    """
    for name in names:
        require(mentions(function, name), f"{_get_display_name(function)} does not use {name}")
