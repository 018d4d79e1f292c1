"""kv-sizing: a server measures what it needs beside weights and KV cache, and gives the rest to the KV cache.

Why
    The engine sets memory aside by a rule that is blind to hidden size, top-k and runner, and cautious: 28.4 GB for
    Kimi-K2.5's widths and chunks of 16,384, where 12.6 GB are needed, and 8.6 GB with the other changes.

Hook points
    ``_resolve_memory_pool_config`` and ``_init_pools`` of ``ModelRunner``, from 0.5.16 on of ``KVCacheConfigurator``;
    ``Scheduler.get_init_info`` and ``run_event_loop`` (:mod:`.hooks`). On a scheduler that has started: its inbox and
    ``process_input_requests`` (:mod:`.ranks`); while it rehearses, its outbox and ``ModelRunner.forward``
    (:mod:`.rehearsal`); afterwards ``_add_request_to_queue`` and ``get_num_allocatable_reqs``, where nobody said how
    many requests run at once (:mod:`.serving`). In the launcher: ``ServerArgs.__post_init__`` (:mod:`.eligibility`).

Skipped
    unless ``SGLANG_MOE_PATCHES_KV_SIZING`` asks for it; without CUDA, with a feature of ``INELIGIBLE`` or
    ``ENGINE_SWITCHES`` in :mod:`.eligibility`, and with KV caches that :mod:`.pools` does not know.

Costs
    A rehearsal at each start. While serving, a turn of the event loop reads the clock, and one in each second the free
    memory. Eight bytes for each slot of the KV cache that has an address and no memory.

How
    ``docs/changes/kv-sizing.md``. In code :mod:`.hooks` has the steps of a start in their order, and calls:

    1. :mod:`.eligibility`: whether this server is sized.
    2. :mod:`.pools`: the engine makes its pools over addresses for more tokens than have memory
       (:mod:`.address_space`).
    3. :mod:`.rehearsal`: before the first request every rank runs the largest forwards (:mod:`.phases`) through the
       scheduler's own inbox, one after the other.
    4. :mod:`.sizing`: from what was needed to a number of tokens. Memory is mapped, and :mod:`.token_count` tells the
       number to whatever holds one.
    5. :mod:`.serving`: watches free memory from then on, and gives memory back where it runs short.

    All ranks do what the first has decided (:mod:`.ranks`).

Upstream
    None. The engine's sizing after its graphs is off, not for MLA, and only where the largest prefill is captured.

Remove when
    the engine measures what its forwards take, and sizes its KV cache by it.
"""

from __future__ import annotations

from sglang_moe_patches.core.patch import Change, Plan
from sglang_moe_patches.memory.kv_sizing import eligibility


def _plan() -> Plan:
    from sglang_moe_patches.memory.kv_sizing import hooks

    return Plan.applied(hooks.probe())


CHANGE = Change(
    name="kv-sizing",
    summary="a start measures what forwards need and gives the rest to the KV cache; "
    "with SGLANG_MOE_PATCHES_KV_SIZING=auto",
    plan=_plan,
    skip=eligibility.skip,
    variables=(eligibility.KV_SIZING, eligibility.KV_MARGIN),
    launcher_hooks=(("sglang.srt.server_args", eligibility.hook_server_args),),
)
