"""What a change is, how it is put in place, and how it is taken back.

A *change* is one module or package in ``changes`` or ``memory``. It states one :class:`Change`. Asked for its
:class:`Plan`, it probes the installed engine and answers with a status and, where it has something to install, with
the function that does: the branch taken while probing *is* the installer, so nothing is probed twice. Probing never
changes anything; installing goes through a :class:`Patcher`, and either succeeds whole or is undone.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import FunctionType, ModuleType
from typing import Any

from sglang_moe_patches.core import engine, log
from sglang_moe_patches.core.variables import OWN_VARIABLES, RETIRED_VARIABLES, STRICT, Variable, WrongValue

# --- What a change states --------------------------------------------------------------------------------------------


class Status(StrEnum):
    """What becomes of a change."""

    APPLIED = "applied"
    """This package does it."""
    NATIVE = "native"
    """The engine has the change built in; nothing is patched."""
    EXTENDED = "extended"
    """The engine has a part of the change built in, and we reach further."""
    HARDENED = "hardened"
    """The engine has the change built in and we close a hole in it."""
    NOT_NEEDED = "not needed here"
    """Nothing in this configuration reaches the code that the change is about."""
    OFF = "off"
    """A variable of ours could turn it on here, and does not."""
    UNSUPPORTED = "unsupported"
    """The engine is not what the change expects, or not the engine's own any more; nothing is patched."""
    NOT_SELECTED = "not selected"
    """``SGLANG_MOE_PATCHES`` leaves it out."""


ACTIVE = (Status.APPLIED, Status.EXTENDED, Status.HARDENED)
"""With these a change has patched the engine."""


@dataclass(frozen=True)
class Skip:
    """That a server never reaches a change, and why.

    :param can_be_enabled: a variable of ours turns it on: the change is off, and may be of use here.
    """

    reason: str
    can_be_enabled: bool = False


Install = Callable[["Patcher"], None]


@dataclass(frozen=True)
class Plan:
    """What becomes of a change on an engine, by what its probe found.

    :param install: puts the wrappers in place; exactly where the status is one of ``ACTIVE``.
    """

    status: Status
    reason: str = ""
    install: Install | None = None

    @classmethod
    def applied(cls, install: Install) -> Plan:
        return cls(Status.APPLIED, install=install)

    @classmethod
    def hardened(cls, install: Install, reason: str = "") -> Plan:
        return cls(Status.HARDENED, reason, install)

    @classmethod
    def not_needed(cls, reason: str) -> Plan:
        return cls(Status.NOT_NEEDED, reason)

    @classmethod
    def skipped(cls, skip: Skip) -> Plan:
        return cls(Status.OFF if skip.can_be_enabled else Status.NOT_NEEDED, skip.reason)

    @classmethod
    def unsupported(cls, reason: str) -> Plan:
        return cls(Status.UNSUPPORTED, reason)

    def __str__(self) -> str:
        return f"{self.status}, because {self.reason}" if self.reason else str(self.status)


@dataclass(frozen=True)
class BuiltModel:
    """A model as the engine built it with the changes in place, of as many layers as show each kind.

    :param model: its weights need not be there: tensors of PyTorch's ``meta`` device or fake ones do.
    :param tokens: of the largest chunk, as a MoE layer gets it: data-parallel ranks bring one each.
    :param top_k: experts of a token, where a layer leaves that to its router.
    :param tiles: of Triton's second GEMM, of a ``FusedMoE`` layer; ``None``: not known.
    """

    model: Any
    tokens: int
    top_k: int = 0
    tiles: Callable[[Any], Mapping[str, int] | None] = lambda experts: None


def combine_installs(*parts: Install | None) -> Install:
    """What installs all of these that there are, in this order."""

    def install(patcher: Patcher) -> None:
        for part in filter(None, parts):
            part(patcher)

    return install


INPUTS_DROPPED = "attention inputs dropped"
SHARED_LAST = "shared experts last"
OUTPUT_IN_DEAD_INPUT = "output in the dead input"
SCRATCH_IN_DEAD_INPUT = "the activation in the dead input"
COLUMNS = "columns"
SHARED_BUFFERS = "one set of buffers for all layers"


@dataclass(frozen=True)
class Decision:
    """What a change decided for the layers of a model.

    :param effects: those of the constants above that hold in at least one layer; none: it does nothing there.
    :param reason: why it does nothing, or not more, and what would change that.
    :param width: columns of a slice, where there is one.
    """

    effects: tuple[str, ...] = ()
    reason: str = ""
    width: int | None = None

    @property
    def acts(self) -> bool:
        return bool(self.effects)


