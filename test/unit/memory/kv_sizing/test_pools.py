"""Which buffers of an engine's pools are ours, and what ends it where one is not known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.memory.kv_sizing import pools as module
from sglang_moe_patches.memory.kv_sizing.address_space import OutOfMemory
from sglang_moe_patches.memory.kv_sizing.pools import ElasticPools, Unknown, sized_for, unknown_pool_reason
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts
from tells_memory import HostMemory

RULE, TOP, PAGE = TokenCounts(6400), TokenCounts(64_000), 64
HYBRID = TokenCounts(6400, 6400, 1280), TokenCounts(64_000, 64_000, 12_800)


def a_pool(name, **tensors):
    made = type(name, (), {})()
    vars(made).update(tensors, mem_usage=0.0)
    return made


def zeros(*shape, dtype=torch.bfloat16, **more):
    return torch.zeros(shape, dtype=dtype, device="cpu", **more)


def tokens(size, page):
    return size + page


def build(make, rule=RULE, top=TOP, page=PAGE, *, table="ReqToTokenPool", allocator="TokenToKVPoolAllocator", **state):
    """Pools that are made as the engine makes them, for ``top``."""
    made = ElasticPools(HostMemory(), rule, top, page)
    requests = a_pool(table, req_to_token=torch.zeros(100, 5000, dtype=torch.int32), **state)
    parts = lambda pool: (pool, requests, type(allocator, (), {})())  # noqa: E731
    return made, made.build(make, parts, "cpu")


def mha(size, page=PAGE, layers=2):
    keys = [zeros(size + page, 4, 8) for _ in range(layers)]
    return a_pool("MHATokenToKVPool", k_buffer=keys, v_buffer=[zeros(size + page, 4, 8) for _ in range(layers)])


def mapped_bytes(buffer):
    return len(buffer.memory._mapped) * HostMemory.granularity


@pytest.mark.parametrize(
    ("make", "page", "rows"),
    [
        pytest.param(lambda: mha(TOP.tokens), PAGE, [(6464, 0)] * 4, id="keys and values"),
        pytest.param(lambda: mha(TOP.tokens, 1), 1, [(6401, 0)] * 4, id="pages of one token"),
        pytest.param(
            lambda: a_pool("MLATokenToKVPool", kv_buffer=[zeros(TOP.tokens + PAGE, 1, 576)]),
            PAGE,
            [(6464, 0)],
            id="latents",
        ),
        pytest.param(
            lambda: a_pool("MHATokenToKVPool", kv_buffer=[zeros(2, TOP.tokens + PAGE, 4, 8)]),
            PAGE,
            [(6464, 1)],
            id="keys and values in one tensor",
        ),
        pytest.param(
            lambda: a_pool("MHATokenToKVPool", k_buffer=[zeros((TOP.tokens + PAGE) // PAGE, 4, PAGE, 8)]),
            PAGE,
            [(101, 0)],
            id="pages before heads",
        ),
        pytest.param(
            lambda: a_pool(
                "DSATokenToKVPool",
                kv_buffer=[zeros(TOP.tokens + PAGE, 1, 576)],
                index_k_with_scale_buffer=[zeros((TOP.tokens + PAGE + 1) // PAGE, PAGE * 132, dtype=torch.uint8)],
            ),
            PAGE,
            [(6464, 0), (101, 0)],
            id="an indexer's keys by pages",
        ),
        pytest.param(
            lambda: a_pool(
                "MHATokenToKVPoolFP4",
                k_buffer=[zeros(TOP.tokens + PAGE, 4, 4, dtype=torch.uint8)],
                k_scale_buffer=[zeros(TOP.tokens + PAGE, 2, dtype=torch.uint8)],
            ),
            PAGE,
            [(6464, 0), (6464, 0)],
            id="FP4 with scales",
        ),
    ],
)
def test_the_tokens_of_the_rule_have_memory_and_no_more(make, page, rows):
    made, pool = build(make, page=page)
    tensors = list(module._tensors_of(pool))
    granule = HostMemory.granularity
    assert len(tensors) == len(rows)
    expected = 0
    for buffer, (mapped, axis) in zip(made._buffers, rows, strict=True):
        tensor = buffer.memory.tensor
        row_bytes = tensor.stride(axis) * tensor.element_size()
        planes = tensor.shape[0] if axis else 1
        assert not tensor.narrow(axis, 0, mapped).any()  # else this process ends
        least, most = planes * mapped * row_bytes, planes * (mapped * row_bytes + 2 * granule)
        assert least <= mapped_bytes(buffer) <= most
        expected += least
    assert expected <= sum(map(mapped_bytes, made._buffers)) == made.bytes_behind(RULE)
    assert pool.mem_usage * (1 << 30) == expected  # what the engine says of as many tokens


def windows(full, window):
    parts = {"full_kv_pool": mha(full), "swa_kv_pool": mha(window, layers=3)}
    mapping = torch.zeros(full + PAGE + 1, dtype=torch.int64)  # of one dimension: by the addresses, once
    return a_pool("SWAKVPool", **parts, full_to_swa_index_mapping=mapping)


def test_both_parts_of_a_sliding_window_cache_grow_in_the_engines_ratio():
    rule, top = HYBRID
    made, pool = build(lambda: windows(top.full, top.window), rule, top, allocator="SWATokenToKVPoolAllocator")
    assert {(each.part, each.memory.rows) for each in made._buffers} == {("tokens", 64_064), ("window", 12_864)}
    grown = made.counts_for(35_250)
    assert grown == (35_200, 35_200, 7040)
    made.map(grown)
    for part, size in (("full_kv_pool", 35_200), ("swa_kv_pool", 7040)):
        assert not getattr(pool, part).k_buffer[0][: size + PAGE].any()
    assert sum(map(mapped_bytes, made._buffers)) == made.bytes_behind(grown)
    usage = [pool.full_kv_pool.mem_usage, pool.swa_kv_pool.mem_usage]
    rows = 4 * (35_200 + PAGE) + 6 * (7040 + PAGE)  # keys and values of two layers, and of three
    assert sum(usage) * (1 << 30) == rows * 4 * 8 * 2
    assert made.counts_for(3200) == (3200, 3200, 640)


@given(st.integers(0, 70_000), st.integers(0, 50_000_000))
def test_as_many_tokens_as_fit_and_not_a_page_more(now, budget):
    made = ElasticPools(HostMemory(), RULE, TOP, PAGE)
    made.build(lambda: mha(TOP.tokens), lambda pool: (pool, a_pool("ReqToTokenPool"), ALLOCATOR), "cpu")
    fits = made.tokens_within(budget)
    assert fits % PAGE == 0
    assert fits == 0 or made.bytes_behind(made.counts_for(fits)) <= budget
    assert fits == TOP.tokens or made.bytes_behind(made.counts_for(fits + PAGE)) > budget


ALLOCATOR = type("TokenToKVPoolAllocator", (), {})()


def test_what_cannot_be_mapped_in_one_buffer_is_mapped_in_none(monkeypatch):
    made, _ = build(lambda: mha(TOP.tokens))
    before, last = sum(map(mapped_bytes, made._buffers)), made._buffers[-1].memory
    monkeypatch.setattr(last, "map_rows", lambda rows: (_ for _ in ()).throw(OutOfMemory("no more")))
    with pytest.raises(OutOfMemory):
        made.map(made.counts_for(12_800))
    assert (sum(map(mapped_bytes, made._buffers)), made.counts) == (before, RULE)


def other(size):
    pool = mha(size)
    pool.something = torch.zeros(3, size // 7, 9, device="cpu")
    return pool


@pytest.mark.parametrize(
    ("make", "more", "why"),
    [
        (lambda: a_pool("QSATokenToKVPool", k=[zeros(64_064, 8)]), {}, "KV caches of the kind QSATokenToKVPool"),
        (lambda: mha(64_000), {"table": "DecodeReqToTokenPool"}, "request tables of the kind DecodeReqToTokenPool"),
        (lambda: mha(64_000), {"allocator": "UnifiedAllocator"}, "allocators of the kind UnifiedAllocator"),
        (
            lambda: a_pool("SWAKVPool", full_kv_pool=mha(64_000), odd_kv_pool=a_pool("OddTokenToKVPool")),
            {},
            "KV caches with a OddTokenToKVPool",
        ),
        (lambda: a_pool("MHATokenToKVPool"), {}, "makes its buffers in a way that is not known"),
        (lambda: other(64_000), {}, "a tensor of 3x9142x9 in a MHATokenToKVPool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_known_is_named_and_nothing_of_ours_stays(make, more, why, monkeypatch):
    released = []
    release = module.ElasticBuffer.release
    monkeypatch.setattr(module.ElasticBuffer, "release", lambda buffer: released.append(buffer) or release(buffer))
    made = []
    original = ElasticPools.__init__
    monkeypatch.setattr(ElasticPools, "__init__", lambda pools, *args: made.append(pools) or original(pools, *args))
    with pytest.raises(Unknown, match=why):
        build(make, **more)
    assert made[0]._buffers == []
    assert not any(each._mapped for each in released)


def test_states_of_requests_stay_as_they_are():
    states = [torch.zeros(4, 100, 300, 20, device="cpu")]
    mamba = a_pool("MambaPool", conv=states)
    made, pool = build(
        lambda: a_pool("HybridLinearKVPool", full_kv_pool=mha(64_000), mamba_pool=mamba),
        table="HybridReqToTokenPool",
        mamba_pool=mamba,
    )
    assert len(made._buffers) == 4
    assert pool.mamba_pool.conv[0] is states[0]


def test_host_tensors_and_small_ones_are_the_engines():
    def make():
        pool = mha(64_000)
        pool.pinned = torch.zeros(64_064, 2, pin_memory=False, device="meta")
        pool.lengths = torch.zeros(64_064, dtype=torch.int64)
        return pool

    made, pool = build(make)
    assert len(made._buffers) == 4
    assert pool.pinned.device.type == "meta"


@pytest.mark.parametrize(("pool", "table", "why"), [("MLATokenToKVPool", "ReqToTokenPool", ""), ("X", "Y", "X are")])
def test_a_class_is_known_by_its_name(pool, table, why):
    assert why in unknown_pool_reason(pool, table)
    assert bool(unknown_pool_reason(pool, table)) == bool(why)


class Sizes:
    """As the engine's from 0.5.16 on: frozen."""

    __struct_fields__ = ("max_total_num_tokens", "swa_max_total_num_tokens", "max_running_requests")

    def __init__(self, **given):
        vars(self).update(given)


