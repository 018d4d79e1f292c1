"""Definition of a change, and the functions that probe, install and undo changes.

A *change* is one module or package in ``changes`` or ``memory`` that defines one :class:`Change`. Its ``plan`` function
probes the installed engine and returns a :class:`Plan`: a status, a reason and an installer. The installer uses
the results of the probe, so the engine is not probed again to install the change.

Probing changes nothing. An installer patches the engine through a :class:`Patcher`. If an installer fails, all its
patches are undone.
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

# --- The definition of a change --------------------------------------------------------------------------------------


class Status(StrEnum):
    """Status of a change on an engine, or on one server of the engine if the server's arguments are known."""

    APPLIED = "applied"
    """The change patches the engine."""
    NATIVE = "native"
    """The engine already does what the change would do. Nothing is patched."""
    EXTENDED = "extended"
    """The engine already does a part of what the change would do. A patch does the rest."""
    HARDENED = "hardened"
    """The engine already does what the change would do, but with a fault. A patch corrects the fault."""
    NOT_NEEDED = "not needed here"
    """This server never runs the code that the change patches, or the change does not support this server."""
    OFF = "off"
    """The change does nothing on this server until an environment variable enables it."""
    UNSUPPORTED = "unsupported"
    """The engine's code differs from what the change expects, or another plugin has patched it. Nothing is patched."""
    NOT_SELECTED = "not selected"
    """The environment variable ``SGLANG_MOE_PATCHES`` does not select the change."""


ACTIVE = (Status.APPLIED, Status.EXTENDED, Status.HARDENED)
"""Statuses with which a change patches the engine."""


@dataclass(frozen=True)
class Skip:
    """Reason why a change is not installed on a server.

    There are three kinds of reasons:

    - The server never runs the code that the change patches.
    - The change does not support the server.
    - The change is off on this server until an environment variable enables it.

    :param reason: the reason in words, for the log and ``doctor``.
    :param can_be_enabled: whether an environment variable can enable the change on this server. If so, the change's
        status is ``off``, else ``not needed here``.
    """

    reason: str
    can_be_enabled: bool = False


Install = Callable[["Patcher"], None]


