"""Tests that README and the benchmarks' pages show the stored results, as ``benchmark/render.py`` renders them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import render
from common import output


def names() -> list[str]:
    """Return the names of all results, as ``output.load`` expects them."""
    return sorted(str(path.relative_to(output.RESULTS).with_suffix("")) for path in output.RESULTS.rglob("*.json"))


def test_the_pages_and_their_plots_are_rendered_from_the_results():
    assert render.find_outdated() == {}


def test_every_result_is_on_the_page_and_every_image_on_some_page():
    text = "".join(path.read_text(encoding="utf-8") for path in render.pages())
    shown = re.findall(r"<!-- figures:(\S+) -->", text)
    assert sorted(shown) == sorted(render.SECTIONS)
    results = {result for name in shown for result in render.SECTIONS[name].results}
    assert results == set(names())
    images = {path.name for path in render.IMAGES.iterdir()}
    assert set(render.PLOTS) <= images
    assert images <= set(re.findall(r"images/([^)\s\"]+)", text))


@pytest.fixture
def copied_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the results, a page and two plots to a folder in which the test may write."""
    docs, page = tmp_path / "docs", "benchmarks/overheads-and-checks.md"
    shutil.copytree(output.RESULTS, tmp_path / "results")
    shutil.copytree(render.IMAGES, docs / "images")
    (docs / page).parent.mkdir()
    shutil.copy(render.DOCS / page, docs / page)
    (tmp_path / "README.md").touch()
    plots = {name: render.PLOTS[name] for name in ("mori-rows.svg", "weight-shuffle.svg")}
    monkeypatch.setattr(output, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(render, "PLOTS", plots)
    for name, path in (("ROOT", tmp_path), ("DOCS", docs), ("IMAGES", docs / "images")):
        monkeypatch.setattr(render, name, path)
    return tmp_path


def outdated() -> list[str]:
    return [path.name for path in render.find_outdated()]


def test_an_outdated_result_page_or_plot_is_reported(copied_results: Path):
    result, page = (
        copied_results / "results/mori-rows/rows.json",
        copied_results / "docs/benchmarks/overheads-and-checks.md",
    )
    before, rows = result.read_text(), json.loads(result.read_text())
    case = next(case for case in rows["figures"]["cases"] if (case["ep"], case["batch"]) == (8, 32))
    case["received"] *= 2
    result.write_text(json.dumps(rows))
    assert outdated() == ["overheads-and-checks.md", "mori-rows.svg"]

    result.write_text(before)
    page.write_text(page.read_text(encoding="utf-8").replace("| 2,750 |", "| 2,570 |"), encoding="utf-8")
    (render.IMAGES / "weight-shuffle.svg").unlink()
    assert outdated() == ["overheads-and-checks.md", "weight-shuffle.svg"]
