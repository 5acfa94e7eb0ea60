"""How the visited cells of a decision table are judged, and what is doubtful about a table.

Rules, in this order:

1. A side is up when its success ratio is at or above the bound. None up: insufficient.
2. A mean of a side that is up is missing, NaN or not above 0: insufficient.
3. One side up: it wins. (A failed side therefore never wins.)
4. Both up: Equation 1. Local when S > 0, else pd.
5. With enough repeats for an interval (``analysis.confidence``), S must be told from 0 beside all other cells of the table;
   where it cannot be, the cell is a tie. With fewer, the cell says that it has no interval.

An insufficient cell and a tie answer with the table's fallback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ppd_bench.analysis.confidence import (
    FALSE_DISCOVERY_RATIO,
    MIN_REPEATS,
    discoveries,
    half_width,
    probability_above_zero,
    score_se,
)
from ppd_bench.analysis.metrics import Flags, Floats, score
from ppd_bench.policy.table import (
    Cell,
    Certainty,
    DecisionTable,
    Domain,
    Evidence,
    Interval,
    Rule,
    Rules,
    Side,
    Weights,
)

Place = tuple[str, str, float]
"""Context class, workload type and QPS of a cell."""


class _Verdict(NamedTuple):
    """What rules 1 to 4 say: no side where evidence is insufficient."""

    side: Side | None
    rule: Rule
    score: float | None


class _Spread(NamedTuple):
    """Per cell, NaN without enough repeats: half widths of intervals, P(S > 0), and whether the sign of S is certain."""

    ttft: Floats
    tpot: Floats
    score: Floats
    x0_success: Floats
    x1_success: Floats
    chance: Floats
    sure: Flags


def judged(cells: Mapping[Place, Cell], weights: Weights, rules: Rules, domain: Domain) -> dict[Place, Cell]:
    """Apply the module's rules to all visited cells of a table, which are compared together."""
    given = list(cells.values())
    verdicts = [_verdict(cell, weights, rules) for cell in given]
    spread = _spread(given, verdicts, weights)
    final = [_final(i, cell, verdicts[i], spread, rules, domain) for i, cell in enumerate(given)]
    return dict(zip(cells, final, strict=True))


def _spread(cells: list[Cell], verdicts: list[_Verdict], weights: Weights) -> _Spread:
    n = np.array([c.n_repeats for c in cells], dtype=float)
    ttft, tpot, correlation, success0, success1 = (
        _column([getattr(c, name) for c in cells])
        for name in ("delta_ttft_se", "delta_tpot_se", "delta_correlation", "success_x0_se", "success_x1_se")
    )
    s_se = score_se(ttft, tpot, correlation, weights.w_ttft, weights.w_tpot)
    chance = probability_above_zero(_column([v.score for v in verdicts]), s_se, n)
    sure, asked = np.zeros(len(cells), dtype=np.bool_), ~np.isnan(chance)
    sure[asked] = discoveries(chance[asked])
    return _Spread(
        ttft=half_width(ttft, n),
        tpot=half_width(tpot, n),
        score=half_width(s_se, n),
        x0_success=half_width(success0, n),
        x1_success=half_width(success1, n),
        chance=chance,
        sure=sure,
    )


def _column(values: Sequence[float | None]) -> Floats:
    return np.array([math.nan if v is None else v for v in values], dtype=float)


def _final(i: int, cell: Cell, verdict: _Verdict, spread: _Spread, rules: Rules, domain: Domain) -> Cell:
    """Cell number ``i`` with its verdict, its intervals and its certainty."""
    evidence: Evidence = domain.executor if verdict.side else "insufficient"
    certainty = _certainty(i, cell, verdict, spread, rules)
    return replace(
        cell,
        decision=rules.fallback if certainty == "tie" or verdict.side is None else verdict.side,
        evidence=evidence,
        rule=verdict.rule,
        score=verdict.score,
        delta_ttft_interval=_around(cell.delta_ttft, spread.ttft[i]),
        delta_tpot_interval=_around(cell.delta_tpot, spread.tpot[i]),
        score_interval=_around(verdict.score, spread.score[i]),
        probability=None if math.isnan(spread.chance[i]) else float(spread.chance[i]),
        certainty=certainty,
    )


