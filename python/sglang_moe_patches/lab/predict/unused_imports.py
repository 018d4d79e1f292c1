"""Packages that the engine's modules import and an engine query never uses: stand-ins, which take no time to import.

The packages are a third of what an engine query takes (``python -X importtime``). Most of it are SciPy and
scikit-learn, which transformers imports for its losses and for generation. A stand-in takes the place of an installed
package. Each of its attributes is a class to subclass, to call, to decorate or to annotate with.
"""

from __future__ import annotations

import sys
from importlib import util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = (
    *("sklearn", "scipy", "torchao", "torchvision", "torchaudio"),  # transformers: generation, losses, images, sound
    *("openai", "aiohttp", "IPython"),  # the engine: what it answers to clients
    "gguf",  # files of weights
)


class _NamedAnything(type):
    """Class of stand-ins. It has every attribute and accepts every use as a type."""

    def __getattr__(cls, name: str) -> Any:
        return stand_in(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _StandIn(metaclass=_NamedAnything):
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __init_subclass__(cls, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        # As a decorator it returns the function that it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        return stand_in(name)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def stand_in(name: str) -> Any:
    """A class of that name to do anything with."""
    if name.startswith("__"):  # Python, pydantic and others ask whether there is one
        raise AttributeError(name)
    return _NamedAnything(name, (_StandIn,), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return stand_in(name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def leave_out() -> None:
    """Put the stand-ins in place in this process, except for packages that are missing or were imported before."""
    packages = {name for name in UNUSED if name not in sys.modules and util.find_spec(name)}
    sys.meta_path.insert(0, _Finder(packages))
