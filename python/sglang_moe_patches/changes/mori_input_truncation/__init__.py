"""mori-input-truncation: the MoE kernel behind MoRI gets the rows that can have arrived, and never loses one.

Why
    The MoE kernel is given MoRI's whole receive buffer, and the engine's own limit drops tokens without a word.

Hook points
    ``__init__`` and ``run_moe_core`` of the MoE layer behind MoRI, and in releases from 0.5.13 to 0.5.21 the AITER
    runner's reading of the engine's limit (:mod:`.hooks`). Up to 0.5.21 the engine's own cut reads 0 and does nothing;
    from 0.5.22 on it cuts to our rows.

Skipped
    without ``--moe-a2a-backend mori``; off while neither variable is set.

Costs
    In each layer one cached lookup by values that the CPU has. Nothing is read from the device.

How
    Reading the received count back would stall every layer. The CPU knows an upper bound (:mod:`.bound`): the rows
    that each data-parallel rank brings into this forward, and those that this rank has sent. A cut to that bound needs
    no check. Where it cannot be proven, the user's limit is applied under an assertion on the device. While graphs are
    captured, the bound is that of the padded batch, with which every rank replays.

Upstream
    sgl-project/sglang#22952, the unsafe limit, in releases from 0.5.11. Releases from 0.5.19 have
    ``SGLANG_MORI_RECV_BOUND`` beside the limit, which stays unsafe.

Remove when
    the engine never cuts below a bound that it can prove.
"""

from __future__ import annotations

import math
from typing import Any

from sglang_moe_patches.changes.mori_input_truncation import hooks
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT
from sglang_moe_patches.core.patch import Change, Count, Skip


def _skip(server_args: Any) -> Skip | None:
    if server_args.moe_a2a_backend != "mori":
        return Skip(f"--moe-a2a-backend is {server_args.moe_a2a_backend}")
    if not (LIMIT.read() or BOUND.read()):
        return Skip(f"neither {LIMIT.name} nor {BOUND.name} is set", can_be_enabled=True)
    return None


def _rows_cut(cut: Any, dispatched: Any, *args: Any) -> int:
    """Of the receive buffer, or of what the engine would leave of it."""
    before, after = (min(len(o.hidden_states), getattr(o, "recv_cap", 0) or math.inf) for o in (dispatched, cut))
    return int(max(0, before - after))


CHANGE = Change(
    name="mori-input-truncation",
    summary="the MoE input behind MoRI is cut to the rows that can have arrived, never below",
    plan=hooks.plan,
    skip=_skip,
    variables=(LIMIT, BOUND),
    counts=(Count("cut", "cut the input", hooks.__name__, "truncate", _rows_cut, unit="rows"),),
)
