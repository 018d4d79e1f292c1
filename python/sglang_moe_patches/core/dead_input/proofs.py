"""Proofs, from the code of a decoder layer and of its model's loop, that the layer's input is a dead input.

An *alias* is a name that may mean the tracked memory, an *escape* is memory kept where no alias shows it. Every proof
takes a function, or the syntax tree of one: a server proves the model that it builds, and the families of an engine are
scanned without importing them. Code that a proof does not model is refused.
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
"""The code of a layer's own method by its name; ``None`` for a submodule."""
Place = int | str
"""Where a call has an argument: its position or its keyword, or ``*`` or ``**`` for what it unpacks."""

TENSOR_OF_HANDLE = "residual_access.buffer"
"""The engine's function that finds the tensor of an input that may be a handle, a sum that is still owed."""
#: The norms before attention, with the residual's addition: after them only the model's loop has the layer's input.
_NORMS_BEFORE_ATTENTION = frozenset(
    {
        "self.layer_communicator.prepare_attn",
        "self.layer_communicator.prepare_attn_and_capture_last_layer_outputs",
        "self.attn_boundary.prepare",
    }
)
_NORMS_AFTER_ATTENTION = frozenset({"self.layer_communicator.prepare_mlp", "self.ffn_boundary.prepare"})
#: It writes into what a layer returned, which stays what the next one is given.
_IN_PLACE_ADDITIONS = frozenset({"residual_batch.add_to_output"})
#: They return memory of their own.
_COPIES = frozenset({"residual_batch.snapshot"})
_IS_IDLE = "forward_batch.forward_mode.is_idle()"
_NAMESPACES = frozenset({"locals", "vars", "eval", "exec"})
#: Attributes of a tensor that hold none of its memory.
_MEMORY_FREE = frozenset({"shape", "dtype", "device", "ndim"})
_RUN_LATER = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.GeneratorExp)
#: They bind a name within an expression or a pattern, for another function, or for whenever they run.
_NOT_MODELLED = (
    *(ast.NamedExpr, ast.Match, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, *_RUN_LATER),
)


# --- The skip reasons ------------------------------------------------------------------------------------------------

NO_PLAIN_SUM = "the residual of {} may be more than a sum"
TOO_MANY_EXPERTS = "{} has {} modules of routed experts"


def layer_skip_reason(layer: str, forward: Code, method_of: MethodOf = lambda name: None) -> str | None:
    """Why the input of a decoder layer may be read after it was overwritten, by the layer's ``forward``.

    :param layer: the layer's name.
    """
    proofs = {
        f"{layer} may still use its input": input_dies(forward),
        f"{layer} may still use what attention read": attention_lets_go(forward, method_of),
        f"{layer} may keep what is captured": captures_sums_alone(forward),
        f"{layer} may keep its result": keeps_no_result(forward),
    }
    return next((reason for reason, holds in proofs.items() if not holds), None)


def loop_skip_reason(model: str, forward: Code) -> str | None:
    """Why the loop over the layers may keep their inputs."""
    return None if loop_keeps_nothing(forward) else f"{model} may keep its layers' inputs"


# --- The layer's input -----------------------------------------------------------------------------------------------


def input_dies(forward: Code) -> bool:
    """Whether a decoder layer's ``forward`` gives up its input with the first statement that uses it.

    That statement assigns a norm's result (:data:`_NORMS_BEFORE_ATTENTION`) to the name ``hidden_states`` itself. The
    input has no other alias, except one under which the engine itself offers it, and which has no other use. That offer
    is withheld.
    """
    definition = _definition(forward)
    consumer, second_alias = _find_consumer(definition)
    return consumer is not None and (second_alias is None or _is_only_offered(definition, second_alias))


def _find_consumer(definition: ast.FunctionDef) -> tuple[ast.Assign | None, str | None]:
    """The statement that assigns a norm's result to ``hidden_states``, an argument of that norm, and the second alias
    that the input has before it."""
    if not _is_modelled(definition):
        return None, None
    statements = (statement for statement in definition.body if _uses(statement, "hidden_states"))
    first = next(statements, None)
    second_alias = _second_alias(first)
    consumer = first if second_alias is None else next(statements, None)
    match consumer:
        case ast.Assign(targets=[_], value=ast.Call(func=norm, args=args, keywords=keywords) as call):
            arguments = [*args, *(keyword.value for keyword in keywords)]
            uses = _uses(call, "hidden_states")
            is_norm = ast.unparse(norm) in _NORMS_BEFORE_ATTENTION and "hidden_states" in _assigned(consumer)
            if is_norm and _only_names(consumer) and uses and all(use in arguments for use in uses):
                return consumer, second_alias
    return None, second_alias


