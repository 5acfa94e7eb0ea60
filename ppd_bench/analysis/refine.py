"""Which cell of a decision table should get the next repeat: the one whose decision is uncertain and matters most per GPU-second.

A cell here is a (layout, workload, QPS) whose arms x=0 and x=1 are compared. What it would cost to decide it wrongly is the
expected opportunity loss of ranking and selection (Chick and Inoue, 2001, "New two-stage and sequential procedures for selecting
the best simulated system"): the mean of max(0, -S) where S is believed to be above 0. One more repeat takes about 1 / (n + 1) of
it away, and costs GPU-seconds; cells are ranked by the quotient.

With few repeats a cell's own variance says little. It is moderated by that of other cells under like strain (Smyth, 2004, "Linear
models and empirical Bayes methods for assessing differential expression", equation 3 of the moderated t): it counts as
``PRIOR_DF`` more degrees of freedom. The confidence found so is what the search stops by. It is not the certainty that a table
states: that rests on a cell's own repeats alone (``analysis.confidence``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import ndtr, stdtr

from ppd_bench.analysis.confidence import score_se
from ppd_bench.analysis.metrics import Flags, Floats, floats, score

PRIOR_DF = 4.0
"""Degrees of freedom that the variance of other cells counts for."""

STRAINS = (1.1, 1.3, 1.7, 2.5, 5.0)
"""Bounds between strains: by what factor a mean latency of either arm is above that of the same workload at its best rate. A cell
that queues varies far more than one that does not, at whatever rate that begins."""

MIN_POOL = 3
"""Cells with two repeats or more under one strain (fewer where it has fewer) before their variances speak for it. Until then
nothing is known of how its cells vary, and their confidence is 0: these few get their second repeat first."""

POOL_QUANTILE = 0.75
"""Of the variances of other cells that a cell with few repeats is taken to have: rather too much than too little."""

ASSUMED_SPREAD = 0.1
"""Of S from repeat to repeat, where nothing is known yet. Only the order of the first repeats rests on it."""

SUCCESS_FLOOR = 0.005
"""Of a success ratio from repeat to repeat at least: a few repeats without failures do not prove that none can fail."""

FAILED_SIDE_STAKE = 1.0
"""What a router loses that uses a side which fails, in units of S: as much as a latency that doubles."""


MAX_ROUNDS = 6
"""Rounds that a budget is spread over: each may launch every layout again, and each sees what the one before it found."""

MAX_LAUNCH_SHARE = 0.25
"""Of a round's allotment that launches may take; with less to spend there are fewer rounds."""

FREE_ROUND_SHARE = 0.125
"""Of the cost of the coarse pass: what a round may spend where no budget is given."""

_ERRORS = ("delta_ttft_se", "delta_tpot_se", "delta_correlation")


class Standing(NamedTuple):
    """What is known of every cell, one entry per row of the deltas.

    ``side``: ``pd``, ``local`` or ``none`` (no side serves the strain, or nothing is known); ``confidence``: chance that this is
    right; ``loss``: expected loss of acting on it, in units of S. ``spread``: standard deviation of S from repeat to repeat;
    ``pooled``: whether it is known from repeats under this strain. ``strain``: index among ``STRAINS``.
    """

    side: npt.NDArray[np.str_]
    confidence: Floats
    loss: Floats
    score: Floats
    spread: Floats
    pooled: Flags
    strain: Floats


class Candidate(NamedTuple):
    """A cell that may get a repeat: its row, and GPU-seconds of one repeat of both arms."""

    row: int
    cost_gpu_s: float


