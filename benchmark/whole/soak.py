"""A stock and a patched server side by side for minutes: mixed prompts, aborts, flushes, weight updates.

    python benchmark whole/soak --gpus "0;1" --json soak.json       # Qwen3-30B's widths, 4 layers, BF16, 8 minutes
    python benchmark whole/soak --gpus "0;0" --minutes 1 --seed 2    # both on one GPU
    python benchmark whole/soak --quick                             # a tiny model, CPU: does it run?

Both servers serve one checkpoint from disk and get the same requests, drawn from one seed. In every round clients send
prompts of random lengths; some of them go away, some requests are aborted by their id, and whatever still runs at the
round's end is aborted. Then nothing else runs, and fixed prompts are asked, greedily, one after the other and past the
prefix cache. After some rounds the cache is flushed, and after some of those the weights are replaced from disk by
request, with other ones and then the first ones again. It held, and the exit code is 0, if nothing failed, the fixed
prompts had one answer for each weights in both servers, and what the patched server reserved grew in the second half
of the time by no more than its tensors did. (They grow with every flush, stock and patched alike: the engine
makes the list of the KV cache's places anew, 8 bytes each, and the old ones stay for a while.)
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
#: SGLANG_MOE_PATCHES, and whether segments are on.
SERVERS = {"stock": ("none", "off"), "patched": ("all", "on")}
WORKSPACE_MB = "600"
"""Layers whose tiles are tuned, as Qwen3-30B's, stay whole by themselves: something is to be cut."""
#: Of what forwards had reserved in the first half: the most that the second may have more, beyond what tensors grew.
MAX_GROWTH_FRACTION = 0.02
#: Parts of all requests: whose client goes away, and which are aborted by their id.
LEAVE, ABORT = 0.08, 0.08
#: Of all requests, those that begin as others do.
SHARE = 0.3
#: After every so many rounds.
FLUSH_EVERY, UPDATE_EVERY = 2, 4
#: A line of the log that no server should write.
FATAL = re.compile(r"CUDA error|OutOfMemoryError|out of memory|Scheduler hit an exception|Traceback \(most recent")
START_S, PATIENCE_S = 400.0, 300.0
PROBE_TOKENS = 24


@dataclass(frozen=True)
class Draw:
    """A request.

    :param rid: its id; none is the beginning of another one.
    :param prefix: tokens at its beginning that others share.
    :param leaves_s: seconds after which its client goes away.
    :param aborted_s: seconds after which it is aborted by its id.
    """

    rid: str
    tokens: int
    new_tokens: int
    prefix: int = 0
    leaves_s: float | None = None
    aborted_s: float | None = None


def drawn(seed: int, round_: int, client: int, longest: int, most_new: int) -> Iterator[Draw]:
    """The requests of one client in one round, without end: many short ones, and some of any length."""
    draw = random.Random(f"{seed}/{round_}/{client}")
    number = 0
    while True:
        tokens, new_tokens = (max(1, round(limit ** draw.random())) for limit in (longest, most_new))
        fate, after, shares = draw.random(), 0.02 + draw.random(), draw.random()
        yield Draw(
            f"{seed}-{round_}-{client}-{number}-",
            tokens,
            new_tokens,
            prefix=tokens // 2 if shares < SHARE else 0,
            leaves_s=after if fate < LEAVE else None,
            aborted_s=after if LEAVE <= fate < LEAVE + ABORT else None,
        )
        number += 1


@dataclass
class Record:
    """What became of one server. Bytes; times in seconds since the first round.

    :param answers: weights and length of a fixed prompt: its answers by their digest, and how often each came.
    :param logprobs: the same of the answers with their log-probabilities.
    :param columns: forwards in which a tensor ran in columns.
    :param dead_inputs: forwards in which a dead input was used.
    :param first_half: the most that the allocator had reserved in the first half. ``before``: before the first forward.
    :param first_peak: the most that was allocated at once in the first half.
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
    """By how many bytes more was reserved in the second half than in the first, beyond what tensors grew."""
    tensors = max(0, server["second_peak"] - server["first_peak"])
    return int(server["second_half"] - server["first_half"] - tensors)


def distinct_answers(servers: dict[str, Any], what: str = "answers") -> dict[str, set[str]]:
    """All servers' answers of each weights and fixed prompt."""
    keys = dict.fromkeys(key for server in servers.values() for key in server[what])
    return {key: {one for server in servers.values() for one in server[what].get(key, ())} for key in keys}