def _second_alias(statement: ast.stmt | None) -> str | None:
    """The name that a statement gives to the input, or to the tensor in it (:data:`TENSOR_OF_HANDLE`)."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            is_input = ast.unparse(value) in ("hidden_states", f"{TENSOR_OF_HANDLE}(hidden_states)")
            return name if is_input else None
    return None


def _is_only_offered(definition: ast.FunctionDef, alias: str) -> bool:
    """Whether a function only offers what an alias means, and reads its type and shape."""
    parents = _parents(definition)

    def is_harmless(use: ast.Name) -> bool:
        match parents[use]:
            case ast.Call(func=function):
                return ast.unparse(function) in (ENGINE_OFFER, "isinstance")
            case ast.Attribute(attr="shape"):
                return True
        return False

    uses = _uses(definition, alias)
    loads = [use for use in uses if isinstance(use.ctx, ast.Load)]
    return len(uses) - len(loads) == 1 and all(map(is_harmless, loads))


# --- What attention reads --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionFacts:
    """What a layer does until the norm after attention.

    :param attributes: the names that it looks up in itself.
    :param submodules: those that it gives what attention reads, and at which places.
    """

    attributes: frozenset[str]
    submodules: dict[str, frozenset[Place]]


def attention_lets_go(forward: Code, method_of: MethodOf = lambda name: None) -> bool:
    """Whether nothing has what attention read once attention is done (:func:`follow_attention`)."""
    return follow_attention(forward, method_of) is not None


def follow_attention(forward: Code, method_of: MethodOf = lambda name: None) -> AttentionFacts | None:
    """Follow what attention reads to the norm after it: the norm before may have written that into the layer's input.

    At the norm after attention (:data:`_NORMS_AFTER_ATTENTION`, or a function of the module that is given the layer) it
    may have no alias, and none may be used later. The layer's own methods are followed. That its submodules return
    memory of their own is for the caller to prove (:func:`returns_own_memory`); without tokens they may not, but
    nothing is on offer then.

    :returns: ``None`` if something may still have it.
    """
    definition = _definition(forward)
    consumer, _ = _find_consumer(definition)
    if consumer is None:
        return None
    following = definition.body[definition.body.index(consumer) + 1 :]
    layer = _Layer(method_of)
    aliases: set[str] | None = _assigned(consumer) - {"residual"}
    for index, statement in enumerate(following):
        if aliases is None:
            return None
        if any(_is_norm_after_attention(node) for node in ast.walk(statement)):
            elsewhere = aliases - _assigned(statement)
            if aliases & _loaded(statement) or any(elsewhere & _loaded(later) for later in following[index:]):
                return None
            before = definition.body[: definition.body.index(statement) + 1]
            submodules = {name: frozenset(places) for name, places in layer.submodules.items()}
            return AttentionFacts(_attributes(before, method_of), submodules)
        aliases = _aliases_after(statement, aliases, layer)
    return None


def _is_norm_after_attention(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(), args=[ast.Name(id="self"), *_]):
            return True
        case ast.Call(func=function):
            return ast.unparse(function) in _NORMS_AFTER_ATTENTION
    return False


def _attributes(statements: list[ast.stmt], method_of: MethodOf) -> frozenset[str]:
    """What statements, and the methods that they mention, look up in the layer."""
    attributes: set[str] = set()
    trees: list[ast.AST] = list(statements)
    while trees:
        new = {name for node in ast.walk(trees.pop()) if (name := _attribute_of_self(node))} - attributes
        attributes |= new
        trees += [_definition(method) for name in sorted(new) if (method := method_of(name)) is not None]
    return frozenset(attributes)


def _attribute_of_self(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


@dataclass(frozen=True)
class _Layer:
    """What follows an alias through a layer's own code.

    :param submodules: where each submodule was given an alias so far.
    :param methods: the method that is followed, after those that called it; none in ``forward``, which must not return.
    """

    method_of: MethodOf
    submodules: dict[str, set[Place]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()

    def escapes(self, tree: ast.expr, aliases: set[str]) -> bool:
        """Whether something that may keep it is given what one of the aliases means."""
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and aliases & _loaded(node)]
        return any(ast.unparse(call.func) != "isinstance" and not self._is_followed(call, aliases) for call in calls)

    def _is_followed(self, call: ast.Call, aliases: set[str]) -> bool:
        name = _submodule(call)
        if name is None:
            return False
        places = _places(call, aliases)
        method = self.method_of(name)
        if method is None:
            self.submodules.setdefault(name, set()).update(places)
            return True
        definition = _definition(method)
        parameters = _parameters(definition, places)
        if parameters is None or name in self.methods or not _is_modelled(definition):
            return False
        inside = replace(self, methods=(*self.methods, name))
        return _aliases_after_all(definition.body, parameters, inside) is not None


def _places(call: ast.Call, aliases: set[str]) -> set[Place]:
    """Where a call is given an alias."""
    places: set[Place] = {
        "*" if isinstance(argument, ast.Starred) else index
        for index, argument in enumerate(call.args)
        if aliases & _loaded(argument)
    }
    return places | {word.arg or "**" for word in call.keywords if aliases & _loaded(word.value)}


def _parameters(definition: ast.FunctionDef, places: frozenset[Place] | set[Place]) -> set[str] | None:
    """A method's parameters by their places in a call; ``None`` if one of them is unknown."""
    arguments = definition.args
    by_position = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]
    by_keyword = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    by_place: dict[Place, str] = {keyword: keyword for keyword in by_keyword}
    by_place.update(enumerate(by_position))
    parameters = {by_place[place] for place in places if place in by_place}
    return parameters if len(parameters) == len(places) and parameters <= set(by_keyword) else None


