"""Plots of prefix reuse and of the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppd_bench.analysis.reuse import Reuse
from ppd_bench.analysis.reuse_distance import Curve
from ppd_bench.analysis.reuse_instances import InstanceReuse
from ppd_bench.analysis.roofline import Roofline
from ppd_bench.report.style import KINDS, MIN_FONT_PT, new_figure, plain_numbers, put_legend, state_empty, styled
from ppd_bench.report.units import counted, percent

GIB = 1 << 30
Look = tuple[str, str, Any]
"""Colour, marker, line; Any, because matplotlib's own type lists every spelling."""
LOOKS: dict[str, Look] = {
    name: (KINDS[kind].stroke, KINDS[kind].marker, KINDS[kind].line)
    for name, kind in (("round_robin", "replica"), ("session_affinity", "partial"), ("cache_aware", "x1"))
}
"""The placements of the study; others take ``OTHER_LOOK``."""
OTHER_LOOK: Look = (KINDS["hybrid_local"].stroke, "D", "-")
BELOW: dict[str, Any] = {"xytext": (0, -10), "rotation": 55, "ha": "right", "va": "top"}
LEFT: dict[str, Any] = {"xytext": (-8, 0), "ha": "right", "va": "center"}
"""Where a step's name stands: prefills crowd on the roof's flat part, decodes on its slope."""


@styled
def figure_curve(reuse: Reuse, curve: Curve, *, source: str, kv_bytes_per_token: int | None = None) -> Figure:
    """Hit ratio of an LRU cache against its size; the upper axis is in GiB where the model is known."""
    fig = new_figure(3.6)
    ax = fig.subplots()
    sizes = np.array([p.capacity_tokens for p in curve.points])
    ratios = 100 * np.array([p.hit_ratio for p in curve.points])
    ax.plot(sizes, ratios, color=KINDS["x1"].stroke, marker="o", markersize=3.5, linewidth=1.4)
    if not curve.exact:
        errors = 100 * np.array([p.standard_error or 0.0 for p in curve.points])
        ax.fill_between(
            sizes, ratios - 2 * errors, ratios + 2 * errors, color=KINDS["x1"].stroke, alpha=0.2, linewidth=0
        )
    ax.axhline(100 * reuse.hit_ratio, color="#555555", linewidth=0.9, linestyle=(0, (1, 2)))
    label = f"without bound: {percent(reuse.hit_ratio)}"
    ax.text(sizes[0], 100 * reuse.hit_ratio, label, va="bottom", ha="left", color="#444444")
    ax.set(xlabel="cache size (tokens)", ylabel="prompt tokens found (%)", xscale="log")
    ax.set_ylim(0, 112 * max(reuse.hit_ratio, 0.01))
    plain_numbers(ax.xaxis)
    plain_numbers(ax.yaxis)
    if kv_bytes_per_token:
        per_gib = kv_bytes_per_token / GIB
        upper = ax.secondary_xaxis("top", functions=_scaled(per_gib))
        upper.set_xlabel("cache size (GiB)")
        plain_numbers(upper.xaxis)
    how = "exact" if curve.exact else f"sampled, {curve.rate:.2%} of blocks; band: 2 standard errors"
    _footer(fig, f"LRU, {how} · {source}")
    return fig


def _scaled(factor: float) -> Any:
    """A function pair for a second axis; Any, because matplotlib's types take no array-only functions."""

    def there(values: Any) -> Any:
        return values * factor

    def back(values: Any) -> Any:
        return values / factor

    return there, back


@styled
def figure_instances(possible_ratio: float, results: Sequence[InstanceReuse], *, source: str) -> Figure:
    """Hit ratio against the number of instances: one panel per cache size, one line per policy."""
    capacities = list(dict.fromkeys(r.capacity_tokens for r in results))
    fig = new_figure(3.4)
    axes = fig.subplots(1, max(1, len(capacities)), sharey=True, squeeze=False)[0]
    policies = list(dict.fromkeys(r.policy for r in results))
    for ax, capacity in zip(axes, capacities, strict=False):
        _draw_policies(ax, [r for r in results if r.capacity_tokens == capacity], policies)
        ax.axhline(100 * possible_ratio, color="#555555", linewidth=0.9, linestyle=(0, (1, 2)))
        ax.set_title("without bound" if capacity is None else f"{capacity:,.0f} tokens each")
    if not results:
        state_empty(axes[0], "no policy was asked for")
    axes[0].set_ylabel("prompt tokens found (%)")
    axes[0].set_ylim(0, 112 * max(possible_ratio, 0.01))
    put_legend(fig, [_handle(name) for name in policies], n_columns=4)
    _footer(fig, f"dotted: one cache without bound ({percent(possible_ratio)}) · {source}")
    return fig


def _draw_policies(ax: Axes, results: Sequence[InstanceReuse], policies: Sequence[str]) -> None:
    for name in policies:
        colour, marker, line = LOOKS.get(name, OTHER_LOOK)
        mine = sorted((r.n_instances, 100 * r.hit_ratio) for r in results if r.policy == name)
        ax.plot(*zip(*mine, strict=True), color=colour, marker=marker, linestyle=line, linewidth=1.4, markersize=5)
    ax.set_xticks(sorted({r.n_instances for r in results}))
    ax.set_xlabel("instances")


def _handle(name: str) -> Line2D:
    colour, marker, line = LOOKS.get(name, OTHER_LOOK)
    return Line2D([], [], color=colour, marker=marker, linestyle=line, label=name.replace("_", " "))


@styled
def figure_roofline(found: Roofline) -> Figure:
    """Attainable FLOP/s against arithmetic intensity, with every prefill and decode on the roof."""
    fig = new_figure(3.6)
    ax = fig.subplots()
    intensities = np.array([row.work.intensity for row in found.rows])
    low, high = 0.1 * min(*intensities, found.ridge), 3.0 * max(*intensities, found.ridge)
    roof = np.geomspace(low, high, 200)
    ax.plot(
        roof, np.minimum(found.peak_flop_per_s, roof * found.peak_bytes_per_s) / 1e12, color="#555555", linewidth=1.2
    )
    ax.axvline(found.ridge, color="#999999", linewidth=0.8, linestyle=(0, (1, 2)))
    for row in found.rows:
        kind = KINDS["x0" if row.reuse_ratio is not None else "x1"]
        reach = row.flop_per_s / 1e12
        ax.plot(row.work.intensity, reach, marker=kind.marker, color=kind.colour, markeredgecolor="black", markersize=7)
        name, place = (row.name, LEFT) if row.reuse_ratio is None else (f"{100 * row.reuse_ratio:g} % reused", BELOW)
        ax.annotate(name, (row.work.intensity, reach), textcoords="offset points", fontsize=MIN_FONT_PT, **place)
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="attainable TFLOP/s")
    ax.set_ylim(min(row.flop_per_s for row in found.rows) / 2e12, found.peak_flop_per_s * 2e-12)
    for axis in (ax.xaxis, ax.yaxis):
        plain_numbers(axis)
    prompt = counted(found.prompt_tokens, "token")
    _footer(fig, f"estimated from peaks · {found.model} on {found.gpu}, {prompt} · ridge {found.ridge:.4g} FLOP/byte")
    return fig


def _footer(fig: Figure, text: str) -> None:
    # A text of supxlabel takes part in the constrained layout, so it can't overlap the axes.
    fig.supxlabel(text, x=0.01, ha="left", fontsize=MIN_FONT_PT, color="#444444")
