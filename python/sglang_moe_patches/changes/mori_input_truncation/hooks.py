"""Wrappers with which this change, not the engine, decides how many rows of MoRI's receive buffer remain.

The engine's own cut of the buffer depends on the release, so the wrappers differ:

- Up to 0.5.12.post1, ``MoriEPMoE.run_moe_core`` cuts to the layer's attribute ``mori_moe_max_input_tokens``. A wrapper
  sets the attribute to 0, so the engine does not cut.
- From 0.5.13 to 0.5.21, AITER's runner cuts to ``SGLANG_MORI_MOE_MAX_INPUT_TOKENS``, which it reads from the
  environment in every forward pass. A wrapper lets the runner read 0. If the runner also computes a bound
  (``_mori_decode_recv_bound``), another wrapper returns 0 for the bound. So the engine does not cut.
- From 0.5.22 on, AITER's runner cuts to ``recv_cap``, a field of the dispatcher's output. A wrapper sets the field.

From 0.5.13 on, MoRI's layer is ``DeepEPMoE``, which calls the methods of ``FusedMoE``. The layer of EPv2, the second
version of MoRI's dispatch, is ``FusedMoE`` itself.
"""

from __future__ import annotations

import ast
import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_moe_patches.changes.mori_input_truncation.bound import Cut, decide_cut, find_rows_per_dp_rank
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT, Policy, read_policy
from sglang_moe_patches.core import engine, log
from sglang_moe_patches.core.patch import Install, Patcher, Plan, around

_RUNNER_MODULE = "sglang.srt.layers.moe.moe_runner.aiter"
_RUNNER_FUNCTION = "_pre_permute_deepep_to_aiter"
_ENGINE_BOUND = "_mori_decode_recv_bound"
_RECV_CAP = "recv_cap"
_ENGINE_LIMIT = "mori_moe_max_input_tokens"
_POLICY = "_moe_patches_mori_policy"
_CUT_TENSORS = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")

# --- In every forward pass -------------------------------------------------------------------------------------------


def truncate(dispatched: Any, policy: Policy, dp_buffer: Any) -> Any:
    """Cut the receive buffer in the engine's dispatch output to the rows that can have arrived.

    If the dispatch output has a field ``recv_cap``, the engine itself cuts to this number of rows, and this function
    only sets the field. Otherwise this function cuts the tensors.

    :param dispatched: a named tuple with ``hidden_states`` [buffer, ...], ``hidden_states_scale`` [buffer, ...] or
        ``None``, ``topk_ids`` and ``topk_weights`` [buffer, top-k], ``num_recv_tokens_per_expert`` (despite its name
        the number of rows received, int32 [1]) and ``origin_topk_ids`` [rows sent, top-k].
    :param policy: the layer's settings.
    :param dp_buffer: the engine's class in which ``dp_attention`` keeps the token counts of a forward pass.
    :returns: a changed copy of ``dispatched``, or the object itself if there is nothing to cut.
    :raises RuntimeError: no bound can be proven, and more rows than the user's limit have arrived. On a GPU, a failed
        assertion ends the process instead.
    """
    buffer_rows = dispatched.hidden_states.shape[0]
    if policy.has_unproven_layout:
        message = (
            "neither %s nor %s is applied: with MoRI's InterNode kernels, received rows may not lie at the start of "
            "the buffer"
        )
        log.log_once(
            logging.WARNING, "mori layout", log.format_line("mori-input-truncation", message), LIMIT.name, BOUND.name
        )
        return _cut_to(dispatched, buffer_rows)
    counts = None
    if not policy.has_stale_counts and (policy.unreliable_reason is None or policy.layout.dp_ranks == 1):
        counts = find_rows_per_dp_rank(
            read_host_counts(getattr(dp_buffer, "_global_num_tokens", None)),
            getattr(dp_buffer, "_local_dp_buffer_len", None),
            getattr(dp_buffer, "_global_dp_buffer_len", None),
            policy.layout.dp_ranks,
            two_batch_overlap=policy.two_batch_overlap,
        )
    sent = dispatched.origin_topk_ids.shape[0]
    bound, cut = decide_cut(sent, counts, policy.layout, buffer_rows, policy.limit, policy.recv_bound)
    if bound is None or cut.is_limit_raised:
        _warn(bound, cut, policy)
    rows = cut.rows
    if policy.raise_only:
        rows = max(rows, getattr(dispatched, _RECV_CAP, 0) or buffer_rows)
    if cut.needs_assertion:
        if not policy.has_assertions:
            rows = buffer_rows
        elif rows < buffer_rows:
            import torch

            message = (
                f"MoRI delivered more rows than {LIMIT.name} allows ({rows}); raise the limit or unset the variable"
            )
            within = dispatched.num_recv_tokens_per_expert <= rows
            torch._assert_async(within, log.format_line("mori-input-truncation", message))
    return _cut_to(dispatched, rows)


