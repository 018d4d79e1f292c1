"""Which of the engine's KV buffers are ours: made by the engine, over addresses for more tokens than have memory.

The engine builds its pools for as many tokens as could ever fit. While it does, each tensor with a dimension that
counts tokens, or pages, is made over reserved addresses (:mod:`.address_space`), with memory behind those that the
engine has decided on. A pool that is not known, or a tensor as large as the tokens that is not ours, ends this: then
the engine builds its pools once more, as it would without us.
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
"""KV caches whose buffers are known, by the engine's names; ``docs/changes/kv-sizing.md`` has the list, too."""
KNOWN_TABLES = {"ReqToTokenPool", "HybridReqToTokenPool"}
"""Request tables; the second has states of Mamba layers, which stay as many as they are."""
FACTORIES = ("zeros", "empty", "ones", "full")
"""Functions of ``torch`` that make a tensor of a given shape."""


class Unknown(Exception):
    """A KV cache that is not grown; the message says why, worded to follow "because"."""


def unknown_pool_reason(pool: str, table: str) -> str:
    """Why a KV cache of these classes, by the engine's names, is not grown; "": it may be."""
    if pool not in KNOWN_POOLS:
        return f"KV caches of the kind {pool} are not known"
    return "" if table in KNOWN_TABLES else f"request tables of the kind {table} are not known"


def pools_of(runner: Any) -> tuple[Any, Any]:
    """A model runner's KV cache and its request table; ``None`` for one that it has not."""
    return getattr(runner, "token_to_kv_pool", None), getattr(runner, "req_to_token_pool", None)


def pool_bytes(pool: Any) -> int:
    """Bytes of a KV cache, as the pool reports them."""
    return round(float(getattr(pool, "mem_usage", 0) or 0) * GIB)


def hybrid(pool: Any, table: Any) -> str:
    """The kind of pool that is more than one KV cache, or "" for none."""
    kinds = [kind.__name__ for each in (pool, table) for kind in type(each).__mro__]
    if any("SWA" in kind for kind in kinds):
        return WINDOWS
    return MAMBA if any("Hybrid" in kind or "Mamba" in kind for kind in kinds) else ""


@dataclass
class _Buffer:
    """:param part: of :class:`TokenCounts`; ``unit``: how many of its tokens a row holds."""

    memory: ElasticBuffer
    part: str
    unit: int


