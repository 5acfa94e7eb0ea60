"""From paired deltas to a decision table, and from a table to the same table under other weights.

How a cell is judged is in ``analysis.judging``. A context class that the grid does not visit borrows the cell of the
nearest class that it does visit (same type and QPS; the smaller class at equal distance), marked ``extrapolated``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from ppd_bench.analysis.confidence import MIN_REPEATS
from ppd_bench.analysis.judging import Place, judged
from ppd_bench.analysis.metrics import Floats, delta_tpot, delta_ttft
from ppd_bench.analysis.pairing import DELTA_FIELDS, Pair
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point, content_hash
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.policy.axes import PAPER_CONTEXTS, PAPER_TYPES, Axes, WorkloadType
from ppd_bench.policy.table import (
    SCHEMA_VERSION,
    Cell,
    DecisionTable,
    Domain,
    Evidence,
    Rules,
    Side,
    Weights,
    cell_key,
)

SUCCESS_BOUND = 0.95
"""The paper counts a success ratio below 95 % as service degradation (Figure 4, Section 6.1)."""

MAX_UNKNOWN_RATIO = 0.25
"""Default share of visited cells that may be insufficient before a program refuses to start with the table."""

MAX_WEIGHT = 1e9
"""Far above any use, and low enough that no score overflows."""

_MEANS = ("ttft_x0_s", "ttft_x1_s", "tpot_x0_s", "tpot_x1_s")
_SUCCESSES = ("success_x0_ratio", "success_x1_ratio")
_DELTA_ERRORS = ("delta_ttft_se", "delta_tpot_se")
_SUCCESS_ERRORS = ("success_x0_se", "success_x1_se")
_FIGURES = (*_MEANS, *_SUCCESSES, *_DELTA_ERRORS, *_SUCCESS_ERRORS, "delta_correlation")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellChange:
    """A cell that two tables answer differently or on other evidence; null where a table lacks the cell."""

    key: str
    decision_a: str | None
    decision_b: str | None
    evidence_a: str | None
    evidence_b: str | None
    score_a: float | None
    score_b: float | None


def compile_table(
    deltas: pd.DataFrame,
    points: Sequence[Point],
    *,
    pair: Pair,
    w_ttft: float,
    w_tpot: float,
    success_bound: float = SUCCESS_BOUND,
    fallback: Side = "pd",
    max_unknown_ratio: float = MAX_UNKNOWN_RATIO,
) -> str:
    """The table file's text for one (x=0, x=1) pair: sorted keys, no timestamps, same inputs same bytes.

    ``deltas`` has the fields of ``core.results.PairedDelta``; rows of other pairs are left out, and a frame without the
    fields of repeats, as earlier versions wrote it, makes cells without intervals. The axes are the
    paper's context classes, and the turn-2 lengths and QPS levels of the pair's points, so every workload of the grid
    has its own place; recorded traffic has the place of its mean follow-up turn. Workloads that share a place are averaged
    with equal weight (means) and judged by the lower success; the cell names them all, and has the repeats of the workload
    that has fewest.

    Raises:
        SpecError: unusable weights or bounds, no multi-turn points of this pair, or points of more than one domain.
    """
    weights, rules = (
        Weights(w_ttft=float(w_ttft), w_tpot=float(w_tpot)),
        Rules(
            success_bound=float(success_bound),
            fallback=fallback,
            max_unknown_ratio=float(max_unknown_ratio),
            min_repeats=MIN_REPEATS,
        ),
    )
    check_settings(weights, rules)
    names = (pair[0].name, pair[1].name)
    ours = [p for p in points if p.topology in names and p.policy.decider == "node" and p.workload.has_cell]
    domain, axes = _domain_of(pair, ours), _axes_of(ours)
    rows = deltas[(deltas["baseline"] == names[0]) & (deltas["candidate"] == names[1])]
    rows = rows.reindex(columns=list(DELTA_FIELDS))
    cells = judged(_raw_cells(rows, ours, axes), weights, rules, domain)
    return DecisionTable(
        domain=domain,
        axes=axes,
        weights=weights,
        rules=rules,
        inputs_hash=_inputs_hash(rows, ours),
        cells=_dense(cells, axes, rules),
    ).to_json()


def reweigh(table_json: str, w_ttft: float, w_tpot: float) -> str:
    """The same table under other weights, decided from the means and success ratios in the file; no sweep is needed.

    Raises:
        TableError: the text is not a usable table.
        SpecError: unusable weights.
    """
    return reweighed(DecisionTable.from_json(table_json), w_ttft, w_tpot).to_json()


def reweighed(table: DecisionTable, w_ttft: float, w_tpot: float) -> DecisionTable:
    """``reweigh`` on a loaded table. The result has no content hash before it is written.

    Raises:
        SpecError: unusable weights.
    """
    weights = Weights(w_ttft=float(w_ttft), w_tpot=float(w_tpot))
    check_settings(weights, table.rules)
    visited = {(c.context, c.type, c.qps): c for c in table.cells if c.visited}
    rules = replace(table.rules, min_repeats=MIN_REPEATS)
    return replace(
        table,
        weights=weights,
        rules=rules,
        cells=_dense(judged(visited, weights, rules, table.domain), table.axes, rules),
        schema_version=SCHEMA_VERSION,
        content_hash="",
    )


def diff_tables(a: str, b: str) -> list[CellChange]:
    """Cells whose decision or evidence differ between two tables, or that only one has.

    Raises:
        TableError: one of the texts is not a usable table.
    """
    cells_a, cells_b = ({c.key: c for c in DecisionTable.from_json(text).cells} for text in (a, b))
    changes = [_change(key, cells_a.get(key), cells_b.get(key)) for key in dict.fromkeys((*cells_a, *cells_b))]
    return [c for c in changes if (c.decision_a, c.evidence_a) != (c.decision_b, c.evidence_b)]


def _change(key: str, a: Cell | None, b: Cell | None) -> CellChange:
    return CellChange(
        key=key,
        decision_a=a.decision if a else None,
        decision_b=b.decision if b else None,
        evidence_a=a.evidence if a else None,
        evidence_b=b.evidence if b else None,
        score_a=a.score if a else None,
        score_b=b.score if b else None,
    )


def check_settings(weights: Weights, rules: Rules) -> None:
    """Whether a table can be compiled with these.

    Raises:
        SpecError: every weight or bound that cannot be used.
    """
    bounds = {"success_bound": rules.success_bound, "max_unknown_ratio": rules.max_unknown_ratio}
    problems = [
        f"{name} is {value}: a number from 0 to {MAX_WEIGHT:g} is needed"
        for name, value in (("w_ttft", weights.w_ttft), ("w_tpot", weights.w_tpot))
        if not 0 <= value <= MAX_WEIGHT
    ]
    problems += [f"{k} is {v}: a ratio from 0 to 1 is needed" for k, v in bounds.items() if not 0 <= v <= 1]
    if not problems and weights.w_ttft == weights.w_tpot == 0:
        problems.append("w_ttft and w_tpot are both 0: at least one must be above 0, or nothing is asked for")
    if rules.fallback not in ("pd", "local"):
        problems.append(f"fallback is {rules.fallback!r}: allowed are 'pd' and 'local'")
    if problems:
        raise SpecError(problems)


def _domain_of(pair: Pair, points: Sequence[Point]) -> Domain:
    if not points:
        raise SpecError(
            f"no multi-turn points of {pair[0].name} and {pair[1].name} with the 'node' decider: "
            "a decision table needs a sweep of both arms with workloads of two turns or more that come at a rate"
        )
    domains = {
        Domain(
            model=p.model,
            gpu=p.gpu,
            layout=pair[0].layout.name,
            baseline=pair[0].name,
            candidate=pair[1].name,
            executor="simulated" if p.executor.evidence == "simulated" else "measured",
            engine_version=p.engine_version,
            kv_connector=p.engine.kv_connector,
            handoff=p.engine.handoff,
            timeout_s=float(p.timeout_s),
        )
        for p in points
    }
    if len(domains) > 1:
        raise SpecError(
            [f"the points belong to {len(domains)} domains; build one table for each:", *sorted(map(str, domains))]
        )
    return domains.pop()


def _axes_of(points: Sequence[Point]) -> Axes:
    found = dict.fromkeys(_turn2_lengths(p.workload) for p in points)
    known = [t for t in PAPER_TYPES if (t.input_tokens, t.output_tokens) in found]
    others = sorted(set(found) - {(t.input_tokens, t.output_tokens) for t in known})
    own = [WorkloadType(name=f"{i}to{o}", input_tokens=i, output_tokens=o) for i, o in others]
    return Axes(contexts=PAPER_CONTEXTS, types=(*known, *own), qps=tuple(sorted({float(p.qps) for p in points})))


def _followup(workload: WorkloadSpec) -> tuple[int, int, int]:
    assert workload.followup is not None, "points without follow-up turns are left out"
    return workload.followup


def _turn2_lengths(workload: WorkloadSpec) -> tuple[int, int]:
    _, new, output = _followup(workload)
    return new, output


def _place(workload: WorkloadSpec, qps: float, axes: Axes) -> Place:
    context = axes.contexts[axes.context_index(_followup(workload)[0])]
    kind = axes.types[axes.type_index(*_turn2_lengths(workload))]
    return context.name, kind.name, axes.qps[axes.qps_index(qps)]


def _raw_cells(rows: pd.DataFrame, points: Sequence[Point], axes: Axes) -> dict[Place, Cell]:
    """The visited cells with their figures, not judged yet. A visited cell without deltas has nulls."""
    typed = rows.astype(dict.fromkeys(("qps", *_FIGURES, "n_repeats"), float)).fillna({"n_repeats": 0.0})
    by_cell: dict[tuple[str, float], dict[Any, Any]] = {(r["workload"], r["qps"]): r for r in typed.to_dict("records")}
    missing: dict[Any, Any] = {**dict.fromkeys(_FIGURES, math.nan), "n_pairs": 0, "n_repeats": 0}
    visits: dict[Place, dict[str, dict[Any, Any]]] = {}
    for p in points:
        found = by_cell.get((p.workload.name, float(p.qps)), missing)
        visits.setdefault(_place(p.workload, p.qps, axes), {})[p.workload.name] = found
    return {place: _raw_cell(place, seen) for place, seen in visits.items()}


def _raw_cell(place: Place, seen: dict[str, dict[Any, Any]]) -> Cell:
    # A workload without figures makes the whole cell NaN: half of a cell's evidence is not the cell's.
    rows = list(seen.values())
    figures = {name: float(np.mean([row[name] for row in rows])) for name in _MEANS}
    figures |= {name: float(np.min([row[name] for row in rows])) for name in _SUCCESSES}
    figures["delta_ttft"] = delta_ttft(figures["ttft_x0_s"], figures["ttft_x1_s"])
    figures["delta_tpot"] = delta_tpot(figures["tpot_x0_s"], figures["tpot_x1_s"])
    figures |= _cell_errors(rows) | {name: float(np.max([row[name] for row in rows])) for name in _SUCCESS_ERRORS}
    known: dict[str, Any] = {name: _finite(value) for name, value in figures.items()}
    return replace(
        _blank(place),
        workloads=tuple(sorted(seen)),
        n_pairs=int(sum(row["n_pairs"] for row in rows)),
        n_repeats=int(min(row["n_repeats"] for row in rows)),
        **known,
    )


def _cell_errors(rows: list[dict[Any, Any]]) -> dict[str, float]:
    """Standard errors and correlation of a cell's deltas, from those of its workloads, whose seeds differ.

    A cell's delta is the mean of its workloads' deltas weighted with their share of the x=0 mean; the shares' own errors are
    left out. A cell of one workload has that workload's figures.
    """
    ttft, tpot = (
        _shares([row[mean] for row in rows]) * np.array([row[error] for row in rows])
        for mean, error in zip(("ttft_x0_s", "tpot_x0_s"), _DELTA_ERRORS, strict=True)
    )
    both = float(np.sum(np.array([row["delta_correlation"] for row in rows]) * ttft * tpot))
    ttft_se, tpot_se = float(np.sqrt(np.sum(ttft**2))), float(np.sqrt(np.sum(tpot**2)))
    correlation = both / (ttft_se * tpot_se) if ttft_se * tpot_se > 0 else 0.0 * both
    return {"delta_ttft_se": ttft_se, "delta_tpot_se": tpot_se, "delta_correlation": correlation}


def _shares(means: list[float]) -> Floats:
    total = sum(means)
    return np.array(means) / total if 0 < total < math.inf else np.full(len(means), math.nan)


def _blank(place: Place) -> Cell:
    context, kind, qps = place
    return Cell(
        key=cell_key(context, kind, qps),
        context=context,
        type=kind,
        qps=qps,
        workloads=(),
        decision="pd",
        evidence="insufficient",
        rule="unvisited",
        score=None,
        delta_ttft=None,
        delta_tpot=None,
        ttft_x0_s=None,
        ttft_x1_s=None,
        tpot_x0_s=None,
        tpot_x1_s=None,
        success_x0_ratio=None,
        success_x1_ratio=None,
        n_pairs=0,
    )


def _finite(value: float | np.floating) -> float | None:
    return float(value) if math.isfinite(value) else None


def _dense(cells: dict[Place, Cell], axes: Axes, rules: Rules) -> tuple[Cell, ...]:
    """Every place of the axes: judged cells, borrowed cells, and cells on nothing at all with the fallback."""
    names = [c.name for c in axes.contexts]
    return tuple(
        cells.get((names[i], kind.name, qps)) or _borrowed(cells, names, i, kind.name, qps, rules)
        for i, kind, qps in product(range(len(names)), axes.types, axes.qps)
    )


def _borrowed(cells: dict[Place, Cell], names: list[str], wanted: int, kind: str, qps: float, rules: Rules) -> Cell:
    nearest = sorted(range(len(names)), key=lambda i: (abs(i - wanted), i))
    source = next((cells[(names[i], kind, qps)] for i in nearest if (names[i], kind, qps) in cells), None)
    blank = _blank((names[wanted], kind, qps))
    if source is None:
        return replace(blank, decision=rules.fallback)
    evidence: Evidence = "insufficient" if source.evidence == "insufficient" else "extrapolated"
    return replace(
        source, key=blank.key, context=blank.context, workloads=(), evidence=evidence, borrowed_from=source.key
    )


def _inputs_hash(rows: pd.DataFrame, points: Sequence[Point]) -> str:
    """Hash of the deltas used and of the identities of the points behind them; row order does not matter."""
    figures = [[_plain(row[name]) for name in DELTA_FIELDS] for row in rows.to_dict("records")]
    return content_hash({"deltas": sorted(figures, key=str), "points": sorted(p.point_id for p in points)})


def _plain(value: object) -> object:
    if isinstance(value, (float, np.floating)):
        return _finite(value)
    return int(value) if isinstance(value, np.integer) else value
