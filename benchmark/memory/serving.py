"""Measure the tokens per second of stock servers and of servers with a grown KV cache, with the engine's own client.

    python benchmark memory/serving --json serving.json  # Kimi-K2.5's widths, 14 layers: stock, grown
    python benchmark memory/serving --work serving --json serving.json --servers stock  # one server; others later
    python benchmark memory/serving --model qwen3-30b --shard 1 --layers 48 --context 40960 --input 30000 --prompts 60
    python benchmark memory/serving --model qwen3-vl-30b --shard 1 --layers 48 --input 100,2000 --images 2
    python benchmark memory/serving ... --servers stock,post-capture,grown --penalized 256  # from 0.5.17 on
    python benchmark memory/serving ... --servers grown --take 60 --overfill 60
    python benchmark memory/serving --quick  # a tiny model, CPU: does it run?

Servers have random weights, the engine's own memory fraction and its default CUDA graphs. They run one after the other,
and answer the same requests: first eight questions, one after the other, then all requests of the load at once.

- `stock`: SGLANG_MOE_PATCHES=none
- `patched`: all changes but kv-sizing
- `grown`: all changes with kv-sizing (SGLANG_MOE_PATCHES_KV_SIZING=auto)
- `stock-grown`: only kv-sizing
- `post-capture`: the engine's own sizing (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1, from 0.5.17 on, not for MLA)
- names of changes, as in `fp4-weights` or `kv-sizing+moe-workspace`: only these changes. They show what one change
  does.
- `stock-again`, `grown-again`: a second start. It shows whether another start gives the same results.
- `stock-zeros`: stock, but the memory after each layer's MXFP4 scales is zero. Kernels on Hopper read that memory.

Servers of the last three kinds (names of changes, `-again`, `stock-zeros`) only answer the questions. With
--mem-fraction-static after `--`, the KV cache grows all the same (SGLANG_MOE_PATCHES_KV_SIZING=always).

Each server has an empty home folder, and this package must leave no file there. Compiled kernels are kept in --work, so
the first run with a --work folder has longer start times. The results are written to --json after each server. A later
or concurrent run with the same --json adds its servers, so that each run can be short.

Further loads come after the first one:

- --sweep repeats the load with other numbers of requests.
- --overfill sends more requests than the KV cache has room for.
- --penalized sends many requests at once, with penalties and a logit bias. With --record, the result says which
  functions of the engine had allocated the tensors at the peak.
- --take starts another process that allocates GPU memory while clients send requests, until less than half of
  kv-sizing's margin is free. The server must then free a part of its KV cache, and still answer requests.

With --leave-free, another process allocates GPU memory before a server starts, until only this many MiB are free. With
80943 MiB, an H200 has the free memory of an H100.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    dummy_models,
    dummy_servers,
    dummy_weights,
    growth,
    machine,
    neighbour,
    output,
    overfill,
    plugins,
    processes,
    servers,
    snapshot,
    stand_ins,
)
from common.client import Client
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_patches.memory import kv_sizing
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_MARGIN, KV_SIZING
from sglang_moe_patches.registry import CHANGES
from sglang_moe_reference import environment

MB = 1e6


class Kind(NamedTuple):
    """Settings of one of this benchmark's servers, such as ``stock`` or ``grown``.

    :param changes: value of ``SGLANG_MOE_PATCHES``.
    :param grows: whether kv-sizing is on.
    :param loaded: whether the server receives the load. Otherwise it only answers the questions.
    :param variables: further environment variables.
    """

    changes: str
    grows: bool = False
    loaded: bool = True
    variables: Mapping[str, str] = {}


ZEROS = "stock-zeros"
SERVERS = {
    "stock": Kind("none"),
    "stock-again": Kind("none", loaded=False),
    ZEROS: Kind("none", loaded=False, variables={dummy_weights.ZEROS_BEHIND_SCALES: "1"}),
    "post-capture": Kind("none", variables={"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}),
    "patched": Kind("all"),
    "stock-grown": Kind("kv-sizing", grows=True),
    "grown": Kind("all", grows=True),
    "grown-again": Kind("all", grows=True, loaded=False),
}
DEFAULT = ("stock", "grown")


def kind_of(name: str) -> Kind:
    """Return the settings of a server.

    :param name: key of ``SERVERS``, or names of changes joined by ``+``.
    :raises argparse.ArgumentTypeError: the name is unknown.
    """
    if name in SERVERS:
        return SERVERS[name]
    known, changes = [change.name for change in CHANGES], name.split("+")
    if not set(changes) <= set(known):
        raise argparse.ArgumentTypeError(
            f"{name}: unknown; known: {', '.join([*SERVERS, *known])}; join several changes with +"
        )
    return Kind(",".join(changes), grows=kv_sizing.CHANGE.name in changes, loaded=False)


def parse_servers(text: str) -> list[str]:
    """Parse and check the value of ``--servers``."""
    names = text.split(",")
    for name in names:
        kind_of(name)
    return names


KEPT = (
    *("duration", "completed", "total_input_tokens", "total_output_tokens", "total_throughput", "output_throughput"),
    *("concurrency", "max_concurrent_requests", "mean_e2e_latency_ms", "mean_ttft_ms", "median_ttft_ms"),
    *("median_tpot_ms", "p99_tpot_ms", "median_itl_ms"),
)
"""Figures of the engine's client that are stored in a result."""
ANSWER_TOKENS = 32
"""Maximum new tokens of an answer to a question."""
WARM_UP_TOKENS = 8
"""New tokens of each warm-up request."""
STARTUP_S = 900
"""Timeout in seconds for a server to become ready. With four GPUs a server compiles kernels for minutes."""
STREAM_INTERVAL = 16
"""Tokens between two messages of a streamed answer. Each message has the whole text so far. With one message per token,
HTTP would take most of the time.
"""
IMAGE_SIZE, IMAGE_TOKENS = "720p", 880
"""Size of each image (1,280 x 720 pixels), and the number of tokens of such an image in a prompt of Qwen3-VL."""
RETRACTED = "KV cache pool is full. Retract"
"""Text of the engine's log line about a retraction."""
SERVER_ENDED = "server ended with exit code"
"""Text in the error of ``Server.check`` about a server that has ended."""
COMPILED = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
}
"""Environment variables that name folders for compiled kernels. Value: name of the folder below ``--work``."""
LOADS = {"overfill": "overfilled", "penalized": "with penalties", "taken": "memory taken"}
"""Loads that come after the first one: for each load's key in a result, its name in the tables."""


