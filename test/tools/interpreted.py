"""Runner of GPU tests in Triton's interpreter, without a GPU.

The tests run in a process of their own, because the interpreter must be enabled before Triton is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GPU = Path(__file__).parents[1] / "gpu"


def run_tests(tests: Sequence[str], arguments: Sequence[str] = (), *, timeout: float) -> tuple[int, str]:
    """Run the GPU tests of some files in Triton's interpreter. If a test fails, raise an error.

    :param tests: names of the files in ``test/gpu``.
    :param arguments: additional arguments of pytest.
    :param timeout: time limit of all tests together, in seconds.
    :returns: the number of tests that passed, and pytest's output.
    """
    files = [str(GPU / test) for test in tests]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    ran = re.search(r"\b(\d+) passed", result.stdout)
    assert ran is not None, result.stdout
    return int(ran[1]), result.stdout
