"""Snapshots of the engine's modules and classes. A test compares a snapshot with a later state."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

PACKAGES = ("sglang", "flashinfer")
Snapshot = dict[str, tuple[Any, dict[str, Any]]]
"""Snapshot of modules and classes. For each dotted name, it has the module or class, and a copy of its attributes."""


def take_snapshot() -> Snapshot:
    """Take a snapshot of all loaded modules of the engine and of FlashInfer, and of the classes that they define."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in PACKAGES:
            continue
        attributes = dict(vars(module))
        found[name] = (module, attributes)
        for value in attributes.values():
            # type() instead of isinstance(), because a lazy proxy runs code when its __class__ is read.
            if issubclass(type(value), type) and value.__module__ == name:
                found[f"{name}.{value.__qualname__}"] = (value, dict(vars(value)))
    return found


def find_differences(before: Snapshot) -> list[str]:
    """Return the dotted names of all attributes that were changed, added or removed since a snapshot.

    If a later import has added a submodule to its package, this is no difference.
    """
    absent, found = object(), []
    for place, (owner, attributes) in before.items():
        now = vars(owner)
        for name in attributes.keys() | now.keys():
            then, value = attributes.get(name, absent), now.get(name, absent)
            if then is not value and not (then is absent and isinstance(value, ModuleType)):
                found.append(f"{place}.{name}")
    return sorted(found)


def restore(before: Snapshot) -> None:
    """Restore the attributes of all modules and classes from a snapshot."""
    for dotted in find_differences(before):
        place, _, name = dotted.rpartition(".")
        owner, attributes = before[place]
        if name in attributes:
            setattr(owner, name, attributes[name])
        else:
            delattr(owner, name)
