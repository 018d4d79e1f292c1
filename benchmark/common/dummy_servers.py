"""Options, models and arguments of benchmark servers with ``--load-format dummy``: real sizes, random weights."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import dummy_models, weights
from common.shapes import MODELS, TINY, Model
from common.weights import ServedModel

VOCABULARY = {"kimi-k2.5": 163_840, "qwen3-235b": 151_936, "qwen3-30b": 151_936} | {
    name: config["vocab_size"] for name, config in dummy_models.CONFIGS.items()
}
"""Vocabulary size of each model that these servers can load."""
NVFP4 = {"qwen3-235b-nvfp4": "qwen3-235b"}
"""Models with NVFP4 experts, which Marlin runs on Hopper from 0.5.13 on. Value: the bfloat16 model with the same sizes.
"""
VOCABULARY |= {name: VOCABULARY[source] for name, source in NVFP4.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the model, its sizes and the server's limits.

    ``--quick`` serves a tiny model instead.
    """
    parser.add_argument("--model", choices=VOCABULARY, default="kimi-k2.5", help="model to serve (%(default)s)")
    sizes = "give the model the sizes of one rank of this many tensor-parallel ranks (%(default)s)"
    parser.add_argument("--shard", type=int, default=4, help=sizes)
    parser.add_argument("--layers", type=int, default=14, help="number of layers (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="number of GPUs, --tp of the server (%(default)s)")
    chunk = "tokens of a prefill chunk, --chunked-prefill-size of the server (%(default)s)"
    parser.add_argument("--chunk", type=int, default=16_384, help=chunk)
    context = "maximum tokens of a request (%(default)s)"
    parser.add_argument("--context", type=int, default=65_536, help=context)
    requests = "--max-running-requests of the server; 0: the engine's default (%(default)s)"
    parser.add_argument("--requests", type=int, default=256, help=requests)


def describe_options(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of some options, for a result. With ``--quick``, the model and its sizes are those of the tiny
    model.

    :param names: names of the options.
    """
    tiny = {"model": "tiny", "shard": 1, "layers": TINY.layers}
    return {name: getattr(options, name) for name in names} | (tiny if options.quick else {})


def write_model(folder: Path, options: argparse.Namespace) -> Path:
    """Write the model folder that the options choose."""
    if options.quick:
        return weights.write_model(folder, ServedModel(TINY, runner="triton"))
    name, shard, layers, context = options.model, options.shard, options.layers, options.context
    if name in dummy_models.CONFIGS:
        return dummy_models.write(folder, dummy_models.config(name, shard, layers, context))
    source = NVFP4.get(name, name)
    whole: Model = MODELS[source].shard(shard) if shard > 1 else MODELS[source]
    dense = min(whole.dense_layers, 1)
    # A ServedModel derives the quantization of its experts from the runner. NVFP4 checkpoints are the same for Marlin.
    runner = "flashinfer_trtllm_routed" if name in NVFP4 else "triton"
    config = weights.config(ServedModel(whole, dense_layers=dense, moe_layers=layers - dense, runner=runner))
    return weights.write_folder(folder, config | {"vocab_size": VOCABULARY[name], "max_position_embeddings": context})


def server_arguments(options: argparse.Namespace) -> list[str]:
    """Return the server arguments that the options choose, without ``--model-path``."""
    arguments = ["--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none", "--random-seed", "1"]
    if not options.quick:
        arguments += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
    runner = "triton" if options.quick else dummy_models.RUNNERS.get(options.model, "triton")
    if options.model in NVFP4 and not options.quick:
        arguments += ["--quantization", "modelopt_fp4"]
    arguments += ["--moe-runner-backend", runner, "--tp", str(options.tp), "--chunked-prefill-size", str(options.chunk)]
    if options.requests:
        arguments += ["--max-running-requests", str(options.requests)]
    return [*arguments, *options.arguments]


def run_label(result: dict[str, Any]) -> str:
    """Make the label of a run for a table: model, sizes, GPUs, backends other than the benchmark's default, release."""
    figures = result["figures"]
    words = figures.get("arguments", [])
    values = dict(zip(words, [*words[1:], ""], strict=False))  # for each argument, the next one, usually its value
    parts = [figures["model"]]
    if (sizes := figures["shard"] * figures["tp"]) > 1:
        parts.append(f"TP={sizes}'s sizes")
    parts.append(f"{figures['layers']} layers")
    if figures["tp"] > 1:
        parts.append(f"{figures['tp']} GPUs")
    if {"--enable-dp-attention", "--attn-dp-size"} & values.keys():
        parts[-1] += " with data-parallel attention, KV tokens of each"
    elif replicas := values.get("--dp"):
        parts.append(f"{replicas} replicas, KV tokens of each")
    if stages := values.get("--pp-size"):
        parts.append(f"{stages} pipeline stages")
    if (attention := values.get("--attention-backend", "triton")) != "triton":
        parts.append(f"attention by {attention}")
    if (sampling := values.get("--sampling-backend", "pytorch")) != "pytorch":
        parts.append(f"sampling by {sampling}")
    if algorithm := values.get("--speculative-algorithm"):
        parts.append(algorithm)
    return ", ".join([*parts, result["conditions"]["engine"]])
