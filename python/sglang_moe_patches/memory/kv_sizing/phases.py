"""What is driven: the largest forwards that a server's configuration allows, as data.

One definition for the rehearsal and for the tests of its phases.
Nothing here imports the engine or torch.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

from sglang_moe_patches.memory.kv_sizing.ranks import Order

DECODES = ("DECODE", "TARGET_VERIFY")
PREFILLS = ("EXTEND",)
SHARED_PREFIX_REQUESTS = 8
"""Requests that share the longest prefix in one forward."""
MAX_PART_FRACTION = 1 / 16
"""Of the longest prefix, by which it grows at most with each prompt, where a radix cache is to hold it and it cannot be
planted. The engine computes an aborted prompt to its end, and the request by which it tests itself waits: unanswered
that ends the server."""
FIRST_PART_FRACTION = 1 / 4
"""Of the longest prefix that is planted, or of the longest prompt without a radix cache: computed before the whole, to
tell how long that will take."""
LONG_PROMPT_NEW_TOKENS = 64
"""New tokens of requests that wait for one long prompt, and then decode with it."""
MIXED_DECODES = 32
"""Requests that decode while a mixed chunk arrives."""
SHORT_PROMPT_TOKENS = 8
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 20}
"""Choosing a token so takes more memory than taking the likeliest; model cards recommend the like."""
BIASED_TOKEN = 1000
"""Token of the logit bias, or the last token of a smaller vocabulary."""
PENALIZED = {
    **SAMPLED,
    **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.05},
    "logit_bias": {str(BIASED_TOKEN): -1.0},
}
"""Each of them allocates a number for every request and every token of the vocabulary."""
RISE = 4
"""Times more requests with which a decode is rehearsed, at most, so that its memory is known before it runs."""
FEW = 64
"""Requests of the first decode at most: what they sample takes less than is left free in any case."""
PENALIZED_WITHOUT_GRAPHS = 256
"""Requests with penalties that run at once, where nobody says how many and no decode is captured."""
VARIED_PROMPTS = 16
"""Requests of the phase that leaves the allocator blocks of many sizes: a dozen chunks, cut at other places each."""
GROWING_PROMPTS = 8
"""Prompts up to a chunk, each longer than the one before. Blocks that the allocator keeps of one are too small for the
next, so it takes new ones until it has seen the largest. Of prompts in random order, one in a thousand of them a whole
chunk, about as many are longer than all before (``1 + 1/2 + ... + 1/1000`` is 7.5)."""


Arguments = Mapping[str, Any]
"""A server's arguments, as resolved or as it tells them."""
MAMBA = "Mamba"
"""Of :attr:`ServerFacts.hybrid`: a state for each request, beside the KV cache."""
STATE_INTERVAL_TOKENS = 256
"""Tokens. A state is kept where a request ends, or at multiples of 64 to 256 tokens, as release, model and strategy go:
at multiples of these in any case."""
WINDOW_OVERHANG_TOKENS = 128
"""Tokens that may stay behind a sliding window until they are given back (0.5.23: every so many)."""


class PhaseKind(StrEnum):
    """The kinds of largest forwards that are driven."""

    PREFILL = "prefill"
    TOGETHER = "together"
    """Several prompts in one forward."""
    BEHIND_PREFIX = "behind prefix"
    SHARED_PREFIX = "shared prefix"
    MIXED = "mixed"
    CAPTURED_DECODE = "captured decode"
    EAGER_DECODE = "eager decode"
    VARIED = "varied"
    PENALTIES = "penalties"
    """The largest decode, whose sampling keeps counts of every token for every request."""
    LONG_AMONG_SHORT = "long among short"
    """An attention backend may copy the request table, as wide as the longest request."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one forward.

    :param tokens: rows of its input.
    :param prefix: tokens of all requests that are cached already, and ``longest_prefix`` of one.
    :param longest: tokens of the longest request, where the engine has them on the host.
    :param all_ranks: tokens of all data-parallel ranks, where they are gathered.
    """

    tokens: int = 0
    requests: int = 0
    prefix: int = 0
    longest_prefix: int = 0
    longest: int = 0
    all_ranks: int = 0


