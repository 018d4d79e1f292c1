"""Compute the largest number of tokens in a forward pass from the server's arguments and memory pools.

The module adds a method to ``ServerArgs`` that returns this number. It also adds a start-up check that the all-to-all
dispatcher can send this number of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sglang_moe_patches.changes.cutedsl_sizing.tokens import (
    ForwardLimits,
    compute_max_forward_tokens,
    compute_other_tokens_per_request,
)
from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.patch import Patcher, around, best_effort
from sglang_moe_patches.core.variables import Variable

METHOD = "cutedsl_moe_max_num_tokens"
_DEFAULT_BUDGET = 1024


def _parse_budget(text: str) -> int:
    """Parse ``SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK``. As in the engine, text that is no number means the
    default.
    """
    try:
        return int(text)
    except ValueError:
        return _DEFAULT_BUDGET


BUDGET = Variable(
    "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
    "largest number of tokens per rank for FlashInfer's all-to-all dispatcher; unset: the engine's default",
    _parse_budget,
    is_engine_variable=True,
)


def find_budget_error(required: int, budget: int, ep_size: int) -> str | None:
    """Return an error message if the all-to-all dispatcher cannot send the largest forward pass, else ``None``.

    :param required: tokens of the largest forward pass of one rank.
    :param budget: value of ``SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK``.
    :param ep_size: number of expert-parallel ranks.
    :returns: ``None``, or the message. It gives the reason and the ``export`` command that fixes it.
    """
    if budget * ep_size >= required:
        return None
    return (
        f"{BUDGET.name}={budget} times ep_size={ep_size} is a budget of {budget * ep_size} tokens, but one forward "
        f"pass can have {required} tokens. Set this before you start the server:\n"
        f"export {BUDGET.name}={-(-required // ep_size)}\n"
        "or lower --max-prefill-tokens, --cuda-graph-max-bs or --max-running-requests."
    )


@dataclass
class Pools:
    """Sizes of the memory pools that the model runners of this process chose at start-up. Each size is 0 until it is
    chosen.

    :param requests: number of requests that can run at once.
    :param cache_tokens: tokens of the KV cache.
    :param request_tokens: tokens of the longest request, prompt and output.
    """

    requests: int = 0
    cache_tokens: int = 0
    request_tokens: int = 0


def read_forward_limits(server_args: Any, pools: Pools) -> ForwardLimits:
    """Return the settings and sizes that limit the tokens of one forward pass on a data-parallel rank.

    :param server_args: the engine's ``ServerArgs``, resolved.
    :param pools: sizes that the model runners chose.
    """
    speculative = bool(server_args.speculative_algorithm)
    chunk = server_args.chunked_prefill_size
    chunked = chunk is None or chunk > 0
    graph_requests, piecewise_tokens = _read_graph_limits(server_args)
    ranks = server_args.dp_size if server_args.enable_dp_attention else 1
    return ForwardLimits(
        max_prefill_tokens=server_args.max_prefill_tokens,
        graph_requests=graph_requests,
        piecewise_tokens=piecewise_tokens,
        draft_tokens=(server_args.speculative_num_draft_tokens or 1) if speculative else 1,
        chunk_tokens=(chunk or 0) if chunked else None,
        request_tokens=0 if chunked else pools.request_tokens or server_args.get_model_config().context_len,
        unchecked_requests=bool(server_args.disable_radix_cache),
        requests=pools.requests or (server_args.max_running_requests or 0) // ranks,
        other_tokens_per_request=_compute_draft_tokens_per_request(server_args) if speculative else 1,
        cache_tokens=pools.cache_tokens,
        probes_chunk=bool(getattr(server_args, "enable_dynamic_chunking", False)) and server_args.pp_size > 1,
        padding=_read_padding(server_args),
    )


def _read_graph_limits(server_args: Any) -> tuple[int, int]:
    """Return the sizes of the largest captured CUDA graphs: requests of the decode graph, and tokens of the prefill
    graph.

    A size is 0 if no such graph is captured.
    """
    config = getattr(server_args, "cuda_graph_config", None)
    if config is not None:  # releases from 0.5.14
        # The engine's own limit ignores prefill graphs that are not piecewise, although the engine captures such
        # graphs, too.
        captured = config.prefill.backend != "disabled"
        return config.decode.max_bs or 0, (config.prefill.max_bs or 0) if captured else 0
    piecewise = 0 if server_args.disable_piecewise_cuda_graph else server_args.piecewise_cuda_graph_max_tokens
    return server_args.cuda_graph_max_bs or 0, piecewise or 0


def _find_max_adaptive_steps(initial: int, path: str | None) -> int:
    """Return the largest number of draft steps that adaptive speculation may choose.

    :param initial: value of ``--speculative-num-steps``.
    :param path: value of ``--speculative-adaptive-config``.
    """
    from sglang.srt.speculative import adaptive_spec_params as adaptive

    if hasattr(adaptive, "resolve_candidate_steps_from_config"):  # releases from 0.5.13
        return max(adaptive.resolve_candidate_steps_from_config(path))
    return adaptive.AdaptiveSpeculativeParams(initial, adaptive.load_adaptive_config(path)).max_steps


def _compute_draft_tokens_per_request(server_args: Any) -> int:
    """Return the largest number of tokens of one request in a forward pass of the draft model."""
    steps = server_args.speculative_num_steps or 0
    if server_args.speculative_adaptive:
        steps = max(steps, _find_max_adaptive_steps(steps, server_args.speculative_adaptive_config))
    return compute_other_tokens_per_request(
        server_args.speculative_eagle_topk or 1, steps, multi_layer=bool(server_args.enable_multi_layer_eagle)
    )


def _read_padding(server_args: Any) -> int:
    """Return the granularity of padding in tokens, or 1 without padding.

    With a granularity of 8, for example, the engine pads a forward pass of 13 tokens to 16 tokens.
    """
    if server_args.enable_dp_attention:
        return server_args.tp_size // server_args.dp_size
    scattered = server_args.moe_dense_tp_size == 1 or server_args.enable_attn_tp_input_scattered
    return server_args.tp_size if scattered or server_args.moe_a2a_backend != "none" else 1


def _cutedsl_moe_max_num_tokens(self: Any) -> int:
    """Return the largest number of tokens in a forward pass of one data-parallel rank, from the configuration alone.

    If the engine has not chosen ``max_running_requests`` yet, limits that depend on it are ignored. CuteDSL's buffers
    are sized later, when ``max_running_requests`` is known.
    """
    return compute_max_forward_tokens(read_forward_limits(self, Pools()))


def check_budget(server_args: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Raise an error if ``SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` is too small for the largest forward
    pass.

    :raises ValueError: the value is too small. The message has the ``export`` command that fixes it.
    """
    error = None
    with best_effort("checking the token budget of FlashInfer's dispatcher"):
        if (
            server_args.moe_runner_backend == runners.CUTEDSL
            and server_args.moe_a2a_backend == "flashinfer"
            and server_args.disaggregation_mode != "decode"
        ):
            required = server_args.cutedsl_moe_max_num_tokens()
            error = find_budget_error(required, BUDGET.read(environ), server_args.ep_size)
    if error:
        raise ValueError(error)


