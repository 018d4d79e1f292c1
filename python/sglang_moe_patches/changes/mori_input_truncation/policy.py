"""Settings with which a layer's receive buffer is cut, read when the layer is constructed.

The settings depend on the environment variables, on how the attention is distributed over the ranks, and on whether the
server uses features with which the engine's token counts are wrong.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_moe_patches.changes.mori_input_truncation.bound import Layout
from sglang_moe_patches.core.runners import read_server_setting
from sglang_moe_patches.core.variables import Variable


def _parse_rows(text: str) -> int:
    """Parse ``SGLANG_MORI_MOE_MAX_INPUT_TOKENS``. As in the engine, 0 and negative numbers mean no limit."""
    try:
        return max(0, int(text))
    except ValueError:
        raise ValueError(f"expected 0 (no limit) or a positive number of rows, got {text!r}") from None


def _parse_switch(text: str) -> bool:
    """Parse ``SGLANG_MORI_RECV_BOUND``, with every spelling that the engine accepts, such as "1" and "true".

    :raises ValueError: any other text. The engine itself would read it as "off".
    """
    if text.lower() in ("1", "true", "yes", "y"):
        return True
    if text.lower() in ("0", "false", "no", "n"):
        return False
    raise ValueError(f"expected 0 or 1, got {text!r}")


LIMIT = Variable(
    "SGLANG_MORI_MOE_MAX_INPUT_TOKENS",
    "row limit for the MoE kernel behind MoRI; raised if more rows can arrive; 0: no limit",
    _parse_rows,
    default="0",
    is_engine_variable=True,
)
BOUND = Variable(
    "SGLANG_MORI_RECV_BOUND",
    "1: the MoE kernel computes only the rows of MoRI's buffer that can have arrived",
    _parse_switch,
    default="0",
    is_engine_variable=True,
)


@dataclass(frozen=True)
class Policy:
    """Settings of one layer that decide how many received rows its experts compute.

    :param layout: distribution of attention over the ranks of the layer's expert-parallel group.
    :param limit: the user's limit in rows, or 0 for no limit.
    :param recv_bound: whether to cut the receive buffer to the largest number of rows that can arrive, even if the user
        set no limit.
    :param two_batch_overlap: whether the server may run two sub-batches at once.
    :param unreliable_reason: why the engine's token counts of other ranks may be wrong on this server, or ``None`` if
        they are right.
    :param has_assertions: whether a failed assertion on the device ends the process.
    :param has_stale_counts: whether this rank's own token count may be wrong, too, because the count may belong to an
        earlier forward pass.
    :param raise_only: whether this change may only raise the engine's number of rows, never lower it. This holds for
        EPv2, the second version of MoRI's dispatch.
    :param has_unproven_layout: whether received rows may lie elsewhere than at the start of the buffer. The buffer is
        then never cut.
    """

    layout: Layout
    limit: int
    recv_bound: bool
    two_batch_overlap: bool = False
    unreliable_reason: str | None = None
    has_assertions: bool = True
    has_stale_counts: bool = False
    raise_only: bool = False
    has_unproven_layout: bool = False


def assertions_end_the_process(hip: str | None, macros: str) -> bool:
    """Return whether a failed device-side assertion ends the process with this build of PyTorch.

    :param hip: ``torch.version.hip``. It is ``None`` for CUDA, where a failed assertion always ends the process.
    :param macros: text of PyTorch's ``Macros.h`` and ``cmake_macros.h``. In older ROCm builds the assertion does
        nothing unless a macro enables it. In newer builds a failed assertion aborts the process.
    """
    if hip is None:
        return True
    if re.search(r"^#define C10_USE_ROCM_KERNEL_ASSERT\b", macros, re.MULTILINE):
        return True
    on_rocm = re.search(r"USE_ROCM\)\n#define CUDA_KERNEL_ASSERT\(cond\)((?:.*\\\n)*.*)", macros)
    return on_rocm is not None and "abort()" in on_rocm.group(1)


@functools.cache
def _assertions_work() -> bool:
    """Return whether a failed device-side assertion ends the process with the installed PyTorch."""
    import torch

    include = Path(inspect.getfile(torch)).parent / "include"
    folders = (include / "torch/headeronly/macros", include / "c10/macros")
    paths = [folder / name for folder in folders for name in ("Macros.h", "cmake_macros.h")]
    macros = "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())
    return assertions_end_the_process(torch.version.hip, macros)


def _read_layout(layer: Any) -> Layout:
    """Return how the engine distributes the attention over the ranks of a layer's expert-parallel group."""
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
"""Largest number of ranks with which MoRI uses its IntraNode kernels. With more ranks MoRI uses its AsyncLL kernels if
``--deepep-mode`` allows low latency, else its InterNode kernels. With InterNode kernels this package cuts nothing,
because received rows can lie anywhere in the receive buffer."""


def _runs_internode(layer: Any) -> bool:
    """Return whether a layer uses MoRI's InterNode kernels (:data:`_MAX_INTRANODE_RANKS`)."""
    from sglang.srt.layers.moe.utils import get_deepep_mode

    return bool(layer.moe_ep_size > _MAX_INTRANODE_RANKS and not get_deepep_mode().enable_low_latency())


def read_policy(layer: Any) -> Policy | None:
    """Return the settings with which a new ``FusedMoE`` layer cuts its receive buffer, or ``None`` if the server does
    not use MoRI.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, is_tbo_enabled

    backend = get_moe_a2a_backend()
    if not backend.is_mori():
        return None
    # The engine cuts EPv2's input only if it knows EPv2's layout. For EPv2, this change only raises a limit that is too
    # small.
    epv2 = hasattr(backend, "is_mori_epv2") and backend.is_mori_epv2()
    unreliable_reason = None
    has_stale_counts = str(read_server_setting("get_spec", "speculative_algorithm")).upper() == "DSPARK"
    if read_server_setting("get_schedule", "enable_dynamic_chunking"):
        # The profiling run of dynamic chunking gives each rank counts of 0 for the other ranks, but all ranks send
        # rows.
        unreliable_reason = "--enable-dynamic-chunking"
    elif has_stale_counts:
        # With DSPARK the counts may be of an earlier forward pass. The engine's own bound does not use them either.
        unreliable_reason = "--speculative-algorithm DSPARK"
    elif envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        unreliable_reason = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
    return Policy(
        layout=_read_layout(layer),
        limit=LIMIT.read(),
        recv_bound=BOUND.read() and not epv2,
        two_batch_overlap=is_tbo_enabled(),
        unreliable_reason=unreliable_reason,
        has_assertions=_assertions_work(),
        has_stale_counts=has_stale_counts,
        raise_only=epv2,
        has_unproven_layout=not epv2 and _runs_internode(layer),
    )
