"""Compare the rows that the MoE kernel computes with the rows that a rank receives from MoRI, in three modes.

    python benchmark changes/mori_rows --json rows.json --plot rows.svg            # the whole grid, no GPU
    python benchmark changes/mori_rows --eps 8 --batches 1,32                      # a part of it

- `stock`: the kernel computes all rows of the receive buffer.
- `limit`: the kernel computes a fixed number of rows, set for decode batches of up to 128 tokens on each rank. On a
  larger batch, the engine loses rows.
- `bound`: mori-input-truncation computes a provable bound for each batch.

Each case routes random tokens between simulated ranks by the rules of the reference dispatcher: a row goes to a rank
once, however many of its experts are there. Received rows are counted, not estimated. "balanced" draws experts
uniformly. "skewed" draws them with Zipf weights (exponent 1), so that few ranks receive most tokens. The figures are
those of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import output
from common.shapes import MODELS
from sglang_moe_patches.changes.mori_input_truncation import bound as rows_bound

EPS = (8, 16, 32)
BATCHES = (1, 8, 32, 128, 512, 2048, 4096)
BUFFER_PER_RANK = 4096
"""Rows that MoRI's receive buffer has by default for each sending rank."""
LIMIT_BATCH = 128
"""Tokens on each rank for which the mode ``limit`` is set. Batches of up to this many tokens per rank lose no rows."""
TOP_K, EXPERTS = MODELS["deepseek-v3"].top_k, MODELS["deepseek-v3"].experts
ROUTINGS = ("balanced", "skewed")
MODES = ("stock", "limit", "bound")


@dataclass(frozen=True)
class Case:
    """One forward pass, with the rows of the busiest rank: the rank that receives the most rows.

    :param ep: number of expert-parallel ranks.
    :param batch: tokens on each rank.
    :param received: rows that the busiest rank receives.
    :param stock: rows that the busiest rank's kernel computes in the mode ``stock``. ``limit`` and ``bound`` are the
        rows in the other two modes.
    """

    ep: int
    batch: int
    routing: str
    received: int
    stock: int
    limit: int
    bound: int

    @property
    def lost(self) -> int:
        """Number of received rows that the kernel does not compute in the mode ``limit``."""
        return max(0, self.received - self.limit)

    def ratio(self, mode: str) -> float:
        """Return the computed rows in a mode, divided by the received rows."""
        return getattr(self, mode) / self.received


def count_received_rows(ep: int, batch: int, routing: str, generator: torch.Generator) -> int:
    """Route ``ep * batch`` tokens to ``TOP_K`` distinct experts each, and count the rows of the busiest rank."""
    popularity = torch.ones(EXPERTS) if routing == "balanced" else 1.0 / torch.arange(1, EXPERTS + 1)
    tokens = ep * batch
    arrived = torch.zeros(ep, dtype=torch.long)
    for start in range(0, tokens, 16_384):
        n = min(16_384, tokens - start)
        ids = torch.multinomial(popularity.expand(n, -1), TOP_K, generator=generator)
        is_sent = torch.zeros(n, ep, dtype=torch.bool).scatter_(1, ids // (EXPERTS // ep), True)
        arrived += is_sent.sum(dim=0)
    return int(arrived.max())


def make_cases(eps: tuple[int, ...], batches: tuple[int, ...]) -> list[Case]:
    """Count the rows that the busiest rank receives and computes, for all sizes, batches and routings.

    :param eps: numbers of expert-parallel ranks.
    :param batches: numbers of tokens on each rank.
    """
    generator = torch.Generator().manual_seed(0)
    cases = []
    for ep in eps:
        buffer_rows, limit = ep * BUFFER_PER_RANK, ep * LIMIT_BATCH
        for routing in ROUTINGS:
            for batch in batches:
                bound = rows_bound.compute_max_received_rows(
                    batch, [batch] * ep, rows_bound.Layout(ranks=ep), buffer_rows
                )
                received = count_received_rows(ep, batch, routing, generator)
                assert bound is not None
                assert received <= bound
                computed = rows_bound.decide_rows(bound, 0, buffer_rows, recv_bound=True).rows
                cases.append(Case(ep, batch, routing, received, buffer_rows, min(limit, buffer_rows), computed))
    return cases


def make_tables(result: output.Result, eps: Sequence[int] = (), batches: Sequence[int] = ()) -> str:
    """Make a table of the received rows and of the rows that the kernel computes in each mode.

    :param eps: numbers of expert-parallel ranks to show; empty: all.
    :param batches: numbers of tokens on each rank to show; empty: all.
    """
    figures = result["figures"]
    rows = []
    for c in (Case(**case) for case in figures["cases"]):
        if (eps and c.ep not in eps) or (batches and c.batch not in batches):
            continue
        limit = f"**{c.limit:,}, loses {c.lost:,}**" if c.lost else f"{c.limit:,}"
        load = f"EP={c.ep}, {c.batch:,} tokens on each rank, {c.routing}"
        rows.append((load, f"{c.received:,}", f"{c.stock:,}", limit, f"{c.bound:,}"))
    return (
        f"Rows given to the kernel; {figures['experts']} experts, top-{figures['top_k']}, "
        f"{figures['buffer_rows_per_rank']:,} buffer rows for each rank; the limit for {figures['limit_batch']} tokens "
        "on each rank.\n\n" + output.table(("load", "received", *MODES), rows)
    )


def plot(result: output.Result, path: Path) -> None:
    """Draw the computed rows divided by the received rows, by tokens per rank."""
    pyplot = output.pyplot()
    cases = [Case(**case) for case in result["figures"]["cases"]]
    eps = sorted({case.ep for case in cases})
    figure, axes = pyplot.subplots(1, len(eps), figsize=(4.2 * len(eps), 3.6), sharey=True, squeeze=False)
    colours = {"stock": "tab:red", "limit": "tab:orange", "bound": "tab:green"}
    for axis, ep in zip(axes[0], eps, strict=True):
        for routing, style in zip(ROUTINGS, ("-", "--"), strict=True):
            chosen = [c for c in cases if c.ep == ep and c.routing == routing]
            for mode in MODES:
                x, y = [c.batch for c in chosen], [c.ratio(mode) for c in chosen]
                axis.plot(x, y, style, color=colours[mode], marker="o", markersize=3, label=f"{mode}, {routing}")
        axis.axhspan(0.01, 1, color="grey", alpha=0.2)
        axis.text(1, 0.5, "rows are lost", fontsize=7, va="top")
        axis.set(yscale="log", ylim=(0.01, 3e4), title=f"EP={ep}", xlabel="tokens per rank")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("rows given to the kernel / rows received")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    output.save(figure, path)


def main() -> None:
    quick = {"eps": (8,), "batches": (1, 32)}
    parser = output.parser(__doc__, quick=quick, plots=True)
    parser.add_argument("--eps", type=output.parse_numbers, default=EPS, help="numbers of expert-parallel ranks")
    parser.add_argument("--batches", type=output.parse_numbers, default=BATCHES, help="tokens on each rank")
    options = output.parse(parser)
    sizes = {"experts": EXPERTS, "top_k": TOP_K, "buffer_rows_per_rank": BUFFER_PER_RANK, "limit_batch": LIMIT_BATCH}
    figures = {**sizes, "cases": [asdict(case) for case in make_cases(options.eps, options.batches)]}
    output.finish(options, output.result("mori_rows", figures), make_tables, plot)