def standing(deltas: pd.DataFrame, *, w_ttft: float, w_tpot: float, success_bound: float) -> Standing:
    """Judge every row of ``analysis.pairing.deltas`` by itself, with moderated variances.

    A side is up where its success ratio reaches the bound; two sides that are up are compared by S (Equation 1).
    """
    n, strain = floats(deltas, "n_repeats"), strains(deltas)
    pairs = zip(floats(deltas, "delta_ttft"), floats(deltas, "delta_tpot"), strict=True)
    s = np.array([score(ttft, tpot, w_ttft, w_tpot) for ttft, tpot in pairs], dtype=np.float64)
    ttft_se, tpot_se, correlation = (floats(deltas, name) for name in _ERRORS)
    spread = _moderated(score_se(ttft_se, tpot_se, correlation, w_ttft, w_tpot), n, strain, assumed=ASSUMED_SPREAD)
    pooled = _pooled(n, strain)
    up0, up1 = (_chance_up(deltas, side, n, strain, success_bound) for side in ("x0", "x1"))
    above = np.where(np.isnan(s), 0.5, _chance_above(np.nan_to_num(s), spread, n))
    local = up1 * (1 - up0) + up0 * up1 * above
    pd_side = up0 * (1 - up1) + up0 * up1 * (1 - above)
    chances = np.nan_to_num(np.stack([pd_side, local, (1 - up0) * (1 - up1)]))
    known = (n > 0) & ~np.isnan(up0) & ~np.isnan(up1)
    best = np.where(known, chances.argmax(axis=0), 2)
    doubt = 1 - np.maximum(up0, 1 - up0) * np.maximum(up1, 1 - up1)
    by_score = np.where(np.isnan(s), FAILED_SIDE_STAKE, _opportunity_loss(np.nan_to_num(s), spread, n))
    loss = np.where(known, up0 * up1 * by_score + FAILED_SIDE_STAKE * doubt, FAILED_SIDE_STAKE)
    return Standing(
        side=np.array(["pd", "local", "none"])[best],
        confidence=np.where(known & pooled, chances.max(axis=0), 0.0),
        loss=loss,
        score=s,
        spread=spread,
        pooled=pooled,
        strain=strain,
    )


def next_round(
    found: Standing, n_repeats: Floats, candidates: Sequence[Candidate], *, confidence: float, allotment_gpu_s: float
) -> list[Candidate]:
    """The cells that get one more repeat now, most valuable per GPU-second first, as far as the allotment reaches.

    Cells that are as certain as asked are left out. The first ``MIN_POOL`` of a strain of which nothing is known
    come before all others. Ties keep the order given.
    """
    wanted = [c for c in candidates if found.confidence[c.row] < confidence]
    ranked = _scouts_first(sorted(wanted, key=lambda c: -value_per_gpu_s(found, n_repeats, c)), found, n_repeats)
    chosen: list[Candidate] = []
    spent = 0.0
    for candidate in ranked:
        if spent + candidate.cost_gpu_s <= allotment_gpu_s:
            chosen.append(candidate)
            spent += candidate.cost_gpu_s
    return chosen


def _scouts_first(ranked: Sequence[Candidate], found: Standing, n_repeats: Floats) -> list[Candidate]:
    scouts: list[Candidate] = []
    missing = {float(q): MIN_POOL - int((n_repeats[found.strain == q] >= 2).sum()) for q in found.strain[~found.pooled]}
    for candidate in ranked:
        level = float(found.strain[candidate.row])
        if missing.get(level, 0) > 0 and n_repeats[candidate.row] < 2:
            missing[level] -= 1
            scouts.append(candidate)
    first = set(scouts)
    return [*scouts, *(c for c in ranked if c not in first)]


def round_allotment(coarse_gpu_s: float, launch_gpu_s: float, budget_gpu_s: float | None) -> float:
    """GPU-seconds of one round, launches included: what the coarse pass leaves, in at most ``MAX_ROUNDS`` equal parts.

    ``launch_gpu_s``: of launching every layout once. Never negative; 0 where nothing is left.
    """
    if budget_gpu_s is None:
        return max(FREE_ROUND_SHARE * coarse_gpu_s, launch_gpu_s / MAX_LAUNCH_SHARE)
    rest = max(budget_gpu_s - coarse_gpu_s, 0.0)
    launches_able = rest * MAX_LAUNCH_SHARE
    # Compared as products: a launch may cost next to nothing.
    n_rounds = next((n for n in range(MAX_ROUNDS, 1, -1) if n * launch_gpu_s <= launches_able), 1)
    return rest / n_rounds


