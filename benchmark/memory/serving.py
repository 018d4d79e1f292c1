"""Tokens per second of servers as they come, and with a KV cache that grew in their start, by the engine's client.

    python benchmark memory/serving --json serving.json  # Kimi-K2.5's widths, 14 layers: stock, grown
    python benchmark memory/serving --work serving --json serving.json --servers stock  # one of them; the others later
    python benchmark memory/serving --model qwen3-30b --shard 1 --layers 48 --context 40960 --input 30000 --prompts 60
    python benchmark memory/serving --model qwen3-vl-30b --shard 1 --layers 48 --input 100,2000 --images 2
    python benchmark memory/serving ... --servers stock,post-capture,grown --penalized 256  # from 0.5.17 on
    python benchmark memory/serving ... --servers grown --take 60 --overfill 60
    python benchmark memory/serving --quick  # a tiny model, CPU: does it run?

Servers are started one after the other, at the engine's own fraction and with its default graphs, random weights, and
are asked the same requests at once; before that eight questions, one after the other. `stock`: SGLANG_MOE_PATCHES=none.
`patched`: all changes. `grown`: kv-sizing besides (SGLANG_MOE_PATCHES_KV_SIZING=auto); `stock-grown`: kv-sizing alone.
`grown-again` and `stock-again` are asked nothing but the questions: does another start give the same? Nor is a server
that has the names of its changes, as in `fp4-weights` or `kv-sizing+moe-workspace`: what does each do alone?
`stock-zeros`: stock, but for what Hopper's MXFP4 kernels read behind a layer's scales, which is zeros there.
`post-capture` is the engine's own sizing (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1: from 0.5.17 on, not for MLA). With
--mem-fraction-static behind `--` the KV cache grows all the same (SGLANG_MOE_PATCHES_KV_SIZING=always).

Each server has an empty home of its own, where it leaves no file of this package. Compiled kernels lie in --work: the
time to ready is a warm one if an earlier run with the same --work has compiled them. What is known is written to --json
after each server; with the same --json a later or a second run adds its servers to it, so that each call can be short.

After the load: --overfill asks for more than the KV cache holds, --penalized for so many requests at once with
penalties and a logit bias; with --record it is said which tensors these took. --take has another process take memory
while clients ask, until less than half of kv-sizing's margin is free: the server is to give KV cache back and to go on
answering. --sweep repeats the load with other numbers of requests.

--leave-free starts the servers on a GPU of which another process holds all but so many MiB: 80943 give an H200 the free
memory of an H100.
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
    """A server of this benchmark.

    :param changes: its ``SGLANG_MOE_PATCHES``.
    :param grows: with kv-sizing.
    :param loaded: asked for more than the questions.
    :param variables: more of them.
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
    """The server of a name: of ``SERVERS``, or of changes joined by ``+``.

    :raises argparse.ArgumentTypeError: it is neither.
    """
    if name in SERVERS:
        return SERVERS[name]
    known, changes = [change.name for change in CHANGES], name.split("+")
    if not set(changes) <= set(known):
        raise argparse.ArgumentTypeError(f"{name}: not known; known: {', '.join([*SERVERS, *known])}; + joins changes")
    return Kind(",".join(changes), grows=kv_sizing.CHANGE.name in changes, loaded=False)


def parse_servers(text: str) -> list[str]:
    """``type=`` of ``--servers``."""
    names = text.split(",")
    for name in names:
        kind_of(name)
    return names


#: Of the engine's own result.
KEPT = (
    *("duration", "completed", "total_input_tokens", "total_output_tokens", "total_throughput", "output_throughput"),
    *("concurrency", "max_concurrent_requests", "mean_e2e_latency_ms", "mean_ttft_ms", "median_ttft_ms"),
    *("median_tpot_ms", "p99_tpot_ms", "median_itl_ms"),
)
ANSWER_TOKENS = 32
"""New tokens of each answer to a question, at the most."""
WARM_UP_TOKENS = 8
"""New tokens of each request before the load."""
STARTUP_S = 900
"""Seconds until a server must be ready: four GPUs compile for minutes."""
STREAMED = 16
"""Tokens between two messages of a stream: one for each token, with the whole text so far, is work for HTTP alone."""
IMAGE_SIZE, IMAGE_TOKENS = "720p", 880
"""1,280 x 720 pixels, and the tokens that Qwen3-VL makes of them."""
RETRACTED = "KV cache pool is full. Retract"
SERVER_ENDED = "server ended with exit code"
"""What the error of a server that has ended contains (``Server.check``)."""
#: Where what is compiled is kept for the next server, below one folder.
COMPILED = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
}
LOADS = {"overfill": "overfilled", "penalized": "with penalties", "taken": "memory taken"}
"""What may come after the load, by its key in a result: what the tables call it."""


