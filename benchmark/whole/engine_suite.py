"""Run SGLang's own tests with this package installed, stock and patched, and compare the outcomes.

    make engine-suite SGLANG=../sglang                        # a checkout at the tag of the installed engine
    python benchmark whole/engine_suite ../sglang --jobs 16 --json suite.json --logs logs
    python benchmark whole/engine_suite ../sglang --list         # which files would run, and why others would not
    python benchmark whole/engine_suite ../sglang --only fused_moe,block_int8

The benchmark selects the folders of `test/registered` with tests of MoE layers. From these it runs every file that
needs one GPU and no download. Each file runs twice, in processes of its own: with the stock engine, and with every
change acting wherever it can (`benchmark/common/engine_test_file.py`). The exit code is 1 if a test passes with the
stock engine and does not pass with the patched engine.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from common import machine, output, plugins, processes, stand_ins
from common.engine_test_file import SIDES
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.lab.servers.supervisor import Supervised

REGISTERED = Path("test") / "registered"
FOLDERS = ("moe/", "quant/", "ep/", "lora/", "kernels/", "layers/", "ops/", "unit/layers/", "unit/lora/", "rl/")
"""Folders below `test/registered` from which test files are selected."""
ABOUT_MOE = re.compile(r"moe|experts", re.IGNORECASE)
"""Matches the words "moe" and "experts". A file outside of `moe/` and `quant/` is selected only if it has such a word.
"""
NEEDS_MODEL = {
    *("from_pretrained", "popen_launch_server", "popen_launch_pd_server", "Engine", "SRTRunner", "HFRunner"),
    *("snapshot_download", "hf_hub_download", "load_dataset", "try_cached_model", "run_bench_serving"),
}
"""Names of functions and classes that download a model, or that start a server with a public model. A test file with
such a name is skipped.
"""
MODEL_NAME = re.compile(r"^DEFAULT_\w*MODEL\w*$")
"""Matches the engine's constants for public models, such as ``DEFAULT_MODEL_NAME_FOR_TEST``."""
GPUS = re.compile(r"\b(\d+)-gpu")
OTHER_DEVICES = {"register_amd_ci": "AMD", "register_npu_ci": "NPU", "register_cpu_ci": "CPU"}


# --- Selection --------------------------------------------------------------------------------------------------------


