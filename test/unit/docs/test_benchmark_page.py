"""Tests that README and the benchmarks' pages show the stored results, as ``benchmark/render.py`` renders them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import render
from common import output, overview
from memory.first_starts import ROWS

DOCS = render.DOCS


def result_names() -> list[str]:
    """Return the names of all results, as ``output.load`` expects them."""
    return sorted(str(path.relative_to(output.RESULTS).with_suffix("")) for path in output.RESULTS.rglob("*.json"))


def test_the_pages_and_their_plots_are_rendered_from_the_results():
    assert render.find_outdated() == {}


def test_every_result_is_on_the_page_and_every_image_on_some_page():
    text = "".join(path.read_text(encoding="utf-8") for path in render.pages())
    shown = re.findall(r"<!-- figures:(\S+) -->", text)
    assert sorted(shown) == sorted(render.SECTIONS)
    results = {result for name in shown for result in render.SECTIONS[name].results}
    results |= {f"{overview.FOLDER}/{name}" for name in overview.stored_rows()}
    assert results == set(result_names())
    images = {path.name for path in render.IMAGES.iterdir()}
    assert set(render.images()) <= images
    assert images <= set(re.findall(r"images/([^)\s\"]+)", text))


def test_no_server_is_stored_twice_and_no_run_is_on_two_tables():
    stored: dict[str, list[str]] = {}
    for name in result_names():
        servers = output.load(name)["figures"].get("servers")
        for kind, server in servers.items() if isinstance(servers, dict) else ():
            stored.setdefault(json.dumps(server, sort_keys=True), []).append(f"{name}, {kind}")
    assert [same for same in stored.values() if len(same) > 1] == []
    shown = [*render.SERVING, *render.SERVING_EARLIER, *render.SERVING_RECIPES]
    assert len(shown) == len(set(shown))


@pytest.fixture
def copied_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with copies of the results and images, in which the test may write. README is empty there."""
    docs = tmp_path / "docs"
    shutil.copytree(output.RESULTS, tmp_path / "results")
    shutil.copytree(render.IMAGES, docs / "images")
    (docs / "benchmarks").mkdir()
    (tmp_path / "README.md").touch()
    monkeypatch.setattr(output, "RESULTS", tmp_path / "results")
    for name, path in (("ROOT", tmp_path), ("DOCS", docs), ("IMAGES", docs / "images")):
        monkeypatch.setattr(render, name, path)
    return tmp_path


@pytest.fixture
def page_and_plots(copied_results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with copies of the results and one page. Only two of the plots are rendered."""
    page = "docs/benchmarks/overheads-and-checks.md"
    shutil.copy(DOCS / "benchmarks/overheads-and-checks.md", copied_results / page)
    plots = {name: render.PLOTS[name] for name in ("mori-rows.svg", "weight-shuffle.svg")}
    monkeypatch.setattr(render, "PLOTS", plots)
    monkeypatch.setattr(overview, "drawings", dict)
    return copied_results


def outdated_files() -> list[str]:
    return [path.name for path in render.find_outdated()]


def test_an_outdated_result_page_or_plot_is_reported(page_and_plots: Path):
    result, page = (
        page_and_plots / "results/mori-rows/rows.json",
        page_and_plots / "docs/benchmarks/overheads-and-checks.md",
    )
    before, rows = result.read_text(), json.loads(result.read_text())
    case = next(case for case in rows["figures"]["cases"] if (case["ep"], case["batch"]) == (8, 32))
    case["received"] *= 2
    result.write_text(json.dumps(rows))
    assert outdated_files() == ["overheads-and-checks.md", "mori-rows.svg"]

    result.write_text(before)
    page.write_text(page.read_text(encoding="utf-8").replace("| 2,750 |", "| 2,570 |"), encoding="utf-8")
    (render.IMAGES / "weight-shuffle.svg").unlink()
    assert outdated_files() == ["overheads-and-checks.md", "weight-shuffle.svg"]


def store_first_start(name: str, commit: str) -> None:
    """Store a made-up result of a row of the README's table."""
    result = output.load("serving/qwen3-30b-default")
    for server in result["figures"]["servers"].values():
        server["sweep"] = [{"prompts": 50, "total_throughput": 40.0, "median_tpot_ms": 15.0}]
    result["conditions"]["commit"] = commit
    path = output.RESULTS / overview.FOLDER / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result))


def test_first_starts_of_one_commit_change_the_pages_and_those_of_two_commits_are_refused(
    copied_results: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(render, "PLOTS", {})
    shutil.rmtree(output.RESULTS / overview.FOLDER, ignore_errors=True)
    for page, names in (
        ("README.md", ("launched-chart", "launched", "launched-settings")),
        ("docs/benchmarks/README.md", ("gains", "charts")),
    ):
        (copied_results / page).write_text("\n".join(f"<!-- figures:{name} -->\n<!-- /figures -->" for name in names))
    for path, text in render.find_outdated().items():
        path.write_text(text)
    assert overview.README_CHART not in (copied_results / "README.md").read_text()

    for name in ROWS:
        store_first_start(name, "a")
    for image in render.IMAGES.iterdir():
        image.unlink()
    assert set(outdated_files()) == {"README.md", overview.README_CHART, *overview.CHARTS}
    changed = render.page((copied_results / "docs/benchmarks/README.md").read_text())
    assert all(f"(../images/{name})" in changed for name in overview.CHARTS)
    assert f"(docs/images/{overview.README_CHART})" in render.page((copied_results / "README.md").read_text())

    store_first_start(list(ROWS)[-1], "b")
    with pytest.raises(overview.MixedCommits):
        render.find_outdated()
