"""Tests of ``test/tools/processor_time.py``, which fails a test that takes too much processor time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import processor_time
import pytest
from releases import ROOT
from share import ALL_CASES

BURN = "import time\nwhile time.process_time() < {}: pass"
TESTS = f"""
import subprocess, sys, time
import pytest

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass

def below(seconds):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    subprocess.run([sys.executable, "-c", code, {BURN!r}.format(seconds)])

@pytest.fixture(scope="session")
def once():
    burn(0.5)

@pytest.fixture(scope="module")
def shared():
    burn(0.5)

def test_session(once): pass
def test_first(shared): pass
def test_second(shared): pass
def test_by_itself(): burn(0.5)
def test_sleeping(): time.sleep(0.5)
def test_below(): below(0.9)

@pytest.mark.long("why not")
def test_with_a_reason(): burn(0.5)
"""
CONFTEST = """
import os
import processor_time
def pytest_configure(config):
    config.addinivalue_line("markers", "long")
    processor_time.LIMIT_S, processor_time.SAMPLED_S = 0.3, 0.05
    processor_time.measure_slowdown = lambda: float(os.environ.get("SLOW", "1"))
    processor_time.install_limit(config)
"""


def run_tests(folder: Path, **variables: str) -> set[str]:
    """Run tests in a new process. Return the names of the tests that failed."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rE", str(folder)]
    environment = {"PYTHONPATH": str(ROOT / "test/tools"), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert " 7 passed" in done.stdout, done.stdout
    return {line.partition("::")[2].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")}


def test_a_test_that_takes_too_long_with_its_child_processes_fails_unless_marked(tmp_path):
    assert run_tests(tmp_path) == {"test_first", "test_by_itself", "test_below"}


def test_on_a_slow_machine_the_limit_is_higher(tmp_path):
    assert run_tests(tmp_path, SLOW="100") == set()


def test_with_all_random_cases_there_is_no_limit(tmp_path):
    assert run_tests(tmp_path, ALL_CASES="1") == set()


def test_this_session_has_the_limit_on_processor_time(request: pytest.FixtureRequest):
    assert request.config.pluginmanager.has_plugin(processor_time.NAME) != bool(os.environ.get(ALL_CASES))
