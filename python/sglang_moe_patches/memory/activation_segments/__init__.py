"""activation-segments: eager activations come from expandable segments after the server has started.

Why
    After prompts of many lengths, PyTorch's caching allocator keeps free blocks that fit no new tensor. This slack is
    2.5 GB beside 3.1 GB of tensors at Kimi-K2.5's widths and chunks of 16,384 tokens. Users cannot see it.
    With expandable segments the driver maps memory where it is needed. They cannot be on from the start, because they
    break code that shares memory between processes: CUDA IPC has no handles for such memory.

Hook points
    ``Scheduler.run_event_loop`` turns the switch on. ``CUDAGraph.capture_begin`` and ``capture_end``,
    ``GroupCoordinator.graph_capture`` and ``torch.cuda.use_mem_pool`` suspend it (:mod:`.switch`).

Skipped
    Servers with a feature that breaks with such memory. By default also servers with a feature that has not been tested
    with it on a GPU (:mod:`.eligibility`).

Costs
    Memory that is used for the first time is mapped in pieces, once.

How
    When ``Scheduler.run_event_loop`` begins, weights, KV cache, CUDA graphs and registered buffers are in place, also
    those of a draft model. The allocator then switches to expandable segments (:mod:`.switch`). Ordinary blocks that it
    keeps can still be used.

    Some memory must be ordinary: memory that is allocated during a graph capture, and memory of a separate pool. The
    switch is suspended for that time (:func:`.switch.suspend_during_captures`).

    All ranks decide alike. Each rank tries the switch, and it stays on only if it works on every rank
    (:func:`.switch.agree_on_all_ranks`).

Upstream
    None.

Remove when
    the engine starts its servers so, or PyTorch's allocator keeps no such blocks.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Change, Plan, Skip
from sglang_moe_patches.memory.activation_segments import eligibility


def _pytorch() -> str:
    """Version of the installed PyTorch."""
    import torch

    return str(torch.__version__)


def _skip(server_args: Any = None) -> Skip | None:
    """Return why this server's allocator is not switched, or ``None`` if it is.

    :param server_args: the engine's ``ServerArgs``; ``None``: check only what is the same for all servers.
    :raises engine.Unsupported: ``SGLANG_MOE_PATCHES_SEGMENTS=on``, but the server cannot use expandable segments.
    """
    setting = eligibility.SEGMENTS.read()
    skip = eligibility.skip(setting, os.environ, _pytorch(), server_args)
    engine.require(not setting or skip is None, f"{eligibility.SEGMENTS.name}=on, but {skip and skip.reason}")
    return skip


def _plan() -> Plan:
    """Probe PyTorch's allocator and the engine's hook points."""
    from sglang_moe_patches.memory.activation_segments import switch

    if reason := switch.allocator_skip_reason():
        engine.require(not eligibility.SEGMENTS.read(), f"{eligibility.SEGMENTS.name}=on, but {reason}")
        return Plan.not_needed(reason)
    if skip := _skip():  # doctor asks without a server
        return Plan.skipped(skip)
    return Plan.applied(switch.probe())


CHANGE = Change(
    name="activation-segments",
    summary="after the start, activations come from expandable segments, so that PyTorch's allocator keeps less "
    "unusable memory; by default only on servers of a kind that was tested on a GPU",
    plan=_plan,
    skip=_skip,
    variables=(eligibility.SEGMENTS,),
)
