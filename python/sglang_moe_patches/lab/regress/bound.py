"""How much worse can the patched server be? An upper bound of the drop in accuracy, exact for paired answers.

Both servers get the same ``n`` questions. Losses are those that only stock answers correctly, gains those that only
patched does; the drop is the share of losses less that of gains. Nearly all questions are neither, and with so few the
usual interval (the difference and 1.64 standard errors) says too much: without any loss or gain its width is zero.
So this is an exact unconditional test of *the drop is* ``drop`` *or more*, ordered by the score statistic:

- its variance is that of the likeliest table with just that drop (Nam, Tango);
- its p is the probability of a table at least as favourable, under that drop and the worst rate of gains, added up over
  all tables: multinomial, nothing approximated but that rates of gains are looked at on a grid (Hsueh and others).

A bound from it is wrong with at most ``alpha``, whatever the true rates: a larger drop makes losses more probable and
leaves gains as they are, so that no favourable table becomes more probable.

Neither scipy nor statsmodels has an interval for paired proportions (statsmodels' ``confint_proportions_2indep`` is for
independent ones). What is used here of scipy are its distributions.

Sources: J. Nam, "Establishing equivalence of two treatments and sample size requirements in matched-pairs design",
Biometrics 53 (1997), 1422: the statistic and :func:`questions_for`. T. Tango, "Equivalence test and confidence interval
for the difference in proportions for the paired-sample design", Statistics in Medicine 17 (1998), 891: the statistic,
and the interval by its inversion. H.-M. Hsueh, J.-P. Liu, J. J. Chen, "Unconditional exact tests for equivalence or
noninferiority for paired binary endpoints", Biometrics 57 (2001), 478: the exact p.
"""

from __future__ import annotations

import functools
from math import ceil, log, sqrt
from typing import Any

CHURN = 0.03
"""Share of questions, losses and gains together, that two servers are expected to answer otherwise, one of them
correctly: what a change of batches does to a model at temperature 0."""
POWER = 0.8
"""How probably :func:`questions_for` questions show that a server is not worse by more, where it is as good."""
GRID = 160
"""Rates of gains that are looked at, closer together where they are small."""
NOTHING = 1e-12
"""Probability of a number of gains that is not looked at further: it counts as favourable."""
TIE = 1e-9
"""Scores that differ by less are the same table's."""


def p_value(questions: int, losses: int, gains: int, drop: float) -> float:
    """How probable a table at least as favourable as this one is, where the accuracy drops by ``drop``.

    :param drop: as a share, above 0 and below 1.
    :returns: the exact one-sided p, for the worst rate of gains.
    """
    return _largest(questions, float(_scores(questions, losses, gains, drop)), drop)


def largest_drop(questions: int, losses: int, gains: int, alpha: float, *, looked_at: float) -> float:
    """The upper end of the one-sided interval of the drop, at a level of ``1 - alpha``.

    :param looked_at: a drop on the right side of which the bound lies, as :func:`p_value` says.
    :returns: the share of questions, to a ten-thousandth.
    """
    inside = p_value(questions, losses, gains, looked_at) <= alpha
    low, high = ((losses - gains) / questions, looked_at) if inside else (looked_at, 1.0)
    while high - low > 1e-4:
        middle = (low + high) / 2
        # No drop below 0 is asked for: the bound would be a gain that is proven.
        if middle > 0 and p_value(questions, losses, gains, middle) > alpha:
            low = middle
        else:
            high = middle
        if high <= 0:
            return 0.0
    return high


@functools.cache
def fewest(drop: float, alpha: float) -> int:
    """The fewest questions that can show a drop to be below ``drop``: where none is lost and none gained."""
    questions = ceil(log(alpha) / log(1 - drop))  # none is lost, where a share of `drop` would be
    while p_value(questions, 0, 0, drop) > alpha:
        questions += 1
    return questions


