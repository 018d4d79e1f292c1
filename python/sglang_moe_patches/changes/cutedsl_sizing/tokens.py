"""Compute the largest number of tokens in one forward pass, and the number of tokens for which CuteDSL needs buffers.

All functions are pure functions of plain values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardLimits:
    """Settings and sizes that limit the tokens of one forward pass on one data-parallel rank.

    :param max_prefill_tokens: ``--max-prefill-tokens``. Once a prefill batch has this many tokens, it accepts no
        further request.
    :param graph_requests: ``--cuda-graph-max-bs``.
    :param piecewise_tokens: ``piecewise_cuda_graph_max_tokens``, or 0 if no prefill is captured.
    :param draft_tokens: ``speculative_num_draft_tokens``: the tokens of one request in a verification. It is 1 without
        speculation.
    :param chunk_tokens: ``--chunked-prefill-size``. It is ``None`` if chunked prefill is off, and 0 if the engine has
        not chosen it yet.
    :param request_tokens: tokens of the longest request, or 0 if unknown. Prompt and output count, because a retracted
        request is prefilled with both.
    :param unchecked_requests: whether the radix cache is disabled. The engine then does not check whether a
        request with ``ignore_eos`` fits into ``max_prefill_tokens``, so a prefill batch may have more tokens.
    :param requests: number of requests that can run at once on this rank, or 0 if unknown.
    :param other_tokens_per_request: largest number of tokens of one request in a draft or draft-extend forward pass.
    :param cache_tokens: tokens of the KV cache, or 0 if unknown. Every prefilled token occupies one token of the KV
        cache.
    :param probes_chunk: whether dynamic chunking over pipeline stages is on. At start-up the engine then runs forward
        passes of up to 1.25 chunks.
    :param padding: granularity of padding in tokens: a padded forward pass has a multiple of this number. The value is
        the number of tensor-parallel ranks within a data-parallel rank, or 1 without padding.
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


def compute_max_forward_tokens(limits: ForwardLimits) -> int:
    """Return the largest number of tokens that one forward pass can have on one data-parallel rank.

    The engine's own computation (sgl-project/sglang#26696) is the maximum of ``max_prefill_tokens``,
    ``piecewise_tokens`` and ``graph_requests * draft_tokens``. In these cases the engine's scheduler (``PrefillAdder``,
    ``ScheduleBatch``) can exceed this maximum:

    - First request of a prefill batch: the scheduler admits it whatever its length. The request contributes one chunk,
      or all its tokens if chunked prefill is off. Running decodes that join the chunk add no tokens, because the
      scheduler first subtracts them from the chunk and from ``max_prefill_tokens``.
    - Further requests if chunked prefill is off: usually they must fit into ``max_prefill_tokens``. But with
      ``unchecked_requests``, a request of any length may join a batch that is one token below ``max_prefill_tokens``.
    - Dynamic chunking with pipeline stages: the engine first profiles the model with one request of up to
      ``int(1.25 * chunk)`` tokens (``SchedulerPPMixin.profile_and_init_predictor``). The chunks that the engine chooses
      later stay within ``max_prefill_tokens``.
    - Decode batches: a batch may have all requests that can run at once. If these are more than fit into the largest
      CUDA graph, the batch runs without a CUDA graph. The dummy batch for FlashInfer's autotuner also has as many
      requests as can run at once.
    - Speculation: a draft step has ``topk`` tokens per request. A draft-extend step has ``num_steps + 1`` or more.

    The result is the maximum of the engine's number and of the numbers of these cases, rounded up to a multiple of
    ``padding``. If ``cache_tokens`` is known, it limits the numbers of the prefill cases.
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


def compute_other_tokens_per_request(topk: int, steps: int, *, multi_layer: bool) -> int:
    """Return the largest number of tokens of one request in a draft or draft-extend forward pass (EAGLE-like
    speculation).

    :param topk: ``speculative_eagle_topk``.
    :param steps: ``speculative_num_steps``. With adaptive speculation it is the largest number of steps that the engine
        may choose.
    :param multi_layer: whether each draft step has a layer of its own. The draft-extend forward pass of step ``i``
        (from 0 on) then has ``steps + 1 + i`` tokens. With 3 steps these are 4, 5 and 6 tokens.
    """
    return max(topk, 2 * steps if multi_layer else steps + 1, 1)


def compute_wrapper_tokens(rank_tokens: int, gathered_ranks: int, dispatcher_tokens: int | None, ep_size: int) -> int:
    """Return the number of tokens for which the buffers of a CuteDSL wrapper must have room.

    :param rank_tokens: tokens of the largest forward pass of one data-parallel rank.
    :param gathered_ranks: number of data-parallel ranks whose tokens are all-gathered before the experts.
    :param dispatcher_tokens: tokens that an all-to-all dispatcher accepts from one rank, or ``None`` without a
        dispatcher.
    :param ep_size: number of expert-parallel ranks.
    """
    return rank_tokens * gathered_ranks if dispatcher_tokens is None else dispatcher_tokens * ep_size


def split_tokens(tokens: int, size: int) -> list[slice]:
    """Split ``tokens`` rows into as few slices of at most ``size`` rows as possible. For no rows, return one empty
    slice.
    """
    return [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]
