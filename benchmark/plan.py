"""The `plan` command on real layer shapes: the rule's KV cache, and the one by the record, verified.

    python benchmark/plan.py --model kimi-k2.5 --shard 4 --layers 12 --json kimi.json
    python benchmark/plan.py --model qwen3-30b --json qwen.json --gpus "0;1"  # the stock server's plan beside the other
    python benchmark/plan.py --model kimi-k2.5 --tp 2 --layers 4 --gpus 0,1
    python benchmark/plan.py --model gpt-oss-120b --layers 14 --json windows.json     # pools of more than one kind
    python benchmark/plan.py --model qwen3-vl-30b --json vision.json -- --mm-attention-backend triton_attn

Servers have random weights (`--load-format dummy`), the model's own widths and vocabulary, and its prefill graphs; what
they cannot have without other libraries (a tokenizer, FlashInfer's kernels) is left out. Each group of `--gpus` has one
server at a time.
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

from common import kinds, output, weights
from common.shapes import MODELS, Model
from common.weights import Served
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.planning.result import UNSEEN

GB, MB = 1e9, 1e6
SERVERS = ("stock", "patched")
VOCABULARY = {"kimi-k2.5": 163_840, "qwen3-235b": 151_936, "qwen3-30b": 151_936} | {
    name: config["vocab_size"] for name, config in kinds.CONFIGS.items() if not kinds.sees(name)
}
SEEING = tuple(filter(kinds.sees, kinds.CONFIGS))
"""Models that take images, which no other benchmark serves."""
LIMIT_S = 3600.0
"""Seconds that a plan may take."""


def write_model(folder: Path, name: str, shard: int, layers: int, context: int) -> Path:
    """config.json of so many layers of the model, at the sizes of one of ``shard`` tensor-parallel ranks."""
    if name in kinds.CONFIGS:
        return kinds.write(folder, kinds.config(name, shard, layers, context))
    whole: Model = MODELS[name].shard(shard) if shard > 1 else MODELS[name]
    dense = min(whole.dense_layers, 1)
    served = Served(whole, dense_layers=dense, moe_layers=layers - dense, runner="triton")
    weights.write_model(folder, served)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"vocab_size": VOCABULARY[name], "max_position_embeddings": context}
    path.write_text(json.dumps(config))
    return folder


def layers(name: str) -> int:
    """Of the whole model."""
    if name not in kinds.CONFIGS:
        return MODELS[name].layers
    return int(kinds.text(kinds.CONFIGS[name])["num_hidden_layers"])


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

    def run(self, command: Sequence[str], log: Path, **variables: str) -> int:
        """The exit code of a command that sees one group."""
        group = self._free.get()
        seen = {"CUDA_VISIBLE_DEVICES": group} if group else {}
        own = {**os.environ, **seen, **variables}
        try:
            with log.open("wb") as out:
                return subprocess.run(
                    command, env=own, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S
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
        command = [sys.executable, "-m", "sglang_moe_patches.cli", "plan", "--model", str(model)]
        command += ["--output", str(folder), "--verify-seconds", str(options.verify_seconds)]
        command += ["--prompt-logprobs"] if options.logprobs else []
        changes = {SELECT_VARIABLE: "none" if server == "stock" else "all"}
        code = groups.run([*command, "--", *server_arguments(options)], work / f"{server}.txt", **changes)
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
    for started in filter(None, (server["first"], server["second"])):
        for rank in started["ranks"]:
            rank.pop("pools")
        started["said"] = [line.partition("; recorded in ")[0] for line in started["said"]]
    if server["record"]:
        server["record"]["made_of"] = {}  # it has folders of this machine in it, as the command
    server.pop("command")
    return {**server, "exit_code": plan["exit_code"]}


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
    if {"--enable-dp-attention", "--attn-dp-size"} & set(figures.get("arguments", ())):
        ranks += " with data-parallel attention, KV tokens of each"
    return f"{figures['model']}{share}, {figures['layers']} layers{ranks}"


def tables(results: Sequence[output.Result]) -> str:
    """Both starts of each server, what became of the second, and what its verification did not bring about."""
    header = (
        *("", "chunk", "server", "set aside by the rule", "needed", "KV tokens by the rule", "by the record"),
        *("verdict; what was not verified", "lowest free"),
    )
    rows = []
    for result in results:
        figures = result["figures"]
        for name, server in figures["servers"].items():
            first, second, found = (server[each] for each in ("first", "second", "verified"))
            need = (server["record"] or {}).get("need", 0)
            sized = ""
            if first and second:
                gain = 100 * (second["tokens"] / first["tokens"] - 1)
                sized = f"{second['fraction']:.4f}: {second['tokens']:,} ({gain:+.0f} %)"
            free = min(found["lowest_free"].values(), default=0) / MB if found else None
            rows.append(
                (
                    described(figures),
                    f"{figures['chunk']:,}",
                    name,
                    f"{figures['rule']['reserve_mib'] * 1.048576e-3:.1f} GB",
                    f"{need / GB:.1f} GB" if need else "",
                    f"{first['fraction']:.4f}: {first['tokens']:,}" if first else "",
                    sized,
                    "; ".join([server["verdict"], *(each.removeprefix(UNSEEN) for each in server["reasons"])]),
                    "" if free is None else f"{free:,.0f} MB",
                )
            )
    return output.table(header, rows, left=3)


# --- Plans of a version that searched from outside --------------------------------------------------------------------


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
                of = unseen.setdefault(missing.partition(" (")[0], [])
                of += [] if plan[0] in of else [plan[0]]
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
    where = "; ".join(f"{missing} ({', '.join(plans)})" for missing, plans in unseen.items())
    said = f"\nNot seen in each verification: {where}.\n" if unseen else ""
    return output.table(header, rows, left=2) + said


def needed(server: dict[str, Any]) -> int:
    """Bytes that everything but weights and KV cache took on the worst rank, with the last fraction measured."""
    last = [trial for trial in server["trials"] if trial["ranks"]][-1]
    worst = min(last["ranks"], key=lambda rank: rank["lowest_free"])
    return int(worst["after_cache"] + worst["forwards"])


def main() -> int:
    parser = output.parser(__doc__, logs=True)
    parser.add_argument("--model", choices=(*VOCABULARY, *SEEING), default="kimi-k2.5")
    parser.add_argument("--shard", type=int, default=1, help="the sizes of one rank of so many, served by one GPU")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--context", type=int, default=65_536, help="the model's context length")
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--requests", type=int, default=256, help="--max-running-requests; 0: the engine's own")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--logprobs", action="store_true", help="requests ask for prompt log-probabilities")
    parser.add_argument("--verify-seconds", type=float, default=120)
    parser.add_argument("--only", type=output.choice_of(SERVERS), default=list(SERVERS), help="stock or patched")
    parser.add_argument("--gpus", default="", help="groups, as 0;1 or 0,1;2,3. Default: all that are visible")
    parser.add_argument("--model-only", type=Path, metavar="FOLDER", help="write the model there and serve nothing")
    parser.add_argument("arguments", nargs="*", help="more server arguments, after `--`")
    options = output.parse(parser)
    options.layers = options.layers or layers(options.model)
    if options.model_only:
        print(write_model(options.model_only, options.model, options.shard, options.layers, options.context))
        return 0
    if not has_gpu():
        print("plan.py: needs a GPU, and there is none here; --model-only writes the model", file=sys.stderr)
        return 2
    if options.gpus:
        # What this process asks of the GPUs in the end, it asks of its own: others may be measured meanwhile.
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus.replace(";", ",")
    described_by = ("model", "shard", "layers", "context", "chunk", "requests", "tp", "verify_seconds")
    figures = {name: getattr(options, name) for name in described_by} | {"only": ",".join(options.only)}
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        work = Path(folder)
        model = write_model(work / "model", options.model, options.shard, options.layers, options.context)
        try:
            figures |= plans(options, model, work)
        finally:
            keep(options.logs, work)
    found = output.result("plan", figures)
    output.finish(options, found, tables([found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
