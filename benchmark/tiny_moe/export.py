"""Quantize the trained model to the NVFP4 checkpoint of this repository, or restore its bfloat16 weights.

    python benchmark tiny_moe/export quantize trained.safetensors benchmark/tiny_moe
    python benchmark tiny_moe/export bf16 benchmark/tiny_moe bf16-model

``quantize`` writes three things: ``model/`` has NVFP4 experts in ModelOpt's format, with input scales that were
calibrated on training problems. ``experts.safetensors`` has the experts before quantization. ``test.jsonl`` has
held-out questions. ``bf16`` writes the same model with the experts before quantization.

Before quantization, the bfloat16 experts are rounded to E4M3 times a power of two per matrix. Such numbers are also
bfloat16 numbers, and need half the space in the repository. The rounded model is then quantized, and its answers are
compared with the answers of the quantized model.
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
"""Number of training problems from which input scales are computed."""
CALIBRATION_SEED = 7
E4M3_MAX = 448.0


def pack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round the routed experts' matrices to E4M3 times a power of two.

    :returns: ``NAME`` with the E4M3 matrix and ``NAME_scale`` with the power of two, for each matrix.
    """
    packed = {}
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            scale = 2.0 ** math.ceil(math.log2(float(weight.abs().max()) / E4M3_MAX))
            packed[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            packed[f"{name}_scale"] = torch.tensor(scale)
    return packed


def unpack_experts(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert packed experts to bfloat16 matrices, without rounding."""
    return {
        name: (weight.float() * packed[f"{name}_scale"]).bfloat16()
        for name, weight in packed.items()
        if not name.endswith("_scale")
    }


@torch.no_grad()
def quantize(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantize the experts to NVFP4. Each expert's input scales come from the tokens that are routed to it."""
    model = from_checkpoint(spec, weights)
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.moe_layers:
        layer.experts.register_forward_hook(lambda module, args, result: inputs.append(args))
    tokens, _, lengths = encode(CALIBRATION_PROBLEMS, False, CALIBRATION_SEED)
    length = int(lengths.sum()) // 32
    model(torch.from_numpy(tokens[: 32 * length]).long().view(32, length))

    def expert_inputs(layer: int, expert: int) -> torch.Tensor:
        x, routing = inputs[layer - spec.dense_layers]
        routed = x[routing[:, expert] > 0]
        return routed if len(routed) else x

    return quantize_experts(spec, weights, expert_inputs)


def load_shipped_bf16(folder: Path) -> dict[str, torch.Tensor]:
    """Load the bfloat16 weights from which the checkpoint in a folder was quantized."""
    experts = unpack_experts(load_file(str(folder / EXPERTS)))
    weights = load_file(str(folder / MODEL / "model.safetensors"))
    return {name: tensor for name, tensor in weights.items() if ".mlp.experts." not in name} | experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    quantizing = commands.add_parser("quantize", help="write the repository's checkpoint from trained weights")
    quantizing.add_argument("trained", type=Path, help="file of tiny_moe/train with the trained weights")
    quantizing.add_argument("folder", type=Path, help="folder for the checkpoint, the experts and the questions")
    quantizing.add_argument("--questions", type=int, default=600, help="number of held-out questions (%(default)s)")
    restoring = commands.add_parser("bf16", help="write the bfloat16 checkpoint that was quantized")
    restoring.add_argument("folder", type=Path, help="folder that `quantize` wrote")
    restoring.add_argument("output", type=Path, help="new folder for the bfloat16 checkpoint")
    options = parser.parse_args()
    if options.command == "bf16":
        write_checkpoint(options.output, SPEC, load_shipped_bf16(options.folder), quantized=False)
        return
    weights = load_file(str(options.trained))
    packed = pack_experts(weights)
    weights |= unpack_experts(packed)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(options.folder / MODEL, SPEC, quantize(SPEC, weights))
    save_file(packed, str(options.folder / EXPERTS), metadata={"format": "pt"})
    lines = [problem.to_json() + "\n" for problem in islice(problems(0, test=True), options.questions)]
    (options.folder / QUESTIONS).write_text("".join(lines))
