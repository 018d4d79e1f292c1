"""How many tokens one forward can bring, and what buffers for them follow: pure functions of plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardLimits:
    """What bounds the tokens of one forward on one data-parallel rank.

    :param max_prefill_tokens: ``--max-prefill-tokens``: a prefill batch takes no further request beyond it.
    :param graph_requests: ``--cuda-graph-max-bs``.
    :param piecewise_tokens: ``piecewise_cuda_graph_max_tokens``; 0: none are captured.
    :param draft_tokens: ``speculative_num_draft_tokens``, the tokens of one request that a verification brings; 1:
        no speculation.
    :param chunk_tokens: ``--chunked-prefill-size``; ``None``: chunked prefill is off, 0: the engine has yet to choose.
    :param request_tokens: the longest request, prompt and output (a retracted one is prefilled again with both); 0:
        unknown.
    :param unchecked_requests: the radix cache is disabled, so that requests with ``ignore_eos`` are admitted whatever
        is left of ``max_prefill_tokens``.
    :param requests: that can run at once on this rank; 0: unknown.
    :param other_tokens_per_request: the most tokens of one request in a draft or draft-extend forward.
    :param cache_tokens: of the KV cache, which every prefilled token occupies; 0: unknown.
    :param probes_chunk: dynamic chunking over pipeline stages: at start-up the engine tries forwards of up to 1.25
        chunks.
    :param padding: a forward is padded to a multiple of this many tokens (tensor-parallel ranks within a data-parallel
        one).
    """

    max_prefill_tokens: int
    graph_requests: int = 0
    piecewise_tokens: int = 0
    draft_tokens: int = 1
    chunk_tokens: int | None = 0
    request_tokens: int = 0
    unchecked_requests: bool = False
    requests: int = 0
    other_tokens_per_request: int = 1
    cache_tokens: int = 0
    probes_chunk: bool = False
    padding: int = 1


def max_forward_tokens(limits: ForwardLimits) -> int:
    """The largest number of tokens that one forward can bring on one data-parallel rank.

    Upstream's terms (sgl-project/sglang#26696) are ``max_prefill_tokens``, ``piecewise_tokens`` and ``graph_requests *
    draft_tokens``. Beyond them, from the engine's scheduler (``PrefillAdder``, ``ScheduleBatch``):

    - the first request of a prefill batch is admitted whatever its length: one chunk, or with chunked prefill off the
      whole request. Mixed chunks subtract the running decodes from both budgets first, and so add nothing.
    - with chunked prefill off, further requests must fit into what is left, except those admitted unchecked, the last
      of which may start when one token is left.
    - dynamic chunking with pipeline stages first profiles the model, with one request of up to ``int(1.25 * chunk)``
      tokens (``SchedulerPPMixin.profile_and_init_predictor``); the chunks that it then chooses stay within
      ``max_prefill_tokens``.
    - a decode batch larger than the largest captured one runs eagerly; the autotuner's dummy batch is of that size too.
    - a draft step brings ``topk`` tokens per request, a draft-extend one ``num_steps + 1`` or more.
    """
    upstream = max(limits.max_prefill_tokens, limits.piecewise_tokens, limits.graph_requests * limits.draft_tokens)
    if limits.chunk_tokens is not None:
        prefill = limits.chunk_tokens + (limits.chunk_tokens // 4 if limits.probes_chunk else 0)
    elif limits.unchecked_requests:
        prefill = max(limits.max_prefill_tokens - 1, 0) + limits.request_tokens
    else:
        prefill = limits.request_tokens
    if limits.cache_tokens:
        prefill = min(prefill, limits.cache_tokens)
    running = max(limits.requests, limits.graph_requests)
    decode = running * max(limits.draft_tokens, limits.other_tokens_per_request)
    tokens = max(upstream, prefill, decode)
    return tokens + -tokens % limits.padding


def other_tokens_per_request(topk: int, steps: int, *, multi_layer: bool) -> int:
    """The most tokens of one request in a draft or draft-extend forward of EAGLE-like speculation.

    :param topk: ``speculative_eagle_topk``, the branches that a draft step follows.
    :param steps: ``speculative_num_steps`` (adaptive speculation: the most it may choose).
    :param multi_layer: each step has a layer of its own, and step ``i`` extends by ``steps + 1 + i`` tokens.
    """
    return max(topk, 2 * steps if multi_layer else steps + 1, 1)


def wrapper_tokens(rank_tokens: int, gathered_ranks: int, dispatcher_tokens: int | None, ep_size: int) -> int:
    """Tokens that a wrapper's buffers must hold.

    :param rank_tokens: the largest forward of one data-parallel rank.
    :param gathered_ranks: data-parallel ranks whose tokens the all-gather path puts together before the experts.
    :param dispatcher_tokens: of an all-to-all dispatcher, the tokens that it takes from one rank; ``None`` without one.
    """
    return rank_tokens * gathered_ranks if dispatcher_tokens is None else dispatcher_tokens * ep_size


def split_tokens(tokens: int, size: int) -> list[slice]:
    """The fewest slices of at most ``size`` rows that cover ``tokens`` rows; one empty slice for no rows."""
    return [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]
