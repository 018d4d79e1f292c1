"""A server for each flag with which kv-sizing keeps the fraction.

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
MONITOR_ONLY = {
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
}
"""Their free memory is recorded while they serve."""
INELIGIBLE = {
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
    "--enable-hisparse": UnsizedServer(),
    "--enable-hierarchical-cache": UnsizedServer(),
    "--enable-lmcache": UnsizedServer(),
    "--enable-flexkv": UnsizedServer(),
    "--radix-cache-backend": UnsizedServer("flexkv"),
    "--enable-unified-cache-external-linker": UnsizedServer(),
}
"""Nothing is recorded of them."""
ABSENT_FROM_SOME_RELEASES = {
    "attn_dp_size",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "enable_unified_memory",
    "grpc_port",
    "keep_mm_feature_on_device",
    "model_config",  # the engine keeps it beside the arguments
    "radix_cache_backend",
    "speculative_skip_dp_mlp_sync",
}
"""Arguments that kv-sizing reads and a tested release lacks."""


def arguments(flag: str) -> dict[str, object]:
    """What the resolved arguments of the flag's server say of it."""
    one = (MONITOR_ONLY | INELIGIBLE)[flag]
    return dict(one.arguments) or {flag.removeprefix("--").replace("-", "_"): one.value}


def command_lines() -> list[str]:
    """Of all these servers. A release that has no such flag refuses the server."""
    given = (MONITOR_ONLY | INELIGIBLE).items()
    return [f"{flag} {'' if one.value is True else one.value} {one.more}" for flag, one in given]
