"""What the engine says of a batch, of a model runner's pools and of images: in the process that has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.memory.kv_sizing.eligibility import is_on
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
    graphs = getattr(runner, "decode_cuda_graph_runner", None) or getattr(runner, "graph_runner", None)
    captured = getattr(graphs, "max_bs", None)
    # By the allocator: the pool's own number counts addresses, with and without memory.
    window_tokens = int(getattr(getattr(runner, "token_to_kv_pool_allocator", None), "size_swa", 0) or 0)
    return ServerFacts(
        fixed_bytes=(0 if rows is None else rows.nbytes) + pool_bytes(getattr(table, "mamba_pool", None)),
        page=int(getattr(runner, "page_size", None) or getattr(pool, "page_size", 1) or 1),
        vocabulary=int(config.vocab_size),
        hybrid=hybrid(pool, table),
        window=int(getattr(runner, "sliding_window_size", 0) or 0) if window_tokens else 0,
        window_tokens=window_tokens,
        captured=None if captured is None else int(captured),
    )


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


# --- What the engine keeps for images, which are not rehearsed -------------------------------------------------------

IMAGE_GRAPHS = "SGLANG_VIT_ENABLE_CUDA_GRAPH"
"""Has graphs of the vision model captured while serving, one for each size of image."""
IMAGE_RULE = "sglang.srt.arg_groups.memory_hook"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"


class NoAllowance(Exception):
    """The message says why."""


def image_allowance(runner: Any, arguments: Mapping[str, Any], fraction: float, before_gib: float) -> int:
    """Bytes that the rule keeps for them, and those of the cache of what the vision model made of them.

    :param fraction: by the rule, with the allowance.
    :raises NoAllowance: what the rule keeps is not all that they take, or nothing.
    """
    if is_on(IMAGE_GRAPHS, os.environ):
        raise NoAllowance(f"images are not rehearsed yet, nor what {IMAGE_GRAPHS} captures of them")
    share = image_factor(runner.model_config)
    if not 0 < share < 1:
        raise NoAllowance("images are not rehearsed yet, and the rule keeps nothing for them")
    return int(((fraction / share - fraction) * before_gib + image_cache_gib(arguments)) * GIB)


def image_factor(model_config: Any) -> float:
    """By which the rule makes the fraction smaller for a model that takes images; 1: it does not."""
    if engine.has_module(IMAGE_RULE):
        return float(engine.module(IMAGE_RULE).adjust_mem_fraction_for_vlm(1.0, model_config, False, None))
    told = SimpleNamespace(mem_fraction_static=1.0)
    engine.module("sglang.srt.server_args").ServerArgs.adjust_mem_fraction_for_vlm(told, model_config)
    return told.mem_fraction_static


def image_cache_gib(arguments: Mapping[str, Any]) -> float:
    """What fills up with images and stays: the embeddings, and from 0.5.2x on what carries images to the scheduler.

    Later releases take it from the KV cache at every start, so that a rehearsal finds it free.
    """
    maker = engine.module(CONFIGURATOR) if engine.has_module(CONFIGURATOR) else None
    reserved = getattr(maker, "mm_runtime_reservation_gb", None)
    if reserved is not None:
        return float(reserved(is_multimodal=True, mm_feature_transport=arguments.get("mm_feature_transport")))
    from sglang.srt.environ import envs

    return envs.SGLANG_VLM_CACHE_SIZE_MB.get() / 1024
