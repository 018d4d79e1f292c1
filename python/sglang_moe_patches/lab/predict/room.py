"""Memory that a server needs beside weights and KV cache, and whether the room that a fraction leaves is enough.

The need has four parts: buffers of libraries, CUDA graphs, the largest forward pass with its sampling, and memory that
PyTorch's allocator holds between forward passes. The forward pass of a prefill chunk is predicted from the layers'
sizes (:mod:`.forward`). The other parts are factors times sizes. The factors were fitted to servers that had measured
their need in their start; ``docs/commands/models.md`` compares the prediction with all of those servers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sglang_moe_patches.lab.predict.engine_pools import FRACTION_STEP, Fit

NUMBER_BYTES = 4
"""Bytes of a number in the logits and in the tensors that sampling makes of them (float32)."""
LIBRARY_BYTES = 130_000_000
"""Bytes of workspaces that libraries allocate once. Servers without prefill graphs had 106 to 140 MB."""
PREFILL_GRAPH_PEAKS = {"piecewise": 2.2, "breakable": 3.3}
"""Bytes that the prefill graphs of a kind hold, as a multiple of the eager peak of their largest prefill."""
PREFILL_GRAPH_LAYER_BYTES = 6_000_000
"""Bytes that the prefill graphs hold besides, for each layer."""
CAPTURED_LOGITS = 3.0
"""Bytes of the decode graphs, as a multiple of the logits of the largest captured decode."""
CAPTURED_LOGITS_ALONE = 3.5
"""The same besides, if there are no prefill graphs whose memory the decode graphs share."""
CAPTURED_LOGITS_RANKS = 1.6
"""The same besides, if several ranks gather their parts of the logits."""
SAMPLED_LOGITS, MANY_SAMPLED_LOGITS, MANY_REQUESTS = 6.8, 3.25, 512
"""Bytes of a decode with top-k and top-p sampling, as a multiple of its logits. The second factor holds beyond so many
requests."""
PENALIZED_LOGITS, PENALIZED_LOGITS_NEWER = 17.0, 11.3
"""The same with penalties and a logit bias, on SGLang 0.5.12.post1 and on 0.5.17."""
VERIFIED_LOGITS = 2.7
"""The same of a speculative decode, which verifies several rows of a request, with and without penalties."""
HELD_PEAKS, HELD_PEAKS_SEGMENTS = 2.5, 1.0
"""Bytes that the allocator holds between forward passes, as a multiple of a prefill chunk's peak, without and with
activation-segments."""
HELD_LOGITS = 4.0
"""Bytes that it holds besides for decodes without a graph, as a multiple of the logits of the requests beyond the
largest graph."""
HELD_MOST_BYTES = 4_500_000_000
"""The most bytes that an allocator was seen to hold between forward passes."""
DECODE_SPLITS = 256
"""Parts in which Triton's attention computes a decode of latent attention on a GPU of 129 to 256 multiprocessors."""
DEFAULT_REQUESTS = 2048
"""Requests that the engine lets run at once, if nobody says how many."""
EAGER_REQUESTS = 256
"""Requests with penalties that kv-sizing lets run at once, if no decode is captured."""
CACHE_SHARE = 1 / 32
"""Share of the KV cache that kv-sizing gives up for more requests at once."""
MARGIN_BYTES = 2_000_000_000
"""Bytes that stay free at the highest advised fraction; kv-sizing's default margin."""
NEED_ERROR = 0.2
"""Relative error of the predicted need. Four of five measured servers lie within it."""


@dataclass(frozen=True)
class Decodes:
    """The sizes that decide the memory of decodes, on one rank.

    :param vocabulary: tokens.
    :param captured: requests of the largest decode graph; 0: none is captured.
    :param requests: requests that run at once.
    :param penalized: requests that run at once while one of them has penalties.
    :param rows: rows of a request in a decode: 1, or its draft tokens.
    :param ranks: ranks that share the logits.
    :param split_bytes: bytes of one row's partial results in latent attention by Triton; 0: other attention.
    """

    vocabulary: int
    captured: int
    requests: int
    penalized: int
    rows: int = 1
    ranks: int = 1
    split_bytes: int = 0

    def logits(self, requests: int) -> int:
        """Bytes of the logits of a decode."""
        return requests * self.rows * self.vocabulary * NUMBER_BYTES


