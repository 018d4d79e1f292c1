"""The second GEMM and sum of a MoE layer in column slices, against the engine as it is: time, memory, answers.

    python benchmark changes/moe_workspace --json triton.json  # the grid of docs/benchmarks/moe-workspace.md
    python benchmark changes/moe_workspace --models kimi-k2.5 --layouts tp4 --tokens 16384,4096
    python benchmark changes/moe_workspace --slices 2,3,5 --mb 400,800  # other numbers than the rule's, and the setting
    python benchmark changes/moe_workspace --tiles TILES --models kimi-k2.5 --layouts tp4  # and tiles that were tuned
    python benchmark changes/moe_workspace --runner marlin --layers kimi-k2.5:tp8 --tokens 16384 --slices 2,7 --mb 700

One process, no server, no checkpoint: the engine's own layer with random weights at one rank's widths. Each cell
compares stock, stock again (what stock differs from itself no patch caused) and column slices, in turn, by CUDA events.
Every run starts from an idle GPU, so that the host's time to start slices counts; *queued* ones follow others, as in a
forward of many layers. The peak is what one call allocates beyond what was allocated before it, Marlin's output
included, unless it is *offered*. An interval is that of the median of all rounds' ratios, to 95 %.

With the Triton runner answers are compared bit by bit; with Marlin also with some tokens' experts in float32, and
*permuted ahead* is what slices would take if each range of weights lay by itself since the model was loaded. The engine
compiles Marlin's kernel first, for some four minutes, once on a machine.
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
GRID = ("kimi-k2.5", "deepseek-v3-fused", "glm-4.5", "qwen3-235b", "qwen3-30b", "minimax-m2", "mixtral-8x7b")
MARLIN_GRID = "kimi-k2.5:tp8,kimi-k2.5:tp4,qwen3-235b:tp4,glm-4.5:tp8"
WEIGHTS = {"triton": ("bf16", "fp8"), "marlin": ("int4",)}
#: Options that are not given.
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
#: What is measured of one layer, beside its cells.
KINDS = ("cells", "decode", "graphs", "mixed", "left_out")
Checked = tuple[torch.Tensor, torch.Tensor] | None


def interval(ratios: list[float]) -> list[float]:
    """Where the median of such ratios lies, to 95 %: between two of them, by the binomial distribution."""
    ordered, below = sorted(ratios), 0
    while sum(math.comb(len(ordered), k) for k in range(below + 1)) / 2 ** len(ordered) <= 0.025:
        below += 1
    below = max(below - 1, 0)
    return [ordered[below], ordered[-1 - below]]


def errors(output: torch.Tensor, checked: Checked) -> dict[str, float] | None:
    """The mean error of some tokens against float32, over the mean of what is expected."""
    if checked is None:
        return None
    tokens, expected = checked
    apart = (output[tokens.to(output.device)].float() - expected).abs()
    return {"mean": float(apart.mean() / expected.abs().mean())}


def restored(batch: Batch) -> torch.Tensor:
    """The output for the batch's own tokens, also where a call has overwritten them."""
    batch.restore()
    return batch.run()


def idle_ms(batch: Batch, run: Callable[[], Any]) -> float:
    """Milliseconds of one call that finds the GPU idle."""
    batch.restore()
    return timing.idle_ms(run)


def peak_bytes(batch: Batch) -> int:
    batch.restore()
    return timing.peak_bytes(batch.run)


def ratios_to_stock(samples: dict[str, list[float]], name: str) -> list[float]:
    """Times over stock's, round by round."""
    return [other / stock for stock, other in zip(samples[timing.STOCK], samples[name], strict=True)]


