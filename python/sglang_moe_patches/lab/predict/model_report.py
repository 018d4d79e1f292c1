"""Report of ``doctor --model`` on a server that does not run yet: its MoE runner, the changes that act in the server,
and its memory."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.dead_input.families import DEEPSEEK
from sglang_moe_patches.core.patch import (
    ACTIVE,
    INPUTS_DROPPED,
    OUTPUT_IN_DEAD_INPUT,
    SCRATCH_IN_DEAD_INPUT,
    SHARED_LAST,
    Change,
    Decision,
    Status,
    describe_unread_variables,
)
from sglang_moe_patches.lab import without_gpu
from sglang_moe_patches.lab.predict import config, forward, room
from sglang_moe_patches.lab.predict.config import ModelSizes
from sglang_moe_patches.lab.predict.engine_pools import Fit
from sglang_moe_patches.lab.predict.engine_query import CannotAsk, ask, chunk_tokens, find_gpu
from sglang_moe_patches.lab.predict.forward import MemoryEffects, Prediction
from sglang_moe_patches.lab.predict.room import Decodes, Forwards, Room
from sglang_moe_patches.lab.predict.shapes import Layout, Model
from sglang_moe_patches.memory.kv_sizing.eligibility import ALWAYS, KV_SIZING, kept_fraction_reason
from sglang_moe_patches.memory.kv_sizing.phases import attention_ranks
from sglang_moe_patches.registry import CHANGES

_CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
UNKNOWN_FORMAT = "not known"
NVFP4 = "NVFP4"


class CannotAdvise(ValueError):
    """Raised if ``doctor --model`` cannot report on a server. The message says why in one line."""


@dataclass(frozen=True)
class Server:
    """Facts about a server that decide the memory of a forward pass. They come from the engine or from the server's
    arguments.

    :param runner: MoE runner, by its name for ``--moe-runner-backend``; ``None`` if not known.
    :param quantization: quantization of the routed experts' inputs, as in :class:`.forward.Runner`.
    :param format: format of the routed experts' weights, in words.
    :param family: family of the layers, by the engine's module; empty if no layer of the model offers its input to the
        changes.
    :param layout: number of ranks of each kind of parallelism.
    :param tokens: tokens of the largest prefill chunk on one data-parallel rank.
    :param graphs: whether decodes run in captured graphs.
    :param engine_drops: whether the engine itself frees attention's inputs early in DeepSeek's layers, and lets NVFP4
        kernels write their output into the dead input.
    :param float_logits: whether the router computes float32 logits, as for :func:`.forward.predict`.
    :param all_to_all: value of ``--moe-a2a-backend``; empty if there is no all-to-all backend.
    :param copies_output: whether the engine copies the output of TRT-LLM's FP8 kernels into a second tensor.
    :param in_place: whether the engine lets the runner write its output over its input.
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
    all_to_all: str = ""
    in_place: bool = True
    copies_output: bool = False


def derive_effects(
    server: Server, shared_experts: bool, decided: Mapping[str, Decision]
) -> tuple[MemoryEffects, MemoryEffects]:
    """Return the effects on the memory of a forward pass, first for the stock server, then for the patched server. The
    stock server has only the engine's own effects. The patched server also has the effects of the changes.

    :param shared_experts: whether the layers have shared experts that run separately from the routed experts.
    :param decided: decision of each applied change. The key is the change's name.
    """
    natively, trtllm = server.family == DEEPSEEK and server.engine_drops, server.runner in runners.TRTLLM
    effects = {effect for decision in decided.values() for effect in decision.effects}
    stock = MemoryEffects(
        inputs_dropped=natively,
        shared_last=natively and trtllm and shared_experts,
        dead_input=natively and trtllm and server.format == NVFP4,
        out_of_place=server.runner == "triton" and not server.in_place and SHARED_LAST not in effects,
    )
    patched = MemoryEffects(
        inputs_dropped=stock.inputs_dropped or INPUTS_DROPPED in effects,
        shared_last=stock.shared_last or SHARED_LAST in effects,
        dead_input=stock.dead_input
        or bool({OUTPUT_IN_DEAD_INPUT, SCRATCH_IN_DEAD_INPUT} & effects)
        # The deferred shared experts still need Triton's input. Triton therefore writes its output into the dead input,
        # whatever its size.
        or (SHARED_LAST in effects and server.runner == "triton" and bool(server.family)),
        columns=next((decision.width for decision in decided.values() if decision.width), None),
        out_of_place=stock.out_of_place,
    )
    return stock, patched


