import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sglang_moe_patches.lab.reference import model
from sglang_moe_patches.lab.reference.families import FAMILIES
from sglang_moe_patches.lab.reference.model import ModelSpec, make_model
from sglang_moe_patches.lab.reference.nvfp4 import dequantize

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


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_default_is_small(tmp_path):
    make_model(tmp_path / "tiny", ModelSpec())
    assert sum(len(data) for data in contents(tmp_path / "tiny").values()) < 16e6


@settings(max_examples=100)
@given(text=st.text())
def test_the_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_tokenizer_and_config_agree(tokenizer, directory, weights):
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
    assert len(tokenizer(" eggs").input_ids) == 1  # the merges work, and not the bytes alone
    assert "assistant:" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes spelled out once more, from DeepSeek-V3's and ModelOpt's checkpoints."""
    bf16, h, i, vocab = torch.bfloat16, spec.hidden, spec.moe_intermediate, model.vocab_size()
    expected = {
        "model.embed_tokens.weight": (bf16, (vocab, h)),
        "model.norm.weight": (bf16, (h,)),
        "lm_head.weight": (bf16, (vocab, h)),
    }
    for layer in range(spec.layers + spec.nextn):
        p = f"model.layers.{layer}."
        shapes = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_a_proj": (128, h),
            "self_attn.q_a_layernorm": (128,),
            "self_attn.q_b_proj": (spec.heads * 192, 128),
            "self_attn.kv_a_proj_with_mqa": (576, h),
            "self_attn.kv_a_layernorm": (512,),
            "self_attn.kv_b_proj": (spec.heads * 256, 512),
            "self_attn.o_proj": (h, spec.heads * 128),
        }
        if layer < spec.dense_layers:
            shapes |= {"mlp.gate_proj": (2 * h, h), "mlp.up_proj": (2 * h, h), "mlp.down_proj": (h, 2 * h)}
        else:
            s = spec.shared_experts * i
            shapes["mlp.gate"] = (spec.experts, h)
            expected[p + "mlp.gate.e_score_correction_bias"] = (torch.float32, (spec.experts,))
            for name, shape in {"gate_proj": (s, h), "up_proj": (s, h), "down_proj": (h, s)}.items():
                shapes[f"mlp.shared_experts.{name}"] = shape
            for expert in range(spec.experts):
                for name, (rows, k) in {"gate_proj": (i, h), "up_proj": (i, h), "down_proj": (h, i)}.items():
                    e = f"{p}mlp.experts.{expert}.{name}."
                    if layer == spec.layers:
                        expected[e + "weight"] = (bf16, (rows, k))
                    else:
                        expected[e + "weight"] = (torch.uint8, (rows, k // 2))
                        expected[e + "weight_scale"] = (torch.float8_e4m3fn, (rows, k // 16))
                        expected[e + "weight_scale_2"] = expected[e + "input_scale"] = (torch.float32, ())
        if layer == spec.layers:
            shapes |= {"enorm": (h,), "hnorm": (h,), "eh_proj": (h, 2 * h), "shared_head.norm": (h,)}
        expected |= {f"{p}{name}.weight": (bf16, shape) for name, shape in shapes.items()}
    return expected


@pytest.mark.parametrize(
    "changes",
    [{}, {"dense_layers": 0}, {"dense_layers": 3, "nextn": False}, {"experts": 6, "top_k": 3, "shared_experts": 2}],
)
def test_names_shapes_and_dtypes(spec, changes):
    spec = dataclasses.replace(spec, **changes)
    found = {name: (t.dtype, tuple(t.shape)) for name, t in model.checkpoint_weights(spec).items()}
    assert found == expected_tensors(spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_knows_every_family(tmp_path, family):
    from transformers import AutoConfig, GenerationConfig

    spec = ModelSpec(family=family, layers=2, experts=16, top_k=3)
    make_model(tmp_path / "tiny", spec)
    config = AutoConfig.from_pretrained(tmp_path / "tiny")
    assert type(config).model_type == FAMILIES[family].model_type
    own = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert config.architectures == [FAMILIES[family].architecture]
    (experts,) = {"num_experts", "num_local_experts", "n_routed_experts"} & set(own)
    assert (config.num_experts_per_tok, getattr(config, experts), own[experts]) == (3, 16, 16)
    assert config.rope_parameters["rope_theta"] == own["rope_theta"]
    assert GenerationConfig.from_pretrained(tmp_path / "tiny").do_sample is False


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_is_the_model_before_quantization(tmp_path, family):
    spec = ModelSpec(family=family, layers=1)
    make_model(tmp_path / "tiny", spec, quantized=False)
    written = load_file(tmp_path / "tiny" / "model.safetensors")
    expected = model.original_weights(spec)
    assert set(written) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    assert "quantization_config" not in json.loads((tmp_path / "tiny" / "config.json").read_text())


def test_biases_are_not_their_weights():
    weights = model.original_weights(ModelSpec(family="glm4-moe", layers=1))
    bias, weight = (weights[f"model.layers.0.self_attn.q_proj.{part}"].float() for part in ("bias", "weight"))
    assert abs(torch.corrcoef(torch.stack((bias, weight.flatten()[: len(bias)])))[0, 1]) < 0.2


def test_experts_stand_for_the_original_weights(spec, weights):
    original = model.original_weights(spec)
    names = [name.removesuffix(".weight_scale_2") for name in weights if name.endswith(".weight_scale_2")]
    assert len(names) == 2 * spec.experts * 3
    for name in names:
        weight, scale, scale_2, input_scale = (weights[f"{name}.{part}"] for part in EXPERT_TENSORS)
        wanted = original[f"{name}.weight"].float()
        error = (dequantize(weight, scale, scale_2) - wanted).abs().unflatten(-1, (-1, 16))
        amax = wanted.abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True)
        # Half of the widest step of E2M1, 4 to 6, is 1/6 of the block's largest magnitude; the rest is E4M3's rounding
        # of the block scale, at most 1/16.
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
            torch.testing.assert_close(shared * 448 * 6, amax.float())  # neither of the two saturates


def test_input_scales_cover_what_the_experts_see(spec, weights):
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


def test_unprintable_tokens_cannot_win(weights, tokenizer):
    silent = (weights["lm_head.weight"] == 0).all(-1).nonzero().flatten().tolist()
    assert tokenizer.bos_token_id in silent
    assert tokenizer.eos_token_id not in silent
    for index in set(range(len(tokenizer))) - set(silent):
        assert tokenizer.decode([index]).isprintable() or tokenizer.decode([index]) == "\n"


def test_quantization_config_leaves_out_everything_but_routed_experts(directory, spec):
    """By the engine's own rule for ModelOpt's patterns: fullmatch of the pattern as a glob on the module's path."""
    import fnmatch

    patterns = json.loads((directory / "config.json").read_text())["quantization_config"]["ignore"]

    def ignored(path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    for path in (
        "model.layers.2.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.1.mlp.shared_experts.down_proj",
        "lm_head",
        "model.layers.3.mlp.experts",
    ):
        assert ignored(path), path
    assert not ignored("model.layers.1.mlp.experts")
    assert not ignored("model.layers.2.mlp.experts")


def test_same_seed_same_bytes(tmp_path, directory, spec):
    make_model(tmp_path / "again", spec)
    assert contents(tmp_path / "again") == contents(directory)
    make_model(tmp_path / "other", dataclasses.replace(spec, seed=1))
    one, other = contents(tmp_path / "other"), contents(directory)
    assert one["model.safetensors"] != other["model.safetensors"]
    assert one["tokenizer.json"] == other["tokenizer.json"]


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
def test_bad_specs_are_refused(changes, field, rule):
    with pytest.raises(ValueError, match=rf"^{field} must be .*") as error:
        ModelSpec(**changes)
    assert rule in str(error.value)


@given(experts=st.integers(2, 64), data=st.data())
def test_groups_can_hold_top_k(experts, data):
    top_k = data.draw(st.integers(1, experts))
    groups, chosen = ModelSpec(experts=experts, top_k=top_k).expert_groups
    assert experts % groups == 0
    assert experts // groups >= 2  # a group's score is the sum of its two best
    assert chosen <= groups
    assert chosen * (experts // groups) >= top_k


def test_replaces_a_model_of_ours(tmp_path):
    small = ModelSpec(layers=1, dense_layers=1)
    make_model(tmp_path / "tiny", small)
    before = contents(tmp_path / "tiny")
    make_model(tmp_path / "tiny", dataclasses.replace(small, seed=5))
    assert contents(tmp_path / "tiny") != before
    (tmp_path / "empty").mkdir()
    make_model(tmp_path / "empty", small)
    assert contents(tmp_path / "empty") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "tiny"]  # no temporary directory left


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"notes.txt": "mine"}, "not empty and not a tiny model of ours"),
        ({"config.json": '{"architectures": ["DeepseekV3ForCausalLM"]}'}, "not empty and not a tiny model of ours"),
        ({"config.json": json.dumps({model.MARKER: {}}), "notes.txt": "mine"}, r"notes\.txt"),
    ],
    ids=["another folder", "somebody's model", "foreign files beside a model of ours"],
)
def test_leaves_other_directories_alone(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(FileExistsError, match=words) as error:
        make_model(tmp_path, ModelSpec())
    assert str(tmp_path) in str(error.value)
    with pytest.raises(FileExistsError, match="is a file"):
        make_model(tmp_path / next(iter(files)), ModelSpec())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def disk_full(self, target):
    if self.name == "new":
        raise OSError("disk full")
    return os.rename(self, target)


@pytest.mark.parametrize(
    ("target", "what", "replacement", "error"),
    [
        ("tiny", "safetensors.torch.save_file", interrupted, KeyboardInterrupt),
        ("new", "safetensors.torch.save_file", interrupted, KeyboardInterrupt),
        ("tiny", "pathlib.Path.rename", disk_full, OSError),
    ],
)
def test_a_run_that_fails_leaves_what_was_there(tmp_path, monkeypatch, target, what, replacement, error):
    small = ModelSpec(layers=1, dense_layers=1)
    make_model(tmp_path / "tiny", small)
    before = contents(tmp_path / "tiny")
    monkeypatch.setattr(what, replacement)
    with pytest.raises(error):
        make_model(tmp_path / target, dataclasses.replace(small, seed=5))
    assert contents(tmp_path / "tiny") == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
