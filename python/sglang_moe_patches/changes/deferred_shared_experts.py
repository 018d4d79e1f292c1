"""deferred-shared-experts: run the shared experts after the routed experts, if the routed experts preserve their input.

Why
    The engine runs the shared experts first. Their output, a tensor of the hidden size, stays allocated while the
    routed experts have their workspace.

Hook points
    ``DeepseekV2MoE.__init__``, in 0.5.11 also ``forward_normal`` and ``_forward_shared_experts`` of this class. The
    hook points of :mod:`sglang_moe_patches.core.dead_input`: decoder layers, and Triton's fused-MoE function.

Skipped
    The change decides for each layer by the layer's actual runner, not by ``--moe-runner-backend``. Shared experts run
    first with runners that overwrite their input, with fused shared experts, with all-to-all, and with single-batch
    overlap. They also run first in Triton layers of a server with LoRA adapters, and on AMD.

How
    If a runner's setting ``inplace`` is on, the runner may write its output over its input. Some runners preserve their
    input if ``inplace`` is off. In layers with such a runner, the change switches ``inplace`` off. The Triton runner
    then writes its output into the layer's dead input. From 0.5.12 on the engine itself runs the shared experts last if
    ``inplace`` is off.

    In 0.5.11 the engine cannot run the shared experts last. Therefore ``_forward_shared_experts`` returns a stand-in
    instead of the output, while a layer's ``forward_normal`` runs. Later in ``forward_normal``, the engine executes its
    own statement ``final_hidden_states += shared_output``. With the stand-in, this statement runs the shared experts
    and adds their output. The statement comes after the routed experts and their scaling, and before the all-reduce.

    In 0.5.11 the change switches ``inplace`` off only while ``forward_normal`` runs with the stand-in. Other forward
    passes, such as a traced prefill graph, run the shared experts first. If ``inplace`` were off there, too, they would
    allocate one more tensor for the output.

Upstream
    From 0.5.12 on the engine can run the shared experts last (sgl-project/sglang#25279). From 0.5.13 on it switches
    ``inplace`` off for TRT-LLM, but for no other runner.

Remove when
    the engine itself runs the shared experts last with every runner that preserves its input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.dead_input import counts, probe, takers
from sglang_moe_patches.core.dead_input.families import DEEPSEEK
from sglang_moe_patches.core.patch import (
    SHARED_LAST,
    BuiltModel,
    Change,
    Count,
    Decision,
    Patcher,
    Plan,
    Status,
    around,
    best_effort,
)

_DEFERS = "_moe_patches_defers_shared_experts"

_deferring: ContextVar[bool] = ContextVar("moe_deferring_shared_experts", default=False)


_REASON_TO_RUN_FIRST = "_moe_patches_why_shared_experts_run_first"
"""Name of an attribute of each DeepSeek MoE layer. Its value is the reason why the layer's shared experts run before
the routed experts. The value is "" if this change runs them last, and ``None`` if the engine itself runs them last."""


def find_reason_to_run_first(
    *,
    inplace: bool,
    preserves_input: bool,
    is_overlapped: bool,
    is_fused: bool,
    has_shared_experts: bool,
    serves_lora: bool,
    uses_all_to_all: bool,
) -> str:
    """Return why a layer's shared experts must run before its routed experts, or "" if they may run after the routed
    experts.

    :param inplace: whether the runner's configuration lets it write its output over its input.
    :param preserves_input: whether the runner never overwrites its input, or can be configured not to overwrite it.
    :param is_overlapped: whether single-batch overlap already decides when the shared experts run.
    :param is_fused: whether the shared experts are fused into the routed experts.
    :param has_shared_experts: whether the layer has shared experts of its own.
    :param serves_lora: whether the server may run LoRA adapters, which use other runners.
    :param uses_all_to_all: whether tokens are sent to their experts' ranks (``--moe-a2a-backend``).
    """
    if is_fused:
        return "shared experts are fused into the routed ones"
    if not has_shared_experts:
        return "the layers have no shared experts of their own"
    if is_overlapped:
        return "single-batch overlap decides when the shared experts run"
    if uses_all_to_all:
        return "tokens are sent to their experts' ranks (all-to-all)"
    if inplace and not preserves_input:
        return "the runner may overwrite its input"
    return "the server may run LoRA adapters" if inplace and serves_lora else ""


class DeferredSharedExperts:
    """Stand-in for the output of the shared experts, which run later.

    The shared experts run when the engine adds the stand-in to the routed experts' output (``routed += deferred``). The
    stand-in is no tensor, so every other operation of PyTorch on it raises ``TypeError``.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(function, "__name__", "") in ("__iadd__", "add_") and len(args) == 2 and not kwargs:
            routed, deferred = args
            return routed.add_(deferred._compute())
        raise TypeError(
            "sglang-moe-patches: the engine used the deferred shared experts in an unexpected way "
            f"({getattr(function, '__name__', function)}); to turn deferred-shared-experts off, set "
            "SGLANG_MOE_PATCHES to the names of the other changes"
        )


