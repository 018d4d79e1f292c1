"""``doctor --model``: what a server of a model would run, which changes act in it, and a prefill chunk's memory."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB
from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.dead_input.families import DEEPSEEK
from sglang_moe_patches.core.patch import Change
from sglang_moe_patches.core.variables import REFERENCE_KERNELS
from sglang_moe_patches.lab.effects import ATTENTION, EFFECTS, INSTALLED, Layer, effect
from sglang_moe_patches.lab.predict import config, forward
from sglang_moe_patches.lab.predict.config import Read
from sglang_moe_patches.lab.predict.engine_query import GPUS, CannotAsk, ask
from sglang_moe_patches.lab.predict.forward import Acting, Prediction
from sglang_moe_patches.lab.predict.shapes import Layout, Model
from sglang_moe_patches.lab.reference.families import FAMILIES as FAMILY
from sglang_moe_patches.memory.kv_sizing.eligibility import ALWAYS, KV_SIZING
from sglang_moe_patches.memory.kv_sizing.phases import attention_ranks
from sglang_moe_patches.registry import CHANGES

_OF_A_CPU = (REFERENCE_KERNELS.name, "SGLANG_USE_CPU_ENGINE")
UNKNOWN_FORMAT = "not known"


class CannotAdvise(ValueError):
    """What was given is not enough; one line says what."""


@dataclass(frozen=True)
class Server:
    """What decides the memory of a forward, as the engine or the arguments say it.

    :param runner: by its ``--moe-runner-backend``; ``None``: not known.
    :param quantization: of what the routed experts are given, as :func:`.forward.predicted` takes it.
    :param format: the weights of the routed experts, for people.
    :param family: of its layers, by the engine's module; "": none that offers.
    :param graphs: decodes are captured.
    :param engine_drops: the engine drops attention's inputs by itself, and has an output buffer for NVFP4.
    :param float_logits: as :func:`.forward.predicted` takes it.
    """

    runner: str | None
    quantization: str | None
    format: str
    family: str
    layout: Layout
    tokens: int
    graphs: bool = True
    engine_drops: bool = False
    float_logits: bool = False


def acting(server: Server, shared_experts: bool, statuses: Mapping[str, str]) -> tuple[Acting, Acting]:
    """What acts in a stock server, and in a patched one.

    :param shared_experts: its layers have some that run by themselves.
    :param statuses: of each change.
    """
    deepseek, nvfp4 = server.family == DEEPSEEK, server.runner in runners.TRTLLM
    natively = deepseek and server.engine_drops
    stock = Acting(natively, natively and nvfp4 and shared_experts, natively and nvfp4)

    def does(name: str, part: str | None) -> bool:
        return bool(effect(name, Layer(server.family, shared_experts, part or ""), statuses.get(name, "")))

    columns = does("moe-workspace", server.runner)
    last = does("deferred-shared-experts", server.runner)
    patched = Acting(
        inputs_dropped=stock.inputs_dropped or does("output-buffer", ATTENTION),
        shared_last=stock.shared_last or last,
        dead_input=stock.dead_input
        or does("output-buffer", server.runner)
        or bool(server.family and (columns or (last and server.runner == "triton"))),
        columns=columns,
    )
    return stock, patched


def what_acts(server: Server, model: Model, told: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each change with what it does here, or why it does nothing.

    :param told: status and reason of each change.
    """
    found = []
    known = {change.name: change for change in CHANGES}
    for one in told:
        if one["name"] not in known:  # an answer that was kept from before a change had another name
            continue
        change, status, reason = known[one["name"]], one["status"], one["reason"]
        does = ""
        if status in INSTALLED:
            words = {
                part: effect(change.name, Layer(server.family, bool(model.shared_experts), part), status)
                for part in (server.runner or "", ATTENTION)
            }
            told_of = [f"{ATTENTION} {said}" if part == ATTENTION else said for part, said in words.items() if said]
            does = "; ".join(told_of) if change.name in EFFECTS else change.summary
            if not does:
                own = "" if model.shared_experts else " without shared experts of their own"
                reason = f"nothing for {server.runner or 'an unknown runner'} in {server.family or 'other'} layers{own}"
        if change.name == "moe-workspace" and does and (whole := _whole(server, model)):
            does, reason = "", whole
        if change.name == "nvfp4-weights" and does and server.format not in ("NVFP4", UNKNOWN_FORMAT):
            does, reason = "", f"the experts' weights are {server.format}"
        found.append({"name": change.name, "status": status, "acts": bool(does), "does": does, "reason": reason})
    return found


