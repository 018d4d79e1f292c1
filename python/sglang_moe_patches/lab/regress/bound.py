"""Upper bound of the drop in accuracy from a stock to a patched server, exact for paired answers.

Both servers answer the same ``n`` questions. A *loss* is a question that only the stock server answers correctly. A
*gain* is a question that only the patched server answers correctly. The drop is the share of losses minus the share of
gains. For example, 20 losses and 15 gains in 1,000 questions are a drop of 0.005. The upper bound of the true drop is
then 0.015 with ``alpha`` = 0.05.

Nearly all questions are neither a loss nor a gain. The usual interval, the drop plus or minus 1.64 standard errors, is
then too narrow. In a run without losses and gains, its width is even zero. This module therefore tests many values of
the true drop, with an exact unconditional test. The bound is the smallest value that the test rejects:

- The null hypothesis is "the accuracy drops by at least ``drop``".
- The *score* of a run is the number of standard errors by which the run's drop is smaller than ``drop``. The standard
  error depends on the true rates of losses and gains, which are not known. They are estimated: of all rates whose
  difference is ``drop``, those are used that make the run most likely (Nam, Tango).
- The *p-value* of a run is the probability that another run has at least this score, if the true drop is ``drop``.
  This probability depends on the true rate of gains, which is not known. The p-value is therefore computed for many
  rates of gains, and the largest p-value counts (Hsueh and others). For each rate, the sum over the multinomial
  distribution is exact.

The bound is too small with a probability of at most ``alpha``, whatever the true rates are. This also holds if the true
drop is larger than ``drop``: losses are then more probable, so high scores are not more probable.

scipy and statsmodels have no interval for paired proportions: ``confint_proportions_2indep`` of statsmodels is for
independent proportions. This module uses only the distributions of scipy.

Sources: J. Nam, "Establishing equivalence of two treatments and sample size requirements in matched-pairs design",
Biometrics 53 (1997), 1422: the statistic and :func:`questions_for`. T. Tango, "Equivalence test and confidence interval
for the difference in proportions for the paired-sample design", Statistics in Medicine 17 (1998), 891: the statistic,
and the interval by its inversion. H.-M. Hsueh, J.-P. Liu, J. J. Chen, "Unconditional exact tests for equivalence or
noninferiority for paired binary endpoints", Biometrics 57 (2001), 478: the exact p-value.
"""

from __future__ import annotations

import functools
from math import ceil, log, sqrt
from typing import Any

CHURN = 0.03
"""Expected share of questions that are losses or gains, for two equally good servers. Different batches round
differently, so a model's answers differ even at temperature 0."""
POWER = 0.8
"""Probability of the verdict "no worse" with the number of questions from :func:`questions_for`, if both servers are
equally good."""
GRID_RATES = 160
"""Number of true rates of gains for which the p-value is computed. The largest of these p-values counts. The rates lie
between 0 and 1/2, and are denser near 0."""
MIN_PROBABILITY = 1e-12
"""Threshold to skip improbable numbers of gains. If a number of gains has at most this probability, the scores of runs
with this number are not computed. Instead, all these runs count as runs with a sufficient score. The p-value may
therefore be slightly too large, but never too small. For example, 900 gains in 1,000 questions are skipped for a true
rate of gains of 0.02."""
TIE_TOLERANCE = 1e-9
"""Largest difference between two scores that count as equal."""


def p_value(questions: int, losses: int, gains: int, drop: float) -> float:
    """Return the exact one-sided p-value of the null hypothesis that the accuracy drops by at least ``drop``.

    The p-value is the probability that another run has at least this run's score (:func:`_scores`), if the true drop is
    ``drop``. The true rate of gains is unknown, so the rate that makes this probability largest is used.

    :param drop: drop in accuracy as a share, above 0 and below 1.
    """
    return _max_probability(questions, float(_scores(questions, losses, gains, drop)), drop)


def largest_drop(questions: int, losses: int, gains: int, alpha: float, *, threshold: float) -> float:
    """Return the upper end of the one-sided confidence interval of the drop, at the level ``1 - alpha``.

    :param threshold: drop with which the caller compares the result. The search begins at ``threshold``, so that the
        comparison agrees with :func:`p_value`. If the p-value for the drop ``threshold`` is at most ``alpha``, the
        result is at most ``threshold``. Otherwise, the result is larger.
    :returns: the drop as a share of the questions, accurate to 0.0001.
    """
    is_below = p_value(questions, losses, gains, threshold) <= alpha
    low, high = ((losses - gains) / questions, threshold) if is_below else (threshold, 1.0)
    while high - low > 1e-4:
        middle = (low + high) / 2
        # The search stops at 0: a bound below 0 would prove a gain, and nobody needs that.
        if middle > 0 and p_value(questions, losses, gains, middle) > alpha:
            low = middle
        else:
            high = middle
        if high <= 0:
            return 0.0
    return high


@functools.cache
def min_questions(drop: float, alpha: float) -> int:
    """Return the smallest number of questions with which a run can show that the accuracy drops by less than ``drop``.

    This number suffices in the best case: the run has neither losses nor gains.
    """
    # if the share of losses is `drop`, a run without any loss is improbable
    questions = ceil(log(alpha) / log(1 - drop))
    while p_value(questions, 0, 0, drop) > alpha:
        questions += 1
    return questions


