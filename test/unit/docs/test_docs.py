"""README and docs: what is generated is up to date, and links lead somewhere."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pages
import pytest
import releases
from common import same
from sglang_moe_patches import __version__
from sglang_moe_patches.core import runners
from sglang_moe_patches.registry import CHANGES

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NAMES = [str(page.relative_to(pages.ROOT)) for page in pages.pages()]
MAX_PROSE_WORDS = 1_500
"""Of one page, without tables, code and what is generated: a longer page is not read."""


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "`", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = HEADING.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def prose_words(text: str) -> int:
    """Words of a page with a letter in them, without tables, code and what is generated."""
    text = re.sub(r"<!-- (generated|figures):.*?<!-- /\1 -->|```.*?```", "", text, flags=re.DOTALL)
    lines = (line for line in text.splitlines() if not line.startswith("|"))
    return sum(1 for line in lines for token in line.split() if re.search(r"[A-Za-z]", token))


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere; those to the web are not followed."""
    found = []
    for link in LINK.findall(prose(page)):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str):
    assert broken(pages.ROOT / name) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path):
    (tmp_path / "there.md").write_text("# What `it` is, in short\n```\n# a comment\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](there.md) [b](there.md#what-it-is-in-short) [c](#here) [d](https://example.org/x) `[e](code.md)`\n"
        "[f](gone.md) [g](there.md#gone) [h](there.md#a-comment) [i](#gone)\n"
    )
    assert broken(page) == ["gone.md", "there.md#gone", "there.md#a-comment", "#gone"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_a_page_is_short_enough_to_be_read(name: str):
    assert prose_words((pages.ROOT / name).read_text()) <= MAX_PROSE_WORDS


def test_tables_code_and_what_is_generated_are_no_prose():
    page = "Two words\n| a | b |\n```\nc d\n```\n<!-- figures:x -->\ne\n<!-- /figures -->\n5 % [link](x.md)\n"
    assert prose_words(page) == 3


@pytest.mark.parametrize("name", NAMES)
def test_what_is_generated_is_up_to_date(name: str):
    page = (pages.ROOT / name).read_text()
    assert same.same(page, pages.render(page)), "run `make pages`"


@pytest.mark.parametrize("name", NAMES)
def test_no_page_types_where_the_releases_end(name: str):
    """A fact about the newest release of its day may name it; a range that ends there is wrong with the next one."""
    if name != "CHANGELOG.md":
        assert not re.search(rf"(\bto|-) {re.escape(releases.ALL[-1])}\b", (pages.ROOT / name).read_text())


@pytest.mark.parametrize(
    ("page", "rendered"),
    [
        ("of <!-- generated:x -->old<!-- /generated -->.", "of <!-- generated:x -->X<!-- /generated -->."),
        ("<!-- generated:x -->\n<!-- /generated -->", "<!-- generated:x -->\nX\n<!-- /generated -->"),
        ("<!-- generated:x -->\n1\n2\n<!-- /generated -->\n", "<!-- generated:x -->\nX\n<!-- /generated -->\n"),
        (
            "| <!-- generated:x -->1<!-- /generated --> | <!-- generated:y -->2<!-- /generated --> |",
            "| <!-- generated:x -->X<!-- /generated --> | <!-- generated:y -->Y<!-- /generated --> |",
        ),
    ],
)
def test_what_is_between_the_marks_is_replaced(page: str, rendered: str):
    assert pages.render(page, str.upper) == rendered


def test_a_mark_that_markdown_would_take_for_html_is_refused():
    with pytest.raises(ValueError, match="starts a line"):
        pages.render("of\n<!-- generated:x -->old<!-- /generated --> and more", str.upper)


@pytest.mark.parametrize("name", ["latest", "status:no-such-change"])
def test_an_unknown_name_is_refused(name: str):
    with pytest.raises(ValueError, match=r"known|knows no change"):
        pages.generated(name)


def test_every_change_and_every_variable_has_its_line():
    table, stated = pages.generated("changes"), pages.generated("variables")
    for change in CHANGES:
        assert f"[{change.name}](docs/changes/{change.name}.md)" in table
        assert (pages.ROOT / "docs" / "changes" / f"{change.name}.md").exists()
        for variable in change.variables:
            default = f"`{variable.default}`" if variable.default else "unset"
            assert f"| `{variable.name}` | {default} | {change.name} |" in stated


def test_the_changelog_ends_with_this_version_and_what_comes_next():
    headings = re.findall(r"^## (.*)$", (pages.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


def found(*told: tuple[str, str]) -> dict[str, dict]:
    return {str(number): {"changes": {"x": list(it)}} for number, it in enumerate(told, 1)}


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ("aaa", "a on all"),
        ("abb", "a on 1, b from 2"),
        ("aabb", "a up to 2, b from 3"),
        ("aabbc", "a up to 2, b from 3 to 4, c from 5"),
        ("aba", "a on 1, b on 2, a from 3"),
    ],
)
def test_what_a_change_is_where_is_put_in_words(statuses: str, words: str):
    assert pages.status("x", found(*((status, "") for status in statuses))) == words


def test_neighbouring_releases_share_a_line_of_reasons():
    told = found(("native", "why"), ("native", "why"), ("applied", ""), ("native", "why"), ("applied", "since then"))
    assert pages.reasons(told) == (
        "- **x**, native up to 2: why.\n- **x**, native on 4: why.\n- **x**, applied from 5: since then."
    )


def test_a_change_that_a_release_was_not_asked_about_is_shown_as_such():
    told = found(("applied", ""), ("applied", "why"))
    told["2"]["changes"]["y"] = ["native", ""]
    assert pages.status("y", told) == "not asked on 1, native from 2"
    for facts in told.values():
        facts |= {"torch": "2.0", "tests": "3 passed · 1 skipped"}
    assert pages.statuses(told).splitlines()[2:] == [
        "| 1 | 2.0 | applied | not asked | 3 |",
        "| 2 | 2.0 | applied | native | 3 |",
    ]


def test_neighbouring_releases_that_are_alike_share_a_line():
    told = found(*[("applied", "")] * 5)
    for facts in told.values():
        facts |= {"torch": "2.0", "tests": "3 passed"}
    told["3"]["torch"] = "2.1"
    told["5"]["tests"] = "1 failed · 2 passed"
    assert pages.statuses(told).splitlines()[2:] == [
        "| 1, 2 | 2.0 | applied | 3 |",
        "| 3 | 2.1 | applied | 3 |",
        "| 4 | 2.0 | applied | 3 |",
        "| 5 | 2.0 | applied | 1 failed · 2 passed |",
    ]


def cells(row: str) -> dict[str, str]:
    """What stands in the line of a family, by the runner."""
    lines = [line.strip("| ").split(" | ") for line in pages.generated("families").splitlines()]
    for above, line in itertools.pairwise(lines):
        line[:] = [old if cell == pages.SAME else cell for old, cell in zip(above, line, strict=True)]
    (found,) = [line for line in lines if row in line[0].split("; ")]
    return {name: cell for names, cell in zip(lines[0], found, strict=True) for name in names.split(", ")}


APART = "`qwen2_moe`, `qwen3_5`, `qwen3_next`, shared experts of their own"


def test_a_family_or_runner_that_is_not_listed_is_untouched():
    assert set(list(cells("any other").values())[1:]) == {"untouched", "columns"}
    for kind in ("DeepSeek-V2/V3, shared experts of its own", APART, "any other that offers"):
        line = cells(kind)
        assert line["any other"] == "untouched"
        assert all("output in the dead input (NVFP4)" in line[f"`{name}`"] for name in runners.TRTLLM)


def test_a_familys_line_says_what_its_layers_do():
    """As `test_the_triton_runner_takes_what_it_can_use_with_the_stock_bits` finds it."""
    own = cells("DeepSeek-V2/V3, shared experts of its own")
    assert own["`triton`"] == "shared experts last; output in the dead input; columns"
    assert own["`marlin`"] == "shared experts last; columns, output in the dead input"
    assert own["`cutlass`"] == "shared experts last"
    assert own["attention inputs"] == "dropped up to 0.5.12.post1"
    in_place, out_of_place = "in place, the dead input is scratch; columns", "output in the dead input; columns"
    for other in ("DeepSeek-V2/V3, shared experts fused or none", "any other that offers"):
        assert cells(other)["`triton`"] == in_place
        assert cells(other)["`marlin`"] == "columns, output in the dead input"
        assert cells(other)["`cutlass`"] == "untouched"
    # The engine has them out of place by itself: where is found in its code.
    assert cells(APART)["`triton`"] == f"up to 0.5.13.post1: {in_place}; from 0.5.14: {out_of_place}"


def test_another_runner_has_its_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runners, "OUT_OF_PLACE", ("triton", "another"))
    assert cells("DeepSeek-V2/V3, shared experts of its own")["`another`"] == "shared experts last"


def test_which_families_offer_is_said_with_the_releases_or_the_reason():
    told = {
        "1": {"families": {"a": "", "b": "BLayer may still use its input"}},
        "2": {"families": {"a": "", "b": "", "c": "CLayer may still use its input", "d": "DModel may keep it"}},
    }
    assert pages.offers(told).splitlines()[2:] == [
        "| `b` | from 2 |",
        "| `a` | on all |",
        "| `d` | its loop may keep it |",
        "| `c` | its layer may still use its input |",
    ]