class ElasticPools:
    """The KV buffers of a scheduler process, of its model and of its draft models.

    :param first: the tokens behind which memory is mapped at first.
    :param top: the tokens that there are addresses for.
    :param page: tokens.
    """

    def __init__(self, memory: CudaMemory, first: TokenCounts, top: TokenCounts, page: int) -> None:
        self.first, self.top, self.page, self.counts = first, top, page, first
        self._memory = memory
        self._buffers: list[_Buffer] = []
        self._pools: list[Any] = []
        self._tables: list[Any] = []

    # --- Sizes ---------------------------------------------------------------------------------------------------

    def counts_for(self, tokens: int) -> TokenCounts:
        """All parts, of which ``tokens`` is one: on the line through what the engine gives at first and at the top.

        :param tokens: rounded down to whole pages.
        """
        tokens = tokens // self.page * self.page
        span = self.top.tokens - self.first.tokens
        share = (tokens - self.first.tokens) / span if span and tokens >= self.first.tokens else None

        def part(first: int, top: int) -> int:
            value = first * tokens / self.first.tokens if share is None else first + share * (top - first)
            return min(top, int(value)) // self.page * self.page

        return TokenCounts(tokens, *(part(*each) for each in zip(self.first[1:], self.top[1:], strict=True)))

    def bytes_behind(self, counts: TokenCounts) -> int:
        """Bytes of memory that so many tokens take."""
        return sum(each.memory.bytes_behind(self._rows(each, counts)) for each in self._buffers)

    def tokens_within(self, budget: int) -> int:
        """The most tokens, whole pages, whose memory takes at most ``budget`` bytes; 0: not even one page's."""
        pages = range(1, self.top.tokens // self.page + 1)
        return self.page * bisect_right(
            pages, budget, key=lambda number: self.bytes_behind(self.counts_for(number * self.page))
        )

    def tokens_with_window(self, window: int) -> int:
        """The fewest tokens, whole pages, of which the layers with a sliding window have at least ``window``."""
        pages = range(self.top.tokens // self.page + 1)
        return self.page * bisect_left(pages, window, key=lambda number: self.counts_for(number * self.page).window)

    def _rows(self, buffer: _Buffer, counts: TokenCounts) -> int:
        # Whatever the engine adds to the tokens, a page of padding for one, is there for any number of them.
        return buffer.memory.rows - (getattr(self.top, buffer.part) - getattr(counts, buffer.part)) // buffer.unit

    # --- Memory --------------------------------------------------------------------------------------------------

    def map(self, counts: TokenCounts) -> None:
        """Have memory behind so many tokens, in every buffer or in none more than before.

        :raises OutOfMemory: there is not enough; nothing has changed.
        """
        try:
            for each in self._buffers:
                each.memory.map_rows(self._rows(each, counts))
        except Exception:
            self.unmap_from(self.counts)
            raise
        self.counts = counts
        self._tell_usage()

    def unmap_from(self, counts: TokenCounts) -> int:
        """Give back the memory behind which none of so many tokens lies. Nobody may hold a slot of it.

        :returns: bytes given back.
        """
        self.counts = counts  # also if the driver fails: the slots are taken out
        for each in self._tables:
            _forget_slots(each)
        _wait_for_device()  # what still runs may read it
        given = sum(each.memory.unmap_from(self._rows(each, counts)) for each in self._buffers)
        self._tell_usage()
        return given

    def _tell_usage(self) -> None:
        """The engine shows what a pool takes as an attribute, in GiB: as one of so many tokens would."""
        ours = {each.memory.address: each.memory.bytes_of(self._rows(each, self.counts)) for each in self._buffers}
        for pool in self._pools:
            if hasattr(pool, "mem_usage"):
                mine = {_address(tensor) for tensor in _tensors_of(pool)} & set(ours)
                pool.mem_usage = sum(ours[each] for each in mine) / GIB

    # --- Making them ---------------------------------------------------------------------------------------------

    def build(self, build: Callable[[], Any], parts_of: Callable[[Any], tuple[Any, Any, Any]], device: str) -> Any:
        """Have the engine build pools for ``top``, and keep their buffers.

        :param build: the engine's; called once.
        :param parts_of: gives the KV cache, the request table and the allocator of what it returns.
        :raises Unknown: they are not known. Their buffers have been given back.
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
            for each in self._buffers[before:]:
                each.memory.release()
            del self._buffers[before:]
            raise
        self._pools += _pools_in(pool)
        if not any(table is each for each in self._tables):  # a draft model's is its target's
            self._tables.append(table)
        self._tell_usage()
        return built

    def _check(self, pool: Any, table: Any, others: list[Any], made: int) -> None:
        """:raises Unknown: a part of the KV cache is of a kind that is not known, or as large as it and not ours."""
        parts = _pools_in(pool)
        for part in parts:
            if type(part).__name__ not in KNOWN_POOLS:
                raise Unknown(f"KV caches with a {type(part).__name__} are not known")
        if not made:
            raise Unknown(f"a {type(pool).__name__} of this release makes its buffers in a way that is not known")
        ours = {each.memory.address for each in self._buffers}
        fixed = {_address(each) for owner in (table, getattr(table, "mamba_pool", None)) for each in _tensors_of(owner)}
        if fixed & ours:
            raise Unknown(f"a {type(table).__name__} has about as many rows as the KV cache")
        least = min(filter(None, self.top)) // self.page
        made_here = (reference() for reference in others)
        held = (tensor for part in parts for tensor in _tensors_of(part))
        for tensor in (*made_here, *held):
            if tensor is None or tensor.dim() < 2 or tensor.numel() < least or tensor.device.type == "meta":
                continue
            if tensor.device.type == self._memory.device().type and _address(tensor) not in ours | fixed:
                shape = "x".join(map(str, tensor.shape))
                raise Unknown(f"a tensor of {shape} in a {type(pool).__name__} is not known")

    def make_buffer(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """:returns: a tensor over addresses, or ``None`` where no dimension counts tokens or pages."""
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
    """Have what makes pools take the tokens of ``top`` for those of ``first``.

    :param maker: the engine's; up to 0.5.15 a model runner, which has the numbers as attributes.
    :param arguments: of its function, which has them from 0.5.16 on.
    :returns: the arguments to call it with.
    :raises Unknown: it has other numbers, as a draft model may have.
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
        names = [each.name for each in fields(sizes)] if is_dataclass(sizes) else sizes.__struct_fields__
        told = {name: getattr(sizes, name) for name in names} | wanted
        yield {**arguments, "sizes": type(sizes)(**told)}
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
        """Makes the engine's KV buffers over addresses. ``others``: what it has made besides, on the same device."""

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
            # Zeros alone: memory that is mapped is zero, and nobody may write into what is not.
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
        size = [each for each in args if isinstance(each, int)]
    return tuple(int(each) for each in size)


def _pools_in(pool: Any) -> list[Any]:
    """A KV cache and those that it consists of; a pool of states (``MambaPool``) goes with requests, and is none."""
    found: list[Any] = []
    queue = [pool]
    while queue:
        each = queue.pop()
        if each is None or any(each is one for one in found):
            continue
        found.append(each)
        for value in vars(each).values():
            if "KVPool" in type(value).__name__ and hasattr(value, "__dict__"):
                queue.append(value)
    return found


def _tensors_of(owner: Any) -> Iterator[Any]:
    """The tensors among the attributes of an object, in lists and dictionaries, too."""
    import torch

    queue = list(vars(owner).values()) if hasattr(owner, "__dict__") else []
    while queue:
        each = queue.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            queue += each
        elif isinstance(each, dict):
            queue += each.values()
        elif is_dataclass(each) and not isinstance(each, type):
            queue += vars(each).values() if hasattr(each, "__dict__") else ()


def _forget_slots(table: Any) -> None:
    """Have a request table's free rows name no slot that may have no memory.

    A captured decode reads a slot for each row that it is padded with. Up to 0.5.12.post1 that is one of the request
    which was there before.
    """
    import torch

    rows = table.req_to_token
    free = torch.tensor([0, *map(int, table.free_slots)], dtype=torch.int64)  # the first is nobody's
    rows[free.to(rows.device)] = 0


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the engine's lines about pools, which would name the tokens that there are addresses for."""
    logger = logging.getLogger("sglang.srt.mem_cache")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
