"""Decides which request of a rehearsal is put next, and knows of the engine what is reported to it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from sglang_moe_patches.memory.kv_sizing.phases import (
    DECODES,
    SHORT_PROMPT_TOKENS,
    Batch,
    Estimate,
    Limits,
    Phase,
    PhaseKind,
    Plant,
    Tokens,
    max_new_tokens,
    shared_prefix,
)

ATTEMPTS_PER_PHASE = 2
"""Which requests share a forward depends on what the scheduler has left to do when they arrive."""

Make = Callable[[str, Sequence[int], int, Phase], Any]
"""A request of the engine's, from its name, its prompt, its new tokens and the phase whose sampling it has."""


class LoadDriver:
    """The script of one server, from the first request to the last answer.

    Asked again and again for what to put; in between it is told what was seen and answered.

    :param derive: makes what is driven from the limits.
    :param fits: whether there is memory for a phase or a prompt that is larger than what ran.
    :param abort: makes the request that ends all others.
    :param seconds_to_deadline: seconds until no further phase begins.
    :param grace_s: so many more, after which what still runs is left to itself.
    """

    def __init__(
        self,
        derive: Callable[[Limits], Sequence[Phase]],
        limits: Limits,
        make: Make,
        abort: Callable[[], Any],
        seconds_to_deadline: Callable[[], float],
        grace_s: float,
        fits: Callable[[Estimate], bool],
    ):
        self._derive, self.limits, self._make, self._abort, self._fits = derive, limits, make, abort, fits
        self.phases = derive(limits)
        self._seconds_to_deadline, self._grace_s, self._slowest_s = seconds_to_deadline, grace_s, 0.0
        self.seconds: dict[str, float] = {}
        """Of each phase that began, by its name."""
        self.fewer_requests = 0
        """How many run at once from now on, because more would have taken too much memory; 0: as many as can."""
        self.missed: dict[str, PhaseKind] = {}
        """Of phases that were not reached, by their names."""
        self.over = False
        self._numbers = count(1)
        self._waiting: set[str] = set()
        self._phase: Phase | None = None
        self._reached = self._decoding = self._idle = self._stuck = self._ended = self._planted = False
        self._steps = self._run()

    @property
    def phase_name(self) -> str:
        return self._phase.name if self._phase is not None else ""

    def saw(self, batch: Batch) -> None:
        """A forward has run."""
        if self._phase is None:
            return
        self._reached = self._reached or self._phase.bound.met(batch)
        behind = batch.mode in DECODES and batch.requests >= self._phase.background
        self._decoding = self._decoding or behind

    def answered(self, name: str) -> None:
        """A request has ended, however it did."""
        self._waiting.discard(name)

    def planted(self, held: bool) -> None:
        """The caches have been given a :class:`Plant`.

        :param held: what :func:`.planted_prefix.plant` said on this rank.
        """
        self._planted = held

    def end(self) -> None:
        """No further phase; what runs is aborted, or ends by its length."""
        self._ended = True

    def put(self, idle: bool, stuck: bool) -> list[Any]:
        """What to put now: requests, or one :class:`Plant`; nothing while requests are waited for.

        :param idle: the scheduler has nothing to do: what is waited for has been lost.
        :param stuck: it runs nothing and admits none of the requests that wait: they are aborted.
        """
        self._idle, self._stuck = idle, stuck
        try:
            return next(self._steps)
        except StopIteration:
            self.over = True
            return []

    def abort_all(self) -> list[Any]:
        """The request that ends all others; none with speculation, where requests are short and end by their length."""
        return [] if self.limits.draft_tokens else [self._abort()]

    def _run(self) -> Iterator[list[Any]]:
        left, began_kinds = list(self.phases), set[PhaseKind]()
        while left:
            phase = left.pop(0)
            began_kinds.add(phase.kind)
            if phase.estimate is not None and not self._fits(phase.estimate):
                if phase.estimate.fewer_requests:
                    self.fewer_requests = phase.estimate.fewer_requests * self.limits.stages
                    self.limits = replace(self.limits, requests=self.fewer_requests)
                    left = [later for later in self._derive(self.limits) if later.kind not in began_kinds]
                    continue
                self.end()
            self._phase, self._reached = phase, False
            began = self._seconds_to_deadline()
            for attempt in range(ATTEMPTS_PER_PHASE):
                if self._stopping():
                    break
                yield from self._attempt(phase, Tokens(f"{phase.name} {attempt}", self.limits.vocabulary))
                self.seconds[phase.name] = began - self._seconds_to_deadline()
                if self._reached:
                    break
            not_reached = [] if self._reached else [phase]
            if self._stopping():
                not_reached, left = not_reached + left, []
            self.missed |= {each.name: each.kind for each in not_reached}
        self._phase = None

    def _stopping(self) -> bool:
        return self._ended or self._seconds_to_deadline() < 0

    @property
    def _nothing_more_comes(self) -> bool:
        """Whether the requests that were put are waited for in vain: they were lost, are not admitted, or must end."""
        return self._idle or self._stuck or self._ended

    def _attempt(self, phase: Phase, tokens: Tokens) -> Iterator[list[Any]]:
        self._decoding = self._planted = False
        prefix = shared_prefix(phase.shared, self.limits)
        if prefix and self.limits.plants:
            yield [Plant(tuple(prefix))]
            if not self._planted:
                return  # computing it may take minutes
        if phase.background:
            others = [tokens.some(SHORT_PROMPT_TOKENS) for _ in range(phase.background)]
            yield self._requests(others, max_new_tokens(phase.background, self.limits, 4096), phase)
            while self._waiting and not (self._decoding or self._nothing_more_comes):
                yield []
        behind = set(self._waiting)
        prompts, last_tokens = [prefix[: each.shared] + tokens.some(each.fresh) for each in phase.prompts], 0
        for turn in [[prompt] for prompt in prompts] if phase.in_turn else [prompts]:
            # What comes behind a prefix is about as large as what came before.
            if last_tokens and not (phase.growth or self._fits(Estimate(phase.name, len(turn[0]) / last_tokens))):
                self.end()
                break
            last_tokens = len(turn[0])
            if (left_s := self._seconds_to_deadline() + self._grace_s) < phase.growth * self._slowest_s:
                self.end()
                break
            yield self._requests(turn, phase.new_tokens, phase)
            while self._waiting - behind and not self._nothing_more_comes:
                if self._reached and not phase.to_the_end and not phase.in_turn:
                    break
                yield []
            if phase.growth:
                self._slowest_s = max(self._slowest_s, left_s - self._seconds_to_deadline() - self._grace_s)
            if self._ended or self._stuck:
                break
        if self._waiting and not self._idle:
            yield [self._abort()] if self._stuck else self.abort_all()
            while self._waiting and not self._idle:
                # The engine aborts in the batch whose turn it is, and a pipeline has several.
                yield self.abort_all() if self.limits.stages > 1 else []
        self._waiting.clear()
        # The engine keeps a batch for a turn or two after its last answer, with all that its penalties take. Requests
        # that come meanwhile are merged into it.
        while not (self._idle or self._ended):
            yield []

    def _requests(self, prompts: Sequence[Sequence[int]], new: int, phase: Phase) -> list[Any]:
        names = [f"rehearsal-{next(self._numbers)}" for _ in prompts]
        self._waiting.update(names)
        return [self._make(name, prompt, new, phase) for name, prompt in zip(names, prompts, strict=True)]
