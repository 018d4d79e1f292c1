"""Command-line options that all benchmarks share, and the format of their results.

A result is a JSON object:

- ``benchmark`` and ``command``: the benchmark and its command line.
- ``conditions``: the machine and the versions.
- ``figures``: the measurements.
- ``"transcribed": true``: the figures were typed in from a page, because the original file is lost.

The results are in ``benchmark/results/``, in one folder per benchmark. ``python benchmark/render.py`` makes the tables
and plots of the pages from them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_moe_reference.environment import SWITCH

from common import machine

Result = dict[str, Any]

RESULTS = Path(__file__).parents[1] / "results"


class Parser(argparse.ArgumentParser):
    """Argument parser with a second set of defaults, for ``--quick``."""

    quick: dict[str, Any]
    """Default values of the options with ``--quick``."""

    def add_names(self, option: str, what: str, known: Collection[str], default: Collection[str] | None = None) -> None:
        """Add an option whose value is a comma-separated list of ``known`` names.

        :param what: what the option lists, for its help text.
        :param default: names that are selected if the command line does not have the option; ``None``: all names.
        """
        names = list(known if default is None else default)
        text = f"{what} (default: {'all' if default is None else ','.join(names)}): {', '.join(known)}"
        self.add_argument(option, type=_choice_of(known), default=names, metavar="NAME,...", help=text)


def program() -> str:
    """Return the command that runs this process's benchmark, as in ``python benchmark memory/serving``."""
    script = Path(sys.argv[0])
    return f"python benchmark {script.parent.name}/{script.stem}"


def parser(
    description: str | None, *, quick: dict[str, Any] | None = None, plots: bool = False, logs: bool = False
) -> Parser:
    """Make a parser with the options of every benchmark. The benchmark adds its own options.

    :param quick: defaults of a short run that only checks that the benchmark works. Without them the parser has no
        ``--quick``.
    :param plots: whether to add ``--plot``.
    :param logs: whether to add ``--logs``.
    """
    parser = Parser(prog=program(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.quick = quick or {}
    common = parser.add_argument_group("every benchmark")
    common.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    if plots:
        common.add_argument("--plot", type=Path, metavar="FILE", help="write the plot to this file")
    if logs:
        common.add_argument("--logs", type=Path, metavar="FOLDER", help="copy the servers' logs to this folder")
    if parser.quick:
        chosen = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in parser.quick.items())
        common.add_argument(
            "--quick", action="store_true", help=f"short run to check that the benchmark works; defaults: {chosen}"
        )
    return parser


def parse(parser: Parser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. With ``--quick``, options that are not on the command line have their quick defaults."""
    options = parser.parse_args(arguments)
    if parser.quick and options.quick:
        parser.set_defaults(**parser.quick)
        options = parser.parse_args(arguments)
    return options


def _choice_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Make the argparse ``type=`` function of an option that takes a comma-separated list of ``known`` names."""

    def parse_names(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: unknown; known: {', '.join(known)}")
        return names

    return parse_names


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated positive integers. It is the argparse ``type=`` function of some options."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: not all positive")
    return values


def result(benchmark: str, figures: dict[str, Any], conditions: dict[str, Any] | None = None) -> Result:
    """Make a result from a benchmark's figures, its command line and the machine's conditions.

    :param conditions: conditions that override those of ``machine.conditions()``.
    """
    through = "sglang-moe-reference exec -- " if os.environ.get(SWITCH) == "1" else ""
    return {
        "benchmark": benchmark,
        "command": f"{through}{program()} {shlex.join(sys.argv[1:])}".strip(),
        "conditions": machine.conditions() | (conditions or {}),
        "figures": figures,
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Format a Markdown table. The first ``left`` columns are text. The other columns are numbers."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    lines.insert(1, f"|{'---|' * left}{'--:|' * (len(header) - left)}\n")
    return "".join(lines)


def wrap_text(text: str) -> str:
    """Wrap a paragraph of a page at 120 characters. Links and names with hyphens stay whole."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def finish(
    options: argparse.Namespace,
    result: Result,
    tables: Callable[[Result], str],
    plot: Callable[[Result, Path], None] | None = None,
) -> None:
    """Print the tables of a result. Write the result and the plot to the files of ``--json`` and ``--plot``."""
    print("\n" + tables(result))
    if options.json:
        write(options.json, result)
    if plot is not None and options.plot:
        plot(result, options.plot)


def write(path: Path, result: Result) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def work_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Create a temporary folder for the files of a run. Its logs are copied to the folder of ``--logs``."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        try:
            yield Path(folder)
        finally:
            keep_logs(options, Path(folder))


def keep_logs(options: argparse.Namespace, work: Path) -> None:
    """Copy all logs below ``work`` to the folder of ``--logs``."""
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        for log in work.rglob("*.log"):
            shutil.copy(log, options.logs / log.name)


def load(name: str) -> Result:
    """Load a result of the repository.

    :param name: ``BENCHMARK/NAME``.
    """
    loaded: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def pyplot() -> Any:
    """Import matplotlib's ``pyplot`` with settings that make a plot small and the same on every machine.

    An SVG contains text as text instead of outlines, and its ids are not random. The user's own settings of matplotlib
    are ignored. Paths are not simplified, because the last bit of a coordinate could decide which points are left out.
    """
    import matplotlib

    matplotlib.rcdefaults()
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sglang-moe-patches", "path.simplify": False})
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a plot. An SVG gets no date, and no minor ticks, which would be most of the file on logarithmic axes."""
    for axis in figure.axes:
        axis.minorticks_off()
    figure.savefig(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))
    pyplot().close(figure)
