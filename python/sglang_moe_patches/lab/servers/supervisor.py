"""A command and everything it starts, which end when the process that wanted them does, however that comes.

A server is dozens of processes in sessions and groups of their own. :class:`Supervised` starts a supervisor between it
and us (``python -m sglang_moe_patches.lab.servers.supervisor COMMAND...``), which adopts every process that loses its
parent, so that none can leave the family, and holds the reading end of a pipe. The writing end is ours: whether we
close it, are interrupted, or are killed with SIGKILL, the supervisor reads its end and ends the whole family.

It ends it gently first. The command gets SIGTERM; whoever is left after a while gets SIGKILL, those last who clean up
behind others once these are gone (Python's resource tracker, torch's). An engine ends its own trackers with SIGKILL, so
what the family had in shared memory is noted before, and what nobody has any more is removed after. Temporary files
are in a folder of the family's own, which goes with it: some engines' sockets are in nobody's charge. Where we were
killed, our folders go as well, and what must not be lost goes where we would have put it.
"""

from __future__ import annotations

import ctypes
import getpass
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from sglang_moe_patches.lab.servers.folders import Scratch, clear, remove
from sglang_moe_patches.lab.servers.interrupts import SIGNALS

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
GENTLE_S = 6.0
"""How long the command may take after SIGTERM: SGLang looks every five seconds whether it came."""
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""In the command lines of processes that remove what others have left in shared memory, once these are gone."""
CLEANING_S = 5.0
OURS_S = 20.0
"""How long a supervisor may take for all that before we do it ourselves."""
ON_PURPOSE = b"."
"""What a supervisor reads before the end of its pipe, unless we were killed."""
PATIENCE_S = 120.0
"""How long killed processes may take to go: a GPU's driver frees their memory first."""


class StillRunning(RuntimeError):
    """Processes outlived SIGKILL; the message names them."""


class Supervised:
    """``command``, running under a supervisor of its own.

    :param environment: the whole environment of the process.
    :param output: file that takes its standard output and standard error.
    :param scratch: our folders, which the supervisor clears if we are killed.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        output: IO[bytes],
        *,
        cwd: str = ".",
        scratch: Sequence[Scratch] = (),
    ) -> None:
        self._temporary = _temporary_folder(environment)
        left = [[str(each.folder), each.keep_in and str(each.keep_in)] for each in scratch]
        own = json.dumps({"temporary": self._temporary, "scratch": left})
        # A session of its own: Ctrl-C in a terminal reaches us alone.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, own, *command],
            env=_with_temporary(environment, self._temporary),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._root = psutil.Process(self._supervisor.pid)
        self._ended = False

    def exit_code(self) -> int | None:
        """Of the command, negative for the signal that ended it; ``None`` while it runs."""
        return self._supervisor.poll()

    def end(self) -> None:
        """End the command and every process it started. May be called again.

        :raises StillRunning: some are still there after ``PATIENCE_S``.
        """
        if self._ended:
            return
        assert self._supervisor.stdin is not None
        if not self._supervisor.stdin.closed:
            with suppress(BrokenPipeError):  # it has ended already
                self._supervisor.stdin.write(ON_PURPOSE)
                self._supervisor.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(OURS_S)
        left = end_family(self._root, PATIENCE_S)
        if left:
            raise StillRunning(f"still running after {PATIENCE_S:.0f} s: {', '.join(map(_described, left))}")
        self._supervisor.wait()
        if self._temporary:  # where the supervisor could not
            remove(Path(self._temporary))
        self._ended = True


LONGEST_SOCKET = 107 - len("/pymp-12345678/listener-12345678")
"""Characters of a folder in which whatever makes sockets there still can: their paths have 107 at most."""


def _temporary_folder(environment: dict[str, str]) -> str | None:
    """A new folder in the place where the command would put its temporary files; ``None``: there cannot be one."""
    with suppress(OSError):
        folder = tempfile.mkdtemp(prefix="moe-", dir=environment.get("TMPDIR") or None)
        if len(folder) <= LONGEST_SOCKET:
            return folder
        os.rmdir(folder)
    return None


def _with_temporary(environment: dict[str, str], folder: str | None) -> dict[str, str]:
    """``environment`` with temporary files in ``folder``; but PyTorch's compiled kernels stay where they are.

    A server that compiles them anew chooses by timing, and may choose others than the last, which round otherwise.
    """
    if folder is None:
        return environment
    kept = {}
    with suppress(KeyError, OSError):  # a user without a name
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        kept["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.path.dirname(folder), f"torchinductor_{user}")  # its default
    return {**kept, **environment, "TMPDIR": folder}


def family(root: psutil.Process) -> list[psutil.Process]:
    """Every process below ``root`` or in its session, and ``root`` itself, without us and without zombies."""
    found = {}
    if root.is_running():  # and its number is not somebody else's by now
        with suppress(psutil.NoSuchProcess):
            found = {process.pid: process for process in [root, *root.children(recursive=True)]}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == root.pid:
                found[process.pid] = process
    return [process for pid, process in found.items() if pid != os.getpid() and _alive(process)]


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} ({' '.join(process.cmdline())[:80] or process.name()})"
    return str(process.pid)


def end_family(root: psutil.Process, patience_s: float) -> list[psutil.Process]:
    """Kill the family of ``root``, again and again until nobody new has come, ``root`` after all others: it adopts.

    :returns: who is left after ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    while members := family(root):
        _kill([process for process in members if process.pid != root.pid] or members)
        if time.monotonic() > deadline:
            return members
        time.sleep(0.02)
    return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def end_gently(root: psutil.Process, command: subprocess.Popen[bytes]) -> None:
    """End the family of ``root``, whose first process is ``command``, with time to clean up: see the module."""
    if command.poll() is None:
        with suppress(ProcessLookupError):
            command.terminate()
        with suppress(subprocess.TimeoutExpired):
            command.wait(GENTLE_S)
    deadline = time.monotonic() + PATIENCE_S
    while others := [each for each in family(root) if each.pid != root.pid and not _cleans_up(each)]:
        _kill(others)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    deadline = time.monotonic() + CLEANING_S
    while [each for each in family(root) if each.pid != root.pid] and time.monotonic() < deadline:
        time.sleep(0.02)


