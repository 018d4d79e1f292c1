"""What every benchmark script does before it measures anything."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from common.history import Block, History, Moment
from sglang_moe_patches.lab.observers.events import Memory, Process
from whole import peak_memory

FOLDER = Path(__file__).parents[3] / "benchmark"
SCRIPTS = [
    f"{folder}/{path.stem}"
    for folder in ("changes", "memory", "whole")
    for path in (FOLDER / folder).glob("[a-z]*")
    if path.suffix == ".py"
]


def run(monkeypatch, script, *arguments) -> str | int | None:
    monkeypatch.setattr(sys, "argv", ["benchmark", script, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches(script, monkeypatch, capsys):
    assert run(monkeypatch, script, "--help") == 0
    said = capsys.readouterr().out
    assert said.count(f"python benchmark {script}") > 1, "no example beside the usage"
    assert "--json FILE" in said


def test_an_unknown_benchmark_is_answered_with_those_that_are_known(monkeypatch, capsys):
    assert run(monkeypatch, "changes/nothing") == 2
    said = capsys.readouterr().err
    assert all(script in said for script in (*SCRIPTS, "tiny_moe/mutations"))


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("changes/weight_shuffle", ()),
        ("changes/weight_shuffle", ("--tune", "--quick")),
        ("changes/overhead", ("servers",)),
        ("whole/peak_memory", ("--tp", "4")),
        ("whole/peak_memory", ("--quick", "--runner", "marlin")),
        ("changes/mori_rows", ("kernel",)),
        *(("memory/segments", ()), ("memory/serving", ()), ("whole/soak", ())),
    ],
)
def test_where_a_gpu_is_needed_and_missing_there_is_one_line(script, arguments, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, script, *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(script.split("/")[1])
    assert "needs a GPU" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("script", ["changes/weight_shuffle", "changes/cutedsl_memory"])
def test_a_model_that_does_not_divide_is_named(script, monkeypatch, capsys):
    assert run(monkeypatch, script, "--models", "deepseek-v3-fused") == 2
    assert "deepseek-ai/DeepSeek-V3: 257 experts of intermediate size 2048 do not divide by" in capsys.readouterr().err


def test_a_run_keeps_the_busiest_moment_and_few_points_of_its_line():
    sizes = ((1, "low"), (3, "first"), (3, "last"), (2, "after"))
    moments = tuple(Moment(size, (Block(size, (name,), 0),)) for size, name in sizes)
    line = tuple((clock, clock % 997) for clock in range(10_000))
    kept = peak_memory.shortened(Process((), Memory("cuda", 997)), History(line, moments, moments[0]))
    assert kept["peak_forward_bytes"] == 997
    assert [block["code"] for block in kept["at_kernel"]["blocks"]] == [("last",)]
    assert len(kept["line"]) <= peak_memory.LINE_POINTS
    assert max(kept["line"]) == 996
    with pytest.raises(SystemExit, match="observing failed"):
        peak_memory.shortened(Process((), failure="observing failed: ..."), None)


def test_what_allocated_memory_stands_beside_each_other_and_adds_up():
    def moment(total, **blocks):
        return {"at_kernel": {"bytes": total, "blocks": [{"bytes": b, "code": [c]} for c, b in blocks.items()]}}

    memory = {"stock": moment(5e6, ours=2e6, theirs=4e6), "patched": moment(2e6, ours=2e6)}
    rows = peak_memory.alive({"figures": {"memory": memory}}, "at_kernel").splitlines()[2:]
    assert rows == [
        "| `theirs` | 4.0 | - |",
        "| `ours` | 2.0 | 2.0 |",
        "| `released: memory from before the forward` | -1.0 | - |",
        "| **sum** | **5.0** | **2.0** |",
    ]


def test_a_share_that_does_not_divide_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run(monkeypatch, "whole/peak_memory", "--model", "qwen3-30b", "--shard", "4") == 2
    assert capsys.readouterr().err == ("peak_memory.py: moe_intermediate must be a positive multiple of 128, got 192\n")
    assert run(monkeypatch, "whole/peak_memory", "--shard", "5") == 2
    assert "moonshotai/Kimi-K2.5: moe_intermediate 2048 does not divide by 5" in capsys.readouterr().err
