"""What the code of a decoder layer and of its model's loop shows of the layer's input."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from sglang_moe_patches import engine
from sglang_moe_patches.dead_input.channel import ENGINE_OFFER

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


def input_dies(forward: Callable[..., Any]) -> bool:
    """Whether a decoder layer's ``forward`` gives up its input with the first statement that uses it.

    That is an assignment of a norm's result (:data:`_CONSUMERS`) to the name ``hidden_states`` itself: from there on
    the name means something else. No other name ever meant the input, but for one under which the engine itself offers
    it, and does nothing else with it; nor does that offer, once it is a no-op.
    """
    (definition,) = ast.parse(engine.source(forward)).body
    assert isinstance(definition, ast.FunctionDef)
    statements = [statement for statement in definition.body if _names(statement, "hidden_states")]
    if statements and (second := _second_name(statements[0])):
        return _is_only_offered(definition, second) and len(statements) > 1 and _consumes(statements[1])
    return bool(statements) and _consumes(statements[0])


def _names(tree: ast.AST, name: str) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]


def _consumes(statement: ast.stmt) -> bool:
    """Whether a statement assigns a norm's result to ``hidden_states``, which is an argument of that norm."""
    if (
        not isinstance(statement, ast.Assign)
        or len(statement.targets) != 1
        or not isinstance(statement.value, ast.Call)
    ):
        return False
    (target,), call = statement.targets, statement.value
    assigned = target.elts if isinstance(target, ast.Tuple) else [target]
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    used = _names(call, "hidden_states")
    return (
        any(isinstance(name, ast.Name) and name.id == "hidden_states" for name in assigned)
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


def is_told_out_of_place(module: str) -> bool:
    """Whether a family's module itself tells routed experts to leave their input alone.

    The shared experts of such a layer, or their gate, read it once more afterwards.

    :param module: its source.
    """
    told = [
        keyword.value
        for call in ast.walk(ast.parse(module))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("get_moe_impl_class(")
        for keyword in call.keywords
        if keyword.arg == "inplace"
    ]
    return any(ast.unparse(value) != "True" for value in told)


def loop_keeps_nothing(forward: Callable[..., Any]) -> bool:
    """Whether the loop over the layers, in a model's ``forward``, keeps no layer's input but in the name
    ``hidden_states``, to which it assigns the layer's result.

    Hidden states that are captured on the way are sums with the residual, which are tensors of their own.
    """
    loops = [
        loop
        for loop in ast.walk(ast.parse(engine.source(forward)))
        if isinstance(loop, ast.For) and any(_is_layer(node) for node in ast.walk(loop))
    ]
    if len(loops) != 1:
        return False
    (loop,) = loops
    parents = {child: node for node in ast.walk(loop) for child in ast.iter_child_nodes(node)}
    uses = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == "hidden_states"]
    assigned = 0
    for use in uses:
        around = parents[use]
        if isinstance(use.ctx, ast.Store):
            statement = parents[around] if isinstance(around, ast.Tuple) else around
            if not (isinstance(statement, ast.Assign) and _is_layer(statement.value)):
                return False
            assigned += 1
        elif isinstance(around, ast.BinOp) and isinstance(around.op, ast.Add):
            continue
        elif not _is_layer(parents[around] if isinstance(around, ast.keyword) else around):
            return False
    return assigned == 1


def _is_layer(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "layer"
