"""Count sentences that are probably hard to read, in docstrings, comments and pages.

    python test/tools/words.py PATH [PATH ...]              # shares of flagged sentences, one line per path
    python test/tools/words.py PATH --show 40 [--seed 1]    # flagged sentences, drawn at random
    python test/tools/words.py PATH --sample 50 [--seed 1]  # docstrings, drawn at random, for a reader to judge

This tool is a smoke detector. It shows where to look, and people judge. A flagged sentence can be good, and a bad
sentence can pass. A sentence is flagged for one of three reasons:

- *long*: it has more than 28 words.
- *nested*: it has three or more relative pronouns and the like (``CLAUSE``).
- *headless*: it begins a docstring or a comment with a preposition or a relative pronoun (``HEADLESS``), so its subject
  is probably missing.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_WORDS = 28
MAX_CLAUSES = 2
CLAUSE = re.compile(
    r"\b(that|which|what|whose|whom|where|whatever|whoever|as many|of it|of them|of theirs)\b", re.IGNORECASE
)
"""Matches words that begin a subordinate clause, or that refer back to a noun."""
HEADLESS = re.compile(r"(Of|More|By|With|In|As|What|Where|Whose|To|From|Behind|Beside)\b")
SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z`\"(])")
MARKUP = re.compile(r":(?:param|returns?|raises?)[^:]*:|``[^`]*``|`[^`]*`|\[([^\]]*)\]\([^)]*\)")
"""Matches markup: fields of docstrings such as ``:returns:``, code, and links. A link is replaced by its text, other
markup by an X."""
NO_PROSE = re.compile(r"#\s*(noqa|type:|!|pylint|fmt|ruff|SPDX|Copyright|-{3,})|# ---")
"""Matches the beginnings of comments that are not prose."""
GENERATED = re.compile(r"<!-- (generated|figures):.*?<!-- /\1 -->|```.*?```", re.DOTALL)
"""Matches the parts of a page that are not counted: generated parts, and code blocks."""
SKIPPED_FILES = {"CHANGELOG.md"}


class Text(NamedTuple):
    """A docstring, a block of comments, or a paragraph of a page.

    :param line: number of its first line.
    :param name: name that a docstring documents, "comment", or "page".
    """

    path: Path
    line: int
    name: str
    text: str

    @property
    def sentences(self) -> list[str]:
        """Sentences of the text, without markup."""
        plain = MARKUP.sub(lambda match: match[1] or " X ", self.text)
        return [" ".join(part.split()) for part in SENTENCE_END.split(plain) if re.search("[a-z]", part)]


class Shares(NamedTuple):
    """Shares of flagged sentences, in per cent.

    :param long: long sentences among all sentences.
    :param nested: nested sentences among all sentences.
    :param headless: docstrings and comments with a headless first sentence, among all docstrings and comments.
    """

    long: float
    nested: float
    headless: float


def find_flags(sentence: str, *, is_first: bool) -> list[str]:
    """Return the reasons why a sentence is flagged.

    :param is_first: whether it is the first sentence of a docstring or a comment.
    """
    flags = {
        "long": len(re.findall(r"[A-Za-z']+", sentence)) > MAX_WORDS,
        "nested": len(CLAUSE.findall(sentence)) > MAX_CLAUSES,
        "headless": is_first and HEADLESS.match(sentence) is not None,
    }
    return [name for name, is_set in flags.items() if is_set]


def flag_text(text: Text) -> list[tuple[str, list[str]]]:
    """Return the sentences of a text, each with its flags."""
    may_be_headless = text.name != "page"
    return [
        (sentence, find_flags(sentence, is_first=may_be_headless and number == 0))
        for number, sentence in enumerate(text.sentences)
    ]


def measure(texts: Iterable[Text]) -> Shares:
    sentences, headed = 0, 0
    counts = {"long": 0, "nested": 0, "headless": 0}
    for text in texts:
        flagged = flag_text(text)
        sentences += len(flagged)
        headed += bool(flagged) and text.name != "page"
        for _, flags in flagged:
            for flag in flags:
                counts[flag] += 1
    totals = {"long": sentences, "nested": sentences, "headless": headed}
    return Shares(**{name: 100 * count / max(1, totals[name]) for name, count in counts.items()})


# --- Texts of files ---------------------------------------------------------------------------------------------------


def texts_in(root: Path) -> Iterator[Text]:
    """Yield the texts of a file, or of all Python files and pages below a folder. Hidden folders are left out."""
    for path in [root] if root.is_file() else sorted([*root.rglob("*.py"), *root.rglob("*.md")]):
        is_hidden = any(part.startswith(".") for part in path.parts[len(root.parts) :])
        if is_hidden or path.name in SKIPPED_FILES:
            continue
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            yield from paragraphs(path, source)
        else:
            yield from docstrings(path, source)
            yield from comments(path, source)


def docstrings(path: Path, source: str) -> Iterator[Text]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for index, statement in enumerate(body if isinstance(body, list) else []):
            value = getattr(statement, "value", None)
            if not (
                isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)
            ):
                continue
            owner = body[index - 1] if index else node
            target = getattr(owner, "target", None) or next(iter(getattr(owner, "targets", [])), None)
            name = getattr(owner, "name", "module") if target is None else ast.unparse(target)
            yield Text(path, statement.lineno, name, value.value)


def comments(path: Path, source: str) -> Iterator[Text]:
    """Yield the comments. Comments in consecutive lines are one text."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or NO_PROSE.match(token.string):
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield Text(path, start, "comment", " ".join(block))
            block = []
        if not block:
            start = line
        block.append(token.string.lstrip("#: ").strip())
        last = line
    if block:
        yield Text(path, start, "comment", " ".join(block))


def paragraphs(path: Path, source: str) -> Iterator[Text]:
    """Yield the paragraphs and list items of a page, without tables, headings, code and generated parts."""
    prose = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), source)
    line = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) ))", prose):
        if not re.match(r"\s*[|#<]", paragraph) and re.search("[a-z]", paragraph):
            yield Text(path, line, "page", re.sub(r"^\s*(?:[-*]|\d+\.) ", "", paragraph))
        line += paragraph.count("\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--show", type=int, metavar="COUNT", help="show so many flagged sentences")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="show so many docstrings")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (%(default)s)")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    for root in options.paths:
        texts = list(texts_in(root))
        if options.sample:
            documented = [text for text in texts if text.name not in ("comment", "page")]
            for text in draw.sample(documented, min(options.sample, len(documented))):
                print(f"--- {text.path}:{text.line} {text.name}\n{text.text.strip()}\n")
        elif options.show:
            flagged = [(text, *row) for text in texts for row in flag_text(text) if row[1]]
            for text, sentence, flags in draw.sample(flagged, min(options.show, len(flagged))):
                print(f"{text.path}:{text.line} [{', '.join(flags)}] {sentence}")
        else:
            shares = measure(texts)._asdict()
            print(f"{root}: " + ", ".join(f"{name} {share:.1f} %" for name, share in shares.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
