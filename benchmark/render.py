"""Write the tables and plots of README and docs/ from the results in benchmark/results/.

    python benchmark/render.py            # write them
    python benchmark/render.py --check    # name the outdated files, and exit with 1 if there are any

Prose is on the pages themselves. Between the comments ``<!-- figures:NAME -->`` and ``<!-- /figures -->``, this script
writes the section NAME of ``SECTIONS``: the command, the conditions and the tables of one or several results. To add a
figure, add a result (``--json benchmark/results/BENCHMARK/NAME.json``), a line in ``SECTIONS``, and the two comments on
docs/benchmarks/BENCHMARK.md. To add a plot, add a line in ``PLOTS``. The charts of README and of the summary page are
in ``benchmark/common/overview.py``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from changes import cutedsl_memory, marlin_repack, mori_rows, overhead, weight_shuffle
from common import equality, headlines, machine, moe_tables, output, overview, verdicts
from memory import loading, scheduler_turn, segments, serving
from tiny_moe import mutations
from whole import engine_suite, launcher_cost, models, peak_memory, recipes, room, soak, triton_server

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
DATA = "../../benchmark/results"
"""Relative path to the results, from a page in docs/benchmarks."""
Load = Callable[[str], output.Result]
MARKED = re.compile(r"(?<=<!-- figures:)(\S+) -->\n.*?(?=<!-- /figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Section:
    """Generated part of a page. It has a text of its own (``make_text``), or the commands, conditions and tables of
    stored results.

    :param results: names of the files in ``benchmark/results/`` that ``tables`` takes. If ``make_text`` is set, only a
        test reads these names.
    :param tables: function that makes the tables from ``results``.
    :param make_text: function that makes the whole section, and loads the results that it needs; ``None``: the section
        has commands, conditions and ``tables``.
    """

    results: tuple[str, ...] = ()
    tables: Callable[[list[output.Result]], str] = lambda results: ""
    make_text: Callable[[Load], str] | None = None


def section_of_one(name: str, tables: Callable[[output.Result], str]) -> Section:
    """Make a section of a single result."""
    return Section((name,), lambda results: tables(results[0]))


def raw_table(result: output.Result) -> str:
    """Make the table of a result that stores the table's rows. It was typed in, or its script no longer exists."""
    figures = result["figures"]
    table = output.table(figures.get("header", ("", "stock", "patched")), figures["rows"], left=figures.get("left", 1))
    return table + (f"\n{figures['note']}\n" if figures.get("note") else "")


def full_names(benchmark: str, *names: str) -> tuple[str, ...]:
    """Return the full names ``BENCHMARK/NAME`` of several results of one benchmark."""
    return tuple(f"{benchmark}/{name}" for name in names)


