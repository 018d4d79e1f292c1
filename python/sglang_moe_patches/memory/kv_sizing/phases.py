"""Derive the phases of a rehearsal: the largest forward passes that a server's configuration allows.

A *rehearsal* runs these forward passes before the first user's request, and measures their memory. A *phase* is the set
of requests that makes one kind of largest forward pass. A *rank* is one process of the server, with one GPU. This
module imports neither the engine nor torch, so that tests can run it alone.
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
"""Largest number of requests that share the longest prefix in one rehearsed forward pass."""
MAX_PART_FRACTION = 1 / 16
"""Largest part of the longest prefix, as a fraction of this prefix. With a radix cache, the rehearsal may compute the
prefix in parts: each prompt adds one part to the cached prefix. The parts are small because the engine computes even an
aborted prompt to its end. While a long part is computed, the engine's warm-up request could time out. The engine would
then end the server."""
FIRST_PART_FRACTION = 1 / 4
"""Length of a trial prompt, as a fraction. The time of the trial prompt predicts the time of the longest prompt.

- Without a radix cache, the trial prompt has this fraction of the longest prompt's tokens.
- With a planted prefix (put into the radix cache without computing it), the trial prompt has this fraction of the
  longest prefix's tokens, followed by one chunk.
"""
LONG_PROMPT_NEW_TOKENS = 64
"""Number of tokens that each request generates if one long request decodes among short requests. The short requests
wait until the long prompt has been computed. Then all requests decode in one batch."""
MIXED_DECODES = 32
"""Limit of decoding requests in the forward pass of a mixed chunk, which has prompt tokens and decoding requests."""
SHORT_PROMPT_TOKENS = 8
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "top_k": 20}
"""Sampling parameters as model cards recommend them. They take more memory than greedy decoding."""
BIASED_TOKEN = 1000
"""Token to which the rehearsal's logit bias applies, or the last token of a smaller vocabulary."""
PENALIZED_SAMPLING = {
    **SAMPLING,
    **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.05},
    "logit_bias": {str(BIASED_TOKEN): -1.0},
}
"""Sampling parameters of *penalized* requests: three penalties, ``min_p`` and a logit bias. For each of these five
parameters, the engine allocates at least one number for every request and every token of the vocabulary."""
MAX_REQUEST_RATIO = 4
"""Largest factor between the numbers of requests in two consecutive rehearsed decodes. The memory of the larger decode
can then be predicted from the smaller decode."""
FIRST_DECODE_REQUESTS = 64
"""Limit of requests in the first rehearsed decode. Sampling for so few requests always fits into the free memory."""
PENALIZED_WITHOUT_GRAPHS = 256
"""Limit of concurrent requests with penalties (:data:`PENALIZED_SAMPLING`), if ``--max-running-requests`` is not given
and no decode graph is captured."""
VARIED_PROMPTS = 16
"""Number of requests in the phase with prompts of many lengths. Their prompts fill about a dozen prefill chunks. The
chunks end at different places of the prompts, so PyTorch's allocator keeps blocks of many sizes."""
GROWING_PROMPTS = 8
"""Number of prompts in the first phase. Each prompt is longer than the prompt before it, and the last prompt fills a
chunk. For each prompt, the free blocks of PyTorch's allocator are too small, so the allocator allocates new blocks.
Users' prompts have the same effect: among 1,000 prompts of random lengths, about 8 are longer than all prompts before
them (``1 + 1/2 + ... + 1/1000`` is 7.5)."""


Arguments = Mapping[str, Any]
"""Arguments of a server, as the engine has resolved them or as an endpoint of the server reports them."""
MAMBA = "Mamba"
"""Value of :attr:`ServerFacts.hybrid` for a model with Mamba layers, in which each request has a state in addition to
its KV cache."""
STATE_INTERVAL_TOKENS = 256
"""On models with Mamba layers, the length of a rehearsed prefix is a multiple of this number of tokens. A later
request can reuse a cached prefix only up to a token for which the engine has kept the state of the Mamba layers.
Depending on release, model and strategy, the engine keeps this state at the end of a request, or at the multiples of a
number from 64 to 256 tokens. In all of these cases, the engine keeps a state at the end of the rehearsed prefix."""
WINDOW_OVERHANG_TOKENS = 128
"""Limit of tokens that a request keeps in addition to its sliding window. The engine frees the tokens that have left
the window in steps, such as 128 tokens in 0.5.23."""


class PhaseKind(StrEnum):
    """Kinds of the largest forward passes."""

    PREFILL = "prefill"
    TOGETHER = "together"
    """Several prompts of different requests in one forward pass."""
    BEHIND_PREFIX = "behind prefix"
    SHARED_PREFIX = "shared prefix"
    MIXED = "mixed"
    CAPTURED_DECODE = "captured decode"
    EAGER_DECODE = "eager decode"
    VARIED = "varied"
    PENALTIES = "penalties"
    """The largest decode of penalized requests. Their sampling stores a count for every request and every token of the
    vocabulary."""
    LONG_AMONG_SHORT = "long among short"
    """A decode of short requests and one long request. An attention backend may copy the slots of all requests into a
    table that is as wide as the longest request."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one forward pass. They are either observed (:class:`Batch`) or required (:class:`Bound`). An observed
    size of 0 means that the size is not known. A required size of 0 means that any size is large enough.

    :param tokens: rows of the input.
    :param requests: requests in the batch.
    :param prefix: cached tokens of all requests together.
    :param longest_prefix: largest number of cached tokens of one request.
    :param longest: tokens of the longest request, if the engine stores this number in CPU memory.
    :param all_ranks: tokens of all data-parallel ranks together, if the engine exchanges these numbers.
    """

    tokens: int = 0
    requests: int = 0
    prefix: int = 0
    longest_prefix: int = 0
    longest: int = 0
    all_ranks: int = 0


