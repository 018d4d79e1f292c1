"""How probably ``regress`` comes to which verdict: computed, not measured."""

from __future__ import annotations

from sglang_moe_patches.lab.regress import bound
from sglang_moe_patches.lab.regress.compare import mcnemar

from common import output

ALPHA = 0.05
LOST = (0, 1, 2, 3, 5, 10)
"""Points of accuracy, in truth."""


def worse(questions: int, losses: float, gains: float) -> float:
    """The probability of *worse*, where those shares are truly lost and gained."""
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


def tables() -> str:
    """Verdicts in 100 runs, by what is truly lost; exit code 1 goes before 0."""
    churn = bound.CHURN / 2
    rows = []
    for drop in (3.0, 2.0):
        questions = bound.questions_for(drop / 100, ALPHA)
        assert questions is not None
        for lost in LOST:
            shares = (churn + lost / 100, churn)
            shown, called = bound.pass_probability(questions, drop / 100, ALPHA, *shares), worse(questions, *shares)
            rows.append((f"{drop:g}", f"{questions}", f"{lost}", f"{100 * shown:.0f}", f"{100 * called:.0f}"))
    return "\n" + output.table(
        ("`--max-drop`", "questions", "points truly lost", "within `--max-drop`", "worse"), rows, left=0
    )
