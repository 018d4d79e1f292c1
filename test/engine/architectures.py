"""Configurations of tiny models: one for each architecture with routed experts that the engine can build on the CPU."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""Fields of ``config.json`` that most architectures share."""


def config(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    return {**COMMON, "architectures": [architecture], "model_type": model_type, **own}


DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
BAILING = {
    "num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "embedding_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_num_value_heads_cpu": 2,
    "linear_num_key_heads_cpu": 2,
}
"""Fields of ``config.json`` that describe linear attention."""
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
CONFIGS = {
    "qwen3-moe": config("Qwen3MoeForCausalLM", "qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[]),
    "qwen3-next": config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        full_attention_interval=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        shared_expert_intermediate_size=64,
        partial_rotary_factor=0.25,
        **LINEAR,
    ),
    "qwen3.5-moe": config(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        text_config=dict(
            config("", "qwen3_5_moe_text"),
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
            full_attention_interval=2,
            shared_expert_intermediate_size=64,
            **LINEAR,
        ),
        vision_config=VISION,
    ),
    "gpt-oss": config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=4,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attention_bias=True,
        swiglu_limit=7.0,
        rope_scaling=None,
    ),
    "llama4": config(
        "Llama4ForCausalLM",
        "llama4_text",
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=1,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
        attention_chunk_size=64,
    ),
    "glm4-moe-lite": config("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **{**DEEPSEEK, **LATENT, "n_shared_experts": 0}),
    "glm4.6v": config(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        text_config=dict(
            config("", "glm4v_moe_text"), **DEEPSEEK, rope_scaling={"type": "default", "mrope_section": [8, 12, 12]}
        ),
        vision_config=VISION,
    ),
    "qwen3-vl-moe": config(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        text_config=dict(
            config("", "qwen3_vl_moe_text"),
            decoder_sparse_step=1,
            mlp_only_layers=[],
            rope_scaling={"type": "default", "mrope_section": [8, 12, 12]},
        ),
        vision_config={**VISION, "deepstack_visual_indexes": [0]},
    ),
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": dict(config("DeepseekV3ForCausalLM", "kimi_k2"), **DEEPSEEK, **LATENT),
        "vision_config": {
            "vt_num_hidden_layers": 1,
            "vt_hidden_size": 64,
            "vt_intermediate_size": 64,
            "vt_num_attention_heads": 2,
            "mm_hidden_size": 64,
            "text_hidden_size": 128,
        },
    },
    "bailing-moe": config("BailingMoeForCausalLM", "bailing_moe", **BAILING),
    "ernie4.5": config(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
        moe_layer_end_index=3,
        moe_layer_interval=1,
        use_bias=False,
    ),
    "minimax-m2": config(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        num_local_experts=4,
        rotary_dim=32,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        use_routing_bias=True,
        attn_type_list=[1] * 4,
    ),
    "mixtral": config("MixtralForCausalLM", "mixtral", num_local_experts=4),
    "olmoe": config("OlmoeForCausalLM", "olmoe"),
    "llada2": config(
        "LLaDA2MoeModelLM", "llada2_moe", **BAILING, score_function="sigmoid", moe_router_enable_expert_bias=True
    ),
    "sdar-moe": config("SDARMoeForCausalLM", "sdar_moe", decoder_sparse_step=1, mlp_only_layers=[]),
    "mimo-v2": config(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        **{**DEEPSEEK, "moe_layer_freq": [1] * 4, "n_shared_experts": None},
        hybrid_layer_pattern=[0, 1, 0, 1],
        sliding_window=64,
        v_head_dim=64,
        layernorm_epsilon=1e-6,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_head_dim=64,
        swa_v_head_dim=64,
        swa_rope_theta=10000.0,
        add_full_attention_sink_bias=False,
        add_swa_attention_sink_bias=False,
        partial_rotary_factor=1.0,
        sliding_window_size=64,
        attention_value_scale=None,
        rope_scaling={"rope_type": "default"},
    ),
    "step3.5": config(
        "Step3p5ForCausalLM",
        "step3p5",
        layer_types=["full_attention", "sliding_attention"] * 2,
        moe_num_experts=4,
        moe_top_k=2,
        num_attention_groups=2,
        share_expert_dim=64,
        share_expert_dims=64,
        moe_layers_enum="0,1,2,3",
        sliding_window=64,
        use_qk_norm=True,
        moe_every_n_layer=1,
        norm_expert_weight=True,
        attention_other_setting={"num_attention_heads": 2, "num_attention_groups": 2, "head_dim": 64},
        yarn_only_types=[],
        partial_rotary_factors=[1.0] * 4,
        use_head_wise_attn_gate=False,
        swiglu_limits=[0.0] * 4,
        swiglu_limits_shared=[0.0] * 4,
        moe_router_activation="sigmoid",
        moe_router_scaling_factor=1.0,
        use_moe_router_bias=True,
        need_fp32_gate=False,
        rope_theta=[10000.0] * 4,
        rope_parameters={"rope_theta": [10000.0] * 4, "rope_type": "default"},
        zero_centered=True,
    ),
    "sarvam-moe": config(
        "SarvamMoEForCausalLM",
        "sarvam_moe",
        **BAILING,
        score_function="sigmoid",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        use_qk_norm=True,
        moe_router_enable_expert_bias=True,
    ),
    "exaone-moe": config(
        "ExaoneMoEForCausalLM",
        "exaone_moe",
        num_shared_experts=1,
        is_moe_layer=[True] * 4,
        sliding_window=64,
        layer_types=["full_attention"] * 4,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    ),
    "laguna": config("LagunaForCausalLM", "laguna"),
}


def register_config(model_type: str) -> None:
    """Register a configuration class for a model type that transformers does not know.

    The checkpoints of such models come with their own configuration code.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        AutoConfig.register(model_type, type(f"{model_type}_config", (PretrainedConfig,), {"model_type": model_type}))
