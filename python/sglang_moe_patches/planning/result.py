"""What ``plan`` has found."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_moe_patches.planning.measure import Measured, Verified
from sglang_moe_patches.planning.rule import Rule

MB = 1_000_000


@dataclass(frozen=True)
class Recommendation:
    """A value to set.

    :param fraction: ``--mem-fraction-static``; ``None``: none was found that fits.
    :param ceiling: no higher one can fit by what was measured.
    :param before_margin: the same without a margin, by the verification's load, too.
    :param tokens: of the KV cache that it gives.
    :param requests_at_context: how many requests of the model's context length that holds.
    :param command: to paste.
    :param verified: what the verification found, or ``None`` without one.
    """

    logprobs: bool
    fraction: float | None
    ceiling: float
    tokens: int = 0
    requests_at_context: float = 0.0
    command: str = ""
    verified: Verified | None = None
    before_margin: float = 0.0


@dataclass(frozen=True)
class ServerPlan:
    """What was found of one server, stock or patched.

    :param trials: the servers started, in order; the first with the engine's own fraction.
    :param knobs: other settings that bind, each with what it would give.
    """

    server: str
    trials: tuple[Measured, ...]
    recommendations: tuple[Recommendation, ...]
    knobs: tuple[str, ...]

    @property
    def default(self) -> Measured:
        return self.trials[0]


@dataclass(frozen=True)
class Plan:
    """Everything that was found."""

    engine: str
    model: str
    arguments: tuple[str, ...]
    margin: int
    rule: Rule
    servers: tuple[ServerPlan, ...]

    @property
    def held(self) -> bool | None:
        """Whether every recommended value survived its verification; ``None`` without one."""
        found = [r.verified for s in self.servers for r in s.recommendations if r.verified is not None]
        return all(each.held for each in found) if found else None

    @property
    def exit_code(self) -> int:
        """0: a value was found for each server, and held where it was verified; 1: one did not hold; 2: none found."""
        if self.held is False:
            return 1
        first = [s.recommendations[0].fraction for s in self.servers]
        return 0 if all(fraction is not None for fraction in first) else 2
