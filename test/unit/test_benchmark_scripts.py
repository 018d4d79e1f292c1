"""What every benchmark script does before it measures anything."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmark"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


def run(monkeypatch, script, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", [f"benchmark/{script}", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches(script, monkeypatch, capsys):
    assert run(monkeypatch, script, "--help") == 0
    said = capsys.readouterr().out
    assert f"benchmark/{script}" in said, "no example"
    assert script == "render.py" or "--json FILE" in said


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("weight_shuffle.py", ()),
        ("weight_shuffle.py", ("--tune", "--quick")),
        ("overhead.py", ("servers",)),
        ("peak_memory.py", ("--tp", "4")),
        ("mori_rows.py", ("kernel",)),
    ],
)
def test_where_a_gpu_is_needed_and_missing_there_is_one_line(script, arguments, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, script, *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(script)
    assert "needs a GPU" in said
    assert said.count("\n") == 1
