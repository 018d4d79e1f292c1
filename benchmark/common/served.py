"""Models with random weights at the sizes that people serve, and the servers of the benchmarks that load them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import kinds, weights
from common.shapes import MODELS, Model
from common.weights import Served

VOCABULARY = {"kimi-k2.5": 163_840, "qwen3-235b": 151_936, "qwen3-30b": 151_936} | {
    name: config["vocab_size"] for name, config in kinds.CONFIGS.items()
}
"""Tokens of the vocabulary of each model that can be served."""


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


def server_arguments(options: argparse.Namespace) -> list[str]:
    given = ["--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none", "--random-seed", "1"]
    given += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton"]
    given += ["--tp", str(options.tp), "--chunked-prefill-size", str(options.chunk)]
    if options.requests:
        given += ["--max-running-requests", str(options.requests)]
    return [*given, *options.arguments]


def at_once(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))


def run_label(result: dict[str, Any]) -> str:
    """A run in a table: its model, sizes, GPUs, attention where it is not Triton's, and the engine's release."""
    figures = result["figures"]
    words = figures.get("arguments", [])
    given = dict(zip(words, [*words[1:], ""], strict=False))  # of an argument, what follows its last place
    ranks = f", {figures['tp']} GPUs" if figures["tp"] > 1 else ""
    sizes = figures["shard"] * figures["tp"]
    share = f", TP={sizes}'s sizes" if sizes > 1 else ""
    if {"--enable-dp-attention", "--attn-dp-size"} & given.keys():
        ranks += " with data-parallel attention, KV tokens of each"
    elif replicas := given.get("--dp"):
        ranks += f", {replicas} replicas, KV tokens of each"
    if stages := given.get("--pp-size"):
        ranks += f", {stages} pipeline stages"
    if (attention := given.get("--attention-backend", "triton")) != "triton":
        ranks += f", attention by {attention}"
    return f"{figures['model']}{share}, {figures['layers']} layers{ranks}, {result['conditions']['engine']}"
