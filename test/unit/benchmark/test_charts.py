"""Tests of ``common.charts``: the bars and texts of a bar chart, and data that cannot be drawn."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from common import charts
from common.charts import Bar, Group, Point, Stack

SVG = "{http://www.w3.org/2000/svg}"
GROUPS = [
    Group("a server", [Bar(1, "100 tokens"), Bar(2, "200 tokens")]),
    Group("another < server", [Bar(0, "does not start"), Bar(1.5, "150 tokens")]),
]


def draw_chart() -> ElementTree.Element:
    return ElementTree.fromstring(charts.bar_chart("KV cache", ["stock", "patched"], GROUPS, "relative to stock's"))


def bars_of(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in svg.iter(f"{SVG}rect") if float(rect.get("height")) == charts.BAR_HEIGHT]


def test_bars_are_as_long_as_their_values() -> None:
    bars = bars_of(draw_chart())
    widths = [float(rect.get("width")) for rect in bars]

    assert [round(width / widths[0], 2) for width in widths] == [1, 2, 1.5], "a bar without length is not drawn"
    assert [rect.get("class") for rect in bars] == ["bar0", "bar1", "bar1"]


def test_nothing_lies_outside_the_drawing_and_no_texts_overlap() -> None:
    svg = draw_chart()
    _, _, width, height = map(float, svg.get("viewBox").split())
    texts = [(float(t.get("x")), float(t.get("y")), t.text) for t in svg.iter(f"{SVG}text")]

    assert {text for _, _, text in texts} >= {"does not start", "another < server", "relative to stock's"}
    assert all(left + len(text) * charts.CHARACTER_WIDTH <= width and top < height for left, top, text in texts)
    rows = sorted(top for left, top, _ in texts if left < 20)
    assert all(below - above >= 14 for above, below in itertools.pairwise(rows))


def test_parts_of_a_stacked_bar_follow_each_other() -> None:
    stacks = [Stack("a", [1, 2, 1], "4 s"), Stack("b", [2, 0, 0], "2 s")]
    bars = bars_of(ElementTree.fromstring(charts.stacked_chart("Seconds", ["x", "y", "z"], stacks)))
    (first, second, third), (alone,) = bars[:3], bars[3:]

    def edge(bar: ElementTree.Element) -> float:
        return float(bar.get("x")) + float(bar.get("width"))

    assert [bar.get("class") for bar in bars] == ["bar0", "bar1", "bar2", "bar0"], "a part without length is not drawn"
    assert float(second.get("x")) == pytest.approx(edge(first), abs=0.2)
    assert float(third.get("x")) == pytest.approx(edge(second), abs=0.2)
    assert float(alone.get("width")) == pytest.approx((edge(third) - charts.LEFT) / 2, abs=0.2)


def test_points_lie_on_both_axes_at_the_same_scale() -> None:
    points = [Point(5, 5), Point(10, 20), Point(20, 10)]
    svg = ElementTree.fromstring(charts.scatter_chart("Need", ("measured", "predicted"), points, 10, 0.2))
    found = [(float(point.get("cx")), float(point.get("cy"))) for point in svg.iter(f"{SVG}circle")]
    polygon = next(svg.iter(f"{SVG}polygon")).get("points").split()
    (left, bottom), (_, low), (right, top), (high, _) = (map(float, corner.split(",")) for corner in polygon)

    assert [round((x - left) / (right - left), 2) for x, _ in found] == [0.17, 0.33, 0.67], "the axis ends at 30"
    assert [round((bottom - y) / (bottom - top), 2) for _, y in found] == [0.17, 0.67, 0.33]
    assert (bottom - low) / (bottom - top) == pytest.approx(0.8, abs=0.01), "the band begins 20 % below the diagonal"
    assert (high - left) / (right - left) == pytest.approx(1 / 1.2, abs=0.01)


def test_a_chart_has_a_background_and_a_size_of_its_own() -> None:
    svg = draw_chart()
    back = next(svg.iter(f"{SVG}rect"))
    assert back.get("class") == "back"
    assert (back.get("width"), back.get("height")) == (svg.get("width"), svg.get("height"))


def test_a_long_legend_and_a_long_note_are_broken_into_lines() -> None:
    names = [f"a phase with a long name {number}" for number in range(4)]
    text = charts.stacked_chart("Seconds", names, [Stack("a", [1, 1, 1, 1], "4 s")], "word " * 40)
    svg = ElementTree.fromstring(text)
    assert len({float(rect.get("y")) for rect in svg.iter(f"{SVG}rect") if rect.get("height") == "12"}) == 2
    assert sum(text.get("class") == "note" for text in svg.iter(f"{SVG}text")) == 3


def test_a_chart_has_colours_for_light_and_dark_themes() -> None:
    style = next(draw_chart().iter(f"{SVG}style")).text
    light, dark = style.split("@media (prefers-color-scheme: dark)")

    def colours(text: str) -> dict[str, str]:
        return dict(re.findall(r"(\.bar\d) \{ fill: (#\w+) \}", text))

    assert colours(light).keys() == colours(dark).keys()
    assert not set(colours(light).values()) & set(colours(dark).values())


def test_a_text_that_is_too_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="too wide"):
        charts.bar_chart("x" * 200, ["stock"], GROUPS)
