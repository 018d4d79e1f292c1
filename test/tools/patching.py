"""Context manager that patches the engine for the duration of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_moe_patches.core.patch import Patcher


@contextmanager
def patched_by(*installs: Callable[[Patcher], None]) -> Iterator[None]:
    """Install patches while the block runs, and undo them afterwards.

    :param installs: functions that install patches with the :class:`Patcher` that they receive. They run in this order.
    """
    patcher = Patcher()
    try:
        for install in installs:
            install(patcher)
        yield
    finally:
        patcher.undo()
