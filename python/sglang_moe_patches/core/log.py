"""Logger of this package. Its lines appear in the server's log, together with the engine's lines."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("sglang.srt.moe_patches")
PREFIX = "sglang-moe-patches: "
_logged: set[str] = set()


def format_line(change: str, message: str) -> str:
    """Return a change's log line: the package's prefix, the name of the change and the message."""
    return f"{PREFIX}{change}: {message}"


def log_once(level: int, key: str, message: str, *arguments: Any) -> None:
    """Log a message once in this process, although the caller may run in every forward pass.

    :param level: a level of ``logging``.
    :param key: identifier of the message. A second message with the same key is not logged, even if its arguments
        differ.
    """
    if key not in _logged:
        _logged.add(key)
        logger.log(level, message, *arguments)
