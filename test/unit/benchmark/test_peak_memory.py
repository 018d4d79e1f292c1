"""benchmark/whole/peak_memory.py: what is kept of a forward."""

from __future__ import annotations

import pytest
from sglang_moe_patches.lab.observers.events import Memory, Process
from whole import peak_memory


def test_a_run_keeps_few_points_of_its_line():
    line = [clock % 997 for clock in range(10_000)]
    kept = peak_memory.shortened(Process((), Memory("cuda", 997)), line)
    assert kept["peak_forward_bytes"] == 997
    assert len(kept["line"]) <= peak_memory.LINE_POINTS
    assert max(kept["line"]) == 996
    with pytest.raises(SystemExit, match="observing failed"):
        peak_memory.shortened(Process((), failure="observing failed: ..."), None)
