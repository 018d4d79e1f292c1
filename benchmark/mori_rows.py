"""Rows that the MoE kernel computes over rows received behind MoRI: stock, with a limit, and with the provable bound.

    python benchmark/mori_rows.py --json rows.json --markdown rows.md --plot rows.svg   # the whole grid, no GPU
    python benchmark/mori_rows.py --eps 8 --batches 1,32                                # a part of it
    python benchmark/mori_rows.py --gpu --gpu-json gpu.json --gpu-plot gpu.svg          # and a kernel's time by rows

Each case routes random tokens and moves them between simulated ranks with the reference dispatcher's rules (a row goes
to a rank once, however many of its experts are there); what a rank receives is counted, not estimated. "balanced" draws
experts uniformly, "skewed" with Zipf weights (exponent 1), which gathers tokens on few ranks; figures are those of the
busiest rank. The limit is a server's that was set for decode batches up to ``--limit-batch`` tokens on each rank, as
the engine applies it: on a larger batch it loses rows.

``--gpu`` times SGLang's Triton ``fused_experts`` on the GPU at hand against its number of input rows. It illustrates
why the row count matters; it is not AITER, and not a measurement of an AMD GPU. (AITER skips the rows that were not
received inside its kernel, after choosing the kernel for all of them; this one computes every row that it is given.)
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang_moe_patches.changes.mori_input_truncation.bound import Layout, decide_rows, max_received_rows

EPS = (8, 16, 32)
BATCHES = (1, 8, 32, 128, 512, 2048, 4096)
#: MoRI's default receive buffer, for each rank that sends.
BUFFER_PER_RANK = 4096
TOP_K = 8
EXPERTS = 256
ROUTINGS = ("balanced", "skewed")
MODES = ("stock", "limit", "bound")


@dataclass(frozen=True)
class Case:
    """One rank's forward: ``received`` rows arrive on the busiest rank, the kernel is given so many in each mode."""

    ep: int
    batch: int
    routing: str
    received: int
    stock: int
    limit: int
    bound: int

    @property
    def lost(self) -> int:
        """Rows that the engine's limit drops."""
        return max(0, self.received - self.limit)

    def ratio(self, mode: str) -> float:
        return getattr(self, mode) / self.received