NOT_BUILT = "not known: the engine could not build the model's layers"


def _start_row(name: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "status": answer["status"], "acts": False, "does": "", "reason": answer["reason"]}


def describe_change(change: Change, answer: Mapping[str, Any], decision: Decision | None) -> dict[str, Any]:
    """Return a change's row of the report: the effect of the change on the server, or the reason why it has no effect.

    The value of ``acts`` in the row is ``None`` if it is not known whether the change acts.

    :param answer: status and reason of the change.
    :param decision: decision of the change about the layers; ``None`` if the layers were not built, or if the change
        makes no decision about layers.
    """
    row = _start_row(change.name, answer)
    if answer["status"] not in ACTIVE:
        return row
    if change.decide and decision is None:
        return row | {"acts": None, "reason": NOT_BUILT}
    if decision is None:
        return row | {"acts": True, "does": change.summary}
    if decision.acts:
        return row | {"acts": True, "does": "; ".join(filter(None, (*decision.effects, decision.reason)))}
    return row | {"reason": decision.reason}


def describe_fp4_weights(
    server: Server, answer: Mapping[str, Any], stock: Fit | None, fit: Fit | None
) -> dict[str, Any]:
    """Return fp4-weights' row of the report: whether the change acts on the server, and how much memory it saves.
    fp4-weights acts only with certain formats of weights and certain runners (:data:`LAYOUT_RUNNERS`).

    :param answer: status and reason of the change.
    :param stock: memory of the stock server after loading and while loading; ``None`` if it is not known.
    :param fit: memory of the patched server, like ``stock``.
    """
    row = _start_row("fp4-weights", answer)
    if answer["status"] not in ACTIVE:
        return row
    if server.format == UNKNOWN_FORMAT:
        return row | {"acts": None, "reason": NOT_BUILT}
    if server.format not in LAYOUT_RUNNERS:
        return row | {"reason": f"the experts' weights are {server.format}, not {' or '.join(LAYOUT_RUNNERS)}"}
    if server.runner is None:
        return row | {"acts": None, "reason": "not known: it depends on the MoE runner, which is not known"}
    if server.runner not in LAYOUT_RUNNERS[server.format]:
        return row | {"reason": f"fp4-weights does not lay out {server.format} experts for the runner {server.runner}"}
    does = ["lays out the experts' weights with less additional memory"]
    if stock and fit:
        kept, least = stock.loading - fit.loading, stock.least_memory - fit.least_memory
        if kept:
            does.append(f"after loading, about {kept / 1e6:,.0f} MB more are free on each GPU")
        if least:
            does.append(f"the peak while loading is about {least / 1e6:,.0f} MB lower")
    return row | {"acts": True, "does": "; ".join(does)}


LAYOUT_RUNNERS = {
    NVFP4: (*runners.TRTLLM, *runners.MARLIN),
    "MXFP4": (runners.TRITON_KERNELS, *runners.MARLIN),
}
"""Runners for which the change fp4-weights changes the layout of the experts' weights. The key is the format of the
weights."""

WOULD_SIZE = "kv-sizing would then set this server's KV cache size"
"""Last clause of the reason in kv-sizing's row of the report. It is used if kv-sizing is off, but would size the
server's KV cache if it were on."""


