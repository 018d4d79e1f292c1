"""SGLang's own tests with this package installed, stock and patched side by side.

    make engine-suite SGLANG=../sglang                        # a checkout at the tag of the installed engine
    python benchmark whole/engine_suite ../sglang --jobs 16 --json suite.json --logs logs
    python benchmark whole/engine_suite ../sglang --list         # which would run, and why the others would not
    python benchmark whole/engine_suite ../sglang --only fused_moe,block_int8

Of the folders of `test/registered` that say something of MoE layers, every file runs that needs one GPU and no
download, twice, each time in a process of its own: with the engine as it is, and with every change acting wherever it
can (`benchmark/common/engine_test_file.py`). The exit code is 1 if a test passes stock and does not pass patched.
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
#: Folders, or files in others, by what their paths contain.
FOLDERS = ("moe/", "quant/", "ep/", "lora/", "kernels/", "layers/", "ops/", "unit/layers/", "unit/lora/", "rl/")
#: A file outside of `moe/` and `quant/` says something of MoE layers if its code does.
ABOUT = re.compile(r"moe|experts", re.IGNORECASE)
#: What fetches a model or starts one by its name; and names of public models.
NEEDS_MODEL = {
    *("from_pretrained", "popen_launch_server", "popen_launch_pd_server", "Engine", "SRTRunner", "HFRunner"),
    *("snapshot_download", "hf_hub_download", "load_dataset", "try_cached_model", "run_bench_serving"),
}
MODEL_NAME = re.compile(r"^DEFAULT_\w*MODEL\w*$")
GPUS = re.compile(r"\b(\d+)-gpu")
OTHERS = {"register_amd_ci": "AMD", "register_npu_ci": "NPU", "register_cpu_ci": "CPU"}


# --- selection --------------------------------------------------------------------------------------------------------


def skip_reason(source: str, gpus: int = 1) -> str:
    """Why a file of tests of that code is not run on so many GPUs; "": it is."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    if needed := sorted(name for name in names if name in NEEDS_MODEL or MODEL_NAME.match(name)):
        return f"needs a model: {next((name for name in needed if MODEL_NAME.match(name)), needed[0])}"
    calls = [(node.func.id, node) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    cuda = [ast.unparse(call) for name, call in calls if name == "register_cuda_ci"]
    others = [OTHERS[name] for name, _ in calls if name in OTHERS]
    if not cuda and "CPU" not in others:
        return f"for {' and '.join(dict.fromkeys(others))} alone" if others else "not registered"
    wanted = [int(match) for code in cuda for match in GPUS.findall(code)]
    return f"needs {min(wanted)} GPUs" if wanted and min(wanted) > gpus else ""


def select(checkout: Path, only: Sequence[str] = (), gpus: int = 1) -> dict[str, str]:
    """The files that say something of MoE layers or of quantization, below `test/registered`, and their skip reasons.

    :param only: parts of paths, of which one must be there.
    """
    root = checkout / REGISTERED
    reasons = {}
    for path in sorted(root.rglob("test_*.py")):
        name = str(path.relative_to(root))
        if not name.startswith(FOLDERS) or (only and not any(part in name for part in only)):
            continue
        source = path.read_text(encoding="utf-8")
        if name.startswith(("moe/", "quant/")) or ABOUT.search(source):
            reasons[name] = skip_reason(source, gpus)
    if not reasons:
        raise SystemExit(f"engine_suite: no tests below {root}; give a checkout of SGLang")
    return reasons


def described(checkout: Path) -> str:
    """What git says that the checkout is: its tag, or its commit; "" where it is none."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--tags", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else ""


# --- running ----------------------------------------------------------------------------------------------------------


def variables(*folders: Path) -> dict[str, str]:
    own = processes.variables(*folders, Path(__file__).parents[1], *stand_ins.folders())
    # Downloads that the selection did not foresee fail at once, and alike on both sides.
    return own | {"HF_HUB_OFFLINE": "1"}


def run(file: str, side: str, checkout: Path, work: Path, limit_s: float) -> dict[str, Any]:
    """Run one file's tests on one side, and read what became of them."""
    name = f"{file.removesuffix('.py').replace('/', '-')}-{side}"
    result = work / f"{name}.json"
    own = variables(*[work / "plugin"] * (side == "patched"))
    own |= {SELECT_VARIABLE: "all" if side == "patched" else "none"}
    path = (checkout / REGISTERED / file).resolve()
    command = [sys.executable, "-m", "common.engine_test_file", side, str(path), str(result)]
    begun = time.monotonic()
    with (work / f"{name}.log").open("wb") as log:
        process = Supervised(command, own, log, cwd=str(path.parent))
        try:
            while process.exit_code() is None and time.monotonic() < begun + limit_s:
                time.sleep(0.2)
            code = process.exit_code()
        finally:
            process.end()
    seconds = round(time.monotonic() - begun, 1)
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
    counts = Counter(test["outcome"] for test in side["tests"].values())
    parts = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome]]
    return ", ".join([*parts, *(["no result"] if side["errors"] else [])]) or "no tests"


