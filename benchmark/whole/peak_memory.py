"""Activation memory of one prefill, stock against patched, predicted and measured.

    python benchmark whole/peak_memory --tp 4 --workspace-mb 1536 --json m.json
    python benchmark whole/peak_memory --model deepseek-v3 --tp 2 --symm-mem
    python benchmark whole/peak_memory --runner triton --shard 4  # BF16, one rank's share of four on one GPU
    python benchmark whole/peak_memory --runner triton --shard 4 --fp8
    python benchmark whole/peak_memory --runner marlin --shard 8 --moe-workspace-mb 628
    python benchmark whole/peak_memory --quick  # a tiny model, no GPU needed

Two real servers, a few layers of the model's own widths with random weights. --runner says how the routed experts are
computed: flashinfer_trtllm_routed is NVFP4 on the reference kernels; triton is BF16 (or FP8) and marlin INT4,
on the engine's own kernels. What each server should need is written down first, from the sizes (the package's
lab/predict/forward.py).

Both are asked the same prompts twice, one at a time; every token and log-probability that the stock server repeats must
be equal, or there is no result. Where it repeats none, as Marlin does on Hopper, it is said how far apart answers are.
The second forward of --tokens tokens and those after it are measured (the first also pays for libraries' one-off
workspaces). Figures are those of one rank, bytes beyond what was allocated before the forward. --workspace-mb stands
for the memory that the vendor's NVFP4 kernel takes. --moe-workspace-mb is SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB of the
patched server.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import machine, output, servers, timing, weights
from common.shapes import MODELS, Layout, Rank, as_the_engine_runs, every_change
from sglang_moe_patches.changes.moe_workspace.column_slices import (
    MOE_WORKSPACE_MB,
    LayerShape,
    MarlinGemm,
    TritonGemm,
    packed_slice_width,
    slice_width,
)
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.predict import forward as prediction

MB = 1e6
PROMPTS = 4
#: Scratch memory of the reference kernel for NVFP4 on a GPU.
REFERENCE_SCRATCH = 64 * 2**20
#: Triton's tiles where nobody tuned any (``get_default_config``): of BF16, and of FP8 in blocks.
UNTUNED = (
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 8},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "GROUP_SIZE_M": 32},
)


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
    """What a server should need, by the sizes alone.

    :param server: ``stock`` or ``patched``.
    :param moe_workspace_mb: SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB of the patched server; ``None``: unset.
    :param fusion: whether the engine may run shared experts as routed ones.
    :param width: of a column slice; ``None``: as moe-workspace decides today.
    """
    model = as_the_engine_runs(served.model, served.runner, fusion=fusion)
    layout, acting = Layout(tp=tp), prediction.Acting()
    if server == "patched":
        acting = every_change(model)
        if served.runner in ("triton", "marlin"):
            width = width or decided_width(served, model.per_rank(layout), tokens, acting, moe_workspace_mb)
            acting = every_change(model, width)
    runner = prediction.Runner(served.runner, served.quantization, workspace_mb * 2**20 + REFERENCE_SCRATCH)
    return prediction.predict(model, layout, runner, tokens, acting)


def decided_width(
    served: weights.ServedModel, rank: Rank, tokens: int, acting: prediction.Acting, moe_workspace_mb: int | None
) -> int:
    """Columns of a slice as moe-workspace decides today, with the tiles that Triton has where nobody tuned any."""
    max_bytes = None if moe_workspace_mb is None else moe_workspace_mb * 10**6
    sizes = (tokens, rank.top_k, rank.hidden, rank.intermediate)
    if served.runner == "marlin":
        column_bytes = int(prediction.PACKED_BYTES * rank.experts * rank.intermediate)
        packed = LayerShape(*sizes, weight_bytes=3 * rank.hidden * column_bytes)
        return packed_slice_width(packed, MarlinGemm(column_bytes, output_in_dead_input=True), max_bytes)
    is_fp8 = served.quantization == prediction.BLOCKS
    weight_bytes = 3 * rank.experts * rank.hidden * rank.intermediate * (1 if is_fp8 else 2)
    scales = {"columns_per_scale": 128, "scale_stride_bytes": rank.intermediate // 128 * 4} if is_fp8 else {}
    is_scratch = not acting.shared_last and rank.top_k * rank.intermediate <= rank.hidden
    gemm = TritonGemm(UNTUNED[is_fp8], is_fp8, is_scratch, **scales)
    return slice_width(LayerShape(*sizes, weight_bytes=weight_bytes), gemm, max_bytes)


def predict_both(served: weights.ServedModel, options: argparse.Namespace) -> dict[str, Any]:
    """What stock and patched should need, as a result keeps it."""
    fusion = "--disable-shared-experts-fusion" not in options.server_arguments and has_gpu()
    sizes = {name: getattr(options, name) for name in ("tokens", "tp", "workspace_mb", "moe_workspace_mb")}
    both = {name: predict(served, name, **sizes, fusion=fusion) for name in servers.SERVERS}
    return {
        name: asdict(one) | {"live_at_kernel_bytes": one.live, "peak_forward_bytes": one.peak}
        for name, one in both.items()
    }


def measure(options: argparse.Namespace, served: weights.ServedModel, work: Path) -> dict[str, Any]:
    predicted = predict_both(served, options)
    print("predicted, MB:", {name: in_mb(one["peak_forward_bytes"]) for name, one in predicted.items()}, flush=True)
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
        with servers.running(dict.fromkeys(together, setup), at_once=options.at_once) as running:
            for name, server in running.items():
                answers[name] = [
                    servers.generate(server, servers.prompt(options.tokens, seed), options.new_tokens)
                    for seed in [*range(PROMPTS)] * 2
                ]
                figures[name] = figures_of(events.collect(setup.records_folder(name)))
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
            name: [{key: answer[key] for key in ("tokens", "logprobs")} for answer in given]
            for name, given in answers.items()
        },
        "memory": figures,
    }


def figures_of(process: events.Process | None) -> dict[str, Any]:
    """:param process: what :func:`events.collect` found."""
    if process is None or process.failure:
        raise SystemExit(f"peak_memory.py: {process.failure if process else 'the servers observed no forward'}")
    return {**asdict(process.memory), "changes": process.changes}


# --- Tables ----------------------------------------------------------------------------------------------------------


def in_mb(value: float | None) -> str:
    return "-" if value is None else f"{value / MB:,.1f}"


KEYS = ("live_at_kernel_bytes", "peak_forward_bytes")
PEAK_COLUMNS = ("peak, MB", "stock: predicted", "measured", "patched: predicted", "measured")
ANSWERS = ("answers, beside stock's first", "same tokens", "their log-probabilities apart, at most")


def distances(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """How far answers are from the stock server's first ones: its own second ones, and each other server's."""
    prompts, answers = figures["prompts"], figures["answers"]
    rows = []
    for name, given in answers.items():
        same = [
            (a, b)
            for a, b in zip(answers["stock"][:prompts], given[prompts:] if name == "stock" else given, strict=False)
            if a["tokens"] == b["tokens"]
        ]
        apart = [abs(x - y) for a, b in same for x, y in zip(a["logprobs"], b["logprobs"], strict=True)]
        title = "stock, asked again" if name == "stock" else name
        rows.append((title, f"{len(same)} of {prompts}", f"{max(apart):.2f}" if apart else "-"))
    return rows


def with_knob(result: output.Result) -> str:
    """The peak of one run within so many MB, predicted beside measured, and its answers."""
    figures = result["figures"]
    run = f"{figures['model']}, TP={figures['shard']}'s sizes, {figures['moe_workspace_mb']} MB asked for"
    table = output.table(PEAK_COLUMNS, [(run, *peaks_beside(result))])
    return f"{table}\n{output.table(ANSWERS, distances(figures))}"


def peaks_beside(result: output.Result) -> list[str]:
    """MB at the peak, predicted by the formulas of today and measured, of each server."""
    cells = []
    for server in servers.SERVERS:
        measured = result["figures"]["memory"][server]["peak_forward_bytes"]
        cells += [in_mb(of_result(result, server).peak), in_mb(measured)]
    return cells


def tables(result: output.Result) -> str:
    """Both figures of one run, predicted beside measured, and how far answers are apart where they differ."""
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
    """The two figures of several runs, a row a run."""
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


def of_result(result: output.Result, server: str) -> prediction.Prediction:
    """What a server of a result should have needed, by the formulas of today.

    ``slice_columns``: what moe-workspace decided when the result was measured, before slices had a price.
    """
    figures = result["figures"]
    kept = figures["served"]
    served = weights.ServedModel(
        MODELS[figures["model"]].shard(figures["shard"]), runner=kept["runner"], fp8=kept["fp8"]
    )
    sizes = {name: figures[name] for name in ("tokens", "tp", "workspace_mb", "moe_workspace_mb")}
    return predict(served, server, **sizes, width=figures.get("slice_columns"))


def against_sizes(results: list[output.Result]) -> str:
    """The peak of the forward, predicted beside measured, a row a run."""
    rows = []
    for result in results:
        figures = result["figures"]
        run = f"{figures['model']} {'FP8' if figures['served']['fp8'] else 'BF16'}"
        rows.append((run, *peaks_beside(result), of_result(result, "patched").where))
    return output.table((*PEAK_COLUMNS, "where, patched"), rows)


def main() -> int:
    quick = {"model": "tiny", "tokens": 256, "moe_layers": 1}
    parser = output.parser(__doc__, quick=quick, logs=True)
    servers.add_options(parser, new_tokens=8)
    parser.add_argument("--runner", choices=weights.RUNNERS, default="flashinfer_trtllm_routed")
    parser.add_argument("--fp8", action="store_true", help="FP8 experts, scales by blocks of 128 x 128; with triton")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--workspace-mb", type=int, default=0, help="MiB that the routed kernel takes while it runs")
    parser.add_argument("--moe-workspace-mb", type=int, help="MB that Triton or Marlin may hold; default: unset")
    parser.add_argument("--symm-mem", action="store_true", help="NCCL symmetric memory (NVLink multicast as it is)")
    parser.add_argument("--at-once", action="store_true", help="run both servers at the same time; needs the memory")
    parser.add_argument("--control", action="store_true", help="a second stock server too, for its answers")
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
            f"peak_memory.py: no figures: the patched server answered prompts {sorted(wrong)} otherwise than the stock "
            f"server, which repeats them; otherwise the second time: {figures['unrepeatable']}",
            file=sys.stderr,
        )
        return 1
    output.finish(options, result, tables)
    return 0