def _warn(bound: int | None, cut: Cut, policy: Policy) -> None:
    """Log a warning that the user's limit is raised, or that the largest number of received rows is unknown.

    Each kind of problem is logged only once.
    """
    reason = policy.unreliable_reason or "the engine's token counts do not cover every rank that sends rows"
    arguments: tuple[Any, ...]
    if bound is not None:
        kind, arguments = "raised", (LIMIT.name, policy.limit, bound, cut.rows, BOUND.name)
        message = (
            "%s=%d is less than the %d rows that this rank can receive, so the limit is raised for each forward pass "
            "(here to %d rows). Set %s=1 without a limit, or set a limit of at least this number."
        )
    elif not cut.needs_assertion:
        kind, arguments = "uncut", (reason,)
        message = "MoRI's receive buffer is not cut, because the number of rows that a rank can receive is unknown (%s)"
    elif not policy.has_assertions:
        kind, arguments = "unguarded", (LIMIT.name, reason)
        message = (
            "%s is not applied, because the number of rows that a rank can receive is unknown (%s), and this PyTorch "
            "has no device-side assertions that would detect a lost row"
        )
    else:  # Log this before the assertion can fail: on ROCm a failed assertion aborts the process without a message.
        kind, arguments = "asserted", (reason, LIMIT.name, policy.limit)
        message = (
            "the number of rows that a rank can receive is unknown (%s), so %s=%d is applied, and a device-side "
            "assertion ends this process if more rows arrive. If that happens, raise the limit or unset it."
        )
    log.log_once(logging.WARNING, f"mori {kind}", log.format_line("mori-input-truncation", message), *arguments)


def _cut_to(dispatched: Any, rows: int) -> Any:
    """Return a copy of ``dispatched`` from which the MoE kernel computes ``rows`` rows.

    If ``dispatched`` has a field ``recv_cap``, the copy's field is ``rows``, or 0 if nothing is cut. Otherwise the
    copy's tensors have ``rows`` rows.
    """
    whole = rows >= dispatched.hidden_states.shape[0]
    if _RECV_CAP in dispatched._fields:
        cap = 0 if whole else rows
        return dispatched if getattr(dispatched, _RECV_CAP) == cap else dispatched._replace(**{_RECV_CAP: cap})
    if whole:
        return dispatched
    tensors = {name: getattr(dispatched, name) for name in _CUT_TENSORS}
    return dispatched._replace(**{name: t[:rows] for name, t in tensors.items() if t is not None})


def read_host_counts(counts: Any) -> Any:
    """Return ``counts``, the engine's token counts, or an empty tuple if a count is no Python integer.

    Such a count lies on the device, and reading it would synchronize in every layer. If ``counts`` is ``None``, the
    result is ``None``.
    """
    return counts if counts is None or all(isinstance(count, int) for count in counts) else ()


# --- The wrappers ----------------------------------------------------------------------------------------------------


