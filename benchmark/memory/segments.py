"""What the allocator keeps beyond the tensors, with activation-segments and without, on real servers.

    python benchmark memory/segments --json segments.json --gpus "0;1"  # Kimi-K2.5's widths, 14 layers
    python benchmark memory/segments --model qwen3-30b --shard 1 --layers 48 --context 40960 --json segments-qwen.json
    python benchmark memory/segments --servers stock,stock-segments --seconds 480  # a long run
    python benchmark memory/segments --tp 2 --servers stock,variable,stock-segments  # custom all-reduce
    python benchmark memory/segments -- --disable-cuda-graph --disable-piecewise-cuda-graph  # everything eager
    python benchmark memory/segments --quick  # a tiny model, CPU: does it run?

Four servers, one after the other on each group of GPUs, at the engine's own fraction and with its default graphs,
random weights: stock and patched, each with activation-segments and without; `stock-again` is a second stock server,
and `variable` a stock one with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True from its start. Each is asked the same:
eight questions alone, at its start and at its end, a first prompt of a chunk, rising prompts, chunks behind chunks, the
largest decode, prompts of a chunk again, steps of one request and of 32, 64 mixed requests, and then random lengths for
--seconds. What the forwards took is read from the allocator and from the driver at each of them, on the first rank.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import allocator_trace, dummy_servers, dummy_weights, machine, output, plugins, processes, servers
from common.client import Client, Unanswered
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_patches.memory.activation_segments.eligibility import SEGMENTS
from sglang_moe_reference import environment

MB = 1e6
#: SGLANG_MOE_PATCHES, and whether segments are on.
SERVERS = {
    "stock": ("none", ""),
    "stock-segments": ("activation-segments", "on"),
    "patched-off": ("all", "off"),
    "patched": ("all", "on"),
    "stock-again": ("none", ""),
    "variable": ("none", ""),
}
#: More variables of a server.
VARIABLES = {"variable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
DEFAULT = ("stock", "stock-segments", "patched-off", "patched")
MIXED = 64
CLIENTS = 16
BATCH = 32
SHORT = 48
ANSWER_TOKENS = 16
"""New tokens of each answer to a question."""


class Failed(RuntimeError):
    """A request was not answered as it should be."""


class Asking:
    """The requests, the same for every server."""

    def __init__(self, server: Server, options: Any, vocabulary: int) -> None:
        self.server, self.options, self.client = server, options, Client(server.url)
        self.tokens = range(1000 if vocabulary > 2000 else 3, min(50_000, vocabulary))
        self.errors: list[str] = []

    def some(self, count: int, *seed: Any) -> list[int]:
        return random.Random(f"{count}/{seed}").choices(self.tokens, k=count)

    def ms(self, prompts: list[list[int]], new_tokens: int = 1) -> float:
        """Milliseconds until all are answered."""
        self.server.check()
        begun = time.perf_counter()
        if error := self.client.generate(prompts, new_tokens):
            raise Failed(error)
        return (time.perf_counter() - begun) * 1e3

    def prefills(self, count: int, seed: str) -> list[float]:
        return [self.ms([self.some(self.options.chunk, seed, number)]) for number in range(count)]

    def decode(self, requests: int, seed: str) -> float:
        """Milliseconds of a step of so many requests: of the longer run, without those of the shorter."""
        steps = self.options.steps
        short, long = (self.ms([self.some(SHORT, seed, n, r) for r in range(requests)], n) for n in (2, steps + 2))
        return (long - short) / steps

    def mixed(self, seed: int) -> float:
        """Requests a second, of ``MIXED`` requests of many lengths."""
        draw = random.Random(seed)
        longest = self.options.chunk * 3 // 4
        prompts = [self.some(draw.randrange(longest // 48 + 1, longest), seed, n) for n in range(self.options.mixed)]
        return len(prompts) * 1e3 / self.ms(prompts, self.options.steps)

    def largest(self) -> None:
        """Rising prompts, chunks behind chunks, many at once, the most requests that decode together."""
        chunk, options = self.options.chunk, self.options
        for part in range(1, 9):
            self.ms([self.some(-(-chunk * part // 8), "rising")], 2)
        prefix = self.some(min(options.context - chunk - 16, 3 * chunk), "behind")
        self.ms([prefix + self.some(chunk - 16, "behind it")])
        self.ms([self.some(chunk // 8, "at once", n) for n in range(9)], 2)
        self.ms([self.some(8, "decode", n) for n in range(options.requests)], options.steps)

    def random(self, seconds: float) -> tuple[int, int]:
        """Prompts of random lengths from ``CLIENTS`` clients; (how many were answered, how many we left).

        :raises Failed: one was refused.
        """
        stop, counts = threading.Event(), [0, 0]
        longest = min(2 * self.options.chunk, self.options.context - 300)

        def work(number: int) -> None:
            draw = random.Random(number)
            while not stop.is_set():
                count, new = (max(1, round(limit ** draw.random())) for limit in (longest, 256))
                leaves = 0.05 + draw.random() if draw.random() < 0.1 else 900.0
                try:
                    prompt = self.some(count, number, draw.random())
                    error = self.client.generate([prompt], new, sampling={"temperature": 0.8}, timeout_s=leaves)
                except Unanswered:
                    counts[1] += 1
                    continue
                counts[0] += 1
                if error and not stop.is_set():
                    self.errors.append(error)

        with ThreadPoolExecutor(CLIENTS) as pool:
            for number in range(CLIENTS):
                pool.submit(work, number)
            begun = time.monotonic()
            while time.monotonic() < begun + seconds:
                self.server.check()
                time.sleep(0.5)
            stop.set()
            self.client.abort_all()
        if self.errors:
            raise Failed(self.errors[0])
        return counts[0], counts[1]


def measure(asking: Asking, path: Path) -> dict[str, Any]:
    """Ask one server everything; in the file it writes what its allocator holds."""
    options = asking.options
    figures: dict[str, Any] = {"first_ms": asking.ms([asking.some(options.chunk, "first")])}
    asking.largest()
    figures["prefill_ms"] = asking.prefills(options.rounds, "later")
    figures["decode_ms"] = [asking.decode(1, f"one {n}") for n in range(options.rounds)]
    figures["batch_ms"] = [asking.decode(BATCH, f"batch {n}") for n in range(options.rounds)]
    figures["mixed_per_s"] = [asking.mixed(seed) for seed in range(options.rounds // 2 + 1)]
    before = len(allocator_trace.read(path))
    figures["answered"], figures["left"] = asking.random(options.seconds)
    during = allocator_trace.read(path)[before:]
    asking.largest()
    lines = allocator_trace.read(path)
    slack = allocator_trace.compute_slack(lines, during)
    return figures | asdict(slack) | {"slack": slack.slack, "forwards": len(lines)}


def serve(name: str, options: Any, work: Path, model: Path, group: str) -> dict[str, Any]:
    """Start, ask and end one server."""
    select, segments = SERVERS[name]
    path = work / f"{name}.jsonl"
    own = processes.variables(work / "plugin", *dummy_weights.write_plugin(work / "weights"))
    own |= {} if has_gpu() else environment.variables(own)
    own |= {SELECT_VARIABLE: select, SEGMENTS.name: segments, allocator_trace.VARIABLE: str(path)}
    own |= VARIABLES.get(name, {})
    own |= {"CUDA_VISIBLE_DEVICES": group} if group else {}
    arguments = environment.server_arguments(["--model-path", str(model), *dummy_servers.server_arguments(options)])
    log, progress = work / f"{name}.log", processes.print_progress(name, 20)
    server = Server(name, arguments, own, log, timeout=400, progress=progress)
    with server:
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        at_start = servers.answer_digests(server, options.chunk, ANSWER_TOKENS)
        figures = {"startup_s": round(server.startup_s, 1)} | measure(Asking(server, options, vocabulary), path)
        figures["answers"] = [*at_start, *servers.answer_digests(server, options.chunk, ANSWER_TOKENS)]
    log_lines = [line for line in server.log_text().splitlines() if "activation-segments" in line]
    print("\n".join([f"{name}: {json.dumps(figures)}", *(f"  {line[-300:]}" for line in log_lines)]), flush=True)
    return figures | {"log": log_lines}


def serve_all(options: Any, work: Path, finished: Callable[[dict[str, Any]], None]) -> None:
    """Each group's servers one after the other; ``finished`` gets the figures so far after each."""
    model = dummy_servers.write_model(work / "model", options)
    plugins.write(work / "plugin", "benchmark_allocator", "common.allocator_trace:register")
    groups = options.gpus.split(";") if options.gpus else [""]
    done: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def in_turn(group: str, names: Sequence[str]) -> None:
        for name in names:
            try:
                figures = serve(name, options, work, model, group)
            except Exception as error:  # what the other servers were seen to do is worth keeping
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            with lock:
                done[name] = figures
                finished({server: done[server] for server in SERVERS if server in done})

    share = -(-len(options.servers) // len(groups))
    shares = [options.servers[at * share : (at + 1) * share] for at in range(len(groups))]
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(in_turn, groups, shares))  # what one raises is raised here


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(results: Sequence[output.Result]) -> str:
    """Two tables with a row for each server: memory, and times with answers."""
    memory: list[tuple[str, ...]] = []
    times: list[tuple[str, ...]] = []
    answers: list[tuple[str, ...]] = []
    for result in results:
        figures = result["figures"]
        for place, (name, one) in enumerate(figures["servers"].items()):
            run = '"' if place else dummy_servers.run_label(result)
            share = f" ({round(100 * one['slack'] / one['tensors'])} %)" if one["tensors"] else ""
            slack = f"{one['slack'] / MB:,.0f}{share}"
            sizes = (f"{one[what] / MB:,.0f}" for what in ("lowest_free", "grown"))
            memory.append((run, name, f"{one['tensors'] / MB:,.0f}", slack, *sizes))
            medians = (f"{statistics.median(one[what]):.1f}" for what in ("prefill_ms", "decode_ms", "batch_ms"))
            times.append((run, name, *medians, f"{statistics.median(one['mixed_per_s']):.1f}"))
            if alike := servers.equal_answers(figures["servers"], name):
                answers.append((run, name, alike))
    of_memory = ("run", "server", "tensors MB", "slack MB (of the tensors)", "lowest free MB", "grown MB")
    of_times = ("run", "server", "prefill ms", "decode ms", f"decode of {BATCH} ms", "mixed requests/s")
    found = [output.table(of_memory, memory, left=2), output.table(of_times, times, left=2)]
    if answers:
        found.append(output.table(("run", "server", "answers as stock's"), answers, left=2))
    return "\n".join(found)