def value_per_gpu_s(found: Standing, n_repeats: Floats, candidate: Candidate) -> float:
    """Expected loss that one more repeat takes away, per GPU-second."""
    return float(found.loss[candidate.row] / (n_repeats[candidate.row] + 1) / candidate.cost_gpu_s)


def strains(deltas: pd.DataFrame) -> Floats:
    """How strained each cell is: the number of ``STRAINS`` that it is above; the highest where a mean is missing."""
    factors = []
    for name in ("ttft_x0_s", "ttft_x1_s", "tpot_x0_s", "tpot_x1_s"):
        best = deltas.groupby(["baseline", "workload"], sort=False)[name].transform("min")
        factors.append(floats(deltas.assign(best=deltas[name] / best), "best"))
    worst = np.max(np.nan_to_num(np.stack(factors), nan=np.inf), axis=0)
    return np.asarray(np.digitize(worst, STRAINS), dtype=np.float64)


def _chance_up(deltas: pd.DataFrame, side: str, n: Floats, strain: Floats, bound: float) -> Floats:
    """P(the success ratio of a side reaches the bound)."""
    spread = _moderated(floats(deltas, f"success_{side}_se"), n, strain, assumed=SUCCESS_FLOOR)
    margin = floats(deltas, f"success_{side}_ratio") - bound
    return _chance_above(margin, np.maximum(spread, SUCCESS_FLOOR), n)


def _pooled(n: Floats, strain: Floats) -> Flags:
    """Whether enough cells of a row's strain have two repeats."""
    pooled = np.zeros(len(n), dtype=np.bool_)
    for level in np.unique(strain):
        here = strain == level
        pooled[here] = (n[here] >= 2).sum() >= min(MIN_POOL, here.sum())
    return pooled


def _moderated(se: Floats, n: Floats, strain: Floats, *, assumed: float) -> Floats:
    """Standard deviation from repeat to repeat, each cell's own and that of other cells under its strain weighed together."""
    own_known = (n >= 2) & ~np.isnan(se)
    # The standard errors of analysis.confidence are s / sqrt(n - 1).
    own = np.where(own_known, np.nan_to_num(se) ** 2 * np.maximum(n - 1, 0), 0.0)
    df = np.where(own_known, n - 1, 0.0)
    pooled = np.full(len(n), assumed**2)
    if own_known.sum() >= MIN_POOL:
        pooled[:] = np.quantile(own[own_known], POOL_QUANTILE)
    for level in np.unique(strain):
        here = own_known & (strain == level)
        if here.sum() >= min(MIN_POOL, (strain == level).sum()):
            pooled[strain == level] = np.quantile(own[here], POOL_QUANTILE)
    return np.asarray(np.sqrt((PRIOR_DF * pooled + df * own) / (PRIOR_DF + df)), dtype=np.float64)


def _chance_above(figure: Floats, spread: Floats, n: Floats) -> Floats:
    """P(the true figure is above 0), by a moderated t."""
    error = spread / np.sqrt(np.maximum(n, 1))
    certain = np.where(figure == 0, 0.0, np.copysign(np.inf, figure))
    t = np.where(error > 0, figure / np.where(error > 0, error, 1.0), certain)
    return np.asarray(stdtr(PRIOR_DF + np.maximum(n - 1, 0), t), dtype=np.float64)


def _opportunity_loss(s: Floats, spread: Floats, n: Floats) -> Floats:
    """Mean loss of deciding by the sign of S, were S normal around what was seen."""
    error = np.maximum(spread / np.sqrt(np.maximum(n, 1)), 1e-12)
    z = np.abs(s) / error
    density = np.exp(-(np.minimum(z, 40.0) ** 2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(error * (density - z * ndtr(-z)), dtype=np.float64)
