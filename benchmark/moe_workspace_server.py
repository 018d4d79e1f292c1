"""Whole servers with the Triton runner, stock against patched: a prefill's memory and time, and the same answers.

    python benchmark/moe_workspace_server.py --json server.json
    python benchmark/moe_workspace_server.py --model qwen3-235b --changes all # other widths, every change
    python benchmark/moe_workspace_server.py --graphs --json graphs.json    # with the engine's default graphs
    python benchmark/moe_workspace_server.py --quick                          # a tiny model, CPU: does it run at all?

Two real servers at the same time on one GPU, a few BF16 layers of the model's widths at one rank's shard sizes, random
weights (drawn where `--load-format dummy` would), asked the same prompts in turn. Figures are of one forward of
--tokens tokens, beyond what was allocated before it; each server's first two forwards do not count, they pay for
libraries' workspaces. Answers must be equal, token by token and log-probability by log-probability, or the result says
which are not.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import machine, output, plugins, weights
from common.shapes import MODELS, TINY
from sglang_moe_patches.patch import SELECT_VARIABLE
from sglang_moe_patches.reference import environment
from sglang_moe_patches.regression.server import Server

MB = 1e6
#: The patched one is named after the change that it has by default.
SERVERS = ("stock", "columns")
CHANGES = "moe-workspace"
OBSERVED = "MOE_WORKSPACE_OBSERVED"
WARM_UP = 2

#: Runs in every process of the servers: writes a line for each forward.
PLUGIN = f"""
import functools, json, os, time
import wrapt

def register():
    wrapt.register_post_import_hook(_observe, "sglang.srt.model_executor.model_runner")
    wrapt.register_post_import_hook(_count, "sglang_moe_patches.changes.moe_workspace.seams")
    wrapt.register_post_import_hook(_draw, "sglang.srt.model_loader.loader")

def _draw(loader):
    def draw(model, *args, **kwargs):
        import torch
        for name, tensor in model.state_dict().items():
            if not torch.is_floating_point(tensor):
                continue
            generator = torch.Generator(tensor.device).manual_seed(len(name))
            if tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
            else:
                tensor.fill_(1 if "norm" in name else 0)
    loader.initialize_dummy_weights = draw

slices = []

def _count(seams):
    original = seams.slices
    def counted(promise, into):
        found = original(promise, into)
        slices.append(len(found))
        return found
    seams.slices = counted

def _observe(module):
    import torch
    forward = module.ModelRunner.forward
    cuda = torch.cuda.is_available()

    @functools.wraps(forward)
    def run(self, batch, *args, **kwargs):
        slices.clear()
        before = peak = reserved = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        result = forward(self, batch, *args, **kwargs)
        if cuda:
            torch.cuda.synchronize()
            peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved()
        seen = {{"tokens": batch.input_ids.shape[0], "ms": (time.perf_counter() - started) * 1e3, "peak": peak,
                "before": before, "reserved": reserved, "slices": list(slices)}}
        with open(os.environ["{OBSERVED}"], "a") as lines:
            lines.write(json.dumps(seen) + "\\n")
        return result

    module.ModelRunner.forward = run
