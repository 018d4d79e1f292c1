"""Generate grade-school word problems in GSM8K's format from templates. A very small model can learn them.

Each line has a ``question`` and an ``answer``. The answer solves the problem in two to four steps with GSM8K's
calculator annotations (``3*4=<<3*4=12>>12``), and ends in ``#### NUMBER``.

**Training and test problems are disjoint.** A problem consists of a template, its numbers, and names and things. A hash
of only the template and the numbers decides whether it is a test problem. So no test problem is a training problem with
other names.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEST_SHARE = 10
"""A combination of a template and numbers is a test problem with the probability 1 / ``TEST_SHARE``. Otherwise it is a
training problem.
"""

NAMES = {
    "he": ("Tom", "Ben", "Sam", "Max", "Leo", "Dan"),
    "she": ("Ann", "Mia", "Eva", "Zoe", "Amy", "Kim"),
}
THINGS = ("apples", "eggs", "cookies", "cards", "books", "pens", "toys", "cakes")
HOLDERS = ("box", "bag")
PLURALS = {"box": "boxes", "bag": "bags"}


@dataclass(frozen=True)
class Template:
    """Template of problems: an entry of ``problems.toml``, which describes the fields."""

    question: str
    steps: list[str]
    numbers: dict[str, tuple[int, int]]
    largest: int = 400


TEMPLATES = [
    Template(**values)
    for values in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["problem"]
]


@dataclass(frozen=True)
class Problem:
    """One problem with its solution."""

    question: str
    answer: str
    """Text of the answer: the steps of the solution, and ``#### NUMBER``."""
    test: bool
    """Whether this is a test problem. Otherwise it is a training problem."""

    def to_json(self) -> str:
        return json.dumps({"question": self.question, "answer": self.answer})


def make_problem(rng: random.Random) -> Problem:
    """Make a random training or test problem."""
    index = rng.randrange(len(TEMPLATES))
    template = TEMPLATES[index]
    while True:
        numbers = {name: rng.randint(*limits) for name, limits in template.numbers.items()}
        words = {**_words(rng, template), **{name: str(value) for name, value in numbers.items()}}
        solved = _solve(template, numbers, words)
        if solved is not None:
            break
    key = json.dumps([index, *numbers.values()])
    test = hashlib.sha256(key.encode()).digest()[0] % TEST_SHARE == 0
    return Problem(template.question.format(**words), solved, test)


def problems(seed: int, *, test: bool) -> Iterator[Problem]:
    """Generate training problems without end, or test problems without end and without repetition."""
    rng = random.Random(f"{seed}/{'test' if test else 'train'}")
    known = set()
    while True:
        problem = make_problem(rng)
        if problem.test != test or problem.question in known:
            continue
        if test:
            known.add(problem.question)
        yield problem


def _words(rng: random.Random, template: Template) -> dict[str, str]:
    pronoun = rng.choice(list(NAMES)) if "{name}" in template.question else "he"
    name = rng.choice(NAMES[pronoun])
    other, third = rng.sample([other for names in NAMES.values() for other in names if other != name], 2)
    box = rng.choice(HOLDERS)
    return {
        "name": name,
        "other": other,
        "third": third,
        "pronoun": pronoun,
        "Pronoun": pronoun.capitalize(),
        "thing": rng.choice(THINGS),
        "box": box,
        "boxes": PLURALS[box],
    }


def _solve(template: Template, numbers: dict[str, int], words: dict[str, str]) -> str | None:
    """Solve a problem step by step.

    :returns: the worked answer; ``None`` if a result is no integer between 1 and the template's ``largest``.
    """
    values = dict(numbers)
    lines = []
    for step in template.steps:
        line, start = "", 0
        for part in re.finditer(r"\[(\w)=(\w+)([-+*/])(\w+)\]", step):
            name, left, operator, right = part.groups()
            first, second = (values[side] if side in values else int(side) for side in (left, right))
            if operator == "/" and first % second:
                return None
            value = {"+": first + second, "-": first - second, "*": first * second, "/": first // second}[operator]
            if not 1 <= value <= template.largest:
                return None
            values[name] = value
            line += (
                step[start : part.start()] + f"{first}{operator}{second}=<<{first}{operator}{second}={value}>>{value}"
            )
            start = part.end()
        lines.append((line + step[start:]).format(**words))
    return "\n".join([*lines, f"#### {value}"])
