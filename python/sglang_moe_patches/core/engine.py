"""One language for probing the installed engine: by its code, never at its version number.

A change probes with :func:`require_unpatched`, :func:`get` and :func:`require`. What is not as expected raises
:class:`Unsupported`, whose message becomes the change's reason.
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

_OURS = __name__.partition(".")[0]
# Wrappers from these packages are neutral: what they wrap is what counts.
_NEUTRAL = ("torch", "contextlib", "functools")


class Unsupported(Exception):
    """The engine is not what a change expects. The message says in what."""


# --- The installation ------------------------------------------------------------------------------------------------


def version() -> str | None:
    """The installed SGLang release, or ``None``. For display only: decisions ask the code."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def is_plugin_registered() -> bool:
    """Whether the engine will find this package: it must be installed, being importable is not enough."""
    return any(e.name == PLUGIN_NAME for e in metadata.entry_points(group=PLUGIN_MODULE))


def is_plugin_left_out(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``SGLANG_PLUGINS`` names plugins, and not this one: then no process of the engine's loads us."""
    named = environ.get("SGLANG_PLUGINS", "")
    return bool(named) and PLUGIN_NAME not in (name.strip() for name in named.split(","))


def has_plugin_framework() -> bool:
    """Whether the engine can load us at all. Found without importing the engine."""
    return has_file("srt", "plugins", "__init__.py")


def has_file(*parts: str) -> bool:
    """Whether the engine's package has a file. Found without importing the engine."""
    spec = util.find_spec("sglang")
    return spec is not None and any(Path(place, *parts).is_file() for place in spec.submodule_search_locations or ())


# --- Modules and their members ---------------------------------------------------------------------------------------


def require(condition: object, reason: str) -> None:
    """:raises Unsupported: with ``reason``, where the condition does not hold."""
    if not condition:
        raise Unsupported(reason)


def resolve_arguments(server_args: Any) -> Any:
    """A server's arguments as the engine resolved them: from 0.5.20 on its own object holds what was given."""
    return SimpleNamespace(**server_args.resolved_dict()) if hasattr(server_args, "resolved_dict") else server_args


def has_module(name: str) -> bool:
    """Whether the module exists. It is not imported; its parent packages are."""
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent does not exist, or a module without a spec was put in its place
        return False


def module(*names: str) -> ModuleType:
    """The first of these modules that the engine has.

    :raises Unsupported: it has none of them, or the one cannot be imported.
    """
    name = next((name for name in names if has_module(name)), "")
    require(name, f"the engine has no {' or '.join(names)}")
    try:
        return importlib.import_module(name)
    except Exception as error:  # importing runs code of the engine and of its plugins
        raise Unsupported(f"cannot import {name}: {type(error).__name__}: {error}") from error


def get(owner: Any, name: str) -> Any:
    """``owner.name``.

    :raises Unsupported: there is none.
    """
    require(hasattr(owner, name), f"{_named(owner)} has no {name}")
    return getattr(owner, name)


def require_unpatched(owner: Any, name: str, package: str = "sglang") -> Any:
    """The function or class that will run as ``owner.name``, which must be the package's own.

    Another plugin may have wrapped or replaced it (:mod:`sglang.srt.plugins.hook_registry`): what is read here then
    would not be what runs, and what is put around it might undo what that plugin did. Wrappers of ours are looked
    through.

    :param owner: a module or class, itself found by this function where it is a class.
    :param package: the package that it must come from.
    :raises Unsupported: it does not exist, or comes from another package.
    """
    value = get(owner, name)
    if isinstance(value, type):
        home = _home(value.__module__)
        require(home in (package, _OURS), f"{_named(owner)}.{name} is {value.__module__}.{value.__qualname__}")
        return value
    original = None
    for function in _wrapped(value):
        home = _home(getattr(function, "__globals__", {}).get("__name__", ""))
        require(
            home in (package, _OURS, *_NEUTRAL),
            f"{_named(owner)}.{name} is wrapped or replaced by {_definition_place(function)}",
        )
        if original is None and home != _OURS:
            original = function
    return value if original is None else original


def _wrapped(function: Any) -> Iterator[Any]:
    """A function and, one after another, the functions that it wraps."""
    before = set()
    while function is not None and id(function) not in before:
        before.add(id(function))
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _home(name: str) -> str:
    """The package of a module; the engine's own plugin framework counts as a plugin."""
    return "a plugin" if name.startswith(PLUGIN_MODULE) else name.partition(".")[0]


def _definition_place(function: Any) -> str:
    code = getattr(function, "__code__", None)
    module_name = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    if module_name.startswith(PLUGIN_MODULE):
        return "another plugin's hook"
    return f"{module_name}.{code.co_qualname if isinstance(code, CodeType) else type(function).__qualname__}"


def _named(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__qualname__)


# --- What its code says ----------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of ``function``'s parameters, in order."""
    return list(inspect.signature(function).parameters)


def require_parameters(function: Callable[..., Any], expected: Sequence[str], *, exactly: bool = False) -> None:
    """:raises Unsupported: ``function`` does not start with the ``expected`` parameters, or has not exactly those."""
    names = parameters(function)
    require(
        (names if exactly else names[: len(expected)]) == list(expected),
        f"{_named(function)} takes ({', '.join(names)}), expected ({', '.join(expected)}{'' if exactly else ', ...'})",
    )


@functools.cache  # several changes probe the same functions, and reading a file's lines takes milliseconds
def source(function: Callable[..., Any]) -> str:
    """The source of ``function``, starting at column 0."""
    return textwrap.dedent(inspect.getsource(function))


def find_calls(function: Callable[..., Any], dotted: str) -> list[ast.Call]:
    """Every call of ``dotted`` (such as ``torch.empty``) in the source of ``function``."""
    tree = ast.parse(source(function))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == dotted]


