import dataclasses
import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sglang_moe_reference import model
from sglang_moe_reference.families import FAMILIES
from sglang_moe_reference.model import ModelSpec, make_model
from sglang_moe_reference.nvfp4 import dequantize
from tiny_moe.train import SPEC as SHIPPED

SHIPPED_MODEL = Path(__file__).parents[3] / "benchmark/tiny_moe/model/model.safetensors"

EXPERT_TENSORS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


@pytest.fixture(scope="module")
def spec():
    return ModelSpec(layers=3, experts=4, nextn=True)


@pytest.fixture(scope="module")
def directory(spec, tmp_path_factory):
    target = tmp_path_factory.mktemp("models") / "tiny"
    make_model(target, spec)
    return target


@pytest.fixture(scope="module")
def weights(directory):
    return load_file(directory / "model.safetensors")


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@settings(max_examples=50)
@given(text=st.text())
def test_the_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_the_tokenizer_and_the_config_have_the_same_token_ids(tokenizer, directory, weights):
    config = json.loads((directory / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == weights["model.embed_tokens.weight"].shape[0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        config["bos_token_id"],
        config["eos_token_id"],
        config["pad_token_id"],
    )
    text = "Question: Ünïcode 漢字 🙂\n\tHow many eggs\u2028?\x00 <|pad|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < config["vocab_size"]
    assert len(tokenizer(" eggs").input_ids) == 1  # merges work: the word is one token, not one for each byte
    assert "assistant:" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )


def describe_weights(
    weights: dict[str, torch.Tensor], below: str = ""
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {n.removeprefix(below): (t.dtype, tuple(t.shape)) for n, t in weights.items() if n.startswith(below)}


def test_checkpoint_weights_match_the_shipped_model():
    """Compare names, dtypes and shapes. A NextN layer is not quantized: it has the unquantized weights of an ordinary
    layer, and four weights that only NextN has."""
    assert describe_weights(model.checkpoint_weights(SHIPPED)) == describe_weights(load_file(SHIPPED_MODEL))
    found = model.checkpoint_weights(dataclasses.replace(SHIPPED, nextn=True))
    width, bf16 = SHIPPED.hidden, torch.bfloat16
    norms = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (bf16, (width,)))
    own = norms | {"eh_proj.weight": (bf16, (width, 2 * width))}
    assert (
        describe_weights(found, "model.layers.4.")
        == describe_weights(model.original_weights(SHIPPED), "model.layers.3.") | own
    )


def test_a_bias_and_its_weight_are_drawn_independently():
    weights = model.original_weights(ModelSpec(family="glm4-moe", layers=1))
    bias, weight = (weights[f"model.layers.0.self_attn.q_proj.{part}"].float() for part in ("bias", "weight"))
    assert abs(torch.corrcoef(torch.stack((bias, weight.flatten()[: len(bias)])))[0, 1]) < 0.2


def test_quantized_experts_are_close_to_the_original_weights(spec, weights):
    original = model.original_weights(spec)
    names = [name.removesuffix(".weight_scale_2") for name in weights if name.endswith(".weight_scale_2")]
    assert len(names) == 2 * spec.experts * 3
    for name in names:
        weight, scale, scale_2, input_scale = (weights[f"{name}.{part}"] for part in EXPERT_TENSORS)
        wanted = original[f"{name}.weight"].float()
        error = (dequantize(weight, scale, scale_2) - wanted).abs().unflatten(-1, (-1, 16))
        amax = wanted.abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True)
        # E2M1's widest step is from 4 to 6. Half of it is 1/6 of the block's largest magnitude. Rounding the block
        # scale to E4M3 adds at most 1/16.
        assert (error <= amax * (1 / 6 + 1 / 16)).all(), name
        assert error.square().mean().sqrt() < 0.15 * wanted.square().mean().sqrt(), name
        assert 0 < input_scale < 1
        assert scale.float().max() == 448 or "down" not in name
    for layer in (1, 2):
        for expert in range(spec.experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            shared = weights[f"{prefix}.gate_proj.weight_scale_2"]
            assert shared == weights[f"{prefix}.up_proj.weight_scale_2"]
            amax = max(original[f"{prefix}.{name}_proj.weight"].abs().max() for name in ("gate", "up"))
            torch.testing.assert_close(
                shared * 448 * 6, amax.float()
            )  # gate and up share a scale that is large enough for both


def test_input_scales_cover_the_activations_of_the_experts(spec, weights):
    original = model.original_weights(spec)
    x = torch.randn(512, spec.hidden, generator=torch.Generator().manual_seed(1))
    prefix = "model.layers.1.mlp.experts.0"
    gate, up = (original[f"{prefix}.{name}_proj.weight"].float() for name in ("gate", "up"))
    inner = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    for name, activations in (("gate_proj", x), ("up_proj", x), ("down_proj", inner)):
        largest = weights[f"{prefix}.{name}.input_scale"] * 448 * 6
        assert activations.abs().max() <= largest <= 4 * activations.abs().max()


def test_the_correction_bias_is_the_same_in_bfloat16(weights):
    bias = weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias.bfloat16().float(), bias)
    assert bias.unique().numel() > 1


