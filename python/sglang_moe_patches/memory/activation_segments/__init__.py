"""activation-segments: eager activations come from expandable segments after the server has started.

Why
    After prompts of many lengths, PyTorch's caching allocator keeps free blocks that fit no new tensor. With
    Kimi-K2.5's widths and chunks of 16,384 tokens, the tensors take 3.1 GB and these blocks take 2.5 GB more.
    With expandable segments the driver maps memory where it is needed. Expandable segments cannot be on from the start,
    because they break code that shares memory between processes: CUDA IPC has no handles for such memory.

Hook points
    ``Scheduler.run_event_loop`` turns expandable segments on (:mod:`.switch`). ``CUDAGraph.capture_begin`` and
    ``capture_end``, ``GroupCoordinator.graph_capture`` and ``torch.cuda.use_mem_pool`` suspend them.

Skipped
    Servers with a feature that does not work with memory from expandable segments. By default also servers with a
    feature that has not been tested with such memory on a GPU (:mod:`.eligibility`).

Costs
    When memory is used for the first time, the driver maps it in pieces. This takes time once.

How
    When ``Scheduler.run_event_loop`` begins, weights, KV cache, CUDA graphs and registered buffers are allocated, also
    those of a draft model. The allocator then switches to expandable segments (:mod:`.switch`). It can still use the
    ordinary blocks that it keeps.

    Some memory must come from ordinary segments: memory that is allocated during a graph capture, and memory of a
    separate pool. Expandable segments are suspended for that time (:func:`.switch.suspend_during_captures`).

    All ranks make the same decision. Each rank tries expandable segments. They stay on only if they work on every rank
    (:func:`.switch.agree_on_all_ranks`).

Upstream
    None.

Remove when
    the engine itself switches to expandable segments after the start, or PyTorch's allocator keeps no free blocks that
    fit no new tensor.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Change, Plan, Skip
from sglang_moe_patches.memory.activation_segments import eligibility


def _read_pytorch_version() -> str:
    """Return the version of the installed PyTorch, such as "2.11.0"."""
    import torch

    return str(torch.__version__)


def _skip(server_args: Any = None) -> Skip | None:
    """Return why this server's allocator is not switched to expandable segments, or ``None`` if it is.

    :param server_args: the engine's ``ServerArgs``. If it is ``None``, only the conditions that are the same for all
        servers are checked.
    :raises engine.Unsupported: ``SGLANG_MOE_PATCHES_SEGMENTS=on``, but the server cannot use expandable segments.
    """
    setting = eligibility.SEGMENTS.read()
    skip = eligibility.skip(setting, os.environ, _read_pytorch_version(), server_args)
    engine.require(not setting or skip is None, f"{eligibility.SEGMENTS.name}=on, but {skip and skip.reason}")
    return skip


def _plan() -> Plan:
    """Return the plan for activation-segments, after a probe of PyTorch's allocator and the engine's hook points."""
    from sglang_moe_patches.memory.activation_segments import switch

    if reason := switch.find_allocator_skip_reason():
        engine.require(not eligibility.SEGMENTS.read(), f"{eligibility.SEGMENTS.name}=on, but {reason}")
        return Plan.not_needed(reason)
    if skip := _skip():  # ``doctor`` without ``--model`` calls this function, although no server runs
        return Plan.skipped(skip)
    return Plan.applied(switch.probe())


CHANGE = Change(
    name="activation-segments",
    summary="after the start, activations use expandable segments, so PyTorch's allocator keeps less unusable memory",
    plan=_plan,
    skip=_skip,
    variables=(eligibility.SEGMENTS,),
)
