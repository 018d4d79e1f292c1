"""Tests of the phases of a rehearsal, which are derived from a server's configuration. The requests of a phase make one
kind of forward pass as large as possible on the server."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_servers import LIMITS, find_phase
from sglang_moe_patches.memory.kv_sizing import phases
from sglang_moe_patches.memory.kv_sizing.phases import SIZES, Batch, Bound, Limits, PhaseKind

FACTS = phases.ServerFacts(fixed_bytes=1, page=1, vocabulary=5000)
FEW = {"cache_tokens": 5000, "requests": 20, "input_tokens": 313}


def limits_of(info, facts=FACTS, **numbers):
    given = {"cache_tokens": 20_000, "requests": 300, "input_tokens": 9999, **numbers}
    return phases.derive_limits(info, facts, **given)


def lengths(phase):
    return list(map(sum, phase.prompts))


def decodes(how, *counts):
    return [f"{how} decode of {count} requests" for count in counts]


ALWAYS = ["prefill chunk", "prefill chunk behind the longest prefix", "8 requests behind one prefix"]
CAPTURED, EAGER = decodes("captured", 64), decodes("eager", 75, 300)


def last(requests=300, penalized=(19, 75, 300)):
    return [
        *(f"decode of {count} requests with penalties and a logit bias" for count in penalized),
        f"decode of one long request among {requests - 1} short ones",
        "prompts of many lengths",
    ]


PIPELINE = {"stages": 2, "captured": 4, "chunk": 64}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, [*ALWAYS, *CAPTURED, *EAGER, *last()]),
        ({"mixed": True}, [*ALWAYS, "mixed chunk", *CAPTURED, *EAGER, *last()]),
        ({"captured": 0}, [*ALWAYS, *decodes("eager", 19), *EAGER, *last()]),
        ({"requests": 64}, [*ALWAYS, *CAPTURED, *last(64, [64])]),
        ({"requests": 40}, [*ALWAYS, *decodes("captured", 40), *last(40, [40])]),
        ({"radix_cache": False}, [*ALWAYS[:2], *CAPTURED, *EAGER, *last()]),
        ({"chunk": None, "mixed": True}, ["longest prefill", *CAPTURED, *EAGER, *last()]),
        ({"input_tokens": 1000}, [ALWAYS[0], "2 of the longest prompts", *CAPTURED, *EAGER, *last()]),
        # A pipeline has several batches at the same time, so a batch has a share of the requests.
        ({"stages": 2, "mixed": True}, [*ALWAYS, *CAPTURED, *decodes("eager", 150), *last(150, (38, 150))]),
        (PIPELINE, [*ALWAYS, *decodes("captured", 4), *decodes("eager", 10, 38, 150), *last(150, (38, 150))]),
        # The prompts of a captured decode (4 of a page each) do not fit into one chunk, so that phase is missing.
        (PIPELINE | {"page": 32}, [*ALWAYS[:2], *decodes("eager", 38, 150), *last(150, (38, 150))]),
    ],
    ids=str,
)
def test_the_phases_follow_from_the_configuration(changed, names):
    assert [phase.name for phase in phases.derive_phases(replace(LIMITS, **changed))] == names


KINDS = (PhaseKind.CAPTURED_DECODE, PhaseKind.EAGER_DECODE, PhaseKind.PENALTIES)


@pytest.mark.parametrize(
    ("changed", "captured", "eager", "penalized"),
    [
        ({"captured": 256}, [64, 256], [512, 2048], [32, 128, 512, 2048]),
        # A decode of 512 requests took more than the 5.5 GB that a server had left. So smaller decodes come first.
        ({"captured": 512}, [32, 128, 512], [2048], [32, 128, 512, 2048]),
        ({"captured": 512, "has_default_requests": True}, [32, 128, 512], [1024, 2048], [32, 128, 512]),
        ({"captured": 256, "has_default_requests": True}, [64, 256], [512, 1024, 2048], [64, 256]),
        ({"captured": 0, "has_default_requests": True}, [], [64, 256, 512, 1024, 2048], [64, 256]),
        ({"requests": 48, "captured": 0, "has_default_requests": True}, [], [48], [48]),
        ({"captured": 256, "has_default_requests": True, "stages": 2}, [], [64, 256, 512, 1024], [64, 256]),
    ],
    ids=str,
)
def test_decodes_rise_and_penalized_decodes_have_the_size_of_the_largest_graph(changed, captured, eager, penalized):
    limits, ran = replace(LIMITS, **{"requests": 2048, **changed}), {}
    every = phases.derive_phases(limits)
    counts = [[phase.bound.requests for phase in every if phase.kind is kind] for kind in KINDS]
    assert counts == [captured, eager, penalized]
    for phase in every:
        ran[phase.name] = phase
        if phase.kind is PhaseKind.PENALTIES:  # each batch of a pipeline has that many requests
            assert len(phase.prompts) == min(limits.requests, limits.stages * phase.bound.requests)
        if phase.kind in KINDS and phase.estimate:
            before = ran[phase.estimate.name]
            fewer = before.bound.requests
            assert phase.estimate.times == phase.bound.requests / fewer <= phases.MAX_REQUEST_RATIO
            may_stop = limits.has_default_requests and phase.kind is PhaseKind.EAGER_DECODE and fewer >= penalized[-1]
            assert phase.estimate.fewer_requests == (fewer if may_stop else 0)
            if may_stop:  # the decision to stop needs the memory of the other phases
                assert any(each.kind is PhaseKind.PENALTIES for each in ran.values())


@pytest.mark.parametrize(
    ("tokens", "requests", "default"),
    # The first case is Qwen3-30B on an H100 by the engine's defaults, which admit 2,048 requests. In the others the
    # user has set the number.
    [(89_915, 2048, True), (89_915, 2048, False), (89_915, 4096, False), (40_000, 512, False), (20_000, 300, False)],
)
def test_one_long_request_and_the_short_requests_fit_into_the_kv_cache_together(tokens, requests, default):
    info = {"chunked_prefill_size": 8192 if tokens > 80_000 else 1024}
    info |= {} if default else {"max_running_requests": requests}
    numbers = {"cache_tokens": tokens, "requests": requests, "input_tokens": 40_953}
    limits = limits_of(info, replace(FACTS, captured=256), **numbers)
    long = find_phase(limits, PhaseKind.LONG_AMONG_SHORT)
    assert sum(lengths(long)) + len(lengths(long)) * (long.new_tokens + 2 * limits.page) <= 0.9 * tokens


@pytest.mark.parametrize(
    ("max_running_requests", "captured", "page", "requests"),
    [
        (2048, 0, 1, 2048),  # the user has set the number
        (None, 0, 1, 1490),  # 0.9 of half the cache, less two chunks, at 12 tokens a request
        (None, 0, 64, 256),  # 138 tokens a request would allow 129, but 256 is the least
        (None, 160, 64, 160),
    ],
)
def test_the_default_request_limit_follows_from_the_kv_cache_size(max_running_requests, captured, page, requests):
    info = {"max_running_requests": max_running_requests, "chunked_prefill_size": 1024, "cuda_graph_max_bs": captured}
    assert limits_of(info, replace(FACTS, page=page), cache_tokens=43_840, requests=2048).requests == requests


@pytest.mark.parametrize(("page", "context"), [(1, 10_000), (64, 9_999), (64, 1100), (64, 40_000)])
def test_the_longest_cached_prefix_plus_a_chunk_is_the_longest_prompt(page, context):
    c = replace(LIMITS, page=page, input_tokens=context)
    phase = find_phase(c, PhaseKind.BEHIND_PREFIX)
    *grown, prompt = phase.prompts
    prefix = grown[-1].shared
    assert {grown_prompt.fresh for grown_prompt in grown} == {0}
    # The prefix grows in small parts, because the engine finishes even an aborted prompt.
    computed_lengths = [
        longer - shorter for shorter, longer in pairwise([0, *(grown_prompt.shared for grown_prompt in grown)])
    ]
    assert 0 < min(computed_lengths) <= max(computed_lengths) <= max(c.chunk, -(-prefix // 16))
    # The time of a part is predicted from the part before it. So its work, the squared number of tokens, may grow by at
    # most this factor.
    ends = [0, *(length for length in lengths(phase) if length >= c.chunk)]
    work = [longer**2 - shorter**2 for shorter, longer in pairwise(ends)]
    assert all(later <= phase.growth * earlier for earlier, later in pairwise(work))
    assert prompt == (prefix, c.chunk)
    assert phase.bound.longest_prefix == prefix
    assert context - page < sum(prompt) <= context
    # If there is no radix cache, the prompts consist of whole chunks.
    alone = find_phase(replace(LIMITS, radix_cache=False), PhaseKind.BEHIND_PREFIX)
    first, whole_length = lengths(alone)
    assert (first, whole_length) == (3 * c.chunk, 9 * c.chunk)
    assert whole_length**2 <= alone.growth * first**2


@pytest.mark.parametrize(("page", "context"), [(1, 10_000), (64, 9_999), (64, 1300), (64, 40_000)])
@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_only_tokens_after_a_planted_prefix_are_computed(page, context, draft_tokens):
    c = replace(LIMITS, page=page, input_tokens=context, draft_tokens=draft_tokens)
    computed, planted = (find_phase(replace(c, plants=plants), PhaseKind.BEHIND_PREFIX) for plants in (False, True))
    assert planted.bound == computed.bound
    (part, behind_part), (prefix, behind) = planted.prompts
    assert prefix == planted.shared
    assert behind == behind_part == c.chunk
    # A part of the prefix comes first, and its time predicts that of the whole prefix.
    assert part % page == prefix % page == 0
    assert prefix - 4 * page < planted.growth * part <= prefix
    # The planted prefix also serves prompts that share it, or are as long. They compute only tokens of their own.
    own = phases.SHORT_PROMPT_TOKENS
    for kind, behind in ((PhaseKind.SHARED_PREFIX, c.chunk), (PhaseKind.LONG_AMONG_SHORT, own)):
        if phase := find_phase(replace(c, plants=True), kind):
            assert 0 <= max(lengths(phase)) - phase.shared <= behind
            assert phase.prompts == find_phase(c, kind).prompts
    unplanted_kinds = [phase.kind for phase in phases.derive_phases(replace(c, plants=True)) if not phase.shared]
    assert {PhaseKind.PREFILL, PhaseKind.PENALTIES, PhaseKind.VARIED} <= set(unplanted_kinds)


GROWS = [PhaseKind.BEHIND_PREFIX, PhaseKind.SHARED_PREFIX, PhaseKind.LONG_AMONG_SHORT]
FITS_NOW, SHORT = {"cache_tokens": 500_000}, {"input_tokens": 250}


@pytest.mark.parametrize("plants", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ({}, {}, []),
        ({}, FITS_NOW, []),  # the small cache limited no phase
        ({"input_tokens": 7000, "cache_tokens": 7010}, FITS_NOW, GROWS),
        ({"cache_tokens": 15_000}, {}, [PhaseKind.LONG_AMONG_SHORT]),
        # The small cache held neither a chunk nor the prompts of one forward pass.
        ({"input_tokens": 900, "cache_tokens": 910}, {}, [*GROWS, PhaseKind.PREFILL, PhaseKind.VARIED]),
        (SHORT | {"cache_tokens": 800}, SHORT, [PhaseKind.TOGETHER, PhaseKind.LONG_AMONG_SHORT]),
    ],
    ids=str,
)
def test_phases_that_a_small_cache_limited_are_rehearsed_once_more(before, after, kinds, plants):
    of_both = {"plants": plants, "captured": 8, "requests": 20}
    small, large = (replace(LIMITS, **{**of_both, **changed}) for changed in (before, after))
    again, every = phases.derive_second_pass(small, large), phases.derive_phases(large)
    assert {phase.kind for phase in again} == set(kinds)
    assert {phase.name for phase in again} <= {phase.name for phase in every}


def test_missed_phases_are_tried_again_with_the_requests_that_fit_into_the_new_size():
    before, after = (replace(LIMITS, requests=requests, captured=0) for requests in (1021, 871))
    tried = [
        {phase.name for phase in phases.derive_second_pass(before, after, kinds)}
        for kinds in ((), [PhaseKind.EAGER_DECODE])
    ]
    assert ["eager decode of 871 requests" in names for names in tried] == [False, True]


@pytest.mark.parametrize("page", [1, 64, 96])
def test_a_prefix_ends_where_a_state_is_kept(page):
    before = find_phase(replace(LIMITS, states=True, page=page), PhaseKind.BEHIND_PREFIX).bound.longest_prefix
    assert before % phases.STATE_INTERVAL_TOKENS == before % page == 0
    assert 0 <= LIMITS.input_tokens - LIMITS.chunk - before < phases.STATE_INTERVAL_TOKENS * page
    alone = find_phase(replace(LIMITS, states=True, chunk=1000, radix_cache=False), PhaseKind.BEHIND_PREFIX)
    assert alone.bound.longest_prefix == 9 * 1000  # it ends with a chunk


@pytest.mark.parametrize(
    ("changed", "sharers"),
    [
        *[({"requests": requests}, sharers) for requests, sharers in ((300, 8), (9, 8), (8, 8), (2, 2), (1, None))],
        pytest.param({"prefill_requests": 3}, 3, id="more are not admitted into one forward"),
        pytest.param({"prefill_tokens": LIMITS.chunk}, 8, id="the engine puts off what would reach max_prefill_tokens"),
        pytest.param({"window": 128, "window_tokens": 40_000}, 8, id="there are windows for all of them"),
        pytest.param({"window": 4096, "window_tokens": 40_000}, None, id="there are not"),
    ],
    ids=str,
)
def test_the_requests_that_share_a_prefix_are_at_most_the_concurrent_requests(changed, sharers):
    phase = find_phase(replace(LIMITS, **changed), PhaseKind.SHARED_PREFIX)
    assert (phase and phase.bound.requests) == sharers
    if phase:
        new = [length - phase.bound.prefix // sharers for length in lengths(phase)]
        assert len(new) == sharers
        assert LIMITS.chunk > sum(new) == phase.bound.tokens


@pytest.mark.parametrize(
    ("changed", "count", "packed"),
    [
        ({"input_tokens": 250}, 5, 1019),  # the fifth prompt is cut
        ({"input_tokens": 700, "prefill_tokens": 16_384}, 2, 1022),
        ({"input_tokens": 700, "prefill_tokens": 1400}, 1, 700),  # two would reach max_prefill_tokens
        ({"input_tokens": 511, "prefill_tokens": 1024}, 2, 1022),
        ({"input_tokens": 250, "prefill_tokens": 600}, 2, 500),
        ({"input_tokens": 250, "requests": 2}, 2, 500),
        ({"input_tokens": 250, "prefill_requests": 3}, 3, 750),
        ({"input_tokens": 250, "cache_tokens": 700}, 2, 500),
        ({"input_tokens": 250, "cache_tokens": 800, "draft_slots": 20}, 2, 500),
        ({"input_tokens": 250, "page": 64}, 4, 750),  # each prompt takes four pages
        ({"input_tokens": 100}, 11, 1013),
        ({"input_tokens": 100, "window": 512, "window_tokens": 2570}, 4, 400),
        ({"input_tokens": 100, "window": 512, "window_tokens": 1000}, 1, 100),  # a second window has no room
        ({"chunk": None, "prefill_tokens": 25_001}, 2, 20_000),
        ({"chunk": None, "prefill_tokens": 8192}, 1, 10_000),
        ({"chunk": None}, 1, 10_000),
        ({}, 1, 1024),
    ],
    ids=str,
)
def test_prompts_shorter_than_a_chunk_are_sent_together(changed, count, packed):
    c = replace(LIMITS, **changed)
    several = find_phase(c, PhaseKind.TOGETHER)
    assert (c.prompts_together, c.packed_tokens, several is None) == (count, packed, count == 1)
    if several is not None:
        assert lengths(several) == [c.largest_prefill_tokens] * count
        assert count * (c.largest_prefill_tokens + c.draft_slots) < c.cache_tokens
        assert (several.bound.tokens, several.bound.requests) == (packed, count)


EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 4}


@pytest.mark.parametrize(
    ("info", "rows", "slots"),
    [
        ({}, 0, 0),
        ({"speculative_num_draft_tokens": 4}, 0, 0),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12}, 12, 24),
        (EAGLE | {"speculative_num_draft_tokens": 6}, 6, 24),
    ],
    ids=str,
)
def test_a_request_with_draft_tokens_takes_more_rows_and_slots(info, rows, slots):
    two_ranks = {"device": "cpu", "chunked_prefill_size": 1024, "enable_dp_attention": True, "dp_size": 2}
    c = limits_of(two_ranks | info)
    assert (c.draft_tokens, c.draft_slots) == (rows, slots)
    for phase in phases.derive_phases(c):
        assert not (rows and phase.output_logprobs)
        if phase.bound.modes == phases.DECODES:
            # The engine counts the rows of both data-parallel ranks together.
            assert phase.bound.all_ranks == 2 * phase.bound.requests * max(1, rows)
            if phase.kind is not PhaseKind.LONG_AMONG_SHORT:
                request_tokens = phases.SHORT_PROMPT_TOKENS + phase.new_tokens + slots + 2 * c.page
                assert phase.bound.requests * request_tokens <= 0.9 * (c.cache_tokens - 2 * c.largest_prefill_tokens)


@pytest.mark.parametrize(
    "info",
    [
        {"dp_size": 1, "attn_dp_size": 2},  # names in engine release 0.5.20
        {"dp_size": 2, "enable_dp_attention": True},  # names in engine release 0.5.19
        {"attn_dp_size": 2, "enable_dp_attention": True},  # engine release 0.5.23 has both names
    ],
)
def test_data_parallel_ranks_rehearse_together_and_replicas_separately(info):
    def bounds(**more):
        c = limits_of(info | more, **FEW)
        return c.gathered, [phase.bound for phase in phases.derive_phases(c)]

    gathered, of_one = bounds()
    assert gathered == 2
    assert all(bound.all_ranks == 2 * (bound.tokens or bound.requests) > 0 for bound in of_one)
    assert bounds(dp_size=4, attn_dp_size=2) == (2, of_one)
    c = limits_of({"dp_size": 4}, **FEW)
    assert c.gathered == 1
    assert {phase.bound.all_ranks for phase in phases.derive_phases(c)} == {0}


def test_the_phases_of_a_pipeline_have_the_size_of_one_stages_batch():
    info, numbers = {"chunked_prefill_size": 64}, {"cache_tokens": 50_000, "requests": 20, "input_tokens": 2999}
    undivided, c = (limits_of({**info, "pp_size": stages}, **numbers) for stages in (1, 2))
    assert (undivided.batch, c.batch) == (20, 10)
    for kind in (PhaseKind.EAGER_DECODE, PhaseKind.PENALTIES, PhaseKind.LONG_AMONG_SHORT):
        assert (find_phase(c, kind).bound.requests, len(find_phase(c, kind).prompts)) == (10, 20)
    long = find_phase(c, PhaseKind.LONG_AMONG_SHORT)
    assert long.bound.longest == lengths(long)[0] > 2000
    assert {phase.bound.longest for phase in phases.derive_phases(undivided)} == {0}
    captured = find_phase(replace(c, captured=4), PhaseKind.CAPTURED_DECODE)
    assert captured.bound.requests == len(captured.prompts) == 4
    assert find_phase(replace(c, captured=4, page=32), PhaseKind.CAPTURED_DECODE) is None
    assert limits_of({**info, "pp_size": 2, "pp_max_micro_batch_size": 3}, **numbers).batch == 3


@pytest.mark.parametrize(
    ("info", "largest"),
    [
        ({"cuda_graph_max_bs": 256}, 256),
        ({"cuda_graph_max_bs": 256, "disable_cuda_graph": True}, 0),
        ({"cuda_graph_max_bs": 160, "device": "cpu"}, 0),
        ({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": 48}}}, 48),
        ({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 48}}}, 0),
        ({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": None}}}, 0),
        ({"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full", max_bs=48))}, 48),
    ],
    ids=str,
)
@pytest.mark.parametrize("captured", [None, 40])
def test_the_largest_captured_decode_is_read_from_each_releases_arguments(info, largest, captured):
    """The largest captured decode has as many requests as the server's arguments say. If the engine captured graphs for
    fewer requests (``captured``), the smaller number counts."""
    expected = largest if captured is None else min(largest, captured)
    assert limits_of(info, replace(FACTS, captured=captured)).captured == expected


def test_the_largest_decode_uses_every_sampling_parameter_that_takes_memory():
    phase = find_phase(replace(LIMITS, stop_token=True), PhaseKind.PENALTIES)
    assert phase.output_logprobs
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert phase.sampling.keys() >= {*penalties, "min_p", "logit_bias", "min_new_tokens"}
    # Without an end-of-sequence token, a request with min_new_tokens ends the server.
    assert "min_new_tokens" not in find_phase(LIMITS, PhaseKind.PENALTIES).sampling
    assert phase.sampling["logit_bias"] == {"1000": -1.0}


@pytest.mark.parametrize("argument", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}])
def test_no_rehearsed_request_asks_for_min_p_if_each_request_is_sampled_with_a_seed(argument):
    """If each request has a seed, the rehearsed requests must not use min_p. The engine's sampler raises an error if a
    batch has both."""
    without: dict[str, object] = {}
    for arguments in (without, argument):
        sampling = find_phase(limits_of(arguments, FACTS), PhaseKind.PENALTIES).sampling
        assert ("min_p" in sampling) == (arguments is without)


def test_the_logit_bias_names_a_token_of_a_small_vocabulary():
    phase = find_phase(replace(LIMITS, vocabulary=500), PhaseKind.PENALTIES)
    assert phase.sampling["logit_bias"] == {"499": -1.0}


def test_a_long_prompt_begins_with_the_cached_prefix():
    """A long prompt reuses the prefix that the previous phase has put into the radix cache. Computing a prefix of
    262,144 tokens would take minutes with Triton's attention."""
    long, *short = find_phase(LIMITS, PhaseKind.LONG_AMONG_SHORT).prompts
    assert short == [(0, phases.SHORT_PROMPT_TOKENS)] * (LIMITS.requests - 1)
    assert sum(long) > 0.9 * LIMITS.input_tokens
    prefix = find_phase(LIMITS, PhaseKind.BEHIND_PREFIX).shared
    assert 0 < long.shared - prefix <= sum(long) - prefix <= LIMITS.chunk


