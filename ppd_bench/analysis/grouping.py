"""Sums, extremes and quantiles of many groups at once, without a Python loop over groups.

``groups`` holds each row's group number in [0, n_groups). A NaN value belongs to no group; an empty group gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ppd_bench.analysis.metrics import Flags, Floats

Groups = npt.NDArray[np.int64]


def counts(groups: Groups, n_groups: int) -> Groups:
    """Rows per group."""
    return np.bincount(groups, minlength=n_groups)


def sums(values: Floats, groups: Groups, n_groups: int) -> Floats:
    """Sum per group of the values that are not NaN; NaN where there is none."""
    known = ~np.isnan(values)
    total = np.bincount(groups[known], weights=values[known], minlength=n_groups)
    return np.where(counts(groups[known], n_groups) > 0, total, np.nan)


def means(values: Floats, groups: Groups, n_groups: int) -> Floats:
    """Mean per group of the values that are not NaN."""
    known = ~np.isnan(values)
    return ratio(sums(values, groups, n_groups), counts(groups[known], n_groups))


def largest(values: Floats, groups: Groups, n_groups: int) -> Floats:
    """Largest value per group."""
    out = np.full(n_groups, np.nan)
    np.fmax.at(out, groups, values)
    return out


def smallest(values: Floats, groups: Groups, n_groups: int) -> Floats:
    """Smallest value per group."""
    out = np.full(n_groups, np.nan)
    np.fmin.at(out, groups, values)
    return out


def ratio(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> Floats:
    """Element-wise division; NaN where the denominator is not above 0."""
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    return top / np.where(bottom > 0, bottom, np.nan)


class SortedGroups:
    """Values sorted once by (group, value), so that quantiles of any subset of rows cost no further sort."""

    def __init__(self, values: Floats, groups: Groups, n_groups: int) -> None:
        order = np.lexsort((values, groups))
        self._rows = order[~np.isnan(values[order])]
        self._values, self._groups, self._n_groups = values, groups, n_groups

    def quantiles(self, keep: Flags, wanted: Sequence[float], n_infinite: Groups | None = None) -> Floats:
        """Quantiles by linear interpolation over the rows where ``keep``, shape (n_groups, len(wanted)).

        ``n_infinite`` adds so many infinite values to each group: a quantile that touches one of them is infinite.
        """
        rows = self._rows[keep[self._rows]]
        values, n_finite = self._values[rows], counts(self._groups[rows], self._n_groups)
        n = n_finite if n_infinite is None else n_finite + n_infinite
        out = np.full((self._n_groups, len(wanted)), np.nan)
        some = n > 0
        start, last = (np.cumsum(n_finite) - n_finite)[some], n[some] - 1
        padded = np.append(values, np.inf)
        for column, q in enumerate(wanted):
            place = q * last
            low = np.floor(place).astype(np.int64)
            high = np.minimum(np.ceil(place).astype(np.int64), last)
            below, above = (
                padded[np.where(index < n_finite[some], start + index, len(values))] for index in (low, high)
            )
            with np.errstate(invalid="ignore"):  # between two infinite values
                between = below + (above - below) * (place - low)
            out[some, column] = np.where(np.isinf(above), above, between)
        return out
