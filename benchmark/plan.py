"""The `plan` command on real layer shapes: the engine's own fraction against the planned one, each verified.

    python benchmark/plan.py --model kimi-k2.5 --shard 4 --layers 12 --json kimi.json
    python benchmark/plan.py --model qwen3-30b --json qwen.json --gpus "0;1"  # the stock server's plan beside the other
    python benchmark/plan.py --model kimi-k2.5 --tp 2 --layers 4 --gpus 0,1
    python benchmark/plan.py --model kimi-k2.5 --shard 4 --layers 12 --survive 0.95,0.96 --gpus "0;1"

Servers have random weights (`--load-format dummy`), the model's own widths and vocabulary, and its prefill graphs; what
they cannot have without other libraries (a tokenizer, FlashInfer's kernels) is left out. Each group of `--gpus` has one
server at a time. With --survive, no plan is made: each fraction is tried with the verification's load, as many at once
as there are groups; what a plan before its margin is judged by.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import output, weights
from common.shapes import MODELS, Model
from common.weights import Served
from sglang_moe_patches.reference import environment

GB, MB = 1e9, 1e6
SERVERS = ("stock", "patched")
VOCABULARY = {"kimi-k2.5": 163_840, "qwen3-235b": 151_936, "qwen3-30b": 151_936}
LIMIT_S = 3600.0
"""Seconds that a plan, or one fraction's trial, may take."""


def write_model(folder: Path, name: str, shard: int, layers: int, context: int) -> Path:
    """config.json of so many layers of the model, at the sizes of one of ``shard`` tensor-parallel ranks."""
    whole: Model = MODELS[name].shard(shard) if shard > 1 else MODELS[name]
    dense = min(whole.dense_layers, 1)
    served = Served(whole, dense_layers=dense, moe_layers=layers - dense, runner="triton")
    weights.write_model(folder, served)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"vocab_size": VOCABULARY[name], "max_position_embeddings": context}
    path.write_text(json.dumps(config))
    return folder


def server_arguments(options: argparse.Namespace) -> list[str]:
    given = ["--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none", "--random-seed", "1"]
    given += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton"]
    given += ["--tp", str(options.tp), "--chunked-prefill-size", str(options.chunk)]
    if options.requests:
        given += ["--max-running-requests", str(options.requests)]
    return [*given, *options.arguments]


class Groups:
    """GPUs, each group for one command at a time."""

    def __init__(self, gpus: str) -> None:
        self.names = gpus.split(";") if gpus else [""]
        self._free: queue.Queue[str] = queue.Queue()
        for name in self.names:
            self._free.put(name)

    def run(self, command: Sequence[str], log: Path) -> int:
        """The exit code of a command that sees one group."""
        group = self._free.get()
        seen = {"CUDA_VISIBLE_DEVICES": group} if group else {}
        try:
            with log.open("wb") as out:
                return subprocess.run(
                    command, env={**os.environ, **seen}, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S
                ).returncode
        finally:
            self._free.put(group)


def at_once(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))


def plans(options: argparse.Namespace, model: Path, work: Path) -> dict[str, Any]:
    """plan.json's server of each server, by its name, and the rule."""
    groups = Groups(options.gpus)
    made: dict[str, dict[str, Any]] = {}

    def plan(server: str) -> None:
        folder = work / server
        command = [sys.executable, "-m", "sglang_moe_patches.cli", "plan", "--model", str(model), "--only", server]
        command += ["--output", str(folder), "--margin", str(options.margin)]
        command += [] if options.logprobs else ["--no-prompt-logprobs"]
        command += ["--verify", "--verify-seconds", str(options.verify_seconds)] if options.verify_seconds else []
        code = groups.run([*command, "--", *server_arguments(options)], work / f"{server}.txt")
        said = (work / f"{server}.txt").read_text()
        print(f"--- {server}: exit code {code}\n{said}", flush=True)
        if (folder / "plan.json").exists():
            made[server] = json.loads((folder / "plan.json").read_text())

    try:
        at_once(plan, options.only)
    except KeyboardInterrupt:  # a plan that is done took minutes
        print("plan.py: interrupted", file=sys.stderr)
    found = {server: made[server] for server in options.only if server in made}
    if not found:
        raise SystemExit("plan.py: no plan was made")
    first = next(iter(found.values()))
    return {"rule": rule(first["rule"]), "servers": {name: of_server(each) for name, each in found.items()}}


def rule(found: dict[str, Any]) -> dict[str, Any]:
    """The engine's reserve and its terms, without every resolved argument."""
    return {name: found[name] for name in ("gpu_memory_mib", "fraction", "reserve_mib", "terms")}


