import math

import pandas as pd
import pytest

from ppd_bench.analysis.paper_tables import PAPER_TABLES, beside, different_winner_share, table1, table2, table5
from ppd_bench.analysis.summary import summarise
from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import PolicySpec


@pytest.fixture
def run(make_point, make_row, make_frame, make_workload):
    def summaries(*cells):
        """Each cell: (topology, turn-2 workload, qps, turn-2 TTFT, TPOT, share of 20 sessions that succeed)."""
        points = [make_point(t, workload=make_workload("small", w), qps=float(q)) for t, w, q, *_ in cells]
        rows = [
            make_row(p, f"s{i}", 2, ttft=ttft, tpot=tpot, status="ok" if i < 20 * share else "timeout")
            for p, (*_, ttft, tpot, share) in zip(points, cells, strict=True)
            for i in range(20)
        ]
        return summarise(make_frame(*rows), points)

    return summaries


def values(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    return {(r, c): v for r, c, v in zip(table["row"], table["column"], table["value"], strict=True)}


def test_table_1_is_the_mean_of_per_cell_changes_and_not_the_change_of_means(run):
    summaries = run(
        ("1P_3D", "tiny", 1, 0.1, 0.01, 1), ("1P_3pD", "tiny", 1, 0.05, 0.01, 1),  # -50 %
        ("1P_3D", "mid_bal", 1, 1.0, 0.01, 1), ("1P_3pD", "mid_bal", 1, 0.9, 0.01, 1),  # -10 %
        ("1P_3D", "tiny", 10, 1.0, 0.01, 1), ("1P_3pD", "tiny", 10, 0.1, 0.01, 1),  # in no band
        ("1P_3D", "tiny", 16, 0.4, 0.01, 1), ("1P_3pD", "tiny", 16, 0.5, 0.01, 0.1),  # +25 %; success plays no part
        ("1P_3D", "mid_bal", 16, 0.4, 0.01, 1), ("1P_3pD", "mid_bal", 16, 0.5, 0.01, 0),  # undefined
    )  # fmt: skip
    table = table1(summaries)
    found = values(table)
    assert list(found) == [("1P_3D", "low"), ("1P_3D", "med"), ("1P_3D", "high")]
    assert found["1P_3D", "low"] == pytest.approx(-30)
    assert math.isnan(found["1P_3D", "med"])
    assert found["1P_3D", "high"] == pytest.approx(25)
    assert table["n_cells"].tolist() == [2, 0, 1]


def test_table_2_shares_ties_and_tells_the_cells_that_nobody_won(run):
    summaries = run(
        ("4R", "tiny", 8, 0.1, 0.03, 1),
        ("1P_3D", "tiny", 8, 0.2, 0.01, 1),
        ("1P_3pD", "tiny", 8, 0.1, 0.02, 1),
        ("4R", "tiny", 20, 0.1, 0.03, 0.5),
        ("1P_3D", "tiny", 20, 0.2, 0.01, 0.5),
        ("1P_3pD", "tiny", 20, 0.1, 0.02, 0.5),
        ("4R", "mid_bal", 8, 0.1, 0.03, 0.5),
        ("1P_3D", "mid_bal", 8, 0.2, 0.01, 1),
        ("1P_3pD", "mid_bal", 8, 0.3, 0.02, 1),
        ("4R", "mid_bal", 20, 0.1, 0.03, 1),
        ("1P_1D_2pD", "mid_bal", 20, 0.2, 0.01, 1),
        ("1R_1P_2D", "mid_bal", 20, 0.2, 0.03, 1),
    )  # fmt: skip
    found = values(table2(summaries))
    ttft = {row: found[row, "ttft"] for row in ("replica", "x0", "partial", "x1", "hybrid", "none")}
    assert ttft == {"replica": 37.5, "x0": 25.0, "partial": 0.0, "x1": 12.5, "hybrid": 0.0, "none": 25.0}
    assert (found["x0", "tpot"], found["partial", "tpot"], found["none", "tpot"]) == (50.0, 25.0, 25.0)
    assert found["x0", "avg"] == pytest.approx((25.0 + 50.0 + found["x0", "throughput"]) / 3)
    for goal in ("ttft", "tpot", "throughput", "avg"):
        assert sum(v for (_, column), v in found.items() if column == goal) == pytest.approx(100)
    assert set(table2(summaries)["n_cells"]) == {4}


def test_table_5_counts_workloads_below_95_percent(run):
    summaries = run(
        ("3P_1D", "tiny", 8, 0.1, 0.01, 0.95), ("3P_1D", "mid_bal", 8, 0.1, 0.01, 0.9),
        ("3P_1D", "long_gen", 8, 0.1, 0.01, 0.0), ("3P_1D", "small_bal", 8, 0.1, 0.01, 1),
        ("3P_1pD", "tiny", 8, 0.1, 0.01, 0.2), ("4R", "tiny", 20, 0.1, 0.01, 1),
        ("2P_1D_1pD", "tiny", 8, 0.1, 0.01, 0), ("4R", "tiny", 4, 0.1, 0.01, 0),
    )  # fmt: skip
    assert values(table5(summaries)) == {("3P_1D_x0", "8"): 50.0, ("3P_1D_x1", "8"): 100.0, ("4R", "20"): 0.0}
    assert table5(summaries)["n_cells"].tolist() == [4, 1, 1]


def test_winners_differ_unless_some_configuration_is_best_in_both(run):
    summaries = run(
        ("4R", "tiny", 8, 0.1, 0.03, 1), ("1P_3D", "tiny", 8, 0.2, 0.01, 1),  # different
        ("4R", "tiny", 2, 0.1, 0.01, 1), ("1P_3D", "tiny", 2, 0.2, 0.02, 1),  # same
        ("4R", "tiny", 4, 0.1, 0.03, 1), ("1P_3D", "tiny", 4, 0.1, 0.01, 1),  # tie in TTFT includes the TPOT winner
        ("4R", "tiny", 6, 0.3, 0.01, 1), ("1P_3D", "tiny", 6, 0.1, 0.02, 1),  # different
        ("4R", "tiny", 20, 0.1, 0.01, 0), ("1P_3D", "tiny", 20, 0.2, 0.02, 0),  # nobody
    )  # fmt: skip
    (row,) = different_winner_share(summaries).to_dict("records")
    assert row == {"row": "all", "column": "different", "value": 50.0, "n_cells": 4}


def test_configurations_that_are_not_the_papers_take_no_part(run, make_point, make_row, make_frame):
    other = make_point("1P_3D", policy=PolicySpec(decider="always_local"))
    mine = run(("1P_3D", "tiny", 8, 0.2, 0.01, 1), ("1P_3pD", "tiny", 8, 0.1, 0.01, 1))
    mixed = pd.concat([mine, summarise(make_frame(make_row(other, "a", 2, ttft=0.001)), [other])], ignore_index=True)
    for compute in PAPER_TABLES.values():
        pd.testing.assert_frame_equal(compute(mixed), compute(mine))


def test_published_figures_stand_beside_computed_ones_with_signed_differences():
    computed = pd.DataFrame(
        [("3P_1D_x0", "8", 16.7, 18), ("4R", "8", 0.0, 18), ("1P_3D_x0", "8", 5.0, 18)],
        columns=["row", "column", "value", "n_cells"],
    )
    table = beside({"bands": {"low": [1]}, "3P_1D_x0": {8: 11, 12: 44}, "4R": {8: 0}}, computed)
    assert table[["row", "column", "published"]].values.tolist() == [
        ["3P_1D_x0", "8", 11.0], ["3P_1D_x0", "12", 44.0], ["4R", "8", 0.0],
    ]  # fmt: skip
    assert table["difference"].tolist() == pytest.approx([5.7, math.nan, 0.0], nan_ok=True)
    assert table["n_cells"].tolist() == [18, 0, 18]


def test_a_single_published_figure_stands_beside_a_table_of_one_cell(run):
    one = different_winner_share(run(("4R", "tiny", 8, 0.1, 0.03, 1), ("1P_3D", "tiny", 8, 0.2, 0.01, 1)))
    assert beside(92.2, one)["difference"].tolist() == pytest.approx([7.8])
    with pytest.raises(SpecError, match="2 cells"):
        beside(92.2, pd.concat([one, one]))
