"""Grade-school word problems in GSM8K's format, made from templates, for a model small enough to learn them.

    python benchmark tiny_moe/problems --questions 600 --output test.jsonl

Each line holds ``question`` and ``answer``; the answer works the problem out in two to four steps, each with GSM8K's
calculator annotation (``3*4=<<3*4=12>>12``), and ends in ``#### NUMBER``.

**Train and test are disjoint by construction.** A problem is a template, its numbers, and names and things that fill
the rest. A hash of template and numbers alone decides on which side a problem is, so no test problem is a training
problem with other names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TEST_SHARE = 10
"""One in this many combinations of template and numbers is for testing."""

NAMES = {
    "he": ("Tom", "Ben", "Sam", "Max", "Leo", "Dan"),
    "she": ("Ann", "Mia", "Eva", "Zoe", "Amy", "Kim"),
}
THINGS = ("apples", "eggs", "cookies", "cards", "books", "pens", "toys", "cakes")
HOLDERS = ("box", "bag")
PLURALS = {"box": "boxes", "bag": "bags"}


@dataclass(frozen=True)
class Template:
    """A problem with its numbers left open.

    :param question: ``{a}`` is a number, ``{name}``, ``{thing}``, ... a word from :func:`_words`.
    :param steps: one line of the answer each; ``[n=a*b]`` works out ``a*b`` and calls the result ``n``. The last
        result is the answer.
    :param numbers: smallest and largest value of each number.
    """

    question: str
    steps: tuple[str, ...]
    numbers: dict[str, tuple[int, int]] = field(hash=False)
    largest: int = 400
    """No number of the problem is larger."""


TEMPLATES = (
    Template(
        "{name} buys {a} {boxes} of {thing}. Each {box} has {b} {thing}. {Pronoun} gives {c} of them to {other}. "
        "How many {thing} are left?",
        ("There are [n=a*b] {thing}.", "So [m=n-c] are left."),
        {"a": (2, 9), "b": (3, 12), "c": (2, 30)},
    ),
    Template(
        "{name} has {a} {thing} and {other} has {b} {thing}. They share all {thing} with {c} friends. "
        "How many {thing} does each person get?",
        ("They have [n=a+b] {thing}.", "They are [p=c+2] people.", "Each gets [m=n/p] {thing}."),
        {"a": (4, 60), "b": (4, 60), "c": (1, 7)},
    ),
    Template(
        "{name} works {a} hours each day for {b} days. {Pronoun} earns {c} dollars per hour. "
        "How much money does {pronoun} earn?",
        ("{Pronoun} works [n=a*b] hours.", "{Pronoun} earns [m=n*c] dollars."),
        {"a": (2, 8), "b": (2, 7), "c": (3, 9)},
    ),
    Template(
        "{name} has {a} dollars. {Pronoun} buys {b} {thing} at {c} dollars each and then spends {d} dollars on lunch. "
        "How much money is left?",
        (
            "The {thing} cost [n=b*c] dollars.",
            "So {pronoun} spends [s=n+d] dollars.",
            "There are [m=a-s] dollars left.",
        ),
        {"a": (30, 99), "b": (2, 8), "c": (2, 9), "d": (3, 20)},
    ),
    Template(
        "A school has {a} rooms with {b} students in each room. On Monday {c} students are sick. "
        "The rest go by bus. {d} students fit in a bus. How many buses are needed?",
        ("The school has [n=a*b] students.", "So [r=n-c] students go by bus.", "They need [m=r/d] buses."),
        {"a": (3, 9), "b": (8, 20), "c": (2, 20), "d": (5, 12)},
    ),
    Template(
        "{name} reads {a} pages in the morning and {b} pages in the evening. "
        "How many pages does {pronoun} read in {c} days?",
        ("Each day {pronoun} reads [n=a+b] pages.", "In {c} days {pronoun} reads [m=n*c] pages."),
        {"a": (3, 19), "b": (3, 19), "c": (2, 9)},
    ),
    Template(
        "{name} has {a} {thing}. {other} has twice as many. {third} has {b} fewer than {other}. "
        "How many {thing} do they have in total?",
        (
            "{other} has [n=a*2] {thing}.",
            "{third} has [k=n-b] {thing}.",
            "They have [s=a+n] and [m=s+k] {thing} in total.",
        ),
        {"a": (5, 40), "b": (2, 30)},
    ),
    Template(
        "A farmer has {a} cows and {b} hens. Each cow eats {c} pounds of food per day and each hen eats {d} pounds. "
        "How many pounds of food do they eat per day?",
        ("The cows eat [n=a*c] pounds.", "The hens eat [k=b*d] pounds.", "They eat [m=n+k] pounds."),
        {"a": (2, 12), "b": (2, 12), "c": (4, 12), "d": (2, 5)},
    ),
    Template(
        "{name} needs {a} dollars for a bike. {Pronoun} has {b} dollars and saves {c} dollars each week. "
        "How many weeks does {pronoun} need?",
        ("{Pronoun} needs [n=a-b] more dollars.", "It takes [m=n/c] weeks."),
        {"a": (40, 200), "b": (10, 90), "c": (4, 12)},
    ),
    Template(
        "A train has {a} cars with {b} seats each. {c} people sit in the train. At the next stop {d} people leave. "
        "How many seats are empty then?",
        ("The train has [n=a*b] seats.", "Then [k=c-d] people are in the train.", "So [m=n-k] seats are empty."),
        {"a": (3, 9), "b": (8, 20), "c": (20, 90), "d": (3, 19)},
    ),
    Template(
        "{name} bakes {a} cakes. {Pronoun} cuts each cake into {b} pieces and sells each piece for {c} dollars. "
        "The flour costs {d} dollars. How much money does {pronoun} make?",
        ("There are [n=a*b] pieces.", "They sell for [k=n*c] dollars.", "So {pronoun} makes [m=k-d] dollars."),
        {"a": (2, 6), "b": (4, 10), "c": (2, 6), "d": (4, 30)},
    ),
    Template(
        "{name} runs {a} miles on each of {b} days and {c} miles on each of {d} days. How many miles is that?",
        ("First [n=a*b] miles.", "Then [k=c*d] miles.", "In total [m=n+k] miles."),
        {"a": (2, 12), "b": (2, 9), "c": (2, 12), "d": (2, 9)},
    ),
    Template(
        "There are {a} {thing} in a {box}. {name} takes half of them. Then {other} takes {b}. "
        "How many {thing} are still in the {box}?",
        ("{name} takes [n=a/2] {thing}.", "So [k=a-n] are left.", "Then [m=k-b] are still there."),
        {"a": (20, 160), "b": (2, 30)},
    ),
    Template(
        "{name} is {a} years old. {other} is {b} times as old. In {c} years, how old are they together?",
        (
            "{other} is [n=a*b] years old.",
            "In {c} years {name} is [p=a+c].",
            "{other} is [q=n+c] then.",
            "Together they are [m=p+q] years old.",
        ),
        {"a": (4, 15), "b": (2, 5), "c": (2, 15)},
    ),
    Template(
        "A shop sells {a} {thing} on Monday, {b} on Friday and {c} on Sunday. Each costs {d} dollars. "
        "How much money does the shop get?",
        ("The shop sells [n=a+b] and [k=n+c] {thing}.", "It gets [m=k*d] dollars."),
        {"a": (3, 20), "b": (3, 20), "c": (3, 20), "d": (2, 6)},
    ),
    Template(
        "{name} has {a} {boxes} with {b} {thing} each and {c} more {thing}. {Pronoun} puts them into bags of {d}. "
        "How many bags does {pronoun} fill?",
        ("The {boxes} hold [n=a*b] {thing}.", "With the rest that is [k=n+c] {thing}.", "They fill [m=k/d] bags."),
        {"a": (2, 9), "b": (3, 15), "c": (2, 30), "d": (3, 9)},
    ),
    Template(
        "{name} plants {a} rows of {b} trees. {c} trees die and {pronoun} plants {d} new ones. "
        "How many trees are there now?",
        ("First there are [n=a*b] trees.", "Then [k=n-c] are left.", "Now there are [m=k+d] trees."),
        {"a": (3, 12), "b": (3, 12), "c": (2, 20), "d": (2, 30)},
    ),
    Template(
        "A pool holds {a} buckets of water. {name} brings {b} buckets per hour and {other} brings {c}. "
        "How many hours does it take them together?",
        ("Together they bring [n=b+c] buckets per hour.", "It takes [m=a/n] hours."),
        {"a": (30, 240), "b": (2, 12), "c": (2, 12)},
    ),
    Template(
        "{name} gets {a} dollars each week and spends {b} of them. After {c} weeks {pronoun} buys a game for {d} "
        "dollars. How many dollars are left?",
        (
            "Each week {pronoun} saves [n=a-b] dollars.",
            "After {c} weeks that is [k=n*c].",
            "So [m=k-d] dollars are left.",
        ),
        {"a": (10, 30), "b": (2, 20), "c": (3, 12), "d": (5, 60)},
    ),
    Template(
        "{name} and {other} pick {thing}. {name} picks {a} per hour and {other} picks {b} per hour. "
        "They work {c} hours and give {d} {thing} away. How many {thing} do they keep?",
        ("Together they pick [n=a+b] per hour.", "They pick [k=n*c] {thing}.", "They keep [m=k-d] {thing}."),
        {"a": (4, 20), "b": (4, 20), "c": (2, 8), "d": (5, 60)},
    ),
    Template(
        "A bus starts with {a} people. At the first stop {b} people leave and {c} come in. At the second stop half of "
        "the people leave. How many people are in the bus now?",
        ("First [n=a-b] people stay.", "Then [k=n+c] people are in the bus.", "So [m=k/2] people are in it now."),
        {"a": (20, 90), "b": (3, 30), "c": (3, 40)},
    ),
    Template(
        "{name} has {a} {thing}. {Pronoun} gives {b} {thing} to each of {c} friends and loses {d}. "
        "How many {thing} are left?",
        ("{Pronoun} gives away [n=b*c] {thing}.", "So [k=a-n] {thing} are left.", "Then there are [m=k-d]."),
        {"a": (30, 150), "b": (2, 9), "c": (2, 8), "d": (2, 20)},
    ),
    Template(
        "One ticket costs {a} dollars for a child and {b} dollars for a man. {c} children and {d} men go. "
        "They have {e} dollars. How much money is left?",
        (
            "The children pay [n=a*c] dollars.",
            "The men pay [k=b*d] dollars.",
            "In total [s=n+k] dollars.",
            "So [m=e-s] dollars are left.",
        ),
        {"a": (2, 6), "b": (4, 12), "c": (2, 9), "d": (2, 6), "e": (60, 200)},
    ),
    Template(
        "{name} makes {a} {thing} per day. {Pronoun} works {b} days per week for {c} weeks. "
        "{Pronoun} packs {d} {thing} in a {box}. How many {boxes} are there?",
        ("{Pronoun} works [n=b*c] days.", "{Pronoun} makes [k=a*n] {thing}.", "There are [m=k/d] {boxes}."),
        {"a": (2, 12), "b": (2, 6), "c": (2, 4), "d": (2, 9)},
    ),
    Template(
        "A book has {a} pages. {name} reads {b} pages on the first day and twice as many on the second day. "
        "How many pages are left?",
        ("On the second day {pronoun} reads [n=b*2] pages.", "In total [k=b+n] pages.", "So [m=a-k] pages are left."),
        {"a": (60, 250), "b": (5, 40)},
    ),
    Template(
        "{name} has {a} {thing}. {other} has {b} more than {name}. They put all of them into {c} {boxes}, the same "
        "number in each. How many {thing} are in a {box}?",
        ("{other} has [n=a+b] {thing}.", "Together they have [k=a+n] {thing}.", "Each {box} has [m=k/c] {thing}."),
        {"a": (4, 60), "b": (2, 40), "c": (2, 9)},
    ),
    Template(
        "A man drives {a} miles per hour for {b} hours and then {c} miles per hour for {d} hours. The trip is {e} "
        "miles long. How many miles are left?",
        (
            "First {pronoun} drives [n=a*b] miles.",
            "Then {pronoun} drives [k=c*d] miles.",
            "That is [s=n+k] miles.",
            "So [m=e-s] miles are left.",
        ),
        {"a": (10, 30), "b": (2, 5), "c": (10, 30), "d": (2, 5), "e": (100, 300)},
    ),
    Template(
        "{name} buys {a} {thing} for {b} dollars each and sells them for {c} dollars each. "
        "How many dollars does {pronoun} make if {d} of them break?",
        (
            "The {thing} cost [n=a*b] dollars.",
            "{Pronoun} sells [r=a-d] of them.",
            "They bring [k=r*c] dollars.",
            "So {pronoun} makes [m=k-n] dollars.",
        ),
        {"a": (5, 20), "b": (2, 6), "c": (4, 15), "d": (1, 6)},
    ),
    # Products of two-digit numbers, which a small model only half learns: on the edge of what it knows, a small error
    # in the computation tips an answer. Where it knows everything well, it does not.
    Template(
        "A school has {a} rows of {b} seats. {c} people come and sit. How many seats are empty?",
        ("The school has [n=a*b] seats.", "So [m=n-c] seats are empty."),
        {"a": (12, 99), "b": (12, 49), "c": (100, 400)},
        9999,
    ),
    Template(
        "A farmer sells {a} eggs for {b} cents each and spends {c} cents on food. How many cents are left?",
        ("The eggs bring [n=a*b] cents.", "So [m=n-c] cents are left."),
        {"a": (12, 99), "b": (12, 49), "c": (20, 140)},
        9999,
    ),
    Template(
        "{name} buys {a} {boxes} of {thing}. Each {box} has {b} {thing}. {other} has {c} {thing}. "
        "How many {thing} do they have together?",
        ("{name} buys [n=a*b] {thing}.", "Together they have [m=n+c] {thing}."),
        {"a": (12, 99), "b": (12, 49), "c": (10, 99)},
        9999,
    ),
)


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    """The steps, and ``#### NUMBER``."""
    test: bool
    """Whether it belongs to the held-out problems."""

    def to_json(self) -> str:
        return json.dumps({"question": self.question, "answer": self.answer})


