"""Predict and measure the activation memory of one prefill, stock and patched.

    python benchmark whole/peak_memory --tp 4 --workspace-mb 1536 --json m.json
    python benchmark whole/peak_memory --model deepseek-v3 --tp 2 --symm-mem
    python benchmark whole/peak_memory --runner triton --shard 4  # BF16, the sizes of one rank of four, on one GPU
    python benchmark whole/peak_memory --runner triton --shard 4 --fp8
    python benchmark whole/peak_memory --runner marlin --shard 8 --moe-workspace-mb 628
    python benchmark whole/peak_memory --quick  # a tiny model, no GPU needed

Two servers run a few layers with the model's own sizes and random weights. --runner chooses the MoE runner:
flashinfer_trtllm_routed has NVFP4 weights and runs on the reference kernels. triton has BF16 or FP8 weights and marlin
has INT4 weights; both run on the engine's own kernels. The predictions come first, from the sizes alone (the package's
lab/predict/forward.py).

Both servers answer the same prompts twice, one at a time. The stock server *repeats* an answer if both of its answers
to a prompt have the same tokens and log-probabilities. If the patched server gives another answer to such a prompt, the
script prints no figures, and the exit code is 1. If the stock server repeats no answer, as with Marlin on Hopper, the
result says how far answers are apart. The first forward pass of --tokens tokens is not measured, because libraries
allocate workspaces in it. The figures are those of one rank: bytes on top of the memory that was allocated before the
forward pass. --workspace-mb stands for the memory of the vendor's NVFP4 kernel. --moe-workspace-mb is
SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB of the patched server.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import machine, output, servers, timing, weights
from common.shapes import MODELS, Layout, Rank, every_change, fuse_like_engine
from sglang_moe_patches.changes.moe_workspace.column_slices import (
    MOE_WORKSPACE_MB,
    LayerShape,
    MarlinGemm,
    TritonGemm,
    choose_packed_slice_width,
    choose_slice_width,
)
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.predict import forward as prediction

MB = 1e6
PROMPTS = 4
REFERENCE_SCRATCH = 64 * 2**20
"""Bytes of scratch memory that the reference kernel for NVFP4 allocates on a GPU."""
UNTUNED = (
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 8},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 32},
)
"""Tile sizes that the engine uses without a tuned file (``get_default_config``): for BF16, and for FP8 in blocks."""


def predict(
    served: weights.ServedModel,
    server: str,
    tokens: int,
    *,
    tp: int = 1,
    workspace_mb: int = 0,
    moe_workspace_mb: int | None = None,
    fusion: bool = True,
    width: int | None = None,
) -> prediction.Prediction:
    """Predict the memory of one prefill from the sizes of the model and of the batch alone.

    :param server: ``stock`` or ``patched``.
    :param tokens: tokens of the prefill.
    :param workspace_mb: MiB that the reference kernel allocates while it runs.
    :param moe_workspace_mb: SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB of the patched server; ``None``: unset.
    :param fusion: whether the engine may run shared experts as routed experts.
    :param width: columns of a slice; ``None``: the width that moe-workspace's rule chooses today.
    """
    model = fuse_like_engine(served.model, served.runner, fusion=fusion)
    layout, acting = Layout(tp=tp), prediction.MemoryEffects()
    if server == "patched":
        acting = every_change(model)
        if served.runner in ("triton", "marlin"):
            width = width or choose_width(served, model.per_rank(layout), tokens, acting, moe_workspace_mb)
            acting = every_change(model, width)
    runner = prediction.Runner(served.runner, served.quantization, workspace_mb * 2**20 + REFERENCE_SCRATCH)
    return prediction.predict(model, layout, runner, tokens, acting)


def choose_width(
    served: weights.ServedModel, rank: Rank, tokens: int, acting: prediction.MemoryEffects, moe_workspace_mb: int | None
) -> int:
    """Return the slice width, in columns, that moe-workspace's rule chooses today, with untuned tiles for Triton."""
    max_bytes = None if moe_workspace_mb is None else moe_workspace_mb * 10**6
    sizes = (tokens, rank.top_k, rank.hidden, rank.intermediate)
    if served.runner == "marlin":
        column_bytes = int(prediction.PACKED_BYTES * rank.experts * rank.intermediate)
        packed = LayerShape(*sizes, weight_bytes=3 * rank.hidden * column_bytes)
        return choose_packed_slice_width(packed, MarlinGemm(column_bytes, output_in_dead_input=True), max_bytes)
    is_fp8 = served.quantization == prediction.BLOCKS
    weight_bytes = 3 * rank.experts * rank.hidden * rank.intermediate * (1 if is_fp8 else 2)
    scales = {"columns_per_scale": 128, "scale_stride_bytes": rank.intermediate // 128 * 4} if is_fp8 else {}
    is_scratch = not acting.shared_last and rank.top_k * rank.intermediate <= rank.hidden
    gemm = TritonGemm(UNTUNED[is_fp8], is_fp8, is_scratch, **scales)
    return choose_slice_width(LayerShape(*sizes, weight_bytes=weight_bytes), gemm, max_bytes)


def predict_both(served: weights.ServedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Predict the memory of both servers, in the format of a result."""
    fusion = "--disable-shared-experts-fusion" not in options.server_arguments and has_gpu()
    sizes = {name: getattr(options, name) for name in ("tokens", "tp", "workspace_mb", "moe_workspace_mb")}
    both = {name: predict(served, name, **sizes, fusion=fusion) for name in servers.SERVERS}
    return {
        name: asdict(memory) | {"live_at_kernel_bytes": memory.bytes_before_runner, "peak_forward_bytes": memory.peak}
        for name, memory in both.items()
    }


def measure(options: argparse.Namespace, served: weights.ServedModel, work: Path) -> dict[str, Any]:
    """Run the servers, and return predictions, measurements and answers."""
    predicted = predict_both(served, options)
    print(
        "predicted, MB:", {name: in_mb(memory["peak_forward_bytes"]) for name, memory in predicted.items()}, flush=True
    )
    symmetric = ["--enable-symm-mem"] if options.symm_mem else []
    setup = servers.Setup(
        served,
        work,
        tp=options.tp,
        tokens=options.tokens,
        arguments=(*servers.EAGER, *symmetric, *options.server_arguments),
        workspace_mb=options.workspace_mb,
        variables=((MOE_WORKSPACE_MB.name, str(options.moe_workspace_mb)),) if options.moe_workspace_mb else (),
    )
    setup.prepare()
    answers: dict[str, list[Any]] = {}
    figures: dict[str, Any] = {}
    names = [*servers.SERVERS, *([timing.CONTROL] if options.control else [])]
    for together in [names] if options.at_once else [[name] for name in names]:
        with servers.run_servers(dict.fromkeys(together, setup), at_once=options.at_once) as running:
            for name, server in running.items():
                answers[name] = [
                    servers.generate(server, servers.prompt(options.tokens, seed), options.new_tokens)
                    for seed in [*range(PROMPTS)] * 2
                ]
                figures[name] = check_record(events.collect(setup.records_folder(name)))
                print(f"{name}: ready after {server.startup_s:.0f} s, asked {PROMPTS} prompts twice", flush=True)

    def differing(a: list[Any], b: list[Any]) -> list[int]:
        return [seed for seed in range(PROMPTS) if not servers.is_same_answer(a[seed], b[seed])]

    described_by = ("model", "shard", "tp", "tokens", "symm_mem", "workspace_mb", "moe_workspace_mb")
    return {name: getattr(options, name) for name in described_by} | {
        "served": asdict(served),
        "predicted": predicted,
        "server_arguments": setup.server_arguments(),
        "prompts": PROMPTS,
        "differing": {name: differing(answers["stock"], answers[name]) for name in names},
        "unrepeatable": {name: differing(answers[name][:PROMPTS], answers[name][PROMPTS:]) for name in names},
        "answers": {
            name: [{key: answer[key] for key in ("tokens", "logprobs")} for answer in own]
            for name, own in answers.items()
        },
        "memory": figures,
    }


def check_record(process: events.Process | None) -> dict[str, Any]:
    """Check a server's record, and return its memory figures and the changes that were installed.

    :param process: result of :func:`events.collect`.
    :raises SystemExit: the server recorded nothing, or the recording failed.
    """
    if process is None or process.failure:
        raise SystemExit(f"peak_memory.py: {process.failure if process else 'the servers recorded no forward pass'}")
    return {**asdict(process.memory), "changes": process.changes}


# --- Tables ----------------------------------------------------------------------------------------------------------


def in_mb(value: float | None) -> str:
    return "-" if value is None else f"{value / MB:,.1f}"


KEYS = ("live_at_kernel_bytes", "peak_forward_bytes")
PEAK_COLUMNS = ("peak, MB", "stock: predicted", "measured", "patched: predicted", "measured")
ANSWERS = ("answers, compared with stock's first answers", "equal tokens", "largest difference of log-probabilities")


def distances(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Make the rows of a table that compares answers with the first answers of the stock server.

    :returns: one row for the second answers of the stock server, and one row for each other server.
    """
    prompts, answers = figures["prompts"], figures["answers"]
    rows = []
    for name, own in answers.items():
        same = [
            (a, b)
            for a, b in zip(answers["stock"][:prompts], own[prompts:] if name == "stock" else own, strict=False)
            if a["tokens"] == b["tokens"]
        ]
        differences = [abs(x - y) for a, b in same for x, y in zip(a["logprobs"], b["logprobs"], strict=True)]
        title = "stock, asked again" if name == "stock" else name
        rows.append((title, f"{len(same)} of {prompts}", f"{max(differences):.2f}" if differences else "-"))
    return rows


def setting_tables(result: output.Result) -> str:
    """Make the tables of a run with ``--moe-workspace-mb``: predicted and measured peaks, and answers that differ."""
    figures = result["figures"]
    run = f"{figures['model']}, TP={figures['shard']}'s sizes, {figures['moe_workspace_mb']} MB asked for"
    table = output.table(PEAK_COLUMNS, [(run, *peak_cells(result))])
    return f"{table}\n{output.table(ANSWERS, distances(figures))}"


def peak_cells(result: output.Result) -> list[str]:
    """Format the predicted and the measured peak of each server, in MB. The predictions use today's formulas."""
    cells = []
    for server in servers.SERVERS:
        measured = result["figures"]["memory"][server]["peak_forward_bytes"]
        cells += [in_mb(predict_result(result, server).peak), in_mb(measured)]
    return cells


def make_tables(result: output.Result) -> str:
    """Make the tables of one run: predicted and measured memory, and differences of answers."""
    figures = result["figures"]
    rows = []
    for title, key in zip(("live when the routed kernel starts", "peak of the forward"), KEYS, strict=True):
        both = ((figures[kind][name][key] for kind in ("predicted", "memory")) for name in servers.SERVERS)
        rows.append((title, *map(in_mb, itertools.chain(*both))))
    parts = [output.table(("MB, one rank", *PEAK_COLUMNS[1:]), rows)]
    if figures["differing"]["patched"]:
        parts.append(output.table(ANSWERS, distances(figures)))
    return "\n".join(parts)


def summary(results: list[output.Result]) -> str:
    """Make a table of the measured memory of several runs, with a row per run."""
    rows = []
    for result in results:
        figures = result["figures"]
        stock, patched = (figures["memory"][name] for name in servers.SERVERS)
        cells = []
        for key in KEYS:
            cells += [in_mb(stock[key]), in_mb(patched[key])]
        ranks = f"{figures['tp']}{', symmetric memory' if figures['symm_mem'] else ''}"
        rows.append((f"{figures['model']}, TP={ranks}, {result['conditions']['engine']}", *cells))
    live, peak = "allocated when the routed kernel starts: stock", "peak of the forward pass: stock"
    return output.table(("MB", live, "patched", peak, "patched"), rows)


def predict_result(result: output.Result, server: str) -> prediction.Prediction:
    """Predict the memory of a server of a stored result with today's formulas.

    Old results have ``slice_columns``: the slice width that moe-workspace's rule chose at the time of the measurement.
    """
    figures = result["figures"]
    server_settings = figures["served"]
    served = weights.ServedModel(
        MODELS[figures["model"]].shard(figures["shard"]), runner=server_settings["runner"], fp8=server_settings["fp8"]
    )
    sizes = {name: figures[name] for name in ("tokens", "tp", "workspace_mb", "moe_workspace_mb")}
    return predict(served, server, **sizes, width=figures.get("slice_columns"))


def runs_table(results: list[output.Result]) -> str:
    """Make a table of predicted and measured peaks of several runs, with a row per run."""
    rows = []
    for result in results:
        figures = result["figures"]
        run = f"{figures['model']} {'FP8' if figures['served']['fp8'] else 'BF16'}"
        rows.append((run, *peak_cells(result), predict_result(result, "patched").peak_place))
    return output.table((*PEAK_COLUMNS, "where, patched"), rows)


def main() -> int:
    quick = {"model": "tiny", "tokens": 256, "moe_layers": 1}
    parser = output.parser(__doc__, quick=quick, logs=True)
    servers.add_options(parser, new_tokens=8)
    parser.add_argument(
        "--runner", choices=weights.RUNNERS, default="flashinfer_trtllm_routed", help="MoE runner (%(default)s)"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="FP8 experts with a scale for each block of 128 x 128; only with triton"
    )
    parser.add_argument("--tp", type=int, default=1, help="number of tensor-parallel ranks (%(default)s)")
    parser.add_argument(
        "--workspace-mb",
        type=int,
        default=0,
        help="MiB that the reference kernel allocates while it runs (%(default)s)",
    )
    parser.add_argument(
        "--moe-workspace-mb",
        type=int,
        help="SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB of the patched server (default: unset)",
    )
    parser.add_argument(
        "--symm-mem", action="store_true", help="use NCCL symmetric memory; NVLink multicast stays as it is"
    )
    parser.add_argument(
        "--at-once", action="store_true", help="run all servers at the same time; the GPUs must have enough memory"
    )
    parser.add_argument("--control", action="store_true", help="also run a second stock server, to compare its answers")
    options = output.parse(parser)
    if not options.model.startswith("tiny") or options.runner == "marlin":
        machine.require_gpu("peak_memory.py", "--quick runs a tiny model without one, not with --runner marlin")
    try:
        whole = weights.SERVABLE[options.model].shard(options.shard)
        served = weights.ServedModel(whole, options.dense_layers, options.moe_layers, options.runner, options.fp8)
        weights.config(served)
        whole.per_rank(Layout(tp=options.tp))
    except ValueError as error:
        print(f"peak_memory.py: {error}", file=sys.stderr)
        return 2
    with output.work_folder(options) as work:
        figures = measure(options, served, work)
    result = output.result("peak_memory", figures)
    if wrong := set(figures["differing"]["patched"]) - set(figures["unrepeatable"]["stock"]):
        if options.json:
            output.write(options.json, result)
        print(
            f"peak_memory.py: no figures, because the patched server's answers to prompts {sorted(wrong)} differ from "
            "those of the stock server, which repeats its answers. Prompts that a server answers differently the "
            f"second time: {figures['unrepeatable']}",
            file=sys.stderr,
        )
        return 1
    output.finish(options, result, make_tables)
    return 0