@pytest.mark.parametrize("radix_cache", [True, False])
@pytest.mark.parametrize(("chunk", "requests", "context"), [(64, 4, 318), (36, 20, 2999), (2047, 512, 40_953)])
def test_no_chunk_ends_within_a_prompt_of_a_decode(chunk, requests, context, radix_cache):
    """Each prompt of a decode phase must lie within one prefill chunk, unless its beginning is cached. If a prompt were
    cut at the end of a chunk, the engine would admit one request too few, and the decode would never reach its size.
    For example, if a chunk of 64 tokens already has 60, the next prompt must have at most 4 tokens in this chunk, or
    begin in the next chunk."""
    info = {"chunked_prefill_size": chunk, "max_running_requests": requests, "disable_radix_cache": not radix_cache}
    c = limits_of(info, cache_tokens=100_000, requests=requests, input_tokens=context)
    for kind in (PhaseKind.EAGER_DECODE, PhaseKind.PENALTIES, PhaseKind.LONG_AMONG_SHORT):
        ends = 0
        for prompt in find_phase(c, kind).prompts:
            # The engine computes the last token of a prompt even if the radix cache has all of its tokens.
            computed_tokens = max(1, prompt.fresh) if radix_cache else sum(prompt)
            assert prompt.shared or ends // chunk == (ends + computed_tokens - 1) // chunk
            ends += computed_tokens


