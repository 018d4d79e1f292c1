"""Tests that the engine loads and runs the tiny checkpoint of each model family, on the reference kernels."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULT_ENGINE_ONLY
from harness import load_unquantized
from safetensors.torch import load_file, save_file
from sglang_moe_reference.families import FAMILIES

OTHER_FAMILIES = [name for name in FAMILIES if name != "deepseek-v3"]  # DeepSeek's family is tested in all other files
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 700) for _ in range(length)] for length in (9, 130, 1)]
STEPS = 4


def moe_layer(model: Any, family: str) -> Any:
    return getattr(model.model.layers[-1], FAMILIES[family].moe)


def strip_numbers(name: str) -> str:
    """Return a tensor's name without the numbers of its layer and expert.

    The scales of the gate and up projections get the same name, because the engine reads the scale of only one of these
    two projections.
    """
    anywhere = re.sub(r"\.\d+\.", ".*.", name)
    return re.sub(r"(gate_proj|up_proj|w1|w3)(?=\.(weight_scale_2|input_scale)$)", "gate_up", anywhere)


@pytest.mark.every_release
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_answers_depend_on_the_checkpoint_and_are_deterministic(engine, checkpoint, family):
    model, other = (engine.load(checkpoint(family=family, seed=seed)) for seed in (0, 1))
    normed = []
    norm = model.model.layers[-1].post_attention_layernorm
    hook = norm.register_forward_hook(
        lambda norm, given, made: normed.append(all(a is b for a, b in zip(given, made, strict=True)))
    )
    tokens, logits = engine.generate(model, PROMPTS, STEPS)
    hook.remove()
    again, logits_again = engine.generate(model, PROMPTS, STEPS)
    assert again == tokens
    assert torch.equal(logits, logits_again)
    assert torch.isfinite(logits).all()
    # Each answer has many different tokens: the model does not repeat one token again and again.
    assert all(len(set(answer)) > STEPS // 2 for answer in tokens)
    assert all(a != b for a, b in zip(tokens, engine.generate(other, PROMPTS, STEPS)[0], strict=True))
    # The norm after the addition works in place, as on a GPU, so that an aliasing fault changes the answers.
    assert normed == [True] * (STEPS + 1)


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_checkpoint_reaches_the_model(engine, checkpoint, family, tmp_path):
    """The model loads every tensor of the checkpoint. The engine's loaders ignore unknown names, and a parameter
    that is not loaded keeps arbitrary values.
    """
    folder = checkpoint(family=family)
    tensors = load_file(folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "other")

    def change_values(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.uint8 or name.endswith(
            "correction_bias"
        ):  # these cannot be NaN, or a NaN would not reach the logits
            return tensor.flip(0).contiguous()
        return torch.full(tensor.shape, float("nan")).to(tensor.dtype)

    def logits(changed: str) -> torch.Tensor:
        made = {name: change_values(name, t) if strip_numbers(name) == changed else t for name, t in tensors.items()}
        save_file(made, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        return engine.generate(engine.load(tmp_path / "other"), PROMPTS[:1], 0)[1]

    expected = logits("none")
    assert torch.isfinite(expected).all()
    ignored = []
    for kind in sorted(set(map(strip_numbers, tensors))):
        found, again = logits(kind), logits(kind)
        shown = torch.isnan(found).any() or not torch.equal(found, expected)
        if not shown or not torch.equal(found.nan_to_num(), again.nan_to_num()):
            ignored.append(kind)
    assert ignored == []


@pytest.mark.product
@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe"])
def test_the_kernel_that_routes_by_itself_routes_as_the_engine_does(engine, checkpoint, family):
    logits = engine.generate(engine.load(checkpoint(family=family)), PROMPTS, 0)[1]
    with engine.override_arguments(moe_runner_backend="flashinfer_trtllm"):
        logits_of_kernel = engine.generate(engine.load(checkpoint(family=family)), PROMPTS, 0)[1]
    # The kernel rounds the routing weights at another place. This can change a token, and then all later tokens.
    print(torch.nn.functional.cosine_similarity(logits, logits_of_kernel, dim=-1))
    assert torch.nn.functional.cosine_similarity(logits, logits_of_kernel, dim=-1).min() > 0.99


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_minimax_is_refused_on_the_kernel_that_computes_the_routing(engine, checkpoint):
    """MiniMax-M2 cannot run on ``flashinfer_trtllm``, whose kernel computes the routing itself. The engine does not
    pass the model's routing method to the kernel, so the stand-in for the kernel raises an error.
    """
    with engine.override_arguments(moe_runner_backend="flashinfer_trtllm"):
        model = engine.load(checkpoint(family="minimax-m2"))
        with pytest.raises(NotImplementedError, match="routing_bias with routing_method_type=0"):
            engine.generate(model, PROMPTS, 0)


@pytest.mark.product
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_own_experts_answer_from_the_bfloat16_checkpoint(engine, checkpoint, family, monkeypatch):
    with monkeypatch.context() as patch, engine.override_arguments(moe_runner_backend="auto"):
        load_unquantized(patch)
        model = engine.load(checkpoint(family=family, quantized=False))
        assert moe_layer(model, family).experts.w13_weight.dtype == torch.bfloat16
        tokens, logits = engine.generate(model, PROMPTS, STEPS)
        assert engine.generate(model, PROMPTS, STEPS)[0] == tokens
    assert torch.isfinite(logits).all()
    quantized = engine.generate(engine.load(checkpoint(family=family)), PROMPTS, 0)[1]
    # The same model, except that the experts' weights are rounded, which can change the experts of a token.
    assert torch.nn.functional.cosine_similarity(logits[0], quantized[0]).mean() > 0.9


@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe"])
def test_routed_experts_are_scaled_once(engine, checkpoint, family):
    """The output of routed experts is multiplied by the model's scaling factor only once. On the CPU, the engine alone
    would multiply the output of NVFP4 experts by a factor that the routing weights already contain.
    """
    layer = moe_layer(engine.load(checkpoint(family=family)), family)
    hidden = torch.randn(5, 256).bfloat16()
    with torch.no_grad():
        routing = layer.topk(hidden, layer.gate(hidden))
        expected = layer.experts(hidden.clone(), routing) + layer.shared_experts(hidden)
        found = layer(hidden.clone())
    torch.testing.assert_close(routing.topk_weights.sum(-1), torch.full((5,), 2.5), rtol=0.01, atol=0)
    torch.testing.assert_close(found, expected)


@DEFAULT_ENGINE_ONLY
def test_minimax_normalises_over_all_heads_as_the_engines_own_layer_does(engine, checkpoint):
    attention = engine.load(checkpoint(family="minimax-m2")).model.layers[0].self_attn
    q, k = torch.randn(3, 512).bfloat16(), torch.randn(3, 256).bfloat16()
    with torch.no_grad():
        normed = attention.qk_norm_impl.forward(q.clone(), k.clone())
        expected = attention.q_norm(q), attention.k_norm(k)
    torch.testing.assert_close(normed, expected)


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
def test_a_dense_first_layer_changes_the_answers(engine, checkpoint):
    paths: list[Path] = [checkpoint(family="glm4-moe", dense_layers=layers) for layers in (0, 1)]
    models = [engine.load(path) for path in paths]
    assert [hasattr(model.model.layers[0].mlp, "experts") for model in models] == [True, False]
    tokens, logits = engine.generate(models[0], PROMPTS, STEPS)
    assert torch.isfinite(logits).all()
    assert tokens != engine.generate(models[1], PROMPTS, STEPS)[0]
