"""One place for what figures look like: colours, markers, sizes, footers, and how a figure becomes files.

Sizes are printed sizes: a figure is ``PAGE_WIDTH_IN`` wide, which is the text width of an A4 page, so a font of 8 pt
is 8 pt on paper. D-local capable configurations (some turn-2+ prefill can happen on a decode node) are dark, blue and
round or pointed; baselines are light, orange or yellow and angular, so the two groups differ in hue, in lightness and
in shape.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

P = ParamSpec("P")
PAGE_WIDTH_IN = 7.2
MIN_FONT_PT = 8.0
DPI = 160
LOG_RANGE = 8.0
"""An axis is logarithmic where its largest value exceeds its smallest by more than this factor."""

# Any, because matplotlib's own type lists every key of every version.
RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": MIN_FONT_PT,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.labelsize": MIN_FONT_PT,
    "xtick.labelsize": MIN_FONT_PT,
    "ytick.labelsize": MIN_FONT_PT,
    "legend.fontsize": MIN_FONT_PT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "ppd-bench",
    "svg.fonttype": "path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How one kind of configuration looks.

    ``letter`` stands for it in heat maps, where ``ink`` is legible on ``colour``; ``stroke`` colours thin lines.
    """

    label: str
    letter: str
    colour: str
    ink: str
    stroke: str
    marker: str
    line: str
    hatch: str = ""


KINDS: dict[str, Mark] = {
    "replica": Mark(
        label="replica (R)", letter="R", colour="#f5dd75", stroke="#9a7b00", ink="black", marker="P", line=":"
    ),
    "x0": Mark(label="P/D, x = 0", letter="0", colour="#f2a54a", stroke="#e07b00", ink="black", marker="s", line="--"),
    "hybrid_x0": Mark(
        label="hybrid without pD",
        letter="h",
        colour="#f7c896",
        stroke="#d9822b",
        ink="black",
        marker="X",
        line="--",
        hatch="////",
    ),
    "partial": Mark(
        label="P/D, 0 < x < 1", letter="p", colour="#2b74b4", stroke="#2b74b4", ink="white", marker="^", line="-."
    ),
    "x1": Mark(label="P/D, x = 1", letter="1", colour="#08306b", stroke="#08306b", ink="white", marker="o", line="-"),
    "hybrid_local": Mark(
        label="hybrid with pD",
        letter="H",
        colour="#6a4c93",
        stroke="#6a4c93",
        ink="white",
        marker="D",
        line="-",
        hatch="////",
    ),
}
"""Baselines first, then D-local capable kinds."""


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Run a figure function under ``RC`` and fix its layout, so that saving twice lays out once."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(RC):
            fig = draw(*args, **kwargs)
            engine = fig.get_layout_engine()
            if engine is not None:
                engine.execute(fig)
            fig.set_layout_engine("none")
        return fig

    return drawn


def new_figure(height_in: float) -> Figure:
    """An empty figure of the page's width, laid out so that nothing is clipped."""
    return Figure(figsize=(PAGE_WIDTH_IN, height_in), layout="constrained")


def evidence_of(summaries: pd.DataFrame) -> str:
    """The executor word of these rows: ``simulated``, ``measured``, both, or ``no data``."""
    words = {"sim": "simulated", "live": "measured"}
    found = sorted({words.get(str(name), str(name)) for name in summaries["executor"].dropna().unique()})
    return " and ".join(found) or "no data"


def put_footer(fig: Figure, *, run_name: str, evidence: str, note: str = "") -> None:
    """Say below the figure who made the numbers and in which run."""
    text = f"{evidence} · run {run_name}" + (f" · {note}" if note else "")
    # A text of supxlabel takes part in the constrained layout, so it can't overlap the axes.
    fig.supxlabel(text, x=0.01, ha="left", fontsize=MIN_FONT_PT, color="#444444")


def put_legend(fig: Figure, handles: Sequence[Artist], *, n_columns: int) -> None:
    """One legend above all panels, outside of them."""
    if handles:
        fig.legend(handles=list(handles), loc="outside upper center", ncols=n_columns, frameon=False)


def kind_handle(kind: str) -> Line2D:
    """The legend entry of a kind."""
    mark = KINDS[kind]
    return Line2D(
        [],
        [],
        color=mark.stroke,
        markerfacecolor=mark.colour,
        marker=mark.marker,
        markeredgecolor="black",
        markeredgewidth=0.6,
        markersize=6.5,
        label=mark.label,
        linestyle="none",
    )


def state_empty(ax: Axes, reason: str) -> None:
    """A panel without data says so instead of showing empty axes."""
    # Not set_ticks: that would empty the axes that share this one's scale.
    ax.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    ax.grid(False)
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", color="#444444", wrap=True)


def plain_numbers(axis: Axis) -> None:
    """Tick labels without offsets and exponents: 12,500 and 0.5."""
    axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.10g}"))


def set_scale(ax: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Logarithmic where all ``values`` are positive and span more than ``LOG_RANGE``, else linear."""
    if not values or min(values) <= 0 or max(values) <= LOG_RANGE * min(values):
        set_linear(ax, which, values)
        return
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    span = max(values) / min(values)
    subs = (1.0, 2.0, 5.0) if span < 30 else (1.0, 3.0) if span < 1000 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    plain_numbers(axis)


def set_linear(ax: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Linear with plain numbers; from zero unless that would waste a quarter of the axis or more."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    if values and max(values) > 0:
        # Limits follow the data, with room for markers at the top.
        low = 0.0 if min(values) < 0.25 * max(values) else 0.9 * min(values)
        (ax.set_xlim if which == "x" else ax.set_ylim)(low, max(values) + 0.08 * (max(values) - low))
    plain_numbers(axis)


def svg_text(fig: Figure) -> str:
    """The figure as SVG, the same bytes for the same content."""
    buffer = io.StringIO()
    with mpl.rc_context(RC):
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def png_bytes(fig: Figure) -> bytes:
    """The figure as PNG at ``DPI``."""
    buffer = io.BytesIO()
    with mpl.rc_context(RC):
        fig.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def save(fig: Figure, path_stem: Path) -> list[Path]:
    """Write ``path_stem`` + ``.png`` and ``.svg`` and return both paths. The folder must exist."""
    png = path_stem.with_name(path_stem.name + ".png")
    svg = path_stem.with_name(path_stem.name + ".svg")
    png.write_bytes(png_bytes(fig))
    svg.write_text(svg_text(fig), encoding="utf-8")
    return [png, svg]
