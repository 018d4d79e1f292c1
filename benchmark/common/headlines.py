"""Make the README's older first table, and the index of the benchmark pages: questions with short answers."""

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
LAUNCHED = {
    "qwen3-30b-default": ("Qwen3-30B", "H100", 200),
    "qwen3-next-80b": ("Qwen3-Next-80B", "one of 4 ranks, H200", 200),
    "deepseek-r1-recipe": ("DeepSeek-R1", "one of 8 ranks, H200", 256),
    "gpt-oss-120b-30-layers": ("gpt-oss-120b", "30 of 36 layers, H100", 100),
    "kimi-k2.5-13-layers-h200": ("Kimi-K2.5", "one of 8 ranks, 13 of 61 layers, H200", 200),
}
"""Servers of the README's older first table. Key: name of the stored result. Value: model, part of the model that ran,
and number of concurrent requests.
"""


def launched_table(load: Load) -> str:
    """Make the README's older table: KV cache and throughput of servers, stock and patched, from several commits."""

    def cell(stock: float, patched: float, form: str, gains: bool = True) -> str:
        mark = "**" if gains else ""
        return f"{stock:{form}} -> {mark}{patched:{form}}{mark}"

    rows = []
    for name, (model, part, requests) in LAUNCHED.items():
        figures = load(f"serving/{name}")["figures"]
        stock, grown = figures["servers"]["stock"], figures["servers"]["grown"]
        # Bold only if the load does not fit the stock server's KV cache. The cause of other differences is unknown.
        asked_tokens = figures["prompts"] * (sum(figures["input"]) // 2 + figures["output"])
        gains = asked_tokens > stock["tokens"] and grown["total_throughput"] > 1.01 * stock["total_throughput"]
        rows.append(
            (
                model,
                part,
                str(requests),
                cell(stock["tokens"], grown["tokens"], ","),
                cell(stock["total_throughput"], grown["total_throughput"], ",.0f", gains),
                cell(stock["median_tpot_ms"], grown["median_tpot_ms"], ".0f", False),
            )
        )
    header = ("model", "run on", "requests", "KV tokens", "tokens/s", "ms per token")
    return output.table(header, rows, left=6)


def launched(load: Load) -> str:
    """Make the README's older table with its note."""
    note = (
        "Random weights, one run each. *One of 8 ranks*: one GPU's share of `--tp 8`. "
        "Bold tokens/s: the load overflowed stock's KV cache. Elsewhere tokens/s were 0.99 to 1.14 of stock's, for "
        "unknown reasons. Most of gpt-oss's tokens/s gain is from "
        "[fp4-weights](docs/changes/fp4-weights.md). DeepSeek-R1 has `--mem-fraction-static 0.82` and "
        "`SGLANG_MOE_PATCHES_KV_SIZING=always`. "
        "[How this was measured](docs/benchmarks/earlier-measurements.md#five-servers-of-several-commits)."
    )
    return f"\n{launched_table(load)}\n{note}\n"


def find(rows: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """Return the first row whose fields have the given values."""
    return next(row for row in rows if all(row[name] == value for name, value in values.items()))


def index(
    load: Load,
    served: str = "serving/qwen3-30b-default",
    memory: str = "one H100",
    served_page: str = "earlier-measurements",
) -> str:
    """Make a table with a row for each question that the benchmark pages answer.

    :param served: name of the result whose KV cache sizes the first row shows.
    :param memory: GPU or GPU memory of the servers of this result, in words.
    :param served_page: page with this result, and its anchor.
    """

    def figures(name: str) -> dict[str, Any]:
        return load(name)["figures"]

    def peaks(name: str) -> list[float]:
        """Return the peak memory of one forward pass in MB: stock, then patched."""
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
    whole = figures(served)["servers"]
    recipe = figures("serving/deepseek-r1-recipe")["servers"]
    held = figures("serving/qwen3-30b-penalties")["servers"]["stock"]["penalized"]["held"]
    penalized = sum(held.values()) / 1e6
    case = find(figures("mori-rows/rows")["cases"], ep=8, batch=32, routing="skewed")
    host = [figures(f"overhead/host-{name}")["added_us"] for name in ("h200", "triton-h200")]
    launch = figures("launcher-cost/cpu")["medians"]["load_plugins_ms"]
    hole = {name: differing for name, differing, _ in figures("residual-hole/h200")["rows"]}
    checks = "overheads-and-checks"
    tokens_of = "KV cache {:,} -> {:,} tokens".format
    rows = [
        (
            "How much larger is the KV cache, and what does it serve?",
            f"Qwen3-30B, {memory}: {tokens_of(whole['stock']['tokens'], whole['grown']['tokens'])}",
            served_page,
        ),
        (
            "The same with a published `--mem-fraction-static`?",
            f"DeepSeek-R1: {tokens_of(recipe['stock']['tokens'], recipe['grown']['tokens'])}",
            "serving-recipes",
        ),
        (
            "How much memory does a forward pass need?",
            f"Kimi-K2.5: {kimi[0]:,.0f} -> {kimi[1]:,.0f} MB in BF16, {nvfp4[1] - nvfp4[0]:+,.0f} MB in NVFP4",
            "peak-memory",
        ),
        (
            "How much memory does one MoE layer behind Triton or Marlin need?",
            f"Kimi-K2.5: {layer['stock_peak'] / 1e6:,.0f} -> {layer['peak'] / 1e6:,.0f} MB",
            "moe-workspace",
        ),
        (
            "Do whole servers get slower?",
            f"Kimi-K2.5's prefills take {figures('triton-server/kimi-k2.5')['patched']['time']:.3f} of stock's time",
            "triton-server",
        ),
        (
            "How much memory do expandable segments leave free?",
            f"Kimi-K2.5: at least {free[0]:,.0f} -> {free[1]:,.0f} MB, all other changes on",
            "segments",
        ),
        (
            "How much memory does sampling with penalties take?",
            f"{penalized:,.0f} MB for 256 requests (stock)",
            "penalties",
        ),
        (
            "Does a server survive mixed load, flushes and weight updates?",
            f"{soaked['patched']['answered']:,} answers in {minutes:.1f} minutes, {failed} errors",
            "soak",
        ),
        (
            "Do SGLang's own tests pass?",
            f"{sum(map(len, ran))} tests of {sum(map(bool, ran))} files, stock and patched alike",
            "engine-suite",
        ),
        ("How long do FP4 weights take to prepare?", f"{shuffled['speedup']:.1f}x as fast", "weight-shuffle"),
        (
            "How much memory do CuteDSL's buffers take?",
            f"{before:.1f} GB -> {after:.0f} MB (computed)",
            "cutedsl-memory",
        ),
        (
            "How much time do the changes add?",
            f"{host[0]:.0f} to {host[1]:.0f} us of the host per eager layer",
            f"{checks}#host-time",
        ),
        (
            "How much does the launching process pay?",
            f"{launch['patched'] - launch['stock']:+.0f} ms",
            f"{checks}#the-launcher",
        ),
        (
            "Does `regress` find differing answers?",
            figures("regress/tiny-h200")["rows"][0][2],
            f"{checks}#regress-on-gpus",
        ),
        (
            "How many answers does the engine's own output buffer change?",
            f"stock {hole['stock']}, patched {hole['patched']}",
            f"{checks}#the-engines-own-output-buffer",
        ),
        (
            "How many rows does the kernel behind MoRI get?",
            f"{case['stock']:,} -> {case['bound']:,} (computed)",
            f"{checks}#rows-behind-mori",
        ),
    ]
    linked = [(question, answer, f"[{name_of(page)}]({page_of(page)})") for question, answer, page in rows]
    return "\n" + output.table(("question", "answer, stock -> patched", "page"), linked, left=3)


def name_of(place: str) -> str:
    """Return the text of the link to a benchmark page. The link is in the index, which is on the page ``README``."""
    page = place.partition("#")[0]
    return "this page" if page == "README" else page


def page_of(place: str) -> str:
    """Return the target of the link to a benchmark page: the file name, with the anchor if ``place`` has one."""
    page, _, anchor = place.partition("#")
    return f"{page}.md#{anchor}" if anchor else f"{page}.md"
