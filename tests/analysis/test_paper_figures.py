"""The paper's figures: arms, wins, regret and visited cells on hand-made points."""

from __future__ import annotations

import pandas as pd
import pytest

from ppd_bench.analysis.paper_figures import agreement, arm_points, reductions, regret, ttft_by, visited_cells, wins


def point(arm: str, qps: float, ttft: float, tpot: float, *, success: float = 1.0, **more: object) -> dict[str, object]:
    return {
        "layout": "1P_3D", "workload": "chat", "qps": qps, "arm": arm, "ttft_s": ttft, "ttft_p99_s": ttft, "tpot_s": tpot,
        "e2e_s": ttft + 100 * tpot, "throughput_tokens_per_s": 1.0, "success_ratio": success, "n_scheduled": 10.0,
        "n_ok": 10.0 * success, "realised_x_ratio": 0.0, "transfer_bytes": 100.0, "degraded": success < 0.95, **more,
    }  # fmt: skip


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(rows)


def summary_rows(topology: str, category: str, policy: str, ttft: float, valid: bool = True) -> list[dict[str, object]]:
    common = {
        "point_id": f"{topology}-{policy}", "layout": "1P_3D", "workload": "chat", "qps": 2.0, "category": category,
        "policy": policy,
        "tpot_mean_s": 0.01, "e2e_mean_s": 1.0, "throughput_tokens_per_s": 5.0, "success_ratio": 1.0, "n_scheduled": 4, "n_ok": 4,
        "realised_x_ratio": 0.5, "transfer_bytes": 7, "valid": valid, "ttft_p99_s": 0.2,
    }  # fmt: skip
    return [{**common, "slice": "all", "ttft_mean_s": 9.0}, {**common, "slice": "turn2plus", "ttft_mean_s": ttft}]


def test_an_arm_is_told_by_its_roles_and_its_policy_and_other_configurations_are_left_out() -> None:
    rows = [
        *summary_rows("1P_3D", "x0", "node", 0.3),
        *summary_rows("1P_3pD", "x1", "node", 0.1, valid=False),
        *summary_rows("1P_3D", "x0", "table", 0.2),
        *summary_rows("1P_2D_1pD", "partial", "node", 0.2),
        *summary_rows("1P_3D", "x0", "fraction x=0.5", 0.2),
    ]
    points = arm_points(pd.DataFrame(rows)).set_index("arm")
    assert dict(points["ttft_s"]) == {"x0": 0.3, "x1": 0.1, "ppd": 0.2}
    assert dict(points["degraded"]) == {"x0": False, "x1": True, "ppd": False}


def test_wins_sum_to_the_points_ties_are_shared_and_a_degraded_arm_wins_nothing() -> None:
    points = frame(
        point("x0", 1, 0.3, 0.010), point("x1", 1, 0.1, 0.012), point("ppd", 1, 0.1, 0.012),
        point("x0", 2, 0.3, 0.010), point("x1", 2, 0.2, 0.012), point("ppd", 2, 0.1, 0.009),
        point("x0", 4, 0.01, 0.001, success=0.5), point("x1", 4, 0.2, 0.012), point("ppd", 4, 0.3, 0.013),
    )  # fmt: skip
    won = wins(points).set_index("arm")
    assert dict(won["n_ttft"]) == {"x0": 0.0, "x1": 1.5, "ppd": 1.5}
    assert dict(won["n_ttft_alone"]) == {"x0": 0, "x1": 1, "ppd": 1}
    assert dict(won["n_tpot"]) == {"x0": 1.0, "x1": 1.0, "ppd": 1.0}
    assert won["n_ttft"].sum() == won["n_tpot"].sum() == 3
    assert dict(won["n_success_all"]) == {"x0": 2, "x1": 3, "ppd": 3}
    assert dict(won["n_degraded"]) == {"x0": 1, "x1": 0, "ppd": 0}


