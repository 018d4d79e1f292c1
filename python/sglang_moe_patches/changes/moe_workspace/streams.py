"""Detect modules that read the input of their routed experts on a second CUDA stream.

Some modules run their shared experts at the same time as their routed experts, on another stream and on the same input.
If the routed experts work in place, they write their output over this input, without waiting for the other stream. With
the engine's own function this is safe, because it writes the output only after the whole second GEMM. With column
slices, the first columns of the output would be written earlier.

:data:`has_concurrent_reader` becomes true if one module meets two conditions: its class has a method that uses the name
``stream``, and its shared experts are not fused into the routed experts. If the variable is true, all layers of the
process that work in place run differently:

- The Triton runner writes slices to a staging buffer. After the last GEMM it copies the buffer into the output.
- Marlin does not cut the expert outputs.

If the variable is true by mistake, time or memory is wasted, but results stay the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Install, Patcher, around, best_effort

has_concurrent_reader = False
"""Whether a module of this process's models may read the input of its routed experts on another stream."""


def switches_streams(block: type) -> bool:
    """Return whether a class may run code on another CUDA stream: one of its methods uses the name ``stream``."""
    return any(engine.mentions(function, "stream") for owner in block.__mro__ for function in vars(owner).values())


def may_read_concurrently(modules: Iterable[Any], experts: Any) -> bool:
    """Return whether a module of a model may read the input of its routed experts on another stream.

    :param modules: all modules of the model.
    :param experts: the engine's class ``FusedMoE``.
    """
    return any(
        switches_streams(type(module))
        for module in modules
        for child in module.children()
        if isinstance(child, experts) and not child.num_fused_shared_experts
    )


def probe(check_model: Callable[[Any], None] = lambda model: None) -> Install:
    """Return an installer that wraps the engine's loading of models. After each load, the wrapper inspects the model.
    If the model may read the input of its routed experts on another CUDA stream, it sets :data:`has_concurrent_reader`
    to True.

    If the engine's loading code is unknown, or the inspection fails, :data:`has_concurrent_reader` becomes True, too.

    :param check_model: function that is called with each loaded model, before the model is inspected.
    """
    try:
        runner = engine.require_unpatched(engine.import_module("sglang.srt.model_executor.model_runner"), "ModelRunner")
        engine.require_unpatched(runner, "load_model")
        experts = engine.require_unpatched(
            engine.import_module("sglang.srt.layers.moe.fused_moe_triton.layer"), "FusedMoE"
        )
        engine.require_mentions(engine.require_unpatched(experts, "__init__"), "num_fused_shared_experts")
    except engine.Unsupported:
        return _assume_concurrent_reader

    def install(patcher: Patcher) -> None:
        @around
        def wrap_load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            loaded = original(self, *args, **kwargs)
            check_model(self.model)
            concurrent = True
            with best_effort("moe-workspace: checking whether another stream reads the experts' input"):
                concurrent = may_read_concurrently(self.model.modules(), experts)
            if concurrent:
                _assume_concurrent_reader(patcher)
            return loaded

        patcher.wrap(runner, "load_model", wrap_load_model)

    return install


def _assume_concurrent_reader(patcher: Patcher) -> None:
    """Set :data:`has_concurrent_reader` to True. When ``patcher`` undoes its changes, the old value returns."""
    patcher.replace(sys.modules[__name__], "has_concurrent_reader", True)
