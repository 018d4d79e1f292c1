"""The tiny model on the engine: right answers, agreement with plain PyTorch, and the effect of broken patches."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import DEFAULT_ENGINE_ONLY, installed
from servers import MAX_ANSWER_TOKENS, shortest_questions
from sglang_moe_patches.changes import deferred_shared_experts, output_buffer
from sglang_moe_patches.lab.regress import report
from sglang_moe_patches.lab.regress.compare import Answer, Run, compare
from tiny_moe import export, mutations, network
from tiny_moe.mutations import SHIPPED
from tiny_moe.train import SPEC

CHANGES = (output_buffer.CHANGE, deferred_shared_experts.CHANGE)
MUTATION_QUESTIONS, MUTATION_ANSWER_TOKENS = 8, 113
"""Number of held-out questions for an engine with a broken patch, and largest number of tokens in an answer."""
FURTHER_MUTATIONS = {"one expert's scales swapped", "shared experts skipped in one layer"}
"""Broken patches (mutations) that only the longest test run applies. Every test run applies similar mutations."""


def ask(engine, model, questions: list[str], longest: int) -> Run:
    """Ask the engine in this process all questions in one batch, without worked examples. Return its answers.

    :param questions: lines of JSON.
    :param longest: maximum number of new tokens.
    """
    from sglang.test.few_shot_gsm8k import INVALID, get_answer_value, get_one_example

    lines = [json.loads(line) for line in questions]
    tokenizer = engine.tokenizer_of(SHIPPED / "model")
    prompts = [tokenizer(get_one_example(lines, i, False)).input_ids for i in range(len(lines))]
    tokens, _ = engine.generate(model, prompts, longest)
    answers = []
    for line, ids in zip(lines, tokens, strict=True):
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
        text = tokenizer.decode(ids[:end])
        number = get_answer_value(text)
        label = get_answer_value(line["answer"])
        answers.append(Answer(line["question"], text, label, None if number == INVALID else number, tuple(ids[:end])))
    return Run("in process", "", (), tuple(answers), 0.0, 0.0, 0, 0, None, ())


def ask_shortest(engine) -> Run:
    return ask(engine, engine.load(SHIPPED / "model"), shortest_questions(), MAX_ANSWER_TOKENS)


def ask_first(engine) -> Run:
    """Return the engine's answers to the first ``MUTATION_QUESTIONS`` questions of the test set."""
    first = (SHIPPED / "test.jsonl").read_text().splitlines()[:MUTATION_QUESTIONS]
    return ask(engine, engine.load(SHIPPED / "model"), first, MUTATION_ANSWER_TOKENS)


@pytest.fixture(scope="module")
def stock(engine):
    return ask_shortest(engine)


@pytest.fixture(scope="module")
def stock_for_mutations(engine):
    return ask_first(engine)


@pytest.mark.every_release
def test_the_stock_engine_answers_most_questions_correctly(stock):
    assert stock.accuracy >= 0.85


@pytest.mark.every_release
def test_the_patched_engine_gives_the_same_answers(engine, stock):
    with installed(*CHANGES):
        comparison = compare(stock, ask_shortest(engine), require_identical=True)
    assert comparison.token_identical
    assert comparison.accuracy_can_tell
    assert comparison.exit_code == 0


@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.product if name in FURTHER_MUTATIONS else ())
        for name in mutations.MUTATIONS
    ],
)
def test_a_broken_patch_is_called_worse(engine, stock_for_mutations, name, patcher):
    mutations.MUTATIONS[name](patcher)
    with installed(*CHANGES):
        mutated = ask_first(engine)
    comparison = compare(stock_for_mutations, mutated, require_identical=True)
    print(name, f"{100 * mutated.accuracy:.0f} %", comparison.p_worse, len(comparison.differing))
    assert comparison.exit_code == 1
    assert comparison.differing
    assert f"{len(comparison.differing)} of {MUTATION_QUESTIONS} answers differ" in " ".join(
        report.make_summary(comparison)
    )


@pytest.mark.every_release
def test_the_networks_rope_equals_the_engines(engine):
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

    settings = network.config(SPEC)
    yarn = settings["rope_scaling"]
    engines = DeepseekScalingRotaryEmbedding(
        settings["qk_rope_head_dim"],
        settings["qk_rope_head_dim"],
        yarn["original_max_position_embeddings"],
        int(settings["rope_theta"]),
        False,
        yarn["factor"],
        torch.float32,
        mscale=yarn["mscale"],
        mscale_all_dim=yarn["mscale_all_dim"],
        device="cpu",
    )
    assert torch.equal(torch.cat(network.rope_table(settings, 8192), dim=-1), engines.cos_sin_cache)
    x = torch.randn(7, 2, 64)
    positions = torch.tensor([0, 1, 5, 100, 4095, 4096, 8191])
    cos, sin = (table[positions] for table in network.rope_table(settings, 8192))
    rotated, _ = engines.forward_native(positions, x.clone(), x.clone())
    torch.testing.assert_close(network.rotate(x, cos, sin), rotated.view_as(x))


@pytest.mark.every_release
def test_the_network_predicts_the_engines_answers(engine, stock):
    """The plain PyTorch network, with NVFP4 experts, predicts each token of an answer from the tokens before it."""
    tokenizer = engine.tokenizer_of(SHIPPED / "model")
    model = network.from_checkpoint(SPEC, export.load_shipped_bf16(SHIPPED))
    model.quantize(True)
    equal = 0
    for answer in stock.answers[:8]:
        prompt = tokenizer(f"Question: {answer.question}\nAnswer:").input_ids
        with torch.no_grad():
            predicted = model(torch.tensor([[*prompt, *answer.tokens]]))[0].argmax(-1)
        equal += predicted[len(prompt) - 1 :].tolist() == [*answer.tokens, tokenizer.eos_token_id]
    assert equal >= 7