def import_error(module: str = "sglang.test.test_utils") -> str:
    """Why a test cannot import a module, or ""; an installation without all that it needs would fail each alike."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip().rsplit("\n", 1)[-1]


# --- comparing --------------------------------------------------------------------------------------------------------


def differing(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    """Tests whose outcome is not the same on both sides; "": the file as a whole."""

    def outcome(side: dict[str, Any], name: str) -> tuple[Any, ...]:
        test = side["tests"].get(name, {})
        return test.get("outcome"), test.get("subtests")

    names = dict.fromkeys([*stock["tests"], *patched["tests"]])
    names_apart = [name for name in names if outcome(stock, name) != outcome(patched, name)]
    return names_apart + [""] * (bool(stock["errors"]) != bool(patched["errors"]))


def broken(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    """Of those the ones that stock passes and patched does not."""
    if patched["errors"] and not stock["errors"]:
        return [""]
    passed = [name for name, test in stock["tests"].items() if test["outcome"] == "passed"]
    return [name for name in passed if patched["tests"].get(name, {}).get("outcome") != "passed"]


def failing(side: dict[str, Any]) -> dict[str, str]:
    """What fails, and with which words; "": the file as a whole."""
    messages = {name: test["said"] for name, test in side["tests"].items() if test["outcome"] == "failed"}
    return messages | ({"": side["errors"][0]} if side["errors"] else {})


def tables(result: output.Result) -> str:
    """Which ran, what stock itself fails, what differs; which gave no result, and how many were not run."""
    figures = result["figures"]
    files = {path: [sides[side] for side in SIDES] for path, sides in figures["files"].items()}
    rows = []
    fails: dict[str, list[str]] = {}
    differ = []
    for path, (stock, patched) in files.items():
        for name, words in failing(stock).items():
            fails.setdefault(f"No result of {{}}: {words}" if not name else f"Stock fails {{}}: {words}", []).append(
                place(path, name)
            )
        other = differing(stock, patched)
        for name in other:
            words = failing(patched).get(name, "")
            differ.append(f"Differs: {place(path, name)}" + (f": {words}" if words else ""))
        if stock["tests"] or patched["tests"] or other:
            subtests = sum(test["subtests"] for test in stock["tests"].values())
            acted = ", ".join(f"{name} {times:,}" for name, times in patched["acted"].items() if times)
            outcomes = outcome_counts(stock), outcome_counts(patched)
            cells = (f"`{path}`", outcomes[0], '"' if outcomes[0] == outcomes[1] else outcomes[1], acted or "-")
            rows.append((*cells, f"{subtests:,}" if subtests else "-", str(len(other))))
    ran = {path: len(stock["tests"]) for path, (stock, _) in files.items() if stock["tests"]}
    lost = sum(len(broken(stock, patched)) for stock, patched in files.values())
    whose = f" of {figures['checkout']}" if figures["checkout"] else ""
    verdict = f"{sum(ran.values())} tests of {len(ran)} files{whose}; {lost} pass stock and not patched."
    reasons = Counter(reason.split(":")[0] for reason in figures["not_run"].values())
    left = ", ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
    notes = [how.format(", ".join(places)) for how, places in fails.items()] + differ
    header = ("file", "stock", "patched", "acted (times)", "subtests", "differ")
    listed = "".join(f"- {note}\n" for note in (f"Files not run: {left or 'none'}.", *notes))
    return f"{output.table(header, rows, left=4)}\n{verdict}\n\n{listed}"


def place(path: str, name: str) -> str:
    return f"`{path}`" + (f", `{name}`" if name else "")


def main() -> int:
    parser = output.parser(__doc__, logs=True)
    parser.add_argument("checkout", type=Path, help="of SGLang, at the tag of the installed engine")
    parser.add_argument("--tag", default="", help="of the checkout, where git does not know")
    parser.add_argument("--list", action="store_true", help="say what would run, and why the rest would not")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="PART,...", help="of paths")
    parser.add_argument("--gpus", type=int, default=1, help="that a test may need (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (%(default)s)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a file (%(default)s)")
    options = output.parse(parser)
    files = select(options.checkout, options.only, options.gpus)
    if options.list:
        for file, reason in files.items():
            print(f"{file}: {reason or 'runs'}")
        return 0
    machine.require_gpu("engine_suite", "--list says what would run")
    engine, tag = metadata.version("sglang"), options.tag or described(options.checkout)
    if missing := import_error():
        print(f"engine_suite: what the engine's tests share cannot be imported here: {missing}", file=sys.stderr)
        return 2
    if tag and tag != f"v{engine}":
        print(f"engine_suite: the tests are of {tag}, the engine is {engine}", file=sys.stderr)
    figures = run_suite(files, options)
    output.finish(options, output.result("engine_suite", figures), tables)
    return int(any(broken(*(sides[side] for side in SIDES)) for sides in figures["files"].values()))


def run_suite(files: Mapping[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """All files that are run, on both sides; what is known is written after each."""
    figures: dict[str, Any] = {
        "checkout": options.tag or described(options.checkout),
        "files": {},
        "not_run": {file: reason for file, reason in files.items() if reason},
    }
    with output.work_folder(options) as work:
        plugins.write(work / "plugin", "benchmark_everywhere", "common.engine_test_file:register")
        with ThreadPoolExecutor(options.jobs) as pool:
            at_work = {
                file: [pool.submit(run, file, side, options.checkout, work, options.limit) for side in SIDES]
                for file, reason in files.items()
                if not reason
            }
            for path, sides in at_work.items():
                figures["files"][path] = dict(zip(SIDES, (future.result() for future in sides), strict=True))
                if options.json:
                    output.write(options.json, output.result("engine_suite", figures))
    return figures
