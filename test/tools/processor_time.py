"""Pytest plugin that fails a test which takes more than ``LIMIT_S`` seconds of processor time.

A test with the mark ``long(reason)`` may take longer.

- The processor time is that of the test's process and of all its child processes.
- Processor time is longer on a slow or shared machine. If a test exceeds the limit, the plugin times a loop, and
  multiplies the limit by the loop's slowdown.
- The set-up of session fixtures does not count. The set-up of a module fixture counts for the first test that uses it.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from share import ALL_CASES

NAME = "processor-time"
LIMIT_S = 30.0
LOOPS, LOOPS_S = 3_000_000, 0.2
"""Iterations of the timed loop, and the seconds that they take on a machine of normal speed. On a slower machine, the
limit is higher than ``LIMIT_S``."""
SAMPLED_S = 1.0
"""Seconds between two samples of the child processes. Processor time of a child after its last sample is not
counted."""


class Meter:
    """Meter of the processor time of this process and of its child processes, including ended ones."""

    def __init__(self) -> None:
        self._below: dict[tuple[int, float], float] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        this = psutil.Process()
        while not self._ended.wait(SAMPLED_S):
            with suppress(psutil.Error):
                for process in this.children(recursive=True):
                    with suppress(psutil.Error):
                        times = process.cpu_times()
                        self._below[process.pid, process.create_time()] = times.user + times.system

    @property
    def seconds(self) -> float:
        """User and system time of all processes since the meter was made, in seconds."""
        own = os.times()
        return own.user + own.system + sum(list(self._below.values()))

    def stop(self) -> None:
        self._ended.set()


def measure_slowdown() -> float:
    """Time a loop of Python code. Return its duration divided by ``LOOPS_S``, at least 1.0."""

    def loop_s() -> float:
        began, total = time.process_time(), 0
        for turn in range(LOOPS):
            total += turn
        return time.process_time() - began

    return max(1.0, statistics.median(loop_s() for _ in range(5)) / LOOPS_S)


class ProcessorTimeLimit:
    """Pytest plugin that fails a test if its processor time exceeds the limit."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._began_s = 0.0

    def pytest_sessionfinish(self) -> None:
        self._meter.stop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[Any]:
        self._began_s = self._meter.seconds
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        before_s = self._meter.seconds
        try:
            return (yield)
        finally:
            if fixturedef.scope == "session":
                self._began_s += self._meter.seconds - before_s

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[Any]:
        result = yield
        taken_s = self._meter.seconds - self._began_s
        if item.get_closest_marker("long") is not None or taken_s <= LIMIT_S:
            return result
        if taken_s > (limit_s := LIMIT_S * measure_slowdown()):
            pytest.fail(
                f"{item.nodeid} took {taken_s:.0f} s of processor time; the limit without a reason is {limit_s:.0f} s: "
                'see "How tests share slow parts" in CONTRIBUTING.md',
                pytrace=False,
            )
        return result


def install_limit(config: pytest.Config) -> None:
    """Install the limit for all tests. With ``ALL_CASES``, there is no limit, because tests run more random cases."""
    if not os.environ.get(ALL_CASES) and not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(ProcessorTimeLimit(), NAME)
