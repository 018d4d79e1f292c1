"""The engine's own rule for the KV cache size: its fraction, its bytes per token, and its reserve for images.

The engine computes the size from ``--mem-fraction-static``, the *fraction*. A *maker* is the engine's object that makes
the KV cache. It is a ``ModelRunner``, or from 0.5.16 on a ``KVCacheConfigurator``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches.core import engine, gpu_memory
from sglang_moe_patches.memory.kv_sizing import sizing
from sglang_moe_patches.memory.kv_sizing.eligibility import arguments_of, is_on
from sglang_moe_patches.memory.kv_sizing.pools import GIB, Unknown
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts

IMAGE_GRAPHS = "SGLANG_VIT_ENABLE_CUDA_GRAPH"
"""Environment variable of the engine. If it is on, the engine captures graphs of the vision model while serving, one
for each size of image."""
IMAGE_RULE = "sglang.srt.arg_groups.memory_hook"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"


def get_configurator(maker: Any) -> Any:
    """Return the engine's object that computes the number of KV cache tokens from a number of bytes."""
    return engine.import_module("sglang.srt.model_executor.pool_configurator").create_memory_pool_configurator(maker)


def bytes_per_token(maker: Any) -> float:
    """Return the bytes that the engine allocates for one KV cache token. The engine is asked how many tokens fit into
    64 GiB, because rounding to pages hardly matters for so many tokens."""
    enough = 64 * GIB
    return enough / int(get_configurator(maker).calculate_pool_sizes(enough, maker.page_size).max_total_num_tokens)


def find_rehearsal_fraction(maker: Any, launches: list[LaunchMemory], margin: int) -> float | None:
    """Return a larger ``--mem-fraction-static`` (*fraction*) for the rehearsal. With this fraction, the KV cache has
    room for two prefill chunks. If the model's context length is less than two chunks, or if there are no chunks, the
    KV cache has room for the context length.

    The rehearsal does not begin with an even larger KV cache, because CUDA graphs are captured in the memory that the
    fraction leaves free. The KV cache grows after the need was measured.

    :returns: ``None`` if the rehearsal uses the engine's own fraction. There are three reasons: the engine's own
        fraction is large enough, a larger fraction would leave too little memory for forward passes, or the model has
        states (such as Mamba's).
    """
    if getattr(maker, "mambaish_config", None):
        return None
    chunk = int(arguments_of(maker.server_args).get("chunked_prefill_size") or 0)
    context = int(maker.model_config.context_len)
    tokens = (min(context, 2 * chunk) if chunk > 0 else context) + 2 * int(maker.page_size)
    # The engine takes the caches for images out of the memory that the fraction leaves to the KV cache.
    has_images = bool(maker.model_config.is_multimodal)
    images_gib = reserved_by_configurator_gib(arguments_of(maker.server_args)) if has_images else None
    return sizing.find_larger_fraction(
        launches, int(tokens * bytes_per_token(maker) + (images_gib or 0.0) * GIB), margin
    )


def counts_of(config: Any) -> TokenCounts:
    """Return the token counts of the engine's ``MemoryPoolConfig``."""
    return TokenCounts(
        int(config.max_total_num_tokens),
        int(config.full_max_total_num_tokens or 0),
        int(config.swa_max_total_num_tokens or 0),
    )


def measure_launch_memory(maker: Any, arguments: Any, before_gib: float) -> LaunchMemory:
    """Return this rank's free memory before its KV cache is made, the engine's ``--mem-fraction-static``, and the
    memory that images may take.

    If the server cannot be measured, the result has only ``failure``, the reason.

    :param before_gib: free memory before the weights were loaded, in GiB.
    """
    import torch

    if getattr(maker, "post_capture_kv_active", False):
        return LaunchMemory("the engine itself sizes its KV cache after it captured its CUDA graphs")
    if torch.cuda.is_available():
        if getattr(torch.cuda.get_device_properties(maker.gpu_id), "is_integrated", False):
            return LaunchMemory(
                "the GPU shares its memory with the host, and the host may need the memory that is free"
            )
        torch.cuda.empty_cache()
    fraction = fraction_in_force(maker)
    images = 0
    if getattr(maker, "is_multimodal", False) or maker.model_config.is_multimodal:
        try:
            images = int(image_allowance_gib(maker, arguments, fraction, before_gib) * GIB)
        except Unknown as error:
            return LaunchMemory(str(error))
    return LaunchMemory("", int(before_gib * GIB), gpu_memory.read(int(maker.gpu_id)).free, fraction, images)


