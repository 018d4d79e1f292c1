"""What this package costs a start: the launching process's time, memory and modules, and a server's time to ready.

The launcher runs no model. It is measured as a user's is: a fresh interpreter loads the engine's plugins and parses
server arguments, with our plugin and without it, in turn; ``SGLANG_PLUGINS`` names which, and the reference kernels'
never.

    python benchmark whole/launcher_cost --json launcher.json
    python benchmark whole/launcher_cost --servers --json servers.json  # kv-sizing: whole starts of a tiny model, CPU

With `--servers` whole servers start one after another, each round in the other order: stock, stock again, kv-sizing
without its variable, and with `auto`, which rehearses and grows. What the driver says of memory is a stand-in's. A
rehearsal's own time is told in whole seconds.

Runs on any machine; without a CUDA driver start it through ``sglang-moe-reference exec --``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from common import growth, output, plugins, processes, servers, timing, weights
from common.shapes import TINY
from sglang_moe_patches.core import machine
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_MARGIN, KV_SIZING
from sglang_moe_reference.environment import PLUGIN_NAME

LAUNCHER = """
import json, resource, sys, time
started = time.perf_counter()
from sglang.srt.server_args import prepare_server_args
before = set(sys.modules)
loading = time.perf_counter()
from sglang.srt.plugins import load_plugins
load_plugins()
loaded = time.perf_counter()
imported = sorted(set(sys.modules) - before)
from sglang.srt.entrypoints.http_server import launch_server  # what the launcher imports next, with or without us
print(json.dumps({
    "load_plugins_ms": (loaded - loading) * 1e3,
    "total_s": time.perf_counter() - started,
    "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "modules": len(sys.modules),
    "imported_by_plugins": imported,
    "models": sorted(name for name in sys.modules if name.startswith("sglang.srt.models.deepseek")),
}))
"""


#: name: what the table calls it, and its digits
MEASURED = {
    "load_plugins_ms": ("`load_plugins()`, ms", 1),
    "total_s": ("imports up to launching, s", 2),
    "rss_mb": ("peak memory, MB", 1),
    "modules": ("modules imported", 0),
}


def launch(with_us: bool) -> dict[str, Any]:
    environment = processes.variables()
    left_out = {PLUGIN_NAME} if with_us else {PLUGIN_NAME, machine.PLUGIN_NAME}
    loaded = {plugin.name for plugin in metadata.entry_points(group="sglang.srt.plugins")} - left_out
    environment["SGLANG_PLUGINS"] = ",".join(sorted(loaded)) or "none_of_them"
    done = subprocess.run([sys.executable, "-c", LAUNCHER], env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SystemExit(
            f"launcher_cost.py: {''.join(last)}; without a CUDA driver start it through `sglang-moe-reference exec --`"
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(runs: int) -> dict[str, Any]:
    launched: dict[str, list[dict[str, Any]]] = {"stock": [], "patched": []}
    for run in range(runs + 1):
        for name, launches in launched.items():
            one = launch(name == "patched")
            if run:  # the first ones warm the disk's cache
                launches.append(one)
    stock, patched = (launches[-1] for launches in launched.values())
    only_ours = set(patched["imported_by_plugins"]) - set(stock["imported_by_plugins"])
    return {
        "runs": runs,
        "medians": {
            key: {name: statistics.median(one[key] for one in launches) for name, launches in launched.items()}
            for key in MEASURED
        },
        "model_code": {"stock": stock["models"], "patched": patched["models"]},
        "our_packages": sorted({name.split(".")[0] for name in only_ours}),
    }


def tables(result: output.Result) -> str:
    figures = result["figures"]
    rows = []
    for key, (label, digits) in MEASURED.items():
        stock, patched = (figures["medians"][key][name] for name in ("stock", "patched"))
        rows.append((label, f"{stock:.{digits}f}", f"{patched:.{digits}f}", f"{patched - stock:+.{digits}f}"))
    code = {name: ", ".join(figures["model_code"][name]) or "none" for name in ("stock", "patched")}
    return (
        output.table(("launcher", "without", "with sglang-moe-patches", "difference"), rows)
        + f"\nMedians of {figures['runs']} runs of each, in turn. Model code imported in the launcher: "
        f"{code['patched']} with this package, {code['stock']} without. Packages that loading our plugin imports: "
        f"{', '.join(figures['our_packages'])}.\n"
    )


# --- Servers ---------------------------------------------------------------------------------------------------------

STARTS = {
    timing.STOCK: ("none", "", "stock", None),
    timing.CONTROL: ("none", "", "stock again", 0.0),
    "unset": ("kv-sizing", "", "kv-sizing without its variable", 0.0),
    "grown": ("kv-sizing", "auto", "`auto`", 0.3),
}
"""By name: ``SGLANG_MOE_PATCHES``, ``SGLANG_MOE_PATCHES_KV_SIZING``, what the table calls it; and, written before the
first run, seconds beside stock, without the rehearsal."""


def processor_s() -> float:
    """Seconds of processor time of all processes that this one has started, and of those that they waited for."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def start(name: str, work: Path, setup: servers.Setup, seen: list[tuple[float, float | None]]) -> float:
    """Seconds until a server is ready.

    :param seen: takes the processor's seconds until then, and those of the rehearsal; ``None``: there was none.
    """
    changes, mode, *_ = STARTS[name]
    own = setup.environment(name) | {SELECT_VARIABLE: changes}
    if mode:
        own[KV_SIZING.name] = mode
    own[KV_MARGIN.name] = KV_MARGIN.default  # the stand-in reads it
    arguments = [each for each in setup.command() if each != "--skip-server-warmup"]
    setup.temporary(name).mkdir(exist_ok=True)
    with Server(name, arguments, own, work / f"{name}.log", progress=processes.saying(name, 20)) as server:
        seen.append((processor_s(), growth.rehearsed_s(growth.said(server.log_text()))))
    print(f"  {name}: ready in {server.startup_s:.1f} s", flush=True)
    return server.startup_s


