"""Find scales of a layer that no code reads after the weights were processed.

This module examines the source code of all functions that may read a scale, an attribute of the layer.

:class:`_Reader` follows the statements of the quantization method's ``apply``, and of every function to which ``apply``
passes the layer. If the source of such a function cannot be followed, all scales count as read.

At an ``if`` whose condition has a known value, the reader follows only the branch that will run. At every other ``if``
it follows both branches. A value is known if it depends only on attributes that no longer change, on the engine's
globals, and on functions whose body is one ``return`` statement.

A scale also counts as read if its name occurs in another function of the quantization method, or in a function of the
layer. Weight loaders and functions that prepare the weights are exceptions.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import importlib
import inspect
from collections.abc import Iterable
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

from sglang_moe_patches.core import engine

_UNKNOWN = object()
_EMPTY_CELL = CellType()
"""Closure cell without contents. Empty cells are found by comparison with this cell, because reading their contents
would raise ``ValueError``."""
_MEGA_MOE = "_mega_moe_weights_built"
"""Name of an attribute that the engine sets on a layer if DeepGEMM's mega kernel runs the experts. The engine then does
not call the quantization method's ``apply``."""
_SETUP = ("__init__", "create_weights", "create_moe_runner", "process_weights_after_loading")
"""Names of a quantization method's functions that run only before a layer's first forward pass, or after a weight
update."""
_LOADERS = ("weight_loader", "weight_loader_fused")
_FORWARDS = ("forward", "forward_impl", "run_moe_core")
"""Names of functions of the engine's ``FusedMoE`` that run in a forward pass."""


class UnreadScales(NamedTuple):
    """Result of :func:`find_unread_scales`: scales of a layer that no code reads after the weights were processed.

    :param bytes_of: bytes of each unread scale, by the scale's name.
    :param reason: why the layer has no unread scale. It is empty if the layer has one.
    """

    bytes_of: dict[str, int]
    reason: str = ""


def find_unread_scales(layer: Any) -> UnreadScales:
    """Return the scales of a layer that fp4-weights frees, or the reason why it frees none.

    :param layer: a ``FusedMoE`` layer whose weights were processed.
    """
    method = getattr(layer, "quant_method", None)
    if getattr(layer, _MEGA_MOE, False):
        return UnreadScales({}, "DeepGEMM's mega kernel runs the layer's experts")
    try:
        for owner in (method, getattr(method, "runner", None)):
            holds_layer = any(_leads_to_layer(value, layer) for value in _read_attributes(owner).values())
            engine.require(not holds_layer, f"{type(method).__name__} keeps a reference to its layer")
        for owner in (method, layer):
            kind: Any = type(owner)
            replaced = sorted(_read_attributes(owner).keys() & _find_functions(kind).keys())
            engine.require(not replaced, f"an instance of {kind.__name__} replaces its class's {', '.join(replaced)}")
        read = find_attributes_read(method, layer)
    except engine.Unsupported as error:
        return UnreadScales({}, str(error))
    unread = {
        name: int(value.nbytes)
        for name, value in layer._parameters.items()
        if value is not None
        and name.endswith(("_weight_scale", "_weight_scale_inv"))
        and name not in read
        and not _is_named_elsewhere(type(method), type(layer), name)
    }
    return UnreadScales(unread, "" if unread else f"{type(method).__name__} reads all of its scales")


