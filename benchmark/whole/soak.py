"""Run a stock and a patched server for minutes under mixed prompts, aborts, cache flushes and weight updates.

    python benchmark whole/soak --gpus "0;1" --json soak.json       # 4 layers of Qwen3-30B, BF16, 8 minutes
    python benchmark whole/soak --gpus "0;0" --minutes 1 --seed 2    # both on one GPU
    python benchmark whole/soak --quick                             # a tiny model, CPU: does it run?

Both servers load the first of two checkpoints from disk, and receive the same requests, drawn from one seed. A round
has these steps:

1. Clients send prompts of random lengths. Some clients close their connection, and some requests are aborted by their
   id. At the end of the round all requests are aborted.
2. Fixed prompts are sent one after the other. They are answered greedily and without the radix cache.
3. After every second round the radix cache is flushed. After every fourth round, a request replaces the weights with
   those of the other checkpoint.

The exit code is 1 if an error occurred, if two answers to a fixed prompt differ despite the same weights, or if the
patched server's reserved memory grew clearly more than its tensors from the first to the second half of the time.
(Tensors grow with every flush in both servers, because the engine makes a new free list of the KV cache, 8 bytes per
token, and keeps the old one for a while.) The exit code is also 1 if the run tested too little: for example, if no
weight update took effect, or no change acted.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import allocator_trace, forwards, machine, output, plugins, processes, weights
from common.client import Client, Unanswered
from common.servers import EAGER, RUNNER_ARGUMENTS, digests, generate, prompt
from common.shapes import MODELS, TINY
from common.weights import ServedModel
from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.lab.servers.server import Server, ServerFailed
from sglang_moe_patches.memory.activation_segments.eligibility import SEGMENTS
from sglang_moe_reference import environment

MB = 1e6
SERVERS = {"stock": ("none", "off"), "patched": ("all", "on")}
"""Values of ``SGLANG_MOE_PATCHES`` and of activation-segments' own environment variable, by server."""
WORKSPACE_MB = "600"
"""``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` of both servers. Without it, moe-workspace would not cut layers with tuned
tiles, such as the layers of Qwen3-30B, and the soak would not test moe-workspace.
"""
MAX_GROWTH_FRACTION = 0.02
"""Limit on :func:`unexplained_growth`, as a fraction of the memory that forward passes reserved in the first half of
the time.
"""
CLOSED_FRACTION, ABORTED_FRACTION = 0.08, 0.08
"""Fraction of the requests whose client closes the connection, and fraction of the requests that are aborted by id."""
PREFIXED_FRACTION = 0.3
"""Fraction of the requests that begin with the shared prefix."""
FLUSH_EVERY, UPDATE_EVERY = 2, 4
"""Number of rounds from one flush of the radix cache to the next, and from one weight update to the next."""
FATAL_TEXT = re.compile(r"CUDA error|OutOfMemoryError|out of memory|Scheduler hit an exception|Traceback \(most recent")
"""Matches a text in a server's log that counts as an error."""
START_S, TIMEOUT_S = 400.0, 300.0
"""Timeouts of a server's start and of a request, in seconds."""
PROBE_TOKENS = 24
"""Number of new tokens in an answer to a fixed prompt."""


@dataclass(frozen=True)
class Draw:
    """One request of the load.

    :param rid: id of the request. No id is a prefix of another id, because the engine aborts by prefix.
    :param tokens: tokens of the prompt.
    :param new_tokens: tokens to generate.
    :param prefix: number of tokens of the shared prefix at the beginning of the prompt.
    :param closes_after_s: seconds until the client closes the connection; ``None``: it stays open.
    :param aborts_after_s: seconds until the request is aborted by its id; ``None``: it is not aborted.
    """

    rid: str
    tokens: int
    new_tokens: int
    prefix: int = 0
    closes_after_s: float | None = None
    aborts_after_s: float | None = None


