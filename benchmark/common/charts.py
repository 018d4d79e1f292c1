"""Charts as SVG: the same file on every machine, readable in light and dark themes.

An SVG of matplotlib has fixed colours, and its coordinates depend on the release. These charts are text: a browser
chooses colours by ``prefers-color-scheme`` and scales the drawing to the page. Each chart has a background of its own,
so it stays readable if a page and the browser disagree about the theme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 520
"""Width of the drawing, in pixels. A phone shows it 368 pixels wide, and its text is 10 pixels high there."""
LEFT = 12
"""Distance of texts and bars from the left edge of the drawing, in pixels."""
BAR_HEIGHT, BAR_GAP, LABEL_HEIGHT, GROUP_GAP, LINE_HEIGHT = 15, 3, 24, 10, 18
VALUE_WIDTH = 225
"""Space for a text to the right of the longest bar, in pixels."""
CHARACTER_WIDTH, TITLE_CHARACTER_WIDTH, NOTE_CHARACTER_WIDTH = 7.7, 10.2, 6.8
"""Average width of a character in pixels, for three kinds of text: labels, titles and notes. The widths of texts are
computed with these values. They belong to the widest usual font, because the font of a reader's browser is not known.
"""
COLOURS = {  # by series: light theme, dark theme
    "bar0": ("#9aa4b0", "#656f7a"),
    "bar1": ("#2f6fdb", "#5b9dff"),
    "bar2": ("#2c9a5f", "#4cc38a"),
    "bar3": ("#b7791f", "#d9a441"),
    "bar4": ("#9b4f96", "#c984c4"),
}
LIGHT, DARK = 0, 1


def _colours(theme: int) -> str:
    text, note, background, line = (
        ("#1f2328", "#59636e", "#ffffff", "#d1d9e0"),
        ("#e6edf3", "#9198a1", "#0d1117", "#3d444d"),
    )[theme]
    bars = " ".join(f".{name} {{ fill: {both[theme]} }}" for name, both in COLOURS.items())
    return (
        f"text {{ fill: {text} }} .note {{ fill: {note} }} .back {{ fill: {background} }} .line {{ stroke: {line} }} "
        f".band {{ fill: {line}; opacity: 0.5 }} {bars}"
    )


STYLE = f"""
  text {{ font: 14px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }}
  .title {{ font-size: 16px; font-weight: 600 }} .note {{ font-size: 12px }} .end {{ text-anchor: end }}
  .middle {{ text-anchor: middle }}
  {_colours(LIGHT)}
  @media (prefers-color-scheme: dark) {{
    {_colours(DARK)}
  }}
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


class Stack(NamedTuple):
    """One bar that is made of a part for each series of the chart.

    :param text: the sum as a reader sees it, with its unit.
    """

    label: str
    lengths: Sequence[float]
    text: str


class Point(NamedTuple):
    x: float
    y: float


def bar_chart(title: str, series: Sequence[str], groups: Sequence[Group], note: str = "") -> str:
    """Draw horizontal bars in groups.

    :param series: names of the bars of each group, in order: the legend.
    :param note: text below the chart; "" leaves it out.
    :returns: text of an SVG file.
    :raises ValueError: a text is too wide for the drawing.
    """
    longest = max((bar.length for group in groups for bar in group.bars), default=0)
    lines, top = _begin(title, series)
    for group in groups:
        top += LABEL_HEIGHT
        lines.append(_text(LEFT, top - 6, group.label))
        for place, bar in enumerate(group.bars):
            width = _scale(bar.length, longest)
            if width:
                lines.append(_rectangle(f"bar{place}", LEFT, top, width))
            lines.append(_text(LEFT + round(width) + 6 * bool(width), top + 12, bar.text))
            top += BAR_HEIGHT + BAR_GAP
        top += GROUP_GAP
    return _finish(title, lines, top, note)


def stacked_chart(title: str, series: Sequence[str], stacks: Sequence[Stack], note: str = "") -> str:
    """Draw one horizontal bar for each label. Its parts lie one after the other.

    :param series: names of the parts of each bar, in order: the legend.
    :param note: text below the chart; "" leaves it out.
    :returns: text of an SVG file.
    :raises ValueError: a text is too wide for the drawing.
    """
    longest = max((sum(stack.lengths) for stack in stacks), default=0)
    lines, top = _begin(title, series)
    for stack in stacks:
        top += LABEL_HEIGHT
        lines.append(_text(LEFT, top - 6, stack.label))
        left = float(LEFT)
        for place, length in enumerate(stack.lengths):
            width = _scale(length, longest)
            if width:
                lines.append(_rectangle(f"bar{place}", round(left, 1), top, width, corner=0))
            left += width
        lines.append(_text(round(left) + 6, top + 12, stack.text))
        top += BAR_HEIGHT + BAR_GAP + GROUP_GAP
    return _finish(title, lines, top, note)


