"""Repack FP4 experts for Marlin in place: write each repacked expert over the loaded expert from which it was made.

*Repack* is Marlin's name for the conversion of loaded weights to the layout that its kernel reads. The engine repacks
one expert after the other into a list, and then stacks the list. Meanwhile the loaded weights are still allocated.

A repacked expert has as many bytes as the loaded expert. Therefore this module writes each repacked expert over the
loaded expert as soon as the kernel is done. When the engine calls ``torch.stack``, all repacked experts already lie one
after the other in the memory of the loaded weights. The call then returns this memory instead of a new tensor.

Two conditions must hold:

- Only the layer refers to the memory of the loaded weights. Reference counts show this for each layer.
- No code reads the loaded weights after the repack. The engine's source code shows this (:func:`require_last_use`).

If a condition does not hold, the engine repacks into its own list and stack.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import around

WEIGHTS = ("w13_weight", "w2_weight")
_LOCALS = ("w13", "w2")
"""Names of the local variables for a layer's two weight tensors, in the engine's functions that prepare a layer for
Marlin."""
_HARMLESS = ("hasattr", "delattr")


def _count_references(parameters: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the reference count of a parameter, and the number of tensors that use its memory."""
    memory = parameters[name].untyped_storage()
    return sys.getrefcount(parameters[name]), torch._C._storage_Use_Count(memory._cdata)


def find_shared_storages(layer: Any) -> list[int]:
    """Return the storages of a layer's weights that must not be overwritten, because other objects refer to them.

    If only the layer refers to a weight, the weight has the same reference counts as a new parameter. With other counts
    the weight's storage must not be overwritten.

    :returns: addresses of the storages' C++ objects.
    """
    unshared = _count_references({"": torch.nn.Parameter(torch.empty(1, device="cpu"), requires_grad=False)}, "")
    shared = (name for name in WEIGHTS if _count_references(layer._parameters, name) != unshared)
    return [layer._parameters[name].untyped_storage()._cdata for name in shared]


class _Repack(TorchFunctionMode):
    """Observer of the engine while it repacks one layer. It lets repacked experts overwrite the loaded experts.

    When the engine copies an expert, the observer records the source of the copy. When the engine stacks the repacked
    experts, the observer returns the memory of the loaded weights instead of a new tensor.

    :param protected_storages: storages that must not be overwritten, as :func:`find_shared_storages` returns them.
    """

    def __init__(self, protected_storages: list[int]) -> None:
        super().__init__()
        self._protected_storages = protected_storages
        self._last_copy: tuple[Any, Any] = None, None
        self._written_experts: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.stack:
            experts, self._written_experts = self._written_experts, []
            if not kwargs and len(args) == 1 and _are_same_tensors(args[0], experts) and _lie_in_order(experts):
                first = experts[0]
                return first.as_strided((len(experts), *first.shape), (first.numel(), *first.stride()))
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.contiguous:
            self._last_copy = result, args[0]
        return result

    def find_loaded_expert(self, copy: Any) -> Any:
        """Return the loaded weights of the expert that the engine copied into ``copy``.

        The engine copies an expert's transposed weights with ``contiguous()``, and repacks the copy.

        :param copy: the tensor that the engine passes to its repacking kernel.
        :returns: a view of the loaded weights, which the repacked expert may overwrite. It is ``None`` if they must not
            be overwritten, or if ``copy`` is not the copy that the last ``contiguous()`` made.
        """
        (last_copy, source), self._last_copy = self._last_copy, (None, None)
        if last_copy is not copy or copy is None:
            return None
        storage = source.untyped_storage()._cdata
        return None if storage in (copy.untyped_storage()._cdata, *self._protected_storages) else source.mT

    def write_over(self, result: Any, memory: Any) -> Any:
        """Write a repacked expert over the loaded expert's ``memory``, and return the written tensor.

        If ``result`` does not fit into this memory, nothing is written, and the method returns ``result``.
        """
        if not memory.is_contiguous() or (memory.dtype, memory.numel()) != (result.dtype, result.numel()):
            return result
        self._written_experts.append(memory.view(result.shape).copy_(result))
        return self._written_experts[-1]