def draw_requests(seed: int, round_: int, client: int, longest: int, most_new: int) -> Iterator[Draw]:
    """Draw an endless sequence of requests for one client in one round.

    All orders of magnitude of a length are equally probable, so most requests are short.
    """
    draw = random.Random(f"{seed}/{round_}/{client}")
    number = 0
    while True:
        tokens, new_tokens = (max(1, round(limit ** draw.random())) for limit in (longest, most_new))
        fate, after, shares = draw.random(), 0.02 + draw.random(), draw.random()
        yield Draw(
            f"{seed}-{round_}-{client}-{number}-",
            tokens,
            new_tokens,
            prefix=tokens // 2 if shares < PREFIXED_FRACTION else 0,
            closes_after_s=after if fate < CLOSED_FRACTION else None,
            aborts_after_s=after if CLOSED_FRACTION <= fate < CLOSED_FRACTION + ABORTED_FRACTION else None,
        )
        number += 1


@dataclass
class Record:
    """Results of one server. Memory is in bytes.

    :param seconds: seconds since the start of the first round.
    :param left: number of requests whose client closed the connection.
    :param probes: number of fixed prompts that were sent.
    :param answers: count of each distinct answer (its digest), by the weights and the length of the fixed prompt.
    :param logprobs: the same for the answers' log-probabilities.
    :param forwards: number of forward passes.
    :param columns: number of forward passes in which a tensor was cut into column slices.
    :param dead_inputs: number of forward passes in which a dead input was used.
    :param before: memory that the allocator had reserved after the server's first forward pass.
    :param first_half: largest memory that the allocator reserved in the first half; ``second_half`` likewise.
    :param first_peak: peak of the allocated memory in the first half; ``second_peak`` likewise.
    :param lowest_free: lowest free memory of the GPU.
    """

    seconds: float = 0.0
    rounds: int = 0
    answered: int = 0
    left: int = 0
    aborted: int = 0
    flushes: int = 0
    updates: int = 0
    probes: int = 0
    errors: list[str] = field(default_factory=list)
    answers: dict[str, Counter[str]] = field(default_factory=dict)
    logprobs: dict[str, Counter[str]] = field(default_factory=dict)
    forwards: int = 0
    columns: int = 0
    dead_inputs: int = 0
    before: int = 0
    first_half: int = 0
    second_half: int = 0
    first_peak: int = 0
    second_peak: int = 0
    lowest_free: int = 0


# --- verdict ----------------------------------------------------------------------------------------------------------


def unexplained_growth(server: dict[str, Any]) -> int:
    """Return the growth of the allocator's reserved memory that tensors do not explain, in bytes.

    Growth is the maximum in the second half of the time, minus the maximum in the first half. If reserved memory grew
    by 300 MB and the peak of the tensors by 100 MB, the result is 200 MB. If the peak of the tensors fell, it counts as
    unchanged.
    """
    tensors = max(0, server["second_peak"] - server["first_peak"])
    return int(server["second_half"] - server["first_half"] - tensors)


def distinct_answers(servers: dict[str, Any], part: str = "answers") -> dict[str, set[str]]:
    """Return the distinct answers of all servers to each fixed prompt, for each set of weights.

    :param part: ``answers`` or ``logprobs``.
    """
    keys = dict.fromkeys(key for server in servers.values() for key in server[part])
    return {key: {answer for server in servers.values() for answer in server[part].get(key, ())} for key in keys}


def find_failures(figures: dict[str, Any]) -> list[str]:
    """Find the reasons why the run failed. An empty list means that the run passed."""
    servers = figures["servers"]
    failures = [f"{name}: not run" for name in SERVERS if name not in servers]
    for name, server in servers.items():
        if server["errors"]:
            failures.append(f"{name}: {len(server['errors'])} errors, the first: {server['errors'][0]}")
        failures += [
            f"{name}: {event}: none" for event in ("aborted", "left", "flushes", "updates") if not server[event]
        ]
    answers = distinct_answers(servers)
    if not answers:
        failures.append("no fixed prompt was sent")
    by_prompt: dict[str, set[str]] = {}
    for key, several in answers.items():
        by_prompt.setdefault(key.split(", ")[1], set()).update(several)
        if len(several) > 1:
            counts = ", ".join(f"{name} {len(server['answers'].get(key, ()))}" for name, server in servers.items())
            failures.append(f"{key}: {len(several)} different answers ({counts})")
    if answers and not any(len(several) > 1 for several in by_prompt.values()):
        failures.append("both sets of weights give the same answers, so no weight update took effect")
    if (patched := servers.get("patched")) is not None:
        growth = unexplained_growth(patched)
        if growth > MAX_GROWTH_FRACTION * (patched["first_half"] - patched["before"]):
            failures.append(
                f"patched: {growth / MB:,.0f} MB more reserved in the second half, beyond what tensors grew"
            )
        # One of two acts is enough. If experts are as wide as those of Qwen3-30B, the output of the activation function
        # does not fit into the dead input, so only column slices can act.
        if figures["gpu"] and not (patched["columns"] or patched["dead_inputs"]):
            failures.append("patched: no change acted in any forward pass")
    return failures