def cell(
    runner: Runner, batch: Batch, checked: Checked, variants: list[Variant], rounds: int
) -> Iterator[dict[str, Any]]:
    """Figures of one batch, variant by variant.

    A variant that runs in the same slices as an earlier one is left out.
    """
    expected = restored(batch).clone()
    again = restored(batch)
    stock: dict[str, Any] = {"stock_repeats": bool(torch.equal(expected, again))}
    stock |= {"stock_errors": [errors(one, checked) for one in (expected, again)]} if checked else {}
    del again
    stock["stock_peak"] = peak_bytes(batch)
    runner.dead_input = torch.empty_like(expected)
    ran: dict[Variant, list[tuple[int, int]]] = {}
    facts: dict[Variant, dict[str, Any]] = {}
    for variant in variants:
        with runner.use(variant):
            answer = restored(batch)
            ran[variant] = runner.ran
            facts[variant] = {"same": bool(torch.equal(expected, answer)) if variant.copies else None}
            facts[variant]["errors"] = errors(answer, checked) if variant.copies else None
            del answer
            facts[variant]["peak"] = peak_bytes(batch)
    kinds = {variant: (ran[variant], variant.copies, variant.offered) for variant in variants}
    timed = {
        variant: f"columns {variant}"
        for index, variant in enumerate(variants)
        if variant == Variant() or kinds[variant] not in [kinds[earlier] for earlier in variants[:index]]
    }

    def in_turn(measure: Callable[[], float], rounds: int) -> dict[str, list[float]]:
        def measured(variant: Variant | None) -> float:
            with runner.use(variant):
                return measure()

        versions: dict[str, Callable[[], float]] = {
            name: lambda: measured(None) for name in (timing.STOCK, timing.CONTROL)
        }
        versions |= {name: lambda variant=variant: measured(variant) for variant, name in timed.items()}
        return timing.run_in_turn(versions, rounds)

    samples = in_turn(lambda: idle_ms(batch, batch.run), rounds)
    queued = None if runner.in_place else in_turn(lambda: timing.queued_ms(batch.run), max(3, rounds // 2))
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
            "interval": interval(ratios),
            "control": statistics.median(control),
        }
        if queued is not None:
            figures["queued"] = statistics.median(ratios_to_stock(queued, name))
        yield figures | stock | facts[variant]


def decode(runner: Runner, batch: Batch) -> dict[str, Any]:
    """A batch too small for slices: microseconds by the host's clock, eager, and of a captured graph's replay."""
    versions = {timing.STOCK: None, timing.CONTROL: None, "columns": Variant()}
    graphs, outputs = {}, {}
    for name, variant in versions.items():
        with runner.use(variant):
            batch.run()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                outputs[name] = batch.run()

    def eager(variant: Variant | None) -> float:
        with runner.use(variant):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(20):
                batch.run()
            torch.cuda.synchronize()
            return (time.perf_counter() - started) / 20 * 1e3

    def replayed(graph: Any) -> float:
        return timing.idle_ms(lambda: [graph.replay() for _ in range(20)]) / 20

    figures: dict[str, Any] = {}
    for kind, measures in (
        ("eager", {name: lambda variant=variant: eager(variant) for name, variant in versions.items()}),
        ("captured", {name: lambda graph=graph: replayed(graph) for name, graph in graphs.items()}),
    ):
        samples = timing.run_in_turn(measures, 25)
        for name in (timing.CONTROL, "columns"):
            ratios = ratios_to_stock(samples, name)
            figures[f"{kind} {name}"] = statistics.median(ratios)
        figures[f"{kind} us"] = statistics.median(samples[timing.STOCK]) * 1e3
    return figures


def mixed(runner: Runner, batch: Batch, tokens: int, variant: Variant) -> dict[str, Any]:
    """Forty batches of mixed sizes: bytes allocated at the peak, and reserved in the end."""
    chosen = random.Random(5)
    sizes = [chosen.choice(range(min(512, tokens // 2), tokens + 1, 16)) for _ in range(40)]
    figures: dict[str, Any] = {"tokens": tokens, "batches": len(sizes), "asked_mb": variant.mb}
    for name, ran_as in ((timing.STOCK, None), ("columns", variant)):
        with runner.use(ran_as):
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


def graph(runner: Runner, batch: Batch, variant: Variant, rounds: int) -> dict[str, Any]:
    """One layer captured: what the graph's pool holds, whether a replay answers as eager does, and its time."""
    figures: dict[str, Any] = {}
    graphs: dict[str, Any] = {}
    expected = restored(batch).clone()
    for name, ran_as in ((timing.STOCK, None), (timing.CONTROL, None), ("columns", variant)):
        with runner.use(ran_as):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                eager = restored(batch).clone()
            torch.cuda.synchronize()
            expected = expected if runner.in_place else eager  # Marlin's own sums have no fixed order
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
        {name: lambda one=one: idle_ms(batch, one.replay) for name, one in graphs.items()}, rounds
    )
    for name, ratio in timing.compare_with_stock(samples).items():
        figures[name]["slowdown"] = 1 / ratio["ratio"]
    return figures


# --- The grid --------------------------------------------------------------------------------------------------------


def variants_of(layer: tuple[str, str], options: Any, *, first: bool) -> list[Variant]:
    """What is measured of one batch, the layer's first or another."""
    own_mb = moe_tables.MARLIN_MB.get(layer) if options.runner == "marlin" else None
    settings = [mb for mb in (own_mb, *options.mb) if mb]
    variants = [Variant(), *(Variant(mb=mb) for mb in settings)]
    if own_mb:
        variants += [Variant(mb=own_mb, offered=True)]
    variants += [Variant(slices=slices) for slices in options.slices]
    if first and options.runner == "marlin" and options.slices:
        variants += [Variant(slices=slices, copies=False) for slices in dict.fromkeys((2, max(options.slices)))]
    return variants


def measure(runner: Runner, names: list[tuple[str, str, str]], options: Any) -> dict[str, Any]:
    """Everything that the options ask for, layer by layer."""
    figures: dict[str, Any] = {kind: [] for kind in KINDS}

    def keep(kind: str, one: dict[str, Any]) -> None:
        figures[kind].append(one)
        print(json.dumps({"kind": kind, "at": round(time.monotonic() - STARTED)} | one), flush=True)

    runner.warm_up()
    for model, layout, weights in names:
        name = {"model": model, "layout": layout, "weights": weights}
        if time.monotonic() - STARTED > options.seconds:
            keep("left_out", name | {"reason": "out of time"})
            continue
        layer = None
        try:
            layer = runner.layer(model, layout, weights)
            for kind, one in of_layer(runner, layer, (model, layout), options):
                keep(kind, name | one)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            keep("left_out", name | {"reason": reason})
        finally:
            layer = None
            timing.free_memory()
    return figures


def of_layer(runner: Runner, layer: Any, name: tuple[str, str], options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of one layer, each with its kind."""
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
            of_batch: dict[str, Any] = {}
            if isinstance(batch, MarlinBatch):
                of_batch = batch.layer.sizes()
                try:
                    checked = batch.expected()
                except Exception as error:  # the engine's own test utilities say how weights are packed
                    yield "left_out", {"reason": f"no errors against float32: {type(error).__name__}: {error}"}
            else:
                of_batch = {"tiles": tiles, "config": moe_tiles.find_tiles(layer, tokens)}
            variants = variants_of(name, options, first=tokens == options.tokens[0])
            for one in cell(runner, batch, checked, variants, options.rounds):
                yield "cells", one | of_batch
            del batch
            timing.free_memory()
        if options.tiles:
            moe_tiles.use_folder(None)
    own_mb = moe_tables.MARLIN_MB.get(name) if options.runner == "marlin" else None
    if options.mixed:
        batch = runner.batch(layer, options.mixed)
        yield "mixed", mixed(runner, batch, options.mixed, Variant(mb=own_mb))
    for tokens in options.graphs:
        variant = Variant(slices=max(options.slices)) if own_mb and options.slices else Variant()
        yield "graphs", {"tokens": tokens} | graph(runner, runner.batch(layer, tokens), variant, options.rounds)
    for tokens in options.decode:
        yield "decode", {"tokens": tokens} | decode(runner, runner.batch(layer, tokens))


def layers(text: str) -> list[tuple[str, str, str]]:
    """``type=`` of an option that names layers."""
    names = []
    for name in text.split(","):
        model, layout, weights = (*name.split(":"), "int4", "")[:3]
        if model not in MODELS or layout not in LAYOUTS or weights not in itertools.chain(*WEIGHTS.values()):
            raise argparse.ArgumentTypeError(f"{name}: expected MODEL:LAYOUT:WEIGHTS")
        names.append((model, layout, weights))
    return names


def parse(arguments: list[str] | None = None) -> Any:
    parser = output.parser(__doc__)
    parser.add_argument("--runner", choices=RUNNERS, default="triton")
    parser.add_argument("--models", type=output.choice_of(MODELS), default=list(GRID), help=", ".join(MODELS))
    parser.add_argument("--layouts", type=output.choice_of(LAYOUTS), default=["tp1", "tp4", "tp8"])
    parser.add_argument("--layers", type=layers, metavar="MODEL:LAYOUT:WEIGHTS,...", help="these, not all of the above")
    parser.add_argument("--tokens", type=output.numbers)
    parser.add_argument("--slices", type=output.numbers, help="so many, beside the rule's own")
    parser.add_argument("--mb", type=output.numbers, default=(), help="settings of the variable, beside the rule's own")
    parser.add_argument("--tiles", type=Path, metavar="FOLDER", help="measure with tiles from there as well")
    parser.add_argument("--graphs", type=output.numbers, help="tokens of layers to capture")
    parser.add_argument("--decode", type=output.numbers, help="tokens of batches too small for slices")
    parser.add_argument("--mixed", type=int, help="tokens of the largest of forty mixed batches")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    options = output.parse(parser, arguments)
    for name, value in DEFAULTS[options.runner].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.runner == "marlin":
        options.layers = options.layers or layers(MARLIN_GRID)
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
        print(machine.sentence(machine.conditions()), flush=True)
        figures = measure(runner, options.layers, options)
    # In a folder of its own: tests and the models' table read each cell beside it as the Triton runner's.
    name, tables = {
        "triton": ("moe_workspace", moe_tables.triton),
        "marlin": ("moe_workspace_marlin", moe_tables.marlin),
    }[options.runner]
    output.finish(options, output.result(name, figures), tables)
