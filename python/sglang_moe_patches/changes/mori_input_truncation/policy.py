"""What is decided once, when a layer is built: the user's variables, the server's layout, what can be relied on."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.mori_input_truncation.bound import Layout
from sglang_moe_patches.core.runners import server_setting
from sglang_moe_patches.core.variables import Variable


def _parse_rows(text: str) -> int:
    """0 and less is no limit, as to the engine."""
    try:
        return max(0, int(text))
    except ValueError:
        raise ValueError(f"expected 0 (no limit) or a positive number of rows, got {text!r}") from None


def _parse_switch(text: str) -> bool:
    """Every spelling that the engine takes for on or off; what it takes for a mistake, and so for "off", is refused."""
    if text.lower() in ("1", "true", "yes", "y"):
        return True
    if text.lower() in ("0", "false", "no", "n"):
        return False
    raise ValueError(f"expected 0 or 1, got {text!r}")


LIMIT = Variable(
    "SGLANG_MORI_MOE_MAX_INPUT_TOKENS",
    "rows to which MoRI's receive buffer is cut, raised to what can arrive; 0: no limit",
    _parse_rows,
    default="0",
    is_engine_variable=True,
)
BOUND = Variable(
    "SGLANG_MORI_RECV_BOUND",
    "1: cut MoRI's receive buffer to what can arrive, without a limit",
    _parse_switch,
    default="0",
    is_engine_variable=True,
)


@dataclass(frozen=True)
class Policy:
    """What a layer's cuts depend on, beside the forward.

    :param limit: the user's, in rows; 0: none.
    :param recv_bound: cut to the provable bound, limit or not.
    :param unreliable: why the counts that the engine announces of other ranks may be wrong on this server.
    :param stale: this rank's own count may be wrong, too.
    :param assertions: a failed assertion on the device ends the process.
    :param raise_only: the engine's own cut is never made smaller, only larger.
    :param unproven_layout: rows that have arrived need not lie first in the buffer: it is never cut.
    """

    layout: Layout
    limit: int
    recv_bound: bool
    two_batch_overlap: bool = False
    unreliable: str | None = None
    assertions: bool = True
    stale: bool = False
    raise_only: bool = False
    unproven_layout: bool = False


def assertions_end_the_process(hip: str | None, macros: str) -> bool:
    """Whether a failed device-side assertion ends the process with this build of PyTorch.

    :param hip: ``torch.version.hip``; ``None`` for CUDA, where it always does.
    :param macros: the text of PyTorch's ``Macros.h`` and ``cmake_macros.h``. ROCm builds used to define the assertion
        away unless asked to keep it; newer ones abort.
    """
    if hip is None:
        return True
    if re.search(r"^#define C10_USE_ROCM_KERNEL_ASSERT\b", macros, re.MULTILINE):
        return True
    on_rocm = re.search(r"USE_ROCM\)\n#define CUDA_KERNEL_ASSERT\(cond\)((?:.*\\\n)*.*)", macros)
    return on_rocm is not None and "abort()" in on_rocm.group(1)


@functools.cache
def _assertions_work() -> bool:
    import torch

    include = Path(inspect.getfile(torch)).parent / "include"
    folders = (include / "torch/headeronly/macros", include / "c10/macros")
    paths = [folder / name for folder in folders for name in ("Macros.h", "cmake_macros.h")]
    macros = "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())
    return assertions_end_the_process(torch.version.hip, macros)


def _read_layout(layer: Any) -> Layout:
    from sglang.srt.layers import dp_attention

    if hasattr(dp_attention, "get_attention_tp_size"):
        attn_tp = dp_attention.get_attention_tp_size()
        attn_cp = dp_attention.get_attention_cp_size()
        dp_rank = dp_attention.get_attention_dp_rank()
    else:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        attn_tp, attn_cp, dp_rank = parallel.attn_tp_size, parallel.attn_cp_size, parallel.attn_dp_rank
    return Layout(layer.moe_ep_size, attn_tp, attn_cp, dp_rank)


_MAX_INTRANODE_RANKS = 8
"""With more, MoRI's kernels are InterNode's, unless those of low latency (AsyncLL) are asked for. The engine's own
bound, from 0.5.22 on, is for IntraNode and AsyncLL alone."""


def _runs_internode(layer: Any) -> bool:
    from sglang.srt.layers.moe.utils import get_deepep_mode

    return bool(layer.moe_ep_size > _MAX_INTRANODE_RANKS and not get_deepep_mode().enable_low_latency())


def read_policy(layer: Any) -> Policy | None:
    """The policy of a ``FusedMoE`` layer under construction; ``None``: the all-to-all back end is not MoRI."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, is_tbo_enabled

    backend = get_moe_a2a_backend()
    if not backend.is_mori():
        return None
    # The engine bounds EPv2's input only where it knows EPv2's layout. A limit that is too small is raised there, too.
    epv2 = hasattr(backend, "is_mori_epv2") and backend.is_mori_epv2()
    unreliable = None
    stale = str(server_setting("get_spec", "speculative_algorithm")).upper() == "DSPARK"
    if server_setting("get_schedule", "enable_dynamic_chunking"):
        # Its profiling run tells each rank that the others bring nothing, while all of them do.
        unreliable = "--enable-dynamic-chunking"
    elif stale:
        # The engine's own bound does not trust the counts with it: they can be of an earlier forward.
        unreliable = "--speculative-algorithm DSPARK"
    elif envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        unreliable = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
    return Policy(
        layout=_read_layout(layer),
        limit=LIMIT.read(),
        recv_bound=BOUND.read() and not epv2,
        two_batch_overlap=is_tbo_enabled(),
        unreliable=unreliable,
        assertions=_assertions_work(),
        stale=stale,
        raise_only=epv2,
        unproven_layout=not epv2 and _runs_internode(layer),
    )
