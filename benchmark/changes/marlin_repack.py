"""FP4 experts repacked for Marlin: one layer by the engine's own function, and with fp4-weights.

    python benchmark changes/marlin_repack --json repack.json
    python benchmark changes/marlin_repack --layers gpt-oss-120b  # one of them

Random weights of one rank's shard, the engine's own kernel. First every parameter that the engine leaves is compared
bit for bit, over small layers of each kind and over the layers that are measured; what does not agree ends the run.
Then what one layer takes at the most while it is prepared, beyond what it holds when it is loaded, and the time of one
layer. A kind of layer that the release refuses is left out, with the engine's words.
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
    """Experts of one rank.

    :param format: of their weights, ``mxfp4`` or ``nvfp4``.
    :param rows: the intermediate size of this rank's part of an expert.
    """

    format: str
    experts: int
    hidden: int
    rows: int
    gated: bool = True
    biased: bool = False

    @property
    def function(self) -> str:
        """The engine's function that prepares it, by name; a release without it runs no such experts by Marlin."""
        return f"prepare_moe_{self.format}_layer_for_marlin"


#: Compared alone. Sizes that Marlin's kernels take: no padding but where it is said.
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
#: Compared and measured. By each model's public config.json.
LAYERS = {
    "deepseek-v4-flash, a quarter": Layer("mxfp4", 256, 4096, 512),
    "gpt-oss-120b": Layer("mxfp4", 128, 2880, 2880, biased=True),
    "kimi-k2.5 NVFP4, an eighth": Layer("nvfp4", 384, 7168, 256),
    "kimi-k2.5 NVFP4, 48 experts": Layer("nvfp4", 48, 7168, 2048),
}


def loaded(layer: Layer) -> torch.nn.Module:
    """What the engine's function reads of a layer of routed experts."""
    generator = torch.Generator("cuda").manual_seed(0)
    group, scale = (32, torch.uint8) if layer.format == "mxfp4" else (16, torch.float8_e4m3fn)
    rows = layer.rows * (2 if layer.gated else 1)

    def some(*size: int) -> torch.Tensor:
        size = (layer.experts, *size)
        return torch.randint(0, 127, size, generator=generator, dtype=torch.uint8, device="cuda")

    made = {
        "w13_weight": some(rows, layer.hidden // 2),
        "w2_weight": some(layer.hidden, layer.rows // 2),
        "w13_weight_scale": some(rows, layer.hidden // group).view(scale),
        "w2_weight_scale": some(layer.hidden, layer.rows // group).view(scale),
    }
    if layer.format == "nvfp4":
        made |= {f"{name}_weight_scale_2": some().float() for name in ("w13", "w2")}
    if layer.biased:
        word = "bias" if layer.format == "nvfp4" else "weight_bias"
        made |= {f"w13_{word}": some(rows).bfloat16(), f"w2_{word}": some(layer.hidden).bfloat16()}
    module = torch.nn.Module()
    for name, value in made.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    module.quant_config = SimpleNamespace(group_size=group)
    module.moe_runner_config = SimpleNamespace(is_gated=layer.gated)
    module.intermediate_size_per_partition, module.params_dtype = layer.rows, torch.bfloat16
    return module


@contextmanager
def patched() -> Iterator[None]:
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
    """One layer prepared: its parameters, and the most bytes beyond what was loaded with the seconds it took."""
    module = loaded(layer)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    start = time.perf_counter()
    getattr(engine_code.module(UTILS), layer.function)(module)
    torch.cuda.synchronize()
    figures = {
        "seconds": time.perf_counter() - start,
        "allocated": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved() - reserved,
    }
    return {name: value.data for name, value in module.named_parameters()}, figures


def same_bits(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == stock.keys() and all(
        (value.dtype, value.shape, value.stride()) == (ours[name].dtype, ours[name].shape, ours[name].stride())
        and torch.equal(value.contiguous().view(torch.uint8), ours[name].contiguous().view(torch.uint8))
        for name, value in stock.items()
    )


def compare(name: str, layer: Layer) -> dict[str, Any]:
    """Stock, patched, and both again without the kernels' compilation, which alone counts."""
    try:
        stock, _ = prepare(layer)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    with patched():
        ours, _ = prepare(layer)
    if not same_bits(ours, stock):
        sys.exit(f"marlin_repack: {name}: the parameters differ from the engine's")
    first = next(iter(ours.values()))
    first.view(torch.uint8).flatten()[0] ^= 1
    if same_bits(ours, stock):
        sys.exit("marlin_repack: the comparison does not see a single bit")
    del stock, ours, first
    one: dict[str, Any] = {"packed": packed_bytes(layer)}
    for kind in ("stock", "patched", timing.CONTROL):
        with patched() if kind == "patched" else nullcontext():
            one[kind] = prepare(layer)[1]
    return one


def packed_bytes(layer: Layer) -> int:
    """Bytes of the packed weights as they are loaded: half a byte a number."""
    return layer.experts * layer.hidden * layer.rows * (3 if layer.gated else 2) // 2


def tables(result: output.Result) -> str:
    def cells(one: dict[str, Any]) -> list[str]:
        kinds = [one[kind] for kind in ("stock", "patched", timing.CONTROL)]
        beyond = [f"{kind['allocated'] / MB:,.0f} ({kind['allocated'] / one['packed']:.2f})" for kind in kinds[:2]]
        reserved = " -> ".join(f"{kind['reserved'] / MB:,.0f}" for kind in kinds[:2])
        stock, patched, control = (f"{1e3 * kind['seconds']:.0f}" for kind in kinds)
        return [f"{one['packed'] / MB:,.0f}", *beyond, reserved, f"{stock} -> {patched} ({control})"]

    figures = result["figures"]
    measured = {name: one for name, one in figures["layers"].items() if "refused" not in one}
    header = (
        *(f"layer, {result['conditions']['engine']}", "packed weights MB", "stock: most beyond MB (times)", "patched"),
        *("reserved MB, stock -> patched", "ms, stock -> patched (stock again)"),
    )
    table = output.table(header, [(name, *cells(one)) for name, one in measured.items()])
    agree = [name for name, one in (figures["small"] | figures["layers"]).items() if "refused" not in one]
    lines = [table, "", f"The same bits: {'; '.join(agree)}."]
    for name, one in (figures["small"] | figures["layers"]).items():
        if "refused" in one:
            lines.append(f"Refused by the engine, not compared: {name} ({one['refused']}).")
    return "\n".join(lines)


def main() -> None:
    parser = output.parser(__doc__)
    choice = output.choice_of(LAYERS)
    parser.add_argument("--layers", type=choice, default=list(LAYERS), metavar="NAME[,NAME]", help=" | ".join(LAYERS))
    options = output.parse(parser)
    machine.require_gpu("marlin_repack")
    engine_code.module("sglang.srt.layers.quantization")  # first: the engine's imports are circular
    utils = engine_code.module(UTILS)
    known = {name: layer for name, layer in (SMALL | LAYERS).items() if hasattr(utils, layer.function)}
    figures = {
        "small": {name: compare(name, layer) for name, layer in known.items() if name in SMALL},
        "layers": {name: compare(name, layer) for name, layer in known.items() if name in options.layers},
    }
    output.finish(options, output.result("marlin_repack", figures), tables)
