"""kv-sizing: a server measures what it needs beside weights and KV cache, and its next start serves more.

Why
    The engine sets memory aside by a rule that is blind to hidden size, top-k and runner, and cautious: 28.4 GB for
    Kimi-K2.5's widths and chunks of 16,384, where 12.6 GB are needed, and 8.6 GB with the other changes. What is saved
    reaches a user only as ``--mem-fraction-static``.

Hook points
    ``ModelRunner.init_memory_pool`` or ``alloc_memory_pool``, ``Scheduler.run_event_loop`` and ``get_init_info``
    (:mod:`.hooks`). On the scheduler itself: ``process_input_requests`` while it serves, and its inbox while it
    rehearses (:mod:`.rehearsal`). In the launcher: ``ServerArgs.__post_init__``, ``http_server._wait_and_warmup``
    (:mod:`.launcher`).

Skipped
    unless ``SGLANG_MOE_PATCHES_KV_SIZING`` asks for it, without CUDA, and with the features in :mod:`.eligibility`.

Costs
    A rehearsal at the first two starts. While serving, a turn of the event loop reads the clock.

How
    ``docs/changes/kv-sizing.md``. In code: :mod:`.hooks` asks :mod:`.sizing` for the fraction before the engine makes
    its pools, by what :mod:`.record` has under a :mod:`.fingerprint`. Before the first request :mod:`.rehearsal` has
    every rank run :mod:`.phases` through the scheduler's own inbox; :mod:`.monitor` goes on while the server serves.
    All ranks decide by what the first has read.

Upstream
    None. The engine's sizing after its graphs is off, not for MLA, and only where the largest prefill is captured.

Remove when
    the engine measures what its forwards take, and sizes its KV cache by it.
"""

from __future__ import annotations

from sglang_moe_patches.core.patch import Change, Plan
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.memory.kv_sizing.launcher import hook_server_args, hook_warmup, skip_reason


def _plan() -> Plan:
    from sglang_moe_patches.memory.kv_sizing import hooks

    return Plan.applied(hooks.probe())


CHANGE = Change(
    name="kv-sizing",
    summary="a start measures what forwards need, and the next gives the rest to the KV cache; "
    "with SGLANG_MOE_PATCHES_KV_SIZING=auto",
    plan=_plan,
    skip_reason=skip_reason,
    variables=(eligibility.KV_SIZING, eligibility.KV_RECORD),
    launcher_hooks=(
        ("sglang.srt.server_args", hook_server_args),
        ("sglang.srt.entrypoints.http_server", hook_warmup),
    ),
)