def find_uses(function: Callable[..., Any], name: str) -> set[str]:
    """What the source of ``function`` does with a local variable: the expressions and statements right around it."""
    return {
        ast.unparse(parent)
        for parent in ast.walk(ast.parse(source(function)))
        for child in ast.iter_child_nodes(parent)
        if isinstance(child, ast.Name) and child.id == name and isinstance(child.ctx, ast.Load)
    }


def load_definition(owner: ModuleType, name: str) -> FunctionType:
    """The function that a module's source defines by that name, where a decorator keeps it from being found there.

    Made again from the module's code: it has no defaults.

    :raises Unsupported: there is not exactly one.
    """
    get_code = getattr(getattr(owner.__spec__, "loader", None), "get_code", None)
    code = get_code(owner.__name__) if get_code else None
    inner = code.co_consts if isinstance(code, CodeType) else ()
    codes = [constant for constant in inner if isinstance(constant, CodeType) and constant.co_name == name]
    require(len(codes) == 1, f"the source of {owner.__name__} has no {name}, or several")
    return FunctionType(codes[0], vars(owner), name)


def mentions(function: Callable[..., Any] | None, *names: str) -> bool:
    """Whether a function's compiled code, functions inside it included, refers to all of these names.

    A name is a global, a local, an attribute or an imported module.
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return isinstance(code, CodeType) and set(names) <= _names(code)


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}.union(*inner)


def sets_attribute(function: Callable[..., Any], attribute: str) -> bool:
    """Whether a function's code assigns to an attribute of that name, of any object."""
    return any(
        i.opname == "STORE_ATTR" and i.argval == attribute for i in dis.get_instructions(inspect.unwrap(function))
    )


def is_only_a_global(function: Callable[..., Any], name: str) -> bool:
    """Whether ``name`` in the function's code is never an attribute or an import of that name."""
    return all(i.opname == "LOAD_GLOBAL" for i in dis.get_instructions(function) if i.argval == name)


def require_mentions(function: Any, *names: str) -> None:
    """:raises Unsupported: the function's code does not refer to one of the names, see :func:`mentions`."""
    for name in names:
        require(mentions(function, name), f"{_named(function)} does not use {name}")
