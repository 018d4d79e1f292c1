"""Quantize the trained model into a checkpoint that the engine serves, and back to the one it was quantized from.

    python benchmark tiny_moe/export quantize trained.safetensors benchmark/tiny_moe
    python benchmark tiny_moe/export bf16 benchmark/tiny_moe bf16-model

``quantize`` writes ``model/`` (NVFP4 experts in ModelOpt's format, input scales calibrated on training problems),
``experts.safetensors`` (the experts before quantization) and ``test.jsonl`` (held-out questions). ``bf16`` puts the
experts back: the same model without NVFP4.

The experts of the bfloat16 model are rounded to E4M3 times a power of two per matrix first. Such numbers are bfloat16
numbers, and take half the space in the repository. The model that is quantized, and compared with, is the rounded one.
"""

from __future__ import annotations

import argparse
import math
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang_moe_reference.model import ModelSpec, quantize_experts, write_checkpoint

from tiny_moe.network import from_checkpoint
from tiny_moe.problems import problems
from tiny_moe.train import SPEC, encode

MODEL, EXPERTS, QUESTIONS = "model", "experts.safetensors", "test.jsonl"
CALIBRATION_PROBLEMS = 256
CALIBRATION_SEED = 7
E4M3_MAX = 448.0


def pack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The routed experts' matrices as E4M3 and the power of two to multiply with: ``NAME`` and ``NAME_scale``."""
    packed = {}
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            scale = 2.0 ** math.ceil(math.log2(float(weight.abs().max()) / E4M3_MAX))
            packed[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            packed[f"{name}_scale"] = torch.tensor(scale)
    return packed


def unpack_experts(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse: bfloat16 matrices, exactly the packed values."""
    return {
        name: (weight.float() * packed[f"{name}_scale"]).bfloat16()
        for name, weight in packed.items()
        if not name.endswith("_scale")
    }


@torch.no_grad()
def quantize(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint with NVFP4 experts, each expert's input scales from the tokens that are routed to it."""
    model = from_checkpoint(spec, weights)
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.moe_layers:
        layer.experts.register_forward_hook(lambda module, given, result: inputs.append(given))
    tokens, _, lengths = encode(CALIBRATION_PROBLEMS, False, CALIBRATION_SEED)
    length = int(lengths.sum()) // 32
    model(torch.from_numpy(tokens[: 32 * length]).long().view(32, length))

    def seen(layer: int, expert: int) -> torch.Tensor:
        x, routing = inputs[layer - spec.dense_layers]
        routed = x[routing[:, expert] > 0]
        return routed if len(routed) else x

    return quantize_experts(spec, weights, seen)


def shipped_bf16(folder: Path) -> dict[str, torch.Tensor]:
    """The bfloat16 weights that ``folder``'s checkpoint was quantized from."""
    experts = unpack_experts(load_file(str(folder / EXPERTS)))
    weights = load_file(str(folder / MODEL / "model.safetensors"))
    return {name: tensor for name, tensor in weights.items() if ".mlp.experts." not in name} | experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("quantize", help="make the shipped folder from trained weights")
    one.add_argument("trained", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("--questions", type=int, default=600, help="held-out questions to write (%(default)s)")
    other = commands.add_parser("bf16", help="make the checkpoint that the shipped one was quantized from")
    other.add_argument("folder", type=Path)
    other.add_argument("output", type=Path)
    options = parser.parse_args()
    if options.command == "bf16":
        write_checkpoint(options.output, SPEC, shipped_bf16(options.folder), quantized=False)
        return
    weights = load_file(str(options.trained))
    packed = pack_experts(weights)
    weights |= unpack_experts(packed)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(options.folder / MODEL, SPEC, quantize(SPEC, weights))
    save_file(packed, str(options.folder / EXPERTS), metadata={"format": "pt"})
    lines = [problem.to_json() + "\n" for problem in islice(problems(0, test=True), options.questions)]
    (options.folder / QUESTIONS).write_text("".join(lines))