def kv_sizing_row(answer: Mapping[str, str], arguments: Iterable[str]) -> dict[str, Any]:
    """kv-sizing's row, by what the server itself would decide.

    :param answer: as the engine query has it under ``kv_sizing``.
    """
    given = any(argument.split("=")[0] == "--mem-fraction-static" for argument in arguments)
    mode = answer["mode"]
    row = {"name": "kv-sizing", "status": "applied", "acts": False, "does": "", "reason": ""}
    if reason := answer["skip_reason"] or answer["monitor_only"]:
        recorded = "" if answer["skip_reason"] else "; free memory is recorded while it serves"
        used = "is used" if mode else "would be used"
        return row | {"reason": f"the engine's fraction {used} because {reason}{recorded}"}
    if not mode:
        would = "say what the given --mem-fraction-static leaves" if given else "size this server"
        return row | {"status": "not needed", "reason": f"{KV_SIZING.name}=auto turns it on; it would {would}"}
    if given and mode != ALWAYS:
        does = "the given --mem-fraction-static is used unchanged; a start measures, and the log says what it leaves"
    else:
        does = "a start measures what forwards need, and the next gives the rest to the KV cache"
    return row | {"acts": True, "does": does}


def _whole(server: Server, model: Model) -> str:
    """Why the runner's tensor stays whole; "": it does not."""
    rank = model.per_rank(server.layout)
    scratch = bool(server.family) and not model.shared_experts
    if server.quantization not in forward.TILES:
        return ""
    share = 1 / server.layout.ep

    def width(*, at_any_cost: bool) -> int:
        if server.runner == "marlin":
            return forward.marlin_width(
                rank,
                server.tokens,
                output_elsewhere=bool(server.family),
                share=share,
                most_time=math.inf if at_any_cost else None,
            )
        return forward.columns_width(
            rank,
            server.tokens,
            scratch=scratch,
            quantization=server.quantization,
            share=share,
            tiles=None if at_any_cost else forward.TILES[server.quantization],
        )

    if width(at_any_cost=False) < model.hidden:
        return ""
    if model.top_k <= 2 and server.runner == "triton":
        return f"a top-k of {model.top_k} has no sum to cut"
    size = f"[tokens, top-k, hidden] is {2 * server.tokens * model.top_k * model.hidden / 1e6:,.0f} MB here"
    if width(at_any_cost=True) < model.hidden:
        return f"{size}, and cutting it costs more than 2 % of the layer's time; {MOE_WORKSPACE_MB.name} asks for it"
    return f"{size}, too small to cut"


def predict(
    read: Read, server: Server, acts: tuple[Acting, Acting]
) -> tuple[tuple[Prediction, Prediction] | None, list[str]]:
    """The memory of a chunk, stock and patched; and in words what is not known of it.

    ``None`` where the runner has no formula, or the layers are not what the formulas are of.
    """
    unknown = []
    model = read.model
    if server.runner not in forward.RUNNERS:
        why = f"what {server.runner} holds while it works" if server.runner else "the runner"
        return None, [f"not predicted: {why}"]
    if read.residual:
        return None, [f"not predicted: {read.residual}"]
    if server.quantization not in (None, *forward.SCALED):
        return None, [f"not predicted: what {server.format} quantizes"]
    if server.layout.dp > 1:
        return None, ["not predicted: data-parallel attention"]
    try:
        both = [
            forward.predicted(
                model,
                server.layout,
                server.runner,
                server.tokens,
                one,
                quantization=server.quantization,
                graphs=server.graphs,
                float_logits=server.float_logits,
            )
            for one in acts
        ]
    except ValueError as error:
        return None, [f"not predicted: {error}"]
    if server.runner in runners.TRTLLM:
        unknown.append(f"{OWN_WORKSPACE} comes on top of the routed experts' sum")
    if read.attention:
        unknown.append(f"attention, which {read.attention}: the peak is {AT_LEAST}")
        both = [replace(one, elsewhere=_without(one.elsewhere, "attention")) for one in both]
    if not model.family:
        unknown.append(f"{UNMEASURED}: the formulas are those of the families that were")
    if server.quantization == "rows":
        unknown.append("experts with a scale a row were not measured")
    return (both[0], both[1]), unknown


def _without(places: dict[str, int], name: str) -> dict[str, int]:
    return {place: size for place, size in places.items() if place != name}


AT_LEAST = "at least what is shown"
OWN_WORKSPACE = "what the vendor's kernel takes while it works"
UNMEASURED = "this family was not measured"
ALWAYS_UNKNOWN = (
    "chunks behind a prefix, mixed batches, images, prompt log-probabilities, LoRA",
    "what the allocator keeps beside tensors, graph pools, weights and KV cache",
)
"""What no prediction has."""


# --- From a model and arguments --------------------------------------------------------------------------------------


