"""What identifies a configuration: the arguments, variables and versions on which its memory need depends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from sglang_moe_patches.core.patch import ACTIVE, SELECT_VARIABLE, Plan
from sglang_moe_patches.core.variables import OWN
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_RECORD, KV_SIZING
from sglang_moe_patches.memory.kv_sizing.record import NOT_IDENTIFYING, Record

VOLATILE = (
    # Where a server listens, and what it logs and reports.
    *("host", "port", "grpc_port", "nccl_port", "dist_init_addr", "api_key", "admin_api_key", "served_model_name"),
    *("log_level", "log_level_http", "log_requests", "log_requests_level", "log_requests_target", "crash_dump_folder"),
    *("show_time_cost", "enable_metrics", "weight_version", "fastapi_root_path", "random_seed", "skip_server_warmup"),
    *("decode_log_interval", "warmups", "watchdog_timeout", "soft_watchdog_timeout", "dist_timeout", "sleep_on_idle"),
    *("base_gpu_id", "gpu_id_step", "node_rank", "stream_interval"),
    *("enable_cache_report", "download_dir", "model_loader_extra_config", "log_requests_format", "enable_trace"),
    *("extra_metric_labels", "export_metrics_to_file", "export_metrics_to_file_dir", "otlp_traces_endpoint"),
    *("enable_metrics_for_all_schedulers", "enable_request_time_stats_logging", "uvicorn_access_log_exclude_prefixes"),
    *("tool_call_parser", "reasoning_parser", "chat_template"),
    # The model is identified by its configuration, wherever it lies.
    *("model_path", "tokenizer_path", "model_config"),
    # What is decided here.
    "mem_fraction_static",
)
"""Arguments on which nothing depends that is measured here."""
SECRET = ("key", "_token", "password", "passphrase", "secret", "keyfile", "certfile", "certs")
"""Ends of names of arguments and variables whose values no file may hold."""
INJECTED = re.compile(r"_(SERVICE_(HOST|PORT).*|PORT(_\d+_(TCP|UDP).*)?)$")
"""Variables that an orchestrator sets for each of its services, whatever they are called."""


def plain(value: Any) -> Any:
    """A value as JSON has it, nested ones too; ``None`` for one that is no plain value."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int | float | str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return plain(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else None


def defaults_of(server_args: Any) -> dict[str, Any]:
    """This release's arguments where nobody gives them, as far as they are plain values."""
    kind = type(server_args)
    if hasattr(kind, "__struct_defaults__"):  # from 0.5.2x on
        known = kind.__struct_defaults__
        return dict(zip(kind.__struct_fields__[-len(known) :], known, strict=True)) if known else {}
    return {name: vars(kind)[name] for name in getattr(kind, "__dataclass_fields__", {}) if name in vars(kind)}


def lasting_arguments(
    arguments: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A server's arguments that identify its configuration: all that are set, but for the volatile ones and secrets.

    :param defaults: values that are left out: the release, which is part of the fingerprint, implies them.
    """
    return {
        name: value
        for name, value in ((name, plain(value)) for name, value in sorted(arguments.items()))
        if name not in VOLATILE
        and not name.startswith("_")
        and not is_secret(name)
        and value not in (None, False, "", [], {})
        and value != arguments.get("model_path")  # the path of a draft that the model contains
        and value != plain(defaults.get(name))
    }


def is_secret(name: str) -> bool:
    """Whether the value of an argument or variable may be one."""
    return name.lower().endswith(SECRET) or name.lower().startswith("ssl_")


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that identify a configuration: the engine's, the allocator's and the changes'."""
    # Which changes are applied is known by the status of each.
    ours = {KV_SIZING.name, KV_RECORD.name, SELECT_VARIABLE, *(variable.name for _, variable in OWN)}

    def counts(name: str) -> bool:
        if name in ours or is_secret(name) or INJECTED.search(name):
            return False
        return name in ALLOCATOR or (name.startswith("SGLANG_") and name not in PROCESS)

    return {name: value for name, value in sorted(environ.items()) if value and counts(name)}


def changes_of(plans: Mapping[str, Plan]) -> dict[str, str]:
    """The changes that have patched the engine. Why another one has not is nothing to the memory that is needed."""
    return {name: str(plan.status) for name, plan in sorted(plans.items()) if plan.status in ACTIVE}


def model_configuration(config: Any) -> dict[str, Any]:
    """A model's configuration, of transformers, without the folders that it was loaded from."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_paths(each) for name, each in value.items() if name != "_name_or_path"}
        return [without_paths(each) for each in value] if isinstance(value, list) else value

    def without_itself(value: Any) -> None:
        # Some releases keep the configuration in its own quantization's settings, which JSON cannot have.
        if not isinstance(value, type(config)):
            raise TypeError(f"{type(value).__name__} in the model's configuration has no JSON")

    found: dict[str, Any] = without_paths(json.loads(json.dumps(config.to_dict(), default=without_itself)))
    return found


def nearest(inputs: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    """In what the record that differs least from this configuration differs from it; "": none is near."""
    own = dict(_flat(inputs))
    differences = []
    for record in records.values():
        other = dict(_flat(record.fingerprint_inputs))
        differences.append(sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name)))
    least = min(differences, key=len, default=[])
    return f"the nearest record differs in {', '.join(least)}" if 0 < len(least) <= MAX_DIFFERENCES else ""


MAX_DIFFERENCES = 5
"""A record that differs in more is not near."""


def _flat(inputs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in inputs.items():
        if isinstance(value, Mapping) and prefix == "":
            yield from _flat(value, f"{name}.")
        elif name not in NOT_IDENTIFYING:
            yield prefix + name, value


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PROCESS = (
    *("SGLANG_RUN_ID", "SGLANG_PLUGINS", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "SGLANG_IS_FIRST_RANK_ON_NODE"),
    *("SGLANG_DP_RANK", "SGLANG_TP_RANK", "SGLANG_HOST_IP", "SGLANG_LOCAL_IP_NIC", "SGLANG_PORT", "SGLANG_GRPC_PORT"),
    *("SGLANG_TCP_STORE_PORT", "SGLANG_BACKUP_PORT_BASE"),
)
"""Variables of the engine that differ between processes, machines or starts of one configuration."""
