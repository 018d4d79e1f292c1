"""Ask the engine for its choices for a model on a GPU that this machine does not have. This is an *engine query*.

``python -m sglang_moe_patches.lab.predict.engine_query`` reads one JSON object from standard input, and writes its
answer as one JSON object to standard output. In this process PyTorch reports the GPU that the query names. The process
groups are PyTorch's fake process groups, with as many ranks as the server has. The engine then resolves the server's
arguments, and builds the model's first layers with fake tensors, which have sizes and no memory. The layers show which
runner and which kernels the server would use. No weights are loaded, and nothing is computed.

If the engine needs more from a GPU than its properties, :class:`CannotAsk` is raised. If the engine would refuse the
server on such a GPU, the engine also refuses the query, with the same message.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import gc
import inspect
import io
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches.changes.fp4_weights.loading import predict_loading
from sglang_moe_patches.core import engine, patch, runners
from sglang_moe_patches.core.dead_input.families import DEEPSEEK
from sglang_moe_patches.core.patch import OUTPUT_IN_DEAD_INPUT, SCRATCH_IN_DEAD_INPUT
from sglang_moe_patches.core.variables import WrongValue
from sglang_moe_patches.lab.predict import engine_pools, forward, unused_imports
from sglang_moe_patches.lab.predict.config import dense_layers
from sglang_moe_patches.lab.predict.engine_pools import Fit, describe_error
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.memory.kv_sizing.phases import attention_ranks, graph_settings
from sglang_moe_patches.registry import CHANGES


@dataclass(frozen=True)
class Gpu:
    """Kind of GPU, with the properties that PyTorch reports.

    :param name: name that CUDA reports.
    :param capability: compute capability, major and minor.
    :param memory: bytes of memory.
    :param processors: number of streaming multiprocessors.
    :param integrated: whether the GPU shares its memory with the host.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    processors: int
    integrated: bool = False


GPUS = {
    "h200": Gpu("NVIDIA H200", (9, 0), 143_771 * 2**20, 132),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81_559 * 2**20, 132),
    "h20": Gpu("NVIDIA H20", (9, 0), 97_871 * 2**20, 78),
    "h800": Gpu("NVIDIA H800", (9, 0), 81_559 * 2**20, 132),
    "h20-3e": Gpu("NVIDIA H20-3e", (9, 0), 143_771 * 2**20, 78),
    "b200": Gpu("NVIDIA B200", (10, 0), 183_359 * 2**20, 148),
    "b300": Gpu("NVIDIA B300 SXM6 AC", (10, 3), 275_040 * 2**20, 148),
    "gb200": Gpu("NVIDIA GB200", (10, 0), 189_471 * 2**20, 152),
    "gb300": Gpu("NVIDIA GB300", (10, 3), 284_208 * 2**20, 152),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 81_920 * 2**20, 108),
    "gb10": Gpu("NVIDIA GB10", (12, 1), 119 * 2**30, 48, integrated=True),
    "rtx-pro-6000": Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 97_887 * 2**20, 188),
    "rtx-5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32_607 * 2**20, 170),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 46_068 * 2**20, 142),
}
"""Kinds of GPUs, by their names for ``doctor --gpu``. The memory size is the number that ``nvidia-smi`` shows. For GB10
(DGX Spark), the memory size is the host's."""
GPU_SIZE = re.compile(r"(?P<kind>[^:]+)(?::(?P<size>\d+(?:\.\d+)?)(?P<unit>GB|GIB|MIB)?)?", re.IGNORECASE)
"""Pattern for a value of ``doctor --gpu``: a kind of GPU, optionally followed by a colon and a memory size."""
SIZE_UNITS = {"GB": 10**9, "GIB": 2**30, "MIB": 2**20}


def find_gpu(text: str) -> Gpu:
    """Return the GPU that a value of ``doctor --gpu`` names.

    The value is a kind in upper or lower case, such as ``h100``. ``:SIZE`` after the kind sets another memory size, by
    default in GB.

    :raises ValueError: the kind is unknown, or the text after the colon is not a memory size.
    """
    match = GPU_SIZE.fullmatch(text.strip())
    kind = match["kind"].lower().replace("_", "-").replace(" ", "-") if match else text
    if match is None or kind not in GPUS:
        near = difflib.get_close_matches(kind, GPUS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--gpu {text} is unknown{hint}; known GPUs: {', '.join(GPUS)}; append another memory size as in h100:96GB"
        )
    if match["size"] is None:
        return GPUS[kind]
    size = int(float(match["size"]) * SIZE_UNITS[(match["unit"] or "GB").upper()])
    if not 10**9 < size < 10**13:
        raise ValueError(f"--gpu {text}: no GPU has {size / 1e9:,.1f} GB of memory")
    return replace(GPUS[kind], memory=size)


