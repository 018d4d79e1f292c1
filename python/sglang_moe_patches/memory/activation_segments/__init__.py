"""activation-segments: eager activations come from expandable segments, once the server has started.

Why
    After prompts of many lengths PyTorch's caching allocator holds blocks that fit nothing: *slack*. At Kimi-K2.5's
    widths and chunks of 16,384 tokens that is 2.5 GB beside 3.1 GB of tensors, and no user can see it. With expandable
    segments the driver maps memory where it is wanted. Turned on from the start, they break what shares memory between
    processes: handles of CUDA IPC cannot be had for such memory.

Hook points
    ``Scheduler.run_event_loop``, which turns the switch on; ``CUDAGraph.capture_begin`` and ``capture_end``,
    ``GroupCoordinator.graph_capture`` and ``torch.cuda.use_mem_pool``, which hold it off (:mod:`.switch`).

Skipped
    with a feature that breaks with such memory, and by default with what was not tested on a GPU (:mod:`.eligibility`).

Costs
    Memory that is taken for the first time is mapped in pieces, once.

How
    Weights, KV cache, graphs and registered buffers are in place when ``Scheduler.run_event_loop`` begins, those of a
    draft model too. There the allocator is switched over (:mod:`.switch`). Ordinary blocks that it keeps stay usable.

    Where memory must be ordinary all the same, the switch is off for that long (:func:`.switch.hold_off`): while a
    graph is captured, and while memory comes from a pool of its own.

    Ranks decide alike: the switch is tried on each, and stays on if it works on all (:func:`.switch.everywhere`).

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
    import torch

    return str(torch.__version__)


def _skip(server_args: Any = None) -> Skip | None:
    """:raises engine.Unsupported: ``SGLANG_MOE_PATCHES_SEGMENTS=on``, and the server cannot have it."""
    asked = eligibility.SEGMENTS.read()
    skip = eligibility.skip(asked, os.environ, _pytorch(), server_args)
    engine.require(not asked or skip is None, f"{eligibility.SEGMENTS.name}=on, but {skip and skip.reason}")
    return skip


def _plan() -> Plan:
    from sglang_moe_patches.memory.activation_segments import switch

    if reason := switch.allocator_skip_reason():
        engine.require(not eligibility.SEGMENTS.read(), f"{eligibility.SEGMENTS.name}=on, but {reason}")
        return Plan.not_needed(reason)
    if skip := _skip():  # without a server too, as for doctor
        return Plan.skipped(skip)
    return Plan.applied(switch.probe())


CHANGE = Change(
    name="activation-segments",
    summary="after the start, activations come from expandable segments, of which the allocator keeps less: where "
    "that was seen on a GPU, elsewhere with SGLANG_MOE_PATCHES_SEGMENTS=on",
    plan=_plan,
    skip=_skip,
    variables=(eligibility.SEGMENTS,),
)