def test_a_point_at_which_nobody_works_is_won_by_nobody() -> None:
    points = frame(*(point(arm, 1, 0.1, 0.01, success=0.1) for arm in ("x0", "x1", "ppd")))
    assert wins(points)["n_ttft"].sum() == 0


def test_reductions_are_of_points_at_which_both_arms_work() -> None:
    points = frame(
        point("x0", 1, 0.4, 0.010), point("ppd", 1, 0.1, 0.010, transfer_bytes=25.0),
        point("x0", 2, 0.4, 0.010, success=0.9), point("ppd", 2, 0.1, 0.010),
    )  # fmt: skip
    found = reductions(points)
    assert list(found["qps"]) == [1]
    assert found["ttft_ratio"].iloc[0] == pytest.approx(0.75)
    assert found["transfer_ratio"].iloc[0] == pytest.approx(0.75)
    assert found["e2e_ratio"].iloc[0] == pytest.approx(1 - 1.1 / 1.4)


def test_regret_is_against_the_better_side_and_negative_where_the_table_beats_both() -> None:
    points = frame(
        point("x0", 1, 0.4, 0.010), point("x1", 1, 0.2, 0.012), point("ppd", 1, 0.3, 0.008),
        point("x0", 2, 0.4, 0.010), point("x1", 2, 0.2, 0.012), point("ppd", 2, 0.2, 0.010, success=0.0),
    )  # fmt: skip
    found = regret(points).set_index("metric")
    assert found.loc["ttft", "mean_ratio"] == pytest.approx(0.5)
    assert found.loc["tpot", "mean_ratio"] == pytest.approx(-0.2)
    assert found.loc["ttft", "x0_mean_ratio"] == pytest.approx(1.0)
    assert found.loc["ttft", "x1_mean_ratio"] == pytest.approx(0.0)
    assert list(found["n_left_out"]) == [1, 1, 1]


def test_visited_cells_come_from_the_recorded_reasons() -> None:
    reasons = [
        ("table ab12 large/tiny/2 simulated score", "local"),
        ("table ab12 large/tiny/2 simulated score off-grid", "local"),
        ("table ab12 huge/tiny/2 extrapolated score tie", "pd"),
        ("turn-1", "pd"),
        (None, None),
    ]
    found = visited_cells(pd.DataFrame(reasons, columns=["reason", "route"]), "1P_3D").set_index("cell")
    assert list(found.index) == ["large/tiny/2", "huge/tiny/2"]
    assert list(found["n_turns"]) == [2, 1]
    assert found.loc["large/tiny/2", "off_grid_ratio"] == 0.5
    assert found.loc["huge/tiny/2", "evidence"] == "extrapolated"
    assert found["share_ratio"].sum() == pytest.approx(1.0)


def test_ttft_by_leaves_degraded_arms_and_absent_arms_null() -> None:
    points = frame(
        point("x0", 1, 0.4, 0.01), point("x1", 1, 0.1, 0.01), point("x0", 2, 0.5, 0.01, success=0.0), point("x1", 2, 0.1, 0.01)
    )  # fmt: skip
    found = ttft_by(points, "qps", [1, 2]).set_index("qps")
    assert found.loc[1, "reduction_ratio"] == pytest.approx(0.75)
    assert pd.isna(found.loc[2, "reduction_ratio"])
    assert found["replica_s"].isna().all()


def test_agreement_tells_level_and_order_apart() -> None:
    cells = pd.DataFrame(
        {
            "model": ["a"] * 3 + ["b"] * 3,
            "table": ["t"] * 6,
            "published": [10.0, 20.0, 30.0] * 2,
            "computed": [0.0, 10.0, 20.0, 30.0, 20.0, float("nan")],
        }
    )
    found = agreement(cells).set_index("model")
    assert list(found["n_cells"]) == [3, 2]
    assert list(found["mean_distance"]) == [10.0, 10.0]
    assert list(found["rank_correlation"]) == pytest.approx([1.0, -1.0])
