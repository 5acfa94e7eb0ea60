import math

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.summary import SUMMARY_FIELDS, SUMMARY_UNITS, summarise
from ppd_bench.core.enums import Executor
from ppd_bench.core.point import PolicySpec
from ppd_bench.core.slo import SLO


def one(summary: pd.DataFrame, name: str = "all", row: int = 0) -> pd.Series:
    return summary[summary["slice"] == name].iloc[row]


@pytest.fixture
def worked(make_point, make_row, make_frame):
    """Three sessions of 10 s arrivals: one whole, one whose turn 2 times out, one whose turn 1 fails."""
    p = make_point("1P_2D_1pD")
    frame = make_frame(
        make_row(p, "a", 1, at=1.0, ttft=0.2, tpot=0.02, n=11),  # last token 1.4
        make_row(p, "a", 2, at=1.4, ttft=0.1, tpot=0.01, n=21, route="local", cached_tokens=204),  # last token 1.7
        make_row(p, "b", 1, at=2.0, ttft=0.4, n=1, prefill_cached_tokens=0, cached_tokens=0, transferred_tokens=128),
        make_row(p, "b", 2, at=2.4, ttft=1.0, n=3, status="timeout", last_token_s=12.0, n_preemptions=2),
        make_row(p, "c", 1, at=3.0, n=0, status="error", first_token_s=None, last_token_s=None),
        make_row(p, "c", 2, n=0, status="unsent", route=None)
        | dict.fromkeys(("scheduled_s", "sent_s", "first_token_s", "last_token_s")),
    )
    return p, frame


def test_turns_are_conserved_and_counted_by_status(worked):
    p, frame = worked
    row = one(summarise(frame, [p]))
    counts = row[["n_scheduled", "n_ok", "n_timeout", "n_error", "n_aborted", "n_unsent"]]
    assert counts.tolist() == [6, 3, 1, 1, 0, 1]
    assert row["success_ratio"] == 0.5


def test_rates_use_the_arrival_window_and_the_span(worked):
    p, frame = worked
    row = one(summarise(frame, [p], slo=SLO(ttft_s=0.3)))
    # First send at 1.0, last token of the point (of a failed turn, yet a token) at 12.0; arrivals end at 10.0.
    assert (row["span_s"], row["drain_s"]) == (11.0, 2.0)
    assert row["offered_rps"] == pytest.approx(6 / 10)
    assert row["achieved_rps"] == pytest.approx(3 / 11)
    assert row["throughput_tokens_per_s"] == pytest.approx((11 + 21 + 1) / 11)
    assert row["goodput_rps"] == pytest.approx(2 / 11)
    assert one(summarise(frame, [p]))[["goodput_rps"]].isna().all()


def test_latencies_are_over_ok_turns_and_null_tpot_is_counted_apart(worked):
    p, frame = worked
    row = one(summarise(frame, [p]))
    assert row["ttft_mean_s"] == pytest.approx((0.2 + 0.1 + 0.4) / 3)
    assert row["ttft_p50_s"] == pytest.approx(0.2)
    # 0.1, 0.2, 0.4: place 0.9 * 2 = 1.8, so 0.2 + 0.8 * 0.2.
    assert row["ttft_p90_s"] == pytest.approx(0.36)
    assert row["tpot_mean_s"] == pytest.approx(0.015)
    assert row["n_null_tpot"] == 1
    assert row["e2e_mean_s"] == pytest.approx((0.4 + 0.3 + 0.4) / 3)
    # Ten gaps of 20 ms and twenty of 10 ms, pooled over tokens: 400 ms / 30.
    assert row["itl_mean_s"] == pytest.approx(0.4 / 30)
    assert row["itl_max_s"] == 0.02


def test_slices_split_the_turns_and_share_the_span(worked):
    p, frame = worked
    summary = summarise(frame, [p])
    first, later = one(summary, "turn1"), one(summary, "turn2plus")
    assert (first["n_scheduled"], later["n_scheduled"]) == (3, 3)
    assert first["ttft_mean_s"] == pytest.approx(0.3)
    assert later["ttft_mean_s"] == pytest.approx(0.1)
    assert later["span_s"] == 11.0
    assert later["throughput_tokens_per_s"] == pytest.approx(21 / 11)


def test_x_is_told_as_built_as_asked_and_as_realised(worked, make_point, make_row, make_frame):
    p, frame = worked
    row = one(summarise(frame, [p]))
    assert row["node_x_ratio"] == pytest.approx(1 / 3)
    assert math.isnan(row["request_x_ratio"])
    # Two turn-2 turns were sent (one timed out), one of them local; the unsent one does not count.
    assert row["realised_x_ratio"] == 0.5
    assert math.isnan(one(summarise(frame, [p]), "turn1")["realised_x_ratio"])
    asked = make_point(policy=PolicySpec(decider="fraction", params=(("x", 0.25),)))
    row = one(summarise(make_frame(make_row(asked)), [asked]))
    assert (row["request_x_ratio"], row["node_x_ratio"]) == (0.25, 0.0)
    assert (row["configuration"], row["policy"]) == ("1P_3D fraction x=0.25", "fraction x=0.25")


