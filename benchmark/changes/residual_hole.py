"""Does the engine's own output buffer change answers, and does this package put them right?

    sglang-moe-reference exec -- python benchmark changes/residual_hole --json hole.json \\
        [-- SERVER_ARGS...]

For releases from 0.5.13 on. Serves a tiny model, whose first layer is MoE, so that the hole shows, three times: the
stock engine with its buffer switched off, patched, and stock; asks all three the same questions one at a time,
greedily; and compares patched and stock with the first. On a CPU or a GPU; see docs/changes/output-buffer.md.

Exits with 1 if the patched answers are not those without the buffer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common import output, plugins
from sglang_moe_patches.lab.regress import regress
from sglang_moe_patches.lab.regress.compare import Run
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_reference import environment
from sglang_moe_reference.model import ModelSpec, make_model

GSM8K = Path(__file__).parents[1] / "gsm8k" / "test.jsonl"
BACKEND = ["--quantization", "modelopt_fp4", "--moe-runner-backend", "flashinfer_trtllm_routed"]

SWITCH_OFF = """
import contextlib, wrapt

def switch_off(base):
    base.moe_output_buffer_ctx = lambda buf: contextlib.nullcontext()

def register():
    wrapt.register_post_import_hook(switch_off, "sglang.srt.layers.moe.moe_runner.base")
"""


def switching_off(folder: Path) -> str:
    """PYTHONPATH with an installed plugin of the engine that turns its buffer off."""
    plugins.write_module(folder, "buffer_switched_off", SWITCH_OFF)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def tables(result: output.Result) -> str:
    figures = result["figures"]
    rows = [
        (name, f"{one['differing']} of {figures['questions']}", str(one.get("correct", "")))
        for name, one in figures["servers"].items()
    ]
    return output.table(("server", "answers that differ from those without the engine's buffer", "correct"), rows)


def main() -> None:
    parser = output.parser(__doc__, quick={"num_questions": 2, "max_new_tokens": 8}, logs=True)
    parser.add_argument("--num-questions", type=int, default=6)
    parser.add_argument("--num-shots", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("server_args", nargs="*", help="after `--`: further arguments of the server")
    options = output.parse(parser)
    evaluation = regress.Evaluation(GSM8K, options.num_questions, options.num_shots, options.max_new_tokens, parallel=1)
    with output.work_folder(options) as work:
        make_model(work / "model", ModelSpec(dense_layers=0))
        arguments = environment.server_arguments(["--model-path", str(work / "model"), *BACKEND, *options.server_args])
        runs: dict[str, Run] = {}
        for name, variables in {
            "without": {"SGLANG_MOE_PATCHES": "none", "PYTHONPATH": switching_off(work / "off")},
            "patched": {"SGLANG_MOE_PATCHES": "all"},
            "stock": {"SGLANG_MOE_PATCHES": "none"},
        }.items():
            print(f"{name}: starting", flush=True)
            with Server(name, arguments, {**os.environ, **variables}, work / f"{name}.log", timeout=600) as server:
                runs[name] = regress.evaluate_url("stock", server.url, dict(os.environ), evaluation)
    wanted = [answer.tokens for answer in runs["without"].answers]
    servers = {
        name: {
            "correct": run.correct,
            "differing": sum(a.tokens != b for a, b in zip(run.answers, wanted, strict=True)),
            "tokens": [answer.tokens for answer in run.answers],
        }
        for name, run in runs.items()
    }
    output.finish(options, output.result("residual_hole", {"questions": len(wanted), "servers": servers}), tables)
    sys.exit(1 if servers["patched"]["differing"] else 0)
