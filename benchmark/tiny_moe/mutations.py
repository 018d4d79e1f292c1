"""Break patches on purpose, and find out whether ``regress`` notices that the tiny model's answers get worse.

    sglang-moe-reference exec -- python benchmark tiny_moe/mutations

The benchmark serves the model stock, patched, and patched with each of ``MUTATIONS``. All servers answer the same
held-out questions, by default as many as ``regress`` asks. Each server is compared with stock as by ``regress``: once
by accuracy, and once with identical answers required.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import output, plugins, processes
from sglang_moe_patches.core import patch
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.lab.regress import bound, regress
from sglang_moe_patches.lab.regress.compare import INCONCLUSIVE, MAX_DROP, NO_WORSE, WORSE, Run, compare
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_reference import environment

SHIPPED = Path(__file__).parent
RESULT = "mutations/cpu"
SHOTS = 1
LAYER, EXPERT = 1, 4
"""Layer and expert that mutations change: the first MoE layer, and one of its sixteen experts."""


# --- Mutations: each breaks the engine with a Patcher, which can undo it ---------------------------------------------


def _break_loaded_weights(patcher: Patcher, break_weights: Callable[[Any], None], every_layer: bool) -> None:
    """Make a mutation that changes loaded weights before the engine prepares them for its kernels.

    :param every_layer: whether to change every MoE layer, or only ``LAYER``.
    """
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    def make(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            if every_layer or layer.layer_id == LAYER:
                break_weights(layer)
            original(self, layer)

        return process_weights_after_loading

    patcher.wrap(ModelOptNvFp4FusedMoEMethod, "process_weights_after_loading", make)


def swap_scales(patcher: Patcher) -> None:
    """Give one expert the block scales of another expert, as by a wrong index."""

    def exchange(layer: Any) -> None:
        for scales in (layer.w13_weight_scale.data, layer.w2_weight_scale.data):
            scales[EXPERT] = scales[EXPERT + 1]

    _break_loaded_weights(patcher, exchange, every_layer=False)


def swap_rows(patcher: Patcher) -> None:
    """Swap two rows of w13 in every expert, as by a wrong index in the permutation that all experts share."""

    def exchange(layer: Any) -> None:
        rows = layer.w13_weight.data[:, 8:10]
        rows.copy_(rows.flip(1))

    _break_loaded_weights(patcher, exchange, every_layer=True)


def offer_residual_as_buffer(patcher: Patcher) -> None:
    """Make each layer offer its residual as the output buffer of the MoE runner, although the layer still needs it."""
    from sglang_moe_patches.core.dead_input import offer
    from sglang_moe_patches.core.dead_input.channel import moe_output_buffer_ctx

    # Replace the function inside this package. A wrapper around the engine's function would switch the change off.
    def make(original: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(
            self: Any, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with moe_output_buffer_ctx(residual):
                return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)

        return forward

    patcher.replace(offer, "make_layer_forward", make)


def clear_last_row(patcher: Patcher) -> None:
    """Set the last output row of every MoE layer to zero, if its input has two or more rows.

    A limit of MoRI that is one row too low would have this effect. MoRI needs AMD GPUs, so the mutation clears the row
    after the kernel.
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


def skip_shared_experts(patcher: Patcher) -> None:
    """Set the output of one layer's shared experts to zero."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _forward_shared_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            return output.zero_() if self.layer_id == LAYER and output is not None else output

        return _forward_shared_experts

    patcher.wrap(DeepseekV2MoE, "_forward_shared_experts", make)


MUTATIONS: dict[str, Callable[[Patcher], None]] = {
    "one expert's scales swapped": swap_scales,
    "one row of w13 misplaced": swap_rows,
    "residual used as output buffer": offer_residual_as_buffer,
    "a lost MoRI row": clear_last_row,
    "shared experts skipped in one layer": skip_shared_experts,
}


# --- In a server: an engine plugin on PYTHONPATH ----------------------------------------------------------------------


def plugin(folder: Path, body: str) -> str:
    """Write an engine plugin that runs ``body`` in every process of a server. Return the folder for PYTHONPATH."""
    source = "def register():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return str(plugins.write_module(folder, "deliberate_mutation", source))


def mutate_this_process(name: str) -> None:
    """Install a mutation as soon as this process imports the model's code. The plugin of :func:`mutation_path` calls
    this.
    """
    import wrapt

    wrapt.register_post_import_hook(lambda module: MUTATIONS[name](Patcher()), "sglang.srt.models.deepseek_v2")


def mutation_path(folder: Path, name: str) -> str:
    """Return the ``PYTHONPATH`` of a server with a mutation."""
    body = f"from tiny_moe import mutations\nmutations.mutate_this_process({name!r})"
    paths = [plugin(folder, body), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return ":".join(filter(None, paths))


# --- Table ------------------------------------------------------------------------------------------------------------


def row(name: str, run: Run, stock: Run) -> dict[str, Any]:
    """Return the figures of one server's answers, and the exit codes with which ``regress`` would judge them."""
    by_accuracy, identical = (compare(stock, run, require_identical=required) for required in (False, True))
    return {
        "server": name,
        "accuracy": run.accuracy,
        "lost": by_accuracy.losses,
        "gained": by_accuracy.gains,
        "p_worse": by_accuracy.p_worse,
        "largest_drop": by_accuracy.largest_drop,
        "differing": len(identical.differing),
        "by_accuracy": by_accuracy.exit_code,
        "identical": identical.exit_code,
    }


