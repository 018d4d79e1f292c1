"""mori-input-truncation: the MoE kernel behind MoRI sees the rows that can have arrived, and never loses one.

Why
    On AMD, MoRI's expert-parallel dispatch hands the MoE kernel its whole receive buffer, sized for the worst case
    (``SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` times the ranks: 32,768 rows for eight ranks), and AITER chooses
    its kernel by that row count instead of the few hundred rows that hold tokens. The engine's
    ``SGLANG_MORI_MOE_MAX_INPUT_TOKENS`` cuts the input first, but below the number of rows really received it drops
    tokens, and MoRI's combine reads past the end of what is left: wrong answers without a word.

How
    The received count lives on the GPU, and reading it back would stall every layer. What the CPU knows is enough for
    an upper bound: how many rows each data-parallel rank brings into this forward (``dp_attention``, where the engine
    puts it once a forward) and how many this rank has just sent. ``MoriEPMoE.__init__`` is wrapped to take the limit
    over and set the attribute by which the engine cuts to 0, so that its own cut never runs; ``run_moe_core`` is
    wrapped to cut the dispatched tensors before it. Where the bound is provable the cut needs no check. Where it is
    not, the user's limit is applied under an assertion on the device. Neither reads anything back.

    From 0.5.13 on MoRI's layer is ``DeepEPMoE``, with EPv2 ``FusedMoE``, which the former goes through: of that one the
    same two methods are wrapped. The engine's own cut sits elsewhere: up to 0.5.21 AITER's runner reads the limit from
    the environment at every forward, and in that module it now reads 0; from 0.5.22 on the dispatcher chooses the rows
    and AITER's runner cuts to the ``recv_cap`` of the dispatch output, in which ours is put.

    During CUDA/HIP-graph capture the engine announces the padded batch instead of the counts. Every rank replays a
    graph of that size, so the bound made from it is static and holds for each replay.

Upstream
    sgl-project/sglang#22952, the unsafe limit, in releases from 0.5.11. Releases from 0.5.19 have
    ``SGLANG_MORI_RECV_BOUND`` beside the limit, which stays unsafe.

Remove when
    the engine never cuts below a bound that it can prove.
"""

from __future__ import annotations

from typing import Any

from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT
from sglang_moe_patches.core.patch import Change, Count, Off, Plan


def _skip_reason(server_args: Any) -> str | None:
    if server_args.moe_a2a_backend != "mori":
        return f"--moe-a2a-backend is {server_args.moe_a2a_backend}"
    if not (LIMIT.read() or BOUND.read()):
        return Off(f"neither {LIMIT.name} nor {BOUND.name} is set")
    return None


def _plan() -> Plan:
    from sglang_moe_patches.changes.mori_input_truncation import hooks

    return hooks.plan()


def _rows_cut(cut: Any, dispatched: Any, *args: Any) -> int:
    """Of the receive buffer, or of what the engine would leave of it."""

    def rows(output: Any) -> int:
        whole = int(output.hidden_states.shape[0])
        return min(whole, getattr(output, "recv_cap", 0) or whole)

    return max(0, rows(dispatched) - rows(cut))


CHANGE = Change(
    name="mori-input-truncation",
    summary="the MoE input behind MoRI is cut to the rows that can have arrived, never below",
    plan=_plan,
    skip_reason=_skip_reason,
    variables=(LIMIT, BOUND),
    counts=(Count("cut", "cut the input", f"{__name__}.hooks", "truncate", _rows_cut, unit="rows"),),
)
