"""What a server says that sizes its KV cache by itself, at its first start and at its second.

    python test/tools/second_start.py --model MODEL --output FOLDER [--report PAGE] -- SERVER_ARGUMENTS

A --mem-fraction-static among the arguments is left out, as it would stand. Without a GPU forwards are small, and what
the driver says is a stand-in's: all else is the engine's. Logs and record are in FOLDER; PAGE, a report of regress,
gets a row on its first screen and a section.

Exits with 1 unless the second start is sized by the record of the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from common import plugins, processes
from common.client import Client
from releases import ROOT
from rich.console import Console
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.lab.reference import environment
from sglang_moe_patches.lab.regress import pages
from sglang_moe_patches.lab.servers.server import Server, show_starting
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_RECORD, KV_SIZING

SAYS = "sglang-moe-patches: kv-sizing: "
SIZED = " instead of "
STAND_IN = "tells_memory"
SMALL = ("--chunked-prefill-size", "64", "--max-running-requests", "3", "--context-length", "320")
GIVEN = "--mem-fraction-static"
NO_GPU = "Without a GPU: what the driver says of memory is a stand-in's."


class Start(NamedTuple):
    """One start of a server.

    :param tokens: the size of its KV cache.
    :param lines: what kv-sizing said.
    """

    name: str
    tokens: int
    ready_s: float
    lines: Sequence[str]


def without_fraction(arguments: Sequence[str]) -> list[str]:
    """Server arguments but for a fraction, given in one word or in two."""
    kept = list(arguments)
    while GIVEN in kept:
        at = kept.index(GIVEN)
        del kept[at : at + 2]
    return [each for each in kept if not each.startswith(f"{GIVEN}=")]


def said(log: str) -> list[str]:
    """What kv-sizing has said, whole: a log's line has a time and a rank in front."""
    return [line[line.index(SAYS) :] for line in log.splitlines() if SAYS in line]


def sized(first: Start, second: Start) -> bool:
    """Whether the second start was sized by the record of the first."""
    return second.tokens > first.tokens and any(SIZED in line for line in second.lines)


def fragments(first: Start, second: Start, *, gpu: bool) -> dict[str, str]:
    """What a report of ``regress`` says of the two starts, by its markers."""
    outcome = "sized by the record of the first" if sized(first, second) else "not sized by a record"
    note = "" if gpu else f" {NO_GPU}"
    rows = "".join(
        f'<tr><th scope="row">{each.name}</th><td>{each.tokens:,}</td><td>{each.ready_s:.0f} s</td>'
        f"<td>{'<br>'.join(escape(line.removeprefix(SAYS)) for line in each.lines)}</td></tr>"
        for each in (first, second)
    )
    return {
        "overview": f'<tr><th scope="row">KV cache</th><td>{first.tokens:,} tokens at the first start, '
        f"{second.tokens:,} at the second, {outcome}.{note}</td></tr>\n",
        "sections": "<h2>The second start of the patched server, with SGLANG_MOE_PATCHES_KV_SIZING=auto</h2>\n"
        '<section class="card scroll"><table>\n<thead><tr><th>Start</th><th>KV tokens</th><th>Ready after</th>'
        f"<th>What kv-sizing said</th></tr></thead>\n<tbody>{rows}</tbody></table>\n"
        '<p class="soft">The first start uses the engine\'s default fraction and measures what its largest forwards '
        f"need; the second gives what nobody needed to the KV cache.{note}</p></section>\n\n",
    }


def start(name: str, arguments: list[str], variables: dict[str, str], output: Path) -> Start:
    """Start a server and end it."""
    server = Server(name, arguments, variables, output / f"{name}.log")
    with show_starting(server, Console(), interrupt=lambda: None), server:
        tokens = int(Client(server.url).info()["max_total_num_tokens"])
    lines = said(server.log_text())
    print(f"{name} start: {tokens:,} KV tokens, ready in {server.startup_s:.0f} s", *lines, sep="\n  ", flush=True)
    return Start(name, tokens, server.startup_s, lines)


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
        arguments += SMALL
        folders = [plugins.write(output / "plugin", STAND_IN, f"{STAND_IN}:register"), ROOT / "test" / "standins"]
        print(NO_GPU, flush=True)
    variables = processes.variables(*folders)
    if not has_gpu():
        variables |= environment.variables(variables)
    variables |= {KV_SIZING.name: "auto", KV_RECORD.name: str(output / "records.json")}

    arguments = environment.server_arguments(arguments)
    first, second = (start(name, arguments, variables, output) for name in ("first", "second"))
    if options.report is not None:
        pages.insert(options.report, fragments(first, second, gpu=has_gpu()))
        print(f"Added to {options.report}")
    if sized(first, second):
        return 0
    print(f"The second start is not sized by the record of the first; see {output}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