def _aliases_after(statement: ast.stmt, aliases: set[str], layer: _Layer) -> set[str] | None:
    """The names that may alias the tracked memory once ``statement`` has run.

    :returns: ``None`` if the memory may escape (a call keeps it, an attribute holds it, it is returned), or if the
        statement is of a kind that this analysis does not model.
    """
    match statement:
        case ast.Assign(targets=targets, value=value):
            if layer.escapes(value, aliases) or any(aliases & _loaded(target) for target in targets):
                return None
            if not aliases & _memory(value):
                return aliases - _assigned(statement)
            return aliases | _assigned(statement) if _only_names(statement) else None
        case ast.If(test=test, body=body, orelse=orelse):
            if layer.escapes(test, aliases):
                return None
            conditions = set(_conditions(test))
            if conditions & {f"isinstance({alias}, tuple)" for alias in aliases}:
                body = []  # for a tuple of quantized values, which are no memory of the input
            if_true = _aliases_after_all(body, aliases, layer)
            there_are_tokens = {f"{alias}.shape[0] {comparison} 0" for alias in aliases for comparison in ("!=", ">")}
            if not orelse and conditions <= there_are_tokens | {f"not {_IS_IDLE}"}:
                return if_true
            return _union([if_true, _aliases_after_all(orelse, aliases, layer)])
        case ast.With(items=items, body=body):
            used = {node.id for item in items for node in ast.walk(item) if isinstance(node, ast.Name)}
            return None if used & aliases else _aliases_after_all(body, aliases, layer)
        case ast.Try(body=body, handlers=[], orelse=orelse, finalbody=finalbody):
            return _aliases_after_all([*body, *orelse, *finalbody], aliases, layer)
        case ast.Return(value=value) if layer.methods:
            escapes = value is not None and (layer.escapes(value, aliases) or aliases & _memory(value))
            return None if escapes else aliases
    returns = not layer.methods and any(isinstance(node, ast.Return) for node in ast.walk(statement))
    return None if returns or aliases & _loaded(statement) else aliases


def _aliases_after_all(statements: list[ast.stmt], aliases: set[str], layer: _Layer) -> set[str] | None:
    return _after_all(statements, aliases, lambda statement, before: _aliases_after(statement, before, layer))


