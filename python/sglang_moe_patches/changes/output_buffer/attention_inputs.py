"""Where the engine keeps attention's inputs until the next layer (releases up to 0.5.12): they are dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Install, Patcher


def _wrap_forward(original: Callable[..., Any], context: Any, is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not is_compiling():
            context.set_attn_inputs(None)
        return output

    return forward


def probe() -> Install:
    """Probe what keeps attention's inputs; installed, they are dropped when attention returns, whatever the runner.

    :raises engine.Unsupported: the engine is not what this expects.
    """
    import torch

    communicator = engine.module("sglang.srt.layers.communicator")
    try:
        deepseek = engine.module("sglang.srt.models.deepseek_v2")
    except engine.Unsupported:  # the engine serves none of its models either
        return lambda patcher: None
    attention = engine.own(deepseek, "DeepseekV2AttentionMLA")
    engine.own(attention, "forward")
    engine.require("forward" in vars(attention), "DeepseekV2AttentionMLA has no forward of its own")
    context = engine.get(communicator, "get_attn_tp_context")()
    engine.get(context, "set_attn_inputs")
    is_compiling = torch.compiler.is_compiling

    def install(patcher: Patcher) -> None:
        patcher.wrap(attention, "forward", lambda original: _wrap_forward(original, context, is_compiling))

    return install
