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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

FORMAT = 1
"""Of the file. Another one is not read: what was measured is measured again."""


@dataclass(frozen=True)
class Record:
    """What a configuration needed beside weights and KV cache, in bytes; every number is the worst rank's.

    :param made_of: what the fingerprint is made of, for people.
    :param measured: when, in seconds since 1970; of a server that is only watched, since when.
    :param unfinished: rehearsals that began and have not ended, each by its GPU and its launch.
    :param total: memory of the GPU, and ``before``: free of it before the weights were loaded.
    :param rule_fraction: the engine's own ``--mem-fraction-static``, and ``rule_tokens``: the KV cache it gave.
    :param fraction: in force when it was measured, and ``tokens``, ``kv_bytes``: the KV cache then.
    :param table_bytes: of the request table, which grows with the KV cache.
    :param requests_follow: as many requests run at once as the pools have room for, and the need may grow with them.
    :param need: the most that was taken of what is set aside, by all ranks; 0: nothing was measured.
    :param ranks: the same for each rank.
    :param driven: phases that were seen at their bounds; ``missed``: that were not; ``left_out``: that cannot be driven
        in this configuration, each with the reason.
    :param proven: a server that was sized by it has rehearsed too.
    :param serving_need: the most taken while serving; 0: not seen.
    :param lowest_serving: the lowest free memory while serving; ``None``: not seen.
    :param ooms: servers of this configuration that ran out of memory while serving.
    """

    made_of: Mapping[str, Any] = field(default_factory=dict)
    measured: float = 0.0
    unfinished: tuple[str, ...] = ()
    total: int = 0
    before: int = 0
    rule_fraction: float = 0.0
    rule_tokens: int = 0
    fraction: float = 0.0
    tokens: int = 0
    kv_bytes: int = 0
    table_bytes: int = 0
    requests_follow: bool = False
    need: int = 0
    ranks: tuple[int, ...] = ()
    driven: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    proven: bool = False
    serving_need: int = 0
    lowest_serving: int | None = None
    ooms: int = 0

    @property
    def attempts(self) -> int:
        """Launches whose rehearsals began and have not all ended."""
        return len({entry.partition(_OF)[2] for entry in self.unfinished})


_OF = " of "


class Unreadable(ValueError):
    """The file is there and is not what it should be. The message says in what, in a few words."""


class Unwritable(OSError):
    """The file cannot be written. The message says why."""


# --- The fingerprint -------------------------------------------------------------------------------------------------


def fingerprint(made_of: Mapping[str, Any]) -> str:
    """Of everything that what is needed depends on; the same for the same values in any order."""
    text = json.dumps(made_of, sort_keys=True, ensure_ascii=True, default=str)
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
    return {str(name): _record(found) for name, found in whole["records"].items()}


def _record(found: Any) -> Record:
    """:raises Unreadable: not a record."""
    if not isinstance(found, dict):
        raise Unreadable("has a record that is none")
    hints = get_type_hints(Record)
    given = {}
    for each in fields(Record):
        if each.name in found:
            given[each.name] = _value(found[each.name], hints[each.name], each.name)
    return Record(**given)


def _value(value: Any, kind: Any, name: str) -> Any:
    """``value``, if it is of the kind that the field ``name`` has."""
    inner = get_args(kind)
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


