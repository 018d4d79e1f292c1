"""NVFP4 experts on Hopper or Ampere, where the engine runs them by Marlin from 0.5.13 on: what their weights take.

    python benchmark changes/nvfp4_hopper --json nvfp4.json
    python benchmark changes/nvfp4_hopper --model qwen3-30b --shard 1 --moe-layers 8 --changes all

Whole servers, stock, patched and stock again, on the same GPU: a few layers of the model's widths at one rank's shard
sizes, random weights, the engine's own kernels and quantization flags. Compared are the bytes that are allocated before
a forward with the same KV cache, the engine's own account of its weights, the answers, and what a weight update by
request (``update_weights_from_disk``) comes to. Marlin adds with atomics: the second stock server says how far stock
is from itself. The engine compiles its Marlin kernels in the first server that runs them, which takes minutes. Each
figure is said as soon as it is there.

Predicted before it was measured (Kimi-K2.5 at one rank's sizes of TP=8): 384 experts x (512 x 448 + 7,168 x 16) bytes a
layer, less 768 for the placeholders: 132,119,808 bytes, 264.2 MB for 2 layers, 7.93 GB for 60. Answers as equal as
stock's to itself. The update ends both servers: Marlin's parameters know no weight loader (AttributeError), and the
engine's rolling back fails alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from common import forwards, machine, output, servers, timing, weights
from common.client import Client
from common.shapes import Model

MB = 1e6
NAMES = (*servers.SERVERS, timing.CONTROL)
NVFP4 = "flashinfer_trtllm_routed"
"""A runner of ``weights.RUNNERS`` whose experts are NVFP4; which one runs is left to the engine here."""


def dead_scales(rank: Model, moe_layers: int) -> int:
    """Bytes of the swizzled block scales that Marlin never reads: each row of an expert's weights in 128ths, each
    group of 16 columns in fours (``swizzle_blockscale``), less the placeholders' byte for each expert.

    :param rank: the sizes of one rank's shard.
    """

    def padded(value: int, to: int) -> int:
        return -(-value // to) * to

    w13 = padded(2 * rank.moe_intermediate, 128) * padded(rank.hidden // 16, 4)
    w2 = padded(rank.hidden, 128) * padded(rank.moe_intermediate // 16, 4)
    return moe_layers * rank.experts * (w13 + w2 - 2)


def update(server: Any, folder: Path) -> str:
    """What a weight update comes to, in the engine's words."""
    try:
        response = httpx.post(f"{server.url}/update_weights_from_disk", json={"model_path": str(folder)}, timeout=60)
        answer = response.json()
        return f"{'done' if answer['success'] else 'refused'}: {answer['message'].splitlines()[0][:200]}"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return f"no answer: {type(error).__name__}"


def difference(first: dict[str, Any], second: dict[str, Any]) -> float | None:
    """The largest difference of a log-probability; ``None``: another token came out."""
    if first["tokens"] != second["tokens"]:
        return None
    return max(abs(a - b) for a, b in zip(first["logprobs"], second["logprobs"], strict=True))


def measure(options: Any, work: Path) -> dict[str, Any]:
    rank = weights.SERVABLE[options.model].shard(options.shard)
    served = weights.Served(rank, options.dense_layers, options.moe_layers, NVFP4)
    asked = ["--moe-runner-backend", "auto", "--disable-shared-experts-fusion", *options.server_arguments]
    asked += ["--max-total-tokens", str(2 * options.tokens + 4096), "--mem-fraction-static", "0.9"]
    setup = servers.Setup(
        served,
        work,
        tokens=options.tokens,
        arguments=(*servers.EAGER, *asked),
        observe=False,
        timed=True,
        changes=options.changes,
    )
    setup.prepare()
    other = weights.write_checkpoint(work / "other", served, 1, "cuda")  # an update reads files
    prompts = [servers.prompt(tokens, seed) for seed, tokens in enumerate((24, 600, options.tokens))]
    figures: dict[str, Any] = {}
    answers: dict[str, list[dict[str, Any]]] = {}

    def ask(server: Any) -> list[dict[str, Any]]:
        return [servers.generate(server, ids, options.new_tokens) for ids in prompts]

    for name in NAMES:
        with servers.running({name: setup}, at_once=False) as running:
            server = running[name]
            answers[name] = ask(server)
            lines = forwards.read(setup.forwards_file(name))
            one: dict[str, Any] = {
                "start_s": round(server.startup_s, 1),
                "engine": Client(server.url).info()["internal_states"][0]["memory_usage"],
                "before": lines[-1].before,
                "log": [line for line in server.log_text().splitlines() if "moe-patches on" in line],
                "answers": answers[name],
                "again": list(map(difference, answers[name], ask(server))),
                "update": update(server, other),
            }
            try:
                answers[f"{name}, updated"] = ask(server)
            except (httpx.HTTPError, RuntimeError):  # ended by the update
                answers[f"{name}, updated"] = []
        for kind in (name, f"{name}, updated"):
            pairs = zip(answers[kind.replace(name, "stock", 1)], answers[kind], strict=False)
            one["differs" if kind == name else "differs_updated"] = [difference(a, b) for a, b in pairs]
        figures[name] = one
        print(name, json.dumps({k: v for k, v in one.items() if k != "answers"}), flush=True)
    return {
        "servers": figures,
        "predicted": dead_scales(rank, options.moe_layers),
        "measured": figures["stock"]["before"] - figures["patched"]["before"],
    }


def tables(result: output.Result) -> str:
    """A row for each server, and what was predicted."""

    def worst(differences: list[float | None]) -> str:
        if not differences:
            return "no answers"
        return "another token" if None in differences else f"{max(d for d in differences if d is not None):.2g}"

    figures = result["figures"]
    rows = [
        (
            *(name, f"{one['before'] / MB:,.1f}", worst(one["again"]), worst(one["differs"])),
            *(one["update"], worst(one["differs_updated"])),
        )
        for name, one in figures["servers"].items()
    ]
    header = ("server", "allocated, MB", "asked again, differs by", "from stock by")
    table = output.table((*header, "weight update", "then from stock by"), rows)
    return f"{table}\n\nGiven up: {figures['measured'] / MB:,.1f} MB (predicted: {figures['predicted'] / MB:,.1f} MB)."


def main() -> None:
    parser = output.parser(__doc__, logs=True)
    servers.add_options(parser, shard=8, tokens=4096, moe_layers=2)
    parser.add_argument(
        "--changes", default="fp4-weights", help="SGLANG_MOE_PATCHES of the patched server (%(default)s)"
    )
    options = output.parse(parser)
    machine.require_gpu("nvfp4_hopper")
    with output.work_folder(options) as work:
        figures = measure(options, work)
    output.finish(options, output.result("nvfp4_hopper", figures), tables)