@dataclass(frozen=True)
class Plan:
    """Result of a change's probe: the status of the change on this engine, and the function that installs its patches.

    :param reason: why the change has this status; may be empty.
    :param install: function that installs the change's patches. It is ``None`` unless the status is one of
        :data:`ACTIVE`.
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
    """A model that the engine has built while the changes were installed.

    ``doctor --model`` builds such a model, with one layer of each kind, to show what the changes decide.

    :param model: the engine's model. Its weights may be tensors of PyTorch's ``meta`` device or fake tensors.
    :param tokens: largest number of tokens that a MoE layer receives in a prefill chunk. With data parallelism, this is
        the sum of one chunk per rank.
    :param top_k: number of experts per token. It is used for layers whose own configuration does not contain this
        number.
    :param tiles: function that returns the tile sizes of Triton's second GEMM for a ``FusedMoE`` layer. It returns
        ``None`` if it does not know them.
    """

    model: Any
    tokens: int
    top_k: int = 0
    tiles: Callable[[Any], Mapping[str, int] | None] = lambda experts: None


def combine_installs(*parts: Install | None) -> Install:
    """Return an installer that runs several installers in this order, except those that are ``None``."""

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
    """Result of a change's ``decide`` function (:attr:`Change.decide`): how the change acts in the layers of one model.

    :param effects: a name for each way in which the change acts in at least one layer, such as :data:`SHARED_LAST`. If
        the tuple is empty, the change does nothing in this model.
    :param reason: why the change does nothing, or less than it could, and which setting would change that.
    :param width: columns of a column slice, or ``None`` if no layer computes in column slices.
    """

    effects: tuple[str, ...] = ()
    reason: str = ""
    width: int | None = None

    @property
    def acts(self) -> bool:
        return bool(self.effects)


@dataclass(frozen=True)
class Count:
    """Definition of a counter for an action of a change.

    If ``SGLANG_MOE_PATCHES_OBSERVE`` is set, :mod:`sglang_moe_patches.lab.observers.counting` counts the action. To do
    so, it wraps a function that runs whenever the change may act.

    :param name: name of the action. Changes that share an action use the same name.
    :param description: phrase for people, which follows the change's name, such as "ran in columns".
    :param module: module of this package or of the engine that defines the function.
    :param function: name of the function in the module, or ``Class.method``.
    :param amount: function that returns how often or how much the change acted in one call, or 0 if it did not act. It
        receives the call's result and then the call's arguments.
    :param unit: unit of ``amount``, for people. It is empty if ``amount`` only counts calls.
    :param before_layer: whether the function runs before the layer's routed experts start. Its action is then
        attributed to the layer that starts next.
    :param skip_reason: function that returns why the change did nothing, or "" if the reason is unknown. It receives
        the sizes of the largest MoE input observed: tokens, top-k, hidden size and bytes per element.
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
    """Definition of a change: all facts that code outside the change's own module needs.

    :param name: name of the change in ``SGLANG_MOE_PATCHES``.
    :param summary: one line for ``doctor`` and the pages.
    :param plan: function that probes the installed engine and returns the plan. It imports the engine's modules that it
        needs. It raises :class:`engine.Unsupported` if the engine is not as the change expects.
    :param skip: function that receives a server's ``ServerArgs``. It returns a :class:`Skip` if the change is not to be
        installed on this server, else ``None``. It raises :class:`engine.Unsupported` if an environment variable
        enables the change on a server that cannot run it. ``skip`` is called before ``plan``, so that a server imports
        no modules for a change that it skips.
    :param variables: environment variables that the change reads. If the change is selected, an invalid value ends the
        start-up.
    :param counts: counters for the change's actions.
    :param decide: function that returns how the change acts in a model. The engine must have built the model while the
        change was installed. The function calls the same code that decides in a forward pass. If ``decide`` is
        ``None``, the change acts alike on all models.
    :param launcher_hooks: pairs. The first element is the name of an engine module. The second element is a function,
        the *launcher hook*. Every process that imports the module calls the hook with the module and a
        :class:`Patcher`. This includes the launcher, the process that starts the schedulers.
    """

    name: str
    summary: str
    plan: Callable[[], Plan]
    skip: Callable[[Any], Skip | None] = lambda server_args: None
    variables: tuple[Variable[Any], ...] = ()
    counts: tuple[Count, ...] = ()
    decide: Callable[[BuiltModel], Decision] | None = None
    launcher_hooks: tuple[tuple[str, Callable[[ModuleType, Patcher], None]], ...] = ()


# --- The environment variables, and the selected changes -------------------------------------------------------------

SELECT_VARIABLE = "SGLANG_MOE_PATCHES"
_VARIABLE_PREFIX = "SGLANG_MOE_PATCH"
"""Beginning of the names of all environment variables of this package. A variable with this beginning that no code
reads is probably misspelt. The final "ES" of ``SGLANG_MOE_PATCHES`` is left out, so that a misspelt name such as
``SGLANG_MOE_PATCH_STRICT`` is reported, too."""
_NEW_NAMES = {"nvfp4-weights": "fp4-weights"}
"""Mapping from a change's former name to its present name. ``SGLANG_MOE_PATCHES`` may not contain a former name. The
error message then gives the present name."""


def _define_selection(changes: Iterable[Change]) -> Variable[set[str]]:
    """Return the definition of the environment variable ``SGLANG_MOE_PATCHES``, which selects some of ``changes`` by
    their names.
    """
    change_names = [change.name for change in changes]

    def parse(text: str) -> set[str]:
        if text in ("all", "none"):
            return set(change_names) if text == "all" else set()
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise ValueError(f"{text!r} names no change; to select no change, set {SELECT_VARIABLE}=none")
        if unknown := [name for name in names if name not in change_names]:
            renamed = "".join(f"; {name} is now {_NEW_NAMES[name]}" for name in unknown if name in _NEW_NAMES)
            raise ValueError(
                f"unknown change {', '.join(map(repr, unknown))}{renamed}; "
                f"valid: all, none, or a comma-separated list of {', '.join(change_names)}"
            )
        return set(names)

    return Variable(
        SELECT_VARIABLE, "changes to apply: `all`, `none`, or names separated by commas", parse, default="all"
    )


