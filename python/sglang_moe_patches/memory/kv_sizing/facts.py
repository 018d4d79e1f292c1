"""What the engine says of a batch, and of a model runner's pools: in the process that has them."""

from __future__ import annotations

from typing import Any

from sglang_moe_patches.memory.kv_sizing.phases import MAMBA, Batch, ServerFacts

GIB = 1 << 30
WINDOWS = "sliding-window"


def batch_facts(batch: Any) -> Batch:
    """What the engine's ``ForwardBatch`` says of itself."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    prefixes = _numbers(getattr(batch, "extend_prefix_lens_cpu", None))
    gathered = _numbers(getattr(batch, "global_num_tokens_cpu", None))
    return Batch(
        mode=batch.forward_mode.name,
        tokens=0 if batch.input_ids is None else int(batch.input_ids.shape[0]),
        requests=int(batch.batch_size),
        prefix=sum(prefixes),
        longest_prefix=max(prefixes, default=0),
        longest=0 if lengths is None or not len(lengths) else int(lengths.max()),
        all_ranks=sum(gathered),
    )


def _numbers(values: Any) -> list[int]:
    return [] if values is None else [int(value) for value in values]


def server_facts(runner: Any) -> ServerFacts:
    """What a model runner consists of, as far as this release tells."""
    pool, table = pools(runner)
    config = runner.model_config
    rows = getattr(table, "req_to_token", None)
    # By the allocator: the pool's own number counts addresses, with and without memory.
    window_tokens = int(getattr(getattr(runner, "token_to_kv_pool_allocator", None), "size_swa", 0) or 0)
    return ServerFacts(
        fixed_bytes=_table_bytes(rows) + pool_bytes(getattr(table, "mamba_pool", None)),
        page=int(getattr(runner, "page_size", None) or getattr(pool, "page_size", 1) or 1),
        vocabulary=int(config.vocab_size),
        hybrid=hybrid(pool, table),
        window=int(getattr(runner, "sliding_window_size", 0) or 0) if window_tokens else 0,
        window_tokens=window_tokens,
        captured=_captured(runner),
    )


def _table_bytes(rows: Any) -> int:
    return 0 if rows is None else int(rows.numel() * rows.element_size())


def _captured(runner: Any) -> int | None:
    graphs = getattr(runner, "decode_cuda_graph_runner", None) or getattr(runner, "graph_runner", None)
    largest = getattr(graphs, "max_bs", None)
    return None if largest is None else int(largest)


def pools(runner: Any) -> tuple[Any, Any]:
    """A model runner's KV cache and its request table; ``None`` for one that it has not."""
    return getattr(runner, "token_to_kv_pool", None), getattr(runner, "req_to_token_pool", None)


def pool_bytes(pool: Any) -> int:
    """Bytes of a KV cache, as the pool reports them."""
    return round(float(getattr(pool, "mem_usage", 0) or 0) * GIB)


def graph_bytes(runner: Any) -> int:
    """Bytes that the engine has seen go into graphs of decodes, and what they read: 0 where it does not say."""
    told = getattr(runner, "graph_memory_usage", None)  # from 0.5.14 on
    if told is None:
        return round(float(getattr(runner, "graph_mem_usage", 0) or 0) * GIB)
    return round(sum(float(told.get(phase, 0)) for phase in ("decode", "target_verify")) * GIB)


def hybrid(pool: Any, table: Any) -> str:
    """The kind of pool that is more than one KV cache, or "" for none."""
    kinds = [kind.__name__ for each in (pool, table) for kind in type(each).__mro__]
    if any("SWA" in kind for kind in kinds):
        return WINDOWS
    return MAMBA if any("Hybrid" in kind or "Mamba" in kind for kind in kinds) else ""