def _conditions(test: ast.expr) -> list[str]:
    """What must hold for a condition to hold, each as text."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return [condition for value in values for condition in _conditions(value)]
    return [ast.unparse(test)]


def _submodule(node: ast.AST) -> str | None:
    """The name of a layer's submodule, of the list that has it, or of the layer's method, where ``node`` calls it."""
    match node:
        case ast.Call(func=ast.Subscript(value=module)) | ast.Call(func=module):
            return _attribute_of_self(module)
    return None


# --- What a submodule returns ----------------------------------------------------------------------------------------


def returns_own_memory(forward: Code, places: frozenset[Place]) -> bool:
    """Whether a submodule's ``forward`` returns nothing that it was given at these places, unless there are no tokens.

    What its own methods and submodules return is taken to be theirs, and what other functions return to be their
    arguments'.
    """
    definition = _definition(forward)
    parameters = _parameters(definition, places)
    return parameters is not None and _after_all(definition.body, parameters, _unreturned_after) is not None


def _unreturned_after(statement: ast.stmt, aliases: set[str]) -> set[str] | None:
    """The names that may alias what a submodule was given once ``statement`` has run; ``None`` if it may return one."""
    if any(isinstance(node, _NOT_MODELLED) and aliases & _loaded(node) for node in ast.walk(statement)):
        return None
    match statement:
        case ast.Return(value=value):
            return None if value is not None and aliases & _memory(value, _is_of_self) else aliases
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            return aliases | stored if aliases & _memory(value, _is_of_self) else aliases - stored
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
    return _union([_after_all(branch, aliases, _unreturned_after) for branch in branches])


def _is_of_self(call: ast.Call) -> bool:
    """Whether what is called is reached through ``self``."""
    called: ast.expr = call.func
    while isinstance(called, ast.Attribute | ast.Subscript):
        called = called.value
    return isinstance(called, ast.Name) and called.id == "self" and called is not call.func


# --- What is captured, and the layer's result ------------------------------------------------------------------------


def captures_sums_alone(forward: Code) -> bool:
    """Whether a layer's ``forward`` hands on what is to be captured to its first norm alone, which captures sums with
    the residual."""
    definition = _definition(forward)
    consumer, _ = _find_consumer(definition)
    arguments = [*definition.args.args, *definition.args.kwonlyargs]
    captures = {argument.arg for argument in arguments if "captur" in argument.arg}
    return not any(
        (isinstance(node, ast.Name) and node.id in captures)
        or (isinstance(node, ast.Constant) and "captur" in str(node.value))  # of the other keywords
        for statement in definition.body
        if statement is not consumer
        for node in ast.walk(statement)
    )


def keeps_no_result(forward: Code) -> bool:
    """Whether a layer's ``forward`` keeps nothing that it computes: what it returns is the next layer's input.

    It may mark a tensor with a constant. What submodules and norms keep is not asked.
    """
    nodes = list(ast.walk(_definition(forward)))
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    computed, known = {"hidden_states"}, set[str]()
    while computed != known:
        known = set(computed)
        computed.update(*(_assigned(node) for node in assignments if known & _loaded(node.value)))
    marks = [target for node in assignments if isinstance(node.value, ast.Constant) for target in node.targets]

    def keeps(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                return node not in marks
            case ast.Expr(value=value) | ast.AugAssign(value=value) | ast.withitem(context_expr=ast.Call() as value):
                return bool(computed & _loaded(value))
        return False

    return not any(map(keeps, nodes))


# --- The loop over the layers ----------------------------------------------------------------------------------------


def loop_keeps_nothing(forward: Code) -> bool:
    """Whether the loop over the layers, in a model's ``forward``, keeps a layer's input in no other name than
    ``hidden_states``, to which it assigns the layer's result.

    Hidden states that are captured on the way are sums with the residual, which are tensors of their own; without a
    residual nothing is on offer. Something may be added to a layer's result, in place.
    """
    definition = _definition(forward)
    match list(loops(definition)):
        case [loop]:
            return _keeps_nothing(loop) and not _is_read_elsewhere(definition)
    return False


def loops(forward: Code) -> Iterator[ast.For]:
    """The loops over the layers in a model's ``forward``."""
    for loop in ast.walk(_definition(forward)):
        if isinstance(loop, ast.For) and any(_runs_layer(node) for node in ast.walk(loop)):
            yield loop


