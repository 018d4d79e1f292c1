"""Which servers measure what they need and size their KV cache by it: by arguments, environment, and images.

In the launcher a hook remembers whether ``--mem-fraction-static`` was given, before the engine fills it in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Patcher, Skip, around
from sglang_moe_patches.core.variables import Variable
from sglang_moe_patches.memory.kv_sizing.phases import attention_ranks, speculates

ALWAYS = "always"


def _mode(text: str) -> str:
    if text == "given":
        raise ValueError("given is now called always")
    if text not in ("off", "auto", ALWAYS):
        raise ValueError(f"expected off, auto or always, got {text!r}")
    return "" if text == "off" else text


def _margin(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_MARGIN_MB:
        raise ValueError(f"expected a whole number of MB, at least {LEAST_MARGIN_MB}, got {text!r}")
    return int(text) * 1_000_000


LEAST_MARGIN_MB = 200
"""Below it a server could not take one more buffer of a library."""
KV_SIZING = Variable(
    "SGLANG_MOE_PATCHES_KV_SIZING",
    "auto: each start measures what forwards need and gives the rest to the KV cache; a given --mem-fraction-static is "
    "left alone. always: with a given one the KV cache begins, and is measured and grown all the same",
    _mode,
    "off",
)
KV_MARGIN = Variable(
    "SGLANG_MOE_PATCHES_KV_MARGIN_MB",
    "MB (10^6 bytes) kept free beside what was measured; with half of it left while serving, KV cache is given back",
    _margin,
    "2000",
)
"""Between two kinds of load the need of fourteen servers has differed by up to 1,180 MB, and once by 2 GB, on H100s
and H200s. ``docs/changes/kv-sizing.md`` states the default under *What it does*, and
``test_the_page_says_the_margin`` in ``test/unit/memory/kv_sizing/test_eligibility.py`` compares; ``make pages`` writes
the README's. ``hooks.py`` reads it in a server, ``lab/predict/engine_pools.py`` for ``doctor``, which says in three of
the recipes with what fraction the KV cache begins: run ``.venvs/RELEASE/bin/python benchmark whole/recipes --json
benchmark/results/recipes/RELEASE.json`` again for each file that is there (five minutes each). Figures say that they
are of 2,000 MB, and stay: in ``docs/benchmarks/serving.md``, in ``docs/benchmarks/earlier-measurements.md`` under *How
the first table was measured*, and among the measurements of ``docs/changes/kv-sizing.md``. Stand-ins follow the
default."""


_NOT_REHEARSED = "whose forwards are not rehearsed"
_MEMORY_CHANGES = "whose memory comes and goes"
_KEEPS_PROMPTS = "which would keep the prompts of a rehearsal"
_BY_SLOT = "which keeps something for every slot of the KV cache, as many as there are at first"
_SHARDS = "whose KV cache lies in pieces on several ranks"

REHEARSED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Speculative algorithms that a rehearsal exercises, by the engine's names."""

Reasons = Mapping[str, tuple[Callable[[Mapping[str, Any]], object], str]]
"""By flag: whether a server's resolved arguments have the feature, and the reason, worded to follow "of FLAG,"."""

