"""Forks the processes of a test's server from one that has imported what is neither the engine nor ours.

Python imports this module when it starts with this folder in ``PYTHONPATH``. A process that becomes a server imports
``PACKAGES`` here and then, before the engine, forks what serves as ``multiprocessing``'s fork server, a process of the
server's own family. What the engine spawns is forked from it. It differs from a spawned process in its parent, which is
not the launcher, and in the seed of hashes, which all processes of the server share.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG = 1  # prctl(2): it ends with the launcher, as what is forked from it ends with it
PACKAGES = (
    *("torch", "torch._dynamo", "torchvision", "torchao.quantization", "triton", "transformers.modeling_utils"),
    *("transformers.processing_utils", "scipy.optimize", "openai.types.responses", "aiohttp", "fastapi", "uvicorn"),
    *("xgrammar", "timm", "cutlass.cute", "flashinfer"),
)
"""Those of an engine process that take longest to import."""


def fork(path: bytes, command: Sequence[str], kept: Sequence[int]) -> int:
    """In the place of ``spawnv_passfds``: the command's code in a fork, which keeps these file descriptors alone."""
    if process := os.fork():
        return process
    kept = sorted({0, 1, 2, *kept})
    for this, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(this + 1, following)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # With it an engine process that fails ends its parent, and means the launcher.
    signal.signal(signal.SIGQUIT, lambda *received: os.kill(os.getppid(), signal.SIGQUIT))
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL))
    try:
        exec(command[-1], {})
    finally:
        os._exit(1)


def hand_over_environment() -> None:
    """As to a spawned process: that of its launcher when it is started, not when the fork server was."""
    from multiprocessing import spawn

    get_preparation_data, prepare = spawn.get_preparation_data, spawn.prepare

    def prepare_with_environment(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop("environ"))
        prepare(data)

    spawn.get_preparation_data = lambda name: {**get_preparation_data(name), "environ": dict(os.environ)}
    spawn.prepare = prepare_with_environment  # type: ignore[assignment]


def serve_forks() -> None:
    from multiprocessing import context, forkserver, resource_tracker, util

    gc.disable()  # thousands of modules are imported, and nothing is thrown away
    for package in PACKAGES:
        with suppress(ImportError):
            importlib.import_module(package)
    gc.freeze()  # nor looked at again, in this process or in its forks
    gc.enable()
    hand_over_environment()
    resource_tracker.ensure_running()  # a process of its own, not a fork
    spawn, util.spawnv_passfds = util.spawnv_passfds, fork  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
    context.SpawnProcess._Popen = context.ForkServerProcess._Popen  # type: ignore[assignment]


if "sglang.launch_server" in sys.orig_argv[:3]:
    serve_forks()
