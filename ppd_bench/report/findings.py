"""What figures, words and tables of the report are made of: winners, costs, failures and shares of one run.

Values, eligibility, winners, frontiers and shares come from ``analysis``; here they get the shape that a page needs,
and configurations are compared with the best one of each cell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ppd_bench.analysis import winners as contest
from ppd_bench.analysis.compile_table import SUCCESS_BOUND
from ppd_bench.analysis.paper_tables import different_winner_share
from ppd_bench.analysis.pareto import PANEL_FIELDS, panels
from ppd_bench.policy.table import DecisionTable
from ppd_bench.report.configurations import with_kinds
from ppd_bench.report.style import evidence_of
from ppd_bench.report.units import ms, tokens_per_s

CELL = ["workload", "qps"]
_KEY = [*CELL, "configuration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalText:
    """How a goal of ``analysis.winners.GOALS`` is named and shown."""

    title: str
    noun: str
    show: Callable[[float | None], str]


GOALS: dict[str, GoalText] = {
    "ttft": GoalText(title="mean TTFT, turn 2+", noun="TTFT", show=ms),
    "tpot": GoalText(title="mean TPOT, all turns", noun="TPOT", show=ms),
    "throughput": GoalText(title="throughput", noun="throughput", show=tokens_per_s),
}
"""The goals that the report is about, by name: those of the paper's Table 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a configuration gives away: per goal the median gap to the best of the cell, over its eligible cells.

    ``worst`` is the largest of these medians with failed cells counted as infinitely far: what 'balanced' minimises.
    """

    gaps: Mapping[str, float]
    worst: float
    n_cells: int
    n_failed: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """One run, judged. Frames are never changed.

    - ``summaries``: the run's, with ``kind`` (key of ``style.KINDS``).
    - ``values``: one row per (workload, qps, configuration): a column per goal, NaN where the configuration is not
      eligible for it, and ``works``: valid, with output, and enough successful turns.
    - ``gaps``: the same rows: per goal the distance to the best of the cell, a ratio (see ``gaps_to_best``).
    - ``costs``: by configuration.
    - ``won``: one row per cell and goal that has a winner: goal, workload, qps, configuration, kind, tied, n_tied.
    - ``failures``: by configuration and QPS: how many workloads do not work; configurations without failures left out.
    - ``different_winner_ratio``: share of cells whose TTFT and TPOT winners differ; NaN where no cell has both.
    """

    summaries: pd.DataFrame
    success_bound: float
    evidence: str
    values: pd.DataFrame
    gaps: pd.DataFrame
    costs: Mapping[str, Cost]
    won: pd.DataFrame
    failures: Mapping[str, Mapping[float, int]]
    different_winner_ratio: float

    @property
    def n_cells(self) -> int:
        return len(self.values[CELL].drop_duplicates())

    @property
    def n_points(self) -> int:
        return int(self.summaries["point_id"].nunique())

    def n_workloads(self, qps: float) -> int:
        """Workloads that the run has at this QPS."""
        return int(self.values.loc[self.values["qps"] == qps, "workload"].nunique())

    def wins(self, goal: str) -> dict[str, int]:
        """Cells won per configuration, most first, names at a tie."""
        counts = Counter(str(name) for name in self.won.loc[self.won["goal"] == goal, "configuration"])
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def typical(self, configuration: str, goal: str) -> float:
        """The median of a goal's value over the cells where the configuration is eligible; NaN where there are none."""
        return float(self.values.loc[self.values["configuration"] == configuration, goal].median())

    @property
    def balanced(self) -> str | None:
        """The configuration whose largest median gap is smallest; fewer failed cells break ties. Null without any."""
        usable = {name: cost for name, cost in self.costs.items() if math.isfinite(cost.worst)}
        return min(usable, key=lambda name: (usable[name].worst, usable[name].n_failed, name), default=None)

    def choices(self) -> dict[str, str]:
        """The configuration for each goal (most cells won, the smaller median gap at a tie), and ``balanced``."""
        picks: dict[str, str] = {}
        for goal in GOALS:
            wins = self.wins(goal)
            top = [name for name, n in wins.items() if n == max(wins.values())]
            if top:
                picks[goal] = min(top, key=lambda name: (self.costs[name].gaps[goal], name))
        return picks if self.balanced is None else {**picks, "balanced": self.balanced}


def find(summaries: pd.DataFrame, *, success_bound: float = SUCCESS_BOUND) -> Findings:
    """Judge the summaries of one run.

    Raises:
        SpecError: they hold more than one executor, model or GPU.
    """
    known = with_kinds(summaries)
    if known.empty:
        return _nothing(known, success_bound)
    values = _values(known, success_bound)
    gaps = gaps_to_best(values)
    return Findings(
        summaries=known,
        success_bound=success_bound,
        evidence=evidence_of(known),
        values=values,
        gaps=gaps,
        costs=_costs(values, gaps),
        won=_won(known, success_bound),
        failures=_failures(values),
        different_winner_ratio=float(different_winner_share(known)["value"].iloc[0]) / 100,
    )


