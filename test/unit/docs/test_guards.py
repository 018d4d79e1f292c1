"""docs/development/guards.md names every engine test, and no test that is not there."""

from __future__ import annotations

import re

import guards
from releases import ROOT

PAGE = (ROOT / "docs" / "development" / "guards.md").read_text()


def names_in(folder: str) -> set[str]:
    files = sorted((ROOT / "test" / folder).rglob("test_*.py"))
    return {name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)}


def test_every_engine_test_has_its_line():
    assert names_in("engine") - set(re.findall(r"`(test_\w+)`", PAGE)) == set()


def test_every_test_that_is_named_is_there():
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - names_in("engine") - names_in("unit") - names_in("gpu") == set()


def test_each_mutation_is_of_one_place_and_of_a_test_that_is_there():
    for mutation in guards.MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation
        file, _, test = mutation.test.partition("[")[0].partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(), mutation
