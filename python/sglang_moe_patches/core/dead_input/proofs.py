"""Proofs that a decoder layer's input is dead, from the source code of the layer and of its model's loop.

The input is dead if no code reads it after attention has run. A proof follows a tensor's memory through the statements
of a function. An *alias* is a local name that may refer to this memory. The memory *escapes* if code may keep it in
another place, such as an attribute or a list. If a function contains code that a proof does not model, the proof fails.

Each proof accepts a function or a syntax tree. A server passes the functions of the model that it builds. The scan of
all model families (``test/tools/family_scan.py``) passes syntax trees, because it does not import the engine's models.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.dead_input.channel import ENGINE_OFFER

Code = Callable[..., Any] | ast.FunctionDef
MethodOf = Callable[[str], Code | None]
"""Type of a function that receives the name of a layer's attribute. It returns the method's code if the attribute is a
method, and ``None`` if it is a submodule."""
Place = int | str
"""Type of an argument's place in a call: its position such as 0, its keyword such as "residual", or ``*`` or ``**`` for
an unpacked argument."""

TENSOR_OF_HANDLE = "residual_access.buffer"
"""Name of the engine's function that returns the tensor of a handle. In some releases, a layer's input is a handle
instead of a tensor. The handle stands for a sum that is not computed yet, such as a sum over ranks."""
#: Names of the engine's methods that add the layer's input to the residual and run the norm before attention. These
#: methods keep no reference to the layer's input.
_NORMS_BEFORE_ATTENTION = frozenset(
    {
        "self.layer_communicator.prepare_attn",
        "self.layer_communicator.prepare_attn_and_capture_last_layer_outputs",
        "self.attn_boundary.prepare",
    }
)
_NORMS_AFTER_ATTENTION = frozenset({"self.layer_communicator.prepare_mlp", "self.ffn_boundary.prepare"})
#: Names of functions that add to a layer's result in place. The result is still the same tensor, which is the next
#: layer's input.
_IN_PLACE_ADDITIONS = frozenset({"residual_batch.add_to_output"})
#: Names of functions that return newly allocated memory.
_COPIES = frozenset({"residual_batch.snapshot"})
_IS_IDLE = "forward_batch.forward_mode.is_idle()"
_NAMESPACE_FUNCTIONS = frozenset({"locals", "vars", "eval", "exec"})
#: Names of a tensor's attributes that do not refer to its memory.
_METADATA_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim"})
_DEFERRED_CODE = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.GeneratorExp)
#: Syntax that binds a name inside an expression or a pattern, in another scope, or at a later time. If a function
#: contains such syntax, a proof about it fails.
_NOT_MODELLED = (
    *(ast.NamedExpr, ast.Match, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, *_DEFERRED_CODE),
)


# --- The skip reasons ------------------------------------------------------------------------------------------------

NO_PLAIN_SUM = "the residual of {} may not be a plain sum"
TOO_MANY_EXPERTS = "{} has {} modules of routed experts"


def find_layer_skip_reason(layer: str, forward: Code, method_of: MethodOf = lambda name: None) -> str | None:
    """Return why a decoder layer's input may be read after it was overwritten, or ``None`` if all proofs succeed.

    :param layer: the name of the layer's class.
    :param forward: the function or syntax tree of the layer's ``forward``.
    :param method_of: function that returns the code of the layer's methods (:data:`MethodOf`).
    """
    proofs = {
        f"{layer} may read its input after the first norm": input_dies(forward),
        f"{layer} may read attention's input after attention": attention_input_dies(forward, method_of),
        f"{layer} may keep captured hidden states": captures_only_sums(forward),
        f"{layer} may keep its result": keeps_no_result(forward),
    }
    return next((reason for reason, holds in proofs.items() if not holds), None)


def find_loop_skip_reason(model: str, forward: Code) -> str | None:
    """Return why a model's loop over its layers may keep a layer's input, or ``None`` if the proof succeeds.

    :param model: the name of the model's class.
    :param forward: the function or syntax tree of the model's ``forward``.
    """
    return None if loop_keeps_nothing(forward) else f"{model} may keep its layers' inputs"


# --- The layer's input -----------------------------------------------------------------------------------------------


def input_dies(forward: Code) -> bool:
    """Return whether a decoder layer's ``forward`` drops its input in the first statement that uses it.

    This statement must assign the result of a norm (:data:`_NORMS_BEFORE_ATTENTION`) to the name ``hidden_states``.

    In some releases ``forward`` first assigns the input to a second name, and passes this name to the engine's own
    offer, which this package disables. The second name must have no further use, except a type check or a use of its
    shape (:func:`_is_only_offered`).
    """
    definition = _parse_definition(forward)
    consumer, second_alias = _find_consumer(definition)
    return consumer is not None and (second_alias is None or _is_only_offered(definition, second_alias))


def _find_consumer(definition: ast.FunctionDef) -> tuple[ast.Assign | None, str | None]:
    """Find the statement that passes ``hidden_states`` to the norm before attention and overwrites that name.

    :returns: the statement, and a second name to which ``forward`` has assigned its input before. ``None`` stands for a
        missing statement or name.
    """
    if not _is_modelled(definition):
        return None, None
    statements = (statement for statement in definition.body if _find_uses(statement, "hidden_states"))
    first = next(statements, None)
    second_alias = _find_second_alias(first)
    consumer = first if second_alias is None else next(statements, None)
    match consumer:
        case ast.Assign(targets=[_], value=ast.Call(func=norm, args=args, keywords=keywords) as call):
            arguments = [*args, *(keyword.value for keyword in keywords)]
            uses = _find_uses(call, "hidden_states")
            is_norm = ast.unparse(norm) in _NORMS_BEFORE_ATTENTION and "hidden_states" in _find_names_assigned(consumer)
            if is_norm and _assigns_only_names(consumer) and uses and all(use in arguments for use in uses):
                return consumer, second_alias
    return None, second_alias


def _find_second_alias(statement: ast.stmt | None) -> str | None:
    """Return the name to which a statement assigns the layer's input, or ``None`` if the statement does not do so.

    For example, the result is "x" for the statement ``x = hidden_states``.

    In some releases ``hidden_states`` is a handle for a sum that is not computed yet. The statement may then assign the
    handle's tensor instead: ``x = f(hidden_states)``, where ``f`` is the engine's function :data:`TENSOR_OF_HANDLE`.
    """
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            is_input = ast.unparse(value) in ("hidden_states", f"{TENSOR_OF_HANDLE}(hidden_states)")
            return name if is_input else None
    return None


def _is_only_offered(definition: ast.FunctionDef, alias: str) -> bool:
    """Return whether an alias of the layer's input has no other use in a function than the engine's offer.

    A type check of the alias, and a use of its shape, are allowed, too. The function must assign the alias only once.
    """
    parents = _map_parents(definition)

    def is_harmless(use: ast.Name) -> bool:
        match parents[use]:
            case ast.Call(func=function):
                return ast.unparse(function) in (ENGINE_OFFER, "isinstance")
            case ast.Attribute(attr="shape"):
                return True
        return False

    uses = _find_uses(definition, alias)
    loads = [use for use in uses if isinstance(use.ctx, ast.Load)]
    return len(uses) - len(loads) == 1 and all(map(is_harmless, loads))


# --- What attention reads --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionFacts:
    """Attributes and submodules that a decoder layer's ``forward`` uses up to the norm after attention.

    :param attributes: names of the layer's attributes that ``forward`` looks up.
    :param submodules: the submodules that receive attention's input. The key is the submodule's name. The value
        contains the places (:data:`Place`) of the arguments that may share memory with the input.
    """

    attributes: frozenset[str]
    submodules: dict[str, frozenset[Place]]


def attention_input_dies(forward: Code, method_of: MethodOf = lambda name: None) -> bool:
    """Return whether :func:`follow_attention` proves that no code of a decoder layer reads attention's input later."""
    return follow_attention(forward, method_of) is not None


