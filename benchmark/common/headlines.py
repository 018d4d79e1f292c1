"""The README's first table and the index of the benchmarks: a figure or two of each result."""

from __future__ import annotations

from collections.abc import Callable
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
#: result: (what was served, the load, SGLANG_MOE_PATCHES_KV_SIZING)
LAUNCHED = {
    "qwen3-30b-default": ("Qwen3-30B, one H100", "200 requests", "auto"),
    "qwen3-30b-h200": ("Qwen3-30B, one H200", "200 requests", "auto"),
    "qwen3-235b-fp8": ("Qwen3-235B-A22B-FP8, four H200s", "200 requests", "auto"),
    "gpt-oss-120b-30-layers": ("gpt-oss-120b, 30 layers, one H100", "100 requests", "auto"),
    "qwen3-vl-30b-h200": ("Qwen3-VL-30B, one H200", "120 requests, two images each", "auto"),
    "qwen3-next-80b": ("Qwen3-Next-80B, one H200", "200 requests", "auto"),
    "kimi-k2.5-13-layers-h200": ("Kimi-K2.5, 13 layers, one H200", "200 requests", "auto"),
    "deepseek-r1-recipe": ("DeepSeek-R1, one H200", "256 requests", "always"),
    "deepseek-r1-eagle-two-gpus": ("DeepSeek-R1, 24 layers, EAGLE, two H200s", "64 requests", "always"),
}


