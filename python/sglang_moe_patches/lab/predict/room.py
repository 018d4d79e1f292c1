"""Predict the memory that a server needs, and whether its ``--mem-fraction-static`` leaves enough memory free.

The *need* is the memory that a server takes in addition to weights and KV cache. The *fraction* is the value of
``--mem-fraction-static``: the share of the GPU's memory for weights and KV cache. The *room* is the memory that
remains.

The need has four parts: buffers of libraries, CUDA graphs, the largest forward pass with its sampling, and memory that
PyTorch's allocator keeps between forward passes. The forward pass of a prefill chunk is predicted from the layers'
sizes (:mod:`.forward`). Each other part is a size times a factor. The factors were fitted to servers that measured
their need when they started. ``docs/commands/models.md`` compares the predictions with these measurements.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sglang_moe_patches.lab.predict.engine_pools import FRACTION_STEP, Fit
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_MARGIN
from sglang_moe_patches.memory.kv_sizing.sizing import MORE_REQUESTS_FRACTION

NUMBER_BYTES = 4
"""Bytes of a number in the logits, and in the tensors that sampling makes from the logits (float32)."""
LIBRARY_BYTES = 130_000_000
"""Bytes of the workspaces that libraries allocate once. In servers without prefill graphs, 106 to 140 MB were
measured."""
PREFILL_GRAPH_PEAKS = {"piecewise": 2.2, "breakable": 3.3}
"""Bytes that the prefill graphs keep allocated, as a multiple of the peak bytes of an eager prefill. The eager prefill
has as many tokens as the largest prefill graph. For example, if its peak is 1 GB, piecewise graphs keep 2.2 GB. The key
is the kind of prefill graphs."""
PREFILL_GRAPH_LAYER_BYTES = 6_000_000
"""Further bytes that the prefill graphs keep allocated for each layer."""
CAPTURED_LOGITS = 3.0
"""Bytes of the decode graphs, as a multiple of the logits' bytes in the largest captured decode."""
CAPTURED_LOGITS_ALONE = 3.5
"""Further bytes of the decode graphs if there are no prefill graphs whose memory they could share. The number is a
multiple of the logits' bytes in the largest captured decode."""
CAPTURED_LOGITS_RANKS = 1.6
"""Further bytes of the decode graphs if each rank computes a part of the logits, because the engine then gathers the
parts. The number is a multiple of the logits' bytes in the largest captured decode."""
SAMPLED_LOGITS, MANY_SAMPLED_LOGITS, MANY_REQUESTS = 6.8, 3.25, 512
"""Bytes of a decode with top-k and top-p sampling, as a multiple of the bytes of its logits. The first number is for
decodes of up to ``MANY_REQUESTS`` requests, the second number is for larger decodes."""
PENALIZED_LOGITS, PENALIZED_LOGITS_NEWER = 17.0, 11.3
"""Bytes of a decode with penalties and a logit bias, as a multiple of the bytes of its logits. The first number was
measured on SGLang 0.5.12.post1. The second number was measured on 0.5.17, and is used from 0.5.15 on."""
VERIFIED_LOGITS = 2.7
"""Bytes of a speculative decode, as a multiple of the bytes of its logits, which have several rows for each request.
The same multiple is used with and without penalties."""
HELD_PEAKS, HELD_PEAKS_SEGMENTS = 2.5, 1.0
"""Bytes that PyTorch's allocator keeps between forward passes, as a multiple of a prefill chunk's peak. The second
number is for servers with the change activation-segments, the first number is for all others."""
HELD_LOGITS = 4.0
"""Further bytes that PyTorch's allocator keeps if a decode can have more requests than the largest decode graph. The
number is a multiple of a logits tensor with only the further requests. For example, if 300 requests can run and the
largest graph has 256, the tensor has the logits of 44 requests."""
HELD_MOST_BYTES = 4_500_000_000
"""Upper bound of the bytes that PyTorch's allocator keeps between forward passes: the largest measured value."""
DECODE_SPLITS = 256
"""Number of parts into which Triton's kernel divides the attention of a decode with MLA, on a GPU with 129 to 256
multiprocessors."""
DEFAULT_REQUESTS = 2048
"""Limit of concurrent requests that the engine uses without ``--max-running-requests``."""
EAGER_REQUESTS = 256
"""Limit of concurrent requests while a request has penalties, in a server without decode graphs. kv-sizing sets this
limit if the server has no ``--max-running-requests``. If the server has decode graphs, the limit is the number of
requests in the largest graph."""
MARGIN_BYTES = KV_MARGIN.parse(KV_MARGIN.default)
"""Bytes that a server must have free in addition to its need (:class:`Need`): kv-sizing's default margin. The report
advises no ``--mem-fraction-static`` that leaves less memory free."""
NEED_ERROR = 0.2
"""Assumed relative error of the predicted need. For four of five measured servers, the error was at most 20 %."""


