"""What tests of a command that starts servers do with a stand-in for the engine."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sglang_moe_patches import cli


class Command:
    """A command with a model, a place for its report, and a stand-in for the engine on PYTHONPATH.

    :param standin: folder of the stand-in, which notes what happens in ``folder``.
    """

    def __init__(self, name: str, standin: Path, tmp_path: Path, folder: Path) -> None:
        self.standin, self.folder, self.output = standin, folder, tmp_path / "report"
        self.marker = uuid.uuid4().hex
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.arguments = [name, "--model", str(model), "--output", str(self.output)]

    def environment(self, *wrong: str) -> dict[str, str]:
        """:param wrong: what is to go wrong in the stand-in."""
        return {
            "PYTHONPATH": os.pathsep.join([str(self.standin), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "STANDIN_FOLDER": str(self.folder),
            "STANDIN": ",".join(wrong),
            "MARKER": self.marker,
        }

    def run_here(self, monkeypatch: pytest.MonkeyPatch, *more: str, wrong: tuple[str, ...] = ()) -> int:
        """The exit code of the command in this process."""
        for name, value in self.environment(*wrong).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["sglang-moe-patches", *self.arguments, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def processes(self) -> list[psutil.Process]:
        """Those that the command has started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARKER") == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return [process for process in found if process.pid != os.getpid()]

    @contextmanager
    def nothing_left(self) -> Iterator[None]:
        """Of the processes that it starts within the block."""
        yield
        left = self.processes()
        for process in left:
            process.kill()
        assert left == []
