"""GPU tests of KV buffers that reserve addresses and map memory later. Mapped memory is zero, and CUDA graphs stay
valid.
"""

from __future__ import annotations

import pytest
import torch
from sglang_moe_patches.memory.kv_sizing.address_space import CudaMemory, ElasticBuffer, OutOfMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ROWS, MB = 200_000, 1 << 20


@pytest.fixture
def memory():
    torch.zeros(1, device="cuda")  # creates the CUDA context, which the driver's functions need
    return CudaMemory(0)


@pytest.mark.parametrize(
    ("shape", "axis"), [((ROWS, 8, 128), 0), ((2, ROWS, 8, 128), 1), ((ROWS // 64, 64 * 132), 0)], ids=str
)
def test_mapped_memory_is_zero_and_is_freed_by_unmapping(shape, axis, memory):
    free = torch.cuda.mem_get_info()[0]
    buffer = ElasticBuffer(shape, torch.bfloat16, axis, memory)
    assert torch.cuda.mem_get_info()[0] == free  # reserved addresses use no memory
    rows = shape[axis]
    for want in (rows // 10, rows // 2, rows):
        buffer.map_rows(want)
        mapped = buffer.tensor.narrow(axis, 0, want)
        assert not mapped.narrow(axis, want // 2, want - want // 2).any()
        mapped.fill_(float("nan"))
    assert free - torch.cuda.mem_get_info()[0] >= buffer.backing_bytes(rows)
    torch.cuda.synchronize()
    assert buffer.unmap_from(rows // 3) == buffer.backing_bytes(rows) - buffer.backing_bytes(rows // 3)
    assert buffer.tensor.narrow(axis, 0, rows // 3).isnan().all()
    kept = set(buffer._mapped)
    buffer.map_rows(rows)
    new = sorted(buffer._mapped - kept)
    whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(buffer.tensor.untyped_storage())
    granules = whole.view(-1, memory.granularity)
    assert not granules[new].any()  # memory that is mapped again is zero
    del granules, whole
    torch.cuda.synchronize()
    buffer.release()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


def test_mapping_more_memory_than_is_free_fails_and_changes_nothing(memory):
    free = torch.cuda.mem_get_info()[0]
    buffer = ElasticBuffer((2 * free // MB, MB), torch.uint8, 0, memory)
    buffer.map_rows(100)
    mapped, left = set(buffer._mapped), torch.cuda.mem_get_info()[0]
    with pytest.raises(OutOfMemory):
        buffer.map_rows(buffer.rows)
    assert (buffer._mapped, torch.cuda.mem_get_info()[0]) == (mapped, left)
    buffer.release()


def test_a_graph_writes_into_memory_mapped_after_its_capture(memory):
    buffer = ElasticBuffer((ROWS, 1024), torch.float32, 0, memory)
    buffer.map_rows(1000)
    slots, values = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.ones(4, 1024, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffer.tensor.index_copy_(0, slots, values)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.tensor.index_copy_(0, slots, values)
    buffer.map_rows(ROWS)
    slots.copy_(torch.tensor([5, 999, 100_000, ROWS - 1]))
    graph.replay()
    assert buffer.tensor[slots].eq(1).all()
    assert not buffer.tensor[ROWS - 2].any()
    torch.cuda.synchronize()
    buffer.release()
