"""Is the patched server worse than the stock one? Pure functions of what the two answered.

Both servers get the same questions, so the comparison is paired: questions that both answer correctly, or both wrongly,
say nothing about a difference. What is left are the losses (only stock was right) and the gains (only patched was).
Without a real difference each is as likely as the other, so losses ~ Binomial(losses + gains, 1/2): McNemar's test in
its exact form.

That a difference is not significant does not mean that there is none. Patched is called no worse only where the
interval of the drop in accuracy ends below what may be lost (:mod:`~sglang_moe_patches.lab.regress.bound`); else the
run is inconclusive.

Source: Q. McNemar, "Note on the sampling error of the difference between correlated proportions or percentages",
Psychometrika 12 (1947); the exact form is the sign test on the discordant pairs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from sglang_moe_patches.lab.observers.events import Acted, ChangeStatus, Memory
from sglang_moe_patches.lab.regress import bound

SCHEMA = 2
"""Version of ``Comparison.to_dict``: raised when a field is renamed, removed or changes its meaning."""
MAX_DROP = 3.0
"""Percentage points of accuracy that patched may lose, where nobody says otherwise."""
NO_WORSE, WORSE, INCONCLUSIVE = 0, 1, 2
"""Exit codes of ``regress``; 2 is a run that could not be made, too: neither has shown anything."""


@dataclass(frozen=True)
class Answer:
    question: str
    text: str
    label: int
    predicted: int | None
    """The number read from the text; None if there is none."""
    tokens: tuple[int, ...]

    @property
    def correct(self) -> bool:
        return self.predicted == self.label


@dataclass(frozen=True)
class Run:
    """One server, evaluated."""

    name: str
    engine: str
    command: tuple[str, ...]
    """The server's command, or its address if it was running already."""
    answers: tuple[Answer, ...]
    startup_s: float
    """Seconds from the start of the command until the server was ready; 0 if it was running already. Not for comparing:
    the first server to start warms the page cache and compiles kernels for the second."""
    latency_s: float
    """Seconds that the evaluation took."""
    input_tokens: int
    output_tokens: int
    memory: Memory | None
    """As the server observed it; ``None``: it did not."""
    changes: tuple[ChangeStatus, ...]
    acted: Acted = field(default_factory=Acted)
    not_observed: str = ""
    """Why ``memory`` has not all its figures, where something went wrong."""

    @property
    def correct(self) -> int:
        return sum(answer.correct for answer in self.answers)

    @property
    def accuracy(self) -> float:
        """Share of questions answered correctly, 0 to 1."""
        return self.correct / len(self.answers) if self.answers else 0.0

    @property
    def input_throughput(self) -> float:
        """Prompt tokens per second of the whole evaluation."""
        return self.input_tokens / self.latency_s if self.latency_s else 0.0

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second of the whole evaluation."""
        return self.output_tokens / self.latency_s if self.latency_s else 0.0


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same questions, compared; made by ``compare``."""

    stock: Run
    patched: Run
    require_identical: bool
    alpha: float
    max_drop: float
    """Percentage points of accuracy that patched may lose."""
    losses: int
    """Questions that only stock answered correctly."""
    gains: int
    """Questions that only patched answered correctly."""
    p_two_sided: float
    """McNemar's exact p that the two differ at all."""
    p_worse: float
    """McNemar's exact one-sided p: of at least this many losses among the discordant questions by chance."""
    texts_differ: int
    tokens_differ: int
    detectable_drop: int | None
    """The fewest questions lost, with none gained, that would be called a drop; None if all of them are too few."""
    differing: tuple[tuple[int, Answer, Answer], ...]
    """(index, stock's answer, patched's answer) where text or tokens differ."""
    reasons: tuple[str, ...]
    """Why patched is worse, in plain sentences; empty if it is not."""

    @property
    def questions(self) -> int:
        return len(self.stock.answers)

    @property
    def token_identical(self) -> bool:
        return self.tokens_differ == 0

    @property
    def worse(self) -> bool:
        return bool(self.reasons)

    @cached_property
    def p_max_drop(self) -> float:
        """Exact one-sided p of so few losses for the gains by chance, where accuracy drops by ``max_drop``."""
        return bound.p_value(self.questions, self.losses, self.gains, self.max_drop / 100)

    @property
    def within(self) -> bool:
        """Whether the interval of the drop ends below ``max_drop``, and patched could have lost more."""
        return self.accuracy_can_tell and self.p_max_drop <= self.alpha

    @cached_property
    def largest_drop(self) -> float:
        """Upper end, in percentage points, of the drop's one-sided interval at a level of ``1 - alpha``."""
        share = self.max_drop / 100
        return 100 * bound.largest_drop(self.questions, self.losses, self.gains, self.alpha, looked_at=share)

    @cached_property
    def questions_needed(self) -> int | None:
        """How many questions would show, with a power of 80 %, that patched is no worse by more than ``max_drop``, if
        the servers differ in truth as they did here; ``None``: no number, they differ by more."""
        losses, gains = (number / self.questions for number in (self.losses, self.gains))
        return bound.questions_for(self.max_drop / 100, self.alpha, losses=losses, gains=gains)

    @property
    def conclusive(self) -> bool:
        """Whether there is a verdict: worse, identical where that was required, or no worse than it may be."""
        return self.worse or self.require_identical or self.within

    @property
    def exit_code(self) -> int:
        if self.worse:
            return WORSE
        return NO_WORSE if self.conclusive else INCONCLUSIVE

    @property
    def detectable_drop_points(self) -> float | None:
        return None if self.detectable_drop is None else 100 * self.detectable_drop / self.questions

    @property
    def accuracy_can_tell(self) -> bool:
        """Whether stock answers enough questions correctly: all of them lost would be called a drop, and be more than
        may be lost."""
        few = self.detectable_drop is None or self.stock.correct < self.detectable_drop
        return not few and 100 * self.stock.accuracy > self.max_drop

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "settings": {name: getattr(self, name) for name in ("require_identical", "alpha", "max_drop")},
            "runs": {"stock": asdict(self.stock), "patched": asdict(self.patched)},
            "results": {
                "worse": self.worse,
                "conclusive": self.conclusive,
                "reasons": list(self.reasons),
                "questions": self.questions,
                "accuracy": {"stock": self.stock.accuracy, "patched": self.patched.accuracy},
                "mcnemar": {
                    "losses": self.losses,
                    "gains": self.gains,
                    "p_two_sided": self.p_two_sided,
                    "p_worse": self.p_worse,
                },
                "largest_drop": self.largest_drop,
                "p_max_drop": self.p_max_drop,
                "questions_needed": self.questions_needed,
                "detectable_drop": {"questions": self.detectable_drop, "points": self.detectable_drop_points},
                "accuracy_can_tell": self.accuracy_can_tell,
                "texts_differ": self.texts_differ,
                "tokens_differ": self.tokens_differ,
                "token_identical": self.token_identical,
                "differing": [index for index, _, _ in self.differing],
                "input_throughput": {"stock": self.stock.input_throughput, "patched": self.patched.input_throughput},
                "output_throughput": {"stock": self.stock.output_throughput, "patched": self.patched.output_throughput},
            },
        }