def measure_servers(rounds: int) -> dict[str, Any]:
    seen: dict[str, list[tuple[float, float | None]]] = {name: [] for name in STARTS}
    with tempfile.TemporaryDirectory(prefix="starts-") as folder:
        work = Path(folder)
        limits = ("--max-running-requests", "3", "--context-length", "320", "--max-total-tokens", "2000")
        setup = servers.Setup(weights.Served(TINY), work, tokens=64, arguments=limits, observe=False)
        setup.prepare()
        plugins.write_module(work / "plugin", growth.STAND_IN.stem, growth.STAND_IN.read_text())
        versions = {name: partial(start, name, work, setup, seen[name]) for name in STARTS}
        ready_s = timing.in_turn(versions, rounds)
    if any((rehearsed is None) == (name == "grown") for name, each in seen.items() for _, rehearsed in each):
        raise SystemExit(f"launcher_cost: rehearsals of unexpected starts: {seen}")
    counted = {name: each[1:] for name, each in seen.items()}  # the first ones warm the disk's cache
    return {
        "rounds": rounds,
        "ready_s": ready_s,
        "processor_s": {name: [processor for processor, _ in each] for name, each in counted.items()},
        "rehearsed_s": [rehearsed for _, rehearsed in counted["grown"]],
    }


def beside(other: list[float], stock: list[float]) -> str:
    """The median of the rounds' differences, the smallest and the largest."""
    more = sorted(a - b for a, b in zip(other, stock, strict=True))
    return f"{statistics.median(more):+.1f} ({more[0]:+.1f} .. {more[-1]:+.1f})"


def server_tables(result: output.Result) -> str:
    figures = result["figures"]
    rows = []
    for name, ready in figures["ready_s"].items():
        grows, processor = name == "grown", figures["processor_s"][name]
        *_, label, predicted = STARTS[name]
        rehearsed = figures["rehearsed_s"] if grows else [0] * len(ready)
        row = [label, f"{statistics.median(ready):.1f}"]
        row.append(f"{statistics.median(rehearsed):.0f}" if grows else "")
        if name == timing.STOCK:
            rows.append((*row, "", "", f"{statistics.median(processor):.1f}", ""))
            continue
        without = [seconds - own for seconds, own in zip(ready, rehearsed, strict=True)]
        row += [beside(without, figures["ready_s"][timing.STOCK]), f"{predicted:+.1f}"]
        row += [f"{statistics.median(processor):.1f}", beside(processor, figures["processor_s"][timing.STOCK])]
        rows.append(tuple(row))
    header = (
        *("server", "ready after s", "of it rehearsal s", "the rest, beside stock s", "predicted s"),
        *("processor s", "beside stock s"),
    )
    return (
        output.table(header, rows)
        + f"\nMedians of {figures['rounds']} rounds, and of their differences, with the smallest and the largest. "
        "A start is looked at every half second. Processor time is that of all of a server's processes, rehearsal "
        "included.\n"
    )


def main() -> None:
    parser = output.parser(__doc__, quick={"runs": 1})
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each, after one warm-up")
    parser.add_argument("--servers", action="store_true", help="start whole servers")
    options = output.parse(parser)
    figures = (measure_servers if options.servers else measure)(options.runs)
    output.finish(options, output.result("launcher_cost", figures), server_tables if options.servers else tables)
