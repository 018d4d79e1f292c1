"""Phases of a rehearsal as data: the largest forward passes that a server's configuration allows.

A *rehearsal* runs these forward passes before the first user's request, and measures their memory. A *phase* is the set
of requests that makes one kind of largest forward pass. A *rank* is one process of the server, with one GPU. The tests
of the phases use this module, too. It imports neither the engine nor torch.
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
"""Most requests of the phase whose requests share the longest prefix in one forward pass."""
MAX_PART_FRACTION = 1 / 16
"""Largest part, as a fraction of the longest prefix, if a prefix in the radix cache is computed in parts. The parts are
small because the engine computes an aborted prompt to its end. During a long one, the engine's warm-up request would
time out, which ends the server."""
FIRST_PART_FRACTION = 1 / 4
"""Share of the longest prompt that is computed first, so that its time predicts how long the full prompt takes. If the
prefix is planted (put into the radix cache without computing it), this is a share of the prefix. Without a radix cache
it is a share of the whole prompt."""
LONG_PROMPT_NEW_TOKENS = 64
"""New tokens of the requests in a decode with one long request. The short requests wait for its prompt, and then decode
in the same batch."""
MIXED_DECODES = 32
"""Most requests that decode in the forward pass of a mixed chunk, which has prompt tokens and decoding requests."""
SHORT_PROMPT_TOKENS = 8
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 20}
"""Sampling parameters such as model cards recommend. They take more memory than greedy decoding."""
BIASED_TOKEN = 1000
"""Token to which the rehearsal's logit bias applies. If the vocabulary is smaller, the bias applies to its last
token."""
PENALIZED = {
    **SAMPLED,
    **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.05},
    "logit_bias": {str(BIASED_TOKEN): -1.0},
}
"""Sampling parameters of *penalized* requests. Each parameter allocates a number for every request and every token of
the vocabulary."""
RISE = 4
"""Largest factor between the requests of one rehearsed decode and of the next. The memory of the next decode can then
be predicted."""
FEW = 64
"""Most requests of the first rehearsed decode. Sampling so few requests always fits into the free memory."""
PENALIZED_WITHOUT_GRAPHS = 256
"""Most penalized requests at once, if ``--max-running-requests`` is not given and no decode is captured in a CUDA
graph."""
VARIED_PROMPTS = 16
"""Requests of the phase with prompts of many lengths. They make about a dozen chunks, each cut at other places, and
leave blocks of many sizes in PyTorch's allocator."""
GROWING_PROMPTS = 8
"""Prompts of the first phase: rising lengths up to a chunk. The blocks that PyTorch's allocator has for one prompt are
too small for the next prompt, so it allocates new blocks each time. Users' prompts do this, too: in 1,000 prompts of
random lengths, about 8 are longer than all prompts before them (``1 + 1/2 + ... + 1/1000`` is 7.5)."""


Arguments = Mapping[str, Any]
"""Arguments of a server, as the engine has resolved them or as the server's endpoints report them."""
MAMBA = "Mamba"
"""Value of :attr:`ServerFacts.hybrid` for a model in which each request has a state in addition to its KV cache."""
STATE_INTERVAL_TOKENS = 256
"""Tokens between two states that the engine keeps for the radix cache. It keeps a state at the end of a request, or at
multiples of 64 to 256 tokens. The interval depends on release, model and strategy. States at multiples of 256 tokens
are always kept."""
WINDOW_OVERHANG_TOKENS = 128
"""Most tokens that a request keeps in addition to its sliding window. The engine frees tokens that have left the window
in steps (0.5.23 in steps of 128)."""


