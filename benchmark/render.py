"""Write the tables and plots of docs/benchmarks.md from the results in benchmark/results/.

    python benchmark/render.py            # write them
    python benchmark/render.py --check    # say which of them are not up to date, and exit with 1

Prose is written on the page itself. Between ``<!-- figures:NAME -->`` and ``<!-- /figures -->`` stands what
``SECTIONS`` says of NAME: the command, the conditions and the tables of one or several results. A new figure is a
result (``--json benchmark/results/NAME.json``), a line in ``SECTIONS``, and these two comments on the page; a plot is a
line in ``PLOTS``.
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

import cutedsl_memory
import launcher_cost
import moe_workspace
import mori_rows
import overhead
import peak_memory
import plan
import triton_server
import weight_shuffle
from common import machine, output, same

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
Load = Callable[[str], output.Result]
MARKED = re.compile(r"(?<=<!-- figures:)(\S+) -->\n.*?(?=<!-- /figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A marked place of the page.

    :param results: names of files in ``benchmark/results/``; none where the tables are computed.
    :param tables: makes the tables from all of these results.
    """

    results: tuple[str, ...]
    tables: Callable[[list[output.Result]], str]


def one(name: str, tables: Callable[[output.Result], str]) -> Section:
    return Section((name,), lambda results: tables(results[0]))


def hosts(*runs: str) -> Section:
    """Host times of several runs in one table."""
    return Section(tuple(f"overhead-host-{run}" for run in runs), lambda results: overhead.host_tables(*results))


def rows_as_they_are(result: output.Result) -> str:
    """The table of a result without a script of its own."""
    return output.table(("", "stock", "patched"), result["figures"]["rows"])


PEAKS = tuple(
    f"peak-memory-{run}"
    for run in (
        *("kimi-k2.5-tp4", "kimi-k2.5-tp4-symm-mem", "kimi-k2.5-tp4-0.5.11", "kimi-k2.5-tp2", "kimi-k2.5-tp2-symm-mem"),
        *("kimi-k2.5-tp1", "deepseek-v3-tp4", "deepseek-v3-tp1"),
    )
)
TRITON_PEAKS = tuple(
    f"peak-memory-triton-{run}-shard4"
    for run in ("kimi-k2.5", "kimi-k2.5-fp8", "qwen3-235b", "qwen3-235b-fp8", "minimax-m2")
)
TRITON_SERVERS = tuple(
    f"triton-server-{run}"
    for run in (
        *("kimi-k2.5", "kimi-k2.5-fp8", "kimi-k2.5-graphs", "kimi-k2.5-graphs-0.5.17"),
        *("kimi-k2.5-tp4", "kimi-k2.5-0.5.17", "kimi-k2.5-fp8-0.5.17"),
        *("glm-4.5", "glm-4.5-0.5.17", "qwen3-235b-0.5.17"),
    )
)
PLANS = tuple(
    f"plan-{run}"
    for run in (
        *("kimi-k2.5-16384", "kimi-k2.5-8192", "kimi-k2.5-tp2-stock", "kimi-k2.5-tp2-patched"),
        *("qwen3-30b-16384", "qwen3-30b-8192"),
    )
)
SURVIVALS = ("plan-survive-kimi-k2.5-16384", "plan-survive-kimi-k2.5-16384-more")
SECTIONS = {
    "weight-shuffle": one("weight-shuffle", weight_shuffle.tables),
    "regress-tiny-h200": one("regress-tiny-h200", rows_as_they_are),
    "peak-memory": Section(PEAKS, peak_memory.summary),
    "alive-at-the-kernel": one(PEAKS[0], lambda result: peak_memory.alive(result, "at_kernel")),
    "peak-memory-triton": Section(TRITON_PEAKS, peak_memory.against_sizes),
    "triton-servers": Section(TRITON_SERVERS, triton_server.tables),
    "triton-decode": one("triton-server-kimi-k2.5-decode", lambda result: triton_server.tables([result])),
    "alive-at-the-peak-triton": one(TRITON_PEAKS[0], lambda result: peak_memory.alive(result, "at_peak")),
    "predictions": Section((), lambda results: peak_memory.predictions()),
    "overhead-servers-h200": one("overhead-servers-h200", overhead.server_tables),
    "overhead-servers-4xh200": one("overhead-servers-4xh200", overhead.server_tables),
    "overhead-host-h200": hosts("h200", "triton-h200"),
    "overhead-host": hosts("cpu", "triton-cpu"),
    "plan": Section(PLANS, plan.tables),
    "plan-survivals": Section(SURVIVALS, plan.tables),
    "mori-rows": one("mori-rows", mori_rows.tables),
    "mori-kernel": one("mori-kernel", mori_rows.kernel_tables),
    "launcher-cost": one("launcher-cost", launcher_cost.tables),
    "cutedsl-memory": one("cutedsl-memory", cutedsl_memory.tables),
    "moe-workspace": Section(("moe-workspace-h200", "moe-workspace-h200-more"), moe_workspace.in_short),
    "moe-workspace-captured": one("moe-workspace-h200-captured", moe_workspace.captured),
    "moe-workspace-h100": Section(("moe-workspace-h100",), moe_workspace.in_short),
    "moe-workspace-captured-h100": one("moe-workspace-h100-captured", moe_workspace.captured),
    "moe-workspace-server-h100": Section(("moe-workspace-server-h100",), triton_server.tables),
    "moe-workspace-servers": Section(
        ("moe-workspace-server-eager", "moe-workspace-server-graphs"), triton_server.tables
    ),
}
#: image: (result, what draws it)
PLOTS: dict[str, tuple[str, Callable[[output.Result, Path], None]]] = {
    "weight-shuffle.svg": ("weight-shuffle", weight_shuffle.plot),
    "peak-memory-tp4.svg": (PEAKS[0], peak_memory.plot),
    "mori-rows.svg": ("mori-rows", mori_rows.plot),
    "mori-kernel.svg": ("mori-kernel", mori_rows.kernel_plot),
    "moe-workspace.svg": ("moe-workspace-h200", moe_workspace.plot),
}


