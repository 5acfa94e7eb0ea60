"""Comparison with the best of each cell, choices and failures, worked out by hand on a few cells."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.report.configurations import kind_of, ordered_configurations, ordered_workloads
from ppd_bench.report.findings import Findings, find, gaps_to_best, local_shares, pareto_panels

Build = Callable[..., pd.DataFrame]


def with_values(
    summaries: pd.DataFrame, values: dict[tuple[str, float], tuple[float, float, float, float]]
) -> pd.DataFrame:
    """Summaries whose (ttft, tpot, throughput, success) are given per (topology, QPS), in every slice."""
    changed = summaries.copy()
    columns = ["ttft_mean_s", "tpot_mean_s", "throughput_tokens_per_s", "success_ratio"]
    for (topology, qps), figures in values.items():
        rows = (changed["topology"] == topology) & (changed["qps"] == qps)
        changed.loc[rows, columns] = figures
    return changed


@pytest.fixture
def by_hand(build: Build) -> Findings:
    """Two configurations in two cells; 1P_3D fails at QPS 8."""
    base = build(("4R", "1P_3D"), ("small_tiny",), (2.0, 8.0))
    return find(
        with_values(
            base,
            {
                ("4R", 2.0): (0.030, 0.010, 900.0, 1.0),
                ("1P_3D", 2.0): (0.060, 0.008, 1000.0, 1.0),
                ("4R", 8.0): (0.040, 0.012, 3000.0, 0.96),
                ("1P_3D", 8.0): (0.010, 0.002, 9000.0, 0.94),
            },
        )
    )


def test_a_latency_gap_is_how_much_longer_and_a_throughput_gap_how_much_less(by_hand: Findings) -> None:
    gaps = by_hand.gaps.set_index(["qps", "configuration"])
    assert gaps.loc[(2.0, "4R"), ["ttft", "tpot", "throughput"]].tolist() == pytest.approx([0.0, 0.25, 0.1])
    assert gaps.loc[(2.0, "1P_3D"), ["ttft", "tpot", "throughput"]].tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_a_failed_configuration_has_no_gap_and_sets_no_best(by_hand: Findings) -> None:
    gaps = by_hand.gaps.set_index(["qps", "configuration"])
    assert gaps.loc[(8.0, "1P_3D"), ["ttft", "tpot", "throughput"]].isna().all()
    assert gaps.loc[(8.0, "4R"), ["ttft", "tpot", "throughput"]].tolist() == [0.0, 0.0, 0.0]


def test_costs_are_medians_over_working_cells_and_worst_counts_failures_as_infinite(by_hand: Findings) -> None:
    replica, split = by_hand.costs["4R"], by_hand.costs["1P_3D"]
    assert replica.gaps == pytest.approx({"ttft": 0.0, "tpot": 0.125, "throughput": 0.05})
    assert (replica.worst, replica.n_failed, replica.n_cells) == (pytest.approx(0.125), 0, 2)
    assert split.gaps == pytest.approx({"ttft": 1.0, "tpot": 0.0, "throughput": 0.0})
    assert (split.worst, split.n_failed) == (np.inf, 1)


def test_the_choice_for_a_goal_wins_most_cells_and_the_balanced_one_has_the_smallest_worst_gap(
    by_hand: Findings,
) -> None:
    assert by_hand.wins("ttft") == {"4R": 2}
    assert by_hand.wins("tpot") == {"1P_3D": 1, "4R": 1}
    # One TPOT win each; 1P_3D's median gap is the smaller one.
    assert by_hand.choices() == {"ttft": "4R", "tpot": "1P_3D", "throughput": "1P_3D", "balanced": "4R"}


def test_failures_count_workloads_by_configuration_and_load(by_hand: Findings) -> None:
    assert by_hand.failures == {"1P_3D": {2.0: 0, 8.0: 1}}
    # At QPS 2 the winners differ (4R, 1P_3D), at QPS 8 only 4R is left.
    assert by_hand.different_winner_ratio == pytest.approx(0.5)
    assert (by_hand.n_cells, by_hand.n_points, by_hand.n_workloads(8.0)) == (2, 4, 1)


def test_typical_values_leave_failed_cells_out(by_hand: Findings) -> None:
    assert by_hand.typical("1P_3D", "ttft") == 0.060
    assert by_hand.typical("4R", "throughput") == 1950.0


def test_a_point_that_is_invalid_in_one_repeat_works_nowhere(build: Build) -> None:
    summaries = build(("4R",), ("small_tiny",), (2.0,), n_repeats=2)
    summaries.loc[summaries["repeat"] == 1, "valid"] = False
    assert find(summaries).failures == {"4R": {2.0: 1}}


def test_two_executors_are_refused_instead_of_averaged(build: Build) -> None:
    simulated = build(("4R",), ("small_tiny",), (2.0,))
    measured = simulated.assign(executor="live", point_id="other")
    with pytest.raises(SpecError, match="executor"):
        find(pd.concat([simulated, measured]))


@pytest.mark.parametrize(
    ("topology", "policy", "asked_x", "kind"),
    [
        ("4R", "node", np.nan, "replica"),
        ("1P_3D", "node", np.nan, "x0"),
        ("1P_2D_1pD", "node", np.nan, "partial"),
        ("1P_3pD", "node", np.nan, "x1"),
        ("1R_1P_2D", "node", np.nan, "hybrid_x0"),
        ("1R_1P_1D_1pD", "node", np.nan, "hybrid_local"),
        ("2P_2D", "fraction x=0.5", 0.5, "partial"),
        ("2P_2D", "fraction x=0.0", 0.0, "x0"),
        ("2P_2D", "always_local", np.nan, "x1"),
        ("2P_2pD", "always_pd", np.nan, "x0"),
        ("2P_2D", "table", np.nan, "partial"),
        ("1R_1P_2D", "table", np.nan, "hybrid_local"),
    ],
)
def test_the_kind_follows_from_roles_and_policy(topology: str, policy: str, asked_x: float, kind: str) -> None:
    assert kind_of(topology, policy, asked_x) == kind


def test_configurations_and_workloads_come_in_the_papers_order(paper_summaries: pd.DataFrame) -> None:
    shuffled = paper_summaries.sample(frac=1, random_state=0)
    names = ordered_configurations(shuffled)
    assert names[:5] == ["4R", "1P_3D", "1P_2D_1pD", "1P_1D_2pD", "1P_3pD"]
    assert names[-1] == "2R_1P_1pD"
    categories = dict(zip(shuffled["workload"], shuffled["workload_category"], strict=True))
    seen = [categories[name] for name in ordered_workloads(shuffled)]
    assert seen == ["decode_heavy"] * 8 + ["balanced"] * 4 + ["prefill_heavy"] * 6


def test_pareto_panels_have_one_place_per_configuration_and_a_best_on_the_frontier(
    paper_summaries: pd.DataFrame,
) -> None:
    panels = pareto_panels(find(paper_summaries), [2.0, 8.0, 20.0])
    assert len(panels) == 3 * 3 * 17
    assert panels.loc[panels["best"], "on_frontier"].all()
    assert set(panels["kind"]) == {"replica", "x0", "partial", "x1", "hybrid_x0", "hybrid_local"}


def test_local_shares_fall_with_the_weight_and_name_their_pair(table_texts: list[str]) -> None:
    shares = local_shares(table_texts, (0.1, 3.0, 1000.0))
    assert set(shares["baseline"]) == {"1P_3D", "1R_1P_2D"}
    for _, line in shares.groupby("baseline"):
        assert line["local_ratio"].is_monotonic_decreasing
    assert local_shares([], (1.0,)).empty


def test_gaps_of_nothing_are_nothing() -> None:
    empty = pd.DataFrame(columns=["workload", "qps", "configuration", "ttft", "tpot", "throughput"])
    assert gaps_to_best(empty).empty