def read_selected_names(changes: Iterable[Change], environ: Mapping[str, str] = os.environ) -> set[str]:
    """Return the names of the changes that ``SGLANG_MOE_PATCHES`` selects.

    The variable is ``all`` (the default), ``none``, or a comma-separated list of names.

    :raises ValueError: a name is unknown. The message lists the valid names.
    """
    return _define_selection(changes).read(environ)


def list_variables(changes: Iterable[Change]) -> list[tuple[str, Variable[Any]]]:
    """Return every environment variable that this package and ``changes`` read, each with the name of its reader.

    :returns: pairs of a reader and a variable. The reader is a change, ``all changes`` or ``observers``.
    """
    changes = tuple(changes)
    of_changes = [(change.name, variable) for change in changes for variable in change.variables]
    return [("all changes", _define_selection(changes)), *OWN_VARIABLES, *of_changes]


def check_environment(changes: Iterable[Change], environ: Mapping[str, str] = os.environ) -> None:
    """Check the values of this package's environment variables. The start-up and ``doctor`` both call this function.

    The variables of a change are checked only if the change is selected. This function does not check a variable that
    the engine reads, too. The change checks such a variable if the server uses it.

    :raises ValueError: a value is invalid, or a variable of an earlier version is set. The message is one line. It
        names the variable, and its valid values or its replacement.
    """
    changes = tuple(changes)
    not_selected = {change.name for change in changes} - read_selected_names(changes, environ)
    for reader, variable in list_variables(changes):
        if reader not in not_selected and not variable.is_engine_variable:
            variable.read(environ)
    for name, (reader, advice) in RETIRED_VARIABLES.items():
        if reader not in not_selected and environ.get(name, "").strip():
            raise ValueError(f"{name}: {advice}")


