import dataclasses
import math

import pandas as pd
import pytest

from ppd_bench.analysis.pairing import DELTA_FIELDS, deltas, pair_arms
from ppd_bench.core.errors import SpecError, StoreError
from ppd_bench.core.point import PolicySpec
from ppd_bench.core.topology import PAPER_TOPOLOGIES


def test_a_paper_run_holds_six_pairs(make_point):
    pairs = pair_arms([make_point(t) for t in PAPER_TOPOLOGIES])
    assert [(a.name, b.name) for a, b in pairs] == [
        ("1P_3D", "1P_3pD"),
        ("2P_2D", "2P_2pD"),
        ("3P_1D", "3P_1pD"),
        ("1R_1P_2D", "1R_1P_2pD"),
        ("1R_2P_1D", "1R_2P_1pD"),
        ("2R_1P_1D", "2R_1P_1pD"),
    ]


def test_an_arm_without_its_counterpart_or_with_another_decider_is_no_pair(make_point):
    fraction = make_point("1P_3pD", policy=PolicySpec(decider="fraction", params=(("x", 1.0),)))
    assert pair_arms([make_point("1P_3D"), make_point("2P_2pD"), fraction]) == []


@pytest.fixture
def arms(make_point):
    return make_point("1P_3D"), make_point("1P_3pD")


def session(make_row, p, name, *, at=0.0, ttft2=0.1, tpot2=0.01, n2=11, **turn2):
    return (
        make_row(p, name, 1, at=at, ttft=9.0),
        make_row(p, name, 2, at=at + 10, ttft=ttft2, tpot=tpot2, n=n2, **turn2),
    )


def test_deltas_are_ratios_of_means_over_ok_follow_up_turns(arms, make_row, make_frame):
    x0, x1 = arms
    frame = make_frame(
        *session(make_row, x0, "a", ttft2=0.3, tpot2=0.010),
        *session(make_row, x0, "b", ttft2=0.5, tpot2=0.014),
        *session(make_row, x1, "a", ttft2=0.1, tpot2=0.015),
        *session(make_row, x1, "b", ttft2=5.0, tpot2=5.0, status="timeout"),
    )
    row = deltas(frame, arms).iloc[0]
    assert (row["baseline"], row["candidate"], row["workload"], row["qps"]) == ("1P_3D", "1P_3pD", "small_tiny", 8.0)
    assert row["ttft_x0_s"] == pytest.approx(0.4)
    assert row["ttft_x1_s"] == pytest.approx(0.1)
    assert row["delta_ttft"] == pytest.approx(0.75)
    assert row["delta_tpot"] == pytest.approx((0.015 - 0.012) / 0.012)
    assert (row["success_x0_ratio"], row["success_x1_ratio"]) == (1.0, 0.75)
    assert row["n_pairs"] == 1


def test_a_turn_of_one_token_counts_for_ttft_alone(arms, make_row, make_frame):
    x0, x1 = arms
    frame = make_frame(
        *session(make_row, x0, "a", ttft2=0.2, tpot2=0.01),
        *session(make_row, x0, "b", ttft2=0.4, n2=1),
        *session(make_row, x1, "a"),
        *session(make_row, x1, "b"),
    )
    row = deltas(frame, arms).iloc[0]
    assert row["ttft_x0_s"] == pytest.approx(0.3)
    assert row["tpot_x0_s"] == pytest.approx(0.01)


def test_repeats_are_pooled_and_a_repeat_that_one_arm_lacks_is_left_out(make_point, make_row, make_frame):
    points = [make_point(t, repeat=r) for t in ("1P_3D", "1P_3pD") for r in range(3)]
    ttft = {("1P_3D", 0): 0.2, ("1P_3D", 1): 0.4, ("1P_3D", 2): 99.0, ("1P_3pD", 0): 0.1, ("1P_3pD", 1): 0.2}
    rows = [
        row
        for p in points
        if (p.topology, p.repeat) in ttft
        for row in session(make_row, p, "a", ttft2=ttft[p.topology, p.repeat])
    ]
    found = deltas(make_frame(*rows), points)
    assert len(found) == 1
    assert found.iloc[0]["ttft_x0_s"] == pytest.approx(0.3)
    assert found.iloc[0]["delta_ttft"] == pytest.approx(0.5)
    assert found.iloc[0]["n_pairs"] == 2


