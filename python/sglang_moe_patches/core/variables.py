"""The environment variables that this package reads itself; those of a change are stated in its module.

All of them together are :func:`.patch.variables`, over which start-up, ``doctor`` and the pages loop. Nothing here
imports anything of ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WrongValue(ValueError):
    """A variable's value is not one of those that are valid; the message names both."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable that a change, or this package, reads.

    :param meaning: one line for ``doctor`` and the docs.
    :param parse: the value of its text, stripped.

        :raises ValueError: saying what is expected, and what was got.
    :param default: the text that an unset or empty variable stands for.
    :param is_engine_variable: the engine reads the variable, too. It starts with any value, so a wrong value is refused
        where the variable is used.
    """

    name: str
    meaning: str
    parse: Callable[[str], T]
    default: str = ""
    is_engine_variable: bool = False

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """The variable's value.

        :raises WrongValue: the message names the variable and its valid values.
        """
        try:
            return self.parse(environ.get(self.name, "").strip() or self.default)
        except ValueError as error:
            raise WrongValue(f"{self.name}: {error}") from None


def parse_zero_or_one(text: str) -> bool:
    """``parse`` of a variable that is 0 or 1."""
    if text not in ("0", "1"):
        raise ValueError(f"expected 0 or 1, got {text!r}")
    return text == "1"


def positive_number_parser(of: str) -> Callable[[str], int | None]:
    """``parse`` of a variable that is a number of something, from 1 on; unset: ``None``."""

    def parse(text: str) -> int | None:
        if not text:
            return None
        if not text.isascii() or not text.isdigit() or not int(text):
            raise ValueError(f"expected a positive number of {of}, got {text!r}")
        return int(text)

    return parse


RETIRED_VARIABLES: Mapping[str, tuple[str, str]] = {
    "SGLANG_MOE_PATCHES_KV_RECORD": (
        "kv-sizing",
        "no record is kept any more, each start measures and grows; to start without that, pin the "
        "--mem-fraction-static of its log line",
    ),
    "SGLANG_MOE_PATCHES_MAX_MOE_TOKENS": (
        "moe-workspace",
        "removed; unset it and set --chunked-prefill-size to this number of tokens instead: this lowers the memory of "
        "the whole forward pass, and the experts' weights are read as often",
    ),
}
"""Variables of earlier versions, by name: the change that read each, and what replaces it."""

STRICT = Variable(
    "SGLANG_MOE_PATCHES_STRICT", "1: a selected change that cannot be applied ends the start-up", parse_zero_or_one, "0"
)
OBSERVE = Variable(
    "SGLANG_MOE_PATCHES_OBSERVE", "folder for what each model process observes of itself; `regress` sets it", str
)

OWN_VARIABLES: tuple[tuple[str, Variable[Any]], ...] = (
    ("all changes", STRICT),
    ("observers", OBSERVE),
)
"""Who reads it, and the variable."""
