"""Decide from the answers of a stock and a patched server whether the patched server is worse.

Both servers answer the same questions, so the comparison is paired. Questions that both servers answer correctly, or
both wrongly, say nothing about a difference. The test uses only losses (only the stock server is right) and gains (only
the patched server is right). Without a real difference, a loss and a gain are equally likely. The number of losses then
follows Binomial(losses + gains, 1/2). This is the exact form of McNemar's test.

A difference that is not significant may still be real. The verdict "no worse" therefore requires more: the confidence
interval of the drop in accuracy must end below the allowed drop (:mod:`~sglang_moe_patches.lab.regress.bound`).
Otherwise the run is inconclusive.

Source: Q. McNemar, "Note on the sampling error of the difference between correlated proportions or percentages",
Psychometrika 12 (1947); the exact form is the sign test on the discordant pairs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from sglang_moe_patches.lab.observers.events import Acts, ChangeStatus, Memory
from sglang_moe_patches.lab.regress import bound

SCHEMA = 2
"""Version of the format of ``Comparison.to_dict``. Raise it when a field is renamed or removed, or when a field's
meaning changes."""
MAX_DROP = 3.0
"""Default allowed drop in accuracy, in percentage points."""
NO_WORSE, WORSE, INCONCLUSIVE = 0, 1, 2
"""Exit codes of ``regress``. A run that failed before it had a result exits with 2, too."""


@dataclass(frozen=True)
class Answer:
    """One server's answer to one question of GSM8K."""

    question: str
    text: str
    label: int
    """Right answer to the question, a number."""
    predicted: int | None
    """Number that the engine's evaluation reads from ``text``; ``None`` if the text has no number."""
    tokens: tuple[int, ...]
    """Token ids of ``text``."""

    @property
    def correct(self) -> bool:
        return self.predicted == self.label


@dataclass(frozen=True)
class Run:
    """One server with its answers and measurements."""

    name: str
    engine: str
    """Release of the engine."""
    command: tuple[str, ...]
    """Command that started the server, or the address of a server that was already running."""
    answers: tuple[Answer, ...]
    startup_s: float
    """Seconds from the start of the command until the server was ready; 0 if the server was already running. Start
    times cannot be compared: the first server warms the page cache and compiles kernels for the second server."""
    latency_s: float
    """Duration of the whole evaluation, in seconds."""
    input_tokens: int
    output_tokens: int
    memory: Memory | None
    """Memory figures that the server's processes recorded; ``None`` if the processes recorded no figures."""
    changes: tuple[ChangeStatus, ...]
    acted: Acts = field(default_factory=Acts)
    not_observed: str = ""
    """Error that ended the recording of ``memory``, so that figures are missing; empty if there was no error."""

    @property
    def correct(self) -> int:
        """Number of questions that the server answered correctly."""
        return sum(answer.correct for answer in self.answers)

    @property
    def accuracy(self) -> float:
        """Share of questions that the server answered correctly, 0 to 1."""
        return self.correct / len(self.answers) if self.answers else 0.0

    @property
    def input_throughput(self) -> float:
        """Prompt tokens per second, over the whole evaluation."""
        return self.input_tokens / self.latency_s if self.latency_s else 0.0

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second, over the whole evaluation."""
        return self.output_tokens / self.latency_s if self.latency_s else 0.0


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs with the same questions. Made by :func:`compare`."""

    stock: Run
    patched: Run
    require_identical: bool
    """Whether a single differing answer is enough for the verdict "worse"."""
    alpha: float
    """Significance level of the one-sided tests."""
    max_drop: float
    """Allowed drop in accuracy, in percentage points."""
    losses: int
    """Number of questions that only the stock server answered correctly."""
    gains: int
    """Number of questions that only the patched server answered correctly."""
    p_two_sided: float
    """McNemar's exact two-sided p-value. The null hypothesis is that both servers are equally accurate."""
    p_worse: float
    """McNemar's exact one-sided p-value. The null hypothesis is that the patched server is at least as accurate."""
    texts_differ: int
    """Number of questions to which the two servers gave different texts."""
    tokens_differ: int
    """Number of questions to which the two servers gave different token ids."""
    detectable_drop: int | None
    """Smallest number of losses that is significant in a run without gains; ``None`` if even the loss of every question
    would not be significant. With ``alpha`` = 0.05, the number is 5."""
    differing: tuple[tuple[int, Answer, Answer], ...]
    """Tuples (index of the question, stock answer, patched answer) for all answers that differ in text or token ids."""
    reasons: tuple[str, ...]
    """Sentences that say why the patched server is worse; empty if it is not worse."""

    @property
    def questions(self) -> int:
        return len(self.stock.answers)

    @property
    def token_identical(self) -> bool:
        """Whether all answers have the same token ids."""
        return self.tokens_differ == 0

    @property
    def worse(self) -> bool:
        """Whether the patched server is significantly worse. With ``require_identical``, a single differing answer also
        counts as worse."""
        return bool(self.reasons)

    @cached_property
    def p_max_drop(self) -> float:
        """Exact one-sided p-value. The null hypothesis is that the accuracy drops by ``max_drop`` or more."""
        return bound.p_value(self.questions, self.losses, self.gains, self.max_drop / 100)

    @property
    def is_within_max_drop(self) -> bool:
        """Whether the run shows that the accuracy drops by less than ``max_drop``.

        The confidence interval of the drop must end below ``max_drop``, and ``accuracy_can_tell`` must hold.
        """
        return self.accuracy_can_tell and self.p_max_drop <= self.alpha

    @cached_property
    def largest_drop(self) -> float:
        """Upper end of the one-sided confidence interval of the drop, in percentage points. The level is ``1 -
        alpha``."""
        share = self.max_drop / 100
        return 100 * bound.largest_drop(self.questions, self.losses, self.gains, self.alpha, threshold=share)

    @cached_property
    def questions_needed(self) -> int | None:
        """Number of questions that would show, with a probability of 80 %, that the drop is below ``max_drop``.

        The true shares of losses and gains are assumed to equal those of this run. The value is ``None`` if no number
        suffices, because this run's drop is at least ``max_drop``.
        """
        losses, gains = (number / self.questions for number in (self.losses, self.gains))
        return bound.questions_for(self.max_drop / 100, self.alpha, losses=losses, gains=gains)

    @property
    def conclusive(self) -> bool:
        """Whether the verdict is "worse" or "no worse". With ``require_identical``, this is always true."""
        return self.worse or self.require_identical or self.is_within_max_drop

    @property
    def exit_code(self) -> int:
        """Exit code of ``regress``: ``NO_WORSE``, ``WORSE`` or ``INCONCLUSIVE``."""
        if self.worse:
            return WORSE
        return NO_WORSE if self.conclusive else INCONCLUSIVE

    @property
    def detectable_drop_points(self) -> float | None:
        """``detectable_drop`` in percentage points: 100 points are all questions of the run."""
        return None if self.detectable_drop is None else 100 * self.detectable_drop / self.questions

    @property
    def accuracy_can_tell(self) -> bool:
        """Whether the stock server answers enough questions correctly for a comparison.

        Imagine a patched server without any right answer. Each right answer of the stock server is then a loss. The
        stock server has enough right answers if this number of losses is significant, and if its accuracy exceeds
        ``max_drop``. For example, a stock server with 4 right answers has too few if ``alpha`` is 0.05.
        """
        few = self.detectable_drop is None or self.stock.correct < self.detectable_drop
        return not few and 100 * self.stock.accuracy > self.max_drop

    def to_dict(self) -> dict[str, Any]:
        """Return the content of report.json."""
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
    """Compute McNemar's exact test for pairs of answers to the same questions.

    :param losses: number of pairs in which only the first answer is right.
    :param gains: number of pairs in which only the second answer is right.
    :returns: the two-sided p-value, and the one-sided p-value. The one-sided null hypothesis is that the second answers
        are at least as accurate. Both p-values are 1 without losses and gains.
    """
    from scipy.stats import binomtest

    if losses + gains == 0:
        return 1.0, 1.0
    sides = ("two-sided", "greater")
    two_sided, worse = (float(binomtest(losses, losses + gains, 0.5, side).pvalue) for side in sides)
    return two_sided, worse


