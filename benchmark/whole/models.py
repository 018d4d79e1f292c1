"""Ask the engine how it would run published models, and predict the memory of a prefill chunk, stock and patched.

    python benchmark whole/models --json benchmark/results/models/0.5.23.json

No server starts. The benchmark asks the engine as ``sglang-moe-patches doctor --model`` does. The models are those of
``doctor``'s models.json. This file has the fields of each model's public ``config.json`` that the engine or a formula
reads.
The result has only the engine's answers. The predictions are computed when the page is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from common import doctor_answers, output
from common.shapes import MODELS, Layout, fuse_like_engine
from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB
from sglang_moe_patches.core import engine
from sglang_moe_patches.lab.predict import config, forward, model_report

MB = 1e6
TOKENS = 16384
SHORT_TEXTS = {
    model_report.OWN_WORKSPACE: "the vendor's workspace",
    model_report.UNMEASURED: "family not measured",
    "one scale for each row": "scales of rows not measured",
    "linear attention": "linear attention",
    "an indexer chooses": "sparse attention",
    "prefill graphs": "prefill graphs",
    "not predicted": "not predicted",
}
"""Short texts in the table for longer texts of `doctor --model`. A key is the longer text, or a part of it."""
RESOLVED = (
    *("tp_size", "ep_size", "dp_size", "enable_dp_attention", "chunked_prefill_size", "max_prefill_tokens"),
    *("moe_runner_backend", "moe_a2a_backend", "disable_cuda_graph", "attention_backend", "decode_attention_backend"),
    *("max_running_requests", "pp_size", "speculative_num_draft_tokens"),
)
"""Server arguments that ``doctor``'s formulas read. A result has their values as the engine resolves them."""
Sizes = tuple[int, int, int, int, str, str | None]
"""Hidden size, experts, top-k and intermediate size of one rank's MoE layer, its MoE runner, and its quantization."""


def ask(model: dict[str, Any]) -> dict[str, Any]:
    """Ask the engine about a model.

    :returns: the engine's answer. If the engine gives no answer, the dictionary has only the key ``refused`` with the
        reason.
    """
    arguments = [*model["arguments"], "--chunked-prefill-size", str(TOKENS)]
    try:
        answer = model_report.ask_engine(model["config"], arguments, model["gpu"])
    except model_report.CannotAsk as error:
        return {"refused": str(error)}
    return keep_resolved(answer)


