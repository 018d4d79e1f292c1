"""The load that fills a KV cache: what it asks for."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from common import overfill
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.lab.servers.server import ServerFailed
from sglang_moe_patches.memory.kv_sizing.phases import Limits


@given(st.integers(1, 5000), st.integers(0, 10))
def test_random_lengths_lie_between_one_and_the_most(most: int, seed: int) -> None:
    assert 1 <= overfill.random_length(random.Random(seed), most) <= most


def test_a_server_that_ends_under_the_load_is_an_error_and_what_it_answered_stays(monkeypatch) -> None:
    def ends(load: overfill._Load, *given: object) -> None:
        load.answered += 5
        raise ServerFailed("the sized server ended with exit code 1. The end of sized.log:\nCUDA error: out of memory")

    said = ["", "CUDA error: out of memory"]
    monkeypatch.setattr(overfill._Load, "run", ends)
    server = SimpleNamespace(url="http://here", log_text=lambda: said.pop(0))
    outcome = overfill.overfill(server, {"max_total_num_tokens": 5000}, 5000, 1)
    assert outcome["errors"] == ["the sized server ended with exit code 1"]
    assert (outcome["answered"], outcome["out_of_memory"]) == (5, True)


@pytest.mark.parametrize(
    ("info", "ranks"),
    [
        ({"dp_size": 4}, 4),
        ({"dp_size": 1, "attn_dp_size": 2}, 2),  # as 0.5.20 names it
        ({"dp_size": 2, "enable_dp_attention": True}, 2),  # as 0.5.19 does
        ({"attn_dp_size": 2, "enable_dp_attention": True}, 2),  # both, as 0.5.23 does
        ({"dp_size": 4, "attn_dp_size": 2, "enable_dp_attention": True}, 8),
    ],
)
def test_every_data_parallel_rank_is_filled(info, ranks) -> None:
    assert overfill.ranks_of(info) == ranks


def test_requests_with_penalties_are_asked_for_at_once_and_short(monkeypatch) -> None:
    asked = []

    def generate(client, prompts, new_tokens, *, sampling=None, timeout_s=0.0):
        asked.append((len(prompts), {len(each) for each in prompts}, new_tokens, sampling))
        return ""

    monkeypatch.setattr(overfill.Client, "generate", generate)
    server = SimpleNamespace(url="http://here", log_text=lambda: "")
    outcome = overfill.penalized(server, {"max_total_num_tokens": 50_000}, 5000, 256)
    count, lengths, new_tokens, sampling = asked[0]
    assert (count, lengths, outcome["answered"]) == (256, {overfill.PENALIZED_PROMPT_TOKENS}, 257)
    assert new_tokens == overfill.PENALIZED_NEW_TOKENS
    assert {"frequency_penalty", "repetition_penalty", "logit_bias"} <= set(sampling)


@given(st.integers(8, 600), st.integers(128, 40_000), st.integers(1, 4))
def test_what_fills_the_kv_cache_is_let_in_and_wants_more_than_there_is(
    requests: int, share: int, context: int
) -> None:
    sizes = {"requests": requests, "cache_tokens": requests * share, "input_tokens": (context + 1) * share}
    c = Limits(captured=64, vocabulary=5000, chunk=4096, **sizes)
    count, prompt, new = overfill.filling_requests(c)
    assert prompt + new <= c.input_tokens
    # The scheduler's admission: the newcomer wants all its new tokens, who is in counts with 70 % of them.
    running = 0
    while running < count and prompt + new < c.cache_tokens - running * (prompt + 0.7 * new):
        running += 1
    assert running * prompt <= c.cache_tokens < running * (prompt + new)


@pytest.mark.parametrize(
    ("tokens", "requests", "whole"),
    [(2_277_347, 256, 1), (2_500_000, 256, 2), (12_000_000, 2048, 1), (900_000, 256, 0)],
)
def test_what_fills_the_kv_cache_is_of_whole_chunks_where_each_prompt_is_longer(
    tokens: int, requests: int, whole: int
) -> None:
    sizes = {"requests": requests, "cache_tokens": tokens, "input_tokens": 65_000}
    c = Limits(captured=64, vocabulary=5000, chunk=8192, **sizes)
    count, prompt, _ = overfill.filling_requests(c)
    assert (prompt == whole * 8192) if whole else (prompt < 8192)
    assert 0.9 * tokens < count * prompt < tokens
