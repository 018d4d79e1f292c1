"""What the processes that a benchmark starts are given, and what is said while they start."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def variables(*folders: object) -> dict[str, str]:
    """This process's environment without our variables; these folders come first in its ``PYTHONPATH``."""
    ours = ("SGLANG_MOE_PATCHES", "SGLANG_MOE_REFERENCE")
    own = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = [*map(str, folders), *filter(None, [own.get("PYTHONPATH")])]
    return own | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def saying(name: str, every_s: int) -> Callable[[float, str], None]:
    """A server's ``progress``, called twice a second: its last line of output, every so many seconds."""

    def progress(seconds: float, line: str) -> None:
        if round(seconds * 2) % (2 * every_s) == 0:
            print(f"  {name}: {seconds:.0f} s  {line[:140]}", flush=True)

    return progress


@contextmanager
def reading(process: subprocess.Popen[str], take: Callable[[str], None]) -> Iterator[None]:
    """Hand each line that a process prints to ``take``, in a thread; after the block the process is ended."""

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            take(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        reader.join()
