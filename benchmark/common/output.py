"""The options that all benchmarks have, and the form of their results.

A result is one JSON object: ``benchmark`` and ``command`` say what ran, ``conditions`` on what, ``figures`` what was
measured. ``python benchmark/render.py`` makes the tables and plots of the documentation from the results in
``benchmark/results/``, where each benchmark has a folder. A result that was typed in from a page, because nobody kept
the original, says ``"transcribed": true``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_moe_reference.environment import SWITCH

from common import machine

Result = dict[str, Any]

RESULTS = Path(__file__).parents[1] / "results"


class Parser(argparse.ArgumentParser):
    """``quick``: other defaults, which ``--quick`` chooses."""

    quick: dict[str, Any]


def program() -> str:
    """How the benchmark of this process is run."""
    script = Path(sys.argv[0])
    return f"python benchmark {script.parent.name}/{script.stem}"


def parser(
    description: str | None, *, quick: dict[str, Any] | None = None, plots: bool = False, logs: bool = False
) -> Parser:
    """A parser with the options that every benchmark has, to which it adds its own.

    :param quick: the defaults of a run that only shows whether it runs at all; without them there is no ``--quick``.
    """
    parser = Parser(prog=program(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.quick = quick or {}
    common = parser.add_argument_group("every benchmark")
    common.add_argument("--json", type=Path, metavar="FILE", help="write the result: conditions and figures")
    if plots:
        common.add_argument("--plot", type=Path, metavar="FILE", help="draw the plot")
    if logs:
        common.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    if parser.quick:
        chosen = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in parser.quick.items())
        common.add_argument("--quick", action="store_true", help=f"does it run at all? Other defaults: {chosen}")
    return parser


def parse(parser: Parser, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; with ``--quick`` those not given have the quick defaults."""
    options = parser.parse_args(arguments)
    if parser.quick and options.quick:
        parser.set_defaults(**parser.quick)
        options = parser.parse_args(arguments)
    return options


def choice_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """``type=`` of an option that takes a comma-separated list of these names."""

    def chosen(names: str) -> list[str]:
        asked = names.split(",")
        if unknown := [name for name in asked if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: unknown; known: {', '.join(known)}")
        return asked

    return chosen


def numbers(text: str) -> tuple[int, ...]:
    """``type=`` of an option that takes comma-separated positive integers."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: not all positive")
    return values


def result(benchmark: str, figures: dict[str, Any], conditions: dict[str, Any] | None = None) -> Result:
    """A result of this process: its figures, its command and the machine.

    :param conditions: what is known better than ``machine.conditions()`` knows it.
    """
    through = "sglang-moe-reference exec -- " if os.environ.get(SWITCH) == "1" else ""
    return {
        "benchmark": benchmark,
        "command": f"{through}{program()} {shlex.join(sys.argv[1:])}".strip(),
        "conditions": machine.conditions() | (conditions or {}),
        "figures": figures,
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first ``left`` columns are text, the others numbers."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    lines.insert(1, f"|{'---|' * left}{'--:|' * (len(header) - left)}\n")
    return "".join(lines)


def finish(
    options: argparse.Namespace,
    result: Result,
    tables: Callable[[Result], str],
    plot: Callable[[Result, Path], None] | None = None,
) -> None:
    """Show the tables, and write what the options ask for."""
    print("\n" + tables(result))
    if options.json:
        write(options.json, result)
    if plot is not None and options.plot:
        plot(result, options.plot)


def write(path: Path, result: Result) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def work_folder(options: argparse.Namespace) -> Iterator[Path]:
    """A folder for what a run writes. Only its logs are kept, and only where ``--logs`` says."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        try:
            yield Path(folder)
        finally:
            keep_logs(options, Path(folder))


def keep_logs(options: argparse.Namespace, work: Path) -> None:
    """Copy the servers' logs to where ``--logs`` says, before ``work`` goes."""
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        for log in work.rglob("*.log"):
            shutil.copy(log, options.logs / log.name)


def load(name: str) -> Result:
    """A result of the repository, by ``BENCHMARK/NAME``."""
    loaded: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def pyplot() -> Any:
    """Matplotlib, for small plots that are the same each time: text stays text, nothing random, no date, no settings of
    whoever draws; and no point left out, as the last bit can decide which."""
    import matplotlib

    matplotlib.rcdefaults()
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sglang-moe-patches", "path.simplify": False})
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a plot; an SVG gets no date. Minor ticks of logarithmic axes would be most of it."""
    for axis in figure.axes:
        axis.minorticks_off()
    figure.savefig(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))
    pyplot().close(figure)
