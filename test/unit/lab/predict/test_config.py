"""The sizes in a model's config.json, and where it is looked for."""

from __future__ import annotations

import json

import pytest
from common.shapes import MODELS
from sglang_moe_patches.lab.predict import config
from sglang_moe_patches.lab.predict.config import NoConfig
from whole import models

BY_SOURCE = {model["source"]: model for model in models.served()}
SIZES = ("layers", "dense_layers", "hidden", "experts", "top_k", "moe_intermediate", "shared_experts", "heads")


def read(source):
    return config.read(BY_SOURCE[source]["config"], source)


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
def test_the_sizes_are_those_that_the_benchmarks_have(source, name):
    found, known = read(source), MODELS[name]
    assert {size: getattr(found.model, size) for size in SIZES} == {size: getattr(known, size) for size in SIZES}
    assert (found.model.q_lora_rank, found.model.family, found.model.kv_heads) == (
        *(known.q_lora_rank, known.family, known.kv_heads),
    )
    assert found.model.latent == known.latent
    assert (found.attention, found.residual) == ("", "")


@pytest.mark.parametrize(
    ("source", "attention"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "attends to keys that an indexer chooses"),
        ("zai-org/GLM-5-FP8", "attends to keys that an indexer chooses"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "has layers of linear attention"),
        ("Qwen/Qwen3.5-397B-A17B", "has layers of linear attention"),
    ],
)
def test_attention_that_is_not_as_the_formulas_have_it_is_named(source, attention):
    assert read(source).attention == attention


def test_a_residual_of_several_streams_is_named():
    assert "hc_mult" in read("deepseek-ai/DeepSeek-V4-Flash").residual


def test_a_model_whose_layers_alternate_has_a_dense_one_first():
    model = read("meta-llama/Llama-4-Maverick-17B-128E-Instruct").model
    assert (model.dense_layers, model.intermediate, model.moe_intermediate) == (1, 16384, 8192)


def test_a_folder_and_its_file_are_the_same(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert config.find(str(tmp_path)) == config.find(str(path)) == path


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{folder}", "has no config.json"),
        ("{folder}/none", "neither a folder"),
        ("nobody", "neither a folder"),
        ("nobody/nothing-of-this-name", "is not in the local cache; `hf download nobody/nothing-of-this-name config"),
    ],
    ids=["empty folder", "no folder", "no name", "not cached"],
)
def test_where_there_is_no_file_one_line_says_so(model, said, tmp_path):
    with pytest.raises(NoConfig, match=r"\S") as caught:
        config.find(model.format(folder=tmp_path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        (json.dumps({"hidden_size": 64}), "has no routed experts"),
        (json.dumps({"num_experts": 8, "num_attention_heads": 4}), "config.json has no hidden_size"),
    ],
    ids=["no JSON", "no object", "dense", "a size missing"],
)
def test_a_file_that_says_too_little_is_refused(text, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(NoConfig, match=said):
        config.read(config.load(path), "this")


def test_a_model_with_eyes_is_asked_about_by_its_language_model():
    kimi = config.language_model(BY_SOURCE["nvidia/Kimi-K2.5-NVFP4"]["config"])
    assert (kimi["architectures"], kimi["model_type"]) == (["DeepseekV3ForCausalLM"], "deepseek_v3")
    assert kimi["quantization_config"]["quant_algo"] == "NVFP4"
    plain = BY_SOURCE["deepseek-ai/DeepSeek-R1"]["config"]
    assert config.language_model(plain) is plain


def test_a_model_that_people_serve_needs_no_file(tmp_path, monkeypatch):
    content, path = config.load_model("qwen/qwen3-30b-a3b-fp8")
    assert path is None
    assert content["num_experts"] == 128
    (tmp_path / "config.json").write_text("{}")
    assert config.load_model(str(tmp_path)) == ({}, tmp_path / "config.json")
    with pytest.raises(config.NoConfig, match="local cache"):
        config.load_model("nobody/nothing")