def extend_server_args(module: ModuleType, patcher: Patcher) -> None:
    """Add the method ``cutedsl_moe_max_num_tokens`` and a start-up check to the engine's ``ServerArgs``.

    The method returns the largest number of tokens in a forward pass. The check raises an error if
    ``SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` is too small for this number (:func:`check_budget`).

    If the engine itself computes the number (:func:`is_sized_by_engine`), this function adds nothing, because the
    engine then checks the variable, too.

    The launcher and every other process call this function.

    :param module: the engine's module ``server_args``, right after its import.
    """
    if hasattr(module.ServerArgs, METHOD) or is_sized_by_engine(module.ServerArgs):
        return
    patcher.add(module.ServerArgs, METHOD, _cutedsl_moe_max_num_tokens)
    patcher.wrap(module.ServerArgs, "check_server_args", _wrap_check_server_args)


@around
def _wrap_check_server_args(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    check_budget(self)


def is_sized_by_engine(server_args_class: Any) -> bool:
    """Return whether the engine itself computes the number of tokens for which CuteDSL needs buffers."""
    # Later releases moved the method into a module of its own, which earlier releases do not have.
    own = vars(server_args_class).get(METHOD)
    return own not in (None, _cutedsl_moe_max_num_tokens) or engine.has_module("sglang.srt.runtime_context")