SIZES = tuple(each.name for each in fields(Sizes))
"""The names of its fields."""


@dataclass(frozen=True)
class Batch(Sizes):
    """What the engine's ``ForwardBatch`` says of itself.

    :param mode: the engine's ``ForwardMode``.
    :param graph: a captured graph ran it.
    """

    mode: str
    graph: bool = False


@dataclass(frozen=True)
class Bound(Sizes):
    """The least that a batch must be; every size must hold in one forward."""

    modes: tuple[str, ...]
    graph: bool | None = None

    def met(self, batch: Batch) -> bool:
        return (
            batch.mode in self.modes
            and all(getattr(batch, name) >= getattr(self, name) for name in SIZES)
            and (self.graph is None or batch.graph is self.graph)
        )


@dataclass(frozen=True)
class ServerFacts:
    """What a model runner consists of, as far as its release tells.

    :param fixed_bytes: of what goes with requests: their table, and Mamba's states.
    :param page: tokens.
    :param hybrid: the kind of pool that is more than one KV cache; "": there is one.
    :param window: tokens of a sliding window, and ``window_tokens``: of the KV cache of the layers that have one.
    :param captured: the largest decode batch that has a graph; ``None``: none has, or not yet.
    """

    fixed_bytes: int
    page: int
    vocabulary: int
    hybrid: str = ""
    window: int = 0
    window_tokens: int = 0
    captured: int | None = None