"""


def server(name: str, options: Any, work: Path) -> Server:
    chunk = str(options.tokens)
    given = ["--model-path", str(work / "model"), "--load-format", "dummy", "--moe-runner-backend", "triton"]
    given += ["--disable-shared-experts-fusion", "--disable-radix-cache", "--grammar-backend", "none"]
    given += ["--chunked-prefill-size", chunk, "--max-prefill-tokens", chunk, "--skip-server-warmup"]
    given += ["--random-seed", "1", "--max-total-tokens", str(2 * options.tokens + 4096), *options.server_arguments]
    if not options.graphs:
        given += ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"]
    if environment.has_gpu():
        given += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.9"]
    paths = [str(work / "plugins"), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_MOE_PATCHES")}
    own |= environment.variables(own)
    selected = "none" if name == "stock" else options.changes
    own |= {SELECT_VARIABLE: selected, OBSERVED: str(work / f"{name}.jsonl"), "PYTHONPATH": ":".join(paths)}

    def progress(seconds: float, line: str) -> None:
        if round(seconds * 2) % 40 == 0:
            print(f"  {name}: {seconds:.0f} s  {line[:140]}", flush=True)

    return Server(name, environment.server_arguments(given), own, work / f"{name}.log", timeout=600, progress=progress)


def measure(options: Any, work: Path) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor

    from common.servers import generate, prompt, same

    model = TINY if options.quick else MODELS[options.model].shard(options.shard)
    weights.write_model(work / "model", weights.Served(model, options.dense_layers, options.moe_layers, "triton"))
    plugins.write_module(work / "plugins", "moe_workspace_observer", PLUGIN)
    plugins.write(work / "plugins", "moe_patches", "sglang_moe_patches.plugin:register")
    servers = {name: server(name, options, work) for name in SERVERS}
    answers: dict[str, list[Any]] = {name: [] for name in SERVERS}
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda one: one.__enter__(), servers.values()))
        print("ready", flush=True)
        for round_ in range(WARM_UP + options.rounds):
            for name in list(servers)[:: -1 if round_ % 2 else 1]:
                ids = prompt(options.tokens, round_ % (WARM_UP + 2))
                answers[name].append(generate(servers[name], ids, options.new_tokens))
    finally:
        for one in servers.values():
            one.stop()
        output.keep_logs(options, work)
    found: dict[str, Any] = {
        "changes": options.changes,
        "equal": list(map(same, answers["stock"], answers["columns"])),
    }
    for name in servers:
        seen = [json.loads(line) for line in (work / f"{name}.jsonl").read_text().splitlines()]
        whole = [one for one in seen if one["tokens"] == options.tokens][WARM_UP:]
        decode = [one["ms"] for one in seen if one["tokens"] == 1]
        log = servers[name].log_text()
        found[name] = {
            "forwards": len(whole),
            "peak": max(one["peak"] for one in whole),
            "reserved": whole[-1]["reserved"],
            "before": whole[-1]["before"],
            "ms": statistics.median(one["ms"] for one in whole),
            "all_ms": [round(one["ms"], 2) for one in whole],
            "decode_ms": statistics.median(decode) if decode else None,
            "slices": whole[-1]["slices"],
            "log": [line for line in log.splitlines() if "moe-patches" in line or "graph" in line.lower()][:12],
        }
    found["slowdown"] = statistics.median(
        b / a for a, b in zip(found["stock"]["all_ms"], found["columns"]["all_ms"], strict=True)
    )
    return found


def tables(results: list[output.Result]) -> str:
    """A row for each server of each run."""
    rows = []
    for result in results:
        graphs = "default graphs" if "--graphs" in result["command"] else "eager"
        found = result["figures"]
        changes = found.get("changes", CHANGES)
        for name in SERVERS:
            one = found[name]
            rows.append(
                [
                    f"{name if name == 'stock' or changes == CHANGES else changes}, {graphs}",
                    f"{one['peak'] / MB:,.0f}",
                    f"{one['before'] / MB:,.0f}",
                    f"{one['reserved'] / MB:,.0f}",
                    f"{one['ms']:.1f}",
                    f"{found['slowdown']:.3f}" if name != "stock" else "",
                    f"{one['decode_ms']:.2f}" if one["decode_ms"] else "",
                    ", ".join(map(str, one["slices"])) or "-",
                    f"{sum(found['equal'])} of {len(found['equal'])}" if name != "stock" else "",
                ]
            )
    header = (
        "server",
        "peak MB",
        "held before MB",
        "reserved MB",
        "prefill ms",
        "time",
        "decode ms",
        "slices",
        "equal answers",
    )
    return output.table(header, rows)


def main() -> None:
    parser = output.parser(__doc__, quick={"tokens": 64, "rounds": 1}, logs=True)
    parser.add_argument("--model", choices=[m for m in weights.SERVABLE if m in MODELS], default="kimi-k2.5")
    parser.add_argument("--changes", default=CHANGES, help="SGLANG_MOE_PATCHES of the patched server (%(default)s)")
    parser.add_argument("--shard", type=int, default=4, help="the TP whose shard sizes one GPU gets")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--dense-layers", type=int, default=1)
    parser.add_argument("--moe-layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--graphs", action="store_true", help="leave the engine's default CUDA graphs on")
    parser.add_argument("server_arguments", nargs="*", help="after --: more arguments for both servers")
    options = output.parse(parser)
    if not options.quick:
        machine.require_gpu("moe_workspace_server", "--quick runs without one")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    result = output.result("moe_workspace_server", found)
    output.finish(options, result, tables([result]))


if __name__ == "__main__":
    main()
