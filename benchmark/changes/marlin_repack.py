"""Compare the engine's repacking of FP4 experts for Marlin with the repacking by fp4-weights, for one layer.

    python benchmark changes/marlin_repack --json repack.json
    python benchmark changes/marlin_repack --layers gpt-oss-120b  # one layer

Weights are random, with the sizes of one rank. The kernel is the engine's own. First, all parameters are compared bit
by bit, for small layers of each kind and for the measured layers. If a parameter differs, the run ends. Then the
benchmark measures the peak memory of preparing one layer, beside its loaded weights, and the time. If the release
rejects a kind of layer, the result has the engine's error instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from common import machine, output, timing
from sglang_moe_patches.changes import fp4_weights
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.core.patch import Patcher, probe

MB = 1e6
UTILS = "sglang.srt.layers.quantization.marlin_utils_fp4"


class Layer(NamedTuple):
    """Routed experts of a MoE layer on one rank.

    :param format: format of the weights, ``mxfp4`` or ``nvfp4``.
    :param rows: intermediate size of this rank's part of an expert.
    """

    format: str
    experts: int
    hidden: int
    rows: int
    gated: bool = True
    biased: bool = False

    @property
    def function(self) -> str:
        """Name of the engine's function that prepares the layer. A release without this function cannot run such a
        layer with Marlin.
        """
        return f"prepare_moe_{self.format}_layer_for_marlin"


SMALL = {
    "all experts": Layer("mxfp4", 8, 1024, 512),
    "an uneven share of experts, biases": Layer("mxfp4", 3, 1024, 512, biased=True),
    "one expert": Layer("mxfp4", 1, 512, 256),
    "padded": Layer("mxfp4", 4, 512, 288, biased=True),
    "nvfp4": Layer("nvfp4", 8, 1024, 512),
    "nvfp4, one expert": Layer("nvfp4", 1, 1024, 512),
    "nvfp4, not gated": Layer("nvfp4", 5, 512, 256, gated=False),
    "nvfp4, not gated, biases": Layer("nvfp4", 3, 512, 256, gated=False, biased=True),
}
"""Small layers. Their parameters are compared but not timed. Only the layer "padded" needs padding for Marlin."""
LAYERS = {
    "deepseek-v4-flash, a quarter": Layer("mxfp4", 256, 4096, 512),
    "gpt-oss-120b": Layer("mxfp4", 128, 2880, 2880, biased=True),
    "kimi-k2.5 NVFP4, an eighth": Layer("nvfp4", 384, 7168, 256),
    "kimi-k2.5 NVFP4, 48 experts": Layer("nvfp4", 48, 7168, 2048),
}
"""Layers that are compared and measured. Sizes are from each model's public config.json."""


