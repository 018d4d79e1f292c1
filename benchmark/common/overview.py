"""Make the README's table of servers, and the summary page's charts and tables, from stored results.

The servers of the table are first starts of one commit (``benchmark/memory/first_starts.py``). A result of another
commit is an error: two commits may size a KV cache differently. While no first starts are stored, the README has the
older table of :mod:`common.headlines`, and charts of first starts are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memory.first_starts import H100_FRACTION, H100_FREE_MIB, ROWS
from whole import peak_memory, room

from common import headlines, output
from common.charts import Bar, Group, Point, Stack, bar_chart, scatter_chart, stacked_chart
from common.growth import REHEARSAL
from common.output import Result

Load = Callable[[str], Result]
Server = Mapping[str, Any]

FOLDER = "first-starts"
"""Folder of ``benchmark/results`` with the results of the servers in README's table."""
CHART_ROWS = ("qwen3-30b-h100-memory", "gpt-oss-120b-h100-memory", "qwen3-30b", "gpt-oss-120b", "qwen3-next-80b")
"""Servers of README's chart, by the names of their results."""
README_GPU = "1 x H200"
"""GPU of all servers of README's table. It is in the table's header, not in each row."""
SWEPT_ROW = "qwen3-30b-h100-memory"
"""Row whose servers also ran loads with other numbers of concurrent requests. A chart shows their throughput."""
ROOM = ("room/0.5.12.post1", "room/0.5.17")
"""Results with the predictions of ``doctor`` about measured servers."""
SERIES = ("stock", "patched")
MB = 1e6
NO_START = "does not start"
PHASE_SECONDS = re.compile(r"(?:^|, )(?P<phase>[^,:]+) (?P<seconds>\d+\.\d) s")
PHASES = {
    "prefill": re.compile(r"prefill|prompts$|one prefix"),
    "prompts of many lengths": re.compile(r"many lengths"),
    "decode with penalties": re.compile(r"penalties"),
    "other decode": re.compile(r"decode"),
    "other": re.compile(""),
}
"""Kinds of rehearsal phases. Key: the kind. Value: a pattern for the names of its phases. If several patterns match a
name, the first one decides."""


class MixedCommits(ValueError):
    """Error: the results for one table were measured on several commits."""


# --- First starts ----------------------------------------------------------------------------------------------------


def stored_rows() -> list[str]:
    """Return the names of those rows of the README's table whose results are stored."""
    return [name for name in ROWS if (output.RESULTS / FOLDER / f"{name}.json").exists()]


def first_starts(load: Load) -> dict[str, Result]:
    """Load the results of the servers in the README's table, by row.

    :raises MixedCommits: the results name no commit, or several.
    """
    results = {name: load(f"{FOLDER}/{name}") for name in stored_rows()}
    commits = {result["conditions"].get("commit") for result in results.values()}
    if len(commits) != 1 or None in commits:
        named = ", ".join(f"{name}: {result['conditions'].get('commit')}" for name, result in results.items())
        raise MixedCommits(f"the servers of README's table must be of one commit: {named or 'no result'}")
    return results


def list_conditions(results: Mapping[str, Result], key: str) -> str:
    """List the different values of a condition, such as ``engine`` or ``date``, of some results."""
    return " and ".join(sorted({result["conditions"][key] for result in results.values()}))


def servers_of(result: Result) -> tuple[Server | None, Server | None]:
    """Return the figures of a row's stock server and of its patched server; ``None``: the server did not start."""
    servers = result["figures"]["servers"]
    return servers.get("stock"), servers.get("grown")


def label(name: str) -> str:
    """Name the server of a row. If only a part of the model ran, name this part, too."""
    row = ROWS[name]
    return row.server if row.as_run == "whole" else f"{row.server}, {row.as_run}"


def ratio(stock: Server | None, patched: Server | None, key: str) -> float | None:
    """Divide the patched server's figure by the stock server's; ``None``: one of the servers did not start."""
    return patched[key] / stock[key] if stock and patched else None


def overflows(figures: Mapping[str, Any], stock: Server | None) -> bool:
    """Return whether all requests of the load together need more tokens than the stock server's KV cache has."""
    tokens = sum(figures["input"]) // 2 + figures["output"]
    return stock is None or bool(figures["prompts"] * tokens > stock["tokens"])


