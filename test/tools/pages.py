"""Write the generated parts of README and docs, from releases.toml, docs/compatibility.json and the changes.

    python test/tools/pages.py            # rewrite the pages

A page contains `<!-- generated:NAME -->...<!-- /generated -->`, within a line or as a block of its own. The text
between the two comments is replaced. Within a line, the first comment must not stand at the line's beginning, because
Markdown would take the line for HTML. The names:

    oldest, newest, default         a release of releases.toml
    every-time, all                 names of the releases that `make test-all` tests, and of all releases
    status:CHANGE                   status of a change by release: "applied up to 0.5.12.post1, hardened from 0.5.13"
    changes                         table of the changes: summary, and status by release
    variables                       table of the environment variables that this package and its changes read
    statuses                        table with a line for each change; neighbouring releases with the same statuses
                                    share a column
    tested                          table of the releases, their PyTorch, and the number of passed tests
    reasons                         why each change has its status; neighbouring releases with the same reason share a
                                    line
    offers                          table of the families that offer their dead input, and reasons of the others
    unsized                         servers that keep the engine's KV cache, and why
    whole                           table of the results of `make test-all`, by release
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import releases

ROOT = releases.ROOT
FOUND = ROOT / "docs" / "compatibility.json"
WHOLE = ROOT / "docs" / "test-all.json"
PARTS = {"engine-tests": "tests that start the engine", "unit": "other tests"}
"""Parts of `make test-all`: targets of the Makefile, each with a description."""
MARKED = re.compile(r"(?P<start>[^\n]?)<!-- generated:(?P<name>\S+) -->(?P<old>.*?)<!-- /generated -->", re.DOTALL)


def pages() -> list[Path]:
    """Return all pages that may have generated parts."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def join_words(names: Sequence[str]) -> str:
    """Join names to ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def group_releases(values: dict[str, Any]) -> Iterator[tuple[Any, list[str]]]:
    """Group neighbouring releases with the same value.

    :param values: values by release, oldest first.
    :returns: pairs of a value and its releases, oldest first.
    """
    for value, same in groupby(values, key=values.__getitem__):
        yield value, list(same)


def describe_span(names: list[str], every: list[str]) -> str:
    """Describe neighbouring releases in words, such as ``from 0.5.13``.

    :param every: all releases, oldest first.
    """
    if names == every:
        return "on all"
    if len(names) == 1 and names[0] != every[-1]:
        return f"on {names[0]}"
    if names[-1] == every[-1]:
        return f"from {names[0]}"
    return f"up to {names[-1]}" if names[0] == every[0] else f"from {names[0]} to {names[-1]}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


NOT_ASKED = ("not asked", "")
"""Status of a change on a release whose record is older than the change."""


def change_names(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for facts in found.values() for name in facts["changes"]))


def describe_status(change: str, found: dict[str, Any]) -> str:
    """Describe the status of a change on all releases, as in ``applied up to 0.5.12.post1, hardened from 0.5.13``."""
    told = {release: facts["changes"].get(change, NOT_ASKED)[0] for release, facts in found.items()}
    return ", ".join(f"{said} {describe_span(names, list(found))}" for said, names in group_releases(told))


def import_package() -> tuple[Any, Any]:
    """Import ``sglang_moe_patches.registry`` and ``.core.patch`` from this checkout. No installed package is needed."""
    if str(ROOT / "python") not in sys.path:
        sys.path.insert(0, str(ROOT / "python"))
    from sglang_moe_patches import registry
    from sglang_moe_patches.core import patch

    return registry, patch


def changes_table(found: dict[str, Any]) -> str:
    """Return a table with one line for each change."""
    rows = [
        (f"[{change.name}](docs/changes/{change.name}.md)", change.summary, describe_status(change.name, found))
        for change in import_package()[0].CHANGES
    ]
    return table(("change", "what it does", "on which SGLang"), rows)


def variables_table() -> str:
    """Return a table with one line for each environment variable that users may set."""
    stated, patch = import_package()

    rows = [
        (f"`{variable.name}`", f"`{variable.default}`" if variable.default else "unset", reader, variable.meaning)
        for reader, variable in patch.list_variables(stated.CHANGES)
        if reader != "observers"  # users do not set these variables: `regress` sets them
    ]
    return table(("variable", "default", "read by", "meaning"), rows)


def unsized_table() -> str:
    """Return a table of the servers whose KV cache kv-sizing does not size, with a line for each reason."""
    import_package()
    from sglang_moe_patches.memory.kv_sizing.eligibility import UNSIZED

    rows = []
    for reason, kinds in groupby(UNSIZED, key=lambda kind: kind.reason):
        names = [f"`{kind.name}` {kind.condition}".strip() for kind in kinds]
        rows.append(((", " if all(name.endswith("`") for name in names) else "; ").join(names), reason))
    return table(("server", "why it keeps the engine's KV cache"), rows)


def statuses_table(found: dict[str, Any]) -> str:
    """Return a table of statuses: one line for each change, one column for neighbouring releases with equal
    statuses."""
    names = change_names(found)
    cells = {
        release: tuple(facts["changes"].get(name, NOT_ASKED)[0] for name in names) for release, facts in found.items()
    }
    columns = [
        (f"{alike[0]} to {alike[-1]}" if len(alike) > 1 else alike[0], said) for said, alike in group_releases(cells)
    ]
    rows = [(name, *(said[place] for _, said in columns)) for place, name in enumerate(names)]
    return table(("change", *(title for title, _ in columns)), rows)


def tested_table(found: dict[str, Any]) -> str:
    """Return a table of the releases, their PyTorch and their passed tests. Releases of `make test-all` are bold."""
    cells = {}
    for release, facts in found.items():
        tests = facts["tests"] if "failed" in facts["tests"] else facts["tests"].split(" ")[0]
        cells[release] = (facts["torch"], tests)
    bold = {release: f"**{release}**" if release in releases.EVERY_TIME else release for release in found}
    rows = [(", ".join(map(bold.__getitem__, alike)), *row) for row, alike in group_releases(cells)]
    return table(("SGLang", "PyTorch", "tests passed"), rows)


def reasons_list(found: dict[str, Any]) -> str:
    """Return a Markdown list. Each line has a change, its status, the releases with this status, and the reason.

    Neighbouring releases with the same status and reason share a line. Statuses without a reason have no line.
    """
    lines = []
    for name in change_names(found):
        told = {release: facts["changes"].get(name, NOT_ASKED) for release, facts in found.items()}
        for (said, reason), names in group_releases(told):
            if reason:
                lines.append(f"- **{name}**, {said} {describe_span(names, list(found))}: {reason}.")
    return "\n".join(lines) or "None."


def releases_offering(family: str, found: dict[str, Any]) -> list[str]:
    """Return the releases on which the layers of a model family may offer their dead input."""
    return [release for release, facts in found.items() if facts["families"].get(family) == ""]


def offers_table(found: dict[str, Any]) -> str:
    """Return a table of model families. It has the releases on which their layers may offer their dead input, and the
    reasons why the layers of some families may not on the newest release.
    """
    names = sorted({name for facts in found.values() for name in facts["families"]})
    where: dict[str, list[str]] = {}
    for name in names:
        if places := releases_offering(name, found):
            where.setdefault(describe_span(places, list(found)), []).append(f"`{name}`")
    why: dict[str, list[str]] = {}
    for name, reason in found[list(found)[-1]]["families"].items():
        if reason:
            of_a_class = re.sub(r"\b\w+(Layer|Model)\b", r"its \1", reason)
            why.setdefault(of_a_class.replace("its Layer", "its layer"), []).append(f"`{name}`")
    rows = [(", ".join(alike), cell) for cells in (where, why) for cell, alike in sorted(cells.items())]
    titles = (
        "model families",
        "releases on which they may offer the dead input, or why they may not on the newest release",
    )
    return table(titles, rows).replace("its Model", "its loop")


def test_all_table(outcomes: dict[str, Any]) -> str:
    """Return a table of the results of the last runs of `make test-all`."""
    rows = []
    for release, parts in outcomes.items():
        found = [parts.get(part) for part in PARTS]
        rows.append((release, *(f"{run['outcome']} ({run['date']})" if run else "not run yet" for run in found)))
    return table(("SGLang", *PARTS.values()), rows)


def generated_text(name: str) -> str:
    """Return the text of a generated part.

    :param name: name in the comment ``<!-- generated:NAME -->``.
    :raises ValueError: the name or its change is unknown.
    """
    found = json.loads(FOUND.read_text())
    name, _, argument = name.partition(":")
    makers: dict[str, Callable[[], str]] = {
        "oldest": lambda: releases.ALL[0],
        "newest": lambda: releases.ALL[-1],
        "default": lambda: releases.DEFAULT,
        "every-time": lambda: join_words([release for release in releases.ALL if release in releases.EVERY_TIME]),
        "all": lambda: join_words(releases.ALL),
        "status": lambda: describe_status(argument, found),
        "changes": lambda: changes_table(found),
        "variables": variables_table,
        "unsized": unsized_table,
        "statuses": lambda: statuses_table(found),
        "tested": lambda: tested_table(found),
        "reasons": lambda: reasons_list(found),
        "offers": lambda: offers_table(found),
        "whole": lambda: test_all_table(json.loads(WHOLE.read_text())) if WHOLE.exists() else "Not recorded yet.",
    }
    if name not in makers:
        raise ValueError(f"unknown name of a generated part: {name}; known: {', '.join(makers)}")
    if name == "status" and argument not in change_names(found):
        raise ValueError(f"docs/compatibility.json knows no change {argument}")
    return makers[name]()


def render(page: str) -> str:
    """Replace the generated parts of a page.

    :raises ValueError: the name of a generated part is unknown, or a line of text begins with a generated part.
    """

    def replace(mark: re.Match[str]) -> str:
        text, block = generated_text(mark["name"]), "\n" in mark["old"]
        if not block and not mark["start"]:
            raise ValueError(f"generated:{mark['name']} starts a line, which Markdown would take for HTML; move it on")
        text = f"\n{text}\n" if block else text
        return f"{mark['start']}<!-- generated:{mark['name']} -->{text}<!-- /generated -->"

    return MARKED.sub(replace, page)


def write() -> list[str]:
    """Replace the generated parts of all pages.

    :returns: the names of the pages that changed.
    :raises ValueError: an error of :func:`render`. The message names the page.
    """
    changed = []
    for page in pages():
        before = page.read_text()
        try:
            after = render(before)
        except ValueError as problem:
            raise ValueError(f"{page.relative_to(ROOT)}: {problem}") from problem
        if after != before:
            page.write_text(after)
            changed.append(str(page.relative_to(ROOT)))
    return changed


if __name__ == "__main__":
    try:
        print("pages written: " + (", ".join(write()) or "none, all were up to date"))
    except ValueError as problem:
        sys.exit(str(problem))
