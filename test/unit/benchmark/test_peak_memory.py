"""benchmark/whole/peak_memory.py: what is kept of a forward, and what allocated it."""

from __future__ import annotations

import pytest
from common.history import Block, History, Moment
from sglang_moe_patches.lab.observers.events import Memory, Process
from whole import peak_memory


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
