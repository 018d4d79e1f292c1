"""Configuration of all tests. Results must not depend on terminal, shell, network or speed of the machine."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from sglang_moe_patches.core import log
from sglang_moe_patches.core.patch import Patcher

TERMINAL = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
"""Variables that set the width and the colours of printed tables and help."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Variables that select a proxy. The tests unset them, because all their servers run on this machine."""

for name in (*TERMINAL, *PROXIES):
    os.environ.pop(name, None)

# Hypothesis draws the same cases on every machine, without a time limit.
settings.register_profile(
    "everywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("everywhere")

# Tests import the engine, which has thousands of modules that stay in memory. The garbage collector is off during these
# imports, and later collections skip the modules.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _forget_logged_messages() -> None:
    """Make ``log.log_once`` log each message once per test instead of once per process."""
    log._logged.clear()


@pytest.fixture
def patcher() -> Iterator[Patcher]:
    """Patcher whose patches are undone at the end of the test."""
    made = Patcher()
    yield made
    made.undo()
