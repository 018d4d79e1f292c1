"""Folders of a command that starts servers: for its work, and for what must not be lost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="sglang-moe-patches-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def logs_in(folder: Path) -> dict[str, bytes]:
    """The servers' logs, by file name."""
    return {log.name: log.read_bytes() for log in sorted(folder.glob("*.log"))}


def keep(files: Mapping[str, bytes], output: Path) -> Path:
    """Write the files to ``output``, or where that cannot be, to a new temporary folder.

    :returns: the folder.
    """

    def write(folder: Path) -> Path:
        for name, content in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder

    try:
        return write(output)
    except OSError:
        return write(Path(tempfile.mkdtemp(prefix="sglang-moe-patches-")))