@given(
    st.builds(
        Limits,
        chunk=st.none() | st.integers(16, 5000),
        input_tokens=st.integers(100, 30_000),
        cache_tokens=st.integers(200, 100_000),
        requests=st.integers(1, 500),
        captured=st.integers(0, 300),
        page=st.sampled_from([1, 16, 64]),
        mixed=st.booleans(),
        radix_cache=st.booleans(),
    )
)
def test_no_prompt_is_longer_than_the_server_or_its_kv_cache_allows(c):
    c = replace(c, input_tokens=min(c.input_tokens, c.cache_tokens - 6))
    for phase in phases.derive_phases(c):
        prompts = lengths(phase)
        assert prompts
        assert all(0 < length <= c.input_tokens for length in prompts)
        assert phase.new_tokens >= (2 if phase.bound.modes == phases.DECODES else 1)
        # Prompts of other phases run one after another or share a prefix, so their sum may be larger.
        if phase.bound.requests <= 1 and not phase.in_turn and phase.kind is not PhaseKind.VARIED:
            assert sum(prompts) <= c.cache_tokens


@pytest.mark.parametrize("vocabulary", [2, 1500, 200_000])
def test_tokens_are_in_the_vocabulary_and_equal_for_equal_seeds(vocabulary):
    tokens = phases.Tokens("seed", vocabulary).draw(500)
    assert all(0 < token < vocabulary for token in tokens)
    assert tokens == phases.Tokens("seed", vocabulary).draw(500)


