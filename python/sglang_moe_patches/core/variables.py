"""Environment variables that this package itself reads. The variables of a change are defined in the change's module.

:func:`.patch.list_variables` lists the variables of the package and of the changes. The start-up, ``doctor`` and the
pages read that list. This module imports no other module of this package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WrongValue(ValueError):
    """Raised if a variable has an invalid value. The message names the variable and its valid values."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable that a change or this package reads.

    :param name: name of the variable in the environment.
    :param meaning: one line for ``doctor`` and the pages.
    :param parse: function that converts the variable's stripped text into its value. It raises a ``ValueError`` for
        invalid text; the message names the expected values and the text.
    :param default: text that replaces an unset or empty variable.
    :param is_engine_variable: whether the engine reads the variable, too. The engine starts with any value, so an
        invalid value is an error only if a change uses the variable on this server.
    """

    name: str
    meaning: str
    parse: Callable[[str], T]
    default: str = ""
    is_engine_variable: bool = False

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """Return the variable's value.

        :raises WrongValue: the value is invalid. The message names the variable and its valid values.
        """
        try:
            return self.parse(environ.get(self.name, "").strip() or self.default)
        except ValueError as error:
            raise WrongValue(f"{self.name}: {error}") from None


def parse_zero_or_one(text: str) -> bool:
    """Parse the text of a variable whose value is 0 or 1. Return False or True."""
    if text not in ("0", "1"):
        raise ValueError(f"expected 0 or 1, got {text!r}")
    return text == "1"


def make_positive_number_parser(unit: str) -> Callable[[str], int | None]:
    """Return a ``parse`` function for a variable whose value is an integer of at least 1.

    The ``parse`` function returns ``None`` for empty text.

    :param unit: unit of the value, for the error message.
    """

    def parse(text: str) -> int | None:
        if not text:
            return None
        if not text.isascii() or not text.isdigit() or not int(text):
            raise ValueError(f"expected a positive number of {unit}, got {text!r}")
        return int(text)

    return parse


RETIRED_VARIABLES: Mapping[str, tuple[str, str]] = {
    "SGLANG_MOE_PATCHES_KV_RECORD": (
        "kv-sizing",
        "removed, because each start measures; unset it. To start without measuring, set the --mem-fraction-static "
        "that the server's log names",
    ),
    "SGLANG_MOE_PATCHES_MAX_MOE_TOKENS": (
        "moe-workspace",
        "removed; unset it and set --chunked-prefill-size to this number of tokens instead: this lowers the memory of "
        "the whole forward pass, and the experts' weights are read as often",
    ),
}
"""Names of variables that only earlier versions read. Each name maps to the change that read the variable, and to
advice for the user."""

STRICT = Variable(
    "SGLANG_MOE_PATCHES_STRICT",
    "1: if a selected change cannot be applied, the server does not start",
    parse_zero_or_one,
    "0",
)
OBSERVE = Variable(
    "SGLANG_MOE_PATCHES_OBSERVE", "folder for the observations of each model process; `regress` sets it", str
)

OWN_VARIABLES: tuple[tuple[str, Variable[Any]], ...] = (
    ("all changes", STRICT),
    ("observers", OBSERVE),
)
"""Variables of this package that belong to no change. Each entry is the name of the reader (``all changes`` or
``observers``) and the variable."""
