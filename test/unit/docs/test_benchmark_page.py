"""docs/benchmarks.md is what its results say."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import render
from common import output


def test_the_page_and_its_plots_are_rendered_from_the_results():
    assert render.outdated() == []


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


def test_a_changed_result_a_changed_page_and_a_missing_plot_are_seen(tmp_path, monkeypatch):
    results, images, page = tmp_path / "results", tmp_path / "images", tmp_path / "benchmarks.md"
    shutil.copytree(output.RESULTS, results)
    shutil.copytree(render.IMAGES, images)
    page.write_text(render.PAGE.read_text())
    monkeypatch.setattr(output, "RESULTS", results)
    for name, path in (("ROOT", tmp_path), ("IMAGES", images), ("PAGE", page)):
        monkeypatch.setattr(render, name, path)

    kernel = json.loads((results / "mori-kernel.json").read_text())
    kernel["figures"]["milliseconds"][0] *= 2
    (results / "mori-kernel.json").write_text(json.dumps(kernel))
    assert render.outdated() == ["benchmarks.md", "images/mori-kernel.svg"]

    kernel["figures"]["milliseconds"][0] /= 2
    (results / "mori-kernel.json").write_text(json.dumps(kernel))
    page.write_text(page.read_text().replace("| 1.551 |", "| 1.115 |"))
    (images / "weight-shuffle.svg").unlink()
    assert render.outdated() == ["benchmarks.md", "images/weight-shuffle.svg"]


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
