"""Compare the engine's preparation of NVFP4 weights for the TRT-LLM MoE kernels with the preparation by fp4-weights.

    python benchmark changes/weight_shuffle --json shuffle.json --plot shuffle.svg  # the whole grid
    python benchmark changes/weight_shuffle --models kimi-k2.5 --shards tp4  # one row

Each case first checks that both preparation functions return the same bytes. Times are medians of many runs of one
layer after a warm-up, measured by CUDA events. The copy bandwidth is the bandwidth of a plain device-to-device copy.
The memory that the allocator keeps is measured after whole loading steps. In such a step, the engine's
align_fp4_moe_weights_for_flashinfer_trtllm calls the preparation function and copies its results into the parameters.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine, output, timing
from common.shapes import MODELS, NVFP4_MODELS, Layout
from sglang_moe_patches.changes.fp4_weights import shuffle

SHARDS = {"tp1": Layout(), "tp4": Layout(tp=4), "tp8": Layout(tp=8), "ep8": Layout(tp=8, ep=8)}


@dataclass(frozen=True)
class Case:
    """MoE layer of a model on one rank."""

    model: str
    shard: str
    experts: int
    hidden: int
    intermediate: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hidden size, intermediate size and number of experts: arguments of the preparation functions."""
        return self.hidden, self.intermediate, self.experts

    @property
    def layer_bytes(self) -> int:
        """Bytes of the layer's weights and scales."""
        elements = self.experts * 3 * self.intermediate * self.hidden
        return elements // 2 + elements // 16


def cases(models: list[str], shards: list[str]) -> Iterator[Case]:
    for model in models:
        for shard in shards:
            rank = MODELS[model].per_rank(SHARDS[shard])
            yield Case(model, shard, rank.experts, rank.hidden, rank.intermediate)


