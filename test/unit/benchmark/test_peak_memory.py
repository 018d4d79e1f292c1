"""benchmark/whole/peak_memory.py: what is kept of a forward."""

from __future__ import annotations

import pytest
from sglang_moe_patches.lab.observers.events import Memory, Process
from whole import peak_memory


def test_a_run_that_was_not_observed_has_no_figures():
    assert peak_memory.check_record(Process((), Memory("cuda", 997)))["peak_forward_bytes"] == 997
    for process, why in ((None, "observed no forward"), (Process((), failure="observing failed"), "observing failed")):
        with pytest.raises(SystemExit, match=why):
            peak_memory.check_record(process)
