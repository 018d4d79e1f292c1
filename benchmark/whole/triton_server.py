"""Compare stock and patched servers with the Triton runner: memory and time of a prefill, time of decode steps.

    python benchmark whole/triton_server --json server.json
    python benchmark whole/triton_server --fp8                                # FP8 experts in blocks
    python benchmark whole/triton_server --model qwen3-235b --changes moe-workspace
    python benchmark whole/triton_server --graphs --json graphs.json          # with the engine's default graphs
    python benchmark whole/triton_server --shard 1 --tp 4                     # the whole layer sizes on four GPUs
    python benchmark whole/triton_server --quick                              # a tiny model, CPU: does it run at all?

Three servers run at the same time on the same GPUs: stock, patched and stock again. They have a few layers of the model
with the sizes of one rank, and random weights. They answer the same prompts in turn, and every other round runs
backwards. The figures are those of a forward pass of --tokens tokens, of a decode step of one request, and of a decode
step of --batch requests. With `--mixed N`, N prompts of many lengths are also sent at once, and the time until all of
them are answered is measured.

The second stock server shows the noise between two equal processes. The first two rounds of each server do not count,
because libraries allocate their workspaces in them. The result says which answers differ in a token or a
log-probability. Answers of the batch are not compared, because servers may batch requests differently.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from common import forwards, machine, output, servers, timing, weights
from common.forwards import Forward
from sglang_moe_patches.core.machine import has_gpu

MB = 1e6
SERVERS = (*servers.SERVERS, timing.CONTROL, "patched-again")
WARM_UP_ROUNDS = 2
"""Number of first rounds of each server that are not recorded."""
SHORT_PROMPT_TOKENS = 48
"""Number of tokens of each prompt in the measurement of decode steps."""


def server_names(copies: int) -> list[str]:
    """Return the names of the servers: stock, patched and stock again.

    :param copies: number of stock and of patched servers. With 1, there are still two stock servers.
    """
    more = [f"{name}-{copy}" for copy in range(3, copies + 1) for name in servers.SERVERS]
    return [*SERVERS[: 3 if copies == 1 else 4], *more]


def time_request(server: Any, lengths: list[int], new_tokens: int, seed: int) -> float:
    """Send prompts of these lengths in one request, and return the seconds until all prompts are answered."""
    body = {
        "input_ids": [servers.prompt(length, seed + at) for at, length in enumerate(lengths)],
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    started = time.perf_counter()
    httpx.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status()
    return time.perf_counter() - started


def mixed_lengths(options: Any, seed: int) -> list[int]:
    """Draw the prompt lengths of ``--mixed`` requests."""
    draw = random.Random(f"mixed/{seed}")
    return [draw.randrange(options.tokens // 48 + 1, options.tokens * 3 // 4) for _ in range(options.mixed)]


def measure(options: Any, work: Path) -> dict[str, Any]:
    """Run all servers and measure them.

    :returns: figures of each server, by its name.
    """
    whole = weights.SERVABLE[options.model].shard(options.shard)
    served = weights.ServedModel(whole, options.dense_layers, options.moe_layers, "triton", options.fp8)
    arguments = ["--max-total-tokens", str(2 * options.tokens + 4096), *options.server_arguments]
    if has_gpu():
        arguments += ["--mem-fraction-static", "0.9"]
    setup = servers.Setup(
        served,
        work,
        options.tp,
        options.tokens,
        arguments=(*(() if options.graphs else servers.EAGER), *arguments),
        observe=False,
        timed=True,
        changes=options.changes,
    )
    setup.prepare()
    setups = dict.fromkeys(server_names(options.copies), setup)
    answers: dict[str, list[Any]] = {name: [] for name in setups}
    with servers.run_servers(setups, at_once=True) as running:
        print("ready:", {name: round(server.startup_s) for name, server in running.items()}, flush=True)
        rounds = [(n, list(running)[:: -1 if n % 2 else 1]) for n in range(WARM_UP_ROUNDS + options.rounds)]
        for round_, names in rounds:
            for name in names:
                ids = servers.prompt(options.tokens, round_ % (WARM_UP_ROUNDS + 2))
                answers[name].append(servers.generate(running[name], ids, options.new_tokens))
        # The batches come after all single prompts. Otherwise the memory that a batch leaves allocated would count in
        # the figures of the prompts.
        for round_, names in rounds:
            for name in names:
                time_request(running[name], [SHORT_PROMPT_TOKENS] * options.batch, options.new_tokens, round_)
        lines_of = {name: forwards.read(setup.forwards_file(name)) for name in running}
        mixed: dict[str, list[float]] = {name: [] for name in running}
        for round_, names in rounds if options.mixed else []:
            for name in names:
                lengths = mixed_lengths(options, round_)
                mixed[name].append(time_request(running[name], lengths, options.new_tokens, round_))

    def median_ms(steps: list[Forward]) -> float | None:
        return statistics.median(step.ms for step in steps) if steps else None

    def figures(name: str) -> dict[str, Any]:
        ranks: dict[int, list[Forward]] = {}
        for line in lines_of[name]:
            ranks.setdefault(line.rank, []).append(line)
        if sorted(ranks) != list(range(options.tp)):
            raise SystemExit(f"triton_server: only ranks {sorted(ranks)} of {options.tp} recorded forward passes")
        by_rank = [[line for line in ranks[rank] if line.tokens == options.tokens] for rank in sorted(ranks)]
        first = by_rank[0][0]
        by_rank = [prefills[WARM_UP_ROUNDS:] for prefills in by_rank]
        lines, whole = ranks[0], by_rank[0]
        decode = [line for line in lines if line.decode and line.tokens == 1]
        batch = [line for line in lines if line.decode and line.tokens == options.batch]
        return {
            "forwards": len(whole),
            "peak": max(line.peak for prefills in by_rank for line in prefills),
            "reserved": whole[-1].reserved,
            "before": whole[-1].before,
            "first_ms": round(first.ms, 1),
            "ms": median_ms(whole),
            "all_ms": [round(line.ms, 2) for line in whole],
            # The first quarter of the decode steps is a warm-up, and is left out.
            "decode_ms": median_ms(decode[len(decode) // 4 :]),
            "batch_ms": median_ms(batch[len(batch) // 4 :]),
            "slices": whole[-1].slices,
            "outputs": whole[-1].outputs,
            "scratch": whole[-1].scratch,
            "mixed_s": [round(seconds, 3) for seconds in mixed[name][WARM_UP_ROUNDS:]],
        }

    stock, *others = (figures(name) for name in setups)
    for name, other in zip(list(setups)[1:], others, strict=True):
        other["equal"] = list(map(servers.is_same_answer, answers["stock"], answers[name]))
        for key, ratio in (("all_ms", "time"), ("mixed_s", "mixed_s_ratio")):
            if stock[key]:
                other[ratio] = statistics.median(b / a for a, b in zip(stock[key], other[key], strict=True))
        for key in ("decode_ms", "batch_ms"):
            if stock[key] and other[key]:
                other[f"{key}_ratio"] = other[key] / stock[key]
    return dict(zip(setups, [stock, *others], strict=True))


def make_tables(results: list[output.Result]) -> str:
    """Make two tables with a row for each server of each run: one of memory, and one of times. The second table also
    has each time relative to the stock server.
    """

    def step(server: dict[str, Any], key: str) -> str:
        ratio = f" ({server[f'{key}_ratio']:.3f})" if f"{key}_ratio" in server else ""
        return f"{server[key]:.2f}{ratio}" if server.get(key) else ""

    memory, times = [], []
    for result in results:
        for place, (name, server) in enumerate(result["figures"].items()):
            run = '"' if place else run_of(result)
            equal = f"{sum(server['equal'])} of {len(server['equal'])}" if "equal" in server else ""
            slices = ", ".join(map(str, server["slices"])) or "-"
            memory.append((run, name, f"{server['peak'] / MB:,.0f}", f"{server['reserved'] / MB:,.0f}", slices, equal))
            prefill = f"{server['ms']:.1f}" + (f" ({server['time']:.3f})" if "time" in server else "")
            mixed = {**server, "mixed_s": statistics.median(server["mixed_s"])} if server.get("mixed_s") else {}
            steps = (step(server, "decode_ms"), step(server, "batch_ms"), step(mixed, "mixed_s"))
            times.append((run, name, prefill, *steps))
    of_memory = ("run", "server", "peak MB", "reserved MB", "slices", "equal answers")
    of_times = ("run", "server", "prefill ms (times stock's)", "decode ms", "batch ms", "mixed s")
    return f"{output.table(of_memory, memory, left=2)}\n{output.table(of_times, times, left=2)}"


def runs_table(results: list[output.Result]) -> str:
    """Make a table with a row for each run: peaks, and the patched server's times relative to the stock server. The
    times of the second stock server are in parentheses.
    """
    rows = []
    for result in results:
        figures = result["figures"]
        stock, patched, again = figures["stock"], figures["patched"], figures.get("stock-again", {})

        def ratio(key: str, patched: dict[str, Any] = patched, again: dict[str, Any] = again) -> str:
            if key not in patched:
                return ""
            return f"{patched[key]:.3f}" + (f" ({again[key]:.3f})" if key in again else "")

        rows.append(
            (
                run_of(result),
                f"{stock['peak'] / MB:,.0f} -> {patched['peak'] / MB:,.0f}",
                f"{stock['ms']:.1f}",
                ratio("time"),
                ratio("decode_ms_ratio"),
                f"{sum(patched['equal'])} of {len(patched['equal'])}",
            )
        )
    header = ("server", "peak MB, stock -> patched", "prefill ms, stock", "time (control)", "decode step")
    return output.table((*header, "equal answers"), rows)


def decode_table(result: output.Result) -> str:
    """Make a table of the decode steps of several stock and several patched servers."""
    rows = []
    for kind in servers.SERVERS:
        chosen = [figures for name, figures in result["figures"].items() if name.split("-")[0] == kind]
        columns = [[figures[key] for figures in chosen] for key in ("decode_ms", "batch_ms")]
        rows.append((kind, *(", ".join(f"{value:.2f}" for value in sorted(values)) for values in columns)))
    return output.table(("ms per decode step, one figure per server", "one request", "32 requests"), rows)


def run_of(result: output.Result) -> str:
    """Return the label of a run, as in "kimi-k2.5, a rank of TP=4, BF16, eager, 0.5.17". It comes from the run's
    command line.
    """
    words = result["command"].split()
    named = dict(zip(words, [*words[1:], ""], strict=True))
    rank = [f"a rank of TP={named['--shard']}"] if named.get("--shard", "1") != "1" else []
    rank += [f"TP={named['--tp']}"] if "--tp" in named else []
    parts = [named.get("--model", "kimi-k2.5"), *rank, "FP8" if "--fp8" in named else "BF16"]
    parts += ["default graphs" if "--graphs" in named else "eager", result["conditions"]["engine"]]
    parts += [f"{named['--changes']} alone"] if "--changes" in named else []
    return ", ".join([*parts, *(["H100"] if "H100" in result["conditions"]["machine"] else [])])


def main() -> None:
    quick = {"model": "tiny", "shard": 1, "tokens": 64, "rounds": 1, "batch": 2, "mixed": 4}
    parser = output.parser(__doc__, quick=quick, logs=True)
    servers.add_options(parser, shard=4)
    parser.add_argument("--fp8", action="store_true", help="FP8 experts, with a scale for each block of 128 x 128")
    parser.add_argument("--changes", default="all", help="SGLANG_MOE_PATCHES of the patched server (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="number of GPUs of each server (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="requests of the decode batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds after the two warm-up rounds (%(default)s)")
    parser.add_argument(
        "--mixed", type=int, default=0, help="requests of many lengths to send at once in each round (%(default)s)"
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=1,
        help="number of stock and of patched servers, because decode steps differ between processes (%(default)s)",
    )
    parser.add_argument("--graphs", action="store_true", help="keep the engine's default CUDA graphs")
    options = output.parse(parser)
    if not options.quick:
        machine.require_gpu("triton_server", "--quick runs without one")
    with output.work_folder(options) as work:
        figures = measure(options, work)
    output.finish(options, output.result("triton_server", figures), lambda result: make_tables([result]))
