"""Where the engine cuts MoRI's receive buffer, and what is put there instead."""

from __future__ import annotations

import ast
import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_moe_patches.changes.mori_input_truncation.bound import cut_for, rows_per_dp_rank
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT, Policy, read_policy
from sglang_moe_patches.core import engine, log
from sglang_moe_patches.core.patch import Install, Patcher, Plan

_RUNNER_MODULE = "sglang.srt.layers.moe.moe_runner.aiter"
_RUNNER_FUNCTION = "_pre_permute_deepep_to_aiter"
_ENGINE_BOUND = "_mori_decode_recv_bound"
_RECV_CAP = "recv_cap"
_ENGINE_LIMIT = "mori_moe_max_input_tokens"
_POLICY = "_moe_patches_mori_policy"
_DISPATCHED = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")

# --- At every forward ------------------------------------------------------------------------------------------------


def truncate(dispatched: Any, policy: Policy, announced: Any) -> Any:
    """``dispatched``, the engine's dispatch output, cut; the very same object if nothing is to be cut.

    Its tensors are cut, or, where it says itself to how many rows the engine shall cut (``recv_cap``), that is set.

    :param dispatched: a named tuple with ``hidden_states`` [buffer, ...], ``hidden_states_scale`` [buffer, ...] or
        ``None``, ``topk_ids`` and ``topk_weights`` [buffer, top-k], ``num_recv_tokens_per_expert`` (despite its name
        the number of rows received, int32 [1]) and ``origin_topk_ids`` [rows sent, top-k].
    :param announced: the class in which ``dp_attention`` keeps what a forward announces.
    :raises RuntimeError: a CPU tensor has more rows than an unprovable limit; on a GPU the process is ended.
    """
    buffer_rows = dispatched.hidden_states.shape[0]
    counts = None
    if not policy.stale and (policy.unreliable is None or policy.layout.dp_ranks == 1):
        counts = rows_per_dp_rank(
            known_to_the_cpu(getattr(announced, "_global_num_tokens", None)),
            getattr(announced, "_local_dp_buffer_len", None),
            getattr(announced, "_global_dp_buffer_len", None),
            policy.layout.dp_ranks,
            two_batch_overlap=policy.two_batch_overlap,
        )
    bound, cut = cut_for(
        dispatched.origin_topk_ids.shape[0], counts, policy.layout, buffer_rows, policy.limit, policy.recv_bound
    )
    if cut.raised:
        _warn(
            "raised",
            "%s=%d is less than the %d rows that this rank can receive: a forward gets what it needs instead "
            "(here %d rows). Set %s=1 and leave the limit out, or set a limit of at least that.",
            LIMIT.name,
            policy.limit,
            bound,
            cut.rows,
            BOUND.name,
        )
    if bound is None:
        why = policy.unreliable or "the engine's per-rank token counts do not cover every rank that sends"
        if cut.rows == buffer_rows:
            _warn("uncut", "how many rows a rank can receive is not known (%s): such input is not cut", why)
        elif not policy.assertions:
            _warn(
                "unguarded",
                "%s is not applied where the rows that a rank can receive are not known (%s): this PyTorch leaves "
                "device-side assertions out, so that a lost token would go unnoticed",
                LIMIT.name,
                why,
            )
            return _cut_to(dispatched, buffer_rows)
        else:
            # Said beforehand: on ROCm a failed assertion aborts the process without its message.
            _warn(
                "asserted",
                "how many rows a rank can receive is not known (%s): %s=%d is applied, and a device-side "
                "assertion ends this process should more arrive. Raise the limit, or unset it, if that happens.",
                why,
                LIMIT.name,
                policy.limit,
            )
    rows = max(cut.rows, _engines_cut(dispatched)) if policy.raise_only else cut.rows
    if cut.assert_needed and rows < buffer_rows:
        _assert_received(dispatched.num_recv_tokens_per_expert, rows)
    return _cut_to(dispatched, rows)


