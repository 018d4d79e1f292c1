"""What this package costs the launching process: time, memory, and modules imported, stock engine against patched.

The launcher runs no model. It is measured as a user's is: a fresh interpreter loads the engine's plugins and parses
server arguments, with our plugin and (``SGLANG_PLUGINS`` naming all others) without it, in turn.

    python benchmark/launcher_cost.py [--runs 7] [--markdown FILE]

Runs on any machine; without a CUDA driver start it through ``sglang-moe-patches exec --reference-kernels --``, whose
reference kernels it leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path

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


def measure(with_us: bool) -> dict:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_MOE_PATCHES")}
    if not with_us:
        others = [e.name for e in metadata.entry_points(group="sglang.srt.plugins") if e.name != "moe_patches"]
        environment["SGLANG_PLUGINS"] = ",".join(others) or "none_of_them"
    done = subprocess.run([sys.executable, "-c", LAUNCHER], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each, after one warm-up")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    results: dict[bool, list[dict]] = {False: [], True: []}
    for run in range(options.runs + 1):
        for with_us in (False, True):
            figures = measure(with_us)
            if run:
                results[with_us].append(figures)
    lines = ["| launcher | without | with sglang-moe-patches | difference |", "| --- | --: | --: | --: |"]
    for name, label, digits in (
        ("load_plugins_ms", "`load_plugins()`, ms", 1),
        ("total_s", "imports up to launching, s", 2),
        ("rss_mb", "peak memory, MB", 1),
        ("modules", "modules imported", 0),
    ):
        without, with_us = (statistics.median(r[name] for r in results[key]) for key in (False, True))
        lines.append(f"| {label} | {without:.{digits}f} | {with_us:.{digits}f} | {with_us - without:+.{digits}f} |")
    last, stock = results[True][-1], results[False][-1]
    ours = sorted({name.split(".")[0] for name in set(last["imported_by_plugins"]) - set(stock["imported_by_plugins"])})
    lines += [
        "",
        f"Model code imported in the launcher: {', '.join(last['models']) or 'none'} with this package, "
        f"{', '.join(stock['models']) or 'none'} without. Packages that loading our plugin imports: {', '.join(ours)}.",
    ]
    text = "\n".join(lines)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
