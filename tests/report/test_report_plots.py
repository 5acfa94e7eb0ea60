"""Figures: what they show, that they are legible in grey, the same bytes twice, and sensible for partial runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from ppd_bench.report.control_plot import figure_control
from ppd_bench.report.findings import GOALS, find, pareto_panels
from ppd_bench.report.load_plot import METRICS, figure_load, load_groups, load_values
from ppd_bench.report.pareto_plot import figure_pareto, nearest_levels
from ppd_bench.report.plots import Plot, loads, pareto, winners
from ppd_bench.report.style import KINDS, MIN_FONT_PT, Mark, png_bytes, save, styled, svg_text
from ppd_bench.report.winner_plot import figure_winners

Build = Callable[..., pd.DataFrame]
LOCAL_CAPABLE = {"partial", "x1", "hybrid_local"}
TITLES = {name: goal.title for name, goal in GOALS.items()}


def texts_of(figure: Figure) -> list[Text]:
    return [t for t in figure.findobj(Text) if isinstance(t, Text) and t.get_text().strip() and t.get_visible()]


def words_of(figure: Figure) -> str:
    return "\n".join(t.get_text() for t in texts_of(figure))


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2) from 0 to 1."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_local_capable_kinds_are_darker_than_every_baseline_and_differ_in_shape() -> None:
    capable = [KINDS[k] for k in KINDS if k in LOCAL_CAPABLE]
    baseline = [KINDS[k] for k in KINDS if k not in LOCAL_CAPABLE]
    assert max(luminance(m.colour) for m in capable) < 0.5 * min(luminance(m.colour) for m in baseline)
    assert len({m.marker for m in KINDS.values()}) == len({m.letter for m in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("mark", KINDS.values(), ids=list(KINDS))
def test_letters_in_heat_maps_are_legible_on_their_colour(mark: Mark) -> None:
    assert contrast(mark.colour, mark.ink) >= 4.5


def test_no_two_kinds_look_the_same_in_grey() -> None:
    for a, b in combinations(KINDS.values(), 2):
        assert contrast(a.colour, b.colour) > 1.1 or bool(a.hatch) != bool(b.hatch), (a.label, b.label)


def test_every_figure_says_who_made_its_numbers_and_in_which_run(plots: list[Plot]) -> None:
    assert [p.name for p in plots] == ["pareto", "winners", "load_1", "load_2", "control"]
    for plot in plots:
        assert "simulated · run demo" in words_of(plot.figure), plot.name


def test_no_text_is_smaller_than_eight_points(plots: list[Plot]) -> None:
    for plot in plots:
        assert min(t.get_fontsize() for t in texts_of(plot.figure)) >= MIN_FONT_PT == 8


def test_nothing_is_cut_off_at_the_edge(plots: list[Plot]) -> None:
    for plot in plots:
        drawn = plot.figure.get_tightbbox(FigureCanvasAgg(plot.figure).get_renderer())
        width, height = plot.figure.get_size_inches()
        assert (drawn.x0 >= 0, drawn.y0 >= 0, drawn.x1 <= width, drawn.y1 <= height) == (True,) * 4, plot.name


def test_captions_and_alternative_texts_are_full_sentences(plots: list[Plot]) -> None:
    for plot in plots:
        assert plot.caption.endswith(".")
        assert plot.alt.endswith(".")
        assert "{" not in plot.caption
        assert "nan" not in plot.alt


def test_saving_gives_a_png_and_an_svg_with_the_same_bytes_every_time(
    tmp_path: Path, paired_summaries: pd.DataFrame
) -> None:
    found = find(paired_summaries)
    figures = [figure_winners(found.won, found.summaries, run_name="r", titles=TITLES) for _ in range(2)]
    (tmp_path / "b").mkdir()
    first, second = save(figures[0], tmp_path / "winners.v1"), save(figures[1], tmp_path / "b" / "winners.v1")
    assert [p.name for p in first] == ["winners.v1.png", "winners.v1.svg"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert "<dc:date>" not in first[1].read_text(encoding="utf-8")
    with Image.open(first[0]) as image:
        assert image.width >= 7 * 150


def test_drawing_leaves_the_global_settings_alone(paired_summaries: pd.DataFrame) -> None:
    before = dict(mpl.rcParams)
    found = find(paired_summaries)
    svg_text(figure_winners(found.won, found.summaries, run_name="r", titles=TITLES))
    assert dict(mpl.rcParams) == before


def test_partial_runs_give_figures_or_a_stated_empty_panel(partial_summaries: pd.DataFrame) -> None:
    found = find(partial_summaries)
    plots = [pareto(found, run_name="r"), winners(found, run_name="r"), *loads(found, run_name="r")]
    for plot in plots:
        assert len(png_bytes(plot.figure)) > 5000
        for ax in plot.figure.axes:
            assert ax.has_data() or "no " in " ".join(t.get_text() for t in ax.texts), plot.name


def test_a_run_without_success_says_so_in_every_panel(
    build: Build, fail: Callable[[pd.DataFrame], pd.DataFrame]
) -> None:
    found = find(fail(build(("4R", "1P_3D"), ("small_tiny",), (2.0, 8.0))))
    figure = figure_pareto(pareto_panels(found, [2.0, 8.0]), found.summaries, run_name="r")
    assert [ax.texts[0].get_text() for ax in figure.axes] == ["no turn succeeded"] * 2
    winners = figure_winners(found.won, found.summaries, run_name="r", titles=TITLES)
    assert {t.get_text() for ax in winners.axes for t in ax.texts} == {"–"}


def test_an_empty_panel_leaves_the_ticks_of_its_neighbours_alone(build: Build) -> None:
    rows = build(("1P_3D", "2P_2D"), ("small_tiny",), (2.0, 8.0))
    rows.loc[rows["topology"] == "2P_2D", "ttft_mean_s"] = np.nan
    figure = figure_load(rows, ("1P_3D", "2P_2D"), run_name="r")
    filled, empty = figure.axes[:2]
    assert [t.get_text() for t in empty.texts] == ["no turn succeeded"]
    assert len([t for t in filled.get_yticklabels() if t.get_text() and t.get_visible()]) > 2
    assert len(figure.axes[-1].get_xticks()) > 2


def test_panels_take_the_nearest_levels_that_the_run_has() -> None:
    assert nearest_levels([0.5, 1, 2, 4, 6, 8, 10, 12, 16, 20]) == [2, 8, 20]
    assert nearest_levels([16.0, 3.0]) == [3.0, 16.0]
    assert nearest_levels([1.0, 3.0], [2.0]) == [1.0]
    assert nearest_levels([]) == []


def test_pareto_panels_name_and_ring_the_best_and_join_the_frontier(paired_summaries: pd.DataFrame) -> None:
    found = find(paired_summaries)
    panels = pareto_panels(found, [2.0])
    figure = figure_pareto(panels, found.summaries, run_name="r")
    titles = [ax.get_title(loc="center").strip() for ax in figure.axes]
    assert titles == ["decode-heavy", "balanced", "prefill-heavy"]
    for ax, category in zip(figure.axes, ("decode_heavy", "balanced", "prefill_heavy"), strict=True):
        panel = panels[panels["workload_category"] == category]
        best = panel[panel["best"]].iloc[0]
        assert ax.get_title(loc="left") == f"best: {best['configuration']}"
        ring = next(line for line in ax.lines if line.get_markeredgecolor() == "#c00000")
        assert ring.get_xdata()[0] == best["throughput_tokens_per_s"]
        assert ring.get_ydata()[0] == pytest.approx(1000 * best["ttft_p99_s"])
        frontier = panel[panel["on_frontier"]].sort_values("throughput_tokens_per_s")
        assert list(ax.lines[0].get_xdata()) == list(frontier["throughput_tokens_per_s"])


def test_heat_maps_show_the_letter_of_the_winning_kind_in_its_cell() -> None:
    summaries = pd.DataFrame(
        {
            "workload": ["a", "a", "b", "b"],
            "workload_category": ["balanced", "balanced", "prefill_heavy", "prefill_heavy"],
            "qps": [1.0, 2.0, 1.0, 2.0],
            "executor": "sim",
        }
    )
    won = pd.DataFrame(
        {
            "goal": "ttft",
            "workload": ["a", "a", "b"],
            "qps": [1.0, 2.0, 2.0],
            "kind": ["x1", "replica", "hybrid_local"],
            "n_tied": [1, 2, 1],
        }
    )
    figure = figure_winners(won, summaries, run_name="r", titles={"ttft": "TTFT"})
    cells = {t.get_position(): t.get_text() for t in figure.axes[0].texts}
    assert cells == {(0.5, 0.5): "1", (1.5, 0.5): "R=", (0.5, 1.5): "–", (1.5, 1.5): "H"}
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["a", "b"]


def test_load_groups_keep_hybrids_apart_and_columns_few(paper_summaries: pd.DataFrame, build: Build) -> None:
    assert load_groups(paper_summaries) == [("1P_3D", "2P_2D", "3P_1D"), ("1R_1P_2D", "1R_2P_1D", "2R_1P_1D")]
    assert load_groups(build(("4R",), ("small_tiny",), (1.0,))) == [("4R",)]
    eight = build(("2P_6D", "3P_5D", "4P_4D", "4P_4pD", "6P_2D"), ("small_tiny",), (1.0,))
    assert load_groups(eight) == [("2P_6D", "3P_5D", "4P_4D"), ("6P_2D",)]


def test_load_values_average_repeats_before_the_median_over_workloads(build: Build) -> None:
    rows = build(("4R",), ("small_tiny", "large_tiny", "small_mid_bal"), (2.0,), n_repeats=2)
    latency = {"small_tiny": (0.1, 0.3), "large_tiny": (0.5, 0.5), "small_mid_bal": (0.0, 0.1)}
    rows["ttft_mean_s"] = [latency[w][r] for w, r in zip(rows["workload"], rows["repeat"], strict=True)]
    # Means per workload 0.2, 0.5, 0.05; their median is 200 ms.
    assert load_values(rows, METRICS[0]).loc[2.0, "4R"] == pytest.approx(200)
    assert load_values(rows, METRICS[0], "large_tiny").loc[2.0, "4R"] == pytest.approx(500)


def test_values_of_survivors_are_faint(build: Build) -> None:
    rows = build(("4R",), ("small_tiny",), (2.0, 4.0, 8.0))
    rows.loc[rows["qps"] == 8.0, "success_ratio"] = 0.5
    figure = figure_load(rows, ("4R",), run_name="r")
    faint, solid = figure.axes[0].lines
    assert faint.get_alpha() == 0.3
    assert not np.isnan(faint.get_ydata()).any()
    assert list(np.isnan(solid.get_ydata())) == [False, False, True]


def test_the_control_surface_has_a_line_per_pair_and_marks_the_weight_that_tables_were_built_with() -> None:
    shares = pd.DataFrame(
        {
            "baseline": ["1P_3D", "1P_3D", "2P_2D"],
            "candidate": ["1P_3pD", "1P_3pD", "2P_2pD"],
            "w_tpot": [1.0, 10.0, 1.0],
            "local_ratio": [0.95, 0.2, np.nan],
        }
    )
    figure = figure_control(shares, run_name="r", evidence="measured", w_tpot_built=3.0)
    line, marked = figure.axes[0].lines
    assert (line.get_label(), list(line.get_ydata())) == ("1P_3D / 1P_3pD", [95.0, 20.0])
    assert list(marked.get_xdata()) == [3.0, 3.0]
    empty = figure_control(shares.iloc[:0], run_name="r", evidence="measured")
    assert "no decision table" in words_of(empty)


def test_a_styled_figure_keeps_its_layout_when_it_is_saved() -> None:
    @styled
    def draw() -> Figure:
        figure = Figure(layout="constrained")
        figure.subplots().set_ylabel("tall\nlabel")
        return figure

    figure = draw()
    before = figure.axes[0].get_position().bounds
    png_bytes(figure)
    assert figure.axes[0].get_position().bounds == before
    assert figure.axes[0].spines["top"].get_visible() is False
