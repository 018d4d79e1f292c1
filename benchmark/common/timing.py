"""Measure the time of calls on the GPU, and compare the times of several versions.

Two medians alone do not show whether two versions differ, because clock rates and other processes change over time.
:func:`run_in_turn` therefore runs all versions one after the other in many rounds, and every other round backwards.
:func:`compare_with_stock` compares the times round by round. Add a second stock version with the name ``CONTROL``: any
difference between the two stock versions is noise.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

import torch

Run = Callable[[], Any]
Sample = TypeVar("Sample")

STOCK = "stock"
CONTROL = "stock-again"
"""Name of a second stock version. Any difference between it and the first stock version is noise."""


class Ratio(TypedDict):
    """Times of a version compared with the times of stock, round by round.

    :ivar stock: median time of stock; ``other``: median time of the version.
    :ivar ratio: median, over all rounds, of stock's time divided by the version's time. Above 1, the version is faster.
    :ivar lowest: lowest quotient of a round; ``highest``: highest quotient; ``pairs``: number of rounds.
    """

    stock: float
    other: float
    ratio: float
    lowest: float
    highest: float
    pairs: int


# --- One version ------------------------------------------------------------------------------------------------------


def median_ms(run: Run, repeats: int, *, warm_up: int = 2) -> float:
    """Measure the GPU time of each of ``repeats`` calls, and return the median in milliseconds.

    All calls are queued at once, so the host does not wait between them.
    """
    for _ in range(warm_up):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def idle_ms(run: Run) -> float:
    """Measure the time of one call on an idle GPU, in milliseconds. The time includes the host's time to launch the
    kernels.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def queued_ms(run: Run, calls: int = 3) -> float:
    """Measure the GPU time of ``calls`` calls together, and return the time per call in milliseconds.

    The host queues the calls without waiting, as in a forward pass of many layers.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


def peak_bytes(run: Run) -> int:
    """Measure the peak of the memory that one call allocates, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def free_memory() -> None:
    """Collect garbage, and return unused memory of the allocator to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def copy_bandwidth() -> float:
    """Measure the bandwidth of a device-to-device copy of 4 GiB: bytes read and written per second."""
    source = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source), 20) / 1e3)


# --- Versions against each other --------------------------------------------------------------------------------------


def run_in_turn(versions: Mapping[str, Callable[[], Sample]], rounds: int, warm_up: int = 1) -> dict[str, list[Sample]]:
    """Run several rounds. Each round measures all versions, one after the other; every second round in reverse order.

    :param versions: for each version's name, a function that makes one measurement.
    :param rounds: number of rounds that are recorded.
    :param warm_up: number of earlier rounds that are not recorded.
    :returns: for each version's name, one measurement per round.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in versions}
    for index in range(-warm_up, rounds):
        for name in list(versions)[:: -1 if index % 2 else 1]:
            sample = versions[name]()
            if index >= 0:
                samples[name].append(sample)
    return samples


def compare_with_stock(samples: Mapping[str, list[float]]) -> dict[str, Ratio]:
    """Compare the times of each version with the times of stock.

    :param samples: result of :func:`run_in_turn`.
    """
    return {name: compare_rounds(samples[STOCK], other) for name, other in samples.items() if name != STOCK}


def compare_rounds(stock: list[float], other: list[float]) -> Ratio:
    """Compare the times of one version with the times of stock in the same rounds."""
    pairs = sorted(a / b for a, b in zip(stock, other, strict=True))
    return {
        "stock": statistics.median(stock),
        "other": statistics.median(other),
        "ratio": statistics.median(pairs),
        "lowest": pairs[0],
        "highest": pairs[-1],
        "pairs": len(pairs),
    }