# What a new flag must be looked at for: docs/development/new-argument.md.
INELIGIBLE: Reasons = {
    "--attn-cp-size": (lambda a: (a.get("attn_cp_size") or 1) > 1, _NOT_REHEARSED),
    "--speculative-algorithm": (
        lambda a: str(a.get("speculative_algorithm") or "").upper() not in ("", *REHEARSED_ALGORITHMS),
        _NOT_REHEARSED,
    ),
    "--speculative-adaptive": (lambda a: speculates(a) and a.get("speculative_adaptive"), _MEMORY_CHANGES),
    "--speculative-skip-dp-mlp-sync": (
        lambda a: speculates(a) and a.get("speculative_skip_dp_mlp_sync"),
        "whose ranks do not run in step",
    ),
    "--speculative-ngram-external-corpus-path": (
        lambda a: speculates(a) and a.get("speculative_ngram_external_corpus_path"),
        "whose corpus the flush after a rehearsal would drop",
    ),
    "--pp-size": (lambda a: speculates(a) and (a.get("pp_size") or 1) > 1, "whose stages do not all speculate"),
    "--disaggregation-mode": (lambda a: a.get("disaggregation_mode") not in (None, "null"), _NOT_REHEARSED),
    "--enable-eplb": (lambda a: a.get("enable_eplb"), "whose rebalance is not rehearsed yet"),
    "--moe-a2a-backend": (
        lambda a: a.get("moe_a2a_backend") not in (None, "none"),
        "whose buffers may hold fewer requests than are admitted",
    ),
    "--enable-dp-attention-local-control-broadcast": (
        lambda a: attention_ranks(a) > 1 and a.get("enable_dp_attention_local_control_broadcast"),
        "with which other ranks do not receive rank 0's requests",
    ),
    "--moe-dense-tp-size": (
        lambda a: attention_ranks(a) > 1 and a.get("moe_dense_tp_size") and a.get("enable_dp_lm_head"),
        "with which ranks do not exchange batch information",
    ),
    "--is-embedding": (lambda a: a.get("is_embedding"), _NOT_REHEARSED),
    "--encoder-only": (lambda a: a.get("encoder_only"), _NOT_REHEARSED),
    "--language-only": (lambda a: a.get("language_only"), _NOT_REHEARSED),
    "--dllm-algorithm": (lambda a: a.get("dllm_algorithm"), _NOT_REHEARSED),
    "--enable-pdmux": (lambda a: a.get("enable_pdmux"), _NOT_REHEARSED),
    "--elastic-ep-backend": (lambda a: a.get("elastic_ep_backend"), _MEMORY_CHANGES),
    "--enable-lora": (lambda a: a.get("enable_lora") or a.get("lora_paths"), _MEMORY_CHANGES),
    "--enable-memory-saver": (lambda a: a.get("enable_memory_saver"), _MEMORY_CHANGES),
    "--cpu-offload-gb": (lambda a: a.get("cpu_offload_gb"), _MEMORY_CHANGES),
    "--enable-unified-memory": (lambda a: a.get("enable_unified_memory"), "whose pools take from one another"),
    "--keep-mm-feature-on-device": (lambda a: a.get("keep_mm_feature_on_device"), _MEMORY_CHANGES),
    "--offload-group-size": (lambda a: (a.get("offload_group_size") or 0) > 0, _MEMORY_CHANGES),
    "--enable-return-hidden-states": (
        lambda a: a.get("enable_return_hidden_states"),
        "with which a request captures all graphs again",
    ),
    "--enable-priority-scheduling": (
        lambda a: (
            a.get("enable_priority_scheduling")
            and not a.get("disable_priority_preemption")
            and a.get("max_running_requests") is None
        ),
        "with which more requests may run at once than were rehearsed; --max-running-requests says how many",
    ),
    "--use-ray": (
        lambda a: a.get("use_ray"),
        "whose launcher asks for the number of KV tokens before the rehearsal",
    ),
    "--enable-hisparse": (lambda a: a.get("enable_hisparse"), _NOT_REHEARSED),
    "--enable-hierarchical-cache": (lambda a: a.get("enable_hierarchical_cache"), _KEEPS_PROMPTS),
    "--enable-lmcache": (lambda a: a.get("enable_lmcache"), _KEEPS_PROMPTS),
    "--enable-flexkv": (lambda a: a.get("enable_flexkv"), _KEEPS_PROMPTS),
    "--radix-cache-backend": (lambda a: a.get("radix_cache_backend") not in (None, "", "auto"), _KEEPS_PROMPTS),
    "--enable-unified-cache-external-linker": (lambda a: a.get("enable_unified_cache_external_linker"), _KEEPS_PROMPTS),
    "--kv-canary": (lambda a: a.get("kv_canary") not in (None, "", "none"), _BY_SLOT),
    "--enable-return-routed-experts": (lambda a: a.get("enable_return_routed_experts"), _BY_SLOT),
    "--enable-return-indexer-topk": (lambda a: a.get("enable_return_indexer_topk"), _BY_SLOT),
    "--prefill-only-disable-kv-cache": (lambda a: a.get("prefill_only_disable_kv_cache"), "which has no KV cache"),
    "--dcp-size": (lambda a: (a.get("dcp_size") or 1) > 1, _SHARDS),
    "--enable-kv-cache-sharding": (lambda a: a.get("enable_kv_cache_sharding"), _SHARDS),
    "--enable-dsa-cache-layer-split": (lambda a: a.get("enable_dsa_cache_layer_split"), _SHARDS),
    "--enable-page-major-kv-layout": (lambda a: a.get("enable_page_major_kv_layout"), "whose layout is not known"),
    "--enable-pd-role-switch": (lambda a: a.get("enable_pd_role_switch"), "which registers the KV cache's memory"),
}
ENGINE_SWITCHES = {
    "SGLANG_RUST_SERVER": "it has no inbox of the kind that a rehearsal needs",
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "another allocator makes the KV cache, and registers its memory",
}
"""Environment variables of the engine's, each with why a server that has it on is not sized."""
SKIP_ALL_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
"""With it ranks do not exchange batch information, which matters where each runs requests of its own."""


