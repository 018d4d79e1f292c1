"""Models for servers with ``--load-format dummy``: sliding windows, Mamba states, a layer that drafts.

``CONFIGS`` has of their public ``config.json`` what decides sizes, by the Hugging Face repository that each is named
after. Nothing is downloaded.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.reference import model

from common import weights

COMMON: dict[str, Any] = {
    "num_hidden_layers": 48,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "vocab_size": 151_936,
    "bos_token_id": model.BOS_ID,
    "eos_token_id": model.EOS_ID,
    "pad_token_id": model.PAD_ID,
}
_QWEN3_MOE = COMMON | {"hidden_size": 2048, "head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_FP8_BLOCKS = {
    **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    "weight_block_size": [128, 128],
}
CONFIGS: dict[str, dict[str, Any]] = {
    # openai/gpt-oss-120b; its experts are MXFP4 there, bfloat16 here. Every other layer has a window.
    "gpt-oss-120b": COMMON
    | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 36}
    | {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True}
    | {"sliding_window": 128, "initial_context_length": 4096, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5}
    | {"rope_theta": 150_000, "rope_scaling": _YARN | {"original_max_position_embeddings": 4096}}
    | {"vocab_size": 201_088},
    # Qwen/Qwen3-Next-80B-A3B-Instruct: three layers with a state for each request, one with a KV cache.
    "qwen3-next-80b": _QWEN3_MOE
    | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 256}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 5120, "partial_rotary_factor": 0.25}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512}
    | {"num_experts_per_tok": 10, "norm_topk_prob": True, "full_attention_interval": 4, "rope_theta": 10_000_000}
    | {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    # deepseek-ai/DeepSeek-R1-0528, in FP8, with the layer that drafts.
    "deepseek-r1": COMMON
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 61}
    | {"hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
    | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256}
    | {"n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_layer_freq": 1}
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    | {"num_nextn_predict_layers": 1, "rope_theta": 10_000.0, "vocab_size": 129_280}
    | {"quantization_config": _FP8_BLOCKS},
}
# moonshotai/Kimi-K2.5's language model, in INT4 as in its own checkpoint.
CONFIGS["kimi-k2.5-int4"] = (
    CONFIGS["deepseek-r1"]
    | {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0}
    | {"rope_theta": 50_000.0, "vocab_size": 163_840, "quantization_config": weights.int4_config()}
)
SHARED = (
    *("num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""Sizes that tensor-parallel ranks share out."""


def config(name: str, shard: int, layers: int, context: int) -> dict[str, Any]:
    """config.json of so many layers of the model, at the sizes of one of ``shard`` tensor-parallel ranks."""
    own = deepcopy(CONFIGS[name])
    own |= {each: max(1, own[each] // shard) for each in SHARED if each in own}
    if name in ("gpt-oss-120b", "deepseek-r1", "kimi-k2.5-int4"):
        own["intermediate_size"] //= shard
    if name == "gpt-oss-120b":
        own["layer_types"] = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    if "first_k_dense_replace" in own:
        own["first_k_dense_replace"] = min(own["first_k_dense_replace"], layers - 1)
    own |= {"num_hidden_layers": layers, "max_position_embeddings": context}
    return own


def write(folder: Path, config_json: dict[str, Any]) -> Path:
    """Write the folder that a server is given: ``config.json`` and a tokenizer of few tokens."""
    folder.mkdir(parents=True)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": model.SPECIAL_TOKENS[model.EOS_ID],
    }
    (folder / "config.json").write_text(json.dumps(config_json))
    (folder / "tokenizer.json").write_text(model.tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