def keep_resolved(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the engine's answer, with only those resolved server arguments that are in ``RESOLVED``."""
    if "refused" in answer:
        return answer
    return answer | {"resolved": {name: answer["resolved"][name] for name in RESOLVED if name in answer["resolved"]}}


# --- Measured results ------------------------------------------------------------------------------------------------


def load_measured_peaks() -> tuple[dict[Sizes, str], dict[Sizes, str]]:
    """Load the measured peaks, stock and patched, by the sizes of a rank's MoE layer.

    :returns: peaks of whole forward passes, and peaks of the runner alone.
    """
    wholes, alone = {}, {}
    for found in forwards():
        peaks = in_mb(*(found["memory"][server]["peak_forward_bytes"] for server in ("stock", "patched")))
        knob = found["moe_workspace_mb"]
        wholes[key_of(found)] = f"{peaks}, {knob} MB asked for" if knob else peaks
    for cell in cells():
        if cell["tokens"] == TOKENS:
            alone[key_of_cell(cell)] = f"runner alone {in_mb(cell['stock_peak'], cell['peak'])}"
    return wholes, alone


def forwards() -> Iterator[dict[str, Any]]:
    """Yield the stored results of ``whole/peak_memory`` that have the sizes of one rank (``--shard``)."""
    for path in sorted((output.RESULTS / "peak-memory").glob("*-shard*.json")):
        yield output.load(f"peak-memory/{path.stem}")["figures"]


def cells() -> Iterator[dict[str, Any]]:
    """Yield the stored measurements of the Triton runner alone. If two have the same sizes, the later one is used."""
    for name in ("h100", "h200-more", "h200"):
        yield from output.load(f"moe-workspace/{name}")["figures"]["cells"]


def key_of(run: dict[str, Any]) -> Sizes:
    """Return the :func:`key` of a measurement of whole forward passes."""
    share, served = MODELS[run["model"]].shard(run["shard"]), run["served"]
    return key(share, Layout(tp=run["tp"]), served["runner"], forward.BLOCKS if served["fp8"] else None)


def key_of_cell(cell: dict[str, Any]) -> Sizes:
    """Return the :func:`key` of a measurement of the Triton runner alone."""
    layout = Layout(tp=int(cell["layout"].removeprefix("tp")))
    return key(MODELS[cell["model"]], layout, "triton", forward.BLOCKS if cell["weights"] == "fp8" else None)


def key(model: Any, layout: Layout, runner: str, quantization: str | None) -> Sizes:
    """Return the key for finding a measurement: the sizes of a rank's MoE layer, its runner and its quantization."""
    rank = fuse_like_engine(model, runner).per_rank(layout)
    return rank.hidden, rank.experts, rank.top_k, rank.intermediate, runner, quantization


# --- The page --------------------------------------------------------------------------------------------------------


def in_mb(*sizes: float) -> str:
    return " -> ".join(f"{size / MB:,.0f}" for size in sizes)


def make_tables(result: output.Result) -> str:
    """Make a table with a row for each model: its runner, the predicted and measured peak, and what is not known."""
    rows = []
    wholes, alone = load_measured_peaks()
    answers = {(entry["source"], entry["gpu"]): entry for entry in result["figures"]["models"]}
    for model in config.served_models():
        if (model["source"], model["gpu"]) not in answers:
            continue
        answer = answers[model["source"], model["gpu"]]["asked"]
        name, on = f"{model['model']} {model['format']}", f"{ranks(model['arguments'])} x {model['gpu'].upper()}"
        if "refused" in answer:
            rows.append((name, on, "refused", "", "", answer["refused"]))
            continue
        report = model_report.derive_report(config.read_sizes(model["config"], model["source"]), answer)
        sizes = sizes_of_a_rank(report)
        seen = wholes.get(sizes) or alone.get(sizes, "")
        rows.append((name, on, report["server"]["runner"] or "not known", _peak(report), seen, _remarks(report)))
    header = ("model", "on", "runner", "peak, MB: stock -> patched", "measured", "what is not known")
    return output.table(header, rows, left=6)


def sizes_of_a_rank(report: dict[str, Any]) -> Sizes:
    """Return the sizes of one rank's MoE layer from a report of ``doctor``, as :func:`key` does for a measurement."""
    server, sizes = report["server"], report["sizes"]
    return (
        *(sizes["hidden"], sizes["experts"] // server["layout"]["ep"], sizes["top_k"]),
        sizes["moe_intermediate"] * server["layout"]["ep"] // server["layout"]["tp"],
        *(server["runner"], server["quantization"]),
    )


def ranks(flags: list[str]) -> str:
    """Read the number of tensor-parallel ranks from server arguments. The flag has three spellings."""
    return re.search(r"--(?:tp|tp-size|tensor-parallel-size)[ =](\d+)", " ".join(flags))[1]


def _peak(report: dict[str, Any]) -> str:
    if not report["stock"]:
        return "-"
    return in_mb(report["stock"]["peak"], report["patched"]["peak"]) + " +" * is_lower_bound(report)


def is_lower_bound(report: dict[str, Any]) -> bool:
    """Return whether the real peak may be larger than the predicted peak of a report of ``doctor``."""
    return any(model_report.AT_LEAST in line or model_report.OWN_WORKSPACE in line for line in report["unknown"])


def _remarks(report: dict[str, Any]) -> str:
    """Return short remarks: whether no change acts in the model's layers, and what is unknown about this model."""
    remarks = []
    if any(MOE_WORKSPACE_MB.name in (change["reason"] or "") for change in report["changes"]):
        remarks.append("on request")
    elif not any(change["acts"] for change in report["changes"] if change["name"] != "kv-sizing"):
        remarks.append("nothing acts")
    for line in report["unknown"]:
        if line not in model_report.ALWAYS_UNKNOWN:
            remarks.append(next((brief for words, brief in SHORT_TEXTS.items() if words in line), line))
    return "; ".join(remarks)


def main() -> None:
    options = output.parse(output.parser(__doc__))
    answers: list[dict[str, Any]] = []
    result = output.result("models", {"models": answers}, {"machine": "no GPU", "engine": engine.version()})
    servers = [model | {"env": {}} for model in config.served_models()]
    for model, answer in doctor_answers.call_for_servers(servers, "whole.models:ask"):
        answers.append({"source": model["source"], "gpu": model["gpu"], "asked": answer})
        layer = answer.get("layer")
        summary = answer.get("refused") or (f"{layer['runner']}, {layer['method']}" if layer else answer["unknown"])
        print(f"{model['model']} {model['format']}: {summary}", flush=True)
        if options.json:
            output.write(options.json, result)
    output.finish(options, result, make_tables)
