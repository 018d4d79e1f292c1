"""The phases of a rehearsal, as functions of a server's configuration: no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.memory.kv_sizing import script
from sglang_moe_patches.memory.kv_sizing.script import Batch, Bound, Configuration, PhaseKind

CONFIGURATION = Configuration(
    chunk=1024, input_tokens=10_000, cache_tokens=50_000, requests=300, captured=64, vocabulary=5000, context=10_006
)


def names(**changed: Any) -> list[str]:
    return [phase.name for phase in script.derive(configured(**changed), logprobs=True).phases]


def configured(**changed: Any) -> Configuration:
    return Configuration(**{**vars(CONFIGURATION), **changed})


def test_the_phases_follow_from_the_configuration() -> None:
    always = ["prefill chunk", "prefill chunk behind the longest prefix", "8 requests behind one prefix"]
    last = ["prompts of many lengths", "prompt log-probabilities"]
    decodes = ["captured decode of 64 requests", "eager decode of 300 requests"]
    assert names() == [*always, *decodes, *last]
    assert names(mixed=True) == [*always, "mixed chunk", *decodes, *last]
    assert names(captured=0) == [*always, decodes[1], *last]
    assert names(requests=64) == [*always, decodes[0], *last]
    assert names(requests=40)[3:] == ["captured decode of 40 requests", *last]
    assert names(radix_cache=False) == [*always[:2], *decodes, *last]
    assert names(chunk=None)[0] == "longest prefill"


@pytest.mark.parametrize(("page", "context"), [(1, 10_000), (64, 9_999), (64, 1100)])
def test_the_longest_cached_prefix_and_a_chunk_are_together_the_longest_prompt(page: int, context: int) -> None:
    c = configured(page=page, input_tokens=context)
    phase = script.derive(c, logprobs=False).phases[1]
    prefix, prompt = phase.prompts(script.Tokens("x", c.vocabulary))
    assert prompt[: len(prefix)] == prefix
    assert phase.bound.longest_prefix == len(prefix) == len(prompt) - c.chunk
    assert context - page < len(prompt) <= context
    # Without the cache a prompt comes in whole chunks.
    (alone,) = script.derive(configured(radix_cache=False), logprobs=False).phases[1].prompts(script.Tokens("x", 5000))
    assert len(alone) == 9 * c.chunk


def test_requests_behind_one_prefix_stay_below_max_prefill_tokens() -> None:
    # The engine puts off the request with which a forward would reach them.
    phase = script.derive(configured(prefill_tokens=CONFIGURATION.chunk), logprobs=False).phases[2]
    before = phase.bound.prefix // script.SHARING
    new = [len(prompt) - before for prompt in phase.prompts(script.Tokens("x", 1000))[1:]]
    assert len(new) == script.SHARING == phase.bound.requests
    assert sum(new) == phase.bound.tokens < CONFIGURATION.chunk


@pytest.mark.parametrize(
    ("changed", "count", "packed"),
    [
        ({"input_tokens": 250}, 5, 1019),  # the last in part
        ({"input_tokens": 700, "prefill_tokens": 16_384}, 2, 1022),
        ({"input_tokens": 700, "prefill_tokens": 1400}, 1, 700),  # two would be max_prefill_tokens
        ({"input_tokens": 511, "prefill_tokens": 1024}, 2, 1022),
        ({"input_tokens": 250, "prefill_tokens": 600}, 2, 500),
        ({"input_tokens": 250, "requests": 3}, 2, 500),
        ({"input_tokens": 250, "cache_tokens": 800}, 2, 500),
        ({"input_tokens": 250, "page": 64}, 4, 750),  # each takes four pages
        ({"chunk": None, "prefill_tokens": 25_001}, 2, 20_000),
        ({"chunk": None, "prefill_tokens": 8192}, 1, 10_000),
        ({"chunk": None}, 1, 10_000),
        ({}, 1, 1024),
    ],
)
def test_prompts_that_are_shorter_than_a_forward_are_driven_together(
    changed: dict[str, Any], count: int, packed: int
) -> None:
    c = configured(**changed)
    phases = {phase.name: phase for phase in script.derive(c, logprobs=True).phases}
    (logprobs,) = (phase for phase in phases.values() if phase.kind is PhaseKind.LOGPROBS)
    assert logprobs.bound.logprobs == packed
    several = phases.get(f"{count} of the longest prompts")
    assert (several is None) == (count == 1)
    for phase in (logprobs, several or logprobs):
        prompts = phase.prompts(script.Tokens("x", c.vocabulary))
        # One more that they wait for: all arrive while it runs.
        assert [len(prompt) for prompt in prompts] == [c.largest] * (count + (count > 1))
    if several is not None:
        assert (several.bound.tokens, several.bound.requests) == (packed, count)


def test_what_cannot_be_driven_is_said() -> None:
    assert script.derive(CONFIGURATION, logprobs=False).not_driven == ()
    assert "request is a chunk" in script.derive(configured(input_tokens=1000), logprobs=False).not_driven[0]
    assert "no radix cache" in script.derive(configured(radix_cache=False), logprobs=False).not_driven[0]
    graphs = {"captured": CONFIGURATION.requests, "ranks": 2}
    assert "without its graph" in script.derive(configured(gathered=2, **graphs), logprobs=False).not_driven[0]
    assert script.derive(configured(**graphs), logprobs=False).not_driven == ()
    assert "chunked prefill is off" in script.derive(configured(chunk=None), logprobs=False).not_driven[0]


@given(
    st.builds(
        Configuration,
        chunk=st.none() | st.integers(64, 5000),
        input_tokens=st.integers(100, 30_000),
        cache_tokens=st.integers(200, 100_000),
        requests=st.integers(2, 500),
        captured=st.integers(0, 300),
        page=st.sampled_from([1, 16, 64]),
        mixed=st.booleans(),
        radix_cache=st.booleans(),
    )
)
def test_no_prompt_is_longer_than_the_server_takes_or_its_cache_holds(c: Configuration) -> None:
    c = Configuration(**{**vars(c), "input_tokens": min(c.input_tokens, c.cache_tokens - 6)})
    for phase in script.derive(c, logprobs=True).phases:
        prompts = phase.prompts(script.Tokens("x", c.vocabulary))
        assert prompts
        assert all(0 < len(prompt) <= c.input_tokens for prompt in prompts)
        # Prompts that only make others wait, or share a prefix, are counted whole: more than the cache must hold.
        if phase.bound.requests <= 1 and not phase.in_turn and phase.kind is not PhaseKind.VARIED:
            assert sum(map(len, prompts)) <= c.cache_tokens


@given(st.integers(2, 200_000), st.integers(1, 50))
def test_tokens_lie_in_the_vocabulary_and_are_alike_for_the_same_seed(vocabulary: int, count: int) -> None:
    found = script.Tokens("seed", vocabulary).some(count)
    assert len(found) == count
    assert all(0 < token < vocabulary for token in found)
    assert found == script.Tokens("seed", vocabulary).some(count)


@given(st.integers(1, 64), st.integers(0, 7), st.booleans())
def test_a_batch_below_its_bound_in_one_thing_is_not_at_it(size: int, which: int, graph: bool) -> None:
    fields = ("tokens", "requests", "prefix", "longest_prefix", "logprobs", "all_ranks")
    bound = Bound(("EXTEND",), **dict.fromkeys(fields, size), graph=graph)

    def forward(graph: bool = graph, **facts: Any) -> SimpleNamespace:
        return SimpleNamespace(batch=Batch(**{"mode": "EXTEND", **dict.fromkeys(fields, size), **facts}), graph=graph)

    assert bound.met(forward())
    spoilt = [*({name: size - 1} for name in fields), {"mode": "DECODE"}, {"graph": not graph}][which]
    assert not bound.met(forward(**spoilt))


def test_captured_decodes_are_read_from_every_release_s_words() -> None:
    assert script._asked_to_capture({"cuda_graph_max_bs": 256}) == 256
    assert script._asked_to_capture({"cuda_graph_max_bs": 256, "disable_cuda_graph": True}) == 0
    assert script._asked_to_capture({"cuda_graph_max_bs": 160, "device": "cpu"}) == 0
    assert script._asked_to_capture({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": 48}}}) == 48
    assert script._asked_to_capture({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 48}}}) == 0


def test_as_many_prompts_of_many_lengths_come_whatever_the_kv_cache_holds() -> None:
    found = []
    for tokens in (50_000, 5_000_000):
        phases = script.derive(configured(cache_tokens=tokens), logprobs=False).phases
        (phase,) = (each for each in phases if each.kind is PhaseKind.VARIED)
        found.append([len(prompt) for prompt in phase.prompts(script.Tokens("x", 1000))])
    assert found[0] == found[1]
    assert sum(found[0]) > 20 * CONFIGURATION.chunk
