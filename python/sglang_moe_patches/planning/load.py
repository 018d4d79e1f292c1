"""The largest forwards that a server's configuration allows: derived from it, driven over HTTP, and checked.

A phase counts only when every rank has seen its batch at its bound, as the engine's own ``ForwardBatch`` says it
(:mod:`.events`): a scheduler may always decide otherwise than one thinks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from sglang_moe_patches.observers.events import Event, Forward, ServerFacts, Watch, of_kind
from sglang_moe_patches.planning.measure import PhaseKind
from sglang_moe_patches.servers.client import LONGEST_S, Client, Unanswered, watched

DECODES = ("DECODE", "TARGET_VERIFY")
PREFILLS = ("EXTEND",)
SHARING = 8
"""Requests that share the longest prefix in one forward."""
MIXED_DECODES = 32
"""Requests that decode while a mixed chunk arrives."""
SHORT_PROMPT = 8
ATTEMPTS = 3
"""Which requests share a forward depends on when they arrive."""
LOST = "no answer: "
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 20}
"""Choosing a token so takes more memory than taking the likeliest; model cards recommend the like."""
VARIED = 32
"""Requests of the phase that leaves the allocator blocks of many sizes."""
RISING = 8
"""Prompts up to a chunk, each longer than the one before. Blocks that the allocator keeps of one are too small for the
next, so it takes new ones until it has seen the largest. Of prompts in random order, one in a thousand of them a whole
chunk, about as many are longer than all before (``1 + 1/2 + ... + 1/1000`` is 7.5)."""
STALLED_S, STALLED_FORWARDS = 10.0, 100
"""An attempt is over when for so long, and for so many forwards, no batch came that is nearer to the bound."""
ABORTING_S = 60.0
"""Seconds in which a server answers what was aborted."""
ENDING_S = 20.0
"""Seconds in which a server that stopped answering is expected to end, which whoever watches it then says."""


@dataclass(frozen=True)
class Configuration:
    """What bounds a forward on one data-parallel rank of a server that runs."""

    chunk: int | None
    """``--chunked-prefill-size``; ``None`` where chunked prefill is off."""
    input_tokens: int
    """The longest prompt."""
    cache_tokens: int
    """Tokens of the KV cache."""
    requests: int
    """Requests that can run at once."""
    captured: int
    """The largest captured decode batch; 0 without graphs."""
    page: int = 1
    mixed: bool = False
    radix_cache: bool = True
    ranks: int = 1
    """Data-parallel ranks."""
    gathered: bool = False
    """Data-parallel attention: the experts see the tokens of all ranks."""
    vocabulary: int = 1000
    context: int = 0
    """The model's context length."""
    prefill_tokens: int | None = None
    """``--max-prefill-tokens``: of several requests in one forward."""
    all_to_all: bool = False
    """Experts get their tokens from an all-to-all backend, whose buffers follow the routing."""

    @property
    def largest(self) -> int:
        """Tokens of the largest prefill of one request: a chunk, or the longest prompt where that is less."""
        return min(self.chunk or self.input_tokens, self.input_tokens)

    @property
    def together(self) -> int:
        """How many of the largest prefills are computed in one forward, the last in part; 1 where one is a chunk."""
        # One more than those must fit into the KV cache: what they wait for.
        most = [self.cache_tokens // (self.largest + 2 * self.page) - 1, self.requests - 1]
        if self.chunk:
            most.append(-(-self.chunk // self._paged))
        # The engine leaves a request for the next forward that would make its tokens max_prefill_tokens in all.
        if self.prefill_tokens:
            most.append((self.prefill_tokens - 1) // self.largest)
        return max(1, min(most)) if self.chunk or self.prefill_tokens else 1

    @property
    def packed(self) -> int:
        """Tokens of those in one forward; of several at least so many, whose last is cut at a page."""
        if self.together == 1:
            return self.largest // self.page * self.page
        all_whole, before = self.together * self.largest, self.together - 1
        if self.chunk is None:
            return all_whole
        left = self.chunk - before * self._paged - self.together * self.page
        return min(all_whole, before * self.largest + max(0, left))

    @property
    def _paged(self) -> int:
        """What the largest prefill takes of a chunk."""
        return -(-self.largest // self.page) * self.page


def configuration(info: Mapping[str, Any], facts: ServerFacts) -> Configuration:
    """From a server's ``/get_server_info`` and from what its first rank said of itself when it was ready."""
    states = info.get("internal_states") or [{}]
    chunk = info.get("chunked_prefill_size")
    return Configuration(
        chunk=int(chunk) if chunk and chunk > 0 else None,
        # The engine refuses a prompt of as many tokens as that.
        input_tokens=int(info.get("max_req_input_len") or facts.context - 6) - 1,
        cache_tokens=int(info.get("max_total_num_tokens") or facts.kv_tokens),
        requests=int(states[0].get("effective_max_running_requests_per_dp") or facts.table_requests),
        captured=_captured(info),
        page=facts.page,
        mixed=bool(info.get("enable_mixed_chunk")),
        radix_cache=not info.get("disable_radix_cache"),
        ranks=int(info.get("dp_size") or 1),
        gathered=bool(info.get("enable_dp_attention")),
        vocabulary=facts.vocabulary,
        context=facts.context,
        prefill_tokens=int(info.get("max_prefill_tokens") or 0) or None,
        all_to_all=info.get("moe_a2a_backend") not in (None, "none"),
    )


def _captured(info: Mapping[str, Any]) -> int:
    graphs = info.get("cuda_graph_config")  # from 0.5.15 on
    if isinstance(graphs, Mapping):
        decode = graphs.get("decode") or {}
        return 0 if str(decode.get("backend")).endswith("disabled") else int(decode.get("max_bs") or 0)
    off = info.get("disable_cuda_graph") or info.get("device") == "cpu"
    return 0 if off else int(info.get("cuda_graph_max_bs") or 0)


LEAST = ("tokens", "requests", "prefix", "longest_prefix", "logprobs", "all_ranks")


@dataclass(frozen=True)
class Bound:
    """The least that a batch must be; every field must hold in one forward."""

    modes: tuple[str, ...]
    tokens: int = 0
    requests: int = 0
    prefix: int = 0
    longest_prefix: int = 0
    logprobs: int = 0
    all_ranks: int = 0
    graph: bool | None = None

    def met(self, seen: Forward) -> bool:
        return (
            seen.batch.mode in self.modes
            and all(getattr(seen.batch, name) >= getattr(self, name) for name in LEAST)
            and (self.graph is None or seen.graph is self.graph)
        )


@dataclass(frozen=True)
class Phase:
    """One kind of largest forward, and the requests that bring it about.

    :param name: for people.
    :param prompts: of one data-parallel rank, from a source of fresh tokens.
    :param background: requests that decode meanwhile.
    :param in_turn: each prompt is sent when the one before is answered.
    :param to_the_end: not over as soon as the batch was seen at its bound, but when all requests are answered.
    """

    kind: PhaseKind
    name: str
    bound: Bound
    prompts: Callable[[Tokens], list[list[int]]]
    new_tokens: int = 1
    logprobs: bool = False
    background: int = 0
    in_turn: bool = False
    to_the_end: bool = False


class Tokens:
    """Random tokens, alike for the same seed."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def some(self, count: int) -> list[int]:
        # Special ids, placeholders of images above all, are the first few of a vocabulary or its last.
        return self._random.choices(range(min(1000, self._vocabulary // 2), min(50_000, self._vocabulary)), k=count)

    def length(self, most: int) -> int:
        """1 to ``most``, one as likely as the other."""
        return self._random.randint(1, max(1, most))


@dataclass(frozen=True)
class Load:
    """What can be driven, and what cannot, each with the reason."""

    phases: tuple[Phase, ...]
    not_driven: tuple[str, ...]


def derive(c: Configuration, *, logprobs: bool) -> Load:
    """The phases of a configuration, that of prompt log-probabilities last: what it allocates stays reserved.

    :param logprobs: whether to drive that one.
    """
    phases: list[Phase] = []
    missing: list[str] = []
    chunk = c.largest
    whole = chunk // c.page * c.page

    def of(tokens: int) -> Bound:
        return Bound(PREFILLS, tokens=tokens, all_ranks=tokens * c.ranks if c.gathered else 0)

    prefill = of(whole)
    name = "longest prefill" if c.chunk is None else "prefill chunk"
    phases.append(
        Phase(
            PhaseKind.PREFILL,
            name,
            prefill,
            lambda tokens: [tokens.some(count) for count in rising(chunk)],
            in_turn=True,
        )
    )
    if c.together > 1:
        several = replace(of(c.packed), requests=c.together)
        phases.append(
            Phase(PhaseKind.TOGETHER, f"{c.together} of the longest prompts", several, _several(chunk, c.together))
        )

    room = min(c.input_tokens, c.cache_tokens - 2 * c.page)  # of one request
    # A cached prefix may end anywhere; without the cache a whole chunk begins at a multiple of one.
    before = (room - chunk if c.radix_cache else (room // chunk - 1) * chunk) // c.page * c.page
    if c.chunk is None:
        missing.append("a long cached prefix: chunked prefill is off, a prompt comes whole")
    elif before < c.page:
        missing.append("a long cached prefix: the longest request is a chunk")
    else:
        behind = replace(prefill, longest_prefix=before)
        prompts = _behind(before, chunk, c)
        phases.append(
            Phase(PhaseKind.BEHIND_PREFIX, "prefill chunk behind the longest prefix", behind, prompts, in_turn=True)
        )
        # The engine leaves a request for the next forward that would make its tokens max_prefill_tokens in all.
        part = (min(chunk, c.prefill_tokens or chunk) - 1) // SHARING // c.page * c.page
        filler = min(3 * chunk, room // chunk * chunk)
        if c.radix_cache and part and before + filler + 2 * chunk + SHARING * c.page <= c.cache_tokens:
            # The filler runs while the others arrive, so that they share the forward after its last chunk.
            sharing = Bound(PREFILLS, tokens=SHARING * part, requests=SHARING, prefix=SHARING * before)
            phases.append(
                Phase(
                    PhaseKind.SHARED_PREFIX,
                    f"{SHARING} requests behind one prefix",
                    sharing,
                    _sharing(filler, before, part, c),
                )
            )
        else:
            missing.append("several requests behind the longest prefix: no radix cache, or the KV cache is too small")
    if c.mixed and c.chunk is not None:
        decodes = min(MIXED_DECODES, c.requests - 1)
        mixed = Bound(("MIXED",), tokens=whole - c.page, requests=decodes, all_ranks=0)
        phases.append(Phase(PhaseKind.MIXED, "mixed chunk", mixed, _several(chunk, 1), background=decodes))

    captured = min(c.captured, c.requests)
    if captured:
        phases.append(_decode(PhaseKind.CAPTURED_DECODE, f"captured decode of {captured} requests", captured, c))
    if c.requests > captured:
        phases.append(_decode(PhaseKind.EAGER_DECODE, f"eager decode of {c.requests} requests", c.requests, c))
    phases.append(
        Phase(PhaseKind.VARIED, "prompts of many lengths", prefill, _varied(chunk, c), new_tokens=4, to_the_end=True)
    )
    if logprobs:
        asked = Bound(PREFILLS, logprobs=c.packed)
        phases.append(
            Phase(PhaseKind.LOGPROBS, "prompt log-probabilities", asked, _several(chunk, c.together), logprobs=True)
        )
    if c.all_to_all:
        missing.append("tokens that all go to the experts of one rank")
    return Load(tuple(phases), tuple(missing))


def rising(chunk: int) -> list[int]:
    """Lengths of prompts up to a chunk, each longer than the one before."""
    return sorted({-(-chunk * part // RISING) for part in range(1, RISING + 1)})


def _several(length: int, count: int) -> Callable[[Tokens], list[list[int]]]:
    """Prompts that are computed together; where there are several, the first runs while the others arrive."""
    return lambda tokens: [tokens.some(length) for _ in range(count + (count > 1))]


def _behind(before: int, chunk: int, c: Configuration) -> Callable[[Tokens], list[list[int]]]:
    """The prefix, for the cache, where later phases ask for it again; and then a chunk of other tokens behind it."""

    def prompts(tokens: Tokens) -> list[list[int]]:
        prefix = Tokens("prefix", c.vocabulary).some(before)
        return [*([prefix] if c.radix_cache else []), prefix + tokens.some(chunk)]

    return prompts


def _sharing(filler: int, shared: int, part: int, c: Configuration) -> Callable[[Tokens], list[list[int]]]:
    def prompts(tokens: Tokens) -> list[list[int]]:
        prefix = Tokens("prefix", c.vocabulary).some(shared)
        return [tokens.some(filler), *(prefix + tokens.some(part) for _ in range(SHARING))]

    return prompts


def _varied(chunk: int, c: Configuration) -> Callable[[Tokens], list[list[int]]]:
    """Prompts of any length to one and a half chunks.

    Forwards of many sizes split the allocator's blocks in many ways, and it keeps more than the largest alone needs.
    As many whatever the KV cache holds: a server with a larger one must not be the first to see them.
    """
    most = min(chunk + chunk // 2, c.input_tokens)

    def prompts(tokens: Tokens) -> list[list[int]]:
        return [tokens.some(most), *(tokens.some(tokens.length(most)) for _ in range(VARIED - 1))]

    return prompts


def _decode(kind: PhaseKind, name: str, requests: int, c: Configuration) -> Phase:
    # Enough that the first still run when the last arrive; they are aborted as soon as all were seen together.
    return Phase(
        kind,
        name,
        Bound(DECODES, requests=requests, graph=kind is PhaseKind.CAPTURED_DECODE),
        lambda tokens: [tokens.some(SHORT_PROMPT) for _ in range(requests)],
        new_tokens=_room(requests, c, most=1024),
    )


def _room(requests: int, c: Configuration, most: int) -> int:
    """New tokens that so many short requests can ask for and still all be admitted, beside a chunk of others."""
    cache = c.cache_tokens - 2 * c.largest
    return max(2, min(most, int(0.9 * cache) // requests - SHORT_PROMPT - 2 * c.page, c.input_tokens - SHORT_PROMPT))


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
            new = _room(phase.background, self.c, most=4096)
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