def describe_kv_sizing(answer: Mapping[str, Any], *, does_start: bool = True) -> dict[str, Any]:
    """Return kv-sizing's row of the report. The row has the decision that the server itself would make.

    :param answer: value of ``kv_sizing`` in the engine query's answer.
    :param does_start: whether a server with kv-sizing starts: whether its GPU has enough memory for the weights and for
        the first KV cache. kv-sizing later changes the size of this KV cache.
    """
    given, mode, unknown = answer["given"], answer["mode"], answer["unknown"]
    row = {"name": "kv-sizing", "status": "applied", "acts": False, "does": "", "reason": ""}
    reason = answer["skip_reason"] or (kept_fraction_reason(mode) if mode and given else "")
    if reason:
        source = "the given --mem-fraction-static" if given else "the engine's --mem-fraction-static"
        return row | {"reason": f"{source} {'is used' if mode else 'would be used'} because {reason}"}
    if mode and not does_start:
        return row | {"reason": "the server does not start: there is no room for a KV cache"}
    if not mode:
        turns_on = f"{KV_SIZING.name}={ALWAYS if given else 'auto'} turns kv-sizing on"
        would = "whether kv-sizing would then set the KV cache size is not known" if unknown else WOULD_SIZE
        return row | {"status": "not needed", "reason": f"{turns_on}; {would}"}
    if unknown:
        return row | {"acts": None, "reason": f"not known: the engine did not compute the KV cache size ({unknown})"}
    begins = ", beginning with the given --mem-fraction-static" if given else ""
    return row | {
        "acts": True,
        "does": f"measures the need of forward passes and gives the remaining memory to the KV cache{begins}",
    }


INPUT_BYTES = {NVFP4: forward.NVFP4_INPUT_BYTES, "BF16": 0.0, "INT4": 0.0, **forward.FP8_INPUT_BYTES}
"""Bytes for one element of the quantized copy of a TRT-LLM kernel's input; 0 if the kernel reads the 16-bit input
itself. The key is a value of :attr:`Server.quantization`. If that attribute is ``None``, the key is a value of
:attr:`Server.format`."""


def predict(
    sizes: ModelSizes, server: Server, acts: tuple[MemoryEffects, MemoryEffects]
) -> tuple[tuple[Prediction, Prediction] | None, list[str]]:
    """Predict the memory of a prefill chunk, stock and patched, and list the parts of the memory that are not known.

    :param acts: effects on the memory, in the stock server and in the patched server.
    :returns: the two predictions, and descriptions of the unknown parts. The predictions are ``None`` if no formula
        fits the server's runner or the model's layers.
    """
    model = sizes.model
    if server.runner not in forward.RUNNERS:
        why = f"there is no formula for the runner {server.runner}" if server.runner else "the runner is not known"
        return None, [f"{NOT_PREDICTED}{why}"]
    if sizes.residual:
        return None, [f"{NOT_PREDICTED}{sizes.residual}"]
    if server.quantization not in (None, *forward.SCALE_COLUMNS):
        return None, [f"{NOT_PREDICTED}there is no formula for the quantized inputs of {server.format}"]
    if server.layout.dp > 1:
        return None, [f"{NOT_PREDICTED}there is no formula for data-parallel attention"]
    runner = forward.Runner(server.runner, server.quantization)
    if server.runner in runners.TRTLLM:
        key = server.quantization or server.format
        if key not in INPUT_BYTES:
            return None, [f"{NOT_PREDICTED}there is no formula for the runner {server.runner} with {server.format}"]
        runner = replace(runner, input_bytes=INPUT_BYTES[key], copies_output=server.copies_output)
    flags = {"graphs": server.graphs, "float_logits": server.float_logits}
    try:
        predictions = [forward.predict(model, server.layout, runner, server.tokens, acting, **flags) for acting in acts]
    except ValueError as error:
        return None, [f"{NOT_PREDICTED}{error}"]
    unknown = []
    if server.runner in runners.TRTLLM:
        unknown.append(f"{OWN_WORKSPACE}, which adds to the memory at the routed experts")
    if sizes.attention:
        unknown.append(f"the memory of attention, which {sizes.attention}: the peak is {AT_LEAST}")
        for prediction in predictions:
            del prediction.elsewhere["attention"]
    if not model.family:
        unknown.append(f"the error of the prediction: {UNMEASURED}, and the formulas are those of measured families")
    if server.quantization == "rows":
        unknown.append("the error of the prediction: experts with one scale for each row were not measured")
    return (predictions[0], predictions[1]), unknown


