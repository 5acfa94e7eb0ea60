"""What is derived from records: summaries, paired deltas and table cells."""

from __future__ import annotations

from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.95, 0.99)
SLICES = ("all", "turn1", "turn2plus")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDelta:
    """One cell of Equation 1: a (workload, QPS) at x=0 against x=1 of one layout.

    Means are over ok turn-2+ turns, seconds; null where a side has none. ``n_pairs`` counts turns that are ok on both
    sides. ``n_repeats`` counts repeats that both sides have; they are the independent draws behind the standard errors
    (``_se``), the correlation of the two deltas' errors, and the 95 % intervals (``_low``, ``_high``). Standard errors are
    null with one repeat, intervals below ``analysis.confidence.MIN_REPEATS``.
    """

    baseline: str
    candidate: str
    workload: str
    qps: float
    ttft_x0_s: float | None
    ttft_x1_s: float | None
    tpot_x0_s: float | None
    tpot_x1_s: float | None
    success_x0_ratio: float
    success_x1_ratio: float
    delta_ttft: float | None
    delta_tpot: float | None
    n_pairs: int
    n_repeats: int
    delta_ttft_se: float | None
    delta_ttft_low: float | None
    delta_ttft_high: float | None
    delta_tpot_se: float | None
    delta_tpot_low: float | None
    delta_tpot_high: float | None
    delta_correlation: float | None
    success_x0_se: float | None
    success_x1_se: float | None