def make_loaded_layer(layer: Layer) -> torch.nn.Module:
    """Make a module with random weights, in the form in which the engine's preparation function reads them."""
    generator = torch.Generator("cuda").manual_seed(0)
    group, scale = (32, torch.uint8) if layer.format == "mxfp4" else (16, torch.float8_e4m3fn)
    rows = layer.rows * (2 if layer.gated else 1)

    def draw(*size: int) -> torch.Tensor:
        size = (layer.experts, *size)
        return torch.randint(0, 127, size, generator=generator, dtype=torch.uint8, device="cuda")

    tensors = {
        "w13_weight": draw(rows, layer.hidden // 2),
        "w2_weight": draw(layer.hidden, layer.rows // 2),
        "w13_weight_scale": draw(rows, layer.hidden // group).view(scale),
        "w2_weight_scale": draw(layer.hidden, layer.rows // group).view(scale),
    }
    if layer.format == "nvfp4":
        tensors |= {f"{name}_weight_scale_2": draw().float() for name in ("w13", "w2")}
    if layer.biased:
        word = "bias" if layer.format == "nvfp4" else "weight_bias"
        tensors |= {f"w13_{word}": draw(rows).bfloat16(), f"w2_{word}": draw(layer.hidden).bfloat16()}
    module = torch.nn.Module()
    for name, value in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    module.quant_config = SimpleNamespace(group_size=group)
    module.moe_runner_config = SimpleNamespace(is_gated=layer.gated)
    module.intermediate_size_per_partition, module.params_dtype = layer.rows, torch.bfloat16
    return module


@contextmanager
def install_fp4_weights() -> Iterator[None]:
    plan = probe(fp4_weights.CHANGE)
    if plan.install is None:
        sys.exit(f"marlin_repack: {plan.status.value}: {plan.reason}")
    patcher = Patcher()
    try:
        plan.install(patcher)
        yield
    finally:
        patcher.undo()


def prepare(layer: Layer) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Prepare the weights of one layer for Marlin, and measure the time and the memory.

    :returns: the prepared parameters, and figures: ``seconds``, and the peaks of ``allocated`` and ``reserved`` memory
        in bytes, beside the loaded weights.
    """
    module = make_loaded_layer(layer)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    start = time.perf_counter()
    getattr(engine_code.import_module(UTILS), layer.function)(module)
    torch.cuda.synchronize()
    figures = {
        "seconds": time.perf_counter() - start,
        "allocated": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved() - reserved,
    }
    return {name: value.data for name, value in module.named_parameters()}, figures


def have_same_bits(patched: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> bool:
    return patched.keys() == stock.keys() and all(
        (value.dtype, value.shape, value.stride()) == (patched[name].dtype, patched[name].shape, patched[name].stride())
        and torch.equal(value.contiguous().view(torch.uint8), patched[name].contiguous().view(torch.uint8))
        for name, value in stock.items()
    )


def compare(name: str, layer: Layer) -> dict[str, Any]:
    """Compare one layer bit by bit, then measure it stock, patched and stock again.

    The comparison also compiles the kernels, so the measurements have no compilation time.
    """
    try:
        stock, _ = prepare(layer)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    with install_fp4_weights():
        patched, _ = prepare(layer)
    if not have_same_bits(patched, stock):
        sys.exit(f"marlin_repack: {name}: the parameters differ from the engine's")
    first = next(iter(patched.values()))
    first.view(torch.uint8).flatten()[0] ^= 1
    if have_same_bits(patched, stock):
        sys.exit("marlin_repack: the comparison missed a flipped bit")
    del stock, patched, first
    figures: dict[str, Any] = {"packed": packed_bytes(layer)}
    for kind in ("stock", "patched", timing.CONTROL):
        with install_fp4_weights() if kind == "patched" else nullcontext():
            figures[kind] = prepare(layer)[1]
    return figures


def packed_bytes(layer: Layer) -> int:
    """Bytes of the packed weights before preparation: half a byte per weight."""
    return layer.experts * layer.hidden * layer.rows * (3 if layer.gated else 2) // 2


def make_tables(result: output.Result) -> str:
    def cells(layer: dict[str, Any]) -> list[str]:
        kinds = [layer[kind] for kind in ("stock", "patched", timing.CONTROL)]
        beyond = [f"{kind['allocated'] / MB:,.0f} ({kind['allocated'] / layer['packed']:.2f})" for kind in kinds[:2]]
        reserved = " -> ".join(f"{kind['reserved'] / MB:,.0f}" for kind in kinds[:2])
        stock, patched, control = (f"{1e3 * kind['seconds']:.0f}" for kind in kinds)
        return [f"{layer['packed'] / MB:,.0f}", *beyond, reserved, f"{stock} -> {patched} ({control})"]

    figures = result["figures"]
    measured = {name: layer for name, layer in figures["layers"].items() if "refused" not in layer}
    header = (
        *(f"layer, {result['conditions']['engine']}", "packed weights MB", "stock: most beyond MB (times)", "patched"),
        *("reserved MB, stock -> patched", "ms, stock -> patched (stock again)"),
    )
    table = output.table(header, [(name, *cells(layer)) for name, layer in measured.items()])
    agree = [name for name, layer in (figures["small"] | figures["layers"]).items() if "refused" not in layer]
    lines = [table, "", f"The same bits: {'; '.join(agree)}."]
    for name, layer in (figures["small"] | figures["layers"]).items():
        if "refused" in layer:
            lines.append(f"Refused by the engine, not compared: {name} ({layer['refused']}).")
    return "\n".join(lines)


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_names("--layers", "layers to measure", LAYERS)
    options = output.parse(parser)
    machine.require_gpu("marlin_repack")
    # Import this package before UTILS, because the engine's imports are circular.
    engine_code.import_module("sglang.srt.layers.quantization")
    utils = engine_code.import_module(UTILS)
    known = {name: layer for name, layer in (SMALL | LAYERS).items() if hasattr(utils, layer.function)}
    figures = {
        "small": {name: compare(name, layer) for name, layer in known.items() if name in SMALL},
        "layers": {name: compare(name, layer) for name, layer in known.items() if name in options.layers},
    }
    output.finish(options, output.result("marlin_repack", figures), make_tables)
