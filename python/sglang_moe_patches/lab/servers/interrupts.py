"""Handle signals in a command that has running servers, so that every server ends with the command.

A signal handler that raises an exception could interrupt the code that ends the servers, so a server could outlive the
command. The handler of this module therefore only records the signal. The command raises ``KeyboardInterrupt`` itself,
at a safe point while it waits.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def catch_signals() -> Iterator[Callable[[], None]]:
    """Context manager that records the signals of ``SIGNALS``, and calls no other handler for them.

    :returns: a function that raises ``KeyboardInterrupt`` if a signal has arrived.
    """
    arrived: list[int] = []

    def check() -> None:
        if arrived:
            raise KeyboardInterrupt

    # SIGINT needs a handler, too, because a shell starts background commands with SIGINT ignored.
    before = {number: signal.signal(number, lambda signum, frame: arrived.append(signum)) for number in SIGNALS}
    try:
        yield check
    finally:
        if not arrived:  # After a signal the command ends. A further Ctrl-C must not print a traceback.
            for number, handler in before.items():
                signal.signal(number, handler)