def table(load: Load) -> str:
    """Make the README's table: KV cache size and throughput of the servers in ``CHART_ROWS``, stock and patched."""
    results = first_starts(load)
    rows = [(readme_label(name), *compare_servers(results[name])) for name in CHART_ROWS if name in results]
    note = (
        f"{BOLD} *An H100's free memory*: another process leaves {H100_FREE_MIB:,} MiB free. *One rank of TP=4*: one "
        "GPU runs its share of `--tp 4`."
    )
    return f"\n{output.table((f'server, {README_GPU}', *FIGURES), rows, left=4)}\n{note}\n"


def readme_label(name: str) -> str:
    """Name the server of a row without the GPU, which is the same in all rows of README's table."""
    return label(name).replace(f", {README_GPU}", "")


def make_readme_settings(load: Load) -> str:
    """Make README's paragraph about the servers of its table; "" while no first start is stored."""
    if not has_first_starts():
        return ""
    paragraph = (
        f"Each server ran once, with SGLang {list_conditions(first_starts(load), 'engine')}, random weights and Triton "
        "attention (not FA3, SGLang's default on Hopper). 200 requests (gpt-oss: 100) were sent at once. The two "
        "servers with an H100's free memory have "
        f"`--mem-fraction-static {H100_FRACTION}`, SGLang's own value on an H100. Because they have this argument, "
        "they run with `SGLANG_MOE_PATCHES_KV_SIZING=always`. [More settings](docs/benchmarks/README.md#settings)."
    )
    return f"\n{output.wrap_text(paragraph)}\n"


FIGURES = ("KV tokens", "tokens/s", "ms per token")
BOLD = "**Bold**: faster, because the load does not fit stock's KV cache."
"""Explanation of the bold cells of throughput, for the notes of tables."""


def compare_servers(result: Result) -> tuple[str, str, str]:
    """Make the cells of a row: KV tokens, tokens per second and milliseconds per token, each stock and patched."""
    stock, patched = servers_of(result)
    speedup = ratio(stock, patched, "total_throughput")
    is_faster = overflows(result["figures"], stock) and (speedup is None or speedup > 1.01)
    return (
        format_pair(stock, patched, "tokens", ","),
        format_pair(stock, patched, "total_throughput", ",.0f", gains=is_faster),
        format_pair(stock, patched, "median_tpot_ms", ".0f"),
    )


def format_pair(stock: Server | None, patched: Server | None, key: str, form: str, gains: bool = False) -> str:
    """Format a figure of both servers as a cell of a table.

    :param gains: whether the patched figure is bold.
    """
    before, after = (f"{server[key]:{form}}" if server else NO_START for server in (stock, patched))
    if key != "tokens" and not stock:
        before = "-"
    if key != "tokens" and not patched:
        return before
    return f"{before} -> **{after}**" if gains else f"{before} -> {after}"


def make_launched(load: Load) -> str:
    """Make the README's table from first starts, or else from older results."""
    return table(load) if has_first_starts() else headlines.launched(load)


def make_older_table(load: Load) -> str:
    """Make the section about the older table, on the page of earlier measurements. The section contains the table only
    if README has first starts. Otherwise README has the table.
    """
    if not has_first_starts():
        return "\nREADME's first table takes two servers of each run:\n"
    return f"\nUp to version 0.4 README's first table had these servers:\n\n{headlines.launched_table(load)}"


def kv_cache_chart(load: Load, names: tuple[str, ...] = CHART_ROWS) -> str:
    """Draw the KV cache size of servers in their first start, relative to the stock server's.

    :param names: rows of the servers. Rows without a result are left out.
    """
    results, groups = first_starts(load), []
    for name in (name for name in names if name in results):
        stock, patched = servers_of(results[name])
        times = ratio(stock, patched, "tokens")
        bars = [
            Bar(1, f"{stock['tokens']:,} tokens") if stock else Bar(0, f"stock {NO_START}"),
            Bar(times or 1, f"{patched['tokens']:,} tokens{f' ({times:.2f}x)' if times else ''}")
            if patched
            else Bar(0, f"patched {NO_START}"),
        ]
        groups.append(Group(label(name), bars))
    note = "A bar's length is relative to stock's KV cache. Without a stock server, the length has no meaning."
    return bar_chart("KV cache size, stock and patched", SERIES, groups, note)


