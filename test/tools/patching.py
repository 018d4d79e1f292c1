"""What stands for as long as a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_moe_patches.core.patch import Patcher


@contextmanager
def patched_by(*installs: Callable[[Patcher], None]) -> Iterator[None]:
    """:param installs: what plans install, in this order."""
    patcher = Patcher()
    try:
        for install in installs:
            install(patcher)
        yield
    finally:
        patcher.undo()