class PhaseKind(StrEnum):
    """Kinds of the largest forward passes."""

    PREFILL = "prefill"
    TOGETHER = "together"
    """Several prompts in one forward pass."""
    BEHIND_PREFIX = "behind prefix"
    SHARED_PREFIX = "shared prefix"
    MIXED = "mixed"
    CAPTURED_DECODE = "captured decode"
    EAGER_DECODE = "eager decode"
    VARIED = "varied"
    PENALTIES = "penalties"
    """The largest decode of penalized requests. Its sampling keeps counts of every token for every request."""
    LONG_AMONG_SHORT = "long among short"
    """A decode with one long request. An attention backend may copy the request table, as wide as the longest
    request."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one forward pass; 0: not known, or not bounded.

    :param tokens: rows of its input.
    :param prefix: cached tokens of all requests together.
    :param longest_prefix: most cached tokens of one request.
    :param longest: tokens of the longest request, if the engine has this number on the host.
    :param all_ranks: tokens of all data-parallel ranks together, if the engine gathers them.
    """

    tokens: int = 0
    requests: int = 0
    prefix: int = 0
    longest_prefix: int = 0
    longest: int = 0
    all_ranks: int = 0


SIZES = tuple(size.name for size in fields(Sizes))
"""Names of the fields of :class:`Sizes`."""


@dataclass(frozen=True)
class Batch(Sizes):
    """Sizes, mode and graph of the engine's ``ForwardBatch``.

    :param mode: name of the engine's ``ForwardMode``.
    :param graph: whether a captured graph ran the batch.
    """

    mode: str
    graph: bool = False


@dataclass(frozen=True)
class Bound(Sizes):
    """Least sizes that one forward pass must have, so that its phase counts as reached.

    :param modes: names of the ``ForwardMode`` values that count.
    :param graph: whether a captured graph must run the batch; ``None``: either.
    """

    modes: tuple[str, ...]
    graph: bool | None = None

    def is_met(self, batch: Batch) -> bool:
        """Return whether a batch has at least these sizes, one of the modes, and ran in a graph if it must."""
        return (
            batch.mode in self.modes
            and all(getattr(batch, name) >= getattr(self, name) for name in SIZES)
            and (self.graph is None or batch.graph is self.graph)
        )


