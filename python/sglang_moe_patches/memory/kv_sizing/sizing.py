"""From what was needed to the fraction for the engine: every decision of kv-sizing, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_moe_patches.memory.kv_sizing import record as records
from sglang_moe_patches.memory.kv_sizing.record import Record

MARGIN_BYTES = 2_000_000_000
"""Bytes kept free beyond the measured need. Between two kinds of load the need of fourteen servers has differed by up
to 1,180 MB, and once by 2 GB, on H100s and H200s; those logs were not kept. Code and tests ask
:attr:`LaunchMemory.margin`, not this, doctor that of :meth:`LaunchMemory.of_record`.

``docs/changes/kv-sizing.md`` states the number where it explains the margin, and one test compares
(``test_the_page_says_the_margin`` in ``test/unit/memory/kv_sizing/test_sizing.py``). A margin that no GPU was run with
belongs under *On no GPU* there. No other page changes: where servers were run with 2,000 MB, that stays. Tests of
decisions take the margin of a GPU of 141 GB (``test/standins/kv_servers.py``). MB and GB are 10^6 and 10^9 bytes."""
MIN_GAIN_FRACTION = 0.02
"""Of the KV cache that the engine's rule gives. For less, a server keeps the engine's own number."""
MAX_FOREIGN_MEMORY_DRIFT = 0.01
"""Of the GPU's memory: what other processes may hold more or less of it than when the record was made."""
MAX_UNFINISHED_REHEARSALS = 2
"""Rehearsals that ended with their server, after which none is tried."""
MAX_INCOMPLETE_REHEARSALS = 2
"""Launches that have rehearsed, after which none does where the last has not reached every phase."""
MAX_OUT_OF_MEMORY = 2
"""Servers that ran out of memory while serving, after which the rule applies."""
MAX_UNSERVED_STARTS = 2
"""Starts that were sized by the record and ended before they served, after which the rule applies."""
FRACTION_STEP = 0.0001
"""What a fraction is rounded down to: 15 MB of an H200's 150,109,880,320 bytes."""


@dataclass(frozen=True)
class LaunchMemory:
    """The memory of a server's GPUs as its start begins, in bytes.

    :param free_before_load: free before its weights were loaded, on the rank with the least.
    :param total: of its GPU, as the driver says: 150,109,880,320 of an H200, 85,017,493,504 of an H100. The same on
        all ranks, or none is sized (:func:`rank_error`).
    :param fraction: the engine's own, or the given ``--mem-fraction-static``.
    :param images: of the reserve, what the engine's rule keeps for images, which are not rehearsed.
    :param max_tokens: ``--max-total-tokens``; 0: not given.
    """

    free_before_load: int
    total: int
    fraction: float
    images: int = 0
    max_tokens: int = 0

    @property
    def reserve(self) -> float:
        """What the fraction sets aside."""
        return self.free_before_load * (1 - self.fraction)

    @property
    def margin(self) -> int:
        """What is kept free beyond the measured need, before any server died.

        As it is part of the fingerprint, a record that was proven with another margin counts for none.
        """
        return MARGIN_BYTES

    @classmethod
    def of_record(cls, record: Record) -> LaunchMemory:
        """A start by the engine's rule where it was measured. Every record has its GPU's total."""
        limit = record.fingerprint_inputs.get("arguments", {}).get("max_total_tokens")
        return cls(record.before, record.total, record.rule_fraction, record.images, int(limit or 0))


@dataclass(frozen=True)
class Decision:
    """How a server sizes its KV cache, and whether it rehearses.

    :param fraction: for the engine; ``None``: its own.
    :param reason: why the record does not decide; "" where it does.
    :param reserve: in bytes; ``margin``: the part of it beyond the need.
    :param monitor: free memory is recorded while serving, though nothing else is.
    """

    fraction: float | None = None
    reason: str = ""
    rehearse: bool = False
    reserve: float = 0.0
    margin: int = 0
    monitor: bool = False


# --- All ranks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """What a rank knows before its pools are made; ``failure``: why it knows nothing."""

    failure: str = ""
    launch: LaunchMemory | None = None
    fingerprint_inputs: Mapping[str, Any] = field(default_factory=dict)
    record: Record | None = None
    unreadable: str = ""
    nearest: str = ""


@dataclass(frozen=True)
class SizingInputs:
    """What a server decides by, the same on every rank.

    :param fraction: in force unless the record decides.
    :param given: the user set ``--mem-fraction-static``; ``keep``: it must not be changed.
    :param monitor_only: why this server is not sized, "" where it may be.
    :param reports: of all ranks in their order; the first one's record counts.
    """

    fraction: float
    given: bool
    keep: bool
    monitor_only: str
    reports: Sequence[RankReport]


@dataclass(frozen=True)
class SizingOutcome:
    """What a server does, and what its leader logs before the pools are made ("": nothing)."""

    message: str
    is_warning: bool = False
    decision: Decision = field(default_factory=Decision)
    launch: LaunchMemory | None = None
    record: Record | None = None