def scatter_chart(title: str, axes: tuple[str, str], points: Sequence[Point], step: float, share: float) -> str:
    """Draw points on two axes of one unit, both from 0, and a band around the diagonal.

    :param axes: names of the x-axis and of the y-axis, with their unit.
    :param step: distance of two grid lines.
    :param share: largest deviation of the band from the diagonal, as a share. With 0.1, the band is from y = 0.9 x to
        y = 1.1 x.
    :returns: text of an SVG file.
    :raises ValueError: a text is too wide for the drawing.
    """
    count = int(max(max(point) for point in points) / step) + 1
    left, top, width, height = 64, 64, WIDTH - 64 - 32, 330

    def place(x: float, y: float) -> tuple[float, float]:
        return round(left + x / (count * step) * width, 1), round(top + height - y / (count * step) * height, 1)

    lines = [_text(LEFT, 24, title, "title"), _text(LEFT, 48, axes[1])]
    most = count * step
    corners = ((0, 0), (most, most * (1 - share)), (most, most), (most / (1 + share), most))
    lines.append(f'<polygon class="band" points="{" ".join(f"{x},{y}" for x, y in (place(*c) for c in corners))}"/>')
    for number in range(count + 1):
        (x, bottom), (_, y) = place(number * step, 0), place(0, number * step)
        lines.append(f'<path class="line" d="M{left} {y}H{left + width}M{x} {top}V{bottom}"/>')
        if number:
            lines.append(_text(left - 8, y + 5, f"{number * step:,.0f}", "end"))
        lines.append(_text(x, bottom + 20, f"{number * step:,.0f}", "middle"))
    for point in points:
        x, y = place(*point)
        lines.append(f'<circle class="bar1" cx="{x}" cy="{y}" r="4.5" opacity="0.7"/>')
    below = top + height + 42
    lines.append(_text(LEFT, below, axes[0]))
    return _finish(title, lines, below, f"Grey band: within {100 * share:.0f} % of the measurement.")


def _begin(title: str, series: Sequence[str]) -> tuple[list[str], int]:
    """Draw the title and the legend. Return their lines of SVG, and the y-coordinate below the legend."""
    lines = [_text(LEFT, 24, title, "title")]
    top, left = 50, float(LEFT)
    for place, name in enumerate(series if len(series) > 1 else ()):
        width = 18 + len(name) * CHARACTER_WIDTH
        if left + width > WIDTH:
            top, left = top + LINE_HEIGHT, LEFT
        lines.append(_rectangle(f"bar{place}", round(left, 1), top - 11, 12, 12))
        lines.append(_text(round(left + 18, 1), top, name))
        left += width + 14
    return lines, top + 14


def _finish(title: str, lines: Sequence[str], top: int, note: str) -> str:
    """Draw the note, and return the text of the SVG file.

    :param lines: lines of SVG that draw the rest of the chart.
    :param top: y-coordinate below the rest of the chart.
    """
    lines = [*lines]
    for line in _wrap(note):
        top += LINE_HEIGHT
        lines.append(_text(LEFT, top, line, "note"))
    height = top + 14
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def _wrap(note: str) -> Iterator[str]:
    """Break a note into lines that fit the drawing."""
    line = ""
    for word in note.split():
        if line and LEFT + (len(line) + 1 + len(word)) * NOTE_CHARACTER_WIDTH > WIDTH:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    if line:
        yield line


def _scale(length: float, longest: float) -> float:
    """Convert the value of a bar to its width in pixels. The longest bar leaves :data:`VALUE_WIDTH` pixels free."""
    return round(length * (WIDTH - LEFT - VALUE_WIDTH) / (longest or 1), 1)


def _rectangle(kind: str, left: float, top: float, width: float, height: float = BAR_HEIGHT, corner: int = 2) -> str:
    return f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="{corner}"/>'


def _text(left: float, top: float, text: str, kind: str = "") -> str:
    """Draw a text.

    :param kind: class of the text in :data:`STYLE`.
    """
    width = {"title": TITLE_CHARACTER_WIDTH, "note": NOTE_CHARACTER_WIDTH}.get(kind, CHARACTER_WIDTH) * len(text)
    right = left if kind == "end" else left + width / (2 if kind == "middle" else 1)
    if right > WIDTH:
        raise ValueError(f"too wide for a chart of {WIDTH} units: {text}")
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{left}" y="{top}">{escape(text)}</text>'
