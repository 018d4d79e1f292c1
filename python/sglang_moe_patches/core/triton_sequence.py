"""The Triton runner's sequence of kernels, and the one wrapper around it, which changes share.

A change that replaces some of its calls adds a *route*. Each call goes to the function of the first route that has one,
or to the engine's sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Patcher

MODULE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
NAME = "_fused_moe_kernel_sequence"
_PARAMETERS = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
_ROUTES = "_moe_patches_routes"

Route = Callable[[Any, Any, dict[str, Any]], Callable[..., Any] | None]
"""From a call's ``hidden_states``, ``topk_ids`` and keyword arguments: the function that gets the call instead, or
``None``."""


def probe() -> tuple[ModuleType, FunctionType]:
    """The engine's module, and its sequence.

    :raises engine.Unsupported: it is not what routes expect, or not the engine's own.
    """
    module = engine.module(MODULE)
    sequence = engine.own(module, NAME)
    engine.require_parameters(sequence, _PARAMETERS)
    kinds = {name: p.kind for name, p in inspect.signature(sequence).parameters.items()}
    engine.require({"inplace", "hooks"} <= set(kinds), f"{NAME} takes no inplace, or no hooks")
    for name in ("inplace", "hooks", "defer_sum"):
        keyword = kinds.get(name, inspect.Parameter.KEYWORD_ONLY) is inspect.Parameter.KEYWORD_ONLY
        engine.require(keyword, f"{NAME} takes {name} by its place")
    return module, sequence


def add_route(patcher: Patcher, route: Route, *, first: bool = False) -> None:
    """Send calls of the engine's sequence where ``route`` says.

    :param first: ask it before the routes that were added earlier.
    """
    module = engine.module(MODULE)
    if not hasattr(getattr(module, NAME), _ROUTES):
        patcher.wrap(module, NAME, wrap_sequence)
    sequence = getattr(module, NAME)
    routes = getattr(sequence, _ROUTES)
    patcher.add(sequence, _ROUTES, (route, *routes) if first else (*routes, route))


def wrap_sequence(original: Callable[..., Any], *routes: Route) -> Callable[..., Any]:
    """The wrapper; more routes can be set on it."""
    import torch

    is_compiling = torch.compiler.is_compiling

    # Named parameters would be packed anew at every call, which costs as much as everything else here.
    @functools.wraps(original)
    def sequence(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        if len(args) < len(_PARAMETERS):  # the engine's own calls pass them by their place
            args = (*args, *(kwargs.pop(name) for name in _PARAMETERS[len(args) :]))
        for route in sequence._moe_patches_routes:  # type: ignore[attr-defined]
            replacement = route(args[0], args[4], kwargs)
            if replacement is not None:
                return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(sequence, _ROUTES, routes)
    return sequence
