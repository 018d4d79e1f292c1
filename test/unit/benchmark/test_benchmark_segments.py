"""benchmark/memory/segments.py: what is read from a server's lines and segments."""

from __future__ import annotations

import json

from common import held
from common.held import Line
from memory import segments


def line(reserved: int, peak: int = 0, free: int = 100, allocated: int = 10) -> Line:
    return Line(0.0, "EXTEND", 1, 1, allocated, peak, reserved, free)


def test_what_forwards_took_is_beyond_what_was_there_when_the_first_began():
    lines = [line(20, peak=99, free=80), line(50, peak=25, free=50), line(45, peak=40, free=55)]
    found = held.slack(lines)
    assert (found.tensors, found.reserved, found.lowest_free, found.grown) == (30, 30, 50, 0)
    assert found.slack == 0
    assert held.slack([*lines, line(70, peak=12)]).slack == 20


def test_growth_is_the_second_half_of_the_long_run_against_the_first():
    run = [line(reserved) for reserved in (30, 50, 40, 50)]
    assert held.slack([line(20)], run).grown == 0
    assert held.slack([line(20)], [*run[:3], line(57)]).grown == 7


def test_segments_are_added_up_by_pool_and_kind_the_largest_first():
    one = {"segment_type": "large", "stream": 0, "total_size": 20, "allocated_size": 5}
    snapshot = [one, one, one | {"is_expandable": True}, one | {"segment_pool_id": (0, 3), "total_size": 90}]
    found = [(part["pool"], part["kind"], part["segments"], part["reserved"]) for part in held.parts(snapshot)]
    assert found == [("pool 0.3", "ordinary", 1, 90), ("common", "ordinary", 2, 40), ("common", "expandable", 1, 20)]


def test_lines_and_what_was_asked_are_read_back(tmp_path):
    path = tmp_path / "server.jsonl"
    assert held.read(path) == []
    path.write_text(json.dumps(vars(line(20))) + "\n")
    assert held.read(path) == [line(20)]
    held.ask(path)
    assert (tmp_path / "server.jsonl.ask").exists()
    (tmp_path / "server.jsonl.parts").write_text('{"first": []}\n{"last": [{"pool": "common"}]}\n')
    assert held.answered(path) == {"first": [], "last": [{"pool": "common"}]}


def test_only_the_sizes_that_were_predicted_have_a_prediction():
    sizes = {"model": "kimi-k2.5", "shard": 4, "layers": 14, "chunk": 16384, "tp": 1}
    assert segments.predicted(sizes, "stock") == 15_817
    assert segments.predicted(sizes, "stock-again") is None
    assert segments.predicted(sizes | {"layers": 12}, "stock") is None
