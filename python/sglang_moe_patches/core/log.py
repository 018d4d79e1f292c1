"""What a server's process says: through one logger, among the engine's."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("sglang.srt.moe_patches")
_said: set[str] = set()


def once(level: int, key: str, message: str, *arguments: Any) -> None:
    """Say once in this process what would be said at every forward.

    :param level: one of ``logging``'s.
    :param key: what stands for it, whatever the arguments are.
    """
    if key not in _said:
        _said.add(key)
        logger.log(level, message, *arguments)