PEAKS = full_names(
    "peak-memory",
    *("kimi-k2.5-tp4", "kimi-k2.5-tp4-symm-mem", "kimi-k2.5-tp4-0.5.11", "kimi-k2.5-tp2", "kimi-k2.5-tp2-symm-mem"),
    *("kimi-k2.5-tp1", "deepseek-v3-tp4", "deepseek-v3-tp1"),
)
TRITON_SERVERS = full_names(
    "triton-server",
    *("kimi-k2.5", "kimi-k2.5-fp8", "kimi-k2.5-graphs", "kimi-k2.5-graphs-0.5.17"),
    *("kimi-k2.5-tp4", "kimi-k2.5-0.5.17", "kimi-k2.5-fp8-0.5.17"),
    *("glm-4.5", "glm-4.5-0.5.17", "qwen3-235b-0.5.17"),
    *("moe-workspace-eager", "moe-workspace-graphs", "moe-workspace-h100"),
)
SEGMENTS = full_names(
    "segments", *("kimi-k2.5", "kimi-k2.5-0.5.17", "kimi-k2.5-0.5.17-stock", "qwen3-30b", "qwen3-30b-0.5.17")
)
SERVING: tuple[str, ...] = full_names(
    "serving",
    *("qwen3-30b-h200", "qwen3-30b-h200-again", "qwen3-vl-30b-h200", "qwen3-vl-30b-h200-again"),
    *("qwen3-next-80b", "qwen3-next-80b-again", "kimi-k2.5-13-layers-h200", "kimi-k2.5-13-layers-moe-workspace-h200"),
    *("qwen3-30b-dp-attention", "qwen3-30b-pipeline", "qwen3-30b-ngram-h200", "qwen3-30b-0.5.17-256-h200"),
    *("qwen3-30b-mixed-h200", "qwen3-30b-mixed-h200-again"),
)
"""Results of ``benchmark memory/serving`` on H200s."""
SERVING_EARLIER: tuple[str, ...] = full_names(
    "serving",
    *("qwen3-30b-default", "qwen3-30b-default-again", "qwen3-30b-h100", "qwen3-235b-fp8"),
    *("kimi-k2.5-13-layers", "kimi-k2.5-13-layers-again", "gpt-oss-120b", "gpt-oss-120b-30-layers"),
    *("gpt-oss-120b-30-layers-0.5.17", "gpt-oss-120b-8-layers", "qwen3-30b-0.5.17", "qwen3-30b-0.5.17-256"),
    *("qwen3-30b-8-layers-short", "qwen3-30b-8-layers-short-stock", "qwen3-30b-8-layers-short-again"),
)
"""Results of ``benchmark memory/serving`` that cannot be measured again: on H100s, and one of faulty code on H200s."""
SERVING_RECIPES: tuple[str, ...] = full_names(
    "serving", "deepseek-r1-recipe", "deepseek-r1-eagle-two-gpus", "deepseek-r1-eagle"
)
# For a recipe that the first of these releases rejects, the table has the report of the next release.
RECIPES = full_names("recipes", "0.5.23", "0.5.12.post1", "0.5.17")
LOADING = full_names(
    "loading",
    *(f"gpt-oss-120b{kind}" for kind in ("", "-as-h100", "-tp2", "-tp4", "-tp8", "-0.5.17")),
    "qwen3-235b-nvfp4-0.5.17",
)
LOADING_SETTINGS = full_names(
    "loading",
    *("setting-none", "setting-expandable-segments", "setting-backend", "setting-roundup-power2-divisions"),
    *("setting-max-split-size-mb", "setting-garbage-collection-threshold", "setting-max-non-split-rounding-mb"),
    *("setting-release-lock-on-cudamalloc", "setting-per-process-memory-fraction"),
    *("setting-pinned-use-cuda-host-register", "setting-pinned-use-background-threads"),
)
HOSTS = full_names("overhead", "host-cpu", "host-triton-cpu", "host-h200", "host-triton-h200")
HOST_TIME = ("output-buffer", "deferred-shared-experts", "moe-workspace")
"""Names of the changes whose pages have the table of host time."""


def added_host_time(load: Load) -> str:
    """Make the table of host time for the page of a change."""
    return f"\n{overhead.added_host_time(list(map(load, HOSTS)))}"


