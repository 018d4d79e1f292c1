"""What a patch is: its name, its seams in the engine, how its status is decided and reported.

A *change* is one module in :mod:`sglang_moe_patches.changes`. It exposes one :class:`Change`, whose ``probe`` looks at
the installed engine and answers with an :class:`Outcome`, and whose ``install`` puts the wrappers in place through a
:class:`Patcher`. Probing never changes anything; installing either succeeds whole or is undone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SELECT_VARIABLE = "SGLANG_MOE_PATCHES"
STRICT_VARIABLE = "SGLANG_MOE_PATCHES_STRICT"


class Status(StrEnum):
    """What a change says about the engine it looked at."""

    APPLIED = "applied"
    """Our wrappers are in place (from ``probe``: they can be put in place)."""
    NATIVE = "native"
    """The engine has the change built in; nothing is patched."""
    HARDENED = "hardened"
    """The engine has the change built in and we close a hole in it."""
    NOT_NEEDED = "not needed here"
    """Nothing in this configuration reaches the code that the change is about."""
    UNSUPPORTED = "unsupported"
    """The engine is not what the change expects; nothing is patched."""
    NOT_SELECTED = "not selected"
    """``SGLANG_MOE_PATCHES`` leaves it out."""


@dataclass(frozen=True)
class Outcome:
    status: Status
    reason: str = ""

    @property
    def installs(self) -> bool:
        return self.status in (Status.APPLIED, Status.HARDENED)

    def __str__(self) -> str:
        return f"{self.status}, because {self.reason}" if self.reason else str(self.status)


class PatchError(RuntimeError):
    """A selected change could not be applied and ``SGLANG_MOE_PATCHES_STRICT=1`` forbids to go on without it."""


_ABSENT = object()


class Patcher:
    """Sets attributes of engine objects and can put every one of them back."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace ``owner.name``, an attribute that ``owner`` (a module or class) itself defines."""
        self._originals.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def add(self, owner: Any, name: str, new: Any) -> None:
        """Give ``owner`` (a module or class) an attribute that it does not define."""
        self._originals.append((owner, name, _ABSENT))
        setattr(owner, name, new)

    def wrap(self, owner: Any, name: str, make_wrapper: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make_wrapper(original)``.

        The wrapper is an ordinary function: ``torch.compile`` traces through it, and a call costs one frame.
        """
        self.replace(owner, name, make_wrapper(vars(owner)[name]))

    def undo(self) -> None:
        """Put the originals back, last change first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@dataclass(frozen=True)
class Change:
    """One of the five changes.

    :param name: as users write it in ``SGLANG_MOE_PATCHES``.
    :param summary: one line for ``doctor``.
    :param probe: looks at the installed engine (and imports what it needs of it).
    :param install: puts the wrappers in place; called only when ``probe`` answered *applied* or *hardened*.
    :param needed: given the engine's ``ServerArgs``, says why this server never reaches the change, or ``None``.
    """

    name: str
    summary: str
    probe: Callable[[], Outcome]
    install: Callable[[Patcher], None]
    needed: Callable[[Any], str | None] = field(default=lambda server_args: None)


def selected(changes: Iterable[Change], environ: Mapping[str, str] = os.environ) -> set[str]:
    """The names that ``SGLANG_MOE_PATCHES`` selects: ``all`` (the default), ``none``, or a comma-separated list.

    :raises ValueError: a name is unknown; the message lists the valid ones.
    """
    known = [change.name for change in changes]
    value = environ.get(SELECT_VARIABLE, "").strip() or "all"
    if value == "all":
        return set(known)
    if value == "none":
        return set()
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"{SELECT_VARIABLE}: unknown change {', '.join(map(repr, unknown))}; "
            f"valid: all, none, or a comma-separated list of {', '.join(known)}"
        )
    return set(names)


def strict(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``SGLANG_MOE_PATCHES_STRICT`` asks that a change which cannot be applied ends the start-up.

    :raises ValueError: the variable is neither ``0`` nor ``1``.
    """
    value = environ.get(STRICT_VARIABLE, "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{STRICT_VARIABLE}: expected 0 or 1, got {value!r}")
    return value == "1"


def probe(change: Change) -> Outcome:
    """``change.probe()``, where an engine so different that looking at it fails is *unsupported*, not an exception."""
    try:
        return change.probe()
    except Exception as error:
        return Outcome(Status.UNSUPPORTED, f"looking at the engine failed: {type(error).__name__}: {error}")


def apply(changes: Iterable[Change], names: set[str], server_args: Any = None) -> dict[str, Outcome]:
    """Install each change in ``names`` that the engine supports and this server needs.

    :returns: an outcome for every change, in order.
    :raises PatchError: a change failed half-way through its installation (it was undone first).
    """
    outcomes = {}
    for change in changes:
        outcomes[change.name] = _apply_one(change, names, server_args)
    return outcomes


def _apply_one(change: Change, names: set[str], server_args: Any) -> Outcome:
    if change.name not in names:
        return Outcome(Status.NOT_SELECTED)
    outcome = probe(change)
    # Asked before "unsupported" counts: what a server never reaches must not end it in strict mode.
    unneeded = change.needed(server_args) if server_args is not None else None
    if unneeded and outcome.status is not Status.NATIVE:
        return Outcome(Status.NOT_NEEDED, unneeded)
    if not outcome.installs:
        return outcome
    patcher = Patcher()
    try:
        change.install(patcher)
    except Exception as error:
        patcher.undo()
        raise PatchError(f"{change.name}: installing failed and was undone: {error}") from error
    return outcome


TRTLLM_RUNNERS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
CUTEDSL_RUNNER = "flashinfer_cutedsl"


def runner_needed(*runners: str) -> Callable[[Any], str | None]:
    """``needed`` of a change that only these ``--moe-runner-backend`` reach, be it for the draft model alone.

    ``auto`` may still become one of them.
    """

    def needed(server_args: Any) -> str | None:
        backends = [str(server_args.moe_runner_backend)]
        if getattr(server_args, "speculative_algorithm", None):
            backends.append(str(getattr(server_args, "speculative_moe_runner_backend", None) or backends[0]))
        return None if {*runners, "auto"} & set(backends) else f"--moe-runner-backend is {backends[0]}"

    return needed
