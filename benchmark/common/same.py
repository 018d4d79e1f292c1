"""Is what was generated before what would be generated now? Not byte by byte: a processor decides the last bit.

Text is compared with its numbers cut out, and number by number:

- A number with many decimals, such as a plot's coordinate, may differ by :data:`TOLERANCE`.
- A number that was rounded for a reader says what it says. But one that lies between two roundings is printed as the
  one or the other, whatever the tolerance. So where it differs by one in its last digit, the text is made again from
  inputs that differ by :data:`NUDGE` (:func:`nudged`): a rounding that one of them gives is as good.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

#: Of a number that was not rounded for a reader: relative, and (in a plot: points) absolute.
TOLERANCE, LEAST = 1e-6, 1e-5
#: Decimals from which on a number was not rounded for a reader. Matplotlib writes six, without the zeros at the end.
UNROUNDED = 5
#: How far an input is moved, relative: more than arithmetic loses, less than any digit that is printed.
NUDGE = 1e-8
#: Beside "all up" and "all down" so many times each input on its own. A figure of two inputs, such as a ratio, is then
#: missed once in 10^4 times.
TRIES = 32

# Signs and thousands' commas belong to a number: -0.0 and 0.0, 999.9 and 1,000.0 are two roundings. What has a second
# point, such as a version, is no decimal: its parts are compared one by one.
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+(?!\.?\d))?|\d+")
# Matplotlib names a clipping or a marker by a hash of its coordinates.
HASHED = re.compile(r"(?<=[\"#])[a-z][0-9a-f]{10}(?=[\")])")


def cut(text: str) -> tuple[str, list[str]]:
    """A text without its numbers, and the numbers. Hashed names are counted in the order of their appearance."""
    names: dict[str, str] = {}
    text = HASHED.sub(lambda name: names.setdefault(name[0], f"hashed-{'i' * (len(names) + 1)}"), text)
    return NUMBER.sub("#", text), NUMBER.findall(text)


def same(before: str, now: str, again: Callable[[], Iterator[str]] = lambda: iter(())) -> bool:
    """Whether a text still says what is generated now.

    :param before: what was generated on whatever machine.
    :param now: what is generated here.
    :param again: the same, from inputs that are nudged; asked only where a rounding could be at stake.
    """
    (text, stated), (made_text, made) = cut(before), cut(now)
    if text != made_text:
        return False
    apart = [i for i, (one, other) in enumerate(zip(stated, made, strict=True)) if not _close(one, other)]
    if not all(_neighbours(stated[i], made[i]) for i in apart):
        return False
    others = again() if apart else iter(())
    while apart and (other := next(others, None)) is not None:
        other_text, others_numbers = cut(other)
        if other_text == text:
            apart = [i for i in apart if others_numbers[i] != stated[i]]
    return not apart


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])


def _close(one: str, other: str) -> bool:
    if max(_decimals(one), _decimals(other)) >= UNROUNDED:
        return math.isclose(_value(one), _value(other), rel_tol=TOLERANCE, abs_tol=LEAST)
    zeros = not _value(one) and not _value(other) and _decimals(one) == _decimals(other)
    return one == other or zeros  # 0.0, and -0.0 from a little less than nothing


def _neighbours(one: str, other: str) -> bool:
    """Two numbers of which each could be the other's rounding."""
    return _decimals(one) == _decimals(other) and abs(_value(one) - _value(other)) <= Decimal(10) ** -_decimals(one)


def nudges() -> Iterator[Callable[[Any], Any]]:
    """Ways to nudge a result: everything up, everything down, each of its numbers by chance (always the same)."""
    for factor in (1 + NUDGE, 1 - NUDGE):
        yield lambda result, factor=factor: nudged(result, lambda: factor)
    for seed in range(TRIES):
        chance = random.Random(seed)
        yield lambda result, chance=chance: nudged(result, lambda: chance.choice((1 - NUDGE, 1 + NUDGE)))


def nudged(result: Any, factor: Callable[[], float]) -> Any:
    """A JSON value with every float of it multiplied."""
    if isinstance(result, dict):
        return {key: nudged(value, factor) for key, value in result.items()}
    if isinstance(result, list):
        return [nudged(value, factor) for value in result]
    return result * factor() if isinstance(result, float) else result
