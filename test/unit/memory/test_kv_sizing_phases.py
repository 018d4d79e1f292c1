"""The phases of a rehearsal, as functions of a server's configuration: no engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.memory.kv_sizing import phases
from sglang_moe_patches.memory.kv_sizing.phases import Batch, Bound, Limits, PhaseKind

CONFIGURATION = Limits(
    chunk=1024, input_tokens=10_000, cache_tokens=50_000, requests=300, captured=64, vocabulary=5000, context=10_006
)


TWO_RANKS = {"enable_dp_attention": True, "dp_size": 2}
FACTS = phases.ServerFacts(
    kv_bytes=1, kv_tokens=20_000, page=1, table_bytes=1, table_requests=300, context=10_006, vocabulary=5000
)


def names(**changed: Any) -> list[str]:
    return [phase.name for phase in phases.derive_phases(configured(**changed)).phases]


def configured(**changed: Any) -> Limits:
    return Limits(**{**vars(CONFIGURATION), **changed})


def test_the_phases_follow_from_the_configuration() -> None:
    always = ["prefill chunk", "prefill chunk behind the longest prefix", "8 requests behind one prefix"]
    decodes = ["captured decode of 64 requests", "eager decode of 300 requests"]

    def last(requests: int = 300) -> list[str]:
        return [
            f"decode of {requests} requests with penalties and a logit bias",
            f"decode of one long request among {requests - 1} short ones",
            "prompts of many lengths",
        ]

    assert names() == [*always, *decodes, *last()]
    assert names(mixed=True) == [*always, "mixed chunk", *decodes, *last()]
    assert names(captured=0) == [*always, decodes[1], *last()]
    assert names(requests=64) == [*always, decodes[0], *last(64)]
    assert names(requests=40)[3:] == ["captured decode of 40 requests", *last(40)]
    assert names(radix_cache=False) == [*always[:2], *decodes, *last()]
    assert names(chunk=None)[0] == "longest prefill"


@pytest.mark.parametrize(("page", "context"), [(1, 10_000), (64, 9_999), (64, 1100)])
def test_the_longest_cached_prefix_and_a_chunk_are_together_the_longest_prompt(page: int, context: int) -> None:
    c = configured(page=page, input_tokens=context)
    phase = phases.derive_phases(c).phases[1]
    prefix, prompt = phase.prompts(phases.Tokens("x", c.vocabulary))
    assert prompt[: len(prefix)] == prefix
    assert phase.bound.longest_prefix == len(prefix) == len(prompt) - c.chunk
    assert context - page < len(prompt) <= context
    # Without the cache a prompt comes in whole chunks.
    (alone,) = phases.derive_phases(configured(radix_cache=False)).phases[1].prompts(phases.Tokens("x", 5000))
    assert len(alone) == 9 * c.chunk


def test_requests_behind_one_prefix_stay_below_max_prefill_tokens() -> None:
    # The engine puts off the request with which a forward would reach them.
    phase = phases.derive_phases(configured(prefill_tokens=CONFIGURATION.chunk)).phases[2]
    before = phase.bound.prefix // phases.SHARED_PREFIX_REQUESTS
    new = [len(prompt) - before for prompt in phase.prompts(phases.Tokens("x", 1000))[1:]]
    assert len(new) == phases.SHARED_PREFIX_REQUESTS == phase.bound.requests
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
    driven = {phase.name: phase for phase in phases.derive_phases(c).phases}
    several = driven.get(f"{count} of the longest prompts")
    assert (several is None) == (count == 1)
    assert c.packed == packed
    if several is not None:
        prompts = several.prompts(phases.Tokens("x", c.vocabulary))
        # One more that they wait for: all arrive while it runs.
        assert [len(prompt) for prompt in prompts] == [c.largest] * (count + 1)
        assert (several.bound.tokens, several.bound.requests) == (packed, count)


@pytest.mark.parametrize(
    ("info", "rows", "slots"),
    [
        ({}, 0, 0),
        ({"speculative_num_draft_tokens": 4}, 0, 0),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12}, 12, 24),
        (
            {
                **{"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 6},
                **{"speculative_num_steps": 3, "speculative_eagle_topk": 4},
            },
            *(6, 24),
        ),
    ],
)
def test_a_request_that_speculates_takes_rows_and_room(info: dict[str, Any], rows: int, slots: int) -> None:
    c = phases.derive_limits({"device": "cpu", "chunked_prefill_size": 1024, **TWO_RANKS, **info}, FACTS)
    assert (c.draft_tokens, c.draft_slots) == (rows, slots)
    for phase in phases.derive_phases(c).phases:
        if phase.bound.modes == phases.DECODES:
            # The engine counts the rows of all ranks.
            assert phase.bound.all_ranks == 2 * phase.bound.requests * max(1, rows)
            if phase.kind is not PhaseKind.LONG_AMONG_SHORT:
                taken = phases.SHORT_PROMPT_TOKENS + phase.new_tokens + slots + 2 * c.page
                assert c.requests * taken <= 0.9 * (c.cache_tokens - 2 * c.largest)


def test_what_cannot_be_driven_is_said() -> None:
    assert phases.derive_phases(CONFIGURATION).skipped == ()
    assert "request is a chunk" in phases.derive_phases(configured(input_tokens=1000)).skipped[0]
    assert "no radix cache" in phases.derive_phases(configured(radix_cache=False)).skipped[0]
    graphs = {"captured": CONFIGURATION.requests, "ranks": 2}
    assert "without its graph" in phases.derive_phases(configured(gathered=2, **graphs)).skipped[0]
    assert phases.derive_phases(configured(**graphs)).skipped == ()
    assert "chunked prefill is off" in phases.derive_phases(configured(chunk=None)).skipped[0]


@given(
    st.builds(
        Limits,
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
def test_no_prompt_is_longer_than_the_server_takes_or_its_cache_holds(c: Limits) -> None:
    c = Limits(**{**vars(c), "input_tokens": min(c.input_tokens, c.cache_tokens - 6)})
    for phase in phases.derive_phases(c).phases:
        prompts = phase.prompts(phases.Tokens("x", c.vocabulary))
        assert prompts
        assert all(0 < len(prompt) <= c.input_tokens for prompt in prompts)
        # Prompts that only make others wait, or share a prefix, are counted whole: more than the cache must hold.
        if phase.bound.requests <= 1 and not phase.in_turn and phase.kind is not PhaseKind.VARIED:
            assert sum(map(len, prompts)) <= c.cache_tokens


@given(st.integers(2, 200_000), st.integers(1, 50))
def test_tokens_lie_in_the_vocabulary_and_are_alike_for_the_same_seed(vocabulary: int, count: int) -> None:
    found = phases.Tokens("seed", vocabulary).some(count)
    assert len(found) == count
    assert all(0 < token < vocabulary for token in found)
    assert found == phases.Tokens("seed", vocabulary).some(count)


@given(st.integers(1, 64), st.integers(0, 7), st.booleans())
def test_a_batch_below_its_bound_in_one_thing_is_not_at_it(size: int, which: int, graph: bool) -> None:
    fields = ("tokens", "requests", "prefix", "longest_prefix", "longest", "all_ranks")
    bound = Bound(("EXTEND",), **dict.fromkeys(fields, size), graph=graph)

    def forward(**spoilt: Any) -> Batch:
        return Batch(**{"mode": "EXTEND", **dict.fromkeys(fields, size), "graph": graph, **spoilt})

    assert bound.met(forward())
    spoilt = [*({name: size - 1} for name in fields), {"mode": "DECODE"}, {"graph": not graph}][which]
    assert not bound.met(forward(**spoilt))


def test_captured_decodes_are_read_from_every_release_s_words() -> None:
    assert phases._asked_to_capture({"cuda_graph_max_bs": 256}) == 256
    assert phases._asked_to_capture({"cuda_graph_max_bs": 256, "disable_cuda_graph": True}) == 0
    assert phases._asked_to_capture({"cuda_graph_max_bs": 160, "device": "cpu"}) == 0
    assert phases._asked_to_capture({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": 48}}}) == 48
    assert phases._asked_to_capture({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 48}}}) == 0


def test_as_many_prompts_of_many_lengths_come_whatever_the_kv_cache_holds() -> None:
    found = []
    for tokens in (50_000, 5_000_000):
        driven = phases.derive_phases(configured(cache_tokens=tokens)).phases
        (phase,) = (each for each in driven if each.kind is PhaseKind.VARIED)
        found.append([len(prompt) for prompt in phase.prompts(phases.Tokens("x", 1000))])
    assert found[0] == found[1]
    assert sum(found[0]) > 20 * CONFIGURATION.chunk


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("at_once", [0, 1, 2])
@pytest.mark.parametrize("cache", [3_000_000, 20_000_000])
def test_the_first_of_a_decode_still_runs_when_the_last_is_admitted(mixed: bool, at_once: int, cache: int) -> None:
    """With mixed chunks those that run decode while others are admitted, so many at once."""
    c = configured(mixed=mixed, prefill_requests=at_once, requests=2000, cache_tokens=cache)
    forwards = c.requests // at_once if mixed and at_once else 0
    decodes = [phase for phase in phases.derive_phases(c).phases if phase.bound.requests == c.requests]
    assert len(decodes) == 3
    if cache > 10_000_000:  # else it holds no more, but all are admitted
        assert [phase.name for phase in decodes if phase.new_tokens <= forwards] == []
    for phase in decodes:
        asked = [len(prompt) + phase.new_tokens for prompt in phase.prompts(phases.Tokens("x", 1000))]
        assert sum(asked) < c.cache_tokens