def _around(figure: float | None, half: float) -> Interval | None:
    return None if figure is None or not math.isfinite(half) else (float(figure - half), float(figure + half))


def _certainty(i: int, cell: Cell, verdict: _Verdict, spread: _Spread, rules: Rules) -> Certainty | None:
    if verdict.side is None:
        return None
    successes = (
        _around(cell.success_x0_ratio, spread.x0_success[i]),
        _around(cell.success_x1_ratio, spread.x1_success[i]),
    )
    by_score = verdict.rule == "equation1"
    if None in successes or (by_score and math.isnan(spread.chance[i])):
        return "no_interval"
    if by_score and not spread.sure[i]:
        return "tie"
    doubted = any(low < rules.success_bound <= high for low, high in filter(None, successes))
    return "success_unclear" if doubted else "decided"


def _verdict(cell: Cell, weights: Weights, rules: Rules) -> _Verdict:
    """Rules 1 to 4 on one visited cell."""
    if cell.success_x0_ratio is None or cell.success_x1_ratio is None:
        return _Verdict(None, "undefined", None)
    x0_up, x1_up = (ratio >= rules.success_bound for ratio in (cell.success_x0_ratio, cell.success_x1_ratio))
    if not (x0_up or x1_up):
        return _Verdict(None, "both_failed", None)
    if (x0_up and not _defined(cell.ttft_x0_s, cell.tpot_x0_s)) or (
        x1_up and not _defined(cell.ttft_x1_s, cell.tpot_x1_s)
    ):
        return _Verdict(None, "undefined", None)
    if not (x0_up and x1_up):
        return _Verdict("local", "x0_failed", None) if x1_up else _Verdict("pd", "x1_failed", None)
    if cell.delta_ttft is None or cell.delta_tpot is None:
        return _Verdict(None, "undefined", None)
    s = score(cell.delta_ttft, cell.delta_tpot, weights.w_ttft, weights.w_tpot)
    return _Verdict("local" if s > 0 else "pd", "equation1", s)


def _defined(*means: float | None) -> bool:
    return all(mean is not None and mean > 0 for mean in means)


def doubts(*tables: DecisionTable) -> list[str]:
    """Warnings: visited cells whose decision is uncertain, each with advice; empty where all are decided.

    Tables of which the same is to be said share a line.
    """
    layouts: dict[str, list[str]] = {}
    for table in tables:
        for text in _doubts(table):
            layouts.setdefault(text, []).append(table.domain.layout)
    return [f"{', '.join(names)}: {text}" for text, names in layouts.items()]


def _doubts(table: DecisionTable) -> list[str]:
    kinds: tuple[tuple[Certainty, str], ...] = (
        ("no_interval", _no_interval_text(table)),
        (
            "tie",
            f"the sign of S is not certain ({FALSE_DISCOVERY_RATIO:.0%} false discoveries among the table's cells allowed): "
            f"the fallback '{table.rules.fallback}' answers. More repeats can decide them",
        ),
        (
            "success_unclear",
            f"a side's success ratio cannot be told from the bound {table.rules.success_bound:g}. "
            "More repeats or longer points can tell",
        ),
    )
    known = [c for c in table.cells if c.visited and c.certainty]
    found = [(text, [c.key for c in known if c.certainty == kind]) for kind, text in kinds]
    return [f"{len(keys)} of {len(known)} cells with evidence: {text}: {_named(keys)}" for text, keys in found if keys]


def _no_interval_text(table: DecisionTable) -> str:
    fewest = min((c.n_repeats for c in table.cells if c.certainty == "no_interval"), default=0)
    needed = table.rules.min_repeats or MIN_REPEATS
    return (
        f"NO INTERVAL, because fewer than {needed} repeats stand behind them (fewest: {fewest}); by themselves "
        f"they do not say whether their decisions are more than noise. Sweep with repeats: {needed} or more"
    )


def _named(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
