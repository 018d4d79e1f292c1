"""Run one file of the engine's own tests in this process: stock, or with every change acting wherever it can.

    python -m common.engine_test_file stock|patched FILE RESULT.json

A server applies the changes when it constructs a model runner. Many tests construct none, so this module applies the
changes before it imports the test. moe-workspace then cuts every tensor, however small, into slices as narrow as the
tiles of the GEMM allow. As an engine plugin (``register``), this module does the same in servers that a test starts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = ("stock", "patched")


def narrowest_slice_width(layer: Any, gemm: Any, max_bytes: int | None = None, *, ignores_time: bool = False) -> int:
    """Return the smallest slice width that the GEMM's alignment allows. It replaces
    ``column_slices.choose_slice_width``."""
    return int(min(layer.hidden, gemm.alignment_columns))


def register() -> None:
    """Make moe-workspace cut every tensor. Patched servers that a test starts call this as an engine plugin."""
    from sglang_moe_patches.changes.moe_workspace import column_slices

    column_slices.choose_slice_width = narrowest_slice_width
    # Cut every tensor, however small it is and however much time slices cost.
    column_slices.MIN_TENSOR_BYTES, column_slices.MAX_SLOWDOWN_FRACTION = 1, math.inf


def count_acts() -> Any:
    """Start to count what the changes do in this process. An error while counting does not fail a test."""
    from sglang_moe_patches.core.patch import Patcher
    from sglang_moe_patches.lab.observers.counting import Tally
    from sglang_moe_patches.registry import CHANGES

    def attempt(step: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(Exception):
            step(*args)

    counts = {count.name: count for change in CHANGES for count in change.counts}
    tally = Tally(counts.values(), attempt)
    tally.install(Patcher())
    return tally


class Outcomes:
    """Pytest plugin that records the outcome of each test and its number of ``subTest`` blocks."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.errors: list[str] = []
        self._subtests = 0

    def count_subtests(self) -> None:
        case: Any = unittest.TestCase
        original = case.subTest

        def sub_test(test: Any, *args: Any, **kwargs: Any) -> Any:
            self._subtests += 1
            return original(test, *args, **kwargs)

        case.subTest = sub_test

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(one_line_error(report.longrepr))

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.split("::", 1)[-1]
        test = self.tests.setdefault(name, {"outcome": "", "seconds": 0.0, "subtests": 0, "said": ""})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.when == "call":
            # Some releases of pytest report each subtest, and other releases only the test.
            test["subtests"] += self._subtests
            self._subtests = 0
        if report.failed or report.skipped or report.when == "call":
            worst_first = ("failed", "skipped", "passed")
            outcomes = [outcome for outcome in (test["outcome"], report.outcome) if outcome]
            test["outcome"] = min(outcomes, key=worst_first.index)
        if not report.passed:
            test["said"] = test["said"] or one_line_error(report.longrepr)


def one_line_error(report: Any) -> str:
    """Return one line that describes a failure, or the reason why a test was skipped."""
    if isinstance(report, tuple):
        return str(report[2])[:300]
    if (crash := getattr(report, "reprcrash", None)) is not None:
        return str(crash.message).strip().split("\n")[0][:300]
    lines = [line.removeprefix("E").strip() for line in str(report).splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def main(side: str, file: Path, result: Path) -> int:
    """Run the tests of a file, and write their outcomes to ``result``.

    :param side: ``stock`` or ``patched``.
    :returns: pytest's exit code.
    """
    import pytest

    started, outcomes, acts, statuses = time.monotonic(), Outcomes(), Counter[str](), {}
    tally = None
    if side == "patched":
        from sglang_moe_patches import plugin

        register()
        statuses = {name: str(plan) for name, plan in plugin.activate().items()}
        tally = count_acts()
    outcomes.count_subtests()
    code = pytest.main(
        ["-q", "-s", "-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(file.parent), str(file)], [outcomes]
    )
    for act in tally.acted.acts if tally is not None else ():
        acts[act.name] += act.times
    record = {"tests": outcomes.tests, "errors": outcomes.errors, "acted": acts, "changes": statuses}
    record |= {"seconds": round(time.monotonic() - started, 1), "exit_code": int(code)}
    result.write_text(json.dumps(record))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3])))
