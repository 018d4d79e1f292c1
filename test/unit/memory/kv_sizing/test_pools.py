"""Tests of buffers over reserved addresses, to which memory is mapped later, and of the engine's pools whose tensors
are such buffers. In these tests, the buffers are in CPU memory. Touching an address without memory ends the process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from releases import ROOT
from sglang_moe_patches.memory.kv_sizing import pools as module
from sglang_moe_patches.memory.kv_sizing.address_space import ElasticBuffer, OutOfMemory
from sglang_moe_patches.memory.kv_sizing.pools import ElasticPools, Unknown, substitute_counts
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts
from tells_memory import HostMemory

GRANULE = HostMemory.granularity


class Counting(HostMemory):
    """Stand-in for GPU memory that records the mapped granules. A *granule* is the smallest piece of memory that the
    GPU driver can map. Once ``fails_at`` granules are mapped, mapping another one fails."""

    def __init__(self):
        super().__init__()
        self.granules, self.fails_at = set(), None

    def map(self, address, size):
        if self.fails_at is not None and len(self.granules) >= self.fails_at:
            raise OutOfMemory("no more")
        super().map(address, size)
        new = set(range(address, address + size, GRANULE))
        assert not self.granules & new
        self.granules |= new

    def unmap(self, address, size):
        gone = set(range(address, address + size, GRANULE))
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
                needed |= set(range(first // GRANULE * GRANULE, last // GRANULE * GRANULE + 1, GRANULE))
        assert memory.granules == needed
        assert buffer.backing_bytes(want) == len(needed) * GRANULE == before * GRANULE - given_back
    buffer.release()
    assert memory.granules == set()


def test_without_enough_memory_no_mapping_changes():
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


def test_mapping_and_unmapping_the_tail_keeps_addresses_and_values_and_zeroes_new_memory():
    buffer = ElasticBuffer((4000, 8), torch.float32, 0, HostMemory())
    address = buffer.tensor.data_ptr()
    buffer.map_rows(500)
    buffer.tensor[:500].fill_(7)
    buffer.map_rows(4000)
    assert buffer.tensor[:500].eq(7).all()
    buffer.tensor.fill_(7)
    buffer.unmap_from(1000)
    buffer.map_rows(4000)
    kept_rows = buffer.backing_bytes(1000) // 32  # rows in the granules that stayed mapped, at 32 bytes a row
    assert buffer.tensor[:kept_rows].eq(7).all()
    assert not buffer.tensor[kept_rows:].any()
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
def test_touching_an_unmapped_address_ends_the_process(mapped, row, lives):
    program = [sys.executable, "-c", TOUCH.format(mapped=mapped, row=row)]
    code = subprocess.run(program, cwd=ROOT / "test/standins", check=False).returncode
    assert code == (0 if lives else -signal.SIGSEGV)


# --- An engine's pools -----------------------------------------------------------------------------------------------

RULE, TOP, PAGE = TokenCounts(6400), TokenCounts(64_000), 64
HYBRID = TokenCounts(6400, 6400, 1280), TokenCounts(64_000, 64_000, 12_800)


def make_pool(name, **tensors):
    pool = type(name, (), {})()
    vars(pool).update(tensors, mem_usage=0.0)
    return pool


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, device="cpu")


def build(make, rule=RULE, top=TOP, page=PAGE, *, table="ReqToTokenPool", allocator="TokenToKVPoolAllocator", **state):
    """Build an engine's pools. Their buffers have addresses for ``top`` tokens, but memory only for ``rule`` tokens.
    Return the ``ElasticPools`` that built the pools, and the KV cache pool.
    """
    pools = ElasticPools(HostMemory(), rule, top, page)
    rows = {"req_to_token": torch.zeros(100, 5000, dtype=torch.int32), "free_slots": list(range(1, 100))}
    requests = make_pool(table, **{**rows, **state})

    def parts_of(pool):
        if requests.req_to_token is None:  # ``make`` has made the table together with the pool
            requests.req_to_token = vars(pool).pop("req_to_token")
        return pool, requests, make_pool(allocator)

    return pools, pools.build(make, parts_of, "cpu")


def mha(size=TOP.tokens, page=PAGE, layers=2):
    keys, values = ([zeros(size + page, 4, 8) for _ in range(layers)] for _ in range(2))
    return make_pool("MHATokenToKVPool", k_buffer=keys, v_buffer=values)


def mapped_bytes(buffer):
    return len(buffer.memory._mapped) * HostMemory.granularity


ROWS = TOP.tokens + PAGE


def an_indexers_keys_by_pages():
    rows, keys = zeros(ROWS, 1, 576), zeros((ROWS + 1) // PAGE, PAGE * 132, dtype=torch.uint8)
    return make_pool("DSATokenToKVPool", kv_buffer=[rows], index_k_with_scale_buffer=[keys])


def fp4_with_scales():
    keys, scales = (zeros(ROWS, *shape, dtype=torch.uint8) for shape in ((4, 4), (2,)))
    return make_pool("MHATokenToKVPoolFP4", k_buffer=[keys], k_scale_buffer=[scales])


@pytest.mark.parametrize(
    ("make", "page", "rows"),
    [
        (mha, PAGE, [(6464, 0)] * 4),
        (partial(mha, page=1), 1, [(6401, 0)] * 4),
        (lambda: make_pool("MLATokenToKVPool", kv_buffer=[zeros(ROWS, 1, 576)]), PAGE, [(6464, 0)]),
        (lambda: make_pool("MHATokenToKVPool", kv_buffer=[zeros(2, ROWS, 4, 8)]), PAGE, [(6464, 1)]),
        (lambda: make_pool("MHATokenToKVPool", k_buffer=[zeros(ROWS // PAGE, 4, PAGE, 8)]), PAGE, [(101, 0)]),
        (an_indexers_keys_by_pages, PAGE, [(6464, 0), (101, 0)]),
        (fp4_with_scales, PAGE, [(6464, 0), (6464, 0)]),
    ],
)
def test_only_the_tokens_of_the_rule_have_memory_at_first(make, page, rows):
    pools, pool = build(make, page=page)
    assert len(list(module._tensors_of(pool))) == len(rows)
    expected = 0
    for buffer, (mapped, axis) in zip(pools._buffers, rows, strict=True):
        tensor = buffer.memory.tensor
        row_bytes = tensor.stride(axis) * tensor.element_size()
        planes = tensor.shape[0] if axis else 1
        assert not tensor.narrow(axis, 0, mapped).any()  # touching unmapped memory ends this process
        least, most = planes * mapped * row_bytes, planes * (mapped * row_bytes + 2 * HostMemory.granularity)
        assert least <= mapped_bytes(buffer) <= most
        expected += least
    assert expected <= sum(map(mapped_bytes, pools._buffers)) == pools.backing_bytes(RULE)
    assert pool.mem_usage * (1 << 30) == expected  # the engine reports the memory of the rule's tokens


def windows(full, window):
    parts = {"full_kv_pool": mha(full), "swa_kv_pool": mha(window, layers=3)}
    mapping = torch.zeros(full + PAGE + 1, dtype=torch.int64)  # one-dimensional, so it is made once, for all addresses
    return make_pool("SWAKVPool", **parts, full_to_swa_index_mapping=mapping)


def test_both_parts_of_a_sliding_window_cache_grow_in_the_engines_ratio():
    rule, top = HYBRID
    pools, pool = build(lambda: windows(top.full, top.window), rule, top, allocator="SWATokenToKVPoolAllocator")
    assert {(buffer.part, buffer.memory.rows) for buffer in pools._buffers} == {("tokens", 64_064), ("window", 12_864)}
    grown = pools.counts_for(35_250)
    assert grown == (35_200, 35_200, 7040)
    pools.map(grown)
    for part, size in (("full_kv_pool", 35_200), ("swa_kv_pool", 7040)):
        assert not getattr(pool, part).k_buffer[0][: size + PAGE].any()
    assert sum(map(mapped_bytes, pools._buffers)) == pools.backing_bytes(grown)
    usage = [pool.full_kv_pool.mem_usage, pool.swa_kv_pool.mem_usage]
    rows = 4 * (35_200 + PAGE) + 6 * (7040 + PAGE)  # keys and values: 2 x 2 layers, and 2 x 3 layers
    assert sum(usage) * (1 << 30) == rows * 4 * 8 * 2
    assert pools.counts_for(3200) == (3200, 3200, 640)


@given(st.integers(0, 70_000), st.integers(0, 50_000_000))
def test_tokens_within_a_budget_are_the_most_whole_pages_that_fit(now, budget):
    pools, _ = build(mha)
    fits = pools.tokens_within(budget)
    assert fits % PAGE == 0
    assert fits == 0 or pools.backing_bytes(pools.counts_for(fits)) <= budget
    assert fits == TOP.tokens or pools.backing_bytes(pools.counts_for(fits + PAGE)) > budget


def test_no_buffer_keeps_new_memory_if_one_cannot_be_mapped(monkeypatch):
    pools, _ = build(mha)
    before, last = sum(map(mapped_bytes, pools._buffers)), pools._buffers[-1].memory
    monkeypatch.setattr(last, "map_rows", lambda rows: (_ for _ in ()).throw(OutOfMemory("no more")))
    with pytest.raises(OutOfMemory):
        pools.map(pools.counts_for(12_800))
    assert (sum(map(mapped_bytes, pools._buffers)), pools.counts) == (before, RULE)


def test_free_rows_of_the_request_table_contain_no_unmapped_slot():
    """If three requests run in a CUDA graph for four requests, the graph also reads slots from a free row of the table.
    An earlier request may have left slots in this row whose memory has been unmapped. Therefore free rows are set to
    0."""
    rows = torch.arange(1, 401, dtype=torch.int32).reshape(4, 100)
    pools, _ = build(mha, table="ReqToTokenPool", req_to_token=rows, free_slots=[3, 1])
    pools.unmap_from(pools.counts_for(3200))
    assert [bool(row.any()) for row in rows] == [False, False, True, False]
    assert rows[2].tolist() == list(range(201, 301))


def test_the_smaller_token_count_stays_if_the_driver_fails_to_unmap(monkeypatch):
    """The pools have the smaller number of tokens even if unmapping fails, because some of the slots may have lost
    their memory."""
    pools, _ = build(mha)
    monkeypatch.setattr(pools._buffers[-1].memory, "unmap_from", lambda rows: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        pools.unmap_from(pools.counts_for(3200))
    assert pools.counts == pools.counts_for(3200)


def test_tokens_with_window_give_the_windows_at_least_the_wanted_tokens():
    rule, top = HYBRID
    pools, _ = build(lambda: windows(top.full, top.window), rule, top, allocator="SWATokenToKVPoolAllocator")
    for window in (64, 1000, 1280, 7000):
        tokens = pools.tokens_with_window(window)
        assert pools.counts_for(tokens).window >= window > pools.counts_for(tokens - PAGE).window


ODD = make_pool("OddTokenToKVPool")


def pool_and_table_of_equal_length():
    """Make a KV cache pool and a request table whose tensors have the same number of rows."""
    pool = mha()
    pool.req_to_token = zeros(TOP.tokens // PAGE + 1, 500)
    return pool


@pytest.mark.parametrize(
    ("make", "settings", "why"),
    [
        (lambda: make_pool("QSATokenToKVPool", k=[zeros(64_064, 8)]), {}, "KV caches of the kind QSATokenToKVPool"),
        (mha, {"table": "DecodeReqToTokenPool"}, "request tables of the kind DecodeReqToTokenPool"),
        (mha, {"allocator": "UnifiedAllocator"}, "does not support KV cache allocators of the kind UnifiedAllocator"),
        (lambda: make_pool("SWAKVPool", full_kv_pool=mha(), odd_kv_pool=ODD), {}, "KV caches with a OddTokenToKVPool"),
        (
            pool_and_table_of_equal_length,
            {"req_to_token": None},
            "(ReqToTokenPool) has about as many rows",
        ),
        (
            lambda: make_pool("MHATokenToKVPool"),
            {},
            "does not know how this release's MHATokenToKVPool makes its buffers",
        ),
        (
            lambda: make_pool("MHATokenToKVPool", k=zeros(ROWS, 8), x=zeros(3, 9142, 9)),
            {},
            "does not know the 3x9142x9 tensor in a MHA",
        ),
    ],
)
def test_an_unsupported_pool_is_named_and_its_buffers_are_freed(make, settings, why, monkeypatch):
    released = []
    release = module.ElasticBuffer.release
    monkeypatch.setattr(module.ElasticBuffer, "release", lambda buffer: released.append(buffer) or release(buffer))
    pools_made = []
    original = ElasticPools.__init__
    monkeypatch.setattr(
        ElasticPools, "__init__", lambda pools, *args: pools_made.append(pools) or original(pools, *args)
    )
    with pytest.raises(Unknown, match=re.escape(why)):
        build(make, **settings)
    assert pools_made[0]._buffers == []
    assert not any(each._mapped for each in released)


def test_states_host_tensors_and_small_tensors_get_no_reserved_addresses():
    states = [torch.zeros(4, 100, 300, 20, device="cpu")]
    mamba = make_pool("MambaPool", conv=states)

    def make():
        pinned = torch.zeros(64_064, 2, pin_memory=False, device="meta")
        other_tensors = {"pinned": pinned, "lengths": torch.zeros(64_064, dtype=torch.int64)}
        return make_pool("HybridLinearKVPool", full_kv_pool=mha(), mamba_pool=mamba, **other_tensors)

    pools, pool = build(make, table="HybridReqToTokenPool", mamba_pool=mamba)
    assert len(pools._buffers) == 4
    assert pool.mamba_pool.conv[0] is states[0]
    assert pool.pinned.device.type == "meta"


class Sizes:
    """Stand-in for the engine's frozen class with the sizes of pools, from engine release 0.5.16 on."""

    __struct_fields__ = ("max_total_num_tokens", "swa_max_total_num_tokens", "max_running_requests")

    def __init__(self, **sizes):
        vars(self).update(sizes)


