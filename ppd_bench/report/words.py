"""The summary in words: plain sentences computed from the data, nothing said that the data does not say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd

from ppd_bench.policy.table import DecisionTable
from ppd_bench.report.configurations import ordered_configurations
from ppd_bench.report.findings import CELL, GOALS, Findings
from ppd_bench.report.units import counted, listed, number, percent, share

CLOSE_RATIO = 0.02
"""A winner that leads the second by less than this share is called close."""

FEW_CONVERSATIONS = 30
FAR_POINTS = 20.0
"""Percentage points between a computed and a published figure above which the page warns."""
N_FAR = 4
"""How many of these are named."""
"""Below this many conversations in a point, its p99 is in effect its maximum and a mean can rest on one burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A heading and its sentences, one per bullet."""

    title: str
    sentences: tuple[str, ...]


def in_words(
    found: Findings,
    deltas: pd.DataFrame | None,
    tables: Sequence[DecisionTable],
    published: pd.DataFrame | None = None,
) -> list[Passage]:
    """The summary: which split for which goal, what each choice costs, what failed, what is uncertain."""
    if found.values.empty:
        return [Passage(title="Nothing to summarise", sentences=("The run holds no points.",))]
    warnings = _published_doubts(found, published)
    return [
        *([Passage(title="Before you act on this", sentences=tuple(warnings))] if warnings else []),
        Passage(title="Which split for which goal", sentences=tuple(_choices(found))),
        Passage(title="What each choice costs", sentences=tuple(_prices(found))),
        Passage(title="Follow-up turns: prefill node or local?", sentences=tuple(_routes(found, deltas, tables))),
        Passage(title="What failed", sentences=tuple(_failed(found))),
        Passage(title="What is uncertain", sentences=tuple(_doubts(found, tables))),
    ]


def _choices(found: Findings) -> list[str]:
    picks = found.choices()
    if not picks:
        bound = percent(found.success_bound)
        return [f"No configuration reached {bound} successful turns in any cell, so nothing can be chosen."]
    lines = [_goal_line(found, goal, pick) for goal, pick in picks.items() if goal in GOALS]
    lines.append(_balance_line(found))
    if math.isfinite(found.different_winner_ratio):
        ratio = percent(found.different_winner_ratio)
        lines.append(f"TTFT and TPOT have different winners in {ratio} of the cells in which both have one.")
    return lines


def _balance_line(found: Findings) -> str:
    if found.balanced is None:
        return "Balanced: no configuration works in at least half of its cells, so none is named."
    return (
        f"Balanced: {found.balanced}. In its median cell none of the three goals is more than "
        f"{percent(found.costs[found.balanced].worst)} from the best (failed cells count as infinitely far)."
    )


def _goal_line(found: Findings, goal: str, pick: str) -> str:
    wins = found.wins(goal)
    line = f"Best {GOALS[goal].title}: {pick}, which wins {share(wins[pick], found.n_cells, 'cells')}."
    others = [f"{name} ({n})" for name, n in wins.items() if name != pick][:2]
    if others:
        line += f" Next: {listed(others)}."
    return line + _by_load(found, goal)


def _by_load(found: Findings, goal: str) -> str:
    """The commonest winner at each QPS, neighbours with one winner put together; nothing where load changes nothing."""
    won = found.won[found.won["goal"] == goal]
    at: dict[float, list[str]] = {}
    for qps, name in sorted(zip(won["qps"], won["configuration"], strict=True)):
        at.setdefault(float(qps), []).append(str(name))
    modal = [(qps, Counter(names).most_common(1)[0][0]) for qps, names in at.items()]
    told = []
    for name, run in groupby(modal, key=lambda pair: pair[1]):
        levels = [qps for qps, _ in run]
        told.append(f"{name} at QPS {levels[0]:g}" + (f" to {levels[-1]:g}" if len(levels) > 1 else ""))
    return f" Most frequent by load: {listed(told, most=8)}." if len({name for _, name in modal}) > 1 else ""


def _prices(found: Findings) -> list[str]:
    goals_of: dict[str, list[str]] = {}
    for goal, pick in found.choices().items():
        goals_of.setdefault(pick, []).append(goal)
    lines = [_price_line(found, pick, goals) for pick, goals in goals_of.items()]
    return lines or ["There is nothing to compare: no configuration works anywhere."]


def _price_line(found: Findings, pick: str, goals: Sequence[str]) -> str:
    cost = found.costs[pick]
    others = {name: gap for name, gap in cost.gaps.items() if name not in goals and math.isfinite(gap)}
    compared = listed([_gap_text(name, gap) for name, gap in others.items()])
    failing = f"it fails in {share(cost.n_failed, cost.n_cells, 'cells')}" if cost.n_failed else "it fails nowhere"
    typical = ", ".join(f"{g.noun} {g.show(found.typical(pick, name))}" for name, g in GOALS.items())
    told = listed(["balance" if goal == "balanced" else GOALS[goal].noun for goal in goals])
    start = f"{pick} (chosen for {told}): "
    return start + (f"in its median cell {compared}; " if compared else "") + f"{failing}. Its medians: {typical}."


def _gap_text(goal: str, gap: float) -> str:
    noun = GOALS[goal].noun
    if gap < 0.0005:
        return f"{noun} equals the best"
    if goal == "throughput":
        return f"{noun} is {percent(gap)} below the best"
    return f"{noun} is {percent(gap)} above the best" if gap < 1 else f"{noun} is {number(1 + gap)} times the best"


def _routes(found: Findings, deltas: pd.DataFrame | None, tables: Sequence[DecisionTable]) -> list[str]:
    """One line per pair: what the deltas say and what its decision table makes of them."""
    changes = {} if deltas is None else _changes(deltas, found.success_bound)
    decisions = {(t.domain.baseline, t.domain.candidate): _decisions(t) for t in tables}
    pairs = dict.fromkeys((*changes, *decisions))
    if not pairs:
        return ["The run holds no pair of configurations that differ only in where follow-up turns are prefilled."]
    start = (
        "What changes when follow-up turns are prefilled on their decode node (x = 1) instead of through a prefill "
        "node (x = 0), for their mean TTFT and mean TPOT, in the median of the cells where both work:"
    )
    told = [[part for part in (changes.get(pair), decisions.get(pair)) if part] for pair in pairs]
    return [start, *(f"{x0} to {x1}: {'; '.join(parts)}." for (x0, x1), parts in zip(pairs, told, strict=True))]


def _changes(deltas: pd.DataFrame, success_bound: float) -> dict[tuple[str, str], str]:
    both_work = deltas[["success_x0_ratio", "success_x1_ratio"]].min(axis=1) >= success_bound
    known = deltas[both_work].dropna(subset=["delta_ttft", "delta_tpot"])
    told = {}
    for arms, rows in known.groupby(["baseline", "candidate"], sort=False):
        ttft, tpot = float(rows["delta_ttft"].median()), float(rows["delta_tpot"].median())
        # delta_ttft is positive where local is better, that is, where TTFT falls.
        told[str(arms[0]), str(arms[1])] = f"TTFT {_signed(-ttft)}, TPOT {_signed(tpot)} ({len(rows)} cells)"
    return told


def _decisions(table: DecisionTable) -> str:
    decided = [c for c in table.cells if c.visited and c.evidence != "insufficient"]
    local = share(sum(c.decision == "local" for c in decided), len(decided), "decided cells")
    weights = table.weights
    return f"its table says local in {local} at w_ttft = {weights.w_ttft:g}, w_tpot = {weights.w_tpot:g}"


def _signed(ratio: float) -> str:
    text = percent(abs(ratio))
    return text if text == percent(0.0) else f"{'+' if ratio > 0 else '−'}{text}"


def _failed(found: Findings) -> list[str]:
    bound = percent(found.success_bound)
    if not found.failures:
        return [f"Nothing: every configuration had at least {bound} successful turns in every cell."]
    lines = [f"A configuration fails in a cell when fewer than {bound} of its turns succeed or its result is invalid."]
    alike: dict[str, list[str]] = {}
    names = ordered_configurations(found.summaries)
    for name in [n for n in names if n in found.failures]:
        alike.setdefault(_failure_text(found, name), []).append(name)
    for text, group in alike.items():
        lines.append(f"{listed(group, most=20)}: {'each ' if len(group) > 1 else ''}{text}")
    clean = [n for n in names if n not in found.failures]
    lines.append(f"Without failures: {listed(clean, most=20)}." if clean else "No configuration is without failures.")
    return lines


def _failure_text(found: Findings, name: str) -> str:
    """How often, from which load on, and where most."""
    failing = {qps: n for qps, n in found.failures[name].items() if n}
    first, most = min(failing), max(failing, key=lambda qps: failing[qps])
    text = f"fails in {share(sum(failing.values()), found.costs[name].n_cells, 'cells')}, first at QPS {first:g}"
    text += f" ({failing[first]} of {counted(found.n_workloads(first), 'workload')})"
    return (
        f"{text}, most at QPS {most:g} ({failing[most]} of {found.n_workloads(most)})." if most != first else f"{text}."
    )


def _doubts(found: Findings, tables: Sequence[DecisionTable]) -> list[str]:
    checks = (_executor_doubt, _repeat_doubt, _size_doubt, _close_doubt, _tie_doubt, _invalid_doubt)
    lines = [line for check in checks if (line := check(found))]
    return lines + _table_doubts(tables)


def _published_doubts(found: Findings, published: pd.DataFrame | None) -> list[str]:
    """Where the run contradicts the measured study most, in words, so that nobody has to find it in a table below."""
    if published is None:
        return []
    known = published.dropna(subset="computed")
    distance = (known["computed"] - known["published"]).abs()
    far = known[distance > FAR_POINTS]
    if far.empty:
        return []
    worst = far.loc[distance[far.index].sort_values(ascending=False, kind="stable").index].head(N_FAR)
    told = [
        f"{str(r['table']).partition(':')[0]}, {r['row']} {r['column']}: {r['published']:g} % published, "
        f"{r['computed']:.1f} % here"
        for r in worst.to_dict("records")
    ]
    return [
        f"This run contradicts the paper's measured study: {len(far)} of {len(known)} comparable figures differ by more than "
        f"{FAR_POINTS:g} points, most of all {'; '.join(told)}. All are in the table of published figures below. "
        f"Do not choose a split by these {found.evidence} winners alone."
    ]


def _executor_doubt(found: Findings) -> str:
    if set(found.summaries["gpu"]) == {"cpu"}:
        return "The engines, or the model of them, share a CPU: this proves paths and decides nothing about GPUs."
    if "simulated" not in found.evidence:
        return ""
    return "These numbers come from a simulator, not from GPUs. Measure the candidates before acting on them."


def _repeat_doubt(found: Findings) -> str:
    n = int(found.summaries["repeat"].nunique())
    if n > 1:
        return ""
    return "Every point ran once. There are no confidence intervals, and small differences may be chance."


def _size_doubt(found: Findings) -> str:
    first = found.summaries[found.summaries["slice"] == "turn1"]
    few = first[first["n_scheduled"] < FEW_CONVERSATIONS]
    if few.empty:
        return ""
    levels = listed([f"{q:g}" for q in sorted(few["qps"].unique())], most=10)
    return (
        f"At QPS {levels} points have fewer than {FEW_CONVERSATIONS} conversations (as few as "
        f"{int(few['n_scheduled'].min())}); their 99th percentiles are little more than their largest value."
    )


def _close_doubt(found: Findings) -> str:
    told = []
    for name, goal in GOALS.items():
        second = found.gaps.dropna(subset=[name]).sort_values(name).groupby(CELL)[name].nth(1)
        close = int((second.to_numpy() < CLOSE_RATIO).sum())
        if close:
            told.append(f"{goal.noun} in {share(close, len(second), 'cells')}")
    if not told:
        return ""
    return f"The winner leads the second by less than {percent(CLOSE_RATIO)}: {listed(told)}. Call it equal."


def _tie_doubt(found: Findings) -> str:
    tied = int((found.won["n_tied"] > 1).sum())
    if not tied:
        return ""
    return f"{share(tied, len(found.won), 'wins')} are exact ties; the first configuration of the run is named."


def _invalid_doubt(found: Findings) -> str:
    rows = found.summaries[(found.summaries["slice"] == "all") & ~found.summaries["valid"].astype(bool)]
    if rows.empty:
        return ""
    reasons = rows["invalid_reasons"].value_counts()
    told = listed([f"{reason or 'no reason given'} ({count})" for reason, count in reasons.items()])
    return f"{share(len(rows), found.n_points, 'points')} are invalid and win nothing: {told}."


def _table_doubts(tables: Sequence[DecisionTable]) -> list[str]:
    lines = []
    told = []
    for table in tables:
        visited = [c for c in table.cells if c.visited]
        unknown = sum(c.evidence == "insufficient" for c in visited)
        if unknown:
            arms = f"{table.domain.baseline} / {table.domain.candidate}"
            told.append(f"{arms} {unknown} of {len(visited)}, answered {table.rules.fallback}")
    if told:
        lines.append(f"Cells of the sweep for which a decision table has too little evidence: {'; '.join(told)}.")
    borrowed = [c for table in tables for c in table.cells if c.evidence == "extrapolated"]
    if borrowed:
        n_cells = sum(len(table.cells) for table in tables)
        contexts = listed(sorted({c.context for c in borrowed}))
        lines.append(
            f"No workload of the sweep visits {share(len(borrowed), n_cells, 'table cells')} (contexts: {contexts}); "
            "they borrow from the nearest context class and are marked extrapolated."
        )
    return lines