def _cleans_up(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return any(name in line for name in CLEANERS)
    return False


# --- Shared memory ----------------------------------------------------------------------------------------------------

SHARED = Path("/dev/shm")


def _shared() -> dict[Path, int]:
    """Our user's files in shared memory, with their inodes."""
    found = {}
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        with suppress(OSError):
            seen = path.stat()
            if seen.st_uid == os.getuid():
                found[path] = seen.st_ino
    return found


def _mapped(pids: Iterable[int]) -> set[int]:
    """Inodes of what these processes have of it. Not the names: a semaphore is mapped before it has its own."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                if f" {SHARED}/" in line:
                    found.add(int(line.split()[4]))
    return found


def _remove_shared(left: dict[Path, int]) -> None:
    """Those that are still there and that nobody has."""
    there = _shared()
    left = {path: inode for path, inode in left.items() if there.get(path) == inode}
    if left:
        in_use = _mapped(psutil.pids())
        for path, inode in left.items():
            if inode not in in_use:
                with suppress(OSError):
                    path.unlink()


# --- The process ------------------------------------------------------------------------------------------------------


def _main(own: str, command: list[str]) -> int:
    asked: list[int] = []
    for number in SIGNALS:  # handlers, not SIG_IGN, which the command would inherit
        signal.signal(number, lambda signum, frame: asked.append(signum))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = _shared()
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(error, file=sys.stderr)
        return 127
    killed = False
    while server.poll() is None and not asked:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            killed = os.read(sys.stdin.fileno(), 1) != ON_PURPOSE
            break
    code = server.poll()
    root = psutil.Process()
    mapped = _mapped(each.pid for each in family(root))
    left = {path: inode for path, inode in _shared().items() if before.get(path) != inode and inode in mapped}
    end_gently(root, server)
    end_family(root, PATIENCE_S)
    _remove_shared(left)
    folders = json.loads(own)
    if folders["temporary"]:
        remove(Path(folders["temporary"]))
    for folder, keep_in in folders["scratch"] if killed else ():
        clear(Scratch(Path(folder), keep_in and Path(keep_in)))
    return server.wait() if code is None else code


if __name__ == "__main__":
    code = _main(sys.argv[1], sys.argv[2:])
    if code < 0:  # ended by a signal: end the same way, so that whoever waits for us reads the same
        if -code in SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
