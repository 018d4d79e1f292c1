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


def outcome(losses: int, gains: int, both: int = 0, **settings) -> Comparison:
    stock = [True] * losses + [False] * gains + [True] * both
    patched = [False] * losses + [True] * gains + [True] * both
    return compare(run("stock", stock), run("patched", patched), **{"require_identical": False, **settings})


def test_a_run_counts():
    one = run("stock", [True, False, True, True])
    assert (one.correct, one.accuracy, one.input_throughput, one.output_throughput) == (3, 0.75, 100.0, 25.0)


@given(losses=st.integers(0, 40), gains=st.integers(0, 40))
def test_mcnemar_is_the_binomial_tail(losses, gains):
    n = losses + gains
    tail = sum(comb(n, k) for k in range(losses, n + 1)) / 2**n
    lower = sum(comb(n, k) for k in range(losses + 1)) / 2**n
    two_sided, worse = mcnemar(losses, gains)
    assert worse == pytest.approx(tail if n else 1.0)
    assert two_sided == pytest.approx(min(1.0, 2 * min(tail, lower)) if n else 1.0)


@given(questions=st.integers(1, 40), alpha=st.floats(1e-6, 0.6))
def test_the_detectable_drop_is_the_first_one_called_a_drop(questions, alpha):
    called = [k for k in range(1, questions + 1) if outcome(k, 0, questions - k, alpha=alpha).worse]
    assert outcome(0, 0, questions, alpha=alpha).detectable_drop == (called[0] if called else None)


@given(
    questions=st.integers(1, 30),
    right=st.integers(0, 30),
    lost=st.integers(0, 30),
    alpha=st.floats(1e-6, 0.6),
    max_drop=st.floats(1, 90),
)
def test_a_pass_is_given_only_where_a_drop_could_have_been_called_one(questions, right, lost, alpha, max_drop):
    """Had patched answered nothing, it must have been called worse and have lost more than it may; else the run is no
    pass. Nor is it where the interval of the drop reaches beyond what may be lost."""
    right, lost = min(right, questions), min(lost, right, questions)
    stock = [True] * right + [False] * (questions - right)
    patched = [False] * lost + stock[lost:]
    given = {"require_identical": False, "alpha": alpha, "max_drop": max_drop}
    found = compare(run("stock", stock), run("patched", patched), **given)
    nothing = compare(run("stock", stock), run("patched", [False] * questions), **given)
    told = nothing.worse and 100 * right / questions > max_drop
    within = bound.p_value(questions, lost, 0, max_drop / 100) <= alpha
    assert found.accuracy_can_tell == told
    assert found.within == (told and within)
    assert found.exit_code == (1 if found.worse else 0 if told and within else 2)


def test_no_worse_is_said_where_the_interval_ends_below_what_may_be_lost():
    """5 lost and 4 gained of 200 are no significant drop at all; but they may be one of 3 points."""
    for losses, gains, code in ((0, 0, 0), (3, 2, 0), (5, 4, 2), (4, 0, 2), (6, 0, 1), (3, 9, 0)):
        found = outcome(losses, gains, 200 - losses - gains)
        assert (found.exit_code, found.conclusive) == (code, code != 2), (losses, gains)
        if code != 1:
            assert (found.largest_drop <= 3) == (code == 0)
    assert outcome(5, 4, 191, max_drop=4.0).exit_code == 0
    assert outcome(0, 0, 98).exit_code == 2
    assert outcome(0, 0, 99).exit_code == 0
    assert outcome(0, 0, 98, alpha=0.1).exit_code == 0


def test_how_many_questions_it_takes_if_they_go_like_these():
    assert outcome(4, 0, 196).questions_needed > 282  # more differs than is expected
    assert outcome(0, 0, 50).questions_needed == 99
    assert outcome(3, 0, 97).questions_needed is None