def kv_cache_table(load: Load) -> str:
    """Make the table behind the chart of all KV caches, with the sizes that were predicted before the runs."""
    rows = []
    for name, result in first_starts(load).items():
        stock, patched = servers_of(result)
        times, expected = ratio(stock, patched, "tokens"), ROWS[name].predicted_tokens[1]
        sizes = (f"{server['tokens']:,}" if server else NO_START for server in (stock, patched))
        predicted = f"{expected:,}" if expected else ""
        rows.append((ROWS[name].server, ROWS[name].as_run, *sizes, f"{times:.2f}" if times else "", predicted))
    header = ("server", "as run", "KV tokens, stock", "patched", "times stock's", "patched, predicted before the run")
    return output.table(header, rows, left=2)


# --- Concurrent requests ---------------------------------------------------------------------------------------------


class Throughput(NamedTuple):
    """Throughput of one server under one load."""

    tokens_per_s: float
    ms_per_token: float


def sweep_loads(load: Load) -> dict[int, list[Throughput]]:
    """Read the throughput of the servers of ``SWEPT_ROW``, stock and patched, by the number of concurrent requests."""
    figures = load(f"{FOLDER}/{SWEPT_ROW}")["figures"]
    by_server = []
    for server in map(figures["servers"].__getitem__, ("stock", "grown")):
        loads = [*server.get("sweep", []), {"prompts": figures["prompts"], **server}]
        by_server.append({row["prompts"]: Throughput(row["total_throughput"], row["median_tpot_ms"]) for row in loads})
    return {prompts: [loads[prompts] for loads in by_server] for prompts in sorted(by_server[0])}


def has_sweep() -> bool:
    """Return whether the result of ``SWEPT_ROW`` is stored, and both of its servers ran all loads."""
    if SWEPT_ROW not in stored_rows():
        return False
    servers = output.load(f"{FOLDER}/{SWEPT_ROW}")["figures"]["servers"]
    return all(servers.get(name, {}).get("sweep") for name in ("stock", "grown"))


def concurrency_chart(load: Load) -> str:
    """Draw the throughput of one server by the number of concurrent requests."""
    groups = []
    for prompts, (stock, patched) in sweep_loads(load).items():
        times = patched.tokens_per_s / stock.tokens_per_s
        bars = [
            Bar(stock.tokens_per_s, f"{stock.tokens_per_s:,.0f} tokens/s"),
            Bar(patched.tokens_per_s, f"{patched.tokens_per_s:,.0f} tokens/s ({times:.2f}x)"),
        ]
        groups.append(Group(f"{prompts} concurrent requests", bars))
    return bar_chart("Throughput by concurrent requests", SERIES, groups, f"{label(SWEPT_ROW)}.")


def concurrency_table(load: Load) -> str:
    """Make the table behind the chart of throughput."""
    rows = []
    for prompts, (stock, patched) in sweep_loads(load).items():
        rows.append(
            (
                str(prompts),
                *(f"{server.tokens_per_s:,.0f}" for server in (stock, patched)),
                f"{patched.tokens_per_s / stock.tokens_per_s:.2f}",
                *(f"{server.ms_per_token:.1f}" for server in (stock, patched)),
            )
        )
    header = ("requests", "tokens/s, stock", "patched", "times stock's", "ms per token, stock", "patched")
    return output.table(header, rows, left=0)


# --- Memory of a forward pass ----------------------------------------------------------------------------------------


class Saving(NamedTuple):
    """Memory of one model's forward pass, stock and with some changes.

    :param change: changes that are on, in words.
    :param model: the model, its weights and its MoE runner.
    :param predicted: memory with the changes as ``doctor`` predicts it; ``None``: it has no prediction.
    """

    change: str
    model: str
    stock: float
    patched: float
    predicted: float | None = None