def min_losses(alpha: float) -> int:
    """Return the smallest number of losses that is significant if there are no gains. Without gains, ``k`` losses have
    the p-value ``2 ** -k``."""
    return next(k for k in count(1) if 0.5**k < alpha)


def compare(
    stock: Run, patched: Run, *, require_identical: bool, alpha: float = 0.05, max_drop: float = MAX_DROP
) -> Comparison:
    """Compare two runs of the same questions. The verdict is one of three:

    - *Worse*: the patched server answers significantly fewer questions correctly. With ``require_identical``, one
      answer with a different text or different token ids is enough.
    - *No worse*: a drop of ``max_drop`` or more is rejected at the level ``alpha``. With ``require_identical``,
      identical answers are enough.
    - *Inconclusive*: the run shows neither.

    :param alpha: significance level of the one-sided tests, between 0 and 1.
    :param max_drop: allowed drop in accuracy in percentage points, between 0 and 100.
    :raises ValueError: the runs have no questions or different questions, or ``alpha`` or ``max_drop`` is out of range.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if not 0 < max_drop < 100:
        raise ValueError(f"max_drop must be between 0 and 100, got {max_drop}")
    questions = [[(answer.question, answer.label) for answer in run.answers] for run in (stock, patched)]
    if questions[0] != questions[1]:
        counts = [len(asked) for asked in questions]
        difference = (
            f"{stock.name} has {counts[0]} questions, {patched.name} has {counts[1]}"
            if counts[0] != counts[1]
            else "the questions, their labels or their order differ"
        )
        raise ValueError(f"the runs did not answer the same questions: {difference}")
    if not questions[0]:
        raise ValueError(
            "no question was answered, so nothing can be compared; check the number of questions and the servers' logs"
        )

    pairs = list(zip(stock.answers, patched.answers, strict=True))
    losses = sum(a.correct and not b.correct for a, b in pairs)
    gains = sum(b.correct and not a.correct for a, b in pairs)
    p_two_sided, p_worse = mcnemar(losses, gains)
    differing = tuple((i, a, b) for i, (a, b) in enumerate(pairs) if a.text != b.text or a.tokens != b.tokens)
    fewest = min_losses(alpha)
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