def reasons(figures: dict[str, Any]) -> list[str]:
    """Why it did not hold; none: it did."""
    servers = figures["servers"]
    failures = [f"{name}: not run" for name in SERVERS if name not in servers]
    for name, server in servers.items():
        if server["errors"]:
            failures.append(f"{name}: {len(server['errors'])} errors, the first: {server['errors'][0]}")
        failures += [f"{name}: {what}: none" for what in ("aborted", "left", "flushes", "updates") if not server[what]]
    answers = distinct_answers(servers)
    if not answers:
        failures.append("no fixed prompt was asked")
    by_prompt: dict[str, set[str]] = {}
    for key, several in answers.items():
        by_prompt.setdefault(key.split(", ")[1], set()).update(several)
        if len(several) > 1:
            counts = ", ".join(f"{name} {len(server['answers'].get(key, ()))}" for name, server in servers.items())
            failures.append(f"{key}: {len(several)} different answers ({counts})")
    if answers and not any(len(several) > 1 for several in by_prompt.values()):
        failures.append("the other weights answer alike: no update was seen")
    if (patched := servers.get("patched")) is not None:
        growth = unexplained_growth(patched)
        if growth > MAX_GROWTH_FRACTION * (patched["first_half"] - patched["before"]):
            failures.append(
                f"patched: {growth / MB:,.0f} MB more reserved in the second half, beyond what tensors grew"
            )
        # The activation's output does not fit into the dead input where the experts are as wide as Qwen3-30B's.
        if figures["gpu"] and not (patched["columns"] or patched["dead_inputs"]):
            failures.append("patched: no change was seen to act")
    return failures


# --- one server -------------------------------------------------------------------------------------------------------


class Driven:
    """A server that is asked, and what is known of it; the files say what its forwards held, and did."""

    def __init__(self, server: Server, options: Any, models: Sequence[Path], forward_files: tuple[Path, Path]) -> None:
        self.server, self.options, self.models, self.forward_files = server, options, models, forward_files
        self.record = Record()
        self._lock = threading.Lock()
        self._loaded = 0
        self._shared = prompt(options.longest, -1)
        self._client = Client(server.url)

    def run(self, finished: Callable[[], None]) -> None:
        """All rounds, until the time is over; what ends them early is recorded as an error."""
        began, number = time.time(), 0
        try:
            while time.time() < began + self.options.seconds:
                self.load(number)
                number += 1
                self.probe()
                if number % FLUSH_EVERY == 0:
                    self.flush()
                if number % UPDATE_EVERY == 0:
                    self.update()
                    self.probe()
                    self.read_forwards(began)
                    finished()
                self.record.rounds, self.record.seconds = number, round(time.time() - began, 1)
        except Exception as error:
            self.error(f"{type(error).__name__}: {str(error)[:2000]}")
        self.record.seconds = round(time.time() - began, 1)
        self.read_forwards(began)
        finished()

    def error(self, message: str) -> None:
        with self._lock:
            self.record.errors.append(message)
        print(f"{self.server.name}: {message}", flush=True)

    def load(self, round_: int) -> None:
        """One round of requests; nothing runs any more when it returns."""
        over = threading.Event()
        options = self.options

        def work(client: int) -> None:
            for draw in drawn(options.seed, round_, client, options.longest, options.new_tokens):
                if over.is_set():
                    return
                self.ask(draw, over)

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

    def ask(self, draw: Draw, over: threading.Event) -> None:
        tokens = self._shared[: draw.prefix] + prompt(draw.tokens - draw.prefix, draw.rid)
        body: dict[str, Any] = {"rid": draw.rid, "input_ids": tokens}
        body["sampling_params"] = {"temperature": 0.8, "max_new_tokens": draw.new_tokens, "ignore_eos": True}
        aborter = None
        if draw.aborted_s is not None:
            aborter = threading.Timer(draw.aborted_s, self.abort, [draw.rid])
            aborter.start()
        try:
            answer = self._client.post("/generate", body, timeout_s=draw.leaves_s or PATIENCE_S)
        except Unanswered as error:
            if error.lost or draw.leaves_s is None:
                self.error(f"{error} to {draw}")
                return
            with self._lock:
                self.record.left += 1
            return
        finally:
            if aborter is not None:
                aborter.cancel()
                aborter.join()
        outcome = outcome_of(answer.status_code, answer.text)
        with self._lock:
            if outcome == "answered":
                self.record.answered += 1
            elif outcome == "aborted":
                self.record.aborted += 1
        if outcome == "aborted" and draw.aborted_s is None and not over.is_set():
            self.error(f"aborted, though nobody asked for it: {draw}")
        elif outcome == "answered" and len(answer.json()["output_ids"]) != draw.new_tokens:
            self.error(f"{len(answer.json()['output_ids'])} tokens in answer to {draw}")
        elif outcome not in ("answered", "aborted"):
            self.error(f"{outcome} to {draw}")

    def abort(self, rid: str) -> None:
        """One request, or with "" all of them."""
        try:
            self._post("/abort_request", {"rid": rid, "abort_all": not rid})
        except Exception as error:  # of a timer's thread nobody else would hear it
            self.error(f"{type(error).__name__}: {str(error)[:300]}")

    def probe(self) -> None:
        """The fixed prompts, greedily, nothing of them taken from the prefix cache."""
        for length in self.options.probes:
            own_key = f"probe {self.record.probes}"
            answer = generate(self.server, prompt(length, 0), PROBE_TOKENS, extra_key=own_key)
            key = f"weights {self._loaded}, {length} tokens"
            for part, counts in (("tokens", self.record.answers), ("logprobs", self.record.logprobs)):
                counts.setdefault(key, Counter()).update(digests([answer], part))
            self.record.probes += 1

    def flush(self) -> None:
        self.server.check()
        self._client.flush_cache()
        self.record.flushes += 1

    def update(self) -> None:
        self._loaded = (self._loaded + 1) % len(self.models)
        answer = self._post("/update_weights_from_disk", {"model_path": str(self.models[self._loaded])})
        if not answer["success"]:
            self.error(f"weight update: {answer}")
        self.record.updates += 1

    def _post(self, path: str, body: Any) -> Any:
        self.server.check()
        answer = self._client.post(path, body, timeout_s=PATIENCE_S)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: HTTP {answer.status_code}: {answer.text[:300]}")
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None

    def read_forwards(self, began: float) -> None:
        """What its forwards held and did, as far as they are written."""
        record, (held_file, acted_file) = self.record, self.forward_files
        if lines := allocator_trace.read(held_file):
            add_up(record, lines, began)
        acted = [forward for forward in forwards.read(acted_file) if forward.tokens is not None]
        record.forwards = len(acted)
        record.columns = sum(bool(forward.slices) for forward in acted)
        record.dead_inputs = sum(bool(forward.outputs or forward.scratch) for forward in acted)
        fatal = Counter(match[0] for match in map(FATAL.search, self.server.log_text().splitlines()) if match)
        others = [error for error in record.errors if not error.startswith("log: ")]
        record.errors = others + [f"log: {message} ({count} times)" for message, count in fatal.items()]


