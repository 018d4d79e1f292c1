"""Signals that end a command which has servers running.

A handler that raises would raise anywhere, while servers are being ended too, and twice for two signals: that is how a
server outlives its command. Here a signal is only noted, and acted on between two looks at what is waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def catch_signals() -> Iterator[Callable[[], None]]:
    """Within the block, ``SIGNALS`` do nothing but make what this yields raise ``KeyboardInterrupt``."""
    arrived: list[int] = []

    def check() -> None:
        if arrived:
            raise KeyboardInterrupt

    # SIGINT too: a shell starts background commands with it ignored.
    before = {number: signal.signal(number, lambda signum, frame: arrived.append(signum)) for number in SIGNALS}
    try:
        yield check
    finally:
        if not arrived:  # else the command is about to end: nobody needs a traceback of a third Ctrl-C
            for number, handler in before.items():
                signal.signal(number, handler)