class Failed(RuntimeError):
    """A server was not measured; the message says why."""


def tokenizer_json(vocabulary: int, images: dict[int, str]) -> str:
    """A word for each token, so that every token is text: the engine's client counts none else; images have theirs.

    None is a special token, which an answer's text would leave out.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {images.get(token, f"{token:x}"): token for token in range(vocabulary)}
    made = Tokenizer(WordLevel(words, unk_token="0"))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_tokens([AddedToken(word, special=False, normalized=False) for word in images.values()])
    return str(made.to_str())


def write_model(folder: Path, options: Any) -> Path:
    """The model's folder, as it was left where it is there."""
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
    given = [each for each in dummy_servers.server_arguments(options) if each != "--skip-tokenizer-init"]
    given = ["--model-path", str(model), *given, "--stream-interval", str(STREAMED)]
    if options.quick:
        given += ["--context-length", str(options.context)]
        if kind_of(name).grows:  # without the limit that servers without a GPU have
            given += ["--max-total-tokens", "100000000"]
    given.append(growth.METRICS_FLAG)  # in every server, so that all servers do the same work
    return environment.server_arguments(given)


# --- The load --------------------------------------------------------------------------------------------------------


def bench_module() -> str:
    """The engine's client, under its name in this release."""
    engine = importlib.util.find_spec("sglang")
    assert engine is not None
    root = Path(str(engine.origin)).parent
    return "sglang.benchmark.serving" if (root / "benchmark" / "serving.py").exists() else "sglang.bench_serving"


