"""README and docs: what is generated is up to date, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest
import releases
from common import same
from sglang_moe_patches import __version__
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


def test_every_change_and_every_variable_has_its_line():
    table, stated = pages.generated("changes"), pages.generated("variables")
    for change in CHANGES:
        assert f"[{change.name}](docs/changes/{change.name}.md)" in table
        assert (pages.ROOT / "docs" / "changes" / f"{change.name}.md").exists()
        for variable in change.variables:
            default = f"`{variable.default}`" if variable.default else "unset"
            assert f"| `{variable.name}` | {default} | {change.name} |" in stated


def test_the_readmes_second_start_logs_what_a_server_logs_today():
    """Its numbers are measured, its words are the code's."""
    hooks = pages.ROOT / "python" / "sglang_moe_patches" / "memory" / "kv_sizing" / "hooks.py"
    (line,) = re.findall(r'"(%\.4f instead of .*)",', hooks.read_text())
    pattern = re.escape(line).replace(r"%\.4f", r"\d\.\d{4}").replace("%s", ".*")
    readme = (pages.ROOT / "README.md").read_text()
    assert re.search(f"^sglang-moe-patches: kv-sizing: {pattern}$", readme, re.MULTILINE)


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