def cells(row: dict[str, Any], questions: int) -> tuple[str, ...]:
    verdicts = {NO_WORSE: f"no worse by more than {MAX_DROP:g}", WORSE: "**worse**", INCONCLUSIVE: "inconclusive"}
    return (
        row["server"],
        f"{100 * row['accuracy']:.1f} %",
        f"{row['lost']}, {row['gained']} ({row['largest_drop']:.1f})",
        f"{row['differing']} of {questions}",
        verdicts[row["by_accuracy"]],
        "**worse**" if row["identical"] == WORSE else "equal",
    )


def make_tables(result: output.Result) -> str:
    figures = result["figures"]
    questions = figures["questions"]
    header = ("", "accuracy", "lost, gained (points lost, at most)", "answers that differ", "by accuracy")
    stock = ("stock", f"{100 * figures['stock']:.1f} %", *[""] * (len(header) - 1))
    rows = [stock, *(cells(row, questions) for row in figures["rows"])]
    return (
        f"SGLang {result['conditions']['engine']}, `{figures['backend']}`, {questions} held-out questions, "
        f"{figures['shots']}-shot\n\n{output.table((*header, 'by answers'), rows)}"
    )


def make_table(load: Callable[[str], output.Result]) -> str:
    """Make the table of docs/commands/accuracy.md, with a line that names the source of the table's data."""
    result = load(RESULT)
    conditions, typed = result["conditions"], " (typed in)" if result.get("transcribed") else ""
    data = f"[{RESULT.split('/')[1]}.json](../../benchmark/results/{RESULT}.json){typed}"
    return f"\n{conditions['date']}, {conditions['machine']}. Data: {data}.\n\n{make_tables(result)}"


def main() -> None:
    parser = output.parser(__doc__, quick={"questions": 24, "only": list(MUTATIONS)[:1]})
    questions = bound.questions_for(MAX_DROP / 100, 0.05)
    parser.add_argument("--questions", type=int, default=questions, help="number of questions (%(default)s)")
    parser.add_argument("--backend", default="flashinfer_trtllm_routed", help="--moe-runner-backend (%(default)s)")
    parser.add_argument(
        "--only", choices=list(MUTATIONS), nargs="*", default=list(MUTATIONS), help="mutations to serve (default: all)"
    )
    options = output.parse(parser)
    evaluation = regress.Evaluation(SHIPPED / "test.jsonl", options.questions, SHOTS, 128, 64)
    arguments = ["--model-path", str(SHIPPED / "model"), "--quantization", "modelopt_fp4"]
    arguments = environment.server_arguments([*arguments, "--moe-runner-backend", options.backend])
    environ = processes.variables()
    base = {**environ, **environment.variables(environ)}
    stock: Run | None = None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("stock", "patched", *options.only):
            work = Path(scratch) / name.replace(" ", "-")
            work.mkdir()
            variables = dict(base)
            if name == "stock":
                variables[patch.SELECT_VARIABLE] = "none"
            elif name != "patched":
                variables["PYTHONPATH"] = mutation_path(work / "plugin", name)
            with Server(name, arguments, variables, work / "server.log", timeout=600) as server:
                run = regress.evaluate_url(name, server.url, base, evaluation)
            if stock is None:
                stock = run
                print(f"stock: {100 * run.accuracy:.1f} %", flush=True)
            else:
                rows.append(row(name, replace(run, name="patched"), stock))
                print(", ".join(cells(rows[-1], options.questions)), flush=True)
    assert stock is not None
    figures = {"questions": options.questions, "shots": SHOTS, "backend": options.backend}
    output.finish(options, output.result("mutations", {**figures, "stock": stock.accuracy, "rows": rows}), make_tables)