NOT_PREDICTED = "the memory of a prefill chunk is not predicted: "
"""Beginning of a line that says why there is no prediction."""
AT_LEAST = "at least the peak in the table"
OWN_WORKSPACE = "the workspace of the vendor's kernel"
UNMEASURED = "this model family was not measured"
ALWAYS_UNKNOWN = (
    "the memory of chunks behind a cached prefix, mixed batches, images, prompt log-probabilities and LoRA",
    "memory that the allocator keeps in addition to tensors, graph pools, weights and KV cache",
)
"""Descriptions of the memory that no prediction contains."""


# --- From a model and arguments --------------------------------------------------------------------------------------


def examine(model: str, arguments: list[str], gpu: str) -> dict[str, Any]:
    """Return the report on a server, as a dictionary for JSON.

    :param model: model, as :func:`.config.load_model` takes it.
    :param arguments: the server's arguments, without the model.
    :param gpu: GPU, as :func:`.engine_query.find_gpu` takes it.
    :raises NoConfig: the model's sizes cannot be read.
    :raises CannotAdvise: the arguments name the model, the GPU kind is unknown, or SGLang is not installed.
    :raises CannotAsk: the engine refuses the model or the arguments, or cannot answer.
    """
    try:
        find_gpu(gpu)
    except ValueError as error:
        raise CannotAdvise(str(error)) from None
    if helps := {"-h", "--help", "--version"} & set(arguments):
        raise CannotAdvise(
            f"{min(helps)} is an option of the engine: run `python -m sglang.launch_server {min(helps)}`"
        )
    if any(argument.split("=")[0] in ("--model", "--model-path") for argument in arguments):
        raise CannotAdvise("give --model before the `--`")
    if misspelt := describe_unread_variables(CHANGES):
        raise CannotAdvise("; ".join(misspelt))
    content, path = config.load_model(model)
    config.check_class(content, model)
    sizes = config.read_sizes(content, model)
    if (version := engine.version()) is None:
        raise CannotAdvise("SGLang is not installed in this environment; pip install sglang")
    report: dict[str, Any] = {"model": model, "gpu": gpu, "arguments": arguments, "engine": version}
    report |= derive_report(sizes, ask_engine(content, arguments, gpu, path))
    return report | {"remarks": describe_unused_variables(report["changes"], os.environ)}


def describe_unused_variables(rows: list[dict[str, Any]], environ: Mapping[str, str]) -> list[str]:
    """Return a line for each environment variable that is set, but that this server does not read.

    :param rows: rows of the report on the changes.
    """
    why = {row["name"]: row["reason"] for row in rows if row["status"] == Status.NOT_NEEDED}
    return [
        f"{variable.name}={environ[variable.name]} is set, but this server does not read it: {why[change.name]}"
        for change in CHANGES
        for variable in change.variables
        if change.name in why and change.name != "kv-sizing" and variable.name in environ
    ]


def ask_engine(content: Mapping[str, Any], arguments: list[str], gpu: str, path: Path | None = None) -> dict[str, Any]:
    """Ask the installed engine about a model and a server's arguments, and return its answers.

    The engine reads the model's ``config.json`` from a temporary folder.

    :param content: content of the model's ``config.json``.
    :param path: path of the ``config.json``. The engine may also read other files in the folder of this path; ``None``
        if the content does not come from a file.
    :raises CannotAsk: the engine refuses the model or the arguments, or cannot answer.
    """
    environ = query_environment()
    language_model = config.language_model(content)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(language_model), encoding="utf-8")
        # Checkpoints by ModelOpt describe their quantization in this additional file.
        if path is not None and (beside := path.with_name("hf_quant_config.json")).is_file():
            shutil.copy(beside, folder)
        arguments, missing_draft = _replace_missing_draft(arguments, language_model, Path(folder) / "draft")
        is_part = language_model is not content
        top_k = config.read_sizes(content, folder).model.top_k
        answer = ask(folder, arguments, gpu, environ, top_k=top_k, language_model=is_part)
    return answer | {"missing_draft": missing_draft, "is_part": is_part}