def savings(load: Load) -> list[Saving]:
    """Read the memory that forward passes of 16,384 tokens need, by change."""

    def all_changes(model: str, name: str) -> Saving:
        result = load(name)
        stock, patched = (result["figures"]["memory"][server]["peak_forward_bytes"] for server in SERIES)
        return Saving("all changes", model, stock, patched, peak_memory.predict_result(result, "patched").peak)

    alone = load("triton-server/moe-workspace-eager")["figures"]
    nvfp4 = load("peak-memory/kimi-k2.5-tp4")["figures"]["memory"]
    segment_servers = load("segments/kimi-k2.5")["figures"]["servers"]
    return [
        Saving("moe-workspace", "Kimi-K2.5 in BF16, Triton", alone["stock"]["peak"], alone["patched"]["peak"]),
        *(
            all_changes(f"{model.partition(',')[0]} in {'FP8' if 'FP8' in model else 'BF16'}, Triton", name)
            for model, name in headlines.PEAKS.items()
        ),
        all_changes("Kimi-K2.5 in INT4, Marlin", "peak-memory/marlin-kimi-k2.5-shard8"),
        Saving(
            "output-buffer, deferred-shared-experts",
            "Kimi-K2.5 in NVFP4",
            *(nvfp4[server]["peak_forward_bytes"] for server in SERIES),
        ),
        Saving(
            "activation-segments",
            "unusable memory, Kimi-K2.5 in BF16",
            segment_servers["stock"]["slack"],
            segment_servers["stock-segments"]["slack"],
        ),
    ]


def prefill_chart(load: Load) -> str:
    """Draw the peak memory of one prefill of 16,384 tokens, by change."""
    groups = []
    for saving in savings(load):
        bars = [
            Bar(saving.stock / MB, f"{saving.stock / MB:,.0f} MB"),
            Bar(saving.patched / MB, f"{saving.patched / MB:,.0f} MB ({saving.patched / saving.stock:.2f}x)"),
        ]
        groups.append(Group(f"{saving.change}: {saving.model}", bars))
    note = (
        "Prefill of 16,384 tokens, H200, sizes of one rank of TP=4; INT4 of TP=8. Unusable memory: what PyTorch's "
        "allocator keeps in addition to tensors, under mixed load."
    )
    return bar_chart("Peak memory of a forward pass, by change", SERIES, groups, note)


def prefill_table(load: Load) -> str:
    """Make the table behind the chart of forward passes."""
    rows = []
    for saving in savings(load):
        predicted = "" if saving.predicted is None else f"{saving.predicted / MB:,.0f}"
        measured = (f"{size / MB:,.0f}" for size in (saving.stock, saving.patched))
        rows.append((saving.change, saving.model, *measured, f"{saving.patched / saving.stock:.2f}", predicted))
    header = ("changes", "model", "MB, stock", "patched", "times stock's", "patched, predicted")
    return output.table(header, rows, left=2)


# --- Predictions of doctor -------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Memory need of one measured server: predicted by ``doctor`` and measured, in bytes."""

    model: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the predicted need."""
        return self.predicted / self.measured - 1


def comparisons(load: Load) -> list[Comparison]:
    """Compare the predicted with the measured need of each server that measured its need."""
    found = []
    for result in map(load, ROOM):
        for answer, served, server in room.pair_servers(result):
            predicted = room.compare(answer, server)[0]["need"]["total"]
            found.append(Comparison(served["figures"]["model"], predicted, server["growth"]["need_bytes"]))
    return found


def prediction_chart(load: Load) -> str:
    """Draw a point for each measured server: the measured need, and the need that ``doctor`` predicts."""
    points = [Point(one.measured / MB, one.predicted / MB) for one in comparisons(load)]
    title = "Memory need: predicted by doctor, and measured"
    return scatter_chart(title, ("measured, MB", "predicted, MB"), points, 5_000, room.NEED_ERROR)


def prediction_table(load: Load) -> str:
    """Make the table behind the chart of predictions, with a row for each model."""
    by_model: dict[str, list[Comparison]] = {}
    for one in comparisons(load):
        by_model.setdefault(one.model, []).append(one)
    rows = []
    for model, ones in sorted(by_model.items()):
        worst = max(ones, key=lambda one: abs(one.error))
        within = sum(abs(one.error) <= room.NEED_ERROR for one in ones)
        needs = (f"{need / MB:,.0f}" for need in (worst.predicted, worst.measured))
        rows.append((model, str(len(ones)), str(within), *needs, f"{100 * worst.error:+.0f} %"))
    share = f"{100 * room.NEED_ERROR:.0f} %"
    header = ("model", "servers", f"within {share}", "worst: predicted MB", "measured MB", "error")
    return output.table(header, rows, left=1)


# --- Rehearsals ------------------------------------------------------------------------------------------------------


def rehearsals(load: Load) -> dict[str, dict[str, float]]:
    """Read the seconds of each row's rehearsal by kind of phase. Rows without a rehearsal are left out."""
    found = {}
    for name, result in first_starts(load).items():
        patched = servers_of(result)[1]
        kinds = dict.fromkeys(PHASES, 0.0)
        for phase, seconds in phase_seconds(patched["said"] if patched else []).items():
            kinds[next(kind for kind, pattern in PHASES.items() if pattern.search(phase))] += seconds
        if any(kinds.values()):
            found[name] = kinds
    return found