def skip_reason(source: str, gpus: int = 1) -> str:
    """Return the reason why a test file does not run; "": it runs.

    :param source: source of the file.
    :param gpus: number of available GPUs.
    """
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    if needed := sorted(name for name in names if name in NEEDS_MODEL or MODEL_NAME.match(name)):
        return f"needs a model: {next((name for name in needed if MODEL_NAME.match(name)), needed[0])}"
    calls = [(node.func.id, node) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    cuda = [ast.unparse(call) for name, call in calls if name == "register_cuda_ci"]
    others = [OTHER_DEVICES[name] for name, _ in calls if name in OTHER_DEVICES]
    if not cuda and "CPU" not in others:
        return f"for {' and '.join(dict.fromkeys(others))} alone" if others else "not registered"
    gpu_counts = [int(match) for code in cuda for match in GPUS.findall(code)]
    return f"needs {min(gpu_counts)} GPUs" if gpu_counts and min(gpu_counts) > gpus else ""


def select(checkout: Path, only: Sequence[str] = (), gpus: int = 1) -> dict[str, str]:
    """Select test files about MoE layers or quantization below `test/registered`.

    :param only: parts of paths. Only files whose path contains one of these parts are selected; empty: all files.
    :returns: skip reason of each file; "": it runs.
    """
    root = checkout / REGISTERED
    reasons = {}
    for path in sorted(root.rglob("test_*.py")):
        name = str(path.relative_to(root))
        if not name.startswith(FOLDERS) or (only and not any(part in name for part in only)):
            continue
        source = path.read_text(encoding="utf-8")
        if name.startswith(("moe/", "quant/")) or ABOUT_MOE.search(source):
            reasons[name] = skip_reason(source, gpus)
    if not reasons:
        raise SystemExit(f"engine_suite: no tests below {root}; give a checkout of SGLang")
    return reasons


def describe_checkout(checkout: Path) -> str:
    """Return the tag or commit of the checkout, by git; "" if the checkout is no git repository."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--tags", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else ""


# --- Running ----------------------------------------------------------------------------------------------------------


def variables(*folders: Path) -> dict[str, str]:
    """Return the environment variables of a test process. Its ``PYTHONPATH`` begins with ``folders``."""
    own = processes.variables(*folders, Path(__file__).parents[1], *stand_ins.folders())
    # If a selected test still tries to download a model, it fails at once, stock and patched.
    return own | {"HF_HUB_OFFLINE": "1"}


def run(file: str, side: str, checkout: Path, work: Path, limit_s: float) -> dict[str, Any]:
    """Run the tests of one file with the stock engine or with the patched engine.

    :param side: ``stock`` or ``patched``.
    :param limit_s: seconds until the process is ended.
    :returns: outcomes of the tests, and ``seconds``.
    """
    name = f"{file.removesuffix('.py').replace('/', '-')}-{side}"
    result = work / f"{name}.json"
    own = variables(*[work / "plugin"] * (side == "patched"))
    own |= {SELECT_VARIABLE: "all" if side == "patched" else "none"}
    path = (checkout / REGISTERED / file).resolve()
    command = [sys.executable, "-m", "common.engine_test_file", side, str(path), str(result)]
    started = time.monotonic()
    with (work / f"{name}.log").open("wb") as log:
        process = Supervised(command, own, log, cwd=str(path.parent))
        try:
            while process.exit_code() is None and time.monotonic() < started + limit_s:
                time.sleep(0.2)
            code = process.exit_code()
        finally:
            process.end()
    seconds = round(time.monotonic() - started, 1)
    outcomes: dict[str, Any] = {"tests": {}, "errors": [], "acted": {}, "changes": {}}
    if result.exists():
        outcomes = json.loads(result.read_text())
    elif code is None:
        outcomes["errors"] = [f"ended after {limit_s:.0f} s"]
    else:
        lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
        outcomes["errors"] = [f"exit code {code}: {lines[-1][:300] if lines else ''}"]
    print(f"  {file}, {side}: {outcome_counts(outcomes)}, {seconds:.0f} s", flush=True)
    return outcomes | {"seconds": seconds}


def outcome_counts(side: dict[str, Any]) -> str:
    """Format the numbers of passed, failed and skipped tests, as in "12 passed, 3 skipped"."""
    counts = Counter(test["outcome"] for test in side["tests"].values())
    parts = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome]]
    return ", ".join([*parts, *(["no result"] if side["errors"] else [])]) or "no tests"


def import_error(module: str = "sglang.test.test_utils") -> str:
    """Return the error of importing a module in a test process; "": the import works.

    If the installation is incomplete, every test fails, stock and patched. This function notices it before the tests.
    """
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip().rsplit("\n", 1)[-1]


# --- Comparison -----------------------------------------------------------------------------------------------------


def find_differing_tests(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    """Find the tests whose outcome differs between the stock and the patched engine.

    :returns: names of the tests. The name "" means that only one of the two engines has a result for the file.
    """

    def outcome(side: dict[str, Any], name: str) -> tuple[Any, ...]:
        test = side["tests"].get(name, {})
        return test.get("outcome"), test.get("subtests")

    names = dict.fromkeys([*stock["tests"], *patched["tests"]])
    different = [name for name in names if outcome(stock, name) != outcome(patched, name)]
    return different + [""] * (bool(stock["errors"]) != bool(patched["errors"]))


def find_broken_tests(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    """Find the tests that pass with the stock engine and do not pass with the patched engine.

    :returns: names of the tests. The name "" means that only the stock engine has a result for the file.
    """
    if patched["errors"] and not stock["errors"]:
        return [""]
    passed = [name for name, test in stock["tests"].items() if test["outcome"] == "passed"]
    return [name for name in passed if patched["tests"].get(name, {}).get("outcome") != "passed"]


def failure_messages(side: dict[str, Any]) -> dict[str, str]:
    """Return the message of each failure, by the test's name. If the file has no result, the name is ""."""
    messages = {name: test["said"] for name, test in side["tests"].items() if test["outcome"] == "failed"}
    return messages | ({"": side["errors"][0]} if side["errors"] else {})


def make_tables(result: output.Result) -> str:
    """Make a table of the files that ran. Below the table, list the tests that fail with the stock engine, the tests
    whose outcomes differ, and the files without a result.
    """
    figures = result["figures"]
    files = {path: [sides[side] for side in SIDES] for path, sides in figures["files"].items()}
    rows = []
    fails: dict[str, list[str]] = {}
    differ = []
    for path, (stock, patched) in files.items():
        for name, words in failure_messages(stock).items():
            fails.setdefault(f"No result of {{}}: {words}" if not name else f"Stock fails {{}}: {words}", []).append(
                format_place(path, name)
            )
        other = find_differing_tests(stock, patched)
        for name in other:
            words = failure_messages(patched).get(name, "")
            differ.append(f"Differs: {format_place(path, name)}" + (f": {words}" if words else ""))
        if stock["tests"] or patched["tests"] or other:
            subtests = sum(test["subtests"] for test in stock["tests"].values())
            acted = ", ".join(f"{name} {times:,}" for name, times in patched["acted"].items() if times)
            outcomes = outcome_counts(stock), outcome_counts(patched)
            cells = (f"`{path}`", outcomes[0], '"' if outcomes[0] == outcomes[1] else outcomes[1], acted or "-")
            rows.append((*cells, f"{subtests:,}" if subtests else "-", str(len(other))))
    ran = {path: len(stock["tests"]) for path, (stock, _) in files.items() if stock["tests"]}
    lost = sum(len(find_broken_tests(stock, patched)) for stock, patched in files.values())
    whose = f" of {figures['checkout']}" if figures["checkout"] else ""
    verdict = f"{sum(ran.values())} tests of {len(ran)} files{whose}; {lost} pass stock and not patched."
    reasons = Counter(reason.split(":")[0] for reason in figures["not_run"].values())
    left = ", ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
    notes = [how.format(", ".join(places)) for how, places in fails.items()] + differ
    header = ("file", "stock", "patched", "acted (times)", "subtests", "differ")
    listed = "".join(f"- {note}\n" for note in (f"Files not run: {left or 'none'}.", *notes))
    return f"{output.table(header, rows, left=4)}\n{verdict}\n\n{listed}"


def format_place(path: str, name: str) -> str:
    """Format the file and the name of a test in Markdown."""
    return f"`{path}`" + (f", `{name}`" if name else "")


def main() -> int:
    parser = output.parser(__doc__, logs=True)
    parser.add_argument(
        "checkout", type=Path, help="folder of a checkout of SGLang, at the tag of the installed engine"
    )
    parser.add_argument("--tag", default="", help="tag of the checkout, if it is no git repository")
    parser.add_argument(
        "--list", action="store_true", help="only list the files that would run, and why others would not"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="PART,...",
        help="run only files whose path has one of these parts",
    )
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs that a test may need (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent processes (%(default)s)")
    parser.add_argument("--limit", type=float, default=900.0, help="time limit of a file, in seconds (%(default)s)")
    options = output.parse(parser)
    files = select(options.checkout, options.only, options.gpus)
    if options.list:
        for file, reason in files.items():
            print(f"{file}: {reason or 'runs'}")
        return 0
    machine.require_gpu("engine_suite", "--list shows the files that would run")
    engine, tag = metadata.version("sglang"), options.tag or describe_checkout(options.checkout)
    if missing := import_error():
        print(f"engine_suite: cannot import the module that all engine tests use: {missing}", file=sys.stderr)
        return 2
    if tag and tag != f"v{engine}":
        print(
            f"engine_suite: warning: the tests belong to {tag}, but the installed engine is {engine}", file=sys.stderr
        )
    figures = run_suite(files, options)
    output.finish(options, output.result("engine_suite", figures), make_tables)
    return int(any(find_broken_tests(*(sides[side] for side in SIDES)) for sides in figures["files"].values()))


def run_suite(files: Mapping[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Run all files, stock and patched. After each file, write the result."""
    figures: dict[str, Any] = {
        "checkout": options.tag or describe_checkout(options.checkout),
        "files": {},
        "not_run": {file: reason for file, reason in files.items() if reason},
    }
    with output.work_folder(options) as work:
        plugins.write(work / "plugin", "benchmark_engine_tests", "common.engine_test_file:register")
        with ThreadPoolExecutor(options.jobs) as pool:
            running = {
                file: [pool.submit(run, file, side, options.checkout, work, options.limit) for side in SIDES]
                for file, reason in files.items()
                if not reason
            }
            for path, sides in running.items():
                figures["files"][path] = dict(zip(SIDES, (future.result() for future in sides), strict=True))
                if options.json:
                    output.write(options.json, output.result("engine_suite", figures))
    return figures