def make_problem(rng: random.Random) -> Problem:
    """One problem, from either side."""
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
    """Without end, and without repetition on the test side."""
    rng = random.Random(f"{seed}/{'test' if test else 'train'}")
    seen = set()
    while True:
        problem = make_problem(rng)
        if problem.test != test or problem.question in seen:
            continue
        if test:
            seen.add(problem.question)
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
    """The worked answer, or None where a result is no whole number between 1 and the template's largest."""
    values = dict(numbers)
    lines = []
    for step in template.steps:
        line, start = "", 0
        for part in re.finditer(r"\[(\w)=(\w+)([-+*/])(\w+)\]", step):
            name, left, operator, right = part.groups()
            one, other = (values[side] if side in values else int(side) for side in (left, right))
            if operator == "/" and one % other:
                return None
            value = {"+": one + other, "-": one - other, "*": one * other, "/": one // other}[operator]
            if not 1 <= value <= template.largest:
                return None
            values[name] = value
            line += step[start : part.start()] + f"{one}{operator}{other}=<<{one}{operator}{other}={value}>>{value}"
            start = part.end()
        lines.append((line + step[start:]).format(**words))
    return "\n".join([*lines, f"#### {value}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=600, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help="from the training side instead of the test side")
    parser.add_argument("--output", type=Path, required=True, help="the JSON lines file to write")
    options = parser.parse_args()
    made = problems(options.seed, test=not options.train)
    options.output.write_text("".join(next(made).to_json() + "\n" for _ in range(options.questions)))


if __name__ == "__main__":
    main()
