"""Tables and the plot of ``moe_workspace``: what column slices cost and leave, by layer, and all layers together."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices

from common import machine, output, timing
from common.moe_runners import rank_of

MB = 1e6
#: MB that a Marlin layer is asked to keep to.
MARLIN_MB = {("kimi-k2.5", "tp8"): 700, ("kimi-k2.5", "tp4"): 800, ("qwen3-235b", "tp4"): 420, ("glm-4.5", "tp8"): 500}
#: Of forty mixed batches.
WHAT = ("allocated", "reserved")
HIGHEST_LOWER_END = "highest lower end of 95 % intervals"


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def layer_name(one: dict[str, Any]) -> str:
    return f"{one['model']} TP={one['layout'][2:]} {one['weights'].upper()}"


def layer_key(one: dict[str, Any]) -> tuple[str, str, str]:
    return one["model"], one["layout"], one["weights"]


def mb(size: float) -> str:
    return f"{size / MB:,.0f}"


def time_of(one: dict[str, Any]) -> str:
    """Time over stock's, with the interval of its median."""
    low, high = one["interval"]
    return f"{one['slowdown']:.3f} ({low:.3f}-{high:.3f})"


def cut_cell(one: dict[str, Any]) -> str:
    """A cell that ran in slices: peak, slices, time."""
    return f"{mb(one['peak'])}, {one['slices']}: {time_of(one)}"


# --- Triton ----------------------------------------------------------------------------------------------------------


def triton(result: output.Result) -> str:
    """Every cell that ran as moe-workspace decides by itself; the others are in the result."""
    return f"{by_default(result)}\n{captured([result])}"


