"""What the code of a decoder layer and of its model's loop shows of the layer's input."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from sglang_moe_patches import engine
from sglang_moe_patches.dead_input.channel import ENGINE_OFFER

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
    the name means something else, and no other name ever meant the input.
    """
    (definition,) = ast.parse(engine.source(forward)).body
    assert isinstance(definition, ast.FunctionDef)
    first = next(
        (
            statement
            for statement in definition.body
            if any(isinstance(node, ast.Name) and node.id == "hidden_states" for node in ast.walk(statement))
        ),
        None,
    )
    if not isinstance(first, ast.Assign) or len(first.targets) != 1 or not isinstance(first.value, ast.Call):
        return False
    (target,) = first.targets
    assigned = target.elts if isinstance(target, ast.Tuple) else [target]
    given = [*first.value.args, *(keyword.value for keyword in first.value.keywords)]
    used = [node for node in ast.walk(first.value) if isinstance(node, ast.Name) and node.id == "hidden_states"]
    return (
        any(isinstance(name, ast.Name) and name.id == "hidden_states" for name in assigned)
        and ast.unparse(first.value.func) in _CONSUMERS
        and bool(used)
        and all(name in given for name in used)
    )


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


def offers_regardless_of_the_residual(forward: Callable[..., Any]) -> bool:
    """Whether a decoder layer's ``forward`` offers its input under a condition that does not look at the residual."""
    for node in ast.walk(ast.parse(engine.source(forward))):
        if isinstance(node, ast.If) and any(
            isinstance(call, ast.Call) and ast.unparse(call.func).endswith(ENGINE_OFFER)
            for statement in node.body
            for call in ast.walk(statement)
        ):
            return "residual" not in ast.unparse(node.test)
    return engine.mentions(forward, ENGINE_OFFER)
