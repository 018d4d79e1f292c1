"""Unit tests: no engine process. Which of them differ between engine releases."""

from __future__ import annotations

import os
from types import SimpleNamespace

import processor_time
import pytest

if os.environ.get("SGLANG_MOE_REFERENCE_KERNELS") != "1":  # else for the engine tests beside these
    for variable in [name for name in os.environ if name.startswith("SGLANG")]:
        del os.environ[variable]  # a test says which it wants

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
"""They look at the engine's functions or FlashInfer's, or ask its torch to compile something."""
ONCE = ("test_the_triton_kernels_work_in_the_interpreter",)
"""Of those: half a minute of kernels of our own, the same on every release."""


def pytest_configure(config: pytest.Config) -> None:
    processor_time.watch(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in EVERY_RELEASE and item.name not in ONCE:
            item.add_marker(pytest.mark.every_release)


@pytest.fixture
def symmetric_memory() -> SimpleNamespace:
    """In the place of the engine's module of NCCL symmetric memory: off, with nothing in its pool."""
    return SimpleNamespace(
        _active_symmetric_memory_context=None,
        is_symmetric_memory_enabled=lambda: False,
        is_tensor_in_symmetric_mempool=lambda tensor: False,
    )
