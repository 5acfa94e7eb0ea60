"""``table check``: a table against the traffic of a run or of a router, and what should be measured again.

Window means of latencies in every cell are compared with the table's (``analysis.drift``); the sweeps that are written hold the
drifted cells and the traffic that no cell was measured for, nothing else. A workload that no sweep here can name is replaced by
one made of the turns that were seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from ppd_bench.analysis.confidence import MIN_REPEATS
from ppd_bench.analysis.drift import TURN_FIELDS, DriftOptions, DriftReport, check_drift
from ppd_bench.analysis.metrics import floats, labels, with_latencies
from ppd_bench.core.errors import SpecError, WrongDomain
from ppd_bench.core.point import Point
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.table import Cell, DecisionTable
from ppd_bench.report.units import counted
from ppd_bench.runner.router_log import damaged_lines, router_turns
from ppd_bench.runner.runs import Run, open_run
from ppd_bench.runner.summaries import SUMMARY_COLUMNS, summaries_of, trusted_points
from ppd_bench.runner.tables import load_table
from ppd_bench.store.atomic import make_folder, write_bytes
from ppd_bench.store.read import read_records
from ppd_bench.workload.library import find_workload

MIN_OUTSIDE_SHARE = 0.05
"""Of the turns outside the domain, that a place of its own must hold to be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What was asked: the turns of a run folder or of a router's decision log, one of them. ``window_s``: unit of the tests.

    ``w_ttft``, ``w_tpot``: the weights that the router was given beside the table; null: the table's own.
    """

    table: Path
    w_ttft: float | None = None
    w_tpot: float | None = None
    records: Path | None = None
    router_log: Path | None = None
    options: DriftOptions = DriftOptions()
    window_s: float = 30.0
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """``lines``: findings in words. ``paths``: the report as JSON, then sweeps and workloads to measure again, if any."""

    report: DriftReport
    lines: tuple[str, ...]
    paths: tuple[Path, ...]


def check_table(request: CheckRequest) -> CheckResult:
    """Check, and write ``drift.json`` and the sweeps.

    Raises:
        SpecError: not exactly one source of turns, or a number that cannot be used.
        WrongDomain: the turns are of another layout, model, GPU or table.
    """
    _check(request)
    table = load_table(request.table, w_ttft=request.w_ttft, w_tpot=request.w_tpot)
    source = request.records or request.router_log
    assert source is not None
    if request.records is not None:
        run = open_run(request.records)
        turns = turns_of_run(run, table, request.window_s)
        what = (f"turns of run {run.manifest.name}, {run.evidence}", *_left_out(run, table))
    else:
        turns = turns_of_log(router_turns(source), table, request.window_s, source)
        n_damaged = damaged_lines(source)
        left_out = [f"{counted(n_damaged, 'line')} of the log left out, because unreadable"] if n_damaged else []
        what = (f"turns of the router log {source}", *left_out)
    report = check_drift(table, turns, request.options)
    folder = request.out or source / "drift"
    make_folder(folder)
    sweeps = remeasure(table, report, turns, folder)
    path = folder / "drift.json"
    write_bytes(path, _json(table, report, sweeps).encode())
    for file, text in sweeps.items():
        write_bytes(file, text.encode())
    lines = tuple(_lines(table, report, request.options, what))
    return CheckResult(report=report, lines=lines, paths=(path, *sweeps))


def _check(request: CheckRequest) -> None:
    problems = request.options.problems()
    if (request.records is None) == (request.router_log is None):
        problems.append("command line: give either --records RUN or --router-log FOLDER")
    if not 0 < request.window_s < math.inf:
        problems.append(f"command line: --window {request.window_s:g}: seconds above 0 are needed")
    if problems:
        raise SpecError(problems)


# -- turns ---------------------------------------------------------------------------------------------------------------


def turns_of_run(run: Run, table: DecisionTable, window_s: float) -> pd.DataFrame:
    """Follow-up turns of the points of the table's layout, ``analysis.drift.TURN_FIELDS``, without points that are no evidence.

    Raises:
        WrongDomain: no point is of the table's layout, or they are of another model or GPU.
        SpecError: no point of the layout measured what it should.
    """
    every = _points_of(run, table)
    trusted = {point.point_id for point in trusted_points(run, summaries_of(run))}
    points = {point_id: point for point_id, point in every.items() if point_id in trusted}
    if every and not points:
        raise SpecError(
            f"{run.path}: every point of layout {table.domain.layout} is invalid; see the run's page for why"
        )
    if not points:
        raise WrongDomain(f"{run.path}: holds no point of layout {table.domain.layout}, which the table is for")
    for point in points.values():
        table.check_domain(topology=parse_topology(point.topology), model=point.model, gpu=point.gpu)
    records = read_records(run.path, columns=SUMMARY_COLUMNS)
    kept = with_latencies(records[records["point_id"].isin(list(points)) & (records["turn"] >= 2)]).reset_index(
        drop=True
    )
    number = {point_id: i for i, point_id in enumerate(points)}
    place = kept["point_id"].map(number).to_numpy(dtype=np.int64)
    qps = kept["point_id"].map({point_id: p.qps for point_id, p in points.items()}).to_numpy(dtype=float)
    # Points are apart in time, and so are their windows.
    stretch = np.floor(floats(kept, "scheduled_s") / window_s)
    session = [f"{a} {b}" for a, b in zip(place, kept["session_id"], strict=True)]
    frame = _ok_alone(kept).assign(qps=qps, session=session, x=(kept["route"] == "local").astype(int), at=place)
    frame["window"] = pd.factorize(pd.Series(list(zip(place, stretch, strict=True))))[0]
    frame = _in_cells(frame[kept["route"].isin(["local", "pd", "pd_readback"])], table)
    return frame.sort_values(["at", "scheduled_s"], kind="stable")[list(TURN_FIELDS)]


def _ok_alone(turns: pd.DataFrame) -> pd.DataFrame:
    """A failed turn may have a first token; the table's means are of turns that succeeded."""
    ok = labels(turns, "status", "ok")
    return turns.assign(**{name: np.where(ok, floats(turns, name), math.nan) for name in ("ttft_s", "tpot_s")})


