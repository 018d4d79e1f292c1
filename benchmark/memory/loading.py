"""Measure the GPU memory of servers that have loaded FP4 experts (allocated, reserved, in holes, peak), and KV tokens.

    python benchmark memory/loading --json loading.json  # gpt-oss-120b, MXFP4, whole
    python benchmark memory/loading --leave-free 80943 --json h100.json -- --mem-fraction-static 0.83  # as on an H100
    python benchmark memory/loading --json loading.json --servers new  # one server; other servers later
    python benchmark memory/loading --quick  # a tiny model, CPU: does it run?

Servers start one after the other, with random weights and the engine's defaults:

- `stock`: SGLANG_MOE_PATCHES=none.
- `stock-zeros`: stock, and MXFP4's kernels read zeros after a layer's scales.
- `before`: fp4-weights as in earlier versions, which laid out all experts of a layer at once.
- `new`: fp4-weights as it is now. It lays out a few experts at a time.
- `before-grown`, `new-grown`: `before` and `new` with kv-sizing. The result has two KV cache sizes: by the engine's
  rule, and grown by kv-sizing.

When the model is loaded, unused segments are returned (torch.cuda.empty_cache), and the figures of the allocator are
read. Then each server answers eight questions. Holes are bytes that are reserved and not allocated.

--leave-free makes another process allocate GPU memory first, so that this many MiB are free. An idle H100 has 80943 MiB
of free memory. With the same --json a later run adds its servers to the file.

Servers inherit PYTORCH_CUDA_ALLOC_CONF, the settings of PyTorch's allocator. The result has its value.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import dummy_servers, growth, machine, neighbour, output, plugins, processes, servers
from common.client import Client
from sglang_moe_patches.lab.servers.server import Server

from memory import serving

MB = 1e6
WHOLE_LAYOUT_VARIABLE = "BENCHMARK_WHOLE_LAYOUT"
"""Environment variable. If it is set, fp4-weights lays out all experts of a layer at once, as in earlier versions."""
SERVERS = {
    "stock": "stock",
    "stock-zeros": serving.ZEROS,
    "before": "fp4-weights",
    "new": "fp4-weights",
    "before-grown": "fp4-weights+kv-sizing",
    "new-grown": "fp4-weights+kv-sizing",
}
"""Servers of this benchmark. Value: the server of ``memory/serving.py`` with the same environment variables."""
DEFAULT = ("stock", "stock-zeros", "before", "new")
_LOG_PREFIX = "benchmark: loading: "


# --- Within the server -----------------------------------------------------------------------------------------------


def register() -> None:
    """Entry point of the engine plugin. It measures the memory after loading. If ``WHOLE_LAYOUT_VARIABLE`` is set, it
    also makes fp4-weights lay out experts as in earlier versions.
    """
    import wrapt

    wrapt.register_post_import_hook(_measure, "sglang.srt.model_loader.loader")
    if os.environ.get(WHOLE_LAYOUT_VARIABLE):
        wrapt.register_post_import_hook(_lay_out_whole, "sglang_moe_patches.changes.fp4_weights.in_parts")


def _lay_out_whole(in_parts: Any) -> None:
    """Restore how fp4-weights laid out experts in earlier versions, by switching off three newer steps.

    The steps are: the layout of a few experts at a time, the reuse of the loaded weights' memory for the layout, and
    the return of unused segments to the driver.
    """
    in_parts.wrap_swizzle = lambda original: original
    in_parts.create_with_room = lambda swizzle, create, layer: create()
    in_parts.free_cached_memory = lambda: None


def _measure(loader: Any) -> None:
    load = loader.DummyModelLoader.load_model

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        model = load(*args, **kwargs)
        print(_LOG_PREFIX + json.dumps(_read_memory() | {"seconds": round(time.monotonic() - begin, 2)}), flush=True)
        return model

    loader.DummyModelLoader.load_model = load_model


def _read_memory() -> dict[str, int]:
    """Return unused segments to the driver. Then read the memory figures of this process's allocator, in bytes. The
    result is empty without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    peak = {name: torch.cuda.memory_stats()[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")}
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    native = torch.cuda.get_allocator_backend() == "native"  # another allocator has no snapshot
    segments = torch.cuda.memory_snapshot() if native else []
    largest = max((segment["total_size"] - segment["active_size"] for segment in segments), default=0)
    return {
        "allocated": allocated,
        "reserved": reserved,
        "peak_allocated": peak["allocated"],
        "peak_reserved": peak["reserved"],
        "largest_hole": largest,
    }


# --- One server ------------------------------------------------------------------------------------------------------


def variables(name: str, options: Any, work: Path) -> dict[str, str]:
    own = serving.variables(SERVERS[name], options, work)
    folder = work / "loading-plugin"
    if not folder.exists():
        plugins.write(folder, "benchmark_loading", "memory.loading:register")
    own["PYTHONPATH"] = os.pathsep.join([str(folder), own["PYTHONPATH"]])
    return own | ({WHOLE_LAYOUT_VARIABLE: "1"} if name.startswith("before") else {})


def serve(name: str, options: Any, work: Path, model: Path) -> dict[str, Any]:
    """Start one server, let it answer the questions, and return its figures.

    If the server does not start, ``failed`` has the reason, and the other figures are those that the server logged
    before.
    """
    own, log = variables(name, options, work), work / f"{name}.log"
    Path(own["HOME"]).mkdir(parents=True, exist_ok=True)
    arguments = serving.server_arguments(options, model, SERVERS[name])
    progress = processes.print_progress(name, 20)
    server = Server(name, arguments, own, log, timeout=serving.STARTUP_S, progress=progress)
    figures: dict[str, Any] = {}
    try:
        with server:
            client = Client(server.url)
            info = client.info()
            figures |= {"startup_s": round(server.startup_s, 1), "tokens": info["max_total_num_tokens"]}
            figures["fraction"] = serving.fraction_in_force(info)
            sizing = growth.read_growth(client.metrics()) if serving.kind_of(SERVERS[name]).grows else None
            figures["growth"] = None if sizing is None else sizing._asdict()
            answers = servers.answer_all(server, options.longest, serving.ANSWER_TOKENS, logprobs=True)
            figures["answers"], figures["logprobs"] = servers.digests(answers), servers.digests(answers, "logprobs")
            figures["said"] = growth.kv_sizing_lines(server.log_text())
    except Exception as error:
        figures["failed"] = failure(log.read_text() if log.exists() else "", error)
    return read_memory_figures(log.read_text() if log.exists() else "") | figures


def read_memory_figures(log: str) -> dict[str, Any]:
    """Read from a server's log the figures of the rank that reserved the most memory. The result is empty if the model
    was not loaded.
    """
    ranks = [json.loads(line.partition(_LOG_PREFIX)[2]) for line in log.splitlines() if _LOG_PREFIX in line]
    return max(ranks, key=lambda rank: rank.get("reserved", 0), default={})


def failure(log: str, error: Exception) -> str:
    """Return the last line of a server's log that names an error. It says why the server did not start."""
    named = [line for line in log.splitlines() if "Error" in line or "Not enough memory" in line]
    return (named[-1] if named else f"{type(error).__name__}: {error}").strip()[-300:]


# --- The table -------------------------------------------------------------------------------------------------------

MEMORY = ("server", "allocated MB", "reserved MB", "in holes MB", "peak reserved MB", "loading s")
TOKENS = (
    "server",
    "KV tokens by the rule",
    "KV tokens, grown",
    "answers equal to stock-zeros",
    "equal log-probabilities",
)


def make_tables(results: Sequence[output.Result]) -> str:
    """Make two tables for each run: one of memory, and one of KV tokens and answers."""
    parts = []
    for result in results:
        figures = result["figures"]
        servers_of_run = figures["servers"].items()
        memory = [(name, *_memory_cells(found)) for name, found in servers_of_run]
        tokens = [
            (name, *_token_cells(found), *_count_equal_answers(results, result, name)) for name, found in servers_of_run
        ]
        parts += [f"{run_label(result)}\n", output.table(MEMORY, memory), output.table(TOKENS, tokens)]
    return "\n".join(parts)


SETTINGS = ("setting", "holes MB of stock-zeros", "of new", *TOKENS[3:])


def make_settings_table(results: Sequence[output.Result]) -> str:
    """Make a table with a row for each run of *stock-zeros* and *new* with one setting of PyTorch's allocator."""
    rows = []
    for result in results:
        figures = result["figures"]
        setting = figures["allocator_settings"]
        holes = [_memory_cells(figures["servers"][name])[2] for name in (serving.ZEROS, "new")]
        equal = _count_equal_answers(results, result, "new")
        rows.append((f"`{setting}`" if setting else "none", *holes, *equal))
    return output.table(SETTINGS, rows)


def run_label(result: output.Result) -> str:
    """Describe a run: model, GPU, whether CUDA graphs were off, the free memory that ``--leave-free`` left, and the
    settings of PyTorch's allocator.
    """
    figures = result["figures"]
    parts = [dummy_servers.run_label(result), machine.gpu_model(result["conditions"])]
    parts += ["no CUDA graphs"] * ("--disable-cuda-graph" in figures["arguments"])
    parts += [f"{figures['leave_free']:,} MiB free"] * bool(figures["leave_free"])
    parts += filter(None, [figures["allocator_settings"]])
    return ", ".join(filter(None, parts))


def _memory_cells(figures: dict[str, Any]) -> list[str]:
    if "reserved" not in figures:
        return [""] * 5
    holes = figures["reserved"] - figures["allocated"]
    share = f"{holes / MB:,.0f} ({holes / figures['allocated']:.1%})"
    sizes = [f"{figures[name] / MB:,.0f}" for name in ("allocated", "reserved", "peak_reserved")]
    return [*sizes[:2], share, sizes[2], f"{figures['seconds']:.0f}"]


def _token_cells(figures: dict[str, Any]) -> list[str]:
    if "failed" in figures:
        return ["does not start", ""]
    growth_of = figures["growth"]
    if growth_of is None:
        return [f"{figures['tokens']:,}", ""]
    return [f"{growth_of['rule_tokens']:,}", f"{growth_of['tokens']:,}"]


def _count_equal_answers(results: Sequence[output.Result], result: output.Result, name: str) -> list[str]:
    """Compare a server's answers with those of the server ``stock-zeros``, bit by bit.

    If the run has no server ``stock-zeros``, the answers of ``stock-zeros`` come from another run: the first of
    ``results`` that has this server, and the same model, sizes and SGLang release.

    :returns: how many answers are equal, and how many answers have equal log-probabilities: two texts, as in "8 of 8".
        Both are "" if there is nothing to compare.
    """
    own = result["figures"]["servers"]
    alike = (other for other in results if _describe_model(other) == _describe_model(result))
    stored = (other["figures"]["servers"].get(serving.ZEROS) for other in alike)
    zeros = own.get(serving.ZEROS) or next(filter(None, stored), None)
    if zeros is None or "answers" not in own[name] or own[name] is zeros:
        return ["", ""]
    compared = {serving.ZEROS: zeros, name: own[name]}
    return [servers.equal_answers(compared, name, part, serving.ZEROS) for part in ("answers", "logprobs")]


def _describe_model(result: output.Result) -> tuple[Any, ...]:
    """Return what a run's answers depend on: the SGLang release, the model and its sizes."""
    return result["conditions"]["engine"], *(result["figures"][name] for name in ("model", "shard", "layers"))


def main() -> None:
    quick = {"chunk": 64, "context": 320, "requests": 4, "longest": 60, "servers": ["stock", "new"]}
    parser = output.parser(__doc__, quick=quick, logs=True)
    dummy_servers.add_options(parser)
    parser.set_defaults(model="gpt-oss-120b-mxfp4", shard=1, layers=36, context=131_072, chunk=8192, requests=0)
    parser.add_argument(
        "--leave-free",
        type=int,
        default=0,
        metavar="MIB",
        help="another process allocates GPU memory until only MIB MiB are free",
    )
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest question")
    parser.add_names("--servers", "servers to measure", SERVERS, DEFAULT)
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="keep the model and compiled kernels in this folder, for later runs"
    )
    parser.add_argument("arguments", nargs="*", help="further server arguments, after `--`")
    options = output.parse(parser)
    if not options.quick:
        machine.require_gpu("loading", "--quick runs without one")
    options.take, options.input, options.output = 0, (options.longest,), serving.ANSWER_TOKENS
    named = ("model", "shard", "layers", "context", "chunk", "requests", "tp", "leave_free", "longest", "arguments")
    figures = dummy_servers.describe_options(options, named)
    figures["allocator_settings"] = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    figures["servers"] = serving.load_servers(options.json, figures)
    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        work = (options.work or Path(folder)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        model = serving.write_model(work / "model", options)
        try:
            with neighbour.leave_free(options.leave_free):
                for name in options.servers:
                    figures["servers"][name] = found = serve(name, options, work, model)
                    print(f"{name}: {json.dumps({key: found[key] for key in found if key != 'said'})}", flush=True)
                    if options.json:
                        output.write(options.json, output.result("loading", figures))
        finally:
            output.keep_logs(options, work)
    output.finish(options, output.result("loading", figures), lambda result: make_tables([result]))
    if failed := [name for name in options.servers if "failed" in figures["servers"][name]]:
        print(f"loading: did not start: {', '.join(failed)}", file=sys.stderr)
