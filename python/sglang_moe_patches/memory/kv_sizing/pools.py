"""The engine's KV buffers over reserved addresses, for more tokens than have memory.

A *pool* is the engine's object with the tensors of a KV cache. The engine builds its pools for as many tokens as could
ever fit. Meanwhile this module makes each tensor with a dimension that counts tokens or pages over reserved addresses
(:mod:`.address_space`). At first, memory is mapped only for the tokens of the engine's own rule. If this module does
not support a pool, or if another tensor grows with the tokens, the engine builds its pools once more without this
package.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from sglang_moe_patches.memory.kv_sizing.address_space import CudaMemory, ElasticBuffer
from sglang_moe_patches.memory.kv_sizing.phases import MAMBA
from sglang_moe_patches.memory.kv_sizing.token_count import COUNTS, TokenCounts, unknown_allocator

GIB = 1 << 30
WINDOWS = "sliding-window"
KNOWN_POOLS = {
    *("MHATokenToKVPool", "MHATokenToKVPoolFP4", "MHATokenToKVPoolMXFP8"),
    *("MLATokenToKVPool", "MLATokenToKVPoolFP4", "NSATokenToKVPool", "DSATokenToKVPool"),
    *("SWAKVPool", "HybridLinearKVPool"),
}
"""Names of the engine's pool classes that this module supports. ``docs/changes/kv-sizing.md`` lists them, too."""
KNOWN_TABLES = {"ReqToTokenPool", "HybridReqToTokenPool"}
"""Names of the engine's request table classes that this module supports. The second class also has the states of Mamba
layers, whose number does not depend on the tokens."""
FACTORIES = ("zeros", "empty", "ones", "full")
"""Names of the functions of ``torch`` that make a tensor of a given shape."""


class Unknown(Exception):
    """Raised if the KV cache cannot grow. The message is the reason, worded to follow "because"."""


def unknown_pool_reason(pool: str, table: str) -> str:
    """Return the reason why a KV cache cannot grow, from its class names. "": the classes are supported."""
    if pool not in KNOWN_POOLS:
        return f"kv-sizing does not support KV caches of the kind {pool}"
    return "" if table in KNOWN_TABLES else f"kv-sizing does not support request tables of the kind {table}"


def pools_of(runner: Any) -> tuple[Any, Any]:
    """Return a model runner's KV cache and its request table; ``None`` in the place of a missing one."""
    return getattr(runner, "token_to_kv_pool", None), getattr(runner, "req_to_token_pool", None)


def pool_bytes(pool: Any) -> int:
    """Return the bytes of a pool, as the pool reports them."""
    return round(float(getattr(pool, "mem_usage", 0) or 0) * GIB)


def hybrid(pool: Any, table: Any) -> str:
    """Return the kind of a pool: sliding windows, Mamba, or "" if the pool is just one KV cache."""
    kinds = [kind.__name__ for owner in (pool, table) for kind in type(owner).__mro__]
    if any("SWA" in kind for kind in kinds):
        return WINDOWS
    return MAMBA if any("Hybrid" in kind or "Mamba" in kind for kind in kinds) else ""


@dataclass
class _Buffer:
    """Buffer of a pool.

    :param memory: the buffer's tensor over reserved addresses.
    :param part: field of :class:`TokenCounts` with the buffer's number of tokens.
    :param unit: tokens of one row: 1, or a page.
    """

    memory: ElasticBuffer
    part: str
    unit: int