def questions_for(drop: float, alpha: float, *, losses: float = CHURN / 2, gains: float = CHURN / 2) -> int | None:
    """Return the number of questions with which a run shows, with the probability ``POWER``, that the accuracy drops by
    less than ``drop``. The number comes from Nam's formula.

    :param losses: true share of losses (questions that only the stock server answers correctly).
    :param gains: true share of gains (questions that only the patched server answers correctly).
    :returns: ``None`` if no number suffices, because the true drop is at least ``drop``.
    """
    from scipy.stats import norm

    room = drop - (losses - gains)
    if room <= 0:
        return None
    by_chance = norm.ppf(1 - alpha) * sqrt(_variance(1.0, losses, gains, drop))
    true = norm.ppf(POWER) * sqrt(losses + gains - (losses - gains) ** 2)
    return max(min_questions(drop, alpha), ceil(((by_chance + true) / room) ** 2))


def pass_probability(questions: int, drop: float, alpha: float, losses: float, gains: float) -> float:
    """Return the probability that a run shows that the accuracy drops by less than ``drop``.

    :param losses: true share of losses (questions that only the stock server answers correctly).
    :param gains: true share of gains (questions that only the patched server answers correctly).
    """
    passing = _max_losses(questions, _critical_score(questions, drop, alpha), drop)
    return float(_table_probability(questions, passing, losses, gains)[0])


# --- The statistic ----------------------------------------------------------------------------------------------------


def _likeliest_gains(questions: float, losses: Any, gains: Any, drop: float) -> Any:
    """Return the true rate of gains for which a run's losses and gains are most likely, if the true drop is ``drop``.
    The rate solves a quadratic equation, because the derivative of the likelihood must be zero."""
    import numpy as np

    linear = 2 * questions * drop - losses * (1 + drop) - gains * (1 - drop)
    constant = gains * drop * (1 - drop)
    root = (np.sqrt(linear * linear + 8 * questions * constant) - linear) / (4 * questions)
    return np.clip(root, 0.0, (1 - drop) / 2)


def _variance(questions: float, losses: Any, gains: Any, drop: float) -> Any:
    """Return the variance of one question's outcome (1 for a loss, -1 for a gain, else 0), if the true drop is
    ``drop``. The true rate of gains is not known, and :func:`_likeliest_gains` estimates it from the run."""
    return 2 * _likeliest_gains(questions, losses, gains, drop) + drop - drop * drop


def _scores(questions: int, losses: Any, gains: Any, drop: float) -> Any:
    """Return the score of each run: the number of standard errors by which the run's drop is smaller than ``drop``."""
    import numpy as np

    return (questions * drop - (losses - gains)) / np.sqrt(questions * _variance(questions, losses, gains, drop))


# --- The distribution of the statistic --------------------------------------------------------------------------------


def _max_losses(questions: int, score: float, drop: float) -> Any:
    """Return, for each number of gains, the largest number of losses with which a run has at least the score ``score``.

    The function finds the numbers by bisection, because each further loss lowers the score.

    :returns: array of shape [questions + 1], indexed by the number of gains. The value is -1 if even a run without
        losses has a lower score.
    """
    import numpy as np

    gains = np.arange(questions + 1)
    least, most = np.full_like(gains, -1), questions - gains
    while (least < most).any():
        middle = (least + most + 1) // 2
        enough = _scores(questions, middle, gains, drop) >= score - TIE_TOLERANCE
        least, most = np.where(enough, middle, least), np.where(enough, most, middle - 1)
    return least


def _table_probability(questions: int, max_losses: Any, losses: Any, gains: Any) -> Any:
    """Return the probability that a run has at most ``max_losses[n]`` losses, where ``n`` is the run's number of gains.
    The probability is the sum over all ``n``.

    :param max_losses: largest number of losses for each number of gains: array of shape [questions + 1].
    :param losses: true rates of losses: array of shape [rates], or one rate.
    :param gains: true rates of gains, in the same shape as ``losses``.
    :returns: array of shape [rates].
    """
    import numpy as np
    from scipy.stats import binom

    losses, gains = np.atleast_1d(losses)[:, None], np.atleast_1d(gains)[:, None]
    counts = np.arange(questions + 1)
    chances = binom.pmf(counts, questions, gains)
    rates, counts = np.nonzero(chances > MIN_PROBABILITY)
    # Share of losses among the questions that are not gains.
    rest = np.minimum(1.0, losses / (1 - gains))[rates, 0]
    chances[rates, counts] *= binom.cdf(max_losses[counts], questions - counts, rest)
    return chances.sum(1)


def _max_probability(questions: int, score: float, drop: float) -> float:
    """Return the probability that a run has a score of at least ``score``, if the true drop is ``drop``. The true rate
    of gains is not known. The probability is therefore computed for :data:`GRID_RATES` rates, and the largest
    probability is returned."""
    import numpy as np

    rates = (1 - drop) / 2 * (np.arange(GRID_RATES) / GRID_RATES) ** 2
    return float(_table_probability(questions, _max_losses(questions, score, drop), rates + drop, rates).max())


@functools.cache
def _critical_score(questions: int, drop: float, alpha: float) -> float:
    """Return the smallest score (:func:`_scores`) with which a run shows, at the level ``alpha``, that the accuracy
    drops by less than ``drop``."""
    low, high = 0.0, 10.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if _max_probability(questions, middle, drop) <= alpha else (middle, high)
    return high