def _points_of(run: Run, table: DecisionTable) -> dict[str, Point]:
    return {p.point_id: p for p in run.points if parse_topology(p.topology).layout.name == table.domain.layout}


def _left_out(run: Run, table: DecisionTable) -> list[str]:
    ours = _points_of(run, table)
    n_invalid = len(ours.keys() - {point.point_id for point in trusted_points(run, summaries_of(run))})
    return [f"{n_invalid} of {len(ours):,} points left out, because they are invalid"] if n_invalid else []


def _in_cells(turns: pd.DataFrame, table: DecisionTable) -> pd.DataFrame:
    keys, covered = [], []
    columns = (turns[name] for name in ("context_tokens", "input_tokens", "output_tokens", "qps"))
    for context, n_in, n_out, qps in zip(*columns, strict=True):
        context, n_in, n_out = int(context), int(n_in), int(n_out)
        found = table.lookup(context_tokens=context, input_tokens=n_in, output_tokens=n_out, qps=qps)
        keys.append(found.key)
        covered.append(table.covers(context_tokens=context, input_tokens=n_in, output_tokens=n_out, qps=qps))
    return turns.assign(cell=keys, covered=covered)


def turns_of_log(rows: pd.DataFrame, table: DecisionTable, window_s: float, folder: Path) -> pd.DataFrame:
    """Follow-up turns that this table decided, as a router logged them; cells are those that the router named.

    Raises:
        WrongDomain: the log holds no decision of this table.
    """
    ours = rows[(rows["table_hash"] == table.content_hash) & rows["x"].notna()].reset_index(drop=True)
    if ours.empty:
        seen = ", ".join(sorted(set(rows["table_hash"].dropna().astype(str)))) or "no table"
        raise WrongDomain(
            f"{folder}: holds no follow-up turn that table {table.content_hash} decided; it was decided by {seen}; give "
            "the table that the router obeyed, and its --w-ttft and --w-tpot where it had any"
        )
    frame = _ok_alone(with_latencies(ours))
    level = {cell.key: cell.qps for cell in table.cells}
    return frame.assign(
        x=frame["x"].astype(int),
        window=np.floor(floats(frame, "time_unix_s") / window_s).astype(np.int64),
        session=frame["session_id"],
        covered=frame["off_grid"].isna(),
        qps=frame["cell"].map(level).astype(float),
        at=floats(frame, "time_unix_s"),
    ).sort_values("at", kind="stable")[list(TURN_FIELDS)]


