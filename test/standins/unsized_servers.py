"""Command lines of servers that kv-sizing leaves alone. There is one server for each argument in kv-sizing's table
``UNSIZED``. An argument that is a plain switch needs no entry in this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_moe_patches.memory.kv_sizing.eligibility import UNSIZED

EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
EAGLE += " --speculative-num-draft-tokens 4"
ATTENTION = "--tp 2 --dp 2 --enable-dp-attention"


@dataclass(frozen=True)
class UnsizedServer:
    """Server that kv-sizing leaves alone because of one argument.

    :param value: value of this argument in the command line; ``True`` if the argument is a switch.
    :param more: rest of the command line.
    :param arguments: fields of the resolved ``ServerArgs`` by which kv-sizing recognizes the server. If ``arguments``
        is empty, kv-sizing recognizes the server by one field: the field with the argument's name and the value
        ``value``. For example, ``--dcp-size 2`` sets ``dcp_size`` to 2.
    """

    value: object = True
    more: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


_EAGLE = {"speculative_algorithm": "EAGLE"}
SPECIAL = {
    "--attn-cp-size": UnsizedServer(2, "--tp 2"),
    "--speculative-algorithm": UnsizedServer("DFLASH"),
    "--speculative-adaptive": UnsizedServer(more=EAGLE, arguments=_EAGLE | {"speculative_adaptive": True}),
    "--speculative-skip-dp-mlp-sync": UnsizedServer(
        more=EAGLE, arguments=_EAGLE | {"speculative_skip_dp_mlp_sync": True}
    ),
    "--speculative-ngram-external-corpus-path": UnsizedServer(
        "x",
        "--speculative-algorithm NGRAM --speculative-ngram-external-sam-budget 1",
        {"speculative_algorithm": "NGRAM", "speculative_ngram_external_corpus_path": "x"},
    ),
    "--pp-size": UnsizedServer(2, f"{EAGLE} --disable-overlap-schedule", _EAGLE | {"pp_size": 2}),
    "--disaggregation-mode": UnsizedServer("prefill"),
    "--enable-eplb": UnsizedServer(more="--tp 2 --ep 2"),
    "--moe-a2a-backend": UnsizedServer("deepep", "--tp 2"),
    "--enable-dp-attention-local-control-broadcast": UnsizedServer(
        more=ATTENTION, arguments={"attn_dp_size": 2, "enable_dp_attention_local_control_broadcast": True}
    ),
    "--moe-dense-tp-size": UnsizedServer(
        1,
        f"{ATTENTION} --enable-dp-lm-head",
        {"attn_dp_size": 2, "moe_dense_tp_size": 1, "enable_dp_lm_head": True},
    ),
    "--language-only": UnsizedServer(more="--encoder-urls http://127.0.0.1:1"),
    "--dllm-algorithm": UnsizedServer("LowConfidence"),
    "--enable-pdmux": UnsizedServer(more="--chunked-prefill-size -1 --disable-overlap-schedule"),
    "--elastic-ep-backend": UnsizedServer("mooncake"),
    "--enable-lora": UnsizedServer(
        more="--max-lora-rank 8 --lora-target-modules q_proj", arguments={"lora_paths": ["x"]}
    ),
    "--cpu-offload-gb": UnsizedServer(1),
    "--offload-group-size": UnsizedServer(2),
    "--radix-cache-backend": UnsizedServer("flexkv"),
    "--kv-canary": UnsizedServer("log"),
    "--dcp-size": UnsizedServer(2, "--tp 2"),
    "--enable-kv-cache-sharding": UnsizedServer(more="--tp 2"),
    "--enable-dsa-cache-layer-split": UnsizedServer(more="--tp 2"),
}
"""Servers for the arguments that have a value, or that need further arguments."""
SERVERS = {kind.name: SPECIAL.get(kind.name, UnsizedServer()) for kind in UNSIZED if kind.name.startswith("--")}
"""Server for each argument. The key is the argument's name."""
ABSENT_FROM_SOME_RELEASES = {
    "attn_dp_size",
    "dcp_size",
    "enable_dsa_cache_layer_split",
    "enable_flexkv",
    "enable_kv_cache_sharding",
    "enable_page_major_kv_layout",
    "enable_pd_role_switch",
    "enable_return_indexer_topk",
    "enable_unified_cache_external_linker",
    "enable_unified_memory",
    "grpc_port",
    "keep_mm_feature_on_device",
    "kv_canary",
    "model_config",  # not a field, but the engine stores it in the arguments
    "prefill_only_disable_kv_cache",
    "radix_cache_backend",
    "speculative_skip_dp_mlp_sync",
}
"""Arguments that kv-sizing reads, and that at least one tested release does not have."""


def arguments(name: str) -> dict[str, object]:
    """Return the fields of ``ServerArgs`` by which kv-sizing recognizes the server with the argument ``name``."""
    server = SERVERS[name]
    return dict(server.arguments) or {name.removeprefix("--").replace("-", "_"): server.value}


def command_lines() -> list[str]:
    """Return the command lines of all servers. A release refuses a command line whose argument it does not know."""
    return [f"{name} {'' if server.value is True else server.value} {server.more}" for name, server in SERVERS.items()]
