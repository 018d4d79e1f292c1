"""Test with pipeline stages whether stock and patched servers differ more often than two stock servers.

    make pipeline                                         # on two GPUs; without one a tiny model, on the CPU
    make pipeline ARGS="--starts 6 --rounds 5 --output mismatches"
    make pipeline ARGS="--choose-by-timing"               # PyTorch chooses kernels by their time, as it does by default

Each start runs three servers with two stages at the same time: stock, stock again, and patched. All servers receive the
requests of test/gpu/test_triton_servers_cuda.py: first one prompt after another, then enough prompts at once to keep
both stages busy. A round compares stock with stock, and stock with patched. If answers differ, the answers,
log-probabilities, logs and forward passes are kept. The last line says whether a patch causes the differences.

The exit code is 1 if a patch causes them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import mismatch
from common import forwards, plugins
from common.servers import EAGER, Setup, run_servers
from common.shapes import MODELS, TINY
from common.weights import ServedModel
from mismatch import Request
from sglang_moe_patches.core.machine import has_gpu

STOCK, CONTROL, PATCHED = NAMES = ("stock", "stock-again", "patched")
SHARES = {"qwen3-235b": 4, "deepseek-v3": 8}
IN_FLIGHT = 6


def make_model(model: str) -> ServedModel:
    """Return the model: four layers, two for each stage. The first layer of DeepSeek's model has no experts."""
    if not has_gpu():  # on the CPU, this package does not patch Triton's runner, but it patches TRT-LLM's runner
        return ServedModel(TINY, moe_layers=3, runner="flashinfer_trtllm_routed")
    return ServedModel(
        MODELS[model].shard(SHARES[model]), moe_layers=3 if model == "deepseek-v3" else 4, runner="triton"
    )


def make_setups(options: argparse.Namespace, work: Path) -> dict[str, Setup]:
    arguments = [*EAGER, "--pp-size", "2", "--max-running-requests", "8"]
    arguments += ["--max-total-tokens", str(8 * options.tokens), "--mem-fraction-static", "0.9"]
    if options.model == "deepseek-v3":
        arguments.append("--disable-shared-experts-fusion")
    chosen = () if options.choose_by_timing else (("TORCHINDUCTOR_DETERMINISTIC", "1"),)
    return {
        name: Setup(
            make_model(options.model),
            work,
            tokens=options.tokens,
            arguments=tuple(arguments),
            observe=False,
            variables=((forwards.UNTIMED, "1"), (forwards.VARIABLE, str(work / f"{name}.forwards")), *chosen),
        )
        for name in NAMES
    }


def make_requests(tokens: int) -> list[Request]:
    alone = [Request(length, length, 6) for length in (tokens, tokens - 16, tokens - 33, 5)]
    return [*alone, *mismatch.make_simultaneous_requests(tokens, IN_FLIGHT)]


def run_start(options: argparse.Namespace, start: int) -> list[tuple[bool, bool]]:
    """Start the three servers and run all rounds.

    :returns: for each round, whether the two stock servers differed, and whether stock and patched differed.
    """
    requests, outcomes = make_requests(options.tokens), []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "run"
        setups = make_setups(options, work)
        setups[STOCK].prepare()
        plugins.write(work / "plugin", "benchmark_forwards", "common.forwards:register")
        with run_servers(setups, at_once=True) as servers:
            for round_ in range(options.rounds):
                # Every second round asks the servers in reverse order, so that no server is always the first.
                answers = {name: mismatch.ask(servers[name], requests) for name in NAMES[:: -1 if round_ % 2 else 1]}
                differing = {
                    n: mismatch.find_differences(requests, answers[STOCK], answers[n]) for n in (CONTROL, PATCHED)
                }
                for name, differences in differing.items():
                    if differences:
                        files = [*(server.log for server in servers.values()), *work.glob("*.forwards")]
                        into = options.output / f"start-{start}-round-{round_}-{name}"
                        place = mismatch.save_mismatch(into, differences, answers, files)
                        print(
                            f"stock and {name} differ in {differences[0]} ({len(differences)} in all); kept in {place}"
                        )
                outcomes.append((bool(differing[CONTROL]), bool(differing[PATCHED])))
            acted = not all(one.is_untouched for one in forwards.read(work / f"{PATCHED}.forwards"))
    if not acted:
        raise SystemExit("pipeline: the patched server did nothing in any forward, so nothing was compared")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=30, help="number of starts of all three servers (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds in each start (%(default)s)")
    parser.add_argument(
        "--model", choices=list(SHARES), default="qwen3-235b", help="model whose layer sizes are used (%(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=8192 if has_gpu() else 64, help="tokens of the longest prompt (%(default)s)"
    )
    parser.add_argument("--choose-by-timing", action="store_true", help="let PyTorch choose kernels by their time")
    parser.add_argument(
        "--output", type=Path, default=Path("mismatches"), help="folder for differing answers (%(default)s)"
    )
    options = parser.parse_args()
    runs: list[tuple[bool, bool]] = []
    for start in range(options.starts):
        runs += run_start(options, start)
        stock, patched = (list(side) for side in zip(*runs, strict=True))
        print(f"start {start + 1} of {options.starts}: {mismatch.find_cause(stock, patched)}", flush=True)
    return int(mismatch.find_cause(stock, patched).startswith("OURS"))


if __name__ == "__main__":
    sys.exit(main())
