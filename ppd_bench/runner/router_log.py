"""``report --router-log``: what a router's decision log says of live traffic, as figures and as text.

It is how drift is seen: which cells of the table the traffic visits, which of those rest on little, and what was measured there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppd_bench.analysis.metrics import with_latencies
from ppd_bench.core.errors import StoreError
from ppd_bench.core.record import RECORD_FIELDS
from ppd_bench.report.units import counted
from ppd_bench.router.decision_log import FILE_NAME, HEADER, LOG_SCHEMA, ROUTER_COLUMNS, TABLE, log_numbers
from ppd_bench.router.turn_record import STAGES

STAGE_ENDS = {
    "decide": "t_decided_s",
    "to_prefill": "t_p_sent_s",
    "prefill": "t_p_done_s",
    "to_decode": "t_d_sent_s",
    "first_byte": "t_first_byte_s",
    "stream": "t_done_s",
}
COLUMNS = [*RECORD_FIELDS, *ROUTER_COLUMNS]
WEAK = frozenset({"insufficient", "extrapolated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage over the turns that had it, seconds. ``share``: of all turns' whole time."""

    stage: str
    n: int
    mean_s: float
    p50_s: float
    p99_s: float
    share_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """One cell of a table as live traffic met it. Latencies are measured at the router; null without an ok turn."""

    table_hash: str
    cell: str
    evidence: str
    rule: str
    n: int
    share_ratio: float
    n_off_grid: int
    n_ok: int
    x_ratio: float | None
    mean_ttft_s: float | None
    mean_tpot_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """Figures of a decision log. ``n_damaged``: lines that could not be read (a crash cuts one short)."""

    n_turns: int
    n_damaged: int
    span_s: float
    topologies: tuple[str, ...]
    tables: tuple[Mapping[str, Any], ...]
    by_status: Mapping[str, int]
    by_route: Mapping[str, int]
    by_reason: Mapping[str, int]
    by_identity: Mapping[str, int]
    failures: Mapping[str, int]
    counters: Mapping[str, int]
    stages: tuple[StageFigures, ...]
    cells: tuple[CellFigures, ...]
    n_table_decisions: int
    insufficient_ratio: float | None
    off_grid_ratio: float | None


def read_router_log(folder: Path) -> LogReport:
    """The figures of all files of a log.

    Raises:
        StoreError: there is no log, or it is of another version.
    """
    return _report(*_read(folder))


def router_turns(folder: Path) -> pd.DataFrame:
    """The rows of all files of a log, with the columns ``COLUMNS``.

    Raises:
        StoreError: there is no log, or it is of another version.
    """
    return _read(folder)[0]


def damaged_lines(folder: Path) -> int:
    """Lines of a log that ``router_turns`` cannot read and leaves out."""
    return _read(folder)[2]


def _read(folder: Path) -> tuple[pd.DataFrame, list[dict[str, Any]], int]:
    """Rows, other lines, and how many lines could not be read."""
    turns: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    n_damaged = 0
    for line in _lines(folder):
        try:
            entry = json.loads(line)
        except ValueError:
            n_damaged += 1
            continue
        if isinstance(entry, dict) and "kind" in entry:
            others.append(entry)
        elif _is_turn(entry):
            turns.append(entry)
        else:
            n_damaged += 1
    _check(folder, others)
    return pd.DataFrame(turns, columns=COLUMNS), others, n_damaged


def _is_turn(entry: object) -> bool:
    """Whether a line has what every turn has, and its numbers are numbers."""
    if not isinstance(entry, dict):
        return False
    instants = [entry.get(name) for name in (*STAGE_ENDS.values(), "first_token_s", "last_token_s", "x")]
    return all(isinstance(entry.get(name), int | float) for name in ("time_unix_s", "t_recv_s", "t_done_s")) and all(
        at is None or isinstance(at, int | float) for at in instants
    )


def _lines(folder: Path) -> Iterator[bytes]:
    numbers = sorted(log_numbers(folder))
    if not numbers:
        raise StoreError(f"{folder}: holds no decision log; give the folder of 'ppd-bench router --log'")
    for number in numbers:
        path = folder / FILE_NAME.format(number=number)
        try:
            yield from (line for line in path.read_bytes().split(b"\n") if line)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror})") from error


def _check(folder: Path, others: Sequence[Mapping[str, Any]]) -> None:
    versions = {entry.get("schema") for entry in others if entry["kind"] == HEADER}
    if versions - {LOG_SCHEMA}:
        raise StoreError(
            f"{folder}: written with log schema {sorted(map(str, versions))}, but this ppd-bench reads {LOG_SCHEMA}; use the "
            f"version that wrote it"
        )


def _report(frame: pd.DataFrame, others: Sequence[Mapping[str, Any]], n_damaged: int) -> LogReport:
    by_table = frame[frame["table_hash"].notna()]
    n = len(by_table)
    headers = [entry for entry in others if entry["kind"] == HEADER]
    return LogReport(
        n_turns=len(frame),
        n_damaged=n_damaged,
        span_s=_span(frame),
        topologies=tuple(sorted({str(entry.get("topology")) for entry in headers})),
        tables=tuple(entry for entry in others if entry["kind"] == TABLE),
        by_status=_counts(frame["status"]),
        by_route=_counts(frame["route"]),
        by_reason=_counts(frame["reason"].dropna().astype(str).str.split(" ").str[0]),
        by_identity=_counts(frame["identity"]),
        failures=_counts(frame["failure"]),
        counters=dict(Counter(name for names in frame["counters"].dropna() for name in names).most_common()),
        stages=tuple(_stages(frame)),
        cells=tuple(_cells(by_table)),
        n_table_decisions=n,
        insufficient_ratio=float((by_table["evidence"] == "insufficient").mean()) if n else None,
        off_grid_ratio=float(by_table["off_grid"].notna().mean()) if n else None,
    )


