"""Summaries and deltas of a run: made from its records, kept beside them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ppd_bench.analysis.pairing import DELTA_FIELDS
from ppd_bench.analysis.pairing import deltas as deltas_of
from ppd_bench.analysis.steady_state import STEADY_UNITS, steady_state
from ppd_bench.analysis.summary import SUMMARY_UNITS, summarise
from ppd_bench.core.point import Point
from ppd_bench.runner.checks import lateness_limit_s, problems_of
from ppd_bench.runner.runs import Run
from ppd_bench.store import layout
from ppd_bench.store.frames import read_frame, write_frame
from ppd_bench.store.read import read_records

FAILED = ("no turns", "no turn succeeded")
"""Reasons that are results themselves: a configuration that fails loses against one that works."""

DELTA_UNITS = {
    **dict.fromkeys(DELTA_FIELDS, "1"),
    **dict.fromkeys(("baseline", "candidate", "workload"), ""),
    **dict.fromkeys(("ttft_x0_s", "ttft_x1_s", "tpot_x0_s", "tpot_x1_s"), "s"),
    "qps": "1/s",
}
SUMMARY_COLUMNS = (
    "point_id", "session_id", "turn", "context_tokens", "input_tokens", "output_tokens", "generated_tokens", "route",
    "scheduled_s", "sent_s", "first_token_s", "last_token_s", "end_s", "itl_count", "itl_mean_s", "itl_max_s",
    "prefill_cached_tokens", "cached_tokens", "transferred_tokens", "transfer_bytes", "n_preemptions", "status",
)  # fmt: skip
"""Record columns that summaries and deltas need."""


def write_summaries(run: Run) -> Path:
    """Summaries and deltas of a finished run, from its records. Returns the summaries' path."""
    records = read_records(run.path, columns=SUMMARY_COLUMNS)
    summaries = summarise(
        records,
        run.points,
        slo=run.spec.slo,
        send_lag_limit_s=lateness_limit_s(run),
        problems=problems_of(run),
    )
    write_frame(run.path / layout.SUMMARIES, summaries, SUMMARY_UNITS, "summaries", executor=run.executor)
    steady = steady_state(records, run.points, slo=run.spec.slo)
    write_frame(run.path / layout.STEADY_STATE, steady, STEADY_UNITS, "steady_state", executor=run.executor)
    deltas = deltas_of(records, trusted_points(run, summaries))
    write_frame(run.path / layout.DELTAS, deltas, DELTA_UNITS, "deltas", executor=run.executor)
    return run.path / layout.SUMMARIES


def trusted_points(run: Run, summaries: pd.DataFrame) -> list[Point]:
    """The points that may decide: a point that is invalid for any reason but that its turns failed is no evidence at all."""
    doubted = summaries.loc[~summaries["valid"] & ~summaries["invalid_reasons"].isin(FAILED), "point_id"]
    doubted_ids = set(doubted)
    return [point for point in run.points if point.point_id not in doubted_ids]


def summaries_of(run: Run) -> pd.DataFrame:
    """The stored summaries; made first when they are not there."""
    if not (run.path / layout.SUMMARIES).exists():
        write_summaries(run)
    return read_frame(run.path / layout.SUMMARIES, "summaries")[0]


def stored_deltas(run: Run) -> pd.DataFrame:
    """The stored deltas; made first when they are not there."""
    if not (run.path / layout.DELTAS).exists():
        write_summaries(run)
    return read_frame(run.path / layout.DELTAS, "deltas")[0]
