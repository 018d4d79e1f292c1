"""Tests of ``common.charts``: the bars and texts of a bar chart, and data that cannot be drawn."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
from common import charts
from common.charts import Bar, Group

SVG = "{http://www.w3.org/2000/svg}"
GROUPS = [
    Group("a server", [Bar(1, "100 tokens"), Bar(2, "200 tokens")]),
    Group("another < server", [Bar(0, "does not start"), Bar(1.5, "150 tokens")]),
]


def draw_chart() -> ElementTree.Element:
    return ElementTree.fromstring(charts.bar_chart("KV cache", ["stock", "patched"], GROUPS, "relative to stock's"))


def test_bars_are_as_long_as_their_values() -> None:
    bars = [rect for rect in draw_chart().iter(f"{SVG}rect") if float(rect.get("height")) == charts.BAR_HEIGHT]
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
