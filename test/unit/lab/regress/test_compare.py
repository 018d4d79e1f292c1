"""Tests of ``lab/regress/compare.py``, which compares a stock run with a patched run. They check the verdicts, the
limits of the verdicts, and the JSON report."""

import dataclasses
import json
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.lab.regress import bound
from sglang_moe_patches.lab.regress.compare import (
    Answer,
    Comparison,
    Memory,
    Run,
    compare,
    mcnemar,
)

MEMORY = Memory("cpu", None, 4096, 12, forwards=30, moe_layers=3, output_buffers=3)


def answer(index: int, right: bool, tokens: tuple[int, ...] = (1, 2)) -> Answer:
    return Answer(f"question {index}", "42" if right else "43", 42, 42 if right else 43, tokens)


def run(name: str, right: list[bool], **changes) -> Run:
    answers = tuple(answer(i, r) for i, r in enumerate(right))
    values = {
        "engine": "0.5.12.post1",
        "command": ("python", "-m", "sglang.launch_server"),
        "startup_s": 20.0,
        "latency_s": 4.0,
        "input_tokens": 400,
        "output_tokens": 100,
        "memory": MEMORY,
        "changes": (("output-buffer", "applied", ""),),
    }
    return Run(name=name, answers=answers, **{**values, **changes})


def compare_counts(losses: int, gains: int, both_right: int = 0, **settings) -> Comparison:
    stock = [True] * losses + [False] * gains + [True] * both_right
    patched = [False] * losses + [True] * gains + [True] * both_right
    return compare(run("stock", stock), run("patched", patched), **{"require_identical": False, **settings})


def test_accuracy_and_throughput_of_a_run():
    stock = run("stock", [True, False, True, True])
    assert (stock.correct, stock.accuracy, stock.input_throughput, stock.output_throughput) == (3, 0.75, 100.0, 25.0)


@given(losses=st.integers(0, 40), gains=st.integers(0, 40))
def test_mcnemars_p_values_are_binomial_tails(losses, gains):
    n = losses + gains
    tail = sum(comb(n, k) for k in range(losses, n + 1)) / 2**n
    lower = sum(comb(n, k) for k in range(losses + 1)) / 2**n
    two_sided, worse = mcnemar(losses, gains)
    assert worse == pytest.approx(tail if n else 1.0)
    assert two_sided == pytest.approx(min(1.0, 2 * min(tail, lower)) if n else 1.0)


@given(questions=st.integers(1, 40), alpha=st.floats(1e-6, 0.6))
def test_the_detectable_drop_is_the_smallest_significant_drop(questions, alpha):
    significant = [k for k in range(1, questions + 1) if compare_counts(k, 0, questions - k, alpha=alpha).worse]
    assert compare_counts(0, 0, questions, alpha=alpha).detectable_drop == (significant[0] if significant else None)


@given(
    questions=st.integers(1, 30),
    right=st.integers(0, 30),
    lost=st.integers(0, 30),
    alpha=st.floats(1e-6, 0.6),
    max_drop=st.floats(1, 90),
)
def test_a_run_passes_only_if_it_could_have_shown_a_drop(questions, right, lost, alpha, max_drop):
    """A run passes only if it could have shown a drop: stock's accuracy is above ``max_drop``, and a patched server
    without any right answer would be significantly worse. In addition, the confidence interval of the drop must end
    below ``max_drop``."""
    right, lost = min(right, questions), min(lost, right, questions)
    stock = [True] * right + [False] * (questions - right)
    patched = [False] * lost + stock[lost:]
    settings = {"require_identical": False, "alpha": alpha, "max_drop": max_drop}
    comparison = compare(run("stock", stock), run("patched", patched), **settings)
    all_wrong = compare(run("stock", stock), run("patched", [False] * questions), **settings)
    can_tell = all_wrong.worse and 100 * right / questions > max_drop
    within = bound.p_value(questions, lost, 0, max_drop / 100) <= alpha
    assert comparison.accuracy_can_tell == can_tell
    assert comparison.is_within_max_drop == (can_tell and within)
    assert comparison.exit_code == (1 if comparison.worse else 0 if can_tell and within else 2)


def test_a_run_passes_if_the_interval_of_the_drop_ends_below_the_allowed_drop():
    """A run passes (code 0) if the confidence interval of the drop ends below the allowed 3 points. It is inconclusive
    (code 2) if the drop is not significant, but the interval contains larger drops, as with 5 losses and 4 gains in 200
    answers."""
    for losses, gains, code in ((0, 0, 0), (3, 2, 0), (5, 4, 2), (4, 0, 2), (6, 0, 1), (3, 9, 0)):
        comparison = compare_counts(losses, gains, 200 - losses - gains)
        assert (comparison.exit_code, comparison.conclusive) == (code, code != 2), (losses, gains)
        if code != 1:
            assert (comparison.largest_drop <= 3) == (code == 0)
    assert compare_counts(5, 4, 191, max_drop=4.0).exit_code == 0
    assert compare_counts(0, 0, 98).exit_code == 2
    assert compare_counts(0, 0, 99).exit_code == 0
    assert compare_counts(0, 0, 98, alpha=0.1).exit_code == 0