@dataclass(frozen=True)
class Limits:
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
    stages: int = 1
    """Of a pipeline, which has several batches under way."""
    micro_batch: int = 0
    """``--pp-max-micro-batch-size``; 0: what runs at once, shared by the stages."""
    mixed: bool = False
    radix_cache: bool = True
    plants: bool = False
    """The radix cache takes a prefix that was not computed (:mod:`.planted_prefix`)."""
    gathered: int = 1
    """Ranks of data-parallel attention, whose tokens the experts see together."""
    vocabulary: int = 1000
    prefill_tokens: int | None = None
    """``--max-prefill-tokens``: of several requests in one forward."""
    prefill_requests: int = 0
    """``--prefill-max-requests``: in one forward; 0: no limit."""
    window: int = 0
    """Tokens of a sliding window."""
    window_tokens: int = 0
    """Tokens of the KV cache of the layers that have one; 0: none has."""
    states: bool = False
    """Layers keep a state for each request, and a prefix is cached where one was kept."""
    stop_token: bool = False
    """The tokenizer has an end of sequence, which ``min_new_tokens`` bars."""
    draft_tokens: int = 0
    """``--speculative-num-draft-tokens``: rows of a request in one verification; 0: no speculation."""
    draft_slots: int = 0
    """Tokens of the KV cache that a request's next drafts take beside its own."""
    samples_by_seed: bool = False
    """Every request is sampled with a seed (deterministic inference), and the sampler refuses ``min_p``."""
    default_requests: bool = False
    """Nobody has said how many requests run at once: the engine's default is thousands."""
    limits_penalized: bool = False
    """Fewer requests run while one is penalized, although ``--max-running-requests`` is given: memory for as many
    penalized requests would leave the KV cache fewer tokens than the engine's own."""

    @property
    def batch(self) -> int:
        """Requests in one forward."""
        return min(self.requests, self.micro_batch or max(1, self.requests // self.stages))

    def with_requests(self, requests: int) -> Limits:
        """With no more than so many at once, of which a forward of each stage has its share."""
        share = max(1, requests // self.stages)
        return replace(self, requests=min(self.requests, requests), micro_batch=min(self.micro_batch, share))

    @property
    def penalized(self) -> int:
        """Requests in one forward where one of them has penalties or the like (:func:`.serving.limit_requests`)."""
        is_limited = self.default_requests or self.limits_penalized
        return min(self.batch, self._graph_requests) if is_limited else self.batch

    def with_fewer_penalized(self) -> Limits | None:
        """Limit penalized requests as without ``--max-running-requests``.

        :returns: ``None``: no fewer run then.
        """
        limited = replace(self, limits_penalized=True)
        return limited if limited.penalized < self.penalized else None

    @property
    def short_requests(self) -> int:
        """Requests of a few tokens for which half of the KV cache has room, but no fewer than a decode graph has."""
        each = SHORT_PROMPT_TOKENS + self.beside_prompt(2)
        half = min(self.cache_tokens, self.window_tokens or self.cache_tokens) // 2
        return max(self.stages * self._graph_requests, int(0.9 * (half - 2 * self.largest)) // each)

    def beside_prompt(self, new: int = 0) -> int:
        """Tokens of the KV cache that a request takes beside its prompt, at the most.

        :param new: new tokens of the request.
        """
        return new + 2 * self.page + self.draft_slots

    @property
    def short_prompt_tokens(self) -> int:
        """Of the prompts of a decode: no chunk ends within one. Of a prompt that is cut the engine counts two requests,
        and admits one less than can run; what a mixed chunk has room for is not known."""
        return 1 if self.mixed else math.gcd(self.chunk or SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS)

    @property
    def _graph_requests(self) -> int:
        return self.captured or PENALIZED_WITHOUT_GRAPHS

    @property
    def largest(self) -> int:
        """Tokens of the largest prefill of one request: a chunk, or the longest prompt where that is less."""
        return min(self.chunk or self.input_tokens, self.input_tokens)

    @property
    def together(self) -> int:
        """How many of the largest prefills are computed in one forward, the last in part; 1 where one is a chunk."""
        limits = [self.cache_tokens // (self.largest + self.beside_prompt()), self.batch]
        if self.window_tokens:
            # A request is admitted where the pool has a window for it, however short it is.
            limits.append(self.window_tokens // (max(self.largest, self.window) + 2 * self.page) - 1)
        if self.chunk:
            limits.append(-(-self.chunk // self._paged))
        # The engine leaves a request for the next forward that would make its tokens max_prefill_tokens in all.
        if self.prefill_tokens:
            limits.append((self.prefill_tokens - 1) // self.largest)
        if self.prefill_requests:
            limits.append(self.prefill_requests)
        return max(1, min(limits)) if self.chunk or self.prefill_tokens else 1

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


def derive_limits(
    info: Arguments, facts: ServerFacts, *, cache_tokens: int, requests: int, input_tokens: int
) -> Limits:
    """What bounds a forward.

    :param facts: of its model runner.
    :param cache_tokens: of its KV cache.
    :param requests: that can run at once, on a data-parallel rank.
    :param input_tokens: of the longest prompt.
    """
    chunk = info.get("chunked_prefill_size")
    draft_tokens = draft_slots = 0
    if speculates(info):
        draft_tokens = int(info.get("speculative_num_draft_tokens") or 1)
        tree = int(info.get("speculative_eagle_topk") or 1) * int(info.get("speculative_num_steps") or 1)
        # While one batch is verified the slots of the next are taken already.
        draft_slots = 2 * max(draft_tokens, tree)
    captured = _asked_to_capture(info)
    if facts.captured is not None:
        # Not all sizes that are asked for are captured: ranks that attend together share a batch in whole tokens.
        captured = min(captured, facts.captured)
    limits = Limits(
        chunk=int(chunk) if chunk and chunk > 0 else None,
        input_tokens=input_tokens,
        cache_tokens=cache_tokens,
        requests=requests,
        captured=captured,
        page=facts.page,
        stages=int(info.get("pp_size") or 1),
        micro_batch=int(info.get("pp_max_micro_batch_size") or 0),
        mixed=bool(info.get("enable_mixed_chunk")),
        radix_cache=not info.get("disable_radix_cache"),
        gathered=attention_ranks(info),
        vocabulary=facts.vocabulary,
        prefill_tokens=int(info.get("max_prefill_tokens") or 0) or None,
        prefill_requests=int(info.get("prefill_max_requests") or 0),
        window=facts.window,
        window_tokens=facts.window_tokens,
        states=facts.hybrid == MAMBA,
        draft_tokens=draft_tokens,
        draft_slots=draft_slots,
        samples_by_seed=bool(info.get("enable_deterministic_inference") or info.get("rl_on_policy_target")),
        default_requests=info.get("max_running_requests") is None,
    )
    return replace(limits, requests=min(limits.requests, limits.short_requests)) if limits.default_requests else limits


def speculates(info: Arguments) -> bool:
    """Whether a server decodes speculatively."""
    return bool(info.get("speculative_algorithm"))


def attention_ranks(info: Arguments) -> int:
    """Ranks of data-parallel attention; 1: there is none."""
    named = int(info.get("attn_dp_size") or 1)  # from 0.5.2x on; before, the replicas' argument counts them
    return named if named > 1 or not info.get("enable_dp_attention") else int(info.get("dp_size") or 1)


def graph_settings(info: Arguments, phase: str) -> dict[str, Any] | None:
    """Of the engine's ``cuda_graph_config``, what it says of graphs of "decode" or "prefill", and whether they are
    ``off``; ``None`` up to 0.5.13, which has other arguments."""
    graphs = info.get("cuda_graph_config")
    if graphs is None:
        return None
    found = graphs.get(phase) if isinstance(graphs, Mapping) else getattr(graphs, phase)
    settings = dict(found) if isinstance(found, Mapping) else vars(found or SimpleNamespace())
    backend = str(getattr(settings.get("backend"), "value", settings.get("backend")))
    return {**settings, "backend": backend, "off": backend.lower().endswith("disabled")}


def _asked_to_capture(info: Arguments) -> int:
    settings = graph_settings(info, "decode")
    if settings is not None:
        return 0 if settings["off"] else int(settings.get("max_bs") or 0)
    off = info.get("disable_cuda_graph") or info.get("device") == "cpu"
    return 0 if off else int(info.get("cuda_graph_max_bs") or 0)


class Prompt(NamedTuple):
    """Tokens of a prompt: of the prefix that several phases share, and then of its own."""

    shared: int
    fresh: int


@dataclass(frozen=True)
class Estimate:
    """What a forward takes that has not run: at most ``times`` what the phase of a name took.

    :param with_graphs: that one ran in a graph: the memory of the decodes' graphs belongs to it.
    :param fewer_requests: how many run at once if the forward is left out, because it would take more memory than there
        is, or too much more than any phase before it: that is of more use to the KV cache. 0: it is never left out, and
        where there is no memory, its memory counts as taken.
    """

    name: str
    times: float
    with_graphs: bool = False
    fewer_requests: int = 0


@dataclass(frozen=True)
class Phase:
    """One kind of largest forward, and the requests that bring it about.

    :param name: for people.
    :param prompts: of one data-parallel rank.
    :param background: requests that decode meanwhile.
    :param in_turn: each prompt is sent when the one before is answered.
    :param to_the_end: not over as soon as the batch was seen at its bound, but when all requests are answered.
    :param sampling: the engine's sampling parameters of every request.
    :param output_logprobs: every request asks for the log-probabilities of its new tokens.
    :param growth: a prompt of this phase may take so many times as long as the slowest one before it, of the phases
        with a growth: attention takes the square of the tokens. 0: its time does not depend on the context.
    :param estimate: of the memory that it takes; ``None``: it runs whatever is free.
    """

    kind: PhaseKind
    name: str
    bound: Bound
    prompts: Sequence[Prompt]
    new_tokens: int = 1
    background: int = 0
    in_turn: bool = False
    to_the_end: bool = False
    sampling: Mapping[str, Any] = field(default_factory=lambda: SAMPLED)
    output_logprobs: bool = False
    growth: float = 0.0
    estimate: Estimate | None = None

    @property
    def shared(self) -> int:
        """Tokens of the shared prefix that its prompts begin with."""
        return max(prompt.shared for prompt in self.prompts)


@dataclass(frozen=True)
class Plant(Order):
    """What every rank's radix cache is to hold without computing it, before the requests that are put next.

    :param tokens: the shared prefix, as far as a phase needs it.
    """

    tokens: tuple[int, ...]


def _drawn_from(vocabulary: int) -> range:
    # Special ids, placeholders of images above all, are the first few of a vocabulary or its last.
    return range(min(1000, vocabulary // 2), min(50_000, vocabulary))


class Tokens:
    """Random tokens, alike for the same seed."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._drawn_from = _drawn_from(vocabulary)

    def some(self, count: int) -> list[int]:
        return self._random.choices(self._drawn_from, k=count)


def shared_prefix(length: int, limits: Limits) -> list[int]:
    """As many tokens of the one prefix that several phases share, so that the radix cache has it after the first."""
    return Tokens("prefix", limits.vocabulary).some(length)


def first_tokens(limits: Limits) -> Iterator[int]:
    """Tokens by which other prompts than the shared prefix begin, so that the radix cache has nothing of any: without
    end, and none again before all have had their turn."""
    (taken,) = shared_prefix(1, limits)
    tokens = [token for token in _drawn_from(limits.vocabulary) if token != taken]
    return cycle(random.Random("first").sample(tokens, len(tokens)))


def derive_phases(limits: Limits) -> list[Phase]:
    """What a server of this configuration rehearses, in this order: the largest forwards, and what sampling takes
    besides."""
    phases: list[Phase] = []

    chunk = limits.largest
    whole = chunk // limits.page * limits.page
    prefill = Bound(PREFILLS, tokens=whole)
    name = "longest prefill" if limits.chunk is None else "prefill chunk"
    growing = [Prompt(0, length) for length in growing_lengths(chunk)]
    phases.append(Phase(PhaseKind.PREFILL, name, prefill, growing, in_turn=True))
    if limits.together > 1:
        several = Bound(PREFILLS, tokens=limits.packed, requests=limits.together)
        estimate, name = Estimate(name, limits.packed / whole), f"{limits.together} of the longest prompts"
        prompts = [Prompt(0, chunk)] * limits.together
        phases.append(Phase(PhaseKind.TOGETHER, name, several, prompts, estimate=estimate))

    room = min(limits.input_tokens, limits.cache_tokens - limits.beside_prompt())  # of one request
    # A cached prefix may end anywhere; without the cache a whole chunk begins at a multiple of one.
    keeps_states = limits.states and limits.radix_cache
    step = math.lcm(limits.page, min(STATE_INTERVAL_TOKENS, chunk)) if keeps_states else limits.page
    before = (room - chunk if limits.radix_cache else (room // chunk - 1) * chunk) // step * step
    # With EAGLE the cache's keys are pairs of tokens: of a prefix it finds one token less, which can be a step less.
    cached = before - step if limits.draft_tokens and limits.radix_cache else before
    if limits.chunk is not None and cached >= step:
        name, behind = "prefill chunk behind the longest prefix", replace(prefill, longest_prefix=cached)
        prompts = _behind(before, chunk, limits)
        # A part has at most twice the tokens of the one before, behind twice as many; a chunk behind a planted prefix
        # as many, behind four times as many; without the cache the whole has four times as many.
        growth = 4.0 if limits.radix_cache else FIRST_PART_FRACTION**-2
        phases.append(Phase(PhaseKind.BEHIND_PREFIX, name, behind, prompts, in_turn=True, growth=growth))
        sharers = min(SHARED_PREFIX_REQUESTS, limits.batch, limits.prefill_requests or SHARED_PREFIX_REQUESTS)
        # The engine leaves a request for the next forward that would make its tokens max_prefill_tokens in all.
        most = min(chunk, limits.prefill_tokens or chunk) - 1
        part = most // max(1, sharers) // limits.page * limits.page - (before - cached)
        each = part + limits.beside_prompt()
        fits = sharers > 1 and before + chunk + sharers * each <= limits.cache_tokens
        if limits.window_tokens:
            # One window is the prefix's, and one with a chunk what is left of the phase before.
            windows = sharers * (max(part, limits.window) + 2 * limits.page) + 2 * (chunk + limits.window)
            fits = fits and windows <= limits.window_tokens
        if limits.radix_cache and part > 0 and fits:
            sharing = Bound(PREFILLS, tokens=sharers * part, requests=sharers, prefix=sharers * cached)
            name, prompts = f"{sharers} requests behind one prefix", [Prompt(before, part)] * sharers
            phases.append(Phase(PhaseKind.SHARED_PREFIX, name, sharing, prompts))
    if limits.mixed and limits.stages == 1 and limits.chunk is not None:  # each stage has several batches under way
        decodes = min(MIXED_DECODES, limits.requests - 1)
        mixed = Bound(("MIXED",), tokens=whole - limits.page, requests=decodes)
        phases.append(Phase(PhaseKind.MIXED, "mixed chunk", mixed, [Prompt(0, chunk)], background=decodes))

    captured = min(limits.captured, limits.batch)
    # In a pipeline what does not fit into one forward goes into another batch, and stays there.
    paged = -(-SHORT_PROMPT_TOKENS // limits.page) * limits.page
    fit = min(limits.chunk or limits.input_tokens, limits.prefill_tokens or limits.input_tokens) // paged
    counts: list[tuple[PhaseKind, str, int]] = []
    # Where so many are not there at once they are not waited for: a graph has its memory since it was captured.
    if captured and not (limits.stages > 1 and fit < captured < limits.batch):
        counts += [(PhaseKind.CAPTURED_DECODE, "captured", count) for count in rising_counts(FEW // RISE, captured)]
    if limits.batch > captured:
        first = captured if counts else FEW // RISE
        # Those that may be left out in small steps: as many run at once as in the last that was not.
        asked = limits.penalized if limits.default_requests else limits.batch
        eager = rising_counts(first, asked) if asked > captured or not counts else []
        eager += rising_counts(asked, limits.batch, 2) if limits.batch > asked else []
        counts += [(PhaseKind.EAGER_DECODE, "eager", count) for count in eager]
    named = (_decode(kind, f"{how} decode of {count} requests", count, limits) for kind, how, count in counts)
    plain = _link_rising(named, limits)
    phases += [phase for phase in plain if not _may_go(phase)]
    penalized = rising_counts(FEW // RISE, limits.penalized)
    phases += _link_rising((_penalized_decode(count, limits) for count in penalized), limits)
    # After all that must fit: none of these may take more than the largest of them.
    phases += filter(_may_go, plain)
    phases += _long_among_short(limits, plain)
    name, prompts = "prompts of many lengths", _varied(chunk, limits)
    phases.append(Phase(PhaseKind.VARIED, name, prefill, prompts, new_tokens=4, to_the_end=True))
    return [_in_step(phase, limits) for phase in phases]


def derive_second_pass(before: Limits, after: Limits, missed: Collection[PhaseKind] = ()) -> list[Phase]:
    """What is to be rehearsed once more with another number of tokens: the phases that are larger than they were.

    :param missed: kinds of phases that were not reached, which are tried again, with the numbers that they have now.
    """

    def sizes(phase: Phase) -> tuple[int, ...]:
        # A decode's bound does not say how long the longest request is: not every release tells.
        return (*(getattr(phase.bound, name) for name in SIZES), max(map(sum, phase.prompts)))

    ran = {phase.kind: sizes(phase) for phase in derive_phases(before)}

    def is_larger(phase: Phase) -> bool:
        was_missed = phase.kind not in ran or phase.kind in missed
        return was_missed or any(map(operator.gt, sizes(phase), ran[phase.kind]))

    return list(filter(is_larger, derive_phases(after)))


def rising_counts(fewer: int, last: int, times: int = RISE) -> list[int]:
    """Numbers of requests up to ``last``. Each is at most ``times`` the one before, and the first at most as many times
    ``fewer``."""
    counts = [last]
    while counts[0] > times * fewer:
        counts.insert(0, -(-counts[0] // times))
    return counts


def _link_rising(phases: Iterable[Phase], limits: Limits) -> list[Phase]:
    """The same phases, the memory of each judged by the one before it, which has fewer requests."""
    linked: list[Phase] = []
    for phase in phases:
        linked.append(_judge_by(linked[-1], phase, limits) if linked else phase)
    return linked


def _judge_by(smaller: Phase, phase: Phase, limits: Limits) -> Phase:
    """The same phase, whose memory is judged by that of one with fewer requests."""
    fewer, is_eager = smaller.bound.requests, phase.kind is PhaseKind.EAGER_DECODE
    may_go = limits.default_requests and is_eager and fewer >= limits.penalized
    times = max(1.0, phase.bound.requests / fewer)
    graphs = is_eager and smaller.kind is PhaseKind.CAPTURED_DECODE
    return replace(phase, estimate=Estimate(smaller.name, times, graphs, fewer if may_go else 0))


def _may_go(phase: Phase) -> bool:
    return bool(phase.estimate and phase.estimate.fewer_requests)


def _long_among_short(limits: Limits, decodes: list[Phase]) -> list[Phase]:
    """The largest decode with one request that is long; none where there is no room for both.

    :param decodes: those without.
    """
    short = _decode(PhaseKind.EAGER_DECODE, "", limits.batch, limits)
    half = replace(limits, cache_tokens=limits.cache_tokens // 2)  # the long one has the other
    wanted = LONG_PROMPT_NEW_TOKENS + _decoded_meanwhile(limits.requests, limits)
    new = min(short.new_tokens, max_new_tokens(limits.requests, half, wanted))
    beside = limits.beside_prompt(new)
    left = int(0.9 * limits.cache_tokens) - 2 * limits.largest - limits.requests * (SHORT_PROMPT_TOKENS + beside)
    longest = min(limits.input_tokens, limits.cache_tokens // 2, left) - beside
    longest -= longest % limits.short_prompt_tokens
    if limits.batch == 1 or longest <= SHORT_PROMPT_TOKENS:
        return []
    long = replace(
        short,
        kind=PhaseKind.LONG_AMONG_SHORT,
        name=f"decode of one long request among {limits.batch - 1} short ones",
        # Of several batches that of the long one.
        bound=Bound(DECODES, requests=limits.batch, longest=longest if limits.stages > 1 else 0),
        # What the cache has of it needs not be computed, which can take minutes. As many behind that as a short one has
        # leave the ends of chunks where they are.
        prompts=[Prompt(longest - limits.short_prompt_tokens, limits.short_prompt_tokens), *short.prompts[1:]],
        new_tokens=new,
        growth=0.0 if limits.radix_cache else 1.0,
    )
    return [_judge_by(decodes[-1], long, limits) if decodes else long]


def _penalized_decode(requests: int, limits: Limits) -> Phase:
    name = f"decode of {requests} requests with penalties and a logit bias"
    sampling = PENALIZED | {"logit_bias": {str(min(BIASED_TOKEN, limits.vocabulary - 1)): -1.0}}
    if limits.stop_token:
        sampling |= {"min_new_tokens": 2}
    if limits.samples_by_seed:
        del sampling["min_p"]
    return replace(
        _decode(PhaseKind.PENALTIES, name, requests, limits),
        bound=Bound(DECODES, requests=requests),
        sampling=sampling,
        # With speculation each release computes log-probabilities in another way.
        output_logprobs=not limits.draft_tokens,
    )


def _in_step(phase: Phase, limits: Limits) -> Phase:
    """The same, seen only where every data-parallel rank is at the bound in the same forward."""
    # The engine counts a request that is verified as its draft tokens.
    each = phase.bound.tokens or phase.bound.requests * max(1, limits.draft_tokens)
    all_ranks = limits.gathered * each if limits.gathered > 1 else 0
    return replace(phase, bound=replace(phase.bound, all_ranks=all_ranks))


def growing_lengths(chunk: int) -> list[int]:
    """Lengths of prompts up to a chunk, each longer than the one before."""
    return sorted({-(-chunk * part // GROWING_PROMPTS) for part in range(1, GROWING_PROMPTS + 1)})


def _parts(longest: int, chunk: int, limits: Limits) -> list[int]:
    """Lengths of the prompts by which the prefix grows up to the longest.

    Each adds a chunk at least, and at most as much as there was before and :data:`MAX_PART_FRACTION` of the longest.
    With sliding windows the last holds a window and hardly more. The cache keeps the windows of a prefix in use by the
    parts in which it came to know it: a larger last part, or one that is smaller than a window and has a large one
    before it, would leave no room for a chunk behind it.
    """
    behind = limits.window + 2 * limits.page if limits.window_tokens else 0
    rising = max(0, longest - behind) // limits.page * limits.page if behind else longest
    lengths, most = [0], max(chunk, math.ceil(rising * MAX_PART_FRACTION))
    while lengths[-1] < rising:
        lengths.append(min(rising, lengths[-1] + min(most, max(chunk, lengths[-1]))))
    return lengths[1:] if rising == longest else [*lengths[1:], longest]


def _behind(before: int, chunk: int, limits: Limits) -> list[Prompt]:
    """A part of the prefix and then all of it, with a chunk of other tokens behind it; or what the cache is to have
    of it first."""
    if limits.plants:
        parts = [Prompt(int(before * FIRST_PART_FRACTION) // limits.page * limits.page, chunk)]
    elif limits.radix_cache:
        parts = [Prompt(length, 0) for length in _parts(before, chunk, limits)]
    else:
        # Whole chunks, and so many that the whole takes no longer than the square of the fraction says.
        parts = [Prompt(math.ceil((before + chunk) * FIRST_PART_FRACTION / chunk) * chunk, 0)]
    return [*parts, Prompt(before, chunk)]


def _varied(chunk: int, limits: Limits) -> list[Prompt]:
    """Prompts of any length to one and a half chunks.

    Forwards of many sizes split the allocator's blocks in many ways, and it keeps more than the largest alone needs.
    As many whatever the KV cache holds: a server with a larger one must not be the first to see them.
    """
    longest, draw = min(chunk + chunk // 2, limits.input_tokens), random.Random("varied")
    lengths = [longest, *(draw.randint(1, longest) for _ in range(VARIED_PROMPTS - 1))]
    return [Prompt(0, length) for length in lengths]


def _decode(kind: PhaseKind, name: str, requests: int, limits: Limits) -> Phase:
    # The largest batch is there once all that can run at once do: before, several may share them. Each batch of a
    # pipeline keeps what its penalties take.
    put = limits.requests if requests == limits.batch else requests
    if kind is PhaseKind.PENALTIES:
        put = min(limits.requests, requests * limits.stages)
    # Enough that the first still run when the last arrive; they are aborted as soon as all were seen together. With
    # speculation nothing is aborted: after an abort a release was seen to answer no more.
    new = (LONG_PROMPT_NEW_TOKENS if limits.draft_tokens else 1024) + _decoded_meanwhile(put, limits)
    return Phase(
        kind,
        name,
        Bound(DECODES, requests=requests, graph=kind is PhaseKind.CAPTURED_DECODE),
        [Prompt(0, limits.short_prompt_tokens)] * put,
        new_tokens=max_new_tokens(put, limits, new),
    )


def _decoded_meanwhile(requests: int, limits: Limits) -> int:
    """Tokens that the first of these requests has decoded when the last one is admitted."""
    if not (limits.mixed and limits.prefill_requests):
        return 0  # what waits goes before what decodes
    return -(-requests // limits.prefill_requests) * max(1, limits.draft_tokens)


def max_new_tokens(requests: int, limits: Limits, wanted: int) -> int:
    """New tokens that so many short requests can ask for and still all be admitted, beside a chunk of others."""
    caches = [limits.cache_tokens]
    windows = requests * (limits.window + WINDOW_OVERHANG_TOKENS + 2 * limits.page)
    if limits.window_tokens and windows > limits.window_tokens - 2 * limits.largest:
        caches.append(limits.window_tokens)  # which has no whole window for each
    each = min(int(0.9 * (cache - 2 * limits.largest)) // requests for cache in caches)
    new = each - SHORT_PROMPT_TOKENS - limits.beside_prompt()
    return max(2, min(wanted, new, limits.input_tokens - SHORT_PROMPT_TOKENS))
