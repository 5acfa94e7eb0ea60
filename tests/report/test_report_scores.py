"""What is uncertain about a table, drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from ppd_bench.policy.table import Cell, DecisionTable
from ppd_bench.report.control_plot import figure_control, figure_scores
from ppd_bench.report.style import png_bytes, svg_text

KINDS: tuple[dict[str, Any], ...] = (
    {"certainty": "decided", "decision": "local", "score": 0.4, "score_interval": (0.3, 0.5)},
    {"certainty": "tie", "decision": "pd", "score": 0.1, "score_interval": (-0.2, 0.4)},
    {"certainty": "no_interval", "decision": "local", "score": 0.2},
    {"certainty": None, "evidence": "insufficient", "score": None},
    {"certainty": "decided", "decision": "pd", "rule": "x1_failed", "score": None},
)


@pytest.fixture
def table(table_texts: list[str]) -> DecisionTable:
    found = DecisionTable.from_json(table_texts[0])
    cells = tuple(replace(c, **KINDS[i % len(KINDS)]) if c.visited else c for i, c in enumerate(found.cells))
    return replace(found, cells=cells)


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_each_kind_of_cell_is_marked_and_each_visited_kind_of_turn_has_a_panel(table: DecisionTable) -> None:
    figure = figure_scores(table)
    visited = {f"{c.context}, {c.type}" for c in table.cells if c.visited}
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert {ax.get_title() for ax in panels} == visited
    assert legend_of(figure) == ["local, decided", "tie: the fallback answers", "no interval: too few repeats"]
    marks = {text.get_text() for ax in panels for text in ax.texts}
    assert marks == {"?", "!"}
    assert png_bytes(figure).startswith(b"\x89PNG")
    assert svg_text(figure) == svg_text(figure_scores(table))


def test_a_table_of_before_there_were_intervals_shows_that_it_has_none(table_texts: list[str]) -> None:
    found = DecisionTable.from_json(table_texts[0])
    strip: Callable[[Cell], Cell] = lambda c: replace(c, certainty=None, score_interval=None)  # noqa: E731
    figure = figure_scores(replace(found, cells=tuple(map(strip, found.cells))))
    assert legend_of(figure) == ["no interval: too few repeats"]


def test_the_control_surface_shades_the_cells_that_tie() -> None:
    shares = pd.DataFrame(
        {
            "baseline": "2P_2D",
            "candidate": "2P_2pD",
            "w_tpot": [1.0, 3.0],
            "local_ratio": [0.5, 0.25],
            "local_low_ratio": [0.5, 0.25],
            "local_high_ratio": [0.75, 0.5],
        }
    )
    shaded = figure_control(shares, run_name="r", evidence="measured")
    plain = figure_control(
        shares.drop(columns=["local_low_ratio", "local_high_ratio"]), run_name="r", evidence="measured"
    )
    assert [len(figure.axes[0].collections) for figure in (shaded, plain)] == [1, 0]
    ((low, high),) = [
        (path.vertices[:, 1].min(), path.vertices[:, 1].max()) for path in shaded.axes[0].collections[0].get_paths()
    ]
    assert (low, high) == (25.0, 75.0)
