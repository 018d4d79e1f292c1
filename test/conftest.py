"""Of what the terminal, the shell and the network of whoever runs the tests say, nothing counts, nor how fast it is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from sglang_moe_patches.core import log
from sglang_moe_patches.core.patch import Patcher

TERMINAL = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
"""How wide help and tables are, and whether in colour."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Every server that is asked runs here."""

for name in (*TERMINAL, *PROXIES):
    os.environ.pop(name, None)

# The same cases on every machine, however long one takes there.
settings.register_profile(
    "everywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("everywhere")

# Tests import the engine, thousands of modules of which nothing is thrown away: nobody looks whether it can be, neither
# meanwhile nor in any later collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    """What is said once in a process is said once in a test."""
    log._logged.clear()


@pytest.fixture
def patcher() -> Iterator[Patcher]:
    """Taken back when the test has ended."""
    made = Patcher()
    yield made
    made.undo()
