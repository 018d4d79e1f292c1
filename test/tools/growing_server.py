"""Start a server with SGLANG_MOE_PATCHES_KV_SIZING=auto and check that its KV cache grew.

    python test/tools/growing_server.py --model MODEL --output FOLDER [--report PAGE] -- SERVER_ARGUMENTS

A --mem-fraction-static among the arguments is removed, because a KV cache with a given fraction does not grow. Without
a GPU, a plugin answers in place of the driver, and short limits keep the forward passes small. The engine itself is
unchanged. FOLDER receives the server's log. PAGE is a report of `regress`: it receives a row in its overview and a
section.

The exit code is 1 unless the server has more KV tokens than the engine's rule gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from common import growth, plugins, processes
from common.client import Client
from common.growth import Growth
from rich.console import Console
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.lab.regress import pages
from sglang_moe_patches.lab.servers.server import Server, show_starting
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_MARGIN, KV_SIZING
from sglang_moe_reference import environment

SMALL = ("--chunked-prefill-size", "64", "--max-running-requests", "3", "--context-length", "320")
"""Server arguments on a machine without a GPU. They are so small that the rehearsal is short."""
NO_LIMIT = ("--max-total-tokens", "100000000")
"""Server arguments for a KV cache of practically any size. Without them, the test environment for servers without a GPU
would limit the KV cache to 65,536 tokens."""
FRACTION_FLAG = "--mem-fraction-static"
NO_GPU = (
    "Without a GPU, a stand-in reports the free memory of a GPU with 107 GB. So the sizes are made up, and the engine, "
    "its forward passes and the growth are real."
)
NO_FIGURES = ("rehearses the largest forward passes", "needed in addition to weights and KV cache")
"""Beginnings of kv-sizing's log lines whose figures mean nothing without a GPU. These figures are a time limit and the
memory of forward passes. They come from the stand-in for the driver."""


class Start(NamedTuple):
    """Observations of one start of the server.

    :param tokens: KV cache size in ``/get_server_info``.
    :param ready_s: seconds until the server was ready.
    :param sizing: KV cache size in ``/metrics``; ``None``: kv-sizing kept the size of the engine's rule.
    :param lines: kv-sizing's log lines.
    """

    tokens: int
    ready_s: float
    sizing: Growth | None
    lines: list[str]

    @property
    def growth(self) -> Growth | None:
        """Growth of the KV cache, if ``/metrics`` and ``/get_server_info`` report the same grown size. Otherwise
        ``None``.
        """
        grew = self.sizing and self.sizing.rule_tokens < self.sizing.tokens == self.tokens
        return self.sizing if grew else None


def remove_fraction(arguments: Sequence[str]) -> list[str]:
    """Return server arguments without ``--mem-fraction-static``, whether it is written as one argument or as two."""
    kept = list(arguments)
    while FRACTION_FLAG in kept:
        at = kept.index(FRACTION_FLAG)
        del kept[at : at + 2]
    return [argument for argument in kept if not argument.startswith(f"{FRACTION_FLAG}=")]


def make_fragments(start: Start, *, gpu: bool) -> dict[str, str]:
    """Make HTML that describes a start, for a report of ``regress``.

    :returns: HTML by the name of a marker in the report. :func:`insert` inserts the HTML before this marker.
    """
    note = "" if gpu else f" {NO_GPU}"
    outcome, bars = "which did not grow.", ""
    if start.growth:
        outcome = f"{start.growth.rule_tokens:,} by the engine's rule: no forward pass needed the rest."
        bars = draw_bars(start.growth)
    rows = "".join(f"<tr><td>{escape(line)}</td></tr>" for line in select_lines(start.lines, gpu=gpu))
    return {
        "bars": bars,
        "overview": f'<tr><th scope="row">KV cache</th><td>{start.tokens:,} tokens, {outcome}{note}</td></tr>\n',
        "sections": "<h2>The start of the patched server with SGLANG_MOE_PATCHES_KV_SIZING=auto</h2>\n"
        '<section class="card scroll"><table>\n<thead><tr><th>Log lines of kv-sizing</th></tr></thead>\n'
        f"<tbody>{rows}</tbody></table>\n"
        '<p class="soft">Before its first request the server ran its largest forward passes. It then gave the memory '
        f"that none of them needed to the KV cache. It was ready after {start.ready_s:.0f} s.{note}</p></section>\n\n",
    }


def select_lines(lines: Sequence[str], *, gpu: bool) -> list[str]:
    """Return kv-sizing's log lines. Without a GPU, the lines of :data:`NO_FIGURES` are left out."""
    return [line for line in lines if gpu or not line.startswith(NO_FIGURES)]