def change(path: Path, key: str, by: Callable[[Record], Record | None]) -> Record | None:
    """Change one record of the file, beside other processes that do; ``Record()`` where there is none.

    A file that cannot be read is put aside, under its name and ``.unreadable``.

    :param by: what becomes of it; ``None``: it goes.
    :returns: what ``by`` did.
    :raises Unwritable: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
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
    except OSError as error:
        raise Unwritable(f"{path} cannot be written ({_short(error)})") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # A file of its own: the other one is replaced, and whoever waited for its lock would hold the old one's.
    with path.with_name(path.name + ".lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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


def begun(old: Record, gpu: int, launch: str) -> Record:
    """A rehearsal begins.

    :param launch: the same for the replicas of a server, each of which rehearses on GPUs of its own.
    """
    return replace(old, unfinished=(*old.unfinished, f"{gpu}{_OF}{launch}"))


def of_others(old: Record, launch: str) -> Record:
    """The record as other launches have left it: replicas of this one may have begun."""
    return replace(old, unfinished=tuple(each for each in old.unfinished if each.partition(_OF)[2] != launch))


def rehearsed(old: Record, new: Record, gpu: int, *, stopped: bool = False) -> Record:
    """A rehearsal has ended, and what did not end on this GPU before is forgiven.

    :param new: what it measured. An earlier need counts where it was larger; what was seen while serving stays known.
    :param stopped: it ended early, before memory ran out: of a server that was sized by ``old`` it says how much less
        is to be given; the phases that ``old`` has are no less driven for it.
    """
    left = tuple(each for each in old.unfinished if each.partition(_OF)[0] != str(gpu))
    if stopped and old.need:
        return replace(old, unfinished=left, need=max(new.need, old.need), ranks=new.ranks, proven=False)
    return replace(
        new,
        unfinished=left,
        need=max(new.need, old.need),
        # Another replica may have found meanwhile that more is needed than this one set aside.
        proven=new.proven and old.need <= new.before * (1 - new.fraction),
        rule_tokens=old.rule_tokens or new.rule_tokens,
        serving_need=old.serving_need,
        lowest_serving=old.lowest_serving,
        ooms=old.ooms,
    )


def served(old: Record, reserve: int, lowest: int) -> Record:
    """What a server that serves has had left at the worst moment.

    :param reserve: what it set aside, in bytes.
    """
    known = lowest if old.lowest_serving is None else min(lowest, old.lowest_serving)
    return replace(old, serving_need=max(old.serving_need, reserve - lowest), lowest_serving=known)


def with_served(known: Record, others: Iterable[Record]) -> Record:
    """A record with what other machines' records have seen while serving, each of its own ranks."""
    every = [known, *others]
    lowest = [each.lowest_serving for each in every if each.lowest_serving is not None]
    return replace(
        known,
        serving_need=max(each.serving_need for each in every),
        lowest_serving=min(lowest, default=None),
        ooms=max(each.ooms for each in every),
    )


def ran_out(old: Record) -> Record:
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


def described(key: str, record: Record) -> list[str]:
    """A record in lines."""
    made = record.made_of
    lines = [f"{key}: {made.get('model', '?')} on {made.get('devices', '?')} x {made.get('device', '?')}"]
    lines.append("  " + ", ".join(f"{name} {made.get(name, '?')}" for name in ("engine", "torch", "driver")))
    when = datetime.fromtimestamp(record.measured, UTC).strftime("%Y-%m-%d %H:%M")
    if not record.need:
        lines.append(
            f"  nothing measured yet; {record.attempts} rehearsals have begun and not ended"
            if record.lowest_serving is None
            else f"  not rehearsed; while serving, since {when} UTC, {record.lowest_serving / 1e6:,.0f} MB of "
            f"{record.before * (1 - record.fraction) / 1e6:,.0f} MB stayed free at the worst moment seen"
        )
        lines += [f"  out of memory while serving: {record.ooms}"] * bool(record.ooms)
        return lines
    lines.append(
        f"  measured {when} UTC: {record.need / 1e6:,.0f} MB needed of {record.before / 1e6:,.0f} MB "
        f"({', '.join(f'{need / 1e6:,.0f}' for need in record.ranks)} by rank), at the fraction {record.fraction:.4f}"
    )
    lines.append(f"  the rule: {record.rule_fraction:.4f}, {record.rule_tokens:,} tokens")
    lines.append(f"  driven: {', '.join(record.driven) or 'nothing'}")
    if record.missed:
        lines.append(f"  not seen at its bound, so the rule sizes: {', '.join(record.missed)}")
    if record.left_out:
        lines.append(f"  not driven: {', '.join(record.left_out)}")
    lines.append("  proven by a server of its size" if record.proven else "  the next server rehearses once more")
    if record.lowest_serving is not None:
        lines.append(f"  while serving: {record.lowest_serving / 1e6:,.0f} MB free at the worst moment seen")
    if record.ooms:
        lines.append(f"  out of memory while serving: {record.ooms}")
    arguments = made.get("arguments", {})
    lines.append(f"  arguments: {json.dumps(arguments, sort_keys=True)}")
    changes = made.get("changes", {})
    lines.append(f"  changes: {', '.join(f'{name}: {status}' for name, status in changes.items())}")
    return lines
