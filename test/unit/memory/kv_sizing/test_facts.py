"""What the engine says of a model runner's pools."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kv_servers import PLAIN_TABLE, a_pool, a_runner
from sglang_moe_patches.memory.kv_sizing import facts, phases
from sglang_moe_patches.memory.kv_sizing.facts import GIB

PLAIN = a_pool("MHATokenToKVPool", mem_usage=2)
WINDOWS = a_pool("SWAKVPool", size_swa=70_000, mem_usage=2)  # addresses, most of which have no memory
TABLE = a_pool("HybridReqToTokenPool", mamba_pool=SimpleNamespace(mem_usage=3))
NUMBERS = {"cache_tokens": 20_000, "requests": 300, "input_tokens": 9999}
STATES = a_pool("HybridLinearKVPool", mem_usage=2), TABLE


@pytest.mark.parametrize(
    ("pools", "kind", "window", "fixed_gib"),
    [
        pytest.param((PLAIN, PLAIN_TABLE), "", (0, 0), 0, id="one KV cache for all layers"),
        pytest.param((WINDOWS, PLAIN_TABLE), "sliding-window", (128, 700), 0, id="sliding windows"),
        pytest.param(STATES, "Mamba", (0, 0), 3, id="states go with requests"),
    ],
)
def test_pools_are_told_by_their_kind(pools, kind, window, fixed_gib):
    allocator = SimpleNamespace(**({"size_swa": 700} if pools[0] is WINDOWS else {}))
    told = facts.server_facts(a_runner(*pools, sliding_window_size=128, token_to_kv_pool_allocator=allocator))
    assert (told.hybrid, told.window, told.window_tokens, told.fixed_bytes) == (kind, *window, fixed_gib * GIB)
    limits = phases.derive_limits({}, told, **NUMBERS)
    assert (limits.window, limits.window_tokens, limits.states) == (*window, kind == "Mamba")


@pytest.mark.parametrize("name", ["decode_cuda_graph_runner", "graph_runner"])
def test_the_largest_captured_decode_is_of_what_was_captured(name):
    for graphs, captured in ((SimpleNamespace(max_bs=144), 144), (None, None)):
        assert facts.server_facts(a_runner(PLAIN, **{name: graphs})).captured == captured


@pytest.mark.parametrize(
    ("told", "gib"),
    [
        ({"graph_mem_usage": 2}, 2),
        ({}, 0),
        ({"graph_memory_usage": {"decode": 2}}, 2),
        ({"graph_memory_usage": {"decode": 1, "target_verify": 2, "prefill": 4, "draft": 8}}, 3),
    ],
    ids=str,
)
def test_graphs_took_what_the_engine_says(told, gib):
    assert facts.graph_bytes(SimpleNamespace(**told)) == gib * GIB