def follow_attention(forward: Code, method_of: MethodOf = lambda name: None) -> AttentionFacts | None:
    """Prove that no code of a decoder layer's ``forward`` can read attention's input after attention.

    Attention's input may lie in the memory of the layer's input, because the norm before attention may work in place.
    The proof follows this memory from the norm before attention to the norm after attention. From there on, no code may
    read an alias of the memory. The norm after attention is a method in :data:`_NORMS_AFTER_ATTENTION`, or a function
    that receives the layer as its first argument.

    The proof also follows the layer's own methods, but not its submodules. The caller proves that the submodules return
    new memory (:func:`returns_own_memory`).

    :returns: the attributes and submodules that ``forward`` uses up to the norm after attention. The result is ``None``
        if the proof fails.
    """
    definition = _parse_definition(forward)
    consumer, _ = _find_consumer(definition)
    if consumer is None:
        return None
    following = definition.body[definition.body.index(consumer) + 1 :]
    tracker = _AliasTracker(method_of)
    aliases: set[str] | None = _find_names_assigned(consumer) - {"residual"}
    for index, statement in enumerate(following):
        if aliases is None:
            return None
        if any(_is_norm_after_attention(node) for node in ast.walk(statement)):
            elsewhere = aliases - _find_names_assigned(statement)
            if aliases & _find_names_read(statement) or any(
                elsewhere & _find_names_read(later) for later in following[index:]
            ):
                return None
            before = definition.body[: definition.body.index(statement) + 1]
            submodules = {name: frozenset(places) for name, places in tracker.submodules.items()}
            return AttentionFacts(_find_attributes(before, method_of), submodules)
        aliases = _find_aliases_after(statement, aliases, tracker)
    return None


