"""Tile sizes that the engine uses for the Triton kernels of a MoE layer.

The engine reads them from a file that was tuned for the layer and the GPU, for example by SGLang's own tuning script.
Without a file it computes them by a rule. The variable ``SGLANG_MOE_CONFIG_DIR`` names another folder for the files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def find_tiles(layer: Any, tokens: int) -> dict[str, int]:
    """Return the tile sizes that the engine uses for a layer and a number of tokens."""
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
    """Return the name of the engine's file with a layer's tile sizes."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    experts, _, inner = layer.w2_weight.shape
    fp8 = layer.w2_weight.element_size() == 1
    return str(
        fused_moe_triton_config.get_config_file_name(
            experts, inner, "fp8_w8a8" if fp8 else None, [128, 128] if fp8 else [0, 0]
        )
    )


def use_folder(folder: Path | None) -> None:
    """Let the engine read files with tile sizes from a folder; ``None``: from the engine's own folder."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    fused_moe_triton_config.get_moe_configs.cache_clear()
    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)
    if folder is not None:
        os.environ["SGLANG_MOE_CONFIG_DIR"] = str(folder)
