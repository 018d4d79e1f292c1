"""Test README and docs: generated parts are up to date, links are valid, and pages are short."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest
from common import equality

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NAMES = [str(page.relative_to(pages.ROOT)) for page in pages.pages()]
MAX_PROSE_WORDS = 1_500
"""Largest allowed number of words on a page, not counting tables, code and generated parts."""
MAX_README_WORDS = 1_100
"""Largest allowed number of words in README.md, not counting tables, code and generated parts."""
MAX_FIRST_SCREEN_WORDS = 250
"""Largest allowed number of words in README.md before its first section, counting tables and code, too."""
MAX_COLUMNS = 6
"""Largest allowed number of columns in a table. Wider tables belong in benchmark/results."""


def remove_code(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "`", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings."""
    headings = HEADING.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def count_prose_words(text: str) -> int:
    """Return the number of words of a page that contain a letter, without tables, code and generated parts."""
    text = re.sub(r"<!-- (generated|figures):.*?<!-- /\1 -->|```.*?```", "", text, flags=re.DOTALL)
    lines = (line for line in text.splitlines() if not line.startswith("|"))
    return sum(1 for line in lines for token in line.split() if re.search(r"[A-Za-z]", token))


def broken_links(page: Path) -> list[str]:
    """Return the broken links of a page. Links to the web are not checked."""
    found = []
    for link in LINK.findall(remove_code(page)):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str):
    assert broken_links(pages.ROOT / name) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_a_page_is_short_enough_to_be_read(name: str):
    words = count_prose_words((pages.ROOT / name).read_text())
    assert words <= MAX_PROSE_WORDS


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_at_most_six_columns(name: str):
    rules = re.findall(r"^\|(?:[-:| ]+\|)$", (pages.ROOT / name).read_text(), re.MULTILINE)
    assert [rule for rule in rules if rule.count("|") - 1 > MAX_COLUMNS] == []


def test_the_readme_and_its_first_screen_are_short():
    readme = (pages.ROOT / "README.md").read_text()
    first_screen = re.sub(r"<!-- .*? -->", "", readme[: readme.index("\n## ")])
    assert len([token for token in first_screen.split() if re.search(r"\w", token)]) <= MAX_FIRST_SCREEN_WORDS
    assert all(text in first_screen for text in ("pip install", "sglang serve", "When not to use it"))
    assert count_prose_words(readme) <= MAX_README_WORDS


@pytest.mark.parametrize("name", NAMES)
def test_generated_parts_of_pages_are_up_to_date(name: str):
    page = (pages.ROOT / name).read_text()
    assert equality.is_same_text(page, pages.render(page)), "run `make pages`"


def records_of(*statuses: tuple[str, str]) -> dict[str, dict]:
    """Return the records of several releases. Each record has the status and the reason of a single change, ``x``."""
    return {str(number): {"changes": {"x": list(it)}} for number, it in enumerate(statuses, 1)}


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
def test_the_page_states_the_status_of_a_change_by_release(statuses: str, words: str):
    assert pages.describe_status("x", records_of(*((status, "") for status in statuses))) == words
