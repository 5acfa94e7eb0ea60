"""TTFT of turn 2+, TPOT, throughput and success against QPS, one column per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppd_bench.core.topology import parse_topology
from ppd_bench.report.configurations import ordered_configurations, with_kinds
from ppd_bench.report.style import (
    KINDS,
    evidence_of,
    new_figure,
    put_footer,
    put_legend,
    set_linear,
    set_scale,
    state_empty,
    styled,
)
from ppd_bench.report.units import counted

MAX_COLUMNS = 3
PARTIAL_MARKERS = ("^", "v", "<", ">")
Look = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetric:
    """One row of panels: a summary column of one slice, scaled for people."""

    column: str
    slice_name: str
    label: str
    scale: float = 1.0


METRICS = (
    LoadMetric(column="ttft_mean_s", slice_name="turn2plus", label="mean TTFT,\nturn 2+ (ms)", scale=1000),
    LoadMetric(column="tpot_mean_s", slice_name="all", label="mean TPOT,\nall turns (ms)", scale=1000),
    LoadMetric(column="throughput_tokens_per_s", slice_name="all", label="throughput\n(tokens/s)"),
    LoadMetric(column="success_ratio", slice_name="all", label="successful turns,\nworst workload (%)", scale=100),
)
SUCCESS = METRICS[-1]


def load_groups(summaries: pd.DataFrame) -> list[tuple[str, ...]]:
    """Layouts per figure: P/D layouts first, hybrids in figures of their own, at most ``MAX_COLUMNS`` in each.

    Replica-only topologies are no column: they are the reference in every one. A run with nothing else gives one group.
    """
    layouts = sorted(set(summaries["layout"]), key=lambda name: (parse_topology(name).n_replica, name))
    split = [n for n in layouts if parse_topology(n).n_prefill]
    core = [n for n in split if not parse_topology(n).n_replica]
    hybrid = [n for n in split if parse_topology(n).n_replica]
    groups = [tuple(part[i : i + MAX_COLUMNS]) for part in (core, hybrid) for i in range(0, len(part), MAX_COLUMNS)]
    return groups or [tuple(layouts[:MAX_COLUMNS])]


def load_values(labelled: pd.DataFrame, metric: LoadMetric, workload: str | None = None) -> pd.DataFrame:
    """Rows QPS, columns configuration: the mean over repeats, then over workloads (or for the one asked for) the median, and
    for success the lowest."""
    rows = labelled[labelled["slice"] == metric.slice_name]
    if workload is not None:
        rows = rows[rows["workload"] == workload]
    per_workload = rows.groupby(["qps", "configuration", "workload"])[metric.column].mean()
    cells = per_workload.groupby(["qps", "configuration"])
    over = cells.min() if metric is SUCCESS else cells.median()  # a median would hide the workloads that fail
    return over.unstack("configuration") * metric.scale


@styled
def figure_load(
    summaries: pd.DataFrame,
    layouts: Sequence[str],
    *,
    run_name: str,
    workload: str | None = None,
    success_bound: float = 0.95,
) -> Figure:
    """One column per layout, one row per metric of ``METRICS``; the y axis of a row is shared.

    Where the success shown in the last row is below the bound, the other rows are faint: their values are of the turns
    that succeeded and flatter the configuration.

    Args:
        summaries: rows of ``analysis.summary.summarise`` (all slices).
        layouts: what ``load_groups`` gives for one figure.
        run_name: for the footer.
        workload: one workload; null takes the median over workloads.
        success_bound: smallest share of successful turns that counts as working.
    """
    labelled = with_kinds(summaries)
    columns = _columns(labelled, layouts) or {"": {}}
    works = load_values(labelled, SUCCESS, workload) >= 100 * success_bound
    fig = new_figure(8.6)
    axes = fig.subplots(len(METRICS), len(columns), sharex="col", sharey="row", squeeze=False)
    for row, metric in zip(axes, METRICS, strict=True):
        values = load_values(labelled, metric, workload)
        for ax, looks in zip(row, columns.values(), strict=True):
            _draw(ax, values, works if metric is not SUCCESS else values.notna(), looks)
        _finish_row(row, metric, values[sorted({n for looks in columns.values() for n in looks})], success_bound)
    for top, bottom, layout in zip(axes[0], axes[-1], columns, strict=True):
        top.set_title(f"layout {layout}" if layout else "no data")
        bottom.set_xlabel("conversations/s (QPS)")
        bottom.set_xlim(0, 1.05 * float(labelled["qps"].max()) if len(labelled) else 1)
    put_legend(fig, _legend(labelled, columns), n_columns=4)
    fig.align_ylabels(axes[:, 0])
    note = f"workload {workload}" if workload else f"median over {counted(labelled['workload'].nunique(), 'workload')}"
    put_footer(fig, run_name=run_name, evidence=evidence_of(summaries), note=note)
    return fig


def _columns(labelled: pd.DataFrame, layouts: Sequence[str]) -> dict[str, dict[str, Look]]:
    """For each layout the configurations drawn in its column, with their looks."""
    kinds = dict(zip(labelled["configuration"], labelled["kind"], strict=True))
    replicas = set(labelled.loc[labelled["category"] == "replica", "configuration"])
    columns = {}
    for layout in layouts:
        members = set(labelled.loc[labelled["layout"] == layout, "configuration"]) | replicas
        columns[layout] = _looks([n for n in ordered_configurations(labelled) if n in members], kinds)
    return columns


def _looks(names: Sequence[str], kinds: dict[str, str]) -> dict[str, Look]:
    """Lines of one kind in one column differ by a hollow marker (and by its direction where the kind is partial)."""
    looks: dict[str, Look] = {}
    seen: dict[str, int] = {}
    for name in names:
        kind = kinds[name]
        mark = KINDS[kind]
        ordinal = seen[kind] = seen.get(kind, -1) + 1
        looks[name] = {
            "color": mark.stroke,
            "marker": PARTIAL_MARKERS[ordinal % len(PARTIAL_MARKERS)] if kind == "partial" else mark.marker,
            "markerfacecolor": "white" if ordinal % 2 else mark.colour,
            "markeredgecolor": "black",
            "markeredgewidth": 0.5,
            "markersize": 5,
            "linestyle": mark.line,
            "linewidth": 1.4,
        }
    return looks


def _draw(ax: Axes, values: pd.DataFrame, works: pd.DataFrame, looks: dict[str, Look]) -> None:
    for name, look in looks.items():
        line = values[name].dropna() if name in values else pd.Series(dtype=float)
        if line.empty:
            continue
        good = line.where(works[name].reindex(line.index, fill_value=False).astype(bool))
        if good.isna().any():
            ax.plot(line.index, line, **look, alpha=0.3)
        ax.plot(good.index, good, **look)
    if not ax.lines:
        state_empty(ax, "no turn succeeded")


def _finish_row(row: Sequence[Axes], metric: LoadMetric, values: pd.DataFrame, success_bound: float) -> None:
    row[0].set_ylabel(metric.label)
    shown = values.to_numpy(dtype=float)
    finite = [float(v) for v in shown[np.isfinite(shown)]]
    if metric is SUCCESS:
        row[0].set_ylim(-4, 106)
        for ax in row:
            ax.axhline(100 * success_bound, color="#555555", linewidth=0.9, linestyle=(0, (1, 2)))
    elif metric.column == "ttft_mean_s":
        set_scale(row[0], "y", finite)
    else:
        set_linear(row[0], "y", finite)


def _legend(labelled: pd.DataFrame, columns: dict[str, dict[str, Look]]) -> list[Line2D]:
    looks = {name: look for column in columns.values() for name, look in column.items()}
    return [Line2D([], [], label=n, **looks[n]) for n in ordered_configurations(labelled) if n in looks]