def _warn(key: str, message: str, *arguments: Any) -> None:
    log.once(logging.WARNING, f"mori {key}", log.of("mori-input-truncation", message), *arguments)


def _engines_cut(dispatched: Any) -> int:
    """The rows that the engine's dispatcher would cut to; all of them where it would not cut."""
    return getattr(dispatched, _RECV_CAP, 0) or dispatched.hidden_states.shape[0]


def _cut_to(dispatched: Any, rows: int) -> Any:
    whole = rows >= dispatched.hidden_states.shape[0]
    if _RECV_CAP in dispatched._fields:
        cap = 0 if whole else rows
        return dispatched if getattr(dispatched, _RECV_CAP) == cap else dispatched._replace(**{_RECV_CAP: cap})
    if whole:
        return dispatched
    tensors = {name: getattr(dispatched, name) for name in _DISPATCHED}
    return dispatched._replace(**{name: t[:rows] for name, t in tensors.items() if t is not None})


def known_to_the_cpu(counts: Any) -> Any:
    """``counts``, or none of use where one lives on the device: reading it would stall every layer."""
    return counts if counts is None or all(isinstance(count, int) for count in counts) else ()


def _assert_received(received: Any, rows: int) -> None:
    import torch

    torch._assert_async(
        received <= rows,
        log.of(
            "mori-input-truncation",
            f"MoRI delivered more rows than {LIMIT.name} lets the MoE kernel see ({rows}): raise it, or unset it",
        ),
    )


# --- The wrappers ----------------------------------------------------------------------------------------------------


def _make_init(
    original: Callable[..., None], read_policy: Callable[[Any], Policy | None] = read_policy
) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        policy = read_policy(self)
        if policy is not None and (policy.limit or policy.recv_bound):
            setattr(self, _POLICY, policy)
            if hasattr(self, _ENGINE_LIMIT):
                setattr(self, _ENGINE_LIMIT, 0)

    return __init__