def mcnemar(losses: int, gains: int) -> tuple[float, float]:
    """McNemar's exact test of pairs in which only the first was right, and of those in which only the second was.

    :returns: (two-sided p, one-sided p for the second being worse); both 1 without discordant pairs.
    """
    from scipy.stats import binomtest

    if losses + gains == 0:
        return 1.0, 1.0
    sides = ("two-sided", "greater")
    two_sided, worse = (float(binomtest(losses, losses + gains, 0.5, side).pvalue) for side in sides)
    return two_sided, worse


def smallest_sample(alpha: float) -> int:
    """The fewest questions that can show a drop: all of them lost has p = 2 ** -k, which must be below ``alpha``."""
    return next(k for k in count(1) if 0.5**k < alpha)


def compare(
    stock: Run, patched: Run, *, require_identical: bool, alpha: float = 0.05, max_drop: float = MAX_DROP
) -> Comparison:
    """Compare two runs of the same questions.

    Patched is worse when it answers fewer questions correctly and chance explains that with less than ``alpha``, or
    when identical answers are required and one is not, in its text or its tokens. Else it is no worse by more than
    ``max_drop`` when chance explains with less than ``alpha`` that it lost no more, had it lost so much.

    :param alpha: significance level of the one-sided tests, between 0 and 1.
    :param max_drop: percentage points of accuracy, between 0 and 100.
    :raises ValueError: no questions, not the same questions in the same order, or alpha or max_drop out of range.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if not 0 < max_drop < 100:
        raise ValueError(f"max_drop must be between 0 and 100, got {max_drop}")
    asked = [[(answer.question, answer.label) for answer in run.answers] for run in (stock, patched)]
    if asked[0] != asked[1]:
        raise ValueError(
            f"the runs did not answer the same questions: {stock.name} has {len(asked[0])}, {patched.name} "
            f"{len(asked[1])}, or they differ in order or label"
        )
    if not asked[0]:
        raise ValueError("there are no answers to compare")

    pairs = list(zip(stock.answers, patched.answers, strict=True))
    losses = sum(a.correct and not b.correct for a, b in pairs)
    gains = sum(b.correct and not a.correct for a, b in pairs)
    p_two_sided, p_worse = mcnemar(losses, gains)
    differing = tuple((i, a, b) for i, (a, b) in enumerate(pairs) if a.text != b.text or a.tokens != b.tokens)
    fewest = smallest_sample(alpha)
    reasons = []
    if losses > gains and p_worse < alpha:
        reasons.append(
            f"Accuracy dropped from {stock.correct} to {patched.correct} of {len(pairs)} questions "
            f"({losses} lost, {gains} gained; one-sided exact McNemar p = {p_worse:.2g}, below {alpha:g})."
        )
    if require_identical and differing:
        verb = "differs" if len(differing) == 1 else "differ"
        reasons.append(f"{len(differing)} of {len(pairs)} answers {verb} although identical answers were required.")
    return Comparison(
        stock=stock,
        patched=patched,
        require_identical=require_identical,
        alpha=alpha,
        max_drop=max_drop,
        losses=losses,
        gains=gains,
        p_two_sided=p_two_sided,
        p_worse=p_worse,
        texts_differ=sum(a.text != b.text for a, b in pairs),
        tokens_differ=sum(a.tokens != b.tokens for a, b in pairs),
        detectable_drop=fewest if fewest <= len(pairs) else None,
        differing=differing,
        reasons=tuple(reasons),
    )
