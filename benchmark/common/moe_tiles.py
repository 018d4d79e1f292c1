"""The engine's tiles for the Triton kernels of a MoE layer: which ones it chooses, and better ones.

It takes them from a file that somebody tuned for the layer and the GPU, or from a rule. ``tune`` writes such a file to
where ``SGLANG_MOE_CONFIG_DIR`` has the engine look.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from common import timing
from common.moe_runners import TritonRunner

#: Experts of a layer for which kernels are only compiled.
COMPILED_EXPERTS = 16
Name = tuple[str, str, str]


def candidates(weights: str) -> list[dict[str, int]]:
    """What is tried, for both GEMMs; a block of scales is 128 x 128."""
    return [
        {
            "BLOCK_SIZE_M": m,
            "BLOCK_SIZE_N": n,
            "BLOCK_SIZE_K": 128 if weights == "fp8" else 64,
            "GROUP_SIZE_M": group,
            "num_warps": warps,
            "num_stages": stages,
        }
        for m, n, group, warps, stages in itertools.product((64, 128), (128, 256), (1, 32), (4, 8), (3, 4))
    ]


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


@torch.inference_mode()
def compile_part(names: list[Name], part: int, parts: int) -> None:
    """In a process of its own, compile every ``parts``-th kernel, for whoever shares Triton's cache."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    runner = TritonRunner()
    for model, layout, weights in names:
        batch = runner.batch(runner.layer(model, layout, weights, COMPILED_EXPERTS), 64)
        for config in candidates(weights)[part::parts]:
            try:
                with override_config(config):
                    batch.run()
            except Exception as error:
                print(f"{config}: {type(error).__name__}", flush=True)


def tune(
    runner: TritonRunner, names: list[Name], tokens: tuple[int, ...], folder: Path, processes: int
) -> list[dict[str, Any]]:
    """Write the best tiles for each layer and batch.

    :param folder: where the files go.
    :param processes: that compile before anything is timed.
    :returns: the best tiles, and what they took.
    """
    import triton
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as workers:
        compiling = [workers.submit(compile_part, names, part, processes) for part in range(processes)]
    for future in compiling:
        future.result()
    files = folder / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    files.mkdir(parents=True, exist_ok=True)
    figures = []
    for model, layout, weights in names:
        layer, configs, best = runner.layer(model, layout, weights), candidates(weights), {}
        for count in tokens:
            batch = runner.batch(layer, count)

            def median_ms(times: int, batch: Any = batch) -> float:
                samples = []
                for _ in range(times):
                    batch.restore()
                    samples.append(timing.idle_ms(batch.run))
                return statistics.median(samples)

            own_ms, times = median_ms(7), {}
            for index, config in enumerate(configs):
                try:
                    with override_config(config):
                        median_ms(1)
                        times[index] = median_ms(5)
                except Exception as error:
                    print(f"{config}: {type(error).__name__}", flush=True)
            winner = min(times, key=times.__getitem__)
            best[str(count)] = configs[winner]
            figures.append(
                {"model": model, "layout": layout, "weights": weights, "tokens": count, "tiles": configs[winner]}
                | {"ms": times[winner], "own_ms": own_ms, "tried": len(times)}
            )
            print(figures[-1], flush=True)
        (files / file_name(layer)).write_text(json.dumps(best, indent=1) + "\n")
        del layer, batch, median_ms
        timing.free_memory()
    return figures