def received_on_busiest_rank(ep: int, batch: int, routing: str, generator: torch.Generator) -> int:
    """Route ``ep * batch`` tokens to ``TOP_K`` distinct experts each, and count the rows that each rank gets."""
    favour = torch.ones(EXPERTS) if routing == "balanced" else 1.0 / torch.arange(1, EXPERTS + 1)
    tokens = ep * batch
    arrived = torch.zeros(ep, dtype=torch.long)
    for start in range(0, tokens, 16_384):
        n = min(16_384, tokens - start)
        ids = torch.multinomial(favour.expand(n, -1), TOP_K, generator=generator)
        there = torch.zeros(n, ep, dtype=torch.bool).scatter_(1, ids // (EXPERTS // ep), True)
        arrived += there.sum(dim=0)
    return int(arrived.max())


def measure(eps: tuple[int, ...], batches: tuple[int, ...], limit_batch: int, seed: int = 0) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for ep in eps:
        buffer_rows = ep * BUFFER_PER_RANK
        limit = ep * limit_batch
        for routing in ROUTINGS:
            for batch in batches:
                bound = max_received_rows(batch, [batch] * ep, Layout(ranks=ep), buffer_rows)
                received = received_on_busiest_rank(ep, batch, routing, generator)
                assert bound is not None
                assert received <= bound
                cases.append(
                    Case(
                        ep,
                        batch,
                        routing,
                        received,
                        stock=buffer_rows,
                        limit=min(limit, buffer_rows),
                        bound=decide_rows(bound, 0, buffer_rows, recv_bound=True).rows,
                    )
                )
    return cases


def markdown(cases: list[Case]) -> str:
    limits = ", ".join(f"{rows:,} rows for EP={ep}" for ep, rows in sorted({(c.ep, c.limit) for c in cases}))
    lines = [
        f"Rows given to the kernel, and their ratio to the rows received on the busiest rank; {EXPERTS} experts, "
        f"top-{TOP_K}, {BUFFER_PER_RANK:,} buffer rows for each rank. The limit: {limits}.",
        "",
        "| EP | tokens per rank | routing | received | stock | limit | bound | stock | limit | bound |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for c in cases:
        counts = " | ".join(f"{n:,}" for n in (c.received, c.stock, c.limit, c.bound))
        shown = {mode: f"{c.ratio(mode):,.2f}x" for mode in MODES}
        if c.lost:
            shown["limit"] = f"**loses {c.lost:,}**"
        lines.append(f"| {c.ep} | {c.batch} | {c.routing} | {counts} | {' | '.join(shown.values())} |")
    return "\n".join(lines) + "\n"


def plot(cases: list[Case], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    eps = sorted({case.ep for case in cases})
    figure, axes = pyplot.subplots(1, len(eps), figsize=(4.2 * len(eps), 3.6), sharey=True, squeeze=False)
    colours = {"stock": "tab:red", "limit": "tab:orange", "bound": "tab:green"}
    for axis, ep in zip(axes[0], eps, strict=True):
        for routing, style in zip(ROUTINGS, ("-", "--"), strict=True):
            mine = [c for c in cases if c.ep == ep and c.routing == routing]
            for mode in MODES:
                x, y = [c.batch for c in mine], [c.ratio(mode) for c in mine]
                axis.plot(x, y, style, color=colours[mode], marker="o", markersize=3, label=f"{mode}, {routing}")
        axis.axhspan(0.01, 1, color="grey", alpha=0.2)
        axis.text(1, 0.5, "rows are lost", fontsize=7, va="top")
        axis.set(yscale="log", ylim=(0.01, 3e4), title=f"EP={ep}", xlabel="tokens per rank")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("rows given to the kernel / rows received")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


# --- A fused MoE kernel's time against its rows, on the GPU at hand --------------------------------------------------


def time_kernel(rows: tuple[int, ...], hidden: int = 7168, intermediate: int = 2048) -> dict[str, Any]:
    """Median time of SGLang's Triton ``fused_experts`` on one of eight ranks, for each number of input rows."""
    from sglang.srt.layers.moe import MoeRunnerConfig
    from sglang.srt.layers.moe.fused_moe_triton import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    # The two settings that the kernel reads.
    settings = SimpleNamespace(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
    set_global_server_args_for_scheduler(settings)
    experts = EXPERTS // 8
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    w1 = torch.randn(experts, 2 * intermediate, hidden, **options) * 0.02
    w2 = torch.randn(experts, hidden, intermediate, **options) * 0.02
    config = MoeRunnerConfig(num_experts=experts, num_local_experts=experts, top_k=TOP_K, inplace=False)
    times = []
    for n in rows:
        x = torch.randn(n, hidden, **options)
        ids = torch.rand(n, experts, device="cuda").topk(TOP_K, dim=1).indices.to(torch.int32)
        weights = torch.full((n, TOP_K), 1 / TOP_K, device="cuda")
        routed = StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=None)
        times.append(median_milliseconds(lambda x=x, routed=routed: fused_experts(x, w1, w2, routed, config)))
    return {
        "what": "SGLang's Triton fused_experts, bf16: an illustration on this GPU, not AITER and not an AMD GPU",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "experts": experts,
        "hidden": hidden,
        "intermediate": intermediate,
        "top_k": TOP_K,
        "rows": list(rows),
        "milliseconds": times,
    }


def median_milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end))
    return statistics.median(samples)


def gpu_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"{result['what']} ({result['gpu']}; {result['experts']} local experts, hidden {result['hidden']}, "
        f"intermediate {result['intermediate']}, top-{result['top_k']}).",
        "",
        "| input rows | ms | against the fewest rows |",
        "| ---: | ---: | ---: |",
    ]
    for rows, ms in zip(result["rows"], result["milliseconds"], strict=True):
        lines.append(f"| {rows:,} | {ms:.3f} | {ms / result['milliseconds'][0]:.1f}x |")
    return "\n".join(lines) + "\n"


def gpu_plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 3.6))
    axis.plot(result["rows"], result["milliseconds"], marker="o")
    axis.set(xscale="log", yscale="log", xlabel="input rows", ylabel="ms", title=f"Triton fused MoE, {result['gpu']}")
    axis.text(0.02, 0.95, "illustration: not AITER, not AMD", transform=axis.transAxes, fontsize=8, va="top")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=numbers, default=EPS, help="expert-parallel sizes")
    parser.add_argument("--batches", type=numbers, default=BATCHES, help="tokens on each rank")
    parser.add_argument("--limit-batch", type=int, default=128, help="tokens on each rank that the limit was set for")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--gpu", action="store_true", help="also time a fused MoE kernel against its row count")
    parser.add_argument("--gpu-rows", type=numbers, default=(256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768))
    parser.add_argument("--gpu-json", type=Path)
    parser.add_argument("--gpu-markdown", type=Path)
    parser.add_argument("--gpu-plot", type=Path)
    arguments = parser.parse_args()
    cases = measure(arguments.eps, arguments.batches, arguments.limit_batch)
    print(markdown(cases))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(cases))
    if arguments.plot:
        plot(cases, arguments.plot)
    if arguments.gpu:
        if not torch.cuda.is_available():
            raise SystemExit("--gpu: PyTorch sees no GPU here; leave it out")
        result = time_kernel(arguments.gpu_rows)
        print(gpu_markdown(result))
        if arguments.gpu_json:
            arguments.gpu_json.write_text(json.dumps(result, indent=1) + "\n")
        if arguments.gpu_markdown:
            arguments.gpu_markdown.write_text(gpu_markdown(result))
        if arguments.gpu_plot:
            gpu_plot(result, arguments.gpu_plot)


if __name__ == "__main__":
    main()
