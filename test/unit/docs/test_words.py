"""Tests that few sentences of docstrings, comments and pages are long, nested or without a subject. The counter,
``test/tools/words.py``, only shows where to look: people judge prose."""

from __future__ import annotations

from pathlib import Path

import pytest
import words
from releases import ROOT
from words import Shares, Text

CODE_LIMITS = Shares(long=100.0, nested=0.3, headless=1.5)
PAGE_LIMITS = Shares(long=4.0, nested=0.5, headless=0.0)
PACKAGE = ("python/sglang_moe_patches",)
LAB_TESTS = ("arithmetic", "environment", "kv_sizing_answers", "recipes", "reference_cutedsl", "server_kinds")
TESTS = (
    *("test/gpu", "test/reference_kernels", "test/standins", "test/tools", "test/unit", "test/engine/core"),
    *(f"test/engine/{name}.py" for name in ("architectures", "harness", "servers", "snapshot")),
    *(f"test/engine/lab/test_{name}.py" for name in (*LAB_TESTS, "servers", "tiny_moe")),
)
BENCHMARKS = ("benchmark",)
PAGES = ("README.md", "CONTRIBUTING.md", "docs")
"""Pages whose sentences must stay below ``PAGE_LIMITS``."""


@pytest.mark.parametrize(
    ("paths", "limits"),
    [(PACKAGE, CODE_LIMITS), (TESTS, CODE_LIMITS), (BENCHMARKS, CODE_LIMITS), (PAGES, PAGE_LIMITS)],
    ids=["package", "tests", "benchmarks", "pages"],
)
def test_shares_of_hard_sentences_are_below_the_limits(paths: tuple[str, ...], limits: Shares) -> None:
    shares = words.measure(text for path in paths for text in words.texts_in(ROOT / path))
    above = {name: share for name, share in shares._asdict().items() if share > getattr(limits, name)}
    assert not above, f"`python test/tools/words.py {' '.join(paths)} --show 40` lists sentences; rewrite the hard ones"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("Map memory for the tokens.", []),
        ("Of a pipeline, which has several batches.", ["headless"]),
        ("Take what that is which it has.", ["nested"]),
        ("Take " + "a word " * 14, ["long"]),
        ("Take a word. With it, wait.", []),
        ("``what`` and `which` and [a page](where.md) that exists.", []),
        (":param x: what it is.", []),
    ],
)
def test_a_sentence_is_flagged_for_its_length_its_clauses_and_its_missing_subject(text: str, flags: list[str]) -> None:
    flagged = words.flag_text(Text(Path("module.py"), 1, "comment", text))
    assert [flag for _, found in flagged for flag in found] == flags


def test_shares_count_sentences_and_only_texts_of_code_can_be_headless() -> None:
    path = Path("file")
    texts = [Text(path, 1, "f", "Of one. A second. A third. A fourth."), Text(path, 9, "page", "With care.")]
    assert words.measure(texts) == Shares(long=0.0, nested=0.0, headless=100.0)
    nested = Text(path, 20, "page", "Say what that is which is here.")
    assert words.measure([*texts, nested]).nested == pytest.approx(100 / 6)


SOURCE = '''"""A module."""
LIMIT = 3
"""An attribute."""


class Thing:
    """A class."""

    size: int = 0
    """A field."""


def run():
    """A function."""
    # A comment
    # of two lines.
    return "no text"  # noqa: X100
'''
PAGE = """# A heading

A paragraph with
two lines.

| a table |
|---|

- An item
- Another item

<!-- generated:x -->Generated text.<!-- /generated -->

```
Code.
```
"""


def test_texts_are_docstrings_comments_and_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "CHANGELOG.md").write_text("A change.")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "page.md").write_text("A hidden page.")
    texts = [(text.path.name, text.line, text.name, text.text) for text in words.texts_in(tmp_path)]
    assert sorted(texts) == [
        ("module.py", 1, "module", "A module."),
        ("module.py", 3, "LIMIT", "An attribute."),
        ("module.py", 7, "Thing", "A class."),
        ("module.py", 10, "size", "A field."),
        ("module.py", 14, "run", "A function."),
        ("module.py", 15, "comment", "A comment of two lines."),
        ("page.md", 3, "page", "A paragraph with\ntwo lines."),
        ("page.md", 9, "page", "An item"),
        ("page.md", 10, "page", "Another item"),
    ]
