"""Wait until the memory of the GPUs is free again, by ``nvidia-smi``, without a CUDA context and without torch."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

SLACK_MIB = 512
"""Growth of a GPU's used memory, in MiB, that is ignored, because other processes use a little memory, too."""
TIMEOUT_S = 60.0


class MemoryInUse(RuntimeError):
    """Raised if the memory of a GPU did not become free. The message names the GPU and the figures."""


def read_used_mib() -> dict[str, int]:
    """Return the used memory of each visible GPU in MiB. The key is the GPU's index and model name. The dictionary is
    empty if there is no ``nvidia-smi``."""
    command = ["nvidia-smi", "--query-gpu=index,name,memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        return {f"GPU {index.strip()} ({name.strip()})": int(used) for index, name, used in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def wait_until_free(before: dict[str, int], while_waiting: Callable[[], None]) -> None:
    """Wait until every GPU has as much free memory as before the stock server.

    :param before: result of :func:`read_used_mib` before the stock server started.
    :param while_waiting: function that is called about four times a second. The function can raise an exception to end
        the waiting.
    :raises MemoryInUse: a GPU's memory is still in use after ``TIMEOUT_S`` seconds.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        now = read_used_mib()
        short = [name for name, used in before.items() if now.get(name, 0) > used + SLACK_MIB]
        if not short:
            return
        if time.monotonic() > deadline:
            name = short[0]
            raise MemoryInUse(
                f"{name} has {now[name]:,} MiB in use. Before the stock server started, it had {before[name]:,} MiB in "
                "use. The stock server has ended, so another process uses the memory. The patched server was not "
                "started; find the process with nvidia-smi, end it, and run this command again"
            )
        while_waiting()
        time.sleep(0.25)
