"""What deliberately broken patches do to the shipped model's answers, and whether ``regress`` notices.

    PYTHONPATH=benchmark sglang-moe-patches exec --reference-kernels -- python -m tiny_moe.mutations --markdown table.md

Serves the model stock and patched, then patched with each mutation of ``MUTATIONS``, asks all the same held-out
questions and compares each with stock as ``regress`` does: once by accuracy alone, once requiring identical answers.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_moe_patches import engine, patch
from sglang_moe_patches.patch import Patcher
from sglang_moe_patches.reference import environment
from sglang_moe_patches.regression import regress
from sglang_moe_patches.regression.compare import Comparison, Run, compare
from sglang_moe_patches.regression.server import Server

SHIPPED = Path(__file__).parents[2] / "data" / "tiny_moe"
LAYER, EXPERT = 1, 4
"""What is mutated: the first MoE layer, and one of its sixteen experts."""


# --- Mutations: each breaks the engine through a Patcher, which can take it back -------------------------------------


def _before_weights_are_prepared(patcher: Patcher, break_weights: Callable[[Any], None], every_layer: bool) -> None:
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    def make(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            if every_layer or layer.layer_id == LAYER:
                break_weights(layer)
            original(self, layer)

        return process_weights_after_loading

    patcher.wrap(ModelOptNvFp4FusedMoEMethod, "process_weights_after_loading", make)


def swapped_scales(patcher: Patcher) -> None:
    """One expert has another expert's block scales, as by one wrong index."""

    def exchange(layer: Any) -> None:
        for scales in (layer.w13_weight_scale.data, layer.w2_weight_scale.data):
            scales[EXPERT] = scales[EXPERT + 1]

    _before_weights_are_prepared(patcher, exchange, every_layer=False)


def misplaced_row(patcher: Patcher) -> None:
    """One row of w13 is in the place of its neighbour: one wrong index in the permutation, which all experts share."""

    def exchange(layer: Any) -> None:
        rows = layer.w13_weight.data[:, 8:10]
        rows.copy_(rows.flip(1))

    _before_weights_are_prepared(patcher, exchange, every_layer=True)


def residual_as_buffer(patcher: Patcher) -> None:
    """The layer offers the residual, which is still needed, as output buffer."""
    from sglang_moe_patches.changes.output_buffer import lend
    from sglang_moe_patches.handoff import moe_output_buffer_ctx

    # In the place of our own wrapper: beside somebody else's, the change would leave the engine alone.
    def make(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(
            self: Any, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with moe_output_buffer_ctx(residual):
                return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)

        return forward

    patcher.replace(lend, "_make_layer_forward", make)


def lost_row(patcher: Patcher) -> None:
    """The last row of every MoE input of two or more is not computed: its output is zero.

    What a MoRI limit one below the rows received does. MoRI itself needs AMD GPUs, so this stands where its kernel
    would return.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, hidden_states, *args, **kwargs)
            if len(output) > 1:
                output[-1] = 0
            return output

        return forward

    patcher.wrap(FusedMoE, "forward", make)


def skipped_shared_experts(patcher: Patcher) -> None:
    """One layer's shared experts add nothing."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _forward_shared_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            return output.zero_() if self.layer_id == LAYER and output is not None else output

        return _forward_shared_experts

    patcher.wrap(DeepseekV2MoE, "_forward_shared_experts", make)


MUTATIONS: dict[str, Callable[[Patcher], None]] = {
    "one expert's scales swapped": swapped_scales,
    "one row of w13 misplaced": misplaced_row,
    "residual used as output buffer": residual_as_buffer,
    "a lost MoRI row": lost_row,
    "shared experts skipped in one layer": skipped_shared_experts,
}


# --- In a server: an engine plugin that is on PYTHONPATH --------------------------------------------------------------


def plugin(folder: Path, body: str) -> str:
    """An installed plugin of the engine that runs ``body`` in every process, to put on PYTHONPATH."""
    info = folder / "deliberate_mutation-0.dist-info"
    info.mkdir(parents=True)
    (folder / "deliberate_mutation.py").write_text(
        "def register():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deliberate-mutation\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nmutation = deliberate_mutation:register\n")
    return str(folder)


def mutate_this_process(name: str) -> None:
    """What the plugin runs: the mutation is in place as soon as the model's code is imported."""
    import wrapt

    wrapt.register_post_import_hook(lambda module: MUTATIONS[name](Patcher()), "sglang.srt.models.deepseek_v2")


def mutation_path(folder: Path, name: str) -> str:
    """PYTHONPATH of a server that runs with the mutation ``name``."""
    body = f"from tiny_moe import mutations\nmutations.mutate_this_process({name!r})"
    paths = [plugin(folder, body), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return ":".join(filter(None, paths))


# --- The table --------------------------------------------------------------------------------------------------------


def row(name: str, run: Run, by_accuracy: Comparison, identical: Comparison) -> str:
    verdicts = {0: "no worse", 1: "**worse**", 2: "inconclusive"}
    return (
        f"| {name} | {100 * run.accuracy:.1f} % | {by_accuracy.losses} lost, {by_accuracy.gains} gained "
        f"| {by_accuracy.p_worse:.2g} | {len(identical.differing)} of {identical.questions} "
        f"| {verdicts[by_accuracy.exit_code]} | {verdicts[identical.exit_code]} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--backend", default="flashinfer_trtllm_routed", help="--moe-runner-backend (%(default)s)")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--only", choices=list(MUTATIONS), nargs="*", default=list(MUTATIONS))
    options = parser.parse_args()
    evaluation = regress.Evaluation(SHIPPED / "test.jsonl", options.questions, options.shots, 128, 64)
    arguments = ["--model-path", str(SHIPPED / "model"), "--quantization", "modelopt_fp4"]
    arguments = environment.server_arguments([*arguments, "--moe-runner-backend", options.backend])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_MOE_PATCHES")}
    base = {**kept, **environment.variables(kept)}
    title = (
        f"SGLang {engine.version()}, `{options.backend}`, {options.questions} held-out questions, {options.shots}-shot"
    )
    lines = [
        "| | accuracy | questions | one-sided p | answers that differ | by accuracy | identical answers required |",
        "| --- | --: | --: | --: | --: | --- | --- |",
    ]
    stock: Run | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("stock", "patched", *options.only):
            work = Path(scratch) / name.replace(" ", "-")
            work.mkdir()
            variables = dict(base)
            if name == "stock":
                variables[patch.SELECT_VARIABLE] = "none"
            elif name != "patched":
                variables["PYTHONPATH"] = mutation_path(work / "plugin", name)
            started = time.monotonic()
            with Server(name, arguments, variables, work / "server.log", timeout=600) as server:
                (found,) = regress.evaluate_urls({name: server.url}, base, evaluation)
            if stock is None:
                stock = found
                lines.append(f"| stock | {100 * found.accuracy:.1f} % | | | | | |")
            else:
                found = replace(found, name="patched")
                by_accuracy, identical = (compare(stock, found, require_identical=each) for each in (False, True))
                lines.append(row(name, found, by_accuracy, identical))
            print(f"{lines[-1]}  ({time.monotonic() - started:.0f} s)", flush=True)
    table = "\n".join([title, "", *lines]) + "\n"
    print("\n" + table)
    if options.markdown:
        options.markdown.write_text(table)


if __name__ == "__main__":
    main()
