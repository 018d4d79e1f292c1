"""Which scales of a layer's experts its quantization method never reads, by the source of the method's own ``apply``.

``apply`` is walked with the method and the layer at hand: an ``if`` whose condition is a comparison of their attributes
or of the engine's globals is decided, and only the branch that runs is read. Any other condition counts with both
branches. Functions that get the layer are read as well. Where the layer itself goes anywhere else, nothing is proven.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from types import FunctionType
from typing import Any, NamedTuple

from sglang_moe_patches.core import engine

_UNKNOWN = object()
_MEGA_MOE = "_mega_moe_weights_built"
"""The engine sets it on a layer that DeepGEMM's mega kernel runs without the method's ``apply``."""
_DECIDABLE = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Load, ast.Compare, ast.cmpop),
    *(ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not),
)


class Unread(NamedTuple):
    """Scales of one layer that are not read once its weights have been processed.

    :param bytes_of: the size of each by its name.
    :param reason: why there are none; "" where there are some.
    """

    bytes_of: dict[str, int]
    reason: str = ""


def unread_scales(layer: Any) -> Unread:
    """What fp4-weights gives up of a layer of routed experts, and why not where it gives up nothing.

    The layer may be on ``meta``, and its weights need not have been processed.

    :param layer: a ``FusedMoE`` layer whose quantization method and runner were made.
    """
    method = getattr(layer, "quant_method", None)
    scales = {
        name: int(value.nbytes)
        for name, value in layer._parameters.items()
        if value is not None and name.endswith(("_weight_scale", "_weight_scale_inv"))
    }
    if getattr(layer, _MEGA_MOE, False):
        return Unread({}, "DeepGEMM's mega kernel runs its experts")
    try:
        read = attributes_read(method, layer)
    except engine.Unsupported as error:
        return Unread({}, str(error))
    unread = {name: size for name, size in scales.items() if name not in read}
    return Unread(unread, "" if unread else f"{type(method).__name__} reads all of its scales")


def attributes_read(method: Any, layer: Any) -> set[str]:
    """The attributes of ``layer`` that ``method.apply(layer, ...)`` may read.

    :raises engine.Unsupported: the source does not show it.
    """
    apply = engine.own(type(method), "apply")
    names = engine.parameters(apply)
    engine.require(names[:2] == ["self", "layer"], "apply takes no layer")
    return _Reader(apply, {"self": method, "layer": layer}, "layer", frozenset()).read()


class _Reader:
    """Walks one function in which the name ``subject`` means the layer."""

    def __init__(self, function: Any, known: dict[str, Any], subject: str, callers: frozenset[Any]) -> None:
        self.function, self.known, self.subject = function, known, subject
        self.callers = callers | {function}
        self.attributes: set[str] = set()
        (definition,) = ast.parse(engine.source(function)).body
        engine.require(isinstance(definition, ast.FunctionDef), f"{function.__name__} is no plain function")
        self.definition: Any = definition
        # What is bound here hides a global of that name, and is known only by an assignment or import that was walked.
        bound = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        engine.require(not bound & {subject, "self"}, f"{function.__name__} gives its arguments other values")
        self.hidden = bound | set(engine.parameters(function))

    def read(self) -> set[str]:
        self._walk(self.definition.body)
        return self.attributes

    def _walk(self, statements: list[ast.stmt]) -> bool:
        """:returns: whether the statements surely end the function."""
        for statement in statements:
            match statement:
                case ast.If(test=test, body=body, orelse=orelse):
                    if self._if(test, body, orelse):
                        return True
                case ast.ImportFrom(module=name, names=names, level=0) if name:
                    for alias in names:
                        bound = alias.asname or alias.name
                        self.known[bound] = getattr(importlib.import_module(name), alias.name, _UNKNOWN)
                case ast.With(items=items, body=body):
                    for item in items:
                        self._note(item)
                    if self._walk(body):
                        return True
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._note(statement)
                    self.known[name] = self._value(value)
                case ast.Return() | ast.Raise():
                    self._note(statement)
                    return True
                case _:
                    self._note(statement)
                    for node in ast.walk(statement):  # in a loop or a handler: what is assigned there is not known
                        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                            self.known[node.id] = _UNKNOWN
        return False

    def _if(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> bool:
        decided = self._value(test)
        self._note(test)
        if decided is not _UNKNOWN:
            return self._walk(body if decided else orelse)
        before = dict(self.known)
        first_ends, first = self._walk(body), self.known
        self.known = dict(before)
        second_ends = self._walk(orelse)
        for name in {*first, *self.known}:
            if first.get(name, _UNKNOWN) is not self.known.get(name, _UNKNOWN):
                self.known[name] = _UNKNOWN
        return first_ends and second_ends

    def _lookup(self, name: str) -> Any:
        if name in self.known:
            return self.known[name]
        if name in self.hidden:
            return _UNKNOWN
        return self.function.__globals__.get(name, getattr(builtins, name, _UNKNOWN))

    def _value(self, expression: ast.expr) -> Any:
        """What an expression is, where telling runs no code but attributes, comparisons and ``is_...()`` of an enum."""
        if isinstance(expression, ast.Call) and not expression.args and not expression.keywords:
            if isinstance(expression.func, ast.Attribute) and expression.func.attr.startswith("is_"):
                owner = self._value(expression.func.value)
                if hasattr(type(owner), "__members__"):
                    return getattr(owner, expression.func.attr)()
            return _UNKNOWN
        if not all(isinstance(node, _DECIDABLE) for node in ast.walk(expression)):
            return _UNKNOWN
        names = {node.id: self._lookup(node.id) for node in ast.walk(expression) if isinstance(node, ast.Name)}
        if _UNKNOWN in names.values():
            return _UNKNOWN
        try:
            value = eval(compile(ast.Expression(expression), "<condition>", "eval"), {"__builtins__": {}}, names)
            return bool(value) if isinstance(expression, ast.Compare | ast.BoolOp | ast.UnaryOp) else value
        except Exception:  # an attribute that is not there yet, a tensor that has no truth value
            return _UNKNOWN

    def _note(self, tree: ast.AST) -> None:
        """Take down what the tree reads of the layer, and follow the layer into the functions that get it."""
        harmless: set[ast.AST] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name() as use, attr=attribute) if self._is_subject(use):
                    called = inspect.getattr_static(type(self.known[self.subject]), attribute, None)
                    engine.require(
                        not isinstance(called, FunctionType | property),
                        f"{self._name()} calls {attribute} of its layer",
                    )
                    self.attributes.add(attribute)
                    harmless.add(use)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id=self.subject) as use, name, *_]
                ):
                    engine.require(isinstance(name, ast.Constant), f"{self._name()} reads attributes by computed names")
                    self.attributes.add(str(name.value))  # type: ignore[attr-defined]
                    harmless.add(use)
                case ast.Call():
                    harmless |= self._follow(node)
        for node in ast.walk(tree):
            kept = isinstance(node, ast.Name) and node.id == self.subject and node not in harmless
            engine.require(not kept, f"{self._name()} may keep its layer")

    def _name(self) -> str:
        return str(self.function.__qualname__)

    def _follow(self, call: ast.Call) -> set[ast.AST]:
        """:returns: the uses of the layer as an argument of a function that was read."""
        positions = [place for place, value in enumerate(call.args) if self._is_subject(value)]
        keywords = [word.arg for word in call.keywords if word.arg and self._is_subject(word.value)]
        if not positions and not keywords:
            return set()
        match call.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                function, receiver = engine.own(type(self.known["self"]), name), {"self": self.known["self"]}
            case ast.Name(id=name):
                function, receiver = self._lookup(name), {}
            case _:
                raise engine.Unsupported(f"{self._name()} may keep its layer")
        engine.require(isinstance(function, FunctionType), f"{self._name()} gives its layer to {name}")
        engine.require(function not in self.callers, f"{name} calls itself")
        taken = engine.parameters(function)[len(receiver) :]
        subjects = [*(taken[place] for place in positions), *keywords]
        engine.require(len(subjects) == 1, f"{self._name()} gives its layer to {name} twice")
        known = receiver | {subjects[0]: self.known[self.subject]}
        self.attributes |= _Reader(function, known, subjects[0], self.callers).read()
        return {value for value in (*call.args, *(word.value for word in call.keywords)) if self._is_subject(value)}

    def _is_subject(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Name) and value.id == self.subject
