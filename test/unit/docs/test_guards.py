"""Tests of names of tests: each test that a page or a mutation of ``make guards`` names must exist.

A mutation removes one guard from a file of the code, and names the test that must then fail. The file must contain the
removed code exactly once.
"""

from __future__ import annotations

import re

import guards
import pages
from releases import ROOT


def names_of_tests() -> set[str]:
    files = sorted((ROOT / "test").rglob("test_*.py"))
    return {name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)}


def test_every_test_that_a_page_names_exists():
    written = [
        re.sub(r"<!-- figures:.*?<!-- /figures -->", "", page.read_text(), flags=re.DOTALL) for page in pages.pages()
    ]
    named = {name for text in written for name in re.findall(r"`(test_\w+)`", text)}
    files = {path.stem for path in (ROOT / "test").rglob("test_*.py")}
    assert named - names_of_tests() - files == set()


def test_each_mutation_matches_one_place_and_names_an_existing_test():
    for mutation in guards.MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation
        file, _, test = mutation.test.partition("[")[0].partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(), mutation
