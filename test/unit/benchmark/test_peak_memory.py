"""Test of ``benchmark/whole/peak_memory.py``: an incomplete record of a server's forward passes is an error."""

from __future__ import annotations

import pytest
from sglang_moe_patches.lab.observers.events import Memory, Process
from whole import peak_memory


def test_a_server_without_a_complete_record_is_an_error():
    assert peak_memory.check_record(Process((), Memory("cuda", 997)))["peak_forward_bytes"] == 997
    for process, error in (
        (None, "recorded no forward pass"),
        (Process((), failure="observing failed"), "observing failed"),
    ):
        with pytest.raises(SystemExit, match=error):
            peak_memory.check_record(process)
