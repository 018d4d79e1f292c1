"""Compare the speed of mapped memory, as kv-sizing uses it, with the speed of allocated memory.

    python benchmark memory/mapped --json mapped.json                    # 48 GB, in pieces of 2 and 64 MiB
    python benchmark memory/mapped --gigabytes 16 --pieces 2 --rounds 3

PyTorch allocates the memory of `stock`, and of `stock-again` as a control. The memory of `mapped-N-MiB` is mapped as by
kv-sizing, in pieces of N MiB. Each round allocates or maps the memory again, and then measures:

- the host's time to launch a kernel, and to launch a CUDA graph of kernels;
- the bandwidth of reads of random rows, as decodes read the KV cache;
- the longest launch within a quarter of a second, while another process asks the driver for free memory once, as
  monitoring does.

Each figure is a median, because other processes use the host at times.
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
"""Number of buffers of a server's KV cache: keys and values of 48 layers."""
ROW_BYTES = 1024
"""Bytes of one token in one buffer."""
BATCHES, LAUNCHES, REPLAYS, GRAPH_KERNELS = 40, 500, 200, 400
"""Counts for the launch measurements: batches of launches, launches in a batch, graph replays, kernels in a graph."""
READ_BUFFERS, READ_ROWS, READS = 8, 1 << 17, 25
"""Counts for the read measurement: buffers that are read in turn, rows that are read in each buffer, repetitions."""
WINDOWS, WINDOW_S = 16, 0.25
"""Number of time windows in which launches are measured, and the length of a window in seconds. Free memory is read
once in each window.
"""
START_S = 10.0
"""Timeout in seconds for the start of the process that reads free memory."""
FIGURES = {
    "launch": ("launch of a kernel", "us"),
    "replay": (f"launch of a graph of {GRAPH_KERNELS} kernels", "us"),
    "read": ("reads of random rows of 1 KiB", "GB/s"),
    "longest": ("longest launch while free memory is asked for once", "ms"),
}
"""Description and unit of each figure."""


@contextmanager
def allocate_buffers(size: int) -> Iterator[list[torch.Tensor]]:
    """Allocate the buffers with PyTorch.

    :param size: bytes of all buffers together.
    """
    yield [
        torch.zeros(size // BUFFERS // ROW_BYTES, ROW_BYTES, dtype=torch.uint8, device="cuda") for _ in range(BUFFERS)
    ]


@contextmanager
def map_buffers(piece: int, size: int) -> Iterator[list[torch.Tensor]]:
    """Reserve addresses for the buffers and map memory to them, as kv-sizing does.

    :param piece: bytes of each mapped piece.
    :param size: bytes of all buffers together.
    """
    memory, rows = CudaMemory(torch.cuda.current_device()), size // BUFFERS // ROW_BYTES
    memory.granularity = piece
    buffers = [ElasticBuffer((rows, ROW_BYTES), torch.uint8, 0, memory) for _ in range(BUFFERS)]
    try:
        for buffer in buffers:
            buffer.map_rows(rows)
        yield [buffer.tensor for buffer in buffers]
    finally:
        torch.cuda.synchronize()
        for buffer in buffers:
            buffer.release()


def launch_us(number: torch.Tensor) -> float:
    """Measure the host time per kernel launch, in microseconds, while the host launches many kernels in a row."""
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(times) / LAUNCHES * 1e6


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Measure the host time to launch a CUDA graph on an idle GPU, in microseconds."""
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def read_gb_s(buffers: Sequence[torch.Tensor]) -> float:
    """Measure the bandwidth of reads of random rows, in GB/s. The rows are also written, but only reads are counted."""
    rows = torch.randint(len(buffers[0]), (READ_ROWS,), device="cuda")

    def read() -> None:
        for buffer in buffers[:READ_BUFFERS]:
            buffer.index_select(0, rows)

    return READ_BUFFERS * READ_ROWS * ROW_BYTES / 1e9 / (timing.median_ms(read, READS) / 1e3)


def longest_ms(number: torch.Tensor) -> float:
    """Measure the longest kernel launch of each time window, and return the median of the windows in milliseconds.

    A launch is measured until its kernel has finished. Another process asks the driver for free memory once in each
    window.
    """
    longest = [0.0] * WINDOWS
    with free_memory() as readings:
        until_s = time.perf_counter() + START_S
        while not readings and time.perf_counter() < until_s:
            time.sleep(0.1)  # wait for the first reading
        for window in range(WINDOWS):
            until_s = time.perf_counter() + WINDOW_S
            while time.perf_counter() < until_s:
                start = time.perf_counter()
                number.add_(1)
                torch.cuda.current_stream().synchronize()
                longest[window] = max(longest[window], time.perf_counter() - start)
    return statistics.median(longest) * 1e3


def measure(make: Callable[[int], Any], size: int) -> dict[str, float]:
    """Allocate or map the buffers, and measure all figures.

    :param make: :func:`allocate_buffers` or :func:`map_buffers`.
    :param size: bytes of all buffers together.
    """
    timing.free_memory()
    with make(size) as buffers:
        number = torch.zeros(1, device="cuda")
        buffers[0][:1].add_(1)  # load the kernel before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for kernel in range(GRAPH_KERNELS):
                buffers[kernel % len(buffers)][:1].add_(1)
        return {
            "launch": launch_us(number),
            "replay": replay_us(graph),
            "read": read_gb_s(buffers),
            "longest": longest_ms(number),
        }


def make_tables(result: output.Result) -> str:
    """Make a table with a row for each figure. It has the medians, and the range of each version's ratio to stock."""
    figures = result["figures"]
    names = list(figures["samples"])
    rows = []
    for key, (words, unit) in FIGURES.items():
        samples = {name: [sample[key] for sample in timed] for name, timed in figures["samples"].items()}
        ratios = timing.compare_with_stock(samples)
        cells = [f"{next(iter(ratios.values()))['stock']:.3g}"]
        for name in names[1:]:
            ratio = ratios[name]
            cells.append(f"{ratio['other']:.3g} ({1 / ratio['highest']:.2f} to {1 / ratio['lowest']:.2f})")
        rows.append((f"{words}, {unit}", *cells))
    return output.table((f"{figures['gigabytes']} GB", *names), rows)


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument(
        "--gigabytes",
        type=int,
        default=48,
        help="GB of memory in all buffers; as much again must be free (%(default)s)",
    )
    parser.add_argument(
        "--pieces",
        type=output.parse_numbers,
        default=(2, 64),
        metavar="MIB,...",
        help="sizes of the mapped pieces in MiB, multiples of 2",
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (%(default)s)")
    options = output.parse(parser)
    machine.require_gpu("mapped")
    size = options.gigabytes * 10**9 // (BUFFERS << 26) * (BUFFERS << 26)
    makers = {
        timing.STOCK: allocate_buffers,
        **{f"mapped-{mib}-MiB": partial(map_buffers, mib << 20) for mib in options.pieces},
    }
    makers[timing.CONTROL] = allocate_buffers
    versions = {name: partial(measure, make, size) for name, make in makers.items()}
    samples = timing.run_in_turn(versions, options.rounds)
    figures = {"gigabytes": options.gigabytes, "rounds": options.rounds, "samples": samples}
    output.finish(options, output.result("mapped", figures), make_tables)


if __name__ == "__main__":
    main()