class Failed(RuntimeError):
    """Error: a server could not be measured. The message says why."""


def tokenizer_json(vocabulary: int, images: dict[int, str]) -> str:
    """Build a tokenizer with one word per token, so that every token appears in an answer's text.

    The engine's client counts the tokens of the text. A special token would not appear in the text, so this tokenizer
    has no special tokens.

    :param images: words of the image tokens, by token id.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {images.get(token, f"{token:x}"): token for token in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in images.values()])
    return str(tokenizer.to_str())


def write_model(folder: Path, options: Any) -> Path:
    """Write the model's folder, unless an earlier run has written it."""
    if folder.exists():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    dummy_servers.write_model(partial, options)
    config = json.loads((partial / "config.json").read_text())
    images = {config[name]: word for name, word in dummy_models.IMAGE_TOKENS.items() if name in config}
    (partial / "tokenizer.json").write_text(tokenizer_json(config["vocab_size"], images))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0", "eos_token": "1", "pad_token": "0"}
    (partial / "tokenizer_config.json").write_text(json.dumps(named))
    partial.rename(folder)
    return folder


def server_arguments(options: Any, model: Path, name: str) -> list[str]:
    """Return the arguments of the server ``name``."""
    arguments = [
        argument for argument in dummy_servers.server_arguments(options) if argument != "--skip-tokenizer-init"
    ]
    arguments = ["--model-path", str(model), *arguments, "--stream-interval", str(STREAM_INTERVAL)]
    if options.quick:
        arguments += ["--context-length", str(options.context)]
        if kind_of(name).grows:  # override the small default for servers without a GPU
            arguments += ["--max-total-tokens", "100000000"]
    arguments.append(growth.METRICS_FLAG)  # also without kv-sizing, so that all servers do the same work
    return environment.server_arguments(arguments)


# --- The load --------------------------------------------------------------------------------------------------------


