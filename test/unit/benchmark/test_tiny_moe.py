"""Tests of ``benchmark/tiny_moe``, a small MoE model: its word problems, its network, and the checkpoint in this
repository."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from common import output
from sglang_moe_patches.lab.regress.compare import Answer, Run
from sglang_moe_patches.lab.regress.gsm8k import check_questions
from sglang_moe_reference.model import ModelSpec, quantize_experts, tokenizer_json
from tiny_moe import export, mutations, network, problems, train

SHIPPED = Path(__file__).parents[3] / "benchmark" / "tiny_moe"
STEP = re.compile(r"(\d+)([-+*/])(\d+)=<<\1\2\3=(\d+)>>\4")
WORDS = {*sum(problems.NAMES.values(), ()), *problems.THINGS, *sum(problems.PLURALS.items(), ())}
WORDS |= {"he", "she", "He", "She"}


def draw_problems(count: int, *, test: bool, seed: int = 3) -> list[problems.Problem]:
    return list(islice(problems.problems(seed, test=test), count))


def mask_words(text: str) -> str:
    """Return a text with underscores for the words that a template fills in (names, things, pronouns)."""
    return re.sub(r"[A-Za-z]+", lambda word: "_" if word[0] in WORDS else word[0], text)


def test_every_step_is_correct_and_the_last_result_is_the_answer():
    questions = set()
    for problem in draw_problems(3000, test=False):
        lines = problem.answer.split("\n")
        steps = [step for line in lines[:-1] for step in STEP.findall(line)]
        assert 2 <= len(steps) <= 4
        assert all(STEP.search(line) for line in lines[:-1])
        for left, sign, right, result in steps:
            exact = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(left) == int(right) * int(result) if sign == "/" else exact[sign] == int(result)
            assert 1 <= int(result) <= 9999
        assert lines[-1] == f"#### {steps[-1][-1]}"
        assert "{" not in problem.question + problem.answer
        questions.add(re.sub(r"\d+", "_", mask_words(problem.question)))
    assert len(questions) == len(problems.TEMPLATES) >= 25


def test_no_test_problem_is_a_training_problem_with_other_names():
    training, testing = (
        {mask_words(problem.question) for problem in draw_problems(count, test=test)}
        for count, test in ((6000, False), (300, True))
    )
    assert not training & testing


def test_training_rows_have_the_format_of_the_engines_evaluation():
    """Each row has solved problems in the engine's format. The loss counts only the tokens of answers. The target after
    each answer is the end token.
    """
    from sglang.test.few_shot_gsm8k import get_few_shot_examples, get_one_example
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokens, targets, lengths = train.encode(3, True, 3)
    lines = [json.loads(problem.to_json()) for problem in draw_problems(3, test=True)]
    prompt = get_few_shot_examples(lines, 2) + get_one_example(lines, 2, True)
    assert tokenizer.decode(tokens.tolist()) == prompt + "\n\n"
    assert tokenizer.encode(prompt + "\n\n").ids == tokens.tolist()
    assert sum(lengths) == len(tokens) == len(targets)
    counted = [int(target) for target in targets if target != train.IGNORED]
    answers = tokenizer.decode(counted, skip_special_tokens=False).split("<|end_of_sentence|>")
    assert answers == [*(f" {line['answer']}" for line in lines), ""]
    following = [(int(a), int(b)) for a, b in zip(tokens[1:], targets, strict=False) if b not in (train.IGNORED, 1)]
    assert all(a == b for a, b in following)


def test_weights_are_the_same_after_writing_and_reading_a_checkpoint():
    spec = ModelSpec(layers=2, dense_layers=1, experts=8, top_k=2, heads=1, hidden=128)
    trained = network.Model(spec)
    weights = network.to_checkpoint(trained)
    assert {name for name in weights if "experts.7." in name} == {
        f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    again = network.from_checkpoint(spec, weights).state_dict()
    rounded = {name: tensor.bfloat16().float() for name, tensor in trained.state_dict().items()}
    torch.testing.assert_close(dict(again), rounded, rtol=0, atol=0)


def test_packing_experts_is_close_and_packing_them_again_is_exact():
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    weight = torch.randn(128, 128).bfloat16()
    packed = export.pack_experts({name: weight, "model.norm.weight": torch.ones(3)})
    once = export.unpack_experts(packed)
    assert set(once) == {name}
    assert packed[name].dtype == torch.float8_e4m3fn
    assert torch.equal(export.unpack_experts(export.pack_experts(once))[name], once[name])
    assert ((once[name] - weight).abs() <= weight.abs() / 16 + 2.0**-9 * float(packed[f"{name}_scale"])).all()


def test_the_repositorys_questions_are_those_of_the_generator():
    lines = (SHIPPED / export.QUESTIONS).read_text().splitlines()
    assert len(lines) >= 500
    assert lines == [problem.to_json() for problem in draw_problems(len(lines), test=True, seed=0)]
    check_questions(SHIPPED / export.QUESTIONS, len(lines), 5)


@pytest.fixture(scope="module")
def shipped_weights():
    """Return the tensors of this repository's checkpoint of the tiny model."""
    from safetensors.torch import load_file

    return load_file(str(SHIPPED / export.MODEL / "model.safetensors"))


def test_the_repositorys_checkpoint_is_its_experts_quantized(shipped_weights):
    anything = torch.ones(1, train.SPEC.hidden)
    quantized = quantize_experts(train.SPEC, export.load_shipped_bf16(SHIPPED), lambda layer, expert: anything)
    assert set(quantized) == set(shipped_weights)
    for name, tensor in shipped_weights.items():
        assert quantized[name].dtype == tensor.dtype
        if not name.endswith(".input_scale"):
            assert torch.equal(quantized[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    assert (SHIPPED / export.MODEL / "tokenizer.json").read_text(encoding="utf-8") == tokenizer_json()


@pytest.mark.product
def test_the_repositorys_input_scales_are_those_of_the_calibration(shipped_weights):
    """A new calibration must give nearly the input scales of the repository's checkpoint. The scales need not be
    exactly equal, because processors round sums of products differently.
    """
    quantized = export.quantize(train.SPEC, export.load_shipped_bf16(SHIPPED))
    for name in (name for name in shipped_weights if name.endswith(".input_scale")):
        torch.testing.assert_close(quantized[name], shipped_weights[name], rtol=1e-4, atol=0)


def test_verdicts_in_the_result_follow_from_its_counts_by_the_current_rule():
    """The stored result has counts of lost and gained answers, and verdicts. ``regress`` must still derive the same
    verdicts from these counts."""
    figures = output.load(mutations.RESULT)["figures"]
    count = figures["questions"]
    right = round(count * figures["stock"])
    stock = [True] * right + [False] * (count - right)

    def run(is_right: list[bool]) -> Run:
        answers = tuple(Answer(str(i), "", 1, int(right), ()) for i, right in enumerate(is_right))
        return Run("", "", (), answers, 0.0, 0.0, 0, 0, None, ())

    for row in figures["rows"]:
        lost, gained = row["lost"], row["gained"]
        mutated = [*[False] * lost, *stock[lost : count - gained], *[True] * gained]
        verdicts = mutations.row(row["server"], run(mutated), run(stock))
        assert verdicts["by_accuracy"] == row["by_accuracy"], row["server"]
        assert verdicts["largest_drop"] == pytest.approx(row["largest_drop"], abs=0.05)
    assert {row["by_accuracy"] for row in figures["rows"]} == {0, 1}
