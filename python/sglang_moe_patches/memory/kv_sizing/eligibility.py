"""Which servers may size their KV cache by a record: pure functions of a server's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.machine import cache_folder
from sglang_moe_patches.core.variables import Variable
from sglang_moe_patches.memory.kv_sizing.phases import attention_ranks, speculates

FILE = "kv-records.json"


ALWAYS = "always"


def _mode(text: str) -> str:
    if text == "given":
        raise ValueError("given is now called always")
    if text not in ("off", "auto", ALWAYS):
        raise ValueError(f"expected off, auto or always, got {text!r}")
    return "" if text == "off" else text


KV_SIZING = Variable(
    "SGLANG_MOE_PATCHES_KV_SIZING",
    "auto: a server's first start measures what it needs, later ones give the rest to the KV cache; a given "
    "--mem-fraction-static is used unchanged, and the log says what it leaves. always: the record decides all the same",
    _mode,
    "off",
)
KV_RECORD = Variable(
    "SGLANG_MOE_PATCHES_KV_RECORD", f"the file of what was measured; unset: `{FILE}` in the user's cache", str
)


def record_path(environ: Mapping[str, str]) -> Path:
    """The file of records."""
    given = KV_RECORD.read(environ)
    return Path(given).expanduser() if given else cache_folder(environ) / FILE


_NOT_REHEARSED = "whose forwards are not rehearsed"
_MEMORY_CHANGES = "whose memory comes and goes"
_KEEPS_PROMPTS = "which would keep the prompts of a rehearsal"

REHEARSED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Speculative algorithms that a rehearsal exercises, by the engine's names."""

Reasons = Mapping[str, tuple[Callable[[Mapping[str, Any]], object], str]]
"""By flag: whether a server's resolved arguments have the feature, and the reason, worded to follow "of FLAG,"."""

# Which table a flag belongs to. INELIGIBLE is the safe one: the change is skipped and hooks nothing. MONITOR_ONLY is
# for a feature that somebody has looked at: the server is never rehearsed, but its lowest free memory while it serves
# tells what the next start of the same server will leave. What else a new flag needs: docs/development/new-argument.md.
#: Servers that keep their fraction. Their free memory is recorded while they serve.
MONITOR_ONLY: Reasons = {
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
}
#: Servers that keep their fraction. Nothing is recorded.
INELIGIBLE: Reasons = {
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
    "--enable-hisparse": (lambda a: a.get("enable_hisparse"), _NOT_REHEARSED),
    "--enable-hierarchical-cache": (lambda a: a.get("enable_hierarchical_cache"), _KEEPS_PROMPTS),
    "--enable-lmcache": (lambda a: a.get("enable_lmcache"), _KEEPS_PROMPTS),
    "--enable-flexkv": (lambda a: a.get("enable_flexkv"), _KEEPS_PROMPTS),
    "--radix-cache-backend": (lambda a: a.get("radix_cache_backend") not in (None, "", "auto"), _KEEPS_PROMPTS),
    "--enable-unified-cache-external-linker": (lambda a: a.get("enable_unified_cache_external_linker"), _KEEPS_PROMPTS),
}
ENGINE_SWITCHES = ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_RUST_SERVER")
"""With the first the engine sizes its KV cache after graph capture; with the second it has no inbox of this kind."""
SKIP_ALL_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
"""With it ranks do not exchange batch information, which matters where each runs requests of its own."""


def arguments_of(server_args: Any) -> dict[str, Any]:
    """A server's arguments, as resolved."""
    return dict(vars(engine.resolved(server_args)))


def skip_reason(asked: object, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Why the engine's rule sizes a server and nothing is recorded of it; ``None``: a record is kept.

    :param asked: the value of ``SGLANG_MOE_PATCHES_KV_SIZING``.
    :returns: the reason, worded to follow "because".
    """
    if not asked:
        return f"{KV_SIZING.name} is off; auto turns it on"
    if str(arguments.get("device")) != "cuda":
        return f"--device is {arguments.get('device')}"
    if reason := _first_reason(INELIGIBLE, arguments):
        return reason
    for name in (*ENGINE_SWITCHES, *([SKIP_ALL_GATHER] if attention_ranks(arguments) > 1 else [])):
        if is_on(name, environ):
            return f"{name} is set"
    return None


def monitor_only_reason(arguments: Mapping[str, Any]) -> str | None:
    """Why the engine's rule sizes a server of which a record is kept; ``None``: the record may size it."""
    return _first_reason(MONITOR_ONLY, arguments)


def _first_reason(reasons: Reasons, arguments: Mapping[str, Any]) -> str | None:
    """The first reason that applies, worded to follow "because"."""
    return next((f"of {name}, {reason}" for name, (has, reason) in reasons.items() if has(arguments)), None)


def is_on(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a boolean environment variable of the engine is on."""
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "t", "on")