def _are_same_tensors(tensors: Any, others: list[Any]) -> bool:
    return 0 < len(tensors) == len(others) and all(a is b for a, b in zip(tensors, others, strict=True))


def _lie_in_order(tensors: list[Any]) -> bool:
    """Return whether each tensor begins in memory where the tensor before it ends."""
    return all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(tensors))


_current: ContextVar[_Repack | None] = ContextVar("sglang_moe_patches_repack", default=None)


@around
def wrap_prepare(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the engine's function that prepares a layer for Marlin, so that :class:`_Repack` observes it.

    The function is ``prepare_moe_mxfp4_layer_for_marlin`` or ``prepare_moe_nvfp4_layer_for_marlin``.
    """
    with _Repack(find_shared_storages(layer)) as mode:
        token = _current.set(mode)
        try:
            return original(layer, *args, **kwargs)
        finally:
            _current.reset(token)


@around
def wrap_kernel(original: Callable[..., Any], b_q_weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``gptq_marlin_repack``, which repacks one expert, so that the result overwrites the loaded expert."""
    mode = _current.get()
    memory = mode and mode.find_loaded_expert(b_q_weight)
    result = original(b_q_weight, *args, **kwargs)
    return result if memory is None else mode.write_over(result, memory)  # type: ignore[union-attr]


# --- Who reads the loaded weights ------------------------------------------------------------------------------------


def require_last_use(prepare: Any, helper: Any | None) -> None:
    """Check that the engine does not read a layer's loaded weights again once it has begun to repack them.

    Repacked experts overwrite the loaded weights, so a later read would return wrong values.

    :param prepare: one of the engine's functions that prepare a layer for Marlin.
    :param helper: the engine's function that repacks a layer's experts, or ``None`` if this function is defined inside
        ``prepare``.
    :raises engine.Unsupported: the engine may read the loaded weights.
    """
    whole = _parse_definition(prepare)
    inner = [node for node in ast.walk(whole) if isinstance(node, ast.FunctionDef) and node is not whole]
    repackers = [_parse_definition(helper)] if helper else [node for node in inner if "repack" in node.name]
    engine.require(
        len(repackers) == 1, f"{prepare.__name__} contains {len(repackers)} functions that repack weights; expected 1"
    )
    (repacker,), weight = repackers, repackers[0].args.args[0].arg
    calls = [node for node in ast.walk(whole) if isinstance(node, ast.Call) and ast.unparse(node.func) == repacker.name]
    calls.sort(key=lambda call: call.lineno)
    repacked = [ast.unparse(call.args[0]) for call in calls if call.args]
    engine.require(repacked == [*_LOCALS], f"{prepare.__name__} repacks {', '.join(repacked) or 'nothing'}")
    inside = {node for function in inner for node in ast.walk(function)}
    for node in ast.walk(whole):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                reads = name in (*_LOCALS, *WEIGHTS) and not any(node is call.args[0] for call in calls)
            case ast.Call(func=function, args=arguments):
                name = f"the layer by {ast.unparse(function)}"
                reads = name.rpartition(" ")[2] not in _HARMLESS and "layer" in map(ast.unparse, arguments)
            case _:
                continue
        late = node in inside or node.lineno >= calls[0].lineno
        engine.require(not (reads and late), f"{prepare.__name__} reads {name} again")
    read = [
        ast.unparse(parent)
        for parent in ast.walk(repacker)
        for child in ast.iter_child_nodes(parent)
        if isinstance(child, ast.Name) and child.id == weight
    ]
    engine.require(sorted(read) == [f"{weight}.shape", f"{weight}[i]"], f"{repacker.name} reads {weight} otherwise")


def _parse_definition(function: Any) -> ast.FunctionDef:
    (definition,) = ast.parse(engine.read_source(function)).body
    engine.require(isinstance(definition, ast.FunctionDef), f"{function.__name__} is no plain function")
    return definition  # type: ignore[return-value]
