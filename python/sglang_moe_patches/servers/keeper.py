"""A command and everything it starts, which end when the process that wanted them does, however that comes.

A server is dozens of processes in sessions and groups of their own. :class:`Kept` starts a keeper between it and us
(``python -m sglang_moe_patches.servers.keeper COMMAND...``), which adopts every process that loses its parent, so
that none can leave the family, and holds the reading end of a pipe. The writing end is ours: whether we close it, are
interrupted, or are killed with SIGKILL, the keeper reads its end and ends the whole family.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO

import psutil

from sglang_moe_patches.servers.interrupts import SIGNALS

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
PATIENCE_S = 120.0
"""How long killed processes may take to go: a GPU's driver frees their memory first."""


class StillRunning(RuntimeError):
    """Processes outlived SIGKILL; the message names them."""


class Kept:
    """``command``, running under a keeper of its own.

    :param environment: the whole environment of the process.
    :param output: file that takes its standard output, and standard error with ``join_error``.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], output: IO[bytes], *, join_error: bool, cwd: str = "."
    ) -> None:
        # A session of its own: Ctrl-C in a terminal reaches us alone.
        self._keeper = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, *command],
            env=environment,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if join_error else None,
            start_new_session=True,
        )
        self._root = psutil.Process(self._keeper.pid)
        self._ended = False

    def exit_code(self) -> int | None:
        """Of the command, negative for the signal that ended it; ``None`` while it runs."""
        return self._keeper.poll()

    def end(self) -> None:
        """End the command and every process it started. May be called again.

        :raises StillRunning: some are still there after ``PATIENCE_S``.
        """
        if self._ended:
            return
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        left = end_family(self._root, PATIENCE_S)
        if left:
            raise StillRunning(f"still running after {PATIENCE_S:.0f} s: {', '.join(map(_described, left))}")
        self._keeper.wait()
        self._ended = True


def family(root: psutil.Process) -> list[psutil.Process]:
    """Every process below ``root`` or in its session, and ``root`` itself, without us and without zombies."""
    found = {}
    if root.is_running():  # and its number is not somebody else's by now
        with suppress(psutil.NoSuchProcess):
            found = {process.pid: process for process in [root, *root.children(recursive=True)]}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == root.pid:
                found[process.pid] = process
        except (ProcessLookupError, PermissionError):
            continue
    return [process for pid, process in found.items() if pid != os.getpid() and _alive(process)]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:80] or process.name()})"
    except psutil.Error:
        return str(process.pid)


def end_family(root: psutil.Process, patience_s: float) -> list[psutil.Process]:
    """Kill the family of ``root``, again and again until nobody new has come, ``root`` after all others: it adopts.

    :returns: who is left after ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    while members := family(root):
        others = [process for process in members if process.pid != root.pid]
        for process in others or members:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > deadline:
            return members
        time.sleep(0.02)
    return []


def _main(command: list[str]) -> int:
    asked: list[int] = []
    for number in SIGNALS:  # handlers, not SIG_IGN, which the command would inherit
        signal.signal(number, lambda signum, frame: asked.append(signum))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(error, file=sys.stderr)
        return 127
    while server.poll() is None and not asked:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            break
    code = server.poll()
    end_family(psutil.Process(), PATIENCE_S)
    return server.wait() if code is None else code


if __name__ == "__main__":
    code = _main(sys.argv[1:])
    if code < 0:  # ended by a signal: end the same way, so that whoever waits for us reads the same
        if -code in SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
