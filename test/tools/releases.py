"""Engine releases of releases.toml, for the tests and the Makefile. The Makefile uses the command line:

python test/tools/releases.py default | every-time | others | known RELEASE | overrides RELEASE
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FILE = ROOT / "releases.toml"


class Releases(NamedTuple):
    """Contents of releases.toml.

    :param default: release that the Makefile installs by default.
    :param every_time: releases that `make test-all` tests.
    :param all: all releases, oldest first.
    :param overrides: by release, requirements that replace the release's own requirements of the same packages.
    """

    default: str
    every_time: tuple[str, ...]
    all: tuple[str, ...]
    overrides: Mapping[str, tuple[str, ...]]


def check(stated: Mapping[str, Any]) -> Releases:
    """Check the contents of releases.toml, and return them as :class:`Releases`.

    :param stated: parsed contents of releases.toml.
    :raises ValueError: ``all`` names a release twice; or another table names a release that ``all`` does not name; or
        ``every_time`` does not name the default release.
    """
    known = tuple(stated["all"])
    if twice := {name for name in known if known.count(name) > 1}:
        raise ValueError(f"releases.toml: twice in all: {', '.join(sorted(twice))}")
    named = {"default": [stated["default"]], "every_time": stated["every_time"], "overrides": stated["overrides"]}
    for where, names in named.items():
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"releases.toml: in {where}, but not in all: {', '.join(missing)}")
    if stated["default"] not in stated["every_time"]:
        raise ValueError("releases.toml: the default is not in every_time")
    overrides = {name: tuple(requirements) for name, requirements in stated["overrides"].items()}
    return Releases(stated["default"], tuple(stated["every_time"]), known, overrides)


def read() -> Releases:
    """Read releases.toml.

    :raises ValueError: a table is missing, or the contents are inconsistent.
    """
    import tomllib

    try:
        return check(tomllib.loads(FILE.read_text()))
    except KeyError as missing:
        raise ValueError(f"{FILE.name}: the table or key {missing} is missing") from missing


def answer(question: str, release: str = "") -> str:
    """Return the answer to a question of the Makefile. This module's docstring lists the questions.

    :raises ValueError: the question or the release is unknown.
    """
    answers = {
        "default": DEFAULT,
        "every-time": " ".join(EVERY_TIME),
        # The newest release comes first, because its tests take longest.
        "others": " ".join(name for name in reversed(EVERY_TIME) if name != DEFAULT),
        "overrides": "\n".join(OVERRIDES.get(release, ())),
    }
    if question == "known":
        if release not in ALL:
            raise ValueError(f"SGLang {release} is not in `all` of {FILE.name}; add it there first")
        return release
    if question not in answers:
        raise ValueError(f"unknown question: {question}; known: known, {', '.join(answers)}")
    return answers[question]


try:
    DEFAULT, EVERY_TIME, ALL, OVERRIDES = read()
    if __name__ == "__main__":
        print(answer(*sys.argv[1:]))
except (ValueError, ImportError) as problem:
    if __name__ != "__main__":
        raise
    sys.exit(
        f"make: {problem}" if isinstance(problem, ValueError) else "make: needs Python 3.11 or newer; set PYTHON=..."
    )
