"""Counters of how often decoder layers offered their dead input, and how often MoE runners took this input.

Several changes share these counters.
"""

from __future__ import annotations

from typing import Any

from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.core.patch import Count


def _count_taken(result: Any, *args: Any, **conditions: Any) -> int:
    return int(result is not None)


OFFERED = Count(
    "offered",
    "offered the dead input",
    channel.__name__,
    "replace_offer",
    lambda before, buffer: buffer is not None,
    before_layer=True,
)
AS_OUTPUT = Count("as output", "wrote the output into the dead input", channel.__name__, "take_output", _count_taken)
AS_SCRATCH = Count(
    "as scratch", "took the dead input as scratch memory", channel.__name__, "take_scratch", _count_taken
)