QUERY_TIMEOUT_S = 600
"""Time limit of an engine query, in seconds. On an idle machine, a query takes ten to twenty seconds."""


class CannotAsk(RuntimeError):
    """Raised if the engine gave no answer. The message says why."""


class Refused(CannotAsk):
    """Raised if the engine refuses the query as it would refuse the server. The message is the engine's error
    message."""


class ModelRefused(Refused):
    """Raised if the engine refuses the model with these arguments, but would accept the arguments for another model."""


# --- In the asking process -------------------------------------------------------------------------------------------


def ask(
    model: str, arguments: list[str], gpu: str, environ: dict[str, str], *, top_k: int = 0, language_model: bool = False
) -> dict[str, Any]:
    """Ask the engine, in a new process, for its choices for a server.

    :param model: folder with the model's ``config.json``.
    :param arguments: the server's arguments, without the model.
    :param gpu: GPU of the server, as :func:`find_gpu` takes it.
    :param environ: environment of the engine's process.
    :param top_k: number of experts to which a token is routed, by ``config.json``.
    :param language_model: whether ``config.json`` describes only the language model within a multimodal model.
    :returns: dictionary with, among others, the keys ``resolved`` (the server's resolved arguments that JSON can
        represent), ``layer`` (description of the first MoE layer, or ``None``), ``unknown`` (reason why ``layer`` is
        ``None``), ``fit`` (fields of a :class:`.engine_pools.Fit`, or ``None``) and ``changes`` (status and decision of
        each change).
    :raises Refused: the engine refuses these arguments, or this model.
    :raises CannotAsk: the engine cannot answer without a GPU.
    """
    query: dict[str, Any] = {"arguments": ["--model-path", model, *arguments], "gpu": gpu}
    query |= {"language_model": language_model, "top_k": top_k}
    try:
        try:
            answer = _query_once(query | {"leave_out_unused": True}, environ)
            if answer["layer"]:
                return answer
        # The query may need a package that was left out. Only a refusal of the arguments is final.
        except CannotAsk as error:
            if type(error) is Refused:
                raise
        return _query_once(query | {"leave_out_unused": False}, environ)
    except subprocess.TimeoutExpired:
        raise CannotAsk(f"the engine's process gave no answer in {QUERY_TIMEOUT_S} s") from None