def of_server(plan: dict[str, Any]) -> dict[str, Any]:
    """What a result keeps of one server's plan: all that was measured, and what it serves by."""
    (server,) = plan["servers"]
    for trial in server["trials"]:
        for rank in trial["ranks"]:
            rank.pop("pools")
    return {**server, "verdict": plan["verdict"], "exit_code": plan["exit_code"]}


def survivals(options: argparse.Namespace, model: Path, work: Path) -> list[dict[str, Any]]:
    """What came of each fraction."""
    groups = Groups(options.gpus)

    def survives(fraction: float) -> dict[str, Any]:
        log = work / f"{fraction:.3f}.txt"
        command = [sys.executable, "-m", "sglang_moe_patches.planning.survive", "--model", str(model)]
        command += ["--fraction", f"{fraction:.3f}", "--only", options.only[-1], "--output", str(work / f"{fraction}")]
        command += ["--seconds", str(options.verify_seconds), "--", *server_arguments(options)]
        code = groups.run(command, log)
        lines = log.read_text().splitlines()
        found = json.loads(lines[-1]) if code in (0, 1) and lines and lines[-1].startswith("{") else {}
        print(f"{fraction:.3f}: {'held' if code == 0 else found.get('reasons', lines[-3:])}", flush=True)
        return {"fraction": fraction, "held": {0: True, 1: False}.get(code), **found}

    return at_once(survives, options.survive)


def keep(folder: Path | None, work: Path) -> None:
    """What the commands wrote and said, before ``work`` goes; not every event that a server recorded."""
    if folder is None:
        return
    for path in work.rglob("*"):
        if path.suffix in (".log", ".txt", ".json", ".html") and "model" not in path.parts:
            kept = folder / path.relative_to(work)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, kept)


# --- tables -----------------------------------------------------------------------------------------------------------


def described(figures: dict[str, Any]) -> str:
    ranks = f", {figures['tp']} GPUs" if figures["tp"] > 1 else ""
    sizes = figures["shard"] * figures["tp"]
    share = f", TP={sizes}'s sizes" if sizes > 1 else ""
    return f"{figures['model']}{share}, {figures['layers']} layers{ranks}"


def tables(results: Sequence[output.Result]) -> str:
    """Default and planned value of each server, and what the survival tests say of it."""
    header = (
        *("", "chunk", "server", "set aside by the rule", "needed", "fraction", "planned", "without its margin"),
        *("KV tokens", "then"),
    )
    rows = []
    for result in results:
        figures = result["figures"]
        for name, server in figures.get("servers", {}).items():
            first, value = server["trials"][0], server["recommendations"][0]
            gain = f"{value['tokens']:,} ({100 * (value['tokens'] / first['cache_tokens'] - 1):+.0f} %)"
            reserve = figures["rule"]["reserve_mib"] * 1.048576e-3
            rows.append(
                (
                    described(figures),
                    f"{figures['chunk']:,}",
                    name,
                    f"{reserve:.1f} GB",
                    f"{needed(server) / GB:.1f} GB",
                    f"{first['fraction']:.3f}",
                    f"{value['fraction']:.3f}",
                    f"{value['before_margin']:.3f}",
                    f"{first['cache_tokens']:,}",
                    gain,
                )
            )
    made = output.table(header, rows, left=3) if rows else ""
    return "\n".join(filter(None, [made, verified(results), survived(results)]))


def in_short(results: Sequence[output.Result]) -> str:
    """Stock and patched in one line: the KV cache by the rule and as planned; what verifications did not see."""
    both: dict[tuple[str, str], dict[str, Any]] = {}
    reserves = {}
    unseen: dict[str, list[str]] = {}
    for result in results:
        figures = result["figures"]
        plan = (described(figures), f"{figures['chunk']:,}")
        reserves[plan] = figures["rule"]["reserve_mib"] * 1.048576e-3
        for name, server in figures.get("servers", {}).items():
            both.setdefault(plan, {})[name] = server
            for missing in server["recommendations"][0]["verified"]["not_seen"]:
                unseen.setdefault(missing, []).append(f"{plan[0]}, {name}")
    rows = []
    for plan, found in both.items():
        first = found["stock"]["trials"][0]
        row = [*plan, f"{reserves[plan]:.1f}", *(f"{needed(found[name]) / GB:.1f}" for name in SERVERS)]
        for fraction, tokens in [
            (first["fraction"], first["cache_tokens"]),
            *(
                (value["fraction"], value["tokens"])
                for value in (found[name]["recommendations"][0] for name in SERVERS)
            ),
        ]:
            more = f" ({100 * (tokens / first['cache_tokens'] - 1):+.0f} %)" if tokens != first["cache_tokens"] else ""
            row.append(f"{fraction:.3f}: {tokens:,}{more}")
        checked = [found[name]["recommendations"][0]["verified"] for name in SERVERS]
        free = " / ".join(f"{min(one['lowest_free'].values()) / MB:,.0f}" if one["held"] else "no" for one in checked)
        rows.append((*row, free))
    header = (
        *("", "chunk", "set aside, GB", "needed: stock", "patched", "KV tokens by the rule", "planned, stock"),
        *("planned, patched", "held, MB free"),
    )
    where = "; ".join(f"{missing} ({'; '.join(plans)})" for missing, plans in unseen.items())
    said = f"\nNot seen in the verification: {where}.\n" if unseen else ""
    return output.table(header, rows, left=2) + said