def _span(frame: pd.DataFrame) -> float:
    times = pd.to_numeric(frame["time_unix_s"])
    return float(times.max() - times.min()) if len(frame) else 0.0


def _counts(column: pd.Series[Any]) -> dict[str, int]:
    return {str(name): int(n) for name, n in column.dropna().value_counts().items()}


def _stages(frame: pd.DataFrame) -> Iterator[StageFigures]:
    """Each stage begins where the one before it that the turn had ended, so that they add up to the whole."""
    before = pd.to_numeric(frame["t_recv_s"])
    whole_s = float((pd.to_numeric(frame["t_done_s"]) - before).sum())
    for stage in STAGES:
        end = pd.to_numeric(frame[STAGE_ENDS[stage]])
        seconds = (end - before).dropna()
        before = end.fillna(before)
        if len(seconds):
            yield StageFigures(
                stage=stage,
                n=len(seconds),
                mean_s=float(seconds.mean()),
                p50_s=float(seconds.quantile(0.5)),
                p99_s=float(seconds.quantile(0.99)),
                share_ratio=float(seconds.sum()) / whole_s if whole_s else 0.0,
            )


def _cells(by_table: pd.DataFrame) -> Iterator[CellFigures]:
    """Most visited first."""
    latencies = with_latencies(by_table)
    groups = latencies.groupby(["table_hash", "cell", "evidence", "rule"], sort=True)
    for key, turns in sorted(groups, key=lambda group: (-len(group[1]), group[0])):
        ok = turns[turns["status"] == "ok"]
        x = pd.to_numeric(turns["x"]).dropna()
        table_hash, cell, evidence, rule = map(str, key)
        yield CellFigures(
            table_hash=table_hash,
            cell=cell,
            evidence=evidence,
            rule=rule,
            n=len(turns),
            share_ratio=len(turns) / len(by_table),
            n_off_grid=int(turns["off_grid"].notna().sum()),
            n_ok=len(ok),
            x_ratio=float(x.mean()) if len(x) else None,
            mean_ttft_s=_mean(ok["ttft_s"]),
            mean_tpot_s=_mean(ok["tpot_s"]),
        )


def _mean(column: pd.Series[Any]) -> float | None:
    known = column.dropna()
    return float(known.mean()) if len(known) else None


# -- for people and programs -------------------------------------------------------------------------------------------


def report_json(report: LogReport) -> str:
    """The figures as JSON."""
    return json.dumps(asdict(report), indent=1, sort_keys=True, allow_nan=False) + "\n"


def report_lines(report: LogReport) -> list[str]:
    """The figures as text."""
    topologies = ", ".join(report.topologies) or "unknown topology"
    lines = [
        f"router log: {counted(report.n_turns, 'turn')} over {report.span_s:,.0f} s on {topologies} (measured at the router)"
    ]
    if report.n_damaged:
        lines.append(f"{counted(report.n_damaged, 'line')} that could not be read left out")
    for entry in report.tables:
        lines.append(
            f"table {entry.get('hash')}: {entry.get('evidence')}, w_ttft {entry.get('w_ttft')}, w_tpot {entry.get('w_tpot')}"
        )
    for name, counts in (
        ("status", report.by_status),
        ("route", report.by_route),
        ("reason", report.by_reason),
        ("recognised by", report.by_identity),
        ("failures", report.failures),
        ("on the way", report.counters),
    ):
        if counts:
            lines.append(f"{name}: " + ", ".join(f"{key} {n:,}" for key, n in counts.items()))
    return [*lines, *_stage_lines(report), *_cell_lines(report)]


def _stage_lines(report: LogReport) -> list[str]:
    if not report.stages:
        return []
    head = "stage          turns      mean       p50       p99   share"
    return ["", head, *(
        f"{s.stage:<12} {s.n:>7,} {_ms(s.mean_s)} {_ms(s.p50_s)} {_ms(s.p99_s)}  {s.share_ratio:6.1%}" for s in report.stages
    )]  # fmt: skip


def _cell_lines(report: LogReport) -> list[str]:
    if not report.cells:
        return []
    head = "cell                           turns   share  evidence      off grid       x      TTFT      TPOT"
    weak = sum(cell.n for cell in report.cells if cell.evidence in WEAK)
    shares = (
        f"{report.insufficient_ratio or 0:.1%} in insufficient cells, {report.off_grid_ratio or 0:.1%} off the grid, "
        f"{weak:,} on weak evidence"
    )
    return [
        "",
        f"{counted(report.n_table_decisions, 'decision')} of the table in {counted(len(report.cells), 'cell')}; {shares}",
        head,
        *(
            f"{c.cell:<28} {c.n:>7,} {c.share_ratio:7.1%}  {c.evidence:<12} {c.n_off_grid:>9,} "
            f"{'      -' if c.x_ratio is None else f'{c.x_ratio:7.2f}'} {_ms(c.mean_ttft_s)} {_ms(c.mean_tpot_s)}"
            for c in report.cells
        ),
    ]


def _ms(seconds: float | None) -> str:
    return "        -" if seconds is None else f"{seconds * 1e3:6.2f} ms"