def _runs_layer(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Subscript(value=layers)):
            return ast.unparse(layers) == "self.layers"
        case ast.Call(func=ast.Name(id="layer")):
            return True
    return False


def _is_read_elsewhere(definition: ast.FunctionDef) -> bool:
    """Whether anything but a function's own statements, as they are run, may read its ``hidden_states``."""
    return any(
        isinstance(node, ast.Global | ast.Nonlocal)
        or _is_namespace(node)
        or (isinstance(node, _RUN_LATER) and bool(_uses(node, "hidden_states")))
        for node in ast.walk(definition)
        if node is not definition
    )


def _keeps_nothing(loop: ast.For) -> bool:
    parents = _parents(loop)
    runs = [parents[node] for node in ast.walk(loop) if _runs_layer(node)]
    uses = _uses(loop, "hidden_states")
    return all(isinstance(run, ast.Assign) and "hidden_states" in _assigned(run) for run in runs) and all(
        _stores_result(use, parents) if isinstance(use.ctx, ast.Store) else _reads_only(use, parents) for use in uses
    )


def _stores_result(use: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether it is assigned a layer's result, or that result with something added in place."""
    parent = parents[use]
    match parents[parent] if isinstance(parent, ast.Tuple) else parent:
        case ast.Assign(targets=[_], value=value):
            return _runs_layer(value) or _adds_in_place(value)
    return False


def _reads_only(use: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a use gives it to a layer, sums it, adds to it in place or copies it."""
    parent = parents[use]
    user = parents.get(parent)  # the loop itself has none
    match parent:
        case ast.BinOp(op=ast.Add()):
            return True
        case ast.IfExp(test=test, body=body, orelse=orelse):  # without a residual nothing is on offer
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


def _after_all(
    statements: list[ast.stmt], aliases: set[str], after_one: Callable[[ast.stmt, set[str]], set[str] | None]
) -> set[str] | None:
    """The aliases once all statements have run; ``None`` as soon as one of them has none to give."""
    after: set[str] | None = aliases
    for statement in statements:
        after = None if after is None else after_one(statement, after)
    return after


def _union(branches: list[set[str] | None]) -> set[str] | None:
    """The aliases after whichever branch has run; ``None`` if one of them has none to give."""
    given = [branch for branch in branches if branch is not None]
    return set().union(*given) if len(given) == len(branches) else None


# --- Syntax trees ----------------------------------------------------------------------------------------------------


def _definition(code: Code) -> ast.FunctionDef:
    if isinstance(code, ast.FunctionDef):
        return code
    (definition,) = ast.parse(engine.source(code)).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _is_modelled(definition: ast.FunctionDef) -> bool:
    """Whether a function binds names only in ways that the proofs model."""
    inner = (node for node in ast.walk(definition) if node is not definition)
    return not any(isinstance(node, _NOT_MODELLED) or _is_namespace(node) for node in inner)


def _is_namespace(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in _NAMESPACES


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _uses(tree: ast.AST, name: str) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]


def _memory(value: ast.AST, returns_its_own: Callable[[ast.Call], object] = _submodule) -> set[str]:
    """The names of which a value may hold the memory.

    :param returns_its_own: whether a call returns memory of its own; by default, those of the layer's own callables do.
    """
    match value:
        case ast.Name(id=name):
            return {name}
        case ast.Compare():
            return set()
        case ast.Attribute(attr=attribute) if attribute in _MEMORY_FREE:
            return set()
        case ast.Call() if returns_its_own(value):
            return set()
    return set().union(*(_memory(child, returns_its_own) for child in ast.iter_child_nodes(value)))


def _loaded(tree: ast.AST) -> set[str]:
    """The names that are read, for more than a shape or a type."""
    match tree:
        case ast.Name(id=name, ctx=ast.Load()):
            return {name}
        case ast.Attribute(attr=attribute) if attribute in _MEMORY_FREE:
            return set()
    return set().union(*map(_loaded, ast.iter_child_nodes(tree)))


def _assigned(statement: ast.stmt) -> set[str]:
    """The names to which an assignment assigns, in any case."""
    return {target.id for target in _targets(statement) if isinstance(target, ast.Name)}


def _targets(statement: ast.stmt) -> list[ast.expr]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _only_names(statement: ast.Assign) -> bool:
    return all(isinstance(target, ast.Name) for target in _targets(statement))
