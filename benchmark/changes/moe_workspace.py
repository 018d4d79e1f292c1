"""Compare moe-workspace's column slices with the stock engine for one MoE layer: time, memory and answers.

    python benchmark changes/moe_workspace --json triton.json  # the grid of docs/benchmarks/moe-workspace.md
    python benchmark changes/moe_workspace --models kimi-k2.5 --layouts tp4 --tokens 16384,4096
    python benchmark changes/moe_workspace --slices 2,3,5 --mb 400,800  # also fixed numbers of slices, and settings
    python benchmark changes/moe_workspace --tiles TILES --models kimi-k2.5 --layouts tp4  # also tuned tiles
    python benchmark changes/moe_workspace --runner marlin --layers kimi-k2.5:tp8 --tokens 16384 --slices 2,7 --mb 700

The benchmark runs the engine's own layer with random weights at one rank's sizes, in one process, without a server.
Each measurement compares stock, stock again (any difference between the two is noise) and column slices. They run in
turn, and CUDA events measure the times. Each call starts on an idle GPU, so the host's time to launch slices counts.
*Queued* calls follow other calls, as in a forward pass of many layers. The peak is the memory that one call allocates.
It includes Marlin's output, unless the output is *offered*: the runner then writes into an existing tensor, as into a
layer's dead input. The ratio of a round is the time with slices, divided by stock's time. An interval is the 95 %
confidence interval of the median of these ratios.

With the Triton runner, answers are compared bit by bit. With Marlin, the outputs of some tokens are also compared with
float32. *Permuted ahead* is the time that slices would take if the model's loading had already permuted the weights. On
its first run on a machine, the engine compiles Marlin's kernel for about four minutes.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import machine, moe_tables, moe_tiles, output, timing
from common.moe_runners import LAYOUTS, RUNNERS, Batch, MarlinBatch, Runner, Variant
from common.shapes import MODELS

STARTED = time.monotonic()
"""Start of the program, in seconds of :func:`time.monotonic`."""
GRID = ("kimi-k2.5", "deepseek-v3-fused", "glm-4.5", "qwen3-235b", "qwen3-30b", "minimax-m2", "mixtral-8x7b")
MARLIN_GRID = "kimi-k2.5:tp8,kimi-k2.5:tp4,qwen3-235b:tp4,glm-4.5:tp8"
WEIGHTS = {"triton": ("bf16", "fp8"), "marlin": ("int4",)}
DEFAULTS: dict[str, dict[str, Any]] = {
    "triton": {
        "tokens": (1, 64, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        **{"slices": (), "graphs": (), "decode": (), "mixed": 0, "rounds": 9},
    },
    "marlin": {
        "tokens": (16384, 4096, 32768),
        **{"slices": (2, 3, 4, 5, 7), "graphs": (4096,), "decode": (1, 64), "mixed": 16384, "rounds": 11},
    },
}
"""Default values of options, by the value of ``--runner``."""
KINDS = ("cells", "decode", "graphs", "mixed", "left_out")
"""Keys of a result, one for each kind of measurement. ``left_out`` has the measurements that did not run."""
Checked = tuple[torch.Tensor, torch.Tensor] | None
"""Result of ``Batch.expected``: indices of some tokens, and their outputs in float32. ``None``: outputs are only
compared with stock, bit by bit.
"""


def median_interval(ratios: list[float]) -> list[float]:
    """Compute the 95 % confidence interval of the ratios' median by the binomial distribution. Both ends of the
    interval are values of ``ratios``.
    """
    ordered, below = sorted(ratios), 0
    while sum(math.comb(len(ordered), k) for k in range(below + 1)) / 2 ** len(ordered) <= 0.025:
        below += 1
    below = max(below - 1, 0)
    return [ordered[below], ordered[-1 - below]]


def compute_errors(output: torch.Tensor, checked: Checked) -> dict[str, float] | None:
    """Compute the mean absolute error of the checked tokens' outputs, relative to the mean absolute value in float32.

    :param checked: result of ``Batch.expected``. With ``None``, the result is ``None``, too.
    """
    if checked is None:
        return None
    tokens, expected = checked
    differences = (output[tokens.to(output.device)].float() - expected).abs()
    return {"mean": float(differences.mean() / expected.abs().mean())}


def run_restored(batch: Batch) -> torch.Tensor:
    """Restore the batch's input, which an earlier call may have overwritten, and run the layer."""
    batch.restore()
    return batch.run()