class ElasticPools:
    """KV buffers of a scheduler process: those of its model and of its draft models.

    :param first: token counts that have memory at first, those of the engine's rule.
    :param top: largest token counts, for which addresses are reserved.
    :param page: tokens of a page.
    """

    def __init__(self, memory: CudaMemory, first: TokenCounts, top: TokenCounts, page: int) -> None:
        self.first, self.top, self.page, self.counts = first, top, page, first
        self._memory = memory
        self._buffers: list[_Buffer] = []
        self._pools: list[Any] = []
        self._tables: list[Any] = []

    # --- Sizes ---------------------------------------------------------------------------------------------------

    def counts_for(self, tokens: int) -> TokenCounts:
        """Return the token counts of all layer kinds for a KV cache size, interpolated between ``first`` and ``top``.

        :param tokens: KV cache size, which is rounded down to whole pages.
        """
        tokens = tokens // self.page * self.page
        span = self.top.tokens - self.first.tokens
        share = (tokens - self.first.tokens) / span if span and tokens >= self.first.tokens else None

        def part(first: int, top: int) -> int:
            value = first * tokens / self.first.tokens if share is None else first + share * (top - first)
            return min(top, int(value)) // self.page * self.page

        return TokenCounts(tokens, *map(part, self.first[1:], self.top[1:]))

    def bytes_behind(self, counts: TokenCounts) -> int:
        """Return how many bytes of memory back ``counts`` tokens in all buffers."""
        return sum(buffer.memory.bytes_behind(self._rows(buffer, counts)) for buffer in self._buffers)

    def tokens_within(self, budget: int) -> int:
        """Return the most tokens, in whole pages, whose memory fits into ``budget`` bytes. 0: one page takes more."""
        pages = range(1, self.top.tokens // self.page + 1)
        return self.page * bisect_right(
            pages, budget, key=lambda number: self.bytes_behind(self.counts_for(number * self.page))
        )

    def tokens_with_window(self, window: int) -> int:
        """Return the least tokens, in whole pages, with which sliding-window layers have at least ``window`` tokens."""
        pages = range(self.top.tokens // self.page + 1)
        return self.page * bisect_left(pages, window, key=lambda number: self.counts_for(number * self.page).window)

    def _rows(self, buffer: _Buffer, counts: TokenCounts) -> int:
        # The engine makes more rows than tokens, for example a page of padding. The number of these rows is constant.
        return buffer.memory.rows - (getattr(self.top, buffer.part) - getattr(counts, buffer.part)) // buffer.unit

    # --- Memory --------------------------------------------------------------------------------------------------

    def map(self, counts: TokenCounts) -> None:
        """Map memory for ``counts`` tokens in every buffer. If one buffer fails, no buffer keeps new memory.

        :raises OutOfMemory: no mapping has changed.
        """
        try:
            for buffer in self._buffers:
                buffer.memory.map_rows(self._rows(buffer, counts))
        except Exception:
            self.unmap_from(self.counts)
            raise
        self.counts = counts
        self._set_usage()

    def unmap_from(self, counts: TokenCounts) -> int:
        """Unmap the memory of all slots after the first ``counts`` tokens. No request may hold one of these slots.

        :returns: freed bytes.
        """
        self.counts = counts  # even if the driver fails, because the slots are withdrawn already
        for table in self._tables:
            _forget_slots(table)
        _wait_for_device()  # a running kernel may read these slots
        freed = sum(buffer.memory.unmap_from(self._rows(buffer, counts)) for buffer in self._buffers)
        self._set_usage()
        return freed

    def _set_usage(self) -> None:
        """Set the GiB that the engine reports for each pool to those of a pool with ``counts`` tokens."""
        sizes = {
            buffer.memory.address: buffer.memory.bytes_of(self._rows(buffer, self.counts)) for buffer in self._buffers
        }
        for pool in self._pools:
            if hasattr(pool, "mem_usage"):
                addresses = {_address(tensor) for tensor in _tensors_of(pool)} & set(sizes)
                pool.mem_usage = sum(sizes[address] for address in addresses) / GIB

    # --- Making the pools ----------------------------------------------------------------------------------------

    def build(self, build: Callable[[], Any], parts_of: Callable[[Any], tuple[Any, Any, Any]], device: str) -> Any:
        """Let the engine build pools for ``top`` tokens over reserved addresses, and keep their buffers.

        :param build: the engine's function; it is called once.
        :param parts_of: function that returns the KV cache, the request table and the allocator of the result.
        :param device: the device on which the engine makes its KV cache.
        :raises Unknown: this module does not support the pools. Their buffers have been freed.
        """
        before, mode = len(self._buffers), _substitution(self, device)
        try:
            with _quiet(), mode:
                built = build()
            pool, table, allocator = parts_of(built)
            if reason := unknown_pool_reason(type(pool).__name__, type(table).__name__) or unknown_allocator(allocator):
                raise Unknown(reason)
            self._check(pool, table, mode.others, len(self._buffers) - before)
        except Exception:
            _wait_for_device()
            for buffer in self._buffers[before:]:
                buffer.memory.release()
            del self._buffers[before:]
            raise
        self._pools += _pools_in(pool)
        if not any(table is known for known in self._tables):  # a draft model shares the table of its target
            self._tables.append(table)
        self._set_usage()
        return built

    def _check(self, pool: Any, table: Any, others: list[Any], made: int) -> None:
        """Check that all parts of the KV cache are supported, and that no other tensor grows with the tokens.

        :param others: weak references to the other tensors that the engine has made meanwhile.
        :param made: number of buffers over reserved addresses.
        :raises Unknown: a part is not supported, or another tensor grows with the tokens.
        """
        parts = _pools_in(pool)
        for part in parts:
            if type(part).__name__ not in KNOWN_POOLS:
                raise Unknown(f"kv-sizing does not support KV caches with a {type(part).__name__}")
        if not made:
            raise Unknown(f"a {type(pool).__name__} of this release makes its buffers in a way that is not known")
        ours = {buffer.memory.address for buffer in self._buffers}
        owners = (table, getattr(table, "mamba_pool", None))
        fixed = {_address(tensor) for owner in owners for tensor in _tensors_of(owner)}
        if fixed & ours:
            raise Unknown(f"a {type(table).__name__} has about as many rows as the KV cache")
        least = min(filter(None, self.top)) // self.page
        made_meanwhile = (reference() for reference in others)
        of_pools = (tensor for part in parts for tensor in _tensors_of(part))
        for tensor in (*made_meanwhile, *of_pools):
            if tensor is None or tensor.dim() < 2 or tensor.numel() < least or tensor.device.type == "meta":
                continue
            if tensor.device.type == self._memory.device().type and _address(tensor) not in ours | fixed:
                shape = "x".join(map(str, tensor.shape))
                raise Unknown(f"a tensor of {shape} in a {type(pool).__name__} is not known")

    def make_buffer(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make a tensor over reserved addresses, and map memory for its first rows.

        :returns: ``None`` if no dimension counts tokens or pages.
        """
        for axis, size in enumerate(shape):
            for part, top in self.top._asdict().items():
                for unit in {1, self.page} if top else ():
                    if top // unit <= size <= top // unit + (2 * self.page if unit == 1 else 2):
                        made = _Buffer(ElasticBuffer(shape, dtype, axis, self._memory), part, unit)
                        self._buffers.append(made)
                        made.memory.map_rows(self._rows(made, self.counts))
                        return made.memory.tensor
        return None


@contextmanager
def sized_for(maker: Any, arguments: dict[str, Any], first: TokenCounts, top: TokenCounts) -> Iterator[dict[str, Any]]:
    """Let the engine make pools for the tokens of ``top`` instead of those of ``first``.

    :param maker: the engine's object that makes pools. Up to 0.5.15 it is a model runner with the token counts as
        attributes.
    :param arguments: arguments of its function that makes pools. From 0.5.16 on they contain the token counts.
    :returns: the arguments for the call.
    :raises Unknown: the engine has other token counts than ``first``, as it may have for a draft model.
    """
    sizes = arguments.get("sizes")
    owner = maker if sizes is None else sizes
    wanted, found = {}, {}
    for name, part in COUNTS.items():
        found[name] = getattr(owner, name, None)
        if found[name] and getattr(top, part):
            if found[name] != getattr(first, part):
                raise Unknown(f"a draft model's cache has {found[name]:,} tokens, another number than the model's")
            wanted[name] = getattr(top, part)
    if sizes is not None:
        names = [item.name for item in fields(sizes)] if is_dataclass(sizes) else sizes.__struct_fields__
        values = {name: getattr(sizes, name) for name in names} | wanted
        yield {**arguments, "sizes": type(sizes)(**values)}
        return
    for name, value in wanted.items():
        setattr(owner, name, value)
    try:
        yield arguments
    finally:
        for name in wanted:
            setattr(owner, name, found[name])


def _substitution(pools: ElasticPools, device: str) -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    factories = {getattr(torch, name) for name in FACTORIES}

    class Substitution(TorchFunctionMode):
        """PyTorch function mode that makes the engine's KV buffers over reserved addresses.

        ``others`` has weak references to the other tensors that the engine makes on the same device.
        """

        def __init__(self) -> None:
            super().__init__()
            self.others: list[Any] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function not in factories:
                return function(*args, **kwargs)
            where = torch.device(kwargs.get("device") or "cpu")
            shape = _shape(args, kwargs)
            is_ours = where.type == torch.device(device).type and len(shape) > 1 and not kwargs.get("pin_memory")
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            # Replace only ``torch.zeros``: mapped memory is zero already. Other functions would write into unmapped
            # memory.
            if is_ours and function is torch.zeros and (made := pools.make_buffer(shape, dtype)) is not None:
                return made
            result = function(*args, **kwargs)
            if is_ours:
                self.others.append(weakref.ref(result))
            return result

    return Substitution()


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    size = kwargs["size"] if "size" in kwargs else args[0] if args else ()
    if isinstance(size, int):
        size = [value for value in args if isinstance(value, int)]
    return tuple(map(int, size))


def _pools_in(pool: Any) -> list[Any]:
    """Return a pool and the KV pools in it. A pool of states (``MambaPool``) is left out: it grows with requests."""
    found: list[Any] = []
    queue = [pool]
    while queue:
        part = queue.pop()
        if part is None or any(part is known for known in found):
            continue
        found.append(part)
        for value in vars(part).values():
            if "KVPool" in type(value).__name__ and hasattr(value, "__dict__"):
                queue.append(value)
    return found


def _tensors_of(owner: Any) -> Iterator[Any]:
    """Yield the tensors among an object's attributes, also those in lists and dictionaries."""
    import torch

    queue = list(vars(owner).values()) if hasattr(owner, "__dict__") else []
    while queue:
        value = queue.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            queue += value
        elif isinstance(value, dict):
            queue += value.values()
        elif is_dataclass(value) and not isinstance(value, type):
            queue += vars(value).values() if hasattr(value, "__dict__") else ()


def _forget_slots(table: Any) -> None:
    """Point the free rows of a request table to slot 0, which always has memory.

    A captured decode reads a slot for each row of its padding. Up to 0.5.12.post1 this is a slot of the request that
    used the row before.
    """
    import torch

    rows = table.req_to_token
    free = torch.tensor([0, *map(int, table.free_slots)], dtype=torch.int64)  # row 0 is no request's
    rows[free.to(rows.device)] = 0


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the engine's log lines about pools. They would report the tokens that have addresses, not memory."""
    logger = logging.getLogger("sglang.srt.mem_cache")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
