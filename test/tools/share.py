"""How many of its random cases a test runs."""

from __future__ import annotations

import os

ALL_CASES = "ALL_CASES"


def cases(everything: int) -> int:
    """All of them where ``ALL_CASES`` is set, as `make test-all` does; a quarter otherwise, the same ones each time."""
    return everything if os.environ.get(ALL_CASES) else everything // 4
