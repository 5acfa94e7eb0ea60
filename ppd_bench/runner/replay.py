"""``ppd-bench replay``: recorded traffic on the simulator, on engines or through a router, as an ordinary run, and where time
goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench.analysis.breakdown import STAGES, StageFigures, stage_figures, stages, start_waits_s
from ppd_bench.analysis.metrics import LATENCIES, prompt_tokens, with_latencies
from ppd_bench.analysis.summary import configuration_name
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point
from ppd_bench.core.workload import Arrivals, Loop
from ppd_bench.report.text_table import TextTable
from ppd_bench.runner.listeners import Listener
from ppd_bench.runner.live import LiveOptions
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import SUMMARY_COLUMNS, summaries_of
from ppd_bench.runner.sweep import Outcome, Prepared, SweepRequest, prepare, run_sweep
from ppd_bench.store.atomic import write_bytes
from ppd_bench.store.read import read_records

REPLAY_SWEEP = "replay"
REQUESTS_FILE = "requests.csv"
RECORD_COLUMNS = (
    *SUMMARY_COLUMNS, "request_id", "prefill_worker", "decode_worker", "prefill_start_s", "prefill_done_s", "transfer_start_s",
    "transfer_done_s", "decode_start_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What was asked. ``qps`` null plays recorded arrivals; a number draws whole conversations at that rate for the sweep's
    duration.

    ``loop`` null is the trace's own. Everything else is in ``sweep`` (a sweep file or name) and ``overrides``.
    """

    trace: Path
    format: str | None = None
    tokenizer: Path | None = None
    block_tokens: int | None = None
    sessions: str = "chain"
    loop: Loop | None = None
    time_scale: float = 1.0
    qps: float | None = None
    max_request_tokens: int | None = None
    max_requests: int | None = None
    max_inflight_sessions: int | None = None
    sweep: str = REPLAY_SWEEP
    overrides: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    out: Path | None = None
    n_processes: int = 0
    with_report: bool = True
    live: LiveOptions = LiveOptions()

    @property
    def via_alone(self) -> bool:
        """Whether a router is named and no engines behind it."""
        return self.live.via is not None and not self.live.given


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One configuration: what came of its turns, and where the time to their first tokens went. ``invalid``: why its figures are
    no evidence, empty where they are."""

    configuration: str
    evidence: str
    invalid: str
    n_scheduled: int
    n_ok: int
    ttft_p50_s: float
    tpot_p90_s: float
    e2e_p50_s: float
    prefix_hit_ratio: float
    start_wait_s: float
    longest_start_wait_s: float
    stages: tuple[StageFigures, ...]


def prepare_replay(request: ReplayRequest) -> Prepared:
    """Read the trace and make the run's points. Changes nothing on disk.

    Raises:
        SpecError: the trace cannot be played, or the sweep cannot be used.
        LaunchError: live is wanted and cannot run here.
    """
    if request.via_alone:
        raise SpecError(
            "command line: --via needs --endpoints too: the engines behind the router, whose caches are emptied "
            "and whose gauges are read"
        )
    executor = request.overrides.get("executor")
    asked = executor or ("live" if request.live.given else "sim")
    return prepare(
        SweepRequest(
            source=request.sweep,
            overrides={
                **request.overrides,
                "executor": asked,
                "workloads": [_entry(request)],
                "qps": [request.qps or 1.0],
            },
            name=request.name or _name(request, asked),
            out=request.out,
            n_processes=request.n_processes,
            with_report=request.with_report,
            live=request.live,
        )
    )


def _name(request: ReplayRequest, executor: str) -> str | None:
    """The run's: the trace's and the executor's, where the trace's can be one."""
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in request.trace.stem).strip("-._")
    return f"replay-{stem or 'trace'}-{executor}"


def _entry(request: ReplayRequest) -> dict[str, Any]:
    """The trace as a sweep's workload."""
    arrivals: Arrivals = "recorded" if request.qps is None else "poisson"
    entry = {
        "dataset": str(request.trace),
        "format": request.format,
        "tokenizer": None if request.tokenizer is None else str(request.tokenizer),
        "block_tokens": request.block_tokens,
        "sessions": request.sessions,
        "loop": request.loop,
        "arrivals": arrivals,
        "time_scale": request.time_scale,
        "max_request_tokens": request.max_request_tokens,
        "max_requests": request.max_requests,
        "max_inflight_sessions": request.max_inflight_sessions,
    }
    return {name: value for name, value in entry.items() if value is not None}