def test_the_engine_builds_pools_for_the_largest_size_and_keeps_its_own_token_counts():
    rule, top = HYBRID
    names = ("max_total_num_tokens", "full_max_total_num_tokens", "swa_max_total_num_tokens", "other")
    runner = SimpleNamespace(**dict(zip(names, (6400, 6400, 1280, 1), strict=True)))
    with substitute_counts(runner, {}, rule, top) as counts:
        assert counts == {}
        assert vars(runner) == dict(zip(names, (64_000, 64_000, 12_800, 1), strict=True))
    assert (runner.max_total_num_tokens, runner.swa_max_total_num_tokens) == (6400, 1280)
    sizes = Sizes(max_total_num_tokens=6400, swa_max_total_num_tokens=None, max_running_requests=7)
    with substitute_counts(runner, {"sizes": sizes, "x": 2}, rule, top) as counts:
        changed_sizes = counts["sizes"]
        assert (changed_sizes.max_total_num_tokens, changed_sizes.max_running_requests, counts["x"]) == (64_000, 7, 2)
    assert vars(sizes)["max_total_num_tokens"] == 6400


def test_a_draft_model_with_other_token_counts_is_not_supported():
    runner = SimpleNamespace(max_total_num_tokens=64)
    with pytest.raises(Unknown, match="has 64 tokens"), substitute_counts(runner, {}, RULE, TOP):
        pass
