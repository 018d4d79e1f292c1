"""kv-sizing: a starting server measures its need, and gives the rest of the GPU's memory to the KV cache.

Why
    The *need* is the memory that forward passes, CUDA graphs and buffers take in addition to weights and KV cache. The
    engine reserves memory for the need by a cautious rule, which does not know hidden size, top-k and runner. For
    Kimi-K2.5's widths and chunks of 16,384 tokens the rule reserves 28.4 GB. The need is 12.6 GB, and 8.6 GB with the
    other changes.

Hook points
    ``_resolve_memory_pool_config`` and ``_init_pools`` of ``ModelRunner``, from 0.5.16 on of ``KVCacheConfigurator``;
    ``Scheduler.get_init_info`` and ``run_event_loop`` (:mod:`.hooks`). On a started scheduler: its inbox (the socket of
    its requests) and ``process_input_requests`` (:mod:`.ranks`). During a rehearsal: its outbox and
    ``ModelRunner.forward`` (:mod:`.rehearsal`). Afterwards, if requests are limited: ``_add_request_to_queue``,
    ``get_new_batch_prefill`` and ``get_num_allocatable_reqs`` (:mod:`.serving`). In the launcher:
    ``ServerArgs.__post_init__`` (:mod:`.eligibility`).

Skipped
    Servers without ``SGLANG_MOE_PATCHES_KV_SIZING=auto`` or ``always``. With the variable: servers without CUDA,
    servers in the table ``UNSIZED`` of :mod:`.eligibility`, and servers with a KV cache that :mod:`.pools` does not
    support. With ``auto`` also servers for which the user gave ``--mem-fraction-static``.

Costs
    Each start takes a *rehearsal*: it runs the server's largest forward passes, and measures their memory. While
    serving, each turn (iteration of the scheduler's event loop) reads the clock, and one turn in each second reads the
    free memory. Each slot of the KV cache that has an address but no memory takes eight bytes in the engine's list of
    free slots.

How
    ``docs/changes/kv-sizing.md``. In code, a start goes through these files:

    1. :mod:`.eligibility`: decide whether this server is measured.
    2. :mod:`.hooks`: let the engine make its KV cache over reserved addresses, for more tokens than have memory
       (:mod:`.engine_rule`, :mod:`.pools`, :mod:`.address_space`).
    3. :mod:`.start`: the rest of the start from top to bottom, the same on every rank (``ServerStart.start_up``). Ranks
       exchange values, and resume in the same turn (:mod:`.ranks`).
    4. :mod:`.rehearsal`: before the first request, run the largest forward passes, kind by kind (:mod:`.phases`). Their
       requests go through the scheduler's own inbox (:mod:`.load_driver`).
    5. :mod:`.sizing`: decide on a number of tokens. Memory is mapped, and :mod:`.token_count` sets the number in every
       object of the engine that has it.
    6. :mod:`.serving`: watch free memory, and free a part of the KV cache when memory is short.

Upstream
    None. The engine can size its KV cache by itself after it has captured its CUDA graphs. This is off by default, does
    not work with MLA, and needs a graph of the largest prefill.

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
    summary="each start measures the memory of forward passes, and gives the rest to the KV cache",
    plan=_plan,
    skip=eligibility.skip,
    variables=(eligibility.KV_SIZING, eligibility.KV_MARGIN),
    launcher_hooks=(("sglang.srt.server_args", eligibility.hook_server_args),),
)