def add_up(record: Record, lines: Sequence[allocator_trace.Line], began: float) -> None:
    """A server's lines in two halves of the time since ``began``."""
    later = [line for line in lines if line.at >= began] or [lines[0]]
    middle = began + (later[-1].at - began) / 2
    record.before = lines[0].reserved
    first, second = ([line for line in later if (line.at < middle) is half] for half in (True, False))
    record.first_half = max((line.reserved for line in first), default=0)
    record.second_half = max((line.reserved for line in second), default=0)
    record.first_peak = max((line.peak for line in first), default=0)
    record.second_peak = max((line.peak for line in second), default=0)
    record.lowest_free = min(line.free for line in later)


def outcome_of(status: int, text: str) -> str:
    """What became of a request: ``answered``, ``aborted``, or what the server had against it."""
    if status != 200:
        # As the engine says it of a request that was aborted before it ran.
        return "aborted" if status in (400, 499, 503) and "abort" in text.lower() else f"HTTP {status}: {text[:300]}"
    reason = json.loads(text)["meta_info"]["finish_reason"] or {}
    return "aborted" if reason.get("type") == "abort" else "answered"


# --- both -------------------------------------------------------------------------------------------------------------


def served(options: Any) -> ServedModel:
    if options.quick:
        return ServedModel(TINY)
    return ServedModel(MODELS[options.model], moe_layers=options.layers, runner="triton")


def arguments(options: Any, model: Path) -> list[str]:
    given = ["--model-path", str(model), *RUNNER_ARGUMENTS[served(options).runner], "--skip-tokenizer-init"]
    given += ["--grammar-backend", "none", "--random-seed", "1", "--chunked-prefill-size", str(options.chunk)]
    given += ["--max-running-requests", str(options.requests), "--max-total-tokens", str(options.cache)]
    if has_gpu():
        given += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.9"]
        if options.captured:  # a replayed prefill allocates nothing: longer ones are to run as they are written
            given += ["--piecewise-cuda-graph-max-tokens", str(options.captured)]
    elif options.quick:
        given += EAGER
    return environment.server_arguments([*given, *options.arguments])


def server(name: str, options: Any, work: Path, model: Path, group: str) -> tuple[Server, tuple[Path, Path]]:
    """Not started yet; and the files that its forwards write."""
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
        # Both compile small kernels while they start, and each would choose one by its time: those round otherwise.
        "TORCHINDUCTOR_DETERMINISTIC": "1",
    }
    own |= {"CUDA_VISIBLE_DEVICES": group} if group else {}
    log, progress = work / f"{name}.log", processes.print_progress(name, 20)
    return Server(name, arguments(options, model), own, log, timeout=START_S, progress=progress), forward_files


