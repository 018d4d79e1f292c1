"""kv-sizing: a server measures what it needs beside weights and KV cache, and its next start serves more.

Why
    The engine sets memory aside by a rule that is blind to hidden size, top-k and runner, and cautious: 28.4 GB for
    Kimi-K2.5's widths and chunks of 16,384, where 12.6 GB are needed, and 8.6 GB with the other changes. What is saved
    reaches a user only as ``--mem-fraction-static``.

How
    At the end of its first start a server rehearses (:mod:`.rehearsal`): every rank runs the largest forwards that the
    configuration allows (:mod:`.phases`), through the scheduler's own inbox, before the first request is read. What was
    left free at the worst moment is recorded (:mod:`.record`) under a fingerprint of all that it depends on. A later
    start has the fraction that the record gives (:mod:`.sizing`), used where the engine sizes its pools, so that
    these are made by its own code. The first such start rehearses once more: a larger pool allows longer prefixes.

    Never worse than the rule: whatever is not known, fails, or gives less than 2 %, leaves the engine's own number,
    with one line that says why. All ranks decide by what the first has read. A given ``--mem-fraction-static`` is used
    unchanged, unless the variable says ``always``.

Upstream
    None. The engine's sizing after its graphs is off, not for MLA, and only where the largest prefill is captured.

Remove when
    the engine measures what its forwards take, and sizes its KV cache by it.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_moe_patches.core.patch import Change, Plan
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.memory.kv_sizing.launcher import hook_server_args, hook_warmup


def _skip_reason(server_args: Any) -> str | None:
    asked = eligibility.KV_SIZING.read()
    return eligibility.skip_reason(asked, eligibility.arguments_of(server_args) if asked else {}, os.environ)


def _plan() -> Plan:
    from sglang_moe_patches.memory.kv_sizing import hooks

    return Plan.applied(hooks.probe())


CHANGE = Change(
    name="kv-sizing",
    summary="a start measures what forwards need, and the next gives the rest to the KV cache; "
    "with SGLANG_MOE_PATCHES_KV_SIZING=auto",
    plan=_plan,
    skip_reason=_skip_reason,
    variables=(eligibility.KV_SIZING, eligibility.KV_RECORD),
    launcher_hooks=(
        ("sglang.srt.server_args", hook_server_args),
        ("sglang.srt.entrypoints.http_server", hook_warmup),
    ),
)
