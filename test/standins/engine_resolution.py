"""Comparison of ``doctor --model`` with the engine: both choose the settings of the same published recipe or server.

To *resolve* a recipe means to run the engine's code that replaces unset arguments by the engine's choices. The
functions run in a process that pretends to have the recipe's GPU (:mod:`common.doctor_answers`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import doctor_answers
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing import hooks
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory
from sglang_moe_patches.registry import CHANGES


def compare(recipe: dict[str, Any]) -> dict[str, Any]:
    """Resolve a recipe twice: with ``doctor``, and with the engine.

    :returns: a dictionary with two keys: ``doctor`` has doctor's answer, and ``engine`` has the engine's prefill chunk
        size in tokens, numbers of ranks, MoE runner and quantization.
    """
    return {"doctor": doctor_answers.examine(recipe), "engine": _call_in_fork(_resolve, recipe)}


def compare_kv_sizing(server: dict[str, Any]) -> dict[str, Any]:
    """Decide twice whether kv-sizing sizes a server: with ``doctor``, and with the code of a server's process.

    :returns: a dictionary with two keys: ``doctor`` has doctor's answer, and ``engine`` has the decision of the
        server's code.
    """
    return {"doctor": doctor_answers.examine(server), "engine": _call_in_fork(_decide, server)}


def _call_in_fork(call: Callable[[dict[str, Any]], dict[str, Any]], server: dict[str, Any]) -> dict[str, Any]:
    """Return the result of ``call(server)`` in a fork, because the engine stores resolved arguments in its globals."""
    with tempfile.TemporaryFile("w+") as out:
        if not (child := os.fork()):
            try:
                json.dump(call(server), out)
                out.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        out.seek(0)
        answer: dict[str, Any] = json.load(out)
    return answer


def _decide(server: dict[str, Any]) -> dict[str, Any]:
    """Run kv-sizing's own code for a server, and return its decision: whether kv-sizing sizes the KV cache.

    The code decides in two steps. First ``skip`` reads the server's arguments. If it finds no reason against sizing,
    the hook that gathers facts from all ranks decides.

    :returns: a dictionary with one key: ``sized``; ``skipped`` or ``kept``, with kv-sizing's reason against sizing; or
        ``refused``, with the engine's error for these arguments.
    """
    from sglang.srt.server_args import prepare_server_args

    change = next(change for change in CHANGES if change.name == "kv-sizing")
    for module, hook in change.launcher_hooks:
        if module in sys.modules:
            hook(sys.modules[module], Patcher())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(server["config"]), encoding="utf-8")
        try:
            server_args = prepare_server_args(["--model-path", folder, *server["flags"]])
            if hasattr(server_args, "resolve_once"):
                server_args.resolve_once()
            server_args.check_server_args()
        except (SystemExit, Exception) as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    if skip := change.skip(server_args):
        return {"skipped": skip.reason}
    hooks.ranks.is_rank_0 = lambda: True  # there are no process groups
    hooks.ranks.all_gather = lambda value, kind: [value]
    hooks.engine_rule.measure_launch_memory = lambda maker, arguments, before_gib: LaunchMemory(
        fraction=0.8, free_before_load=100 << 30
    )
    process = hooks.SchedulerHooks()
    process._gather_launch_memory(SimpleNamespace(server_args=server_args, gpu_id=0), 100.0)
    return {"kept": process.reason} if process.reason else {"sized": True}


def _resolve(recipe: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import prepare_server_args

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(recipe["config"]), encoding="utf-8")
        try:
            server_args = prepare_server_args(["--model-path", folder, *recipe["flags"]])
            if hasattr(server_args, "resolve_once"):
                server_args = server_args.resolve_once() or server_args
            model = ModelConfig.from_server_args(server_args)
        except (SystemExit, Exception) as error:  # for example if the draft model is missing
            return {"refused": f"{type(error).__name__}: {error}"}
    view = engine.resolve_arguments(server_args)
    return {
        "tokens": view.chunked_prefill_size,
        "tp": view.tp_size,
        "ep": view.ep_size,
        "dp": max(view.dp_size, getattr(view, "attn_dp_size", 1) or 1),
        "runner": view.moe_runner_backend,
        "quantization": model.quantization,
    }
