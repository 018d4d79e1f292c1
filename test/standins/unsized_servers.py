"""A server for each flag with which kv-sizing does not size: written by hand, so that an entry that is lost is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
EAGLE += " --speculative-num-draft-tokens 4"
ATTENTION = "--tp 2 --dp 2 --enable-dp-attention"


@dataclass(frozen=True)
class Unsized:
    """A server with the flag.

    :param more: what its command line has besides the flag and ``value``.
    :param arguments: how its resolved arguments show it; without any, the argument of the flag's name is ``value``.
    """

    value: object = True
    more: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


_EAGLE, _NGRAM = {"speculative_algorithm": "EAGLE"}, {"speculative_algorithm": "NGRAM"}
MONITOR_ONLY = {
    "--attn-cp-size": Unsized(2, "--tp 2"),
    "--speculative-algorithm": Unsized("DFLASH"),
    "--speculative-adaptive": Unsized(more=EAGLE, arguments=_EAGLE | {"speculative_adaptive": True}),
    "--speculative-skip-dp-mlp-sync": Unsized(more=EAGLE, arguments=_EAGLE | {"speculative_skip_dp_mlp_sync": True}),
    "--speculative-ngram-external-corpus-path": Unsized(
        "x",
        "--speculative-algorithm NGRAM --speculative-ngram-external-sam-budget 1",
        _NGRAM | {"speculative_ngram_external_corpus_path": "x"},
    ),
    "--pp-size": Unsized(2, f"{EAGLE} --disable-overlap-schedule", _EAGLE | {"pp_size": 2}),
    "--disaggregation-mode": Unsized("prefill"),
    "--enable-eplb": Unsized(more="--tp 2 --ep 2"),
    "--moe-a2a-backend": Unsized("deepep", "--tp 2"),
}
"""Their free memory is recorded while they serve."""
INELIGIBLE = {
    "--enable-dp-attention-local-control-broadcast": Unsized(
        more=ATTENTION, arguments={"attn_dp_size": 2, "enable_dp_attention_local_control_broadcast": True}
    ),
    "--moe-dense-tp-size": Unsized(
        1,
        f"{ATTENTION} --enable-dp-lm-head",
        {"attn_dp_size": 2, "moe_dense_tp_size": 1, "enable_dp_lm_head": True},
    ),
    "--is-embedding": Unsized(),
    "--encoder-only": Unsized(),
    "--language-only": Unsized(more="--encoder-urls http://127.0.0.1:1"),
    "--dllm-algorithm": Unsized("LowConfidence"),
    "--enable-pdmux": Unsized(more="--chunked-prefill-size -1 --disable-overlap-schedule"),
    "--elastic-ep-backend": Unsized("mooncake"),
    "--enable-lora": Unsized(more="--max-lora-rank 8 --lora-target-modules q_proj", arguments={"lora_paths": ["x"]}),
    "--enable-memory-saver": Unsized(),
    "--cpu-offload-gb": Unsized(1),
    "--enable-unified-memory": Unsized(),
    "--keep-mm-feature-on-device": Unsized(),
    "--offload-group-size": Unsized(2),
    "--enable-return-hidden-states": Unsized(),
    "--enable-hisparse": Unsized(),
    "--enable-hierarchical-cache": Unsized(),
    "--enable-lmcache": Unsized(),
    "--enable-flexkv": Unsized(),
    "--radix-cache-backend": Unsized("flexkv"),
    "--enable-unified-cache-external-linker": Unsized(),
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
    values = {flag: "" if one.value is True else f" {one.value}" for flag, one in (MONITOR_ONLY | INELIGIBLE).items()}
    return [f"{flag}{values[flag]} {one.more}" for flag, one in (MONITOR_ONLY | INELIGIBLE).items()]