def _nothing(summaries: pd.DataFrame, success_bound: float) -> Findings:
    values = pd.DataFrame(columns=[*_KEY, *GOALS, "works"])
    return Findings(
        summaries=summaries,
        success_bound=success_bound,
        evidence=evidence_of(summaries),
        values=values,
        gaps=values[[*_KEY, *GOALS]],
        costs={},
        won=pd.DataFrame(columns=["goal", *CELL, "configuration", "kind", "tied", "n_tied"]),
        failures={},
        different_winner_ratio=math.nan,
    )


def _values(summaries: pd.DataFrame, success_bound: float) -> pd.DataFrame:
    by_goal = {
        name: contest.cell_values(summaries, contest.GOALS[name], success_bound=success_bound).set_index(_KEY)
        for name in GOALS
    }
    columns = {name: cells["value"].where(cells["eligible"]) for name, cells in by_goal.items()}
    return pd.DataFrame({**columns, "works": by_goal["throughput"]["eligible"].astype(bool)}).reset_index()


def gaps_to_best(values: pd.DataFrame) -> pd.DataFrame:
    """How far each eligible configuration is from the best one of its cell, per goal; NaN where it is not eligible.

    Latencies: value / best - 1 ('so much longer'). Throughput: 1 - value / best ('so much less').
    """
    result = values[_KEY].copy()
    cells = values.groupby(CELL)
    for name in GOALS:
        maximise = contest.GOALS[name].maximise
        relative = values[name] / cells[name].transform("max" if maximise else "min")
        result[name] = 1 - relative if maximise else relative - 1
    return result


def _costs(values: pd.DataFrame, gaps: pd.DataFrame) -> dict[str, Cost]:
    names = list(GOALS)
    by_configuration = gaps.groupby("configuration")[names]
    medians = by_configuration.median()
    worst = gaps[names].fillna(math.inf).groupby(gaps["configuration"]).median().max(axis=1)
    counts = values.groupby("configuration")["works"].agg(["size", "sum"])
    return {
        str(name): Cost(
            gaps=dict(zip(names, map(float, row), strict=True)), worst=float(w), n_cells=int(n), n_failed=int(n - ok)
        )
        for name, row, w, n, ok in zip(
            medians.index, medians.to_numpy(), worst, counts["size"], counts["sum"], strict=True
        )
    }


def _won(summaries: pd.DataFrame, success_bound: float) -> pd.DataFrame:
    told = contest.winners(summaries, goals=tuple(GOALS), success_bound=success_bound).dropna(subset=["winner"])
    kinds = dict(zip(summaries["configuration"], summaries["kind"], strict=True))
    told = told.rename(columns={"winner": "configuration"})
    return told.assign(kind=told["configuration"].map(kinds).astype(object)).reset_index(drop=True)


def _failures(values: pd.DataFrame) -> dict[str, dict[float, int]]:
    failed = (~values["works"]).groupby([values["configuration"], values["qps"]]).sum()
    found: dict[str, dict[float, int]] = {}
    names, levels = (failed.index.get_level_values(name) for name in ("configuration", "qps"))
    for name, qps, count in zip(names, levels, failed, strict=True):
        found.setdefault(str(name), {})[float(qps)] = int(count)
    return {name: counts for name, counts in found.items() if any(counts.values())}


def pareto_panels(found: Findings, levels: Sequence[float]) -> pd.DataFrame:
    """``analysis.pareto.panels`` at these QPS levels, with ``kind``."""
    rows = found.summaries[found.summaries["qps"].isin(list(levels))]
    kinds = dict(zip(found.summaries["configuration"], found.summaries["kind"], strict=True))
    if rows.empty:
        return pd.DataFrame(columns=[*PANEL_FIELDS, "kind"])
    places = panels(rows, success_bound=found.success_bound)
    return places.assign(kind=places["configuration"].map(kinds).astype(object))


def local_shares(table_texts: Sequence[str], w_tpot: Sequence[float]) -> pd.DataFrame:
    """``analysis.winners.local_share`` of every table: baseline, candidate, w_tpot, n_cells, local_ratio and its band."""
    frames = []
    for text in table_texts:
        domain = DecisionTable.from_json(text).domain
        frames.append(contest.local_share(text, w_tpot).assign(baseline=domain.baseline, candidate=domain.candidate))
    columns = ["baseline", "candidate", "w_tpot", "n_cells", "local_ratio", "local_low_ratio", "local_high_ratio"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)