def draw_bars(sizing: Growth) -> str:
    """Draw the KV cache size by the engine's rule and the grown one, as HTML like the other charts of the report."""
    bars = "".join(
        f'<div class="bar"><span style="width: {70 * tokens / sizing.tokens:.1f}%; background: var(--{server})"></span>'
        f"{tokens:,} tokens</div>\n"
        for server, tokens in (("stock", sizing.rule_tokens), ("patched", sizing.tokens))
    )
    return f"<figure><figcaption>KV cache</figcaption>\n{bars}</figure>\n"


def start_server(arguments: list[str], variables: dict[str, str], output: Path) -> Start:
    """Start a server, send it one request, and end it.

    :raises SystemExit: the server did not answer the request.
    """
    server = Server("growing", arguments, variables, output / "growing.log")
    with show_starting(server, Console(), interrupt=lambda: None), server:
        client = Client(server.url)
        tokens, metrics = int(client.info()["max_total_num_tokens"]), client.metrics()
        if error := client.generate([list(range(2, 200))], 8):
            raise SystemExit(f"growing_server: {error}; see {server.log}")
    lines = growth.kv_sizing_lines(server.log_text())
    shown = select_lines(lines, gpu=has_gpu())
    print(f"{tokens:,} KV tokens, ready in {server.startup_s:.0f} s", *shown, sep="\n  ", flush=True)
    return Start(tokens, server.startup_s, growth.read_growth(metrics), lines)


def insert(page: Path, fragments: Mapping[str, str]) -> None:
    """Insert HTML into an existing page.

    :param fragments: HTML, by the name of the marker before which it is inserted: ``<!-- name -->`` in the page.
    :raises ValueError: the page has no such marker.
    """
    text = page.read_text(encoding="utf-8")
    for name, fragment in fragments.items():
        before, marker, after = text.partition(f"<!-- {name} -->")
        if not marker:
            raise ValueError(f"{page}: has no marker {name!r}")
        text = f"{before}{fragment}{marker}{after}"
    pages.replace({page.name: text}, page.parent)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hugging Face name of the model")
    parser.add_argument("--output", type=Path, required=True, help="new folder for the server's log")
    parser.add_argument("--report", type=Path, help="report.html of `regress`, to which the result is added")
    parser.add_argument("arguments", nargs="*", help="server arguments, after `--`")
    options = parser.parse_args(argv)
    output = options.output.absolute()
    output.mkdir(parents=True)

    arguments, folders = ["--model-path", options.model, *remove_fraction(options.arguments), growth.METRICS_FLAG], []
    if not has_gpu():
        arguments += [*SMALL, *NO_LIMIT]
        stand_in = growth.STAND_IN
        folders = [plugins.write_module(output / "plugin", stand_in.stem, stand_in.read_text())]
        print(NO_GPU, flush=True)
    variables = processes.variables(*folders)
    if not has_gpu():
        variables |= environment.variables(variables) | {KV_MARGIN.name: KV_MARGIN.default}
    variables[KV_SIZING.name] = "auto"

    start = start_server(environment.server_arguments(arguments), variables, output)
    if options.report is not None:
        insert(options.report, make_fragments(start, gpu=has_gpu()))
        print(f"The report shows the KV cache, too: {options.report}")
    if start.growth:
        return 0
    print(f"The KV cache did not grow; see {output}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
