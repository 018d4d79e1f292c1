"""Measure the time, memory and modules that this package costs the process that launches a server.

The launcher runs no model. A new interpreter loads the engine's plugins and imports the launcher's modules, with this
package's plugin and without it, in turn. ``SGLANG_PLUGINS`` selects the plugins. The plugin of the reference kernels is
never selected.

    python benchmark whole/launcher_cost --json launcher.json

This runs on any machine. Without a CUDA driver, start it with ``sglang-moe-reference exec --``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from importlib import metadata
from typing import Any

from common import output, processes
from sglang_moe_patches.core import machine
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
from sglang.srt.entrypoints.http_server import launch_server  # the launcher's next import, with any plugins
print(json.dumps({
    "load_plugins_ms": (loaded - loading) * 1e3,
    "total_s": time.perf_counter() - started,
    "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "modules": len(sys.modules),
    "imported_by_plugins": imported,
    "models": sorted(name for name in sys.modules if name.startswith("sglang.srt.models.deepseek")),
}))
"""
"""Program of the launcher. It prints its figures as JSON."""

FIGURES = {
    "load_plugins_ms": ("`load_plugins()`, ms", 1),
    "total_s": ("imports up to launching, s", 2),
    "rss_mb": ("peak memory, MB", 1),
    "modules": ("modules imported", 0),
}
"""Figures of the launcher: for each key, its name in the table and its number of decimals."""


def launch(with_package: bool) -> dict[str, Any]:
    """Run the launcher once, and return its figures.

    :param with_package: whether this package's plugin is loaded.
    """
    environment = processes.variables()
    left_out = {PLUGIN_NAME} if with_package else {PLUGIN_NAME, machine.PLUGIN_NAME}
    loaded = {plugin.name for plugin in metadata.entry_points(group="sglang.srt.plugins")} - left_out
    environment["SGLANG_PLUGINS"] = ",".join(sorted(loaded)) or "none_of_them"
    done = subprocess.run([sys.executable, "-c", LAUNCHER], env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SystemExit(
            f"launcher_cost.py: {''.join(last)}; without a CUDA driver start it with `sglang-moe-reference exec --`"
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(runs: int) -> dict[str, Any]:
    """Run the launcher with and without the package in turn, and compute the medians."""
    launched: dict[str, list[dict[str, Any]]] = {"stock": [], "patched": []}
    for run in range(runs + 1):
        for name, launches in launched.items():
            figures = launch(name == "patched")
            if run:  # the first run of each launcher only fills the disk cache
                launches.append(figures)
    stock, patched = (launches[-1] for launches in launched.values())
    only_ours = set(patched["imported_by_plugins"]) - set(stock["imported_by_plugins"])
    return {
        "runs": runs,
        "medians": {
            key: {name: statistics.median(figures[key] for figures in launches) for name, launches in launched.items()}
            for key in FIGURES
        },
        "model_code": {"stock": stock["models"], "patched": patched["models"]},
        "our_packages": sorted({name.split(".")[0] for name in only_ours}),
    }


def make_tables(result: output.Result) -> str:
    figures = result["figures"]
    rows = []
    for key, (label, digits) in FIGURES.items():
        stock, patched = (figures["medians"][key][name] for name in ("stock", "patched"))
        rows.append((label, f"{stock:.{digits}f}", f"{patched:.{digits}f}", f"{patched - stock:+.{digits}f}"))
    code = {name: ", ".join(figures["model_code"][name]) or "none" for name in ("stock", "patched")}
    return (
        output.table(("launcher", "without", "with sglang-moe-patches", "difference"), rows)
        + f"\nMedians of {figures['runs']} runs of each, in turn. Model code imported in the launcher: "
        f"{code['patched']} with this package, {code['stock']} without. Packages that loading our plugin imports: "
        f"{', '.join(figures['our_packages'])}.\n"
    )


def main() -> None:
    parser = output.parser(__doc__, quick={"runs": 1})
    parser.add_argument(
        "--runs",
        type=int,
        default=7,
        help="number of counted runs with and without the package, after one warm-up (%(default)s)",
    )
    options = output.parse(parser)
    output.finish(options, output.result("launcher_cost", measure(options.runs)), make_tables)
