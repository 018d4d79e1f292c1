"""The records that a server's processes write: what is written is what is read."""

from __future__ import annotations

from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.observers.events import Act, Acted, ChangeStatus, Memory, MoeInput, Process, of_all


def test_a_process_is_read_as_it_was_written(tmp_path) -> None:
    changes = (ChangeStatus("output-buffer", "hardened", "a reason"),)
    used = Memory("cuda", 1, None, 5, 7, cache_token_bytes=0.5)
    acts = Acted((1,), (Act("columns", None, True, 3, 2, 6),), MoeInput(5, 8, 64, 2))
    found = Process(changes, used, acts, "")
    events.write(found, tmp_path / "1.json")
    assert events.collect(tmp_path) == found
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]


def test_the_layers_of_all_pipeline_stages_are_told_of() -> None:
    one = Acted((1, 2), (Act("columns", 1, False, 5, 3, 9),), MoeInput(5, 8, 64, 2))
    other = Acted((3,), (Act("columns", 1, False, 6, 2, 8), Act("columns", 3, False, 1, 2, 2)), MoeInput(9, 8, 64, 2))
    assert of_all([one, other]) == Acted(
        (1, 2, 3), (Act("columns", 1, False, 6, 3, 9), Act("columns", 3, False, 1, 2, 2)), MoeInput(9, 8, 64, 2)
    )