def test_cache_hits_and_transfers_are_counted_apart(worked):
    p, frame = worked
    row = one(summarise(frame, [p]))
    # Known hits: 204 of turn 2's 272 prompt tokens, 0 of turn 1's 128.
    assert row["prefix_hit_ratio"] == pytest.approx(204 / 400)
    assert row["transferred_tokens"] == 128
    assert math.isnan(row["transfer_bytes"])
    assert row["n_preemptions"] == 2


def test_a_point_without_turns_is_there_with_counts_of_zero_and_no_latency(make_point, make_row, make_frame):
    empty, full = make_point("4R"), make_point("1P_3D")
    summary = summarise(make_frame(make_row(full)), [empty, full])
    assert summary["slice"].tolist() == ["all", "turn1", "turn2plus"] * 2
    row = summary.iloc[0]
    assert (row["topology"], row["n_scheduled"], row["n_ok"], row["n_preemptions"]) == ("4R", 0, 0, 0)
    assert row[["ttft_mean_s", "ttft_p99_s", "success_ratio", "span_s", "throughput_tokens_per_s"]].isna().all()
    assert (row["valid"], row["invalid_reasons"]) == (False, "no turns")
    assert (summary.iloc[3]["valid"], summary.iloc[3]["invalid_reasons"]) == (True, "")


def test_a_point_where_nothing_succeeded_is_invalid_and_its_throughput_is_zero(make_point, make_row, make_frame):
    p = make_point()
    row = one(summarise(make_frame(make_row(p, status="timeout")), [p]))
    assert (row["valid"], row["invalid_reasons"]) == (False, "no turn succeeded")
    assert row["throughput_tokens_per_s"] == 0.0
    assert math.isnan(row["ttft_mean_s"])


@pytest.mark.parametrize(("executor", "valid"), [(Executor.LIVE, False), (Executor.SIM, True)])
def test_a_live_point_whose_client_lagged_is_invalid_in_every_slice(make_point, make_row, make_frame, executor, valid):
    p = make_point(executor=executor)
    frame = make_frame(make_row(p, "a", 1, scheduled_s=-0.2), make_row(p, "a", 2, at=1.0))
    summary = summarise(frame, [p])
    assert summary["valid"].tolist() == [valid] * 3
    assert summary["invalid_reasons"].str.contains("send lag p99 above limit").tolist() == [not valid] * 3
    assert one(summary)["send_lag_p99_s"] == pytest.approx(0.198)
    assert summarise(frame, [p], send_lag_limit_s=0.3)["valid"].all()


def test_row_order_and_records_of_other_points_do_not_matter(worked, make_point, make_row, make_frame):
    p, frame = worked
    other = make_frame(make_row(make_point("4R")))
    shuffled = pd.concat([other, frame]).sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(summarise(shuffled, [p]), summarise(frame, [p]))


def test_no_records_at_all_is_a_summary_of_empty_points(make_point, make_frame):
    assert summarise(make_frame(), [make_point()])["n_scheduled"].tolist() == [0, 0, 0]


def test_every_column_has_its_unit():
    assert set(SUMMARY_UNITS) == set(SUMMARY_FIELDS)
    some = ("ttft_p99_s", "qps", "throughput_tokens_per_s", "goodput_rps", "n_ok", "success_ratio", "transfer_bytes")
    assert [SUMMARY_UNITS[name] for name in some] == ["s", "1/s", "tokens/s", "1/s", "1", "1", "bytes"]
    assert SUMMARY_UNITS["topology"] == ""


def test_many_groups_agree_with_pandas(make_point, make_row, make_frame):
    rng = np.random.default_rng(0)
    points = [make_point(repeat=r) for r in range(20)]
    rows = [
        make_row(p, f"s{i}", ttft=float(rng.exponential())) for p in points for i in range(int(rng.integers(1, 30)))
    ]
    frame = make_frame(*rows)
    summary = summarise(frame, points)
    groups = (frame["first_token_s"] - frame["sent_s"]).groupby(frame["repeat"])
    found = summary[summary["slice"] == "all"]
    np.testing.assert_allclose(found["ttft_p99_s"], groups.quantile(0.99))
    np.testing.assert_allclose(found["ttft_mean_s"], groups.mean())


@pytest.mark.parametrize("backend", ["category", "string[pyarrow]", "object"])
def test_labels_may_come_in_any_type_that_a_store_reads(worked, backend):
    p, frame = worked
    typed = frame.astype(dict.fromkeys(("point_id", "status", "route", "session_id"), backend))
    pd.testing.assert_frame_equal(summarise(typed, [p]), summarise(frame, [p]))