def test_identical_answers_are_a_verdict_of_their_own():
    nothing_right = run("stock", [False] * 20)
    required = compare(nothing_right, nothing_right, require_identical=True)
    assert (required.conclusive, required.exit_code) == (True, 0)
    found_only = compare(nothing_right, nothing_right, require_identical=False)
    assert (found_only.conclusive, found_only.exit_code) == (False, 2)
    assert found_only.to_dict()["results"]["conclusive"] is False
    differing = compare(nothing_right, replaced(nothing_right, 3, tokens=(9,)), require_identical=True)
    assert (differing.conclusive, differing.exit_code) == (True, 1)


def test_a_drop_is_worse_and_a_rise_is_not():
    drop = outcome(5, 0, 15)
    assert drop.worse
    assert "from 20 to 15 of 20 questions (5 lost, 0 gained; one-sided exact McNemar p = 0.031" in drop.reasons[0]
    assert outcome(3, 2, alpha=0.9).worse
    for other in (outcome(4, 0, 16), outcome(0, 20), outcome(10, 8, 2), outcome(0, 0, 20)):
        assert not other.worse
        assert other.reasons == ()
    # Unless fewer are right it is none, however generous alpha is.
    for losses, gains, both, alpha in ((5, 0, 15, 0.03), (3, 3, 0, 0.9), (2, 3, 0, 0.9)):
        assert not outcome(losses, gains, both, alpha=alpha).worse


def replaced(one: Run, index: int, **changes) -> Run:
    answers = list(one.answers)
    answers[index] = dataclasses.replace(answers[index], **changes)
    return dataclasses.replace(one, name="patched", answers=tuple(answers))


@pytest.mark.parametrize(
    ("changes", "texts", "tokens"),
    [({"text": "forty-two"}, 1, 0), ({"tokens": (1, 3)}, 0, 1), ({"text": "x", "tokens": ()}, 1, 1)],
)
def test_differing_answers(changes, texts, tokens):
    stock = run("stock", [True] * 6)
    patched = replaced(stock, 4, **changes)
    lenient = compare(stock, patched, require_identical=False)
    assert (lenient.texts_differ, lenient.tokens_differ, lenient.token_identical) == (texts, tokens, not tokens)
    assert lenient.differing == ((4, stock.answers[4], patched.answers[4]),)
    assert not lenient.worse
    strict = compare(stock, patched, require_identical=True)
    assert strict.reasons == ("1 of 6 answers differs although identical answers were required.",)
    assert compare(stock, stock, require_identical=True).reasons == ()


def test_only_the_same_questions_can_be_compared():
    stock = run("stock", [True] * 3)
    for other in (
        run("patched", [True] * 2),
        replaced(stock, 1, question="another"),
        replaced(stock, 1, label=7),
        dataclasses.replace(stock, answers=stock.answers[::-1]),
    ):
        with pytest.raises(ValueError, match="did not answer the same questions"):
            compare(stock, other, require_identical=False)
    with pytest.raises(ValueError, match="no answers"):
        compare(run("stock", []), run("patched", []), require_identical=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha", value) for value in (0, 1, -0.1, 2, float("nan"))),
        *(("max_drop", value) for value in (0, 100, -3, float("nan"))),
    ],
)
def test_alpha_is_a_probability_and_what_may_be_lost_a_part_of_all(name, value):
    with pytest.raises(ValueError, match=name):
        outcome(0, 0, 3, **{name: value})


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_a_report_is_json_of_runs_and_results(memory):
    stock = run("stock", [True] * 6, memory=memory)
    made = compare(stock, replaced(stock, 2, predicted=None, text="\u2028 <b>"), require_identical=True, alpha=0.01)
    data = json.loads(json.dumps(made.to_dict()))
    assert data["schema"] == 2
    assert data["settings"] == {"require_identical": True, "alpha": 0.01, "max_drop": 3.0}
    assert data["runs"]["stock"]["memory"] == (memory and dataclasses.asdict(memory))
    assert data["runs"]["patched"]["answers"][2]["text"] == "\u2028 <b>"
    assert data["results"]["differing"] == [2]
    assert data["results"]["worse"] is True
