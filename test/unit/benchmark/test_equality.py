"""Tests of ``common.equality``, which compares generated pages and plots. Numbers may differ in their last digits,
because processors round differently."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from common import equality

TEXT = "SGLang 0.5.12.post1, 2026-11-21: 1,315.3 MB, -0.0 (+3 %), 18.3x; d=L 173.77 46.292621"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("46.292621", "46.292613"),
        ("173.77", "173.769999"),
        ("-0.0", "0.0"),
    ],
)
def test_unrounded_numbers_may_differ_in_their_last_bits(before: str, now: str):
    assert equality.is_same_text(TEXT, TEXT.replace(before, now))
    assert equality.is_same_text(TEXT.replace(before, now), TEXT)


@pytest.mark.parametrize(
    ("before", "now"),
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
def test_a_changed_figure_version_date_or_label_is_a_difference(before: str, now: str):
    assert not equality.is_same_text(TEXT, TEXT.replace(before, now))
    assert not equality.is_same_text(TEXT.replace(before, now), TEXT)


def test_another_rounding_is_equal_only_if_nudged_inputs_are_rounded_to_it():
    def make_text(*figures: float) -> str:
        return " ".join(f"{figure:,.1f}" for figure in figures)

    def remake(*figures: float):
        return lambda: (make_text(*nudge(list(figures))) for nudge in equality.nudges())

    between, within = 999.95, 19.02
    rounded_up, rounded_down = "1,000.0 19.0", "999.9 19.0"
    assert not equality.is_same_text(rounded_up, rounded_down)
    assert equality.is_same_text(rounded_up, rounded_down, remake(between * (1 - 1e-9), within))
    assert equality.is_same_text(rounded_down, rounded_up, remake(between * (1 + 1e-9), within))
    assert not equality.is_same_text("999.9 19.1", rounded_up, remake(between, within))
    assert not equality.is_same_text("1,000.1 19.0", rounded_up, remake(between, within))


def test_two_figures_between_roundings_may_be_rounded_in_different_directions():
    assert equality.is_same_text("1.5 2.6", "1.6 2.5", lambda: iter(["1.5 2.5", "1.6 2.6"]))
    assert not equality.is_same_text("1.5 2.6", "1.6 2.5", lambda: iter(["1.5 2.5", "1.5 2.4"]))


def test_a_text_is_not_remade_for_a_difference_of_more_than_a_rounding():
    def remake() -> Iterator[str]:
        raise AssertionError("the text was remade")

    assert not equality.is_same_text("1.551", "1.115", remake)
    assert not equality.is_same_text("1.551 ms", "1.552 s", remake)


def test_names_that_are_hashes_of_coordinates_are_not_compared_but_their_references_are():
    def image(first: str, second: str, used: str) -> str:
        return f'<path id="{first}"/><path id="{second}"/><g clip-path="url(#{used})" fill="#9aa5b1"/>'

    before = image("pb2001e2e19", "m0123456789", "pb2001e2e19")
    assert equality.is_same_text(before, image("p9999999999", "mabcdefabcd", "p9999999999"))
    assert not equality.is_same_text(before, image("p9999999999", "mabcdefabcd", "mabcdefabcd"))
    assert not equality.is_same_text(before, before.replace("9aa5b1", "9aa5b2"))


def test_only_floats_are_nudged():
    nudged = equality.nudge_floats({"a": [1.5, 2, "3.5", True, None], "b": {"c": 4.0}}, lambda: 2.0)
    assert nudged == {"a": [3.0, 2, "3.5", True, None], "b": {"c": 8.0}}
    assert [type(value) for value in nudged["a"]] == [float, int, str, bool, type(None)]
    assert len(list(equality.nudges())) == 2 + equality.TRIES
    assert len({str(nudge([1.0, 1.0, 1.0])) for nudge in equality.nudges()}) == 8
