"""Figures of a comparison: who is who, what they show, and runs that share nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.text import Text

from ppd_bench.report.compare_plots import SHOWN, figure_compared, figure_errors
from ppd_bench.report.style import MIN_FONT_PT, save


def frame(ratios: list[float]) -> pd.DataFrame:
    rows = [
        {"configuration": f"{k}R", "slice": name, "metric": metric, "statistic": statistic, "reference": 0.1 * (k + 1),
         "candidate": 0.1 * (k + 1) * ratio, "error_ratio": ratio - 1}
        for k, ratio in enumerate(ratios)
        for name in ("all", "turn1")
        for metric in ("ttft", "tpot", "e2e")
        for statistic in ("mean", "p99")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def words_of(figure: Figure) -> str:
    texts = [t for t in figure.findobj(Text) if isinstance(t, Text) and t.get_text().strip()]
    assert min(t.get_fontsize() for t in texts) >= MIN_FONT_PT
    return "\n".join(t.get_text() for t in texts)


def test_a_point_lies_where_its_two_values_say() -> None:
    figure = figure_compared(frame([1.1, 0.9]), reference="measured", candidate="simulated")
    marks = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert [tuple(np.round([line.get_xdata()[0], line.get_ydata()[0]], 6)) for line in marks] == [
        (100, 110),
        (200, 180),
    ]
    words = words_of(figure)
    assert "measured (ms)" in words
    assert "simulated (ms)" in words
    assert "0R" in words


def test_ratios_and_their_medians_are_drawn_for_every_slice_and_statistic() -> None:
    figure = figure_errors(frame([1.0, 1.2, 3.0]), reference="measured, a", candidate="simulated, b")
    bars = [line for line in figure.axes[0].lines if line.get_linewidth() == 1.6]
    assert [bar.get_ydata()[0] for bar in bars] == [1.2] * 4
    assert "simulated, b against measured, a" in words_of(figure)


def test_a_ratio_beyond_all_bounds_is_drawn_at_the_edge() -> None:
    figure = figure_errors(frame([1.0, 400.0]), reference="a", candidate="b")
    highest = max(np.max(line.get_ydata()) for line in figure.axes[0].lines if line.get_linestyle() == "None")
    assert highest == SHOWN[1]


def test_nothing_in_common_is_said_and_not_drawn(tmp_path: Path) -> None:
    empty = frame([1.0]).assign(error_ratio=np.nan)
    for figure in (
        figure_compared(empty, reference="a", candidate="b"),
        figure_errors(empty, reference="a", candidate="b"),
    ):
        assert "no value in both runs" in words_of(figure)
        assert len(save(figure, tmp_path / "empty")) == 2
