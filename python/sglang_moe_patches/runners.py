"""Which MoE runners a server uses, and which of them leave their input alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_moe_patches import engine
from sglang_moe_patches.patch import Patcher, Plan

TRTLLM = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm")
"""Values of ``--moe-runner-backend`` for the TRT-LLM kernels, which never write into their input. The last one, in
releases from 0.5.13, has kernels of its own for LoRA adapters alone."""
CUTEDSL = "flashinfer_cutedsl"


def unneeded_without(*runners: str) -> Callable[[Any], str | None]:
    """``unneeded`` of a change that only these ``--moe-runner-backend`` reach, be it for the draft model alone.

    ``auto`` may still become one of them.
    """

    def unneeded(server_args: Any) -> str | None:
        backends = [str(server_args.moe_runner_backend)]
        if getattr(server_args, "speculative_algorithm", None):
            backends.append(str(getattr(server_args, "speculative_moe_runner_backend", None) or backends[0]))
        return None if {*runners, "auto"} & set(backends) else f"--moe-runner-backend is {backends[0]}"

    return unneeded


def without_flashinfer() -> Plan | None:
    """The plan of a change about FlashInfer's kernels where there is no FlashInfer (AMD, CPU); else ``None``."""
    if engine.has_module("flashinfer"):
        return None
    return Plan.not_needed("FlashInfer is not installed, so none of its kernels runs")


def look_at_inplace(fused_moe: Any) -> Any:
    """The engine's ``FusedMoE``, whose layers say whether their runner may write its output over its input.

    :raises engine.Unsupported: it does not say it by ``use_flashinfer_trtllm_moe`` and ``moe_runner_config``.
    """
    layer = engine.own(fused_moe, "FusedMoE")
    engine.require_mentions(engine.own(layer, "__init__"), "use_flashinfer_trtllm_moe", "moe_runner_config")
    return layer


def clear_inplace(layer: Any, patcher: Patcher) -> None:
    """Mark the TRT-LLM runners of all ``FusedMoE`` layers to come as leaving their input alone, which they do.

    In place is the engine's default, and what it defers the shared experts by.
    """

    def make_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.use_flashinfer_trtllm_moe:
                self.moe_runner_config.inplace = False

        return __init__

    patcher.wrap(layer, "__init__", make_init)