def main() -> None:
    quick = {"chunk": 64, "context": 512, "requests": 4, "seconds": 3.0, "rounds": 1, "steps": 4, "mixed": 4}
    parser = output.parser(__doc__, quick={**quick, "servers": ["stock", "patched"]}, logs=True)
    dummy_servers.add_options(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="of random lengths (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each time")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a request")
    parser.add_argument("--mixed", type=int, default=MIXED, help="mixed requests at once")
    parser.add_argument("--servers", type=output.choice_of(SERVERS), default=list(DEFAULT), metavar="NAME,...")
    parser.add_argument("--gpus", default="", help="groups, as 0;1. Each has its part of the servers, one at a time")
    parser.add_argument("arguments", nargs="*", help="more server arguments, after `--`")
    options = output.parse(parser)
    if not options.quick:
        machine.require_gpu("segments", "--quick runs without one")
    described_by = ("model", "shard", "layers", "context", "chunk", "requests", "tp", "seconds", "rounds", "steps")
    figures = dummy_servers.describe_options(options, described_by) | {"servers": {}}

    def finished(measured: dict[str, Any]) -> None:
        figures["servers"] = measured
        if options.json:
            output.write(options.json, output.result("segments", figures))

    with output.work_folder(options) as work:
        serve_all(options, work, finished)
    if not figures["servers"]:
        raise SystemExit("segments: no server was measured")
    output.finish(options, output.result("segments", figures), lambda result: tables([result]))
