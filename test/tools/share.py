"""Number of random cases that a test runs."""

from __future__ import annotations

import os

ALL_CASES = "ALL_CASES"


def case_count(everything: int) -> int:
    """Return the number of random cases that a test runs: all cases if ``ALL_CASES`` is set, as in `make test-all`,
    otherwise a quarter of them.

    The cases are the same in each run.

    :param everything: number of all cases.
    """
    return everything if os.environ.get(ALL_CASES) else everything // 4
