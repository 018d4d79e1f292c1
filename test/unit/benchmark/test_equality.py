"""What makes a generated text out of date, and what only another processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from common import equality

TEXT = "SGLang 0.5.12.post1, 2026-11-21: 1,315.3 MB, -0.0 (+3 %), 18.3x; d=L 173.77 46.292621"


@pytest.mark.parametrize(
    ("stated", "now"),
    [
        ("46.292621", "46.292613"),
        ("173.77", "173.769999"),
        ("-0.0", "0.0"),
    ],
)
def test_the_last_bits_of_a_number_that_was_not_rounded_for_a_reader_are_not_compared(stated: str, now: str):
    assert equality.is_same_text(TEXT, TEXT.replace(stated, now))
    assert equality.is_same_text(TEXT.replace(stated, now), TEXT)


@pytest.mark.parametrize(
    ("stated", "now"),
    [
        ("1,315.3", "1,315.4"),
        ("1,315.3", "1,315.30"),
        ("+3", "-3"),
        ("-0.0", "0"),
        ("0.5.12", "0.5.13"),
        ("2026-11-21", "2026-11-22"),
        ("46.292621", "46.292721"),
        ("173.77", "173.7701"),
        ("MB", "GB"),
        (", 18.3x", ""),
    ],
)
def test_a_changed_figure_version_date_or_label_is_seen(stated: str, now: str):
    assert not equality.is_same_text(TEXT, TEXT.replace(stated, now))
    assert not equality.is_same_text(TEXT.replace(stated, now), TEXT)


def test_a_rounding_is_as_good_as_another_only_where_nudged_inputs_give_it():
    def made(*figures: float) -> str:
        return " ".join(f"{figure:,.1f}" for figure in figures)

    def again(*figures: float):
        return lambda: (made(*nudge(list(figures))) for nudge in equality.nudges())

    between, within = 999.95, 19.02
    one, other = "1,000.0 19.0", "999.9 19.0"
    assert not equality.is_same_text(one, other)
    assert equality.is_same_text(one, other, again(between * (1 - 1e-9), within))
    assert equality.is_same_text(other, one, again(between * (1 + 1e-9), within))
    assert not equality.is_same_text("999.9 19.1", one, again(between, within))
    assert not equality.is_same_text("1,000.1 19.0", one, again(between, within))


def test_two_figures_that_lie_between_roundings_need_not_fall_to_the_same_side():
    assert equality.is_same_text("1.5 2.6", "1.6 2.5", lambda: iter(["1.5 2.5", "1.6 2.6"]))
    assert not equality.is_same_text("1.5 2.6", "1.6 2.5", lambda: iter(["1.5 2.5", "1.5 2.4"]))


def test_what_differs_by_more_than_a_rounding_is_not_made_again():
    def again() -> Iterator[str]:
        raise AssertionError("made again")

    assert not equality.is_same_text("1.551", "1.115", again)
    assert not equality.is_same_text("1.551 ms", "1.552 s", again)


def test_a_name_that_is_a_hash_of_coordinates_is_not_compared_but_what_it_names_is():
    def image(first: str, second: str, used: str) -> str:
        return f'<path id="{first}"/><path id="{second}"/><g clip-path="url(#{used})" fill="#9aa5b1"/>'

    before = image("pb2001e2e19", "m0123456789", "pb2001e2e19")
    assert equality.is_same_text(before, image("p9999999999", "mabcdefabcd", "p9999999999"))
    assert not equality.is_same_text(before, image("p9999999999", "mabcdefabcd", "mabcdefabcd"))
    assert not equality.is_same_text(before, before.replace("9aa5b1", "9aa5b2"))


def test_every_float_is_nudged_and_nothing_else():
    found = equality.nudge_floats({"a": [1.5, 2, "3.5", True, None], "b": {"c": 4.0}}, lambda: 2.0)
    assert found == {"a": [3.0, 2, "3.5", True, None], "b": {"c": 8.0}}
    assert [type(value) for value in found["a"]] == [float, int, str, bool, type(None)]
    assert len(list(equality.nudges())) == 2 + equality.TRIES
    assert len({str(nudge([1.0, 1.0, 1.0])) for nudge in equality.nudges()}) == 8