# --- one server -------------------------------------------------------------------------------------------------------


class ServerRun:
    """Run the load on one started server, and record the server's results.

    :param models: folders of the two checkpoints.
    :param forward_files: files to which the plugins :mod:`common.allocator_trace` and :mod:`common.forwards` write.
    """

    def __init__(self, server: Server, options: Any, models: Sequence[Path], forward_files: tuple[Path, Path]) -> None:
        self.server, self.options, self.models, self.forward_files = server, options, models, forward_files
        self.record = Record()
        self._lock = threading.Lock()
        self._loaded = 0
        self._shared = prompt(options.longest, -1)
        self._client = Client(server.url)

    def run(self, finished: Callable[[], None]) -> None:
        """Run rounds until the time is over. If a round raises an exception, record it as an error and stop.

        :param finished: called after each weight update and at the end.
        """
        started, number = time.time(), 0
        try:
            while time.time() < started + self.options.seconds:
                self.run_clients(number)
                number += 1
                self.send_fixed_prompts()
                if number % FLUSH_EVERY == 0:
                    self.flush_cache()
                if number % UPDATE_EVERY == 0:
                    self.update_weights()
                    self.send_fixed_prompts()
                    self.read_forwards(started)
                    finished()
                self.record.rounds, self.record.seconds = number, round(time.time() - started, 1)
        except Exception as error:
            self.add_error(f"{type(error).__name__}: {str(error)[:2000]}")
        self.record.seconds = round(time.time() - started, 1)
        self.read_forwards(started)
        finished()

    def add_error(self, message: str) -> None:
        """Record and print an error."""
        with self._lock:
            self.record.errors.append(message)
        print(f"{self.server.name}: {message}", flush=True)

    def run_clients(self, round_: int) -> None:
        """Run the clients of one round. All requests have ended when this returns."""
        over = threading.Event()
        options = self.options

        def work(client: int) -> None:
            for draw in draw_requests(options.seed, round_, client, options.longest, options.new_tokens):
                if over.is_set():
                    return
                self.send(draw, over)

        with ThreadPoolExecutor(options.clients) as pool:
            working = [pool.submit(work, client) for client in range(options.clients)]
            ends = time.monotonic() + options.round
            while time.monotonic() < ends:
                try:
                    self.server.check()
                except ServerFailed:
                    over.set()
                    raise
                time.sleep(0.2)
            over.set()
            self.abort("")
        for future in working:
            future.result()

    def send(self, draw: Draw, over: threading.Event) -> None:
        """Send one request and record its outcome.

        :param over: event that is set at the end of the round. A later abort is no error.
        """
        tokens = self._shared[: draw.prefix] + prompt(draw.tokens - draw.prefix, draw.rid)
        body: dict[str, Any] = {"rid": draw.rid, "input_ids": tokens}
        body["sampling_params"] = {"temperature": 0.8, "max_new_tokens": draw.new_tokens, "ignore_eos": True}
        aborter = None
        if draw.aborts_after_s is not None:
            aborter = threading.Timer(draw.aborts_after_s, self.abort, [draw.rid])
            aborter.start()
        try:
            answer = self._client.post("/generate", body, timeout_s=draw.closes_after_s or TIMEOUT_S)
        except Unanswered as error:
            if error.lost or draw.closes_after_s is None:
                self.add_error(f"{error} to {draw}")
                return
            with self._lock:
                self.record.left += 1
            return
        finally:
            if aborter is not None:
                aborter.cancel()
                aborter.join()
        outcome = classify_answer(answer.status_code, answer.text)
        with self._lock:
            if outcome == "answered":
                self.record.answered += 1
            elif outcome == "aborted":
                self.record.aborted += 1
        if outcome == "aborted" and draw.aborts_after_s is None and not over.is_set():
            self.add_error(f"the server aborted a request by itself: {draw}")
        elif outcome == "answered" and len(answer.json()["output_ids"]) != draw.new_tokens:
            self.add_error(f"{len(answer.json()['output_ids'])} tokens in answer to {draw}")
        elif outcome not in ("answered", "aborted"):
            self.add_error(f"{outcome} to {draw}")

    def abort(self, rid: str) -> None:
        """Abort requests.

        :param rid: id of the request; "": all requests.
        """
        try:
            self._post("/abort_request", {"rid": rid, "abort_all": not rid})
        except Exception as error:  # an exception in a timer's thread would be lost
            self.add_error(f"{type(error).__name__}: {str(error)[:300]}")

    def send_fixed_prompts(self) -> None:
        """Send the fixed prompts greedily. A new ``extra_key`` keeps them from using the radix cache."""
        for length in self.options.probes:
            extra_key = f"probe {self.record.probes}"
            answer = generate(self.server, prompt(length, 0), PROBE_TOKENS, extra_key=extra_key)
            key = f"weights {self._loaded}, {length} tokens"
            for part, counts in (("tokens", self.record.answers), ("logprobs", self.record.logprobs)):
                counts.setdefault(key, Counter()).update(digests([answer], part))
            self.record.probes += 1

    def flush_cache(self) -> None:
        self.server.check()
        self._client.flush_cache()
        self.record.flushes += 1

    def update_weights(self) -> None:
        """Replace the weights with those of the other checkpoint."""
        self._loaded = (self._loaded + 1) % len(self.models)
        answer = self._post("/update_weights_from_disk", {"model_path": str(self.models[self._loaded])})
        if not answer["success"]:
            self.add_error(f"weight update: {answer}")
        self.record.updates += 1

    def _post(self, path: str, body: Any) -> Any:
        self.server.check()
        answer = self._client.post(path, body, timeout_s=TIMEOUT_S)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: HTTP {answer.status_code}: {answer.text[:300]}")
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None

    def read_forwards(self, started: float) -> None:
        """Update the results from the lines that the forward passes have written so far, and from the log."""
        record, (memory_file, acts_file) = self.record, self.forward_files
        if lines := allocator_trace.read(memory_file):
            add_memory(record, lines, started)
        acted = [forward for forward in forwards.read(acts_file) if forward.tokens is not None]
        record.forwards = len(acted)
        record.columns = sum(bool(forward.slices) for forward in acted)
        record.dead_inputs = sum(bool(forward.outputs or forward.scratch) for forward in acted)
        fatal = Counter(match[0] for match in map(FATAL_TEXT.search, self.server.log_text().splitlines()) if match)
        others = [error for error in record.errors if not error.startswith("log: ")]
        record.errors = others + [f"log: {message} ({count} times)" for message, count in fatal.items()]