def examine(model: str, arguments: list[str], gpu: str) -> dict[str, Any]:
    """All that is known of a server, JSON-ready.

    :param model: as :func:`.config.find` takes it.
    :param arguments: of the server, without the model.
    :param gpu: one of ``GPUS``.
    :raises NoConfig: there are no sizes.
    :raises CannotAdvise: the arguments name the model or a GPU kind is unknown.
    :raises CannotAsk: the engine refuses the model or the arguments.
    """
    if gpu not in GPUS:
        raise CannotAdvise(f"--gpu {gpu} is unknown; known: {', '.join(GPUS)}")
    if any(argument.split("=")[0] in ("--model", "--model-path") for argument in arguments):
        raise CannotAdvise("give --model before the `--`")
    path = config.find(model)
    read = config.read(config.load(path), model)
    found: dict[str, Any] = {"model": model, "gpu": gpu, "arguments": arguments, "engine": engine.version()}
    asked = ask_engine(path, arguments, gpu) if found["engine"] else None
    return found | advise(read, asked, arguments)


def ask_engine(path: Path, arguments: list[str], gpu: str) -> dict[str, Any]:
    """What the installed engine says, which looks for a folder with the file.

    :raises CannotAsk: it refuses the model or the arguments.
    """
    from sglang_moe_patches.lab.reference import environment

    # Without what makes the engine run on a CPU: there it chooses otherwise.
    environ = {name: value for name, value in os.environ.items() if name not in _OF_A_CPU} | {"SGLANG_PLUGINS": ""}
    try:
        stub = environment.variables(environ)
    except environment.UnusableEnvironment as error:
        raise CannotAsk(str(error)) from None
    environ |= {name: stub[name] for name in ("LD_LIBRARY_PATH",) if name in stub}
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        asked_of = json.dumps(config.language_model(config.load(path)))
        (Path(folder) / "config.json").write_text(asked_of, encoding="utf-8")
        if (beside := path.with_name("hf_quant_config.json")).is_file():  # how ModelOpt's checkpoints are quantized
            shutil.copy(beside, folder)
        return ask(folder, arguments, gpu, environ)


def advise(read: Read, asked: Mapping[str, Any] | None, arguments: list[str]) -> dict[str, Any]:
    """What follows from the sizes and from what the engine said.

    :param asked: as :func:`.engine_query.ask` returns it; ``None``: there is no engine.
    """
    unknown = []
    if asked is None:
        resolved, layer, told = _by_arguments(arguments), None, [_not_asked(change) for change in CHANGES]
        unknown.append("SGLang is not installed here: what it would choose, and what the changes say of it")
    else:
        resolved, layer, told = asked["resolved"], asked["layer"], asked["changes"]
        if layer is None:
            unknown.append(f"the runner: {asked['unknown'] or 'the engine built no routed experts'}")
    server, model = _server(read.model, resolved, layer, asked or {})
    read = replace(read, model=model)
    if resolved.get("moe_a2a_backend", "none") != "none":
        both, why = None, [f"not predicted: all-to-all by {resolved['moe_a2a_backend']}"]
        acts = (Acting.stock(), Acting.stock())
    else:
        acts = acting(server, bool(model.shared_experts), {one["name"]: one["status"] for one in told})
        both, why = predict(read, server, acts)
    sizing = (asked or {}).get("kv_sizing")
    return {
        "sizes": asdict(model),
        "server": asdict(server),
        "changes": [
            kv_sizing_row(sizing, arguments) if sizing and one["name"] == "kv-sizing" else one
            for one in what_acts(server, model, told)
        ],
        "stock": _in_plain(both[0]) if both else None,
        "patched": _in_plain(both[1]) if both else None,
        "unknown": [*unknown, *why, *(ALWAYS_UNKNOWN if both else ())],
    }


def _in_plain(prediction: Prediction) -> dict[str, Any]:
    return asdict(prediction) | {"peak": prediction.peak, "where": prediction.where}


def _not_asked(change: Change) -> dict[str, str]:
    return {"name": change.name, "status": "not asked", "reason": ""}