def test_a_cell_without_records_is_there_with_nulls(arms, make_point, make_row, make_frame):
    points = [*arms, make_point("1P_3D", qps=20.0), make_point("1P_3pD", qps=20.0)]
    rows = [row for p in arms for row in session(make_row, p, "a")]
    found = deltas(make_frame(*rows), points)
    assert found["qps"].tolist() == [8.0, 20.0]
    assert list(found.columns) == list(DELTA_FIELDS)
    missing = found.iloc[1]
    assert missing[["delta_ttft", "delta_tpot", "ttft_x0_s", "success_x0_ratio"]].isna().all()
    assert missing["n_pairs"] == 0


def test_pairs_and_cells_do_not_leak_into_each_other(make_point, make_row, make_frame):
    points = [make_point(t, qps=q) for q in (2.0, 4.0) for t in ("1P_3D", "1P_3pD", "2P_2D", "2P_2pD")]
    rows = [
        row
        for i, p in enumerate(points)
        for s in range(i // 4 + 1)
        for row in session(make_row, p, f"s{s}", ttft2=i + 1.0)
    ]
    found = deltas(make_frame(*rows), points)
    assert found[["baseline", "qps", "ttft_x0_s", "ttft_x1_s", "n_pairs"]].values.tolist() == [
        ["1P_3D", 2.0, 1.0, 2.0, 1],
        ["1P_3D", 4.0, 5.0, 6.0, 2],
        ["2P_2D", 2.0, 3.0, 4.0, 1],
        ["2P_2D", 4.0, 7.0, 8.0, 2],
    ]


@pytest.mark.parametrize(
    "change",
    [{"session_id": "z"}, {"turn": 3}, {"input_tokens": 99}, {"output_tokens": 99}, {"scheduled_s": 0.5}],
    ids=str,
)
def test_arms_that_saw_different_turns_cannot_be_compared(arms, make_row, make_frame, change):
    x0, x1 = arms
    changed = make_row(x1, "a", 1) | change
    frame = make_frame(make_row(x0, "a", 1), changed)
    with pytest.raises(StoreError, match=r"1P_3D and 1P_3pD saw different turns in 1 points .first: small_tiny, QPS 8"):
        deltas(frame, arms)


def test_the_order_of_turns_and_the_instants_of_later_turns_may_differ(arms, make_row, make_frame):
    x0, x1 = arms
    frame = make_frame(
        make_row(x0, "a", 1), make_row(x0, "a", 2, at=1.0), make_row(x1, "a", 2, at=7.0), make_row(x1, "a", 1)
    )
    assert deltas(frame, arms)["n_pairs"].tolist() == [1]


def test_arms_that_differ_in_more_than_x_cannot_be_compared(arms, make_row, make_frame):
    x0, x1 = arms[0], dataclasses.replace(arms[1], timeout_s=10.0)
    with pytest.raises(SpecError, match="differ in more than x"):
        deltas(make_frame(make_row(x0), make_row(x1)), [x0, x1])


def test_two_points_of_one_place_are_refused_not_mixed(arms, make_frame):
    with pytest.raises(SpecError, match="1 points share topology, workload, QPS and repeat"):
        deltas(make_frame(), [*arms, dataclasses.replace(arms[0], gpu="H200")])


def test_no_pairs_give_no_rows(make_point, make_row, make_frame):
    p = make_point("4R")
    assert deltas(make_frame(make_row(p)), [p]).empty


def test_a_side_where_nothing_succeeded_has_no_delta(arms, make_row, make_frame):
    x0, x1 = arms
    frame = make_frame(make_row(x0, "a", 2, status="timeout"), make_row(x1, "a", 2))
    row = deltas(frame, arms).iloc[0]
    assert (row["success_x0_ratio"], row["success_x1_ratio"], row["n_pairs"]) == (0.0, 1.0, 0)
    assert math.isnan(row["delta_ttft"])


@pytest.mark.parametrize("backend", ["category", "string[pyarrow]", "object"])
def test_deltas_take_labels_of_any_type_that_a_store_reads(arms, make_row, make_frame, backend):
    frame = make_frame(*(row for p in arms for name in "ab" for row in session(make_row, p, name)))
    typed = frame.astype(dict.fromkeys(("point_id", "status", "route", "session_id"), backend))
    pd.testing.assert_frame_equal(deltas(typed, arms), deltas(frame, arms))
