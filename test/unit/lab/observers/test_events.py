"""The records that a server's processes write: what is written is what is read."""

from __future__ import annotations

from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.observers.events import (
    Act,
    Acted,
    ChangeStatus,
    Memory,
    MoeInput,
    Process,
)


def test_a_process_is_read_as_it_was_written(tmp_path) -> None:
    changes = (ChangeStatus("output-buffer", "hardened", "a reason"),)
    used = Memory("cuda", 1, None, 5, 7, cache_token_bytes=0.5)
    acts = Acted((1,), (Act("columns", None, True, 3, 2, 6),), MoeInput(5, 8, 64, 2))
    found = Process(changes, used, acts, "")
    events.write(found, tmp_path / "1.json")
    assert events.collect(tmp_path) == found
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]
