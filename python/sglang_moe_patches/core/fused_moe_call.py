"""The Triton runner's fused_moe of kernels, and the one wrapper around it, which changes share.

A change that replaces some of its calls adds a *route*. Each call goes to the function of the first route that has one,
or to the engine's fused_moe.
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
    """The engine's module, and its fused-MoE function.

    :raises engine.Unsupported: it is not what routes expect, or not the engine's own.
    """
    module = engine.module(MODULE)
    fused_moe = engine.require_unpatched(module, NAME)
    engine.require_parameters(fused_moe, _PARAMETERS)
    kinds = {name: p.kind for name, p in inspect.signature(fused_moe).parameters.items()}
    engine.require({"inplace", "hooks"} <= set(kinds), f"{NAME} takes no inplace, or no hooks")
    for name in ("inplace", "hooks", "defer_sum"):
        keyword = kinds.get(name, inspect.Parameter.KEYWORD_ONLY) is inspect.Parameter.KEYWORD_ONLY
        engine.require(keyword, f"{NAME} takes {name} by its place")
    return module, fused_moe


def add_route(patcher: Patcher, route: Route, *, first: bool = False) -> None:
    """Send calls of the engine's fused-MoE function where ``route`` says.

    :param first: ask it before the routes that were added earlier.
    """
    module = engine.module(MODULE)
    if not hasattr(getattr(module, NAME), _ROUTES):
        patcher.wrap(module, NAME, wrap_fused_moe)
    fused_moe = getattr(module, NAME)
    routes = getattr(fused_moe, _ROUTES)
    patcher.add(fused_moe, _ROUTES, (route, *routes) if first else (*routes, route))


def wrap_fused_moe(original: Callable[..., Any], *routes: Route) -> Callable[..., Any]:
    """The wrapper; more routes can be set on it."""
    import torch

    is_compiling = torch.compiler.is_compiling

    # Named parameters would be packed anew at every call, which costs as much as everything else here.
    @functools.wraps(original)
    def fused_moe(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        if len(args) < len(_PARAMETERS):  # the engine's own calls pass them by their place
            args = (*args, *(kwargs.pop(name) for name in _PARAMETERS[len(args) :]))
        for route in fused_moe._moe_patches_routes:  # type: ignore[attr-defined]
            replacement = route(args[0], args[4], kwargs)
            if replacement is not None:
                return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(fused_moe, _ROUTES, routes)
    return fused_moe
