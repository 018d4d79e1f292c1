"""deferred-shared-experts: run the shared experts after the routed ones where the routed kernel leaves its input alone.

Why
    In ``DeepseekV2MoE.forward_normal`` the shared experts run first, so their hidden-size output stays allocated while
    the routed kernel has its workspace: 235 MB at a 16K-token prefill of Kimi-K2.5.

How
    During ``forward_normal`` of a layer whose routed experts leave their input alone, ``_forward_shared_experts``
    returns a promise. The engine's own ``final_hidden_states += shared_output`` then computes and adds it, at the place
    where the engine adds it: after the routed experts and their scaling, before the all-reduce.

    Releases 0.5.12 and 0.5.12.post1 defer by themselves, for runners that are not in place, and take every runner for
    one that is: there the TRT-LLM runners are marked as what they are, and the rest is the engine's.

Upstream
    sgl-project/sglang#25279, in releases from 0.5.12; its switch from 0.5.13.

Remove when
    0.5.12.post1 is no longer supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches import engine, runners
from sglang_moe_patches.patch import Change, Patcher, Plan

_DEFERS = "_moe_patches_defers_shared_experts"

_deferring: ContextVar[bool] = ContextVar("moe_deferring_shared_experts", default=False)


def may_defer(*, inplace: bool, runner_is_trtllm: bool, overlapped: bool, fused: bool, present: bool) -> bool:
    """Whether a layer's shared experts may run after its routed experts.

    :param inplace: the runner may write its output over its input.
    :param runner_is_trtllm: the runner is ``flashinfer_trtllm`` or ``flashinfer_trtllm_routed``, which never mutate
        their input, whatever the engine's default for ``inplace`` says.
    :param overlapped: single-batch overlap already runs the shared experts elsewhere.
    :param fused: the shared experts are fused into the routed ones.
    :param present: the layer has shared experts of its own.
    """
    return present and not fused and not overlapped and (runner_is_trtllm or not inplace)


class SharedExpertsLater:
    """The output of the shared experts, computed when it is added in place to the routed output.

    It is no tensor: anything but ``routed += promise`` is a use that was not foreseen, and an error.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(function, "__name__", "") in ("__iadd__", "add_") and len(args) == 2 and not kwargs:
            routed, promise = args
            return routed.add_(promise._compute())
        raise TypeError(
            "sglang-moe-patches: the engine used the deferred shared experts in an unexpected way "
            f"({getattr(function, '__name__', function)}); set SGLANG_MOE_PATCHES to leave deferred-shared-experts out"
        )


def _make_forward_normal(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
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


def _make_forward_shared_experts(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _forward_shared_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Asked first: the tracer knows no ContextVar, and piecewise CUDA graphs trace this without a way out.
        if is_compiling() or not _deferring.get():
            return original(self, *args, **kwargs)
        return SharedExpertsLater(lambda: original(self, *args, **kwargs))

    return _forward_shared_experts


def _make_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        defers = may_defer(
            inplace=self.experts.moe_runner_config.inplace,
            runner_is_trtllm=self.experts.use_flashinfer_trtllm_moe,
            overlapped=self._fuse_shared_experts_inside_sbo,
            fused=self.num_fused_shared_experts > 0,
            present=hasattr(self, "shared_experts"),
        )
        setattr(self, _DEFERS, defers)
        if defers:
            # The choice of runner is a flag of the server; a quantization may bring another kernel, which then must
            # leave its input alone, too.
            self.experts.moe_runner_config.inplace = False

    return __init__


def _plan() -> Plan:
    import torch

    deepseek = engine.module("sglang.srt.models.deepseek_v2")
    fused_moe = engine.module("sglang.srt.layers.moe.fused_moe_triton.layer")
    moe = engine.own(deepseek, "DeepseekV2MoE")
    init = engine.own(moe, "__init__")
    forward = engine.own(moe, "forward_normal")
    if engine.mentions(forward, "defer_shared") or engine.mentions(init, "defer_shared"):
        experts = runners.look_at_inplace(fused_moe)
        if engine.sets(engine.own(experts, "__init__"), "inplace"):
            return Plan.native()
        return Plan.hardened(
            functools.partial(runners.clear_inplace, experts), "the engine defers, and takes every runner for in place"
        )
    shared = engine.own(moe, "_forward_shared_experts")
    engine.require_parameters(forward, ["self", "hidden_states"])
    engine.require_parameters(shared, ["self", "hidden_states"])
    engine.require(
        "final_hidden_states += shared_output" in engine.source(forward),
        "forward_normal does not add the shared experts' output in place",
    )
    engine.require_mentions(init, "_fuse_shared_experts_inside_sbo", "num_fused_shared_experts", "experts")
    is_compiling = torch.compiler.is_compiling

    def install(patcher: Patcher) -> None:
        patcher.wrap(moe, "forward_normal", lambda original: _make_forward_normal(original, is_compiling))
        patcher.wrap(
            moe, "_forward_shared_experts", lambda original: _make_forward_shared_experts(original, is_compiling)
        )
        patcher.wrap(moe, "__init__", _make_init)

    return Plan.applied(install)


CHANGE = Change(
    name="deferred-shared-experts",
    summary="the shared experts run after the routed ones when those leave their input alone",
    plan=_plan,
)
