"""Fork server for the servers of tests. The processes of such a server start faster, because slow packages are imported
once.

Python imports this module at its start if this folder is in ``PYTHONPATH``. In a process that becomes a server's
launcher, the module imports ``PACKAGES``, which contain neither the engine nor this project's package. It then starts
the fork server of ``multiprocessing`` as a fork of the launcher. Every process that the engine spawns is forked from
the fork server.

A forked process differs from a spawned process in two ways: its parent is not the launcher, and all processes of a
server have the same hash seed.
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

PR_SET_PDEATHSIG = 1  # option of prctl(2): the process is killed when its parent ends
PACKAGES = (
    *("torch", "torch._dynamo", "torchvision", "torchao.quantization", "triton", "transformers.modeling_utils"),
    *("transformers.processing_utils", "scipy.optimize", "openai.types.responses", "aiohttp", "fastapi", "uvicorn"),
    *("xgrammar", "timm", "cutlass.cute", "flashinfer"),
)
"""Packages of an engine process that take longest to import."""


def fork(path: bytes, command: Sequence[str], kept: Sequence[int]) -> int:
    """Stand-in for ``multiprocessing.util.spawnv_passfds``, which starts the fork server as a new Python process. The
    stand-in forks this process instead, and runs the code in the command's last argument.

    :param kept: file descriptors that stay open in the fork.
    :returns: the process id of the fork.
    """
    if process := os.fork():
        return process
    kept = sorted({0, 1, 2, *kept})
    for this, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(this + 1, following)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # An engine process that fails sends SIGQUIT to its parent, which should be the launcher. Pass the signal on to it.
    signal.signal(signal.SIGQUIT, lambda *received: os.kill(os.getppid(), signal.SIGQUIT))
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL))
    try:
        exec(command[-1], {})
    finally:
        os._exit(1)


def hand_over_environment() -> None:
    """Send the launcher's environment variables to each process that the fork server forks. The process replaces its
    own environment with them.

    Without this step, a process would have the environment from the start of the fork server. Later changes in the
    launcher would be missing.
    """
    from multiprocessing import spawn

    get_preparation_data, prepare = spawn.get_preparation_data, spawn.prepare

    def prepare_with_environment(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop("environ"))
        prepare(data)

    spawn.get_preparation_data = lambda name: {**get_preparation_data(name), "environ": dict(os.environ)}
    spawn.prepare = prepare_with_environment  # type: ignore[assignment]


def serve_forks() -> None:
    """Import the slow packages and start the fork server."""
    from multiprocessing import context, forkserver, resource_tracker, util

    gc.disable()  # the imports create many objects, and no garbage
    for package in PACKAGES:
        with suppress(ImportError):
            importlib.import_module(package)
    # A process can set its title only if this package saw the environment before `hand_over_environment` cleared it.
    with suppress(ImportError):
        importlib.import_module("setproctitle").getproctitle()
    gc.freeze()  # later collections skip these objects, in this process and in its forks
    gc.enable()
    hand_over_environment()
    resource_tracker.ensure_running()  # the resource tracker is a spawned process, not a fork
    spawn, util.spawnv_passfds = util.spawnv_passfds, fork  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
    # A static method, because uvicorn starts its workers by the method of the process itself.
    context.SpawnProcess._Popen = staticmethod(context.ForkServerProcess._Popen)  # type: ignore[assignment]


if "sglang.launch_server" in sys.orig_argv[:3]:
    serve_forks()
