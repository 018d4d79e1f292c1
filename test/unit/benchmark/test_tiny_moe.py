"""The word problems, the network, and that what ships is what the scripts make."""

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


def some(count: int, *, test: bool, seed: int = 3) -> list[problems.Problem]:
    return list(islice(problems.problems(seed, test=test), count))


def without_words(text: str) -> str:
    """The text with every name, thing, holder and pronoun blotted out."""
    return re.sub(r"[A-Za-z]+", lambda word: "_" if word[0] in WORDS else word[0], text)


def test_every_step_is_right_and_the_last_one_is_the_answer():
    kinds = set()
    for problem in some(3000, test=False):
        lines = problem.answer.split("\n")
        steps = [step for line in lines[:-1] for step in STEP.findall(line)]
        assert 2 <= len(steps) <= 4
        assert all(STEP.search(line) for line in lines[:-1])
        for one, sign, other, result in steps:
            exact = {"+": int(one) + int(other), "-": int(one) - int(other), "*": int(one) * int(other)}
            assert int(one) == int(other) * int(result) if sign == "/" else exact[sign] == int(result)
            assert 1 <= int(result) <= 9999
        assert lines[-1] == f"#### {steps[-1][-1]}"
        assert "{" not in problem.question + problem.answer
        kinds.add(re.sub(r"\d+", "_", without_words(problem.question)))
    assert len(kinds) == len(problems.TEMPLATES) >= 25


def test_no_test_problem_is_a_training_problem_with_other_names():
    training, testing = (
        {without_words(problem.question) for problem in some(count, test=test)}
        for count, test in ((6000, False), (300, True))
    )
    assert not training & testing


def test_rows_are_the_prompts_of_the_engines_evaluation():
    """The loss counts the answers alone, and after each the model is to stop."""
    from sglang.test.few_shot_gsm8k import get_few_shot_examples, get_one_example
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokens, targets, lengths = train.encode(3, True, 3)
    asked = [json.loads(problem.to_json()) for problem in some(3, test=True)]
    prompt = get_few_shot_examples(asked, 2) + get_one_example(asked, 2, True)
    assert tokenizer.decode(tokens.tolist()) == prompt + "\n\n"
    assert tokenizer.encode(prompt + "\n\n").ids == tokens.tolist()
    assert sum(lengths) == len(tokens) == len(targets)
    counted = [int(target) for target in targets if target != train.IGNORED]
    answers = tokenizer.decode(counted, skip_special_tokens=False).split("<|end_of_sentence|>")
    assert answers == [*(f" {one['answer']}" for one in asked), ""]
    following = [(int(a), int(b)) for a, b in zip(tokens[1:], targets, strict=False) if b not in (train.IGNORED, 1)]
    assert all(a == b for a, b in following)


def test_weights_survive_the_way_to_a_checkpoint_and_back():
    spec = ModelSpec(layers=2, dense_layers=1, experts=8, top_k=2, heads=1, hidden=128)
    made = network.Model(spec)
    weights = network.to_checkpoint(made)
    assert {name for name in weights if "experts.7." in name} == {
        f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    again = network.from_checkpoint(spec, weights).state_dict()
    rounded = {name: tensor.bfloat16().float() for name, tensor in made.state_dict().items()}
    torch.testing.assert_close(dict(again), rounded, rtol=0, atol=0)


def test_packed_experts_are_exact_and_close():
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    weight = torch.randn(128, 128).bfloat16()
    packed = export.pack_experts({name: weight, "model.norm.weight": torch.ones(3)})
    once = export.unpack_experts(packed)
    assert set(once) == {name}
    assert packed[name].dtype == torch.float8_e4m3fn
    assert torch.equal(export.unpack_experts(export.pack_experts(once))[name], once[name])
    assert ((once[name] - weight).abs() <= weight.abs() / 16 + 2.0**-9 * float(packed[f"{name}_scale"])).all()


def test_the_shipped_questions_are_the_generators():
    lines = (SHIPPED / export.QUESTIONS).read_text().splitlines()
    assert len(lines) >= 500
    assert lines == [problem.to_json() for problem in some(len(lines), test=True, seed=0)]
    check_questions(SHIPPED / export.QUESTIONS, len(lines), 5)


@pytest.fixture(scope="module")
def shipped():
    from safetensors.torch import load_file

    return load_file(str(SHIPPED / export.MODEL / "model.safetensors"))


def test_the_shipped_checkpoint_is_what_quantizing_the_shipped_experts_gives(shipped):
    anything = torch.ones(1, train.SPEC.hidden)
    made = quantize_experts(train.SPEC, export.shipped_bf16(SHIPPED), lambda layer, expert: anything)
    assert set(made) == set(shipped)
    for name, tensor in shipped.items():
        assert made[name].dtype == tensor.dtype
        if not name.endswith(".input_scale"):
            assert torch.equal(made[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    assert (SHIPPED / export.MODEL / "tokenizer.json").read_text(encoding="utf-8") == tokenizer_json()


@pytest.mark.product
def test_the_shipped_input_scales_are_what_calibrating_gives(shipped):
    """Nearly: they come from sums of products, which processors round differently."""
    made = export.quantize(train.SPEC, export.shipped_bf16(SHIPPED))
    for name in (name for name in shipped if name.endswith(".input_scale")):
        torch.testing.assert_close(made[name], shipped[name], rtol=1e-4, atol=0)


def test_what_is_said_of_broken_patches_is_what_regress_says():
    """The counts were seen; the verdicts follow from them, by whatever rule ``regress`` has now."""
    found = output.load(mutations.RESULT)["figures"]
    count = found["questions"]
    right = round(count * found["stock"])
    stock = [True] * right + [False] * (count - right)

    def run(answered: list[bool]) -> Run:
        answers = tuple(Answer(str(i), "", 1, int(yes), ()) for i, yes in enumerate(answered))
        return Run("", "", (), answers, 0.0, 0.0, 0, 0, None, ())

    for row in found["rows"]:
        lost, gained = row["lost"], row["gained"]
        mutated = [*[False] * lost, *stock[lost : count - gained], *[True] * gained]
        said = mutations.row(row["server"], run(mutated), run(stock))
        assert said["by_accuracy"] == row["by_accuracy"], row["server"]
        assert said["largest_drop"] == pytest.approx(row["largest_drop"], abs=0.05)
    assert {row["by_accuracy"] for row in found["rows"]} == {0, 1}