def _read_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes that are set on an object itself, not on its class, by their names."""
    return getattr(owner, "__dict__", {})


def _leads_to_layer(value: Any, layer: Any) -> bool:
    """Return whether a value is the layer, or a callable or collection through which code can reach the layer."""
    todo, visited_ids = [value], set[int]()
    while todo:
        if (value := todo.pop()) is layer:
            return True
        if id(value) not in visited_ids:
            visited_ids.add(id(value))
            todo += _list_contents(value)
    return False


def _list_contents(value: Any) -> Iterable[Any]:
    """Return the objects to which a callable or a collection refers. For any other value, return an empty tuple."""
    match value:
        case functools.partial(func=function, args=arguments, keywords=keywords):
            return function, *arguments, *keywords.values()
        case MethodType(__self__=owner, __func__=function):
            return owner, function
        case FunctionType(__closure__=cells, __defaults__=defaults, __kwdefaults__=keywords):
            contents = (cell.cell_contents for cell in cells or () if cell != _EMPTY_CELL)
            return *contents, *(defaults or ()), *(keywords or {}).values()
        case dict():
            return *value.keys(), *value.values()
        case list() | tuple() | set() | frozenset():
            return value
    return ()


def find_attributes_read(method: Any, layer: Any) -> set[str]:
    """Return the names of the layer's attributes that ``method.apply(layer, ...)`` may read.

    :raises engine.Unsupported: the source code does not show which attributes ``apply`` reads.
    """
    apply = engine.require_unpatched(type(method), "apply")
    names = engine.list_parameters(apply)
    engine.require(names[:2] == ["self", "layer"], "apply takes no layer")
    return _Reader(apply, {"self": method, "layer": layer}, "layer", frozenset()).read()


# --- Other functions that contain the name of a scale ----------------------------------------------------------------


@functools.cache
def _find_functions(owner: type) -> dict[str, FunctionType]:
    """Return the functions of a class and the getters of its properties, by their names.

    A wrapper is replaced by the function that it wraps.
    """
    functions = {}
    for name in dir(owner):
        value = inspect.getattr_static(owner, name, None)
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and isinstance(inner := inspect.unwrap(value), FunctionType):
            functions[name] = inner
    return functions


@functools.cache
def _find_names_and_strings(code: CodeType) -> frozenset[str]:
    """Return the names and strings that occur in a function's code and in the functions inside it."""
    inner = (_find_names_and_strings(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    strings = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset({*code.co_names, *strings}.union(*inner))


def _find_reachable(owner: type, names: tuple[str, ...]) -> set[str]:
    """Return the names of those functions of a class that may run if its functions ``names`` are called."""
    functions, reachable, todo = _find_functions(owner), set[str](), {*names}
    while todo := todo & functions.keys() - reachable:
        reachable |= todo
        todo = {word for name in todo for word in _find_names_and_strings(functions[name].__code__)}
    return reachable


def _is_named_elsewhere(method: type, layer: type, name: str) -> bool:
    """Return whether a scale's name occurs in a function other than ``apply`` that may run after the weights were
    processed.

    :param method: class of the quantization method.
    :param layer: class of the layer.
    """
    names_of_method = _find_functions(method).keys() - _find_reachable(method, (*_SETUP, "apply"))
    forwards = _find_reachable(layer, _FORWARDS)
    names_of_layer = forwards | _find_functions(layer).keys() - _find_reachable(layer, _LOADERS)
    return any(
        name in _find_names_and_strings(_find_functions(owner)[each].__code__)
        for owner, names in ((method, names_of_method), (layer, names_of_layer))
        for each in names
    )


@functools.cache
def _find_changing_attributes(owner: type) -> frozenset[str]:
    """Return the names of a class's attributes whose values may change in a forward pass.

    Such attributes are set in functions other than those that construct the object or process its weights.
    """
    functions = _find_functions(owner)
    return frozenset(
        instruction.argval
        for name in functions.keys() - _find_reachable(owner, _SETUP)
        for instruction in dis.get_instructions(functions[name])
        if instruction.opname == "STORE_ATTR"
    )


# --- What apply reads ------------------------------------------------------------------------------------------------


class _Reader:
    """Reader of one function's source code. It finds the attributes of the layer that the function may read.

    :param known: values of the function's local names, as far as they are known.
    :param subject: local name that refers to the layer. It is empty if the function does not receive the layer.
    :param callers: functions whose calls lead to this function. A recursive call is not followed.
    """

    def __init__(self, function: Any, known: dict[str, Any], subject: str, callers: frozenset[Any]) -> None:
        self.function, self.known, self.subject = function, known, subject
        self.callers = callers | {function}
        self.attributes: set[str] = set()
        engine.require(not hasattr(function, "__wrapped__"), f"{function.__name__} is wrapped")
        engine.require(not function.__code__.co_freevars, f"{function.__name__} reads variables of another function")
        (definition,) = ast.parse(engine.read_source(function)).body
        engine.require(isinstance(definition, ast.FunctionDef), f"{function.__name__} is no plain function")
        self.definition: Any = definition
        # A local name of this function hides a global of the same name. Its value is known only after its assignment or
        # import was followed.
        bound = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        engine.require(not bound & {subject, "self"}, f"{function.__name__} assigns other values to its arguments")
        self.hidden = bound | {*function.__code__.co_varnames, *function.__code__.co_cellvars}

    def read(self) -> set[str]:
        self._follow_statements(self.definition.body)
        return self.attributes

    def _follow_statements(self, statements: list[ast.stmt]) -> bool:
        """Record the attributes of the layer that the statements read. Return whether every path through the statements
        ends in ``return`` or ``raise``.
        """
        for statement in statements:
            match statement:
                case ast.If(test=test, body=body, orelse=orelse):
                    if self._follow_if(test, body, orelse):
                        return True
                case ast.ImportFrom(module=name, names=names, level=0) if name:
                    for alias in names:
                        bound = alias.asname or alias.name
                        self.known[bound] = getattr(importlib.import_module(name), alias.name, _UNKNOWN)
                case ast.With(items=items, body=body):
                    for item in items:
                        self._record_reads(item)
                    if self._follow_statements(body):
                        return True
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._record_reads(statement)
                    self.known[name] = self._evaluate(value)
                case ast.Return() | ast.Raise():
                    self._record_reads(statement)
                    return True
                case _:
                    self._record_reads(statement)
        return False

    def _follow_if(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> bool:
        self._record_reads(test)
        decided = self._evaluate_condition(test)
        if decided is not _UNKNOWN:
            return self._follow_statements(body if decided else orelse)
        before = dict(self.known)
        first_ends, first = self._follow_statements(body), self.known
        self.known = dict(before)
        second_ends = self._follow_statements(orelse)
        for name in {*first, *self.known}:
            if first.get(name, _UNKNOWN) is not self.known.get(name, _UNKNOWN):
                self.known[name] = _UNKNOWN
        return first_ends and second_ends

    def _look_up(self, name: str) -> Any:
        if name in self.known:
            return self.known[name]
        if name in self.hidden:
            return _UNKNOWN
        return self.function.__globals__.get(name, getattr(builtins, name, _UNKNOWN))

    def _evaluate_condition(self, condition: ast.expr) -> Any:
        value = self._evaluate(condition)
        return bool(value) if isinstance(value, bool | int | str | NoneType) else _UNKNOWN

    def _evaluate(self, expression: ast.expr) -> Any:
        """Return the value of an expression without running it, or ``_UNKNOWN``.

        The value can be known for constants, names, attributes, ``not``, ``and``, ``or``, comparisons and a few calls.
        """
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._look_up(name)
            case ast.Attribute(value=owner, attr=name):
                return self._read_attribute(self._evaluate(owner), name)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self._evaluate_condition(operand)
                return _UNKNOWN if truth is _UNKNOWN else not truth
            case ast.BoolOp(op=op, values=values):
                decisive, truths = isinstance(op, ast.Or), [self._evaluate_condition(value) for value in values]
                if decisive in truths:
                    return decisive
                return _UNKNOWN if _UNKNOWN in truths else not decisive
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compare(op, self._evaluate(left), self._evaluate(right))
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[], keywords=[]) if name.startswith("is_"):
                member = self._evaluate(owner)
                return getattr(member, name)() if hasattr(type(member), "__members__") else _UNKNOWN
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str() as name), default]):
                return self._read_attribute(self._evaluate(owner), name, self._evaluate(default))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._evaluate_call(self._look_up(name), [self._evaluate(argument) for argument in arguments])
        return _UNKNOWN

    @staticmethod
    def _compare(op: ast.cmpop, left: Any, right: Any) -> Any:
        if left is _UNKNOWN or right is _UNKNOWN:
            return _UNKNOWN
        match op:
            case ast.Is():
                return left is right
            case ast.IsNot():
                return left is not right
        plain = isinstance(left, str | int | NoneType) and isinstance(right, str | int | NoneType)
        match op:
            case ast.Eq() if plain:
                return left == right
            case ast.NotEq() if plain:
                return left != right
        return _UNKNOWN

    @staticmethod
    def _read_attribute(owner: Any, name: str, default: Any = _UNKNOWN) -> Any:
        kind: Any = type(owner)
        if owner is _UNKNOWN or name in _find_changing_attributes(kind):
            return _UNKNOWN
        if not isinstance(owner, ModuleType) and isinstance(inspect.getattr_static(kind, name, None), property):
            return _UNKNOWN  # the getter of a property runs code
        return getattr(owner, name, default)

    def _evaluate_call(self, function: Any, arguments: list[Any]) -> Any:
        """Return the value of a call if the called function is a single ``return`` statement, else ``_UNKNOWN``."""
        if not isinstance(function, FunctionType) or function in self.callers or _UNKNOWN in arguments:
            return _UNKNOWN
        names = engine.list_parameters(function)
        if len(names) != len(arguments):
            return _UNKNOWN
        try:
            reader = _Reader(function, dict(zip(names, arguments, strict=True)), "", self.callers)
        except (engine.Unsupported, OSError, ValueError):  # the source code cannot be read, or is no plain function
            return _UNKNOWN
        match reader.definition.body:
            case [ast.Return(value=ast.expr() as value)]:
                return reader._evaluate(value)
        return _UNKNOWN

    def _record_reads(self, tree: ast.AST) -> None:
        """Record the attributes of the layer that a piece of code reads, and follow the functions that receive the
        layer.
        """
        harmless: set[ast.AST] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name() as use, attr=attribute) if self._is_subject(use):
                    layer = self.known[self.subject]
                    called = inspect.getattr_static(type(layer), attribute, None)
                    engine.require(
                        not isinstance(called, FunctionType | property),
                        f"{self._get_name()} uses its layer's method or property {attribute}, which may read scales",
                    )
                    engine.require(
                        not (attribute.startswith("__") or isinstance(vars(layer).get(attribute), dict)),
                        f"{self._get_name()} reads its layer's {attribute}",
                    )
                    self.attributes.add(attribute)
                    harmless.add(use)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id=self.subject) as use, name, *_]
                ):
                    engine.require(
                        isinstance(name, ast.Constant), f"{self._get_name()} reads attributes by computed names"
                    )
                    self.attributes.add(str(name.value))  # type: ignore[attr-defined]
                    harmless.add(use)
                case ast.Call():
                    harmless |= self._follow_call(node)
        for node in ast.walk(tree):
            may_keep_layer = isinstance(node, ast.Name) and node.id == self.subject and node not in harmless
            engine.require(not may_keep_layer, f"{self._get_name()} may store a reference to its layer")
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.known[node.id] = _UNKNOWN

    def _get_name(self) -> str:
        return str(self.function.__qualname__)

    def _follow_call(self, call: ast.Call) -> set[ast.AST]:
        """If ``call`` passes the layer to a function, also record the attributes of the layer that this function may
        read.

        :returns: the arguments of ``call`` that are the layer, as syntax nodes. These uses of the layer store no
            reference to it, because the called function has been checked. The caller rejects all other uses.
        """
        positions = [place for place, value in enumerate(call.args) if self._is_subject(value)]
        keywords = [word.arg for word in call.keywords if word.arg and self._is_subject(word.value)]
        if not positions and not keywords:
            return set()
        match call.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                receiver = {"self": self.known["self"]}
                function = engine.require_unpatched(type(receiver["self"]), name)
            case ast.Name(id=name):
                function, receiver = self._look_up(name), {}
            case _:
                raise engine.Unsupported(f"{self._get_name()} may store a reference to its layer")
        engine.require(
            isinstance(function, FunctionType),
            f"{self._get_name()} passes its layer to {name}, whose code cannot be checked for the scales that it reads",
        )
        engine.require(function not in self.callers, f"{name} calls itself")
        parameters = engine.list_parameters(function)[len(receiver) :]
        subjects = [*(parameters[place] for place in positions), *keywords]
        engine.require(len(subjects) == 1, f"{self._get_name()} passes its layer to {name} twice")
        known = receiver | {subjects[0]: self.known[self.subject]}
        self.attributes |= _Reader(function, known, subjects[0], self.callers).read()
        return {value for value in (*call.args, *(word.value for word in call.keywords)) if self._is_subject(value)}

    def _is_subject(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Name) and value.id == self.subject
