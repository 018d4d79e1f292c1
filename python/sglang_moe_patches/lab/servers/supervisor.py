"""Run a command so that all of its processes end with the process that started the command.

Three kinds of processes take part:

- The *owner* is the process that uses :class:`Supervised`, such as ``regress``. The owner starts the supervisor.
- The *supervisor* (``python -m sglang_moe_patches.lab.servers.supervisor``) starts the command, such as a server.
- The *family* is all processes that the command starts. A server has dozens of processes, in several sessions and
  process groups.

If a process of the family loses its parent, the supervisor adopts the process. So no process can leave the family. The
supervisor also reads from a pipe that the owner writes. If the owner closes the pipe or is killed, even with SIGKILL,
the supervisor ends the whole family.

The family ends in steps:

1. The command receives SIGTERM.
2. After a few seconds, the remaining processes receive SIGKILL. Processes that clean up after others (the resource
   trackers of Python and torch) receive SIGKILL last.
3. The supervisor removes the family's shared memory files that no process maps any more. The engine kills its own
   resource trackers, so the trackers cannot remove these files. The supervisor finds the files before step 1, because
   only running processes show which files they map.
4. The supervisor removes the family's own folder for temporary files. The engine leaves some sockets in the folder.
5. If the owner was killed, the supervisor saves the owner's logs and answers, and removes its temporary folders.
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

from sglang_moe_patches.lab.servers.folders import Scratch, clear_scratch, remove
from sglang_moe_patches.lab.servers.interrupts import SIGNALS

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
TERM_TIMEOUT_S = 6.0
"""Seconds from SIGTERM to SIGKILL. SGLang checks every 5 seconds whether SIGTERM arrived."""
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Texts that identify the command line of a *cleaner*: a process that waits until other processes have ended, and then
removes their shared memory."""
CLEANUP_TIMEOUT_S = 5.0
"""Seconds from the end of all other processes until cleaners (:data:`CLEANERS`) receive SIGKILL, if they have
not ended by themselves."""
SUPERVISOR_TIMEOUT_S = 20.0
"""Seconds within which a supervisor must end its family. If the supervisor needs longer, its owner ends the family."""
END_MESSAGE = b"."
"""Byte that an owner writes into the pipe to its supervisor before it closes the pipe. If the owner was killed, the
supervisor reads no such byte."""
KILL_TIMEOUT_S = 120.0
"""Seconds from SIGKILL until a process must have ended. A process ends slowly if the GPU's driver must free the
process's memory."""


class StillRunning(RuntimeError):
    """Raised if processes still run long after SIGKILL. The message names the processes."""


class Supervised:
    """Running command with a supervisor process, which ends all processes of the command.

    :param environment: complete environment of the command.
    :param output: file for the command's standard output and standard error.
    :param cwd: working directory of the command.
    :param scratch: temporary folders of this process. If this process is killed, the supervisor removes them.
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
        to_clear = [[str(entry.folder), entry.keep_in and str(entry.keep_in)] for entry in scratch]
        folders = json.dumps({"temporary": self._temporary, "scratch": to_clear})
        # A new session keeps Ctrl-C in the terminal from reaching the supervisor.
        self._supervisor = subprocess.Popen(
            # -P: the process imports no module from the user's current folder.
            [sys.executable, "-P", "-W", "ignore", "-m", __name__, folders, *command],
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
        """Exit code of the command; ``None`` while the command runs. If a signal ended the command, the exit code is
        the signal's negative number."""
        return self._supervisor.poll()

    def end(self) -> None:
        """End the command and every process that it started. A second call does nothing.

        :raises StillRunning: processes still run ``KILL_TIMEOUT_S`` seconds after SIGKILL.
        """
        if self._ended:
            return
        assert self._supervisor.stdin is not None
        if not self._supervisor.stdin.closed:
            with suppress(BrokenPipeError):  # the supervisor has already ended
                self._supervisor.stdin.write(END_MESSAGE)
                self._supervisor.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(SUPERVISOR_TIMEOUT_S)
        remaining = end_family(self._root, KILL_TIMEOUT_S)
        if remaining:
            raise StillRunning(
                f"these processes are still running {KILL_TIMEOUT_S:.0f} s after SIGKILL; end them before you start "
                f"again: {', '.join(map(_describe, remaining))}"
            )
        self._supervisor.wait()
        if self._temporary:  # the folder still exists if the supervisor could not remove it
            remove(Path(self._temporary))
        self._ended = True


MAX_FOLDER_LENGTH = 107 - len("/pymp-12345678/listener-12345678")
"""Maximum length of the path of a folder for temporary files, in characters. Python's ``multiprocessing`` makes sockets
in the folder, and the path of a socket has at most 107 characters."""


def _temporary_folder(environment: dict[str, str]) -> str | None:
    """Create the folder for the command's temporary files in the command's ``TMPDIR``; ``None`` if the folder cannot be
    created, or if its path would be too long for sockets."""
    with suppress(OSError):
        folder = tempfile.mkdtemp(prefix="moe-", dir=environment.get("TMPDIR") or None)
        if len(folder) <= MAX_FOLDER_LENGTH:
            return folder
        os.rmdir(folder)
    return None