def phase_seconds(lines: list[str]) -> dict[str, float]:
    """Read the seconds of each phase from the log lines of kv-sizing; empty if there was no rehearsal."""
    line = next(filter(REHEARSAL.search, lines), "")
    phases = PHASE_SECONDS.finditer(line.partition(": ")[2].partition(";")[0])
    return {match["phase"]: float(match["seconds"]) for match in phases}


def rehearsal_kinds(load: Load) -> list[str]:
    """Return the kinds of phases that took time in any rehearsal."""
    found = rehearsals(load).values()
    return [kind for kind in PHASES if any(seconds[kind] for seconds in found)]


def rehearsal_chart(load: Load) -> str:
    """Draw the seconds of each rehearsal by kind of phase."""
    kinds = rehearsal_kinds(load)
    stacks = [
        Stack(label(name), [seconds[kind] for kind in kinds], f"{sum(seconds.values()):.0f} s")
        for name, seconds in rehearsals(load).items()
    ]
    note = "The first server of each model compiles its kernels, mostly in the prefills."
    return stacked_chart("Seconds of a rehearsal, by phase", kinds, stacks, note)


def rehearsal_table(load: Load) -> str:
    """Make the table behind the chart of rehearsals."""
    kinds = rehearsal_kinds(load)[:4]  # the table has six columns
    rows = [
        (label(name), *(f"{seconds[kind]:.1f}" for kind in kinds), f"{sum(seconds.values()):.0f}")
        for name, seconds in rehearsals(load).items()
    ]
    return output.table(("server", *(f"{kind}, s" for kind in kinds), "all, s"), rows)


# --- The summary page ------------------------------------------------------------------------------------------------


class Chart(NamedTuple):
    """Chart of the summary page.

    :param heading: heading above the chart.
    :param text: paragraph above the chart.
    :param draw: function that makes the SVG.
    :param table: function that makes the table below the chart.
    :param page: name and link of the page with more figures.
    :param is_stored: function that returns whether the results exist.
    """

    heading: str
    text: str
    draw: Callable[[Load], str]
    table: Callable[[Load], str]
    page: str
    is_stored: Callable[[], bool] = lambda: True


def has_first_starts() -> bool:
    """Return whether a first start is stored."""
    return bool(stored_rows())


README_CHART = "kv-cache-by-server.svg"
CHARTS = {
    "kv-cache-of-all-servers.svg": Chart(
        "KV cache by server",
        "The patched server measures its forward passes, and gives the rest of the memory to the KV cache.",
        lambda load: kv_cache_chart(load, tuple(ROWS)),
        kv_cache_table,
        "[settings of these servers](#settings), and [other servers](serving.md)",
        has_first_starts,
    ),
    "throughput-by-requests.svg": Chart(
        "Throughput by concurrent requests",
        "With a larger KV cache the server is faster as soon as the requests together need more KV tokens than stock "
        "has.",
        concurrency_chart,
        concurrency_table,
        "[settings of this server](#settings), and [other servers](serving.md)",
        has_sweep,
    ),
    "forward-pass-by-change.svg": Chart(
        "Memory of a forward pass by change",
        "A forward pass needs less memory inside MoE layers. The saved memory stays free, or goes to the KV cache. "
        "Here *moe-workspace* cuts an expert output into as many slices as save memory. By default it cuts fewer "
        "slices, and saves less.",
        prefill_chart,
        prefill_table,
        "[peak-memory](peak-memory.md), [moe-workspace](moe-workspace.md), [segments](segments.md)",
    ),
    "need-predicted-and-measured.svg": Chart(
        "Need: predicted and measured",
        "The *need* is the memory of forward passes and CUDA graphs, in addition to weights and KV cache. `doctor "
        "--model` predicts it without a GPU. Each point is a server that measured its need.",
        prediction_chart,
        prediction_table,
        "[models](../commands/models.md)",
    ),
    "rehearsal-by-phase.svg": Chart(
        "Seconds of a rehearsal by phase",
        "Before it is ready, the patched server sends itself the requests of its largest forward passes. This is its "
        "*rehearsal*. The first server of a model also compiles its kernels, which takes most of a long rehearsal.",
        rehearsal_chart,
        rehearsal_table,
        "[kv-sizing](kv-sizing.md)",
        lambda: has_first_starts() and bool(rehearsals(output.load)),
    ),
}
"""Charts of the summary page by the names of their images, in the page's order."""