SECTIONS = {
    "launched-chart": Section(make_text=overview.make_readme_chart),
    "launched": Section(full_names("serving", *headlines.LAUNCHED), make_text=overview.make_launched),
    "launched-settings": Section(make_text=overview.make_readme_settings),
    "older-table": Section(make_text=overview.make_older_table),
    "gains": Section(make_text=overview.make_gains),
    "charts": Section(make_text=overview.make_charts),
    "index": Section(make_text=overview.make_index),
    "weight-shuffle": section_of_one(
        "weight-shuffle/h200", lambda result: weight_shuffle.make_tables(result, shards=("tp4", "ep8"))
    ),
    "marlin-repack": Section(
        full_names("marlin-repack", "h100", "h100-0.5.17"),
        lambda results: "\n\n".join(map(marlin_repack.make_tables, results)),
    ),
    "nvfp4-hopper": section_of_one("nvfp4-hopper/h200-0.5.17", raw_table),
    "regress-verdicts": Section(make_text=lambda load: verdicts.make_tables()),
    "mutations": Section((mutations.RESULT,), make_text=mutations.make_table),
    "regress-tiny": section_of_one("regress/tiny-h200", raw_table),
    "residual-hole": section_of_one("residual-hole/h200", raw_table),
    "segments": Section(SEGMENTS, segments.make_tables),
    "segments-variable": Section(full_names("segments", "qwen3-30b-tp2-0.5.17", "qwen3-30b-tp2"), segments.make_tables),
    "segments-long": Section(("segments/kimi-k2.5-long",), segments.make_tables),
    "segments-times": Section(
        full_names(
            "triton-server", "kimi-k2.5-segments", "kimi-k2.5-segments-decode", "kimi-k2.5-segments-common-pool"
        ),
        triton_server.make_tables,
    ),
    "soak": section_of_one("soak/qwen3-30b", soak.make_tables),
    "engine-suite": section_of_one("engine-suite/h200-0.5.17", engine_suite.make_tables),
    "peak-memory": Section(PEAKS, peak_memory.summary),
    "peak-memory-triton": Section(tuple(headlines.PEAKS.values()), peak_memory.runs_table),
    "peak-memory-marlin": section_of_one("peak-memory/marlin-kimi-k2.5-shard8", peak_memory.setting_tables),
    "models": section_of_one("models/0.5.23", models.make_tables),
    "recipes": Section(RECIPES, recipes.make_tables),
    "room": Section(full_names("room", "0.5.12.post1", "0.5.17"), room.make_tables),
    "recipes-on-hopper": Section(RECIPES, make_text=lambda load: recipes.on_hopper([load(name) for name in RECIPES])),
    "recipes-kv-sizing": Section(RECIPES, recipes.counts),
    "triton-servers": Section(TRITON_SERVERS, triton_server.runs_table),
    "triton-decode": section_of_one("triton-server/kimi-k2.5-decode", triton_server.decode_table),
    "overhead-servers": section_of_one("overhead/servers-h200", raw_table),
    "overhead-servers-tp4": section_of_one("overhead/servers-4xh200", raw_table),
    "overhead-host": Section(HOSTS, overhead.host_tables),
    "scheduler-turn": section_of_one("overhead/scheduler-turn-cpu", scheduler_turn.make_tables),
    **{f"host-time-{change}": Section(make_text=added_host_time) for change in HOST_TIME},
    "serving": Section(SERVING, serving.make_tables),
    "serving-earlier": Section(SERVING_EARLIER, serving.make_tables),
    "loading": Section(LOADING, loading.make_tables),
    "loading-settings": Section(LOADING_SETTINGS, loading.make_settings_table),
    "serving-recipes": Section(SERVING_RECIPES, serving.make_tables),
    "penalties": section_of_one("serving/qwen3-30b-penalties", serving.peak_table),
    "deepseek-r1": Section(("triton-server/deepseek-v3-fp8-shard8-32768",), triton_server.make_tables),
    "mori-rows": section_of_one(
        "mori-rows/rows", lambda result: mori_rows.make_tables(result, eps=(8, 32), batches=(32, 512))
    ),
    "launcher-cost": section_of_one("launcher-cost/cpu", launcher_cost.make_tables),
    "cutedsl-memory": section_of_one(
        "cutedsl-memory/layouts", lambda result: cutedsl_memory.make_tables(result, tps=(4,))
    ),
    "moe-workspace": Section(full_names("moe-workspace", "h200", "h200-more", "h100"), moe_tables.layers_table),
    "moe-workspace-slices": section_of_one("moe-workspace/h200-slices", moe_tables.slices_table),
    "moe-workspace-default": section_of_one("moe-workspace/h200-default", moe_tables.rule_tables),
    "moe-workspace-marlin": section_of_one("moe-workspace-marlin/h200", moe_tables.make_marlin_tables),
    "moe-workspace-tuned": section_of_one("moe-workspace/h200-tuned", raw_table),
    "moe-workspace-captured": Section(
        full_names("moe-workspace", "h200-captured", "h100-captured"), moe_tables.graph_tables
    ),
}


PLOTS: dict[str, tuple[str, Callable[[output.Result, Path], None]]] = {
    "weight-shuffle.svg": ("weight-shuffle/h200", weight_shuffle.plot),
    "mori-rows.svg": ("mori-rows/rows", mori_rows.plot),
    "moe-workspace.svg": ("moe-workspace/h200", moe_tables.plot),
}
"""Plots that matplotlib draws, each from one result."""


def images() -> list[str]:
    """Return the names of all plots and charts. Charts without results are left out."""
    return [*PLOTS, *overview.drawings()]