SIZES = tuple(size.name for size in fields(Sizes))


@dataclass(frozen=True)
class Batch(Sizes):
    """Facts about the engine's ``ForwardBatch``: its sizes, its mode, and whether it ran in a graph.

    :param mode: name of the engine's ``ForwardMode``.
    :param graph: whether a captured graph ran the batch.
    """

    mode: str
    graph: bool = False


@dataclass(frozen=True)
class Bound(Sizes):
    """Condition for a phase to count as reached: one forward pass must have at least these sizes.

    :param modes: names of the ``ForwardMode`` values that count.
    :param graph: whether a captured graph must run the batch; ``None`` if the batch may run with or without a graph.
    """

    modes: tuple[str, ...]
    graph: bool | None = None

    def is_met(self, batch: Batch) -> bool:
        """Return whether a batch has at least these sizes, has one of the modes, and ran in a graph if it must."""
        return (
            batch.mode in self.modes
            and all(getattr(batch, name) >= getattr(self, name) for name in SIZES)
            and (self.graph is None or batch.graph is self.graph)
        )


@dataclass(frozen=True)
class ServerFacts:
    """Facts about the engine's ``ModelRunner``, as far as its release has them.

    :param fixed_bytes: bytes of the request table and of Mamba's states. These bytes depend on the number of requests,
        and not on the number of tokens.
    :param page: number of tokens in a page.
    :param vocabulary: number of tokens in the vocabulary.
    :param hybrid: kind of the pool if it is more than a single KV cache (sliding windows, or Mamba); else empty.
    :param window: tokens of a sliding window; 0 if no layer has a sliding window.
    :param window_tokens: KV cache tokens of the layers with a sliding window.
    :param captured: number of requests in the largest captured decode; ``None`` if no graph has been captured.
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
    """``--chunked-prefill-size``: tokens of a prefill chunk; ``None`` if chunked prefill is off."""
    input_tokens: int
    """Tokens of the longest prompt."""
    cache_tokens: int
    """Tokens of the KV cache."""
    requests: int
    """Limit of concurrent requests."""
    captured: int
    """Number of requests in the largest captured decode; 0 if decodes run without graphs."""
    page: int = 1
    """``--page-size``: tokens of a KV cache page."""
    stages: int = 1
    """Number of pipeline stages. With several stages, several batches run at the same time."""
    micro_batch: int = 0
    """``--pp-max-micro-batch-size``: limit of requests in a pipeline stage's batch; 0 if each stage has an equal share
    of the concurrent requests."""
    mixed: bool = False
    """Whether a prefill chunk and a decode may share a forward pass (``--enable-mixed-chunk``)."""
    radix_cache: bool = True
    """Whether the server caches prefixes (no ``--disable-radix-cache``)."""
    plants: bool = False
    """Whether a prefix can be put into the radix cache without computing it (:mod:`.planted_prefix`)."""
    gathered: int = 1
    """Number of ranks of data-parallel attention. The experts compute the tokens of all these ranks together."""
    vocabulary: int = 1000
    """Number of tokens in the model's vocabulary."""
    prefill_tokens: int | None = None
    """``--max-prefill-tokens``: limit of the tokens in one prefill of several requests; ``None``: no limit."""
    prefill_requests: int = 0
    """``--prefill-max-requests``: limit of requests in one prefill; 0 if there is no limit."""
    window: int = 0
    """Number of tokens in a sliding window; 0 if no layer has a sliding window."""
    window_tokens: int = 0
    """KV cache size of the layers with a sliding window, in tokens; 0 if no layer has a sliding window."""
    states: bool = False
    """Whether layers (such as Mamba layers) keep a state for each request. A later request can then reuse a cached
    prefix only up to a token for which the engine has kept the state."""
    stop_token: bool = False
    """Whether the tokenizer has an end-of-sequence token. The rehearsal then uses ``min_new_tokens``, which forbids
    this token."""
    draft_tokens: int = 0
    """``--speculative-num-draft-tokens``: number of rows for each request in the forward pass that verifies drafts; 0
    if the server does not speculate."""
    draft_slots: int = 0
    """Number of KV cache tokens for a request's next drafts, in addition to the request's own tokens."""
    samples_by_seed: bool = False
    """Whether every request is sampled with a seed (deterministic inference). The sampler then does not support
    ``min_p``."""
    has_default_requests: bool = False
    """Whether ``--max-running-requests`` is not given. The engine's default is thousands of requests."""
    limits_penalized: bool = False
    """Whether this package limits requests with penalties (:data:`PENALIZED_SAMPLING`) although
    ``--max-running-requests`` is given. Without the limit, the memory of these requests would make the KV cache smaller
    than the engine's own."""

    @property
    def batch(self) -> int:
        """Limit of requests in one forward pass."""
        return min(self.requests, self.micro_batch or max(1, self.requests // self.stages))

    def with_requests(self, requests: int) -> Limits:
        """Return limits with at most ``requests`` concurrent requests. Each pipeline stage runs its share of these
        requests."""
        share = max(1, requests // self.stages)
        return replace(self, requests=min(self.requests, requests), micro_batch=min(self.micro_batch, share))

    @property
    def penalized(self) -> int:
        """Limit of requests in one forward pass if one of the requests is penalized (:func:`.serving.is_penalized`)."""
        is_limited = self.has_default_requests or self.limits_penalized
        return min(self.batch, self._graph_requests) if is_limited else self.batch

    def with_fewer_penalized(self) -> Limits | None:
        """Return limits with fewer penalized requests (:data:`PENALIZED_SAMPLING`) in one forward pass: as many as the
        server would have without ``--max-running-requests``.

        :returns: ``None`` if these are not fewer requests than now.
        """
        limited = replace(self, limits_penalized=True)
        return limited if limited.penalized < self.penalized else None

    @property
    def short_requests(self) -> int:
        """Number of requests with short prompts (:data:`SHORT_PROMPT_TOKENS`) that fit into half of the KV cache at
        once, if this half also keeps room for two of the largest prefills. A tenth of the remaining room stays free.

        The number is at least the number of requests in the largest captured decode, times the number of pipeline
        stages. For example, a captured decode of 160 requests and two stages give at least 320. Without captured
        decodes, :data:`PENALIZED_WITHOUT_GRAPHS` takes the place of the captured decode.
        """
        request_tokens = SHORT_PROMPT_TOKENS + self.tokens_beside_prompt(2)
        half = min(self.cache_tokens, self.window_tokens or self.cache_tokens) // 2
        return max(
            self.stages * self._graph_requests, int(0.9 * (half - 2 * self.largest_prefill_tokens)) // request_tokens
        )

    def tokens_beside_prompt(self, new: int = 0) -> int:
        """Return the largest number of KV cache tokens that a request takes in addition to its prompt.

        :param new: number of tokens that the request generates.
        """
        return new + 2 * self.page + self.draft_slots

    @property
    def short_prompt_tokens(self) -> int:
        """Number of tokens in each prompt of a phase of decodes: the greatest common divisor of 8
        (``SHORT_PROMPT_TOKENS``) and the chunk size. So no chunk ends within a prompt.

        The engine counts a prompt that is cut into two chunks as two requests. It would then admit one request too few.
        With mixed chunks, the prompts have one token, because the number of prompt tokens in a chunk is not known in
        advance.
        """
        return 1 if self.mixed else math.gcd(self.chunk or SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS)

    @property
    def _graph_requests(self) -> int:
        return self.captured or PENALIZED_WITHOUT_GRAPHS

    @property
    def largest_prefill_tokens(self) -> int:
        """Tokens of the largest prefill of one request. This is a chunk, or the longest prompt if it is shorter than a
        chunk."""
        return min(self.chunk or self.input_tokens, self.input_tokens)

    @property
    def prompts_together(self) -> int:
        """Largest number of prompts in one forward pass, if all prompts have the greatest length. The last prompt may
        be cut. For example, a chunk of 8,192 tokens has three prompts of 3,000 tokens, and the last of them is cut.

        The number is 1 if one prompt fills a chunk, or if neither chunks nor ``--max-prefill-tokens`` limit a forward
        pass. The KV cache and the server's limits may lower the number.
        """
        limits = [self.cache_tokens // (self.largest_prefill_tokens + self.tokens_beside_prompt()), self.batch]
        if self.window_tokens:
            # The engine admits a request only if the pool has a whole window for it, even if the request is short.
            limits.append(self.window_tokens // (max(self.largest_prefill_tokens, self.window) + 2 * self.page) - 1)
        if self.chunk:
            limits.append(-(-self.chunk // self._largest_in_pages))
        # The engine does not add a request to a forward pass if the tokens would reach max_prefill_tokens.
        if self.prefill_tokens:
            limits.append((self.prefill_tokens - 1) // self.largest_prefill_tokens)
        if self.prefill_requests:
            limits.append(self.prefill_requests)
        return max(1, min(limits)) if self.chunk or self.prefill_tokens else 1

    @property
    def packed_tokens(self) -> int:
        """Lower bound of the tokens in a forward pass with :attr:`prompts_together` prompts of the greatest length.

        If the prompts do not fit into a chunk, the engine cuts the last prompt at the end of a page. The bound is then
        the size of the chunk, minus up to two pages for each prompt. With pages of one token, one page is subtracted
        for each prompt. For example, with three prompts of 3,000 tokens and chunks of 8,192 tokens the bound is 8,189.
        """
        if self.prompts_together == 1:
            return self.largest_prefill_tokens // self.page * self.page
        all_whole, before = self.prompts_together * self.largest_prefill_tokens, self.prompts_together - 1
        if self.chunk is None:
            return all_whole
        left = self.chunk - before * self._largest_in_pages - self.prompts_together * self.page
        return min(all_whole, before * self.largest_prefill_tokens + max(0, left))

    @property
    def _largest_in_pages(self) -> int:
        """Tokens of the largest prefill of one request, rounded up to whole pages."""
        return -(-self.largest_prefill_tokens // self.page) * self.page


def derive_limits(
    info: Arguments, facts: ServerFacts, *, cache_tokens: int, requests: int, input_tokens: int
) -> Limits:
    """Return the limits of a server's forward passes.

    :param info: arguments of the server.
    :param facts: facts of the server's model runner.
    :param cache_tokens: tokens of the server's KV cache.
    :param requests: limit of concurrent requests on a data-parallel rank.
    :param input_tokens: tokens of the longest prompt.
    """
    chunk = info.get("chunked_prefill_size")
    draft_tokens = draft_slots = 0
    if speculates(info):
        draft_tokens = int(info.get("speculative_num_draft_tokens") or 1)
        tree = int(info.get("speculative_eagle_topk") or 1) * int(info.get("speculative_num_steps") or 1)
        # While one batch is verified, the slots for the next batch are already allocated.
        draft_slots = 2 * max(draft_tokens, tree)
    captured = _read_capture_limit(info)
    if facts.captured is not None:
        # The engine may capture fewer batch sizes than the arguments say. It leaves out sizes that the ranks of one
        # attention group cannot divide evenly.
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
        has_default_requests=info.get("max_running_requests") is None,
    )
    return (
        replace(limits, requests=min(limits.requests, limits.short_requests)) if limits.has_default_requests else limits
    )


def speculates(info: Arguments) -> bool:
    return bool(info.get("speculative_algorithm"))


def attention_ranks(info: Arguments) -> int:
    """Return the number of ranks of data-parallel attention; 1 if it is off."""
    # this attribute exists from 0.5.2x on; in earlier releases, dp_size is the number
    ranks = int(info.get("attn_dp_size") or 1)
    return ranks if ranks > 1 or not info.get("enable_dp_attention") else int(info.get("dp_size") or 1)


def graph_settings(info: Arguments, phase: str) -> dict[str, Any] | None:
    """Return the engine's ``cuda_graph_config`` for decode graphs or for prefill graphs. The additional key ``off``
    says whether these graphs are off.

    :param phase: "decode" or "prefill".
    :returns: ``None`` up to 0.5.13, because these releases have other arguments for graphs.
    """
    graphs = info.get("cuda_graph_config")
    if graphs is None:
        return None
    found = graphs.get(phase) if isinstance(graphs, Mapping) else getattr(graphs, phase)
    settings = dict(found) if isinstance(found, Mapping) else vars(found or SimpleNamespace())
    backend = str(getattr(settings.get("backend"), "value", settings.get("backend")))
    return {**settings, "backend": backend, "off": backend.lower().endswith("disabled")}


def _read_capture_limit(info: Arguments) -> int:
    settings = graph_settings(info, "decode")
    if settings is not None:
        return 0 if settings["off"] else int(settings.get("max_bs") or 0)
    off = info.get("disable_cuda_graph") or info.get("device") == "cpu"
    return 0 if off else int(info.get("cuda_graph_max_bs") or 0)


class Prompt(NamedTuple):
    """Length of a prompt, in tokens.

    :param shared: number of tokens at the beginning of the prompt that it shares with prompts of several phases.
    :param fresh: number of tokens after the shared tokens. They are made anew for each prompt.
    """

    shared: int
    fresh: int


@dataclass(frozen=True)
class Estimate:
    """Estimate of a phase's memory: at most ``times`` the memory of an earlier phase.

    The estimate decides whether the phase runs:

    - A phase that must run: if less than :data:`.sizing.MIN_FREE_BYTES` would stay free, the rehearsal ends. The
      estimate counts as part of the need.
    - A phase that may be left out: it is left out if less than the margin and :data:`.sizing.MIN_FREE_BYTES` together
      would stay free. It is also left out if it would take much more memory than the earlier phase, because the KV
      cache makes better use of this memory. *Much more* means more than a fraction of the KV cache's bytes
      (:data:`.sizing.MORE_REQUESTS_FRACTION`).

    :param name: name of the earlier phase.
    :param times: factor between the memory of the two phases.
    :param with_graphs: whether the earlier phase ran in a graph, but the estimated phase does not. The memory of the
        decode graphs is then added to the memory of the earlier phase.
    :param fewer_requests: limit of concurrent requests if the phase is left out; 0 if the phase must run.
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
    :param bound: sizes that the largest forward pass must at least have.
    :param prompts: prompts of one data-parallel rank.
    :param new_tokens: tokens that each request generates.
    :param background: number of further requests, which decode during the phase.
    :param in_turn: whether each prompt is sent only after the previous prompt was answered.
    :param to_the_end: whether the phase ends only after all requests were answered. Otherwise the phase ends as soon as
        a batch meets the bound.
    :param sampling: the engine's sampling parameters of every request.
    :param output_logprobs: whether every request asks for the log-probabilities of its generated tokens.
    :param growth: number of times that a prompt may take the time of the slowest earlier prompt (of the phases with
        such a number). If less time is left, the prompt is not sent, and the rehearsal ends early. For example, with 4
        and a slowest earlier prompt of 10 s, the next prompt is sent only if 40 s are left. With 0, the time is not
        checked.
    :param estimate: estimate of the phase's memory; ``None`` if the phase always runs.
    """

    kind: PhaseKind
    name: str
    bound: Bound
    prompts: Sequence[Prompt]
    new_tokens: int = 1
    background: int = 0
    in_turn: bool = False
    to_the_end: bool = False
    sampling: Mapping[str, Any] = field(default_factory=lambda: SAMPLING)
    output_logprobs: bool = False
    growth: float = 0.0
    estimate: Estimate | None = None

    @property
    def shared(self) -> int:
        """Number of tokens of the shared prefix that this phase needs: the largest ``Prompt.shared`` of its prompts."""
        return max(prompt.shared for prompt in self.prompts)


@dataclass(frozen=True)
class Plant(Order):
    """Order to every rank to put a prefix into its radix cache without computing it, before the next requests.

    :param tokens: tokens of the prefix that the next phase needs.
    """

    tokens: tuple[int, ...]


def _usable_tokens(vocabulary: int) -> range:
    # Special tokens, such as placeholders of images, are at the beginning or at the end of a vocabulary.
    return range(min(1000, vocabulary // 2), min(50_000, vocabulary))


class Tokens:
    """Generator of random tokens. The same seed gives the same tokens."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._usable_tokens = _usable_tokens(vocabulary)

    def draw(self, count: int) -> list[int]:
        return self._random.choices(self._usable_tokens, k=count)


def shared_prefix(length: int, limits: Limits) -> list[int]:
    """Return the first ``length`` tokens of the prefix that several phases share.

    After the first of these phases, the radix cache has the prefix.
    """
    return Tokens("prefix", limits.vocabulary).draw(length)


def first_tokens(limits: Limits) -> Iterator[int]:
    """Return an endless iterator of first tokens for prompts that do not begin with the shared prefix.

    These prompts begin with different tokens, so the radix cache has no part of a new prompt. A token is repeated only
    after all usable tokens of the vocabulary have been used.
    """
    (taken,) = shared_prefix(1, limits)
    tokens = [token for token in _usable_tokens(limits.vocabulary) if token != taken]
    return cycle(random.Random("first").sample(tokens, len(tokens)))


def derive_phases(limits: Limits) -> list[Phase]:
    """Return the phases of a rehearsal in their order: prefills, decodes, decodes with penalties, decodes that may be
    left out, a decode with one long request, and prompts of many lengths."""
    phases: list[Phase] = []

    chunk = limits.largest_prefill_tokens
    whole = chunk // limits.page * limits.page
    prefill = Bound(PREFILLS, tokens=whole)
    name = "longest prefill" if limits.chunk is None else "prefill chunk"
    growing = [Prompt(0, length) for length in growing_lengths(chunk)]
    phases.append(Phase(PhaseKind.PREFILL, name, prefill, growing, in_turn=True))
    if limits.prompts_together > 1:
        several = Bound(PREFILLS, tokens=limits.packed_tokens, requests=limits.prompts_together)
        estimate, name = (
            Estimate(name, limits.packed_tokens / whole),
            f"{limits.prompts_together} of the longest prompts",
        )
        prompts = [Prompt(0, chunk)] * limits.prompts_together
        phases.append(Phase(PhaseKind.TOGETHER, name, several, prompts, estimate=estimate))

    # One request: with a radix cache, the cached prefix may have any length. Without a radix cache, a whole chunk
    # begins at a multiple of the chunk.
    room = min(limits.input_tokens, limits.cache_tokens - limits.tokens_beside_prompt())
    keeps_states = limits.states and limits.radix_cache
    step = math.lcm(limits.page, min(STATE_INTERVAL_TOKENS, chunk)) if keeps_states else limits.page
    before = (room - chunk if limits.radix_cache else (room // chunk - 1) * chunk) // step * step
    # With EAGLE, a key of the cache is a pair of tokens. The cache then finds a prefix that is one token shorter, and
    # may be one step shorter.
    cached = before - step if limits.draft_tokens and limits.radix_cache else before
    if limits.chunk is not None and cached >= step:
        name, behind = "prefill chunk behind the longest prefix", replace(prefill, longest_prefix=cached)
        prompts = _prompts_behind_prefix(before, chunk, limits)
        # The time of attention grows with the tokens times the tokens before them. A part has at most twice the tokens
        # of the part before it, after twice as many tokens: 2 * 2. A chunk after a planted prefix has as many tokens,
        # after four times as many: 1 * 4. Without the cache the whole prompt has four times the tokens: 4 * 4.
        growth = 4.0 if limits.radix_cache else FIRST_PART_FRACTION**-2
        phases.append(Phase(PhaseKind.BEHIND_PREFIX, name, behind, prompts, in_turn=True, growth=growth))
        sharers = min(SHARED_PREFIX_REQUESTS, limits.batch, limits.prefill_requests or SHARED_PREFIX_REQUESTS)
        # The engine does not add a request to a forward pass if the tokens would reach max_prefill_tokens.
        most = min(chunk, limits.prefill_tokens or chunk) - 1
        part = most // max(1, sharers) // limits.page * limits.page - (before - cached)
        sharer_tokens = part + limits.tokens_beside_prompt()
        fits = sharers > 1 and before + chunk + sharers * sharer_tokens <= limits.cache_tokens
        if limits.window_tokens:
            # The prefix takes one window. One window and a chunk may still be in use from the phase before.
            windows = sharers * (max(part, limits.window) + 2 * limits.page) + 2 * (chunk + limits.window)
            fits = fits and windows <= limits.window_tokens
        if limits.radix_cache and part > 0 and fits:
            sharing = Bound(PREFILLS, tokens=sharers * part, requests=sharers, prefix=sharers * cached)
            name, prompts = f"{sharers} requests behind one prefix", [Prompt(before, part)] * sharers
            phases.append(Phase(PhaseKind.SHARED_PREFIX, name, sharing, prompts))
    # Not with a pipeline, because its stages run several batches at the same time.
    if limits.mixed and limits.stages == 1 and limits.chunk is not None:
        decodes = min(MIXED_DECODES, limits.requests - 1)
        mixed = Bound(("MIXED",), tokens=whole - limits.page, requests=decodes)
        phases.append(Phase(PhaseKind.MIXED, "mixed chunk", mixed, [Prompt(0, chunk)], background=decodes))

    captured = min(limits.captured, limits.batch)
    # In a pipeline, requests whose prompts do not fit into one forward pass join another batch, and stay in it.
    paged = -(-SHORT_PROMPT_TOKENS // limits.page) * limits.page
    fit = min(limits.chunk or limits.input_tokens, limits.prefill_tokens or limits.input_tokens) // paged
    counts: list[tuple[PhaseKind, str, int]] = []
    # A captured decode is left out if so many requests never meet in a batch. The graph got its memory when it was
    # captured.
    if captured and not (limits.stages > 1 and fit < captured < limits.batch):
        counts += [
            (PhaseKind.CAPTURED_DECODE, "captured", count)
            for count in rising_counts(FIRST_DECODE_REQUESTS // MAX_REQUEST_RATIO, captured)
        ]
    if limits.batch > captured:
        first = captured if counts else FIRST_DECODE_REQUESTS // MAX_REQUEST_RATIO
        # Decodes that may be left out grow in small steps. If one is left out, the server admits as many requests as
        # the decode before it had.
        asked = limits.penalized if limits.has_default_requests else limits.batch
        eager = rising_counts(first, asked) if asked > captured or not counts else []
        eager += rising_counts(asked, limits.batch, 2) if limits.batch > asked else []
        counts += [(PhaseKind.EAGER_DECODE, "eager", count) for count in eager]
    named = (
        _make_decode_phase(kind, f"{how} decode of {count} requests", count, limits) for kind, how, count in counts
    )
    plain = _link_estimates(named, limits)
    phases += [phase for phase in plain if not _may_be_left_out(phase)]
    penalized = rising_counts(FIRST_DECODE_REQUESTS // MAX_REQUEST_RATIO, limits.penalized)
    phases += _link_estimates((_make_penalized_decode(count, limits) for count in penalized), limits)
    # Decodes that may be left out come last, because they may not take more memory than the largest phase before them.
    phases += filter(_may_be_left_out, plain)
    phases += _make_long_among_short(limits, plain)
    name, prompts = "prompts of many lengths", _varied_prompts(chunk, limits)
    phases.append(Phase(PhaseKind.VARIED, name, prefill, prompts, new_tokens=4, to_the_end=True))
    return [_bound_all_ranks(phase, limits) for phase in phases]


def derive_second_pass(before: Limits, after: Limits, missed: Collection[PhaseKind] = ()) -> list[Phase]:
    """Return the phases of another rehearsal: phases that are larger with the new KV cache size, phases that have not
    run, and phases that did not reach their sizes.

    :param before: limits with which the phases ran.
    :param after: limits with the new KV cache size.
    :param missed: kinds of phases that did not reach their sizes: they ran, but no forward pass was as large as
        intended. These phases run again, with the new limits.
    """

    def sizes(phase: Phase) -> tuple[int, ...]:
        # The bound of a decode does not contain its longest request, because not every release reports this length. So
        # compare the prompts, too.
        return (*(getattr(phase.bound, name) for name in SIZES), max(map(sum, phase.prompts)))

    ran = {phase.kind: sizes(phase) for phase in derive_phases(before)}

    def is_larger(phase: Phase) -> bool:
        was_missed = phase.kind not in ran or phase.kind in missed
        return was_missed or any(map(operator.gt, sizes(phase), ran[phase.kind]))

    return list(filter(is_larger, derive_phases(after)))


def rising_counts(before: int, last: int, times: int = MAX_REQUEST_RATIO) -> list[int]:
    """Return a list of rising numbers of requests. The list ends with ``last``. Each number is at most ``times`` the
    number before it.

    For example, ``rising_counts(16, 256)`` returns ``[64, 256]``.

    :param before: number of requests in the previous decode. The first number of the list is at most
        ``times * before``.
    """
    counts = [last]
    while counts[0] > times * before:
        counts.insert(0, -(-counts[0] // times))
    return counts


def _link_estimates(phases: Iterable[Phase], limits: Limits) -> list[Phase]:
    """Return the phases with estimates of their memory. The estimate of a phase is derived from the phase before it.
    The first phase gets no estimate.

    :param phases: phases of decodes, in the order of rising numbers of requests.
    """
    linked: list[Phase] = []
    for phase in phases:
        linked.append(_estimate_from(linked[-1], phase, limits) if linked else phase)
    return linked


def _estimate_from(smaller: Phase, phase: Phase, limits: Limits) -> Phase:
    """Return a copy of ``phase`` with an estimate of its memory. The estimate is derived from ``smaller``, a phase with
    fewer requests."""
    smaller_requests, is_eager = smaller.bound.requests, phase.kind is PhaseKind.EAGER_DECODE
    may_go = limits.has_default_requests and is_eager and smaller_requests >= limits.penalized
    times = max(1.0, phase.bound.requests / smaller_requests)
    graphs = is_eager and smaller.kind is PhaseKind.CAPTURED_DECODE
    return replace(phase, estimate=Estimate(smaller.name, times, graphs, smaller_requests if may_go else 0))


def _may_be_left_out(phase: Phase) -> bool:
    return bool(phase.estimate and phase.estimate.fewer_requests)


def _make_long_among_short(limits: Limits, decodes: list[Phase]) -> list[Phase]:
    """Return a list with one phase: the largest decode of one long request among short requests. The list is empty if
    a batch has only one request, or if the KV cache has no room for the long request.

    :param decodes: phases of decodes without a long request. The last phase gives the estimate of the memory.
    """
    short = _make_decode_phase(PhaseKind.EAGER_DECODE, "", limits.batch, limits)
    half = replace(limits, cache_tokens=limits.cache_tokens // 2)  # the long request has the other half of the KV cache
    wanted = LONG_PROMPT_NEW_TOKENS + _count_decoded_meanwhile(limits.requests, limits)
    new = min(short.new_tokens, max_new_tokens(limits.requests, half, wanted))
    beside = limits.tokens_beside_prompt(new)
    room = (
        int(0.9 * limits.cache_tokens)
        - 2 * limits.largest_prefill_tokens
        - limits.requests * (SHORT_PROMPT_TOKENS + beside)
    )
    longest = min(limits.input_tokens, limits.cache_tokens // 2, room) - beside
    longest -= longest % limits.short_prompt_tokens
    if limits.batch == 1 or longest <= SHORT_PROMPT_TOKENS:
        return []
    long = replace(
        short,
        kind=PhaseKind.LONG_AMONG_SHORT,
        name=f"decode of one long request among {limits.batch - 1} short ones",
        # In a pipeline, several batches run. Only the batch with the long request meets the bound.
        bound=Bound(DECODES, requests=limits.batch, longest=longest if limits.stages > 1 else 0),
        # The prefix cache has the long prompt except for its end. This saves minutes. The end is as long as a short
        # prompt, so that the chunks end at the same places as with short prompts alone.
        prompts=[Prompt(longest - limits.short_prompt_tokens, limits.short_prompt_tokens), *short.prompts[1:]],
        new_tokens=new,
        growth=0.0 if limits.radix_cache else 1.0,
    )
    return [_estimate_from(decodes[-1], long, limits) if decodes else long]


def _make_penalized_decode(requests: int, limits: Limits) -> Phase:
    name = f"decode of {requests} requests with penalties and a logit bias"
    sampling = PENALIZED_SAMPLING | {"logit_bias": {str(min(BIASED_TOKEN, limits.vocabulary - 1)): -1.0}}
    if limits.stop_token:
        sampling |= {"min_new_tokens": 2}
    if limits.samples_by_seed:
        del sampling["min_p"]
    return replace(
        _make_decode_phase(PhaseKind.PENALTIES, name, requests, limits),
        bound=Bound(DECODES, requests=requests),
        sampling=sampling,
        # With speculation, releases compute log-probabilities in different ways. The phase then does not ask for
        # log-probabilities.
        output_logprobs=not limits.draft_tokens,
    )


def _bound_all_ranks(phase: Phase, limits: Limits) -> Phase:
    """Return a copy of the phase. If there are several data-parallel ranks, the copy has a bound for the tokens of all
    these ranks together."""
    # The engine counts all draft tokens of a request in the forward pass that verifies these drafts.
    rank_tokens = phase.bound.tokens or phase.bound.requests * max(1, limits.draft_tokens)
    all_ranks = limits.gathered * rank_tokens if limits.gathered > 1 else 0
    return replace(phase, bound=replace(phase.bound, all_ranks=all_ranks))


def growing_lengths(chunk: int) -> list[int]:
    """Return the lengths of the first phase's prompts, in tokens. The lengths rise up to a chunk."""
    return sorted({-(-chunk * part // GROWING_PROMPTS) for part in range(1, GROWING_PROMPTS + 1)})


def _part_lengths(longest: int, chunk: int, limits: Limits) -> list[int]:
    """Return the lengths of prompts that compute a prefix part by part. Each prompt is the prefix up to the end of one
    part, and the last prompt has ``longest`` tokens.

    A part has at most as many tokens as all parts before it, and at most :data:`MAX_PART_FRACTION` of ``longest``. A
    part of one chunk is always allowed. For example, with ``longest`` 64,000 and chunks of 1,000 tokens the lengths are
    1,000, 2,000, 4,000, 8,000, 12,000 and so on in steps of 4,000.

    With sliding windows, the last part has as many tokens as one window and two pages, and up to a page more because of
    rounding. The cache keeps the window at the end of each part. If the last part were shorter, these windows could
    together take so many slots that a chunk after the prefix has no room.
    """
    behind = limits.window + 2 * limits.page if limits.window_tokens else 0
    rising = max(0, longest - behind) // limits.page * limits.page if behind else longest
    lengths, most = [0], max(chunk, math.ceil(rising * MAX_PART_FRACTION))
    while lengths[-1] < rising:
        lengths.append(min(rising, lengths[-1] + min(most, max(chunk, lengths[-1]))))
    return lengths[1:] if rising == longest else [*lengths[1:], longest]


def _prompts_behind_prefix(before: int, chunk: int, limits: Limits) -> list[Prompt]:
    """Return the prompts of the phase with a chunk after the longest prefix.

    The last prompt consists of the prefix and the chunk. With a radix cache, the earlier prompts compute the prefix
    part by part, so that the cache has the prefix. Without a radix cache, or if the prefix is planted, there is a
    single earlier prompt. This prompt is shorter than the last prompt (:data:`FIRST_PART_FRACTION`), and its time
    predicts the time of the last prompt.

    :param before: number of tokens in the prefix.
    """
    if limits.plants:
        parts = [Prompt(int(before * FIRST_PART_FRACTION) // limits.page * limits.page, chunk)]
    elif limits.radix_cache:
        parts = [Prompt(length, 0) for length in _part_lengths(before, chunk, limits)]
    else:
        # Round up to whole chunks. Otherwise the full prompt could take longer than the square of the fraction
        # predicts.
        parts = [Prompt(math.ceil((before + chunk) * FIRST_PART_FRACTION / chunk) * chunk, 0)]
    return [*parts, Prompt(before, chunk)]


def _varied_prompts(chunk: int, limits: Limits) -> list[Prompt]:
    """Return prompts of many lengths, up to one and a half chunks.

    Forward passes of many sizes split the allocator's blocks in many ways. PyTorch's allocator then keeps more memory
    than the largest forward pass alone needs. The number of prompts does not depend on the KV cache size, because the
    phase usually does not run again after the KV cache has grown.
    """
    longest, draw = min(chunk + chunk // 2, limits.input_tokens), random.Random("varied")
    lengths = [longest, *(draw.randint(1, longest) for _ in range(VARIED_PROMPTS - 1))]
    return [Prompt(0, length) for length in lengths]


def _make_decode_phase(kind: PhaseKind, name: str, requests: int, limits: Limits) -> Phase:
    # The largest batch needs all requests that can run at once, because the batches of a pipeline share the requests.
    # Each batch of a pipeline keeps the memory of its penalties. Therefore all batches get penalized requests.
    put = limits.requests if requests == limits.batch else requests
    if kind is PhaseKind.PENALTIES:
        put = min(limits.requests, requests * limits.stages)
    # Each request generates so many tokens that the first requests still run when the last requests arrive. The
    # requests are aborted as soon as all of them have run in one batch. With speculation they are not aborted, because
    # one release stopped answering after an abort.
    new = (LONG_PROMPT_NEW_TOKENS if limits.draft_tokens else 1024) + _count_decoded_meanwhile(put, limits)
    return Phase(
        kind,
        name,
        Bound(DECODES, requests=requests, graph=kind is PhaseKind.CAPTURED_DECODE),
        [Prompt(0, limits.short_prompt_tokens)] * put,
        new_tokens=max_new_tokens(put, limits, new),
    )


def _count_decoded_meanwhile(requests: int, limits: Limits) -> int:
    """Return the number of tokens that the first of several requests has decoded when the last request is admitted. The
    number is 0 if the engine runs all prefills before the decodes.

    :param requests: number of requests, which are sent at once.
    """
    if not (limits.mixed and limits.prefill_requests):
        return 0  # the engine runs prefills before decodes
    return -(-requests // limits.prefill_requests) * max(1, limits.draft_tokens)


def max_new_tokens(requests: int, limits: Limits, wanted: int) -> int:
    """Return how many tokens each of ``requests`` short requests may generate, if all of them run at once.

    The KV cache keeps room for two of the largest prefills. The number is at least 2.

    :param wanted: upper bound of the new tokens.
    """
    caches = [limits.cache_tokens]
    windows = requests * (limits.window + WINDOW_OVERHANG_TOKENS + 2 * limits.page)
    if limits.window_tokens and windows > limits.window_tokens - 2 * limits.largest_prefill_tokens:
        caches.append(limits.window_tokens)  # if there is no whole window for each request
    request_tokens = min(int(0.9 * (cache - 2 * limits.largest_prefill_tokens)) // requests for cache in caches)
    new = request_tokens - SHORT_PROMPT_TOKENS - limits.tokens_beside_prompt()
    return max(2, min(wanted, new, limits.input_tokens - SHORT_PROMPT_TOKENS))
