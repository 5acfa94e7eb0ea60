"""What recorded traffic looks like, as one figure: context classes, the profile after a prefix cache, lengths and turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppd_bench.analysis.trace_stats import Spread, TraceStats
from ppd_bench.report.style import new_figure, put_footer, set_scale, state_empty, styled

REQUESTS, TOKENS = "#9ecae1", "#08519c"
"""Light for shares of requests, dark for shares of tokens: apart in grey too."""
QUANTILE_NAMES = ("p10", "p50", "p90", "p99", "max")


@styled
def figure_trace(stats: TraceStats, *, name: str, basis: str) -> Figure:
    """Four panels of one trace.

    Args:
        name: of the trace, for the footer.
        basis: where token counts come from, for the footer.
    """
    fig = new_figure(5.4)
    (contexts, profile), (lengths, turns) = fig.subplots(2, 2)
    _contexts(contexts, stats)
    _profile(profile, stats)
    _quantiles(lengths, {"prompt": stats.prompt_tokens, "output": stats.output_tokens}, "tokens per request", "lengths")
    _turns(turns, stats)
    put_footer(fig, run_name=name, evidence="recorded traffic", note="token counts " + basis.partition(":")[0])
    return fig


def _contexts(ax: Axes, stats: TraceStats) -> None:
    names = [f"≤ {c.max_tokens // 1024}k" if c.max_tokens else "longer" for c in stats.contexts]
    shares = ([c.request_ratio for c in stats.contexts], [c.token_ratio for c in stats.contexts])
    _bars(ax, names, shares, ("requests", "prompt tokens"))
    ax.set_title("context classes (prompt tokens)")


def _profile(ax: Axes, stats: TraceStats) -> None:
    ax.set_title("after an infinite prefix cache")
    if stats.profile is None:
        state_empty(ax, "no block ids:\nprefix reuse is not known")
        return
    labels = {"warm": "warm\n(> 90 %)", "50-90": "50–90 %", "1-50": "1–50 %", "cold": "cold\n(0 %)"}
    shares = ([b.request_ratio for b in stats.profile], [b.new_token_ratio for b in stats.profile])
    _bars(ax, [labels[b.name] for b in stats.profile], shares, ("requests", "tokens to prefill"))


def _bars(
    ax: Axes, names: Sequence[str], shares: tuple[Sequence[float], Sequence[float]], labels: tuple[str, str]
) -> None:
    places = np.arange(len(names))
    for shift, values, colour, label in zip((-0.2, 0.2), shares, (REQUESTS, TOKENS), labels, strict=True):
        ax.bar(
            places + shift,
            [100 * v for v in values],
            width=0.38,
            color=colour,
            edgecolor="black",
            linewidth=0.5,
            label=label,
        )
    ax.set_xticks(places, names)
    ax.set_ylabel("share (%)")
    ax.legend(frameon=False)


def _quantiles(ax: Axes, spreads: dict[str, Spread], unit: str, title: str) -> None:
    """Quantiles joined by a line; those that are not above 0 have no place on a logarithmic axis and are left out."""
    shown: list[float] = []
    for (label, values), colour, marker in zip(spreads.items(), (TOKENS, REQUESTS), ("o", "s"), strict=False):
        points = [(q, getattr(values, name)) for q, name in enumerate(QUANTILE_NAMES) if getattr(values, name) > 0]
        ax.plot(
            *zip(*points, strict=True), marker=marker, color=colour, markeredgecolor="black", label=label
        ) if points else None
        shown += [value for _, value in points]
    ax.set_xticks(range(len(QUANTILE_NAMES)), QUANTILE_NAMES)
    set_scale(ax, "y", shown)
    ax.set_ylabel(unit)
    ax.set_title(title)
    if len(spreads) > 1:
        ax.legend(frameon=False)


def _turns(ax: Axes, stats: TraceStats) -> None:
    sessions = stats.sessions
    if sessions is None:
        ax.set_title("turns per session")
        state_empty(ax, "no sessions")
        return
    title = f"turns per session ({sessions.source})"
    _quantiles(ax, {"turns": sessions.turns}, "turns", title)