def add_memory(record: Record, lines: Sequence[allocator_trace.Line], started: float) -> None:
    """Set the memory figures of ``record``, for both halves of the time since ``started``.

    :param lines: lines of :mod:`common.allocator_trace`.
    """
    later = [line for line in lines if line.at >= started] or [lines[0]]
    middle = started + (later[-1].at - started) / 2
    record.before = lines[0].reserved
    first, second = ([line for line in later if (line.at < middle) is half] for half in (True, False))
    record.first_half = max((line.reserved for line in first), default=0)
    record.second_half = max((line.reserved for line in second), default=0)
    record.first_peak = max((line.peak for line in first), default=0)
    record.second_peak = max((line.peak for line in second), default=0)
    record.lowest_free = min(line.free for line in later)


def classify_answer(status: int, text: str) -> str:
    """Return the outcome of a request: ``answered``, ``aborted``, or the server's error.

    :param status: HTTP status.
    :param text: body of the response.
    """
    if status != 200:
        # If a request is aborted before it runs, the engine answers with one of these statuses.
        return "aborted" if status in (400, 499, 503) and "abort" in text.lower() else f"HTTP {status}: {text[:300]}"
    reason = json.loads(text)["meta_info"]["finish_reason"] or {}
    return "aborted" if reason.get("type") == "abort" else "answered"


# --- both -------------------------------------------------------------------------------------------------------------


def served_model(options: Any) -> ServedModel:
    if options.quick:
        return ServedModel(TINY)
    return ServedModel(MODELS[options.model], moe_layers=options.layers, runner="triton")


