"""Another process that takes GPU memory while a server answers requests, as a neighbour on the GPU would.

``benchmark/memory/serving.py --take`` uses it. kv-sizing must then free a part of the KV cache, and the server must
still answer requests.
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

from common import growth, overfill, processes
from common.client import Client

LEAVE_FRACTION = 0.4
"""Fraction of kv-sizing's margin that the neighbour leaves free. kv-sizing frees KV cache if less than half of its
margin is free.
"""
STEP_BYTES = 256 << 20
"""Bytes of one allocation of the neighbour on each GPU. Like a real process, the neighbour allocates in steps."""
STEP_INTERVAL_S = 0.25
ALLOCATION_TIMEOUT_S = 60.0
"""Time limit in seconds for the neighbour of :func:`leave_free` to allocate its memory."""
GIVE_BACK_TIMEOUT_S = 60.0
"""Time limit in seconds for the server to free memory of its KV cache after the load has ended. No request uses the KV
cache then.
"""
NEIGHBOUR = """
import sys, time
import torch
leave, step, interval_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
tensors, full = [], set()
while len(full) < torch.cuda.device_count():
    for gpu in set(range(torch.cuda.device_count())) - full:
        with torch.cuda.device(gpu):
            size = min(step, torch.cuda.mem_get_info()[0] - leave)
            if size < 4 << 20:
                full.add(gpu)
                continue
            try:
                tensors.append(torch.empty(size, dtype=torch.uint8, device=gpu))
            except torch.cuda.OutOfMemoryError:  # the server allocated the memory first
                continue
    time.sleep(interval_s)
print(sum(tensor.numel() for tensor in tensors), flush=True)
time.sleep(3600)
"""
"""Program of the neighbour. Its arguments: bytes to leave free on each GPU, bytes of one allocation, and seconds
between two allocations."""
STAND_IN_VARIABLE = "SHORT"
"""Environment variable of a server without a GPU: path of a file with the bytes that another process has taken."""


@contextmanager
def allocate(
    leave_bytes: int, step_bytes: int = STEP_BYTES, interval_s: float = STEP_INTERVAL_S
) -> Iterator[list[int]]:
    """Run a neighbour until the end of the block. It allocates memory until only ``leave_bytes`` are free on each GPU.

    :param step_bytes: bytes of one allocation.
    :param interval_s: seconds between two allocations.
    :returns: an empty list. When the neighbour has allocated its memory, the list receives one number: the allocated
        bytes, summed over the GPUs.
    """
    allocated: list[int] = []
    command = [sys.executable, "-c", NEIGHBOUR, str(leave_bytes), str(step_bytes), str(interval_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with processes.read_lines(process, lambda line: allocated.append(int(line))):
        yield allocated


@contextmanager
def leave_free(mib: int) -> Iterator[None]:
    """Let a neighbour allocate all but ``mib`` MiB of each visible GPU. The neighbour keeps this memory until the end
    of the block.

    The GPU then has the free memory of a smaller GPU. With 0, no neighbour starts.

    :raises TimeoutError: the neighbour has not allocated the memory after ``ALLOCATION_TIMEOUT_S`` seconds.
    """
    if not mib:
        yield
        return
    with allocate(mib << 20, step_bytes=4 << 30, interval_s=0.0) as allocated:
        deadline = time.monotonic() + ALLOCATION_TIMEOUT_S
        while not allocated:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no process could leave {mib} MiB free within {ALLOCATION_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        yield


@contextmanager
def pretend_to_allocate(file: Path, size: int) -> Iterator[list[int]]:
    """Pretend to a server without a GPU that another process allocates memory. Without a GPU, this replaces
    :func:`allocate`.

    :param file: path in the server's ``STAND_IN_VARIABLE``.
    :param size: bytes that the neighbour pretends to allocate.
    """
    file.write_text(str(size))
    try:
        yield [size]
    finally:
        file.unlink()


def take_memory(
    server: Server,
    info: Mapping[str, Any],
    vocabulary: int,
    margin: int,
    seconds: float,
    ask: Callable[[], list[str]],
) -> dict[str, Any]:
    """Send requests for ``seconds`` while a neighbour allocates all free memory but ``LEAVE_FRACTION`` of the margin.

    :param info: the server's ``/get_server_info``.
    :param vocabulary: number of token ids of the model.
    :param margin: kv-sizing's margin, in bytes.
    :param ask: function that sends prompts and returns digests of the answers. It is called at the end, while the
        neighbour still has its memory.
    :returns: the result of :func:`.overfill.send_mixed` and these keys: ``taken`` (bytes that the neighbour allocated),
        ``given_back`` (:func:`given_back_bytes`), ``tokens`` (KV cache size at the end) and ``answers`` (the result of
        ``ask``).
    """
    client = Client(server.url)
    file, leave_bytes = server.environment.get(STAND_IN_VARIABLE), int(LEAVE_FRACTION * margin)
    with pretend_to_allocate(Path(file), margin - leave_bytes) if file else allocate(leave_bytes) as allocated:
        outcome = overfill.send_mixed(server, info, vocabulary, seconds)
        if outcome["errors"]:
            return outcome | {"taken": sum(allocated)}
        until = time.monotonic() + GIVE_BACK_TIMEOUT_S
        while allocated and not given_back_bytes(client) and time.monotonic() < until:
            time.sleep(1)
        outcome["answers"] = ask()
        outcome |= {"taken": sum(allocated), "tokens": kv_tokens(client.info())}
        if allocated:
            outcome["given_back"] = given_back_bytes(client)
    return outcome


def given_back_bytes(client: Client) -> int:
    """Read how many bytes of its KV cache each rank has freed so far, and return the smallest number."""
    return int(growth.read_gauges(client.metrics()).get("given_back_bytes", 0))


def kv_tokens(info: Mapping[str, Any]) -> int:
    """Return the present KV cache size, in tokens, of the rank with the smallest KV cache. (The engine's
    ``max_total_num_tokens`` is the size at the start.)

    :param info: the server's ``/get_server_info``.
    """
    return min(int(state["memory_usage"]["token_capacity"]) for state in info["internal_states"])
