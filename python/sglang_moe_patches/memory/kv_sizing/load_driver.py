"""Script of a rehearsal: the requests that the scheduler reads in each turn, derived from the phases.

A *rehearsal* runs a server's largest forward passes before the first user's request. A *turn* is one iteration of the
scheduler's event loop. A *phase* (:class:`.phases.Phase`) is the set of requests that makes one kind of largest forward
pass. Nothing here imports the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from sglang_moe_patches.memory.kv_sizing.phases import (
    DECODES,
    SAMPLING,
    SHORT_PROMPT_TOKENS,
    Batch,
    Estimate,
    Limits,
    Phase,
    PhaseKind,
    Plant,
    Tokens,
    first_tokens,
    max_new_tokens,
    shared_prefix,
)

ATTEMPTS_PER_PHASE = 2
"""Limit of attempts to run a phase. An attempt fails if no forward pass has the phase's sizes. This may happen, because
the scheduler decides which requests share a forward pass."""


class LoadDriver:
    """Script of a rehearsal, from the first request to the last answer.

    In each turn, rank 0 asks the driver for the next requests. In between, the driver records forward passes and
    answers.

    :param derive: function that derives the phases from the limits.
    :param limits: limits of this server's forward passes.
    :param make: function that makes a request of the engine from a name, a prompt, the number of new tokens and the
        phase.
    :param abort: function that makes the request which aborts all others.
    :param seconds_to_deadline: function that returns the seconds until no further phase may begin.
    :param grace_s: seconds after the deadline in which running requests may end.
    :param fits: function that returns whether there is memory for a forward pass of the estimated size.
    """

    def __init__(
        self,
        derive: Callable[[Limits], Sequence[Phase]],
        limits: Limits,
        make: Callable[[str, Sequence[int], int, Phase], Any],
        abort: Callable[[], Any],
        seconds_to_deadline: Callable[[], float],
        grace_s: float,
        fits: Callable[[Estimate], bool],
    ):
        self._derive, self.limits, self._make, self._abort, self._fits = derive, limits, make, abort, fits
        self.phases = derive(limits)
        self._seconds_to_deadline, self._grace_s, self._slowest_s = seconds_to_deadline, grace_s, 0.0
        self.seconds: dict[str, float] = {}
        """Seconds that each phase has taken, by the phase's name. Phases that never began are left out."""
        self.fewer_requests = 0
        """Limit of concurrent requests from now on, because more requests would take too much memory; 0: as many as the
        server allows."""
        self._most_requests = 0
        """Number of requests in the latest *extra decode*; 0 if no extra decode has begun. An extra decode runs without
        a CUDA graph, and has more requests than a batch with a penalized request may have (:attr:`.Limits.penalized`).
        In a pipeline, no decode counts as extra, because its batches may have more requests than intended."""
        self.restart_requests = 0
        """Limit of concurrent requests for a new rehearsal, in case the latest extra decode (see ``_most_requests``)
        takes too much memory; 0 if no extra decode has begun. The limit is the number of requests in the extra decode
        before it, or :attr:`.Limits.penalized` if there was none. For example, after extra decodes of 512 and 1,024
        requests the limit is 512."""
        self.missed: dict[str, PhaseKind] = {}
        """Phases that ended without a forward pass as large as their ``bound``, and phases that never began because the
        script ended early. The key is the phase's name, and the value is its kind."""
        self.is_over = False
        """Whether :meth:`next_requests` has no further request: all phases have ended, or an error ended the
        rehearsal."""
        self._request_ids, self._first_tokens = count(1), first_tokens(limits)
        self._waiting: set[str] = set()
        """Names of the requests that have no answer yet."""
        self._phase: Phase | None = None
        self._is_reached = self._is_decoding = self._is_planted = False
        """Facts about the phase that runs. ``_is_reached``: a forward pass had the phase's sizes; ``_is_decoding``: the
        phase's background requests (:attr:`.Phase.background`) have begun to decode; ``_is_planted``: the phase's
        prefix was put into the radix cache without computing it."""
        self._is_idle = self._is_stuck = self._is_ended = False
        """Facts about the scheduler and the script. ``_is_idle``: the scheduler has no request; ``_is_stuck``: it
        admits none of its waiting requests; ``_is_ended``: no further phase may begin."""
        self._steps = self._run()

    @property
    def phase_name(self) -> str:
        """Name of the phase that runs; empty if no phase runs."""
        return self._phase.name if self._phase is not None else ""

    def record_forward(self, batch: Batch) -> None:
        """Record a forward pass that has run."""
        if self._phase is None:
            return
        self._is_reached = self._is_reached or self._phase.bound.is_met(batch)
        decodes = batch.mode in DECODES and batch.requests >= self._phase.background
        self._is_decoding = self._is_decoding or decodes

    def finish_request(self, name: str) -> None:
        """Record that a request has ended: it has generated all of its tokens, or was aborted."""
        self._waiting.discard(name)

    def record_planting(self, is_planted: bool) -> None:
        """Record whether :func:`.planted_prefix.plant` has put a phase's prefix into the cache on this rank."""
        self._is_planted = is_planted

    def end(self) -> None:
        """End the script early: no further phase begins. Running requests are aborted. With speculation they are not
        aborted, but run until they have generated all of their tokens."""
        self._is_ended = True

    def next_requests(self, idle: bool, stuck: bool) -> list[Any]:
        """Return the requests that the scheduler reads in this turn. The list is empty if the script waits for forward
        passes or answers. Instead of requests, the list may have one :class:`Plant`: an order to put a prefix into the
        radix cache without computing it.

        :param idle: whether the scheduler has no request. A request of the script that has no answer at this time is
            lost: it never gets an answer.
        :param stuck: whether the scheduler runs nothing and admits none of its waiting requests. The script then aborts
            the waiting requests.
        """
        self._is_idle, self._is_stuck = idle, stuck
        try:
            return next(self._steps)
        except StopIteration:
            self.is_over = True
            return []

    def abort_all(self) -> list[Any]:
        """Return a list with one request, which makes the scheduler abort all other requests. With speculation the list
        is empty, because requests then run until they have generated all of their tokens."""
        return [] if self.limits.draft_tokens else [self._abort()]

    def _run(self) -> Iterator[list[Any]]:
        """Yield the requests of each turn, phase by phase."""
        next_phases, began_kinds = list(self.phases), set[PhaseKind]()
        while next_phases:
            phase = next_phases.pop(0)
            began_kinds.add(phase.kind)
            if phase.estimate is not None and not self._fits(phase.estimate):
                if phase.estimate.fewer_requests:
                    self.fewer_requests = phase.estimate.fewer_requests * self.limits.stages
                    self.limits = self.limits.with_requests(self.fewer_requests)
                    next_phases = [later for later in self._derive(self.limits) if later.kind not in began_kinds]
                    continue
                self.end()
            has_extra = phase.kind is PhaseKind.EAGER_DECODE and phase.bound.requests > self.limits.penalized
            if has_extra and self.limits.stages == 1:  # a pipeline's forward pass may have more requests than intended
                self.restart_requests = max(self.limits.penalized, self._most_requests)
                self._most_requests = phase.bound.requests
            self._phase, self._is_reached = phase, False
            began = self._seconds_to_deadline()
            for attempt in range(ATTEMPTS_PER_PHASE):
                if self._is_stopping():
                    break
                yield from self._attempt(phase, Tokens(f"{phase.name} {attempt}", self.limits.vocabulary))
                self.seconds[phase.name] = began - self._seconds_to_deadline()
                if self._is_reached:
                    break
            if phase.name in self.seconds and phase.bound.modes == DECODES and not phase.bound.graph:
                yield from self._replace_last_decode(phase)
            not_reached = [] if self._is_reached else [phase]
            if self._is_stopping():
                not_reached, next_phases = not_reached + next_phases, []
            self.missed |= {missed.name: missed.kind for missed in not_reached}
        self._phase = None

    def _is_stopping(self) -> bool:
        """Return whether no further phase may begin."""
        return self._is_ended or self._seconds_to_deadline() < 0

    @property
    def _no_answer_will_come(self) -> bool:
        """Whether no further answer will come: requests are lost or are not admitted, or no further phase may begin."""
        return self._is_idle or self._is_stuck or self._is_ended

    def _attempt(self, phase: Phase, tokens: Tokens) -> Iterator[list[Any]]:
        """Yield the requests of each turn in one attempt to run a phase.

        :param tokens: generator of the prompts' tokens, which differ in each attempt.
        """
        self._is_decoding = self._is_planted = False
        prefix = shared_prefix(phase.shared, self.limits)
        if prefix and self.limits.plants:
            yield [Plant(tuple(prefix))]
            if not self._is_planted:
                return  # computing the prefix may take minutes
        if phase.background:
            short = [self._unique_prompt(SHORT_PROMPT_TOKENS, tokens) for _ in range(phase.background)]
            yield self._requests(short, max_new_tokens(phase.background, self.limits, 4096), phase)
            while self._waiting and not (self._is_decoding or self._no_answer_will_come):
                yield []
        background, last_tokens = set(self._waiting), 0
        prompts = [prefix[: prompt.shared] + self._unique_prompt(prompt.fresh, tokens) for prompt in phase.prompts]
        for turn in [[prompt] for prompt in prompts] if phase.in_turn else [prompts]:
            # Phases with a growth are not checked: a chunk after a prefix takes about as much memory as the chunk
            # before it.
            if last_tokens and not (phase.growth or self._fits(Estimate(phase.name, len(turn[0]) / last_tokens))):
                self.end()
                break
            last_tokens = len(turn[0])
            if (left_s := self._seconds_to_deadline() + self._grace_s) < phase.growth * self._slowest_s:
                self.end()
                break
            yield self._requests(turn, phase.new_tokens, phase)
            while self._waiting - background and not self._no_answer_will_come:
                if self._is_reached and not phase.to_the_end and not phase.in_turn:
                    break
                yield []
            if phase.growth:
                self._slowest_s = max(self._slowest_s, left_s - self._seconds_to_deadline() - self._grace_s)
            if self._is_ended or self._is_stuck:
                break
        yield from self._end_requests()

    def _replace_last_decode(self, phase: Phase) -> Iterator[list[Any]]:
        """Run one short request after a decode that may have run without a graph.

        The engine keeps two things of such a decode until the next decode: the attention's workspace (gigabytes for
        hundreds of requests), and the tensors of its sampling. Without the short request the next phase would begin
        with this memory in use, and the flush at the end of the rehearsal would not free it.
        """
        while not self._is_idle:  # else the engine merges the short request into the decode's batch
            yield []
        plain = replace(phase, name="", sampling=SAMPLING, output_logprobs=False)
        prompt = self._unique_prompt(SHORT_PROMPT_TOKENS, Tokens(f"behind {phase.name}", self.limits.vocabulary))
        yield self._requests([prompt], 2, plain)
        while self._waiting and not (self._is_idle or self._is_stuck):
            yield []
        yield from self._end_requests()

    def _end_requests(self) -> Iterator[list[Any]]:
        """Abort the requests that have no answer, and wait until the scheduler has no request."""
        if self._waiting and not self._is_idle:
            yield [self._abort()] if self._is_stuck else self.abort_all()
            while self._waiting and not self._is_idle:
                # The engine aborts only requests of the current batch, and a pipeline has several batches.
                yield self.abort_all() if self.limits.stages > 1 else []
        self._waiting.clear()
        # The engine keeps a batch, with the tensors of its penalties, for a turn or two after its last answer. New
        # requests would be merged into that batch.
        while not (self._is_idle or self._is_ended):
            yield []

    def _unique_prompt(self, length: int, tokens: Tokens) -> list[int]:
        """Return a prompt of ``length`` tokens that shares no prefix with another prompt.

        If the radix cache already had the first tokens of the prompt, the engine would not compute these tokens. The
        forward pass would be smaller, and chunks would end at other tokens.
        """
        return [next(self._first_tokens), *tokens.draw(length - 1)] if length else []

    def _requests(self, prompts: Sequence[Sequence[int]], new: int, phase: Phase) -> list[Any]:
        """Make requests with these prompts and ``new`` new tokens each, and record that they have no answer yet."""
        names = [f"rehearsal-{next(self._request_ids)}" for _ in prompts]
        self._waiting.update(names)
        return [self._make(name, prompt, new, phase) for name, prompt in zip(names, prompts, strict=True)]
