"""Of what the terminal, the shell and the network of whoever runs the tests say, nothing counts, nor how fast it is."""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

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
