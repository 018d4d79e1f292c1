"""Let the engine make its KV buffers over reserved addresses, for more tokens than there is memory.

A *pool* is the engine's object with the tensors of a KV cache. The engine builds its pools for as many tokens as could
ever fit. While it does so, this module intercepts its calls of ``torch.empty`` and the like. If a dimension of a tensor
counts tokens or pages, this module makes the tensor over reserved addresses (:mod:`.address_space`). At first, memory
is mapped only for as many tokens as the engine's own rule allows.

If this module does not support a pool, or if another tensor grows with the number of tokens, the engine builds its
pools once more without this package.
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
"""Names of the engine's pool classes that this module supports. ``docs/changes/kv-sizing.md`` has the same list."""
KNOWN_TABLES = {"ReqToTokenPool", "HybridReqToTokenPool"}
"""Names of the engine's request table classes that this module supports. ``HybridReqToTokenPool`` also has the states
of Mamba layers, whose number does not depend on the number of tokens."""
FACTORIES = ("zeros", "empty", "ones", "full")
"""Names of the functions of ``torch`` that make a tensor of a given shape."""


class Unknown(Exception):
    """Raised if this module cannot make a KV cache that grows. The message is the reason, and can follow "because"."""


def unknown_pool_reason(pool: str, table: str) -> str:
    """Return the reason why a KV cache with these classes cannot grow; empty if the classes are supported. The text can
    follow "because"."""
    if pool not in KNOWN_POOLS:
        return f"kv-sizing does not support KV caches of the kind {pool}"
    return "" if table in KNOWN_TABLES else f"kv-sizing does not support request tables of the kind {table}"


def pools_of(runner: Any) -> tuple[Any, Any]:
    """Return a model runner's KV cache and its request table. A missing object is ``None``."""
    return getattr(runner, "token_to_kv_pool", None), getattr(runner, "req_to_token_pool", None)


def pool_bytes(pool: Any) -> int:
    """Return the bytes of a pool, as the pool itself reports them."""
    return round(float(getattr(pool, "mem_usage", 0) or 0) * GIB)


def hybrid_kind(pool: Any, table: Any) -> str:
    """Return the kind of a hybrid pool: sliding windows, or Mamba; empty if the pool is a single KV cache."""
    kinds = [kind.__name__ for owner in (pool, table) for kind in type(owner).__mro__]
    if any("SWA" in kind for kind in kinds):
        return WINDOWS
    return MAMBA if any("Hybrid" in kind or "Mamba" in kind for kind in kinds) else ""


@dataclass
class _Buffer:
    """Buffer of a pool: a tensor over reserved addresses.

    :param memory: the buffer's tensor over reserved addresses.
    :param part: name of the :class:`TokenCounts` field that has the number of tokens in this buffer.
    :param unit: number of tokens in one row: 1, or the tokens of a page.
    """

    memory: ElasticBuffer
    part: str
    unit: int


