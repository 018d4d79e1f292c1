"""Find the model families of an engine whose layers may offer their dead input.

    python test/tools/family_scan.py   # prints the installed engine's part of docs/compatibility.json, as JSON

A *proof* (:mod:`sglang_moe_patches.core.dead_input.proofs`) decides from source code whether a layer's input is dead.
The scan applies the proofs to every family, without importing the engine. A server does not use the scan. It applies
the proofs to the model that it builds, and may refuse a family that the scan accepts.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import util
from pathlib import Path

from sglang_moe_patches.core.dead_input import proofs
from sglang_moe_patches.core.dead_input.families import MODELS

_EXPERTS = frozenset({"get_moe_impl_class", "FusedMoE", "EPMoE", "DeepEPMoE"})
"""Names of the engine's functions and classes that create routed experts."""
_DECLARES = frozenset({"declare_attn", "declare_ffn"})
"""Engine functions with which a decoder layer declares how its attention and its FFN read and update the residual. Only
releases that store the residual in the batch have these functions."""
_RESIDUAL_KEYWORDS = ("read", "update")
"""Keyword arguments of the functions in ``_DECLARES`` that say how the residual is read and updated."""
_PLAIN = frozenset({"NormQuantReadout", "NormReadout", "NORM_QUANT_READOUT", "NORM_READOUT", "PLAIN_ADD"}) | {
    *("PLAIN_RESIDUAL_OPS", "PLAIN_RESIDUAL", "NormQuantRead", "NormRead", "NORM_QUANT_READ", "NORM_READ", "ADD"),
}
"""Values of the keyword arguments in ``_RESIDUAL_KEYWORDS`` with which the residual is a *plain sum*: the layer only
adds outputs to the residual, and only a norm reads the residual."""


def models_folder() -> Path:
    """Return the folder of the installed engine's models.

    :raises RuntimeError: no engine is installed.
    """
    home, *inner = MODELS.split(".")
    spec = util.find_spec(home)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("SGLang is not installed here")
    return Path(next(iter(spec.submodule_search_locations)), *inner)


def scan(folder: Path) -> dict[str, str]:
    """Scan all model families with routed experts.

    :param folder: the engine's folder ``models``.
    :returns: for each family, the reason why its layers cannot offer their dead input, or ``""`` if they can. A family
        is named like the module of its layer stack.
    """
    engine = _Engine(folder)
    found: dict[str, list[str | None]] = {}
    for module in engine.with_experts:
        for stack in module.classes.values():
            loop = engine.method(stack, "forward")
            if loop is not None and any(proofs.find_layer_loops(loop)):
                reasons = [engine.skip_reason(stack, loop, layer) for layer in engine.layers(stack)]
                found.setdefault(module.name, []).extend(reasons)
    return {name: "" if None in reasons else str(reasons[0]) for name, reasons in sorted(found.items()) if reasons}