@dataclass(frozen=True)
class Count:
    """Something that a change does, which :mod:`sglang_moe_patches.lab.observers.acted` counts in observed processes.

    :param name: what it is found by; changes that share one have the same.
    :param description: the same for people, after the change's name: "ran in columns".
    :param module: one of ours that has the function.
    :param function: what is called whenever it may be done: an attribute of the module, or of a class in it
        ("Class.method").
    :param amount: how much was done, from what the function returned and what it was given; 0: nothing.
    :param unit: what that is a number of, for people; "": of nothing.
    :param before_layer: it is done before the layer's routed experts run, and counts for those.
    :param skip_reason: why nothing was done, from the largest input of a MoE layer that ran: tokens, top-k, hidden
        size, bytes of an element; "": that says nothing.
    """

    name: str
    description: str
    module: str
    function: str
    amount: Callable[..., int] = lambda result, *args, **kwargs: 1
    unit: str = ""
    before_layer: bool = False
    skip_reason: Callable[[int, int, int, int], str] = lambda tokens, top_k, hidden, itemsize: ""


@dataclass(frozen=True)
class Change:
    """One change to the engine; everything that anybody outside its own module has to know of it.

    :param name: as users write it in ``SGLANG_MOE_PATCHES``.
    :param summary: one line for ``doctor``.
    :param plan: probes the installed engine, importing what it needs of it.

        :raises engine.Unsupported: the engine is not what the change expects.
    :param skip: given the engine's ``ServerArgs``, says that this server never reaches the change, and why; ``None``:
        it may. Raises :class:`engine.Unsupported` where a variable of ours asks for the change and this server cannot
        have it. Asked before ``plan``, so that a server imports nothing for a change that it does not need.
    :param variables: the environment variables that it reads; wrong values end the start-up where it is selected.
    :param counts: what it does, each to be counted on request.
    :param decide: what it decided for the layers of a model that was built while it was installed, by the functions
        that decide in a forward; ``None``: the same for every model.
    :param launcher_hooks: modules of the engine, and what to do as soon as any process, the launcher too, imports them.
    """

    name: str
    summary: str
    plan: Callable[[], Plan]
    skip: Callable[[Any], Skip | None] = lambda server_args: None
    variables: tuple[Variable[Any], ...] = ()
    counts: tuple[Count, ...] = ()
    decide: Callable[[BuiltModel], Decision] | None = None
    launcher_hooks: tuple[tuple[str, Callable[[ModuleType, Patcher], None]], ...] = ()


# --- The variables, and the changes that they select -----------------------------------------------------------------

SELECT_VARIABLE = "SGLANG_MOE_PATCHES"
_PREFIX_OF_OURS = "SGLANG_MOE_PATCH"
"""What the names of variables begin with that are ours, or were meant to be."""
_NEW_NAMES = {"nvfp4-weights": "fp4-weights"}
"""Changes by their former names, which are refused with the present one."""


def _selection(changes: Iterable[Change]) -> Variable[set[str]]:
    """``SGLANG_MOE_PATCHES``, which names some of ``changes``."""
    known = [change.name for change in changes]

    def parse(text: str) -> set[str]:
        if text in ("all", "none"):
            return set(known) if text == "all" else set()
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise ValueError(f"{text!r} names no change; none selects none")
        if unknown := [name for name in names if name not in known]:
            renamed = "".join(f"; {name} is now {_NEW_NAMES[name]}" for name in unknown if name in _NEW_NAMES)
            raise ValueError(
                f"unknown change {', '.join(map(repr, unknown))}{renamed}; "
                f"valid: all, none, or a comma-separated list of {', '.join(known)}"
            )
        return set(names)

    return Variable(SELECT_VARIABLE, "which are applied: `all`, `none`, or names with commas", parse, default="all")


def selected_names(changes: Iterable[Change], environ: Mapping[str, str] = os.environ) -> set[str]:
    """The names that ``SGLANG_MOE_PATCHES`` selects: ``all`` (the default), ``none``, or a comma-separated list.

    :raises ValueError: a name is unknown; the message lists the valid ones.
    """
    return _selection(changes).read(environ)


def variables(changes: Iterable[Change]) -> list[tuple[str, Variable[Any]]]:
    """Every environment variable that this package and ``changes`` read, each with who reads it."""
    changes = tuple(changes)
    theirs = [(change.name, variable) for change in changes for variable in change.variables]
    return [("all changes", _selection(changes)), *OWN_VARIABLES, *theirs]


def check_environment(changes: Iterable[Change], environ: Mapping[str, str] = os.environ) -> None:
    """Read every variable that counts: what start-up refuses, and ``doctor`` in the same words.

    A change's counts where the change is selected. One of the engine's own is checked by the change itself, where the
    server uses it.

    :raises ValueError: one line that names the variable and its valid values, or what replaces it.
    """
    changes = tuple(changes)
    not_selected = {change.name for change in changes} - selected_names(changes, environ)
    for reader, variable in variables(changes):
        if reader not in not_selected and not variable.is_engine_variable:
            variable.read(environ)
    for name, (reader, instead) in RETIRED_VARIABLES.items():
        if reader not in not_selected and environ.get(name, "").strip():
            raise ValueError(f"{name}: {instead}")


