"""Compute how probable each verdict of ``regress`` is, for several true drops in accuracy."""

from __future__ import annotations

from sglang_moe_patches.lab.regress import bound
from sglang_moe_patches.lab.regress.compare import mcnemar

from common import output

ALPHA = 0.05
TRUE_DROPS = (0, 1, 2, 3, 5, 10)
"""True drops in accuracy for the rows of the table, in percentage points."""


def worse_probability(questions: int, losses: float, gains: float) -> float:
    """Compute the probability that ``regress`` reports "worse".

    :param questions: number of questions.
    :param losses: true share of questions that only the stock server answers correctly.
    :param gains: true share of questions that only the patched server answers correctly.
    """
    from scipy.stats import binom

    total = 0.0
    for gained in range(questions + 1):
        chance = float(binom.pmf(gained, questions, gains))
        if chance < 1e-6:
            if gained > questions * gains:
                break
            continue
        lost = gained + 1
        while mcnemar(lost, gained)[1] >= ALPHA:
            lost += 1
        total += chance * float(binom.sf(lost - 1, questions - gained, losses / (1 - gains)))
    return total


def make_tables() -> str:
    """Make a table of how often ``regress`` gives each verdict in 100 runs, by the true drop in accuracy.

    A run may be both within ``--max-drop`` and worse. It counts in both columns, and ``regress`` reports "worse".
    """
    churn = bound.CHURN / 2
    rows = []
    for drop in (3.0, 2.0):
        questions = bound.questions_for(drop / 100, ALPHA)
        assert questions is not None
        for true_drop in TRUE_DROPS:
            shares = (churn + true_drop / 100, churn)
            passes = bound.pass_probability(questions, drop / 100, ALPHA, *shares)
            worse = worse_probability(questions, *shares)
            rows.append((f"{drop:g}", f"{questions}", f"{true_drop}", f"{100 * passes:.0f}", f"{100 * worse:.0f}"))
    return "\n" + output.table(
        ("`--max-drop`", "questions", "points truly lost", "within `--max-drop`", "worse"), rows, left=0
    )
