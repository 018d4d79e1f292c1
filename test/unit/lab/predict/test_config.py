"""Tests of ``lab/predict/config.py``, which finds a model's ``config.json`` and reads the model's sizes from this
file."""

from __future__ import annotations

import json

import pytest
from common.shapes import MODELS
from sglang_moe_patches.lab.predict import config
from sglang_moe_patches.lab.predict.config import NoConfig

BY_SOURCE = {model["source"]: model for model in config.served_models()}
SIZES = ("layers", "dense_layers", "hidden", "experts", "top_k", "moe_intermediate", "shared_experts", "heads")


def read(source):
    return config.read_sizes(BY_SOURCE[source]["config"], source)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5"),
        ("zai-org/GLM-4.7", "glm-4.5"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b"),
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3-30b"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
    ],
)
def test_sizes_from_config_json_equal_the_benchmarks_sizes(source, name):
    config, known = read(source), MODELS[name]
    assert {size: getattr(config.model, size) for size in SIZES} == {size: getattr(known, size) for size in SIZES}
    assert (config.model.q_lora_rank, config.model.family, config.model.kv_heads) == (
        *(known.q_lora_rank, known.family, known.kv_heads),
    )
    assert config.model.latent == known.latent
    assert (config.attention, config.residual) == ("", "")


@pytest.mark.parametrize(
    ("source", "attention"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "attends to keys that an indexer chooses"),
        ("zai-org/GLM-5-FP8", "attends to keys that an indexer chooses"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "has layers of linear attention"),
        ("Qwen/Qwen3.5-397B-A17B", "has layers of linear attention"),
    ],
)
def test_unsupported_attention_is_named(source, attention):
    assert read(source).attention == attention


def test_a_model_with_alternating_layers_begins_with_a_dense_layer():
    model = read("meta-llama/Llama-4-Maverick-17B-128E-Instruct").model
    assert (model.dense_layers, model.intermediate, model.moe_intermediate) == (1, 16384, 8192)


#: Configurations of the published models, as transformers' configuration classes have them by default.
ERNIE = {
    **{"hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4},
    **{"intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64},
    **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1},
}
ERNIE_VL = ERNIE | {"moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_layer_start_index": [1, 1]}
HUNYUAN = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"intermediate_size": 3072, "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_experts": 64},
    **{"num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True},
}
LONGCAT = {
    **{"hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64, "ffn_hidden_size": 12288},
    **{"expert_ffn_hidden_size": 2048, "moe_topk": 12, "n_routed_experts": 512, "zero_expert_num": 256},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
PLAIN = {
    **{"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize(
    ("content", "sizes"),
    [
        pytest.param(ERNIE, (28, 1, 2560, 64, 6, 1536, 2, 20), id="ERNIE"),
        pytest.param(ERNIE_VL, (28, 1, 2560, 64, 6, 1536, 2, 20), id="ERNIE VL, with experts of two kinds"),
        pytest.param(HUNYUAN, (32, 0, 4096, 64, 8, 3072, 1, 32), id="Hunyuan, with a value for each layer"),
        pytest.param(LONGCAT, (28, 0, 6144, 512, 12, 2048, 0, 64), id="LongCat"),
    ],
)
def test_sizes_under_other_key_names_are_read(content, sizes):
    model = config.read_sizes(content, "this").model
    assert tuple(getattr(model, size) for size in SIZES) == sizes


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({}, 0),
        ({"first_k_dense_replace": 3}, 3),
        ({"num_dense_layers": 2}, 2),
        ({"dense_mlp_idx": 2}, 2),
        ({"moe_layer_freq": [0, 1, 1]}, 1),
        ({"moe_layer_freq": 1, "first_k_dense_replace": 1}, 1),
        ({"mlp_layer_types": ["dense", "dense", "sparse"]}, 2),
        ({"is_moe_layer": [False, True]}, 1),
        ({"moe_layers_enum": "4,5"}, 4),
        ({"mlp_only_layers": [0, 1, 5]}, 2),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, 1),
        ({"interleave_moe_layer_step": 2}, 1),
    ],
    ids=str,
)
def test_the_first_layers_without_experts_are_counted(keys, dense):
    assert config.read_sizes(PLAIN | keys, "this").model.dense_layers == dense


@pytest.mark.parametrize(
    "key", ["hc_mult", "zero_expert_num", "moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size"]
)
def test_unsupported_layers_are_named_by_their_key(key):
    assert config.read_sizes(PLAIN | {key: 64}, "this").residual.endswith(f"({key} in config.json)")


def without(*names):
    return {name: value for name, value in PLAIN.items() if name not in names}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(
            without("num_experts") | {"ffn_config": {"moe_num_experts": 16}},
            "none of the keys n_routed_experts, .*; "
            "keys about experts that doctor does not know: ffn_config.moe_num_experts$",
            id="the experts of a section",
        ),
        pytest.param(
            without("num_experts_per_tok") | {"experts_chosen": 2},
            "under the key num_experts_per_tok, nor under .*; "
            "keys about experts that doctor does not know: experts_chosen$",
            id="another name for top-k",
        ),
        pytest.param(
            PLAIN | {"num_experts": 1},
            "has no routed experts: the number of experts in config.json is 1",
            id="one expert",
        ),
    ],
)
def test_unknown_expert_keys_are_named_in_the_error(content, reason):
    with pytest.raises(NoConfig, match=reason):
        config.read_sizes(content, "this")


def test_a_folder_and_its_config_json_give_the_same_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert config.find(str(tmp_path)) == config.find(str(path)) == path


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{folder}", "has no config.json"),
        ("{folder}/none", "neither a folder"),
        ("nobody", "neither a folder"),
        (
            "nobody/nothing-of-this-name",
            "is not in the local cache; to download it, run `hf download nobody/nothing-of-this-name config",
        ),
    ],
    ids=["empty folder", "no folder", "no name", "not cached"],
)
def test_a_missing_config_json_is_reported_in_one_line(model, message, tmp_path):
    with pytest.raises(NoConfig, match=r"\S") as caught:
        config.find(model.format(folder=tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "contains no JSON object"),
        (json.dumps({"hidden_size": 64}), "has no routed experts"),
        (
            json.dumps({"num_experts": 8, "num_attention_heads": 4}),
            "config.json has no number under the key hidden_size",
        ),
    ],
    ids=["no JSON", "no object", "dense", "a size missing"],
)
def test_an_incomplete_config_json_is_refused(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(NoConfig, match=message):
        config.read_sizes(config.load(path), "this")


def test_a_multimodal_model_is_queried_by_its_language_model():
    kimi = config.language_model(BY_SOURCE["nvidia/Kimi-K2.5-NVFP4"]["config"])
    assert (kimi["architectures"], kimi["model_type"]) == (["DeepseekV3ForCausalLM"], "deepseek_v3")
    assert kimi["quantization_config"]["quant_algo"] == "NVFP4"
    plain = BY_SOURCE["deepseek-ai/DeepSeek-R1"]["config"]
    assert config.language_model(plain) is plain


def test_a_served_model_needs_no_config_json(tmp_path):
    content, path = config.load_model("qwen/qwen3-30b-a3b-fp8")
    assert path is None
    assert content["num_experts"] == 128
    (tmp_path / "config.json").write_text("{}")
    assert config.load_model(str(tmp_path)) == ({}, tmp_path / "config.json")
    with pytest.raises(config.NoConfig, match="local cache"):
        config.load_model("nobody/nothing")