def decide_sizing(inputs: SizingInputs) -> SizingOutcome:
    """Decide for all ranks; the same outcome on each of them."""
    source = "the given --mem-fraction-static" if inputs.given else "the engine's default fraction"
    using = f"using {source} {inputs.fraction:.4f}"
    if error := rank_error(inputs.reports):
        return SizingOutcome(f"{using}: {error}", True, Decision(reason=error))
    leader = inputs.reports[0]
    launches = [report.launch for report in inputs.reports if report.launch is not None]
    # The engine divides by the free memory of the rank with the least.
    launch = replace(launches[0], free_before_load=min(each.free_before_load for each in launches))
    known = [report.record for report in inputs.reports if report.record]
    # Each machine has monitored its own servers.
    record = leader.record and records.merge_serving(leader.record, known)
    if inputs.monitor_only:
        decision = Decision(reason=inputs.monitor_only, monitor=True, reserve=launch.reserve)
        next_step = "; free memory is recorded while it serves" + _monitored(record)
        message = f"{using} because {decision.reason}{next_step}"
        return SizingOutcome(message, bool(leader.unreadable), decision, launch, record)
    decision = decide(launch, record, leader.unreadable)
    is_warning = bool(leader.unreadable)
    if inputs.keep:
        measured = record if record is not None and is_complete(record) else None
        advice, is_warning = advise(launch, measured) if measured else (decision.reason, is_warning)
        rehearse = decision.rehearse and measured is None
        decision = Decision(reason=f"it is used unchanged; {advice}", rehearse=rehearse, reserve=launch.reserve)
    if decision.fraction is not None:
        return SizingOutcome("", False, decision, launch, record)
    nearest = f" ({leader.nearest})" if leader.nearest and record is None else ""
    next_step = "; measuring during this start" if decision.rehearse else ""
    return SizingOutcome(f"{using}: {decision.reason}{nearest}{next_step}", is_warning, decision, launch, record)


def rank_error(reports: Sequence[RankReport]) -> str:
    """Why the ranks cannot decide together: one failed, or they differ; "": they can."""
    if failure := next((report.failure for report in reports if report.failure), ""):
        return failure
    differing = [part for part in reports[0].fingerprint_inputs if _differs(part, reports)]
    return f"the ranks differ in: {', '.join(differing)}" if differing else ""


def _differs(part: str, reports: Sequence[RankReport]) -> bool:
    return len({records.fingerprint({part: report.fingerprint_inputs[part]}) for report in reports}) > 1


def _monitored(record: Record | None) -> str:
    if record is None or record.lowest_free_serving is None:
        return ""
    return f": {record.lowest_free_serving / 1e6:,.0f} MB were free at the worst moment until now"


def advise(launch: LaunchMemory, record: Record) -> tuple[str, bool]:
    """What a given fraction leaves, by the record: the sentence for the log, and whether it is a warning."""
    wanted, left = wanted_reserve(launch, record), reserve_in_use(launch, record)
    fraction = fraction_for(launch, wanted)
    if wanted > left:
        fit = f"the largest forward plus a {_margin(launch, record) / 1e6:,.0f} MB margin does not fit"
        advice = f"; {fraction:.4f} would be safe" if fraction > 0 else ""
        return f"{(wanted - left) / 1e6:,.0f} MB too little: {fit}{advice}", True
    if left > launch.reserve:
        return _limit_reason(launch, record), False
    unused = f"{(left - wanted) / 1e6:,.0f} MB of the reserve were never needed"
    more = limited(launch, fitting_tokens(launch, record)) - limited(launch, tokens_beside(record, left))
    return f"{unused}: {fraction:.4f} would give {more:,} more tokens", False


# --- One record ------------------------------------------------------------------------------------------------------