def serve_both(options: Any, work: Path, finished: Callable[[dict[str, Record]], None]) -> None:
    """Both servers, at the same time.

    :param finished: called with the records so far after each update of either, and in the end.
    """
    begun = time.monotonic()
    device = "cuda" if has_gpu() else "cpu"
    # In processes of their own, which leave nothing on the GPUs.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as writers:
        writing = [
            writers.submit(weights.write_checkpoint, work / f"model-{seed}", served(options), seed, device)
            for seed in range(2)
        ]
        models = [future.result() for future in writing]
    print(f"two checkpoints written after {time.monotonic() - begun:.0f} s", flush=True)
    plugins.write(work / "plugins", "benchmark_allocator", "common.allocator_trace:register")
    plugins.write(work / "plugins", "benchmark_forwards", "common.forwards:register")
    groups = options.gpus.split(";") if options.gpus else [""]
    lock = threading.Lock()
    records: dict[str, Record] = {}
    # Neither begins before the other one is ready; where one does not start, the other one ends.
    ready = threading.Barrier(len(SERVERS))

    def one(name: str, group: str) -> None:
        try:
            started, forward_files = server(name, options, work, models[0], group)
            with started:
                ready.wait(START_S)
                driven = Driven(started, options, models, forward_files)
                records[name] = driven.record

                def report() -> None:
                    with lock:
                        finished(records)
                        print(f"{name}: {driven.record}", flush=True)

                driven.run(report)
        except Exception as error:
            ready.abort()
            with lock:
                records.setdefault(name, Record()).errors.append(f"{type(error).__name__}: {str(error)[-2000:]}")
                finished(records)

    with ThreadPoolExecutor(len(SERVERS)) as pool:
        for number, name in enumerate(SERVERS):
            pool.submit(one, name, groups[number % len(groups)])


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(result: output.Result) -> str:
    """A column for each server, and the verdict."""
    figures = result["figures"]
    servers = figures["servers"]
    counted = ("answered", "aborted", "left", "flushes", "updates")
    names = {"left": "hung up on", "updates": "weight updates", "columns": "forward passes in columns"}
    names |= {"probes": "fixed prompts asked", "forwards": "forward passes"}
    megabytes = {
        "first_half": "reserved MB at most, first half",
        "second_half": "reserved MB at most, second half",
        "first_peak": "tensors MB at most, first half",
        "second_peak": "tensors MB at most, second half",
        "lowest_free": "lowest free MB",
    }
    found = list(servers.values())
    rows = [
        ("minutes", *(f"{server['seconds'] / 60:.1f}" for server in found)),
        *((names.get(key, key), *(f"{server[key]:,}" for server in found)) for key in counted),
        ("errors", *(f"{len(server['errors']):,}" for server in found)),
        *((names[key], *(f"{server[key]:,}" for server in found)) for key in ("forwards", "columns", "probes")),
        *((name, *(f"{server[key] / MB:,.0f}" for server in found)) for key, name in megabytes.items()),
    ]
    failures = reasons(figures)
    verdict = "**It held.**" if not failures else f"**It did not hold**: {'; '.join(failures)}."
    alike = [f"{len(several)} of {key}" for key, several in distinct_answers(servers).items()]
    with_logprobs = max((len(several) for several in distinct_answers(servers, "logprobs").values()), default=0)
    return (
        f"{output.table(('', *servers), rows)}\n{verdict} Different answers to the fixed prompts, of both servers: "
        f"{', '.join(alike) or 'none asked'}; with their log-probabilities, bit for bit: at most {with_logprobs}.\n"
    )


def main() -> int:
    quick = {"minutes": 1.0, "round": 5.0, "chunk": 64, "cache": 4096, "longest": 200, "new_tokens": 16, "requests": 8}
    parser = output.parser(__doc__, quick={**quick, "clients": 4, "probes": (5, 100)}, logs=True)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, default=4, help="with experts")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--round", type=float, default=12.0, help="seconds of load between two quiet moments")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--captured", type=int, default=2048, help="tokens of the longest captured prefill; 0: default")
    parser.add_argument("--cache", type=int, default=1_000_000, help="--max-total-tokens")
    parser.add_argument("--requests", type=int, default=256, help="--max-running-requests")
    parser.add_argument("--longest", type=int, default=32_768, help="prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="at most")
    parser.add_argument("--probes", type=output.numbers, default=(5, 700, 8192), help="tokens of the fixed prompts")
    parser.add_argument("--seed", type=int, default=1, help="of all requests")
    parser.add_argument("--gpus", default="", help="a group for each server, as 0;1")
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
        figures["reasons"] = reasons(figures)
        if options.json:
            output.write(options.json, output.result("soak", figures))

    with output.work_folder(options) as work:
        serve_both(options, work, finished)
    if not figures["servers"]:
        raise SystemExit("soak: no server ran")
    output.finish(options, output.result("soak", figures), tables)
    return 1 if figures["reasons"] else 0
