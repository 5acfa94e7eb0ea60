"""The only formulas of TTFT, TPOT, E2E, send lag, goodput, prefix hit, the two deltas and Equation 1's score.

A records frame has the columns ``core.record.RECORD_FIELDS``, one row per turn. Every name is a GLOSSARY term.
Undefined is NaN, never 0.
"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppd_bench.core.slo import SLO

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "send_lag_s")


def floats(records: pd.DataFrame, name: str) -> Floats:
    """A column as float64, null as NaN, whatever nullable type the store gave it."""
    return pd.to_numeric(records[name]).to_numpy(dtype=np.float64, na_value=np.nan)


def labels(records: pd.DataFrame, name: str, value: str) -> Flags:
    """Where a label column equals ``value``; null equals nothing."""
    return records[name].eq(value).fillna(False).to_numpy(dtype=np.bool_)


def with_latencies(records: pd.DataFrame) -> pd.DataFrame:
    """The records with ``ttft_s``, ``tpot_s``, ``e2e_s`` and ``send_lag_s`` added, in seconds (GLOSSARY).

    TPOT is null below 2 generated tokens. A failed turn keeps what its instants define; the rest is null.
    """
    sent, first, last = (floats(records, name) for name in ("sent_s", "first_token_s", "last_token_s"))
    tokens = floats(records, "generated_tokens")
    gaps = np.where(tokens >= 2, tokens - 1, np.nan)
    return records.assign(
        ttft_s=first - sent,
        tpot_s=(last - first) / gaps,
        e2e_s=last - sent,
        send_lag_s=sent - floats(records, "scheduled_s"),
    )


def meets(latencies: pd.DataFrame, slo: SLO) -> Flags:
    """Which turns count for goodput: ok, and within every stated bound.

    A null TPOT passes the TPOT bound, so that such a turn is judged on its other bounds (GLOSSARY: goodput); summaries
    count those turns in ``n_null_tpot``. Any other null fails.
    """
    passed = labels(latencies, "status", "ok")
    if slo.ttft_s is not None:
        passed = passed & (floats(latencies, "ttft_s") <= slo.ttft_s)
    if slo.tpot_s is not None:
        tpot = floats(latencies, "tpot_s")
        passed = passed & ((tpot <= slo.tpot_s) | np.isnan(tpot))
    if slo.e2e_s is not None:
        passed = passed & (floats(latencies, "e2e_s") <= slo.e2e_s)
    return passed


def prompt_tokens(records: pd.DataFrame) -> Floats:
    """History plus new input of each turn, tokens."""
    return floats(records, "context_tokens") + floats(records, "input_tokens")


def prefix_hit_tokens(records: pd.DataFrame) -> Floats:
    """Prompt tokens found in the local prefix cache of the worker that prefilled the turn; NaN where not known.

    That worker is P where there was a P leg, else the worker that generated. KV that came from another node is not a
    hit; it is counted in ``transferred_tokens``.
    """
    on_prefill = floats(records, "prefill_cached_tokens")
    return np.where(np.isnan(on_prefill), floats(records, "cached_tokens"), on_prefill)


@overload
def delta_ttft(x0_s: float, x1_s: float) -> float: ...
@overload
def delta_ttft(x0_s: Floats, x1_s: Floats) -> Floats: ...
def delta_ttft(x0_s: float | Floats, x1_s: float | Floats) -> float | Floats:
    """(TTFT(x=0) - TTFT(x=1)) / TTFT(x=0): positive when local is better. NaN unless both means are above 0."""
    return _share_of(x0_s, x0_s, x1_s)


@overload
def delta_tpot(x0_s: float, x1_s: float) -> float: ...
@overload
def delta_tpot(x0_s: Floats, x1_s: Floats) -> Floats: ...
def delta_tpot(x0_s: float | Floats, x1_s: float | Floats) -> float | Floats:
    """(TPOT(x=1) - TPOT(x=0)) / TPOT(x=0): positive when local is worse. NaN unless both means are above 0."""
    return _share_of(x0_s, x1_s, x0_s)


def _share_of(x0_s: float | Floats, more_s: float | Floats, less_s: float | Floats) -> float | Floats:
    """(more - less) / x0 for single means or arrays of them; ``more`` and ``less`` are the two arms' means."""
    x0, more, less = (np.asarray(mean, dtype=np.float64) for mean in (x0_s, more_s, less_s))
    known = (more > 0) & (less > 0) & np.isfinite(x0)
    share = np.where(known, more, np.nan) - np.where(known, less, np.nan)
    share = share / np.where(known, x0, np.nan)
    return share if share.ndim else float(share)


def score(ttft_ratio: float, tpot_ratio: float, w_ttft: float, w_tpot: float) -> float:
    """S = w_ttft * delta_ttft - w_tpot * delta_tpot (Equation 1); local when S > 0."""
    return w_ttft * ttft_ratio - w_tpot * tpot_ratio
