"""The agentic study's plots and page. Frames are those of ``runner.study_figures.frame_of``: one row per point."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import pandas as pd
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppd_bench.report.plots import Plot
from ppd_bench.report.style import (
    KINDS,
    MIN_FONT_PT,
    Mark,
    new_figure,
    plain_numbers,
    put_legend,
    set_scale,
    styled,
    svg_text,
)
from ppd_bench.report.text_table import TextTable
from ppd_bench.report.units import listed

GIB = 1 << 30
HEIGHT_IN = 2.9

LOOKS: dict[str, tuple[str, Mark]] = {
    "8R_round_robin": ("8R, round robin", KINDS["replica"]),
    "8R_cache_aware": ("8R, cache-aware", KINDS["x1"]),
    "6P_2D": ("xP_yD, await", KINDS["x0"]),
    "6P_2D_fire_and_forget": ("xP_yD, fire and forget", KINDS["partial"]),
}
"""How an arm is called and drawn; the P/D arms keep their look in every split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One quantity against what is swept: a column, its axis label, and what it is multiplied with."""

    column: str
    label: str
    factor: float = 1.0


TTFT = Panel(column="ttft_p50_s", label="TTFT p50 (s)")
DECODE_WAIT = Panel(column="decode_wait_share_ratio", label="TTFT spent waiting for D (%)", factor=100.0)
KV_FULL = Panel(column="decode_kv_full_ratio", label="time with decode KV > 95 % (%)", factor=100.0)
HIT = Panel(column="prefix_hit_ratio", label="prompt tokens found (%)", factor=100.0)
BUSY = Panel(column="busy_all_ratio", label="engines busy (%)", factor=100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What one part of the study sweeps, and what its plot says."""

    part: str
    title: str
    axis: str
    caption: str
    panels: tuple[Panel, Panel, Panel]


SWEEPS = (
    Sweep(
        part="kv_capacity",
        title="KV capacity, from scarce to ample",
        axis="KV memory per engine (GiB)",
        caption="From what the longest request needs to four times what the GPU's memory leaves. The memory wall is "
        "where waiting for D "
        "begins to make up the TTFT: requests that have been prefilled wait until others let go of KV memory.",
        panels=(TTFT, DECODE_WAIT, KV_FULL),
    ),
    Sweep(
        part="decode_share",
        title="Decode engines of eight",
        axis="D engines of 8",
        caption="Few D concentrate all KV of requests in flight; many D leave few P, and prompts wait for those.",
        panels=(TTFT, DECODE_WAIT, KV_FULL),
    ),
    Sweep(
        part="reuse",
        title="Prefix reuse",
        axis="reuse possible (% of prompt tokens)",
        caption="The same requests with contents that share less: possible is what an infinite cache would find in earlier "
        "prompts; answers that come back in a later prompt are found on top of it. The gap between possible and found is what "
        "placement and capacity lose.",
        panels=(TTFT, HIT, BUSY),
    ),
    Sweep(
        part="in_flight",
        title="Conversations in flight",
        axis="conversations in flight, at most",
        caption="More conversations at a time hold more KV at a time.",
        panels=(TTFT, DECODE_WAIT, KV_FULL),
    ),
)


def study_plots(frames: Mapping[str, pd.DataFrame], *, kv_bytes_per_token: int) -> list[Plot]:
    """One plot per sweep that was simulated."""
    return [
        _plot(sweep, frames[sweep.part].assign(x=_swept(sweep.part, frames[sweep.part], kv_bytes_per_token)))
        for sweep in SWEEPS
        if sweep.part in frames
    ]


def _swept(part: str, frame: pd.DataFrame, kv_bytes_per_token: int) -> pd.Series[float]:
    """What the horizontal axis shows of the swept value."""
    if part == "kv_capacity":
        return frame["value"] * (kv_bytes_per_token / GIB)
    return 100.0 * frame["possible_hit_ratio"] if part == "reuse" else frame["value"]


def _plot(sweep: Sweep, frame: pd.DataFrame) -> Plot:
    arms = [LOOKS[arm][0] for arm in LOOKS if (frame["arm"] == arm).any()]
    return Plot(
        name=sweep.part,
        title=sweep.title,
        caption=f"Simulated. {sweep.caption}",
        alt=f"Line charts of {listed([panel.label for panel in sweep.panels])} against {sweep.axis}, for {listed(arms)}.",
        figure=figure_sweep(sweep, frame),
    )


@styled
def figure_sweep(sweep: Sweep, frame: pd.DataFrame) -> Figure:
    """Three panels of one sweep, a line per arm."""
    fig = new_figure(HEIGHT_IN)
    axes = fig.subplots(1, len(sweep.panels))
    for ax, panel in zip(axes, sweep.panels, strict=True):
        _draw(ax, panel, frame)
        ax.set(xlabel=sweep.axis, ylabel=panel.label)
    put_legend(fig, _handles(frame), n_columns=4)
    fig.supxlabel("simulated · agentic study", x=0.01, ha="left", fontsize=MIN_FONT_PT, color="#444444")
    return fig


def _draw(ax: Axes, panel: Panel, frame: pd.DataFrame) -> None:
    for arm, (_, mark) in LOOKS.items():
        rows = frame[frame["arm"] == arm].sort_values("x")
        ax.plot(rows["x"], panel.factor * rows[panel.column], color=mark.stroke, linestyle=mark.line, marker=mark.marker,
                markerfacecolor=mark.colour, markeredgecolor=mark.stroke, markersize=4.5, linewidth=1.3)  # fmt: skip
    xs = [float(x) for x in frame["x"].dropna()]
    values = [float(y) for y in panel.factor * frame[panel.column].dropna()]
    set_scale(ax, "x", xs)
    if panel.factor == 1.0:
        set_scale(ax, "y", values)
    else:
        ax.set_ylim(0.0, max(5.0, *(1.08 * value for value in values)) if values else 5.0)
        plain_numbers(ax.yaxis)


def _handles(frame: pd.DataFrame) -> list[Line2D]:
    return [
        Line2D([], [], color=mark.stroke, marker=mark.marker, markerfacecolor=mark.colour, markersize=4.5, label=label)
        for arm, (label, mark) in LOOKS.items()
        if (frame["arm"] == arm).any()
    ]


@dataclass(frozen=True, kw_only=True)
class StudyPage:
    """All that the page is made of."""

    title: str
    evidence: str
    subtitle: str
    tables: Sequence[TextTable]
    differences: Sequence[str]
    plots: Sequence[Plot]
    tables_title: str = "Simulated beside published"
    plots_title: str = "Mechanisms"
    no_plots: str = "No sweeps were asked for."


def render_study(page: StudyPage) -> str:
    """The page's HTML, self-contained. Same input, same bytes."""
    template = files("ppd_bench.report").joinpath("study.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    plots = [(plot, _data_uri(svg_text(plot.figure))) for plot in page.plots]
    return environment.from_string(template).render(page=page, plots=plots)


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