def bench_module() -> str:
    """Return the name of the module with the engine's client. The name depends on the release."""
    engine = importlib.util.find_spec("sglang")
    assert engine is not None
    root = Path(str(engine.origin)).parent
    return "sglang.benchmark.serving" if (root / "benchmark" / "serving.py").exists() else "sglang.bench_serving"


def bench_command(options: Any, model: Path, url: str, into: Path) -> list[str]:
    """Return the command that runs the engine's client with random token ids. The client downloads nothing.

    :param into: file for the client's result.
    """
    low, high = options.input[0], options.input[-1]
    # The client would draw the lengths of answers from the range of the lengths of prompts. max_new_tokens prevents
    # that.
    sampling = {"temperature": 0.0, "max_new_tokens": options.output, "ignore_eos": True}
    dataset = ["random-ids", "--tokenize-prompt"]
    if options.images:
        dataset = ["image", "--image-count", str(options.images), "--image-resolution", IMAGE_SIZE]
    return [
        *(sys.executable, "-m", bench_module(), "--backend", "sglang", "--base-url", url),
        *("--model", str(model), "--tokenizer", str(model)),
        *("--dataset-name", *dataset, "--num-prompts", str(options.prompts)),
        *("--random-input-len", str(high), "--random-output-len", str(options.output)),
        *("--random-range-ratio", str(low / high), "--seed", "3"),
        *("--extra-request-body", json.dumps({"sampling_params": sampling})),
        *("--warmup-requests", "0", "--disable-tqdm", "--output-file", str(into)),
    ]


@contextmanager
def free_memory() -> Iterator[dict[str, int]]:
    """Read the free memory of each visible GPU four times a second within the block.

    :returns: a dictionary that always has the lowest free memory so far, in MiB, by the GPU's index. It stays empty
        without ``nvidia-smi``.
    """
    command = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits", "--loop-ms=250"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    lowest: dict[str, int] = {}
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield lowest
        return

    def read(line: str) -> None:
        with suppress(ValueError):
            gpu, free = line.split(",")
            lowest[gpu] = min(int(free), lowest.get(gpu, int(free)))

    with processes.read_lines(process, read):
        yield lowest


def lowest_free(free: dict[str, int]) -> dict[str, Any]:
    """Convert the readings of :func:`free_memory` to bytes: the lowest free memory of all GPUs, and of each GPU."""
    gpus = [free[gpu] << 20 for gpu in sorted(free, key=int)]
    return {"lowest_free": min(gpus, default=None), "lowest_free_of_each": gpus}


