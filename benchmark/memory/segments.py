"""Measure how much memory PyTorch's allocator reserves but no tensor uses (slack), with and without
activation-segments.

    python benchmark memory/segments --json segments.json --gpus "0;1"  # Kimi-K2.5's widths, 14 layers
    python benchmark memory/segments --model qwen3-30b --shard 1 --layers 48 --context 40960 --json segments-qwen.json
    python benchmark memory/segments --servers stock,stock-segments --seconds 480  # a long run
    python benchmark memory/segments --tp 2 --servers stock,variable,stock-segments  # custom all-reduce
    python benchmark memory/segments -- --disable-cuda-graph --disable-piecewise-cuda-graph  # without CUDA graphs
    python benchmark memory/segments --quick  # a tiny model, CPU: does it run?

Servers have random weights, the engine's own memory fraction and its default CUDA graphs. Each group of GPUs runs its
servers one after the other:

- `stock`: no change
- `stock-segments`: only activation-segments
- `patched-off`: all changes but activation-segments
- `patched`: all changes
- `stock-again`: a second stock server
- `variable`: a stock server with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True from its start

Every server answers the same requests: eight questions one after the other, at its start and at its end; a prompt of
one chunk; prompts of growing length; a long prompt in several chunks; the largest decode; again prompts of one chunk;
decode steps of one request and of 32 requests; 64 mixed requests at once; and prompts of random lengths for --seconds.
Rank 0 records the allocator's memory and the GPU's free memory in each forward pass.
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
SERVERS = {
    "stock": ("none", ""),
    "stock-segments": ("activation-segments", "on"),
    "patched-off": ("all", "off"),
    "patched": ("all", "on"),
    "stock-again": ("none", ""),
    "variable": ("none", ""),
}
"""Values of ``SGLANG_MOE_PATCHES`` and of activation-segments' own environment variable ("": unset), by server."""
VARIABLES = {"variable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
"""Further environment variables, by server."""
DEFAULT = ("stock", "stock-segments", "patched-off", "patched")
MIXED_REQUESTS = 64
"""Default number of requests of many lengths that are sent at once."""
RANDOM_CLIENTS = 16
"""Number of clients that send prompts of random lengths."""
DECODE_REQUESTS = 32
"""Number of requests in the larger of the two timed decode batches. The smaller one has one request."""
SHORT_PROMPT_TOKENS = 48
"""Number of tokens of a prompt in the measurements of decode steps."""
ANSWER_TOKENS = 16
"""Number of new tokens in each answer to a question."""


class Failed(RuntimeError):
    """Error: the server rejected a request."""


class Requests:
    """Sender of this benchmark's requests to one server. Every server receives the same requests."""

    def __init__(self, server: Server, options: Any, vocabulary: int) -> None:
        self.server, self.options, self.client = server, options, Client(server.url)
        self.tokens = range(1000 if vocabulary > 2000 else 3, min(50_000, vocabulary))
        self.errors: list[str] = []

    def prompt(self, count: int, *seed: Any) -> list[int]:
        """Draw a prompt of ``count`` random token ids."""
        return random.Random(f"{count}/{seed}").choices(self.tokens, k=count)

    def send(self, prompts: list[list[int]], new_tokens: int = 1) -> float:
        """Send all prompts in one request.

        :returns: milliseconds until all prompts are answered.
        :raises Failed: the server rejected the request.
        """
        self.server.check()
        started = time.perf_counter()
        if error := self.client.generate(prompts, new_tokens):
            raise Failed(error)
        return (time.perf_counter() - started) * 1e3

    def time_prefills(self, count: int, seed: str) -> list[float]:
        """Send ``count`` prompts of one chunk, one after the other, and return the milliseconds of each."""
        return [self.send([self.prompt(self.options.chunk, seed, number)]) for number in range(count)]

    def time_decode(self, requests: int, seed: str) -> float:
        """Measure the time of one decode step of ``requests`` requests, in milliseconds.

        The requests are sent twice, with few and with many new tokens. The time of a step is the difference between the
        two times, divided by the difference between the numbers of steps.
        """
        steps = self.options.steps
        short, long = (
            self.send([self.prompt(SHORT_PROMPT_TOKENS, seed, n, r) for r in range(requests)], n)
            for n in (2, steps + 2)
        )
        return (long - short) / steps

    def time_mixed(self, seed: int) -> float:
        """Send requests of many lengths at once, and return the number of requests per second."""
        draw = random.Random(seed)
        longest = self.options.chunk * 3 // 4
        prompts = [self.prompt(draw.randrange(longest // 48 + 1, longest), seed, n) for n in range(self.options.mixed)]
        return len(prompts) * 1e3 / self.send(prompts, self.options.steps)

    def run_largest_forwards(self) -> None:
        """Send prompts of growing length, a long prompt in chunks, many prompts at once, and the largest decode
        batch."""
        chunk, options = self.options.chunk, self.options
        for part in range(1, 9):
            self.send([self.prompt(-(-chunk * part // 8), "rising")], 2)
        prefix = self.prompt(min(options.context - chunk - 16, 3 * chunk), "behind")
        self.send([prefix + self.prompt(chunk - 16, "behind it")])
        self.send([self.prompt(chunk // 8, "at once", n) for n in range(9)], 2)
        self.send([self.prompt(8, "decode", n) for n in range(options.requests)], options.steps)

    def send_random(self, seconds: float) -> tuple[int, int]:
        """Send prompts of random lengths from ``RANDOM_CLIENTS`` clients.

        :returns: number of answers, and number of requests for which the client closed the connection.
        :raises Failed: the server rejected a request.
        """
        stop, counts = threading.Event(), [0, 0]
        longest = min(2 * self.options.chunk, self.options.context - 300)

        def work(number: int) -> None:
            draw = random.Random(number)
            while not stop.is_set():
                count, new = (max(1, round(limit ** draw.random())) for limit in (longest, 256))
                timeout_s = 0.05 + draw.random() if draw.random() < 0.1 else 900.0
                try:
                    prompt = self.prompt(count, number, draw.random())
                    error = self.client.generate([prompt], new, sampling={"temperature": 0.8}, timeout_s=timeout_s)
                except Unanswered:
                    counts[1] += 1
                    continue
                counts[0] += 1
                if error and not stop.is_set():
                    self.errors.append(error)

        with ThreadPoolExecutor(RANDOM_CLIENTS) as pool:
            for number in range(RANDOM_CLIENTS):
                pool.submit(work, number)
            started = time.monotonic()
            while time.monotonic() < started + seconds:
                self.server.check()
                time.sleep(0.5)
            stop.set()
            self.client.abort_all()
        if self.errors:
            raise Failed(self.errors[0])
        return counts[0], counts[1]


def measure(requests: Requests, path: Path) -> dict[str, Any]:
    """Send all requests of this benchmark to a server, and compute the server's figures.

    :param path: file in which the server records its allocator's memory.
    """
    options = requests.options
    figures: dict[str, Any] = {"first_ms": requests.send([requests.prompt(options.chunk, "first")])}
    requests.run_largest_forwards()
    figures["prefill_ms"] = requests.time_prefills(options.rounds, "later")
    figures["decode_ms"] = [requests.time_decode(1, f"one {n}") for n in range(options.rounds)]
    figures["batch_ms"] = [requests.time_decode(DECODE_REQUESTS, f"batch {n}") for n in range(options.rounds)]
    figures["mixed_per_s"] = [requests.time_mixed(seed) for seed in range(options.rounds // 2 + 1)]
    before = len(allocator_trace.read(path))
    figures["answered"], figures["left"] = requests.send_random(options.seconds)
    during = allocator_trace.read(path)[before:]
    requests.run_largest_forwards()
    lines = allocator_trace.read(path)
    slack = allocator_trace.compute_slack(lines, during)
    return figures | asdict(slack) | {"slack": slack.slack, "forwards": len(lines)}


def serve(name: str, options: Any, work: Path, model: Path, group: str) -> dict[str, Any]:
    """Start, measure and end one server.

    :param group: value of ``CUDA_VISIBLE_DEVICES``; "": all GPUs.
    """
    select, segments = SERVERS[name]
    path = work / f"{name}.jsonl"
    environ = processes.variables(work / "plugin", *dummy_weights.write_plugin(work / "weights"))
    environ |= {} if has_gpu() else environment.variables(environ)
    environ |= {SELECT_VARIABLE: select, SEGMENTS.name: segments, allocator_trace.VARIABLE: str(path)}
    environ |= VARIABLES.get(name, {})
    environ |= {"CUDA_VISIBLE_DEVICES": group} if group else {}
    arguments = environment.server_arguments(["--model-path", str(model), *dummy_servers.server_arguments(options)])
    log, progress = work / f"{name}.log", processes.print_progress(name, 20)
    server = Server(name, arguments, environ, log, timeout=400, progress=progress)
    with server:
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        at_start = servers.answer_digests(server, options.chunk, ANSWER_TOKENS)
        figures = {"startup_s": round(server.startup_s, 1)} | measure(Requests(server, options, vocabulary), path)
        figures["answers"] = [*at_start, *servers.answer_digests(server, options.chunk, ANSWER_TOKENS)]
    log_lines = [line for line in server.log_text().splitlines() if "activation-segments" in line]
    print("\n".join([f"{name}: {json.dumps(figures)}", *(f"  {line[-300:]}" for line in log_lines)]), flush=True)
    return figures | {"log": log_lines}


def serve_all(options: Any, work: Path, finished: Callable[[dict[str, Any]], None]) -> None:
    """Measure all servers. Groups of GPUs run at the same time, and the servers of a group run one after the other.

    :param finished: called after each server, with the figures of all servers so far.
    """
    model = dummy_servers.write_model(work / "model", options)
    plugins.write(work / "plugin", "benchmark_allocator", "common.allocator_trace:register")
    groups = options.gpus.split(";") if options.gpus else [""]
    done: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def serve_group(group: str, names: Sequence[str]) -> None:
        for name in names:
            try:
                figures = serve(name, options, work, model, group)
            except Exception as error:  # keep the figures of the other servers
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            with lock:
                done[name] = figures
                finished({server: done[server] for server in SERVERS if server in done})

    share = -(-len(options.servers) // len(groups))
    shares = [options.servers[at * share : (at + 1) * share] for at in range(len(groups))]
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(serve_group, groups, shares))  # list() raises the exceptions of the threads


# --- tables -----------------------------------------------------------------------------------------------------------


def make_tables(results: Sequence[output.Result]) -> str:
    """Make tables with a row for each server: memory, times, and the numbers of answers that equal stock's."""
    memory: list[tuple[str, ...]] = []
    times: list[tuple[str, ...]] = []
    answers: list[tuple[str, ...]] = []
    for result in results:
        figures = result["figures"]
        for place, (name, server) in enumerate(figures["servers"].items()):
            run = '"' if place else dummy_servers.run_label(result)
            share = f" ({round(100 * server['slack'] / server['tensors'])} %)" if server["tensors"] else ""
            slack = f"{server['slack'] / MB:,.0f}{share}"
            sizes = (f"{server[figure] / MB:,.0f}" for figure in ("lowest_free", "grown"))
            memory.append((run, name, f"{server['tensors'] / MB:,.0f}", slack, *sizes))
            medians = (f"{statistics.median(server[figure]):.1f}" for figure in ("prefill_ms", "decode_ms", "batch_ms"))
            times.append((run, name, *medians, f"{statistics.median(server['mixed_per_s']):.1f}"))
            if alike := servers.equal_answers(figures["servers"], name):
                answers.append((run, name, alike))
    of_memory = ("run", "server", "tensors MB", "slack MB (of the tensors)", "lowest free MB", "grown MB")
    of_times = ("run", "server", "prefill ms", "decode ms", f"decode of {DECODE_REQUESTS} ms", "mixed requests/s")
    found = [output.table(of_memory, memory, left=2), output.table(of_times, times, left=2)]
    if answers:
        found.append(output.table(("run", "server", "answers equal to stock's"), answers, left=2))
    return "\n".join(found)


def main() -> None:
    quick = {"chunk": 64, "context": 512, "requests": 4, "seconds": 3.0, "rounds": 1, "steps": 4, "mixed": 4}
    parser = output.parser(__doc__, quick={**quick, "servers": ["stock", "patched"]}, logs=True)
    dummy_servers.add_options(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="seconds in which clients send prompts of random lengths (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each time (%(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a request (%(default)s)")
    parser.add_argument("--mixed", type=int, default=MIXED_REQUESTS, help="number of mixed requests (%(default)s)")
    parser.add_names("--servers", "servers to measure", SERVERS, DEFAULT)
    parser.add_argument(
        "--gpus",
        default="",
        help="groups of GPUs, as in 0;1. Each group runs a part of the servers, one after the other",
    )
    parser.add_argument("arguments", nargs="*", help="further server arguments, after `--`")
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
    output.finish(options, output.result("segments", figures), lambda result: make_tables([result]))
