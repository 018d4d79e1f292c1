"""Tables and the plot of the benchmark ``moe_workspace``: memory and time of column slices, by layer and in total."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices

from common import machine, output, timing
from common.moe_runners import rank_sizes

MB = 1e6
MARLIN_MB = {("kimi-k2.5", "tp8"): 700, ("kimi-k2.5", "tp4"): 800, ("qwen3-235b", "tp4"): 420, ("glm-4.5", "tp8"): 500}
"""Value of ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` in the column "MB asked for" of Marlin's table, by layer."""
MEMORY_KINDS = ("allocated", "reserved")
"""Keys of the two memory figures of the measurement with forty mixed batches."""
HIGHEST_LOWER_END = "highest lower end of 95 % intervals"


def format_spread(values: list[float]) -> str:
    """Format the median of some values, with the lowest and the highest value, as in "1.004 (0.998-1.013)"."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def layer_name(cell: dict[str, Any]) -> str:
    return f"{cell['model']} TP={cell['layout'][2:]} {cell['weights'].upper()}"


def layer_key(cell: dict[str, Any]) -> tuple[str, str, str]:
    return cell["model"], cell["layout"], cell["weights"]


def mb(size: float) -> str:
    return f"{size / MB:,.0f}"


def format_relative_time(cell: dict[str, Any]) -> str:
    """Format a measurement's time relative to stock, with the confidence interval of its median."""
    low, high = cell["interval"]
    return f"{cell['slowdown']:.3f} ({low:.3f}-{high:.3f})"


def format_sliced_cell(cell: dict[str, Any]) -> str:
    """Format a measurement that ran in slices: peak memory, number of slices, relative time."""
    return f"{mb(cell['peak'])}, {cell['slices']}: {format_relative_time(cell)}"


# --- Triton ----------------------------------------------------------------------------------------------------------


def make_triton_tables(result: output.Result) -> str:
    """Make the tables of the Triton runner. They show only measurements in which moe-workspace's rule chose the slice
    width.
    """
    return f"{rule_tables(result)}\n{graph_tables([result])}"


def find_cells_of_chosen_width(
    cells: list[dict[str, Any]], setting: int | None = None
) -> dict[tuple[Any, ...], dict[str, Any] | None]:
    """Find the measurements with the slice widths that moe-workspace's rule chooses today.

    :param cells: measurements of several slice widths.
    :param setting: value of ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB``; ``None``: unset.
    :returns: the measurement for each combination of layer, tiles and number of tokens. A combination's value is
        ``None`` if the rule does not cut the layer into slices, and ``{}`` if the chosen width was not measured.
    """
    measured: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        measured.setdefault((*layer_key(cell), cell["tiles"], cell["tokens"]), {})[cell["width"]] = cell
    chosen = {}
    for key, widths in measured.items():
        model, layout, weights, _, tokens = key
        rank, fp8 = rank_sizes(model, layout, fused=True), weights == "fp8"
        shape = column_slices.LayerShape(
            *(tokens, rank.top_k, rank.hidden, rank.intermediate),
            weight_bytes=3 * rank.experts * rank.hidden * rank.intermediate * (1 if fp8 else 2),
        )
        gemm = column_slices.TritonGemm(
            next(iter(widths.values()))["config"],
            fp8,
            **({"columns_per_scale": 128, "scale_stride_bytes": rank.intermediate // 128 * 4} if fp8 else {}),
        )
        width = column_slices.choose_slice_width(shape, gemm, None if setting is None else setting * 10**6)
        chosen[key] = widths.get(width, {}) if width < rank.hidden else None
    return chosen


def slices_table(result: output.Result, tokens: int = 16384, settings: tuple[int, ...] = (800, 400)) -> str:
    """Make a table of peak memory and time, with a row for each layer and tile size. Its columns are stock,
    moe-workspace's default, and each of ``settings``.

    :param settings: values of ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB``.
    """
    cells = result["figures"]["cells"]
    stock = {(*layer_key(cell), cell["tiles"], cell["tokens"]): cell["stock_peak"] for cell in cells}

    def show(cell: dict[str, Any] | None, peak: int) -> str:
        if cell is None:
            return f"{mb(peak)}, uncut"
        return format_sliced_cell(cell) if cell else "not measured"

    same_tokens = [cell for cell in cells if cell["tokens"] == tokens]
    by_setting = [
        find_cells_of_chosen_width(cells),
        *(find_cells_of_chosen_width(same_tokens, setting) for setting in settings),
    ]
    lines = []
    for key, peak in stock.items():
        if key[4] == tokens:
            tiles = f", {key[3]}" if key[3] != "default" else ""
            name = f"{key[0]} TP={key[1][2:]} {key[2].upper()}{tiles}"
            lines.append((name, mb(peak), *(show(cell[key], peak) for cell in by_setting)))
    header = (f"{tokens:,} tokens", "stock, MB", "default", *(f"{setting} MB asked for" for setting in settings))
    cut = [cell for cell in by_setting[0].values() if cell is not None]
    same, times = (
        f"{sum(cell['same'] for cell in cut)} of {len(cut)}",
        format_spread([cell["slowdown"] for cell in cut]),
    )
    row = (f"{len(stock)}, of which {len(cut)} cut", same, times, f"{max(cell['interval'][0] for cell in cut):.3f}")
    together = ("all layers, tiles and batches", "same bits", "time where cut: median (range)", HIGHEST_LOWER_END)
    return f"{output.table(header, lines)}\n{output.table(together, [row])}"


def rule_tables(result: output.Result) -> str:
    """Make two tables of the measurements in which moe-workspace's own rule chose the slices. The first table has a row
    for each layer. The second table summarizes all measurements.
    """
    cells = [cell for cell in result["figures"]["cells"] if cell["asked_mb"] is None and cell["asked_slices"] is None]
    batches = sorted({cell["tokens"] for cell in cells})
    layers: dict[str, dict[int, str]] = {}
    for cell in cells:
        cut = f"{mb(cell['stock_peak'])} -> {mb(cell['peak'])}, {cell['slices']}"
        memory = cut if cell["slices"] > 1 else "uncut"
        layers.setdefault(layer_name(cell), {})[cell["tokens"]] = f"{memory}: {format_relative_time(cell)}"
    lines = [(name, *(batch.get(tokens, "") for tokens in batches)) for name, batch in layers.items()]

    rows = []
    for name, some in (
        ("in slices", [cell for cell in cells if cell["slices"] > 1]),
        ("uncut", [cell for cell in cells if cell["slices"] < 2]),
    ):
        if some:
            same = f"{sum(cell['same'] for cell in some)} of {len(some)}"
            times = [format_spread([cell[key] for cell in some]) for key in ("slowdown", "control")]
            rows.append((name, same, *times, f"{max(cell['interval'][0] for cell in some):.3f}"))
    header = ("MB, slices: time", *(f"{tokens:,} tokens" for tokens in batches))
    together = ("layers and batches", "same bits", "time: median (range)", "control", HIGHEST_LOWER_END)
    return f"{output.table(header, lines)}\n{output.table(together, rows)}"


def layers_table(results: list[output.Result], tokens: int = 16384, layout: str = "tp4") -> str:
    """Make two tables. The first table shows batches of ``tokens`` tokens, with a row for each layer and a column for
    each GPU model. The second table summarizes all measurements.

    :param results: results of the benchmark. Results of the same GPU model share a column.
    """
    gpus: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        gpus.setdefault(machine.gpu_model(result["conditions"]), []).extend(result["figures"]["cells"])
    layers: dict[str, dict[str, dict[str, Any]]] = {}
    for gpu, cells in gpus.items():
        for cell in cells:
            if cell["tokens"] == tokens and cell["layout"] == layout and cell["slices"] > 1:
                layers.setdefault(layer_name(cell), {})[gpu] = cell
    lines = []
    for name, on in layers.items():
        first = next(iter(on.values()))
        times = (f"{on[gpu]['slowdown']:.3f} ({on[gpu]['control']:.3f})" if gpu in on else "" for gpu in gpus)
        lines.append((name, mb(first["stock_peak"]), mb(first["peak"]), *times))
    header = (f"{tokens:,} tokens", "stock, MB", "columns, MB", *(f"time on {gpu} (control)" for gpu in gpus))
    rows = []
    for gpu, cells in gpus.items():
        for kind, some in (
            ("uncut", [cell for cell in cells if cell["slices"] < 2]),
            ("in slices", [cell for cell in cells if cell["slices"] > 1]),
        ):
            ours, control = ([cell[name] for cell in some] for name in ("slowdown", "control"))
            same = sum(cell["same"] for cell in some)
            rows.append([f"{gpu}, {kind}", f"{same} of {len(some)}", *map(format_spread, (ours, control))])
    together = ("all layers and batches", "same bits", "time: median (range)", "control")
    return f"{output.table(header, lines)}\n{output.table(together, rows)}"


def graph_tables(results: list[output.Result]) -> str:
    """Make the tables of mixed batches and of CUDA graphs. If GPU models have the same figures, they share a row."""
    gpus = [machine.gpu_model(result["conditions"]) for result in results]
    mixed: dict[tuple[str, ...], list[str]] = {}
    graphs: dict[tuple[str, ...], dict[str, str]] = {}
    for gpu, result in zip(gpus, results, strict=True):
        for row in result["figures"]["mixed"]:
            sizes = [row[name][kind] for kind in MEMORY_KINDS for name in ("stock", "columns")]
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
    """Draw the runner's peak memory with 16,384 tokens: a stock and a patched bar for each layer at TP=4 and TP=8."""
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


def slices_by_rule(cell: dict[str, Any]) -> int:
    """Return the number of slices that moe-workspace's rule chooses today for a Marlin layer."""
    _, top_k, hidden, inner = cell["sizes"]
    layer = column_slices.LayerShape(cell["tokens"], top_k, hidden, inner, weight_bytes=cell["weight_bytes"])
    gemm = column_slices.MarlinGemm(cell["w2_bytes"] // hidden)
    return len(column_slices.split_columns(hidden, column_slices.choose_packed_slice_width(layer, gemm)))


def has_default_copies(cell: dict[str, Any]) -> bool:
    """Return whether Marlin's slices copied their columns, as by default, and the output was a new tensor."""
    return cell["copies"] == "ours" and not cell["offered"]


def make_marlin_tables(result: output.Result, tokens: int = 16384) -> str:
    """Make the tables of Marlin: layers, a summary of all measurements, decodes, and mixed batches."""
    figures = result["figures"]
    layers: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in figures["cells"]:
        if cell["tokens"] == tokens:
            layers.setdefault(layer_key(cell), []).append(cell)

    def show(cell: dict[str, Any] | None) -> str:
        if cell is None:
            return "-"
        if cell["slices"] < 2:
            time = f": {cell['slowdown']:.3f}" if cell["slowdown"] else ""
            return f"{mb(cell['stock_peak'])}, uncut{time}"
        return f"{format_sliced_cell(cell)}, queued {cell['queued']:.3f}"

    lines: list[tuple[str, ...]] = []
    for (model, layout, _), cells in layers.items():
        ours, setting = [cell for cell in cells if has_default_copies(cell)], MARLIN_MB[model, layout]
        # The constants of moe-workspace's rule were fitted to these measurements later. So the rule is applied again.
        chosen = slices_by_rule(ours[0])
        by_itself = next((cell for cell in ours if cell["slices"] == chosen), ours[0] | {"slices": 1, "slowdown": None})
        ahead = [cell for cell in cells if cell["copies"] == "none"]
        lines.append(
            (
                layer_name(by_itself),
                f"{mb(by_itself['stock_peak'])}; {by_itself['stock_ms']:.2f}",
                show(by_itself),
                f"{setting}: {show(next((cell for cell in ours if cell['asked_mb'] == setting), by_itself))}",
                show(next((cell for cell in cells if cell["offered"]), None)),
                ", ".join(f"{cell['slices']}: {cell['slowdown']:.3f}" for cell in ahead),
            )
        )
    names = ("stock, MB; ms", "default", "MB asked for", "output given", "permuted ahead")
    ours = [cell for cell in figures["cells"] if has_default_copies(cell) and cell["slices"] > 1]
    checked = [cell for cell in ours if cell["errors"]]
    stock = [error["mean"] for cell in checked for error in cell["stock_errors"]]
    patched = [cell["errors"]["mean"] for cell in checked]
    together = ("all layers and batches, cut", "time: median (range)", "control", "mean error: stock", "columns")
    times = (format_spread([cell[name] for cell in ours]) for name in ("slowdown", "control"))
    means = (f"{min(some):.5f}-{max(some):.5f}" if some else "not checked" for some in (stock, patched))
    parts = [
        output.table((f"{tokens:,} tokens", *names), lines),
        output.table(together, [(str(len(ours)), *times, *means)] if ours else []),
    ]
    if figures["decode"]:
        titles = [title for kind in ("eager", "captured") for title in (f"{kind}, us", "columns (control)")]
        decodes = []
        for cell in figures["decode"]:
            decodes.append([f"{cell['model']} {cell['layout']}, {cell['tokens']}"])
            for kind in ("eager", "captured"):
                columns, control = (f"{cell[f'{kind} {name}']:.4f}" for name in ("columns", timing.CONTROL))
                decodes[-1] += [f"{cell[f'{kind} us']:.0f}", f"{columns} ({control})"]
        parts.append(output.table(("decode, tokens", *titles), decodes))
    if figures["mixed"]:
        titles = [
            f"{kind}: {name}" if name == "stock" else name for kind in MEMORY_KINDS for name in ("stock", "columns")
        ]
        rows = [
            (
                f"{cell['model']} {cell['layout']}, {cell['asked_mb']} MB asked for",
                *(mb(cell[name][kind]) for kind in MEMORY_KINDS for name in (timing.STOCK, "columns")),
            )
            for cell in figures["mixed"]
        ]
        parts.append(output.table(("forty mixed batches, MB", *titles), rows))
    return "\n".join(parts)