@dataclass(frozen=True)
class Need:
    """Bytes beside weights and KV cache.

    :param graphs: libraries' buffers and CUDA graphs; without them no server starts.
    :param forwards: bytes of the largest forward passes, by their names.
    :param held: bytes that the allocator holds between forward passes.
    """

    graphs: int
    forwards: dict[str, int]
    held: int

    @property
    def total(self) -> int:
        """Bytes of all parts, with the largest forward pass."""
        return self.graphs + max(self.forwards.values()) + self.held


PREFILL, SAMPLING, PENALTIES = "prefill", "sampling", "penalties"
"""Names of forward passes in :attr:`Need.forwards`."""
GRAPHS, MIXED_LOAD = "graphs", "mixed load"
"""Names of the other places where memory can run out."""


@dataclass(frozen=True)
class Forwards:
    """The sizes that decide the memory of prefills and graphs, on one rank.

    :param layers: layers of this rank.
    :param peak: bytes of the forward pass of a prefill chunk.
    :param chunk: tokens of that chunk.
    :param prefill_graphs: kind of the prefill graphs and tokens of the largest; ``None``: there are none.
    :param stages: pipeline stages; each has a batch under way.
    :param segments: activation-segments acts.
    :param newer: the release configures graphs by ``--cuda-graph-config`` (0.5.15 and later).
    :param draft_bytes: bytes of a draft model's weights, which are loaded after the KV cache is sized; 0: no draft.
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
    """The need of a server, from its sizes."""
    captured = min(decodes.captured, decodes.requests)
    alone = 0.0 if forwards.prefill_graphs else CAPTURED_LOGITS_ALONE
    gathered = CAPTURED_LOGITS_RANKS if decodes.ranks > 1 else 0.0
    graphs = int((CAPTURED_LOGITS + alone + gathered) * decodes.logits(captured))
    graphs += captured * decodes.rows * decodes.split_bytes
    if forwards.draft_bytes:  # the draft model has decode graphs of its own
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
    """Bytes of a decode of so many requests, with its sampling."""
    # Without a graph the buffers of the decode before are still there.
    attention = 2 * requests * decodes.rows * decodes.split_bytes if requests > decodes.captured else 0
    if decodes.rows > 1:
        factor = VERIFIED_LOGITS
    elif penalties:
        factor = PENALIZED_LOGITS_NEWER if newer else PENALIZED_LOGITS
    else:
        factor = SAMPLED_LOGITS if requests <= MANY_REQUESTS else MANY_SAMPLED_LOGITS
    return int(factor * decodes.logits(requests)) + attention


def default_requests(decodes: Decodes, forwards: Forwards, cache_bytes: int) -> Decodes:
    """The same decodes with as many requests at once as kv-sizing admits, if nobody says how many."""
    penalized = decodes.captured or EAGER_REQUESTS
    least = replace(decodes, requests=penalized, penalized=penalized)
    allowed = max(predict_need(least, forwards).forwards.values()) // forwards.stages + CACHE_SHARE * cache_bytes
    requests = penalized
    # kv-sizing estimates a decode by the measured one of half as many requests.
    while 2 * requests <= DEFAULT_REQUESTS and 2 * _decode_bytes(decodes, requests) <= allowed:
        requests *= 2
    return replace(least, requests=requests)


STARTS, LITTLE_ROOM, DOES_NOT_START, NOT_KNOWN = "starts", "little room", "does not start", "not known"
"""Verdicts on a server."""


@dataclass(frozen=True)
class Room:
    """A server's memory on one GPU, by its fraction and by its need.

    :param fit: weights, fraction and KV cache.
    :param need: predicted need; ``None``: not known.
    :param unknown: the reason why the need is not known.
    :param grows: kv-sizing sizes the KV cache.
    :param decodes: the decodes of the need.
    """

    fit: Fit
    need: Need | None = None
    unknown: str = ""
    grows: bool = False
    decodes: Decodes = field(default_factory=lambda: Decodes(0, 0, 0, 0))

    @property
    def _needed(self) -> int:
        """Bytes of the need, of the engine's allowance for images and of the margin."""
        assert self.need is not None
        return self.need.total + self.fit.images + MARGIN_BYTES

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        fit = self.fit
        if self.grows and self.need:
            first = int(fit.memory * fit.begins_with) - fit.loaded if fit.begins_with else 0
            return max(first, fit.memory - fit.loaded - self._needed, 0)
        by_fraction = max(0, int(fit.memory * fit.fraction) - fit.loaded)
        limited = fit.limited and fit.tokens is not None and fit.token_bytes is not None
        return min(by_fraction, int(fit.tokens * fit.token_bytes)) if limited else by_fraction  # type: ignore[operator]

    @property
    def free(self) -> int:
        """Bytes beside weights and KV cache."""
        return self.fit.memory - self.fit.loaded - self.cache_bytes

    @property
    def tokens(self) -> int | None:
        """Tokens of the KV cache; ``None``: not known."""
        fit = self.fit
        if not (self.grows and self.need):
            return fit.tokens
        first = int(fit.memory * fit.begins_with - fit.loaded) if fit.begins_with else 0
        return max(self.grown_tokens() or 0, int(first / fit.token_bytes)) if fit.token_bytes else None

    def grown_tokens(self, error: float = 0.0) -> int | None:
        """Tokens of the KV cache that kv-sizing reaches; ``None``: not known.

        :param error: relative error by which the need is larger than predicted.
        """
        if self.need is None:
            return None
        return self._tokens_beside(int(self._needed + error * self.need.total))

    def _tokens_beside(self, beside: int) -> int | None:
        fit = self.fit
        if not fit.token_bytes:
            return None
        if fit.tokens is None or fit.limited:
            tokens = (fit.memory - fit.loaded - beside) / fit.token_bytes
        else:  # the engine's own number, and the difference: it takes other memory off, too
            tokens = fit.tokens + (fit.memory * (1 - fit.fraction) - beside) / fit.token_bytes
        return max(0, int(tokens))

    @property
    def highest_fraction(self) -> float | None:
        """The highest fraction that leaves enough room, rounded down; ``None``: there is none, or it is not known."""
        least = self.fit.least_fraction
        if self.need is None or least is None:
            return None
        highest = math.floor((1 - self._needed / self.fit.memory) / FRACTION_STEP) * FRACTION_STEP
        return round(highest, 2) if highest >= least else None

    def tokens_at(self, fraction: float) -> int | None:
        """Tokens of the KV cache at a fraction; ``None``: not known."""
        return self._tokens_beside(int(self.fit.memory * (1 - fraction)))

    @property
    def short_of(self) -> list[str]:
        """The places where memory runs out, by their names."""
        if self.need is None or not self.fit.starts:
            return []
        if self.free < self.need.graphs:
            return [GRAPHS]
        short = [name for name, size in self.need.forwards.items() if self.need.graphs + size > self.free]
        return short or ([MIXED_LOAD] if self.need.total > self.free else [])

    @property
    def verdict(self) -> str:
        """Whether the server starts, and with enough room."""
        if not self.fit.starts or GRAPHS in self.short_of or (self.grows and self.need and self.tokens == 0):
            return DOES_NOT_START
        if self.need is None:
            return NOT_KNOWN
        return LITTLE_ROOM if self.short_of else STARTS

    def describe(self) -> dict[str, Any]:
        """All numbers and the verdict, JSON-ready; bytes and tokens."""
        need, highest = self.need, self.highest_fraction
        return {
            "verdict": self.verdict,
            "short_of": self.short_of,
            "memory": self.fit.memory,
            "weights": self.fit.weights,
            "loading": self.fit.loading,
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
