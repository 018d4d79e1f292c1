"""Folders of a command that starts servers: for its work, and for what must not be lost."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Scratch:
    """A folder for the length of a block.

    :param keep_in: where its logs and answers go if this process is killed meanwhile; ``None``: nowhere.
    """

    folder: Path
    keep_in: Path | None


in_use: list[Scratch] = []
"""Of this process: what is left if it is killed, which a server's supervisor then clears (:func:`clear`)."""


@contextmanager
def scratch(keep_in: Path | None = None) -> Iterator[Path]:
    """A folder for the length of the block; see :class:`Scratch`."""
    with tempfile.TemporaryDirectory(prefix="sglang-moe-patches-", ignore_cleanup_errors=True) as folder:
        made = Scratch(Path(folder), None if keep_in is None else keep_in.absolute())
        in_use.append(made)
        try:
            yield made.folder
        finally:
            in_use.remove(made)


def clear(left: Scratch) -> None:
    """Remove a folder that a killed process has left, and keep what must not be lost."""
    if left.keep_in is not None and left.folder.exists():
        answers = {path.name: path.read_bytes() for path in sorted(left.folder.glob("*.json*"))}
        if files := {**logs_in(left.folder), **answers}:
            keep(files, left.keep_in)
    remove(left.folder)


def remove(folder: Path) -> None:
    """Remove a folder into which somebody may still be writing."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


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