def _may_be_plain(value: ast.expr, function: ast.FunctionDef) -> bool:
    """Return whether an argument that says how a layer reads or updates the residual may mean a plain sum.

    It may mean a plain sum if one of its possible values is in :data:`_PLAIN`, or if the code names no value.

    :param value: expression that is passed as one of :data:`_RESIDUAL_KEYWORDS`.
    :param function: function that contains the expression.
    """
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign) and names & {ast.unparse(target) for target in statement.targets}:
            names |= {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
    kinds = {name for name in names if name.lstrip("_")[:1].isupper()}
    return not kinds or bool(kinds & _PLAIN)


@dataclass(eq=False)
class _Class:
    node: ast.ClassDef
    module: _Module

    @cached_property
    def methods(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.node.body if isinstance(node, ast.FunctionDef)}

    @cached_property
    def bases(self) -> list[str]:
        return [ast.unparse(base) for base in self.node.bases]

    @cached_property
    def mentions(self) -> list[str]:
        """All names in the source of the class."""
        names = [node.id for node in ast.walk(self.node) if isinstance(node, ast.Name)]
        return list(dict.fromkeys(names))

    @cached_property
    def makes_experts(self) -> list[str]:
        """Attributes to which the class assigns routed experts, such as ``self.experts``."""
        made = []
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                maker = node.value.func.func if isinstance(node.value.func, ast.Call) else node.value.func
                if ast.unparse(maker) in _EXPERTS:
                    made += [ast.unparse(target) for target in node.targets]
        return sorted(set(made))


@dataclass(eq=False)
class _Module:
    name: str
    tree: ast.Module
    classes: dict[str, _Class] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    assigned: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = _Class(node, self)
            elif isinstance(node, ast.Assign):
                names = [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
                self.assigned |= {target.id: names for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{MODELS}."):
                home = str(node.module).removeprefix(f"{MODELS}.")
                self.imported |= {alias.asname or alias.name: (home, alias.name) for alias in node.names}


class _Engine:
    """Syntax trees of an engine's model classes. A module is parsed when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._sources = {}
        for path in sorted(folder.glob("*.py")):
            with suppress(OSError, ValueError):
                self._sources[path.stem] = path.read_text(encoding="utf-8-sig")
        self._modules: dict[str, _Module | None] = {}
        self._moe: dict[_Class, bool] = {}

    def module(self, name: str) -> _Module | None:
        """Return a parsed module, or ``None`` if it does not exist or cannot be parsed."""
        if name not in self._modules:
            self._modules[name] = None
            if name in self._sources:
                with suppress(SyntaxError, ValueError, RecursionError):
                    self._modules[name] = _Module(name, ast.parse(self._sources[name]))
        return self._modules[name]

    @cached_property
    def with_experts(self) -> list[_Module]:
        """Modules that create routed experts, and modules that import such a module."""
        imported = {
            name: set(re.findall(rf"^from {re.escape(MODELS)}\.(\w+) import", source, re.MULTILINE))
            for name, source in self._sources.items()
        }
        names = {name for name, source in self._sources.items() if any(maker in source for maker in _EXPERTS)}
        while more := {name for name, homes in imported.items() if homes & names} - names:
            names |= more
        return [module for name in sorted(names) if (module := self.module(name))]

    def find(self, module: _Module, name: str, above: frozenset[tuple[str, str]] = frozenset()) -> list[_Class]:
        """Return the classes that a name refers to in a module: one class, or the classes in a table such as a dict.

        :param above: (module, name) pairs of the lookups that led to this lookup. If a pair appears again, the lookup
            ends, because modules may import each other.
        """
        if name in module.classes:
            return [module.classes[name]]
        if (module.name, name) in above:
            return []
        above |= {(module.name, name)}
        if name in module.imported:
            home, original = module.imported[name]
            found = self.module(home)
            return self.find(found, original, above) if found else []
        inner = [each for each in module.assigned.get(name, ()) if each != name]
        return [found for each in inner for found in self._known(module, each, above)]

    def _known(self, module: _Module, name: str, above: frozenset[tuple[str, str]] = frozenset()) -> list[_Class]:
        return self.find(module, name, above) if name in module.classes or name in module.imported else []

    def ancestry(self, kind: _Class, below: frozenset[_Class] = frozenset()) -> Iterator[_Class]:
        """Yield a class and all its base classes.

        :param below: subclasses through which the search has reached this class. They are not visited again.
        """
        yield kind
        below |= {kind}
        for base in kind.bases:
            for found in self._known(kind.module, base):
                if found not in below:
                    yield from self.ancestry(found, below)

    def method(self, kind: _Class, name: str) -> ast.FunctionDef | None:
        return next((each.methods[name] for each in self.ancestry(kind) if name in each.methods), None)

    def is_moe(self, kind: _Class) -> bool:
        """Return whether a class, or a class that it uses, creates routed experts."""
        if kind not in self._moe:
            reached, left = {kind}, [kind]  # classes may use each other, so no class is visited twice
            while left:
                one = left.pop()
                if self._moe.get(one, bool(one.makes_experts)):
                    self._moe[kind] = True
                    return True
                if one in self._moe:
                    continue
                more = {used for name in (*one.mentions, *one.bases) for used in self._known(one.module, name)}
                left += more - reached
                reached |= more
            self._moe |= dict.fromkeys(reached, False)
        return self._moe[kind]

    def layers(self, stack: _Class) -> list[_Class]:
        """Return the classes of decoder layers with routed experts over which ``stack`` may loop.

        :param stack: class that loops over layers. Its source names the classes of the layers. If the source names
            none, the base classes of ``stack`` are searched, nearest first.
        """
        for kind in self.ancestry(stack):
            named = [each for name in kind.mentions for each in self.find(kind.module, name)]
            layers = [each for each in named if self._is_layer(each) and self.is_moe(each)]
            layers = [each for each in layers if not any(self._wraps(other, each) for other in layers)]
            if layers:
                return list(dict.fromkeys(layers))
        return []

    def _wraps(self, layer: _Class, inner: _Class) -> bool:
        """Return whether the class ``layer`` names the class ``inner`` in its body. Such a layer calls ``inner`` layers
        itself, so the model's loop does not call them."""
        return any(
            inner in self._known(layer.module, node.id)
            for statement in layer.node.body
            for node in ast.walk(statement)
            if isinstance(node, ast.Name)
        )

    def _is_layer(self, kind: _Class) -> bool:
        forward = self.method(kind, "forward")
        if forward is None or any(proofs.find_layer_loops(forward)):
            return False
        parameters = [each.arg for each in forward.args.args]
        return "hidden_states" in parameters and ("forward_batch" in parameters or forward.args.kwarg is not None)

    def skip_reason(self, stack: _Class, loop: ast.FunctionDef, layer: _Class) -> str | None:
        """Return why a layer cannot offer its dead input, or ``None`` if all proofs succeed."""
        name, forward = layer.node.name, self.method(layer, "forward")
        assert forward is not None
        return (
            proofs.find_layer_skip_reason(name, forward, functools.partial(self.method, layer))
            or proofs.find_loop_skip_reason(stack.node.name, loop)
            or self._sum_skip_reason(layer, forward)
            or self._experts_skip_reason(layer)
        )

    def _sum_skip_reason(self, layer: _Class, forward: ast.FunctionDef) -> str | None:
        """Return a reason if a layer's residual cannot be a plain sum, else ``None``.

        A layer declares how it reads and updates the residual. If the declarations or the layer's communicator depend
        on the model's configuration, the scan assumes a plain sum.
        """
        if "self.attn_boundary.prepare" not in ast.unparse(forward):
            return None
        functions = [method for kind in self.ancestry(layer) for method in kind.methods.values()]
        functions += [node for node in layer.module.tree.body if isinstance(node, ast.FunctionDef)]
        declarations = [
            (function, node)
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _DECLARES
        ]
        is_plain = bool(declarations) and all(
            _may_be_plain(keyword.value, function)
            for function, call in declarations
            for keyword in call.keywords
            if keyword.arg in _RESIDUAL_KEYWORDS
        )
        return None if is_plain else proofs.NO_PLAIN_SUM.format(layer.node.name)

    def _experts_skip_reason(self, layer: _Class) -> str | None:
        used = [kind for name in layer.mentions for kind in self._known(layer.module, name)]
        most = max((len(above.makes_experts) for kind in (layer, *used) for above in self.ancestry(kind)), default=0)
        return proofs.TOO_MANY_EXPERTS.format(layer.node.name, most) if most > 1 else None


if __name__ == "__main__":
    print(json.dumps({"families": scan(models_folder())}))
