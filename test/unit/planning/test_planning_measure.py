"""What ``plan`` reads out of what a server's processes recorded, and the phases it derives: no engine."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_events import FACTS, GB, changed, forward, memory, process
from sglang_moe_patches.lab.observers import memory as observed
from sglang_moe_patches.lab.observers import observer
from sglang_moe_patches.lab.observers.events import (
    Event,
    Failure,
    Forward,
    Place,
    Ready,
    Start,
    Watch,
    of_kind,
    to_json,
)
from sglang_moe_patches.lab.servers.client import Unanswered, watched
from sglang_moe_patches.memory.kv_sizing import script
from sglang_moe_patches.memory.kv_sizing.script import Bound, Configuration, PhaseKind
from sglang_moe_patches.planning import measure, verify
from sglang_moe_patches.planning.measure import Verified

CONFIGURATION = Configuration(
    chunk=1024, input_tokens=10_000, cache_tokens=50_000, requests=300, captured=64, vocabulary=5000, context=10_006
)


def test_a_gpu_is_divided_into_parts_that_add_up() -> None:
    found = measure.rank(process(), 40 * GB)
    parts = (found.before, found.weights, found.cache, found.after_cache, found.forwards, found.lowest_free)
    assert [part / GB for part in parts] == [1, 30, 40, 4, 5.5, 19.5]
    assert sum(parts) == found.total
    # PyTorch keeps 4 GB more than before the first forward; 1.5 GB were taken beside it.
    assert [part / GB for part in (found.tensors, found.slack, found.outside)] == [4, 0, 1.5]
    assert found.forwards == found.tensors + found.slack + found.outside
    assert found.name == "GPU 3 (TP rank 1)"
    assert found.capture_peak == 2 * GB


def test_a_peak_of_the_start_is_no_tensor_of_a_forward() -> None:
    events = process()
    ready = memory(25, 72, 73, 90)
    events[5], events[6] = replace(events[5], memory=ready), replace(events[6], before=ready)
    assert measure.rank(events, 40 * GB).tensors == 4 * GB


@pytest.mark.parametrize("count", ["retries", "ooms"])
def test_memory_that_was_asked_for_twice_did_not_suffice(count: str) -> None:
    events = process()
    assert measure.retries(events) == 0
    events[-1] = changed(events[-1], **{count: 1})
    assert measure.retries(events) == 1


def test_retries_before_the_first_forward_do_not_count() -> None:
    events = process()
    later = [changed(event, retries=2) for event in events[4:]]
    forwards = [changed(event, "before", retries=2) for event in of_kind(later, Forward)]
    assert measure.retries([*events[:4], *later[:2], *forwards]) == 0


def test_a_draft_model_that_is_ready_first_is_not_taken_for_the_model() -> None:
    # Capturing its graphs runs forwards of it, before any of the model.
    events = process()
    at = next(number for number, event in enumerate(events) if isinstance(event, Ready))
    drafting = {"place": Place(draft=True), "server": replace(FACTS, kv_bytes=1)}
    draft = changed(replace(events[at], **drafting), retries=-3)
    both = [*events[:at], draft, *events[at:]]
    assert measure.ready(both) == events[at]
    assert measure.ready([draft]) is None
    assert measure.target_ranks({"1": both, "2": [draft]}) == {"1"}
    assert measure.retries(both) == measure.retries(events) == 0
    assert measure.rank(both, 40 * GB) == measure.rank(events, 40 * GB)


def test_what_the_fraction_is_of_is_the_smallest_of_the_ranks() -> None:
    one, other = process(), process()
    other[3] = replace(other[3], before_load=98 * GB)
    assert measure.before_load({"1": one, "2": other}) == 98 * GB
    with pytest.raises(measure.NotObserved, match="before loading"):
        measure.before_load({"1": one[:3]})


# --- the observer -----------------------------------------------------------------------------------------------------


def test_a_failing_observer_says_so_once_and_lets_the_server_go_on(tmp_path) -> None:
    observer = observed.Observer(str(tmp_path), ())
    for _ in range(2):
        observer.attempt(lambda: 1 / 0)
    events = Watch(tmp_path).new()[observer.path.stem]
    assert [type(event) for event in events] == [Start, Failure]
    assert "ZeroDivisionError" in measure.failure({"1": events})


def test_a_line_that_is_still_being_written_is_read_later(tmp_path) -> None:
    path, watch = tmp_path / "7.jsonl", Watch(tmp_path)
    start, sized = to_json(process()[0]), to_json(process()[3])
    path.write_text(f"{start}\n{sized[:13]}")
    assert watch.new() == {"7": process()[:1]}
    assert watch.new() == {}
    with path.open("a") as file:
        file.write(f"{sized[13:]}\n")
    assert watch.new() == {"7": [process()[3]]}


@pytest.mark.parametrize(
    ("pool", "table", "kind"),
    [
        ("MHATokenToKVPool", "ReqToTokenPool", ""),
        ("SWAKVPool", "ReqToTokenPool", "sliding-window"),
        ("HybridLinearKVPool", "HybridReqToTokenPool", "Mamba"),
    ],
)
def test_pools_that_are_more_than_one_kv_cache_are_told_apart(pool: str, table: str, kind: str) -> None:
    assert observer.hybrid(type(pool, (), {})(), type(table, (), {})()) == kind


# --- the load ---------------------------------------------------------------------------------------------------------


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
    at_it = {"mode": "EXTEND", "graph": graph, **dict.fromkeys(fields, size)}
    assert bound.met(forward(memory(20), memory(20), **at_it))
    spoilt = [*({name: size - 1} for name in fields), {"mode": "DECODE"}, {"graph": not graph}][which]
    assert not bound.met(forward(memory(20), memory(20), **{**at_it, **spoilt}))


def test_captured_decodes_are_read_from_every_release_s_words() -> None:
    assert script._asked_to_capture({"cuda_graph_max_bs": 256}) == 256
    assert script._asked_to_capture({"cuda_graph_max_bs": 256, "disable_cuda_graph": True}) == 0
    assert script._asked_to_capture({"cuda_graph_max_bs": 160, "device": "cpu"}) == 0
    assert script._asked_to_capture({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": 48}}}) == 48
    assert script._asked_to_capture({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 48}}}) == 0


# --- the search -------------------------------------------------------------------------------------------------------


def test_as_many_prompts_of_many_lengths_come_whatever_the_kv_cache_holds() -> None:
    found = []
    for tokens in (50_000, 5_000_000):
        phases = script.derive(configured(cache_tokens=tokens), logprobs=False).phases
        (phase,) = (each for each in phases if each.kind is PhaseKind.VARIED)
        found.append([len(prompt) for prompt in phase.prompts(script.Tokens("x", 1000))])
    assert found[0] == found[1]
    assert sum(found[0]) > 20 * CONFIGURATION.chunk


def test_a_signal_is_heard_while_a_server_is_waited_for() -> None:
    released = threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(released.wait, interrupt)
    released.set()
    assert watched(lambda: 5, interrupt) == 5


# --- verification -----------------------------------------------------------------------------------------------------


def judged(
    events: list[Event], log: str = "", errors: tuple[str, ...] = (), during: list[Event] | None = None
) -> Verified:
    answered = SimpleNamespace(answered=10, aborted=2, errors=list(errors))
    return verify.judge({"1": events}, {"1": during or events}, log, answered, CONFIGURATION, 0.9)


def test_a_verification_holds_only_without_retries_and_failed_requests() -> None:
    found = judged(process(), "Decode batch. token usage: 0.99\nKV cache pool is full. Retract requests. #retracted: 1")
    assert found.held
    assert found.not_seen == ()
    assert (found.retractions, found.usage, found.requests, found.aborted) == (1, 0.99, 10, 2)
    assert found.lowest_free == {"GPU 3 (TP rank 1)": round(19.5 * GB)}
    retried = process()
    retried[-1] = changed(retried[-1], retries=3)
    assert judged(retried).reasons == ("GPU 3 (TP rank 1): the allocator gave memory back and tried again 3 times",)
    assert not judged(process(), errors=("HTTP 500: no",)).held


def test_a_verification_that_was_not_observed_to_its_end_does_not_hold() -> None:
    events = process()
    forwards = of_kind(events, Forward)
    assert judged(events, during=forwards).held
    unseen = judged(events, during=of_kind(events, Ready))
    assert unseen.reasons == ("GPU 3 (TP rank 1): no forward was recorded, so it is not known what was free",)
    failed = judged([*events, Failure("no space left")], during=forwards)
    assert failed.reasons == ("what was free is not known to the end: no space left",)


@pytest.mark.parametrize(("leaves", "excused"), [(0.5, True), (None, False)])
def test_only_a_client_that_was_to_leave_may_go_without_an_answer(leaves: float | None, excused: bool) -> None:
    class Silent:
        def generate(self, *args: Any, **kwargs: Any) -> str:
            raise Unanswered(TimeoutError("nothing"), lost=False)

    asked = verify._Load(Silent(), CONFIGURATION, False)
    asked.ask([[1]], 1, threading.Event(), leaves=leaves)
    assert (asked.aborted, asked.errors) == ((1, []) if excused else (0, ["TimeoutError: nothing"]))


def test_what_a_verification_did_not_bring_about_is_said() -> None:
    assert judged(process(), "token usage: 0.40, token usage: 0.55").not_seen == (
        "a retraction",
        "a full KV cache (at most 55 %)",
    )


@given(st.integers(1, 5000), st.integers(0, 10))
def test_random_lengths_lie_between_one_and_the_most(most: int, seed: int) -> None:
    import random

    assert 1 <= verify._length(random.Random(seed), most) <= most


@given(st.integers(8, 600), st.integers(128, 40_000), st.integers(1, 4))
def test_what_fills_the_kv_cache_is_let_in_and_wants_more_than_there_is(
    requests: int, share: int, context: int
) -> None:
    c = configured(requests=requests, cache_tokens=requests * share, input_tokens=(context + 1) * share, chunk=4096)
    count, prompt, new = verify.filling(c)
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
    c = configured(cache_tokens=tokens, chunk=8192, requests=requests, input_tokens=65_000)
    count, prompt, _ = verify.filling(c)
    assert (prompt == whole * 8192) if whole else (prompt < 8192)
    assert 0.9 * tokens < count * prompt < tokens
