"""Tensors over reserved GPU addresses. Only their first rows are backed by memory.

The addresses never change. A CUDA graph or a kernel that uses these addresses stays valid while memory for the last
rows is mapped and unmapped. This module calls CUDA's driver, and nothing of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any


class OutOfMemory(RuntimeError):
    """Raised if CUDA's driver has no memory to map. The message names the function of CUDA's driver and its error."""


class CudaMemory:
    """Reserve addresses of a GPU and map memory to them, by calls of CUDA's driver.

    All sizes are multiples of ``granularity`` bytes, the size of a *granule* (2 MiB on an H100). Each granule has its
    own memory handle, because CUDA can unmap a handle only as a whole.
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
        """Reserve addresses for ``size`` bytes, without memory.

        :returns: the first address.
        """
        return int(self._call("cuMemAddressReserve", size, self.granularity, 0, 0))

    def map(self, address: int, size: int) -> None:
        """Map zeroed memory to ``size`` bytes of reserved addresses.

        :raises OutOfMemory: there is not enough memory. No memory was mapped.
        """
        mapped = 0
        try:
            while mapped < size:
                handle = self._call("cuMemCreate", self.granularity, self._kind, 0)
                try:
                    self._call("cuMemMap", address + mapped, self.granularity, 0, handle, 0)
                finally:
                    self._call("cuMemRelease", handle)  # the mapping keeps the memory allocated
                mapped += self.granularity
            self._call("cuMemSetAccess", address, size, [self._access], 1)
            # Zero the memory on a separate stream, and wait for that stream: the engine's streams do not wait for the
            # default stream.
            for granule in range(address, address + size, self.granularity):
                self._call("cuMemsetD8Async", granule, 0, self.granularity, self._stream)
            self._call("cuStreamSynchronize", self._stream)
        except Exception:
            self.unmap(address, mapped)
            raise

    def unmap(self, address: int, size: int) -> None:
        """Unmap and free the memory at these addresses. All kernels that use the memory must have ended before the
        call."""
        for granule in range(address, address + size, self.granularity):
            self._call("cuMemUnmap", granule, self.granularity)

    def release(self, address: int, size: int) -> None:
        """Free reserved addresses. Their memory must have been unmapped before the call."""
        self._call("cuMemAddressFree", address, size)

    def device(self) -> Any:
        """Return the ``torch.device`` for tensors at these addresses."""
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
    """Tensor over reserved addresses. Only the first rows of each plane are backed by memory.

    :param shape: shape of the whole tensor, including the rows without memory.
    :param dtype: ``torch.dtype`` of the tensor's elements.
    :param axis: dimension that counts rows (tokens or pages). A *plane* is the part of the tensor at one index of the
        dimensions before ``axis``. For example, a tensor of shape (2, tokens, 128) with ``axis`` 1 has two planes.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, axis: int, memory: CudaMemory) -> None:
        import torch

        self._memory = memory
        self.rows = shape[axis]
        self._plane_count = math.prod(shape[:axis])
        self._row_bytes = math.prod(shape[axis + 1 :]) * dtype.itemsize
        self._span = _round_up(self._plane_count * self.rows * self._row_bytes, memory.granularity)
        self._mapped: set[int] = set()  # indices of the granules that have memory
        self.address = memory.reserve(self._span)
        storage = torch._C._construct_storage_from_data_pointer(self.address, memory.device(), self._span)
        self.tensor = torch.empty(0, dtype=dtype, device=memory.device()).set_(storage, 0, tuple(shape))

    def backing_bytes(self, rows: int) -> int:
        """Return the bytes of memory that the tensor needs if only ``rows`` rows of each plane have memory. A plane is
        defined at :class:`ElasticBuffer`. Memory is counted in whole granules (:class:`CudaMemory`)."""
        return sum(map(len, self._granules(rows))) * self._memory.granularity

    def bytes_of(self, rows: int) -> int:
        """Return the bytes of a tensor with ``rows`` rows in each plane. Its other dimensions are as in this tensor."""
        return self._plane_count * rows * self._row_bytes

    def map_rows(self, rows: int) -> None:
        """Map zeroed memory for the first ``rows`` rows of every plane. Rows that already have memory keep it.

        :raises OutOfMemory: there is not enough memory. No mapping has changed.
        """
        missing = [number for granules in self._granules(rows) for number in granules if number not in self._mapped]
        mapped_runs: list[range] = []
        try:
            for run in _group_consecutive(missing):
                self._memory.map(*self._extent(run))
                mapped_runs.append(run)
        except Exception:
            for run in mapped_runs:
                self._memory.unmap(*self._extent(run))
            raise
        self._mapped.update(missing)

    def unmap_from(self, rows: int) -> int:
        """Unmap the memory of all rows after the first ``rows`` rows, in every plane.

        At the call, no request may use a slot in these rows, and all kernels that read the rows must have ended.

        :param rows: number of rows in each plane that keep their memory. A granule that contains a part of such a row
            stays mapped.
        :returns: freed bytes.
        """
        needed = {number for granules in self._granules(rows) for number in granules}
        surplus = sorted(self._mapped - needed)
        for run in _group_consecutive(surplus):
            self._memory.unmap(*self._extent(run))
        self._mapped -= set(surplus)
        return len(surplus) * self._memory.granularity

    def release(self) -> None:
        """Free all memory and the addresses. Afterwards, no code may use the tensor."""
        self.unmap_from(0)
        self._memory.release(self.address, self._span)

    def _granules(self, rows: int) -> Iterator[range]:
        """Yield one range for each plane (a part of the tensor, see :class:`ElasticBuffer`). The range has the indices
        of the granules that back the plane's first ``rows`` rows.

        A granule may contain the end of one plane and the beginning of the next plane. So that no granule counts twice,
        only the earlier plane's range then contains the granule's index.
        """
        before = 0
        for plane in range(self._plane_count if rows else 0):
            start = plane * self.rows * self._row_bytes
            end = _round_up(start + min(rows, self.rows) * self._row_bytes, self._memory.granularity)
            granules = range(max(before, start // self._memory.granularity), end // self._memory.granularity)
            before = max(before, granules.stop)
            yield granules

    def _extent(self, run: range) -> tuple[int, int]:
        """Return the first address and the number of bytes of neighbouring granules."""
        return self.address + run.start * self._memory.granularity, len(run) * self._memory.granularity


def _group_consecutive(numbers: Sequence[int]) -> Iterator[range]:
    """Split ascending numbers into ranges of consecutive numbers."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