def _is_norm_after_attention(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(), args=[ast.Name(id="self"), *_]):
            return True
        case ast.Call(func=function):
            return ast.unparse(function) in _NORMS_AFTER_ATTENTION
    return False


def _find_attributes(statements: list[ast.stmt], method_of: MethodOf) -> frozenset[str]:
    """Return the names of all attributes of ``self`` in these statements and in the methods to which the statements
    refer.
    """
    attributes: set[str] = set()
    trees: list[ast.AST] = list(statements)
    while trees:
        new = {name for node in ast.walk(trees.pop()) if (name := _find_attribute_of_self(node))} - attributes
        attributes |= new
        trees += [_parse_definition(method) for name in sorted(new) if (method := method_of(name)) is not None]
    return frozenset(attributes)


def _find_attribute_of_self(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


@dataclass(frozen=True)
class _AliasTracker:
    """State of a proof that follows aliases of attention's input through a decoder layer's ``forward`` and methods.

    :param method_of: function that returns the code of the layer's methods (:data:`MethodOf`).
    :param submodules: the submodules that have received an alias so far. The key is the submodule's name. The value
        contains the places (:data:`Place`) of the aliases.
    :param methods: names of the layer's own methods that the proof follows now, the innermost call last. For example,
        the tuple is ``("run", "prepare")`` if ``forward`` calls ``self.run``, and ``run`` calls ``self.prepare``. While
        the proof follows ``forward`` itself, the tuple is empty. A ``return`` then makes the proof fail, because
        ``forward`` must not return before the norm after attention.
    """

    method_of: MethodOf
    submodules: dict[str, set[Place]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()

    def escapes(self, tree: ast.expr, aliases: set[str]) -> bool:
        """Return whether an expression passes an alias to a call that may keep it."""
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and aliases & _find_names_read(node)]
        return any(ast.unparse(call.func) != "isinstance" and not self._accepts_call(call, aliases) for call in calls)

    def _accepts_call(self, call: ast.Call, aliases: set[str]) -> bool:
        """Return whether the proof accepts a call that passes aliases as arguments.

        A call of a submodule is accepted. ``submodules`` records the places of the aliases, and the caller of the proof
        checks the submodule's code later. A call of one of the layer's own methods is accepted if the proof succeeds
        for the method's statements. Any other call may keep an alias, so it is not accepted.
        """
        name = _find_called_attribute(call)
        if name is None:
            return False
        places = _find_places(call, aliases)
        method = self.method_of(name)
        if method is None:
            self.submodules.setdefault(name, set()).update(places)
            return True
        definition = _parse_definition(method)
        parameters = _find_parameters(definition, places)
        if parameters is None or name in self.methods or not _is_modelled(definition):
            return False
        inside = replace(self, methods=(*self.methods, name))
        return _find_aliases_after_all(definition.body, parameters, inside) is not None


def _find_places(call: ast.Call, aliases: set[str]) -> set[Place]:
    """Return the places at which a call receives one of ``aliases``, the names that may refer to attention's input.

    A place is the position of an argument, its keyword, ``*`` or ``**``.
    """
    places: set[Place] = {
        "*" if isinstance(argument, ast.Starred) else index
        for index, argument in enumerate(call.args)
        if aliases & _find_names_read(argument)
    }
    return places | {word.arg or "**" for word in call.keywords if aliases & _find_names_read(word.value)}


def _find_parameters(definition: ast.FunctionDef, places: frozenset[Place] | set[Place]) -> set[str] | None:
    """Return the names of a method's parameters that receive the arguments in ``places`` of a call.

    For example, the method is ``run(self, a, b)``, and the call is ``self.run(x, b=y)``. The places 0 and "b" then give
    the names ``a`` and ``b``.

    :param definition: the method.
    :returns: the names. The result is ``None`` if an argument has no named parameter of its own, for example if the
        call passes ``*values``.
    """
    arguments = definition.args
    by_position = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]
    by_keyword = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    by_place: dict[Place, str] = {keyword: keyword for keyword in by_keyword}
    by_place.update(enumerate(by_position))
    parameters = {by_place[place] for place in places if place in by_place}
    return parameters if len(parameters) == len(places) and parameters <= set(by_keyword) else None


