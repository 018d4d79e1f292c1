"""How long an evaluation takes: estimated before it starts, and while it runs. Pure functions."""

from __future__ import annotations

from sglang_moe_patches.lab.regress.gsm8k import Evaluation, Progress


def estimate(evaluation: Evaluation, rehearsed_s: float) -> tuple[float, float]:
    """Seconds that all questions take, from those that the first few took together: (at least, at most).

    At least: as many as may be in flight are answered as fast as those few were together. At most: they are answered at
    no higher rate than those few.
    """
    few, many = (min(evaluation.parallel, asked) for asked in (evaluation.rehearsed, evaluation.questions))
    at_most = rehearsed_s * evaluation.questions / evaluation.rehearsed
    return at_most * few / many, at_most


def left(evaluation: Evaluation, progress: Progress) -> float | None:
    """Seconds until all are answered, at the rate so far; ``None``: it is not known yet."""
    if not progress.answered:
        return None
    return progress.seconds / progress.answered * (evaluation.questions - progress.answered)


def spoken(seconds: float) -> str:
    """For people, to two digits at most."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def between(low: float, high: float) -> str:
    """Both, or one where they say the same."""
    ends = dict.fromkeys((spoken(low), spoken(high)))
    return " to ".join(ends)