def _query_once(query: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    process = run_query(json.dumps(query), environ)
    if process.returncode or not process.stdout:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        raise CannotAsk(lines[-1] if lines else "the engine's process ended without a message")
    answer: dict[str, Any] = json.loads(process.stdout)
    for key, error in (("refused", Refused), ("model_refused", ModelRefused)):
        if key in answer:
            raise error(answer[key])
    return answer


def run_query(query: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run an engine query in its own process, because the engine stores the resolved arguments in global variables."""
    # -P: the process imports no module from the user's current folder.
    command = [sys.executable, "-P", "-m", __name__]
    return subprocess.run(command, input=query, env=environ, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)


# --- In the engine's process -----------------------------------------------------------------------------------------


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own output goes to standard error
    gc.disable()  # importing thousands of modules creates no garbage worth collecting
    query = json.load(sys.stdin)
    if query["leave_out_unused"]:
        unused_imports.replace_packages()
    try:
        answer = _answer_query(query["arguments"], find_gpu(query["gpu"]), query["language_model"], query["top_k"])
    except ModelRefused as error:
        answer = {"model_refused": str(error)}
    except (Refused, WrongValue) as error:
        answer = {"refused": str(error)}
    except Exception as error:
        sys.exit(describe_error(error))
    json.dump(answer, out)
    out.close()
    os._exit(0)  # an ordinary exit takes a second, because thousands of modules are imported


@contextmanager
def _translate_refusals(*, but_by: tuple[str, ...] = ()) -> Iterator[None]:
    """Context manager that replaces the engine's errors about the arguments or the model by :class:`Refused`.

    Errors that a package of ``_HARDWARE_PACKAGES`` raises are not replaced, because the missing GPU may cause them.

    :param but_by: further modules whose errors are not replaced. Each entry is the beginning of a module's name.
    """
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        module = frame.f_globals["__name__"]
        if module.startswith(but_by) or module.split(".")[0] in _HARDWARE_PACKAGES:
            raise
        raise Refused(describe_error(error)) from error


_HARDWARE_PACKAGES = ("torch", "triton", "sgl_kernel", "flashinfer", "deep_gemm", "sglang_moe_patches")
_MODEL_CLASSES = "sglang.srt.models.registry"


def _resolve_arguments(arguments: list[str]) -> tuple[Any, bool]:
    """Return a server's arguments, resolved and checked as in a server's start, and whether the user set
    ``--mem-fraction-static``."""
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    fraction_is_given: list[bool] = []
    from_cli_args = ServerArgs.from_cli_args

    def note_fraction(parsed: Any) -> Any:
        if problem := find_wrong_value(vars(parsed)):
            raise Refused(problem)
        fraction_is_given.append(parsed.mem_fraction_static is not None)
        return from_cli_args(parsed)

    words = io.StringIO()
    ServerArgs.from_cli_args = note_fraction
    try:
        with _translate_refusals(), contextlib.redirect_stderr(words):
            server_args = prepare_server_args(arguments)
    except SystemExit:
        lines = words.getvalue().strip().splitlines() or ["the engine's argument parser ended without a message"]
        raise Refused(_add_near_options(lines[-1].split("error: ")[-1])) from None
    finally:
        ServerArgs.from_cli_args = from_cli_args
    with _translate_refusals():
        if hasattr(server_args, "resolve_once"):  # the constructors of other releases resolve the arguments
            server_args.resolve_once()
        server_args.check_server_args()
    return server_args, fraction_is_given[-1]


AT_LEAST_ONE = (
    *("tp_size", "pp_size", "dp_size", "ep_size", "max_running_requests", "max_total_tokens", "context_length"),
    *("page_size", "nnodes", "max_prefill_tokens"),
)
"""Arguments whose value must be at least 1."""


def find_wrong_value(arguments: Mapping[str, Any]) -> str:
    """Return an error message if an argument has an impossible value, such as ``--tp 0``; empty if no argument has one.

    Some releases accept an impossible value, and fail later while they start.
    """
    fraction = arguments.get("mem_fraction_static")
    if fraction is not None and not 0 < fraction < 1:
        return f"--mem-fraction-static {fraction:g} is not a fraction: give a number above 0 and below 1, such as 0.88"
    for name in AT_LEAST_ONE:
        value = arguments.get(name)
        if isinstance(value, int) and value < 1:
            return f"--{name.removesuffix('_size').replace('_', '-')} {value}: give a number from 1 on"
    chunk = arguments.get("chunked_prefill_size")
    if chunk is not None and chunk != -1 and chunk < 1:
        return f"--chunked-prefill-size {chunk}: give a number of tokens from 1 on, or -1 for prompts in one piece"
    if (offloaded := arguments.get("cpu_offload_gb")) and offloaded < 0:
        return f"--cpu-offload-gb {offloaded}: give a number of GB from 0 on"
    return ""


def _add_near_options(refusal: str) -> str:
    """Return the parser's error message, extended by the options of this release that resemble each unknown option."""
    if "unrecognized arguments" not in refusal:
        return refusal
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = sorted(set(re.findall(r"--[a-z][\w-]*", parser.format_help())))
    for unknown in re.findall(r"--[\w-]+", refusal):
        # A release that splits an option into several options appends to the option's name.
        near = [option for option in options if option.startswith(unknown)]
        near = near or difflib.get_close_matches(unknown, options, n=1, cutoff=0.8)
        refusal += f"; similar in this release of SGLang: {', '.join(near)}" if near else ""
    return refusal


def _answer_query(arguments: list[str], gpu: Gpu, language_model: bool, top_k: int) -> dict[str, Any]:
    claim_gpu(gpu)
    from sglang_moe_patches.core.dead_input import probe

    server_args, fraction_is_given = _resolve_arguments(arguments)
    view = engine.resolve_arguments(server_args)
    # Copy the arguments, because some releases resolve them into a read-only object.
    resolved = dict(vars(view))
    plain = {name: value for name, value in resolved.items() if isinstance(value, int | float | str | bool | None)}
    plans = _apply_changes(server_args)
    mode = eligibility.KV_SIZING.read()
    skip_reason = eligibility.skip_reason(mode or "auto", resolved, os.environ) or ""
    beside = "the part outside the language model" if language_model else ""
    if view.speculative_algorithm not in (None, "NGRAM") and not _drafts_with_own_layer(view):
        beside = "a draft model"
    fit = stock_fit = None
    sampling: dict[str, Any] = {}
    layer, unknown, decisions = None, "", {}
    try:
        # The engine may have no class for the language model alone. This does not mean that it refuses the whole model.
        with _translate_refusals(but_by=(_MODEL_CLASSES,) if language_model else ()):
            model, config = _build_model(server_args, view, gpu)
            stages = engine_pools.stage_bounds(view.pp_size, config.hf_text_config.num_hidden_layers)
        (by_stage, own_draft), layer = _count_weight_bytes(model, stages), _describe_layer(model)
        # The stage with the most weights has the least free memory. All stages get as many KV cache tokens as this
        # stage.
        stage = max(range(len(stages)), key=by_stage.__getitem__)
        weights = max(0, by_stage[stage] - int((resolved.get("cpu_offload_gb") or 0) * 2**30))
        room = Fit(
            gpu.memory - engine_pools.HELD_BYTES,
            weights,
            view.mem_fraction_static,
            fraction_is_given,
            beside,
            context=int(config.context_len),
            limited=view.max_total_tokens is not None,
        )
        lays_out = plans["fp4-weights"].status in patch.ACTIVE
        experts = next(iter(runners.find_layers(model)), None)
        moe_layers = _count_moe_layers(model, *stages[stage])
        rooms = [
            replace(room, loading=found.kept_bytes, layout=found.transient)
            for found in (predict_loading(experts, moe_layers, patched=patched) for patched in (False, lays_out))
        ]
        sizes = bool(mode) and not skip_reason
        gc.freeze()  # the engine collects garbage now, and looking at all imported objects would take a second
        asking = partial(_ask_pools, server_args, view, model, config, stage)
        stock_fit, why_not_pools = asking(rooms[0], sizes=False)
        fit = stock_fit
        if sizes or rooms[0] != rooms[1]:
            fit, why_not_pools = asking(rooms[1], sizes=sizes)
        sampling = {
            "vocabulary": int(config.vocab_size),
            "layers": stages[stage][1] - stages[stage][0],
            "captured": captured_requests(resolved),
            "newer_graphs": graph_settings(resolved, "decode") is not None,
            "draft_bytes": own_draft if _drafts_with_own_layer(view) else 0,
        }
        skip_reason = skip_reason or why_not_pools
        # Each data-parallel rank computes a chunk at the same time.
        tokens = chunk_tokens(resolved) * attention_ranks(resolved)
        if layer is not None:
            built = patch.BuiltModel(model, tokens, top_k, partial(_read_tiles, tokens=tokens))
            active_changes = [
                change for change in CHANGES if change.decide and plans[change.name].status in patch.ACTIVE
            ]
            decisions = {change.name: asdict(change.decide(built)) for change in active_changes if change.decide}
            own = chunk_tokens(resolved)
            graphs = _prefill_graphs(resolved)
            traced = bool(graphs and graphs[0] == "piecewise" and own <= graphs[1] and _prefills_in_graphs(resolved))
            inner = (layer["top_k"] or top_k) * layer["intermediate"]
            hidden = int(config.hf_text_config.hidden_size)
            for decision in decisions.values():
                drop_impossible_effects(
                    decision, traced=traced, ranks=attention_ranks(resolved), inner=inner, hidden=hidden
                )
    except Refused as error:
        raise ModelRefused(str(error)) from error
    except Exception as error:
        unknown = describe_error(error)
    return {
        "resolved": plain,
        "layer": layer,
        "unknown": unknown,
        "changes": [
            {"name": name, "status": str(plan.status), "reason": plan.reason, "decision": decisions.get(name)}
            for name, plan in plans.items()
        ],
        "kv_sizing": {
            **{"mode": mode, "skip_reason": skip_reason, "given": fraction_is_given},
            "unknown": fit.unknown if fit else unknown,
        },
        "fit": fit and engine_pools.describe(fit),
        "stock_fit": stock_fit and engine_pools.describe(stock_fit),
        "sampling": sampling,
        "engine_drops": probe.has_engine_offer(),
        "float_logits": _has_float_logits(),
        "prefill_graphs": _prefill_graphs(resolved),
        "prefills_in_graphs": _prefills_in_graphs(resolved),
        "copied_outputs": _copied_fp8_outputs(),
    }


_TRACED = "prefills run in piecewise CUDA graphs, in which layers do not offer their dead input"
_TOO_SMALL = "the dead input has only the rank's own tokens, so it is too small for the gathered tokens of all ranks"


def drop_impossible_effects(decision: dict[str, Any], *, traced: bool, ranks: int, inner: int, hidden: int) -> None:
    """Correct a change's decision about a *dead input*: the memory of a layer's input, which no code reads any more.

    Some changes write their output or their activation into the dead input. In this server, the dead input may be
    missing or too small. The function then removes these effects from the decision.

    :param decision: fields of the change's decision. This function edits the dictionary.
    :param traced: whether prefills run in piecewise graphs. The layers of such a graph offer no dead input.
    :param ranks: number of ranks of data-parallel attention. The layer's input has the tokens of one rank, and the
        activation has the tokens of all ranks.
    :param inner: columns of a token's activations: top-k times the intermediate size.
    :param hidden: columns of the layer's input.
    """
    impossible = set()
    if traced or ranks > 1:
        impossible.add(OUTPUT_IN_DEAD_INPUT)
    if traced or ranks * inner > hidden:
        impossible.add(SCRATCH_IN_DEAD_INPUT)
    if found := impossible & {*decision["effects"]}:
        decision["effects"] = tuple(effect for effect in decision["effects"] if effect not in found)
        decision["reason"] = "; ".join(filter(None, (_TRACED if traced else _TOO_SMALL, decision["reason"])))


def _prefills_in_graphs(resolved: Mapping[str, Any]) -> bool:
    """Return whether the engine would run prefills in prefill graphs. The function assumes that the server captures
    such graphs, and does not check this.

    With a draft model, prefills run eagerly, because they also return hidden states for the draft model.
    """
    return str(resolved.get("speculative_algorithm") or "NGRAM").upper() == "NGRAM"


def _copied_fp8_outputs() -> list[str]:
    """Return the kinds of FP8 quantization for which the engine copies the output of TRT-LLM's kernel into another
    tensor. The engine makes this copy if it passes no output tensor to the kernel.

    The function searches the engine's code for calls that copy an output, and counts these calls. One call, as in
    0.5.17, means that the engine copies only the outputs of experts with one scale for each row ("rows"). Two calls
    mean that it also copies the outputs of experts in FP8 with one scale for each block.
    """
    name = "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm"
    run = (
        getattr(engine.import_module(name), "fused_experts_none_to_flashinfer_trtllm_fp8", None)
        if engine.has_module(name)
        else None
    )
    copies = len(engine.find_calls(run, "symm_output.copy_")) if run else 0
    return ["rows", forward.BLOCKS][:copies]


def _prefill_graphs(resolved: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the kind of a server's prefill graphs, and the number of tokens of the largest prefill graph; ``None`` if
    the server has no prefill graphs."""
    settings = graph_settings(resolved, "prefill")
    if settings is None:  # up to 0.5.13
        off = resolved["disable_cuda_graph"] or resolved["disable_piecewise_cuda_graph"]
        return None if off else ("piecewise", resolved["piecewise_cuda_graph_max_tokens"] or 0)
    return None if settings["off"] else (settings["backend"], settings["max_bs"] or max(settings["bs"] or [0]))


def captured_requests(resolved: Mapping[str, Any]) -> int:
    """Return the number of requests in the largest decode graph; 0 if decodes run without graphs."""
    settings = graph_settings(resolved, "decode")
    if settings is None:  # up to 0.5.13
        return 0 if resolved["disable_cuda_graph"] else int(resolved["cuda_graph_max_bs"] or 0)
    return 0 if settings["off"] else int(settings["max_bs"] or max(settings["bs"] or [0]))


def chunk_tokens(resolved: Mapping[str, Any]) -> int:
    """Return the number of tokens in the largest prefill chunk."""
    chunk = resolved["chunked_prefill_size"] or 0
    return chunk if chunk > 0 else resolved.get("max_prefill_tokens") or 16384


def claim_gpu(gpu: Gpu) -> None:
    """Make PyTorch report GPUs of the given kind, which this machine does not have."""
    # DeepGEMM looks for CUDA's folder when it is imported. It uses the folder only when it compiles.
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    import torch

    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory,
        multi_processor_count=gpu.processors,
        uuid="",
        gcnArchName="",
        is_integrated=gpu.integrated,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_name": gpu.name,
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "mem_get_info": (gpu.memory, gpu.memory),
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "memory_reserved": 0,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    # Some releases move scales to the GPU while they create NVFP4 weights.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    # Nothing is computed, so the compiler is not needed. Importing it takes seconds.
    torch.compile = lambda function=None, **options: function or (lambda other: other)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, unused_imports.stand_in(name))
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = lambda device: None
    import sglang.srt.utils.common as common

    mib = gpu.memory / 2**20
    for name in ("get_nvgpu_memory_capacity", "get_device_memory_capacity"):
        if hasattr(common, name):
            setattr(common, name, lambda *args, **kwargs: mib)


def _ask_pools(
    server_args: Any, resolved: Any, model: Any, config: Any, stage: int, fit: Fit, *, sizes: bool
) -> tuple[Fit, str]:
    """Complete a server's memory figures with the size of the KV cache, and find the reason why kv-sizing would not
    size the KV cache.

    :param fit: memory figures of the server, without the figures of the KV cache.
    :param sizes: whether the server's arguments let kv-sizing size the KV cache. A stock server has no kv-sizing.
    :returns: the fit and the reason, as :func:`.engine_pools.ask` returns them.
    """
    try:
        runner = engine_pools.make_runner(server_args, resolved, config, model, stage)
    except Exception as error:
        return replace(fit, unknown=describe_error(error)), ""
    return engine_pools.ask(runner, fit, sizes=sizes)


def _build_model(server_args: Any, resolved: Any, gpu: Gpu) -> tuple[Any, Any]:
    """Build the model's first layers with fake tensors, as the engine builds them on rank 0.

    :returns: the model with these layers, and the engine's ``ModelConfig`` with all layers.
    """
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from torch._subclasses.fake_tensor import FakeTensorMode

    if engine.has_module("deep_gemm"):
        engine.import_module("deep_gemm").get_num_sms = lambda: gpu.processors  # type: ignore[attr-defined]
    _publish(server_args)
    config = ModelConfig.from_server_args(server_args)
    _leave_out_other_models(config.hf_config.architectures or [])
    layers = config.hf_text_config.num_hidden_layers
    # Each pipeline stage builds only its share of the layers. Ask for so many layers that the first stage has some with
    # experts.
    first = resolved.pp_size * (dense_layers(vars(config.hf_text_config)) + _MOE_LAYERS)
    config.hf_text_config.num_hidden_layers = min(layers, first)
    _keep_attributes_of_fake_tensors()
    _stand_in_for_missing_dispatchers()
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_groups(server_args, resolved, config)
        quantization = loader._get_quantization_config(config, LoadConfig())
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.dtype)
        try:
            with torch.device("cpu"):
                model = loader._initialize_model(config, LoadConfig(), quantization)
        finally:
            torch.set_default_dtype(before)
    config.hf_text_config.num_hidden_layers = layers
    return model, config


def _keep_attributes_of_fake_tensors() -> None:
    """Make parameters store the attributes that the engine passes to their constructors, also if the parameters are
    fake tensors. The engine's models read these attributes.

    The engine has its own parameter classes, which store the attributes. If the data is a fake tensor, PyTorch makes a
    parameter of its plain class instead, which does not store them.
    """
    from sglang.srt.layers.parameter import BasevLLMParameter

    make = BasevLLMParameter.__new__

    def make_with_attributes(cls: Any, data: Any, **given: Any) -> Any:
        made = make(cls, data, **given)
        if type(made) is not cls:
            vars(made).update(given)
        return made

    BasevLLMParameter.__new__ = make_with_attributes


def _stand_in_for_missing_dispatchers() -> None:
    """Make the engine create a stand-in for a layer's dispatcher if an all-to-all package, such as DeepEP, is not
    installed.

    A query does not need the dispatcher, because a dispatcher has no weights and only moves tokens between ranks.
    """
    layer = engine.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    create = getattr(layer, "create_moe_dispatcher", None)

    def create_or_stand_in(*args: Any, **kwargs: Any) -> Any:
        try:
            return create(*args, **kwargs)  # type: ignore[misc]
        except ImportError:
            return unused_imports.stand_in("Dispatcher")()

    if create is not None:
        layer.create_moe_dispatcher = create_or_stand_in  # type: ignore[attr-defined]


def _loaded_element_bytes(model: Any, name: str, parameter: Any) -> int:
    """Return a parameter's bytes per element after the engine has processed the weights.

    The engine changes the size of two kinds of parameters after it has loaded them. ``--quantization fp8`` quantizes
    16-bit weights to one byte. Up to 0.5.13, the scales of DeepSeek-V4's MXFP4 experts are loaded in float32, and then
    converted to one byte.
    """
    size: int = parameter.element_size()
    module, _, own = name.rpartition(".")
    quantization = getattr(model.get_submodule(module), "quant_method", None)
    if type(quantization).__name__.startswith("Mxfp4") and own in ("w13_weight_scale_inv", "w2_weight_scale_inv"):
        return 1
    given = getattr(quantization, "quant_config", None)
    by_loading = size == 2 and own in ("weight", "w13_weight", "w2_weight") and not _is_serialized(given)
    return 1 if by_loading and type(quantization).__name__.startswith("Fp8") else size


def _is_serialized(quantization: Any) -> bool:
    """Return whether the weights in the checkpoint are already in FP8."""
    return bool(getattr(quantization, "is_checkpoint_fp8_serialized", True))


def _drafts_with_own_layer(resolved: Any) -> bool:
    """Return whether the draft model is a layer within the checkpoint of the target model."""
    drafts = resolved.speculative_algorithm in ("EAGLE", "NEXTN")
    return drafts and resolved.speculative_draft_model_path in (None, resolved.model_path)


def _count_weight_bytes(model: Any, stages: list[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the weight bytes on one rank of each pipeline stage, and the weight bytes of a draft model with one layer.

    ``model`` has only the first layers. All weights outside of its layers, such as the embeddings, count for the first
    pipeline stage. The other weights are estimated:

    - Each layer that was not built is assumed to be as large as the average of the last built layers.
    - If there are several stages, the output head of the last stage is assumed to be as large as the embeddings.
    - The draft model is assumed to have one such average layer, and its own embeddings and output head.
    """
    by_layer: dict[int, int] = {}
    outside = embeddings = 0
    for name, parameter in model.named_parameters():
        if name.endswith("_blockscale_swizzled"):  # this tensor replaces the scales, or the engine frees it
            continue
        size = parameter.numel() * _loaded_element_bytes(model, name, parameter)
        if numbered := re.search(r"\blayers\.(\d+)\.", name):
            by_layer[int(numbered[1])] = by_layer.get(int(numbered[1]), 0) + size
        else:
            outside += size
            embeddings += size * ("embed" in name)
    last = [by_layer[index] for index in sorted(by_layer)][-_MOE_LAYERS:]
    average = sum(last) // len(last)
    by_stage = [sum(by_layer.get(layer, average) for layer in range(start, end)) for start, end in stages]
    by_stage[0] += outside
    if len(stages) > 1:
        by_stage[-1] += embeddings
    return by_stage, average + outside


def _count_moe_layers(model: Any, start: int, end: int) -> int:
    """Return the number of layers with routed experts in one pipeline stage. Layers that were not built count as layers
    with experts.

    :param start: first layer of the pipeline stage.
    :param end: layer after the last one of the stage.
    """
    experts = runners.find_layers(model)
    built: dict[int, bool] = {}
    for name, module in model.named_modules():
        numbered = re.search(r"\blayers\.(\d+)\b", name)
        if numbered and type(module).__name__ != "PPMissingLayer":
            built[int(numbered[1])] = built.get(int(numbered[1]), False) or any(module is each for each in experts)
    return sum(built.get(layer, True) for layer in range(start, end))


def _leave_out_other_models(architectures: list[str]) -> None:
    """Keep the engine from importing the modules of other models, because importing all of them takes seconds. The
    engine still imports each module that contains a name of ``architectures``."""
    from sglang.srt import models

    files = [path for folder in models.__path__ for path in Path(folder).glob("*.py")]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files}
    others = {name for name, text in texts.items() if not any(each in text for each in architectures)}
    if len(others) < len(files):  # if no file names the classes, the engine itself reports the error
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(others)))


