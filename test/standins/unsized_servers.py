"""A server for each flag with which kv-sizing leaves the KV cache alone.

Written by hand: tests compare it with kv-sizing's own tables, and see a flag that these lose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
EAGLE += " --speculative-num-draft-tokens 4"
ATTENTION = "--tp 2 --dp 2 --enable-dp-attention"


@dataclass(frozen=True)
class UnsizedServer:
    """A server with the flag.

    :param value: of the flag; ``True``: it is a switch.
    :param more: what its command line has besides the flag and ``value``.
    :param arguments: how its resolved arguments show it; without any, the argument of the flag's name is ``value``.
    """

    value: object = True
    more: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


_EAGLE = {"speculative_algorithm": "EAGLE"}
INELIGIBLE = {
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
    "--is-embedding": UnsizedServer(),
    "--encoder-only": UnsizedServer(),
    "--language-only": UnsizedServer(more="--encoder-urls http://127.0.0.1:1"),
    "--dllm-algorithm": UnsizedServer("LowConfidence"),
    "--enable-pdmux": UnsizedServer(more="--chunked-prefill-size -1 --disable-overlap-schedule"),
    "--elastic-ep-backend": UnsizedServer("mooncake"),
    "--enable-lora": UnsizedServer(
        more="--max-lora-rank 8 --lora-target-modules q_proj", arguments={"lora_paths": ["x"]}
    ),
    "--enable-memory-saver": UnsizedServer(),
    "--cpu-offload-gb": UnsizedServer(1),
    "--enable-unified-memory": UnsizedServer(),
    "--keep-mm-feature-on-device": UnsizedServer(),
    "--offload-group-size": UnsizedServer(2),
    "--enable-return-hidden-states": UnsizedServer(),
    "--enable-priority-scheduling": UnsizedServer(),
    "--use-ray": UnsizedServer(),
    "--enable-hisparse": UnsizedServer(),
    "--enable-hierarchical-cache": UnsizedServer(),
    "--enable-lmcache": UnsizedServer(),
    "--enable-flexkv": UnsizedServer(),
    "--radix-cache-backend": UnsizedServer("flexkv"),
    "--enable-unified-cache-external-linker": UnsizedServer(),
    "--kv-canary": UnsizedServer("log"),
    "--enable-return-routed-experts": UnsizedServer(),
    "--enable-return-indexer-topk": UnsizedServer(),
    "--prefill-only-disable-kv-cache": UnsizedServer(),
    "--dcp-size": UnsizedServer(2, "--tp 2"),
    "--enable-kv-cache-sharding": UnsizedServer(more="--tp 2"),
    "--enable-dsa-cache-layer-split": UnsizedServer(more="--tp 2"),
    "--enable-page-major-kv-layout": UnsizedServer(),
    "--enable-pd-role-switch": UnsizedServer(),
}
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
    "model_config",  # the engine keeps it beside the arguments
    "prefill_only_disable_kv_cache",
    "radix_cache_backend",
    "speculative_skip_dp_mlp_sync",
}
"""Arguments that kv-sizing reads and a tested release lacks."""


def arguments(flag: str) -> dict[str, object]:
    """What the resolved arguments of the flag's server say of it."""
    one = INELIGIBLE[flag]
    return dict(one.arguments) or {flag.removeprefix("--").replace("-", "_"): one.value}


def command_lines() -> list[str]:
    """Of all these servers. A release that has no such flag refuses the server."""
    return [f"{flag} {'' if one.value is True else one.value} {one.more}" for flag, one in INELIGIBLE.items()]