@dataclass(frozen=True)
class Decodes:
    """Sizes that decide the memory of decodes, on one rank.

    :param vocabulary: number of tokens in the vocabulary.
    :param captured: number of requests in the largest decode graph; 0 if no decode graph is captured.
    :param requests: limit of concurrent requests.
    :param penalized: limit of concurrent requests while a request has penalties.
    :param rows: rows of the logits for each request in a decode: 1, or the number of draft tokens.
    :param ranks: number of ranks. Each rank computes a part of the logits.
    :param split_bytes: bytes of one row's partial results in Triton's kernel for MLA; 0 if another kernel runs.
    """

    vocabulary: int
    captured: int
    requests: int
    penalized: int
    rows: int = 1
    ranks: int = 1
    split_bytes: int = 0

    def logits(self, requests: int) -> int:
        """Return the bytes of the logits of a decode with ``requests`` requests."""
        return requests * self.rows * self.vocabulary * NUMBER_BYTES


@dataclass(frozen=True)
class Need:
    """Bytes that a server needs in addition to weights and KV cache.

    :param graphs: bytes of CUDA graphs and of libraries' buffers. A server without memory for them does not start.
    :param forwards: bytes of the largest forward pass of each kind. The key is the kind, such as :data:`PREFILL`.
    :param held: bytes that PyTorch's allocator keeps between forward passes.
    """

    graphs: int
    forwards: dict[str, int]
    held: int

    @property
    def total(self) -> int:
        """Bytes of the whole need: CUDA graphs and buffers, the largest forward pass of any kind, and the bytes that
        the allocator keeps."""
        return self.graphs + max(self.forwards.values()) + self.held


PREFILL, SAMPLING, PENALTIES = "prefill", "sampling", "penalties"
"""Kinds of forward passes: keys of :attr:`Need.forwards`."""
GRAPHS, MIXED_LOAD = "graphs", "mixed load"
"""Further situations in which a server can run out of memory: the capture of CUDA graphs, and a load that mixes
prefills and decodes."""


@dataclass(frozen=True)
class Forwards:
    """Sizes that decide the memory of prefills and graphs, on one rank.

    :param layers: number of layers on this rank.
    :param peak: bytes of the forward pass of a prefill chunk.
    :param chunk: tokens of the prefill chunk.
    :param prefill_graphs: kind of the prefill graphs, and tokens of the largest prefill graph; ``None`` if there are no
        prefill graphs.
    :param stages: number of pipeline stages. Each stage runs a batch at the same time.
    :param segments: whether the change activation-segments acts.
    :param newer: whether the release configures graphs by ``--cuda-graph-config`` (0.5.15 and later).
    :param draft_bytes: bytes of a draft model's weights, which are loaded after the KV cache is sized; 0 if there is no
        draft model.
    """

    layers: int
    peak: int
    chunk: int
    prefill_graphs: tuple[str, int] | None = None
    stages: int = 1
    segments: bool = False
    newer: bool = False
    draft_bytes: int = 0


