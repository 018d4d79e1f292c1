"""What the README and the index of the benchmarks say of the results: a figure or two of each, and one plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import output
from common.output import Result

Load = Callable[[str], Result]

PEAKS = {
    "Kimi-K2.5": "peak-memory/triton-kimi-k2.5-shard4",
    "Kimi-K2.5, FP8": "peak-memory/triton-kimi-k2.5-fp8-shard4",
    "Qwen3-235B": "peak-memory/triton-qwen3-235b-shard4",
    "Qwen3-235B, FP8": "peak-memory/triton-qwen3-235b-fp8-shard4",
    "MiniMax-M2": "peak-memory/triton-minimax-m2-shard4",
}
PLANS = {
    "Kimi-K2.5, 14 layers,\nchunk 16,384": "plan/kimi-k2.5-16384",
    "Kimi-K2.5, 13 layers,\nchunk 8,192": "plan/kimi-k2.5-8192",
    "Qwen3-30B, 24 layers,\nchunk 16,384": "plan/qwen3-30b-16384",
    "Qwen3-30B, 48 layers,\nchunk 8,192": "plan/qwen3-30b-8192",
}


def peaks(result: Result) -> tuple[float, float]:
    """MB of one forward, stock and patched."""
    stock, patched = (result["figures"]["memory"][name]["peak_forward_bytes"] / 1e6 for name in ("stock", "patched"))
    return stock, patched


def tokens(result: Result) -> tuple[int, int, int]:
    """KV tokens: by the engine's rule, as planned for stock, as planned for patched."""
    stock, patched = (result["figures"]["servers"][name] for name in ("stock", "patched"))
    planned, more = (server["recommendations"][0]["tokens"] for server in (stock, patched))
    return stock["trials"][0]["cache_tokens"], planned, more


def shuffled(result: Result) -> dict[str, Any]:
    """Kimi-K2.5's layer at TP=4."""
    cases = result["figures"]["cases"]
    return next(case for case in cases if (case["model"], case["shard"]) == ("kimi-k2.5", "tp4"))


def buffers(result: Result) -> tuple[float, float]:
    """GB of CuteDSL's buffers of Kimi-K2.5 at TP=4, stock and ours."""
    row = next(r for r in result["figures"]["rows"] if (r["model"], r["tp"], r["dp"]) == ("kimi-k2.5", 4, 1))
    return row["stock"]["total"] * row["moe_layers"] / 1e9, row["ours"]["total"] / 1e9