def _find_aliases_after(statement: ast.stmt, aliases: set[str], tracker: _AliasTracker) -> set[str] | None:
    """Return the aliases of attention's input after ``statement``: the local names that may refer to its memory.

    :param aliases: the aliases before the statement.
    :returns: the aliases, or ``None`` if the proof fails. The proof fails in two cases:

        - The memory of attention's input may escape through a call, an attribute or a return value.
        - The proof does not model this kind of statement.
    """
    match statement:
        case ast.Assign(targets=targets, value=value):
            if tracker.escapes(value, aliases) or any(aliases & _find_names_read(target) for target in targets):
                return None
            if not aliases & _find_aliased_names(value):
                return aliases - _find_names_assigned(statement)
            return aliases | _find_names_assigned(statement) if _assigns_only_names(statement) else None
        case ast.If(test=test, body=body, orelse=orelse):
            if tracker.escapes(test, aliases):
                return None
            conditions = set(_split_condition(test))
            if conditions & {f"isinstance({alias}, tuple)" for alias in aliases}:
                body = []  # this branch gets a tuple of quantized tensors, which share no memory with the input
            if_true = _find_aliases_after_all(body, aliases, tracker)
            there_are_tokens = {f"{alias}.shape[0] {comparison} 0" for alias in aliases for comparison in ("!=", ">")}
            if not orelse and conditions <= there_are_tokens | {f"not {_IS_IDLE}"}:
                return if_true
            return _join_branches([if_true, _find_aliases_after_all(orelse, aliases, tracker)])
        case ast.With(items=items, body=body):
            names_read = {node.id for item in items for node in ast.walk(item) if isinstance(node, ast.Name)}
            return None if names_read & aliases else _find_aliases_after_all(body, aliases, tracker)
        case ast.Try(body=body, handlers=[], orelse=orelse, finalbody=finalbody):
            return _find_aliases_after_all([*body, *orelse, *finalbody], aliases, tracker)
        case ast.Return(value=value) if tracker.methods:
            escapes = value is not None and (tracker.escapes(value, aliases) or aliases & _find_aliased_names(value))
            return None if escapes else aliases
    returns = not tracker.methods and any(isinstance(node, ast.Return) for node in ast.walk(statement))
    return None if returns or aliases & _find_names_read(statement) else aliases


def _find_aliases_after_all(statements: list[ast.stmt], aliases: set[str], tracker: _AliasTracker) -> set[str] | None:
    return _follow_statements(
        statements, aliases, lambda statement, before: _find_aliases_after(statement, before, tracker)
    )


