"""What a server's process says: through one logger, among the engine's."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("sglang.srt.moe_patches")
PREFIX = "sglang-moe-patches: "
_logged: set[str] = set()


def format_line(change: str, message: str) -> str:
    """A change's message, begun as all of ours are."""
    return f"{PREFIX}{change}: {message}"


def once(level: int, key: str, message: str, *arguments: Any) -> None:
    """Log once in this process what would be logged at every forward.

    :param level: one of ``logging``'s.
    :param key: identifies the message; the arguments do not count.
    """
    if key not in _logged:
        _logged.add(key)
        logger.log(level, message, *arguments)
