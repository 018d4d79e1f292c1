"""deferred-shared-experts: run the shared experts after the routed ones where the routed kernel leaves its input alone.

Why
    The shared experts run first, so their hidden-size output stays allocated while the routed kernel has its workspace.

Hook points
    ``DeepseekV2MoE.__init__``; in 0.5.11 its ``forward_normal`` and ``_forward_shared_experts``, too. Of
    :mod:`sglang_moe_patches.core.dead_input`: the layers that offer their dead input, and Triton's fused-MoE function.

Skipped
    layer by layer: with runners that do not leave their input alone, fused shared experts, all-to-all, or single-batch
    overlap; Triton in a server with LoRA adapters, and on AMD. ``--moe-runner-backend`` does not say which runner a
    layer gets.

How
    The runners that leave their input alone are marked as what they are (``inplace`` off). Triton can be told to; its
    output then goes into the layer's dead input. Releases from 0.5.12 defer by themselves where ``inplace`` is off.

    In 0.5.11, ``_forward_shared_experts`` returns a stand-in during ``forward_normal`` of a layer that defers. The
    engine's own ``final_hidden_states += shared_output`` then computes and adds it, at the place where the engine adds
    it: after the routed experts and their scaling, before the all-reduce. ``inplace`` is off only for that duration:
    where nothing waits, as in a traced prefill graph, another output would be one tensor more.

Upstream
    sgl-project/sglang#25279, in releases from 0.5.12; its switch from 0.5.13, for TRT-LLM alone.

Remove when
    the engine defers behind every runner that leaves its input alone.
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


_ORDER = "_moe_patches_why_shared_experts_run_first"
"""Attribute of a layer: why they do; "": they do not. ``None``: the engine defers them by itself."""


def reason_to_run_first(
    *,
    inplace: bool,
    leaves_input_alone: bool,
    overlapped: bool,
    fused: bool,
    present: bool,
    lora: bool,
    all_to_all: bool,
) -> str:
    """Why a layer's shared experts must run before its routed experts; "": they may run after them.

    :param inplace: the runner's configuration lets it write its output over its input.
    :param leaves_input_alone: the runner never does so, or can be told not to.
    :param overlapped: single-batch overlap already runs the shared experts elsewhere.
    :param fused: the shared experts are fused into the routed ones.
    :param present: the layer has shared experts of its own.
    :param lora: the server may run LoRA adapters, which use different runners.
    :param all_to_all: tokens travel to their experts, and the layer runs another way.
    """
    if fused:
        return "shared experts are fused into the routed ones"
    if not present:
        return "the layers have no shared experts of their own"
    if overlapped:
        return "single-batch overlap runs the shared experts elsewhere"
    if all_to_all:
        return "tokens travel to their experts"
    if inplace and not leaves_input_alone:
        return "the runner writes into its input, or may"
    return "the server may run LoRA adapters" if inplace and lora else ""


class DeferredSharedExperts:
    """The output of the shared experts, computed when it is added in place to the routed output.

    It is no tensor: anything but ``routed += deferred`` is a use that was not foreseen, and an error.
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
            f"({getattr(function, '__name__', function)}); set SGLANG_MOE_PATCHES to leave deferred-shared-experts out"
        )


def _wrap_forward_normal(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
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
    @functools.wraps(original)
    def _forward_shared_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Asked first: the tracer knows no ContextVar, and piecewise CUDA graphs trace this without a way out.
        if is_compiling() or not _deferring.get():
            return original(self, *args, **kwargs)
        return DeferredSharedExperts(lambda: original(self, *args, **kwargs))

    return _forward_shared_experts


def _init(
    mark: Callable[[Any], None],
    is_native: Callable[[Any], bool],
    original: Callable[..., None],
    self: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Build a layer, and decide whether it defers.

    :param mark: given the configuration of its routed experts' runner, has them leave their input alone.
    :param is_native: whether the engine defers by itself, given the routed experts.
    """
    original(self, *args, **kwargs)
    with best_effort(f"the order of experts in {type(self).__name__}"):
        reason = reason_to_run_first(
            inplace=self.experts.moe_runner_config.inplace,
            leaves_input_alone=runners.preserves_input(self.experts),
            overlapped=self._fuse_shared_experts_inside_sbo,
            fused=self.num_fused_shared_experts > 0,
            present=getattr(self, "shared_experts", None) is not None,
            lora=runners.serves_lora(),
            all_to_all=self._enable_a2a_moe,
        )
        if not reason:
            mark(self.experts.moe_runner_config)
        setattr(self, _DEFERS, not reason)
        setattr(self, _ORDER, None if not reason and is_native(self.experts) else reason)


def _clear_inplace(config: Any) -> None:
    config.inplace = False


# --- Probing the engine ----------------------------------------------------------------------------------------------


def _plan() -> Plan:
    import torch

    deepseek = engine.module(f"sglang.srt.models.{DEEPSEEK}")
    fused_moe = engine.module("sglang.srt.layers.moe.fused_moe_triton.layer")
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
            "final_hidden_states += shared_output" in engine.source(forward),
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
        mark = _clear_inplace if defers_itself else clear_while_deferring
        patcher.wrap(moe, "__init__", around(functools.partial(_init, mark, is_native)))
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
        status, reason = Status.EXTENDED, "the engine defers behind TRT-LLM's kernels alone"
    else:
        status, reason = Status.HARDENED, "the engine defers, and takes every runner for in place"
    return Plan(status, "; ".join(filter(None, [reason, offers.note])), install)


def decide(built: BuiltModel) -> Decision:
    """What each of the layers decided when it was built."""
    orders = {getattr(module, _ORDER) for module in built.model.modules() if hasattr(module, _ORDER)}
    if "" in orders:
        return Decision((SHARED_LAST,))
    if None in orders:
        return Decision(reason="the engine defers them by itself here")
    return Decision(reason="; ".join(sorted(orders)) or "none of the layers is DeepSeek's")


DEFERS = Count(
    *("defers", "had the shared experts of layers run last", __name__, "reason_to_run_first"),
    lambda reason, **facts: not reason,
)
CHANGE = Change(
    name="deferred-shared-experts",
    summary="DeepSeek's shared experts run after the routed ones where those leave their input alone: "
    f"{', '.join((*runners.TRTLLM, *runners.OUT_OF_PLACE))}; other models and runners are left alone",
    plan=_plan,
    counts=(DEFERS, counts.OFFERED, counts.AS_OUTPUT),
    decide=decide,
)
