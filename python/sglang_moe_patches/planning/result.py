"""What ``plan`` has found, and its verdict: pure functions of what was seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sglang_moe_patches.lab.observers.events import ChangeStatus
from sglang_moe_patches.memory.kv_sizing.record import Record
from sglang_moe_patches.planning.measure import Rank, Verified
from sglang_moe_patches.planning.rule import Rule

MB = 1_000_000
UNSEEN = "not brought about by the verification: "


class Verdict(StrEnum):
    """Of a server, or of all of them; the worst first."""

    DID_NOT_HOLD = "did not hold"
    COULD_NOT_BE_TRIED = "could not be tried"
    INCOMPLETE = "incomplete"
    """Something was not driven."""
    HELD = "held"


EXIT_CODES = {
    Verdict.HELD: 0,
    Verdict.DID_NOT_HOLD: 1,
    Verdict.COULD_NOT_BE_TRIED: 2,
    Verdict.INCOMPLETE: 3,
}


@dataclass(frozen=True)
class Started:
    """A server that was ready.

    :param fraction: its ``--mem-fraction-static``, and ``tokens``: its KV cache, of each data-parallel rank.
    :param startup_s: until then, the rehearsal among it.
    :param ranks: memory of each GPU, until the server ended.
    :param said: what kv-sizing said in its log.
    :param given: the engine's own fraction left no KV cache, and this one is by hand.
    """

    fraction: float
    tokens: int
    startup_s: float
    context: int = 0
    ranks: tuple[Rank, ...] = ()
    changes: tuple[ChangeStatus, ...] = ()
    said: tuple[str, ...] = ()
    given: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> Rank | None:
        return min(self.ranks, key=lambda rank: rank.lowest_free, default=None)


@dataclass(frozen=True)
class ServerPlan:
    """What was found of one server, stock or patched.

    :param first: the start by the engine's rule, which rehearses; ``second``: the one that its record sizes.
    :param record: as it was when the last of them had ended.
    :param verified: what a load of another kind found in the second; ``None``: there was none.
    :param failure: why there is no more; "": there is.
    :param logprobs: whether prompt log-probabilities were driven at their bound; ``None``: they were not asked for.
    :param command: to paste; "": nothing is to be served so.
    """

    server: str
    first: Started | None = None
    record: Record | None = None
    second: Started | None = None
    verified: Verified | None = None
    failure: str = ""
    logprobs: bool | None = None
    command: str = ""

    @property
    def judged(self) -> tuple[Verdict, tuple[str, ...]]:
        """The verdict, and what it is for."""
        if self.verified is not None and not self.verified.held:
            return Verdict.DID_NOT_HOLD, self.verified.reasons
        if self.failure or self.first is None or self.second is None or self.record is None or not self.record.need:
            return Verdict.COULD_NOT_BE_TRIED, (self.failure or "it was not tried",)
        missing = tuple(_missing(self, self.first, self.second, self.record))
        return (Verdict.INCOMPLETE, missing) if missing else (Verdict.HELD, ())

    @property
    def verdict(self) -> Verdict:
        return self.judged[0]


def _missing(plan: ServerPlan, first: Started, second: Started, record: Record) -> Iterator[str]:
    if not record.driven:
        yield "no phase was seen at its bound"
    for name in record.missed:
        yield f"not brought about by the rehearsal: {name}"
    if second.fraction > first.fraction and not record.proven:
        yield "the second start's rehearsal did not come to its end"
    if plan.logprobs is False:
        yield "prompt log-probabilities were not seen at their bound"
    if plan.verified is None:
        yield "not verified"
    else:
        for name in plan.verified.not_seen:
            yield f"{UNSEEN}{name}"


@dataclass(frozen=True)
class Plan:
    """Everything that was found until now."""

    engine: str
    model: str
    arguments: tuple[str, ...]
    rule: Rule
    servers: tuple[ServerPlan, ...]
    dummy_weights: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst of the servers'."""
        order = list(Verdict)
        return min((server.verdict for server in self.servers), key=order.index, default=Verdict.COULD_NOT_BE_TRIED)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def shares(self) -> Mapping[str, int]:
        """KV tokens beyond the rule's: what sizing alone brings, and what the patches do besides. Of both servers."""
        found = {server.server: server for server in self.servers}
        stock, patched = found.get("stock"), found.get("patched")
        if not (stock and patched and stock.first and stock.second and patched.second) or stock.first.given:
            return {}
        return {
            "sizing": stock.second.tokens - stock.first.tokens,
            "patches": patched.second.tokens - stock.second.tokens,
        }
