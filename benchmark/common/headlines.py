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


def peaks(result: Result) -> tuple[float, float]:
    """MB of one forward, stock and patched."""
    stock, patched = (result["figures"]["memory"][name]["peak_forward_bytes"] / 1e6 for name in ("stock", "patched"))
    return stock, patched


def shuffled(result: Result) -> dict[str, Any]:
    """Kimi-K2.5's layer at TP=4."""
    cases = result["figures"]["cases"]
    return next(case for case in cases if (case["model"], case["shard"]) == ("kimi-k2.5", "tp4"))


def buffers(result: Result) -> tuple[float, float]:
    """GB of CuteDSL's buffers of Kimi-K2.5 at TP=4, stock and ours."""
    row = next(r for r in result["figures"]["rows"] if (r["model"], r["tp"], r["dp"]) == ("kimi-k2.5", 4, 1))
    return row["stock"]["total"] * row["moe_layers"] / 1e9, row["ours"]["total"] / 1e9


def launched(load: Load) -> str:
    """The README's first table: servers that people launch, stock and patched; the engine's own settings first."""
    rows = []
    for chunk, name in (("default chunk, 8,192", "kimi-k2.5-8192"), ("`--chunked-prefill-size 16384`", "kimi-k2.5")):
        servers = load(f"serving/{name}")["figures"]["servers"]
        stock, sized = servers["stock"], servers["sized"]
        rows.append(
            (
                f"Kimi-K2.5's widths in BF16, 14 layers, {chunk}; 200 requests at once",
                "`SGLANG_MOE_PATCHES_KV_SIZING=auto`, second start",
                f"{stock['tokens']:,} -> **{sized['tokens']:,}** KV tokens",
                f"{stock['total_throughput']:,.0f} -> **{sized['total_throughput']:,.0f}** tokens/s",
                f"{stock['median_tpot_ms']:.1f} -> {sized['median_tpot_ms']:.1f} ms per token with "
                f"{stock['concurrency']:.0f} -> {sized['concurrency']:.0f} requests running, first token after "
                f"{stock['median_ttft_ms'] / 1e3:.1f} -> {sized['median_ttft_ms'] / 1e3:.1f} s",
            )
        )
    recipe = load("triton-server/deepseek-v3-fp8-shard8-32768")["figures"]
    stock, patched = recipe["stock"], recipe["patched"]
    rows.append(
        (
            "DeepSeek-R1 in FP8, sizes of TP=8, 4 layers, chunk of 32,768 as in its published H200 recipe",
            "nothing",
            f"{stock['peak'] / 1e6:,.0f} -> **{patched['peak'] / 1e6:,.0f}** MB for a prefill",
            "",
            f"{stock['ms']:.1f} -> {patched['ms']:.1f} ms for a prefill",
        )
    )
    header = ("server, one H200, random weights", "what to set", "memory", "throughput", "latency")
    now = load("serving/kimi-k2.5-8192-more-sampling")["figures"]["servers"]["sized"]
    note = (
        "Since the first row was measured, a rehearsal also drives `min_p` and repetition penalties: the same server "
        f"has {now['tokens']:,} KV tokens now."
    )
    return "\n" + output.table(header, rows, left=5) + f"\n{note}\n"


def second_start(load: Load) -> str:
    """What a server said at its second start, in today's words: it was measured when "the rule's" was among them."""
    said = load("serving/kimi-k2.5-8192")["figures"]["servers"]["sized"]["said"][0].replace("the rule's ", "")
    return f"""
```
sglang-moe-patches: kv-sizing: {said}
```
"""


def index(load: Load) -> str:
    """A line for each page of benchmarks."""
    kimi = peaks(load(PEAKS["Kimi-K2.5"]))
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
    served = [
        load("serving/kimi-k2.5-8192")["figures"]["servers"][name]["total_throughput"] for name in ("stock", "sized")
    ]
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
        (
            "serving",
            "tokens per second with a measured reserve, default chunk",
            f"{served[0]:,.0f} -> {served[1]:,.0f} tokens/s",
        ),
        ("kv-plans", "KV cache of more models, by a measured reserve", "rows of a command that was removed"),
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