def launched(load: Load) -> str:
    """The README's first table: servers that people launch, stock and patched; the engine's own settings first.

    A cell has at most six words; what does not fit is in the note.
    """

    def cell(stock: float, ours: float, form: str = ".1f", better: bool = False) -> str:
        return f"{stock:{form}} -> {'**' * better}{ours:{form}}{'**' * better}"

    rows = []
    for name, (server, asked, mode) in LAUNCHED.items():
        figures = load(f"serving/{name}")["figures"]
        stock, grown = figures["servers"]["stock"], figures["servers"]["grown"]
        # Emphasized where the load does not fit stock's KV cache: elsewhere a difference is noise.
        asked_tokens = figures["prompts"] * (sum(figures["input"]) // 2 + figures["output"])
        more = asked_tokens > stock["tokens"] and grown["total_throughput"] > 1.01 * stock["total_throughput"]
        rows.append(
            (
                server,
                asked,
                f"`{mode}`",
                f"{cell(stock['tokens'], grown['tokens'], ',', True)} KV tokens",
                cell(stock["total_throughput"], grown["total_throughput"], ",.0f", more),
                cell(stock["median_tpot_ms"], grown["median_tpot_ms"]),
                cell(stock["median_ttft_ms"] / 1e3, grown["median_ttft_ms"] / 1e3),
            )
        )
    recipe = load("triton-server/deepseek-v3-fp8-shard8-32768")["figures"]
    stock, patched = recipe["stock"], recipe["patched"]
    peak = cell(stock["peak"] / 1e6, patched["peak"] / 1e6, ",.0f", True)
    prefill = f"{cell(stock['ms'], patched['ms'])} ms, prefill"
    rows.append(("DeepSeek-R1, 4 layers, eager", "one prefill of 32,768", "unset", f"{peak} MB", "", "", prefill))
    header = ("server", "load at once", "`SGLANG_MOE_PATCHES_KV_SIZING`", "memory", "tokens/s", "ms per token")
    note = (
        "Figures are stock -> patched. Weights are random, so that every expert is used; a real checkpoint has other "
        "tokens per second, which count prompts and answers. Latencies are medians. The models are whole, but where "
        "layers are named. Kimi-K2.5 is in BF16. It has the sizes of TP=8, as DeepSeek-R1 in FP8 on one GPU; "
        "Qwen3-Next has those of TP=4, and DeepSeek-R1 on two GPUs those of TP=8. DeepSeek-R1 has "
        "`--mem-fraction-static 0.82` and, without EAGLE, a chunk of 32,768, as a published recipe. All others have "
        "the engine's own fraction and chunk of 8,192. Tokens per second are in bold where the load did not fit "
        "stock's KV cache; elsewhere a difference is noise."
    )
    return f"\n{output.table((*header, 's to first token'), rows, left=7)}\n{note}\n"


def find(rows: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """The first row with these values."""
    return next(row for row in rows if all(row[name] == value for name, value in values.items()))


def index(load: Load) -> str:
    """A line for each page of benchmarks."""

    def figures(name: str) -> dict[str, Any]:
        return load(name)["figures"]

    def peaks(name: str) -> list[float]:
        """MB of one forward, stock and patched."""
        return [figures(name)["memory"][server]["peak_forward_bytes"] / 1e6 for server in ("stock", "patched")]

    kimi, nvfp4 = peaks(PEAKS["Kimi-K2.5"]), peaks("peak-memory/kimi-k2.5-tp4")
    layer = find(figures("moe-workspace/h200")["cells"], model="kimi-k2.5", layout="tp4", weights="bf16", tokens=16384)
    slack = figures("segments/kimi-k2.5")["servers"]
    free = [slack[name]["lowest_free"] / 1e6 for name in ("patched-off", "patched")]
    soaked = figures("soak/qwen3-30b")["servers"]
    minutes, failed = soaked["patched"]["seconds"] / 60, sum(len(one["errors"]) for one in soaked.values())
    ran = [one["stock"]["tests"] for one in figures("engine-suite/h200-0.5.17")["files"].values()]
    shuffled = find(figures("weight-shuffle/h200")["cases"], model="kimi-k2.5", shard="tp4")
    buffers = find(figures("cutedsl-memory/layouts")["rows"], model="kimi-k2.5", tp=4, dp=1)
    before, after = buffers["stock"]["total"] * buffers["moe_layers"] / 1e9, buffers["ours"]["total"] / 1e6
    served = figures("serving/qwen3-30b-default")["servers"]
    recipe = figures("serving/deepseek-r1-recipe")["servers"]
    held = figures("serving/qwen3-30b-penalties")["servers"]["stock"]["penalized"]["held"]
    case = find(figures("mori-rows/rows")["cases"], ep=8, batch=32, routing="skewed")
    host = [figures(f"overhead/host-{name}")["added_us"] for name in ("h200", "triton-h200")]
    launch = figures("launcher-cost/cpu")["medians"]["load_plugins_ms"]
    hole = {name: differing for name, differing, _ in figures("residual-hole/h200")["rows"]}
    headlines = {
        "moe-workspace": (
            "one MoE layer behind Triton",
            f"{layer['stock_peak'] / 1e6:,.0f} -> {layer['peak'] / 1e6:,.0f} MB",
        ),
        "triton-server": (
            "whole servers with Triton",
            f"prefill at {figures('triton-server/kimi-k2.5')['patched']['time']:.3f} of stock's time",
        ),
        "peak-memory": (
            "memory of a forward",
            f"{kimi[0]:,.0f} -> {kimi[1]:,.0f} MB; NVFP4 {nvfp4[1] - nvfp4[0]:+,.0f} MB",
        ),
        "serving": (
            "tokens per second with a KV cache that grew in its start, default chunk",
            f"Qwen3-30B, whole: {served['stock']['tokens']:,} -> {served['grown']['tokens']:,} KV tokens",
        ),
        "serving-recipes": (
            "the same with a published `--mem-fraction-static`",
            f"DeepSeek-R1, whole: {recipe['stock']['tokens']:,} -> {recipe['grown']['tokens']:,} KV tokens",
        ),
        "penalties": (
            "what sampling with penalties holds",
            f"{sum(held.values()) / 1e6:,.0f} MB for 256 requests",
        ),
        "segments": ("what the allocator keeps", f"lowest free memory {free[0]:,.0f} -> {free[1]:,.0f} MB"),
        "soak": (
            "minutes of mixed load, flushes, weight updates",
            f"{soaked['patched']['answered']:,} answers in {minutes:.1f} minutes, {failed} errors",
        ),
        "engine-suite": (
            "SGLang's own tests",
            f"{sum(map(len, ran))} tests of {sum(map(bool, ran))} files, stock and patched alike",
        ),
        "weight-shuffle": ("preparing NVFP4 weights", f"{shuffled['speedup']:.1f}x as fast"),
        "cutedsl-memory": ("CuteDSL's buffers", f"{before:.1f} GB -> {after:.0f} MB (computed)"),
        "mori-rows": ("rows given to the kernel behind MoRI", f"{case['stock']:,} -> {case['bound']:,} (computed)"),
        "overhead": ("time that the changes add", f"{host[0]:.0f} to {host[1]:.0f} us of the host per eager layer"),
        "launcher-cost": ("what the launching process pays", f"{launch['patched'] - launch['stock']:+.0f} ms"),
        "residual-hole": (
            "wrong answers of the engine's own buffer",
            f"stock {hole['stock']}, patched {hole['patched']}",
        ),
        "regress": ("`regress` on GPUs", f"answers that differ: {figures('regress/tiny-h200')['rows'][0][2]}"),
    }
    rows = [(f"[{page}]({page}.md)", *cells) for page, cells in headlines.items()]
    return "\n" + output.table(("page", "what", "headline"), rows, left=3)