def server_arguments(options: Any, model: Path) -> list[str]:
    arguments = ["--model-path", str(model), *RUNNER_ARGUMENTS[served_model(options).runner], "--skip-tokenizer-init"]
    arguments += ["--grammar-backend", "none", "--random-seed", "1", "--chunked-prefill-size", str(options.chunk)]
    arguments += ["--max-running-requests", str(options.requests), "--max-total-tokens", str(options.cache)]
    if has_gpu():
        arguments += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.9"]
        if options.captured:  # a replayed prefill allocates nothing, so longer prefills must run without a graph
            arguments += ["--piecewise-cuda-graph-max-tokens", str(options.captured)]
    elif options.quick:
        arguments += EAGER
    return environment.server_arguments([*arguments, *options.arguments])


def make_server(name: str, options: Any, work: Path, model: Path, group: str) -> tuple[Server, tuple[Path, Path]]:
    """Make a server without starting it.

    :returns: the server, and the files for the lines of its forward passes.
    """
    select, segments = SERVERS[name]
    forward_files = (work / f"{name}-held.jsonl", work / f"{name}-forwards.jsonl")
    own = processes.variables(work / "plugins", Path(__file__).parents[1])
    own |= environment.variables(own) if options.quick else {}
    own |= {
        SELECT_VARIABLE: select,
        SEGMENTS.name: segments,
        MOE_WORKSPACE_MB.name: WORKSPACE_MB,
        allocator_trace.VARIABLE: str(forward_files[0]),
        forwards.VARIABLE: str(forward_files[1]),
        forwards.UNTIMED: "1",
        # Without this variable, each server would choose compiled kernels by their time. Different kernels round
        # differently.
        "TORCHINDUCTOR_DETERMINISTIC": "1",
    }
    own |= {"CUDA_VISIBLE_DEVICES": group} if group else {}
    log, progress = work / f"{name}.log", processes.print_progress(name, 20)
    return Server(name, server_arguments(options, model), own, log, timeout=START_S, progress=progress), forward_files


def serve_both(options: Any, work: Path, finished: Callable[[dict[str, Record]], None]) -> None:
    """Run both servers at the same time.

    :param finished: called with all results so far, after each weight update and at the end.
    """
    start = time.monotonic()
    device = "cuda" if has_gpu() else "cpu"
    # Separate processes write the checkpoints, so that no memory of the GPUs stays in use.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as writers:
        writing = [
            writers.submit(weights.write_checkpoint, work / f"model-{seed}", served_model(options), seed, device)
            for seed in range(2)
        ]
        models = [future.result() for future in writing]
    print(f"two checkpoints written after {time.monotonic() - start:.0f} s", flush=True)
    plugins.write(work / "plugins", "benchmark_allocator", "common.allocator_trace:register")
    plugins.write(work / "plugins", "benchmark_forwards", "common.forwards:register")
    groups = options.gpus.split(";") if options.gpus else [""]
    lock = threading.Lock()
    records: dict[str, Record] = {}
    # The load begins when both servers are ready. If one server does not start, the other one ends.
    ready = threading.Barrier(len(SERVERS))

    def run_server(name: str, group: str) -> None:
        try:
            started, forward_files = make_server(name, options, work, models[0], group)
            with started:
                ready.wait(START_S)
                server_run = ServerRun(started, options, models, forward_files)
                records[name] = server_run.record

                def report() -> None:
                    with lock:
                        finished(records)
                        print(f"{name}: {server_run.record}", flush=True)

                server_run.run(report)
        except Exception as error:
            ready.abort()
            with lock:
                records.setdefault(name, Record()).errors.append(f"{type(error).__name__}: {str(error)[-2000:]}")
                finished(records)

    with ThreadPoolExecutor(len(SERVERS)) as pool:
        for number, name in enumerate(SERVERS):
            pool.submit(run_server, name, groups[number % len(groups)])


# --- tables -----------------------------------------------------------------------------------------------------------


