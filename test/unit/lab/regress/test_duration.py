import pytest
from sglang_moe_patches.lab.regress import duration
from sglang_moe_patches.lab.regress.gsm8k import Evaluation, Progress


def asked(questions: int, parallel: int) -> Evaluation:
    return Evaluation(None, questions, 5, 512, parallel)


@pytest.mark.parametrize(
    ("questions", "parallel", "between"),
    [
        (320, 64, (50.0, 400.0)),  # five times the few's ten seconds; or 40 times
        (320, 1, (400.0, 400.0)),  # one after the other, then and now
        (320, 4, (400.0, 400.0)),
        (320, 16, (200.0, 400.0)),
        (40, 64, (10.0, 50.0)),  # no more than there are
    ],
)
def test_the_few_first_questions_bound_the_time_of_all(questions, parallel, between):
    assert duration.estimate(asked(questions, parallel), 10.0) == pytest.approx(between)


def test_what_is_left_follows_from_what_was_done():
    assert duration.left(asked(320, 64), Progress(10.0, 0, 5.0)) is None
    assert duration.left(asked(320, 64), Progress(10.0, 80, 20.0)) == pytest.approx(60.0)
    assert duration.left(asked(320, 64), Progress(10.0, 320, 20.0)) == 0


def test_nothing_is_asked_first_where_there_is_little_to_ask():
    assert [asked(count, 64).rehearsed for count in (6, 39, 40, 320)] == [0, 0, 8, 8]


@pytest.mark.parametrize(
    ("seconds", "said"), [(4.4, "4 s"), (99, "99 s"), (100, "2 min"), (5990, "100 min"), (6000, "1.7 h")]
)
def test_times_for_people(seconds, said):
    assert duration.spoken(seconds) == said


def test_ends_that_say_the_same_are_said_once():
    assert duration.between(50, 400) == "50 s to 7 min"
    assert duration.between(400, 401) == "7 min"
