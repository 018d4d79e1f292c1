"""What a driven server has shown: pure functions of the events that its processes recorded (:mod:`.events`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_moe_patches.lab.observers.events import (
    ChangeStatus,
    Device,
    Event,
    Failure,
    Forward,
    Ready,
    Sized,
    Stage,
    Start,
    of_kind,
)


class NotObserved(RuntimeError):
    """The server did not record what a plan needs. The message says what."""


@dataclass(frozen=True)
class Rank:
    """One GPU's memory in bytes, from empty to the worst moment.

    The parts add up: ``before`` (the driver's, the process's and whatever else was there), ``weights``, ``cache``,
    ``after_cache`` (request table, workspaces, graphs, a draft model), ``forwards`` and ``lowest_free`` make ``total``.
    ``tensors``, ``slack`` and ``outside`` are what ``forwards`` consists of: the largest beyond what was allocated
    before the first, what PyTorch's allocator keeps beyond that, and what other libraries took from the driver.
    """

    name: str
    total: int
    before: int
    weights: int
    cache: int
    after_cache: int
    forwards: int
    tensors: int
    slack: int
    outside: int
    lowest_free: int
    capture_peak: int
    pools: Mapping[str, int]
    retries: int


@dataclass(frozen=True)
class Verified:
    """What came of a verification (:mod:`.verify`).

    :param held: no out-of-memory, no retry of the allocator, every request answered or aborted by us, every rank seen.
    :param reasons: why it did not hold.
    :param fraction: ``--mem-fraction-static``.
    :param lowest_free: bytes by rank.
    :param requests: answered; ``aborted``: whose client went away.
    :param retractions: batches from which the scheduler took requests back, by the server's log.
    :param usage: the highest token usage of the KV cache that the log names; 0 to 1.
    :param not_seen: what the load was to bring about and did not.
    :param ran_out: it did not hold for want of memory.
    """

    held: bool
    fraction: float
    reasons: tuple[str, ...] = ()
    lowest_free: Mapping[str, int] = field(default_factory=dict)
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    usage: float = 0.0
    cache_tokens: int = 0
    not_seen: tuple[str, ...] = ()
    ran_out: bool = False


def add(processes: dict[str, list[Event]], more: Mapping[str, Sequence[Event]]) -> None:
    """Append later events of each process to those known."""
    for name, events in more.items():
        processes.setdefault(name, []).extend(events)


def ready(events: Iterable[Event]) -> Ready | None:
    """What a process said of the model itself when that was ready; ``None``: it runs no more than a draft model.

    A draft model may be ready before: capturing its graphs runs forwards of it.
    """
    return next((event for event in of_kind(events, Ready) if not event.place.draft), None)


def changes(events: Iterable[Event]) -> tuple[ChangeStatus, ...]:
    """What became of each change in a process."""
    return of_kind(events, Start)[0].changes


def before_load(processes: Mapping[str, Sequence[Event]]) -> int:
    """What the engine's fraction is of, in bytes.

    :raises NotObserved: no process has sized its memory.
    """
    found = [event.before_load for events in processes.values() for event in of_kind(events, Sized)]
    if not found:
        raise NotObserved("no process of the server said how much memory was free before loading")
    return min(found)


def target_ranks(processes: Mapping[str, Sequence[Event]]) -> set[str]:
    """The processes that run the model itself."""
    return {name for name, events in processes.items() if ready(events) is not None}


def failure(processes: Mapping[str, Sequence[Event]]) -> str:
    """Why observing ended early in some process, or ""."""
    return next((event.reason for events in processes.values() for event in of_kind(events, Failure)), "")


def memories(events: Iterable[Event]) -> Iterable[Device]:
    """Every reading of the device in the events, in order."""
    for event in events:
        if isinstance(event, Forward):
            yield event.before
        if isinstance(event, Stage | Sized | Ready | Forward):
            yield event.memory


def retries(events: Sequence[Event]) -> int:
    """How often the allocator gave memory back and tried again, or gave up, since the model's first forward."""
    first = ready(events)
    begin = 0 if first is None else events.index(first)
    seen = [reading.retries + reading.ooms for reading in memories(events[begin:])]
    return max(seen, default=0) - (seen[0] if seen else 0)


def rank(events: Sequence[Event], cache_bytes: int) -> Rank:
    """One process's memory; see :class:`Rank`.

    :param events: all of the process, from its start.
    :param cache_bytes: of its KV cache.
    """
    first = ready(events)
    assert first is not None
    stages = of_kind(events, Stage)
    loads = [stage for stage in stages if stage.name == "load_model" and not stage.place.draft]
    sized = of_kind(events, Sized)[0].memory
    at, begin = first.memory, loads[0].memory if loads else sized
    loaded = loads[1].memory if len(loads) > 1 else sized
    position = events.index(first)
    later = list(memories(events[position:]))
    free = min((reading.free for reading in later), default=at.free)
    worst = min(later, key=lambda reading: reading.free, default=at)
    # The first two readings, before the first forward, have the peak of what came before it.
    tensors = max((reading.peak for reading in later[2:]), default=at.allocated) - at.allocated
    outside = (worst.total - worst.free - worst.reserved) - (at.total - at.free - at.reserved)
    captures = [stage for stage in stages if "graph" in stage.name and stage.ended]
    told = [event.pools for event in events if isinstance(event, Ready | Forward) and event.pools]
    pools: Mapping[str, int] = told[-1] if told else {}
    forwards = at.free - free
    return Rank(
        name=f"GPU {first.place.gpu}" + (f" (TP rank {first.place.tp})" if first.place.tp else ""),
        total=at.total,
        before=begin.total - begin.free,
        # What loading leaves in the allocator and gives back before the sizing is no weight.
        weights=begin.free - max(loaded.free, sized.free),
        cache=cache_bytes,
        after_cache=max(loaded.free, sized.free) - cache_bytes - at.free,
        forwards=forwards,
        tensors=tensors,
        slack=forwards - tensors - outside,
        outside=outside,
        lowest_free=free,
        capture_peak=max((stage.memory.peak - stage.memory.allocated for stage in captures), default=0),
        pools=pools,
        retries=retries(events),
    )