def describe_unread_variables(changes: Iterable[Change], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return one warning for each environment variable that looks like a variable of this package, but that no code
    reads.

    Such a variable is usually a typing error.
    """
    variable_names = [variable.name for _, variable in list_variables(changes)]
    lines = []
    for name in sorted(environ):
        if name.startswith(_VARIABLE_PREFIX) and name not in variable_names:
            near = difflib.get_close_matches(name, variable_names, n=1, cutoff=0.8)
            lines.append(f"{name} is set, but no code reads it" + "".join(f"; did you mean {other}?" for other in near))
    return lines


# --- Applying changes ------------------------------------------------------------------------------------------------


class PatchError(RuntimeError):
    """Raised if a selected change cannot be applied and ``SGLANG_MOE_PATCHES_STRICT=1`` forbids a start without it."""


def apply(changes: Iterable[Change], names: set[str], server_args: Any = None) -> dict[str, Plan]:
    """Install each change in ``names`` that the engine supports and this server needs.

    :returns: the plan of every change, by the change's name. If an installer raised an exception, its patches were
        undone and the change's plan is *unsupported*.
    """
    return {change.name: _apply_change(change, names, server_args) for change in changes}


def plan_for(change: Change, names: set[str], server_args: Any = None) -> Plan:
    """Return the plan of a change on a server. Nothing is installed.

    :param names: names of the selected changes. If the change is not among them, its status is *not selected*.
    :param server_args: the engine's ``ServerArgs``, resolved or not. If it is ``None``, the plan holds for every server
        of this environment.
    :raises WrongValue: an environment variable that both the engine and the change read has an invalid value.
    """
    if change.name not in names:
        return Plan(Status.NOT_SELECTED)
    try:
        skip = None if server_args is None else change.skip(engine.resolve_arguments(server_args))
    except WrongValue:
        raise
    except Exception as error:
        return Plan.unsupported(format_reason(error, "this server's arguments could not be read: "))
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
        return Plan.unsupported(f"installing failed and was undone: {format_error(error)}")
    return plan


def probe(change: Change) -> Plan:
    """Probe the engine for a change, and return the plan. If ``change.plan`` raises an exception, the plan is
    *unsupported*.
    """
    try:
        return change.plan()
    except Exception as error:
        return Plan.unsupported(format_reason(error, "probing the engine failed: "))


def format_reason(error: Exception, prefix: str = "") -> str:
    """Return the reason of an *unsupported* plan, from the exception that a probe has raised.

    For :class:`engine.Unsupported`, the reason is the exception's message. For another exception, the reason is
    ``prefix`` and then the exception's type and message.

    :param prefix: text such as "probing the engine failed: ".
    """
    return str(error) if isinstance(error, engine.Unsupported) else prefix + format_error(error)


def format_error(error: Exception) -> str:
    """Return the type and the message of an exception as one line."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def best_effort(part: str) -> Iterator[None]:
    """Context manager around an optional patch. It logs an exception instead of raising it, so that the server starts
    without the patch.

    :param part: the step, for the log line, such as "freeing the scales".
    :raises PatchError: an exception occurred and ``SGLANG_MOE_PATCHES_STRICT=1``.
    """
    try:
        yield
    except Exception as error:
        failed, why = f"{log.PREFIX}{part} failed", format_error(error)
        if STRICT.read():
            raise PatchError(f"{STRICT.name}=1, and {failed}: {why}") from error
        message = f"{failed} and is skipped: {why}"
        log.log_once(logging.WARNING, message, "%s", message)


# --- Installing and undoing patches ----------------------------------------------------------------------------------

_ABSENT = object()


class Patcher:
    """Tool that patches the engine: it sets attributes of modules, classes and other objects, and can restore all of
    them.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace the attribute ``owner.name``.

        An inherited attribute is replaced on ``owner`` alone. After :meth:`undo`, ``owner`` inherits it again.

        :raises AttributeError: the attribute does not exist.
        """
        inspect.getattr_static(owner, name)
        self.add(owner, name, new)

    def add(self, owner: Any, name: str, new: Any) -> None:
        """Set the attribute ``owner.name``. The attribute need not exist before."""
        self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def wrap(self, owner: Any, name: str, make_wrapper: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make_wrapper(original)``.

        The wrapper is an ordinary function, so ``torch.compile`` traces through it, and a call costs one stack frame.
        """
        self.replace(owner, name, make_wrapper(inspect.getattr_static(owner, name)))

    def undo(self) -> None:
        """Restore all attributes, the last patch first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def around(wrapper: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn ``wrapper`` into a function that :meth:`Patcher.wrap` accepts as ``make_wrapper``.

    Each call needs one more stack frame than with a wrapper that is written by hand. Do not use ``around`` for
    functions that run in a forward pass.

    :param wrapper: function that receives the original function and then the arguments of each call.
    """

    def make_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        return wrapped

    return make_wrapper


def replace_globals(function: FunctionType, module: ModuleType, patcher: Patcher, **replaced: Any) -> FunctionType:
    """Return a copy of a function in which some global names have other values.

    The replacements are stored in the module under new names, and the copy's code refers to these names. A lookup is as
    fast as before. The copy finds all other globals in its module at the time of the call.

    :param replaced: the new values, by the names of the globals that they replace.
    """
    new = {}
    for name, value in replaced.items():
        new[name] = f"_moe_patches_{name}"
        while hasattr(module, new[name]):  # several changes may replace the same global
            new[name] += "_"
        patcher.add(module, new[name], value)
    code = function.__code__.replace(co_names=tuple(new.get(name, name) for name in function.__code__.co_names))
    bound = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
