"""Time of what a server does over memory that was mapped in pieces, as kv-sizing has it, and over allocated memory.

    python benchmark memory/mapped --json mapped.json                    # 48 GB, in pieces of 2 and 64 MiB
    python benchmark memory/mapped --gigabytes 16 --pieces 2 --rounds 3

Memory is allocated by PyTorch (`stock`, and `stock-again` as control), or mapped as kv-sizing maps it, in pieces of as
many MiB as the name says. While it is there: the host's time to launch a kernel, and a graph of kernels; reads of
random rows, as decodes read the KV cache; and the longest launch of a quarter of a second in which another process asks
the driver for free memory, as monitoring does. Each is a median, because the host has moments of its own. Each round
makes the memory anew.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from common import machine, output, timing
from sglang_moe_patches.memory.kv_sizing.address_space import CudaMemory, ElasticBuffer

from memory.serving import free_memory

BUFFERS = 96
"""Of one server: keys and values of 48 layers."""
ROW_BYTES = 1024
"""Of one token in one of them."""
BATCHES, LAUNCHES, REPLAYS, GRAPH_KERNELS = 40, 500, 200, 400
READ_BUFFERS, READ_ROWS, READS = 8, 1 << 17, 25
"""Buffers that are read, one after another; rows of each; and how often."""
WATCHED, WATCHED_S = 16, 0.25
"""How often launches are watched, and for how many seconds: free memory is asked for as often."""
START_S = 10.0
"""Seconds that the process that asks for it has to start."""
#: What is measured: (its words, its unit).
MEASURED = {
    "launch": ("launch of a kernel", "us"),
    "replay": (f"launch of a graph of {GRAPH_KERNELS} kernels", "us"),
    "read": ("reads of random rows of 1 KiB", "GB/s"),
    "longest": ("longest launch while free memory is asked for once", "ms"),
}


@contextmanager
def allocated(size: int) -> Iterator[list[torch.Tensor]]:
    """:param size: bytes of all buffers."""
    yield [
        torch.zeros(size // BUFFERS // ROW_BYTES, ROW_BYTES, dtype=torch.uint8, device="cuda") for _ in range(BUFFERS)
    ]


@contextmanager
def mapped(piece: int, size: int) -> Iterator[list[torch.Tensor]]:
    """:param piece: bytes of each handle; ``size``: of all buffers."""
    memory, rows = CudaMemory(torch.cuda.current_device()), size // BUFFERS // ROW_BYTES
    memory.granularity = piece
    buffers = [ElasticBuffer((rows, ROW_BYTES), torch.uint8, 0, memory) for _ in range(BUFFERS)]
    try:
        for each in buffers:
            each.map_rows(rows)
        yield [each.tensor for each in buffers]
    finally:
        torch.cuda.synchronize()
        for each in buffers:
            each.release()


def launch_us(number: torch.Tensor) -> float:
    """The host's microseconds for one kernel among many."""
    took = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        took.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return statistics.median(took) / LAUNCHES * 1e6


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """The host's microseconds for one replay that finds the GPU idle."""
    took = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        took.append(time.perf_counter() - begin)
    return statistics.median(took) * 1e6


def read_gb_s(buffers: Sequence[torch.Tensor]) -> float:
    """Gigabytes of rows that are read in a second; as many are written."""
    rows = torch.randint(len(buffers[0]), (READ_ROWS,), device="cuda")

    def read() -> None:
        for each in buffers[:READ_BUFFERS]:
            each.index_select(0, rows)

    return READ_BUFFERS * READ_ROWS * ROW_BYTES / 1e9 / (timing.median_ms(read, READS) / 1e3)


def longest_ms(number: torch.Tensor) -> float:
    """Milliseconds of the longest launch, until its kernel has run, while another process asks for free memory once."""
    longest = [0.0] * WATCHED
    with free_memory() as asked:
        until_s = time.perf_counter() + START_S
        while not asked and time.perf_counter() < until_s:
            time.sleep(0.1)  # it has not started
        for window in range(WATCHED):
            until_s = time.perf_counter() + WATCHED_S
            while time.perf_counter() < until_s:
                begin = time.perf_counter()
                number.add_(1)
                torch.cuda.current_stream().synchronize()
                longest[window] = max(longest[window], time.perf_counter() - begin)
    return statistics.median(longest) * 1e3


def measure(make: Callable[[int], Any], size: int) -> dict[str, float]:
    """:param make: one of :func:`allocated` and :func:`mapped`; ``size``: bytes of all buffers."""
    timing.free_memory()
    with make(size) as buffers:
        number = torch.zeros(1, device="cuda")
        buffers[0][:1].add_(1)  # so that its kernel is loaded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for each in range(GRAPH_KERNELS):
                buffers[each % len(buffers)][:1].add_(1)
        return {
            "launch": launch_us(number),
            "replay": replay_us(graph),
            "read": read_gb_s(buffers),
            "longest": longest_ms(number),
        }


def tables(result: output.Result) -> str:
    """A row for each figure: stock's median, and those of the others, with the spread of theirs over stock's."""
    figures = result["figures"]
    names = list(figures["samples"])
    rows = []
    for key, (words, unit) in MEASURED.items():
        samples = {name: [each[key] for each in found] for name, found in figures["samples"].items()}
        ratios = timing.compare_with_stock(samples)
        cells = [f"{next(iter(ratios.values()))['stock']:.3g}"]
        for name in names[1:]:
            one = ratios[name]
            cells.append(f"{one['other']:.3g} ({1 / one['highest']:.2f} to {1 / one['lowest']:.2f})")
        rows.append((f"{words}, {unit}", *cells))
    return output.table((f"{figures['gigabytes']} GB", *names), rows)


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--gigabytes", type=int, default=48, help="of memory; with as much beside it free")
    parser.add_argument("--pieces", type=output.numbers, default=(2, 64), metavar="MIB,...", help="multiples of 2")
    parser.add_argument("--rounds", type=int, default=5)
    options = output.parse(parser)
    machine.require_gpu("mapped")
    size = options.gigabytes * 10**9 // (BUFFERS << 26) * (BUFFERS << 26)
    kinds = {timing.STOCK: allocated, **{f"mapped-{each}-MiB": partial(mapped, each << 20) for each in options.pieces}}
    kinds[timing.CONTROL] = allocated
    versions = {name: partial(measure, make, size) for name, make in kinds.items()}
    samples = timing.run_in_turn(versions, options.rounds)
    figures = {"gigabytes": options.gigabytes, "rounds": options.rounds, "samples": samples}
    output.finish(options, output.result("mapped", figures), tables)


if __name__ == "__main__":
    main()