def predict_need(decodes: Decodes, forwards: Forwards) -> Need:
    """Predict the need of a server from its sizes."""
    captured = min(decodes.captured, decodes.requests)
    alone = 0.0 if forwards.prefill_graphs else CAPTURED_LOGITS_ALONE
    gathered = CAPTURED_LOGITS_RANKS if decodes.ranks > 1 else 0.0
    graphs = int((CAPTURED_LOGITS + alone + gathered) * decodes.logits(captured))
    graphs += captured * decodes.rows * decodes.split_bytes
    if forwards.draft_bytes:  # the draft model has its own decode graphs
        graphs += graphs + forwards.draft_bytes
    if forwards.prefill_graphs:
        kind, tokens = forwards.prefill_graphs
        factor = PREFILL_GRAPH_PEAKS.get(kind, PREFILL_GRAPH_PEAKS["breakable"])
        graphs += int(factor * forwards.peak * min(tokens, forwards.chunk) / forwards.chunk)
        graphs += PREFILL_GRAPH_LAYER_BYTES * forwards.layers
    passes = {
        PREFILL: forwards.peak,
        SAMPLING: _decode_bytes(decodes, decodes.requests),
        PENALTIES: _decode_bytes(decodes, decodes.penalized, penalties=True, newer=forwards.newer),
    }
    passes = {name: forwards.stages * size for name, size in passes.items()}
    beyond = decodes.requests - captured if captured else 0
    held = (HELD_PEAKS_SEGMENTS if forwards.segments else HELD_PEAKS) * forwards.peak
    held += HELD_LOGITS * decodes.logits(beyond)
    return Need(LIBRARY_BYTES + graphs, passes, int(min(HELD_MOST_BYTES, held)))


def _decode_bytes(decodes: Decodes, requests: int, *, penalties: bool = False, newer: bool = False) -> int:
    """Return the bytes of a decode with ``requests`` requests, including its sampling."""
    # If the decode runs without a graph, attention's buffers of the previous decode are still allocated.
    attention = 2 * requests * decodes.rows * decodes.split_bytes if requests > decodes.captured else 0
    if decodes.rows > 1:
        factor = VERIFIED_LOGITS
    elif penalties:
        factor = PENALIZED_LOGITS_NEWER if newer else PENALIZED_LOGITS
    else:
        factor = SAMPLED_LOGITS if requests <= MANY_REQUESTS else MANY_SAMPLED_LOGITS
    return int(factor * decodes.logits(requests)) + attention


def with_default_requests(decodes: Decodes, forwards: Forwards, cache_bytes: int) -> Decodes:
    """Return a copy of ``decodes`` with the limits of concurrent requests that kv-sizing sets if the server has no
    ``--max-running-requests``.

    :param cache_bytes: bytes of the KV cache.
    """
    penalized = decodes.captured or EAGER_REQUESTS
    least = replace(decodes, requests=penalized, penalized=penalized)
    allowed = (
        max(predict_need(least, forwards).forwards.values()) // forwards.stages + MORE_REQUESTS_FRACTION * cache_bytes
    )
    requests = penalized
    # kv-sizing estimates the memory of a decode from the measured memory of a decode with half as many requests.
    while 2 * requests <= DEFAULT_REQUESTS and 2 * _decode_bytes(decodes, requests) <= allowed:
        requests *= 2
    return replace(least, requests=requests)


STARTS, LITTLE_ROOM, DOES_NOT_START, NOT_KNOWN = "starts", "little room", "does not start", "not known"
"""Verdicts on a server."""


