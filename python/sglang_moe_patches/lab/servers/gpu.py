"""Is the GPUs' memory free again? Asked of ``nvidia-smi`` where it is installed: no CUDA context, no torch."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

SLACK_MIB = 512
"""What may be in use beyond before: other processes' small change."""
PATIENCE_S = 60.0


class MemoryHeld(RuntimeError):
    """A GPU's memory did not come back; the message names the GPU and the figures."""


def used_mib() -> dict[str, int]:
    """MiB in use on each GPU that servers may use, by its name for people; empty where nobody can tell."""
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
    """Wait until every GPU has no more memory in use than ``before`` the stock server ran there.

    :param while_waiting: called about four times a second.
    :raises MemoryHeld: one has, for ``PATIENCE_S``.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = used_mib()
        held = [name for name, used in before.items() if now.get(name, 0) > used + SLACK_MIB]
        if not held:
            return
        if time.monotonic() > deadline:
            name = held[0]
            raise MemoryHeld(
                f"{name} has {now[name]:,} MiB in use, {before[name]:,} before the stock server, whose processes are "
                "gone; something else holds it (nvidia-smi shows what), so the patched server was not started"
            )
        while_waiting()
        time.sleep(0.25)
