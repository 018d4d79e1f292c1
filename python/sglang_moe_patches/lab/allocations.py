"""Simulation of PyTorch's caching allocator, and a recorder of the memory that a function allocates and frees.

Together they show how much GPU memory PyTorch's allocator would reserve if the function ran on a GPU, and how much of
this memory no tensor uses. No GPU is needed, because the function runs on the CPU. If its tensors are too large for the
CPU's memory, the function runs on PyTorch's ``meta`` device.

The simulation follows ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.11 and 2.14 with default settings, one stream
and no limit of memory. It supports only one setting, ``max_split_size_mb``.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ROUND = 512
_SMALL = 1 << 20
"""Largest allocation, in bytes, that the allocator takes from its pool of small blocks."""
_SMALL_SEGMENT, _MEDIUM_SEGMENT, _MEDIUM, _LARGE_ROUND = 2 << 20, 20 << 20, 10 << 20, 2 << 20


class Event(NamedTuple):
    """One step of a recording: an allocation, a release of memory, or a call of ``empty_cache``.

    :param key: number that identifies the allocated memory; ``None`` if the step is a call of ``empty_cache``.
    :param size: bytes that are allocated; 0 if the memory is freed.
    """

    key: int | None
    size: int = 0


EMPTY_CACHE = Event(None)


@dataclass(eq=False)
class _Block:
    """Contiguous part of a segment, either in use or free. A segment is one allocation from CUDA's driver.

    :param size: bytes of the block.
    :param small: whether the block belongs to the allocator's pool for small allocations.
    :param before: previous block of the same segment; ``None`` at the segment's start.
    :param after: next block of the same segment; ``None`` at the segment's end.
    :param order: number that rises with each new block. The allocator takes the older of two equal free blocks.
    """

    size: int
    small: bool
    in_use: bool = True
    before: _Block | None = None
    after: _Block | None = None
    order: int = field(default_factory=itertools.count().__next__)

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of free blocks: the size, then the age. The allocator takes the first block that is large enough."""
        return self.size, self.order


class Allocator:
    """Simulation of PyTorch's caching allocator. It allocates no memory, and only counts bytes.

    :param max_split_size: value of the allocator's setting ``max_split_size_mb``, in bytes; ``None`` if it is not set.
    """

    def __init__(self, max_split_size: int | None = None) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._limit = float("inf") if max_split_size is None else max_split_size
        self._free: dict[bool, list[_Block]] = {True: [], False: []}
        self._used: dict[int, _Block] = {}

    @property
    def holes(self) -> int:
        """Bytes that the allocator has reserved, but that no tensor uses."""
        return self.reserved - self.allocated

    def run(self, events: Iterable[Event]) -> None:
        """Replay recorded allocations, releases and calls of ``empty_cache``."""
        for key, size in events:
            if key is None:
                self.empty_cache()
            elif size:
                self.allocate(key, size)
            else:
                self.free(key)

    def allocate(self, key: int, size: int) -> None:
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = size <= _SMALL
        block = self._take(size, small)
        if block is None:
            block = _Block(_segment_bytes(size), small)
            self.reserved += block.size
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        rest = block.size - size
        if rest >= _ROUND if small else (size < self._limit and rest > _SMALL):
            after = _Block(rest, small, in_use=False, before=block, after=block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            bisect.insort(self._free[small], after, key=lambda free: free.rank)
        block.in_use = True
        self._used[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        block = self._used.pop(key)
        self.allocated -= block.size
        block.in_use = False
        if (before := block.before) is not None and not before.in_use:
            self._free[block.small].remove(before)
            block = _merge(before, block)
        if (after := block.after) is not None and not after.in_use:
            self._free[block.small].remove(after)
            block = _merge(block, after)
        bisect.insort(self._free[block.small], block, key=lambda free: free.rank)

    def empty_cache(self) -> None:
        """Return each segment without a used block to CUDA's driver. A segment is one allocation from the driver."""
        for pool in self._free.values():
            returned = [block for block in pool if block.is_whole_segment]
            self.reserved -= sum(block.size for block in returned)
            pool[:] = [block for block in pool if not block.is_whole_segment]

    def _take(self, size: int, small: bool) -> _Block | None:
        pool = self._free[small]
        place = bisect.bisect_left(pool, (size, -1), key=lambda free: free.rank)
        if place == len(pool):
            return None
        found = pool[place].size
        if size < self._limit <= found or (size >= self._limit and found >= size + _MEDIUM_SEGMENT):
            return None
        return pool.pop(place)


def _merge(first: _Block, second: _Block) -> _Block:
    """Merge a free block with the block that follows it."""
    first.size, first.after = first.size + second.size, second.after
    if second.after is not None:
        second.after.before = first
    return first


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MEDIUM:
        return _MEDIUM_SEGMENT
    return -(-size // _LARGE_ROUND) * _LARGE_ROUND


class Recorder(TorchDispatchMode):
    """Recorder of the memory that tensors of one device allocate and free, and of calls of ``torch.cuda.empty_cache``.

    Memory that was allocated before the recording is not recorded.

    :param device: type of the device, such as "cpu".
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._is_paused = False
        self.events: list[Event] = []
        self._alive: dict[int, StorageWeakRef] = {}
        self._keys: dict[int, int] = {}
        self._next_key = itertools.count().__next__

    def __enter__(self) -> Any:
        self._empty_cache, torch.cuda.empty_cache = torch.cuda.empty_cache, self._record_empty_cache
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.cuda.empty_cache = self._empty_cache
        super().__exit__(*error)
        self._record_freed()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the recording within the ``with`` block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused:
            return function(*args, **(kwargs or {}))
        known = {storage._cdata for storage in self._storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        made = self._storages(result)
        self._record_freed()
        for storage in made:
            address = storage._cdata
            if address not in known and address not in self._alive and storage.nbytes():
                self._alive[address], self._keys[address] = StorageWeakRef(storage), self._next_key()
                self.events.append(Event(self._keys[address], storage.nbytes()))
        return result

    def _storages(self, values: Any) -> list[Any]:
        tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
        return [tensor.untyped_storage() for tensor in tensors if tensor.device.type == self._device]

    def _record_freed(self) -> None:
        for address in [address for address, memory in self._alive.items() if memory.expired()]:
            del self._alive[address]
            self.events.append(Event(self._keys.pop(address)))

    def _record_empty_cache(self) -> None:
        self._record_freed()
        self.events.append(EMPTY_CACHE)


def record(function: Callable[[], Any], device: str = "cpu") -> tuple[Any, list[Event]]:
    """Call a function, and record the memory that the function allocates and frees on one device.

    :returns: the function's result, and the recorded events in order.
    """
    with Recorder(device) as recorder:
        result = function()
    return result, recorder.events