def _split_condition(test: ast.expr) -> list[str]:
    """Split a condition such as ``a and b`` at each ``and``. Return the source text of each part."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return [condition for value in values for condition in _split_condition(value)]
    return [ast.unparse(test)]


def _find_called_attribute(node: ast.AST) -> str | None:
    """Return the name of the attribute of ``self`` that an expression calls, or ``None`` if it calls none.

    The attribute is a method or a submodule: the name is "norm" for ``self.norm(x)``. It may also be a list of
    submodules: the name is "norms" for ``self.norms[0](x)``.
    """
    match node:
        case ast.Call(func=ast.Subscript(value=module)) | ast.Call(func=module):
            return _find_attribute_of_self(module)
    return None


# --- What a submodule returns ----------------------------------------------------------------------------------------


def returns_own_memory(forward: Code, places: frozenset[Place]) -> bool:
    """Return whether the result of a submodule's ``forward`` shares no memory with the arguments in ``places``.

    Batches without tokens are an exception: for them, ``forward`` may return such an argument, because no layer offers
    its input then.

    The proof assumes that the submodule's own methods and submodules return new memory. For a call of any other
    function, the proof assumes that the result may share memory with the call's arguments.

    :param places: places of the arguments that may share memory with the layer's input.
    """
    definition = _parse_definition(forward)
    parameters = _find_parameters(definition, places)
    return (
        parameters is not None
        and _follow_statements(definition.body, parameters, _find_submodule_aliases_after) is not None
    )


def _find_submodule_aliases_after(statement: ast.stmt, aliases: set[str]) -> set[str] | None:
    """Return the names in a submodule's ``forward`` that may alias the tracked arguments after ``statement``.

    :param aliases: the aliases before the statement.
    :returns: the names, or ``None`` if the proof fails. The proof fails if the statement may return an alias, or if the
        proof does not model this kind of statement.
    """
    if any(isinstance(node, _NOT_MODELLED) and aliases & _find_names_read(node) for node in ast.walk(statement)):
        return None
    match statement:
        case ast.Return(value=value):
            return None if value is not None and aliases & _find_aliased_names(value, _calls_own_attribute) else aliases
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            return aliases | stored if aliases & _find_aliased_names(value, _calls_own_attribute) else aliases - stored
        case ast.If(test=test, body=body, orelse=orelse):
            there_are_no_tokens = {_IS_IDLE, *(f"{alias}.shape[0] == 0" for alias in aliases)}
            branches = [orelse] if ast.unparse(test) in there_are_no_tokens else [body, orelse]
        case ast.For(body=body, orelse=orelse) | ast.While(body=body, orelse=orelse):
            branches = [[], [*body, *body, *orelse]]
        case ast.With(body=body):
            branches = [body]
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
            rest = [*orelse, *finalbody]
            branches = [[*body, *rest], *([*body, *handler.body, *finalbody] for handler in handlers)]
        case _:
            return aliases
    return _join_branches([_follow_statements(branch, aliases, _find_submodule_aliases_after) for branch in branches])


def _calls_own_attribute(call: ast.Call) -> bool:
    """Return whether a call runs a method or a submodule of ``self``, such as ``self.norm(x)`` or
    ``self.norm.forward(x)``.
    """
    called: ast.expr = call.func
    while isinstance(called, ast.Attribute | ast.Subscript):
        called = called.value
    return isinstance(called, ast.Name) and called.id == "self" and called is not call.func


# --- What is captured, and the layer's result ------------------------------------------------------------------------


def captures_only_sums(forward: Code) -> bool:
    """Return whether no statement of a layer's ``forward`` captures hidden states, except the norm before attention.

    *Capturing* a tensor means to keep it for other code, such as speculative decoding. The norm before attention may
    capture hidden states, because it captures only new tensors: sums of the layer's input and the residual.

    Any other statement of ``forward`` might capture the input itself. This function recognizes such a statement by the
    letters "captur". The result is therefore false if a statement other than the norm uses one of these:

    - a parameter of ``forward`` with "captur" in its name, such as ``captured_last_layer_outputs``
    - a string constant with "captur" in it, such as a key of ``kwargs``
    """
    definition = _parse_definition(forward)
    consumer, _ = _find_consumer(definition)
    arguments = [*definition.args.args, *definition.args.kwonlyargs]
    captures = {argument.arg for argument in arguments if "captur" in argument.arg}
    return not any(
        (isinstance(node, ast.Name) and node.id in captures)
        or (isinstance(node, ast.Constant) and "captur" in str(node.value))  # a key of ``kwargs``
        for statement in definition.body
        if statement is not consumer
        for node in ast.walk(statement)
    )


def keeps_no_result(forward: Code) -> bool:
    """Return whether a layer's ``forward`` keeps no reference to a tensor that it computes.

    The layer's result is the next layer's input. If ``forward`` kept a reference to its result, the next layer's input
    would not be dead. ``forward`` may set an attribute of a tensor to a constant, as in ``hidden_states.mark = True``.
    This proof does not check whether submodules and norms keep a reference.
    """
    nodes = list(ast.walk(_parse_definition(forward)))
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    computed, known = {"hidden_states"}, set[str]()
    while computed != known:
        known = set(computed)
        computed.update(*(_find_names_assigned(node) for node in assignments if known & _find_names_read(node.value)))
    marks = [target for node in assignments if isinstance(node.value, ast.Constant) for target in node.targets]

    def keeps(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                return node not in marks
            case ast.Expr(value=value) | ast.AugAssign(value=value) | ast.withitem(context_expr=ast.Call() as value):
                return bool(computed & _find_names_read(value))
        return False

    return not any(map(keeps, nodes))


# --- The loop over the layers ----------------------------------------------------------------------------------------


def loop_keeps_nothing(forward: Code) -> bool:
    """Return whether a model's loop over its decoder layers keeps no reference to a layer's input.

    The loop must assign each layer's result to the name ``hidden_states``. This name then no longer refers to the
    layer's input, and no other name may refer to it.

    - The loop may add to a layer's result in place.
    - The loop may capture sums of the hidden states and the residual, which are new tensors.
    - While there is no residual, the loop may capture the hidden states themselves. The next layer offers no input
      then.
    """
    definition = _parse_definition(forward)
    match list(find_layer_loops(definition)):
        case [loop]:
            return _loop_keeps_no_input(loop) and not _reads_hidden_states_elsewhere(definition)
    return False


def find_layer_loops(forward: Code) -> Iterator[ast.For]:
    """Yield each ``for`` loop over the decoder layers in a model's ``forward``."""
    for loop in ast.walk(_parse_definition(forward)):
        if isinstance(loop, ast.For) and any(_runs_layer(node) for node in ast.walk(loop)):
            yield loop