def _by_arguments(arguments: list[str]) -> dict[str, Any]:
    """The few of the engine's arguments that the formulas read, where there is no engine to resolve them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flags, default in (
        (("--tp-size", "--tp", "--tensor-parallel-size"), 1),
        (("--ep-size", "--ep", "--expert-parallel-size"), 1),
        (("--dp-size", "--dp", "--data-parallel-size"), 1),
        (("--chunked-prefill-size",), 8192),
    ):
        parser.add_argument(*flags, type=int, default=default)
    parser.add_argument("--moe-runner-backend", default="auto")
    parser.add_argument("--moe-a2a-backend", default="none")
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    try:
        return vars(parser.parse_known_args(arguments)[0])
    except argparse.ArgumentError as error:
        raise CannotAdvise(str(error)) from None


def _server(
    model: Model, resolved: Mapping[str, Any], layer: Mapping[str, Any] | None, asked: Mapping[str, Any]
) -> tuple[Server, Model]:
    """The server, and the model with its experts as the engine runs them."""
    tp, ep = resolved["tp_size"], resolved["ep_size"]
    dp = attention_ranks(resolved)
    chunk = resolved["chunked_prefill_size"] or 0
    tokens = chunk if chunk > 0 else resolved.get("max_prefill_tokens") or 16384
    backend = resolved["moe_runner_backend"]
    runner = layer["runner"] if layer else None
    quantization, format_ = _format(layer["method"], layer["blocks"]) if layer else (None, UNKNOWN_FORMAT)
    if runner is None and backend != "auto":
        runner = backend
    if layer:
        model = replace(
            model,
            experts=layer["experts"],
            top_k=layer["top_k"] or model.top_k,  # some models hand it to their routers alone
            moe_intermediate=layer["intermediate"] * (tp // ep),
            shared_experts=int(layer["shared_experts"]),
            family=next((name for name, each in FAMILY.items() if each.layers == layer["family"]), ""),
        )
    return (
        Server(
            runner,
            quantization,
            format_,
            layer["family"] if layer else "",
            Layout(tp, ep, dp),
            tokens,
            graphs=not resolved.get("disable_cuda_graph"),
            engine_drops=asked.get("engine_drops", False),
            float_logits=layer is not None and layer["family"] == DEEPSEEK and asked.get("float_logits", False),
        ),
        model,
    )


def _format(method: str, blocks: bool) -> tuple[str | None, str]:
    """How the runner's inputs are quantized, and the weights' format for people, by the engine's class for them."""
    name = method.lower()
    if "unquant" in name:
        return None, "BF16"
    for mark, words in (("nvfp4", "NVFP4"), ("mxfp4", "MXFP4"), ("int4", "INT4")):
        if mark in name:
            return None, words
    if any(mark in name for mark in ("wna16", "awq", "gptq")):
        return None, "INT4 or INT8 weights"
    if "fp8" in name:
        return (forward.BLOCKS, "FP8 in blocks") if blocks else ("rows", "FP8 by rows")
    return method, method


# --- On a terminal ---------------------------------------------------------------------------------------------------


def show(found: Mapping[str, Any]) -> None:
    """Print it: what runs, what acts, the peak term by term, and what is not known."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    server, sizes = found["server"], found["sizes"]
    layout = server["layout"]
    ranks = f"TP={layout['tp']}" + "".join(f", {n.upper()}={layout[n]}" for n in ("ep", "dp") if layout[n] > 1)
    asked = f"asked of SGLang {found['engine']}" if found["engine"] else "SGLang is not installed"
    gpu, chunk = GPUS[found["gpu"]].name, f"{server['tokens']:,}"
    console.print(f"[bold]{escape(found['model'])}[/] on {gpu}, {ranks}, chunks of {chunk} tokens")
    experts = f"Routed experts: {server['format']}, runner {server['runner'] or 'not known'} ({asked})"
    console.print(experts, markup=False)
    console.print(
        f"{sizes['experts']} experts, top-{sizes['top_k']}, hidden {sizes['hidden']}, intermediate "
        f"{sizes['moe_intermediate']}, shared experts of its own: {sizes['shared_experts']}",
        highlight=False,
    )
    table = Table("change", "acts", "what it does here, or why it does nothing")
    for change in found["changes"]:
        mark = "[green]yes[/]" if change["acts"] else "[dim]no[/]"
        table.add_row(change["name"], mark, escape(change["does"] or change["reason"] or change["status"]))
    console.print(table)
    if found["stock"]:
        terms = Table("MB, one rank", "stock", "patched")
        for row in terms_of(found):
            terms.add_row(*row)
        console.print(terms)
    console.print("Not known:")
    for line in found["unknown"]:
        console.print(f"  - {line}", highlight=False, markup=False)


def terms_of(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A row for each term of both predictions, and for each other place that can be the peak."""
    both = (found["stock"], found["patched"])

    def row(title: str, sizes: Iterable[int]) -> tuple[str, str, str]:
        stock, patched = (f"{size / 1e6:,.1f}" for size in sizes)
        return title, stock, patched

    rows = [
        row(f"  {words}", (one["parts"][part] for one in both))
        for part, words in forward.PARTS.items()
        if any(one["parts"][part] for one in both)
    ]
    rows.append(row(f"at {forward.MOE}", (sum(one["parts"].values()) for one in both)))
    rows += [row(f"at {place}", (one["elsewhere"][place] for one in both)) for place in both[0]["elsewhere"]]
    rows.append(row("peak", (one["peak"] for one in both)))
    return rows