def drawings() -> dict[str, Callable[[Load], str]]:
    """Return the functions that draw the charts whose results are stored, by the names of the images."""
    found = {name: chart.draw for name, chart in CHARTS.items() if chart.is_stored()}
    return ({README_CHART: kv_cache_chart} if has_first_starts() else {}) | found


def make_readme_chart(load: Load) -> str:
    """Make the line of the README that shows its chart; "" while no first start is stored."""
    if not has_first_starts():
        return ""
    return f"\n![KV cache, stock and patched](docs/images/{README_CHART})\n"


def make_charts(load: Load) -> str:
    """Make the summary page's sections of charts. Each chart has its table below it, folded."""
    sections = []
    for image, chart in CHARTS.items():
        if not chart.is_stored():
            continue
        sections.append(
            f"\n## {chart.heading}\n\n{output.wrap_text(chart.text)}\n\n![{chart.heading}](../images/{image})\n\n"
            f"<details><summary>The figures of this chart</summary>\n\n{chart.table(load)}\n</details>\n\n"
            f"More: {chart.page}.\n"
        )
    return "".join(sections)


def make_gains(load: Load) -> str:
    """Make the summary page's first table: the servers of all rows, stock and patched."""
    if not has_first_starts():
        return f"\n{headlines.launched_table(load)}\n{describe_origin(load)}\n"
    rows = [
        (ROWS[name].server, ROWS[name].as_run, *compare_servers(result)) for name, result in first_starts(load).items()
    ]
    return (
        f"\n{output.table(('server', 'as run', *FIGURES), rows, left=5)}\n{output.wrap_text(describe_origin(load))}\n"
    )


def make_index(load: Load) -> str:
    """Make the index of the benchmark pages. The first row shows ``SWEPT_ROW`` if its result is stored, and else an
    older result.
    """
    if has_sweep():
        page = "README#kv-cache-by-server"
        return headlines.index(load, f"{FOLDER}/{SWEPT_ROW}", "an H200 with an H100's free memory", page)
    return headlines.index(load)


def describe_origin(load: Load) -> str:
    """Name the releases, the commit and the date of the servers in the summary page's first table."""
    if not has_first_starts():
        return "These servers ran with [several commits](earlier-measurements.md#five-servers-of-several-commits)."
    results = first_starts(load)
    commit = list_conditions(results, "commit")[:12]
    line = (
        f"Stock -> patched. {BOLD} SGLang {list_conditions(results, 'engine')}, commit `{commit}` of this package, "
        f"{list_conditions(results, 'date')}. Data: [{FOLDER}](../../benchmark/results/{FOLDER})."
    )
    if "deepseek-r1-recipe" in results:
        line += (
            " DeepSeek-R1's published recipe has `--mem-fraction-static 0.82`, a chunk of 32,768 tokens, "
            "`--max-running-requests 512` and PyTorch's sampling."
        )
    if any("h100" in name for name in results):
        line += (
            f" *With an H100's free memory*: another process leaves {H100_FREE_MIB:,} MiB of an H200 free. The command "
            f"has `--mem-fraction-static {H100_FRACTION}`, SGLang's own value on an H100."
        )
    return line