@pytest.mark.parametrize("graph", [True, False])
def test_a_batch_with_one_size_below_the_bound_does_not_meet_it(graph):
    bound = Bound(("EXTEND",), **dict.fromkeys(SIZES, 7), graph=graph)

    at_it = Batch("EXTEND", **dict.fromkeys(SIZES, 7), graph=graph)
    assert bound.is_met(at_it)
    assert len(SIZES) == 6
    less = [*({name: 6} for name in SIZES), {"mode": "DECODE"}, {"graph": not graph}]
    assert not any(bound.is_met(replace(at_it, **changed)) for changed in less)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("at_once", [0, 1, 2])
@pytest.mark.parametrize("cache", [3_000_000, 20_000_000])
def test_the_first_request_of_a_decode_still_runs_when_the_last_is_admitted(mixed, at_once, cache):
    """The first request of a decode phase must still run when the engine admits the last request. So each request must
    generate enough tokens. With mixed chunks, the first requests already decode while the engine admits further
    requests, ``at_once`` of them in each chunk."""
    c = replace(LIMITS, mixed=mixed, prefill_requests=at_once, requests=2000, cache_tokens=cache)
    forwards = c.requests // at_once if mixed and at_once else 0
    decodes = [phase for phase in phases.derive_phases(c) if phase.bound.requests == c.requests]
    assert len(decodes) == 3
    if cache > 10_000_000:  # the small cache has no room for so many new tokens
        assert [phase.name for phase in decodes if phase.new_tokens <= forwards] == []
    for phase in decodes:
        assert sum(lengths(phase)) + phase.new_tokens * c.requests < c.cache_tokens
        # Prompts have one token in mixed chunks. The engine would count a prompt that a chunk cuts as two requests, and
        # not admit the last request.
        assert {length > 1 for length in lengths(phase)[1:]} == {not mixed}


def test_a_decode_of_all_requests_fits_into_the_sliding_windows_pool():
    plain, with_windows, few = (
        find_phase(replace(LIMITS, window=window, window_tokens=tokens), PhaseKind.EAGER_DECODE).new_tokens
        for window, tokens in ((0, 0), (16, 46_500), (4096, 20_000))
    )
    assert with_windows == plain  # there is a window for each request
    assert 2 < few < plain
    assert LIMITS.requests * (few + phases.SHORT_PROMPT_TOKENS) + 2 * LIMITS.chunk <= 20_000


def test_only_penalized_requests_are_limited_and_only_if_that_lowers_their_number():
    limited = LIMITS.with_fewer_penalized()
    assert limited is not None
    assert [find_phase(limited, kind).bound.requests for kind in (PhaseKind.PENALTIES, PhaseKind.EAGER_DECODE)] == [
        64,
        300,
    ]
    assert find_phase(LIMITS, PhaseKind.PENALTIES).bound.requests == 300
    assert limited.with_fewer_penalized() is None
    assert replace(LIMITS, requests=64).with_fewer_penalized() is None
