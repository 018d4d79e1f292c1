"""What the engine itself makes of a published recipe, beside what ``doctor --model`` says of it.

Called in a process that answers as if it had the recipe's GPU: see :mod:`common.doctor_answers`.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from common import doctor_answers
from sglang_moe_patches.core import engine


def compare(recipe: dict[str, Any]) -> dict[str, Any]:
    """``doctor``: its answer; ``engine``: chunk, ranks, runner and quantization, as the engine resolves them."""
    with tempfile.TemporaryFile("w+") as out:
        if not (child := os.fork()):  # what the engine resolves it publishes in its globals
            try:
                json.dump(_resolve(recipe), out)
                out.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        out.seek(0)
        resolved = json.load(out)
    return {"doctor": doctor_answers.examine(recipe), "engine": resolved}


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
        except (SystemExit, Exception) as error:  # a draft that is not at hand, too
            return {"refused": f"{type(error).__name__}: {error}"}
    view = engine.resolved(server_args)
    return {
        "tokens": view.chunked_prefill_size,
        "tp": view.tp_size,
        "ep": view.ep_size,
        "dp": max(view.dp_size, getattr(view, "attn_dp_size", 1) or 1),
        "runner": view.moe_runner_backend,
        "quantization": model.quantization,
    }
