"""Tests of ``common.snapshot``, which computes how many bytes each function held at a server's memory peak. It reads
PyTorch's record of allocations."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from common import snapshot


def frame(file, name, line=1):
    return {"filename": file, "name": name, "line": line}


SAMPLER = [
    frame("??", "at::sort"),
    frame("/x/torch/functional.py", "sort"),
    frame("/x/sglang/srt/a/sampler.py", "top_k"),
]
SCHEDULER = frame("/x/sglang/srt/managers/scheduler.py", "run_batch")


def alloc(address, size, frames=()):
    return {"action": "alloc", "addr": address, "size": size, "frames": [*frames, SCHEDULER]}


def free(address):
    return [{"action": "free_requested", "addr": address}, {"action": "free_completed", "addr": address}]


TRACE = [
    *free(9),  # freed memory that was allocated before the record began
    {"action": "segment_alloc", "addr": 1, "size": 1000},
    *(alloc(1, 10), alloc(2, 70, SAMPLER), *free(2)),
    *(alloc(2, 30, SAMPLER), alloc(3, 50, SAMPLER), alloc(4, 5)),  # the peak: 10 + 30 + 50 + 5 = 95 bytes
    *(*free(3), *free(4), alloc(5, 51)),
]


def test_bytes_at_the_peak_are_grouped_by_the_engines_innermost_function():
    expected = {"sampler.py: top_k, line 1": 80, "elsewhere": 15}
    assert snapshot.bytes_at_peak([[alloc(7, 94)], TRACE, []]) == expected
    assert list(snapshot.bytes_at_peak([TRACE])) == list(expected)  # sorted from the largest to the smallest
    assert snapshot.bytes_at_peak([[]]) == {}


@pytest.mark.parametrize("writes", [True, False])
def test_the_engine_records_while_the_block_runs(writes, tmp_path):
    paths = []

    def post(path, body, **more):
        paths.append(path)
        if path == "/stop_profile" and writes:
            (tmp_path / "record" / "1-TP-0-memory.pickle").write_bytes(pickle.dumps({"device_traces": [TRACE]}))

    recording = snapshot.record_allocations(SimpleNamespace(post=post), tmp_path / "record")
    if not writes:
        with pytest.raises(RuntimeError, match="wrote no record"), recording:
            pass
        return
    with recording as sizes:
        assert (paths, sizes) == (["/start_profile"], {})
    assert paths == ["/start_profile", "/stop_profile"]
    assert sum(sizes.values()) == 95