def test_the_engine_is_told_the_top_and_keeps_its_own_numbers():
    rule, top = HYBRID
    runner = SimpleNamespace(
        max_total_num_tokens=6400, full_max_total_num_tokens=6400, swa_max_total_num_tokens=1280, other=1
    )
    with sized_for(runner, {}, rule, top) as told:
        assert told == {}
        assert vars(runner) == {
            "max_total_num_tokens": 64_000,
            "full_max_total_num_tokens": 64_000,
            "swa_max_total_num_tokens": 12_800,
            "other": 1,
        }
    assert (runner.max_total_num_tokens, runner.swa_max_total_num_tokens) == (6400, 1280)
    given = Sizes(max_total_num_tokens=6400, swa_max_total_num_tokens=None, max_running_requests=7)
    with sized_for(runner, {"sizes": given, "x": 2}, rule, top) as told:
        assert (told["sizes"].max_total_num_tokens, told["sizes"].max_running_requests, told["x"]) == (64_000, 7, 2)
    assert vars(given)["max_total_num_tokens"] == 6400


def test_a_draft_with_other_numbers_is_not_ours():
    runner = SimpleNamespace(max_total_num_tokens=64)
    with pytest.raises(Unknown, match="has 64 tokens"), sized_for(runner, {}, RULE, TOP):
        pass
