"""moe-workspace: Triton's and Marlin's second GEMM and sum over the top-k, one column slice after another.

Why
    Between its second GEMM and the sum over the top-k the runner holds the expert outputs, [tokens, top-k, hidden].
    Tensor parallelism does not shard that tensor and nothing bounds it.

Hook points
    What offers the layer's dead input (:mod:`sglang_moe_patches.core.dead_input`); ``_fused_moe_kernel_sequence``
    (:mod:`.triton`), ``fused_marlin_moe`` (:mod:`.marlin`), ``ModelRunner.load_model`` (:mod:`.streams`).

Skipped
    without CUDA, and on AMD. Other runners are left alone. By layer: see *What runs in columns* in
    ``docs/changes/moe-workspace.md``.

Costs
    An estimated 2 % of the layer's time at most (:data:`.column_slices.MAX_SLOWDOWN_FRACTION`), with
    ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` whatever the slices cost; below the threshold one comparison.

How
    In the order of a Triton forward: :mod:`.triton` runs the engine's own fused-MoE function with three replaced
    globals, in which :mod:`.deferred_tensor` stands in for the tensor; :mod:`.column_slices` says how many slices;
    :mod:`.streams`, whether they need a staging buffer.

Upstream
    None.

Remove when
    the engine's runners bound that tensor.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices
from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB
from sglang_moe_patches.core import engine, log, runners
from sglang_moe_patches.core.dead_input import counts, probe
from sglang_moe_patches.core.patch import (
    BuiltModel,
    Change,
    Count,
    Decision,
    Install,
    PatchError,
    Plan,
    Skip,
    Status,
    best_effort,
    combine_installs,
    error_reason,
)
from sglang_moe_patches.core.variables import STRICT


def _skip(server_args: Any) -> Skip | None:
    """``--moe-runner-backend`` does not matter: experts for which that runner has no kernel run on Triton.

    :raises engine.Unsupported: ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` is set, and columns need CUDA.
    """
    if server_args.device == "cuda":
        return None
    reason = f"--device is {server_args.device}"
    _require_unasked(reason)
    return Skip(reason)


def _require_unasked(reason: str) -> None:
    engine.require(MOE_WORKSPACE_MB.read() is None, f"{MOE_WORKSPACE_MB.name} is set, and no runner is cut: {reason}")


def _plan() -> Plan:
    from sglang_moe_patches.changes.moe_workspace import marlin, streams, triton

    triton_plan, marlin_plan = _plan_runner(triton.plan), _plan_runner(marlin.plan)
    if triton_plan.install is None and marlin_plan.install is None:
        _require_unasked(triton_plan.reason)
        return triton_plan
    offer, note = _offer_dead_input()
    reasons = [note]
    if triton_plan.install is None:
        reasons.append(f"no columns in the Triton runner: {triton_plan.reason}")
    if marlin_plan.status is Status.UNSUPPORTED:
        reasons.append(f"no columns in Marlin: {marlin_plan.reason}")
    unsupported = {
        runner: plan.reason
        for runner, plan in (("triton", triton_plan), ("marlin", marlin_plan))
        if plan.status is Status.UNSUPPORTED
    }
    look_at = functools.partial(_require_supported_runners, unsupported=unsupported)
    parts = (offer, triton_plan.install, marlin_plan.install, streams.probe(look_at))
    return Plan(Status.APPLIED, "; ".join(filter(None, reasons)), combine_installs(*parts))


def _require_supported_runners(model: Any, unsupported: dict[str, str]) -> None:
    """:raises PatchError: a layer of the model uses a runner that is not supported, and this server is strict.

    :param unsupported: why, by the runner's name for ``--moe-runner-backend``.
    """
    used = set[str | None]()
    with best_effort("moe-workspace: which runners a model has"):
        used = {runners.runner_of(experts) for experts in runners.layers_of(model)}
    for runner in sorted(unsupported.keys() & used):
        message = log.format_line(
            "moe-workspace", f"layers of this model run on {runner}, uncut: {unsupported[runner]}"
        )
        if STRICT.read():
            raise PatchError(f"{STRICT.name}=1, and {message}")
        log.once(logging.WARNING, f"unsupported {runner}", "%s", message)


def _plan_runner(plan: Callable[[], Plan]) -> Plan:
    """One runner's plan. A runner that is unsupported, or whose code cannot be read, does not affect the other."""
    try:
        return plan()
    except Exception as error:
        return Plan.unsupported(error_reason(error, "probing it failed: "))


def _offer_dead_input() -> tuple[Install | None, str]:
    """What offers the dead input, and a note on what does not; columns work without."""
    try:
        offers = probe.probe_offers()
    except engine.Unsupported as error:
        return None, f"no dead input is scratch memory: {error}"
    return offers.install, offers.note


def _size_skip_reason(tokens: int, top_k: int, hidden: int, itemsize: int) -> str:
    """Why no forward ran in columns. Which runner it was is not known: both thresholds are named where they differ."""
    tensor_bytes, max_bytes = tokens * top_k * hidden * itemsize, column_slices.read_max_bytes()
    thresholds = {
        "Triton": column_slices.min_tensor_bytes(max_bytes),
        "Marlin": column_slices.min_packed_tensor_bytes(max_bytes),
    }
    too_small = [runner for runner, size in thresholds.items() if tensor_bytes < size]
    largest = f"the largest [tokens, top-k, hidden] was {tensor_bytes / 1e6:,.1f} MB"
    if not too_small:
        return f"{largest}, but no layer gained by a second slice, or none can be cut"
    sizes = {size: f"{size / 1e6:,.1f} MB" for size in thresholds.values()}
    starts = [f"{sizes[size]} in {runner}" for runner, size in thresholds.items()] if len(sizes) > 1 else sizes.values()
    return (
        f"no forward was large enough{'' if len(too_small) == len(thresholds) else f' for {too_small[0]}'}: "
        f"{largest}, slices start at {', '.join(starts)}"
    )


def decide(built: BuiltModel) -> Decision:
    """What the layers of a model do (:mod:`.decision`)."""
    from sglang_moe_patches.changes.moe_workspace import decision

    return decision.decide(built)


COLUMNS = Count(
    "columns",
    "ran in columns",
    column_slices.__name__,
    "split_columns",
    lambda slices, *args: len(slices) if len(slices) > 1 else 0,
    unit="slices",
    skip_reason=_size_skip_reason,
)
CHANGE = Change(
    name="moe-workspace",
    summary="Triton and Marlin sum over the top-k in columns where their tensor is large, in as little as a fifth of "
    "their memory; other runners are left alone",
    plan=_plan,
    skip=_skip,
    variables=(MOE_WORKSPACE_MB,),
    counts=(COLUMNS, counts.OFFERED, counts.AS_SCRATCH),
    decide=decide,
)