def section(name: str, load: Load = output.load) -> str:
    """Make the text of a section, which a page has between two comments."""
    names, tables, make_text = SECTIONS[name].results, SECTIONS[name].tables, SECTIONS[name].make_text
    if make_text is not None:
        return f"{make_text(load)}\n"
    results = [{**load(result), "name": result} for result in names]
    if not results:
        return f"\n{tables(results)}\n"
    commands: dict[str, list[str]] = {}
    for result in (result for result in results if "command" in result):  # results of removed scripts have no command
        commands.setdefault(result["command"], []).append(result["conditions"]["engine"])
    several = len({result["conditions"]["engine"] for result in results}) > 1
    lines = [command_lines(command, releases if several else []) for command, releases in commands.items()]
    lines[1:] = [f"# and {len(lines) - 1} like it"] if len(lines) > 1 else []
    typed = [" (typed in)" if result.get("transcribed") else "" for result in results]
    folder = names[0].split("/")[0]
    if len(names) > 2:
        files = f"[{folder}]({DATA}/{folder}){max(typed)}"
    else:
        links = (f"[{result.split('/')[1]}.json]({DATA}/{result}.json)" for result in names)
        files = ", ".join(map("".join, zip(links, typed, strict=True)))
    console = "\n".join(("```console", *lines, "```\n\n")) if lines else ""
    return f"\n{console}{conditions(results)}. Data: {files}.\n\n{tables(results)}\n"


def command_lines(command: str, releases: list[str]) -> str:
    """Format a command for a console block, with a comment that names the releases on which it ran."""
    lines = textwrap.wrap(command, 112, break_long_words=False, break_on_hyphens=False, subsequent_indent="    ")
    comment = f"  # {', '.join(dict.fromkeys(releases))}" if releases else ""
    return "$ " + " \\\n".join(lines) + comment


def conditions(results: list[output.Result]) -> str:
    """Format the conditions of several results as one line."""
    together: dict[str, str] = {}
    for key in dict.fromkeys(key for result in results for key in result["conditions"]):
        values = dict.fromkeys(str(r["conditions"][key]) for r in results if r["conditions"].get(key) is not None)
        together[key] = " / ".join(values)
    return machine.format_conditions(together)


def pages() -> list[Path]:
    """Find all pages that may have generated sections."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def page(text: str, load: Load = output.load) -> str:
    """Return the text of a page, with a new text in each of its generated sections."""

    def write_section(match: re.Match[str]) -> str:
        if match[1] not in SECTIONS:
            raise SystemExit(f"render.py: figures: {match[1]}: unknown; known: {', '.join(SECTIONS)}")
        return f"{match[1]} -->\n{section(match[1], load)}"

    return MARKED.sub(write_section, text)


def draw(image: str, load: Load = output.load) -> str:
    """Draw a plot or a chart, and return its SVG text."""
    if image not in PLOTS:
        return overview.drawings()[image](load)
    name, plot = PLOTS[image]
    with tempfile.TemporaryDirectory() as scratch:
        plot(load(name), Path(scratch) / image)
        return (Path(scratch) / image).read_text(encoding="utf-8")


def matplotlib_release(image: str) -> str:
    """Read from an SVG which release of matplotlib drew it. Other releases draw the same figure differently."""
    return "".join(re.findall(r"Matplotlib v[\d.]+", image)[:1])


def remake(make: Callable[[Load], str]) -> Callable[[], Iterator[str]]:
    """Return a function that makes a text again, from results with slightly changed numbers, for
    :func:`common.equality.is_same_text`.

    :param make: function that makes the text. Its argument is a function that loads a result.
    """
    return lambda: (make(lambda name, nudge=nudge: nudge(output.load(name))) for nudge in equality.nudges())


def find_outdated(*, redraw: bool = False) -> dict[Path, str]:
    """Find the outdated pages and plots.

    :param redraw: whether a plot from another release of matplotlib counts as outdated. Such plots cannot be compared.
    :returns: new content of each outdated file.
    """
    stale = {}
    for path in pages():
        before = path.read_text(encoding="utf-8")
        now = page(before)
        if before != now and not equality.is_same_text(
            before, now, remake(lambda load, before=before: page(before, load))
        ):
            stale[path] = now
    for image in images():
        path, now = IMAGES / image, draw(image)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before and matplotlib_release(before) != matplotlib_release(now):
            is_stale = redraw
        else:
            is_stale = before != now and not equality.is_same_text(
                before, now, remake(lambda load, image=image: draw(image, load))
            )
        if is_stale:
            stale[path] = now
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is outdated")
    check = parser.parse_args().check
    stale = find_outdated(redraw=not check)
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"render.py: outdated: {names}; run `python benchmark/render.py`", file=sys.stderr)
        return 1
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
