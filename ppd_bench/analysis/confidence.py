"""How sure a delta, a success ratio or a score is, when the repeat is the unit that is independent of the others.

Turns of one run share a queue, so that a thousand of them may hold the evidence of one. Only whole repeats (new seeds)
are independent draws. An interval is therefore made from what a figure would be without each repeat in turn (the
delete-one jackknife), with Student's t at n - 1 degrees of freedom:

    se^2 = sum over repeats of (figure without the repeat - figure of all)^2

This is the jackknife without its factor (n - 1) / n, as in the HC3 estimator (MacKinnon and White, 1985, "Some
heteroskedasticity-consistent covariance matrix estimators"): it errs on the wide side when n is small. The bootstrap was
tried beside it on simulated truth (``tests/benchmarks/bench_coverage.py``). Near saturation, percentile and BCa intervals over
repeats hold S in 77 to 92 % of trials with 5 to 20 repeats; with conversations drawn within the repeats too they come close to
95 % from 8 repeats on, but need the records and random draws.

Deviations of Equation 1's score are linear in those of its two deltas, so three numbers per cell (two standard errors and
their correlation) give the score's interval under any weights, without the records.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

from ppd_bench.analysis.grouping import Groups, counts, ratio
from ppd_bench.analysis.metrics import Flags, Floats

CONFIDENCE_RATIO = 0.95
"""Of each interval, for one cell by itself."""

MIN_REPEATS = 5
"""Repeats of both arms that an interval needs. Below it there is none, since a narrow one would be an accident.

From 5 on the intervals of S held the simulated truth in 94 to 95 % of all draws, averaged over 40 cells taken at random from
the paper's grid (``bench_coverage.py --survey``); with 3 in 93 %. Cells differ: 75 % of them were between 93 and 97 % with 5
repeats, 90 % with 8. Not covered at any number of repeats looked at: a mean that one repeat in a hundred dominates.
"""

FALSE_DISCOVERY_RATIO = 0.05
"""Of the cells of one table that are called decided, the share that may be expected to have the wrong sign."""


def covariance_of_deviations(deviations: Floats, groups: Groups, n_groups: int) -> Floats:
    """Covariance matrix of a group's figures from their leave-one-out deviations.

    Args:
        deviations: shape (n_rows, k): figure without this row's repeat, minus figure of all repeats of its group.
        groups: each row's group number in [0, n_groups).

    Returns:
        Shape (n_groups, k, k). NaN where a deviation is NaN or the group has fewer than two rows: one repeat says
        nothing of the next.
    """
    k = deviations.shape[1]
    products = np.einsum("ri,rj->rij", deviations, deviations).reshape(len(deviations), k * k)
    total: Floats = np.stack([np.bincount(groups, weights=column, minlength=n_groups) for column in products.T], axis=1)
    total[counts(groups, n_groups) < 2] = np.nan
    return total.reshape(n_groups, k, k)


def leave_one_out(tops: Floats, bottoms: Floats, groups: Groups, n_groups: int) -> tuple[Floats, Floats]:
    """Pooled means (sum of tops / sum of bottoms) of every group, and of its row's group without that row.

    Args:
        tops, bottoms: shape (n_rows, k): sums and counts of each repeat.

    Returns:
        Shapes (n_groups, k) and (n_rows, k); NaN where nothing is left to divide by.
    """
    all_tops, all_bottoms = (
        np.stack([np.bincount(groups, weights=column, minlength=n_groups) for column in values.T], axis=1)
        for values in (tops, bottoms)
    )
    return ratio(all_tops, all_bottoms), ratio(all_tops[groups] - tops, all_bottoms[groups] - bottoms)


def half_width(se: npt.ArrayLike, n_repeats: npt.ArrayLike, *, min_repeats: int = MIN_REPEATS) -> Floats:
    """Half of the interval around a figure with this standard error; NaN below ``min_repeats`` (2 or more)."""
    n = np.asarray(n_repeats, dtype=np.float64)
    enough = n >= min_repeats
    quantile = stdtrit(np.where(enough, n - 1, 1.0), (1 + CONFIDENCE_RATIO) / 2)
    return np.where(enough, quantile * np.asarray(se, dtype=np.float64), np.nan)


def probability_above_zero(figure: npt.ArrayLike, se: npt.ArrayLike, n_repeats: npt.ArrayLike) -> Floats:
    """P(figure > 0): Student's t around the figure; NaN below ``MIN_REPEATS``.

    One minus it is the one-sided p-value of 'at most 0'. A standard error of 0 gives 1, 0, or one half for a figure of 0.
    """
    n = np.asarray(n_repeats, dtype=np.float64)
    found = stdtr(np.where(n >= MIN_REPEATS, n - 1, 1.0), _over(figure, se))
    return np.where(n >= MIN_REPEATS, found, np.nan)


def discoveries(probabilities: Floats) -> Flags:
    """Which signs are certain among many that were looked at together: Benjamini and Hochberg on two-sided p-values.

    ``probabilities`` are of ``probability_above_zero``, without NaN. A router uses every cell of its table, and a wrong cell
    costs some latency in that cell alone, so the share of wrong ones among the decided ones is what counts
    (``FALSE_DISCOVERY_RATIO``); Holm's bound on the chance of even one wrong cell would leave most cells undecided.
    """
    if not len(probabilities):
        return np.zeros(0, dtype=np.bool_)
    from scipy.stats import false_discovery_control  # takes half a second, and tables of one repeat do not need it

    p = np.minimum(2 * np.minimum(probabilities, 1 - probabilities), 1.0)
    found: Flags = false_discovery_control(p, method="bh") <= FALSE_DISCOVERY_RATIO
    return found


def score_se(
    ttft_se: npt.ArrayLike, tpot_se: npt.ArrayLike, correlation: npt.ArrayLike, w_ttft: float, w_tpot: float
) -> Floats:
    """Standard error of S = w_ttft * delta_ttft - w_tpot * delta_tpot."""
    a, b = w_ttft * np.asarray(ttft_se, dtype=np.float64), w_tpot * np.asarray(tpot_se, dtype=np.float64)
    return np.sqrt(np.maximum(a * a - 2 * np.asarray(correlation, dtype=np.float64) * a * b + b * b, 0.0))


def _over(figure: npt.ArrayLike, se: npt.ArrayLike) -> Floats:
    """Figure / standard error, where 0 / 0 is 0 and anything else over 0 is infinite."""
    top, bottom = np.asarray(figure, dtype=np.float64), np.asarray(se, dtype=np.float64)
    certain = np.where(top == 0, 0.0, np.copysign(np.inf, top))
    return np.where(bottom == 0, certain, top / np.where(bottom == 0, 1.0, bottom))
