"""Pipeline stages: do stock and patched answer alike as often as stock and stock do?

    make pipeline                                         # on two GPUs; without one a tiny model, on the CPU
    make pipeline ARGS="--starts 6 --rounds 5 --output mismatches"
    make pipeline ARGS="--choose-by-timing"               # as PyTorch does by itself

Each start is three servers of two stages at the same time: stock, stock once more, patched. All are asked what
test/gpu/test_triton_servers_cuda.py asks, in turn: prompts one after the other, then as many as keep both stages busy.
A round is a run: one of stock against stock, one of stock against patched. What differs is kept (answers, log-
probabilities, logs, forwards), and the last line says whose doing it is.

Exits with 1 if it is ours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import mismatch
from common import forwards, plugins
from common.servers import EAGER, Setup, running
from common.shapes import MODELS, TINY
from common.weights import ServedModel
from mismatch import Asked
from sglang_moe_patches.core.machine import has_gpu

STOCK, CONTROL, PATCHED = NAMES = ("stock", "stock-again", "patched")
SHARES = {"qwen3-235b": 4, "deepseek-v3": 8}
IN_FLIGHT = 6


def served(model: str) -> ServedModel:
    """Four layers, two for each stage; DeepSeek's first has no experts."""
    if not has_gpu():  # where Triton's runner is not patched, and the other one's outputs are
        return ServedModel(TINY, moe_layers=3, runner="flashinfer_trtllm_routed")
    return ServedModel(
        MODELS[model].shard(SHARES[model]), moe_layers=3 if model == "deepseek-v3" else 4, runner="triton"
    )


def setups(options: argparse.Namespace, work: Path) -> dict[str, Setup]:
    arguments = [*EAGER, "--pp-size", "2", "--max-running-requests", "8"]
    arguments += ["--max-total-tokens", str(8 * options.tokens), "--mem-fraction-static", "0.9"]
    if options.model == "deepseek-v3":
        arguments.append("--disable-shared-experts-fusion")
    chosen = () if options.choose_by_timing else (("TORCHINDUCTOR_DETERMINISTIC", "1"),)
    return {
        name: Setup(
            served(options.model),
            work,
            tokens=options.tokens,
            arguments=tuple(arguments),
            observe=False,
            variables=((forwards.UNTIMED, "1"), (forwards.VARIABLE, str(work / f"{name}.forwards")), *chosen),
        )
        for name in NAMES
    }


def requests(tokens: int) -> list[Asked]:
    alone = [Asked(length, length, 6) for length in (tokens, tokens - 16, tokens - 33, 5)]
    return [*alone, *mismatch.at_once(tokens, IN_FLIGHT)]


def one_start(options: argparse.Namespace, start: int) -> list[tuple[bool, bool]]:
    """For each round, whether stock and stock differed, and stock and patched."""
    asked, found = requests(options.tokens), []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "run"
        made = setups(options, work)
        made[STOCK].prepare()
        plugins.write(work / "plugin", "benchmark_forwards", "common.forwards:register")
        with running(made, at_once=True) as servers:
            for round_ in range(options.rounds):
                # Every other round backwards: none is always the first.
                answers = {name: mismatch.ask(servers[name], asked) for name in NAMES[:: -1 if round_ % 2 else 1]}
                differing = {n: mismatch.differences(asked, answers[STOCK], answers[n]) for n in (CONTROL, PATCHED)}
                for name, differences in differing.items():
                    if differences:
                        files = [*(server.log for server in servers.values()), *work.glob("*.forwards")]
                        into = options.output / f"start-{start}-round-{round_}-{name}"
                        kept = mismatch.keep(into, differences, answers, files)
                        print(
                            f"stock and {name} differ in {differences[0]} ({len(differences)} in all); kept in {kept}"
                        )
                found.append((bool(differing[CONTROL]), bool(differing[PATCHED])))
            acted = not all(one.is_untouched for one in forwards.read(work / f"{PATCHED}.forwards"))
    if not acted:
        raise SystemExit("pipeline: the patched server did nothing in any forward, so nothing was compared")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=30, help="of all three servers (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="with each start (%(default)s)")
    parser.add_argument("--model", choices=list(SHARES), default="qwen3-235b", help="its widths (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192 if has_gpu() else 64, help="(%(default)s)")
    parser.add_argument("--choose-by-timing", action="store_true", help="let PyTorch choose kernels by their time")
    parser.add_argument("--output", type=Path, default=Path("mismatches"), help="where what differs goes (%(default)s)")
    options = parser.parse_args()
    runs: list[tuple[bool, bool]] = []
    for start in range(options.starts):
        runs += one_start(options, start)
        stock, patched = (list(side) for side in zip(*runs, strict=True))
        print(f"start {start + 1} of {options.starts}: {mismatch.whose(stock, patched)}", flush=True)
    return int(mismatch.whose(stock, patched).startswith("OURS"))


if __name__ == "__main__":
    sys.exit(main())
