"""Accuracy of the shipped model, served by the stock engine: with NVFP4 experts, and in the bfloat16 it was made from.

    python benchmark tiny_moe/accuracy

Runs on any machine: the reference kernels stand in for FlashInfer's, and without a GPU the engine runs on the CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from common import output
from sglang_moe_patches.core import engine, patch
from sglang_moe_patches.lab.reference import environment
from sglang_moe_patches.lab.reference.model import write_checkpoint
from sglang_moe_patches.lab.regress import gsm8k
from sglang_moe_patches.lab.servers.server import Server

from tiny_moe.export import MODEL, QUESTIONS, shipped_bf16
from tiny_moe.train import SPEC

SHIPPED = Path(__file__).parent


def tables(result: output.Result) -> str:
    found = result["figures"]
    rows = [
        (name, f"{100 * right / found['questions']:.1f} %", f"{right} of {found['questions']}")
        for name, right in found["right"].items()
    ]
    return output.table((f"{found['shots']}-shot", "accuracy", "right"), rows)


def main() -> None:
    parser = output.parser(__doc__, quick={"questions": 24, "at_least": (0.0, 0.0)})
    parser.add_argument("--folder", type=Path, default=SHIPPED, help="what export.py wrote (%(default)s)")
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--at-least", type=float, nargs=2, default=(0.85, 0.90), metavar=("NVFP4", "BF16"))
    options = output.parse(parser)
    variables = {**os.environ, **environment.variables(), patch.SELECT_VARIABLE: "none"}
    found_right: dict[str, int] = {}
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_checkpoint(work / "bf16", SPEC, shipped_bf16(options.folder), quantized=False)
        nvfp4 = ["--quantization", "modelopt_fp4", "--moe-runner-backend", "flashinfer_trtllm_routed"]
        for name, model, arguments, wanted in (
            ("NVFP4", options.folder / MODEL, nvfp4, options.at_least[0]),
            ("bf16", work / "bf16", [], options.at_least[1]),
        ):
            given = environment.server_arguments(["--model-path", str(model), *arguments])
            started = time.monotonic()
            print(f"{name}: starting SGLang {engine.version()}, then {options.questions} questions", flush=True)
            with Server(name, given, variables, work / f"{name}.log", timeout=600) as server:
                asked = gsm8k.Evaluation(
                    options.folder / QUESTIONS, options.questions, options.shots, 128, options.parallel
                )
                found = gsm8k.evaluate(server.url, variables, asked, work)
            right = sum(answer["predicted"] == answer["label"] for answer in found["answers"])
            found_right[name] = right
            share = right / options.questions
            failed |= share < wanted
            print(
                f"{name}: {100 * share:.1f} % ({right} of {options.questions}, {options.shots}-shot), wanted "
                f"{100 * wanted:.0f} %; {time.monotonic() - started:.0f} s, {server.startup_s:.0f} s of them start-up",
                flush=True,
            )
    figures = {"questions": options.questions, "shots": options.shots, "right": found_right}
    result = output.result("accuracy", figures)
    output.finish(options, result, tables(result))
    if failed:
        sys.exit("accuracy: below what is wanted")


if __name__ == "__main__":
    main()
