"""Environment, progress lines and output of the processes that a benchmark starts."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def variables(*folders: object) -> dict[str, str]:
    """Return a copy of this process's environment without this project's variables. Its ``PYTHONPATH`` begins with
    ``folders``.
    """
    prefixes = ("SGLANG_MOE_PATCHES", "SGLANG_MOE_REFERENCE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    paths = [*map(str, folders), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def print_progress(name: str, interval_s: int) -> Callable[[float, str], None]:
    """Make a ``progress`` callback for :class:`~sglang_moe_patches.lab.servers.server.Server`.

    :returns: a function that prints the last line of the server's log every ``interval_s`` seconds. The server calls
        it twice a second.
    """

    def progress(seconds: float, line: str) -> None:
        if round(seconds * 2) % (2 * interval_s) == 0:
            print(f"  {name}: {seconds:.0f} s  {line[:140]}", flush=True)

    return progress


@contextmanager
def read_lines(process: subprocess.Popen[str], handle: Callable[[str], None]) -> Iterator[None]:
    """Call ``handle`` in a thread with each line that the process prints. End the process after the block."""

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            handle(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        reader.join()