def test_unprintable_tokens_are_never_generated(weights, tokenizer):
    silent = (weights["lm_head.weight"] == 0).all(-1).nonzero().flatten().tolist()
    assert tokenizer.bos_token_id in silent
    assert tokenizer.eos_token_id not in silent
    for index in set(range(len(tokenizer))) - set(silent):
        assert tokenizer.decode([index]).isprintable() or tokenizer.decode([index]) == "\n"


@pytest.mark.parametrize("path", ["model.layers.0.mlp.gate_up_proj", "model.layers.3.mlp.experts"])
def test_dense_layers_and_the_nextn_layer_are_not_quantized(directory, path):
    """The engine does not quantize a module if its whole path matches a glob pattern of ModelOpt's list ``ignore``."""
    patterns = json.loads((directory / "config.json").read_text())["quantization_config"]["ignore"]
    assert any(fnmatchcase(path, pattern) for pattern in patterns)
    assert not any(
        fnmatchcase(f"model.layers.{layer}.mlp.experts", pattern) for layer in (1, 2) for pattern in patterns
    )


def test_the_same_seed_writes_the_same_bytes_over_an_older_model(tmp_path):
    small = ModelSpec(layers=1, dense_layers=1)
    (tmp_path / "empty").mkdir()
    make_model(tmp_path / "empty", small)
    make_model(tmp_path / "tiny", dataclasses.replace(small, seed=5))
    one, other = read_files(tmp_path / "empty"), read_files(tmp_path / "tiny")
    assert one["model.safetensors"] != other["model.safetensors"]
    assert one["tokenizer.json"] == other["tokenizer.json"]
    make_model(tmp_path / "tiny", small)
    assert read_files(tmp_path / "tiny") == one
    (tmp_path / "tiny/model.safetensors").unlink()  # as after an interrupted run
    make_model(tmp_path / "tiny", small)
    assert read_files(tmp_path / "tiny") == one


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"hidden": 200}, "hidden", "multiple of 128"),
        ({"hidden": 0}, "hidden", "multiple of 128"),
        ({"moe_intermediate": 64}, "moe_intermediate", "multiple of 128"),
        ({"top_k": 9}, "top_k", "1 to experts (8)"),
        ({"top_k": 0}, "top_k", "1 to experts (8)"),
        ({"experts": 1, "top_k": 1}, "experts", "at least 2"),
        ({"layers": 0}, "layers", "at least 1"),
        ({"dense_layers": 5}, "dense_layers", "0 to layers (4)"),
        ({"dense_layers": -1}, "dense_layers", "0 to layers (4)"),
        ({"heads": 0}, "heads", "at least 1"),
        ({"shared_experts": -1}, "shared_experts", "at least 0"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"max_position": 101}, "max_position", "even"),
        ({"layers": 1, "nextn": True}, "nextn", "false"),
        ({"layers": 2.0}, "layers", "an integer"),
        ({"seed": True}, "seed", "an integer"),
        ({"nextn": 1}, "nextn", "true or false"),
        ({"family": "gpt"}, "family", f"one of {', '.join(FAMILIES)}"),
        ({"family": "qwen3-moe", "dense_layers": 1}, "dense_layers", "0 for qwen3-moe"),
        ({"family": "minimax-m2", "shared_experts": 1}, "shared_experts", "0 for minimax-m2"),
        ({"family": "glm4-moe", "nextn": True}, "nextn", "false for glm4-moe"),
        ({"family": "glm4-moe", "kv_heads": 3}, "kv_heads", "a divisor of heads (4)"),
        ({"kv_heads": 2}, "kv_heads", "heads (4) for deepseek-v3"),
        ({"intermediate": 100}, "intermediate", "multiple of 128"),
        ({"q_lora_rank": 0}, "q_lora_rank", "at least 1"),
    ],
)
def test_a_bad_model_spec_is_refused(changes, field, rule):
    with pytest.raises(ValueError, match=rf"^{field} must be .*") as error:
        ModelSpec(**changes)
    assert rule in str(error.value)


@given(experts=st.integers(2, 64), data=st.data())
def test_the_chosen_expert_groups_have_at_least_top_k_experts(experts, data):
    top_k = data.draw(st.integers(1, experts))
    groups, chosen = ModelSpec(experts=experts, top_k=top_k).expert_groups
    assert experts % groups == 0
    assert experts // groups >= 2  # a group's score is the sum of its two best experts' scores
    assert chosen <= groups
    assert chosen * (experts // groups) >= top_k


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"notes.txt": "mine"}, "not empty and not a tiny model of ours"),
        ({"config.json": '{"architectures": ["DeepseekV3ForCausalLM"]}'}, "not empty and not a tiny model of ours"),
        ({"config.json": json.dumps({model.MARKER: {}}), "notes.txt": "mine"}, r"notes\.txt"),
    ],
    ids=["another folder", "somebody's model", "foreign files beside a model of ours"],
)
def test_make_model_does_not_write_into_other_directories(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(FileExistsError, match=words) as error:
        make_model(tmp_path, ModelSpec())
    assert str(tmp_path) in str(error.value)
    with pytest.raises(FileExistsError, match="is a file"):
        make_model(tmp_path / next(iter(files)), ModelSpec())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