@around
def _wrap_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of the MoE layer, so that each new layer whose buffer is cut has a :class:`.policy.Policy`.

    A layer has no policy if it does not use MoRI, or if neither the limit nor the bound is set. Up to 0.5.12.post1 the
    wrapper also switches off the engine's own cut: it sets the layer's ``mori_moe_max_input_tokens`` to 0.
    """
    original(self, *args, **kwargs)
    policy = read_policy(self)
    if policy is not None and (policy.limit or policy.recv_bound):
        setattr(self, _POLICY, policy)
        if hasattr(self, _ENGINE_LIMIT):
            setattr(self, _ENGINE_LIMIT, 0)


def _wrap_run_moe_core(original: Callable[..., Any], dp_buffer: Any) -> Callable[..., Any]:
    """Wrap the MoE layer's ``run_moe_core``: cut the received rows before the layer's experts compute them
    (:func:`truncate`).
    """

    @functools.wraps(original)
    def run_moe_core(self: Any, dispatch_output: Any) -> Any:
        policy = getattr(self, _POLICY, None)
        if policy is None:
            return original(self, dispatch_output)
        return original(self, truncate(dispatch_output, policy, dp_buffer))

    return run_moe_core


def _wrap_get_int_env_var(original: Callable[..., int]) -> Callable[..., int]:
    """Wrap the engine's ``get_int_env_var``: return 0 for ``SGLANG_MORI_MOE_MAX_INPUT_TOKENS``, so that the engine cuts
    nothing.
    """

    @functools.wraps(original)
    def get_int_env_var(name: str, *args: Any, **kwargs: Any) -> int:
        return 0 if name == LIMIT.name else original(name, *args, **kwargs)

    return get_int_env_var


# --- Probing the engine ----------------------------------------------------------------------------------------------


def find_layer_class() -> type:
    """Return the engine's class of MoE layers whose ``run_moe_core`` receives MoRI's rows.

    From 0.5.13 on this class is ``FusedMoE``. MoRI's own layer class calls methods of ``FusedMoE``. EPv2 (the second
    version of MoRI's dispatch) uses ``FusedMoE`` itself.

    :raises engine.Unsupported: the layer is missing, or another plugin has replaced it.
    """
    module = engine.import_module("sglang.srt.layers.moe.ep_moe.layer")
    layer: type = engine.require_unpatched(module, "MoriEPMoE" if hasattr(module, "MoriEPMoE") else "FusedMoE")
    return layer


def _probe_engine_cut(layer: type, run_moe_core: Any, dispatched: Any) -> Install:
    """Return an installer that keeps the engine from cutting the receive buffer by itself.

    In some releases the installer does nothing, because the wrappers of ``__init__`` or ``run_moe_core`` control the
    engine's cut.

    :raises engine.Unsupported: the engine's code for its own cut is not as expected.
    """
    if engine.mentions(run_moe_core, _ENGINE_LIMIT):
        engine.require_mentions(engine.require_unpatched(layer, "__init__"), _ENGINE_LIMIT)
        return lambda patcher: None
    engine.require(engine.has_module(_RUNNER_MODULE), f"{layer.__name__}.run_moe_core does not use {_ENGINE_LIMIT}")
    runner = engine.import_module(_RUNNER_MODULE)
    function = engine.require_unpatched(runner, _RUNNER_FUNCTION)
    if _RECV_CAP in dispatched._fields:
        engine.require_mentions(function, _RECV_CAP)
        return lambda patcher: None
    reads = [ast.unparse(call) for call in engine.find_calls(function, "get_int_env_var")]
    engine.require(any(LIMIT.name in call for call in reads), f"{_RUNNER_FUNCTION} does not read {LIMIT.name}")
    for name in ("get_int_env_var", *([_ENGINE_BOUND] if hasattr(runner, _ENGINE_BOUND) else [])):
        engine.require_unpatched(runner, name)

    def install(patcher: Patcher) -> None:
        patcher.wrap(runner, "get_int_env_var", _wrap_get_int_env_var)
        if hasattr(runner, _ENGINE_BOUND):
            patcher.wrap(runner, _ENGINE_BOUND, lambda original: functools.wraps(original)(lambda *rows: 0))

    return install


def _require_layout(dp_attention: Any) -> None:
    """Check that this package can read how the engine distributes the attention over the ranks.

    Depending on the release, the engine has three functions for this in its module ``dp_attention``, or three
    attributes in its parallel context (``get_parallel()``).

    :raises engine.Unsupported: the engine has neither these functions nor these attributes.
    """
    names = ("get_attention_tp_size", "get_attention_cp_size", "get_attention_dp_rank")
    if all(hasattr(dp_attention, name) for name in names):
        return
    parallel = engine.get(engine.import_module("sglang.srt.runtime_context"), "get_parallel")()
    for name in ("attn_tp_size", "attn_cp_size", "attn_dp_rank"):
        try:
            getattr(parallel, name)
        except AttributeError as error:
            raise engine.Unsupported(str(error)) from error
        except Exception:
            pass  # the attribute exists, but reading it raises an exception until the ranks are set up


def plan() -> Plan:
    """Return the plan for mori-input-truncation, which says how to install the change.

    :raises engine.Unsupported: the engine's code for MoRI is not what this module expects.
    """
    environ = engine.import_module("sglang.srt.environ")
    dp_attention = engine.import_module("sglang.srt.layers.dp_attention")
    utils = engine.import_module("sglang.srt.layers.moe.utils")
    moriep = engine.import_module("sglang.srt.layers.moe.token_dispatcher.moriep")

    layer = find_layer_class()
    run_moe_core = engine.require_unpatched(layer, "run_moe_core")
    engine.require_unpatched(layer, "__init__")
    engine.require_parameters(run_moe_core, ["self", "dispatch_output"], exactly=True)
    needed_fields = {*_CUT_TENSORS, "num_recv_tokens_per_expert", "origin_topk_ids"}
    for name in ("MoriEPNormalDispatchOutput", "MoriEPLLDispatchOutput"):
        engine.require(
            needed_fields <= set(getattr(engine.get(moriep, name), "_fields", ())),
            f"{name} does not have the fields {', '.join(sorted(needed_fields))}",
        )
    for name in ("is_tbo_enabled", "get_moe_a2a_backend", "get_deepep_mode"):
        engine.get(utils, name)
    engine.require(
        hasattr(environ.envs, "SGLANG_SCHEDULER_SKIP_ALL_GATHER"), "SGLANG_SCHEDULER_SKIP_ALL_GATHER is unknown"
    )
    _require_layout(dp_attention)
    dp_buffer = engine.require_unpatched(dp_attention, "_DpGatheredBufferWrapper")
    set_dp_buffer_len = engine.require_unpatched(dp_buffer, "set_dp_buffer_len")
    engine.require_parameters(
        set_dp_buffer_len, ["cls", "global_dp_buffer_len", "local_dp_buffer_len", "dp_max_padding", "global_num_tokens"]
    )
    engine.require_mentions(set_dp_buffer_len, "_global_num_tokens", "_local_dp_buffer_len", "_global_dp_buffer_len")
    take_over_engine_cut = _probe_engine_cut(layer, run_moe_core, moriep.MoriEPNormalDispatchOutput)

    def install(patcher: Patcher) -> None:
        patcher.wrap(layer, "__init__", _wrap_init)
        patcher.wrap(layer, "run_moe_core", lambda original: _wrap_run_moe_core(original, dp_buffer))
        take_over_engine_cut(patcher)

    return Plan.hardened(install)
