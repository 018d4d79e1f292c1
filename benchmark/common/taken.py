"""Another process that takes GPU memory while a server is asked, as a neighbour on the GPU would.

Used by ``benchmark/memory/serving.py --take``: kv-sizing is to give KV cache back, and the server to go on answering.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.servers.server import Server

from common import overfill, processes
from common.client import Client

LEAVE_FRACTION = 0.4
"""Of the margin, what is left free: below half of it kv-sizing gives KV cache back."""
STEP_BYTES = 256 << 20
"""Taken at once, on each GPU; a neighbour grows, it does not jump."""
EVERY_S = 0.25
NEIGHBOUR_TIMEOUT_S = 60.0
"""Seconds within which the process of :func:`neighbour` allocates its memory."""
GIVEN_BACK_TIMEOUT_S = 60.0
"""Within which a server gives memory back after the load has ended, when nobody holds its slots any more."""
TAKER = """
import sys, time
import torch
leave, step, every_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
held, full = [], set()
while len(full) < torch.cuda.device_count():
    for gpu in set(range(torch.cuda.device_count())) - full:
        with torch.cuda.device(gpu):
            size = min(step, torch.cuda.mem_get_info()[0] - leave)
            if size < 4 << 20:
                full.add(gpu)
                continue
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device=gpu))
            except torch.cuda.OutOfMemoryError:  # the server was quicker
                continue
    time.sleep(every_s)
print(sum(each.numel() for each in held), flush=True)
time.sleep(3600)
"""


STAND_IN = "SHORT"
"""The variable of a server without a GPU that names a file: so many bytes has another process taken."""


@contextmanager
def taker(leave: int, step: int = STEP_BYTES, every_s: float = EVERY_S) -> Iterator[list[int]]:
    """Run a process that allocates memory of each visible GPU, until ``leave`` bytes are free, for the ``with`` block.

    :param step: bytes of one allocation.
    :param every_s: seconds between two allocations.
    :returns: a list that receives the allocated bytes, as soon as ``leave`` bytes are free.
    """
    took: list[int] = []
    command = [sys.executable, "-c", TAKER, str(leave), str(step), str(every_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with processes.reading(process, lambda line: took.append(int(line))):
        yield took


@contextmanager
def neighbour(leave_mib: int) -> Iterator[None]:
    """Leave ``leave_mib`` MiB of each visible GPU free for the ``with`` block; another process holds the rest.

    A GPU with more memory than another then has the other one's free memory. 0 starts no process.

    :raises TimeoutError: the process has not allocated the memory within a minute.
    """
    if not leave_mib:
        yield
        return
    with taker(leave_mib << 20, step=4 << 30, every_s=0.0) as took:
        deadline = time.monotonic() + NEIGHBOUR_TIMEOUT_S
        while not took:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no process could leave {leave_mib} MiB free within {NEIGHBOUR_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        yield


@contextmanager
def pretended(short: Path, size: int) -> Iterator[list[int]]:
    """The same without a GPU, where a stand-in tells what is free."""
    short.write_text(str(size))
    try:
        yield [size]
    finally:
        short.unlink()


def gauges(text: str) -> dict[str, float]:
    """The smallest value of each gauge of kv-sizing on any rank, by its name without the prefix; of ``/metrics``."""
    from prometheus_client.parser import text_string_to_metric_families

    prefix, found = "sglang_moe_patches:", dict[str, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                name = sample.name.removeprefix(prefix)
                found[name] = min(sample.value, found.get(name, sample.value))
    return found


def taken(
    server: Server,
    info: Mapping[str, Any],
    vocabulary: int,
    margin: int,
    seconds: float,
    ask: Callable[[], list[str]],
) -> dict[str, Any]:
    """Have clients ask for ``seconds``, and as they begin take what is free, but for less than half the margin.

    :param margin: kv-sizing's, in bytes.
    :param ask: is called at the end, while the memory is still taken.
    :returns: as :func:`.overfill.overfill`, with what was taken, what each rank has given back, the KV tokens that are
        left, and what ``ask`` returned.
    """
    client = Client(server.url)
    short, leave = server.environment.get(STAND_IN), int(LEAVE_FRACTION * margin)
    with pretended(Path(short), margin - leave) if short else taker(leave) as took:
        outcome = overfill.mixed(server, info, vocabulary, seconds)
        if outcome["errors"]:
            return outcome | {"taken": sum(took)}
        until = time.monotonic() + GIVEN_BACK_TIMEOUT_S
        while took and not gauges(client.metrics()).get("given_back_bytes") and time.monotonic() < until:
            time.sleep(1)
        outcome["answers"] = ask()
        outcome |= {"taken": sum(took), "tokens": capacity(client.info())}
        if took:
            outcome["given_back"] = int(gauges(client.metrics()).get("given_back_bytes", 0))
    return outcome


def capacity(info: Mapping[str, Any]) -> int:
    """KV tokens of the rank that has the fewest; what the launcher says beside is what it was told at the start.

    :param info: a server's answer to ``/get_server_info``.
    """
    return min(int(each["memory_usage"]["token_capacity"]) for each in info["internal_states"])