def gain(load: Load) -> str:
    """The README's lines."""
    kimi, qwen = (peaks(load(PEAKS[name])) for name in ("Kimi-K2.5", "Qwen3-235B"))
    packed = peaks(load("peak-memory/marlin-kimi-k2.5-shard8"))
    layer_time = next(
        cell["slowdown"]
        for cell in load("moe-workspace-marlin/h200")["figures"]["cells"]
        if (cell["model"], cell["layout"], cell["asked_mb"]) == ("kimi-k2.5", "tp8", 700)
    )
    stock, sized = (load("serving/kimi-k2.5")["figures"]["servers"][name] for name in ("stock", "sized"))
    alone = tokens(load("plan/kimi-k2.5-16384"))[1]
    layer, (before, after) = shuffled(load("weight-shuffle/h200")), buffers(load("cutedsl-memory/layouts"))
    kept = [
        load(f"segments/{model}")["figures"]["servers"][server]["slack"] / 1e6
        for model, servers in (("kimi-k2.5", ("patched", "patched-off")), ("qwen3-30b", ("stock-segments", "stock")))
        for server in servers
    ]
    times = [load(f"triton-server/{name}")["figures"]["patched"]["time"] for name in ("kimi-k2.5", "qwen3-235b-0.5.17")]
    return f"""
- **Triton MoE runner** (`auto` for BF16, FP8 and INT8 on NVIDIA): a forward of 16,384 tokens needs
  **{kimi[1]:,.0f} instead of {kimi[0]:,.0f} MB** with Kimi-K2.5's widths (one rank's sizes of TP=4, BF16, H200). Every
  token and log-probability equal, prefills at {times[0]:.2f} of stock's time
  ([servers](docs/benchmarks/triton-server.md)). A layer of little work, as most are in FP8, is cut less: by default it
  may cost 2 % of the time ([your model](docs/models.md)).
  [On request](docs/moe-workspace.md) Kimi-K2.5's own INT4 (Marlin, sizes of TP=8) needs
  {packed[1]:,.0f} instead of {packed[0]:,.0f} MB, at {layer_time:.2f} of a layer's time; Qwen3-235B's widths need
  {qwen[1]:,.0f} instead of {qwen[0]:,.0f} MB, at {times[1]:.2f}.
- **KV cache, by one variable** ([`SGLANG_MOE_PATCHES_KV_SIZING=auto`](docs/kv-sizing.md)): the second start has
  **{sized["tokens"]:,} instead of {stock["tokens"]:,} tokens** and serves {sized["total_throughput"]:,.0f} instead of
  {stock["total_throughput"]:,.0f} tokens/s (the same widths, 14 layers, one H200, 200 long requests at once:
  [serving](docs/benchmarks/serving.md)). Most of that is the caution of the engine's rule: with a measured
  reserve stock had {alone:,} ([plans](docs/benchmarks/plan.md)).
- **What PyTorch's allocator keeps** after prompts of many lengths, MoE or not: {kept[0]:,.0f} instead of
  {kept[1]:,.0f} MB with all changes (the same widths), {kept[2]:,.0f} instead of {kept[3]:,.0f} MB with Qwen3-30B at
  its full depth, with PyTorch 2.11 by itself ([segments](docs/benchmarks/segments.md)).
- **NVFP4 experts (Blackwell):** weights prepared {layer["speedup"]:.0f} times as fast with
  {layer["ours"]["peak_bytes"] / 1e6:.2f} MB beyond the layer instead of {layer["engine"]["peak_bytes"] / 1e9:.1f} GB
  (measured on an H200), CuteDSL buffers of {after * 1e3:.0f} MB instead of {before:.1f} GB (computed), and right
  answers where the engine [overwrites a live tensor](docs/benchmarks/residual-hole.md).
"""


def second_start(load: Load) -> str:
    """What a server said at its second start."""
    said = load("serving/kimi-k2.5")["figures"]["servers"]["sized"]["said"][0]
    return f"""
```
sglang-moe-patches: kv-sizing: {said}
```
"""