def by_width(cells: list[dict[str, Any]], setting: int | None = None) -> dict[tuple[Any, ...], dict[str, Any] | None]:
    """Of each layer, tiles and batch, the cell that ran as the rule says now, with so many MB asked for.

    ``None``: it is not cut, and is stock; empty: it was not measured.
    """
    measured: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for one in cells:
        measured.setdefault((*layer_key(one), one["tiles"], one["tokens"]), {})[one["width"]] = one
    of_rule = {}
    for key, widths in measured.items():
        model, layout, weights, _, tokens = key
        rank, fp8 = rank_of(model, layout, fused=True), weights == "fp8"
        shape = column_slices.LayerShape(
            *(tokens, rank.top_k, rank.hidden, rank.intermediate),
            weight_bytes=3 * rank.experts * rank.hidden * rank.intermediate * (1 if fp8 else 2),
        )
        gemm = column_slices.TritonGemm(
            next(iter(widths.values()))["config"],
            fp8,
            **({"columns_per_scale": 128, "scale_stride_bytes": rank.intermediate // 128 * 4} if fp8 else {}),
        )
        width = column_slices.slice_width(shape, gemm, None if setting is None else setting * 10**6)
        of_rule[key] = widths.get(width, {}) if width < rank.hidden else None
    return of_rule


def by_rule(result: output.Result, tokens: int = 16384, settings: tuple[int, ...] = (800, 400)) -> str:
    """What the rule costs and leaves, and what a setting does: a line for each layer and its tiles."""
    cells = result["figures"]["cells"]
    stock = {(*layer_key(one), one["tiles"], one["tokens"]): one["stock_peak"] for one in cells}

    def show(one: dict[str, Any] | None, peak: int) -> str:
        if one is None:
            return f"{mb(peak)}, uncut"
        return cut_cell(one) if one else "not measured"

    of_batch = [one for one in cells if one["tokens"] == tokens]
    by_setting = [by_width(cells), *(by_width(of_batch, setting) for setting in settings)]
    lines = []
    for key, peak in stock.items():
        if key[4] == tokens:
            tiles = f", {key[3]}" if key[3] != "default" else ""
            name = f"{key[0]} TP={key[1][2:]} {key[2].upper()}{tiles}"
            lines.append((name, mb(peak), *(show(one[key], peak) for one in by_setting)))
    header = (f"{tokens:,} tokens", "stock, MB", "default", *(f"{setting} MB asked for" for setting in settings))
    cut = [one for one in by_setting[0].values() if one is not None]
    same, times = f"{sum(one['same'] for one in cut)} of {len(cut)}", spread([one["slowdown"] for one in cut])
    row = (f"{len(stock)}, of which {len(cut)} cut", same, times, f"{max(one['interval'][0] for one in cut):.3f}")
    together = ("all layers, tiles and batches", "same bits", "time where cut: median (range)", HIGHEST_LOWER_END)
    return f"{output.table(header, lines)}\n{output.table(together, [row])}"


def by_default(result: output.Result) -> str:
    """Every batch as the rule has it, a line for each layer; and what it costs at the most."""
    cells = [one for one in result["figures"]["cells"] if one["asked_mb"] is None and one["asked_slices"] is None]
    batches = sorted({one["tokens"] for one in cells})
    layers: dict[str, dict[int, str]] = {}
    for one in cells:
        cut = f"{mb(one['stock_peak'])} -> {mb(one['peak'])}, {one['slices']}"
        memory = cut if one["slices"] > 1 else "uncut"
        layers.setdefault(layer_name(one), {})[one["tokens"]] = f"{memory}: {time_of(one)}"
    lines = [(name, *(batch.get(tokens, "") for tokens in batches)) for name, batch in layers.items()]

    rows = []
    for name, some in (
        ("in slices", [one for one in cells if one["slices"] > 1]),
        ("uncut", [one for one in cells if one["slices"] < 2]),
    ):
        if some:
            same = f"{sum(one['same'] for one in some)} of {len(some)}"
            times = [spread([one[key] for one in some]) for key in ("slowdown", "control")]
            rows.append((name, same, *times, f"{max(one['interval'][0] for one in some):.3f}"))
    header = ("MB, slices: time", *(f"{tokens:,} tokens" for tokens in batches))
    of_all = ("layers and batches", "same bits", "time: median (range)", "control", HIGHEST_LOWER_END)
    return f"{output.table(header, lines)}\n{output.table(of_all, rows)}"


def in_short(results: list[output.Result], tokens: int = 16384, layout: str = "tp4") -> str:
    """Layer by layer for one number of tokens, a column a GPU; all cells together, a row a GPU.

    :param results: several of one GPU add up.
    """
    gpus: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        gpus.setdefault(machine.gpu_model(result["conditions"]), []).extend(result["figures"]["cells"])
    layers: dict[str, dict[str, dict[str, Any]]] = {}
    for gpu, cells in gpus.items():
        for one in cells:
            if one["tokens"] == tokens and one["layout"] == layout and one["slices"] > 1:
                layers.setdefault(layer_name(one), {})[gpu] = one
    lines = []
    for name, on in layers.items():
        first = next(iter(on.values()))
        times = (f"{on[gpu]['slowdown']:.3f} ({on[gpu]['control']:.3f})" if gpu in on else "" for gpu in gpus)
        lines.append((name, mb(first["stock_peak"]), mb(first["peak"]), *times))
    header = (f"{tokens:,} tokens", "stock, MB", "columns, MB", *(f"time on {gpu} (control)" for gpu in gpus))
    rows = []
    for gpu, cells in gpus.items():
        for kind, some in (
            ("uncut", [one for one in cells if one["slices"] < 2]),
            ("in slices", [one for one in cells if one["slices"] > 1]),
        ):
            ours, control = ([one[name] for one in some] for name in ("slowdown", "control"))
            same = sum(one["same"] for one in some)
            rows.append([f"{gpu}, {kind}", f"{same} of {len(some)}", *map(spread, (ours, control))])
    together = ("all layers and batches", "same bits", "time: median (range)", "control")
    return f"{output.table(header, lines)}\n{output.table(together, rows)}"


def captured(results: list[output.Result]) -> str:
    """Mixed batches and CUDA graphs, of one GPU or several: what they hold does not depend on it."""
    gpus = [machine.gpu_model(result["conditions"]) for result in results]
    mixed: dict[tuple[str, ...], list[str]] = {}
    graphs: dict[tuple[str, ...], dict[str, str]] = {}
    for gpu, result in zip(gpus, results, strict=True):
        for row in result["figures"]["mixed"]:
            sizes = [row[name][what] for what in WHAT for name in ("stock", "columns")]
            cells = (f"{row['model']} {row['layout']} {row['weights']}", *map(mb, sizes))
            mixed.setdefault(cells, []).append(gpu)
        for row in result["figures"]["graphs"]:
            pools = (mb(row[name]["pool"]) for name in ("stock", "columns"))
            time, control = (f"{row[name]['slowdown']:.4f}" for name in ("columns", timing.CONTROL))
            same = all(row[name]["same"] for name in ("stock", "columns"))
            cells = (f"{row['model']} {row['layout']} {row['weights']}", f"{row['tokens']:,}", *pools)
            graphs.setdefault(cells, {})[gpu] = f"{time} ({control})" + ("" if same else " **NOT EQUAL**")
    parts = []
    if mixed:
        header = ("forty mixed batches, MB", "allocated: stock", "columns", "reserved: stock", "columns", "GPU")
        parts.append(output.table(header, [(*cells, ", ".join(on)) for cells, on in mixed.items()]))
    if graphs:
        titles = ("captured layer", "tokens", "pool, MB: stock", "columns")
        lines = [(*cells, *(times.get(gpu, "") for gpu in gpus)) for cells, times in graphs.items()]
        parts.append(output.table((*titles, *(f"time on {gpu} (control)" for gpu in gpus)), lines))
    return "\n".join(parts)


def plot(result: output.Result, path: Path) -> None:
    """The runner's peak with 16,384 tokens, stock and in columns, one pair of bars for each layer at TP=4 and TP=8."""
    pyplot = output.pyplot()
    cells = [c for c in result["figures"]["cells"] if c["tokens"] == 16384 and c["layout"] in ("tp4", "tp8")]
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(cells) + 1.4))
    positions = range(len(cells))
    for offset, name, key, color in ((-0.2, "stock", "stock_peak", "#9aa5b1"), (0.2, "in columns", "peak", "#2b6cb0")):
        axes.barh([p + offset for p in positions], [c[key] / 1e6 for c in cells], 0.38, label=name, color=color)
    for position, cell in enumerate(cells):
        axes.text(cell["peak"] / 1e6 + 15, position + 0.3, f"{cell['slowdown']:.2f} of stock's time", fontsize=7)
    axes.set_yticks(list(positions), map(layer_name, cells))
    axes.invert_yaxis()
    axes.set(xlabel="peak of one MoE layer, MB", xlim=(0, 1.14 * max(c["stock_peak"] for c in cells) / 1e6))
    axes.legend(frameon=False, loc="lower right")
    conditions = result["conditions"]
    axes.set_title(f"Triton runner, 16,384 tokens, {conditions['gpu']}, SGLang {conditions['engine']}", fontsize=10)
    figure.tight_layout()
    output.save(figure, path)


