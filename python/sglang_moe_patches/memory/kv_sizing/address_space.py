"""Tensors over reserved addresses, of which as much has memory behind it as is asked for.

The addresses never change, so what was captured into a graph, or handed to a kernel, stays valid while memory comes and
goes behind the tail. This module knows CUDA's driver and nothing of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any


class OutOfMemory(RuntimeError):
    """There is no memory to map; nothing was changed. The message says what the driver said."""


class CudaMemory:
    """A GPU's addresses, and memory to put behind them, in bytes: multiples of ``granularity``.

    One handle for each granule (2 MiB on an H100), because a handle can only be unmapped as a whole.
    """

    def __init__(self, gpu: int) -> None:
        from cuda.bindings import driver

        self._driver, self._gpu = driver, gpu
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = gpu
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._kind.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._kind, recommended))
        self._stream = self._call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING

    def reserve(self, size: int) -> int:
        """:returns: the first of ``size`` addresses that nobody else gets."""
        return int(self._call("cuMemAddressReserve", size, self.granularity, 0, 0))

    def map(self, address: int, size: int) -> None:
        """Put zeroed memory behind addresses.

        :raises OutOfMemory: there is none; nothing was mapped.
        """
        mapped = 0
        try:
            while mapped < size:
                handle = self._call("cuMemCreate", self.granularity, self._kind, 0)
                try:
                    self._call("cuMemMap", address + mapped, self.granularity, 0, handle, 0)
                finally:
                    self._call("cuMemRelease", handle)  # the mapping keeps it
                mapped += self.granularity
            self._call("cuMemSetAccess", address, size, [self._access], 1)
            # On a stream of its own, waited for: the engine's streams do not wait for the default one.
            for each in range(address, address + size, self.granularity):
                self._call("cuMemsetD8Async", each, 0, self.granularity, self._stream)
            self._call("cuStreamSynchronize", self._stream)
        except Exception:
            self.unmap(address, mapped)
            raise

    def unmap(self, address: int, size: int) -> None:
        """Give the memory back. Nobody may use it any more."""
        for each in range(address, address + size, self.granularity):
            self._call("cuMemUnmap", each, self.granularity)

    def release(self, address: int, size: int) -> None:
        """Give addresses back behind which nothing is mapped."""
        self._call("cuMemAddressFree", address, size)

    def device(self) -> Any:
        """The ``torch.device`` of tensors over it."""
        import torch

        return torch.device("cuda", self._gpu)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(f"{name}: {error.name}")
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error.name}")
        return results[0] if results else None


class ElasticBuffer:
    """A tensor over reserved addresses, of whose rows only the first have memory behind them.

    :param shape: of the whole tensor.
    :param dtype: of ``torch``.
    :param axis: the dimension that counts rows (tokens or pages). Each index of the dimensions before it is a *plane*,
        whose first rows have memory.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, axis: int, memory: CudaMemory) -> None:
        import torch

        self._memory = memory
        self.rows = shape[axis]
        self._planes = math.prod(shape[:axis])
        self._row_bytes = math.prod(shape[axis + 1 :]) * dtype.itemsize
        self._span = _up(self._planes * self.rows * self._row_bytes, memory.granularity)
        self._mapped: set[int] = set()  # numbers of granules
        self.address = memory.reserve(self._span)
        storage = torch._C._construct_storage_from_data_pointer(self.address, memory.device(), self._span)
        self.tensor = torch.empty(0, dtype=dtype, device=memory.device()).set_(storage, 0, tuple(shape))

    def bytes_behind(self, rows: int) -> int:
        """Bytes of memory that the first ``rows`` rows of every plane take, whole granules."""
        return sum(len(each) for each in self._granules(rows)) * self._memory.granularity

    def bytes_of(self, rows: int) -> int:
        """Bytes of the first ``rows`` rows of every plane: what a tensor of as many rows would have."""
        return self._planes * rows * self._row_bytes

    def map_rows(self, rows: int) -> None:
        """Put zeroed memory behind the first ``rows`` rows of every plane, where there is none yet.

        :raises OutOfMemory: there is not enough; nothing was changed.
        """
        missing = [number for each in self._granules(rows) for number in each if number not in self._mapped]
        done: list[range] = []
        try:
            for run in _runs(missing):
                self._memory.map(*self._extent(run))
                done.append(run)
        except Exception:
            for run in done:
                self._memory.unmap(*self._extent(run))
            raise
        self._mapped.update(missing)

    def unmap_from(self, rows: int) -> int:
        """Give back the memory that no row before ``rows`` lies in.

        Nobody may hold a row from ``rows`` on, and nothing that runs on the device may read one.

        :returns: bytes given back.
        """
        needed = {number for each in self._granules(rows) for number in each}
        surplus = sorted(self._mapped - needed)
        for run in _runs(surplus):
            self._memory.unmap(*self._extent(run))
        self._mapped -= set(surplus)
        return len(surplus) * self._memory.granularity

    def release(self) -> None:
        """Give everything back, the addresses too. Nobody may use the tensor any more."""
        self.unmap_from(0)
        self._memory.release(self.address, self._span)

    def _granules(self, rows: int) -> Iterator[range]:
        """The granules that the first rows of each plane lie in, each granule once."""
        before = 0
        for plane in range(self._planes if rows else 0):
            start = plane * self.rows * self._row_bytes
            end = _up(start + min(rows, self.rows) * self._row_bytes, self._memory.granularity)
            found = range(max(before, start // self._memory.granularity), end // self._memory.granularity)
            before = max(before, found.stop)
            yield found

    def _extent(self, run: range) -> tuple[int, int]:
        """:returns: the address and the bytes of granules that follow one another."""
        return self.address + run.start * self._memory.granularity, len(run) * self._memory.granularity


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges that follow without a gap."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