def section(name: str, load: Load = output.load) -> str:
    """What stands on the page between the comments.

    :param load: gives a result by its name.
    :raises KeyError: no section has this name.
    """
    names, tables = SECTIONS[name].results, SECTIONS[name].tables
    results = [load(result) for result in names]
    if not results:
        return f"\n{tables(results)}\n"
    commands: dict[str, list[str]] = {}
    for result in results:
        commands.setdefault(result["command"], []).append(result["conditions"]["engine"])
    several = len({result["conditions"]["engine"] for result in results}) > 1
    lines = [command_lines(command, releases if several else []) for command, releases in commands.items()]
    files = ", ".join(f"[{result}.json](../benchmark/results/{result}.json)" for result in names)
    if len(names) > 2:
        files = f"[results](../benchmark/results): {', '.join(names)}"
    if any(result.get("transcribed") for result in results):
        files += " (typed in)"
    console = "\n".join(("```console", *lines, "```"))
    return f"\n{console}\n\n{conditions(results)}.\n\n{tables(results)}\nData: {files}.\n\n"


def command_lines(command: str, releases: list[str]) -> str:
    """The command as it is typed, and in a comment the releases on which it was run."""
    lines = textwrap.wrap(command, 112, break_long_words=False, break_on_hyphens=False, subsequent_indent="    ")
    said = f"  # {', '.join(dict.fromkeys(releases))}" if releases else ""
    return "$ " + " \\\n".join(lines) + said


def conditions(results: list[output.Result]) -> str:
    """The conditions of all of them, in one line."""
    together: dict[str, str] = {}
    for key in dict.fromkeys(key for result in results for key in result["conditions"]):
        values = dict.fromkeys(str(r["conditions"][key]) for r in results if r["conditions"].get(key) is not None)
        together[key] = " / ".join(values)
    return machine.sentence(together)


def page(text: str, load: Load = output.load) -> str:
    """The page with every marked place written anew."""

    def marked(match: re.Match[str]) -> str:
        if match[1] not in SECTIONS:
            raise SystemExit(f"render.py: {PAGE.name}: figures: {match[1]}: unknown; known: {', '.join(SECTIONS)}")
        return f"{match[1]} -->\n{section(match[1], load)}"

    return MARKED.sub(marked, text)


def drawn(image: str, load: Load = output.load) -> str:
    """A plot, as SVG."""
    result, plot = PLOTS[image]
    with tempfile.TemporaryDirectory() as scratch:
        plot(load(result), Path(scratch) / image)
        return (Path(scratch) / image).read_text(encoding="utf-8")


def drawn_by(image: str) -> str:
    """Which release of matplotlib drew an SVG: another one draws the same figure otherwise."""
    found = re.search(r"Matplotlib v[\d.]+", image)
    return found[0] if found else ""


def nudged(make: Callable[[Load], str]) -> Callable[[], Iterator[str]]:
    """What ``make`` makes of results that differ by less than any digit that it prints."""
    return lambda: (make(lambda name, nudge=nudge: nudge(output.load(name))) for nudge in same.nudges())


def outdated(*, redraw: bool = False) -> dict[Path, str]:
    """The files that do not say what the results say, and what would stand there.

    :param redraw: with the plots that another release of matplotlib drew; they cannot be compared.
    """
    before = PAGE.read_text(encoding="utf-8")
    now = page(before)
    found = {} if same.same(before, now, nudged(lambda load: page(before, load))) else {PAGE: now}
    for image in PLOTS:
        path, now = IMAGES / image, drawn(image)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before and drawn_by(before) != drawn_by(now):
            stale = redraw
        else:
            stale = not same.same(before, now, nudged(lambda load, image=image: drawn(image, load)))
        if stale:
            found[path] = now
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something would change")
    check = parser.parse_args().check
    stale = outdated(redraw=not check)
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"render.py: not up to date: {names}; run `python benchmark/render.py`", file=sys.stderr)
        return 1
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