def describe_unread_variables(changes: Iterable[Change], environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each variable that is set, is called like one of ours, and that no code reads: a typing error."""
    known = [variable.name for _, variable in variables(changes)]
    lines = []
    for name in sorted(environ):
        if name.startswith(_PREFIX_OF_OURS) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            lines.append(f"{name} is set, and nothing reads it" + "".join(f"; is it {other}?" for other in near))
    return lines


# --- Applying changes ------------------------------------------------------------------------------------------------


class PatchError(RuntimeError):
    """A selected change could not be applied and ``SGLANG_MOE_PATCHES_STRICT=1`` forbids to go on without it."""


def apply(changes: Iterable[Change], names: set[str], server_args: Any = None) -> dict[str, Plan]:
    """Install each change in ``names`` that the engine supports and this server needs.

    :returns: what became of every change, in order. One whose installation failed was undone and is *unsupported*.
    """
    return {change.name: _apply_change(change, names, server_args) for change in changes}


def plan_for(change: Change, names: set[str], server_args: Any = None) -> Plan:
    """What becomes of a change where ``names`` are selected; nothing is installed.

    :param server_args: the engine's, resolved or not; ``None``: what holds for every server of this environment.
    :raises WrongValue: a variable of the engine's that this server uses has a value with which it must not start.
    """
    if change.name not in names:
        return Plan(Status.NOT_SELECTED)
    try:
        skip = None if server_args is None else change.skip(engine.resolve_arguments(server_args))
    except WrongValue:
        raise
    except Exception as error:
        return Plan.unsupported(error_reason(error, "this server's arguments could not be read: "))
    return Plan.skipped(skip) if skip else probe(change)


def _apply_change(change: Change, names: set[str], server_args: Any) -> Plan:
    plan = plan_for(change, names, server_args)
    if plan.install is None:
        return plan
    patcher = Patcher()
    try:
        plan.install(patcher)
    except Exception as error:
        patcher.undo()
        return Plan.unsupported(f"installing failed and was undone: {one_line_error(error)}")
    return plan


def probe(change: Change) -> Plan:
    """``change.plan()``, where an engine that is not as expected is *unsupported*, not an exception."""
    try:
        return change.plan()
    except Exception as error:
        return Plan.unsupported(error_reason(error, "probing the engine failed: "))


def error_reason(error: Exception, unexpected: str = "") -> str:
    """How an engine is not as expected; another error as one line, which ``unexpected`` begins."""
    return str(error) if isinstance(error, engine.Unsupported) else unexpected + one_line_error(error)


def one_line_error(error: Exception) -> str:
    """An unexpected exception as one line of text."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """What we do beside the engine while it starts, and need not do: no server ends because we are installed.

    :param what: stays as the engine has it if this fails, with one line in the log.
    :raises PatchError: it failed, and ``SGLANG_MOE_PATCHES_STRICT=1``.
    """
    try:
        yield
    except Exception as error:
        message = f"{log.PREFIX}{what} is left alone: {one_line_error(error)}"
        if STRICT.read():
            raise PatchError(f"{STRICT.name}=1, and {message}") from error
        log.once(logging.WARNING, message, "%s", message)


# --- Putting one in place, and taking it back ------------------------------------------------------------------------

_ABSENT = object()


class Patcher:
    """Sets attributes of modules, classes and other objects, and can put every one of them back."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace ``owner.name``.

        What ``owner`` inherits is replaced on ``owner`` alone, and found in the base again when undone.

        :raises AttributeError: there is none.
        """
        inspect.getattr_static(owner, name)
        self.add(owner, name, new)

    def add(self, owner: Any, name: str, new: Any) -> None:
        """Give ``owner`` an attribute, whether it has one of that name or not."""
        self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def wrap(self, owner: Any, name: str, make_wrapper: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make_wrapper(original)``.

        The wrapper is an ordinary function: ``torch.compile`` traces through it, and a call costs one frame.
        """
        self.replace(owner, name, make_wrapper(inspect.getattr_static(owner, name)))

    def undo(self) -> None:
        """Put the originals back, last change first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def around(wrapper: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What :meth:`Patcher.wrap` takes, from a function that is called with the original before the arguments.

    Each call costs a frame more than that of a wrapper that is written out: not for what runs in a forward.
    """

    def make_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        return wrapped

    return make_wrapper


def replace_globals(function: FunctionType, module: ModuleType, patcher: Patcher, **replaced: Any) -> FunctionType:
    """``function`` with some of its globals replaced; it finds all others in its module at the time of the call.

    The replacements get names of their own in the module, and the function's code is made to ask for those: finding
    a name costs what it did.
    """
    new = {}
    for name, value in replaced.items():
        new[name] = f"_moe_patches_{name}"
        while hasattr(module, new[name]):  # several changes may replace the same one
            new[name] += "_"
        patcher.add(module, new[name], value)
    code = function.__code__.replace(co_names=tuple(new.get(name, name) for name in function.__code__.co_names))
    bound = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
