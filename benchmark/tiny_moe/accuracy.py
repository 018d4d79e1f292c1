"""Accuracy of the shipped model, served by the stock engine: with NVFP4 experts, and in the bfloat16 it was made from.

    python benchmark tiny_moe/accuracy

Runs on any machine: the reference kernels stand in for FlashInfer's, and without a GPU the engine runs on the CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from common import output
from sglang_moe_patches.core import engine, patch
from sglang_moe_patches.lab.regress import regress
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_reference import environment
from sglang_moe_reference.model import write_checkpoint

from tiny_moe.export import MODEL, QUESTIONS, shipped_bf16
from tiny_moe.train import SPEC

SHIPPED = Path(__file__).parent
MIN_ACCURACY = {"NVFP4": 0.85, "bf16": 0.90}
NVFP4_ARGUMENTS = ("--quantization", "modelopt_fp4", "--moe-runner-backend", "flashinfer_trtllm_routed")
SHOTS = 1


def tables(result: output.Result) -> str:
    figures = result["figures"]
    questions = figures["questions"]
    rows = [
        (name, f"{100 * right / questions:.1f} %", f"{right} of {questions}")
        for name, right in figures["right"].items()
    ]
    return output.table((f"{SHOTS}-shot", "accuracy", "right"), rows)


def main() -> None:
    parser = output.parser(__doc__, quick={"questions": 24})
    parser.add_argument("--questions", type=int, default=600)
    options = output.parse(parser)
    variables = {**os.environ, **environment.variables(), patch.SELECT_VARIABLE: "none"}
    evaluation = regress.Evaluation(SHIPPED / QUESTIONS, options.questions, SHOTS, 128, 64)
    right: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_checkpoint(work / "bf16", SPEC, shipped_bf16(SHIPPED), quantized=False)
        for name, model, more in (("NVFP4", SHIPPED / MODEL, NVFP4_ARGUMENTS), ("bf16", work / "bf16", ())):
            print(f"{name}: starting SGLang {engine.version()}, then {options.questions} questions", flush=True)
            arguments = environment.server_arguments(["--model-path", str(model), *more])
            with Server(name, arguments, variables, work / f"{name}.log", timeout=600) as server:
                run = regress.evaluate_url(name, server.url, variables, evaluation)
            right[name] = run.correct
    output.finish(options, output.result("accuracy", {"questions": options.questions, "right": right}), tables)
    low = [name for name, correct in right.items() if correct < MIN_ACCURACY[name] * options.questions]
    if low and not options.quick:
        sys.exit(f"accuracy: below what is wanted: {', '.join(low)}")
