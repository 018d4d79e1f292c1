"""Configuration of the unit tests, which start no engine process."""

from __future__ import annotations

import os
from types import SimpleNamespace

import processor_time
import pytest

# With the value 1, engine tests run in the same session, and they need the variables of this shell.
if os.environ.get("SGLANG_MOE_REFERENCE_KERNELS") != "1":
    for variable in [name for name in os.environ if name.startswith("SGLANG")]:
        del os.environ[variable]  # a unit test sets the variables that it needs

EVERY_RELEASE = (
    "test_deferred_shared_experts.py",
    "test_engine.py",
    "test_moe_workspace.py",
    "test_nvfp4_shuffle.py",
    "test_output_buffer.py",
    "test_plugin.py",
    "test_reference_cutedsl.py",
    "test_reference_kernels.py",
)
"""Test files that run on every engine release. They inspect functions of the engine or FlashInfer, or compile with
the release's torch. In other files the mark ``every_release`` is on the module or on single tests."""
DEFAULT_RELEASE_ONLY = ("test_the_triton_kernels_work_in_the_interpreter",)
"""Tests in the files of ``EVERY_RELEASE`` that run only on the default release. They take half a minute, and run only
this package's own kernels.
"""


def pytest_configure(config: pytest.Config) -> None:
    processor_time.install_limit(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in EVERY_RELEASE and item.name not in DEFAULT_RELEASE_ONLY:
            item.add_marker(pytest.mark.every_release)


@pytest.fixture
def symmetric_memory() -> SimpleNamespace:
    """Stand-in for the engine's module for NCCL symmetric memory. It is disabled, and its pool is empty."""
    return SimpleNamespace(
        _active_symmetric_memory_context=None,
        is_symmetric_memory_enabled=lambda: False,
        is_tensor_in_symmetric_mempool=lambda tensor: False,
    )
