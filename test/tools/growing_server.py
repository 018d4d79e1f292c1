"""A server whose KV cache grows in its start, with SGLANG_MOE_PATCHES_KV_SIZING=auto, and what it says of that.

    python test/tools/growing_server.py --model MODEL --output FOLDER [--report PAGE] -- SERVER_ARGUMENTS

A --mem-fraction-static among the arguments is left out: with it the KV cache would not grow. Without a GPU forwards are
small, and what the driver says is a stand-in's: all else is the engine's. The log is in FOLDER; PAGE, a report of
regress, gets a row on its first screen and a section.

Exits with 1 unless the server answers with more KV tokens than the engine's rule gives.
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
NO_LIMIT = ("--max-total-tokens", "100000000")
"""In the place of the limit that servers without a GPU have."""
GIVEN = "--mem-fraction-static"
NO_GPU = "Without a GPU: what the driver says of memory is a stand-in's."


class Start(NamedTuple):
    """A start of the server.

    :param tokens: of its KV cache, by its own answer.
    :param lines: what kv-sizing said.
    """

    tokens: int
    ready_s: float
    lines: list[str]

    @property
    def growth(self) -> Growth | None:
        """What the log says of a KV cache that has grown; ``None``: nothing, or another number than the server does."""
        found = growth.growth(self.lines)
        return found if found and found.rule_tokens < found.tokens == self.tokens else None


def without_fraction(arguments: Sequence[str]) -> list[str]:
    """Server arguments but for a fraction, given in one word or in two."""
    kept = list(arguments)
    while GIVEN in kept:
        at = kept.index(GIVEN)
        del kept[at : at + 2]
    return [each for each in kept if not each.startswith(f"{GIVEN}=")]


def fragments(start: Start, *, gpu: bool) -> dict[str, str]:
    """What a report of ``regress`` says of the start, by its markers."""
    note = "" if gpu else f" {NO_GPU}"
    outcome = "which did not grow."
    if start.growth:
        outcome = f"{start.growth.rule_tokens:,} by the engine's rule: the rest was not needed by any forward."
    rows = "".join(f"<tr><td>{escape(line)}</td></tr>" for line in start.lines)
    return {
        "overview": f'<tr><th scope="row">KV cache</th><td>{start.tokens:,} tokens, {outcome}{note}</td></tr>\n',
        "sections": "<h2>The start of the patched server with SGLANG_MOE_PATCHES_KV_SIZING=auto</h2>\n"
        '<section class="card scroll"><table>\n<thead><tr><th>What kv-sizing said</th></tr></thead>\n'
        f"<tbody>{rows}</tbody></table>\n"
        f'<p class="soft">Before its first request the server has run its largest forwards and given what none of them '
        f"needed to the KV cache. It was ready after {start.ready_s:.0f} s.{note}</p></section>\n\n",
    }


def start_server(arguments: list[str], variables: dict[str, str], output: Path) -> Start:
    """Start a server, ask it something, and end it."""
    server = Server("growing", arguments, variables, output / "growing.log")
    with show_starting(server, Console(), interrupt=lambda: None), server:
        client = Client(server.url)
        tokens = int(client.info()["max_total_num_tokens"])
        if refused := client.generate([list(range(2, 200))], 8):
            raise SystemExit(f"growing_server: {refused}; see {server.log}")
    lines = growth.said(server.log_text())
    print(f"{tokens:,} KV tokens, ready in {server.startup_s:.0f} s", *lines, sep="\n  ", flush=True)
    return Start(tokens, server.startup_s, lines)


def insert(page: Path, fragments: Mapping[str, str]) -> None:
    """Add to a page that was written before.

    :param fragments: HTML, by the name of the marker in front of which it goes: ``<!-- name -->`` in the page.
    :raises ValueError: the page has no such marker.
    """
    text = page.read_text(encoding="utf-8")
    for name, fragment in fragments.items():
        before, marker, after = text.partition(f"<!-- {name} -->")
        if not marker:
            raise ValueError(f"{page}: has no marker {name!r}")
        text = f"{before}{fragment}{marker}{after}"
    pages.replace({page.name: text}, page.parent)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True, help="a folder that is made")
    parser.add_argument("--report", type=Path, help="the report.html of `regress` that tells of this, too")
    parser.add_argument("arguments", nargs="*", help="of the server, after `--`")
    options = parser.parse_args(given)
    output = options.output.absolute()
    output.mkdir(parents=True)

    arguments, folders = ["--model-path", options.model, *without_fraction(options.arguments)], []
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
        insert(options.report, fragments(start, gpu=has_gpu()))
        print(f"Added to {options.report}")
    if start.growth:
        return 0
    print(f"The KV cache has not grown; see {output}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