def questions_for(drop: float, alpha: float, *, losses: float = CHURN / 2, gains: float = CHURN / 2) -> int | None:
    """How many questions show with a probability of ``POWER`` that the drop is below ``drop``: Nam's formula.

    :param losses: the true share of losses, and ``gains`` that of gains.
    :returns: ``None``: no number does, the true drop is as large.
    """
    from scipy.stats import norm

    room = drop - (losses - gains)
    if room <= 0:
        return None
    by_chance = norm.ppf(1 - alpha) * sqrt(_variance(1.0, losses, gains, drop))
    true = norm.ppf(POWER) * sqrt(losses + gains - (losses - gains) ** 2)
    return max(fewest(drop, alpha), ceil(((by_chance + true) / room) ** 2))


def shown(questions: int, drop: float, alpha: float, losses: float, gains: float) -> float:
    """How probably a run says that the drop is below ``drop``, where that share is truly lost and gained."""
    excluded = _most_losses(questions, _critical(questions, drop, alpha), drop)
    return float(_probability(questions, excluded, losses, gains)[0])


# --- The statistic ----------------------------------------------------------------------------------------------------


def _likeliest_gains(questions: float, losses: Any, gains: Any, drop: float) -> Any:
    """The likeliest rate of gains, where that of losses is ``drop`` higher: the root of the likelihood's derivative."""
    import numpy as np

    linear = 2 * questions * drop - losses * (1 + drop) - gains * (1 - drop)
    constant = gains * drop * (1 - drop)
    root = (np.sqrt(linear * linear + 8 * questions * constant) - linear) / (4 * questions)
    return np.clip(root, 0.0, (1 - drop) / 2)


def _variance(questions: float, losses: Any, gains: Any, drop: float) -> Any:
    """Of losses less gains of one question, in the likeliest table with that drop."""
    return 2 * _likeliest_gains(questions, losses, gains, drop) + drop - drop * drop


def _scores(questions: int, losses: Any, gains: Any, drop: float) -> Any:
    """How far below ``drop`` the table is, in standard errors."""
    import numpy as np

    return (questions * drop - (losses - gains)) / np.sqrt(questions * _variance(questions, losses, gains, drop))


# --- Its distribution -------------------------------------------------------------------------------------------------


def _most_losses(questions: int, score: float, drop: float) -> Any:
    """For each number of gains from 0 on, the most losses with which a table has at least ``score``; -1 for none.

    [questions + 1]. The score falls with each loss.
    """
    import numpy as np

    gains = np.arange(questions + 1)
    least, most = np.full_like(gains, -1), questions - gains
    while (least < most).any():
        middle = (least + most + 1) // 2
        enough = _scores(questions, middle, gains, drop) >= score - TIE
        least, most = np.where(enough, middle, least), np.where(enough, most, middle - 1)
    return least


def _probability(questions: int, most_losses: Any, losses: Any, gains: Any) -> Any:
    """Of a table with at most so many losses for its gains, at each of these rates.

    :param losses: shares, [rates], and ``gains`` as many.
    """
    import numpy as np
    from scipy.stats import binom

    losses, gains = np.atleast_1d(losses)[:, None], np.atleast_1d(gains)[:, None]
    seen = np.arange(questions + 1)
    chances = binom.pmf(seen, questions, gains)
    rates, seen = np.nonzero(chances > NOTHING)
    # Losses among the questions that are no gain.
    among = np.minimum(1.0, losses / (1 - gains))[rates, 0]
    chances[rates, seen] *= binom.cdf(most_losses[seen], questions - seen, among)
    return chances.sum(1)


def _largest(questions: int, score: float, drop: float) -> float:
    """The largest probability, over the rates of gains, of a table with at least ``score`` where so much is lost."""
    import numpy as np

    rates = (1 - drop) / 2 * (np.arange(GRID) / GRID) ** 2
    return float(_probability(questions, _most_losses(questions, score, drop), rates + drop, rates).max())


@functools.cache
def _critical(questions: int, drop: float, alpha: float) -> float:
    """The least score with which a drop of ``drop`` is excluded."""
    low, high = 0.0, 10.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if _largest(questions, middle, drop) <= alpha else (middle, high)
    return high
