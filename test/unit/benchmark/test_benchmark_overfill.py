"""Tests of ``common.overfill``: a load that needs more tokens than the KV cache has, and its results."""

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
def test_random_lengths_lie_between_one_and_the_limit(longest: int, seed: int) -> None:
    assert 1 <= overfill.random_length(random.Random(seed), longest) <= longest


def test_the_end_of_the_server_is_an_error_and_earlier_answers_still_count(monkeypatch) -> None:
    def end_server(load: overfill._Load, *args: object) -> None:
        load.answered += 5
        raise ServerFailed("the sized server ended with exit code 1. The end of sized.log:\nCUDA error: out of memory")

    logs = ["", "CUDA error: out of memory"]
    monkeypatch.setattr(overfill._Load, "run", end_server)
    server = SimpleNamespace(url="http://here", log_text=lambda: logs.pop(0))
    outcome = overfill.overfill(server, {"max_total_num_tokens": 5000}, 5000, 1)
    assert outcome["errors"] == ["the sized server ended with exit code 1"]
    assert (outcome["answered"], outcome["out_of_memory"]) == (5, True)


@pytest.mark.parametrize(
    ("info", "ranks"),
    [
        ({"dp_size": 4}, 4),
        ({"dp_size": 1, "attn_dp_size": 2}, 2),  # as reported by engine 0.5.20
        ({"dp_size": 2, "enable_dp_attention": True}, 2),  # as reported by engine 0.5.19
        ({"attn_dp_size": 2, "enable_dp_attention": True}, 2),  # engine 0.5.23 reports both
        ({"dp_size": 4, "attn_dp_size": 2, "enable_dp_attention": True}, 8),
    ],
)
def test_all_data_parallel_ranks_are_counted(info, ranks) -> None:
    assert overfill.ranks_of(info) == ranks


def test_requests_with_penalties_are_short_and_sent_at_once(monkeypatch) -> None:
    requests = []

    def generate(client, prompts, new_tokens, *, sampling=None, timeout_s=0.0):
        requests.append((len(prompts), {len(prompt) for prompt in prompts}, new_tokens, sampling))
        return ""

    monkeypatch.setattr(overfill.Client, "generate", generate)
    server = SimpleNamespace(url="http://here", log_text=lambda: "")
    outcome = overfill.send_penalized(server, {"max_total_num_tokens": 50_000}, 5000, 256)
    count, lengths, new_tokens, sampling = requests[0]
    assert (count, lengths, outcome["answered"]) == (256, {overfill.PENALIZED_PROMPT_TOKENS}, 257)
    assert new_tokens == overfill.PENALIZED_NEW_TOKENS
    assert {"frequency_penalty", "repetition_penalty", "logit_bias"} <= set(sampling)


@given(st.integers(8, 600), st.integers(128, 40_000), st.integers(1, 4))
def test_filling_requests_are_admitted_and_need_more_than_the_kv_cache_has(
    requests: int, share: int, context: int
) -> None:
    sizes = {"requests": requests, "cache_tokens": requests * share, "input_tokens": (context + 1) * share}
    c = Limits(captured=64, vocabulary=5000, chunk=4096, **sizes)
    count, prompt, new = overfill.filling_requests(c)
    assert prompt + new <= c.input_tokens
    # The scheduler reserves all new tokens of a new request, and 70 % of those of each running request.
    running = 0
    while running < count and prompt + new < c.cache_tokens - running * (prompt + 0.7 * new):
        running += 1
    assert running * prompt <= c.cache_tokens < running * (prompt + new)


@pytest.mark.parametrize(
    ("tokens", "requests", "whole"),
    [(2_277_347, 256, 1), (2_500_000, 256, 2), (12_000_000, 2048, 1), (900_000, 256, 0)],
)
def test_long_filling_prompts_consist_of_whole_chunks(tokens: int, requests: int, whole: int) -> None:
    sizes = {"requests": requests, "cache_tokens": tokens, "input_tokens": 65_000}
    c = Limits(captured=64, vocabulary=5000, chunk=8192, **sizes)
    count, prompt, _ = overfill.filling_requests(c)
    assert (prompt == whole * 8192) if whole else (prompt < 8192)
    assert 0.9 * tokens < count * prompt < tokens
