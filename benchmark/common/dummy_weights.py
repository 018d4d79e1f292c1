"""Random weights whose activations keep their size from layer to layer, for servers with ``--load-format dummy``.

The engine's own are uniform within 0.001, norms and FP8 weights too. Layers then add next to nothing to the embedding,
so that greedy answers are the same whatever the layers compute, and where a router adds a bias (DeepSeek's), each
token goes to the same experts. MXFP4 weights, which are integers, the engine leaves at zero. This module is a plugin of
the engine (``register``). It also says in the log what was allocated once the model was loaded.
"""

from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.fp4_weights import put_zeros_behind_scales

from common import plugins, weights

UNIFORM = math.sqrt(3)
"""Bound of a uniform distribution whose standard deviation is one."""
FP4_DEVIATION = math.sqrt(68.5 / 8)
"""Standard deviation of uniform E2M1 codes: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, of either sign."""
ZEROS_BEHIND_SCALES = "BENCHMARK_ZEROS_BEHIND_SCALES"
"""Set: a stock server whose MXFP4 kernels do not read what happens to lie behind a layer's scales (Hopper)."""
_LOADED = "benchmark: allocated once the model was loaded: {} bytes"
_CACHED = "Memory pool end"
"""Of the engine's log."""


def write_plugin(folder: Path) -> list[Path]:
    """Make the plugin, once.

    :returns: what a server's ``PYTHONPATH`` needs.
    """
    if not folder.exists():
        plugins.write(folder, "benchmark_dummy_weights", "common.dummy_weights:register")
    return [folder, Path(__file__).parents[1]]


def redraw(name: str, parameter: Any) -> None:
    """Draw a parameter of the model again, from a seed that is its name.

    :param parameter: weights [..., out, in] get a standard deviation of 1 / sqrt(in): FP8 ones by their scales
        [..., out / 128, in / 128], packed INT4 ones by theirs, [..., in / 32, out]; both are constant. A norm's weights
        become 1; other vectors stay.
    """
    import torch

    if name.endswith("norm.weight"):
        parameter.fill_(1)
        return
    if parameter.dim() < 2:
        return
    generator = weights.named_generator(name, parameter.device)
    if not parameter.is_floating_point():
        if name.endswith("packed"):
            weights.draw_int4(parameter, generator)
    elif name.endswith("weight_scale"):
        parameter.fill_(weights.int4_scale(parameter.shape[-2] * weights.INT4_GROUP))
    elif name.endswith("scale_inv"):
        parameter.fill_(UNIFORM / math.sqrt(parameter.shape[-1] * weights.FP8_BLOCK))
    elif parameter.element_size() == 1:
        drawn = torch.empty_like(parameter, dtype=torch.float16).uniform_(-1, 1, generator=generator)
        parameter.copy_(drawn)
    else:
        bound = UNIFORM / math.sqrt(parameter.shape[-1])
        parameter.uniform_(-bound, bound, generator=generator)


def draw_mxfp4(name: str, parameter: Any) -> None:
    """Draw a parameter of MXFP4 experts: packed weights [experts, out, in / 2] or scales [experts, out, in / 32].

    The scales, powers of two, are all the one that brings the weights nearest to a standard deviation of 1 / sqrt(in).
    """
    if name.endswith("_scale"):
        exponent = round(math.log2(1 / (FP4_DEVIATION * math.sqrt(32 * parameter.shape[-1]))))
        parameter.fill_(127 + exponent)
    else:
        parameter.random_(0, 256, generator=weights.named_generator(name, parameter.device))


def allocated_after_loading(log: str) -> int | None:
    """Bytes allocated when this server's model was loaded, the most of its ranks; ``None``: no GPU, or unsaid.

    What a model that drafts has is told of after the KV cache was allocated, and left out.
    """
    found = re.findall(re.escape(_LOADED).replace(r"\{\}", r"(\d+)"), log.partition(_CACHED)[0])
    return max(map(int, found), default=None)


def register() -> None:
    """Entry point ``sglang.srt.plugins``, in servers that a benchmark starts."""
    import wrapt

    wrapt.register_post_import_hook(_wrap, "sglang.srt.model_loader.loader")
    wrapt.register_post_import_hook(_wrap_mxfp4, "sglang.srt.layers.quantization.mxfp4")


def _wrap_mxfp4(mxfp4: Any) -> None:
    """Draw MXFP4 experts as soon as they are made: up to 0.5.13 they are processed before dummy weights are drawn."""
    import torch

    create = mxfp4.Mxfp4MoEMethod.create_weights

    @functools.wraps(create)
    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create(self, layer, *args, **kwargs)
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.dtype == torch.uint8:
                draw_mxfp4(f"{layer.layer_id}.{name}", parameter.data)

    mxfp4.Mxfp4MoEMethod.create_weights = create_weights


def _wrap(loader: Any) -> None:
    """Wrap functions that no change wraps: a change does nothing where somebody else has wrapped one of its own."""
    import torch

    draw, load = loader.initialize_dummy_weights, loader.DummyModelLoader.load_model

    @functools.wraps(draw)
    def initialize_dummy_weights(model: Any, *args: Any, **kwargs: Any) -> None:
        draw(model, *args, **kwargs)
        for name, parameter in model.state_dict().items():
            redraw(name, parameter.data)

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        if os.environ.get(ZEROS_BEHIND_SCALES):
            for module in model.modules():
                if method := getattr(module, "quant_method", None):
                    put_zeros_behind_scales(method)
        if torch.cuda.is_available():
            print(_LOADED.format(torch.cuda.memory_allocated()), flush=True)
        return model

    loader.initialize_dummy_weights = initialize_dummy_weights
    loader.DummyModelLoader.load_model = load_model
