"""What a server says that sizes its KV cache by itself, at its first start and at its second.

    python test/tools/second_start.py --model MODEL --output FOLDER -- SERVER_ARGUMENTS

A --mem-fraction-static among the arguments is left out, as it would stand. Without a GPU forwards are small, and what
the driver says is a stand-in's: all else is the engine's. Logs and record are in FOLDER.

Exits with 1 unless the second start is sized by the record of the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common import plugins, processes
from common.client import Client
from releases import ROOT
from rich.console import Console
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.lab.reference import environment
from sglang_moe_patches.lab.servers.server import Server, shown_starting
from sglang_moe_patches.memory.kv_sizing.decide import KV_RECORD, KV_SIZING

SAYS = "sglang-moe-patches: kv-sizing: "
SIZED = " instead of the rule's "
STAND_IN = "tells_memory"
SMALL = ("--chunked-prefill-size", "64", "--max-running-requests", "3", "--context-length", "320")
GIVEN = "--mem-fraction-static"


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


def sized(first: int, second: int, lines: Sequence[str]) -> bool:
    """Whether the second start was sized by the record.

    :param first: the KV tokens of the first start; ``second``: of the second one, which said ``lines``.
    """
    return second > first and any(SIZED in line for line in lines)


def start(name: str, arguments: list[str], variables: dict[str, str], output: Path) -> tuple[int, list[str]]:
    """Start a server and end it: its KV tokens, and what kv-sizing said."""
    server = Server(name, arguments, variables, output / f"{name}.log")
    with shown_starting(server, Console(), interrupt=lambda: None), server:
        tokens = int(Client(server.url).info()["max_total_num_tokens"])
    lines = said(server.log_text())
    print(f"{name} start: {tokens:,} KV tokens, ready in {server.startup_s:.0f} s", *lines, sep="\n  ", flush=True)
    return tokens, lines


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True, help="a folder that is made")
    parser.add_argument("arguments", nargs="*", help="of the server, after `--`")
    options = parser.parse_args(given)
    output = options.output.absolute()
    output.mkdir(parents=True)

    arguments, folders = ["--model-path", options.model, *without_fraction(options.arguments)], []
    if not has_gpu():
        arguments += SMALL
        folders = [plugins.write(output / "plugin", STAND_IN, f"{STAND_IN}:register"), ROOT / "test" / "standins"]
        print("Without a GPU: what the driver says of memory is a stand-in's.", flush=True)
    variables = processes.variables(*folders)
    if not has_gpu():
        variables |= environment.variables(variables)
    variables |= {KV_SIZING.name: "auto", KV_RECORD.name: str(output / "records.json")}

    arguments = environment.server_arguments(arguments)
    first, _ = start("first", arguments, variables, output)
    second, lines = start("second", arguments, variables, output)
    if sized(first, second, lines):
        return 0
    print(f"The second start is not sized by the record of the first; see {output}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