def _wrap_forward_normal(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap a MoE layer's ``forward_normal``: if the layer defers its shared experts, :data:`_deferring` is set during
    the call.
    """

    @functools.wraps(original)
    def forward_normal(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not getattr(self, _DEFERS, False):
            return original(self, *args, **kwargs)
        token = _deferring.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _deferring.reset(token)

    return forward_normal


def _wrap_forward_shared_experts(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap a MoE layer's ``_forward_shared_experts``: while :data:`_deferring` is set, return a stand-in that computes
    the output later (:class:`DeferredSharedExperts`).
    """

    @functools.wraps(original)
    def _forward_shared_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        # ``is_compiling`` is called first. ``torch.compile`` cannot trace a ContextVar, and piecewise CUDA graphs
        # always trace this function.
        if is_compiling() or not _deferring.get():
            return original(self, *args, **kwargs)
        return DeferredSharedExperts(lambda: original(self, *args, **kwargs))

    return _forward_shared_experts


def _construct_layer(
    disable_inplace: Callable[[Any], None],
    is_native: Callable[[Any], bool],
    original: Callable[..., None],
    self: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Construct one of DeepSeek's MoE layers, and decide whether its shared experts run after its routed experts.

    :param original: the engine's constructor.
    :param disable_inplace: function that switches ``inplace`` off in the configuration of the routed experts' runner.
    :param is_native: function that receives the routed experts of a layer, and returns whether the engine itself runs
        the layer's shared experts after them.
    """
    original(self, *args, **kwargs)
    with best_effort(f"deferring the shared experts in {type(self).__name__}"):
        reason = find_reason_to_run_first(
            inplace=self.experts.moe_runner_config.inplace,
            preserves_input=runners.preserves_input(self.experts),
            is_overlapped=self._fuse_shared_experts_inside_sbo,
            is_fused=self.num_fused_shared_experts > 0,
            has_shared_experts=getattr(self, "shared_experts", None) is not None,
            serves_lora=runners.serves_lora(),
            uses_all_to_all=self._enable_a2a_moe,
        )
        if not reason:
            disable_inplace(self.experts.moe_runner_config)
        setattr(self, _DEFERS, not reason)
        setattr(self, _REASON_TO_RUN_FIRST, None if not reason and is_native(self.experts) else reason)


def _clear_inplace(config: Any) -> None:
    """Configure the runner of a layer's routed experts so that it preserves its input from now on."""
    config.inplace = False


# --- Probing the engine ----------------------------------------------------------------------------------------------


def _plan() -> Plan:
    """Return the plan for deferred-shared-experts: how to install the change, and what the engine does already.

    :raises engine.Unsupported: the engine's code is not what this change expects.
    """
    import torch

    deepseek = engine.import_module(f"sglang.srt.models.{DEEPSEEK}")
    fused_moe = engine.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    moe = engine.require_unpatched(deepseek, "DeepseekV2MoE")
    init = engine.require_unpatched(moe, "__init__")
    forward = engine.require_unpatched(moe, "forward_normal")
    experts = runners.probe_inplace(fused_moe)
    engine.require_mentions(
        init, "_fuse_shared_experts_inside_sbo", "num_fused_shared_experts", "experts", "_enable_a2a_moe"
    )
    offers, install_triton_output = probe.probe_offers(), takers.probe_triton()
    engine.require(not offers.note, offers.note)
    defers_itself = engine.mentions(forward, "defer_shared") or engine.mentions(init, "defer_shared")
    if not defers_itself:
        shared = engine.require_unpatched(moe, "_forward_shared_experts")
        engine.require_parameters(forward, ["self", "hidden_states"])
        engine.require_parameters(shared, ["self", "hidden_states"])
        engine.require(
            "final_hidden_states += shared_output" in engine.read_source(forward),
            "forward_normal does not add the shared experts' output in place",
        )
    behind_trtllm = engine.sets_attribute(engine.require_unpatched(experts, "__init__"), "inplace")
    is_compiling = torch.compiler.is_compiling
    clear_while_deferring = functools.partial(
        runners.disable_inplace_while, is_disabled=lambda: not is_compiling() and _deferring.get()
    )

    def is_native(routed: Any) -> bool:
        return defers_itself and behind_trtllm and bool(routed.use_flashinfer_trtllm_moe)

    def install(patcher: Patcher) -> None:
        disable_inplace = _clear_inplace if defers_itself else clear_while_deferring
        patcher.wrap(moe, "__init__", around(functools.partial(_construct_layer, disable_inplace, is_native)))
        offers.install(patcher)
        install_triton_output(patcher)
        if not defers_itself:
            patcher.wrap(moe, "forward_normal", lambda original: _wrap_forward_normal(original, is_compiling))
            patcher.wrap(
                moe, "_forward_shared_experts", lambda original: _wrap_forward_shared_experts(original, is_compiling)
            )

    if not defers_itself:
        return Plan(Status.APPLIED, offers.note, install)
    if behind_trtllm:
        status, reason = Status.EXTENDED, "the engine itself runs the shared experts last only with TRT-LLM's kernels"
    else:
        reason = "the engine can run the shared experts last, but assumes that every runner overwrites its input"
        status = Status.HARDENED
    return Plan(status, "; ".join(filter(None, [reason, offers.note])), install)


def decide(built: BuiltModel) -> Decision:
    """Return whether the layers of a built model run their shared experts last, or why they run them first.

    Each layer stores its decision in an attribute (:data:`_REASON_TO_RUN_FIRST`) when it is constructed.
    """
    reasons = {
        getattr(module, _REASON_TO_RUN_FIRST)
        for module in built.model.modules()
        if hasattr(module, _REASON_TO_RUN_FIRST)
    }
    if "" in reasons:
        return Decision((SHARED_LAST,))
    if None in reasons:
        return Decision(reason="the engine itself runs the shared experts last here")
    return Decision(reason="; ".join(sorted(reasons)) or "the model has no MoE layers of DeepSeek's architecture")


DEFERS = Count(
    *("defers", "ran the shared experts last", __name__, "find_reason_to_run_first"),
    lambda reason, **facts: not reason,
)
CHANGE = Change(
    name="deferred-shared-experts",
    summary="DeepSeek's shared experts run after the routed experts, if the runner leaves its input alone",
    plan=_plan,
    counts=(DEFERS, counts.OFFERED, counts.AS_OUTPUT),
    decide=decide,
)