@dataclass(frozen=True)
class ServerFacts:
    """Facts of the engine's ``ModelRunner``, as far as its release reports them.

    :param fixed_bytes: bytes of the request table and of Mamba's states. They depend on the number of requests, not of
        tokens.
    :param page: tokens of a page.
    :param vocabulary: size of the vocabulary.
    :param hybrid: kind of the pool, if the pool is more than one KV cache; "": it is one KV cache.
    :param window: tokens of a sliding window; 0: no layer has one.
    :param window_tokens: KV cache tokens of the layers with a sliding window.
    :param captured: requests of the largest decode batch with a graph; ``None``: there is no graph, or none yet.
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
    """Limits of a forward pass on one data-parallel rank of a running server."""

    chunk: int | None
    """``--chunked-prefill-size``: tokens of a prefill chunk. ``None``: chunked prefill is off."""
    input_tokens: int
    """Tokens of the longest prompt."""
    cache_tokens: int
    """Tokens of the KV cache."""
    requests: int
    """Most requests that can run at once."""
    captured: int
    """Requests of the largest captured decode; 0 without graphs."""
    page: int = 1
    stages: int = 1
    """Stages of the pipeline. With several stages, several batches run at the same time."""
    micro_batch: int = 0
    """``--pp-max-micro-batch-size``: most requests in a stage's batch. 0: the stages share the requests that run at
    once."""
    mixed: bool = False
    radix_cache: bool = True
    plants: bool = False
    """Whether a prefix can be planted: put into the radix cache without computing it (:mod:`.planted_prefix`)."""
    gathered: int = 1
    """Ranks of data-parallel attention. The experts compute the tokens of all these ranks together."""
    vocabulary: int = 1000
    prefill_tokens: int | None = None
    """``--max-prefill-tokens``: most tokens of several requests in one forward pass."""
    prefill_requests: int = 0
    """``--prefill-max-requests``: most requests of one prefill; 0: no limit."""
    window: int = 0
    """Tokens of a sliding window; 0: no layer has one."""
    window_tokens: int = 0
    """KV cache tokens of the layers with a sliding window; 0: no layer has one."""
    states: bool = False
    """Whether layers (such as Mamba's) keep a state for each request. A prefix is then cached only up to a kept
    state."""
    stop_token: bool = False
    """Whether the tokenizer has an end-of-sequence token. The rehearsal then uses ``min_new_tokens``, which bars this
    token."""
    draft_tokens: int = 0
    """``--speculative-num-draft-tokens``: rows of a request in the forward pass that verifies drafts; 0: no
    speculation."""
    draft_slots: int = 0
    """KV cache tokens that a request's next drafts take in addition to the request's own tokens."""
    samples_by_seed: bool = False
    """Whether every request is sampled with a seed (deterministic inference). The sampler then refuses ``min_p``."""
    default_requests: bool = False
    """Whether ``--max-running-requests`` is not given. The engine's default is thousands of requests."""
    limits_penalized: bool = False
    """Whether penalized requests are limited although ``--max-running-requests`` is given. This is so if memory for
    that many penalized requests would leave the KV cache fewer tokens than the engine's own rule."""

    @property
    def batch(self) -> int:
        """Most requests in one forward pass."""
        return min(self.requests, self.micro_batch or max(1, self.requests // self.stages))

    def with_requests(self, requests: int) -> Limits:
        """Return the limits with at most ``requests`` at once. Each stage's forward pass has its share of them."""
        share = max(1, requests // self.stages)
        return replace(self, requests=min(self.requests, requests), micro_batch=min(self.micro_batch, share))

    @property
    def penalized(self) -> int:
        """Most requests in one forward pass if one of them is penalized (:func:`.serving.is_penalized`)."""
        is_limited = self.default_requests or self.limits_penalized
        return min(self.batch, self._graph_requests) if is_limited else self.batch

    def with_fewer_penalized(self) -> Limits | None:
        """Return the limits with fewer penalized requests: as many as without ``--max-running-requests``.

        :returns: ``None`` if this does not lower their number.
        """
        limited = replace(self, limits_penalized=True)
        return limited if limited.penalized < self.penalized else None

    @property
    def short_requests(self) -> int:
        """Short requests that fit into half of the KV cache; at least as many as the largest decode graph has."""
        request_tokens = SHORT_PROMPT_TOKENS + self.beside_prompt(2)
        half = min(self.cache_tokens, self.window_tokens or self.cache_tokens) // 2
        return max(self.stages * self._graph_requests, int(0.9 * (half - 2 * self.largest)) // request_tokens)

    def beside_prompt(self, new: int = 0) -> int:
        """Return the most KV cache tokens that a request takes in addition to its prompt.

        :param new: new tokens that the request generates.
        """
        return new + 2 * self.page + self.draft_slots

    @property
    def short_prompt_tokens(self) -> int:
        """Tokens of each prompt in a phase of decodes, chosen so that no chunk ends within a prompt.

        The engine counts a prompt in two chunks as two requests, and would admit one request too few. How many prompt
        tokens a mixed chunk has room for is not known in advance, so the prompts have one token if chunks are mixed.
        """
        return 1 if self.mixed else math.gcd(self.chunk or SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS)

    @property
    def _graph_requests(self) -> int:
        return self.captured or PENALIZED_WITHOUT_GRAPHS

    @property
    def largest(self) -> int:
        """Tokens of the largest prefill of one request: a chunk, or the longest prompt if it is shorter."""
        return min(self.chunk or self.input_tokens, self.input_tokens)

    @property
    def together(self) -> int:
        """Number of longest prompts in one forward pass, the last one maybe in part. 1: one prompt fills a chunk."""
        limits = [self.cache_tokens // (self.largest + self.beside_prompt()), self.batch]
        if self.window_tokens:
            # The engine admits a request only if the pool has a whole window for it, even if the request is short.
            limits.append(self.window_tokens // (max(self.largest, self.window) + 2 * self.page) - 1)
        if self.chunk:
            limits.append(-(-self.chunk // self._paged))
        # The engine leaves a request for the next forward pass if it would bring the tokens to max_prefill_tokens.
        if self.prefill_tokens:
            limits.append((self.prefill_tokens - 1) // self.largest)
        if self.prefill_requests:
            limits.append(self.prefill_requests)
        return max(1, min(limits)) if self.chunk or self.prefill_tokens else 1

    @property
    def packed(self) -> int:
        """Least tokens of the forward pass with ``together`` prompts. The last prompt is cut at the end of a page."""
        if self.together == 1:
            return self.largest // self.page * self.page
        all_whole, before = self.together * self.largest, self.together - 1
        if self.chunk is None:
            return all_whole
        left = self.chunk - before * self._paged - self.together * self.page
        return min(all_whole, before * self.largest + max(0, left))

    @property
    def _paged(self) -> int:
        """Tokens of the largest prefill of one request, rounded up to whole pages."""
        return -(-self.largest // self.page) * self.page


def derive_limits(
    info: Arguments, facts: ServerFacts, *, cache_tokens: int, requests: int, input_tokens: int
) -> Limits:
    """Return the limits of a server's forward passes.

    :param info: arguments of the server.
    :param facts: facts of the server's model runner.
    :param cache_tokens: tokens of the server's KV cache.
    :param requests: requests that can run at once on a data-parallel rank.
    :param input_tokens: tokens of the longest prompt.
    """
    chunk = info.get("chunked_prefill_size")
    draft_tokens = draft_slots = 0
    if speculates(info):
        draft_tokens = int(info.get("speculative_num_draft_tokens") or 1)
        tree = int(info.get("speculative_eagle_topk") or 1) * int(info.get("speculative_num_steps") or 1)
        # While one batch is verified, the slots of the next batch are allocated already.
        draft_slots = 2 * max(draft_tokens, tree)
    captured = _asked_to_capture(info)
    if facts.captured is not None:
        # The engine may capture fewer sizes than the arguments say: ranks that share one attention split a batch into
        # whole tokens.
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
    """Return whether a server decodes speculatively."""
    return bool(info.get("speculative_algorithm"))


def attention_ranks(info: Arguments) -> int:
    """Return the number of ranks of data-parallel attention; 1: it is off."""
    ranks = int(info.get("attn_dp_size") or 1)  # from 0.5.2x on; in earlier releases dp_size is the number
    return ranks if ranks > 1 or not info.get("enable_dp_attention") else int(info.get("dp_size") or 1)


def graph_settings(info: Arguments, phase: str) -> dict[str, Any] | None:
    """Return the engine's ``cuda_graph_config`` for decode or prefill graphs, and a key ``off``: whether they are off.

    :param phase: the engine's word: "decode" or "prefill".
    :returns: ``None`` up to 0.5.13, which has other arguments for graphs.
    """
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
    """Numbers of tokens of a prompt.

    :param shared: tokens of the prefix that several phases share.
    :param fresh: tokens after this prefix, which only this prompt has.
    """

    shared: int
    fresh: int


@dataclass(frozen=True)
class Estimate:
    """Estimate of the memory of a phase's forward pass: at most ``times`` the memory of an earlier phase.

    :param name: name of the earlier phase.
    :param times: factor between the memory of the two phases.
    :param with_graphs: whether the earlier phase ran in a graph. The memory of the decode graphs is then added.
    :param fewer_requests: requests that run at once if the phase is left out. It is left out if it would take more
        memory than is free, or too much more than all phases before it: the KV cache uses this memory better. 0: the
        phase is never left out. If there is no memory for it, the rehearsal ends, and the estimate counts as needed.
    """

    name: str
    times: float
    with_graphs: bool = False
    fewer_requests: int = 0


@dataclass(frozen=True)
class Phase:
    """Requests that make one kind of largest forward pass.

    :param kind: kind of the forward pass.
    :param name: name for the log.
    :param bound: least sizes of the forward pass.
    :param prompts: prompts of one data-parallel rank.
    :param new_tokens: tokens that each request generates.
    :param background: number of further requests, which decode meanwhile.
    :param in_turn: whether each prompt is sent only when the prompt before it is answered.
    :param to_the_end: whether the phase ends only when all requests are answered. Else it ends when a batch meets the
        bound.
    :param sampling: the engine's sampling parameters of every request.
    :param output_logprobs: whether every request asks for the log-probabilities of its new tokens.
    :param growth: largest factor between a prompt's time and the time of the slowest prompt before it, among the phases
        with a growth. A prompt is not sent if it could take too long by this factor. The time of attention grows with
        the square of the tokens. 0: the time does not depend on the context.
    :param estimate: estimate of the phase's memory; ``None``: the phase always runs.
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
        """Most tokens of the shared prefix with which a prompt of this phase begins."""
        return max(prompt.shared for prompt in self.prompts)


@dataclass(frozen=True)
class Plant(Order):
    """Order to every rank to put a prefix into its radix cache without computing it, before the next requests.

    :param tokens: the part of the shared prefix that the phase needs.
    """

    tokens: tuple[int, ...]


def _drawn_from(vocabulary: int) -> range:
    # Special tokens, such as placeholders of images, are the first or the last ones of a vocabulary.
    return range(min(1000, vocabulary // 2), min(50_000, vocabulary))


class Tokens:
    """Source of random tokens. The same seed gives the same tokens."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._drawn_from = _drawn_from(vocabulary)

    def some(self, count: int) -> list[int]:
        return self._random.choices(self._drawn_from, k=count)


def shared_prefix(length: int, limits: Limits) -> list[int]:
    """Return the first ``length`` tokens of the prefix that several phases share.

    After the first of these phases, the radix cache has the prefix.
    """
    return Tokens("prefix", limits.vocabulary).some(length)


def first_tokens(limits: Limits) -> Iterator[int]:
    """Yield endlessly the first tokens of prompts that do not begin with the shared prefix.

    A token is repeated only after all tokens of the vocabulary's used range. So the radix cache finds no part of a
    prompt.
    """
    (taken,) = shared_prefix(1, limits)
    tokens = [token for token in _drawn_from(limits.vocabulary) if token != taken]
    return cycle(random.Random("first").sample(tokens, len(tokens)))


def derive_phases(limits: Limits) -> list[Phase]:
    """Return the phases of a rehearsal in their order: the largest forward passes, then those with larger sampling."""
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
    # With a radix cache, the cached prefix may have any length. Without it, a whole chunk begins at a multiple of the
    # chunk.
    keeps_states = limits.states and limits.radix_cache
    step = math.lcm(limits.page, min(STATE_INTERVAL_TOKENS, chunk)) if keeps_states else limits.page
    before = (room - chunk if limits.radix_cache else (room // chunk - 1) * chunk) // step * step
    # EAGLE makes the cache's keys pairs of tokens. The cache finds one token less of a prefix, which may be a step
    # less.
    cached = before - step if limits.draft_tokens and limits.radix_cache else before
    if limits.chunk is not None and cached >= step:
        name, behind = "prefill chunk behind the longest prefix", replace(prefill, longest_prefix=cached)
        prompts = _behind(before, chunk, limits)
        # The time of attention grows with the tokens times the tokens before them. A part has at most twice the tokens
        # of the part before it, after twice as many tokens: 2 * 2. A chunk after a planted prefix has as many tokens,
        # after four times as many: 1 * 4. Without the cache the whole prompt has four times the tokens: 4 * 4.
        growth = 4.0 if limits.radix_cache else FIRST_PART_FRACTION**-2
        phases.append(Phase(PhaseKind.BEHIND_PREFIX, name, behind, prompts, in_turn=True, growth=growth))
        sharers = min(SHARED_PREFIX_REQUESTS, limits.batch, limits.prefill_requests or SHARED_PREFIX_REQUESTS)
        # The engine leaves a request for the next forward pass if it would bring the tokens to max_prefill_tokens.
        most = min(chunk, limits.prefill_tokens or chunk) - 1
        part = most // max(1, sharers) // limits.page * limits.page - (before - cached)
        sharer_tokens = part + limits.beside_prompt()
        fits = sharers > 1 and before + chunk + sharers * sharer_tokens <= limits.cache_tokens
        if limits.window_tokens:
            # The prefix has one window. One window and a chunk may be left over from the phase before.
            windows = sharers * (max(part, limits.window) + 2 * limits.page) + 2 * (chunk + limits.window)
            fits = fits and windows <= limits.window_tokens
        if limits.radix_cache and part > 0 and fits:
            sharing = Bound(PREFILLS, tokens=sharers * part, requests=sharers, prefix=sharers * cached)
            name, prompts = f"{sharers} requests behind one prefix", [Prompt(before, part)] * sharers
            phases.append(Phase(PhaseKind.SHARED_PREFIX, name, sharing, prompts))
    if limits.mixed and limits.stages == 1 and limits.chunk is not None:  # stages have several batches under way
        decodes = min(MIXED_DECODES, limits.requests - 1)
        mixed = Bound(("MIXED",), tokens=whole - limits.page, requests=decodes)
        phases.append(Phase(PhaseKind.MIXED, "mixed chunk", mixed, [Prompt(0, chunk)], background=decodes))

    captured = min(limits.captured, limits.batch)
    # Requests whose prompts do not fit into one forward pass join another batch of a pipeline, and stay in it.
    paged = -(-SHORT_PROMPT_TOKENS // limits.page) * limits.page
    fit = min(limits.chunk or limits.input_tokens, limits.prefill_tokens or limits.input_tokens) // paged
    counts: list[tuple[PhaseKind, str, int]] = []
    # Captured decodes are left out if so many requests never meet in a batch. A graph has its memory since its capture.
    if captured and not (limits.stages > 1 and fit < captured < limits.batch):
        counts += [(PhaseKind.CAPTURED_DECODE, "captured", count) for count in rising_counts(FEW // RISE, captured)]
    if limits.batch > captured:
        first = captured if counts else FEW // RISE
        # Decodes that may be left out grow in small steps. If one is left out, the server admits as many requests as
        # the decode before it had.
        asked = limits.penalized if limits.default_requests else limits.batch
        eager = rising_counts(first, asked) if asked > captured or not counts else []
        eager += rising_counts(asked, limits.batch, 2) if limits.batch > asked else []
        counts += [(PhaseKind.EAGER_DECODE, "eager", count) for count in eager]
    named = (_decode(kind, f"{how} decode of {count} requests", count, limits) for kind, how, count in counts)
    plain = _link_rising(named, limits)
    phases += [phase for phase in plain if not _may_go(phase)]
    penalized = rising_counts(FEW // RISE, limits.penalized)
    phases += _link_rising((_penalized_decode(count, limits) for count in penalized), limits)
    # Decodes that may be left out come last: they may take no more than the largest phase before them.
    phases += filter(_may_go, plain)
    phases += _long_among_short(limits, plain)
    name, prompts = "prompts of many lengths", _varied(chunk, limits)
    phases.append(Phase(PhaseKind.VARIED, name, prefill, prompts, new_tokens=4, to_the_end=True))
    return [_in_step(phase, limits) for phase in phases]


def derive_second_pass(before: Limits, after: Limits, missed: Collection[PhaseKind] = ()) -> list[Phase]:
    """Return the phases to rehearse again: those that are larger with the new KV cache size, or that never ran.

    :param before: limits with which the phases ran.
    :param after: limits with the new KV cache size.
    :param missed: kinds of phases that were not reached. They are tried again, with their sizes by ``after``.
    """

    def sizes(phase: Phase) -> tuple[int, ...]:
        # The bound of a decode leaves out its longest request, because not every release reports it. So compare the
        # prompts.
        return (*(getattr(phase.bound, name) for name in SIZES), max(map(sum, phase.prompts)))

    ran = {phase.kind: sizes(phase) for phase in derive_phases(before)}

    def is_larger(phase: Phase) -> bool:
        was_missed = phase.kind not in ran or phase.kind in missed
        return was_missed or any(map(operator.gt, sizes(phase), ran[phase.kind]))

    return list(filter(is_larger, derive_phases(after)))


def rising_counts(fewer: int, last: int, times: int = RISE) -> list[int]:
    """Return rising numbers of requests up to ``last``.

    Each number is at most ``times`` the number before it. The first number is at most ``times`` ``fewer``.
    """
    counts = [last]
    while counts[0] > times * fewer:
        counts.insert(0, -(-counts[0] // times))
    return counts


def _link_rising(phases: Iterable[Phase], limits: Limits) -> list[Phase]:
    """Return the phases, each with an estimate of its memory from the phase before it, which has fewer requests."""
    linked: list[Phase] = []
    for phase in phases:
        linked.append(_judge_by(linked[-1], phase, limits) if linked else phase)
    return linked


def _judge_by(smaller: Phase, phase: Phase, limits: Limits) -> Phase:
    """Return ``phase`` with an estimate of its memory from ``smaller``, a phase with fewer requests."""
    fewer, is_eager = smaller.bound.requests, phase.kind is PhaseKind.EAGER_DECODE
    may_go = limits.default_requests and is_eager and fewer >= limits.penalized
    times = max(1.0, phase.bound.requests / fewer)
    graphs = is_eager and smaller.kind is PhaseKind.CAPTURED_DECODE
    return replace(phase, estimate=Estimate(smaller.name, times, graphs, fewer if may_go else 0))


def _may_go(phase: Phase) -> bool:
    return bool(phase.estimate and phase.estimate.fewer_requests)


def _long_among_short(limits: Limits, decodes: list[Phase]) -> list[Phase]:
    """Return the phase of the largest decode with one long request. Empty: the KV cache has no room for it.

    :param decodes: decodes without a long request.
    """
    short = _decode(PhaseKind.EAGER_DECODE, "", limits.batch, limits)
    half = replace(limits, cache_tokens=limits.cache_tokens // 2)  # the long request has the other half
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
        # A pipeline has several batches. Only the batch with the long request counts.
        bound=Bound(DECODES, requests=limits.batch, longest=longest if limits.stages > 1 else 0),
        # The prefix cache has all of the long prompt except its end, which saves minutes. The end is as long as a short
        # prompt, so chunks end where they would end with short prompts alone.
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
        # Releases compute log-probabilities in different ways with speculation, so the phase does not ask for them
        # then.
        output_logprobs=not limits.draft_tokens,
    )


def _in_step(phase: Phase, limits: Limits) -> Phase:
    """Return the phase with a bound on the tokens of all data-parallel ranks together, if there are several."""
    # The engine counts all draft tokens of a request in the forward pass that verifies them.
    rank_tokens = phase.bound.tokens or phase.bound.requests * max(1, limits.draft_tokens)
    all_ranks = limits.gathered * rank_tokens if limits.gathered > 1 else 0
    return replace(phase, bound=replace(phase.bound, all_ranks=all_ranks))


def growing_lengths(chunk: int) -> list[int]:
    """Return the lengths of the first phase's prompts, which rise up to a chunk."""
    return sorted({-(-chunk * part // GROWING_PROMPTS) for part in range(1, GROWING_PROMPTS + 1)})


def _parts(longest: int, chunk: int, limits: Limits) -> list[int]:
    """Return the lengths of the prompts with which the cached prefix grows, part by part, up to ``longest`` tokens.

    Each prompt adds at least a chunk to the prompt before it. It adds at most as many tokens as that prompt has, and at
    most :data:`MAX_PART_FRACTION` of the longest. With sliding windows the last part is hardly longer than a window.
    The cache keeps the windows of a prefix in use by the parts in which it was computed. A longer last part, or a short
    part after a long one, would leave no room for a chunk after the prefix.
    """
    behind = limits.window + 2 * limits.page if limits.window_tokens else 0
    rising = max(0, longest - behind) // limits.page * limits.page if behind else longest
    lengths, most = [0], max(chunk, math.ceil(rising * MAX_PART_FRACTION))
    while lengths[-1] < rising:
        lengths.append(min(rising, lengths[-1] + min(most, max(chunk, lengths[-1]))))
    return lengths[1:] if rising == longest else [*lengths[1:], longest]


def _behind(before: int, chunk: int, limits: Limits) -> list[Prompt]:
    """Return the prompts of the phase with a chunk after the longest prefix.

    The last prompt is the prefix with the chunk. The prompts before it compute the prefix part by part for the radix
    cache, or only one part, whose time predicts the last prompt's.

    :param before: tokens of the prefix.
    """
    if limits.plants:
        parts = [Prompt(int(before * FIRST_PART_FRACTION) // limits.page * limits.page, chunk)]
    elif limits.radix_cache:
        parts = [Prompt(length, 0) for length in _parts(before, chunk, limits)]
    else:
        # Round up to whole chunks. The full prompt then takes no longer than the square of the fraction predicts.
        parts = [Prompt(math.ceil((before + chunk) * FIRST_PART_FRACTION / chunk) * chunk, 0)]
    return [*parts, Prompt(before, chunk)]


def _varied(chunk: int, limits: Limits) -> list[Prompt]:
    """Return prompts of many lengths, up to one and a half chunks.

    Forward passes of many sizes split the allocator's blocks in many ways. The allocator then keeps more memory than
    the largest forward pass alone needs. The number of prompts does not depend on the KV cache size, because a server
    with a larger KV cache must rehearse these prompts, too.
    """
    longest, draw = min(chunk + chunk // 2, limits.input_tokens), random.Random("varied")
    lengths = [longest, *(draw.randint(1, longest) for _ in range(VARIED_PROMPTS - 1))]
    return [Prompt(0, length) for length in lengths]


def _decode(kind: PhaseKind, name: str, requests: int, limits: Limits) -> Phase:
    # The largest batch needs all requests that can run at once, because the batches of a pipeline share the requests.
    # Each batch of a pipeline keeps the memory of its penalties, so all batches get penalized requests.
    put = limits.requests if requests == limits.batch else requests
    if kind is PhaseKind.PENALTIES:
        put = min(limits.requests, requests * limits.stages)
    # Enough new tokens that the first requests still run when the last ones arrive. The requests are aborted when all
    # have run in one batch. With speculation they are not aborted, because one release stopped answering after an
    # abort.
    new = (LONG_PROMPT_NEW_TOKENS if limits.draft_tokens else 1024) + _decoded_meanwhile(put, limits)
    return Phase(
        kind,
        name,
        Bound(DECODES, requests=requests, graph=kind is PhaseKind.CAPTURED_DECODE),
        [Prompt(0, limits.short_prompt_tokens)] * put,
        new_tokens=max_new_tokens(put, limits, new),
    )


def _decoded_meanwhile(requests: int, limits: Limits) -> int:
    """Return the tokens that the first request has decoded when the last one is admitted."""
    if not (limits.mixed and limits.prefill_requests):
        return 0  # prefills come before decodes
    return -(-requests // limits.prefill_requests) * max(1, limits.draft_tokens)


def max_new_tokens(requests: int, limits: Limits, wanted: int) -> int:
    """Return the most new tokens a request with which ``requests`` short requests are all admitted at once.

    Room for two of the largest prefills stays free.

    :param wanted: upper bound of the new tokens.
    """
    caches = [limits.cache_tokens]
    windows = requests * (limits.window + WINDOW_OVERHANG_TOKENS + 2 * limits.page)
    if limits.window_tokens and windows > limits.window_tokens - 2 * limits.largest:
        caches.append(limits.window_tokens)  # there is no whole window for each request
    request_tokens = min(int(0.9 * (cache - 2 * limits.largest)) // requests for cache in caches)
    new = request_tokens - SHORT_PROMPT_TOKENS - limits.beside_prompt()
    return max(2, min(wanted, new, limits.input_tokens - SHORT_PROMPT_TOKENS))