def _with_temporary(environment: dict[str, str], folder: str | None) -> dict[str, str]:
    """Return a copy of the environment with ``folder`` as the folder for temporary files. PyTorch's cache of compiled
    kernels stays in its old folder.

    In the new folder the cache would be empty. A server with an empty cache times kernels, and chooses among them. The
    stock and the patched server could then choose different kernels, which may round differently.
    """
    if folder is None:
        return environment
    child = {**environment, "TMPDIR": folder}
    with suppress(KeyError, OSError):  # the user has no name on this system
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        # This is PyTorch's default folder. The variable is appended: PyTorch sets it again, and a process that sets the
        # first variable of its environment again can no longer set its title.
        child.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(os.path.dirname(folder), f"torchinductor_{user}"))
    return child


def find_family(root: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a family: ``root``, its descendants, and the processes in its session. The result
    contains neither this process nor zombies."""
    processes = {}
    if root.is_running():  # False if the process has ended and another process has its number
        with suppress(psutil.NoSuchProcess):
            processes = {process.pid: process for process in [root, *root.children(recursive=True)]}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == root.pid:
                processes[process.pid] = process
    return [process for pid, process in processes.items() if pid != os.getpid() and _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} ({' '.join(process.cmdline())[:80] or process.name()})"
    return str(process.pid)


def end_family(root: psutil.Process, timeout_s: float) -> list[psutil.Process]:
    """Kill all processes of a family, again and again until no new process appears. ``root`` is killed last, because it
    adopts orphans.

    :returns: processes that still run after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while members := find_family(root):
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
    """End the processes of a family. The command receives SIGTERM. After ``TERM_TIMEOUT_S`` seconds, the remaining
    processes receive SIGKILL, except cleaners (:data:`CLEANERS`). The function then waits for the cleaners, for at most
    ``CLEANUP_TIMEOUT_S`` seconds.

    :param root: the supervisor, which receives no signal.
    :param command: first process of the family.
    """
    if command.poll() is None:
        with suppress(ProcessLookupError):
            command.terminate()
        with suppress(subprocess.TimeoutExpired):
            command.wait(TERM_TIMEOUT_S)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while others := [member for member in find_family(root) if member.pid != root.pid and not _is_cleaner(member)]:
        _kill(others)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    deadline = time.monotonic() + CLEANUP_TIMEOUT_S
    while [member for member in find_family(root) if member.pid != root.pid] and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_cleaner(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return any(name in line for name in CLEANERS)
    return False


# --- Shared memory ----------------------------------------------------------------------------------------------------

SHARED_MEMORY = Path("/dev/shm")


def _shared_files() -> dict[Path, int]:
    """Return the inode of each shared memory file of this user. The key is the file's path."""
    files = {}
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        with suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid():
                files[path] = status.st_ino
    return files


def _mapped_inodes(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the shared memory files that processes map. The files are not compared by path, because a
    process maps a semaphore before the semaphore's file has its final name."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                if f" {SHARED_MEMORY}/" in line:
                    inodes.add(int(line.split()[4]))
    return inodes


def _remove_shared_files(files: dict[Path, int]) -> None:
    """Remove those shared memory files that no process maps any more.

    :param files: inode of each file. The key is the file's path.
    """
    existing = _shared_files()
    files = {path: inode for path, inode in files.items() if existing.get(path) == inode}
    if files:
        in_use = _mapped_inodes(psutil.pids())
        for path, inode in files.items():
            if inode not in in_use:
                with suppress(OSError):
                    path.unlink()


# --- The supervisor ---------------------------------------------------------------------------------------------------


def _main(folders_json: str, command: list[str]) -> int:
    """Run the command as its supervisor. End the family when the command ends, when a signal arrives, or when the owner
    writes into the pipe, closes the pipe or is killed.

    :param folders_json: JSON object with the folders to remove. ``temporary`` is the folder of the family. ``scratch``
        is a list of the owner's folders, which are removed only if the owner was killed.
    :returns: exit code of the command.
    """
    signals: list[int] = []
    for number in SIGNALS:  # set handlers, because the command would inherit SIG_IGN
        signal.signal(number, lambda signum, frame: signals.append(signum))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = _shared_files()
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(error, file=sys.stderr)
        return 127
    owner_was_killed = False
    while server.poll() is None and not signals:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            owner_was_killed = os.read(sys.stdin.fileno(), 1) != END_MESSAGE
            break
    code = server.poll()
    root = psutil.Process()
    mapped = _mapped_inodes(member.pid for member in find_family(root))
    files = {path: inode for path, inode in _shared_files().items() if before.get(path) != inode and inode in mapped}
    end_gently(root, server)
    end_family(root, KILL_TIMEOUT_S)
    _remove_shared_files(files)
    folders = json.loads(folders_json)
    if folders["temporary"]:
        remove(Path(folders["temporary"]))
    for folder, keep_in in folders["scratch"] if owner_was_killed else ():
        clear_scratch(Scratch(Path(folder), keep_in and Path(keep_in)))
    return server.wait() if code is None else code


if __name__ == "__main__":
    code = _main(sys.argv[1], sys.argv[2:])
    if code < 0:  # a signal ended the command: end by the same signal, so that the owner reads the same exit code
        if -code in SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
