"""Tests of the load driver, which sends and aborts the requests of a rehearsal. A rehearsal runs *phases*. A phase is a
set of requests that makes one kind of forward pass as large as possible on the server."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from kv_servers import LIMITS, find_phase, largest_batch
from sglang_moe_patches.memory.kv_sizing import phases
from sglang_moe_patches.memory.kv_sizing.load_driver import ATTEMPTS_PER_PHASE, LoadDriver
from sglang_moe_patches.memory.kv_sizing.phases import Batch, PhaseKind, Plant

GRACE_S = 60.0


class Server:
    """Stand-in for a scheduler that has a load driver. The stand-in runs one forward pass for each group of requests,
    and then answers the requests. The forward pass normally is as large as the requests' phase requires.

    :param small_phases: names of phases whose forward passes stay smaller than required.
    :param lost_phases: names of phases whose requests are never answered.
    :param only: kind of the phases to run; ``None`` for all kinds.
    :param left_s: function that returns how many seconds are left for the rehearsal.
    :param plants: whether the radix cache accepts a prefix that was not computed (a *planted* prefix); ``None`` if the
        server cannot plant prefixes.
    :param fits: function that the driver calls before a large phase. Its argument is an ``Estimate`` of the phase's
        memory. It returns whether this memory is free.
    :param changed: fields of ``LIMITS`` that differ in this server, such as ``requests=256``.
    """

    def __init__(
        self,
        small_phases=(),
        lost_phases=(),
        only=None,
        left_s=lambda: 1e9,
        plants=None,
        fits=lambda estimate: True,
        **changed,
    ):
        self.sent_requests, self.short, self.planted, self.aborts, self.small_phases, self.lost_phases = (
            [],
            [],
            [],
            0,
            small_phases,
            lost_phases,
        )
        self.plants, limits = plants, replace(LIMITS, **changed, plants=plants is not None)

        def derive(limits):
            return [phase for phase in phases.derive_phases(limits) if only in (None, phase.kind)]

        def make(name, prompt, new, phase):
            return SimpleNamespace(name=name, prompt=prompt, new=new, phase=phase)

        self.driver = LoadDriver(derive, limits, make, lambda: "abort", left_s, GRACE_S, fits)

    def step(self, idle=False, stuck=False):
        items = self.driver.next_requests(idle, stuck)
        self.aborts += items.count("abort")
        for each in items:
            if isinstance(each, Plant):
                self.planted.append(each.tokens)
                self.driver.record_planting(self.plants)
        new = [each for each in items if each != "abort" and not isinstance(each, Plant)]
        if [each.phase.name for each in new] == [""]:  # the short request that follows a decode
            self.short += new
            self.answer(new)
            return self.step(idle, stuck)
        self.sent_requests += new
        return new

    def run(self, between=lambda requests: None):
        """Run all phases, and return the driver.

        :param between: function that is called before each answer, for example to advance the clock.
        """
        for _ in range(5000):
            requests = self.step(idle=True)
            if self.driver.is_over:
                assert len({each.name for each in self.sent_requests}) == len(
                    self.sent_requests
                )  # otherwise a late answer could end another request
                return self.driver
            between(requests)
            self.serve(requests)
        raise AssertionError("it never ends")

    def serve(self, requests):
        for phase in {id(request.phase): request.phase for request in requests}.values():
            small = Batch(phase.bound.modes[0], tokens=1, requests=1)
            self.driver.record_forward(small if phase.name in self.small_phases else largest_batch(phase))
        self.answer([request for request in requests if request.phase.name not in self.lost_phases])

    def answer(self, requests):
        for request in requests:
            self.driver.finish_request(request.name)


@pytest.mark.parametrize(
    ("kind", "captured", "ends", "short"),
    [
        (PhaseKind.EAGER_DECODE, 0, False, 1),
        (PhaseKind.EAGER_DECODE, 0, True, 1),
        (PhaseKind.PENALTIES, 256, False, 1),  # its decodes may or may not have run in a graph
        (PhaseKind.CAPTURED_DECODE, 256, False, 0),
        (PhaseKind.VARIED, 256, False, 0),
    ],
)
def test_a_short_request_displaces_the_memory_of_a_decode_without_a_graph(kind, captured, ends, short):
    """A decode without a CUDA graph leaves some tensors allocated until another request runs. The driver must therefore
    send a short request between this decode and the next phase. The driver sends the short request only after all
    requests of the decode have left the batch."""
    server = Server(only=kind, requests=256, captured=captured)
    server.serve(server.step())
    if ends:
        server.driver.end()
    assert (server.step(), server.short) == ([], [])  # the ended requests are still in the batch
    server.step(idle=True)
    short_requests = [(len(each.prompt), each.new, each.phase.sampling) for each in server.short]
    assert short_requests == [(phases.SHORT_PROMPT_TOKENS, 2, phases.SAMPLING)] * short


def test_a_phase_begins_when_the_phase_before_has_ended():
    """The driver must not begin a phase while the engine still has the batch of the previous phase. Otherwise the
    engine would merge the new requests into this batch, which has tensors for penalties: too much memory would be
    measured."""
    server = Server(only=PhaseKind.CAPTURED_DECODE, requests=256, captured=256)
    (first, second) = (phase.name for phase in server.driver.phases)
    server.serve(server.step())
    assert [server.step(), server.step()] == [[], []]
    assert {each.phase.name for each in server.step(idle=True)} == {second} != {first}


@pytest.mark.parametrize("vocabulary", [1_950, 151_936])
def test_the_radix_cache_finds_only_the_intended_prefix_in_prompts(vocabulary):
    """Two prompts may share only the prefix that their phase intends, and must differ in the next token. Otherwise the
    radix cache would already have this token, and the forward pass would be too small. One of the two vocabularies in
    this test has hardly more tokens than there are prompts, so a mistake would repeat a token there."""
    server = Server(requests=256, captured=256, mixed=True, vocabulary=vocabulary)
    server.run()
    begins = []
    for request in server.sent_requests:
        shared = phases.shared_prefix(len(request.prompt), replace(LIMITS, vocabulary=vocabulary))
        pairs = enumerate(zip(request.prompt, shared, strict=True))
        same_at = next((at for at, (token, shared_token) in pairs if token != shared_token), None)
        assert same_at == 0 or request.phase.shared
        if same_at is not None:
            begins.append((same_at, request.prompt[same_at]))
    assert len(set(begins)) == len(begins) > 700


def test_a_prompt_for_the_cache_is_answered_before_the_next_prompt_is_sent():
    server = Server(only=PhaseKind.BEHIND_PREFIX)
    (prefix,) = server.step()
    server.driver.record_forward(largest_batch(prefix.phase))  # a forward pass of one of the prefix's own chunks
    assert (server.step(), server.aborts) == ([], 0)
    server.answer([prefix])
    (behind,) = server.step()
    assert behind.prompt[: len(prefix.prompt)] == prefix.prompt


@pytest.mark.parametrize(
    ("radix_cache", "taken_s", "sent_count"), [(True, 10, 10), (True, 80, 1), (False, 10, 2), (False, 30, 1)]
)
def test_a_prompt_that_would_take_too_long_is_not_sent(radix_cache, taken_s, sent_count):
    """The driver sends no prompt that could take longer than the remaining time. It expects the next prompt to take at
    most 4 times as long as the slowest earlier prompt, or 16 times without a radix cache.

    For example, all prompts together have 360 s, and the first prompt takes 80 s. The second prompt is not sent,
    because it could take 320 s, and only 280 s are left.
    """
    left = [360.0 - GRACE_S]

    def pass_time(requests):
        left[0] -= taken_s if requests else 0

    server = Server(only=PhaseKind.BEHIND_PREFIX, left_s=lambda: left[0], radix_cache=radix_cache)
    server.run(pass_time)
    assert len(server.sent_requests) == sent_count


@pytest.mark.parametrize(("left_s", "is_sent"), [(100, True), (39, False)])
def test_an_uncached_long_prompt_is_sent_if_there_is_time_for_another(left_s, is_sent):
    left = [1e9]

    def pass_time(requests):
        kinds = {request.phase.kind for request in requests}
        left[0] -= 100 if PhaseKind.BEHIND_PREFIX in kinds else 0
        if PhaseKind.PENALTIES in kinds:
            left[0] = left_s

    server = Server(left_s=lambda: left[0], radix_cache=False)
    server.run(pass_time)
    assert (PhaseKind.LONG_AMONG_SHORT in {request.phase.kind for request in server.sent_requests}) == is_sent


def test_all_prompts_of_many_lengths_are_answered_even_if_one_meets_the_bound():
    server = Server(only=PhaseKind.VARIED)
    first, *other_requests = server.step()
    assert sum(len(request.prompt) for request in (first, *other_requests)) > 10 * LIMITS.chunk
    server.serve([first])
    assert (server.step(), server.aborts) == ([], 0)
    server.answer(other_requests)
    server.step(idle=True)
    assert (server.driver.is_over, server.aborts) == (True, 0)


def test_a_phase_that_is_not_reached_is_tried_again_and_then_reported():
    server = Server(small_phases=("prefill chunk",))
    assert server.run().missed == {"prefill chunk": PhaseKind.PREFILL}
    assert sum(len(request.prompt) == LIMITS.chunk for request in server.sent_requests) >= ATTEMPTS_PER_PHASE > 1
    assert Server(lost_phases=("prefill chunk",)).run().is_over  # the driver does not wait for lost answers


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_requests_that_a_server_will_not_admit_are_aborted_and_the_next_phase_begins(draft_tokens):
    """If the server admits no request of a phase, the driver aborts the waiting requests. It must do so with
    speculation, too, although it never aborts running requests with speculation."""
    server = Server(draft_tokens=draft_tokens)
    first, *later = server.driver.phases
    for attempt in range(1, ATTEMPTS_PER_PHASE + 1):
        waiting = server.step(idle=True)
        assert [request.phase for request in waiting] == [first]
        assert (server.step(), server.aborts) == ([], attempt - 1)
        assert (server.step(stuck=True), server.aborts) == ([], attempt)
        server.answer(waiting)
    assert server.step(idle=True)[0].phase in later
    assert [*server.driver.missed] == [first.name]


@pytest.mark.parametrize(
    ("changed", "mode", "aborts"),
    [
        ({"stages": 1}, "DECODE", [1, 1]),
        ({"stages": 2}, "DECODE", [1, 2]),  # the two batches of a pipeline take turns
        # Requests with speculation are short enough to end by themselves.
        ({"draft_tokens": 4, "draft_slots": 8}, "TARGET_VERIFY", [0, 0]),
    ],
    ids=str,
)
def test_a_running_decode_is_aborted_after_its_largest_batch_ran(changed, mode, aborts):
    server = Server(only=PhaseKind.EAGER_DECODE, captured=100, **changed)
    first = server.step()
    assert len(first) == LIMITS.requests
    assert (server.step(), server.aborts) == ([], 0)
    server.driver.record_forward(Batch(mode, tokens=4 * LIMITS.requests, requests=LIMITS.requests))
    for count in aborts:
        assert (server.step(), server.aborts) == ([], count)
    assert not server.driver.is_over  # the aborted requests are still to be answered
    server.answer(first)
    server.step(idle=True)
    (phase,) = server.driver.phases
    assert (server.driver.is_over, server.driver.missed) == (True, {})
    assert (phase.new_tokens <= phases.LONG_PROMPT_NEW_TOKENS) == (mode == "TARGET_VERIFY")


PREFIXED = [PhaseKind.BEHIND_PREFIX, PhaseKind.SHARED_PREFIX, PhaseKind.LONG_AMONG_SHORT]


@pytest.mark.parametrize("kind", PREFIXED)
def test_a_prefix_is_planted_before_the_requests_that_begin_with_it(kind):
    server = Server(only=kind, plants=True)
    assert (server.step(), len(server.planted)) == ([], 1)
    assert server.run().missed == {}
    assert len(server.planted) == 1
    longest = max((request.prompt for request in server.sent_requests), key=len)
    assert tuple(longest[: len(server.planted[0])]) == server.planted[0]


@pytest.mark.parametrize("kind", PREFIXED)
def test_a_phase_whose_prefix_was_not_planted_is_not_computed(kind):
    """The driver *plants* a prefix: it puts the prefix into the radix cache without computing it. If planting fails,
    the driver tries once more, because slots of the KV cache may become free. If planting fails again, the driver skips
    the phase, because computing the prefix could take minutes."""
    server = Server(only=kind, plants=False)
    driver = server.run()
    assert (server.sent_requests, len(server.planted), len(driver.missed)) == ([], ATTEMPTS_PER_PHASE, 1)


@pytest.mark.parametrize("plants", [None, True])
def test_the_duration_of_each_phase_is_recorded(plants):
    clock = [1000.0]

    def pass_time(requests):
        clock[0] -= 3.0 if requests else 0.0
        if any(request.phase.kind is PhaseKind.PENALTIES for request in requests):
            clock[0] = -1.0  # no further phase begins

    server = Server(left_s=lambda: clock[0], plants=plants)
    driver = server.run(pass_time)
    assert [*driver.seconds, *driver.missed] == [phase.name for phase in driver.phases]
    assert driver.missed
    assert driver.seconds["prefill chunk"] == 3.0 * phases.GROWING_PROMPTS
    assert sum(driver.seconds.values()) == 1001.0


def test_the_default_request_limit_is_lowered_until_its_memory_is_free():
    nobody_asked = {"requests": 2048, "captured": 32, "has_default_requests": True}
    server = Server(fits=lambda estimate: not estimate.fewer_requests or "of 512" not in estimate.name, **nobody_asked)
    driver = server.run()
    assert (driver.fewer_requests, driver.missed) == (512, {})
    eager = [f"eager decode of {count} requests" for count in (64, 128, 256, 512)]
    assert [name for name in driver.seconds if name.startswith("eager")] == eager
    assert "decode of one long request among 511 short ones" in driver.seconds


@pytest.mark.parametrize(
    ("changed", "ends_in", "restart_requests"),
    [
        ({}, "decode of 32 requests with penalties and a logit bias", 0),
        ({}, "eager decode of 64 requests", 32),  # a decode that every server must rehearse
        ({}, "eager decode of 512 requests", 256),
        ({}, "decode of one long request among 2047 short ones", 1024),
        ({}, "prompts of many lengths", 1024),  # the largest decode left too little memory for this phase
        (
            {"captured": 0, "requests": 256},
            "prompts of many lengths",
            0,
        ),  # 256 requests are the required number without graphs
        ({"has_default_requests": False}, "prompts of many lengths", 0),  # the user has set the number
        ({"stages": 2, "micro_batch": 1024}, "prompts of many lengths", 0),
    ],
)
def test_the_next_smaller_request_limit_is_known_wherever_a_rehearsal_ends(changed, ends_in, restart_requests):
    server = Server(**{"requests": 2048, "captured": 32, "has_default_requests": True} | changed)
    assert ends_in in [phase.name for phase in server.driver.phases]

    def end(got):
        if any(each.phase.name == ends_in for each in got):
            server.driver.end()

    driver = server.run(end)
    assert ([*driver.seconds][-1], driver.restart_requests, driver.fewer_requests) == (*(ends_in, restart_requests, 0),)


def test_each_pipeline_stages_batch_has_its_share_of_fewer_requests():
    nobody_asked = {"requests": 2048, "captured": 32, "has_default_requests": True, "stages": 2, "micro_batch": 1024}
    driver = Server(fits=lambda each: not each.fewer_requests or "of 512" not in each.name, **nobody_asked).run()
    assert (driver.fewer_requests, driver.limits.batch) == (1024, 512)
    assert "decode of one long request among 511 short ones" in driver.seconds


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (PhaseKind.EAGER_DECODE, {}),  # the user asked for so many requests
        (
            PhaseKind.PENALTIES,
            {"captured": 128, "has_default_requests": True},
        ),  # the largest graph has so many requests
    ],
)
def test_a_required_phase_without_memory_ends_the_rehearsal(kind, changed):
    too_large = find_phase(replace(LIMITS, **changed), kind)
    server = Server(fits=lambda estimate: estimate != too_large.estimate, **changed)
    driver = server.run()
    assert next(iter(driver.missed)) == too_large.name
    assert "prompts of many lengths" in driver.missed
    assert too_large not in [each.phase for each in server.sent_requests]
    assert too_large.bound not in [each.phase.bound for each in server.short]