def index(load: Load) -> str:
    """A line for each page of benchmarks."""
    kimi, deepest = peaks(load(PEAKS["Kimi-K2.5"])), tokens(load("plan/kimi-k2.5-16384"))
    nvfp4 = peaks(load("peak-memory/kimi-k2.5-tp4"))
    layer, (before, after) = shuffled(load("weight-shuffle/h200")), buffers(load("cutedsl-memory/layouts"))
    runner = next(
        cell
        for cell in load("moe-workspace/h200")["figures"]["cells"]
        if (cell["model"], cell["layout"], cell["weights"], cell["tokens"]) == ("kimi-k2.5", "tp4", "bf16", 16384)
    )
    server = load("triton-server/kimi-k2.5")["figures"]
    host = [load(f"overhead/host-{name}")["figures"]["added_us"] for name in ("h200", "triton-h200")]
    case = next(
        c
        for c in load("mori-rows/rows")["figures"]["cases"]
        if (c["ep"], c["batch"], c["routing"]) == (8, 32, "skewed")
    )
    launch = load("launcher-cost/cpu")["figures"]["medians"]["load_plugins_ms"]
    added = launch["patched"] - launch["stock"]
    regress = load("regress/tiny-h200")["figures"]["rows"][0][2]
    hole = load("residual-hole/h200")["figures"]
    wrong = {name: f"{one['differing']} of {hole['questions']}" for name, one in hole["servers"].items()}
    slack = load("segments/kimi-k2.5")["figures"]["servers"]
    free = [slack[name]["lowest_free"] / 1e6 for name in ("patched-off", "patched")]
    soaked = load("soak/qwen3-30b")["figures"]["servers"]
    minutes, failed = soaked["patched"]["seconds"] / 60, sum(len(one["errors"]) for one in soaked.values())
    served = [load("serving/kimi-k2.5")["figures"]["servers"][name]["total_throughput"] for name in ("stock", "sized")]
    suite = load("engine-suite/h200-0.5.17")["figures"]["files"].values()
    tests = sum(len(one["stock"]["tests"]) for one in suite)
    rows = [
        (
            "moe-workspace",
            "one MoE layer behind Triton",
            f"{runner['stock_peak'] / 1e6:,.0f} -> {runner['peak'] / 1e6:,.0f} MB",
        ),
        ("triton-server", "whole servers with Triton", f"prefill at {server['patched']['time']:.3f} of stock's time"),
        (
            "peak-memory",
            "memory of a forward",
            f"{kimi[0]:,.0f} -> {kimi[1]:,.0f} MB; NVFP4 {nvfp4[1] - nvfp4[0]:+,.0f} MB",
        ),
        ("serving", "tokens per second with a measured reserve", f"{served[0]:,.0f} -> {served[1]:,.0f} tokens/s"),
        ("plan", "KV cache as planned", f"{deepest[0]:,} -> {deepest[2]:,} tokens (stock: {deepest[1]:,})"),
        ("segments", "what the allocator keeps", f"lowest free memory {free[0]:,.0f} -> {free[1]:,.0f} MB"),
        (
            "soak",
            "minutes of mixed load, flushes, weight updates",
            f"{soaked['patched']['answered']:,} answers in {minutes:.1f} minutes, {failed} errors",
        ),
        (
            "engine-suite",
            "SGLang's own tests",
            f"{tests} tests of {sum(bool(one['stock']['tests']) for one in suite)} files, stock and patched alike",
        ),
        ("weight-shuffle", "preparing NVFP4 weights", f"{layer['speedup']:.1f}x as fast"),
        ("cutedsl-memory", "CuteDSL's buffers", f"{before:.1f} GB -> {after * 1e3:.0f} MB (computed)"),
        ("mori-rows", "rows given to the kernel behind MoRI", f"{case['stock']:,} -> {case['bound']:,} (computed)"),
        ("overhead", "time that the changes add", f"{host[0]:.0f} to {host[1]:.0f} us of the host per eager layer"),
        ("launcher-cost", "what the launching process pays", f"{added:+.0f} ms"),
        (
            "residual-hole",
            "wrong answers of the engine's own buffer",
            f"stock {wrong['stock']}, patched {wrong['patched']}",
        ),
        ("regress", "`regress` on GPUs", f"answers that differ: {regress}"),
    ]
    return "\n" + output.table(("page", "what", "headline"), ((f"[{n}]({n}.md)", w, f) for n, w, f in rows), left=3)


def plot(results: Sequence[Result], path: Path) -> None:
    """Left the memory of a forward, right the KV cache.

    :param results: of ``PEAKS``, then of ``PLANS``.
    """
    pyplot = output.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6))
    grey, pale, blue = "#9aa5b1", "#90cdf4", "#2b6cb0"
    forwards = [peaks(result) for result in results[: len(PEAKS)]]
    caches = [tokens(result) for result in results[len(PEAKS) :]]
    for axis, names, groups, labels, colors in (
        (left, list(PEAKS), forwards, ("stock", "patched"), (grey, blue)),
        (
            right,
            list(PLANS),
            caches,
            ("by the engine's rule", "planned, stock", "planned, patched"),
            (grey, pale, blue),
        ),
    ):
        height = 0.8 / len(labels)
        for index_, (label, color) in enumerate(zip(labels, colors, strict=True)):
            at = [position + (index_ - (len(labels) - 1) / 2) * height for position in range(len(names))]
            bars = axis.barh(at, [group[index_] for group in groups], height, label=label, color=color)
            axis.bar_label(bars, labels=[f"{group[index_]:,.0f}" for group in groups], fontsize=7, padding=2)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7, loc="lower right")
    left.set_title("Memory of a forward of 16,384 tokens, MB", fontsize=10, loc="left")
    right.set_title("KV cache, tokens", fontsize=10, loc="left")
    right.ticklabel_format(axis="x", style="plain")
    right.set_xticks([])
    left.set_xticks([])
    conditions = results[0]["conditions"]
    figure.supxlabel(
        f"{conditions['gpu']}, SGLang {conditions['engine']}, Triton runner; Kimi-K2.5, Qwen3-235B, MiniMax-M2: "
        "one rank's sizes of TP=4",
        fontsize=8,
    )
    figure.tight_layout()
    output.save(figure, path)
