"""``doctor --model`` for many servers, from one import of the engine for each kind of GPU.

An engine query is a process of its own, and importing the engine is most of what it takes. Here one process imports
packages that ask for no GPU. A fork of it for each kind of GPU is told of that one and imports the engine, and each
query is a fork of that. Everything else is doctor's own code.
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
"""Those of other people that take longest to import, and ask for no GPU then."""
#: What every query imports.
PRELOADED = (
    *("sglang.srt.server_args", "sglang.srt.model_loader.loader", "sglang.srt.models.registry"),
    *("sglang.srt.layers.moe.fused_moe_triton.layer", "sglang_moe_patches.core.dead_input.probe"),
)
SELECTED = {"SGLANG_MOE_PATCHES": "all", "SGLANG_MOE_PATCHES_KV_SIZING": "auto"}
"""Every change, kv-sizing too."""
#: What such a process calls for each server, as ``examine`` does.
EXAMINE = "common.doctor_answers:examine"


def ask_each(servers: list[dict[str, Any]], function: str = EXAMINE) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each server with what ``function`` says of it.

    :param servers: with ``model``, ``config``, ``gpu`` (doctor's name for it), ``flags`` and ``env``.
    :param function: ``MODULE:NAME``, called in a fork of a process with that GPU; takes such a server.
    """
    environ = model_report.query_environment() | SELECTED
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    kinds = dict.fromkeys(server["gpu"] for server in servers)
    mine = [server for gpu in kinds for server in servers if server["gpu"] == gpu]
    with tempfile.TemporaryFile("w+") as asked:
        asked.writelines(json.dumps(server) + "\n" for server in mine)
        asked.seek(0)
        command = [sys.executable, "-m", "common.doctor_answers", function]
        with subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, env=environ, text=True) as process:
            assert process.stdout is not None
            for server, line in zip(mine, process.stdout, strict=True):
                yield server, json.loads(line)


def examine(server: dict[str, Any]) -> dict[str, Any]:
    """What ``doctor --model`` says, or ``refused``: why it says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(server["config"]), encoding="utf-8")
        try:
            return model_report.examine(folder, server["flags"], server["gpu"])
        except (config.NoConfig, model_report.CannotAdvise, model_report.CannotAsk) as error:
            return {"refused": str(error).replace(folder, server["model"])}


def main() -> None:
    (function,) = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints
    servers = [json.loads(line) for line in sys.stdin]
    gc.disable()  # thousands of modules are imported, and nothing is thrown away
    for name in PACKAGES:
        importlib.import_module(name)
    for gpu, asked in itertools.groupby(servers, key=lambda server: server["gpu"]):
        if not (child := os.fork()):
            status = 1
            try:
                _answer(gpu, function, asked, out)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"no answers of a process with a {gpu}")


def _answer(gpu: str, function: str, servers: Iterable[dict[str, Any]], out: TextIO) -> None:
    """In a process that was told of a GPU: a line for each server."""
    if gpu in engine_query.GPUS:
        engine_query.claim_gpu(engine_query.GPUS[gpu])
        for name in PRELOADED:
            importlib.import_module(name)
        gc.freeze()  # the engine collects what it can, which would copy all of this into each fork
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    engine_query.run_query = _run_in_a_fork
    for server in servers:
        before = dict(os.environ)
        os.environ.update(server["env"])
        print(json.dumps(call(server)), file=out, flush=True)
        os.environ.clear()
        os.environ.update(before)


def _run_in_a_fork(asked: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """An engine query, without a new interpreter."""
    with ExitStack() as opened:
        question, out, err = (opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        question.write(asked)
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
