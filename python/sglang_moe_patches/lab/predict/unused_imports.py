"""Stand-ins for packages that the engine's modules import but that an engine query never uses.

Importing these packages takes a third of an engine query's time (``python -X importtime``). Most of this time goes to
SciPy and scikit-learn, which transformers imports for its losses and for generation. A stand-in replaces an installed
package, and takes no time to import. Each attribute of a stand-in is a class. Code can subclass the class, call it, and
use it as a decorator or as an annotation.
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
    *("openai", "aiohttp", "IPython"),  # the engine: answers to clients
    "gguf",  # files of weights
)


class _NamedAnything(type):
    """Metaclass of stand-ins. A stand-in has every attribute, and can be used as any type in an annotation."""

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
        # A stand-in that is used as a decorator returns the decorated function.
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        return stand_in(name)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def stand_in(name: str) -> Any:
    """Return a stand-in class with this name."""
    if name.startswith("__"):  # Python, pydantic and others check whether an object has such an attribute.
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


def replace_packages() -> None:
    """Replace unused packages by stand-ins in this process. A package stays if it is already imported."""
    packages = {name for name in UNUSED if name not in sys.modules and util.find_spec(name)}
    sys.meta_path.insert(0, _Finder(packages))