class ElasticPools:
    """KV buffers of a scheduler process. They belong to its model and to its draft models.

    :param first: token counts for which memory is mapped at first. They come from the engine's rule.
    :param top: largest token counts, for which addresses are reserved.
    :param page: number of tokens in a page.
    """

    def __init__(self, memory: CudaMemory, first: TokenCounts, top: TokenCounts, page: int) -> None:
        self.first, self.top, self.page, self.counts = first, top, page, first
        self._memory = memory
        self._buffers: list[_Buffer] = []
        self._pools: list[Any] = []
        self._tables: list[Any] = []

    # --- Sizes ---------------------------------------------------------------------------------------------------

    def counts_for(self, tokens: int) -> TokenCounts:
        """Return the token counts of all kinds of layers for a KV cache size. Between the first and the largest size of
        the KV cache, the counts are interpolated. Below the first size, they are proportional to the size.

        For example, let the first size be 100,000 tokens with 40,000 in the sliding-window layers, and the largest size
        be 200,000 with 60,000. Then 150,000 tokens have 50,000 in these layers, and 50,000 tokens have 20,000.

        :param tokens: KV cache size, which this method rounds down to whole pages.
        """
        tokens = tokens // self.page * self.page
        span = self.top.tokens - self.first.tokens
        share = (tokens - self.first.tokens) / span if span and tokens >= self.first.tokens else None

        def part(first: int, top: int) -> int:
            value = first * tokens / self.first.tokens if share is None else first + share * (top - first)
            return min(top, int(value)) // self.page * self.page

        return TokenCounts(tokens, *map(part, self.first[1:], self.top[1:]))

    def backing_bytes(self, counts: TokenCounts) -> int:
        """Return the bytes of the memory that backs ``counts`` tokens in all buffers."""
        return sum(buffer.memory.backing_bytes(self._rows(buffer, counts)) for buffer in self._buffers)

    def tokens_within(self, budget: int) -> int:
        """Return the largest number of tokens, in whole pages, whose memory fits into ``budget`` bytes; 0 if a single
        page does not fit."""
        pages = range(1, self.top.tokens // self.page + 1)
        return self.page * bisect_right(
            pages, budget, key=lambda number: self.backing_bytes(self.counts_for(number * self.page))
        )

    def tokens_with_window(self, window: int) -> int:
        """Return the smallest KV cache size, in whole pages, with which the sliding-window layers have at least
        ``window`` tokens."""
        pages = range(self.top.tokens // self.page + 1)
        return self.page * bisect_left(pages, window, key=lambda number: self.counts_for(number * self.page).window)

    def _rows(self, buffer: _Buffer, counts: TokenCounts) -> int:
        # The engine makes more rows than tokens, such as a page of padding. The number of additional rows is constant.
        return buffer.memory.rows - (getattr(self.top, buffer.part) - getattr(counts, buffer.part)) // buffer.unit

    # --- Memory --------------------------------------------------------------------------------------------------

    def map(self, counts: TokenCounts) -> None:
        """Map memory for ``counts`` tokens in every buffer. If one buffer fails, no buffer keeps new memory.

        :raises OutOfMemory: there is not enough memory.
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
        """Unmap the memory of all slots after the first ``counts`` tokens. No request may use these slots at the call.

        :returns: freed bytes.
        """
        self.counts = counts  # set also if the driver fails, because these slots are already withdrawn
        for table in self._tables:
            _reset_free_rows(table)
        _wait_for_device()  # a kernel that still runs may read these slots
        freed = sum(buffer.memory.unmap_from(self._rows(buffer, counts)) for buffer in self._buffers)
        self._set_usage()
        return freed

    def _set_usage(self) -> None:
        """Update the size that the engine reports for each pool, in GiB. The new size counts only tokens that have
        memory."""
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

        :param build: function of the engine that makes the pools. It is called once.
        :param parts_of: function that returns three parts of the result of ``build``: the KV cache, the request table
            and the allocator.
        :param device: the device on which the engine makes its KV cache.
        :raises Unknown: this module does not support the pools. The buffers of these pools have been freed.
        """
        before, mode = len(self._buffers), _make_substitution(self, device)
        try:
            with _silence_pool_logs(), mode:
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
        """Check that the KV cache is supported, and that only its buffers grow with the number of tokens.

        :param others: weak references to all tensors without reserved addresses that the engine made while it built the
            pools.
        :param made: number of buffers over reserved addresses that the pools have.
        :raises Unknown: a part of the KV cache is not supported, or another tensor grows with the number of tokens.
        """
        parts = _pools_in(pool)
        for part in parts:
            if type(part).__name__ not in KNOWN_POOLS:
                raise Unknown(f"kv-sizing does not support KV caches with a {type(part).__name__}")
        if not made:
            raise Unknown(f"kv-sizing does not know how this release's {type(pool).__name__} makes its buffers")
        ours = {buffer.memory.address for buffer in self._buffers}
        owners = (table, getattr(table, "mamba_pool", None))
        fixed = {_address(tensor) for owner in owners for tensor in _tensors_of(owner)}
        if fixed & ours:
            raise Unknown(
                f"the request table ({type(table).__name__}) has about as many rows as the KV cache, so kv-sizing "
                "cannot tell them apart; set another --max-running-requests"
            )
        least = min(filter(None, self.top)) // self.page
        made_meanwhile = (reference() for reference in others)
        of_pools = (tensor for part in parts for tensor in _tensors_of(part))
        for tensor in (*made_meanwhile, *of_pools):
            if tensor is None or tensor.dim() < 2 or tensor.numel() < least or tensor.device.type == "meta":
                continue
            if tensor.device.type == self._memory.device().type and _address(tensor) not in ours | fixed:
                shape = "x".join(map(str, tensor.shape))
                raise Unknown(f"kv-sizing does not know the {shape} tensor in a {type(pool).__name__}")

    def make_buffer(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make a tensor over reserved addresses, and map memory for its first rows.

        :returns: the tensor; ``None`` if no dimension of ``shape`` counts tokens or pages.
        """
        for axis, size in enumerate(shape):
            for part, top in self.top._asdict().items():
                for unit in {1, self.page} if top else ():
                    if top // unit <= size <= top // unit + (2 * self.page if unit == 1 else 2):
                        buffer = _Buffer(ElasticBuffer(shape, dtype, axis, self._memory), part, unit)
                        self._buffers.append(buffer)
                        buffer.memory.map_rows(self._rows(buffer, self.counts))
                        return buffer.memory.tensor
        return None


@contextmanager
def substitute_counts(
    maker: Any, arguments: dict[str, Any], first: TokenCounts, top: TokenCounts
) -> Iterator[dict[str, Any]]:
    """Context manager that makes the engine build its pools for ``top`` tokens instead of ``first`` tokens.

    :param maker: the engine's object that makes pools. Up to 0.5.15 it is a model runner with the token counts as
        attributes.
    :param arguments: arguments of the engine's function that makes pools. From 0.5.16 on, they contain the token
        counts.
    :returns: the arguments with which to call this function.
    :raises Unknown: the engine has other token counts than ``first``. This can happen for a draft model.
    """
    sizes = arguments.get("sizes")
    owner = maker if sizes is None else sizes
    wanted, original_counts = {}, {}
    for name, part in COUNTS.items():
        original_counts[name] = getattr(owner, name, None)
        if original_counts[name] and getattr(top, part):
            if original_counts[name] != getattr(first, part):
                raise Unknown(
                    f"the draft model's KV cache has {original_counts[name]:,} tokens, which differs from the model's"
                )
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
            setattr(owner, name, original_counts[name])


def _make_substitution(pools: ElasticPools, device: str) -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    factories = {getattr(torch, name) for name in FACTORIES}

    class Substitution(TorchFunctionMode):
        """PyTorch function mode that makes the engine's KV buffers over reserved addresses.

        The attribute ``others`` has weak references to all other tensors that the engine makes on the same device.
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
            # Replace only ``torch.zeros``, because mapped memory is zero already. Other factory functions would write
            # to rows without memory.
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
    """Return a pool and the KV pools within it. A pool of states (``MambaPool``) is left out, because its size depends
    on the number of requests."""
    known_pools: list[Any] = []
    queue = [pool]
    while queue:
        part = queue.pop()
        if part is None or any(part is known for known in known_pools):
            continue
        known_pools.append(part)
        for value in vars(part).values():
            if "KVPool" in type(value).__name__ and hasattr(value, "__dict__"):
                queue.append(value)
    return known_pools


def _tensors_of(owner: Any) -> Iterator[Any]:
    """Yield the tensors among an object's attributes, including tensors in lists and dictionaries."""
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


def _reset_free_rows(table: Any) -> None:
    """Write slot 0, which always has memory, into all free rows of a request table.

    A captured decode also reads a slot for each padding row. Up to 0.5.12.post1, a padding row still contains the slots
    of an ended request. These slots may have lost their memory.
    """
    import torch

    rows = table.req_to_token
    free = torch.tensor([0, *map(int, table.free_slots)], dtype=torch.int64)  # no request uses row 0
    rows[free.to(rows.device)] = 0


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


@contextmanager
def _silence_pool_logs() -> Iterator[None]:
    """Silence the engine's log lines about the sizes of pools. The lines would report all tokens with addresses, and
    not only the tokens with memory."""
    logger = logging.getLogger("sglang.srt.mem_cache")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