def decide(launch: LaunchMemory, record: Record | None, unreadable: str = "") -> Decision:
    """The fraction that the record gives; where it cannot be used, the engine's own, with the reason.

    :param unreadable: what is wrong with the file of records; "" where it could be read.
    """
    if launch.free_before_load <= 0:
        return _keep_rule(launch, "no memory is free")
    if record is not None and record.attempts >= MAX_UNFINISHED_REHEARSALS:
        return _keep_rule(launch, f"{record.attempts} rehearsals have begun and not ended")
    if record is None or not record.need:
        return _keep_rule(launch, unreadable or "no record for this configuration", rehearse=True)
    if record.missed:
        # Time may have run out while kernels were compiled, which the next start finds ready.
        again = record.rehearsals < MAX_INCOMPLETE_REHEARSALS
        return _keep_rule(launch, f"the rehearsal did not reach: {', '.join(record.missed)}", rehearse=again)
    if record.ooms >= MAX_OUT_OF_MEMORY:
        return _keep_rule(launch, f"{record.ooms} servers ran out of memory while serving")
    if len(record.unserved) >= MAX_UNSERVED_STARTS:
        return _keep_rule(launch, f"{len(record.unserved)} starts with the record's fraction ended before they served")
    then, now = record.total - record.before, launch.total - launch.free_before_load
    if abs(then - now) > MAX_FOREIGN_MEMORY_DRIFT * launch.total:
        held = f"other processes hold {now / 1e6:,.0f} MB of the GPU"
        return _keep_rule(launch, f"{held}, {then / 1e6:,.0f} MB when it was measured")
    wanted, left = wanted_reserve(launch, record), reserve_in_use(launch, record)
    fraction = fraction_for(launch, wanted)
    sized = replace(launch, fraction=fraction)
    gain = (left - reserve_in_use(sized, record)) / max(1.0, available(record) - left)
    if not 0 < fraction < 1 or gain < MIN_GAIN_FRACTION:
        if round(wanted) > round(left):
            short = f"{(wanted - left) / 1e6:,.0f} MB too little"
            return _keep_rule(launch, f"{short}: the largest forward plus the margin does not fit")
        if 0 < launch.max_tokens <= fitting_tokens(launch, record):
            return _keep_rule(launch, _limit_reason(launch, record))
        return _keep_rule(launch, f"the record would give {100 * gain:.1f} % more KV cache, less than 2 %")
    return Decision(
        round(fraction, 4), rehearse=not record.proven, reserve=sized.reserve, margin=_margin(launch, record)
    )


def _keep_rule(launch: LaunchMemory, reason: str, *, rehearse: bool = False) -> Decision:
    return Decision(None, reason, rehearse, launch.reserve)


def _limit_reason(launch: LaunchMemory, record: Record) -> str:
    return f"--max-total-tokens {launch.max_tokens:,} is used; {fitting_tokens(launch, record):,} would fit"


def is_complete(record: Record) -> bool:
    """Whether all phases were reached, so that the need is known."""
    return record.need > 0 and not record.missed


def suggested_fraction(launch: LaunchMemory, record: Record | None) -> float | None:
    """The ``--mem-fraction-static`` that the record gives, whatever is in force; ``None``: it gives none."""
    if record is None or not is_complete(record):
        return None
    fraction = fraction_for(launch, wanted_reserve(launch, record))
    return fraction if fraction > 0 else None


def fraction_for(launch: LaunchMemory, reserve: float) -> float:
    """What sets aside at least as much."""
    return round(math.floor((1 - reserve / launch.free_before_load) / FRACTION_STEP) * FRACTION_STEP, 4)


def _margin(launch: LaunchMemory, record: Record) -> int:
    """Each server of this configuration that died, starting or serving, adds another."""
    return launch.margin * (1 + record.ooms + len(record.unserved))


def wanted_reserve(launch: LaunchMemory, record: Record) -> float:
    """Bytes to set aside: the peak need, the margin, and what grows with the KV cache, at most in proportion to it.

    That is the request table, and the KV cache of a draft model; and where the number of requests follows the pools,
    all that was needed, which a decode of more of them may have taken.
    """
    wanted = max(record.need + launch.images, record.serving_peak_need) + _margin(launch, record)
    if record.kv_bytes <= 0:
        return wanted
    grows = record.table_bytes + record.draft_kv_bytes
    if record.requests_grow:
        grows += max(record.need, record.serving_peak_need)
    # It takes from the KV cache by which it grows: without that, a little more than is needed.
    return wanted + max(0.0, (available(record) - wanted) / record.kv_bytes - 1) * grows


def available(record: Record) -> int:
    """Bytes for the KV cache and the reserve, as measured."""
    return record.kv_bytes + record.reserve


def reserve_in_use(launch: LaunchMemory, record: Record) -> float:
    """What is left beside the KV cache, which ``--max-total-tokens`` may make smaller than the fraction allows."""
    if not (launch.max_tokens and record.tokens):
        return launch.reserve
    return max(launch.reserve, available(record) - record.kv_bytes * launch.max_tokens / record.tokens)


def fitting_tokens(launch: LaunchMemory, record: Record) -> int:
    """Tokens of the KV cache beside the reserve that is wanted."""
    return tokens_beside(record, wanted_reserve(launch, record))


def limited(launch: LaunchMemory, tokens: int) -> int:
    """As many of them as ``--max-total-tokens`` allows."""
    return min(tokens, launch.max_tokens or tokens)


def tokens_beside(record: Record, reserve: float) -> int:
    """Of the KV cache beside a reserve."""
    return int(max(0.0, available(record) - reserve) * record.tokens / record.kv_bytes) if record.kv_bytes else 0


def lowest_free(seen: int, free_at_start: int, reserved_growth: int) -> int:
    """The lowest free memory of a rank in bytes, not raised by memory that other processes gave back.

    :param seen: the driver's lowest; ``free_at_start``: free when the rehearsal began.
    :param reserved_growth: what this process's allocator took in between.
    """
    return min(seen, free_at_start - max(0, reserved_growth))
