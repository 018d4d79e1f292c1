"""Tests of ``lab/observers/events.py``, which writes, reads and merges the records of a server's processes."""

from __future__ import annotations

from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.observers.events import Act, Acts, ChangeStatus, Memory, MoeInput, Process, merge


def test_a_record_is_read_as_it_was_written(tmp_path) -> None:
    changes = (ChangeStatus("output-buffer", "hardened", "a reason"),)
    memory = Memory("cuda", 1, None, 5, 7, cache_token_bytes=0.5)
    acts = Acts((1,), (Act("columns", None, True, 3, 2, 6),), MoeInput(5, 8, 64, 2))
    process = Process(changes, memory, acts, "")
    events.write(process, tmp_path / "1.json")
    assert events.collect(tmp_path) == process
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]


def test_the_acts_of_all_pipeline_stages_are_merged() -> None:
    first = Acts((1, 2), (Act("columns", 1, False, 5, 3, 9),), MoeInput(5, 8, 64, 2))
    second = Acts((3,), (Act("columns", 1, False, 6, 2, 8), Act("columns", 3, False, 1, 2, 2)), MoeInput(9, 8, 64, 2))
    assert merge([first, second]) == Acts(
        (1, 2, 3), (Act("columns", 1, False, 6, 3, 9), Act("columns", 3, False, 1, 2, 2)), MoeInput(9, 8, 64, 2)
    )
