"""Configuration of the engine tests, which run the real engine on the CPU with the reference kernels.

All tests run on the default release. Three marks change when a test runs:

- ``every_release``: tests that run on the other releases, too, because the tested behaviour differs between releases.
- ``product``: further cases of behaviour that other tests cover. Only `make test-all` runs them.
- ``ci``: the longest tests. `.ci/run` runs them, and `make test` does not.
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

# In-process tests install changes themselves. Tests that start a server set this variable for the server.
os.environ["SGLANG_MOE_PATCHES"] = "none"
RELEASE = metadata.version("sglang")
DEFAULT_ENGINE_ONLY = pytest.mark.skipif(
    RELEASE != DEFAULT, reason="all releases run the same code here, or other releases lack it"
)
LONGEST = (
    "test_kv_sizing.py",
    "test_servers.py",
    "test_arithmetic.py",
    "test_server_kinds.py",
    "test_recipes.py",
    "test_tiny_moe.py",
    "test_doctor_cases.py",
    "test_kv_sizing_flags.py",
    "test_kv_sizing_answers.py",
    "test_doctor_model.py",
    "test_dead_input.py",
)
IN_PROCESS = os.environ.get("SGLANG_MOE_REFERENCE_KERNELS") == "1"


def pytest_configure(config: pytest.Config) -> None:
    processor_time.install_limit(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    left_out = "not ci" in config.option.markexpr
    return ["without the longest tests, which CI runs: make engine-tests MARKS=ci"] if left_out else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    outside = pytest.mark.skip(reason="needs the environment of the reference kernels: run `make engine-tests`")
    for item in items:
        if "engine" in Path(item.path).parts and not IN_PROCESS:
            item.add_marker(outside)
        if item.path.name in ("test_kv_sizing.py", "test_kv_sizing_flags.py"):
            item.add_marker(pytest.mark.long("most of its tests start servers of their own, and see how they start"))
    # Two workers run one file after another. The longest files come first, so that both workers end at about the same
    # time. The other files are sorted by name, so that the tests of one worker always run in the same order: they share
    # an engine.
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path.name, len(LONGEST)), item.path.name))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function that writes a tiny checkpoint and returns its folder. For the same options, it returns the same folder.

    The options are ``quantized`` and the fields of ``ModelSpec``.
    """
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
    """The engine's model runner in the test's process."""
    from common.in_process import InProcess

    return InProcess(checkpoint())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Recorder of the calls of the reference MoE kernels."""
    from harness import Kernels

    return Kernels(monkeypatch, tmp_path)


@contextmanager
def installed(*changes: Any) -> Iterator[None]:
    """Install ``changes`` in the engine within the block. A change that does not apply to this release is left out.

    If a change is *unsupported*, the test fails, because it would compare stock with stock. For example, a change is
    unsupported if the test itself has wrapped a hook point before.
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
    """Disable the engine's own output buffer within the block. Only newer releases have such a buffer.

    Tests compute their expected answers in such a block.
    """
    from sglang.srt.layers.moe.moe_runner import base

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(base, "moe_output_buffer_ctx"):
            patch.setattr(base, "moe_output_buffer_ctx", lambda buf: nullcontext())
        yield
