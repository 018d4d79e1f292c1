"""moe-workspace: compute the expert outputs of the Triton and Marlin runners in column slices.

Why
    A runner allocates the output of its second GEMM, the *expert outputs*, and then sums them over the top-k. This
    tensor has the shape [tokens, top-k, hidden]. Tensor parallelism does not shard it, and no setting limits it.

What it does
    The second GEMM and the sum run for one slice of the hidden columns at a time. The full tensor is never allocated.

Hook points
    The layers that offer their dead input (:mod:`sglang_moe_patches.core.dead_input`), ``_fused_moe_kernel_sequence``
    (:mod:`.triton`), ``fused_marlin_moe`` (:mod:`.marlin`) and ``ModelRunner.load_model`` (:mod:`.streams`).

Skipped
    Servers without CUDA, AMD GPUs, and other runners. The section *What runs in columns* in
    ``docs/changes/moe-workspace.md`` says which kinds of layers are cut into slices.

Costs
    By default at most an estimated 2 % of the layer's time (:data:`.column_slices.MAX_SLOWDOWN_FRACTION`). With
    ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` the slices may cost any time. For small tensors the cost is one comparison.

How
    With the Triton runner, :mod:`.triton` runs the engine's own fused-MoE function with three replaced globals.
    :mod:`.deferred_tensor` has the stand-in for the expert outputs. :mod:`.column_slices` chooses the number of slices.
    :mod:`.streams` finds out whether the slices need a staging buffer.

Upstream
    None.

Remove when
    the engine's runners limit the size of the expert outputs.
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
    format_reason,
)
from sglang_moe_patches.core.variables import STRICT


def _find_skip(server_args: Any) -> Skip | None:
    """Return why this server never runs column slices, or ``None`` if it may run them.

    The value of ``--moe-runner-backend`` does not matter: if the selected runner has no kernel for some experts, these
    experts run on Triton.

    :raises engine.Unsupported: ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` is set, but the device is not CUDA.
    """
    if server_args.device == "cuda":
        return None
    reason = f"--device is {server_args.device}"
    _require_variable_unset(reason)
    return Skip(reason)


def _require_variable_unset(reason: str) -> None:
    """Raise ``engine.Unsupported`` if ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` is set.

    :param reason: why no runner can run column slices on this server.
    """
    engine.require(
        MOE_WORKSPACE_MB.read() is None,
        f"{MOE_WORKSPACE_MB.name} is set, but column slices cannot run here: {reason}",
    )


def _plan() -> Plan:
    """Return the plan for moe-workspace, combined from the plans for the Triton runner and for Marlin.

    If only one of these runners is supported, the combined plan installs the column slices of this runner. The plan's
    reason then says why the other runner is not supported.
    """
    from sglang_moe_patches.changes.moe_workspace import marlin, streams, triton

    triton_plan, marlin_plan = _plan_runner(triton.plan), _plan_runner(marlin.plan)
    if triton_plan.install is None and marlin_plan.install is None:
        _require_variable_unset(triton_plan.reason)
        return triton_plan
    offer, note = _offer_dead_input()
    reasons = [note]
    if triton_plan.install is None:
        reasons.append(f"no column slices on the Triton runner: {triton_plan.reason}")
    if marlin_plan.status is Status.UNSUPPORTED:
        reasons.append(f"no column slices on Marlin: {marlin_plan.reason}")
    unsupported = {
        runner: plan.reason
        for runner, plan in (("triton", triton_plan), ("marlin", marlin_plan))
        if plan.status is Status.UNSUPPORTED
    }
    check_model = functools.partial(_require_supported_runners, unsupported=unsupported)
    parts = (offer, triton_plan.install, marlin_plan.install, streams.probe(check_model))
    return Plan(Status.APPLIED, "; ".join(filter(None, reasons)), combine_installs(*parts))


def _require_supported_runners(model: Any, unsupported: dict[str, str]) -> None:
    """Log a warning if layers of a loaded model use a runner that this change does not support on this engine.

    :param model: the model that the engine has loaded.
    :param unsupported: reasons why runners are not supported, by their names in ``--moe-runner-backend``.
    :raises PatchError: a layer uses an unsupported runner, and ``SGLANG_MOE_PATCHES_STRICT=1``.
    """
    model_runners = set[str | None]()
    with best_effort("moe-workspace: finding the MoE runners of the model"):
        model_runners = {runners.find_runner(experts) for experts in runners.find_layers(model)}
    for runner in sorted(unsupported.keys() & model_runners):
        message = log.format_line(
            "moe-workspace",
            f"layers of this model run on {runner}, which cannot run column slices: {unsupported[runner]}",
        )
        if STRICT.read():
            raise PatchError(f"{STRICT.name}=1, and {message}")
        log.log_once(logging.WARNING, f"unsupported {runner}", "%s", message)


def _plan_runner(plan: Callable[[], Plan]) -> Plan:
    """Call the function that returns the plan for one runner. If it raises an exception, return an *unsupported* plan.

    The exception then does not affect the other runner.
    """
    try:
        return plan()
    except Exception as error:
        return Plan.unsupported(format_reason(error, "probing it failed: "))


def _offer_dead_input() -> tuple[Install | None, str]:
    """Probe whether decoder layers can offer their dead inputs to the runners. Column slices do not need these offers.

    :returns: the function that installs the offers, and a note about layers that offer nothing. If no layer can offer
        its input, the function is ``None``, and the note says why.
    """
    try:
        offers = probe.probe_offers()
    except engine.Unsupported as error:
        return None, f"the runners get no memory from dead inputs: {error}"
    return offers.install, offers.note


def _find_size_skip_reason(tokens: int, top_k: int, hidden: int, itemsize: int) -> str:
    """Return why no forward pass ran in column slices. The arguments are the sizes of the largest expert outputs.

    Each runner cuts expert outputs only from a certain size on. If the largest outputs are smaller, the reason names
    this size. Triton and Marlin may cut from different sizes on. The reason then names both sizes, because this
    function does not know which runner the layers use.

    If the largest outputs are large enough for both runners, the reason is another one: a second slice would save no
    memory, or the layers cannot be cut.
    """
    tensor_bytes, max_bytes = tokens * top_k * hidden * itemsize, column_slices.read_max_bytes()
    thresholds = {
        "Triton": column_slices.compute_min_tensor_bytes(max_bytes),
        "Marlin": column_slices.compute_min_packed_tensor_bytes(max_bytes),
    }
    too_small = [runner for runner, size in thresholds.items() if tensor_bytes < size]
    largest = f"the largest [tokens, top-k, hidden] tensor had {tensor_bytes / 1e6:,.1f} MB"
    if not too_small:
        return (
            f"{largest}, which is large enough to cut; but either a second column slice would save no memory in any "
            "layer, or no layer can be cut (the log then says why a tensor stays uncut)"
        )
    sizes = {size: f"{size / 1e6:,.1f} MB" for size in thresholds.values()}
    starts = [f"{sizes[size]} in {runner}" for runner, size in thresholds.items()] if len(sizes) > 1 else sizes.values()
    return (
        f"no forward pass was large enough{'' if len(too_small) == len(thresholds) else f' for {too_small[0]}'}: "
        f"{largest}, and tensors are cut from {', '.join(starts)} on"
    )


def decide(built: BuiltModel) -> Decision:
    """Return what moe-workspace does in the layers of a built model. :func:`.decision.decide` does the work."""
    from sglang_moe_patches.changes.moe_workspace import decision

    return decision.decide(built)


COLUMNS = Count(
    "columns",
    "ran in columns",
    column_slices.__name__,
    "split_columns",
    lambda slices, *args: len(slices) if len(slices) > 1 else 0,
    unit="slices",
    skip_reason=_find_size_skip_reason,
)
CHANGE = Change(
    name="moe-workspace",
    summary="Triton and Marlin compute large MoE layers in column slices, with as little as a fifth of the memory",
    plan=_plan,
    skip=_find_skip,
    variables=(MOE_WORKSPACE_MB,),
    counts=(COLUMNS, counts.OFFERED, counts.AS_SCRATCH),
    decide=decide,
)