# --- Marlin ----------------------------------------------------------------------------------------------------------


def slices_by_rule(one: dict[str, Any]) -> int:
    """How many slices moe-workspace takes for a Marlin cell by itself, today."""
    _, top_k, hidden, inner = one["sizes"]
    layer = column_slices.LayerShape(one["tokens"], top_k, hidden, inner, weight_bytes=one["weight_bytes"])
    gemm = column_slices.MarlinGemm(one["w2_bytes"] // hidden)
    return len(column_slices.split_columns(hidden, column_slices.packed_slice_width(layer, gemm)))


def fresh(one: dict[str, Any]) -> bool:
    """Whether a cell has our copies, and an output of its own."""
    return one["copies"] == "ours" and not one["offered"]


def marlin(result: output.Result, tokens: int = 16384) -> str:
    """The rule and the setting, layer by layer; all cells together; batches too small for slices; mixed batches."""
    figures = result["figures"]
    layers: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in figures["cells"]:
        if one["tokens"] == tokens:
            layers.setdefault(layer_key(one), []).append(one)

    def show(one: dict[str, Any] | None) -> str:
        if one is None:
            return "-"
        if one["slices"] < 2:
            time = f": {one['slowdown']:.3f}" if one["slowdown"] else ""
            return f"{mb(one['stock_peak'])}, uncut{time}"
        return f"{cut_cell(one)}, queued {one['queued']:.3f}"

    lines: list[tuple[str, ...]] = []
    for (model, layout, _), cells in layers.items():
        ours, setting = [one for one in cells if fresh(one)], MARLIN_MB[model, layout]
        # As the rule is now: its constants were fitted to these cells.
        chosen = slices_by_rule(ours[0])
        by_itself = next((one for one in ours if one["slices"] == chosen), ours[0] | {"slices": 1, "slowdown": None})
        ahead = [one for one in cells if one["copies"] == "none"]
        lines.append(
            (
                layer_name(by_itself),
                f"{mb(by_itself['stock_peak'])}; {by_itself['stock_ms']:.2f}",
                show(by_itself),
                f"{setting}: {show(next((one for one in ours if one['asked_mb'] == setting), by_itself))}",
                show(next((one for one in cells if one["offered"]), None)),
                ", ".join(f"{one['slices']}: {one['slowdown']:.3f}" for one in ahead),
            )
        )
    names = ("stock, MB; ms", "default", "MB asked for", "output given", "permuted ahead")
    ours = [one for one in figures["cells"] if fresh(one) and one["slices"] > 1]
    checked = [one for one in ours if one["errors"]]
    stock = [error["mean"] for one in checked for error in one["stock_errors"]]
    patched = [one["errors"]["mean"] for one in checked]
    together = ("all layers and batches, cut", "time: median (range)", "control", "mean error: stock", "columns")
    times = (spread([one[name] for one in ours]) for name in ("slowdown", "control"))
    means = (f"{min(some):.5f}-{max(some):.5f}" if some else "not checked" for some in (stock, patched))
    parts = [
        output.table((f"{tokens:,} tokens", *names), lines),
        output.table(together, [(str(len(ours)), *times, *means)] if ours else []),
    ]
    if figures["decode"]:
        titles = [title for kind in ("eager", "captured") for title in (f"{kind}, us", "columns (control)")]
        decodes = []
        for one in figures["decode"]:
            decodes.append([f"{one['model']} {one['layout']}, {one['tokens']}"])
            for kind in ("eager", "captured"):
                columns, control = (f"{one[f'{kind} {name}']:.4f}" for name in ("columns", timing.CONTROL))
                decodes[-1] += [f"{one[f'{kind} us']:.0f}", f"{columns} ({control})"]
        parts.append(output.table(("decode, tokens", *titles), decodes))
    if figures["mixed"]:
        titles = [f"{what}: {name}" if name == "stock" else name for what in WHAT for name in ("stock", "columns")]
        rows = [
            (
                f"{one['model']} {one['layout']}, {one['asked_mb']} MB asked for",
                *(mb(one[name][what]) for what in WHAT for name in (timing.STOCK, "columns")),
            )
            for one in figures["mixed"]
        ]
        parts.append(output.table(("forty mixed batches, MB", *titles), rows))
    return "\n".join(parts)