def needed(server: dict[str, Any]) -> int:
    """Bytes that everything but weights and KV cache took on the worst rank, with the last fraction measured."""
    last = [trial for trial in server["trials"] if trial["ranks"]][-1]
    worst = min(last["ranks"], key=lambda rank: rank["lowest_free"])
    return int(worst["after_cache"] + worst["forwards"])


def verified(results: Sequence[output.Result]) -> str:
    """What each verification brought about, and the least that it left free."""
    header = ("verified", "chunk", "server", "fraction", "held", "lowest free", "answered", "aborted", "retractions")
    rows = []
    for result in results:
        figures = result["figures"]
        for name, server in figures.get("servers", {}).items():
            for value in server["recommendations"]:
                found = value["verified"]
                if found is None:
                    continue
                least = min(found["lowest_free"].values(), default=0)
                held = "yes" if found["held"] else f"no: {'; '.join(found['reasons'])}"
                if found["not_seen"]:
                    held += f" (not seen: {', '.join(found['not_seen'])})"
                counts = (f"{found[each]:,}" for each in ("requests", "aborted", "retractions"))
                cells = (described(figures), f"{figures['chunk']:,}", name, f"{found['fraction']:.3f}", held)
                rows.append((*cells, f"{least / MB:,.0f} MB", *counts))
    return output.table(header, rows, left=3) if rows else ""


def survived(results: Sequence[output.Result]) -> str:
    """Each fraction that was tried, in the order in which they were."""
    rows = []
    for result in results:
        for each in result["figures"].get("survivals", ()):
            if each["held"] is None:
                continue
            least = min(each["lowest_free"].values(), default=None)
            held = "yes" if each["held"] else f"no: {'; '.join(each['reasons'])}"
            rows.append((f"{each['fraction']:.3f}", held, "" if least is None else f"{least / MB:,.0f} MB"))
    return output.table(("fraction", "survived", "lowest free"), rows) if rows else ""


def main() -> int:
    parser = output.parser(__doc__, logs=True)
    parser.add_argument("--model", choices=VOCABULARY, default="kimi-k2.5")
    parser.add_argument("--shard", type=int, default=1, help="the sizes of one rank of so many, served by one GPU")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--context", type=int, default=65_536, help="the model's context length")
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--requests", type=int, default=256, help="--max-running-requests; 0: the engine's own")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--margin", type=int, default=1000, help="MB")
    parser.add_argument("--logprobs", action="store_true", help="plan for prompt log-probabilities, too")
    parser.add_argument("--verify-seconds", type=float, default=120)
    parser.add_argument("--only", type=output.choice_of(SERVERS), default=list(SERVERS), help="stock or patched")
    parser.add_argument("--survive", type=lambda text: [float(each) for each in text.split(",")], metavar="F,F,...")
    parser.add_argument("--gpus", default="", help="groups, as 0;1 or 0,1;2,3. Default: all that are visible")
    parser.add_argument("--model-only", type=Path, metavar="FOLDER", help="write the model there and serve nothing")
    parser.add_argument("arguments", nargs="*", help="more server arguments, after `--`")
    options = output.parse(parser)
    options.layers = options.layers or MODELS[options.model].layers
    if options.model_only:
        print(write_model(options.model_only, options.model, options.shard, options.layers, options.context))
        return 0
    if not environment.has_gpu():
        print("plan.py: needs a GPU, and there is none here; --model-only writes the model", file=sys.stderr)
        return 2
    if options.gpus:
        # What this process asks of the GPUs in the end, it asks of its own: others may be measured meanwhile.
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus.replace(";", ",")
    described_by = ("model", "shard", "layers", "context", "chunk", "requests", "tp", "margin", "verify_seconds")
    figures = {name: getattr(options, name) for name in described_by} | {"only": ",".join(options.only)}
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        work = Path(folder)
        model = write_model(work / "model", options.model, options.shard, options.layers, options.context)
        try:
            if options.survive:
                figures["survivals"] = survivals(options, model, work)
            else:
                figures |= plans(options, model, work)
        finally:
            keep(options.logs, work)
    found = output.result("plan", figures)
    output.finish(options, found, tables([found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
