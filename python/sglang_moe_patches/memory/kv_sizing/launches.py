"""Who launched a server: a process, named so that others can tell later whether it has ended."""

from __future__ import annotations

import re
import socket
import time

FORGOTTEN_AFTER_S = 1800.0
"""A launch on another machine cannot be looked for: after so long it counts as ended."""
_NAME = re.compile(r"(?P<host>.*):(?P<pid>\d+)@(?P<created>[\d.]+)")


def current(*, is_replica: bool) -> str:
    """The launch that this process belongs to: host, process and when that began, as process numbers come again.

    :param is_replica: the process that launched all replicas is meant.
    """
    import psutil

    here = psutil.Process()
    launcher = (here.parent() if is_replica else None) or here
    return f"{socket.gethostname()}:{launcher.pid}@{launcher.create_time():.2f}"


def is_alive(launch: str) -> bool:
    """Whether a launch may still be under way."""
    import psutil

    name = _NAME.fullmatch(launch)
    if name is None:
        return False
    created = float(name["created"])
    if name["host"] != socket.gethostname():
        return time.time() - created < FORGOTTEN_AFTER_S
    try:
        return abs(psutil.Process(int(name["pid"])).create_time() - created) < 0.1
    except psutil.Error:
        return False
