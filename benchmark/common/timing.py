"""Times: of calls on the GPU, and of two versions of one thing against each other.

A single pair of medians does not say whether two versions differ: clocks and neighbours drift. ``in_turn`` runs all
versions one after another many times, every other round backwards; ``against_stock`` compares round by round. Give it
the stock version twice, the second one as ``CONTROL``: what stock differs from itself is nobody's doing.
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
#: A second stock run: what differs between it and the first is not the patches' doing.
CONTROL = "stock-again"


class Ratio(TypedDict):
    """Of paired rounds: stock's median and the other's, and stock over it (more is faster), with the pairs' spread."""

    stock: float
    other: float
    ratio: float
    lowest: float
    highest: float
    pairs: int


# --- One version ------------------------------------------------------------------------------------------------------


def median_ms(run: Run, repeats: int, *, warm_up: int = 2) -> float:
    """Median milliseconds of one call on the GPU, the calls queued one after another."""
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
    """Milliseconds of one call that finds the GPU idle: the host's time to start its kernels counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def queued_ms(run: Run, calls: int = 3) -> float:
    """Milliseconds of one call among others, as in a forward of many layers: the host is ahead of the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


def peak_bytes(run: Run) -> int:
    """Bytes that one call allocates at the most, beyond what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def free_memory() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 4 GiB."""
    source = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source), 20) / 1e3)


# --- Versions against each other --------------------------------------------------------------------------------------


def in_turn(versions: Mapping[str, Callable[[], Sample]], rounds: int, warm_up: int = 1) -> dict[str, list[Sample]]:
    """What each version's measurement says, round by round; every other round runs them backwards.

    :param versions: by name, a function that measures once.
    :param warm_up: rounds that do not count, ahead of the others.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in versions}
    for index in range(-warm_up, rounds):
        for name in list(versions)[:: -1 if index % 2 else 1]:
            sample = versions[name]()
            if index >= 0:
                samples[name].append(sample)
    return samples


def against_stock(samples: Mapping[str, list[float]]) -> dict[str, Ratio]:
    """Each other version of ``in_turn`` against stock, round by round."""
    return {name: paired(samples[STOCK], other) for name, other in samples.items() if name != STOCK}


def paired(stock: list[float], other: list[float]) -> Ratio:
    """Times of the same rounds compared: the median of stock over the other, and how the pairs spread."""
    pairs = sorted(a / b for a, b in zip(stock, other, strict=True))
    return {
        "stock": statistics.median(stock),
        "other": statistics.median(other),
        "ratio": statistics.median(pairs),
        "lowest": pairs[0],
        "highest": pairs[-1],
        "pairs": len(pairs),
    }
