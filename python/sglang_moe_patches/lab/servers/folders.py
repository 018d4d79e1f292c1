"""Temporary folders of a command that starts servers, and files that must survive the command."""

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
    """Temporary folder for the length of a ``with`` block.

    :param folder: path of the temporary folder.
    :param keep_in: folder to which the logs and answers are copied if this process is killed; ``None`` if they need not
        be kept.
    """

    folder: Path
    keep_in: Path | None


scratch_folders: list[Scratch] = []
"""Temporary folders that this process uses at the moment. If this process is killed, the supervisor process of its
running server (:mod:`.supervisor`) calls :func:`clear_scratch` for each folder."""


@contextmanager
def scratch(keep_in: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder for the length of a ``with`` block; see :class:`Scratch`."""
    with tempfile.TemporaryDirectory(prefix="sglang-moe-patches-", ignore_cleanup_errors=True) as folder:
        created = Scratch(Path(folder), None if keep_in is None else keep_in.absolute())
        scratch_folders.append(created)
        try:
            yield created.folder
        finally:
            scratch_folders.remove(created)


def clear_scratch(scratch: Scratch) -> None:
    """Copy the logs and answers of a killed process to ``scratch.keep_in``, and remove its temporary folder."""
    if scratch.keep_in is not None and scratch.folder.exists():
        answers = {path.name: path.read_bytes() for path in sorted(scratch.folder.glob("*.json*"))}
        if files := {**logs_in(scratch.folder), **answers}:
            save_files(files, scratch.keep_in)
    remove(scratch.folder)


def remove(folder: Path) -> None:
    """Remove a folder. Retry for 5 s, because another process may still write into it."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def logs_in(folder: Path) -> dict[str, bytes]:
    """Return the content of each server log in a folder. The key is the file's name."""
    return {log.name: log.read_bytes() for log in sorted(folder.glob("*.log"))}


def save_files(files: Mapping[str, bytes], output: Path) -> Path:
    """Write files to ``output``. If writing fails, write the files to a new temporary folder.

    :param files: content of each file. The key is the file's name.
    :returns: folder with the files.
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
