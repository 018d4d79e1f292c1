"""Marlin's second GEMM and sum in columns, against the engine as it is: time, memory, and the error against float32.

    python benchmark/moe_workspace_marlin.py --json marlin.json      # the grid of docs/benchmarks/moe-workspace.md
    python benchmark/moe_workspace_marlin.py --layers kimi-k2.5:tp8 --tokens 16384 --slices 2,7 --mb 700
    python benchmark/moe_workspace_marlin.py --fit marlin.json       # what slices cost there, and what the rule says

One process, no server, no checkpoint: the engine's own ``fused_marlin_moe`` on random INT4 weights at one rank's
widths, called as its runner calls it. Stock, stock again and each number of slices in turn, by CUDA events; every run
starts from an idle GPU, so that the host's time to start slices counts. *Queued* ones follow others, as in a forward of
many layers. The peak is what one call allocates beyond what was allocated before it, its output included, unless it is
*given*, as a server's layer gives its dead input. *Permuted ahead* is what slices would take if each range of weights
lay by itself since the model was loaded: no copies. The error is that of some tokens, against their experts in float32.

The engine compiles its kernel first, for some four minutes, once on a machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine, output, timing
from common.shapes import MODELS, Layout, Rank
from moe_workspace import MB, interval, spread
from sglang_moe_patches.changes.moe_workspace import column_slices, marlin
from sglang_moe_patches.changes.moe_workspace.kernels import moe_sum, sum_and_copy
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.core.patch import Patcher

STARTED = time.monotonic()
LAYOUTS = {"tp1": Layout(), "tp2": Layout(tp=2), "tp4": Layout(tp=4), "tp8": Layout(tp=8)}
GRID = "kimi-k2.5:tp8,kimi-k2.5:tp4,qwen3-235b:tp4,glm-4.5:tp8"
ASKED = {("kimi-k2.5", "tp8"): 700, ("kimi-k2.5", "tp4"): 800, ("qwen3-235b", "tp4"): 420, ("glm-4.5", "tp8"): 500}
"""MB that each layer is asked to keep to, beside ``--mb``."""
GROUPS = {"kimi-k2.5": 32, "glm-4.5": 32}
"""Rows of the weights that share a scale, where that is not 128."""
CHECKED = 48
"""Tokens whose experts are computed in float32."""


# --- A layer ---------------------------------------------------------------------------------------------------------


class Layer:
    """Random INT4 weights of one rank, packed as the engine's loader packs them."""

    def __init__(self, rank: Rank, group: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rank, self.group = rank, group
        generator = torch.Generator(device).manual_seed(0)

        def packed(k: int, n: int) -> torch.Tensor:
            made = torch.empty(rank.experts, k // 16, 2 * n, dtype=torch.int32, device=device)
            for expert in made:
                expert.random_(-(2**31), 2**31 - 1, generator=generator)
            return made

        def scales(k: int, n: int) -> torch.Tensor:
            drawn = torch.rand(rank.experts, k // group, n, device=device, generator=generator)
            return ((0.5 + drawn) * k**-0.5 / 4.6).to(dtype)

        hidden, inner = rank.hidden, rank.intermediate
        self.weights = {
            "w1": packed(hidden, 2 * inner),
            "w2": packed(inner, hidden),
            "w1_scale": scales(hidden, 2 * inner),
            "w2_scale": scales(inner, hidden),
        }

    def in_float(self, name: str, expert: int) -> torch.Tensor:
        """[k, n] of one expert's weights in float32."""
        from sglang.srt.layers.quantization.marlin_utils import get_scale_perms
        from sglang.srt.layers.quantization.moe_wna16 import get_weight_perm

        packed, scales = self.weights[name][expert], self.weights[f"{name}_scale"][expert].float()
        shifts = torch.arange(0, 32, 4, device=packed.device)
        places = get_weight_perm(4).to(packed.device)
        stored = ((packed.unsqueeze(-1) >> shifts) & 15).view(-1, len(places))
        tiles = torch.empty_like(stored)
        tiles[:, places] = stored
        k_tiles, n = len(packed), packed.shape[1] // 2
        values = tiles.view(k_tiles, n // 16, 16, 16).permute(0, 2, 1, 3).reshape(16 * k_tiles, n).float() - 8
        order = torch.tensor(get_scale_perms()[0], device=packed.device)
        in_order = torch.empty_like(scales).view(-1, 64)
        in_order[:, order] = scales.view(-1, 64)
        return values * in_order.view(scales.shape).repeat_interleave(self.group, 0)


class Batch:
    """Tokens as the runner hands them over."""

    def __init__(self, layer: Layer, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        rank, generator = layer.rank, torch.Generator(device).manual_seed(1)
        logits = torch.randn(tokens, rank.experts, device=device, generator=generator)
        best = torch.softmax(logits, -1).topk(rank.top_k, dim=1)
        drawn = torch.randn(tokens, rank.hidden, device=device, generator=generator)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.layer = layer
        self.given = layer.weights | {
            "hidden_states": (drawn * 0.5).to(dtype),
            "gating_output": logits,
            "topk_weights": (best.values / best.values.sum(-1, keepdim=True)).contiguous(),
            "topk_ids": best.indices.to(torch.int32).contiguous(),
            "workspace": torch.zeros(4 * sms, dtype=torch.int32, device=device),
            "num_bits": 4,
            "routed_scaling_factor": 2.5,
        }

    def first(self, tokens: int) -> dict[str, Any]:
        cut = {
            name: self.given[name][:tokens] for name in ("hidden_states", "gating_output", "topk_weights", "topk_ids")
        }
        return self.given | cut

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some tokens, and their outputs in float32."""
        given = self.given
        tokens = torch.arange(0, len(given["hidden_states"]), max(1, len(given["hidden_states"]) // CHECKED))[:CHECKED]
        x, ids, weights = (
            given[name][tokens.to(given[name].device)] for name in ("hidden_states", "topk_ids", "topk_weights")
        )
        found = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[rows].float() @ self.layer.in_float("w1", expert)).chunk(2, -1)
            down = (torch.nn.functional.silu(gate) * up) @ self.layer.in_float("w2", expert)
            found.index_add_(0, rows, down * weights[rows, places].unsqueeze(1))
        return tokens, found * 2.5


# --- Stock and columns -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """Columns by the rule; in so many slices, whatever it says; or with so many MB asked for.

    :param copies: "ours"; "torch": by PyTorch's copy, in launches of their own; "none": the weights were permuted ahead
        (answers are wrong then).
    :param offered: the output is given, as a server's layer gives its dead input.
    """

    slices: int | None = None
    mb: int | None = None
    copies: str = "ours"
    offered: bool = False


def _apart(experts_output: Any, output: Any, scale: float, copied: Any) -> None:
    moe_sum.moe_sum(experts_output, output, scale)
    for source, start, stop, target in copied:
        target.copy_(source[..., start:stop])


COPIES: dict[str, Callable[..., None]] = {
    "ours": sum_and_copy.sum_and_copy,
    "torch": _apart,
    "none": lambda experts_output, output, scale, copied: moe_sum.moe_sum(experts_output, output, scale),
}


class Ways:
    """The engine's function and ours, to switch between; and in which ranges ours ran."""

    def __init__(self) -> None:
        self._plan = marlin.plan()
        if self._plan.install is None:
            print(f"moe_workspace_marlin: {self._plan}", file=sys.stderr)
            raise SystemExit(2)
        self._module = engine.module(marlin.MODULE)
        self.stock = getattr(self._module, marlin.NAME)
        self.ran: list[tuple[int, int]] = []
        self.dead_input: torch.Tensor | None = None
        self._ours: dict[Variant, Any] = {}
        ranges = marlin.choose_column_slices

        def seen(arguments: dict[str, Any], max_bytes: int | None) -> list[tuple[int, int]]:
            self.ran = ranges(arguments, max_bytes)
            return self.ran

        marlin.choose_column_slices = seen

    def ours(self, variant: Variant) -> Any:
        if variant not in self._ours:
            between, smallest = sum_and_copy.sum_and_copy, column_slices.MIN_TENSOR_BYTES
            name = column_slices.MOE_WORKSPACE_MB.name
            sum_and_copy.sum_and_copy = COPIES[variant.copies]
            os.environ[name] = "" if variant.mb is None else str(variant.mb)
            if variant.slices:
                column_slices.MIN_TENSOR_BYTES = 1
            assert self._plan.install is not None
            self._plan.install(Patcher())
            del os.environ[name]
            sum_and_copy.sum_and_copy, column_slices.MIN_TENSOR_BYTES = between, smallest
            self._ours[variant] = getattr(self._module, marlin.NAME)
            setattr(self._module, marlin.NAME, self.stock)
        return self._ours[variant]

    @contextmanager
    def variant(self, variant: Variant) -> Iterator[Any]:
        rule = column_slices.packed_slice_width
        if variant.slices:

            def width(layer: Any, gemm: Any, max_bytes: int | None = None) -> int:
                step = column_slices.MARLIN_ALIGNMENT_COLUMNS
                return min(layer.hidden, -(-layer.hidden // (variant.slices * step)) * step)

            column_slices.packed_slice_width = width
        self.ran = []
        ours = self.ours(variant)

        def offered(**given: Any) -> Any:
            with channel.moe_output_buffer_ctx(self.dead_input):
                return ours(**given)

        try:
            yield offered if variant.offered else ours
        finally:
            column_slices.packed_slice_width = rule


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def errors(found: torch.Tensor, checked: tuple[torch.Tensor, torch.Tensor] | None) -> dict[str, float] | None:
    """Against float32: the mean and the largest, over the mean of what is expected."""
    if checked is None:
        return None
    tokens, expected = checked
    apart = (found[tokens.to(found.device)].float() - expected).abs()
    scale = expected.abs().mean()
    return {"mean": float(apart.mean() / scale), "largest": float(apart.max() / scale)}


def cell(
    ways: Ways, batch: Batch, checked: tuple[torch.Tensor, torch.Tensor] | None, variants: list[Variant], rounds: int
) -> Iterator[dict[str, Any]]:
    """Figures of one batch, variant by variant.

    :param checked: tokens and their outputs in float32.
    """
    given, rank = batch.given, batch.layer.rank
    ways.dead_input = torch.empty_like(given["hidden_states"])
    stock_errors = [errors(ways.stock(**given), checked) for _ in range(2)]
    stock_peak = timing.memory_of(lambda: ways.stock(**given))[0]
    facts: dict[Variant, dict[str, Any]] = {}
    ran: dict[Variant, list[tuple[int, int]]] = {}
    for variant in variants:
        with ways.variant(variant) as ours:
            errors_of = errors(ours(**given), checked)
            ran[variant] = ways.ran
            facts[variant] = {
                "peak": timing.memory_of(lambda ours=ours: ours(**given))[0],
                "errors": errors_of if variant.copies != "none" else None,
            }
    chosen = {
        variant: f"columns {variant}"
        for index, variant in enumerate(variants)
        if not any(
            ran[variant] == ran[other]
            and (variant.copies, variant.offered) == (other.copies, other.offered)
            and variant != Variant()
            for other in variants[:index]
        )
    }

    def measured(variant: Variant, timed: Callable[..., float]) -> float:
        with ways.variant(variant) as ours:
            return timed(lambda: ours(**given))

    def in_turn(timed: Callable[..., float], rounds: int) -> dict[str, list[float]]:
        versions: dict[str, Callable[[], float]] = dict.fromkeys(
            (timing.STOCK, timing.CONTROL), lambda: timed(lambda: ways.stock(**given))
        )
        versions |= {name: lambda variant=variant: measured(variant, timed) for variant, name in chosen.items()}
        return timing.in_turn(versions, rounds)

    samples, queued = in_turn(timing.idle_ms, rounds), in_turn(timing.queued_ms, max(3, rounds // 2))
    queued_stock = queued[timing.STOCK]
    control = [b / a for a, b in zip(samples[timing.STOCK], samples[timing.CONTROL], strict=True)]
    w2 = batch.layer.weights["w2"].nbytes + batch.layer.weights["w2_scale"].nbytes
    for variant, name in chosen.items():
        ratios = [b / a for a, b in zip(samples[timing.STOCK], samples[name], strict=True)]
        yield {
            "tokens": len(given["hidden_states"]),
            "sizes": [rank.experts, rank.top_k, rank.hidden, rank.intermediate],
            "w2_bytes": w2,
            "weight_bytes": sum(tensor.nbytes for tensor in batch.layer.weights.values()),
            "asked_slices": variant.slices,
            "asked_mb": variant.mb,
            "copies": variant.copies,
            "offered": variant.offered,
            "slices": max(1, len(ran[variant])),
            "width": ran[variant][0][1] if ran[variant] else rank.hidden,
            "stock_ms": statistics.median(samples[timing.STOCK]),
            "ms": statistics.median(samples[name]),
            "slowdown": statistics.median(ratios),
            "interval": interval(ratios),
            "control": statistics.median(control),
            "control_interval": interval(control),
            "queued": statistics.median(b / a for a, b in zip(queued_stock, queued[name], strict=True)),
            "queued_control": statistics.median(
                b / a for a, b in zip(queued_stock, queued[timing.CONTROL], strict=True)
            ),
            "rounds": rounds,
            "stock_peak": stock_peak,
            "stock_errors": stock_errors,
        } | facts[variant]


def decode(ways: Ways, batch: Batch, tokens: int) -> dict[str, Any]:
    """A batch too small for columns: microseconds on the host's clock, eager, and of a captured graph's replay."""
    given = batch.first(tokens)
    found: dict[str, Any] = {"tokens": tokens}
    with ways.variant(Variant()) as ours:
        versions = {timing.STOCK: ways.stock, timing.CONTROL: ways.stock, "columns": ours}
        graphs, outputs = {}, {}
        for name, function in versions.items():
            function(**given)
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                outputs[name] = function(**given)

        def eager(function: Any) -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(20):
                function(**given)
            torch.cuda.synchronize()
            return (time.perf_counter() - started) / 20 * 1e3

        def replayed(graph: Any) -> float:
            return timing.idle_ms(lambda: [graph.replay() for _ in range(20)]) / 20

        for kind, samples in (
            ("eager", timing.in_turn({n: lambda f=f: eager(f) for n, f in versions.items()}, 25)),
            ("captured", timing.in_turn({n: lambda g=g: replayed(g) for n, g in graphs.items()}, 25)),
        ):
            for name in (timing.CONTROL, "columns"):
                ratios = [b / a for a, b in zip(samples[timing.STOCK], samples[name], strict=True)]
                found[f"{kind} {name}"] = statistics.median(ratios)
                found[f"{kind} {name} interval"] = interval(ratios)
            found[f"{kind} us"] = statistics.median(samples[timing.STOCK]) * 1e3
        found["ran"] = len(ways.ran)
    return found


def captured(ways: Ways, batch: Batch, tokens: int, variant: Variant) -> dict[str, Any]:
    """One call captured: what the graph's pool holds, and whether a replay says what eager says."""
    given = batch.first(tokens)
    found: dict[str, Any] = {"tokens": tokens, "asked_mb": variant.mb, "asked_slices": variant.slices}
    with ways.variant(variant) as ours:
        for name, function in ((timing.STOCK, ways.stock), ("columns", ours)):
            eager = function(**given)
            clean()
            reserved = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = function(**given)
            pool = torch.cuda.memory_reserved() - reserved
            made.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            apart = (made.float() - eager.float()).abs().max() / eager.float().abs().mean()
            found[name] = {"pool": pool, "apart": float(apart)}
            del made, graph
        found["slices"] = len(ways.ran)
    return found


def mixed(ways: Ways, batch: Batch, variant: Variant) -> dict[str, Any]:
    """Forty batches of mixed sizes: bytes allocated at the peak, and reserved in the end."""
    chosen, largest = random.Random(5), len(batch.given["hidden_states"])
    sizes = [chosen.choice(range(min(512, largest // 2), largest + 1, 16)) for _ in range(40)]
    found: dict[str, Any] = {"tokens": largest, "asked_mb": variant.mb}
    with ways.variant(variant) as ours:
        for name, function in ((timing.STOCK, ways.stock), ("columns", ours)):
            clean()
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            for size in sizes:
                function(**batch.first(size))
            torch.cuda.synchronize()
            found[name] = {
                "allocated": torch.cuda.max_memory_allocated() - allocated,
                "reserved": torch.cuda.max_memory_reserved() - reserved,
            }
    return found


def profile(ways: Ways, batch: Batch, variants: list[Variant]) -> dict[str, dict[str, list[float]]]:
    """Microseconds of each kernel in a call."""
    found = {}
    for variant in (None, *variants):
        with ways.variant(variant or Variant()) as ours:
            function = ways.stock if variant is None else ours
            function(**batch.given)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
                function(**batch.given)
                torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in profiled.events():
            if event.device_time:
                times.setdefault(event.name[:50], []).append(round(event.device_time, 1))
        name = timing.STOCK if variant is None else f"{variant.slices} slices, copies {variant.copies}"
        found[name] = dict(sorted(times.items(), key=lambda item: -sum(item[1]))[:8])
    return found


# --- The rule --------------------------------------------------------------------------------------------------------


def by_rule(one: dict[str, Any]) -> tuple[float, float, int]:
    """What the rule thinks of a cell: microseconds of the layer, of the slices, and how many it takes by itself."""
    _, top_k, hidden, inner = one["sizes"]
    rows = one["tokens"] * top_k
    layer = 2 * rows * hidden * 3 * inner / column_slices.MARLIN_OPERATIONS_PER_US
    layer += (one["weight_bytes"] + 4 * rows * hidden) / column_slices.BYTES_PER_US
    each, for_each_row = column_slices.MARLIN_SLICE_US
    cost = column_slices.MARLIN_SLICING_US + 2 * one["w2_bytes"] / column_slices.MARLIN_COPIED_BYTES_PER_US
    cost += (one["slices"] - 1) * (each + rows * for_each_row)
    shape = column_slices.LayerShape(one["tokens"], top_k, hidden, inner, weight_bytes=one["weight_bytes"])
    width = column_slices.packed_slice_width(shape, column_slices.MarlinGemm(one["w2_bytes"] // hidden))
    return layer, cost, len(column_slices.split_columns(hidden, width))


def fresh(one: dict[str, Any]) -> bool:
    """Whether a cell has our copies, and an output of its own."""
    return one["copies"] == "ours" and not one.get("offered")


def fit(result: output.Result) -> str:
    """Each cell's cost beside the rule's, and constants that fit it best."""
    cells = [one for one in result["figures"]["cells"] if one["slices"] > 1 and fresh(one)]
    rows = []
    for one in cells:
        layer, cost, chosen = by_rule(one)
        measured = (one["slowdown"] - 1) * one["stock_ms"] * 1e3
        rows.append(
            (
                f"{one['model']} {one['layout']}",
                f"{one['tokens']:,}",
                str(one["slices"]),
                f"{one['slowdown']:.3f}",
                f"{one['stock_ms'] * 1e3:,.0f}",
                f"{layer:,.0f}",
                f"{measured:,.0f}",
                f"{cost:,.0f}",
                str(chosen),
            )
        )
    header = ("layer", "tokens", "slices", "time", "layer, us", "by rule", "slices, us", "by rule", "rule's slices")
    facts = torch.tensor(
        [
            [1.0, 2 * one["w2_bytes"] / 1e6, one["slices"] - 1, (one["slices"] - 1) * one["tokens"] * one["sizes"][1]]
            for one in cells
        ],
        dtype=torch.float64,
    )
    cost_us = torch.tensor([[(one["slowdown"] - 1) * one["stock_ms"] * 1e3] for one in cells], dtype=torch.float64)
    best = torch.linalg.lstsq(facts, cost_us, driver="gelsd").solution.flatten().tolist()
    constants = (
        f"MARLIN_SLICING_US {best[0]:.0f}, "
        f"MARLIN_COPIED_BYTES_PER_US {1e6 / best[1] if best[1] > 0 else math.inf:.2g}, "
        f"MARLIN_SLICE_US ({best[2]:.0f}, {best[3]:.1e})\n"
    )
    return output.table(header, rows) + "\n" + constants


# --- Output ----------------------------------------------------------------------------------------------------------


def tables(result: output.Result, tokens: int = 16384) -> str:
    """The rule and the knob, layer by layer; all cells together."""
    figures = result["figures"]
    layers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in figures["cells"]:
        if one["tokens"] == tokens:
            layers.setdefault((one["model"], one["layout"]), []).append(one)

    def said(one: dict[str, Any]) -> str:
        if one["slices"] < 2:
            time = f": {one['slowdown']:.3f}" if one["slowdown"] else ""
            return f"{one['stock_peak'] / MB:,.0f}, whole{time}"
        low, high = one["interval"]
        queued = f", queued {one['queued']:.3f}" if "queued" in one else ""
        return f"{one['peak'] / MB:,.0f}, {one['slices']}: {one['slowdown']:.3f} ({low:.3f}-{high:.3f}){queued}"

    lines: list[tuple[str, ...]] = []
    for (model, layout), cells in layers.items():
        server = next((one for one in cells if one.get("offered")), None)
        ours = [one for one in cells if fresh(one)]
        # As the rule is now: its constants were fitted to these cells.
        chosen = by_rule(ours[0])[2]
        by_itself = next((one for one in ours if one["slices"] == chosen), ours[0] | {"slices": 1, "slowdown": None})
        within = [one for one in ours if one["slowdown"] <= 1.02 and one["slices"] > 1]
        least = min(within, key=lambda one: one["peak"], default=None)
        asked = next((one for one in ours if one["asked_mb"] == ASKED[model, layout]), by_itself)
        ahead = [one for one in cells if one["copies"] == "none"]
        lines.append(
            (
                f"{model} TP={layout[2:]} INT4",
                f"{by_itself['stock_peak'] / MB:,.0f}; {by_itself['stock_ms']:.2f}",
                said(by_itself),
                said(least) if least else "-",
                f"{ASKED[model, layout]}: {said(asked)}",
                said(server) if server else "-",
                ", ".join(f"{one['slices']}: {one['slowdown']:.3f}" for one in ahead),
            )
        )
    header = (
        f"{tokens:,} tokens",
        "stock, MB; ms",
        "default",
        "least within 2 %",
        "MB asked for",
        "output given",
        "permuted ahead",
    )
    ours = [one for one in figures["cells"] if fresh(one) and one["slices"] > 1]
    checked = [one for one in ours if one["errors"]]
    stock, patched = (
        [e["mean"] for one in checked for e in one["stock_errors"]],
        [one["errors"]["mean"] for one in checked],
    )
    together = ("all layers and batches, cut", "time: median (range)", "control", "mean error: stock", "columns")
    rows = [
        (
            str(len(ours)),
            spread([one["slowdown"] for one in ours]),
            spread([one["control"] for one in ours]),
            *(f"{min(means):.5f}-{max(means):.5f}" if means else "not checked" for means in (stock, patched)),
        )
    ]
    parts = [output.table(header, lines), output.table(together, rows)]
    if figures["decode"]:
        titles: tuple[str, ...] = (
            "decode, tokens",
            "eager, us",
            "control",
            "columns",
            "captured, us",
            "control",
            "columns",
        )
        decodes: list[tuple[str, ...]] = [
            (
                f"{one['model']} {one['layout']}, {one['tokens']}",
                *(
                    f"{one[f'{kind} us']:.0f}" if name is None else f"{one[f'{kind} {name}']:.4f}"
                    for kind in ("eager", "captured")
                    for name in (None, timing.CONTROL, "columns")
                ),
            )
            for one in figures["decode"]
        ]
        parts.append(output.table(titles, decodes))
    if figures["mixed"]:
        titles = ("forty mixed batches, MB", "allocated: stock", "columns", "reserved: stock", "columns")
        parts.append(
            output.table(
                titles,
                [
                    (
                        f"{one['model']} {one['layout']}, {one['asked_mb']} MB asked for",
                        *(
                            f"{one[name][what] / MB:,.0f}"
                            for what in ("allocated", "reserved")
                            for name in (timing.STOCK, "columns")
                        ),
                    )
                    for one in figures["mixed"]
                ],
            )
        )
    return "\n".join(parts)


def layers(text: str) -> list[tuple[str, str]]:
    """``type=`` of an option that names layers."""
    found = []
    for name in text.split(","):
        model, _, layout = name.partition(":")
        if (model, layout) not in ASKED:
            raise argparse.ArgumentTypeError(f"{name}: unknown; known: {', '.join(map(':'.join, ASKED))}")
        found.append((model, layout))
    return found


def parse() -> Any:
    parser = output.parser(__doc__)
    parser.add_argument("--layers", type=layers, default=layers(GRID), metavar="MODEL:LAYOUT,...", help=GRID)
    parser.add_argument("--tokens", type=output.numbers, default=(16384, 4096, 32768))
    parser.add_argument("--slices", type=output.numbers, default=(2, 3, 4, 5, 7), help="so many, beside the rule's own")
    parser.add_argument("--mb", type=output.numbers, default=(), help="settings of the knob, beside the layer's own")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    parser.add_argument("--stream", type=Path, metavar="FILE", help="write each figure as it comes")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="say what the rule makes of a result, and no more")
    return output.parse(parser)


def measure(ways: Ways, options: Any) -> dict[str, Any]:
    """The grid, layer by layer."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    figures: dict[str, Any] = {name: [] for name in ("cells", "decode", "graphs", "mixed", "kernels", "left_out")}

    def keep(kind: str, one: dict[str, Any]) -> None:
        figures[kind].append(one)
        line = json.dumps({"kind": kind, "at": round(time.monotonic() - STARTED)} | one)
        print(line, flush=True)
        if options.stream:
            with options.stream.open("a") as stream:
                stream.write(line + "\n")

    small = Batch(Layer(Rank(8, 4, 512, 128), 32, device, dtype), 4096, device, dtype)
    ways.stock(**small.given)
    with ways.variant(Variant(slices=2)) as ours:
        ours(**small.given)
    torch.cuda.synchronize()
    try:
        first = ways.stock(**small.given)
        print(f"errors of stock, tiny layer: {errors(first, small.expected())}", flush=True)
        can_check = True
    except Exception as error:  # the engine's own test utilities say how weights are packed
        keep("left_out", {"reason": f"no errors against float32: {type(error).__name__}: {error}"})
        can_check = False
    print(f"compiled after {time.monotonic() - STARTED:.0f} s", flush=True)
    for place, (model, layout) in enumerate(options.layers):
        name = {"model": model, "layout": layout}
        if time.monotonic() - STARTED > options.seconds:
            keep("left_out", name | {"reason": "out of time"})
            continue
        try:
            layer = Layer(MODELS[model].per_rank(LAYOUTS[layout]), GROUPS.get(model, 128), device, dtype)
            for tokens in options.tokens:
                if time.monotonic() - STARTED > options.seconds:
                    keep("left_out", name | {"tokens": tokens, "reason": "out of time"})
                    continue
                batch = Batch(layer, tokens, device, dtype)
                variants = [Variant(), *(Variant(mb=mb) for mb in (ASKED[model, layout], *options.mb))]
                variants += [Variant(mb=ASKED[model, layout], offered=True)]
                variants += [Variant(slices=n) for n in options.slices]
                if tokens == options.tokens[0]:
                    most = max(options.slices)
                    variants += [Variant(slices=n, copies="none") for n in (2, most)]
                    variants += [Variant(slices=most, copies="torch")] if place == 0 else []
                checked = batch.expected() if can_check else None
                for found in cell(ways, batch, checked, variants, options.rounds):
                    keep("cells", name | found)
                if tokens == options.tokens[0]:
                    if place == 0:
                        keep("kernels", name | profile(ways, batch, [Variant(slices=2), Variant(slices=most)]))
                        keep("mixed", name | mixed(ways, batch, Variant(mb=ASKED[model, layout])))
                        keep("graphs", name | captured(ways, batch, 4096, Variant(slices=7)))
                    for few in (1, 64):
                        keep("decode", name | decode(ways, batch, few))
                batch = None
                clean()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
            keep("left_out", name | {"reason": reason})
        finally:
            layer = None
            clean()
    return figures


def main() -> None:
    options = parse()
    if options.fit:
        print(fit(json.loads(options.fit.read_text(encoding="utf-8"))))
        return
    machine.require_gpu("moe_workspace_marlin")
    with suppress(Exception):  # a release whose arguments want a model: nothing here asks them
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    with torch.inference_mode():
        ways = Ways()
        print(machine.sentence(machine.conditions()), flush=True)
        figures = measure(ways, options)
    result = output.result("moe_workspace_marlin", figures)
    if options.json:
        output.write(options.json, result)
    output.finish(options, result, tables(result))
    if any(one["slices"] > 1 for one in figures["cells"]):
        print(fit(result))


if __name__ == "__main__":
    main()