def random_layer(case: Case, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def randint(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)

    return (
        randint(case.experts, 2 * case.intermediate, case.hidden // 2),
        randint(case.experts, case.hidden, case.intermediate // 2),
        randint(case.experts, 2 * case.intermediate, case.hidden // 16).view(torch.float8_e4m3fn),
        randint(case.experts, case.hidden, case.intermediate // 16).view(torch.float8_e4m3fn),
    )


# --- The engine ------------------------------------------------------------------------------------------------------


class Engine:
    """The engine's preparation function, and the loading step that calls it."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Import this module before the runner, because the engine's imports are circular.
            from sglang.srt.layers.quantization import utils

            runner = importlib.import_module("sglang.srt.layers.moe.moe_runner.flashinfer_trtllm")

        self.prepare = inspect.unwrap(utils.prepare_static_weights_for_trtllm_fp4_moe)
        self._utils = utils
        self._align = runner.align_fp4_moe_weights_for_flashinfer_trtllm

    def run_loading_step(self, layer: torch.nn.Module, prepare: Callable[..., Any]) -> None:
        """Prepare a layer as the engine's loader does, with ``prepare`` as the preparation function."""
        before = self._utils.prepare_static_weights_for_trtllm_fp4_moe
        self._utils.prepare_static_weights_for_trtllm_fp4_moe = prepare
        try:
            self._align(layer)
        finally:
            self._utils.prepare_static_weights_for_trtllm_fp4_moe = before


def moe_layer(tensors: tuple[torch.Tensor, ...]) -> torch.nn.Module:
    """Make a module with the attributes of ``FusedMoE`` that the loading step reads and writes.

    :param tensors: weights of w13, weights of w2, block scales of w13, block scales of w2.
    """
    layer = torch.nn.Module()
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    for name, tensor in zip(names, tensors, strict=True):
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    layer.moe_runner_config = types.SimpleNamespace(is_gated=True)
    layer.w2_input_scale_quant = torch.nn.Parameter(torch.ones((), device=tensors[0].device), requires_grad=False)
    experts = tensors[0].shape[0]
    layer.g1_alphas = torch.nn.Parameter(torch.ones(experts, device=tensors[0].device), requires_grad=False)
    return layer


# --- Measuring -------------------------------------------------------------------------------------------------------


def have_same_bytes(ours: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        # Comparing all experts at once would need twice the memory.
        and all(torch.equal(x, y) for x, y in zip(a.view(torch.uint8), b.view(torch.uint8), strict=True))
        for a, b in zip(ours, expected, strict=True)
    )


def check(case: Case, engine: Engine) -> None:
    """Check that this package's preparation function returns the same bytes as the engine's. If not, exit."""
    layer = random_layer(case, seed=1)
    expected = engine.prepare(*(t.clone() for t in layer), *case.sizes)
    ours = shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, *case.sizes)
    if not have_same_bytes(ours, expected):
        sys.exit(f"{case.model} {case.shard}: our result differs from the engine's")
    # Swap two rows of the last expert. The comparison must then fail.
    ours[0][-1, [0, 1]] = ours[0][-1, [1, 0]]
    if have_same_bytes(ours, expected):
        sys.exit(f"{case.model} {case.shard}: the comparison missed two swapped rows")


def measure(case: Case, engine: Engine, repeats: int) -> dict[str, Any]:
    """Measure the time and memory of the engine's and of this package's preparation function. Also measure the time of
    the first call of this package's function. If Triton's cache is empty, this call also compiles the kernels.
    """
    layer = random_layer(case)
    shuffle.compute_row_permutations(case.hidden, case.intermediate, True)

    def ours() -> Any:
        return shuffle.prepare_static_weights_for_trtllm_fp4_moe(*layer, *case.sizes)

    def engines() -> Any:
        return engine.prepare(*layer, *case.sizes)

    torch.cuda.synchronize()
    started = time.perf_counter()
    ours()
    torch.cuda.synchronize()
    first_call = time.perf_counter() - started

    check(case, engine)
    torch.cuda.empty_cache()

    row: dict[str, Any] = {**asdict(case), "layer_bytes": case.layer_bytes, "first_call_s": first_call}
    for name, function, times in (("ours", ours, repeats), ("engine", engines, max(3, repeats // 5))):
        row[name] = {"ms": timing.median_ms(function, times), "peak_bytes": timing.peak_bytes(function)}
        torch.cuda.empty_cache()
    row["speedup"] = row["engine"]["ms"] / row["ours"]["ms"]
    return row


def measure_fragmentation(case: Case, engine: Engine, layers: int) -> dict[str, Any]:
    """Load and prepare a model of ``layers`` layers. Then measure the memory that is reserved and not allocated.

    :returns: bytes after the engine's preparation (``engine``) and after this package's preparation (``ours``).
    """
    free = torch.cuda.mem_get_info()[0]
    experts = max(1, min(case.experts, int(case.experts * 0.25 * free / (layers * case.layer_bytes))))
    small = Case(case.model, case.shard, experts, case.hidden, case.intermediate)
    result: dict[str, Any] = {"layers": layers, "experts": experts, "layer_bytes": small.layer_bytes}
    for name, prepare in (
        ("engine", engine.prepare),
        ("ours", shuffle.prepare_static_weights_for_trtllm_fp4_moe),
    ):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        # A loader first loads the parameters of all layers, and then prepares one layer after the other.
        model = [moe_layer(random_layer(small)) for _ in range(layers)]
        for layer in model:
            engine.run_loading_step(layer, prepare)
        torch.cuda.synchronize()
        result[name] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - before
        del model, layer
    torch.cuda.empty_cache()
    return result


# --- Tables ----------------------------------------------------------------------------------------------------------


def make_tables(result: output.Result, shards: Collection[str] = tuple(SHARDS)) -> str:
    figures = result["figures"]
    rows = []
    for row in (case for case in figures["cases"] if case["shard"] in shards):
        engines, ours = row["engine"], row["ours"]
        times = (f"{engines['ms']:.1f}", f"{ours['ms']:.2f} ({row['speedup']:.1f}x)")
        peaks = (f"{engines['peak_bytes'] / 1e6:,.0f}", f"{ours['peak_bytes'] / 1e6:.2f}")
        rows.append((f"{row['model']} {row['shard']}", f"{row['layer_bytes'] / 1e9:.2f}", *times, *peaks))
    header = ("model", "layer, GB", "stock ms", "patched ms", "stock MB beside the weights", "patched MB")
    parts = [output.table(header, rows)]
    if pool := figures["fragmentation"]:
        parts.append(
            f"Memory pool after {pool['layers']} layers of {pool['layer_bytes'] / 1e9:.2f} GB, reserved minus "
            f"allocated: stock {pool['engine'] / 1e6:.0f} MB, patched {pool['ours'] / 1e6:.0f} MB."
        )
    parts.append(
        f"Copy bandwidth {figures['copy_bandwidth'] / 1e12:.2f} TB/s. First call with an empty Triton cache: "
        f"{figures['first_call_s']:.2f} s.\n"
    )
    return "\n".join(parts)


def plot(result: output.Result, path: Path) -> None:
    pyplot = output.pyplot()
    rows = result["figures"]["cases"]
    labels = [f"{row['model']} {row['shard']}" for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.42 * len(rows) + 1.8), sharey=True)
    positions = range(len(rows))
    bars = ((-0.2, "engine", "stock", "#9aa5b1"), (0.2, "ours", "patched", "#2b6cb0"))
    for offset, name, label, color in bars:
        at = [p + offset for p in positions]
        left.barh(at, [row[name]["ms"] for row in rows], 0.38, label=label, color=color)
        right.barh(at, [row[name]["peak_bytes"] / 1e6 for row in rows], 0.38, label=label, color=color)
    floor = [2 * row["layer_bytes"] / result["figures"]["copy_bandwidth"] * 1e3 for row in rows]
    left.plot(floor, positions, "k|", markersize=16, label="every byte read and written once")
    left.set_yticks(list(positions), labels)
    left.invert_yaxis()
    left.set(xscale="log", xlabel="one layer, ms")
    right.set(xscale="log", xlabel="peak beyond the weights, MB")
    conditions = result["conditions"]
    figure.suptitle(f"NVFP4 weight preparation, {conditions['gpu']}, SGLang {conditions['engine']}")
    figure.tight_layout(rect=(0, 0.9 / figure.get_figheight() / 2, 1, 1))
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    output.save(figure, path)


def main() -> None:
    quick = {"models": ["qwen3-235b"], "shards": ["tp8"], "repeats": 5, "layers": 0}
    parser = output.parser(__doc__, quick=quick, plots=True)
    parser.add_names("--models", "models", MODELS, NVFP4_MODELS)
    parser.add_names("--shards", "parallel layouts", SHARDS)
    parser.add_argument(
        "--repeats",
        type=int,
        default=50,
        help="timed runs of this package's function; the engine's function runs a fifth as often (%(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=60,
        help="layers of the loaded model for the memory that the allocator keeps; 0: load no model (%(default)s)",
    )
    options = output.parse(parser)
    try:
        chosen = list(cases(options.models, options.shards))
    except ValueError as error:
        parser.error(str(error))

    machine.require_gpu("weight_shuffle.py")
    with tempfile.TemporaryDirectory(prefix="triton-cold-") as cold_cache:
        # With an empty cache, the time of the first call includes the compilation of the kernels.
        os.environ["TRITON_CACHE_DIR"] = cold_cache
        bandwidth = timing.copy_bandwidth()
        engine = Engine()
        rows = []
        for case in chosen:
            rows.append(measure(case, engine, options.repeats))
            ours, engines = rows[-1]["ours"]["ms"], rows[-1]["engine"]["ms"]
            print(f"{case.model} {case.shard}: engine {engines:.2f} ms, ours {ours:.3f} ms", flush=True)
        (pool_case,) = cases(["kimi-k2.5"], ["tp4"])
        figures = {
            "copy_bandwidth": bandwidth,
            "first_call_s": rows[0]["first_call_s"],
            "cases": rows,
            "fragmentation": measure_fragmentation(pool_case, engine, options.layers) if options.layers else None,
        }
    output.finish(options, output.result("weight_shuffle", figures), make_tables, plot)