def fraction_in_force(maker: Any) -> float:
    """Return the value of ``--mem-fraction-static`` that the engine uses. The user or the engine has chosen it."""
    if hasattr(maker, "mem_fraction_static"):
        return float(maker.mem_fraction_static)
    return float(engine.import_module("sglang.srt.runtime_context").get_schedule().mem_fraction_static)


@contextmanager
def use_fraction(maker: Any, fraction: float | None) -> Iterator[None]:
    """Context manager in which the engine sizes its KV cache by another ``--mem-fraction-static``. With ``None``, the
    engine uses its own value."""
    if fraction is None:
        yield
        return
    before = fraction_in_force(maker)

    def put(value: float) -> None:
        if hasattr(maker, "mem_fraction_static"):
            maker.mem_fraction_static = maker.server_args.mem_fraction_static = value
        else:
            context = engine.import_module("sglang.srt.runtime_context").get_context()
            context.override("sglang-moe-patches: kv-sizing", mem_fraction_static=value)

    put(fraction)
    try:
        yield
    finally:
        put(before)


# --- The reserve for images, which are not rehearsed --------------------------------------------------------------


def image_allowance_gib(runner: Any, arguments: Mapping[str, Any], fraction: float, before_gib: float) -> float:
    """Return the GiB that images may take. This is the memory that the engine's rule reserves for images, and the
    memory of the caches for images.

    :param fraction: ``--mem-fraction-static`` by the engine's rule. The rule has lowered this value to reserve memory
        for images.
    :param before_gib: free memory before the weights were loaded, in GiB.
    :raises Unknown: the rule reserves nothing for images, or the engine captures CUDA graphs for images.
    """
    if is_on(IMAGE_GRAPHS, os.environ):
        raise Unknown(f"{IMAGE_GRAPHS} is on: SGLang then captures graphs for images, which kv-sizing does not measure")
    share = image_factor(runner.model_config)
    if not 0 < share < 1:
        raise Unknown("kv-sizing does not measure images, and SGLang reserves no memory for them on this model")
    return (fraction / share - fraction) * before_gib + image_cache_gib(arguments)


def image_factor(model_config: Any) -> float:
    """Return the factor by which the engine's rule lowers ``--mem-fraction-static`` for a model with images; 1 if the
    rule does not lower it."""
    if engine.has_module(IMAGE_RULE):
        return float(engine.import_module(IMAGE_RULE).adjust_mem_fraction_for_vlm(1.0, model_config, False, None))
    arguments = SimpleNamespace(mem_fraction_static=1.0)
    engine.import_module("sglang.srt.server_args").ServerArgs.adjust_mem_fraction_for_vlm(arguments, model_config)
    return float(arguments.mem_fraction_static)


def image_cache_gib(arguments: Mapping[str, Any]) -> float:
    """Return the GiB of the engine's caches for images. These are the cache of image embeddings and, in newer releases,
    GPU buffers that carry image features to the scheduler.

    Newer releases, such as 0.5.23, leave this memory free at the start. The KV cache must not grow into it.
    """
    reserved = reserved_by_configurator_gib(arguments)
    if reserved is not None:
        return reserved
    from sglang.srt.environ import envs

    return envs.SGLANG_VLM_CACHE_SIZE_MB.get() / 1024


def reserved_by_configurator_gib(arguments: Mapping[str, Any]) -> float | None:
    """Return the GiB that the engine's rule leaves free for its image caches, on a model with images.

    :returns: ``None`` on releases whose rule leaves no memory free for these caches, such as 0.5.12.post1.
    """
    maker = engine.import_module(CONFIGURATOR) if engine.has_module(CONFIGURATOR) else None
    reserved = getattr(maker, "mm_runtime_reservation_gb", None)
    if reserved is None:
        return None
    return float(reserved(is_multimodal=True, mm_feature_transport=arguments.get("mm_feature_transport")))