def test_number_of_questions_needed_with_the_observed_losses_and_gains():
    assert (
        compare_counts(4, 0, 196).questions_needed > 282
    )  # more than the usual 282, because more answers differ than expected
    assert compare_counts(0, 0, 50).questions_needed == 99
    assert compare_counts(3, 0, 97).questions_needed is None


def test_required_identical_answers_give_a_verdict_without_any_right_answer():
    nothing_right = run("stock", [False] * 20)
    required = compare(nothing_right, nothing_right, require_identical=True)
    assert (required.conclusive, required.exit_code) == (True, 0)
    not_required = compare(nothing_right, nothing_right, require_identical=False)
    assert (not_required.conclusive, not_required.exit_code) == (False, 2)
    assert not_required.to_dict()["results"]["conclusive"] is False
    differing = compare(nothing_right, replace_answer(nothing_right, 3, tokens=(9,)), require_identical=True)
    assert (differing.conclusive, differing.exit_code) == (True, 1)


def test_only_a_significant_drop_is_worse():
    drop = compare_counts(5, 0, 15)
    assert drop.worse
    assert "from 20 to 15 of 20 questions (5 lost, 0 gained; one-sided exact McNemar p = 0.031" in drop.reasons[0]
    assert compare_counts(3, 2, alpha=0.9).worse
    for counts in ((4, 0, 16), (0, 20), (10, 8, 2), (0, 0, 20)):
        comparison = compare_counts(*counts)
        assert not comparison.worse
        assert comparison.reasons == ()
    # A run without a drop is never worse, however large alpha is.
    for losses, gains, both_right, alpha in ((5, 0, 15, 0.03), (3, 3, 0, 0.9), (2, 3, 0, 0.9)):
        assert not compare_counts(losses, gains, both_right, alpha=alpha).worse


def replace_answer(base: Run, index: int, **changes) -> Run:
    answers = list(base.answers)
    answers[index] = dataclasses.replace(answers[index], **changes)
    return dataclasses.replace(base, name="patched", answers=tuple(answers))


@pytest.mark.parametrize(
    ("changes", "texts", "tokens"),
    [({"text": "forty-two"}, 1, 0), ({"tokens": (1, 3)}, 0, 1), ({"text": "x", "tokens": ()}, 1, 1)],
)
def test_differing_texts_and_tokens_are_counted_and_are_worse_only_if_required(changes, texts, tokens):
    stock = run("stock", [True] * 6)
    patched = replace_answer(stock, 4, **changes)
    lenient = compare(stock, patched, require_identical=False)
    assert (lenient.texts_differ, lenient.tokens_differ, lenient.token_identical) == (texts, tokens, not tokens)
    assert lenient.differing == ((4, stock.answers[4], patched.answers[4]),)
    assert not lenient.worse
    strict = compare(stock, patched, require_identical=True)
    assert strict.reasons == ("1 of 6 answers differs although identical answers were required.",)
    assert compare(stock, stock, require_identical=True).reasons == ()


def test_runs_with_different_questions_cannot_be_compared():
    stock = run("stock", [True] * 3)
    for patched in (
        run("patched", [True] * 2),
        replace_answer(stock, 1, question="another"),
        replace_answer(stock, 1, label=7),
        dataclasses.replace(stock, answers=stock.answers[::-1]),
    ):
        with pytest.raises(ValueError, match="did not answer the same questions"):
            compare(stock, patched, require_identical=False)
    with pytest.raises(ValueError, match="no question was answered"):
        compare(run("stock", []), run("patched", []), require_identical=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha", value) for value in (0, 1, -0.1, 2, float("nan"))),
        *(("max_drop", value) for value in (0, 100, -3, float("nan"))),
    ],
)
def test_alpha_and_max_drop_out_of_range_are_rejected(name, value):
    with pytest.raises(ValueError, match=name):
        compare_counts(0, 0, 3, **{name: value})


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_the_json_report_has_runs_settings_and_results(memory):
    stock = run("stock", [True] * 6, memory=memory)
    comparison = compare(
        stock, replace_answer(stock, 2, predicted=None, text="\u2028 <b>"), require_identical=True, alpha=0.01
    )
    data = json.loads(json.dumps(comparison.to_dict()))
    assert data["schema"] == 2
    assert data["settings"] == {"require_identical": True, "alpha": 0.01, "max_drop": 3.0}
    assert data["runs"]["stock"]["memory"] == (memory and dataclasses.asdict(memory))
    assert data["runs"]["patched"]["answers"][2]["text"] == "\u2028 <b>"
    assert data["results"]["differing"] == [2]
    assert data["results"]["worse"] is True