def run_replay(prepared: Prepared, listener: Listener) -> tuple[Outcome, list[Breakdown]]:
    """Play, write the run folder with ``requests.csv`` beside its records, and break TTFT down.

    Raises:
        SpecError: no turn of the trace was played.
    """
    outcome = run_sweep(prepared, listener)
    run = open_run(prepared.folder)
    records = read_records(run.path, columns=RECORD_COLUMNS)
    if records.empty:
        raise SpecError(f"{prepared.folder}: no turn was played; is the arrival window too short for the rate?")
    path = run.path / REQUESTS_FILE
    write_bytes(path, request_table(records).to_csv(index=False).encode())
    summaries = summaries_of(run)
    found = [
        _breakdown(point, records[records["point_id"] == point.point_id], _overall(summaries, point))
        for point in run.points
    ]
    return Outcome(
        folder=outcome.folder, artefacts=(*outcome.artefacts, path), notice=outcome.notice, warnings=outcome.warnings
    ), found


def request_table(records: pd.DataFrame) -> pd.DataFrame:
    """One row per turn: who and where, latencies, and its stages in seconds."""
    told = with_latencies(records)
    labels = ["point_id", "session_id", "turn", "request_id", "status", "route", "prefill_worker", "decode_worker"]
    return pd.concat(
        [
            told[labels],
            told[["input_tokens", "context_tokens", "output_tokens"]],
            told[list(LATENCIES)],
            stages(records),
        ],
        axis=1,
    ).assign(prompt_tokens=prompt_tokens(records))


def _overall(summaries: pd.DataFrame, point: Point) -> pd.Series[Any]:
    return summaries[(summaries["point_id"] == point.point_id) & (summaries["slice"] == "all")].iloc[0]


def _breakdown(point: Point, records: pd.DataFrame, summary: pd.Series[Any]) -> Breakdown:
    waits = start_waits_s(records)
    return Breakdown(
        configuration=configuration_name(point),
        evidence=point.executor.evidence,
        invalid="" if summary["valid"] else str(summary["invalid_reasons"]),
        n_scheduled=int(summary["n_scheduled"]),
        n_ok=int(summary["n_ok"]),
        ttft_p50_s=float(summary["ttft_p50_s"]),
        tpot_p90_s=float(summary["tpot_p90_s"]),
        e2e_p50_s=float(summary["e2e_p50_s"]),
        prefix_hit_ratio=float(summary["prefix_hit_ratio"]),
        start_wait_s=float(waits.sum()),
        longest_start_wait_s=float(waits.max()) if len(waits) else 0.0,
        stages=tuple(stage_figures(records)),
    )


def breakdown_tables(found: list[Breakdown]) -> list[TextTable]:
    """Results, and shares of TTFT by stage, one row per configuration."""
    unknown = "–"

    def seconds(value: float) -> str:
        return unknown if value != value else f"{value:,.3f} s"

    evidence = found[0].evidence
    results = tuple(
        (
            f"{b.configuration} (invalid)" if b.invalid else b.configuration,
            f"{b.n_ok:,}/{b.n_scheduled:,}", seconds(b.ttft_p50_s), seconds(b.tpot_p90_s), seconds(b.e2e_p50_s),
            unknown if b.prefix_hit_ratio != b.prefix_hit_ratio else f"{100 * b.prefix_hit_ratio:.1f} %",
            f"{b.start_wait_s:,.1f} s, longest {b.longest_start_wait_s:,.1f} s",
        )
        for b in found
    )  # fmt: skip
    names = [name.removesuffix("_s") for name in STAGES]
    rows = []
    for one in found:
        by_name = {s.stage: s for s in one.stages}
        rows.append((one.configuration, *(_stage(by_name.get(name)) for name in names)))
    return [
        TextTable(
            caption=f"What came of it ({evidence})",
            head=(
                "configuration",
                "OK/N",
                "TTFT p50",
                "TPOT p90",
                "E2E p50",
                "prefix hit",
                "sent later than due, in all",
            ),
            rows=results,
            note=" ".join(f"{b.configuration} is invalid: {b.invalid}." for b in found if b.invalid),
        ),
        TextTable(
            caption=f"Where TTFT goes, p50 and share of all TTFT ({evidence})",
            head=("configuration", *(name.replace("_", " ") for name in names)),
            rows=tuple(rows),
            note=f"every request's stages: {REQUESTS_FILE} in the run folder",
        ),
    ]


def _stage(figures: StageFigures | None) -> str:
    return "–" if figures is None else f"{figures.p50_s:,.3f} s, {100 * figures.ttft_share_ratio:.1f} %"
