"""Engine plugin that draws better random weights for servers with ``--load-format dummy``.

The engine draws all weights, also those of norms and FP8 layers, uniformly between -0.001 and 0.001. Layers then add
almost nothing to the embedding. Greedy answers are the same whatever the layers compute. If a router adds a bias
(DeepSeek), every token goes to the same experts. MXFP4 weights are integers, and the engine leaves them at zero.

With the weights of this plugin, activations keep their size from layer to layer. The plugin (``register``) also writes
into the log how much memory was allocated when the model was loaded.
"""

from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.fp4_weights import append_zeros_to_scales

from common import plugins, weights

UNIFORM = math.sqrt(3)
"""Bound of a uniform distribution whose standard deviation is one."""
FP4_DEVIATION = math.sqrt(68.5 / 8)
"""Standard deviation of uniform E2M1 codes: plus or minus 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
ZEROS_BEHIND_SCALES = "BENCHMARK_ZEROS_BEHIND_SCALES"
"""Environment variable. If set, the memory after each layer's MXFP4 scales is zero. Stock MXFP4 kernels on Hopper
read that memory, which otherwise contains arbitrary bytes."""
_LOADED = "benchmark: allocated once the model was loaded: {} bytes"
_KV_CACHE_ALLOCATED = "Memory pool end"
"""Text of the log line that the engine prints after it has allocated the KV cache."""


def write_plugin(folder: Path) -> list[Path]:
    """Write the metadata of this module's plugin into ``folder``. If the folder exists, write nothing.

    :returns: folders that a server's ``PYTHONPATH`` needs: ``folder``, and the folder of the benchmarks.
    """
    if not folder.exists():
        plugins.write(folder, "benchmark_dummy_weights", "common.dummy_weights:register")
    return [folder, Path(__file__).parents[1]]


def redraw(name: str, parameter: Any) -> None:
    """Draw a parameter of the model again.

    Weights [..., out, in] get a standard deviation of 1 / sqrt(in). FP8 and packed INT4 weights get this deviation by
    constant scales, [..., out / 128, in / 128] and [..., in / 32, out]. The weights of a norm become 1. Other vectors
    keep their values.

    :param name: name of the parameter in the model. It is the seed.
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

    All scales are the same power of two. It is chosen so that the standard deviation of the weights is close to
    1 / sqrt(in).
    """
    if name.endswith("_scale"):
        exponent = round(math.log2(1 / (FP4_DEVIATION * math.sqrt(32 * parameter.shape[-1]))))
        parameter.fill_(127 + exponent)
    else:
        parameter.random_(0, 256, generator=weights.named_generator(name, parameter.device))


def allocated_after_loading(log: str) -> int | None:
    """Read from a server's log how many bytes were allocated when its model was loaded.

    A draft model is loaded after the KV cache was allocated. Its bytes are left out.

    :returns: the largest number of all ranks; ``None`` if the log has none, as without a GPU.
    """
    sizes = re.findall(re.escape(_LOADED).replace(r"\{\}", r"(\d+)"), log.partition(_KV_CACHE_ALLOCATED)[0])
    return max(map(int, sizes), default=None)


def register() -> None:
    """Entry point of the engine plugin. It wraps the engine's model loader and its preparation of MXFP4 experts."""
    import wrapt

    wrapt.register_post_import_hook(_wrap_loader, "sglang.srt.model_loader.loader")
    wrapt.register_post_import_hook(_wrap_mxfp4, "sglang.srt.layers.quantization.mxfp4")


def _wrap_mxfp4(mxfp4: Any) -> None:
    """Wrap ``create_moe_runner`` of the MXFP4 method, so that it draws the weights of the MXFP4 experts first.

    :func:`redraw` would be too late: up to 0.5.13 the engine processes MXFP4 weights before it draws dummy weights.
    ``create_weights`` would be earlier, but fp4-weights wraps it, and two wrappers would conflict.
    """
    import torch

    create = mxfp4.Mxfp4MoEMethod.create_moe_runner

    @functools.wraps(create)
    def create_moe_runner(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        create(self, layer, *args, **kwargs)
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.dtype == torch.uint8:
                draw_mxfp4(f"{layer.layer_id}.{name}", parameter.data)

    mxfp4.Mxfp4MoEMethod.create_moe_runner = create_moe_runner


def _wrap_loader(loader: Any) -> None:
    """Wrap two functions of the engine's model loader: one that draws dummy weights, and one that loads a model.

    No change wraps the same functions. This matters, because a change does nothing if another plugin has wrapped a
    function that the change needs.
    """
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
                    append_zeros_to_scales(method)
        if torch.cuda.is_available():
            print(_LOADED.format(torch.cuda.memory_allocated()), flush=True)
        return model

    loader.initialize_dummy_weights = initialize_dummy_weights
    loader.DummyModelLoader.load_model = load_model
