"""What the code of a decoder layer and of its model's loop shows of the layer's input.

Every proof takes a function, or the syntax tree of one: a model that is being built is looked at as it runs, and the
models of an engine are looked at without importing them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.dead_input.channel import ENGINE_OFFER

Code = Callable[..., Any] | ast.FunctionDef

TENSOR_OF_HANDLE = "residual_access.buffer"
"""How a ``forward`` of the engine's gets at the tensor of an input that may be a handle, a sum that is still owed."""
#: The norms before attention, with the residual's addition: after them nobody but the loop has the layer's input.
_CONSUMERS = frozenset(
    {
        "self.layer_communicator.prepare_attn",
        "self.layer_communicator.prepare_attn_and_capture_last_layer_outputs",
        "self.attn_boundary.prepare",
    }
)
#: The norms after attention.
_NORMS_AFTER = frozenset({"self.layer_communicator.prepare_mlp", "self.ffn_boundary.prepare"})
#: Written into what a layer returned, which stays what the next one is given.
_ADDS_IN_PLACE = frozenset({"residual_batch.add_to_output"})
#: They answer with a tensor of its own.
_COPIES = frozenset({"residual_batch.snapshot"})
_NAMESPACES = frozenset({"locals", "vars", "eval", "exec"})
_RUN_LATER = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.GeneratorExp)
#: They bind a name within an expression or a pattern, for another function, or for whenever they run.
_UNFOLLOWED = (
    *(ast.NamedExpr, ast.Match, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, *_RUN_LATER),
)


def _definition(code: Code) -> ast.FunctionDef:
    if isinstance(code, ast.FunctionDef):
        return code
    (definition,) = ast.parse(engine.source(code)).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _is_followed(definition: ast.FunctionDef) -> bool:
    """Whether names are bound in a function in ways alone that the proofs follow."""
    inner = (node for node in ast.walk(definition) if node is not definition)
    return not any(isinstance(node, _UNFOLLOWED) or _is_namespace(node) for node in inner)


