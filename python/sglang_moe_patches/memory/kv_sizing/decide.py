"""Which servers size their KV cache by a record: pure functions of what a server is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.machine import cache_folder
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.core.variables import OWN, Variable
from sglang_moe_patches.memory.kv_sizing.script import attention_ranks

FILE = "kv-records.json"


GIVEN = "given"


def _mode(text: str) -> str:
    if text == "now":
        raise ValueError("now is not there yet; expected off, auto or given")
    if text not in ("off", "auto", GIVEN):
        raise ValueError(f"expected off, auto or given, got {text!r}")
    return "" if text == "off" else text


KV_SIZING = Variable(
    "SGLANG_MOE_PATCHES_KV_SIZING",
    "auto: a server's first start measures what it needs, later ones give the rest to the KV cache; given: also "
    "beside a --mem-fraction-static, where the engine's own is too low to start",
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


_NOT_DRIVEN = "whose phases are not driven yet"
_COMES_AND_GOES = "whose memory comes and goes"

Reasons = Mapping[str, tuple[Callable[[Mapping[str, Any]], object], str]]
WATCHED: Reasons = {
    "--attn-cp-size": (lambda a: (a.get("attn_cp_size") or 1) > 1, _NOT_DRIVEN),
    "--speculative-algorithm": (lambda a: a.get("speculative_algorithm"), _NOT_DRIVEN),
    "--disaggregation-mode": (lambda a: a.get("disaggregation_mode") not in (None, "null"), _NOT_DRIVEN),
    "--enable-eplb": (lambda a: a.get("enable_eplb"), "whose rebalance is not driven yet"),
    "--moe-a2a-backend": (
        lambda a: a.get("moe_a2a_backend") not in (None, "none"),
        "whose buffers may hold fewer requests than are admitted",
    ),
}
"""Servers that stay with the engine's rule, and whose free memory is recorded while they serve: how one is known by its
resolved arguments, and what stands against it."""
NEVER: Reasons = {
    "--enable-dp-attention-local-control-broadcast": (
        lambda a: attention_ranks(a) > 1 and a.get("enable_dp_attention_local_control_broadcast"),
        "whose ranks do not hear the first",
    ),
    "--moe-dense-tp-size": (
        lambda a: attention_ranks(a) > 1 and a.get("moe_dense_tp_size") and a.get("enable_dp_lm_head"),
        "whose ranks do not say what runs on all of them",
    ),
    "--is-embedding": (lambda a: a.get("is_embedding"), _NOT_DRIVEN),
    "--encoder-only": (lambda a: a.get("encoder_only"), _NOT_DRIVEN),
    "--language-only": (lambda a: a.get("language_only"), _NOT_DRIVEN),
    "--dllm-algorithm": (lambda a: a.get("dllm_algorithm"), _NOT_DRIVEN),
    "--enable-pdmux": (lambda a: a.get("enable_pdmux"), _NOT_DRIVEN),
    "--elastic-ep-backend": (lambda a: a.get("elastic_ep_backend"), _COMES_AND_GOES),
    "--enable-lora": (lambda a: a.get("enable_lora") or a.get("lora_paths"), _COMES_AND_GOES),
    "--enable-memory-saver": (lambda a: a.get("enable_memory_saver"), _COMES_AND_GOES),
    "--cpu-offload-gb": (lambda a: a.get("cpu_offload_gb"), _COMES_AND_GOES),
    "--enable-unified-memory": (lambda a: a.get("enable_unified_memory"), "whose pools take from one another"),
    "--keep-mm-feature-on-device": (lambda a: a.get("keep_mm_feature_on_device"), _COMES_AND_GOES),
    "--enable-hierarchical-cache": (lambda a: a.get("enable_hierarchical_cache"), "which keeps what a flush drops"),
}
"""Servers that stay with the engine's rule, unwatched."""
IN_THE_ENGINE = ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_RUST_SERVER")
"""Switches of the engine's: it sizes after its graphs by itself, or has no inbox of this kind."""
TELLS_NOTHING = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
"""A switch of the engine's: ranks do not say what they run, which counts where each runs requests of its own."""


def arguments_of(server_args: Any) -> dict[str, Any]:
    """A server's arguments, as resolved."""
    return dict(vars(engine.resolved(server_args)))


