"""Bar charts as SVG: the same file on every machine, readable in light and dark themes.

An SVG of matplotlib has fixed colours, and its coordinates depend on the release. These charts are text: a browser
chooses colours by ``prefers-color-scheme`` and scales the drawing to the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 640
"""Width of the drawing, in the drawing's units. The text is still 9 pixels high if a page shows the drawing 400
pixels wide.
"""
TEXT_LEFT, BAR_LEFT = 12, 12
BAR_HEIGHT, BAR_GAP, LABEL_HEIGHT, GROUP_GAP = 15, 3, 20, 12
VALUE_WIDTH = 210
"""Free space to the right of the longest bar for its text, in the drawing's units."""
CHARACTER_WIDTH = 7.4
"""Largest width of a character of the 13-unit text, in the drawing's units. Labels are measured with it, because no
font is at hand.
"""
STYLE = """
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .note { font-size: 12px; fill: #59636e }
  .bar0 { fill: #9aa4b0 } .bar1 { fill: #2f6fdb } .bar2 { fill: #2c9a5f } .bar3 { fill: #b7791f }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .note { fill: #9198a1 }
    .bar0 { fill: #656f7a } .bar1 { fill: #5b9dff } .bar2 { fill: #4cc38a } .bar3 { fill: #d9a441 }
  }
"""


class Bar(NamedTuple):
    """One bar of a group.

    :param length: value of the bar on the chart's axis. With 0, only the text is drawn.
    :param text: the value as a reader sees it, with its unit.
    """

    length: float
    text: str


class Group(NamedTuple):
    """Group of bars below one label, with one bar for each series of the chart."""

    label: str
    bars: Sequence[Bar]


def bar_chart(title: str, series: Sequence[str], groups: Sequence[Group], note: str = "") -> str:
    """Draw horizontal bars in groups.

    :param series: names of the bars of each group, in order: the legend.
    :param note: line below the chart; "" leaves it out.
    :returns: text of an SVG file.
    :raises ValueError: a text is too wide for the drawing.
    """
    longest = max((bar.length for group in groups for bar in group.bars), default=0) or 1
    scale = (WIDTH - BAR_LEFT - VALUE_WIDTH) / longest
    lines = [_text(TEXT_LEFT, 22, title, "title")]
    top, left = 44, TEXT_LEFT
    for place, name in enumerate(series):
        lines.append(f'<rect class="bar{place}" x="{left}" y="{top - 11}" width="12" height="12" rx="2"/>')
        lines.append(_text(left + 18, top, name))
        left += 18 + round(len(name) * CHARACTER_WIDTH) + 18
    top += 14
    for group in groups:
        top += LABEL_HEIGHT
        lines.append(_text(TEXT_LEFT, top - 5, group.label))
        for place, bar in enumerate(group.bars):
            width = round(bar.length * scale, 1)
            if width:
                lines.append(
                    f'<rect class="bar{place}" x="{BAR_LEFT}" y="{top}" width="{width}" height="{BAR_HEIGHT}" rx="2"/>'
                )
            lines.append(_text(BAR_LEFT + round(width) + 6 * bool(width), top + 12, bar.text))
            top += BAR_HEIGHT + BAR_GAP
        top += GROUP_GAP
    if note:
        top += 8
        lines.append(_text(TEXT_LEFT, top, note, "note"))
        top += 12
    height = top + 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            *lines,
            "</svg>",
            "",
        ]
    )


def _text(left: float, top: float, text: str, kind: str = "") -> str:
    if left + len(text) * CHARACTER_WIDTH > WIDTH:
        raise ValueError(f"too wide for a chart of {WIDTH} units: {text}")
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{left}" y="{top}">{escape(text)}</text>'
