"""From paired deltas to a decision table, and from a table to the same table under other weights.

Rules, in this order, for the cells that the grid visits:

1. A side is up when its success ratio is at or above the bound. None up: insufficient.
2. A mean of a side that is up is missing, NaN or not above 0: insufficient.
3. One side up: it wins. (A failed side therefore never wins.)
4. Both up: Equation 1. Local when S > 0, else pd.

An insufficient cell answers with the table's fallback. A context class that the grid does not visit borrows the cell of
the nearest class that it does visit (same type and QPS; the smaller class at equal distance), marked ``extrapolated``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from ppd_bench.analysis.metrics import delta_tpot, delta_ttft, score
from ppd_bench.analysis.pairing import DELTA_FIELDS, Pair
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point, content_hash
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.policy.axes import PAPER_CONTEXTS, PAPER_TYPES, Axes, WorkloadType
from ppd_bench.policy.table import Cell, DecisionTable, Domain, Evidence, Rule, Rules, Side, Weights, cell_key

SUCCESS_BOUND = 0.95
"""The paper counts a success ratio below 95 % as service degradation (Figure 4, Section 6.1)."""

MAX_UNKNOWN_RATIO = 0.25
"""Default share of visited cells that may be insufficient before a program refuses to start with the table."""

MAX_WEIGHT = 1e9
"""Far above any use, and low enough that no score overflows."""

_Place = tuple[str, str, float]
_MEANS = ("ttft_x0_s", "ttft_x1_s", "tpot_x0_s", "tpot_x1_s")
_SUCCESSES = ("success_x0_ratio", "success_x1_ratio")
_FIGURES = (*_MEANS, *_SUCCESSES)


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

    ``deltas`` has the fields of ``core.results.PairedDelta``; rows of other pairs are left out. The axes are the
    paper's context classes, and the turn-2 lengths and QPS levels of the pair's points, so every workload of the grid
    has its own place. Workloads that share a place are averaged with equal weight (means) and judged by the lower
    success; the cell names them all.

    Raises:
        SpecError: unusable weights or bounds, no multi-turn points of this pair, or points of more than one domain.
    """
    weights, rules = (
        Weights(w_ttft=float(w_ttft), w_tpot=float(w_tpot)),
        Rules(success_bound=float(success_bound), fallback=fallback, max_unknown_ratio=float(max_unknown_ratio)),
    )
    check_settings(weights, rules)
    names = (pair[0].name, pair[1].name)
    ours = [p for p in points if p.topology in names and p.policy.decider == "node" and len(p.workload.turns) > 1]
    domain, axes = _domain_of(pair, ours), _axes_of(ours)
    rows = deltas[(deltas["baseline"] == names[0]) & (deltas["candidate"] == names[1])]
    judged = {place: _judge(c, weights, rules, domain) for place, c in _raw_cells(rows, ours, axes).items()}
    return DecisionTable(
        domain=domain,
        axes=axes,
        weights=weights,
        rules=rules,
        inputs_hash=_inputs_hash(rows, ours),
        cells=_dense(judged, axes, rules),
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
    judged = {
        (c.context, c.type, c.qps): _judge(c, weights, table.rules, table.domain) for c in table.cells if c.visited
    }
    return replace(table, weights=weights, cells=_dense(judged, table.axes, table.rules), content_hash="")


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
            "a decision table needs a sweep of both arms with workloads of two turns or more"
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


def _turn2_lengths(workload: WorkloadSpec) -> tuple[int, int]:
    return workload.turns[1].input_tokens, workload.turns[1].output_tokens


def _place(workload: WorkloadSpec, qps: float, axes: Axes) -> _Place:
    context = axes.contexts[axes.context_index(workload.context_tokens(2))]
    kind = axes.types[axes.type_index(*_turn2_lengths(workload))]
    return context.name, kind.name, axes.qps[axes.qps_index(qps)]


def _raw_cells(rows: pd.DataFrame, points: Sequence[Point], axes: Axes) -> dict[_Place, Cell]:
    """The visited cells with their figures, not judged yet. A visited cell without deltas has nulls."""
    typed = rows.astype(dict.fromkeys(("qps", *_FIGURES), float))
    by_cell: dict[tuple[str, float], dict[Any, Any]] = {(r["workload"], r["qps"]): r for r in typed.to_dict("records")}
    missing: dict[Any, Any] = {**dict.fromkeys(_FIGURES, math.nan), "n_pairs": 0}
    visits: dict[_Place, dict[str, dict[Any, Any]]] = {}
    for p in points:
        found = by_cell.get((p.workload.name, float(p.qps)), missing)
        visits.setdefault(_place(p.workload, p.qps, axes), {})[p.workload.name] = found
    return {place: _raw_cell(place, seen) for place, seen in visits.items()}


def _raw_cell(place: _Place, seen: dict[str, dict[Any, Any]]) -> Cell:
    # A workload without figures makes the whole cell NaN: half of a cell's evidence is not the cell's.
    figures = {name: float(np.mean([row[name] for row in seen.values()])) for name in _MEANS}
    figures |= {name: float(np.min([row[name] for row in seen.values()])) for name in _SUCCESSES}
    figures["delta_ttft"] = delta_ttft(figures["ttft_x0_s"], figures["ttft_x1_s"])
    figures["delta_tpot"] = delta_tpot(figures["tpot_x0_s"], figures["tpot_x1_s"])
    known: dict[str, Any] = {name: _finite(value) for name, value in figures.items()}
    n_pairs = int(sum(row["n_pairs"] for row in seen.values()))
    return replace(_blank(place), workloads=tuple(sorted(seen)), n_pairs=n_pairs, **known)


def _blank(place: _Place) -> Cell:
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


def _judge(cell: Cell, weights: Weights, rules: Rules, domain: Domain) -> Cell:
    """Apply the module's four rules to one visited cell."""
    decision, rule, s = _verdict(cell, weights, rules)
    evidence: Evidence = domain.executor if decision else "insufficient"
    return replace(cell, decision=decision or rules.fallback, evidence=evidence, rule=rule, score=s)


def _verdict(cell: Cell, weights: Weights, rules: Rules) -> tuple[Side | None, Rule, float | None]:
    if cell.success_x0_ratio is None or cell.success_x1_ratio is None:
        return None, "undefined", None
    x0_up, x1_up = (ratio >= rules.success_bound for ratio in (cell.success_x0_ratio, cell.success_x1_ratio))
    if not (x0_up or x1_up):
        return None, "both_failed", None
    if (x0_up and not _defined(cell.ttft_x0_s, cell.tpot_x0_s)) or (
        x1_up and not _defined(cell.ttft_x1_s, cell.tpot_x1_s)
    ):
        return None, "undefined", None
    if not (x0_up and x1_up):
        return ("local", "x0_failed", None) if x1_up else ("pd", "x1_failed", None)
    if cell.delta_ttft is None or cell.delta_tpot is None:
        return None, "undefined", None
    s = score(cell.delta_ttft, cell.delta_tpot, weights.w_ttft, weights.w_tpot)
    return ("local" if s > 0 else "pd"), "equation1", s


def _defined(*means: float | None) -> bool:
    return all(mean is not None and mean > 0 for mean in means)


def _dense(judged: dict[_Place, Cell], axes: Axes, rules: Rules) -> tuple[Cell, ...]:
    """Every place of the axes: judged cells, borrowed cells, and cells on nothing at all with the fallback."""
    names = [c.name for c in axes.contexts]
    return tuple(
        judged.get((names[i], kind.name, qps)) or _borrowed(judged, names, i, kind.name, qps, rules)
        for i, kind, qps in product(range(len(names)), axes.types, axes.qps)
    )


def _borrowed(judged: dict[_Place, Cell], names: list[str], wanted: int, kind: str, qps: float, rules: Rules) -> Cell:
    nearest = sorted(range(len(names)), key=lambda i: (abs(i - wanted), i))
    source = next((judged[(names[i], kind, qps)] for i in nearest if (names[i], kind, qps) in judged), None)
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