def _is_namespace(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in _NAMESPACES


def input_dies(forward: Code) -> bool:
    """Whether a decoder layer's ``forward`` gives up its input with the first statement that uses it.

    That is an assignment of a norm's result (:data:`_CONSUMERS`) to the name ``hidden_states`` itself: from there on
    the name means something else. No other name ever meant the input, but for one under which the engine itself offers
    it, and does nothing else with it; nor does that offer, once it is a no-op.
    """
    definition = _definition(forward)
    consumer, second = _consumer(definition)
    return consumer is not None and (second is None or _is_only_offered(definition, second))


def _consumer(definition: ast.FunctionDef) -> tuple[ast.Assign | None, str | None]:
    """The statement that gives up the input, and the second name that the input had before it."""
    if not _is_followed(definition):
        return None, None
    statements = [statement for statement in definition.body if _names(statement, "hidden_states")]
    second = _second_name(statements[0]) if statements else None
    first = statements[second is not None :][:1]
    found = first[0] if first else None
    return (found if isinstance(found, ast.Assign) and _consumes(found) else None), second


def attention_lets_go(forward: Code) -> bool:
    """Whether nobody has what attention read once it is done: the norm before it may have written that into the
    layer's input itself.

    By the norm after attention (:data:`_NORMS_AFTER`, or a function of the module's that is given the layer), no name
    may still mean it, and none may be used later. What a submodule of the layer's returns is its own, but where there
    are no tokens, and nothing is on offer then.
    """
    definition = _definition(forward)
    consumer, _ = _consumer(definition)
    if consumer is None:
        return False
    following = definition.body[definition.body.index(consumer) + 1 :]
    names = _assigned(consumer) - {"residual"}
    for place, statement in enumerate(following):
        if any(_is_norm_after(node) for node in ast.walk(statement)):
            elsewhere = names - _assigned(statement)
            return not names & _loaded(statement) and not any(elsewhere & _loaded(one) for one in following[place:])
        after = _followed(statement, names)
        if after is None:
            return False
        names = after
    return False


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _assigned(statement: ast.stmt) -> set[str]:
    """The names to which an assignment assigns, in any case."""
    return {one.id for one in _targets(statement) if isinstance(one, ast.Name)}


def _targets(statement: ast.stmt) -> list[ast.expr]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _only_names(statement: ast.Assign) -> bool:
    return all(isinstance(one, ast.Name) for one in _targets(statement))


def _is_norm_after(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    given_the_layer = bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id == "self"
    return ast.unparse(node.func) in _NORMS_AFTER or (isinstance(node.func, ast.Name) and given_the_layer)


def _followed(statement: ast.stmt, names: set[str]) -> set[str] | None:
    """The names that may mean a memory after a statement, of those before it.

    ``None``: it may be kept elsewhere, or the statement is of a kind that is not known here.
    """
    if isinstance(statement, ast.Assign):
        if _hands_on(statement.value, names) or any(names & _loaded(target) for target in statement.targets):
            return None
        made = _assigned(statement)
        if not _may_hold(statement.value, names):
            return names - made
        return names | made if _only_names(statement) else None
    if isinstance(statement, ast.If):
        if _hands_on(statement.test, names):
            return None
        taken = _all_followed(statement.body, names)
        passed_by = _all_followed(statement.orelse, names)
        if taken is None or passed_by is None:
            return None
        return taken if _there_are_tokens(statement.test, names) and not statement.orelse else taken | passed_by
    if isinstance(statement, ast.With):
        if any(isinstance(node, ast.Name) and node.id in names for item in statement.items for node in ast.walk(item)):
            return None
        return _all_followed(statement.body, names)
    if isinstance(statement, ast.Try) and not statement.handlers:
        return _all_followed([*statement.body, *statement.orelse, *statement.finalbody], names)
    leaves = any(isinstance(node, ast.Return) for node in ast.walk(statement))
    return None if leaves or names & _loaded(statement) else names


def _all_followed(statements: list[ast.stmt], names: set[str]) -> set[str] | None:
    found: set[str] | None = names
    for statement in statements:
        found = None if found is None else _followed(statement, found)
    return found


def _may_hold(value: ast.expr, names: set[str]) -> bool:
    """Whether a value may have the memory that one of the names means: not what a submodule returns."""
    return bool(names & _loaded(value)) and not isinstance(value, ast.Compare) and not _is_submodule(value)


def _hands_on(tree: ast.expr, names: set[str]) -> bool:
    """Whether anything but a submodule is given what one of the names means, which may keep it."""
    return any(
        isinstance(node, ast.Call)
        and names & _loaded(node)
        and not _is_submodule(node)
        and ast.unparse(node.func) != "isinstance"
        for node in ast.walk(tree)
    )


def _is_submodule(node: ast.AST) -> bool:
    """Whether it is a call of a submodule of the layer's, or of one of a list of them."""
    if not isinstance(node, ast.Call):
        return False
    module = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return isinstance(module, ast.Attribute) and isinstance(module.value, ast.Name) and module.value.id == "self"


def _there_are_tokens(test: ast.expr, names: set[str]) -> bool:
    """Whether a condition asks for no more than tokens, of one of the names where it asks for a shape."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(_there_are_tokens(value, names) for value in test.values)
    name, _, asked = ast.unparse(test).partition(".")
    if isinstance(test, ast.Compare):
        return name in names and asked in ("shape[0] != 0", "shape[0] > 0")
    return f"{name}.{asked}" == "not forward_batch.forward_mode.is_idle()"


def captures_sums_alone(forward: Code) -> bool:
    """Whether a layer's ``forward`` hands on what is to be captured to its first norm alone, which captures sums with
    the residual."""
    definition = _definition(forward)
    consumer, _ = _consumer(definition)
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
    definition = _definition(forward)
    nodes = list(ast.walk(definition))
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    made = {"hidden_states"}
    while more := {name for node in assigned if made & _loaded(node.value) for name in _assigned(node)} - made:
        made |= more
    marks = [target for node in assigned if isinstance(node.value, ast.Constant) for target in node.targets]
    return not any(
        (isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store) and node not in marks)
        or (isinstance(node, ast.Expr | ast.AugAssign) and made & _loaded(node.value))
        or (isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Call) and made & _loaded(node))
        for node in nodes
    )


def _names(tree: ast.AST, name: str) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]


def _consumes(statement: ast.Assign) -> bool:
    """Whether a statement assigns a norm's result to ``hidden_states``, which is an argument of that norm."""
    if len(statement.targets) != 1 or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    used = _names(call, "hidden_states")
    return (
        "hidden_states" in _assigned(statement)
        and _only_names(statement)
        and ast.unparse(call.func) in _CONSUMERS
        and bool(used)
        and all(name in given for name in used)
    )


def _second_name(statement: ast.stmt) -> str | None:
    """The name that a statement gives to the input, or to the tensor in it (:data:`TENSOR_OF_HANDLE`)."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    (target,) = statement.targets
    if ast.unparse(statement.value) not in ("hidden_states", f"{TENSOR_OF_HANDLE}(hidden_states)"):
        return None
    return target.id if isinstance(target, ast.Name) else None


def _is_only_offered(definition: ast.FunctionDef, name: str) -> bool:
    """Whether a function does no more with a local name than offer it, and look at its type and shape."""
    parents = {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}

    def harmless(use: ast.Name) -> bool:
        around = parents[use]
        if isinstance(around, ast.Call):
            return ast.unparse(around.func) in (ENGINE_OFFER, "isinstance")
        return isinstance(around, ast.Attribute) and around.attr == "shape"

    stored = [use for use in _names(definition, name) if not isinstance(use.ctx, ast.Load)]
    return len(stored) == 1 and all(harmless(use) for use in _names(definition, name) if use not in stored)


def is_told_out_of_place(module: str | ast.Module) -> bool:
    """Whether a family's module itself tells routed experts to leave their input alone.

    The shared experts of such a layer, or their gate, read it once more afterwards.

    :param module: its source, or the tree of it.
    """
    told = [
        keyword.value
        for call in ast.walk(ast.parse(module) if isinstance(module, str) else module)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("get_moe_impl_class(")
        for keyword in call.keywords
        if keyword.arg == "inplace"
    ]
    return any(ast.unparse(value) != "True" for value in told)


def loop_keeps_nothing(forward: Code) -> bool:
    """Whether the loop over the layers, in a model's ``forward``, keeps no layer's input but in the name
    ``hidden_states``, to which it assigns the layer's result.

    Hidden states that are captured on the way are sums with the residual, which are tensors of their own; without a
    residual nothing is on offer. Something may be added to a layer's result, in place.
    """
    definition = _definition(forward)
    found = list(loops(definition))
    return len(found) == 1 and _keeps_nothing(found[0]) and not _is_reached_elsewhere(definition)


def _is_reached_elsewhere(definition: ast.FunctionDef) -> bool:
    """Whether anything but a function's own statements, as they are run, may read its ``hidden_states``."""
    return any(
        isinstance(node, ast.Global | ast.Nonlocal)
        or _is_namespace(node)
        or (isinstance(node, _RUN_LATER) and bool(_names(node, "hidden_states")))
        for node in ast.walk(definition)
        if node is not definition
    )


def loops(forward: Code) -> Iterator[ast.For]:
    """The loops over the layers in a model's ``forward``."""
    for loop in ast.walk(_definition(forward)):
        if isinstance(loop, ast.For) and any(_is_layer(node) for node in ast.walk(loop)):
            yield loop


def _keeps_nothing(loop: ast.For) -> bool:
    parents = {child: node for node in ast.walk(loop) for child in ast.iter_child_nodes(node)}
    runs = [parents[node] for node in ast.walk(loop) if _is_layer(node)]
    if not all(isinstance(each, ast.Assign) and "hidden_states" in _assigned(each) for each in runs):
        return False
    for use in _names(loop, "hidden_states"):
        around = parents[use]
        if isinstance(use.ctx, ast.Store):
            statement = parents[around] if isinstance(around, ast.Tuple) else around
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                return False
            if not (_is_layer(statement.value) or _adds_in_place(statement.value)):
                return False
        elif not (_is_a_sum(around, use) or _is_in_place(around, parents) or _is_given(around, parents)):
            return False
    return True


def _is_a_sum(around: ast.AST, use: ast.Name) -> bool:
    """Whether a use is one of the summands, or comes to be used where there is no residual alone."""
    if isinstance(around, ast.IfExp):
        asked = ast.unparse(around.test)
        return (asked == "residual is None" and around.body is use) or (
            asked == "residual is not None" and around.orelse is use
        )
    return isinstance(around, ast.BinOp) and isinstance(around.op, ast.Add)


def _is_in_place(around: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether something is added in place, and the sum is nobody else's."""
    user = parents.get(around)  # the loop itself has none
    if isinstance(around, ast.Attribute) and around.attr == "add_":
        return isinstance(user, ast.Call) and user.func is around and isinstance(parents[user], ast.Expr)
    return (
        _adds_in_place(around)
        and isinstance(user, ast.Assign)
        and [ast.unparse(target) for target in user.targets] == ["hidden_states"]
    )


def _is_given(around: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether it is what a layer is given, or what is copied."""
    copied = isinstance(around, ast.Call) and ast.unparse(around.func) in _COPIES
    return copied or _is_layer(parents[around] if isinstance(around, ast.keyword) else around)


def _adds_in_place(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in _ADDS_IN_PLACE


def _is_layer(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Subscript):
        return ast.unparse(called.value) == "self.layers"
    return isinstance(called, ast.Name) and called.id == "layer"


# --- All of them -----------------------------------------------------------------------------------------------------

NO_PLAIN_SUM = "the residual of {} may be more than a sum"
TOO_MANY_EXPERTS = "{} has {} modules of routed experts"


def why_not(layer: str, forward: Code) -> str:
    """Why the input of a decoder layer may be read once it has been written over, by its ``forward``; or ``""``.

    :param layer: what it is called.
    """
    proved = {
        f"{layer} may still use its input": input_dies,
        f"{layer} may still use what attention read": attention_lets_go,
        f"{layer} may keep what is captured": captures_sums_alone,
        f"{layer} may keep its result": keeps_no_result,
    }
    return next((reason for reason, proof in proved.items() if not proof(forward)), "")


def why_no_loop(model: str, forward: Code) -> str:
    """Why the loop over the layers may keep their inputs; or ``""``."""
    return "" if loop_keeps_nothing(forward) else f"{model} may keep its layers' inputs"
