"""``doctor --model`` for many servers, from one import of the engine for each kind of GPU.

An engine query is a process of its own, and importing the engine is most of what it takes. Here a process that was told
of a GPU imports the engine once, and each query is a fork of it; everything else is doctor's own code.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.predict import config, engine_query, model_report

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
    for gpu in dict.fromkeys(server["gpu"] for server in servers):
        mine = [server for server in servers if server["gpu"] == gpu]
        with tempfile.TemporaryFile("w+") as asked:
            asked.writelines(json.dumps(server) + "\n" for server in mine)
            asked.seek(0)
            command = [sys.executable, "-m", "common.doctor_answers", gpu, function]
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
    gpu, function = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints
    if gpu in engine_query.GPUS:
        engine_query.claim_gpu(engine_query.GPUS[gpu])
        for name in PRELOADED:
            importlib.import_module(name)
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    engine_query.run_query = _run_in_a_fork
    for line in sys.stdin:
        server = json.loads(line)
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
