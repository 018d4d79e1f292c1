"""Wrapper around the Triton runner's fused-MoE function. Several changes share this one wrapper.

The fused-MoE function computes the routed experts of one layer. A change adds a *route* to replace some of the
function's calls. For each call the wrapper asks the routes one after another. The first route that returns a function
decides: that function receives the call. If no route returns a function, the engine's fused-MoE function receives the
call.
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
"""Type of a route. A route is a function that receives a call's ``hidden_states``, ``topk_ids`` and keyword arguments.
It returns a function that receives the call instead of the engine's function, or ``None`` if it does not replace the
call."""


def probe() -> tuple[ModuleType, FunctionType]:
    """Return the engine's module with the fused-MoE function, and the function itself.

    :raises engine.Unsupported: the function's parameters are not as this module expects, or another plugin has
        patched the function.
    """
    module = engine.import_module(MODULE)
    fused_moe = engine.require_unpatched(module, NAME)
    engine.require_parameters(fused_moe, _PARAMETERS)
    kinds = {name: p.kind for name, p in inspect.signature(fused_moe).parameters.items()}
    engine.require({"inplace", "hooks"} <= set(kinds), f"{NAME} has no parameter inplace, or no parameter hooks")
    for name in ("inplace", "hooks", "defer_sum"):
        keyword = kinds.get(name, inspect.Parameter.KEYWORD_ONLY) is inspect.Parameter.KEYWORD_ONLY
        engine.require(keyword, f"{NAME} accepts {name} as a positional argument")
    return module, fused_moe


def add_route(patcher: Patcher, route: Route, *, first: bool = False) -> None:
    """Add a route (:data:`Route`, a function that may replace some calls) to the wrapper of the engine's fused-MoE
    function. If that function is not wrapped yet, wrap it first.

    :param first: whether to ask this route before the routes that were added earlier.
    """
    module = engine.import_module(MODULE)
    if not hasattr(getattr(module, NAME), _ROUTES):
        patcher.wrap(module, NAME, wrap_fused_moe)
    fused_moe = getattr(module, NAME)
    routes = getattr(fused_moe, _ROUTES)
    patcher.add(fused_moe, _ROUTES, (route, *routes) if first else (*routes, route))


def wrap_fused_moe(original: Callable[..., Any], *routes: Route) -> Callable[..., Any]:
    """Wrap the engine's fused-MoE function, so that another function can receive some of its calls.

    While ``torch.compile`` traces a call, the engine's function receives it.

    :param routes: functions that may replace a call (:data:`Route`). The wrapper asks them in this order.
    :returns: the wrapper. Its attribute named :data:`_ROUTES` contains the routes, and :func:`add_route` adds to it.
    """
    import torch

    is_compiling = torch.compiler.is_compiling

    # The wrapper has no named parameters. To pass them on would take as long as the rest of the wrapper.
    @functools.wraps(original)
    def fused_moe(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        # Only a caller outside the engine passes some of these arguments by keyword.
        if len(args) < len(_PARAMETERS):
            args = (*args, *(kwargs.pop(name) for name in _PARAMETERS[len(args) :]))
        for route in fused_moe._moe_patches_routes:  # type: ignore[attr-defined]
            replacement = route(args[0], args[4], kwargs)
            if replacement is not None:
                return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(fused_moe, _ROUTES, routes)
    return fused_moe