# -- what to measure again -----------------------------------------------------------------------------------------------


def remeasure(table: DecisionTable, report: DriftReport, turns: pd.DataFrame, folder: Path) -> dict[Path, str]:
    """Files to write, sweeps before workloads: the drifted cells, and where traffic outside the domain is.

    Every sweep is a full product of workloads and rates, and together they hold exactly the cells wanted, in as few files as
    grouping by workloads or by rates gives.
    """
    wanted: dict[tuple[str, float], None] = {}
    cells = {cell.key: cell for cell in table.cells}
    seen: list[_Seen] = []
    for key in report.drifted_cells:
        named = [name for name in cells[key].workloads if _known(name)]
        wanted |= dict.fromkeys((name, cells[key].qps) for name in named)
        if len(named) < len(cells[key].workloads):
            seen.append(_seen_workload(key, turns[turns["cell"] == key], cells[key].qps))
    if report.outside.drifted:
        seen += _outside_workloads(turns, cells)
    files = {folder / f"{found.name}.yaml": found.text for found in seen}
    wanted |= dict.fromkeys((str(folder / f"{found.name}.yaml"), found.qps) for found in seen)
    longest = max((found.n_tokens for found in seen), default=0)
    sweeps = {
        folder / f"remeasure-{i}.yaml": _sweep(table, f"remeasure-{i}", names, rates, longest)
        for i, (names, rates) in enumerate(products(list(wanted)), 1)
    }
    return {**sweeps, **files}


def products(wanted: Sequence[tuple[str, float]]) -> list[tuple[list[str], list[float]]]:
    """The (workload, QPS) as full products of workloads and rates, in as few as one of the two groupings gives."""
    return min((_products(wanted, by) for by in (0, 1)), key=len)


def _products(wanted: Iterable[tuple[str, float]], by: int) -> list[tuple[list[str], list[float]]]:
    """The same (workload, QPS) as full products: grouped by what has the same rates (``by`` 0) or the same workloads (1)."""
    partners: dict[Any, set[Any]] = {}
    for pair in wanted:
        partners.setdefault(pair[by], set()).add(pair[1 - by])
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for key, others in partners.items():
        groups.setdefault(tuple(sorted(others)), []).append(key)
    found = [(sorted(keys), list(others)) for others, keys in groups.items()]
    return [(keys, others) if by == 0 else (others, keys) for keys, others in found]


class _Seen(NamedTuple):
    """A workload made of what was seen: the text of its file, its rate, and the tokens of its longest prompt with answer."""

    name: str
    text: str
    qps: float
    n_tokens: int


def _known(workload: str) -> bool:
    """Whether a sweep here can name it; the table does not say from which file it came."""
    try:
        find_workload(workload)
    except SpecError:
        return False
    return True


def _outside_workloads(turns: pd.DataFrame, cells: dict[str, Cell]) -> list[_Seen]:
    """One per place that holds enough of what is outside the domain."""
    outside = turns[~turns["covered"].astype(bool)]
    groups = [(str(key), group) for key, group in outside.groupby("cell", sort=True)]
    return [
        _seen_workload(key, group, cells[key].qps)
        for key, group in groups
        if len(group) >= MIN_OUTSIDE_SHARE * len(outside)
    ]