def arguments_of(server_args: Any) -> dict[str, Any]:
    """A server's arguments, as resolved."""
    return dict(vars(engine.resolve_arguments(server_args)))


def skip_reason(asked: object, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Why the engine's rule sizes a server; ``None``: it measures and sizes itself, if its pools are known.

    :param asked: the value of ``SGLANG_MOE_PATCHES_KV_SIZING``.
    :returns: the reason, worded to follow "because".
    """
    if not asked:
        return f"{KV_SIZING.name} is off; auto turns it on"
    if str(arguments.get("device")) != "cuda":
        return f"--device is {arguments.get('device')}"
    for name, (has, reason) in INELIGIBLE.items():
        if has(arguments):
            return f"of {name}, {reason}"
    for name, why in ENGINE_SWITCHES.items():
        if is_on(name, environ):
            return f"{name} is set: {why}"
    if attention_ranks(arguments) > 1 and is_on(SKIP_ALL_GATHER, environ):
        return f"{SKIP_ALL_GATHER} is set"
    return None


def given_reason(asked: object) -> str:
    """Why a given ``--mem-fraction-static`` is left alone, worded to follow "because"; "": a KV cache begins with it.

    :param asked: the value of ``SGLANG_MOE_PATCHES_KV_SIZING``.
    """
    return "" if asked == ALWAYS else f"it was given; {KV_SIZING.name}={ALWAYS} measures all the same"


def is_on(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a boolean environment variable of the engine is on."""
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "t", "on")


def skip(server_args: Any) -> Skip | None:
    """:func:`skip_reason` of a server's own arguments, in this process's environment."""
    asked = KV_SIZING.read()
    reason = skip_reason(asked, arguments_of(server_args) if asked else {}, os.environ)
    return Skip(reason, can_be_enabled=not asked) if reason else None


# --- Whether the fraction was given ----------------------------------------------------------------------------------

MARK = "_moe_patches_fraction_by_rule"
"""Attribute of a ``ServerArgs`` that came without a fraction. It goes with it to the schedulers, which take it off."""


def hook_server_args(module: ModuleType, patcher: Patcher) -> None:
    """Have ``ServerArgs`` remember whether ``--mem-fraction-static`` was given, where the engine does not by itself."""
    server_args = module.ServerArgs
    if not KV_SIZING.read(os.environ) or hasattr(server_args, "resolve_once"):
        return
    patcher.wrap(server_args, "__post_init__", around(_mark))


def _mark(original: Callable[..., None], server_args: Any, *args: Any, **kwargs: Any) -> None:
    by_rule = server_args.mem_fraction_static is None
    original(server_args, *args, **kwargs)
    # Schedulers that size nothing would show it among their arguments.
    if by_rule and skip(server_args) is None:
        setattr(server_args, MARK, True)


def given_by_the_user(server_args: Any) -> bool:
    """Whether ``--mem-fraction-static`` was given.

    Arguments that arrive resolved, as from ``Engine(server_args=...)``, count as given.
    """
    raw = getattr(server_args, "_raw_input", None)
    if isinstance(raw, dict):
        return raw.get("mem_fraction_static") is not None
    return not getattr(server_args, MARK, False)


# --- What the engine keeps for images, which are not rehearsed -------------------------------------------------------

IMAGE_GRAPHS = "SGLANG_VIT_ENABLE_CUDA_GRAPH"
"""Has graphs of the vision model captured while serving, one for each size of image."""
IMAGE_RULE = "sglang.srt.arg_groups.memory_hook"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"


class NoAllowance(Exception):
    """The message says why."""


def image_allowance_gib(runner: Any, arguments: Mapping[str, Any], fraction: float, before_gib: float) -> float:
    """What the rule keeps for them, and the cache of what the vision model made of them, in GiB.

    :param fraction: by the rule, with the allowance.
    :raises NoAllowance: what the rule keeps is not all that they take, or nothing.
    """
    if is_on(IMAGE_GRAPHS, os.environ):
        raise NoAllowance(f"images are not rehearsed yet, nor what {IMAGE_GRAPHS} captures of them")
    share = image_factor(runner.model_config)
    if not 0 < share < 1:
        raise NoAllowance("images are not rehearsed yet, and the rule keeps nothing for them")
    return (fraction / share - fraction) * before_gib + image_cache_gib(arguments)


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
