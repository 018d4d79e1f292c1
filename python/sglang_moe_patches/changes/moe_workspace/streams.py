"""Whether another stream may still read a layer's input while its routed experts run.

In place, the engine writes its output after the whole second GEMM; column slices would write after the first one. Some
blocks run their shared experts on another stream at the same time, on the same input. Nothing makes one wait for the
other there; the engine gets by because it writes late.

A block's code shows it: a method of its class runs something on a stream of its choice. With the shared experts fused
there is nothing else to run. The answer holds for the process, whose layers are of one kind; a wrong "yes" costs a copy
of the output and changes no result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Install, Patcher, around, best_effort

has_concurrent_reader = False
"""Whether a block of this process's models may read its routed experts' input on another stream."""


def switches_streams(block: type) -> bool:
    """Whether a method of the class runs something on a stream of its choice."""
    return any(engine.mentions(function, "stream") for owner in block.__mro__ for function in vars(owner).values())


def may_read_concurrently(modules: Iterable[Any], experts: Any) -> bool:
    """Whether one of a model's blocks may read its routed experts' input on another stream.

    :param modules: all of the model's.
    :param experts: the engine's ``FusedMoE``.
    """
    return any(
        switches_streams(type(module))
        for module in modules
        for child in module.children()
        if isinstance(child, experts) and not child.num_fused_shared_experts
    )


def probe(look_at: Callable[[Any], None] = lambda model: None) -> Install:
    """Probe where models are loaded; installed, each is asked. Where that is not possible, any may.

    :param look_at: is given each model, too.
    """
    try:
        runner = engine.require_unpatched(engine.module("sglang.srt.model_executor.model_runner"), "ModelRunner")
        engine.require_unpatched(runner, "load_model")
        experts = engine.require_unpatched(engine.module("sglang.srt.layers.moe.fused_moe_triton.layer"), "FusedMoE")
        engine.require_mentions(engine.require_unpatched(experts, "__init__"), "num_fused_shared_experts")
    except engine.Unsupported:
        return _assume_concurrent_reader

    def install(patcher: Patcher) -> None:
        @around
        def wrap_load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            loaded = original(self, *args, **kwargs)
            look_at(self.model)
            concurrent = True
            with best_effort("moe-workspace: whether another stream reads the experts' input"):
                concurrent = may_read_concurrently(self.model.modules(), experts)
            if concurrent:
                _assume_concurrent_reader(patcher)
            return loaded

        patcher.wrap(runner, "load_model", wrap_load_model)

    return install


def _assume_concurrent_reader(patcher: Patcher) -> None:
    patcher.replace(sys.modules[__name__], "has_concurrent_reader", True)
