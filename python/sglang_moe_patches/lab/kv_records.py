"""What ``sglang-moe-patches doctor --kv`` tells of the records of kv-sizing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_moe_patches import __version__
from sglang_moe_patches.memory.kv_sizing import eligibility, record, sizing
from sglang_moe_patches.memory.kv_sizing.record import Record

REST = "libraries, context, buffers and what others took, which cannot be told apart"
"""Of a need, what is left when all that was measured is taken away."""


def read() -> tuple[Path, dict[str, Record]]:
    """The file of records and what it has.

    :raises ValueError: it cannot be read.
    """
    path = eligibility.record_path(os.environ)
    try:
        return path, record.read(path)
    except record.Unreadable as error:
        raise ValueError(f"{path} {error}") from error


def forget(name: str) -> str:
    """Forget records.

    :param name: how their fingerprints begin, or ``all``.
    :returns: what was forgotten, for people.
    :raises ValueError: the file cannot be read or written, or no record is called so.
    """
    path, records = read()
    gone = [key for key in records if name == "all" or key.startswith(name)]
    if not gone:
        raise ValueError(f"{path} has no record {name}; it has {', '.join(records) or 'none'}")
    try:
        for key in gone:
            record.update(path, key, lambda old: None)
    except OSError as error:
        raise ValueError(str(error)) from error
    return f"{path}: {', '.join(gone)} forgotten"


def format_records() -> list[str]:
    """Every record in lines.

    :raises ValueError: the file cannot be read.
    """
    path, records = read()
    lines = [line for key, found in records.items() for line in describe(key, found)]
    return [f"{path}: {len(records)} {'record' if len(records) == 1 else 'records'}", *lines]


def json_report() -> dict[str, Any]:
    """Every record as JSON has it.

    :raises ValueError: the file cannot be read.
    """
    path, records = read()
    return {"file": str(path), "records": {key: asdict(found) | advice(found) for key, found in records.items()}}


def mismatch_reason(found: Record, margin: int) -> str:
    """Why no start of this version finds the record, which holds for one version and one margin; "": a start may.

    :param margin: in bytes, that a start on its GPU has now.
    """
    differing = []
    for key, what, now in (("package", "version", __version__), ("margin", "margin in bytes", margin)):
        made = found.fingerprint_inputs.get(key, now)
        if made != now:
            differing.append(f"{what} {made}, now {now}")
    return f"measures anew, as this record is of another {'; '.join(differing)}" if differing else ""


def advice(found: Record) -> dict[str, Any]:
    """What a server of this configuration would suggest, what it does, and what its need is made of."""
    launch = sizing.LaunchMemory.of_record(found)
    fraction = sizing.suggested_fraction(launch, found) if launch.free_before_load > 0 else None
    decision = sizing.decide(launch, found)
    sized = decision.reason or "sized by it"
    if decision.rehearse:
        sized += "; rehearses once more" if found.need else "; measures during its start"
    return {
        "suggested_fraction": fraction,
        "suggested_tokens": None if fraction is None else sizing.fitting_tokens(launch, found),
        "next_start": mismatch_reason(found, launch.margin) or sized,
        "need_made_of": need_made_of(found) if found.need else {},
    }


def need_made_of(found: Record) -> dict[str, int]:
    """Bytes of the largest rank's need, by what they were for; they add up to it."""
    parts = found.parts
    phase = f" ({parts.phase})" if parts.phase else ""
    measured = {
        "request table": found.table_bytes,
        "the draft model's KV cache": found.draft_kv_bytes,
        "decode graphs": parts.decode_graphs,
        "prefill graphs": parts.prefill_graphs,
        f"tensors of the largest forward{phase}": parts.tensors,
        "slack of PyTorch's allocator": parts.slack,
        "kept for the forward before which the rehearsal ended early": parts.not_run,
    }
    known = {what: size for what, size in measured.items() if size}
    rest = found.need - sum(known.values())
    # Forwards may have used what graphs had left in the allocator: both counted it.
    return {**known, REST: rest} if rest >= 0 else {"parts that overlap, and cannot be told apart": found.need}


def describe(key: str, found: Record) -> list[str]:
    """A record in lines."""
    suggestion = advice(found)
    made = found.fingerprint_inputs
    lines = [f"{key}: {made.get('model', '?')} on {made.get('devices', '?')} x {made.get('device', '?')}"]
    lines.append("  " + ", ".join(f"{name} {made.get(name, '?')}" for name in ("engine", "torch", "driver")))
    when = datetime.fromtimestamp(found.measured, UTC).strftime("%Y-%m-%d %H:%M")
    if not found.need:
        lines.append(
            f"  nothing measured yet; {found.attempts} rehearsals have begun and not ended"
            if found.lowest_free_serving is None
            else f"  not rehearsed; while serving, since {when} UTC, {found.lowest_free_serving / 1e6:,.0f} MB of "
            f"{found.reserve / 1e6:,.0f} MB stayed free at the worst moment seen"
        )
        lines += [f"  out of memory while serving: {found.ooms}"] * bool(found.ooms)
        return lines
    lines.append(
        f"  measured {when} UTC: {found.need / 1e6:,.0f} MB needed of {found.before / 1e6:,.0f} MB "
        f"({', '.join(f'{need / 1e6:,.0f}' for need in found.ranks)} by rank), at the fraction {found.fraction:.4f}"
    )
    lines += [f"    {size / 1e6:,.0f} MB {what}" for what, size in suggestion["need_made_of"].items()]
    if suggestion["suggested_fraction"] is not None:
        fraction, tokens = suggestion["suggested_fraction"], suggestion["suggested_tokens"]
        lines.append(f"  suggested: --mem-fraction-static {fraction:.4f}, with which {tokens:,} tokens fit")
    lines.append(f"  the rule: {found.rule_fraction:.4f}, {found.rule_tokens:,} tokens")
    lines.append(f"  reached: {', '.join(found.reached) or 'nothing'}")
    if found.missed:
        lines.append(f"  not reached, so the engine's default applies: {', '.join(found.missed)}")
    if found.skipped:
        lines.append(f"  skipped: {', '.join(found.skipped)}")
    lines += ["  proven by a server of its size"] * found.proven
    lines.append(f"  the next start: {suggestion['next_start']}")
    if found.lowest_free_serving is not None:
        lines.append(f"  while serving: {found.lowest_free_serving / 1e6:,.0f} MB free at the worst moment seen")
    if found.ooms:
        lines.append(f"  out of memory while serving: {found.ooms}")
    if found.unserved:
        lines.append(f"  sized starts that have not served: {len(found.unserved)}")
    arguments = made.get("arguments", {})
    lines.append(f"  arguments: {json.dumps(arguments, sort_keys=True)}")
    changes = made.get("changes", {})
    lines.append(f"  changes: {', '.join(f'{name}: {status}' for name, status in changes.items())}")
    return lines