def make_tables(result: output.Result) -> str:
    """Make a table with a column for each server. Below it are the verdict and the numbers of different answers."""
    figures = result["figures"]
    servers = figures["servers"]
    counted = ("answered", "aborted", "left", "flushes", "updates")
    names = {"left": "connections closed early", "updates": "weight updates"}
    names |= {"columns": "forward passes with column slices", "flushes": "flushes of the radix cache"}
    names |= {"probes": "fixed prompts sent", "forwards": "forward passes"}
    names |= {"answered": "answered requests", "aborted": "aborted requests"}
    megabytes = {
        "first_half": "largest reserved memory in MB, first half",
        "second_half": "largest reserved memory in MB, second half",
        "first_peak": "largest allocated memory in MB, first half",
        "second_peak": "largest allocated memory in MB, second half",
        "lowest_free": "lowest free memory in MB",
    }
    found = list(servers.values())
    rows = [
        ("minutes", *(f"{server['seconds'] / 60:.1f}" for server in found)),
        *((names.get(key, key), *(f"{server[key]:,}" for server in found)) for key in counted),
        ("errors", *(f"{len(server['errors']):,}" for server in found)),
        *((names[key], *(f"{server[key]:,}" for server in found)) for key in ("forwards", "columns", "probes")),
        *((name, *(f"{server[key] / MB:,.0f}" for server in found)) for key, name in megabytes.items()),
    ]
    failures = find_failures(figures)
    verdict = "**The run passed.**" if not failures else f"**The run failed**: {'; '.join(failures)}."
    alike = [f"{len(several)} of {key}" for key, several in distinct_answers(servers).items()]
    with_logprobs = max((len(several) for several in distinct_answers(servers, "logprobs").values()), default=0)
    return (
        f"{output.table(('', *servers), rows)}\n{verdict} Different answers to the fixed prompts, of both servers: "
        f"{', '.join(alike) or 'none asked'}; with their log-probabilities, bit for bit: at most {with_logprobs}.\n"
    )


def main() -> int:
    quick = {"minutes": 1.0, "round": 5.0, "chunk": 64, "cache": 4096, "longest": 200, "new_tokens": 16, "requests": 8}
    parser = output.parser(__doc__, quick={**quick, "clients": 4, "probes": (5, 100)}, logs=True)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b", help="model with its own sizes (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="number of MoE layers (%(default)s)")
    parser.add_argument("--minutes", type=float, default=8.0, help="duration of the load in minutes (%(default)s)")
    parser.add_argument("--round", type=float, default=12.0, help="seconds in which clients send prompts (%(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="number of concurrent clients (%(default)s)")
    parser.add_argument("--chunk", type=int, default=16_384, help="tokens of a prefill chunk (%(default)s)")
    parser.add_argument(
        "--captured",
        type=int,
        default=2048,
        help="tokens of the longest prefill with a CUDA graph; 0: the engine's default (%(default)s)",
    )
    parser.add_argument(
        "--cache", type=int, default=1_000_000, help="KV cache size in tokens: --max-total-tokens (%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=256, help="value of --max-running-requests (%(default)s)")
    parser.add_argument("--longest", type=int, default=32_768, help="tokens of the longest prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=256, help="maximum new tokens of a request (%(default)s)")
    parser.add_argument(
        "--probes",
        type=output.parse_numbers,
        default=(5, 700, 8192),
        help="tokens of each fixed prompt, comma-separated",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all requests (%(default)s)")
    parser.add_argument("--gpus", default="", help="GPUs of the stock and of the patched server, as in 0;1")
    parser.add_argument("arguments", nargs="*", help="more server arguments, after `--`")
    options = output.parse(parser)
    options.seconds = 60 * options.minutes
    if not options.quick:
        machine.require_gpu("soak", "--quick runs without one")
    described_by = (
        *("model", "layers", "minutes", "round", "clients", "chunk", "captured", "longest"),
        *("new_tokens", "seed"),
    )
    figures = {name: getattr(options, name) for name in described_by} | {"gpu": has_gpu(), "servers": {}}
    if options.quick:
        figures |= {"model": "tiny", "layers": TINY.layers}

    def finished(records: dict[str, Record]) -> None:
        figures["servers"] = {name: vars(records[name]) for name in SERVERS if name in records}
        figures["reasons"] = find_failures(figures)
        if options.json:
            output.write(options.json, output.result("soak", figures))

    with output.work_folder(options) as work:
        serve_both(options, work, finished)
    if not figures["servers"]:
        raise SystemExit("soak: no server ran")
    output.finish(options, output.result("soak", figures), make_tables)
    return 1 if figures["reasons"] else 0