def stands_back(asked: object, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Why a server stays with the engine's rule and has no record; ``None``: it has one.

    :param asked: ``SGLANG_MOE_PATCHES_KV_SIZING``.
    """
    if not asked:
        return f"{KV_SIZING.name}=auto turns it on"
    if str(arguments.get("device")) != "cuda":
        return f"--device is {arguments.get('device')}"
    if reason := _first_of(NEVER, arguments):
        return reason
    for name in (*IN_THE_ENGINE, *([TELLS_NOTHING] if attention_ranks(arguments) > 1 else [])):
        if is_on(name, environ):
            return f"{name} is set"
    return None


def only_watched(arguments: Mapping[str, Any]) -> str | None:
    """Why a server that has a record stays with the engine's rule all the same; ``None``: the record sizes it."""
    return _first_of(WATCHED, arguments)


def _first_of(reasons: Reasons, arguments: Mapping[str, Any]) -> str | None:
    return next((f"of {name}, {reason}" for name, (has, reason) in reasons.items() if has(arguments)), None)


def is_on(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a switch of the engine's is."""
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "t", "on")


# --- What a fingerprint is made of -----------------------------------------------------------------------------------

VOLATILE = (
    # Where a server listens and what it says.
    *("host", "port", "grpc_port", "nccl_port", "dist_init_addr", "api_key", "admin_api_key", "served_model_name"),
    *("log_level", "log_level_http", "log_requests", "log_requests_level", "log_requests_target", "crash_dump_folder"),
    *("show_time_cost", "enable_metrics", "weight_version", "fastapi_root_path", "random_seed", "skip_server_warmup"),
    *("decode_log_interval", "warmups", "watchdog_timeout", "soft_watchdog_timeout", "dist_timeout", "sleep_on_idle"),
    *("base_gpu_id", "gpu_id_step", "node_rank", "stream_interval"),
    *("tool_call_parser", "reasoning_parser", "chat_template"),
    # What is found out.
    *("mem_fraction_static", "model_config"),
)
"""Arguments that nothing depends on which is measured here."""
SECRET = ("key", "token", "password", "secret", "ssl_", "cert")
"""Parts of names of arguments that no file is to have."""


def defaults_of(server_args: Any) -> dict[str, Any]:
    """What this release's arguments are where nobody gives them, as far as they are plain values."""
    made = type(server_args)
    if hasattr(made, "__struct_defaults__"):  # from 0.5.2x on
        known = made.__struct_defaults__
        return dict(zip(made.__struct_fields__[-len(known) :], known, strict=True)) if known else {}
    return {name: vars(made)[name] for name in getattr(made, "__dataclass_fields__", {}) if name in vars(made)}


def lasting(arguments: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """What of a server's arguments belongs to its fingerprint: plain values that are on.

    :param defaults: values that need not be said: the release, which belongs to the fingerprint, has them.
    """
    return {
        name: value
        for name, value in sorted(arguments.items())
        if name not in VOLATILE
        and not name.startswith("_")
        and not _secret(name)
        and isinstance(value, int | float | str | bool)
        and value not in (False, "")
        and value != defaults.get(name)
    }


def _secret(name: str) -> bool:
    return any(part in name for part in SECRET) and not name.endswith(("tokens", "token_nums"))


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that belong to a fingerprint: the engine's, the allocator's and the changes'."""
    # Which changes there are is known by what became of each.
    ours = {KV_SIZING.name, KV_RECORD.name, SELECT_VARIABLE, *(variable.name for _, variable in OWN)}

    def counts(name: str) -> bool:
        if name in ours:
            return False
        return name in ALLOCATOR or (name.startswith("SGLANG_") and name not in PROCESS and not _secret(name.lower()))

    return {name: value for name, value in sorted(environ.items()) if value and counts(name)}


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PROCESS = (
    *("SGLANG_RUN_ID", "SGLANG_PLUGINS", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "SGLANG_IS_FIRST_RANK_ON_NODE"),
    *("SGLANG_DP_RANK", "SGLANG_TP_RANK", "SGLANG_HOST_IP", "SGLANG_LOCAL_IP_NIC", "SGLANG_PORT", "SGLANG_GRPC_PORT"),
    *("SGLANG_TCP_STORE_PORT", "SGLANG_BACKUP_PORT_BASE"),
)
"""Variables of the engine's that are another process's, another machine's or another start's."""
