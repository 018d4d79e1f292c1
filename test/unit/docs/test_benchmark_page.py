"""docs/benchmarks.md is what its results say."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import render
from common import output, same


def test_the_page_and_its_plots_are_rendered_from_the_results():
    assert render.outdated() == {}


def test_every_result_is_on_the_page_and_every_image_on_some_page():
    shown = re.findall(r"<!-- figures:(\S+) -->", render.PAGE.read_text())
    results = {result for name in shown for result in render.SECTIONS[name].results}
    assert results == {path.stem for path in output.RESULTS.glob("*.json")}
    pages = "".join(path.read_text() for path in (render.ROOT / "README.md", *(render.ROOT / "docs").glob("*.md")))
    images = {path.name for path in render.IMAGES.iterdir()}
    assert set(render.PLOTS) <= images
    assert images <= set(re.findall(r"images/([^)\s\"]+)", pages))


def test_every_result_says_where_it_is_from():
    for path in output.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert {"benchmark", "command", "conditions", "figures"} <= set(result), path
        assert {"date", "machine", "engine"} <= set(result["conditions"]), path
        page_says = "(typed in)" in render.section(
            next(name for name, section in render.SECTIONS.items() if path.stem in section.results)
        )
        assert page_says == result.get("transcribed", False), path


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results, the page and its plots where a test may write."""
    results, images, page = tmp_path / "results", tmp_path / "images", tmp_path / "benchmarks.md"
    shutil.copytree(output.RESULTS, results)
    shutil.copytree(render.IMAGES, images)
    shutil.copy(render.PAGE, page)
    monkeypatch.setattr(output, "RESULTS", results)
    for name, path in (("ROOT", tmp_path), ("IMAGES", images), ("PAGE", page)):
        monkeypatch.setattr(render, name, path)
    return tmp_path


def outdated() -> list[str]:
    return [path.name for path in render.outdated()]


def test_a_changed_result_a_changed_page_and_a_missing_plot_are_seen(apart: Path):
    result, page = apart / "results" / "mori-kernel.json", render.PAGE.read_text(encoding="utf-8")
    kernel = json.loads(result.read_text())
    kernel["figures"]["milliseconds"][0] *= 2
    result.write_text(json.dumps(kernel))
    assert outdated() == ["benchmarks.md", "mori-kernel.svg"]

    kernel["figures"]["milliseconds"][0] /= 2
    result.write_text(json.dumps(kernel))
    render.PAGE.write_text(page.replace("| 1.551 |", "| 1.115 |"), encoding="utf-8")
    (render.IMAGES / "weight-shuffle.svg").unlink()
    assert outdated() == ["benchmarks.md", "weight-shuffle.svg"]


@pytest.mark.parametrize(("old", "new"), [("| 1.551 |", "| 1.552 |"), ("| model |", "| width |"), ("0.5.11", "0.5.10")])
def test_a_figure_that_is_wrong_by_one_digit_and_a_changed_label_are_seen(old: str, new: str):
    page = render.PAGE.read_text(encoding="utf-8")
    assert old in page
    changed = page.replace(old, new)
    assert not same.same(changed, render.page(page), render.nudged(lambda load: render.page(page, load)))


def test_a_label_of_a_plot_that_changed_is_seen(apart: Path):
    for image, label, another in (("mori-kernel.svg", "input rows", "rows"), ("mori-rows.svg", "EP=16", "EP=12")):
        path = render.IMAGES / image
        drawn = path.read_text(encoding="utf-8")
        assert label in drawn
        path.write_text(drawn.replace(label, another), encoding="utf-8")
    assert outdated() == ["mori-rows.svg", "mori-kernel.svg"]


def between(value: Any, digits: Iterator[int]) -> Any:
    """A JSON value whose floats all lie between two roundings, to one decimal place or another."""
    if isinstance(value, dict):
        return {key: between(one, digits) for key, one in value.items()}
    if isinstance(value, list):
        return [between(one, digits) for one in value]
    if not isinstance(value, float) or not value:
        return value
    unit = Decimal(10) ** -next(digits)
    while abs(Decimal(value)) < 10 * unit:
        unit /= 10
    return float((Decimal(value) // unit + Decimal("0.5")) * unit)


def test_no_processor_decides_what_is_up_to_date(apart: Path):
    """Every float of every result in the ninth digit, first as they are, then between two roundings each."""
    chance, digits = random.Random(1), itertools.cycle(range(4))

    def write(change: Callable[[Any], Any]) -> None:
        for path in sorted((apart / "results").glob("*.json")):
            path.write_text(json.dumps(change(json.loads(path.read_text()))))

    def perturb(value: Any) -> Any:
        return same.nudged(value, lambda: chance.choice((1 + 1e-9, 1 - 1e-9)))

    write(perturb)
    assert outdated() == []
    write(lambda value: between(value, digits))
    for path, text in render.outdated().items():
        path.write_text(text, encoding="utf-8")
    stood = render.PAGE.read_text(encoding="utf-8")
    write(perturb)
    turned = [
        one for one, other in zip(same.cut(stood)[1], same.cut(render.page(stood))[1], strict=True) if one != other
    ]
    assert len(turned) > 20  # otherwise nothing lay between
    assert outdated() == []


def test_a_place_that_nothing_is_known_of_is_named():
    with pytest.raises(SystemExit, match=r"figures: nothing: unknown; known: weight-shuffle"):
        render.page("<!-- figures:nothing -->\n<!-- /figures -->\n")


def test_prose_around_the_figures_stays():
    text = "before <!-- figures:launcher-cost -->\nold\n<!-- /figures --> after"
    rendered = render.page(text)
    assert rendered.startswith("before <!-- figures:launcher-cost -->\n")
    assert rendered.endswith("<!-- /figures --> after")
    assert "old\n" not in rendered
    assert render.page(rendered) == rendered