def _publish(server_args: Any) -> None:
    """Publish the server's arguments, as the engine's processes do before they load a model."""
    from sglang.srt import server_args as module
    from sglang.srt.layers.moe import initialize_moe_config

    try:
        from sglang.srt.runtime_context import SpawnRanks, publish
    except ImportError:
        module.set_global_server_args_for_scheduler(server_args)
    else:
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    # Releases that publish the arguments read the published arguments here, and take no parameter.
    initialize_moe_config(*[server_args][: len(inspect.signature(initialize_moe_config).parameters)])


_MOE_LAYERS = 4
"""Number of MoE layers that the engine query builds. In some models, the kinds of layers repeat every two or four
layers, so four layers contain each kind."""


def _make_groups(server_args: Any, resolved: Any, config: Any) -> None:
    """Make the server's process groups, as the engine does on rank 0. The groups are fake and do not communicate."""
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = resolved.tp_size * resolved.pp_size
    torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    _make_groups_fake(torch.distributed, parallel_state)
    parallel_state.init_distributed_environment(world_size=world, rank=0, local_rank=0, backend="fake")
    _call_with_known_arguments(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size=resolved.tp_size,
        attention_data_parallel_size=resolved.dp_size if resolved.enable_dp_attention else 1,
        pipeline_model_parallel_size=resolved.pp_size,
        expert_model_parallel_size=resolved.ep_size,
    )
    _call_with_known_arguments(initialize_dp_attention, server_args=server_args, model_config=config)


