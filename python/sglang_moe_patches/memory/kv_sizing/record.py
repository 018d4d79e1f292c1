"""What was measured, one record for each configuration, in one JSON file that a person can read and delete.

Whatever is wrong with the file is a reason, never an exception: a server that cannot read its record starts by the
engine's rule. It is written whole or not at all, and under a lock, which replicas on one machine share.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

LOCK_RETRY_S = 0.05
FORMAT = 3
"""Of the file. Another one is not read: what was measured is measured again."""


@dataclass(frozen=True)
class NeedParts:
    """Of what one rank needed, in bytes, what its server could measure.

    :param decode_graphs: what their capture took, as the engine tells it, and ``prefill_graphs``.
    :param tensors: the most that PyTorch had allocated in a rehearsal, beside what it had when that began.
    :param phase: in which that was.
    :param slack: what PyTorch's allocator took in the rehearsal beyond those tensors.
    :param not_run: added where the rehearsal ended early, for what further forwards would have taken.
    """

    decode_graphs: int = 0
    prefill_graphs: int = 0
    tensors: int = 0
    phase: str = ""
    slack: int = 0
    not_run: int = 0


@dataclass(frozen=True)
class Record:
    """What a configuration needed beside weights and KV cache, in bytes; every number is the worst rank's.

    :param fingerprint_inputs: what the fingerprint is made of, for people.
    :param measured: when, in seconds since 1970; of a server that is only watched, since when.
    :param unfinished: rehearsals that began and have not ended, each by its GPU and its launch.
    :param unserved: launches that were sized by this record and have not begun to serve.
    :param total: memory of the GPU, as its driver says, known wherever ``fingerprint_inputs`` are, and ``before``:
        free of it before the weights were loaded.
    :param rule_fraction: the engine's own ``--mem-fraction-static``, and ``rule_tokens``: the KV cache it gave.
    :param fraction: in force when it was measured, and ``tokens``, ``kv_bytes``: the KV cache then.
    :param reserve: what there was beside weights and KV cache: more than the fraction sets aside with
        ``--max-total-tokens``.
    :param images: of the engine's rule, for images, which no rehearsal drives.
    :param table_bytes: of the request table, which grows with the KV cache, and ``draft_kv_bytes``: of a draft model's
        KV cache, which does too. Both are part of the need.
    :param requests_grow: as many requests run at once as the pools have room for, and the need may grow with them.
    :param need: the most that was taken of what is set aside, by all ranks; 0: nothing was measured.
    :param ranks: the same for each rank.
    :param parts: what the largest of them was made of.
    :param reached: phases that ran at their bounds; ``missed``: that did not; ``skipped``: that cannot run in this
        configuration, each with the reason.
    :param rehearsals: how many launches have rehearsed this configuration to an end, and ``rehearsed_by`` the last one:
        its replicas count once.
    :param proven: a server that was sized by it has rehearsed too.
    :param serving_peak_need: the most taken while serving; 0: not seen.
    :param lowest_free_serving: the lowest free memory while serving; ``None``: not seen.
    :param ooms: servers of this configuration that ran out of memory while serving.
    """

    fingerprint_inputs: Mapping[str, Any] = field(default_factory=dict)
    measured: float = 0.0
    unfinished: tuple[str, ...] = ()
    unserved: tuple[str, ...] = ()
    total: int = 0
    before: int = 0
    rule_fraction: float = 0.0
    rule_tokens: int = 0
    fraction: float = 0.0
    tokens: int = 0
    kv_bytes: int = 0
    reserve: int = 0
    images: int = 0
    table_bytes: int = 0
    draft_kv_bytes: int = 0
    requests_grow: bool = False
    need: int = 0
    ranks: tuple[int, ...] = ()
    parts: NeedParts = NeedParts()
    reached: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    rehearsals: int = 0
    rehearsed_by: str = ""
    proven: bool = False
    serving_peak_need: int = 0
    lowest_free_serving: int | None = None
    ooms: int = 0

    @property
    def attempts(self) -> int:
        """Launches whose rehearsals began and have not all ended."""
        return len({entry.partition(_OF)[2] for entry in self.unfinished})


_OF = " of "


# --- Launches --------------------------------------------------------------------------------------------------------

FORGOTTEN_AFTER_S = 1800.0
"""A launch on another machine cannot be looked for: after so long it counts as ended."""
_LAUNCH = re.compile(r"(?P<host>.*):(?P<pid>\d+)@(?P<created>[\d.]+)")


def current_launch(*, is_replica: bool) -> str:
    """The launch of this server, by which others can tell later whether it has ended.

    :param is_replica: the process that launched all replicas is meant.
    :returns: host, process and when that began, as process numbers come again.
    """
    import psutil

    here = psutil.Process()
    launcher = (here.parent() if is_replica else None) or here
    return f"{socket.gethostname()}:{launcher.pid}@{launcher.create_time():.2f}"


def is_alive(launch: str) -> bool:
    """Whether a launch may still be under way."""
    import psutil

    name = _LAUNCH.fullmatch(launch)
    if name is None:
        return False
    created = float(name["created"])
    if name["host"] != socket.gethostname():
        return time.time() - created < FORGOTTEN_AFTER_S
    try:
        return abs(psutil.Process(int(name["pid"])).create_time() - created) < 0.1
    except psutil.Error:
        return False


class Unreadable(ValueError):
    """The file is there and is not what it should be. The message says in what, in a few words."""


class Unwritable(OSError):
    """The file cannot be written. The message says why."""


class Busy(Unwritable):
    """Another process is writing the file."""


# --- The fingerprint -------------------------------------------------------------------------------------------------


NOT_IDENTIFYING = ("model",)
"""Inputs that are kept for people: where the model lies does not matter, its configuration does."""


def fingerprint(fingerprint_inputs: Mapping[str, Any]) -> str:
    """The key of a configuration; the same for the same values in any order."""
    identifying = {name: value for name, value in fingerprint_inputs.items() if name not in NOT_IDENTIFYING}
    text = json.dumps(identifying, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- The file --------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Record]:
    """The records by their fingerprints; none where there is no file.

    :raises Unreadable: what is there cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot be read ({_short(error)})") from error
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise Unreadable("is not whole JSON") from error
    if not isinstance(whole, dict) or not isinstance(whole.get("records"), dict):
        raise Unreadable("is no file of records")
    if whole.get("format") != FORMAT:
        raise Unreadable(f"has format {whole.get('format')!r}, this version reads {FORMAT}")
    return {str(name): _typed(found, Record) for name, found in whole["records"].items()}


