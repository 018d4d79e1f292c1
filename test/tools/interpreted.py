"""GPU tests without a GPU: in Triton's interpreter, in a process of their own, which sets it up before Triton loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GPU = Path(__file__).parents[1] / "gpu"


def passed(tests: Sequence[str], arguments: Sequence[str] = (), *, timeout: float) -> tuple[int, str]:
    """How many tests of some files passed, none of them failing, and what pytest printed.

    :param tests: the files, below ``test/gpu``.
    :param arguments: more of pytest's.
    :param timeout: seconds.
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
