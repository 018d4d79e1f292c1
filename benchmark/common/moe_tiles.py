"""The engine's tiles for the Triton kernels of a MoE layer.

It takes them from a file that somebody tuned for the layer and the GPU, as SGLang's own tuning script does, or from a
rule. ``SGLANG_MOE_CONFIG_DIR`` has it look elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def chosen(layer: Any, tokens: int) -> dict[str, int]:
    """What the engine chooses for this layer and batch."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    fp8 = layer.w2_weight.element_size() == 1
    config = fused_moe_triton_config.try_get_optimal_moe_config(
        layer.w13_weight.shape,
        layer.w2_weight.shape,
        layer.top_k,
        "fp8_w8a8" if fp8 else None,
        tokens,
        block_shape=[128, 128] if fp8 else None,
    )
    return dict(config)


def file_name(layer: Any) -> str:
    """The engine's name for the file of this layer's tiles."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    experts, _, inner = layer.w2_weight.shape
    fp8 = layer.w2_weight.element_size() == 1
    return str(
        fused_moe_triton_config.get_config_file_name(
            experts, inner, "fp8_w8a8" if fp8 else None, [128, 128] if fp8 else [0, 0]
        )
    )


def use(folder: Path | None) -> None:
    """Have the engine look there; ``None``: where it does by itself."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    fused_moe_triton_config.get_moe_configs.cache_clear()
    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)
    if folder is not None:
        os.environ["SGLANG_MOE_CONFIG_DIR"] = str(folder)
