"""Make the README's table of servers and the charts of the summary page from stored results.

The servers of the table are first starts of one commit (``benchmark/memory/first_starts.py``). A result of another
commit is an error: two commits may size a KV cache differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from memory.first_starts import ROWS

from common import headlines, output
from common.charts import Bar, Group, bar_chart
from common.growth import REHEARSAL
from common.output import Result

Load = Callable[[str], Result]

FOLDER = "first-starts"
"""Folder of ``benchmark/results`` with the results of the servers in README's table."""
CHART_ROWS = ("qwen3-30b-h100-memory", "gpt-oss-120b-h100-memory", "qwen3-30b", "gpt-oss-120b", "qwen3-next-80b")
"""Servers of README's chart, by the names of their results."""
SWEPT_ROW = "qwen3-30b-h100-memory"
"""Server whose throughput a chart shows by the number of concurrent requests."""
SERIES = ("stock", "patched")
MB = 1e6
PHASE_SECONDS = re.compile(r"(?:^|, )(?P<phase>[^,:]+) (?P<seconds>\d+\.\d) s")


class MixedCommits(ValueError):
    """Error: the results for one table were measured on several commits."""


def first_starts(load: Load) -> dict[str, Result]:
    """Load the results of the servers in the README's table, by row.

    :raises MixedCommits: the results name no commit, or several.
    """
    results = {name: load(f"{FOLDER}/{name}") for name in ROWS if (output.RESULTS / FOLDER / f"{name}.json").exists()}
    commits = {result["conditions"].get("commit") for result in results.values()}
    if len(commits) != 1 or None in commits:
        named = ", ".join(f"{name}: {result['conditions'].get('commit')}" for name, result in results.items())
        raise MixedCommits(f"the servers of README's table must be of one commit: {named or 'no result'}")
    return results


def servers_of(result: Result) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """Return the figures of a row's stock server and of its patched server. The stock figures are ``None`` if the stock
    server did not start.
    """
    servers = result["figures"]["servers"]
    return servers.get("stock"), servers["grown"]


def table(load: Load) -> str:
    """Make the README's table: KV cache size and throughput of each server, stock and patched."""
    rows = []
    for name, result in first_starts(load).items():
        row, (stock, patched) = ROWS[name], servers_of(result)
        rows.append(
            (
                row.server,
                row.as_run,
                f"{stock['tokens']:,}" if stock else "does not start",
                f"**{patched['tokens']:,}**",
                f"{stock['total_throughput']:,.0f}" if stock else "-",
                f"{patched['total_throughput']:,.0f}",
            )
        )
    header = ("server", "as run", "KV tokens, stock", "patched", "tokens/s, stock", "patched")
    return f"\n{output.table(header, rows, left=2)}\n"


def kv_cache_chart(load: Load) -> str:
    """Draw the KV cache size of servers in their first start, relative to the stock server's."""
    results, groups = first_starts(load), []
    for name in (name for name in CHART_ROWS if name in results):
        stock, patched = servers_of(results[name])
        tokens = patched["tokens"]
        if stock is None:
            bars = [Bar(0, "does not start"), Bar(1, f"{tokens:,} tokens")]
        else:
            ratio = tokens / stock["tokens"]
            bars = [Bar(1, f"{stock['tokens']:,} tokens"), Bar(ratio, f"{tokens:,} tokens ({ratio:.2f}x)")]
        groups.append(Group(label(name), bars))
    return bar_chart("KV cache of a first start", SERIES, groups, "A bar's length is relative to stock's KV cache.")


def label(name: str) -> str:
    """Name the server of a row. If only a part of the model ran, name this part, too."""
    row = ROWS[name]
    return row.server if row.as_run == "whole" else f"{row.server}, {row.as_run}"


def concurrency_chart(load: Load) -> str:
    """Draw the throughput of one server by the number of concurrent requests."""
    figures = load(f"{FOLDER}/{SWEPT_ROW}")["figures"]
    loads = {server: _throughputs(figures, figures["servers"][server]) for server in ("stock", "grown")}
    groups = [
        Group(
            f"{prompts} requests at once",
            [Bar(by_load[prompts], f"{by_load[prompts]:,.0f}") for by_load in loads.values()],
        )
        for prompts in sorted(loads["stock"])
    ]
    return bar_chart(f"Tokens per second: {ROWS[SWEPT_ROW].server}", SERIES, groups)


def _throughputs(figures: Mapping[str, Any], server: Mapping[str, Any]) -> dict[int, float]:
    """Read the tokens per second of a server, by the number of concurrent requests."""
    rows = [*server.get("sweep", []), {"prompts": figures["prompts"], "total_throughput": server["total_throughput"]}]
    return {row["prompts"]: row["total_throughput"] for row in rows}


def prefill_chart(load: Load) -> str:
    """Draw the peak memory of one prefill of 16,384 tokens, by model."""
    groups = []
    for model, name in headlines.PEAKS.items():
        memory = load(name)["figures"]["memory"]
        peaks = [memory[server]["peak_forward_bytes"] / MB for server in SERIES]
        groups.append(Group(f"{model}, one rank of TP=4", [Bar(peak, f"{peak:,.0f} MB") for peak in peaks]))
    return bar_chart("Peak memory of a prefill of 16,384 tokens", SERIES, groups)


def rehearsal_chart(load: Load) -> str:
    """Draw the seconds of a rehearsal and the name of its longest phase, by server."""
    groups = []
    for name, result in first_starts(load).items():
        seconds = phase_seconds(servers_of(result)[1]["said"])
        total = sum(seconds.values())
        longest = max(seconds, key=lambda phase: seconds[phase], default="")
        groups.append(Group(label(name), [Bar(total, f"{total:.0f} s; longest: {longest} {seconds[longest]:.0f} s")]))
    return bar_chart("Seconds of a rehearsal", ("all phases",), groups)


def phase_seconds(lines: list[str]) -> dict[str, float]:
    """Read the seconds of each phase from the log lines of kv-sizing; empty if there was no rehearsal."""
    line = next(filter(REHEARSAL.search, lines), "")
    phases = PHASE_SECONDS.finditer(line.partition(": ")[2].partition(";")[0])
    return {match["phase"]: float(match["seconds"]) for match in phases}
