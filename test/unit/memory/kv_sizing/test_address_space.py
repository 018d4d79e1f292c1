"""Buffers over reserved addresses, on the CPU: what is not mapped ends whoever touches it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from releases import ROOT
from sglang_moe_patches.memory.kv_sizing.address_space import ElasticBuffer, OutOfMemory
from tells_memory import HostMemory

PAGE = HostMemory.granularity


class Counting(HostMemory):
    """Knows which granules are mapped, and fails where it is told to."""

    def __init__(self):
        super().__init__()
        self.granules, self.fails_at = set(), None

    def map(self, address, size):
        if self.fails_at is not None and len(self.granules) >= self.fails_at:
            raise OutOfMemory("no more")
        super().map(address, size)
        new = set(range(address, address + size, PAGE))
        assert not self.granules & new
        self.granules |= new

    def unmap(self, address, size):
        gone = set(range(address, address + size, PAGE))
        assert gone <= self.granules
        super().unmap(address, size)
        self.granules -= gone


SHAPES = st.tuples(
    st.lists(st.integers(1, 3), max_size=1), st.integers(1, 3000), st.lists(st.integers(1, 40), max_size=2)
)


@given(SHAPES, st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_exactly_the_granules_of_the_first_rows_of_every_plane_are_mapped(parts, shares):
    planes, rows, row = parts
    shape, axis = (*planes, rows, *row), len(planes)
    memory = Counting()
    buffer = ElasticBuffer(shape, torch.int16, axis, memory)
    for share in shares:
        want = int(share * rows)
        buffer.map_rows(want)
        before = len(memory.granules)
        assert not buffer.tensor.narrow(axis, 0, want).isnan().any()
        given_back = buffer.unmap_from(want)
        needed = set()
        if want:
            for plane in buffer.tensor.reshape(-1, rows, *row):
                first, last = plane[0].data_ptr(), plane[want - 1].data_ptr() + plane[want - 1].nbytes - 1
                needed |= set(range(first // PAGE * PAGE, last // PAGE * PAGE + 1, PAGE))
        assert memory.granules == needed
        assert buffer.bytes_behind(want) == len(needed) * PAGE == before * PAGE - given_back
    buffer.release()
    assert memory.granules == set()


def test_where_there_is_not_enough_nothing_changes():
    memory = Counting()
    buffer = ElasticBuffer((3, 5000, 8), torch.float32, 1, memory)
    buffer.map_rows(100)
    before, memory.fails_at = set(memory.granules), len(memory.granules) + 1
    with pytest.raises(OutOfMemory, match="no more"):
        buffer.map_rows(5000)
    assert memory.granules == before
    memory.fails_at = None
    buffer.map_rows(5000)
    assert not buffer.tensor.any()


def test_addresses_and_values_stay_while_the_tail_comes_and_goes_and_new_memory_is_zero():
    buffer = ElasticBuffer((4000, 8), torch.float32, 0, HostMemory())
    address = buffer.tensor.data_ptr()
    buffer.map_rows(500)
    buffer.tensor[:500].fill_(7)
    buffer.map_rows(4000)
    assert buffer.tensor[:500].eq(7).all()
    buffer.tensor.fill_(7)
    buffer.unmap_from(1000)
    buffer.map_rows(4000)
    kept = buffer.bytes_behind(1000) // 32  # rows in the granules that stayed
    assert buffer.tensor[:kept].eq(7).all()
    assert not buffer.tensor[kept:].any()
    assert buffer.tensor.data_ptr() == address


TOUCH = """
import torch
from sglang_moe_patches.memory.kv_sizing.address_space import ElasticBuffer
from tells_memory import HostMemory
buffer = ElasticBuffer((100_000, 8), torch.float32, 0, HostMemory())
buffer.map_rows({mapped})
buffer.tensor[{row}].fill_(1)
"""


@pytest.mark.parametrize(("mapped", "row", "lives"), [(2000, 1999, True), (2000, 50_000, False), (0, 0, False)])
def test_touching_what_is_not_mapped_ends_the_process(mapped, row, lives):
    program = [sys.executable, "-c", TOUCH.format(mapped=mapped, row=row)]
    code = subprocess.run(program, cwd=ROOT / "test/standins", check=False).returncode
    assert code == (0 if lives else -signal.SIGSEGV)