def _make_run_moe_core(original: Callable[..., Any], announced: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_moe_core(self: Any, dispatch_output: Any) -> Any:
        policy = getattr(self, _POLICY, None)
        if policy is None:
            return original(self, dispatch_output)
        return original(self, truncate(dispatch_output, policy, announced))

    return run_moe_core


def _make_reading_no_limit(original: Callable[..., int]) -> Callable[..., int]:
    """``get_int_env_var`` as AITER's runner sees it, from which it takes the limit at every forward."""

    @functools.wraps(original)
    def get_int_env_var(name: str, *args: Any, **kwargs: Any) -> int:
        return 0 if name == LIMIT.name else original(name, *args, **kwargs)

    return get_int_env_var


# --- The plan --------------------------------------------------------------------------------------------------------


def layer_class() -> type:
    """The MoE layer behind MoRI; from 0.5.13 on, the one that MoRI's own goes through and that EPv2 uses as it is.

    :raises engine.Unsupported: there is none, or it is not the engine's own.
    """
    module = engine.module("sglang.srt.layers.moe.ep_moe.layer")
    found: type = engine.own(module, "MoriEPMoE" if hasattr(module, "MoriEPMoE") else "FusedMoE")
    return found


def _reads_the_limit(runner: Any, function: Callable[..., Any]) -> bool:
    """Whether AITER's runner itself takes the limit from the environment, by a name that can be replaced."""
    reads = engine.calls(function, "get_int_env_var")
    return hasattr(runner, "get_int_env_var") and any(LIMIT.name in ast.unparse(call) for call in reads)


def _probe_the_cut(layer: type, run_moe_core: Any, dispatched: Any) -> Install:
    """How the engine's own cut is taken over, beyond the two methods of the layer.

    :raises engine.Unsupported: where the engine cuts is not known.
    """
    if engine.mentions(run_moe_core, _ENGINE_LIMIT):
        engine.require_mentions(engine.own(layer, "__init__"), _ENGINE_LIMIT)
        return lambda patcher: None
    engine.require(engine.has_module(_RUNNER_MODULE), f"{layer.__name__}.run_moe_core does not use {_ENGINE_LIMIT}")
    runner = engine.module(_RUNNER_MODULE)
    function = engine.own(runner, _RUNNER_FUNCTION)
    if _RECV_CAP in dispatched._fields:
        engine.require_mentions(function, _RECV_CAP)
        return lambda patcher: None
    engine.require(_reads_the_limit(runner, function), f"{_RUNNER_FUNCTION} does not read {LIMIT.name}")
    for name in ("get_int_env_var", *([_ENGINE_BOUND] if hasattr(runner, _ENGINE_BOUND) else [])):
        engine.own(runner, name)

    def install(patcher: Patcher) -> None:
        patcher.wrap(runner, "get_int_env_var", _make_reading_no_limit)
        if hasattr(runner, _ENGINE_BOUND):
            patcher.wrap(runner, _ENGINE_BOUND, lambda original: functools.wraps(original)(lambda *rows: 0))

    return install


def _require_a_layout(dp_attention: Any) -> None:
    """:raises engine.Unsupported: how the ranks share the attention cannot be asked for."""
    names = ("get_attention_tp_size", "get_attention_cp_size", "get_attention_dp_rank")
    if all(hasattr(dp_attention, name) for name in names):
        return
    parallel = engine.get(engine.module("sglang.srt.runtime_context"), "get_parallel")()
    for name in ("attn_tp_size", "attn_cp_size", "attn_dp_rank"):
        try:
            getattr(parallel, name)
        except AttributeError as error:
            raise engine.Unsupported(str(error)) from error
        except Exception:
            pass  # known, and not set yet


def plan() -> Plan:
    """:raises engine.Unsupported: the engine is not what this expects."""
    environ = engine.module("sglang.srt.environ")
    dp_attention = engine.module("sglang.srt.layers.dp_attention")
    utils = engine.module("sglang.srt.layers.moe.utils")
    moriep = engine.module("sglang.srt.layers.moe.token_dispatcher.moriep")

    layer = layer_class()
    run_moe_core = engine.own(layer, "run_moe_core")
    engine.own(layer, "__init__")
    engine.require_parameters(run_moe_core, ["self", "dispatch_output"], exactly=True)
    needed_fields = {*_DISPATCHED, "num_recv_tokens_per_expert", "origin_topk_ids"}
    for name in ("MoriEPNormalDispatchOutput", "MoriEPLLDispatchOutput"):
        engine.require(
            needed_fields <= set(getattr(engine.get(moriep, name), "_fields", ())),
            f"{name} does not have the fields {', '.join(sorted(needed_fields))}",
        )
    for name in ("is_tbo_enabled", "get_moe_a2a_backend"):
        engine.get(utils, name)
    engine.require(
        hasattr(environ.envs, "SGLANG_SCHEDULER_SKIP_ALL_GATHER"), "SGLANG_SCHEDULER_SKIP_ALL_GATHER is unknown"
    )
    _require_a_layout(dp_attention)
    announced = engine.own(dp_attention, "_DpGatheredBufferWrapper")
    announces = engine.own(announced, "set_dp_buffer_len")
    engine.require_parameters(
        announces, ["cls", "global_dp_buffer_len", "local_dp_buffer_len", "dp_max_padding", "global_num_tokens"]
    )
    engine.require_mentions(announces, "_global_num_tokens", "_local_dp_buffer_len", "_global_dp_buffer_len")
    take_the_cut_over = _probe_the_cut(layer, run_moe_core, moriep.MoriEPNormalDispatchOutput)

    def install(patcher: Patcher) -> None:
        patcher.wrap(layer, "__init__", _make_init)
        patcher.wrap(layer, "run_moe_core", lambda original: _make_run_moe_core(original, announced))
        take_the_cut_over(patcher)

    return Plan.hardened(install)
