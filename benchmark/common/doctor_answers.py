"""Run ``doctor --model`` for many servers, with one import of the engine for each GPU model.

An engine query of ``doctor`` is a process of its own, and most of its time is the import of the engine. This module
saves these imports with forks:

1. One process imports the packages that do not look for a GPU.
2. For each GPU model, a fork of that process pretends to have this GPU and imports the engine.
3. Each query is a fork of the second process.

Everything else is ``doctor``'s own code.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from sglang_moe_patches.lab.predict import config, engine_query, model_report

PACKAGES = (
    "torch",
    "transformers.modeling_utils",
    "transformers.processing_utils",
    "fastapi",
    "openai.types.responses",
)
"""Third-party packages whose import is slow and does not look for a GPU."""
#: Names of the modules that every query imports.
PRELOADED = (
    *("sglang.srt.server_args", "sglang.srt.model_loader.loader", "sglang.srt.models.registry"),
    *("sglang.srt.layers.moe.fused_moe_triton.layer", "sglang_moe_patches.core.dead_input.probe"),
)
SELECTED = {"SGLANG_MOE_PATCHES": "all", "SGLANG_MOE_PATCHES_KV_SIZING": "auto"}
"""Environment variables that select every change, kv-sizing too."""
#: Default function that :func:`call_for_servers` calls for each server.
EXAMINE = "common.doctor_answers:examine"


def call_for_servers(
    servers: list[dict[str, Any]], function: str = EXAMINE
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Call a function for each server. Yield pairs of the server's description and the function's result.

    :param servers: descriptions of servers, with the keys ``model``, ``config``, ``gpu`` (``doctor``'s name of the GPU
        model), ``flags`` and ``env``.
    :param function: ``MODULE:NAME`` of the function. The function takes a server's description. It runs in a process
        that pretends to have the server's GPU.
    """
    environ = model_report.query_environment() | SELECTED
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    gpus = dict.fromkeys(server["gpu"] for server in servers)
    by_gpu = [server for gpu in gpus for server in servers if server["gpu"] == gpu]
    with tempfile.TemporaryFile("w+") as questions:
        questions.writelines(json.dumps(server) + "\n" for server in by_gpu)
        questions.seek(0)
        command = [sys.executable, "-m", "common.doctor_answers", function]
        with subprocess.Popen(command, stdin=questions, stdout=subprocess.PIPE, env=environ, text=True) as process:
            assert process.stdout is not None
            for server, line in zip(by_gpu, process.stdout, strict=True):
                yield server, json.loads(line)


def examine(server: dict[str, Any]) -> dict[str, Any]:
    """Run ``doctor --model`` for a server.

    :returns: ``doctor``'s report. If ``doctor`` makes no report, the dictionary has only the key ``refused`` with
        ``doctor``'s reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(server["config"]), encoding="utf-8")
        try:
            return model_report.examine(folder, server["flags"], server["gpu"])
        except (config.NoConfig, model_report.CannotAdvise, model_report.CannotAsk) as error:
            return {"refused": str(error).replace(folder, server["model"])}


def main() -> None:
    (function,) = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine prints to stderr, because stdout is only for the results
    servers = [json.loads(line) for line in sys.stdin]
    gc.disable()  # imports leave no garbage, and garbage collections would slow them down
    for name in PACKAGES:
        importlib.import_module(name)
    for gpu, gpu_servers in itertools.groupby(servers, key=lambda server: server["gpu"]):
        if not (child := os.fork()):
            status = 1
            try:
                _answer_all(gpu, function, gpu_servers, out)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"doctor_answers: the process for the GPU {gpu} failed; its error stands above")


def _answer_all(gpu: str, function: str, servers: Iterable[dict[str, Any]], out: TextIO) -> None:
    """Pretend to have a GPU. Call the function for each server, and write each result as a line of JSON."""
    if gpu in engine_query.GPUS:
        engine_query.claim_gpu(engine_query.GPUS[gpu])
        for name in PRELOADED:
            importlib.import_module(name)
        gc.freeze()  # else the engine's garbage collection in each fork would copy all memory
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    engine_query.run_query = _run_query_in_fork
    for server in servers:
        before = dict(os.environ)
        os.environ.update(server["env"])
        print(json.dumps(call(server)), file=out, flush=True)
        os.environ.clear()
        os.environ.update(before)


def _run_query_in_fork(query: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run an engine query in a fork of this process. It replaces ``engine_query.run_query``, which starts a new
    interpreter.
    """
    with ExitStack() as opened:
        question, out, err = (opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        question.write(query)
        question.seek(0)
        if not (child := os.fork()):
            os.environ.clear()
            os.environ.update(environ)
            for descriptor, file in enumerate((question, out, err)):
                os.dup2(file.fileno(), descriptor)
            sys.stdin = os.fdopen(0)
            status = 1
            try:
                engine_query.main()
                status = 0
            except SystemExit as ended:
                print(ended.code, file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([], status, out.read(), err.read())


if __name__ == "__main__":
    main()
