import math

import numpy as np
import pytest

from ppd_bench.analysis.grouping import SortedGroups
from ppd_bench.analysis.steady_state import STEADY_FIELDS, STEADY_UNITS, steady_state
from ppd_bench.analysis.summary import summarise
from ppd_bench.core.errors import SpecError


def all_turns(frame):
    (row,) = frame[frame["slice"] == "all"].to_dict("records")
    return row


def test_warm_up_and_drain_are_left_out_and_the_window_is_stated(make_point, make_row, make_frame):
    p = make_point()  # 10 s of arrivals: the window is 2 to 10 s
    rows = [
        make_row(p, f"s{i}", at=at, ttft=ttft)
        for i, (at, ttft) in enumerate([(0.0, 9.0), (1.99, 9.0), (2.0, 0.1), (9.9, 0.3), (10.0, 9.0)])
    ]
    found = steady_state(make_frame(*rows), [p])
    assert list(found.columns) == list(STEADY_FIELDS)
    assert set(STEADY_UNITS) == set(STEADY_FIELDS)
    row = all_turns(found)
    assert (row["window_start_s"], row["window_end_s"], row["n_scheduled"]) == (2.0, 10.0, 2)
    assert row["ttft_mean_s"] == pytest.approx(0.2)
    assert row["offered_rps"] == pytest.approx(2 / 8)
    assert all_turns(summarise(make_frame(*rows), [p]))["n_scheduled"] == 5


def test_a_turn_that_was_never_sent_fails_in_the_window_of_the_turn_before(make_point, make_row, make_frame):
    p = make_point()
    unsent = {"status": "unsent", "scheduled_s": None, "sent_s": None, "first_token_s": None, "last_token_s": None}
    rows = [
        make_row(p, "early", 1, at=0.5, status="timeout"), make_row(p, "early", 2, **unsent),
        make_row(p, "late", 1, at=5.0, status="timeout"), make_row(p, "late", 2, **unsent),
    ]  # fmt: skip
    row = all_turns(steady_state(make_frame(*reversed(rows)), [p]))
    assert (row["n_scheduled"], row["n_timeout"], row["n_unsent"], row["success_ratio"]) == (2, 1, 1, 0.0)


def test_throughput_counts_the_tokens_that_fell_into_the_window(make_point, make_row, make_frame):
    p = make_point()
    # From 0 to 4 s, 41 tokens: half of the time is in the window. Then 11 tokens at 5 s, all inside.
    frame = make_frame(
        make_row(p, "a", at=0.0, ttft=0.0, tpot=0.1, n=41), make_row(p, "b", at=5.0, ttft=0.0, tpot=0.01, n=11)
    )
    row = all_turns(steady_state(frame, [p]))
    assert row["throughput_tokens_per_s"] == pytest.approx((41 / 2 + 11) / 8)


def test_growth_tells_queues_that_never_settle(make_point, make_row, make_frame):
    p, q = make_point(), make_point(qps=16.0)
    rows = [make_row(point, f"s{i}", at=2.0 + i, ttft=ttft) for point, grows in ((p, False), (q, True))
            for i, ttft in enumerate(np.linspace(1, 5 if grows else 1, 8))]  # fmt: skip
    found = steady_state(make_frame(*rows), [p, q])
    calm, loaded = found.loc[found["slice"] == "all", "growth_ratio"]
    assert calm == pytest.approx(1.0)
    assert loaded > 2


def test_a_warm_up_that_leaves_nothing_is_refused(make_point, make_frame):
    with pytest.raises(SpecError, match=r"warm_up_ratio is 1\.0: a share of the point from 0 to below 1"):
        steady_state(make_frame(), [make_point()], warm_up_ratio=1.0)


def test_points_without_turns_are_there_with_nothing(make_point, make_frame):
    row = all_turns(steady_state(make_frame(), [make_point()]))
    assert (row["n_scheduled"], row["throughput_tokens_per_s"]) == (0, 0.0)
    assert math.isnan(row["ttft_mean_s"])


def test_failures_count_as_infinitely_late_beside_the_survivors(make_point, make_row, make_frame):
    p = make_point()
    rows = [make_row(p, f"s{i}", ttft=0.1 * (i + 1), status="timeout" if i == 9 else "ok") for i in range(10)]
    row = all_turns(summarise(make_frame(*rows), [p]))
    assert row["ttft_p50_s"] == pytest.approx(0.5)
    assert row["ttft_p50_with_failures_s"] == pytest.approx(0.55)
    assert row["ttft_p99_s"] < 1.0
    assert row["ttft_p99_with_failures_s"] == math.inf
    assert row["e2e_p95_with_failures_s"] == math.inf
    assert row["ttft_mean_s"] == pytest.approx(0.5)


def test_without_failures_both_kinds_of_quantiles_are_the_same(make_point, make_row, make_frame):
    p = make_point()
    row = all_turns(summarise(make_frame(*(make_row(p, f"s{i}", ttft=0.1 + i) for i in range(7))), [p]))
    for name in ("ttft", "tpot", "e2e"):
        for q in ("p50", "p90", "p95", "p99"):
            assert row[f"{name}_{q}_with_failures_s"] == row[f"{name}_{q}_s"]


def test_infinite_values_of_one_group_do_not_reach_another():
    groups = SortedGroups(np.array([1.0, 2.0, 3.0]), np.array([0, 0, 2]), 4)
    found = groups.quantiles(np.ones(3, dtype=bool), (0.0, 0.5, 1.0), np.array([1, 2, 0, 0]))
    np.testing.assert_array_equal(found[0], [1.0, 2.0, math.inf])
    np.testing.assert_array_equal(found[1], [math.inf] * 3)
    np.testing.assert_array_equal(found[2], [3.0] * 3)
    assert np.isnan(found[3]).all()