def bench_command(options: Any, model: Path, url: str, into: Path) -> list[str]:
    """The engine's client: token ids from a seed, nothing to download."""
    low, high = options.input[0], options.input[-1]
    # Its range of lengths is that of the answers as well: these are all to be as long as is said.
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
    """MiB of the lowest free memory of each visible GPU, by its number, read every quarter of a second in the block.

    Empty where nobody can tell.
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
    """Bytes of the GPU with the least, and of each; of :func:`free_memory`."""
    gpus = [free[gpu] << 20 for gpu in sorted(free, key=int)]
    return {"lowest_free": min(gpus, default=None), "lowest_free_of_each": gpus}


def warm_up_prompts(options: Any) -> list[tuple[int, int]]:
    """What is asked before the load, so that none of its requests waits for a kernel to be compiled.

    :returns: how many prompts at once, and the tokens of each: a whole chunk (several prompts where it is larger than
        the context); small prompts; a decode of as many requests as run at once.
    """
    chunk = options.chunk * 15 // 16
    longest = min(chunk, options.context - 2 * WARM_UP_TOKENS)
    together = min(options.requests or options.prompts, options.prompts)
    return [(-(-chunk // longest), longest), (2, options.input[0]), (together, 8)]


def warm(client: Client, options: Any, vocabulary: int) -> None:
    draw = random.Random(5)
    for count, tokens in warm_up_prompts(options):
        prompts = [[draw.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(count)]
        if said := client.generate(prompts, WARM_UP_TOKENS):
            raise Failed(said)


def loaded(server: Server, options: Any, model: Path, work: Path) -> dict[str, Any]:
    """What the engine's client says of the load, and the lowest free memory meanwhile."""
    into, said = work / f"{server.name}.jsonl", work / f"{server.name}-bench.log"
    into.unlink(missing_ok=True)
    paths = [*stand_ins.folders(), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {**os.environ, "PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1"}
    own |= {} if has_gpu() else environment.variables(own)
    before = len(server.log_text())
    with free_memory() as free, said.open("w") as log:
        command = bench_command(options, model, server.url, into)
        code = subprocess.run(command, env=own, stdout=log, stderr=subprocess.STDOUT, timeout=1800).returncode
    server.check()
    if code or not into.exists():
        raise Failed(f"bench_serving: exit code {code}: {said.read_text()[-2000:]}")
    found = json.loads(into.read_text().splitlines()[-1])
    if missing := left_out(found, options):
        raise Failed(f"{missing}: {said.read_text()[-2000:]}")
    return {name: found[name] for name in KEPT if name in found} | {
        **lowest_free(free),
        "retractions": server.log_text()[before:].count(RETRACTED),
    }


SWEPT = ("duration", "total_throughput", "concurrency", "median_ttft_ms", "median_tpot_ms", "retractions")
"""Figures that a result keeps of each load of ``--sweep``."""


def sweep(server: Server, options: Any, model: Path, work: Path) -> list[dict[str, Any]]:
    """Repeat the load with each number of requests of ``--sweep``, one load after the other.

    :returns: one row a load: ``prompts``, and the figures of ``SWEPT``.
    """
    rows = []
    for prompts in options.sweep:
        found = loaded(server, argparse.Namespace(**{**vars(options), "prompts": prompts}), model, work)
        rows.append({"prompts": prompts} | {name: found[name] for name in SWEPT if name in found})
        print(f"  {server.name}: {prompts} requests: {found['total_throughput']:,.0f} tokens/s", flush=True)
    return rows


def left_out(found: dict[str, Any], options: Any) -> str:
    """What is missing in a load, by the client's own result; "": nothing.

    The client counts an error of the image processor as an answer, of one token at most. It does not count a last
    message without text, as padding has none. That is a few tokens of all answers together, so half the tokens of one
    answer may be missing.
    """
    if failed := options.prompts - found["completed"]:
        return f"{failed} requests failed"
    asked = options.prompts * options.output
    if (answered := found["total_output_tokens"]) <= asked - options.output // 2:
        return f"{answered} of {asked} new tokens came"
    if options.images and found["total_input_vision_tokens"] < options.images * options.prompts * IMAGE_TOKENS:
        return "the client has left images out"
    return ""


def after_the_load(
    server: Server, options: Any, info: Mapping[str, Any], vocabulary: int, ask: Callable[[], list[str]], *, grows: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What options ask for besides, one after the other, each with the lowest free memory meanwhile.

    :param ask: the questions once more; the answers' digests.
    """
    asked = []
    if options.overfill:
        # A release stopped answering after an abort where it speculates, stock as well.
        may_abort = "--speculative-algorithm" not in options.arguments
        drive = partial(overfill.overfill, server, info, vocabulary, options.overfill, may_abort=may_abort)
        asked.append(("overfill", drive))
    if options.penalized:
        folder = server.log.with_suffix(".record") if options.record else None
        asked.append(("penalized", partial(penalized, server, info, vocabulary, options.penalized, folder)))
    if options.take and grows:
        margin = KV_MARGIN.read(server.environment)
        asked.append(("taken", partial(neighbour.take_memory, server, info, vocabulary, margin, options.take, ask)))
    for name, drive in asked:
        with free_memory() as free:
            outcome = drive()
        if not (outcome["out_of_memory"] or outcome["errors"]):  # else it may have ended
            outcome.setdefault("answers", ask())
        yield name, outcome | lowest_free(free)


def penalized(
    server: Server, info: Mapping[str, Any], vocabulary: int, requests: int, record: Path | None
) -> dict[str, Any]:
    """``overfill.penalized``; with ``record``, a folder, also what the allocator held when it held most."""
    if record is None:
        return overfill.penalized(server, info, vocabulary, requests)
    shutil.rmtree(record, ignore_errors=True)
    with snapshot.record_allocations(Client(server.url), record) as held:
        outcome = overfill.penalized(server, info, vocabulary, requests)
    return outcome | {"held": held}


def fraction_in_force(info: Mapping[str, Any]) -> float:
    """``--mem-fraction-static`` of a server, by what it tells.

    With data-parallel ranks only these know it: their controller does not hand on what they say when they are ready.
    """
    states = info.get("internal_states") or [{}]
    return float(states[0].get("mem_fraction_static") or info["mem_fraction_static"])


# --- One server ------------------------------------------------------------------------------------------------------


def variables(name: str, options: Any, work: Path) -> dict[str, str]:
    """The environment of a server."""
    kind, home = kind_of(name), work / "homes" / name
    folders = dummy_weights.write_plugin(work / "plugin")
    if pretends := kind.grows and not has_gpu():
        shutil.rmtree(stand_in := work / "stand-in", ignore_errors=True)
        folders.append(plugins.write_module(stand_in, growth.STAND_IN.stem, growth.STAND_IN.read_text()))
    own = processes.variables(*folders)
    own |= {} if has_gpu() else environment.variables(own)
    own |= {neighbour.STAND_IN_VARIABLE: str(work / "taken"), KV_MARGIN.name: KV_MARGIN.default} if pretends else {}
    own = {each: value for each, value in own.items() if not each.startswith("XDG_")}
    own |= {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase()}
    own |= {variable: str(work / "compiled" / folder) for variable, folder in COMPILED.items()}
    own |= {SELECT_VARIABLE: kind.changes, **kind.variables}
    if kind.grows:
        own[KV_SIZING.name] = "always" if "--mem-fraction-static" in options.arguments else "auto"
    return own


def serve(name: str, options: Any, work: Path, model: Path) -> dict[str, Any]:
    """One server, from start to end."""
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
            # What is computed behind a prompt's own cached tokens is rounded otherwise than the whole prompt.
            client.flush_cache()
            return servers.answer_digests(server, max(options.input), new_tokens)

        found["answers"] = ask()
        answers = servers.answer_all(server, max(options.input), new_tokens, logprobs=True)
        found["logprobs"], found["first"] = servers.digests(answers, "logprobs"), servers.first_tokens(answers)
        if kind.loaded:
            vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
            warm(client, options, vocabulary)
            found |= loaded(server, options, model, work)
            if options.sweep:
                found["sweep"] = sweep(server, options, model, work)
            for load, outcome in after_the_load(server, options, info, vocabulary, ask, grows=kind.grows):
                found[load] = outcome
                if failures(found):
                    break  # it may have ended, and would end the next load as well
    found["said"] = growth.kv_sizing_lines(server.log_text())
    if left := sorted(str(each.relative_to(home)) for each in home.rglob("*sglang-moe-patches*")):
        raise Failed(f"it left files in its home: {', '.join(left)}")
    return found


def by_the_rule(name: str, found: dict[str, Any]) -> bool:
    """Whether a server that was to grow has what the engine's own fraction gives, by its log."""
    return kind_of(name).grows and found["growth"] is None


def failures(found: dict[str, Any]) -> list[str]:
    """What went wrong under loads that the server must survive; none where there was no such load."""
    loads = [(words, found[key]) for key, words in LOADS.items() if key in found]
    failed = [f"{words}: out of memory" for words, load in loads if load["out_of_memory"]]
    failed += [f"{words}: {error}" for words, load in loads for error in load["errors"]]
    if found.get("taken", {}).get("given_back") == 0:
        failed.append("memory taken: nothing was given back")
    return failed


def summary(found: dict[str, Any]) -> str:
    rehearsed = f", {found['rehearsed_s']:g} s of it rehearsing" if found["rehearsed_s"] else ""
    line = f"ready in {found['startup_s']:.0f} s{rehearsed}, {found['tokens']:,} KV tokens"
    if found.get("loaded"):
        line += f", {found['loaded'] / MB:,.1f} MB allocated once loaded"
    if "total_throughput" not in found:
        return line
    line += f": {found['total_throughput']:,.0f} tokens/s in {found['duration']:.0f} s{_free(found)}"
    for key, words in LOADS.items():
        if load := found.get(key):
            line += f"; {words}: {load['answered']:,} answers, {load['retractions']} retractions{_free(load)}"
    return line + "".join(f"; FAILED: {why}" for why in failures(found))


def _free(load: dict[str, Any]) -> str:
    return "" if load["lowest_free"] is None else f", lowest free {load['lowest_free'] / MB:,.0f} MB"


# --- tables ----------------------------------------------------------------------------------------------------------


def run_name(result: output.Result) -> str:
    """Name of a result's file, or the model's name for a result that was not loaded from the repository."""
    name: str = result.get("name", result["figures"]["model"])
    return name.rpartition("/")[2]


def describe_run(result: output.Result) -> tuple[str, str, str, str]:
    """What was served, on which GPU, the load, and the date."""
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


def tables(results: Sequence[output.Result]) -> str:
    """Five tables of at most six columns: the runs, tokens per second, memory, starts with answers, and more loads."""
    runs = [(_linked(result), *describe_run(result)) for result in results]
    speed: list[tuple[str, ...]] = []
    memory: list[tuple[str, ...]] = []
    starts: list[tuple[str, ...]] = []
    loads: list[tuple[str, ...]] = []
    given_back: list[tuple[str, ...]] = []
    for result in results:
        run, measured = run_name(result), result["figures"]["servers"]
        stock_speed = measured.get("stock", {}).get("total_throughput")
        for name, found in measured.items():
            label = f"{name} (by the rule)" if by_the_rule(name, found) else name
            speed.append((run, label, f"{found['tokens']:,}", *_speed_cells(found, name, stock_speed)))
            need = _mb(found["growth"] and found["growth"]["need_bytes"])
            memory.append((run, label, _mb(found.get("loaded")), need, _mb(found.get("lowest_free"))))
            rehearsed = "" if found["rehearsed_s"] is None else f"{found['rehearsed_s']:.0f}"
            answers = _answers_alike(measured, name, "answers")
            logprobs = _answers_alike(measured, name, "logprobs") + servers.first_difference(measured, name)
            starts.append((run, label, f"{found['startup_s']:.0f}", rehearsed, answers, logprobs))
            loads += _more_loads(f"{run}, {label}", found)
            given_back += _given_back(f"{run}, {label}", found)
    titled = (
        (("run", "served", "GPU", "load", "date"), runs, 5),
        (("run", "server", "KV tokens", "tokens/s (times stock's)", "ms per token", "first token s"), speed, 2),
        (("run", "server", "weights MB", "need MB", "lowest free MB"), memory, 2),
        (("run", "server", "ready after s", "rehearsal s", "answers as stock's", "log-probabilities"), starts, 2),
        (("run, server", "load", "answered", "errors", "lowest free MB", "answers as before"), loads, 2),
        (("run, server", "KV tokens", "then", "MB given back", "lowest free MB"), given_back, 1),
    )
    found = [output.table(header, rows, left=left) for header, rows, left in titled if rows]
    return "\n".join([*found, *filter(None, map(held_tables, results))])


def _linked(result: output.Result) -> str:
    """Name of a run, linked to its result if the repository has it."""
    name = run_name(result)
    return f"[{name}](../../benchmark/results/{result['name']}.json)" if "name" in result else name


def _speed_cells(found: dict[str, Any], name: str, stock_speed: float | None) -> tuple[str, str, str]:
    """Tokens per second, median milliseconds per token and median seconds to the first token; empty without a load."""
    if "total_throughput" not in found:
        return "", "", ""
    times = f" ({found['total_throughput'] / stock_speed:.2f})" if stock_speed and name != "stock" else ""
    first_token = f"{found['median_ttft_ms'] / 1e3:.1f}"
    return f"{found['total_throughput']:,.0f}{times}", f"{found['median_tpot_ms']:.1f}", first_token


def held_tables(result: output.Result) -> str:
    """A row for each function of the engine whose tensors took more than a hundredth of the most; "": not recorded."""
    figures, rows = result["figures"], []
    for name, one in figures["servers"].items():
        held = one.get("penalized", {}).get("held", {})
        least = sum(held.values()) / 100
        rows += [(name, function, _mb(size)) for function, size in held.items() if size > least]
    header = ("server", "held with penalties, by", "MB")
    described = ", ".join(describe_run(result)[:3])
    return f"{described}\n\n{output.table(header, rows, left=2)}" if rows else ""


def _answers_alike(measured: Mapping[str, Any], name: str, part: str) -> str:
    """Of how many answers a part equals stock's; else of a stock server with zeros behind its scales."""
    alike, zeros = servers.equal_answers(measured, name, part), ""
    if ZEROS in measured and name not in ("stock", ZEROS) and measured[name][part] != measured["stock"][part]:
        zeros = servers.equal_answers(measured, name, part, ZEROS)
    return alike + (f"; {zeros} {ZEROS}'s" if zeros else "")


def _more_loads(label: str, found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each load that came after the requests at once."""
    for key, words in LOADS.items():
        if (load := found.get(key)) is None:
            continue
        same = servers.equal_answers({"stock": found, "then": load}, "then") if "answers" in load else ""
        yield (label, words, f"{load['answered']:,}", _what_failed(load), _mb(load["lowest_free"]), same)


def _given_back(label: str, found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for a server from which another process took memory."""
    if (load := found.get("taken")) and "tokens" in load:
        tokens = (f"{found['tokens']:,}", f"{load['tokens']:,}")
        yield (label, *tokens, _mb(load.get("given_back")), _mb(load["lowest_free"]))


def _what_failed(load: dict[str, Any]) -> str:
    """What ended the server, or else the number of errors."""
    if load["out_of_memory"]:
        return "out of memory"
    if any(SERVER_ENDED in error for error in load["errors"]):
        return "the server ended"
    return f"{len(load['errors'])}"


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / MB:,.0f}"


def earlier(path: Path | None, figures: dict[str, Any]) -> dict[str, Any]:
    """The servers of an earlier run with the same description."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())["figures"]
    described = json.loads(json.dumps({name: value for name, value in figures.items() if name != "servers"}))
    if {name: value for name, value in found.items() if name != "servers"} != described:
        raise SystemExit(f"serving: {path} is of another configuration; name another --json")
    return dict(found["servers"])


def main() -> None:
    quick = {"chunk": 64, "context": 320, "requests": 4, "prompts": 6, "input": (20, 60), "output": 8}
    parser = output.parser(__doc__, quick={**quick, "servers": ["stock", "grown"]}, logs=True)
    dummy_servers.add_options(parser)
    parser.add_argument("--prompts", type=int, default=200, help="requests of the load")
    parser.add_argument("--input", type=output.numbers, default=(3000, 9000), metavar="MIN,MAX", help="tokens of each")
    parser.add_argument("--output", type=int, default=768, help="new tokens of each")
    parser.add_argument("--images", type=int, default=0, help=f"of {IMAGE_SIZE} in each, besides (qwen3-vl-30b)")
    parser.add_argument(
        "--sweep", type=output.numbers, default=(), metavar="N,...", help="then the load again with so many requests"
    )
    parser.add_argument(
        "--leave-free", type=int, default=0, metavar="MIB", help="another process holds the rest of the GPU's memory"
    )
    parser.add_argument(
        "--overfill", type=float, default=0, metavar="SECONDS", help="then more than the KV cache holds"
    )
    parser.add_argument(
        "--penalized", type=int, default=0, metavar="REQUESTS", help="then so many at once, with penalties"
    )
    parser.add_argument(
        "--record", action="store_true", help="of --penalized: which tensors the allocator held when it held most (GPU)"
    )
    parser.add_argument(
        "--take", type=float, default=0, metavar="SECONDS", help="then another process takes memory (grown ones alone)"
    )
    parser.add_argument("--servers", type=parse_servers, default=list(DEFAULT), metavar="NAME,...")
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="keep model and compiled kernels there, for later runs"
    )
    parser.add_argument("arguments", nargs="*", help="more server arguments, after `--`")
    options = output.parse(parser)
    if not options.quick:
        machine.require_gpu("serving", "--quick runs without one")
    if options.record and not (options.penalized and has_gpu()):
        parser.error("--record tells of the load of --penalized, on a GPU")
    described_by = (
        *("model", "shard", "layers", "context", "chunk", "requests", "tp", "prompts", "input", "output"),
        *("arguments", *(["images"] if options.images else []), *(["leave_free"] if options.leave_free else [])),
    )
    figures = dummy_servers.describe_options(options, described_by)
    figures["servers"] = earlier(options.json, figures)
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
                except Exception as error:  # what the other servers were seen to do is worth keeping
                    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    failed.append(name)
                    continue
                print(f"{name}: {summary(found)}\n" + "\n".join(f"  {line}" for line in found["said"]), flush=True)
                if went_wrong := failures(found):
                    failed.append(f"{name} ({went_wrong[0]})")
                if options.json:
                    # Read again: a second run may have added servers meanwhile.
                    figures["servers"] = earlier(options.json, figures) | figures["servers"]
                    output.write(options.json, output.result("serving", figures))
        finally:
            output.keep_logs(options, work)
    if figures["servers"]:
        output.finish(options, output.result("serving", figures), lambda result: tables([result]))
    if failed:
        raise SystemExit(f"serving: not measured, or did not survive: {', '.join(failed)}")
