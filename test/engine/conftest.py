"""Engine tests: the real engine, on the CPU, with the reference kernels.

On the default release every test runs, on the others those marked ``every_release``: they show what differs between
releases. What is marked ``product`` (further cases of a kind that has one already) waits for `make test-all`, and what
is marked ``ci`` (the longest) for `.ci/run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import processor_time
import pytest
from patching import patched_by
from releases import DEFAULT

# The in-process tests patch and restore by hand; servers they start choose for themselves.
os.environ["SGLANG_MOE_PATCHES"] = "none"
RELEASE = metadata.version("sglang")
DEFAULT_ENGINE_ONLY = pytest.mark.skipif(
    RELEASE != DEFAULT, reason="the same code path on every release, or one that the others have not"
)
LONGEST = (
    "test_kv_sizing.py",
    "test_servers.py",
    "test_arithmetic.py",
    "test_server_kinds.py",
    "test_recipes.py",
    "test_tiny_moe.py",
    "test_doctor_cases.py",
    "test_kv_sizing_answers.py",
    "test_doctor_model.py",
    "test_dead_input.py",
)
IN_PROCESS = os.environ.get("SGLANG_MOE_REFERENCE_KERNELS") == "1"


def pytest_configure(config: pytest.Config) -> None:
    processor_time.watch(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    left_out = "not ci" in config.option.markexpr
    return ["without the longest tests, which CI runs: make engine-tests MARKS=ci"] if left_out else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    outside = pytest.mark.skip(reason="needs the environment of the reference kernels: run `make engine-tests`")
    for item in items:
        if "engine" in Path(item.path).parts and not IN_PROCESS:
            item.add_marker(outside)
        if item.path.name == "test_kv_sizing.py":
            item.add_marker(pytest.mark.long("most of its tests start servers of their own, and see how they start"))
    # Two workers take file after file: those that take longest first, so that both end at about the same time. The
    # others go by name, whatever their folder: on one worker a test meets what the files before it left in the engine.
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path.name, len(LONGEST)), item.path.name))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny checkpoint, once for each set of options: a ``ModelSpec``'s, and ``quantized``."""
    from sglang_moe_reference.model import ModelSpec, make_model

    made: dict[tuple, Path] = {}

    def make(*, quantized: bool = True, **options: Any) -> Path:
        key = (quantized, *sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("models") / "tiny"
            make_model(folder, ModelSpec(**options), quantized=quantized)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[..., Path]) -> Any:
    from common.in_process import InProcess

    return InProcess(checkpoint())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from harness import Kernels

    return Kernels(monkeypatch, tmp_path)


@contextmanager
def installed(*changes: Any) -> Iterator[None]:
    """Within the block, the engine is patched with ``changes`` (those that apply to it).

    None may be *unsupported*: a test that has wrapped a hook point itself would compare stock with stock.
    """
    from sglang_moe_patches.core.patch import Status, probe

    with ExitStack() as stack:
        for change in changes:
            plan = probe(change)
            assert plan.status is not Status.UNSUPPORTED, f"{change.name}: {plan.reason}"
            if plan.install is not None:
                stack.enter_context(patched_by(plan.install))
        yield


@contextmanager
def without_buffer() -> Iterator[None]:
    """The stock engine, and where it has a buffer of its own, with that switched off: what every answer must be."""
    from sglang.srt.layers.moe.moe_runner import base

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(base, "moe_output_buffer_ctx"):
            patch.setattr(base, "moe_output_buffer_ctx", lambda buf: nullcontext())
        yield
