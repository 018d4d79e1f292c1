"""kv-sizing: a server measures its need beside weights and KV cache, and gives the rest to the KV cache.

Why
    The engine reserves memory by a cautious rule that does not know hidden size, top-k and runner: 28.4 GB for
    Kimi-K2.5's widths and chunks of 16,384. The need is 12.6 GB, and 8.6 GB with the other changes.

Hook points
    ``_resolve_memory_pool_config`` and ``_init_pools`` of ``ModelRunner``, from 0.5.16 on of ``KVCacheConfigurator``;
    ``Scheduler.get_init_info`` and ``run_event_loop`` (:mod:`.hooks`). On a started scheduler: its inbox and
    ``process_input_requests`` (:mod:`.ranks`). During a rehearsal: its outbox and ``ModelRunner.forward``
    (:mod:`.rehearsal`). Afterwards, if requests are limited: ``_add_request_to_queue``, ``get_new_batch_prefill`` and
    ``get_num_allocatable_reqs`` (:mod:`.serving`). In the launcher: ``ServerArgs.__post_init__`` (:mod:`.eligibility`).

Skipped
    unless ``SGLANG_MOE_PATCHES_KV_SIZING`` asks for it; without CUDA, for servers of ``UNSIZED`` in
    :mod:`.eligibility`, and with KV caches that :mod:`.pools` does not know.

Costs
    A rehearsal at each start. While serving, each turn of the event loop reads the clock, and one turn in each second
    reads the free memory. Eight bytes for each slot of the KV cache that has an address and no memory.

How
    ``docs/changes/kv-sizing.md``. In code, ``ServerStart.start_up`` in :mod:`.hooks` is the start from top to bottom:

    1. :mod:`.eligibility`: decide whether this server is measured.
    2. :mod:`.pools`: let the engine make its pools over addresses for more tokens than have memory
       (:mod:`.address_space`).
    3. :mod:`.rehearsal`: before the first request, run the largest forward passes (:mod:`.phases`) through the
       scheduler's own inbox, one after the other (:mod:`.load_driver`).
    4. :mod:`.sizing`: decide on a number of tokens. Memory is mapped, and :mod:`.token_count` sets the number in every
       object of the engine that has it.
    5. :mod:`.serving`: watch free memory, and free a part of the KV cache when memory is short.

    All ranks run the same start. They exchange values and resume in the same turn (:mod:`.ranks`).

Upstream
    None. The engine's own sizing behind its CUDA graphs is off by default. It is not for MLA, and it needs a graph of
    the largest prefill.

Remove when
    the engine measures the need of its forward passes, and sizes its KV cache by it.
"""

from __future__ import annotations

from sglang_moe_patches.core.patch import Change, Plan
from sglang_moe_patches.memory.kv_sizing import eligibility


def _plan() -> Plan:
    from sglang_moe_patches.memory.kv_sizing import hooks

    return Plan.applied(hooks.probe())


CHANGE = Change(
    name="kv-sizing",
    summary="a starting server measures the memory of its forward passes, and gives the rest to the KV cache; "
    "with SGLANG_MOE_PATCHES_KV_SIZING=auto",
    plan=_plan,
    skip=eligibility.skip,
    variables=(eligibility.KV_SIZING, eligibility.KV_MARGIN),
    launcher_hooks=(("sglang.srt.server_args", eligibility.hook_server_args),),
)
