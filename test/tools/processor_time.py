"""A test that takes more than ``LIMIT_S`` of processor time fails, unless it is marked with a reason.

Processor time is that of the test's process and of all processes below it. It is more on a slow machine, and on one
whose processors others share: a test that takes too long has the limit multiplied by how much a loop takes too long
there, at that moment. The set-up of a session's fixtures counts for no test; that of a module's for the test that asks
first.
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
"""Turns of a loop, and the seconds that they take where the limit is as it stands."""
SAMPLED_S = 1.0
"""Between two looks at the processes below; what one takes after the last look at it is missed."""


class Meter:
    """The processor time of this process and of those below it, ended ones too."""

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
        """User and system time so far."""
        own = os.times()
        return own.user + own.system + sum(list(self._below.values()))

    def stop(self) -> None:
        self._ended.set()


def how_slow() -> float:
    """How many times as long as elsewhere this machine takes now; 1.0: no longer."""

    def loop_s() -> float:
        began, total = time.process_time(), 0
        for turn in range(LOOPS):
            total += turn
        return time.process_time() - began

    return max(1.0, statistics.median(loop_s() for _ in range(5)) / LOOPS_S)


class Limit:
    """The plugin of pytest that measures each test."""

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
        if taken_s > (limit_s := LIMIT_S * how_slow()):
            pytest.fail(
                f"{item.nodeid} took {taken_s:.0f} s of processor time; without a reason {limit_s:.0f} s are the most: "
                'see "How tests share what is slow" in CONTRIBUTING.md',
                pytrace=False,
            )
        return result


def watch(config: pytest.Config) -> None:
    """From now on each test has this limit; where all random cases run, none has."""
    if not os.environ.get(ALL_CASES) and not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(Limit(), NAME)