def _runs_layer(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Subscript(value=layers)):
            return ast.unparse(layers) == "self.layers"
        case ast.Call(func=ast.Name(id="layer")):
            return True
    return False


def _reads_hidden_states_elsewhere(definition: ast.FunctionDef) -> bool:
    """Return whether code outside a function's own statements may read its local name ``hidden_states``.

    Such code is an inner function, a ``global`` statement or a call such as ``locals()``.
    """
    return any(
        isinstance(node, ast.Global | ast.Nonlocal)
        or _reads_namespace(node)
        or (isinstance(node, _DEFERRED_CODE) and bool(_find_uses(node, "hidden_states")))
        for node in ast.walk(definition)
        if node is not definition
    )


def _loop_keeps_no_input(loop: ast.For) -> bool:
    parents = _map_parents(loop)
    runs = [parents[node] for node in ast.walk(loop) if _runs_layer(node)]
    uses = _find_uses(loop, "hidden_states")
    return all(isinstance(run, ast.Assign) and "hidden_states" in _find_names_assigned(run) for run in runs) and all(
        _stores_layer_result(use, parents) if isinstance(use.ctx, ast.Store) else _keeps_no_reference(use, parents)
        for use in uses
    )


def _stores_layer_result(use: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether an assignment to ``hidden_states``, in a model's loop over its layers, stores a layer's result.

    The assigned value may also be an in-place addition to the result, which returns the same tensor
    (:data:`_IN_PLACE_ADDITIONS`).
    """
    parent = parents[use]
    match parents[parent] if isinstance(parent, ast.Tuple) else parent:
        case ast.Assign(targets=[_], value=value):
            return _runs_layer(value) or _adds_in_place(value)
    return False


def _keeps_no_reference(use: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a use of ``hidden_states``, in a model's loop over its layers, keeps no reference to the tensor.

    Such a use passes the tensor to a layer, adds it to another tensor, adds another tensor to it in place, or copies
    it.
    """
    parent = parents[use]
    user = parents.get(parent)  # the loop itself has no parent in ``parents``
    match parent:
        case ast.BinOp(op=ast.Add()):
            return True
        case ast.IfExp(test=test, body=body, orelse=orelse):  # if there is no residual, no layer offers its input
            condition = ast.unparse(test)
            return use is {"residual is None": body, "residual is not None": orelse}.get(condition)
        case ast.Attribute(attr="add_"):
            return isinstance(user, ast.Call) and user.func is parent and isinstance(parents[user], ast.Expr)
        case ast.Call(func=function) if ast.unparse(function) in _COPIES:
            return True
        case ast.Call() if _adds_in_place(parent):
            targets = user.targets if isinstance(user, ast.Assign) else []
            return [ast.unparse(target) for target in targets] == ["hidden_states"]
        case ast.keyword():
            return user is not None and _runs_layer(user)
    return _runs_layer(parent)


def _adds_in_place(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in _IN_PLACE_ADDITIONS


# --- Aliases after several statements --------------------------------------------------------------------------------


def _follow_statements(
    statements: list[ast.stmt], aliases: set[str], follow_one: Callable[[ast.stmt, set[str]], set[str] | None]
) -> set[str] | None:
    """Return the aliases of the memory that a proof follows, after all ``statements``.

    The result is ``None`` if the proof fails in one of the statements.

    :param aliases: the aliases before the first statement.
    :param follow_one: function that returns the aliases after one statement, or ``None`` if the proof fails.
    """
    after: set[str] | None = aliases
    for statement in statements:
        after = None if after is None else follow_one(statement, after)
    return after


def _join_branches(branches: list[set[str] | None]) -> set[str] | None:
    """Return the union of the aliases after several branches, or ``None`` if the proof fails in one of the branches."""
    proved = [branch for branch in branches if branch is not None]
    return set().union(*proved) if len(proved) == len(branches) else None


# --- Syntax trees ----------------------------------------------------------------------------------------------------


def _parse_definition(code: Code) -> ast.FunctionDef:
    if isinstance(code, ast.FunctionDef):
        return code
    (definition,) = ast.parse(engine.read_source(code)).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _is_modelled(definition: ast.FunctionDef) -> bool:
    """Return whether a function binds local names only in ways that the proofs model, such as assignments and loops."""
    inner = (node for node in ast.walk(definition) if node is not definition)
    return not any(isinstance(node, _NOT_MODELLED) or _reads_namespace(node) for node in inner)


def _reads_namespace(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in _NAMESPACE_FUNCTIONS


def _map_parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _find_uses(tree: ast.AST, name: str) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]


def _find_aliased_names(
    value: ast.AST, returns_new_memory: Callable[[ast.Call], object] = _find_called_attribute
) -> set[str]:
    """Return the local names whose tensors may share memory with an expression's value.

    :param returns_new_memory: function that receives a call, and returns a true value if the call returns new memory.
        The default function returns a true value for all calls of the layer's own submodules and methods.
    """
    match value:
        case ast.Name(id=name):
            return {name}
        case ast.Compare():
            return set()
        case ast.Attribute(attr=attribute) if attribute in _METADATA_ATTRIBUTES:
            return set()
        case ast.Call() if returns_new_memory(value):
            return set()
    return set().union(*(_find_aliased_names(child, returns_new_memory) for child in ast.iter_child_nodes(value)))


def _find_names_read(tree: ast.AST) -> set[str]:
    """Return the names that a piece of code reads.

    A use of a tensor's shape, dtype or device does not count, because it does not read the tensor's memory.
    """
    match tree:
        case ast.Name(id=name, ctx=ast.Load()):
            return {name}
        case ast.Attribute(attr=attribute) if attribute in _METADATA_ATTRIBUTES:
            return set()
    return set().union(*map(_find_names_read, ast.iter_child_nodes(tree)))


def _find_names_assigned(statement: ast.stmt) -> set[str]:
    """Return the plain names to which an assignment assigns. Attributes and items are left out."""
    return {target.id for target in _find_targets(statement) if isinstance(target, ast.Name)}


def _find_targets(statement: ast.stmt) -> list[ast.expr]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _assigns_only_names(statement: ast.Assign) -> bool:
    return all(isinstance(target, ast.Name) for target in _find_targets(statement))