def query_environment() -> dict[str, str]:
    """Return the environment variables for an engine query.

    The environment lacks the variable that makes the engine run on a CPU, because the engine chooses other runners on a
    CPU. Further variables keep the engine from waiting for a model hub.

    :raises CannotAsk: the engine cannot be imported here.
    """
    environ = {name: value for name, value in os.environ.items() if name != _CPU_ENGINE}
    environ |= {"SGLANG_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    try:
        stub = without_gpu.variables(environ)
    except without_gpu.UnusableEnvironment as error:
        raise CannotAsk(str(error)) from None
    return environ | {name: stub[name] for name in ("LD_LIBRARY_PATH",) if name in stub}


def _replace_missing_draft(arguments: list[str], target: Mapping[str, Any], folder: Path) -> tuple[list[str], str]:
    """If the server's draft model has no ``config.json`` on this machine, create a stand-in for the draft model. The
    engine needs a ``config.json`` of the draft model to resolve the server's arguments.

    The stand-in has one layer with the sizes of the target model.

    :param target: content of the target model's ``config.json``.
    :param folder: folder to create for the stand-in.
    :returns: the server's arguments with the stand-in, and the name of the missing draft model. The name is empty if no
        draft model is missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", dest="draft")
    try:
        options, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # the engine will report the same error
        return arguments, ""
    if options.draft is None:
        return arguments, ""
    try:
        config.find(options.draft)
    except config.NoConfig:
        text = config.text_config(target)
        copied_names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
        sizes = {name: text[name] for name in (*copied_names, "max_position_embeddings") if name in text}
        layer = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(layer | sizes), encoding="utf-8")
        return [*others, "--speculative-draft-model-path", str(folder)], options.draft
    return arguments, ""


def derive_report(sizes: ModelSizes, engine_answer: Mapping[str, Any], requests: int = 0) -> dict[str, Any]:
    """Derive the report from a model's sizes and the engine's answers, and return it.

    :param engine_answer: answers of the engine, as :func:`.engine_query.ask` returns them.
    :param requests: limit of concurrent requests, as :func:`predict_rooms` takes it.
    """
    unknown = []
    answers = engine_answer["changes"]
    if engine_answer["layer"] is None:
        unknown.append(f"the runner: {engine_answer['unknown'] or 'the engine built no routed experts'}")
    if draft := engine_answer.get("missing_draft"):
        unknown.append(f"the draft model {draft}: its config.json was not found")
    if (fit := engine_answer.get("fit")) and fit["beside"]:
        unknown.append(f"the weights of {fit['beside']}: the tables do not count them")
    if fit and fit["tokens"] is None and fit["unknown"]:
        unknown.append(f"KV tokens ({fit['unknown']})")
    server, model = _describe_server(sizes.model, engine_answer)
    published = sizes.model.moe_intermediate
    sizes = replace(sizes, model=model)
    decided = {answer["name"]: Decision(**answer["decision"]) for answer in answers if answer.get("decision")}
    if server.all_to_all:
        predictions, why = None, [f"{NOT_PREDICTED}there is no formula for all-to-all by {server.all_to_all}"]
    else:
        acts = derive_effects(server, bool(model.shared_experts), decided)
        predictions, why = predict(sizes, server, acts)
    graphs = engine_answer.get("prefill_graphs")
    if predictions and graphs and engine_answer.get("prefills_in_graphs", True) and server.tokens <= graphs[1]:
        kind, tokens = graphs
        why.append(
            f"the memory of {kind} prefill graphs, which run prefills of up to {tokens:,} tokens: the peak in the "
            "table is that of an eager prefill"
        )
    sizing = engine_answer.get("kv_sizing")
    changes = {change.name: change for change in CHANGES}
    rows = []
    for answer in answers:
        if (name := answer["name"]) == "fp4-weights":
            rows.append(
                describe_fp4_weights(
                    server, answer, _read_fit(engine_answer, "stock_fit"), _read_fit(engine_answer, "fit")
                )
            )
        elif sizing and name == "kv-sizing":
            rows.append(describe_kv_sizing(sizing, does_start=fit is None or fit["starts"]))
        else:
            rows.append(describe_change(changes[name], answer, decided.get(name)))
    rooms = predict_rooms(
        sizes, server, engine_answer, predictions, {row["name"] for row in rows if row["acts"]}, requests
    )
    return {
        "sizes": asdict(model) | {"published_intermediate": published},
        "server": asdict(server),
        "changes": rows,
        "fit": engine_answer.get("fit"),
        "stock_fit": engine_answer.get("stock_fit") or engine_answer.get("fit"),
        "room": {name: each.describe() for name, each in rooms.items()},
        "stock": _to_plain(predictions[0]) if predictions else None,
        "patched": _to_plain(predictions[1]) if predictions else None,
        "unknown": [*unknown, *why, *(ALWAYS_UNKNOWN if predictions else ())],
    }


def predict_rooms(
    sizes: ModelSizes,
    server: Server,
    engine_answer: Mapping[str, Any],
    predictions: tuple[Prediction, Prediction] | None,
    acting: set[str],
    requests: int = 0,
) -> dict[str, Room]:
    """Predict the memory of the stock server and of the patched server.

    :param predictions: predicted memory of a prefill chunk, stock and patched; ``None`` if it is not known.
    :param acting: names of the changes that act.
    :param requests: limit of concurrent requests for a server without ``--max-running-requests``; 0 to use the limit
        that kv-sizing would set.
    :returns: dictionary with the keys "stock" and "patched". It is empty if the engine query returned no memory figures
        (``fit``).
    """
    if not engine_answer.get("fit"):
        return {}
    rooms = {}
    for name, key, forward_pass in zip(("stock", "patched"), FIT_KEYS, predictions or (None, None), strict=True):
        fit = _read_fit(engine_answer, key)
        assert fit is not None
        patched = name == "patched"
        grows, segments = patched and "kv-sizing" in acting, patched and "activation-segments" in acting
        try:
            peak = forward_pass.peak if forward_pass else estimate_peak(sizes, server)
            decodes, forwards = _sizes_of_need(sizes.model, server, engine_answer, peak, segments=segments)
        except ValueError as error:
            rooms[name] = Room(fit, unknown=str(error), grows=grows)
            continue
        if engine_answer["resolved"].get("max_running_requests") is None:
            default = room.with_default_requests(decodes, forwards, Room(fit).cache_bytes)
            decodes = replace(default, requests=requests or default.requests)
        rooms[name] = Room(fit, room.predict_need(decodes, forwards), "", grows, decodes)
    return rooms


FIT_KEYS = "stock_fit", "fit"
"""Two keys of the engine query's answer. The first key has the memory of the stock server, and the second key has the
memory of the patched server. Each value is a :class:`.engine_pools.Fit` as a dictionary."""


def _read_fit(engine_answer: Mapping[str, Any], key: str) -> Fit | None:
    """Read the memory of the stock or the patched server from the engine's answers; ``None`` if the engine gave no such
    answer.

    :param key: a key of :data:`FIT_KEYS`.
    """
    description = engine_answer.get(key) or engine_answer.get("fit")
    names = {each.name for each in fields(Fit)}
    return Fit(**{name: value for name, value in description.items() if name in names}) if description else None


def estimate_peak(sizes: ModelSizes, server: Server) -> int:
    """Estimate the peak bytes of a prefill chunk for a MoE runner whose memory this package cannot predict. The
    estimate is the prediction for Triton's runner in BF16.

    :raises ValueError: there is no estimate. The message says why.
    """
    if server.all_to_all:
        raise ValueError(f"there is no formula for all-to-all by {server.all_to_all}")
    if server.runner is None:
        raise ValueError("the MoE runner is not known")
    if sizes.residual:
        raise ValueError(sizes.residual)
    # A data-parallel rank runs attention on its own tokens alone, and runs the experts on the tokens of all ranks.
    layout, tokens = replace(server.layout, dp=1), server.tokens * server.layout.dp
    return forward.predict(
        sizes.model, layout, forward.Runner("triton"), tokens, MemoryEffects(), graphs=server.graphs
    ).peak


def _sizes_of_need(
    model: Model, server: Server, engine_answer: Mapping[str, Any], peak: int, *, segments: bool
) -> tuple[Decodes, Forwards]:
    """Return the sizes from which :func:`.room.predict_need` predicts a server's need: the sizes of its decodes, and
    the sizes of its prefills and graphs.

    :param peak: peak memory of the forward pass of a prefill chunk, in bytes.
    :param segments: whether the change activation-segments acts.
    :raises ValueError: the engine's answer was made by an older version of this package, or the layers could not be
        built.
    """
    resolved, sampling = engine_answer["resolved"], engine_answer.get("sampling")
    if not sampling:
        raise ValueError("the engine could not build the model's layers")
    layout = server.layout
    backend = resolved.get("decode_attention_backend") or resolved.get("attention_backend")
    heads = model.heads * layout.dp // layout.tp
    latent = backend == "triton" and model.q_lora_rank is not None
    requests = (resolved.get("max_running_requests") or 0) // layout.dp
    stages = resolved.get("pp_size") or 1
    decodes = Decodes(
        vocabulary=sampling["vocabulary"],
        captured=sampling["captured"],
        requests=requests // stages,
        penalized=requests // stages,
        rows=resolved.get("speculative_num_draft_tokens") or 1,
        ranks=layout.tp,
        split_bytes=4 * heads * room.DECODE_SPLITS * model.latent.kv_rank if latent else 0,
    )
    graphs = engine_answer.get("prefill_graphs")
    forwards = Forwards(
        layers=sampling["layers"],
        peak=peak,
        chunk=server.tokens * layout.dp,
        prefill_graphs=tuple(graphs) if graphs else None,
        stages=stages,
        segments=segments,
        newer=sampling["newer_graphs"],
        draft_bytes=sampling["draft_bytes"],
    )
    return decodes, forwards


def _to_plain(prediction: Prediction) -> dict[str, Any]:
    return asdict(prediction) | {"peak": prediction.peak, "where": prediction.peak_place}


def _describe_server(model: Model, engine_answer: Mapping[str, Any]) -> tuple[Server, Model]:
    """Return the facts about the server, and the model's sizes. The sizes of the experts come from the layers that the
    engine has built, not from ``config.json``, because the engine may pad them."""
    resolved, layer = engine_answer["resolved"], engine_answer["layer"]
    tp, ep = resolved["tp_size"], resolved["ep_size"]
    dp = attention_ranks(resolved)
    backend = resolved["moe_runner_backend"]
    runner = layer["runner"] if layer else None
    quantization, format_ = _name_format(layer) if layer else (None, UNKNOWN_FORMAT)
    if layer and runner is None and backend != "auto":
        runner = backend
    if layer:
        model = replace(
            model,
            experts=layer["experts"],
            top_k=layer["top_k"] or model.top_k,  # in some models, only the router stores this number
            moe_intermediate=layer["intermediate"] * (tp // ep),
            shared_experts=int(layer["shared_experts"]),
            family=next((name for name, module in config.FAMILIES.values() if module == layer["family"]), ""),
        )
    return (
        Server(
            runner,
            quantization,
            format_,
            layer["family"] if layer else "",
            Layout(tp, ep, dp),
            chunk_tokens(resolved),
            graphs=not resolved.get("disable_cuda_graph"),
            engine_drops=engine_answer.get("engine_drops", False),
            float_logits=layer is not None and layer["family"] == DEEPSEEK and engine_answer.get("float_logits", False),
            all_to_all="" if (backend := resolved.get("moe_a2a_backend", "none")) == "none" else backend,
            in_place=layer is None or layer["in_place"],
            copies_output=quantization in engine_answer.get("copied_outputs", ()),
        ),
        model,
    )


def _name_format(layer: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the quantization of the runner's inputs, and a name for the weights' format. Both follow from the engine's
    quantization class."""
    method: str = layer["method"]
    name = method.lower()
    if layer.get("mxfp4"):  # DeepSeek-V4's experts with the method for FP8
        return None, "MXFP4"
    if "unquant" in name:
        return None, "BF16"
    for mark, words in (("nvfp4", "NVFP4"), ("mxfp4", "MXFP4"), ("int4", "INT4")):
        if mark in name:
            return None, words
    if any(mark in name for mark in ("wna16", "awq", "gptq")):
        return None, "INT4 or INT8 weights"
    if "fp8" in name:
        return (forward.BLOCKS, "FP8 in blocks") if layer["blocks"] else ("rows", "FP8 by rows")
    return method, method
