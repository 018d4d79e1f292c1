"""What the engine's modules and classes hold, before and after."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

PACKAGES = ("sglang", "flashinfer")
Contents = dict[str, tuple[Any, dict[str, Any]]]
"""By dotted name: a module or class, and what it held."""


def contents() -> Contents:
    """Every module of the engine and of FlashInfer that is loaded, and every class that one defines: what it is, and
    what it holds right now."""
    found: Contents = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in PACKAGES:
            continue
        held = dict(vars(module))
        found[name] = (module, held)
        for value in held.values():
            # type(), not isinstance(): asking a lazy proxy for its __class__ runs code of its own.
            if issubclass(type(value), type) and value.__module__ == name:
                found[f"{name}.{value.__qualname__}"] = (value, dict(vars(value)))
    return found


def differences(before: Contents) -> list[str]:
    """The dotted names that hold something else now, or nothing, or did not hold anything ``before``.

    What was imported in between counts only if it replaced something.
    """
    absent, found = object(), []
    for place, (owner, held) in before.items():
        now = vars(owner)
        for name in held.keys() | now.keys():
            then, value = held.get(name, absent), now.get(name, absent)
            if then is not value and not (then is absent and isinstance(value, ModuleType)):
                found.append(f"{place}.{name}")
    return sorted(found)


def put_back(before: Contents) -> None:
    """Every module and class holds again what it held ``before``."""
    for dotted in differences(before):
        place, _, name = dotted.rpartition(".")
        owner, held = before[place]
        if name in held:
            setattr(owner, name, held[name])
        else:
            delattr(owner, name)
