"""What prefills cost the decodes that run beside them, from records that keep every gap between tokens (paper, Figures 2, 7
and 8).

A point holds decode streams, whose sessions begin with ``DECODE``, and prefills that are sent together while all streams run,
whose sessions begin with ``PREFILL``; of an append prefill only turn 2 counts, turn 1 having put its context into the cache.
Every stream is its own baseline: the mean of its last gaps before the prefills were sent. The same definitions hold for simulated
and live records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ppd_bench.analysis.metrics import Floats

DECODE = "decode"
PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """One mix, medians over its decode streams; slowdowns are ratios above the baseline (0.48: 48 % slower).

    ``carrying``: mean over the steps that must carry the prefills (``carrying_steps``), taken as the stream's slowest gaps
    after they were sent. ``step``: the slowest gap. ``window``: mean over the first ``window_tokens`` gaps, so it depends on
    that number and
    ``excess_s``, the seconds that a stream lost in all, does not. ``prefill_s``: from sending to the last prefill's first token.
    """

    baseline_tpot_s: float
    carrying_slowdown_ratio: float
    step_slowdown_ratio: float
    window_slowdown_ratio: float
    excess_s: float
    prefill_s: float
    n_streams: int
    n_carrying_steps: int


def carrying_steps(*, n_decode: int, n_prefill_tokens: int, max_num_batched_tokens: int) -> int:
    """Steps that it takes to prefill so many tokens while all decodes take one token of each step's budget (at least 1)."""
    return max(1, math.ceil(n_prefill_tokens / max(1, max_num_batched_tokens - n_decode)))


def slowdown(records: pd.DataFrame, *, n_carrying: int, window_tokens: int) -> Slowdown | None:
    """The slowdown of one point's records; null where a stream or prefill failed, or a stream lacks the gaps to tell.

    Gaps that begin before the prefills are sent and end after belong to what follows: the step under way may take them in.
    """
    ok = bool((records["status"] == "ok").all())
    is_decode = records["session_id"].astype(str).str.startswith(DECODE)
    prefills = records[records["session_id"].astype(str).str.startswith(PREFILL)]
    prefills = prefills[prefills["turn"] == prefills["turn"].max()]
    if not ok or not is_decode.any() or prefills.empty:
        return None
    sent_s = float(prefills["sent_s"].min())
    window = max(window_tokens, n_carrying)
    streams = [
        _stream(first, gaps, sent_s, window, n_carrying, window_tokens) for first, gaps in _gaps(records[is_decode])
    ]
    found = [figures for figures in streams if figures is not None]
    if len(found) < len(streams):
        return None
    medians = np.median(np.array(found), axis=0)
    return Slowdown(
        baseline_tpot_s=float(medians[0]),
        carrying_slowdown_ratio=float(medians[1]),
        step_slowdown_ratio=float(medians[2]),
        window_slowdown_ratio=float(medians[3]),
        excess_s=float(medians[4]),
        prefill_s=float(prefills["first_token_s"].max()) - sent_s,
        n_streams=len(found),
        n_carrying_steps=n_carrying,
    )


def _gaps(decodes: pd.DataFrame) -> list[tuple[float, Floats]]:
    return [
        (float(first), np.asarray(gaps, dtype=np.float64))
        for first, gaps in zip(decodes["first_token_s"], decodes["itl_s"], strict=True)
    ]


def _stream(
    first_s: float, gaps: Floats, sent_s: float, window: int, n_carrying: int, window_tokens: int
) -> tuple[float, ...] | None:
    """Baseline seconds, the three slowdowns, and excess seconds of one stream; null without ``window`` gaps on either side."""
    ends_s = first_s + np.cumsum(gaps)
    n_before = int(np.searchsorted(ends_s, sent_s))
    before, after = gaps[max(0, n_before - window_tokens) : n_before], gaps[n_before : n_before + window]
    if len(before) < window_tokens or len(after) < window:
        return None
    baseline = float(before.mean())
    slowest = np.sort(after)[::-1]
    figures = (slowest[:n_carrying].mean(), slowest[0], after[:window_tokens].mean())
    return (baseline, *(float(value) / baseline - 1.0 for value in figures), float(after.sum()) - window * baseline)
