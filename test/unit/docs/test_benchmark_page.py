"""README and the pages of the benchmarks are what their results say."""

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


def names() -> list[str]:
    """Every result, as ``output.load`` takes it."""
    return sorted(str(path.relative_to(output.RESULTS).with_suffix("")) for path in output.RESULTS.rglob("*.json"))


def test_the_pages_and_their_plots_are_rendered_from_the_results():
    assert render.outdated() == {}


def test_every_result_is_on_the_page_and_every_image_on_some_page():
    text = "".join(path.read_text(encoding="utf-8") for path in render.pages())
    shown = re.findall(r"<!-- figures:(\S+) -->", text)
    assert sorted(shown) == sorted(render.SECTIONS)
    results = {result for name in shown for result in render.SECTIONS[name].results}
    assert results == set(names())
    images = {path.name for path in render.IMAGES.iterdir()}
    assert set(render.PLOTS) <= images
    assert images <= set(re.findall(r"images/([^)\s\"]+)", text))


def test_the_index_has_every_page():
    index = (render.DOCS / "benchmarks" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (render.DOCS / "benchmarks").iterdir()} - {"README.md"}
    assert pages == set(re.findall(r"^\| \[[^]]*\]\(([^)/]+)\)", index, re.MULTILINE))


def test_every_result_says_where_it_is_from():
    for name in names():
        result, path = output.load(name), output.RESULTS / name
        assert result["benchmark"].replace("_", "-") == path.parent.name
        assert {"benchmark", "command", "conditions", "figures"} <= set(result), path
        assert {"date", "machine", "engine"} <= set(result["conditions"]), path
        shown = next(shown for shown, section in render.SECTIONS.items() if name in section.results)
        several = len(render.SECTIONS[shown].results) > 2
        said = re.search(rf"{path.parent.name if several else name + '.json'}\)(.*)", render.section(shown))
        assert said is not None
        assert said[1].startswith(" (typed in)") == result.get("transcribed", False), path


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results, the pages and their plots where a test may write."""
    shutil.copytree(output.RESULTS, tmp_path / "results")
    shutil.copytree(render.DOCS, tmp_path / "docs")
    shutil.copy(render.ROOT / "README.md", tmp_path)
    monkeypatch.setattr(output, "RESULTS", tmp_path / "results")
    docs = tmp_path / "docs"
    for name, path in (("ROOT", tmp_path), ("DOCS", docs), ("IMAGES", docs / "images")):
        monkeypatch.setattr(render, name, path)
    return tmp_path


def outdated() -> list[str]:
    return [path.name for path in render.outdated()]


def test_a_changed_result_a_changed_page_and_a_missing_plot_are_seen(apart: Path):
    result, page = apart / "results/mori-rows/kernel-h200.json", apart / "docs/benchmarks/mori-rows.md"
    kernel = json.loads(result.read_text())
    kernel["figures"]["milliseconds"][0] *= 2
    result.write_text(json.dumps(kernel))
    assert outdated() == ["mori-rows.md", "mori-kernel.svg"]

    kernel["figures"]["milliseconds"][0] /= 2
    result.write_text(json.dumps(kernel))
    page.write_text(page.read_text(encoding="utf-8").replace("| 1.551 |", "| 1.115 |"), encoding="utf-8")
    (render.IMAGES / "weight-shuffle.svg").unlink()
    assert outdated() == ["mori-rows.md", "weight-shuffle.svg"]


@pytest.mark.parametrize(("old", "new"), [("| 1.551 |", "| 1.552 |"), ("| EP |", "| DP |"), ("0.5.12", "0.5.11")])
def test_a_figure_that_is_wrong_by_one_digit_and_a_changed_label_are_seen(old: str, new: str):
    page = (render.DOCS / "benchmarks" / "mori-rows.md").read_text(encoding="utf-8")
    assert old in page
    changed = page.replace(old, new)
    assert not same.same(changed, render.page(page), render.nudged(lambda load: render.page(page, load)))


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
    """Every float of every result moved in its ninth digit, each from between two roundings."""
    chance, digits = random.Random(1), itertools.cycle(range(4))

    def write(change: Callable[[Any], Any]) -> None:
        for path in sorted((apart / "results").rglob("*.json")):
            path.write_text(json.dumps(change(json.loads(path.read_text()))))

    def perturb(value: Any) -> Any:
        return same.nudged(value, lambda: chance.choice((1 + 1e-9, 1 - 1e-9)))

    write(lambda value: between(value, digits))
    for path, text in render.outdated().items():
        path.write_text(text, encoding="utf-8")
    stood = "".join(path.read_text(encoding="utf-8") for path in render.pages())
    write(perturb)
    turned = [
        one for one, other in zip(same.cut(stood)[1], same.cut(render.page(stood))[1], strict=True) if one != other
    ]
    assert len(turned) > 20  # otherwise nothing lay between
    assert outdated() == []
