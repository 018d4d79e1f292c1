"""Models with random weights at the sizes that people serve, and the servers of the benchmarks that load them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import kinds, weights
from common.shapes import MODELS, TINY, Model
from common.weights import Served

VOCABULARY = {"kimi-k2.5": 163_840, "qwen3-235b": 151_936, "qwen3-30b": 151_936} | {
    name: config["vocab_size"] for name, config in kinds.CONFIGS.items()
}
"""Tokens of the vocabulary of each model that can be served."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that say what is served; ``--quick`` serves a tiny model, whatever they say of it."""
    parser.add_argument("--model", choices=VOCABULARY, default="kimi-k2.5")
    parser.add_argument("--shard", type=int, default=4, help="the sizes of one rank of so many (%(default)s)")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--requests", type=int, default=256, help="--max-running-requests")


def described(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """What a result says of these options."""
    tiny = {"model": "tiny", "shard": 1, "layers": TINY.layers}
    return {name: getattr(options, name) for name in names} | (tiny if options.quick else {})


def write_model(folder: Path, options: argparse.Namespace) -> Path:
    """config.json of --layers layers of the model, at the sizes of one of --shard tensor-parallel ranks."""
    if options.quick:
        return weights.write_model(folder, Served(TINY, runner="triton"))
    name, shard, layers, context = options.model, options.shard, options.layers, options.context
    if name in kinds.CONFIGS:
        return kinds.write(folder, kinds.config(name, shard, layers, context))
    whole: Model = MODELS[name].shard(shard) if shard > 1 else MODELS[name]
    dense = min(whole.dense_layers, 1)
    config = weights.config(Served(whole, dense_layers=dense, moe_layers=layers - dense, runner="triton"))
    return weights.write_folder(folder, config | {"vocab_size": VOCABULARY[name], "max_position_embeddings": context})


def server_arguments(options: argparse.Namespace) -> list[str]:
    given = ["--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none", "--random-seed", "1"]
    if not options.quick:
        given += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
    runner = "triton" if options.quick else kinds.RUNNERS.get(options.model, "triton")
    given += ["--moe-runner-backend", runner, "--tp", str(options.tp), "--chunked-prefill-size", str(options.chunk)]
    if options.requests:
        given += ["--max-running-requests", str(options.requests)]
    return [*given, *options.arguments]


def run_label(result: dict[str, Any]) -> str:
    """A run in a table: its model, sizes, GPUs, attention where it is not Triton's, speculation, and the release."""
    figures = result["figures"]
    words = figures.get("arguments", [])
    given = dict(zip(words, [*words[1:], ""], strict=False))  # of an argument, what follows its last place
    parts = [figures["model"]]
    if (sizes := figures["shard"] * figures["tp"]) > 1:
        parts.append(f"TP={sizes}'s sizes")
    parts.append(f"{figures['layers']} layers")
    if figures["tp"] > 1:
        parts.append(f"{figures['tp']} GPUs")
    if {"--enable-dp-attention", "--attn-dp-size"} & given.keys():
        parts[-1] += " with data-parallel attention, KV tokens of each"
    elif replicas := given.get("--dp"):
        parts.append(f"{replicas} replicas, KV tokens of each")
    if stages := given.get("--pp-size"):
        parts.append(f"{stages} pipeline stages")
    if (attention := given.get("--attention-backend", "triton")) != "triton":
        parts.append(f"attention by {attention}")
    if (sampling := given.get("--sampling-backend", "pytorch")) != "pytorch":
        parts.append(f"sampling by {sampling}")
    if algorithm := given.get("--speculative-algorithm"):
        parts.append(algorithm)
    return ", ".join([*parts, result["conditions"]["engine"]])
