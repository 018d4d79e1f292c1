"""What the engine keeps for images: its own allowance, as images are not rehearsed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.memory.kv_sizing.decide import is_on
from sglang_moe_patches.memory.kv_sizing.facts import GIB

GRAPHS = "SGLANG_VIT_ENABLE_CUDA_GRAPH"
"""Has graphs of the vision model captured while serving, one for each size of image."""
RULE = "sglang.srt.arg_groups.memory_hook"
SIZING = "sglang.srt.mem_cache.kv_cache_configurator"


class NothingKept(Exception):
    """The message says why."""


def allowance(runner: Any, arguments: Mapping[str, Any], fraction: float, before_gib: float) -> int:
    """Bytes that the rule keeps for them, and those of the cache of what the vision model made of them.

    :param fraction: by the rule, with the allowance.
    :raises NothingKept: what the rule keeps is not all that they take, or nothing.
    """
    if is_on(GRAPHS, os.environ):
        raise NothingKept(f"images are not rehearsed yet, nor what {GRAPHS} captures of them")
    share = factor(runner.model_config)
    if not 0 < share < 1:
        raise NothingKept("images are not rehearsed yet, and the rule keeps nothing for them")
    return int(((fraction / share - fraction) * before_gib + cache_gib(arguments)) * GIB)


def factor(model_config: Any) -> float:
    """By which the rule makes the fraction smaller for a model that takes images; 1: it does not."""
    if engine.has_module(RULE):
        return float(engine.module(RULE).adjust_mem_fraction_for_vlm(1.0, model_config, False, None))
    told = SimpleNamespace(mem_fraction_static=1.0)
    engine.module("sglang.srt.server_args").ServerArgs.adjust_mem_fraction_for_vlm(told, model_config)
    return told.mem_fraction_static


def cache_gib(arguments: Mapping[str, Any]) -> float:
    """What fills up with images and stays: the embeddings, and from 0.5.2x on what carries images to the scheduler.

    Later releases take it from the KV cache at every start, so that a rehearsal finds it free.
    """
    reserved = getattr(engine.module(SIZING), "mm_runtime_reservation_gb", None) if engine.has_module(SIZING) else None
    if reserved is not None:
        return float(reserved(is_multimodal=True, mm_feature_transport=arguments.get("mm_feature_transport")))
    from sglang.srt.environ import envs

    return envs.SGLANG_VLM_CACHE_SIZE_MB.get() / 1024