def idle_ms(batch: Batch, run: Callable[[], Any]) -> float:
    """Restore the batch's input, and time one call on an idle GPU, in milliseconds."""
    batch.restore()
    return timing.idle_ms(run)


def peak_bytes(batch: Batch) -> int:
    """Restore the batch's input, and measure the peak of the memory that one call allocates."""
    batch.restore()
    return timing.peak_bytes(batch.run)


def ratios_to_stock(samples: dict[str, list[float]], name: str) -> list[float]:
    """Divide the times of the variant ``name`` by stock's times, round by round."""
    return [other / stock for stock, other in zip(samples[timing.STOCK], samples[name], strict=True)]


def measure_batch(
    runner: Runner, batch: Batch, checked: Checked, variants: list[Variant], rounds: int
) -> Iterator[dict[str, Any]]:
    """Measure one batch stock and with each variant: peak memory, answers and time.

    Two variants may lead to the same computation: they have the same slices, both or neither copy columns, and both or
    neither write into an offered output. Only the first of such variants is timed.

    :returns: figures of each timed variant.
    """
    expected = run_restored(batch).clone()
    again = run_restored(batch)
    stock: dict[str, Any] = {"stock_repeats": bool(torch.equal(expected, again))}
    stock |= {"stock_errors": [compute_errors(result, checked) for result in (expected, again)]} if checked else {}
    del again
    stock["stock_peak"] = peak_bytes(batch)
    runner.dead_input = torch.empty_like(expected)
    ran: dict[Variant, list[tuple[int, int]]] = {}
    facts: dict[Variant, dict[str, Any]] = {}
    for variant in variants:
        with runner.use(variant):
            answer = run_restored(batch)
            ran[variant] = runner.column_ranges
            facts[variant] = {"same": bool(torch.equal(expected, answer)) if variant.copies else None}
            facts[variant]["errors"] = compute_errors(answer, checked) if variant.copies else None
            del answer
            facts[variant]["peak"] = peak_bytes(batch)
    kinds = {variant: (ran[variant], variant.copies, variant.offered) for variant in variants}
    timed = {
        variant: f"columns {variant}"
        for index, variant in enumerate(variants)
        if variant == Variant() or kinds[variant] not in [kinds[earlier] for earlier in variants[:index]]
    }

    def time_in_turn(measure: Callable[[], float], rounds: int) -> dict[str, list[float]]:
        def measure_with(variant: Variant | None) -> float:
            with runner.use(variant):
                return measure()

        versions: dict[str, Callable[[], float]] = {
            name: lambda: measure_with(None) for name in (timing.STOCK, timing.CONTROL)
        }
        versions |= {name: lambda variant=variant: measure_with(variant) for variant, name in timed.items()}
        return timing.run_in_turn(versions, rounds)

    samples = time_in_turn(lambda: idle_ms(batch, batch.run), rounds)
    queued = None if runner.in_place else time_in_turn(lambda: timing.queued_ms(batch.run), max(3, rounds // 2))
    tokens, hidden = expected.shape
    control = ratios_to_stock(samples, timing.CONTROL)
    for variant, name in timed.items():
        ratios, ranges = ratios_to_stock(samples, name), ran[variant] or [(0, hidden)]
        figures = {
            "tokens": tokens,
            "asked_slices": variant.slices,
            "asked_mb": variant.mb,
            "copies": "ours" if variant.copies else "none",
            "offered": variant.offered,
            "slices": len(ranges),
            "width": ranges[0][1],
            "stock_ms": statistics.median(samples[timing.STOCK]),
            "slowdown": statistics.median(ratios),
            "interval": median_interval(ratios),
            "control": statistics.median(control),
        }
        if queued is not None:
            figures["queued"] = statistics.median(ratios_to_stock(queued, name))
        yield figures | stock | facts[variant]


def measure_decode(runner: Runner, batch: Batch) -> dict[str, Any]:
    """Time a batch that is too small for slices: eager calls on the host, and replays of a CUDA graph on the GPU."""
    versions = {timing.STOCK: None, timing.CONTROL: None, "columns": Variant()}
    graphs, outputs = {}, {}
    for name, variant in versions.items():
        with runner.use(variant):
            batch.run()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                outputs[name] = batch.run()

    def eager_ms(variant: Variant | None) -> float:
        with runner.use(variant):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(20):
                batch.run()
            torch.cuda.synchronize()
            return (time.perf_counter() - started) / 20 * 1e3

    def replay_ms(graph: Any) -> float:
        return timing.idle_ms(lambda: [graph.replay() for _ in range(20)]) / 20

    figures: dict[str, Any] = {}
    for kind, measures in (
        ("eager", {name: lambda variant=variant: eager_ms(variant) for name, variant in versions.items()}),
        ("captured", {name: lambda graph=graph: replay_ms(graph) for name, graph in graphs.items()}),
    ):
        samples = timing.run_in_turn(measures, 25)
        for name in (timing.CONTROL, "columns"):
            ratios = ratios_to_stock(samples, name)
            figures[f"{kind} {name}"] = statistics.median(ratios)
        figures[f"{kind} us"] = statistics.median(samples[timing.STOCK]) * 1e3
    return figures


def measure_mixed(runner: Runner, batch: Batch, tokens: int, variant: Variant) -> dict[str, Any]:
    """Run forty batches of mixed sizes, stock and with a variant. Measure the peaks of allocated and reserved memory.

    :param tokens: tokens of the largest batch.
    """
    draw = random.Random(5)
    sizes = [draw.choice(range(min(512, tokens // 2), tokens + 1, 16)) for _ in range(40)]
    figures: dict[str, Any] = {"tokens": tokens, "batches": len(sizes), "asked_mb": variant.mb}
    for name, used in ((timing.STOCK, None), ("columns", variant)):
        with runner.use(used):
            timing.free_memory()
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            for size in sizes:
                batch.first(size).run()
            torch.cuda.synchronize()
            figures[name] = {
                "allocated": torch.cuda.max_memory_allocated() - allocated,
                "reserved": torch.cuda.max_memory_reserved() - reserved,
            }
    return figures


def measure_graph(runner: Runner, batch: Batch, variant: Variant, rounds: int) -> dict[str, Any]:
    """Capture one layer in a CUDA graph: stock, stock again, and with a variant. Measure each graph.

    :returns: for each version, bytes of the graph's memory pool (``pool``), whether a replay has the same output as the
        eager layer (``same``), and the time of a replay relative to stock (``slowdown``).
    """
    figures: dict[str, Any] = {}
    graphs: dict[str, Any] = {}
    expected = run_restored(batch).clone()
    for name, used in ((timing.STOCK, None), (timing.CONTROL, None), ("columns", variant)):
        with runner.use(used):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                eager = run_restored(batch).clone()
            torch.cuda.synchronize()
            # Marlin adds numbers in a random order, so a captured layer can only equal its own eager output.
            expected = expected if runner.in_place else eager
            timing.free_memory()
            reserved = torch.cuda.memory_reserved()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                captured = batch.run()
        pool = torch.cuda.memory_reserved() - reserved
        captured.fill_(math.nan)
        batch.restore()
        graphs[name].replay()
        torch.cuda.synchronize()
        figures[name] = {"pool": pool, "same": bool(torch.equal(captured, expected))}
        del captured, eager
    samples = timing.run_in_turn(
        {name: lambda graph=graph: idle_ms(batch, graph.replay) for name, graph in graphs.items()}, rounds
    )
    for name, ratio in timing.compare_with_stock(samples).items():
        figures[name]["slowdown"] = 1 / ratio["ratio"]
    return figures


# --- The grid --------------------------------------------------------------------------------------------------------


def choose_variants(layer: tuple[str, str], options: Any, *, first: bool) -> list[Variant]:
    """Choose the variants to measure with one batch.

    :param layer: model and layout, as in ("kimi-k2.5", "tp8").
    :param first: whether this is the first batch of the layer. With Marlin, only the first batch is also measured with
        slices that copy no columns (``Variant.copies``).
    """
    default_mb = moe_tables.MARLIN_MB.get(layer) if options.runner == "marlin" else None
    settings = [mb for mb in (default_mb, *options.mb) if mb]
    variants = [Variant(), *(Variant(mb=mb) for mb in settings)]
    if default_mb:
        variants += [Variant(mb=default_mb, offered=True)]
    variants += [Variant(slices=slices) for slices in options.slices]
    if first and options.runner == "marlin" and options.slices:
        variants += [Variant(slices=slices, copies=False) for slices in dict.fromkeys((2, max(options.slices)))]
    return variants


def measure(runner: Runner, names: list[tuple[str, str, str]], options: Any) -> dict[str, Any]:
    """Measure all layers. If a layer fails, or no time is left, the result has the reason in ``left_out``."""
    figures: dict[str, Any] = {kind: [] for kind in KINDS}

    def keep(kind: str, row: dict[str, Any]) -> None:
        figures[kind].append(row)
        print(json.dumps({"kind": kind, "at": round(time.monotonic() - STARTED)} | row), flush=True)

    runner.warm_up()
    for model, layout, weights in names:
        name = {"model": model, "layout": layout, "weights": weights}
        if time.monotonic() - STARTED > options.seconds:
            keep("left_out", name | {"reason": "out of time"})
            continue
        layer = None
        try:
            layer = runner.layer(model, layout, weights)
            for kind, row in measure_layer(runner, layer, (model, layout), options):
                keep(kind, name | row)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            keep("left_out", name | {"reason": reason})
        finally:
            layer = None
            timing.free_memory()
    return figures


def measure_layer(
    runner: Runner, layer: Any, name: tuple[str, str], options: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure one layer. Yield pairs of a kind (one of ``KINDS``) and the figures of a measurement."""
    for tiles, folder in ({"default": None} | ({"tuned": options.tiles} if options.tiles else {})).items():
        if folder is not None and not list(folder.glob(f"configs/*/{glob.escape(moe_tiles.file_name(layer))}")):
            continue
        if options.tiles:
            moe_tiles.use_folder(folder)
        for tokens in options.tokens:
            if time.monotonic() - STARTED > options.seconds:
                yield "left_out", {"tokens": tokens, "reason": "out of time"}
                continue
            batch, checked = runner.batch(layer, tokens), None
            facts: dict[str, Any] = {}
            if isinstance(batch, MarlinBatch):
                facts = batch.layer.sizes()
                try:
                    checked = batch.expected()
                except Exception as error:
                    # The float32 outputs need the engine's test utilities, which may not be installed.
                    yield "left_out", {"reason": f"no errors against float32: {type(error).__name__}: {error}"}
            else:
                facts = {"tiles": tiles, "config": moe_tiles.find_tiles(layer, tokens)}
            variants = choose_variants(name, options, first=tokens == options.tokens[0])
            for row in measure_batch(runner, batch, checked, variants, options.rounds):
                yield "cells", row | facts
            del batch
            timing.free_memory()
        if options.tiles:
            moe_tiles.use_folder(None)
    default_mb = moe_tables.MARLIN_MB.get(name) if options.runner == "marlin" else None
    if options.mixed:
        batch = runner.batch(layer, options.mixed)
        yield "mixed", measure_mixed(runner, batch, options.mixed, Variant(mb=default_mb))
    for tokens in options.graphs:
        variant = Variant(slices=max(options.slices)) if default_mb and options.slices else Variant()
        yield "graphs", {"tokens": tokens} | measure_graph(runner, runner.batch(layer, tokens), variant, options.rounds)
    for tokens in options.decode:
        yield "decode", {"tokens": tokens} | measure_decode(runner, runner.batch(layer, tokens))


def parse_layers(text: str) -> list[tuple[str, str, str]]:
    """Parse the value of ``--layers`` into (model, layout, weights) tuples."""
    names = []
    for name in text.split(","):
        model, layout, weights = (*name.split(":"), "int4", "")[:3]
        if model not in MODELS or layout not in LAYOUTS or weights not in itertools.chain(*WEIGHTS.values()):
            raise argparse.ArgumentTypeError(f"{name}: expected MODEL:LAYOUT:WEIGHTS")
        names.append((model, layout, weights))
    return names


def parse(arguments: list[str] | None = None) -> Any:
    parser = output.parser(__doc__)
    parser.add_argument("--runner", choices=RUNNERS, default="triton", help="MoE runner (%(default)s)")
    parser.add_names("--models", "models whose layers are measured", MODELS, GRID)
    parser.add_names("--layouts", "tensor-parallel layouts", LAYOUTS, ("tp1", "tp4", "tp8"))
    parser.add_argument(
        "--layers",
        type=parse_layers,
        metavar="MODEL:LAYOUT:WEIGHTS,...",
        help="measure these layers instead of --models and --layouts, as in kimi-k2.5:tp8:fp8; also bf16 or int4",
    )
    parser.add_argument("--tokens", type=output.parse_numbers, help="comma-separated numbers of tokens in a batch")
    parser.add_argument(
        "--slices", type=output.parse_numbers, help="also measure these fixed numbers of slices, comma-separated"
    )
    parser.add_argument(
        "--mb",
        type=output.parse_numbers,
        default=(),
        help="also measure these values of SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB",
    )
    parser.add_argument(
        "--tiles",
        type=Path,
        metavar="FOLDER",
        help="also measure with tile sizes from the engine's files in this folder",
    )
    parser.add_argument("--graphs", type=output.parse_numbers, help="numbers of tokens to capture in CUDA graphs")
    parser.add_argument("--decode", type=output.parse_numbers, help="numbers of tokens that are too few for slices")
    parser.add_argument("--mixed", type=int, help="tokens of the largest of forty mixed batches; 0: no mixed batches")
    parser.add_argument("--rounds", type=int, help="number of rounds of each measurement")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no measurement after so many seconds")
    options = output.parse(parser, arguments)
    for name, value in DEFAULTS[options.runner].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.runner == "marlin":
        options.layers = options.layers or parse_layers(MARLIN_GRID)
        if options.tiles:
            parser.error("--tiles is for --runner triton")
    options.layers = options.layers or list(itertools.product(options.models, options.layouts, WEIGHTS["triton"]))
    if wrong := {weights for *_, weights in options.layers} - set(WEIGHTS[options.runner]):
        parser.error(f"--runner {options.runner} has no {', '.join(sorted(wrong))} weights")
    return options


def main() -> None:
    options = parse()
    machine.require_gpu("moe_workspace")
    with torch.inference_mode():
        runner = RUNNERS[options.runner]()
        print(machine.format_conditions(machine.conditions()), flush=True)
        figures = measure(runner, options.layers, options)
    # Marlin's results have their own folder, because tests and the models' table read all results in the Triton
    # runner's folder.
    name, tables = {
        "triton": ("moe_workspace", moe_tables.make_triton_tables),
        "marlin": ("moe_workspace_marlin", moe_tables.make_marlin_tables),
    }[options.runner]
    output.finish(options, output.result(name, figures), tables)