def warm_up_prompts(options: Any) -> list[tuple[int, int]]:
    """Choose the warm-up requests. They make the server compile all kernels before the load.

    :returns: pairs of the number of prompts that are sent at once, and the tokens of each prompt. The first pair fills
        a prefill chunk, with several prompts if a chunk has more tokens than the context. The second pair has small
        prompts. The third pair makes a decode batch as large as in the load.
    """
    chunk = options.chunk * 15 // 16
    longest = min(chunk, options.context - 2 * WARM_UP_TOKENS)
    together = min(options.requests or options.prompts, options.prompts)
    return [(-(-chunk // longest), longest), (2, options.input[0]), (together, 8)]


def warm_up(client: Client, options: Any, vocabulary: int) -> None:
    """Send the requests of :func:`warm_up_prompts`."""
    draw = random.Random(5)
    for count, tokens in warm_up_prompts(options):
        prompts = [[draw.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(count)]
        if error := client.generate(prompts, WARM_UP_TOKENS):
            raise Failed(error)


def run_load(server: Server, options: Any, model: Path, work: Path) -> dict[str, Any]:
    """Run the load.

    :returns: figures of the engine's client, the lowest free memory, and the number of retractions.
    """
    into, log_path = work / f"{server.name}.jsonl", work / f"{server.name}-bench.log"
    into.unlink(missing_ok=True)
    paths = [*stand_ins.folders(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1"}
    environ |= {} if has_gpu() else environment.variables(environ)
    before = len(server.log_text())
    with free_memory() as free, log_path.open("w") as log:
        command = bench_command(options, model, server.url, into)
        code = subprocess.run(command, env=environ, stdout=log, stderr=subprocess.STDOUT, timeout=1800).returncode
    server.check()
    if code or not into.exists():
        raise Failed(f"bench_serving: exit code {code}: {log_path.read_text()[-2000:]}")
    found = json.loads(into.read_text().splitlines()[-1])
    if missing := describe_missing(found, options):
        raise Failed(f"{missing}: {log_path.read_text()[-2000:]}")
    return {name: found[name] for name in KEPT if name in found} | {
        **lowest_free(free),
        "retractions": server.log_text()[before:].count(RETRACTED),
    }


SWEEP_FIGURES = ("duration", "total_throughput", "concurrency", "median_ttft_ms", "median_tpot_ms", "retractions")
"""Figures of each load of ``--sweep`` that are stored in a result."""


def sweep(server: Server, options: Any, model: Path, work: Path) -> list[dict[str, Any]]:
    """Repeat the load with each number of requests of ``--sweep``, one load after the other.

    :returns: one row per load, with ``prompts`` and the figures of ``SWEEP_FIGURES``.
    """
    rows = []
    for prompts in options.sweep:
        found = run_load(server, argparse.Namespace(**{**vars(options), "prompts": prompts}), model, work)
        rows.append({"prompts": prompts} | {name: found[name] for name in SWEEP_FIGURES if name in found})
        print(f"  {server.name}: {prompts} requests: {found['total_throughput']:,.0f} tokens/s", flush=True)
    return rows


def describe_missing(figures: dict[str, Any], options: Any) -> str:
    """Describe what is missing in the client's result of a load; "": nothing is missing.

    The client counts an error of the image processor as an answer with one token or none. It also ignores the last
    message of a streamed answer if this message has no text. So a few tokens may be missing without an error.
    Altogether, this function allows half the tokens of one answer to be missing.
    """
    if failed := options.prompts - figures["completed"]:
        return f"{failed} requests failed"
    requested_tokens = options.prompts * options.output
    if (answered := figures["total_output_tokens"]) <= requested_tokens - options.output // 2:
        return f"only {answered} of {requested_tokens} new tokens were generated"
    if options.images and figures["total_input_vision_tokens"] < options.images * options.prompts * IMAGE_TOKENS:
        return "the client left images out"
    return ""


def run_further_loads(
    server: Server, options: Any, info: Mapping[str, Any], vocabulary: int, ask: Callable[[], list[str]], *, grows: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the loads that come after the first one and that the options choose, one after the other.

    :param ask: function that sends the questions again, and returns digests of the answers.
    :returns: pairs of a load's key in the result and the load's figures, such as the lowest free memory.
    """
    loads = []
    if options.overfill:
        # With speculative decoding, a server of one release stopped answering after an abort, also without our changes.
        may_abort = "--speculative-algorithm" not in options.arguments
        drive = partial(overfill.overfill, server, info, vocabulary, options.overfill, may_abort=may_abort)
        loads.append(("overfill", drive))
    if options.penalized:
        folder = server.log.with_suffix(".record") if options.record else None
        loads.append(
            ("penalized", partial(send_penalized_and_record, server, info, vocabulary, options.penalized, folder))
        )
    if options.take and grows:
        margin = KV_MARGIN.read(server.environment)
        loads.append(("taken", partial(neighbour.take_memory, server, info, vocabulary, margin, options.take, ask)))
    for name, drive in loads:
        with free_memory() as free:
            outcome = drive()
        if not (outcome["out_of_memory"] or outcome["errors"]):  # after an error, the server may have ended
            outcome.setdefault("answers", ask())
        yield name, outcome | lowest_free(free)


def send_penalized_and_record(
    server: Server, info: Mapping[str, Any], vocabulary: int, requests: int, record: Path | None
) -> dict[str, Any]:
    """Run :func:`common.overfill.send_penalized`, and record the server's allocations if asked to.

    :param record: folder for the record of allocations; ``None``: do not record. With a record, the result has the key
        ``held``: bytes at the peak of the memory, by the engine's function that had allocated them.
    """
    if record is None:
        return overfill.send_penalized(server, info, vocabulary, requests)
    shutil.rmtree(record, ignore_errors=True)
    with snapshot.record_allocations(Client(server.url), record) as sizes:
        outcome = overfill.send_penalized(server, info, vocabulary, requests)
    return outcome | {"held": sizes}


def fraction_in_force(info: Mapping[str, Any]) -> float:
    """Return the memory fraction (``--mem-fraction-static``) that a server uses.

    With data-parallel ranks, only the internal states of the ranks have the fraction that the engine computed.

    :param info: the server's ``/get_server_info``.
    """
    states = info.get("internal_states") or [{}]
    return float(states[0].get("mem_fraction_static") or info["mem_fraction_static"])


# --- One server ------------------------------------------------------------------------------------------------------


def variables(name: str, options: Any, work: Path) -> dict[str, str]:
    kind, home = kind_of(name), work / "homes" / name
    folders = dummy_weights.write_plugin(work / "plugin")
    if uses_stand_in := kind.grows and not has_gpu():
        shutil.rmtree(stand_in := work / "stand-in", ignore_errors=True)
        folders.append(plugins.write_module(stand_in, growth.STAND_IN.stem, growth.STAND_IN.read_text()))
    own = processes.variables(*folders)
    own |= {} if has_gpu() else environment.variables(own)
    own |= (
        {neighbour.STAND_IN_VARIABLE: str(work / "taken"), KV_MARGIN.name: KV_MARGIN.default} if uses_stand_in else {}
    )
    own = {name: value for name, value in own.items() if not name.startswith("XDG_")}
    own |= {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase()}
    own |= {variable: str(work / "compiled" / folder) for variable, folder in COMPILED.items()}
    own |= {SELECT_VARIABLE: kind.changes, **kind.variables}
    if kind.grows:
        own[KV_SIZING.name] = "always" if "--mem-fraction-static" in options.arguments else "auto"
    return own


def serve(name: str, options: Any, work: Path, model: Path) -> dict[str, Any]:
    """Start, measure and end one server.

    :raises Failed: the server cannot be measured.
    """
    kind, own = kind_of(name), variables(name, options, work)
    home = Path(own["HOME"])
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)

    log, progress = work / f"{name}.log", processes.print_progress(name, 20)
    server = Server(name, server_arguments(options, model, name), own, log, timeout=STARTUP_S, progress=progress)
    with server:
        client = Client(server.url)
        info = client.info()
        sizing = growth.read_growth(client.metrics()) if kind.grows else None
        found: dict[str, Any] = {
            "startup_s": round(server.startup_s, 1),
            "fraction": fraction_in_force(info),
            "tokens": info["max_total_num_tokens"],
            "loaded": dummy_weights.allocated_after_loading(server.log_text()),
            "growth": None if sizing is None else sizing._asdict(),
            "rehearsed_s": growth.rehearsal_seconds(growth.kv_sizing_lines(server.log_text())),
        }
        print(f"  {name}: ready in {server.startup_s:.0f} s, {found['tokens']:,} tokens", flush=True)
        if sizing is not None and sizing.tokens != found["tokens"]:
            raise Failed(f"/metrics has {sizing.tokens:,} KV tokens, but /get_server_info has {found['tokens']:,}")
        new_tokens = min(ANSWER_TOKENS, options.output)

        def ask() -> list[str]:
            # If a part of a prompt is in the radix cache, the rest of the prompt is computed with other roundings.
            client.flush_cache()
            return servers.answer_digests(server, max(options.input), new_tokens)

        found["answers"] = ask()
        answers = servers.answer_all(server, max(options.input), new_tokens, logprobs=True)
        found["logprobs"], found["first"] = servers.digests(answers, "logprobs"), servers.first_tokens(answers)
        if kind.loaded:
            vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
            warm_up(client, options, vocabulary)
            found |= run_load(server, options, model, work)
            if options.sweep:
                found["sweep"] = sweep(server, options, model, work)
            for load, outcome in run_further_loads(server, options, info, vocabulary, ask, grows=kind.grows):
                found[load] = outcome
                if failures(found):
                    break  # the server may have ended, and would fail in the next load, too
    found["said"] = growth.kv_sizing_lines(server.log_text())
    if left := sorted(str(path.relative_to(home)) for path in home.rglob("*sglang-moe-patches*")):
        raise Failed(f"the server left files in its home folder: {', '.join(left)}")
    return found


def keeps_engine_size(name: str, figures: dict[str, Any]) -> bool:
    """Return whether kv-sizing was on, but left the KV cache at the size of the engine's own rule."""
    return kind_of(name).grows and figures["growth"] is None


def failures(figures: dict[str, Any]) -> list[str]:
    """Return the errors of the loads in ``LOADS``. The list is empty if the server survived all of them."""
    loads = [(words, figures[key]) for key, words in LOADS.items() if key in figures]
    failed = [f"{words}: out of memory" for words, load in loads if load["out_of_memory"]]
    failed += [f"{words}: {error}" for words, load in loads for error in load["errors"]]
    if figures.get("taken", {}).get("given_back") == 0:
        failed.append("memory taken: the server freed no KV cache")
    return failed


def summary(figures: dict[str, Any]) -> str:
    """Describe a server's results in one line, for the terminal."""
    rehearsed = f", {figures['rehearsed_s']:g} s of it rehearsing" if figures["rehearsed_s"] else ""
    line = f"ready in {figures['startup_s']:.0f} s{rehearsed}, {figures['tokens']:,} KV tokens"
    if figures.get("loaded"):
        line += f", {figures['loaded'] / MB:,.1f} MB allocated once loaded"
    if "total_throughput" not in figures:
        return line
    line += f": {figures['total_throughput']:,.0f} tokens/s in {figures['duration']:.0f} s{_free(figures)}"
    for key, words in LOADS.items():
        if load := figures.get(key):
            line += f"; {words}: {load['answered']:,} answers, {load['retractions']} retractions{_free(load)}"
    return line + "".join(f"; FAILED: {why}" for why in failures(figures))


def _free(load: dict[str, Any]) -> str:
    return "" if load["lowest_free"] is None else f", lowest free {load['lowest_free'] / MB:,.0f} MB"


# --- tables ----------------------------------------------------------------------------------------------------------


def run_name(result: output.Result) -> str:
    """Return the name of a result's file. For a result that is not in the repository, return the model's name."""
    name: str = result.get("name", result["figures"]["model"])
    return name.rpartition("/")[2]


def describe_run(result: output.Result) -> tuple[str, str, str, str]:
    """Describe a run: the servers, the GPU, the load, and the date."""
    figures, conditions = result["figures"], result["conditions"]
    lengths = " to ".join(f"{tokens:,}" for tokens in figures["input"])
    images = f" and {figures['images']} images" if "images" in figures else ""
    at_once = f", at most {figures['requests']} requests at once" if figures["requests"] else ""
    return (
        f"{dummy_servers.run_label(result)}, chunk {figures['chunk']:,}{at_once}",
        machine.gpu_model(conditions),
        f"{figures['prompts']} of {lengths} tokens in{images}, {figures['output']:,} out",
        conditions.get("date", ""),
    )


def make_tables(results: Sequence[output.Result]) -> str:
    """Make the tables of several results: runs, speed, memory, starts with answers, further loads, freed KV cache."""
    runs = [(_link_to_result(result), *describe_run(result)) for result in results]
    speed: list[tuple[str, ...]] = []
    memory: list[tuple[str, ...]] = []
    starts: list[tuple[str, ...]] = []
    loads: list[tuple[str, ...]] = []
    given_back: list[tuple[str, ...]] = []
    for result in results:
        run, measured = run_name(result), result["figures"]["servers"]
        stock_speed = measured.get("stock", {}).get("total_throughput")
        for name, found in measured.items():
            label = f"{name} (by the rule)" if keeps_engine_size(name, found) else name
            speed.append((run, label, f"{found['tokens']:,}", *_speed_cells(found, name, stock_speed)))
            need = _mb(found["growth"] and found["growth"]["need_bytes"])
            memory.append((run, label, _mb(found.get("loaded")), need, _mb(found.get("lowest_free"))))
            rehearsed = "" if found["rehearsed_s"] is None else f"{found['rehearsed_s']:.0f}"
            answers = _count_equal_answers(measured, name, "answers")
            logprobs = _count_equal_answers(measured, name, "logprobs") + servers.first_difference(measured, name)
            starts.append((run, label, f"{found['startup_s']:.0f}", rehearsed, answers, logprobs))
            loads += _more_loads(f"{run}, {label}", found)
            given_back += _taken_memory_rows(f"{run}, {label}", found)
    titled = (
        (("run", "served", "GPU", "load", "date"), runs, 5),
        (("run", "server", "KV tokens", "tokens/s (times stock's)", "ms per token", "first token s"), speed, 2),
        (("run", "server", "weights MB", "need MB", "lowest free MB"), memory, 2),
        (("run", "server", "ready after s", "rehearsal s", "answers equal to stock's", "log-probabilities"), starts, 2),
        (("run, server", "load", "answered", "errors", "lowest free MB", "equal answers"), loads, 2),
        (("run, server", "KV tokens", "KV tokens at the end", "freed MB", "lowest free MB"), given_back, 1),
    )
    found = [output.table(header, rows, left=left) for header, rows, left in titled if rows]
    return "\n".join([*found, *filter(None, map(peak_table, results))])


def _link_to_result(result: output.Result) -> str:
    """Return the name of a run, with a link to its result if the repository has the result."""
    name = run_name(result)
    return f"[{name}](../../benchmark/results/{result['name']}.json)" if "name" in result else name


def _speed_cells(figures: dict[str, Any], name: str, stock_speed: float | None) -> tuple[str, str, str]:
    """Format tokens per second, median milliseconds per token, and median seconds to the first token. The cells are
    empty if the server did not run the load.
    """
    if "total_throughput" not in figures:
        return "", "", ""
    times = f" ({figures['total_throughput'] / stock_speed:.2f})" if stock_speed and name != "stock" else ""
    first_token = f"{figures['median_ttft_ms'] / 1e3:.1f}"
    return f"{figures['total_throughput']:,.0f}{times}", f"{figures['median_tpot_ms']:.1f}", first_token


def peak_table(result: output.Result) -> str:
    """Make a table of the engine's functions that had allocated more than 1 % of the memory at its peak. The text is
    empty if no server was recorded.
    """
    figures, rows = result["figures"], []
    for name, server in figures["servers"].items():
        by_function = server.get("penalized", {}).get("held", {})
        least = sum(by_function.values()) / 100
        rows += [(name, function, _mb(size)) for function, size in by_function.items() if size > least]
    header = ("server", "allocated at the peak, with penalties, by", "MB")
    described = ", ".join(describe_run(result)[:3])
    return f"{described}\n\n{output.table(header, rows, left=2)}" if rows else ""


def _count_equal_answers(measured: Mapping[str, Any], name: str, part: str) -> str:
    """Count the answers of a server that equal the answers of the stock server. If some differ, also count the answers
    that equal those of the server ``stock-zeros``.
    """
    alike, zeros = servers.equal_answers(measured, name, part), ""
    if ZEROS in measured and name not in ("stock", ZEROS) and measured[name][part] != measured["stock"][part]:
        zeros = servers.equal_answers(measured, name, part, ZEROS)
    return alike + (f"; {zeros} {ZEROS}'s" if zeros else "")


def _more_loads(label: str, figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Make a table row for each load of a server that came after the first one."""
    for key, words in LOADS.items():
        if (load := figures.get(key)) is None:
            continue
        same = servers.equal_answers({"stock": figures, "then": load}, "then") if "answers" in load else ""
        yield (label, words, f"{load['answered']:,}", _describe_failure(load), _mb(load["lowest_free"]), same)


def _taken_memory_rows(label: str, figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Make the table row of a server with the load ``--take``. Servers without this load have no row."""
    if (load := figures.get("taken")) and "tokens" in load:
        tokens = (f"{figures['tokens']:,}", f"{load['tokens']:,}")
        yield (label, *tokens, _mb(load.get("given_back")), _mb(load["lowest_free"]))


def _describe_failure(load: dict[str, Any]) -> str:
    """Return the error that ended the server. If the server did not end, return the number of errors."""
    if load["out_of_memory"]:
        return "out of memory"
    if any(SERVER_ENDED in error for error in load["errors"]):
        return "the server ended"
    return f"{len(load['errors'])}"


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / MB:,.0f}"


def load_servers(path: Path | None, figures: dict[str, Any]) -> dict[str, Any]:
    """Load the servers of an earlier run with the same options from its result.

    :raises SystemExit: the earlier run had other options.
    """
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())["figures"]
    described = json.loads(json.dumps({name: value for name, value in figures.items() if name != "servers"}))
    if {name: value for name, value in found.items() if name != "servers"} != described:
        raise SystemExit(f"serving: {path} has other options; name another --json file")
    return dict(found["servers"])


def main() -> None:
    quick = {"chunk": 64, "context": 320, "requests": 4, "prompts": 6, "input": (20, 60), "output": 8}
    parser = output.parser(__doc__, quick={**quick, "servers": ["stock", "grown"]}, logs=True)
    dummy_servers.add_options(parser)
    parser.add_argument("--prompts", type=int, default=200, help="number of requests of the load (%(default)s)")
    parser.add_argument(
        "--input",
        type=output.parse_numbers,
        default=(3000, 9000),
        metavar="MIN,MAX",
        help="range of the tokens of a prompt",
    )
    parser.add_argument("--output", type=int, default=768, help="new tokens of each answer (%(default)s)")
    parser.add_argument("--images", type=int, default=0, help=f"images of {IMAGE_SIZE} in each prompt (qwen3-vl-30b)")
    parser.add_argument(
        "--sweep",
        type=output.parse_numbers,
        default=(),
        metavar="N,...",
        help="then repeat the load with each of these numbers of requests",
    )
    parser.add_argument(
        "--leave-free",
        type=int,
        default=0,
        metavar="MIB",
        help="before a server starts, another process allocates GPU memory until only MIB MiB are free",
    )
    parser.add_argument(
        "--overfill",
        type=float,
        default=0,
        metavar="SECONDS",
        help="then send more requests than the KV cache has room for, for so many seconds",
    )
    parser.add_argument(
        "--penalized",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="then send so many requests with penalties at once",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="with --penalized on a GPU: record which functions had allocated the tensors at the peak",
    )
    parser.add_argument(
        "--take",
        type=float,
        default=0,
        metavar="SECONDS",
        help="then send requests for so many seconds while another process allocates memory (only with kv-sizing)",
    )
    parser.add_argument(
        "--servers",
        type=parse_servers,
        default=list(DEFAULT),
        metavar="NAME,...",
        help=f"servers to measure (default: {','.join(DEFAULT)}): {', '.join(SERVERS)}, or changes joined by +",
    )
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="keep the model and compiled kernels in this folder, for later runs"
    )
    parser.add_argument("arguments", nargs="*", help="further server arguments, after `--`")
    options = output.parse(parser)
    if not options.quick:
        machine.require_gpu("serving", "--quick runs without one")
    if options.record and not (options.penalized and has_gpu()):
        parser.error("--record needs --penalized and a GPU")
    described_by = (
        *("model", "shard", "layers", "context", "chunk", "requests", "tp", "prompts", "input", "output"),
        *("arguments", *(["images"] if options.images else []), *(["leave_free"] if options.leave_free else [])),
    )
    figures = dummy_servers.describe_options(options, described_by)
    figures["servers"] = load_servers(options.json, figures)
    failed = []
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        work = (options.work or Path(folder)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        model = write_model(work / "model", options)
        try:
            for name in options.servers:
                try:
                    with neighbour.leave_free(options.leave_free):
                        figures["servers"][name] = found = serve(name, options, work, model)
                except Exception as error:  # continue, because the figures of other servers are worth keeping
                    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    failed.append(name)
                    continue
                print(f"{name}: {summary(found)}\n" + "\n".join(f"  {line}" for line in found["said"]), flush=True)
                if went_wrong := failures(found):
                    failed.append(f"{name} ({went_wrong[0]})")
                if options.json:
                    # Another run may have added servers to the file meanwhile, so read the file again.
                    figures["servers"] = load_servers(options.json, figures) | figures["servers"]
                    output.write(options.json, output.result("serving", figures))
        finally:
            output.keep_logs(options, work)
    if figures["servers"]:
        output.finish(options, output.result("serving", figures), lambda result: make_tables([result]))
    if failed:
        raise SystemExit(f"serving: not measured, or did not survive: {', '.join(failed)}")
