"""Random weights whose activations keep their size from layer to layer, for servers with ``--load-format dummy``.

The engine's own are uniform within 0.001, norms and FP8 weights too. Layers then add next to nothing to the embedding,
so that greedy answers are the same whatever the layers compute, and where a router adds a bias (DeepSeek's), each
token goes to the same experts. This module is a plugin of the engine (``register``).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from common import plugins, weights

UNIFORM = math.sqrt(3)
"""Bound of a uniform distribution whose standard deviation is one."""


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


def register() -> None:
    """Entry point ``sglang.srt.plugins``, in servers that a benchmark starts."""
    import wrapt

    wrapt.register_post_import_hook(_wrap, "sglang.srt.model_loader.loader")


def _wrap(loader: Any) -> None:
    draw = loader.initialize_dummy_weights

    @functools.wraps(draw)
    def initialize_dummy_weights(model: Any, *args: Any, **kwargs: Any) -> None:
        draw(model, *args, **kwargs)
        for name, parameter in model.state_dict().items():
            redraw(name, parameter.data)

    loader.initialize_dummy_weights = initialize_dummy_weights
