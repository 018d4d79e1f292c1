"""The records that a server's processes write: what is written is what is read."""

from __future__ import annotations

import importlib
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_events import process
from sglang_moe_patches.core import variables
from sglang_moe_patches.lab import observers
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.observers.events import (
    Act,
    Acted,
    Block,
    ChangeStatus,
    History,
    Memory,
    MoeInput,
    Moment,
    Process,
)

MOMENT = Moment(7, (Block(512, ("a.py:1 f: x = y", "b.py"), 3),))


@pytest.mark.parametrize("event", [*process(), events.Failure("no space left")], ids=lambda event: type(event).__name__)
def test_an_event_is_read_as_it_was_written(event: events.Event) -> None:
    line = events.to_json(event)
    assert "\n" not in line
    assert events.event(line) == event
    assert events.event(line.encode()) == event


@given(st.builds(events.Forward, graph=st.booleans(), pools=st.dictionaries(st.text(), st.integers())))
def test_any_forward_is_read_as_it_was_written(forward: events.Forward) -> None:
    assert events.event(events.to_json(forward)) == forward


def test_a_process_is_read_as_it_was_written(tmp_path) -> None:
    changes = (ChangeStatus("output-buffer", "hardened", "a reason"),)
    used = Memory("cuda", 1, None, 5, 7, cache_token_bytes=0.5)
    acts = Acted((1,), (Act("columns", None, True, 3, 2, 6),), MoeInput(5, 8, 64, 2))
    found = Process(changes, used, acts, "", History(((0.0, 512), (0.5, 0)), (MOMENT,), MOMENT))
    events.write(found, tmp_path / "1.json")
    assert events.collect(tmp_path) == found
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]


@pytest.mark.parametrize("line", ['{"event": "none"}', '{"no": "event"}'])
def test_what_is_no_event_is_not_taken_for_one(line: str) -> None:
    with pytest.raises(KeyError):
        events.event(line)


def test_every_observer_is_installed_in_the_same_way() -> None:
    assert [variable for variable, _ in observers.OBSERVERS] == [variables.OBSERVE, variables.PLAN]
    for _, name in observers.OBSERVERS:
        module = importlib.import_module(f"{observers.__name__}.{name}")
        assert list(inspect.signature(module.install).parameters) == ["folder", "plans"]