@dataclass(frozen=True)
class Room:
    """Memory of a server on one GPU: weights, KV cache, the free memory (the *room*), and the need.

    :param fit: weights, ``--mem-fraction-static`` and KV cache, as the engine would choose them.
    :param need: predicted need; ``None`` if the need is not known.
    :param unknown: reason why the need is not known.
    :param grows: whether kv-sizing sizes the KV cache.
    :param decodes: sizes of the decodes for which the need was predicted.
    """

    fit: Fit
    need: Need | None = None
    unknown: str = ""
    grows: bool = False
    decodes: Decodes = field(default_factory=lambda: Decodes(0, 0, 0, 0))

    @property
    def _reserved_bytes(self) -> int:
        """Bytes that must stay free: the need, the engine's reserve for images, and the margin."""
        assert self.need is not None
        return self.need.total + self.fit.images + MARGIN_BYTES

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache; 0 if the model does not load."""
        fit = self.fit
        if not fit.loads:
            return 0
        if self.grows and self.need:
            first = int(fit.memory * fit.begins_with) - fit.loaded if fit.begins_with else 0
            return max(first, fit.memory - fit.loaded - self._reserved_bytes, 0)
        by_fraction = max(0, int(fit.memory * fit.fraction) - fit.loaded)
        limited = fit.limited and fit.tokens is not None and fit.token_bytes is not None
        return min(by_fraction, int(fit.tokens * fit.token_bytes)) if limited else by_fraction  # type: ignore[operator]

    @property
    def free(self) -> int:
        """Bytes that weights and KV cache leave free."""
        return self.fit.memory - self.fit.loaded - self.cache_bytes

    @property
    def tokens(self) -> int | None:
        """Number of tokens in the KV cache; ``None`` if the number is not known, or if the model does not load."""
        fit = self.fit
        if not fit.loads:
            return None
        if not (self.grows and self.need):
            return fit.tokens
        first = int(fit.memory * fit.begins_with - fit.loaded) if fit.begins_with else 0
        return max(self.grown_tokens() or 0, int(first / fit.token_bytes)) if fit.token_bytes else None

    def grown_tokens(self, error: float = 0.0) -> int | None:
        """Predict the number of tokens in the KV cache after kv-sizing has sized it; ``None`` if the number cannot be
        predicted.

        :param error: assumed relative error of the predicted need. For example, 0.2 means that the true need is 20 %
            larger than predicted. The KV cache then has fewer tokens.
        """
        if self.need is None or not self.fit.loads:
            return None
        return self._tokens_with_reserve(int(self._reserved_bytes + error * self.need.total))

    def _tokens_with_reserve(self, reserved: int) -> int | None:
        fit = self.fit
        if not fit.token_bytes:
            return None
        if fit.tokens is None or fit.limited:
            tokens = (fit.memory - fit.loaded - reserved) / fit.token_bytes
        else:
            # Begin with the engine's number of tokens, because the engine also subtracts memory that is not known here.
            tokens = fit.tokens + (fit.memory * (1 - fit.fraction) - reserved) / fit.token_bytes
        return max(0, int(tokens))

    @property
    def highest_fraction(self) -> float | None:
        """Highest ``--mem-fraction-static`` that leaves enough memory free, rounded down; ``None`` if there is no such
        value, or if the need is not known."""
        least = self.fit.least_fraction
        if self.need is None or least is None:
            return None
        highest = math.floor((1 - self._reserved_bytes / self.fit.memory) / FRACTION_STEP) * FRACTION_STEP
        return round(highest, 2) if highest >= least else None

    def tokens_at(self, fraction: float) -> int | None:
        """Return the number of tokens in the KV cache if ``--mem-fraction-static`` is ``fraction``; ``None`` if the
        number is not known."""
        return self._tokens_with_reserve(int(self.fit.memory * (1 - fraction)))

    @property
    def short_of(self) -> list[str]:
        """Situations in which the server runs out of memory; empty if there are none.

        If the graphs do not fit, the list has only :data:`GRAPHS`. Otherwise it has the kinds of forward passes that do
        not fit, such as :data:`PREFILL`. If every kind fits, the list can still have :data:`MIXED_LOAD`.
        """
        if self.need is None or not self.fit.starts:
            return []
        if self.free < self.need.graphs:
            return [GRAPHS]
        short = [name for name, size in self.need.forwards.items() if self.need.graphs + size > self.free]
        return short or ([MIXED_LOAD] if self.need.total > self.free else [])

    @property
    def verdict(self) -> str:
        """Verdict on the server: whether it starts, and whether enough memory stays free."""
        if not self.fit.starts or GRAPHS in self.short_of or (self.grows and self.need and self.tokens == 0):
            return DOES_NOT_START
        if self.need is None:
            return NOT_KNOWN
        return LITTLE_ROOM if self.short_of else STARTS

    def describe(self) -> dict[str, Any]:
        """Return all numbers, in bytes and tokens, and the verdict, as a dictionary for JSON."""
        need, highest = self.need, self.highest_fraction
        return {
            "verdict": self.verdict,
            "short_of": self.short_of,
            "memory": self.fit.memory,
            "weights": self.fit.weights,
            "loading": self.fit.loading,
            "layout": self.fit.layout,
            "least_memory": self.fit.least_memory,
            "cache": self.cache_bytes,
            "free": self.free,
            "tokens": self.tokens,
            "need": need and {**asdict(need), "total": need.total},
            "requests": self.decodes.requests,
            "penalized": self.decodes.penalized,
            "unknown": self.unknown,
            "least_fraction": self.fit.least_fraction,
            "highest_fraction": highest,
            "tokens_at_highest": self.tokens_at(highest) if highest else None,
            "grown_tokens": self.grown_tokens(),
            "grown_range": [self.grown_tokens(NEED_ERROR), self.grown_tokens(-NEED_ERROR)],
        }