def _call_with_known_arguments(function: Any, **arguments: Any) -> None:
    """Call a function of the engine. Arguments that the function does not have in this release are left out."""
    taken = engine.list_parameters(function)
    function(**{name: value for name, value in arguments.items() if name in taken})


def _make_groups_fake(distributed: Any, parallel_state: Any) -> None:
    """Make every later process group of the engine a fake group, which opens no connections between GPUs."""
    new_group, init = distributed.new_group, parallel_state.GroupCoordinator.__init__
    signature = inspect.signature(init)

    def fake_group(ranks: Any = None, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    def without_links(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        for name in bound.signature.parameters:
            if name.startswith("use_"):
                bound.arguments[name] = False
        init(*bound.args, **bound.kwargs)

    distributed.new_group, parallel_state.GroupCoordinator.__init__ = fake_group, without_links


_SHARED_EXPERTS = ("shared_experts", "shared_expert", "shared_mlp", "share_expert")
"""Names under which the engine's MoE blocks store their shared experts."""


def _describe_layer(model: Any) -> dict[str, Any] | None:
    """Return a description of the model's first MoE layer; ``None`` if the model has no MoE layer."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    from sglang_moe_patches.core.dead_input import probe

    modules = dict(model.named_modules())
    families = (facts.family for _, dead in probe.probe_stacks(model) for _, facts, _ in dead.layers)
    family = next(families, "")
    for name, experts in modules.items():
        if not isinstance(experts, FusedMoE):
            continue
        block = modules[name.rpartition(".")[0]]
        quantization = runners.find_quantization(experts)
        config = experts.moe_runner_config
        return {
            "runner": runners.find_runner(experts),
            "method": type(quantization).__name__,
            "blocks": bool(getattr(quantization, "block_quant", False)),
            "mxfp4": bool(getattr(quantization, "is_fp4_expert", False)),
            "experts": config.num_experts,
            "top_k": config.top_k,
            "intermediate": config.intermediate_size_per_partition,
            "shared_experts": any(getattr(block, name, None) is not None for name in _SHARED_EXPERTS),
            "family": family,
            "in_place": runners.is_in_place(experts),
        }
    return None


def _read_tiles(experts: Any, tokens: int) -> dict[str, int] | None:
    """Return the tile sizes of Triton's second GEMM, from the engine's configuration file for this GPU; ``None`` if the
    tile sizes are not known."""
    import torch
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as configs

    first, second = (getattr(experts, name, None) for name in ("w13_weight", "w2_weight"))
    if first is None or second is None or first.dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return None
    quantization = runners.find_quantization(experts)
    in_blocks = getattr(quantization, "block_quant", False)
    by_channel = "channel" in str(getattr(getattr(quantization, "weight_quant", None), "strategy", "")).lower()
    config, (down_config, _) = configs.try_get_optimal_moe_config(
        tuple(first.shape),
        tuple(second.shape),
        experts.moe_runner_config.top_k,
        configs.get_config_dtype_str(torch.bfloat16, use_fp8_w8a8=first.dtype == torch.float8_e4m3fn),
        tokens,
        block_shape=quantization.quant_config.weight_block_size if in_blocks else None,
        per_channel_quant=by_channel,
        return_down_config=True,
    )
    return {name: size for name, size in (down_config or config).items() if type(size) is int}


def _has_float_logits() -> bool:
    """Return whether DeepSeek's router computes float32 logits in a prefill. The function reads the engine's code: the
    last branch of ``MoEGate.forward`` is the one that runs in a prefill."""
    gate = engine.import_module(f"sglang.srt.models.{DEEPSEEK}").MoEGate.forward
    named = [call for name in ("F.linear", "linear_bf16_fp32") for call in engine.find_calls(gate, name)]
    last = max(named, key=lambda call: call.lineno, default=None)
    return last is not None and "linear_bf16_fp32" in ast.unparse(last.func)


def _apply_changes(server_args: Any) -> dict[str, patch.Plan]:
    """Install the changes that have a ``decide`` function. Return a :class:`.patch.Plan` for every change: its status
    in this server, and the reason.

    When the engine builds the model with the installed changes, ``decide`` inspects the model. The other changes are
    not installed.
    """
    selected = patch.read_selected_names(CHANGES)
    applied = patch.apply([change for change in CHANGES if change.decide], selected, server_args)
    return {
        change.name: applied.get(change.name) or patch.plan_for(change, selected, server_args) for change in CHANGES
    }


if __name__ == "__main__":
    main()
