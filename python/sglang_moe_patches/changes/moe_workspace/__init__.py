"""moe-workspace: Triton's and Marlin's second GEMM and sum over the top-k, a range of columns at a time.

Why
    Between its second GEMM and the sum over the top-k the runner holds a tensor [tokens, top-k, hidden]. Tensor
    parallelism does not shard it and nothing bounds it: 1,879 MB for Kimi-K2.5 or DeepSeek-V3 at 16,384 tokens, more
    than all other activations together.

How
    The engine's own sequence (``_fused_moe_kernel_sequence``) runs with three names of its globals replaced.
    ``torch.empty`` hands out a promise in place of the three-dimensional tensor. ``invoke_fused_moe_kernel``, told to
    fill it, leaves its arguments there. ``moe_sum_reduce`` then runs the engine's GEMM and a sum of ours for one range
    of columns after another: on views of the weights, of their scales and of the bias, through a scratch buffer of the
    range's width, into the same columns of the output. Routing, tiles and their configuration are those of the whole,
    so the results are the same bits. Activations are quantized at the first range and kept.

    How wide a range is follows from sizes alone (:mod:`.column_slices`). Tensors that are not large, and whatever reads
    the tensor or does not sum it (LoRA's hooks, a top-k of 1 or 2, a deferred sum), run the engine's sequence
    untouched.
    The tensor that the engine allocates and never writes (``no_combine``, ``--enable-fused-moe-sum-all-reduce``) is
    not allocated.

    In a sequence that is in place the layer's dead input (:mod:`sglang_moe_patches.core.dead_input`) is memory for the
    activation's output, if it is large enough: the peak is then the first GEMM's output alone, or a slice.

    Marlin's packed weights have no ranges of columns: each range's are copied first (:mod:`.marlin`). Its output, which
    is never its input, goes into the dead input.

    On request (``SGLANG_MOE_PATCHES_MAX_MOE_TOKENS``) no routed-experts kernel of any runner behind
    ``FusedMoE.run_moe_core`` sees more than so many tokens at once (:mod:`.token_slices`).

Upstream
    None.

Remove when
    the engine's runners bound that tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices
from sglang_moe_patches.changes.moe_workspace.token_slices import MAX_MOE_TOKENS
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.dead_input import counts, probe
from sglang_moe_patches.core.patch import Change, Count, Install, Patcher, Plan, Status, one_line_error


def _skip_reason(server_args: Any) -> str | None:
    """Whatever ``--moe-runner-backend`` says: where it has nothing for a layer's experts, the engine takes Triton."""
    if MAX_MOE_TOKENS.read() is not None:
        return None
    return None if server_args.device == "cuda" else f"--device is {server_args.device}"


def _plan() -> Plan:
    from sglang_moe_patches.changes.moe_workspace import marlin, streams, token_slices, triton

    by_columns, by_marlin = _look(triton.plan), _look(marlin.plan)
    columns_ = bool(by_columns.install or by_marlin.install)
    most = MAX_MOE_TOKENS.read()
    if most is None and not columns_:
        return by_columns
    offer, left_out = _dead_input() if columns_ else (None, "")
    notes = [left_out]
    if by_columns.install is None:
        notes.append(
            f"{'no columns in the Triton runner' if by_marlin.install else 'token slices alone'}: {by_columns.reason}"
        )
    if by_marlin.status is Status.UNSUPPORTED:
        notes.append(f"no columns in Marlin: {by_marlin.reason}")
    parts = [offer, by_columns.install, by_marlin.install, streams.look() if columns_ else None]
    if most is not None:
        parts.append(token_slices.plan(most).install)

    def install(patcher: Patcher) -> None:
        for part in filter(None, parts):
            part(patcher)

    return Plan(Status.APPLIED, "; ".join(filter(None, notes)), install)


def _look(plan: Callable[[], Plan]) -> Plan:
    """One runner's plan. A runner that is unsupported, or whose code cannot be read, takes nothing else with it."""
    try:
        return plan()
    except engine.Unsupported as error:
        return Plan.unsupported(str(error))
    except Exception as error:
        return Plan.unsupported(f"probing it failed: {one_line_error(error)}")


def _dead_input() -> tuple[Install | None, str]:
    """How it is offered, and what of it is left out; columns do without."""
    try:
        offers = probe.offers()
    except engine.Unsupported as error:
        return None, f"no dead input is scratch memory: {error}"
    return offers.install, offers.note


def _too_small(tokens: int, top_k: int, hidden: int, itemsize: int) -> str:
    """Which runner it was is not known: each is told its own threshold, where they have two."""
    largest, most = tokens * top_k * hidden * itemsize, column_slices.most_bytes()
    least = {"Triton": column_slices.smallest_tensor(most), "Marlin": column_slices.smallest_packed_tensor(most)}
    whole = [runner for runner, size in least.items() if largest < size]
    if not whole:
        return ""
    sizes = {size: f"{size / 1e6:,.1f} MB" for size in least.values()}
    starts = [f"{sizes[size]} in {runner}" for runner, size in least.items()] if len(sizes) > 1 else sizes.values()
    return (
        f"no forward was large enough{'' if len(whole) == len(least) else f' for {whole[0]}'}: "
        f"the largest [tokens, top-k, hidden] was {largest / 1e6:,.1f} MB, slices start at {', '.join(starts)}"
    )


COLUMNS = Count(
    "columns",
    "ran in columns",
    column_slices.__name__,
    "ranges",
    lambda ranges, *args: len(ranges) if len(ranges) > 1 else 0,
    unit="slices",
    skip_reason=_too_small,
)
TOKEN_SLICES = Count(
    "token slices",
    "ran in token slices",
    f"{__name__}.token_slices",
    "_run",
    lambda result, core, dispatch, most: -(-len(dispatch.hidden_states) // most),
    unit="slices",
)
CHANGE = Change(
    name="moe-workspace",
    summary="Triton and Marlin sum over the top-k in columns, in as little as a fifth of their memory; "
    "other runners are left alone",
    plan=_plan,
    skip_reason=_skip_reason,
    variables=(MAX_MOE_TOKENS, column_slices.MOE_WORKSPACE_MB),
    counts=(COLUMNS, counts.OFFERED, counts.AS_SCRATCH, TOKEN_SLICES),
)