def _seen_workload(key: str, turns: pd.DataFrame, level: float) -> _Seen:
    """Two turns with the medians of these follow-up turns; ``level`` is the rate where the turns do not tell it."""
    context, n_in, n_out = (max(1, int(turns[f"{name}_tokens"].median())) for name in ("context", "input", "output"))
    first_out = min(n_out, max(1, context // 2))
    name = "seen-" + key.replace("/", "-")
    content = {
        "name": name,
        "description": f"Medians of {len(turns)} follow-up turns that were seen in cell {key}.",
        "category": "prefill_heavy" if n_in > 2 * n_out else "decode_heavy" if n_out > 2 * n_in else "balanced",
        "turns": [
            {"input_tokens": max(1, context - first_out), "output_tokens": first_out},
            {"input_tokens": n_in, "output_tokens": n_out},
        ],
    }
    qps = float(f"{turns['qps'].median():.3g}") if turns["qps"].notna().any() else level
    return _Seen(name, yaml.safe_dump(content, sort_keys=False), qps, context + n_in + n_out)


def _sweep(table: DecisionTable, name: str, workloads: Sequence[str], rates: Sequence[float], longest: int) -> str:
    domain = table.domain
    engine: dict[str, Any] = {"handoff": domain.handoff, "kv_connector": domain.kv_connector}
    if longest > 8192:
        engine["max_model_len"] = 1 << (longest - 1).bit_length()
    content = {
        "name": name,
        "description": f"Cells of table {table.content_hash} to measure again.",
        "gpus": parse_topology(domain.baseline).n_gpus,
        "gpu": domain.gpu,
        "model": domain.model,
        "topologies": [domain.baseline, domain.candidate],
        "workloads": list(workloads),
        "qps": list(rates),
        "timeout": domain.timeout_s,
        "repeats": MIN_REPEATS,
        "engine": engine,
    }
    return yaml.safe_dump(content, sort_keys=False)


# -- words ---------------------------------------------------------------------------------------------------------------


def _lines(table: DecisionTable, report: DriftReport, options: DriftOptions, what: Sequence[str]) -> Iterable[str]:
    """``what``: which turns these are, then what is to be known of them."""
    n_cells = report.cells["cell"].nunique()
    yield (
        f"table {table.content_hash} of {table.domain.layout}, {table.domain.executor}, against {what[0]}: "
        f"{report.n_turns:,} follow-up turns in {n_cells} of its cells; a "
        f"false alarm on the whole table has a chance of {options.alpha:g} at most, however often it is checked"
    )
    yield from what[1:]
    if report.n_failed:
        yield (
            f"{report.n_failed:,} of the {report.n_turns:,} turns failed: they are in no latency below, and whether more fail "
            "than in the table is not tested"
        )
    for row in report.cells[report.cells["drifted"]].to_dict("records"):
        yield (
            f"drift: {row['cell']}, x={row['x']}: mean {row['metric'].upper()} {1e3 * row['seen_s']:.4g} ms where the table has "
            f"{1e3 * row['table_s']:.4g} ms; told from +-{options.tolerance_ratio:.0%} after {row['at']:.0f} windows"
        )
    if not report.drifted_cells:
        yield f"no cell is further from the table than {options.tolerance_ratio:.0%}, as far as its windows can tell"
    outside = report.outside
    verdict = "more than" if outside.drifted else "not told from"
    yield (
        f"{outside.n_outside:,} of {outside.n:,} conversations lie outside what the table's sweep saw: {verdict} the tolerated "
        f"{options.outside_ratio:.0%}"
    )
    if report.unmeasured:
        yield f"turns in cells that the sweep did not visit: {_counts(report.unmeasured)}"
    if report.unseen:
        yield f"{len(report.unseen)} of the cells that it visited met no traffic"


def _counts(found: dict[str, int]) -> str:
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(ranked) - 5} more" if len(ranked) > 5 else ""
    return ", ".join(f"{key} {n:,}" for key, n in ranked[:5]) + more


def _json(table: DecisionTable, report: DriftReport, sweeps: dict[Path, str]) -> str:
    def plain(value: object) -> object:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value.item() if isinstance(value, np.generic) else value

    content = {
        "table": table.content_hash,
        "threshold": report.threshold,
        "n_turns": report.n_turns,
        "n_failed": report.n_failed,
        "cells": [{str(k): plain(v) for k, v in row.items()} for row in report.cells.to_dict("records")],
        "outside": {"n": report.outside.n, "n_outside": report.outside.n_outside, "evidence": report.outside.evidence,
                    "at": report.outside.at},
        "unseen": list(report.unseen),
        "unmeasured": report.unmeasured,
        "sweeps": [path.name for path in sweeps],
    }  # fmt: skip
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
