"""The largest forwards that a server's configuration allows (:mod:`.kv_sizing.script`), driven over HTTP and checked.

A phase counts only when every rank has seen its batch at its bound, as the engine's own ``ForwardBatch`` says it
(:mod:`.events`): a scheduler may always decide otherwise than one thinks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain

from sglang_moe_patches.changes.kv_sizing.script import (
    DECODES,
    LEAST,
    SAMPLED,
    SHORT_PROMPT,
    Configuration,
    Phase,
    Tokens,
    room,
)
from sglang_moe_patches.observers.events import Event, Forward, Watch, of_kind
from sglang_moe_patches.servers.client import LONGEST_S, Client, Unanswered, watched

ATTEMPTS = 3
"""Which requests share a forward depends on when they arrive."""
LOST = "no answer: "
STALLED_S, STALLED_FORWARDS = 10.0, 100
"""An attempt is over when for so long, and for so many forwards, no batch came that is nearer to the bound."""
ABORTING_S = 60.0
"""Seconds in which a server answers what was aborted."""
ENDING_S = 20.0
"""Seconds in which a server that stopped answering is expected to end, which whoever watches it then says."""


class Stuck(RuntimeError):
    """A server that runs does not answer. The message says what was asked."""


@dataclass
class Outcome:
    """What came of a phase.

    :param events: of each process, from the phase's begin to its end.
    :param seen: whether every rank has seen the batch at its bound.
    """

    phase: Phase
    seen: bool = False
    said: str = ""
    events: dict[str, list[Event]] = field(default_factory=dict)


class Growth:
    """Whether the forwards of an attempt still come nearer to anything larger.

    Requests that wait for one that never gets in would decode until they have all their tokens.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._most: dict[str, int] = {}
        self._since, self._forwards = time.monotonic(), 0

    def add(self, forwards: Sequence[Forward]) -> None:
        for seen in forwards:
            self._forwards += 1
            for name in LEAST:
                count = getattr(seen.batch, name)
                if count > self._most.get(name, -1):
                    self._most[name] = count
                    self._since, self._forwards = time.monotonic(), 0

    @property
    def stalled(self) -> bool:
        return self._forwards >= STALLED_FORWARDS and time.monotonic() - self._since > STALLED_S


class Driver:
    """Sends requests to a server and watches what its ranks see.

    :param watching: called about five times a second while waiting; what it raises ends the driving.
    :param ranks: names of the processes that run the model.
    """

    def __init__(
        self, client: Client, watch: Watch, ranks: set[str], c: Configuration, watching: Callable[[], None]
    ) -> None:
        self.client, self.watch, self.ranks, self.c, self.watching = client, watch, ranks, c, watching
        # Not waited for when driving ends early: the server's end ends what it was asked.
        self._pool = ThreadPoolExecutor(2)

    def drive(self, phase: Phase) -> Outcome:
        """Bring a phase about, in up to ``ATTEMPTS`` attempts."""
        outcome = Outcome(phase)
        for attempt in range(ATTEMPTS):
            self._attempt(outcome, Tokens(f"{phase.name} {attempt}", self.c.vocabulary))
            if outcome.seen:
                break
        return outcome

    def _attempt(self, outcome: Outcome, tokens: Tokens) -> None:
        phase, reached, growth = outcome.phase, set[str](), Growth()

        def look() -> bool:
            self.watching()
            for rank, events in self.watch.new().items():
                outcome.events.setdefault(rank, []).extend(events)
                forwards = of_kind(events, Forward)
                growth.add(forwards)
                if any(map(phase.bound.met, forwards)):
                    reached.add(rank)
            return reached >= self.ranks

        pending: list[Future[str]] = []
        if phase.background:
            others = [tokens.some(SHORT_PROMPT) for _ in range(phase.background * self.c.ranks)]
            new = room(phase.background, self.c, most=4096)
            pending.append(self._pool.submit(self._ask, [others], new, False))
            self._until(lambda: look() or self._decoding(outcome, phase.background), pending, growth)
        prompts = [phase.prompts(tokens) for _ in range(self.c.ranks)]
        turns = [list(each) for each in zip(*prompts, strict=True)] if phase.in_turn else [list(chain(*prompts))]
        pending.append(self._pool.submit(self._ask, turns, phase.new_tokens, phase.logprobs))
        growth.begin()
        outcome.seen = self._until(look, pending[-1:], growth, to_the_end=phase.to_the_end)
        # Again and again: what the server has not yet read when it is told to abort is not aborted.
        deadline = time.monotonic() + ABORTING_S
        while wait(pending, 0).not_done:
            if time.monotonic() > deadline:
                raise Stuck(f"{phase.name}: what was aborted is not answered after {ABORTING_S:.0f} s")
            self.client.abort_all()
            wait(pending, 0.5)
            look()
        said = [future.result() for future in pending]
        if any(each.startswith(LOST) for each in said):
            self._until(self._never, [], patience_s=ENDING_S)
        outcome.said = outcome.said or next(filter(None, said), "")
        # Sampling comes after a forward and is seen when the next begins.
        ending = [tokens.some(SHORT_PROMPT) for _ in range(self.c.ranks)]
        watched(lambda: self._ask([ending], 2, False), self.watching)
        outcome.seen = look() or outcome.seen

    def _until(
        self,
        done: Callable[[], bool],
        pending: list[Future[str]],
        growth: Growth | None = None,
        patience_s: float = LONGEST_S,
        to_the_end: bool = False,
    ) -> bool:
        deadline = time.monotonic() + patience_s
        while not done() or to_the_end:
            if (pending and not wait(pending, 0.1).not_done) or time.monotonic() > deadline:
                return done()
            if growth is not None and growth.stalled and not to_the_end:
                return False
            if not pending:
                time.sleep(0.1)
        return True

    def _never(self) -> bool:
        self.watching()
        return False

    def _decoding(self, outcome: Outcome, requests: int) -> bool:
        return any(
            seen.batch.mode in DECODES and seen.batch.requests >= requests
            for events in outcome.events.values()
            for seen in of_kind(events[-50:], Forward)
        )

    def _ask(self, turns: list[list[list[int]]], new_tokens: int, logprobs: bool) -> str:
        """:param turns: the prompts of each request, asked one after the other.
        :returns: "", or what the server had against one.
        """
        for prompts in turns:
            try:
                said = self.client.generate(prompts, new_tokens, sampling=SAMPLED, logprobs=logprobs)
            except Unanswered as error:
                return f"{LOST}{error}"
            if said:
                return said
        return ""
