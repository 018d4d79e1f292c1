"""Compare a generated text with the same text from another machine, whose arithmetic may differ in the last bit.

The text without its numbers must be equal. The numbers are compared one by one:

- A number with many decimals, such as a plot's coordinate, may differ by :data:`TOLERANCE`.
- A rounded number must be equal, with one exception: a value may be rounded up on one machine and down on another. So
  if two numbers differ by one in their last digit, the text is generated again many times. Each time its inputs are
  *nudged*: changed by :data:`NUDGE`. If one of the new texts has the other machine's number, the two numbers count as
  equal.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-5
"""Relative and absolute tolerance for a number that was not rounded. The absolute tolerance is in points of a plot."""
UNROUNDED = 5
"""Lowest number of decimals with which a number counts as not rounded. Matplotlib writes six decimals, without zeros at
the end.
"""
NUDGE = 1e-8
"""Relative change of the inputs from which a text is generated again. It is larger than the rounding error of the
arithmetic, and smaller than any change that a printed digit shows.
"""
TRIES = 32
"""Number of times that a text is generated from inputs that are each changed up or down at random. A figure that is
computed from two inputs, such as a ratio, may be rounded as on the other machine only if the first input goes up and
the second input goes down. In one case of 10^4, none of 32 tries has this combination.
"""

# A number includes its sign and thousands separators, because -0.0 and 0.0, or 999.9 and 1,000.0, can be roundings of
# one value. A version such as 1.2.3 is not a decimal number. Its parts are compared one by one.
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+(?!\.?\d))?|\d+")
# Matplotlib names clip paths and markers by a hash of their coordinates.
HASHED_NAME = re.compile(r"(?<=[\"#])[a-z][0-9a-f]{10}(?=[\")])")


def extract_numbers(text: str) -> tuple[str, list[str]]:
    """Split a text into the text without numbers, and the list of numbers. In an SVG of Matplotlib, replace hashes of
    coordinates by serial numbers.
    """
    names: dict[str, str] = {}
    text = HASHED_NAME.sub(lambda name: names.setdefault(name[0], f"hashed-{'i' * (len(names) + 1)}"), text)
    return NUMBER.sub("#", text), NUMBER.findall(text)


def is_same_text(before: str, now: str, remake: Callable[[], Iterator[str]] = lambda: iter(())) -> bool:
    """Return whether two generated texts are equal, apart from differences in the arithmetic of their machines.

    :param before: text that was generated on any machine.
    :param now: text that this machine generates.
    :param remake: function that yields new versions of the text, generated from inputs with slightly changed numbers
        (:func:`nudges`). It is called only if rounded numbers differ.
    """
    (text, numbers), (text_now, numbers_now) = extract_numbers(before), extract_numbers(now)
    if text != text_now:
        return False
    different = [i for i, pair in enumerate(zip(numbers, numbers_now, strict=True)) if not _is_close(*pair)]
    if not all(_are_neighbours(numbers[i], numbers_now[i]) for i in different):
        return False
    remade_texts = remake() if different else iter(())
    while different and (remade := next(remade_texts, None)) is not None:
        remade_text, remade_numbers = extract_numbers(remade)
        if remade_text == text:
            different = [i for i in different if remade_numbers[i] != numbers[i]]
    return not different


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])


def _is_close(before: str, now: str) -> bool:
    if max(_decimals(before), _decimals(now)) >= UNROUNDED:
        return math.isclose(_value(before), _value(now), rel_tol=TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    are_zeros = not _value(before) and not _value(now) and _decimals(before) == _decimals(now)
    return before == now or are_zeros  # 0.0 equals -0.0


def _are_neighbours(before: str, now: str) -> bool:
    """Return whether two numbers differ by at most one in their last digit. They may then be roundings of one value."""
    decimals = _decimals(before)
    return decimals == _decimals(now) and abs(_value(before) - _value(now)) <= Decimal(10) ** -decimals


def nudges() -> Iterator[Callable[[Any], Any]]:
    """Yield functions that change the numbers of a result by ``NUDGE``: first all up, then all down, then each number
    up or down at random. The random seeds are fixed.
    """
    for factor in (1 + NUDGE, 1 - NUDGE):
        yield lambda result, factor=factor: nudge_floats(result, lambda: factor)
    for seed in range(TRIES):
        chance = random.Random(seed)
        yield lambda result, chance=chance: nudge_floats(result, lambda: chance.choice((1 - NUDGE, 1 + NUDGE)))


def nudge_floats(result: Any, factor: Callable[[], float]) -> Any:
    """Multiply every float in a JSON value by a factor.

    :param factor: function that returns the factor. It is called once for each float.
    """
    if isinstance(result, dict):
        return {key: nudge_floats(value, factor) for key, value in result.items()}
    if isinstance(result, list):
        return [nudge_floats(value, factor) for value in result]
    return result * factor() if isinstance(result, float) else result
