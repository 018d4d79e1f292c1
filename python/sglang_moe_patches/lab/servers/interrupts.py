"""Signals that end a command which has servers running.

A handler that raises would raise anywhere, while servers are being ended too, and twice for two signals: that is how a
server outlives its command. Here a signal is only noted, and acted on between two looks at what is waited for.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Within the ``with`` block, ``SIGNALS`` do nothing but make :meth:`check` raise."""

    def __init__(self) -> None:
        self._arrived = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        # SIGINT too: a shell starts background commands with it ignored.
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._arrived:  # the command is about to end: nobody needs a traceback of a third Ctrl-C
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._arrived = True

    def check(self) -> None:
        """:raises KeyboardInterrupt: a signal has come."""
        if self._arrived:
            raise KeyboardInterrupt