def _typed(found: Any, kind: type[Any]) -> Any:
    """What the file has of a dataclass.

    :raises Unreadable: it is none.
    """
    if not isinstance(found, dict):
        raise Unreadable(f"has a {kind.__name__} that is none")
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind) if each.name in found]
    return kind(**{name: _value(found[name], hints[name], name) for name in names})


def _value(value: Any, kind: Any, name: str) -> Any:
    """``value``, if it is of the kind that the field ``name`` has."""
    inner = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _typed(value, kind)
    if NoneType in inner:
        return None if value is None else _value(value, inner[0], name)
    if kind is float and type(value) in (int, float) and math.isfinite(value) and value >= 0:
        return float(value)
    if (kind is int and type(value) is int and value >= 0) or (kind in (bool, str) and type(value) is kind):
        return value
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_value(each, inner[0], name) for each in value)
    if get_origin(kind) is Mapping and isinstance(value, dict):
        return value
    raise Unreadable(f"has a record whose {name} is {value!r}")


def update(path: Path, key: str, by: Callable[[Record], Record | None], *, wait_s: float = 5.0) -> Record | None:
    """Change one record of the file, beside other processes that do; ``Record()`` where there is none.

    A file that cannot be read is put aside, under its name and ``.unreadable``.

    :param by: what becomes of it; ``None``: it goes.
    :param wait_s: how long another process that writes is waited for.
    :returns: what ``by`` did.
    :raises Busy: another process still writes after ``wait_s``.
    :raises Unwritable: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, wait_s):
            try:
                records = read(path)
            except Unreadable:
                os.replace(path, path.with_name(f"{path.name}.unreadable"))
                records = {}
            before = records.pop(key, None)
            became = by(before or Record())
            if became is not None:
                records[key] = became
            if became != before:
                _write(path, records)
            return became
    except BlockingIOError as error:
        raise Busy(f"{path} is being written by another process") from error
    except OSError as error:
        raise Unwritable(f"{path} cannot be written ({_short(error)})") from error


@contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    # A file of its own: the other one is replaced, and whoever waited for its lock would hold the old one's.
    with path.with_name(path.name + ".lock").open("a", encoding="utf-8") as lock:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOCK_RETRY_S)
        yield


def _write(path: Path, records: Mapping[str, Record]) -> None:
    whole = {"format": FORMAT, "records": {name: asdict(each) for name, each in records.items()}}
    # One name, as one writes at a time: what a killed process left, the next one writes over.
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _short(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


# --- What becomes of a record ----------------------------------------------------------------------------------------


def with_rehearsal_begun(old: Record, gpu: int, launch: str) -> Record:
    """A rehearsal begins.

    :param launch: the same for the replicas of a server, each of which rehearses on GPUs of its own.
    """
    return replace(old, unfinished=(*old.unfinished, f"{gpu}{_OF}{launch}"))


def without_living(old: Record, is_alive: Callable[[str], bool]) -> Record:
    """The record as launches have left it that have ended: others may be in the middle of a start.

    :param is_alive: whether a launch may still be under way.
    """
    return replace(
        old,
        unfinished=tuple(entry for entry in old.unfinished if not is_alive(entry.partition(_OF)[2])),
        unserved=tuple(launch for launch in old.unserved if not is_alive(launch)),
    )


def with_unserved(old: Record, launch: str) -> Record | None:
    """A start sized by this record begins; nothing where the record was forgotten meanwhile."""
    return replace(old, unserved=(*old.unserved, launch)) if old.need else None


def with_served_start(old: Record) -> Record | None:
    """A start sized by this record serves: earlier ones that did not are forgiven."""
    return replace(old, unserved=()) if old.need else None


def with_rehearsal(old: Record, new: Record, gpu: int, launch: str, *, stopped: bool = False) -> Record:
    """A rehearsal has ended, and what did not end on this GPU of this machine before is forgiven.

    :param new: what it measured. An earlier need counts where it was larger; what was seen while serving stays known.
    :param stopped: it ended early, before memory ran out. The need is raised, and the phases that ``old`` has reached
        stay reached.
    """
    here = f"{gpu}{_OF}{launch.rpartition(':')[0]}"
    left = tuple(entry for entry in old.unfinished if entry.rpartition(":")[0] != here)
    need, parts = max((new.need, new.parts), (old.need, old.parts), key=lambda each: each[0])
    old = replace(old, unfinished=left, rehearsals=old.rehearsals + (launch != old.rehearsed_by), rehearsed_by=launch)
    if stopped and old.need:
        return replace(old, need=need, ranks=new.ranks, parts=parts, proven=False)
    return replace(
        new,
        unfinished=left,
        rehearsals=old.rehearsals,
        rehearsed_by=launch,
        unserved=old.unserved,
        need=need,
        parts=parts,
        # Another replica may have found meanwhile that more is needed than this one set aside.
        proven=new.proven and old.need <= new.reserve,
        rule_tokens=old.rule_tokens or new.rule_tokens,
        serving_peak_need=old.serving_peak_need,
        lowest_free_serving=old.lowest_free_serving,
        ooms=old.ooms,
    )


def with_serving(old: Record, reserve: int, lowest: int) -> Record:
    """What a server that serves has had left at the worst moment.

    :param reserve: what it set aside, in bytes.
    """
    known = lowest if old.lowest_free_serving is None else min(lowest, old.lowest_free_serving)
    return replace(old, serving_peak_need=max(old.serving_peak_need, reserve - lowest), lowest_free_serving=known)


def merge_serving(known: Record, others: Iterable[Record]) -> Record:
    """A record with what other machines' records have seen while serving, each of its own ranks."""
    every = [known, *others]
    lowest = [each.lowest_free_serving for each in every if each.lowest_free_serving is not None]
    return replace(
        known,
        serving_peak_need=max(each.serving_peak_need for each in every),
        lowest_free_serving=min(lowest, default=None),
        ooms=max(each.ooms for each in every),
    )


def with_out_of_memory(old: Record) -> Record:
    """A server ran out of memory while serving."""
    return replace(old, ooms=old.ooms + 1)


# --- For people ------------------------------------------------------------------------------------------------------


def age(record: Record, now: float) -> str:
    """How old a record is, in words."""
    seconds = max(0.0, now - record.measured)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"
