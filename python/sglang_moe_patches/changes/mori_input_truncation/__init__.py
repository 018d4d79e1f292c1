"""mori-input-truncation: with MoRI's all-to-all, the MoE kernel computes only the rows of the receive buffer that can
have arrived. No row is ever lost.

Why
    The MoE kernel computes MoRI's whole receive buffer, although only a part of it has rows. The engine's own limit
    for the rows drops tokens silently if it is too small.

Hook points
    ``__init__`` and ``run_moe_core`` of the MoE layer that MoRI's dispatcher serves. In releases from 0.5.13 to 0.5.21
    also the function with which the AITER runner reads the engine's limit (:mod:`.hooks`). Up to 0.5.21 the hooks
    switch off the engine's own cut, and this change cuts the buffer. From 0.5.22 on the engine cuts the buffer to the
    number of rows that this change computes.

Skipped
    Servers without ``--moe-a2a-backend mori``. The change is off if neither ``SGLANG_MORI_MOE_MAX_INPUT_TOKENS`` nor
    ``SGLANG_MORI_RECV_BOUND`` is set.

Costs
    One lookup in a cache in each layer. Nothing is read from the device.

How
    Reading the number of received rows from the device would synchronize in every layer. The CPU knows an upper bound
    of this number (:mod:`.bound`). The bound follows from the rows of each data-parallel rank, and from the rows that
    this rank has sent. A cut to the bound loses no row. If no bound can be proven, the user's limit is applied, and an
    assertion on the device checks the number of received rows. While a CUDA graph is captured, the bound is computed
    for the padded batch, because every rank replays the graph with a batch of this size.

Upstream
    From 0.5.11 on the engine has the limit (sgl-project/sglang#22952). From 0.5.19 on it also has
    ``SGLANG_MORI_RECV_BOUND``. The limit is unsafe in all these releases.

Remove when
    the engine never cuts below a bound that it can prove.
"""

from __future__ import annotations

import math
from typing import Any

from sglang_moe_patches.changes.mori_input_truncation import hooks
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT
from sglang_moe_patches.core.patch import Change, Count, Skip


def _find_skip(server_args: Any) -> Skip | None:
    """Return why this server's receive buffer need not be cut, or ``None`` if it must be cut.

    It need not be cut if the server uses another all-to-all backend, or if neither of the environment variables
    (:data:`LIMIT`, :data:`BOUND`) is set.
    """
    if server_args.moe_a2a_backend != "mori":
        return Skip(f"--moe-a2a-backend is {server_args.moe_a2a_backend}")
    if not (LIMIT.read() or BOUND.read()):
        return Skip(f"neither {LIMIT.name} nor {BOUND.name} is set", can_be_enabled=True)
    return None


def _count_cut_rows(cut: Any, dispatched: Any, *args: Any) -> int:
    """Return the number of rows by which :func:`.hooks.truncate` reduced the MoE kernel's work in one call.

    Without :func:`.hooks.truncate` the kernel would compute the rows that the engine's own cut leaves, or the whole
    buffer if the engine does not cut. If these are 1,000 rows, for example, and :func:`.hooks.truncate` leaves 300
    rows, the result is 700.
    """
    before, after = (min(len(o.hidden_states), getattr(o, "recv_cap", 0) or math.inf) for o in (dispatched, cut))
    return int(max(0, before - after))


CHANGE = Change(
    name="mori-input-truncation",
    summary="the MoE kernel computes only the rows of MoRI's receive buffer that can have arrived",
    plan=hooks.plan,
    skip=_find_skip,
    variables=(LIMIT, BOUND),
    counts=(Count("cut", "cut the input", hooks.__name__, "truncate", _count_cut_rows, unit="rows"),),
)
