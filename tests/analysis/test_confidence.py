import dataclasses
import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ppd_bench.analysis.compile_table import compile_table, reweigh
from ppd_bench.analysis.confidence import (
    MIN_REPEATS,
    covariance_of_deviations,
    discoveries,
    half_width,
    leave_one_out,
    probability_above_zero,
    score_se,
)
from ppd_bench.analysis.judging import doubts
from ppd_bench.analysis.pairing import DELTA_FIELDS, deltas, figures_with_covariance
from ppd_bench.analysis.winners import local_share
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.table import DecisionTable

PAIR = (parse_topology("1P_3D"), parse_topology("1P_3pD"))


def test_the_interval_is_students_t_and_there_is_none_below_the_minimum():
    for n in (MIN_REPEATS, 8, 20):
        assert half_width(2.0, n) == pytest.approx(2 * stats.t.ppf(0.975, n - 1))
    assert np.isnan(half_width([1.0, 1.0], [1, MIN_REPEATS - 1])).all()
    assert half_width(1.0, 2, min_repeats=2) == pytest.approx(stats.t.ppf(0.975, 1))


def test_the_probability_agrees_with_the_interval_and_bears_a_standard_error_of_zero():
    edge = float(half_width(1.0, 6))
    assert probability_above_zero(edge, 1.0, 6) == pytest.approx(0.975)
    assert probability_above_zero(-edge, 1.0, 6) == pytest.approx(0.025)
    assert probability_above_zero([1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [6, 6, 6]).tolist() == [1.0, 0.0, 0.5]
    assert np.isnan(probability_above_zero(1.0, 1.0, MIN_REPEATS - 1))


def test_one_cell_by_itself_is_decided_where_its_interval_excludes_zero_and_many_need_more():
    assert discoveries(np.array([0.976])).tolist() == [True]
    assert discoveries(np.array([0.974])).tolist() == [False]
    # One such cell among twenty that say nothing may be chance: 20 * 0.048 is far above 0.05.
    assert not discoveries(np.array([0.976] + [0.5] * 19)).any()
    # Nineteen certain ones carry it: the largest p-value may be up to the bound itself.
    assert discoveries(np.array([0.976] + [0.0001] * 19)).all()
    assert discoveries(np.array([])).tolist() == []


sums = st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 50)), min_size=2, max_size=12)


@given(sums)
def test_the_error_of_a_plain_mean_is_that_of_the_textbook_over_the_factor_that_is_left_out(rows):
    values = np.array([top for top, _ in rows])[:, None]
    n, group = len(rows), np.zeros(len(rows), dtype=np.int64)
    pooled, without = leave_one_out(values, np.ones_like(values), group, 1)
    found = covariance_of_deviations(without - pooled[group], group, 1)[0, 0, 0]
    assert found == pytest.approx(values.var(ddof=1) / n * n / (n - 1), rel=1e-6, abs=1e-12)


arm = st.lists(st.tuples(*[st.floats(0.05, 5.0)] * 4, st.integers(1, 30)), min_size=2, max_size=8)
weights = st.floats(0, 10)


def tallies(rows):
    """Per repeat, of x=0 then x=1: sums and counts of TTFT, TPOT and successes."""
    ttft0, tpot0, ttft1, tpot1, n = np.array(rows, dtype=float).T
    return np.stack([ttft0 * n, tpot0 * n, n, ttft1 * n, tpot1 * n, n], axis=1), np.stack([n] * 6, axis=1)


@given(arm, weights, weights)
def test_the_scores_error_under_any_weights_follows_from_three_numbers(rows, w_ttft, w_tpot):
    tops, bottoms = tallies(rows)
    group = np.zeros(len(rows), dtype=np.int64)
    figures, covariance = figures_with_covariance(tops, bottoms, group, 1)

    def score_of(keep):
        f = figures_with_covariance(tops[keep], bottoms[keep], group[: keep.sum()], 1)[0][0]
        return w_ttft * f[0] - w_tpot * f[1]

    everyone = np.ones(len(rows), dtype=bool)
    left_out = [score_of(np.arange(len(rows)) != i) for i in range(len(rows))]
    expected = math.sqrt(sum((s - score_of(everyone)) ** 2 for s in left_out))
    (ttft_se, tpot_se), both = np.sqrt([covariance[0, 0, 0], covariance[0, 1, 1]]), covariance[0, 0, 1]
    correlation = both / (ttft_se * tpot_se) if ttft_se * tpot_se else 0.0
    assert score_se(ttft_se, tpot_se, correlation, w_ttft, w_tpot) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert figures[0, 2:].tolist() == [1.0, 1.0]


@given(arm, st.permutations(range(8)))
def test_neither_the_order_of_repeats_nor_the_unit_of_time_matters(rows, order):
    tops, bottoms = tallies(rows)
    group = np.zeros(len(rows), dtype=np.int64)
    places = [i for i in order if i < len(rows)]
    scaled = tops[places] * np.array([1000, 1000, 1, 1000, 1000, 1])
    one, other = (figures_with_covariance(t, b, group, 1) for t, b in ((tops, bottoms), (scaled, bottoms[places])))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.fixture
def repeated(make_point, make_row, make_frame):
    """Deltas of small_tiny at QPS 8 from one turn-2 TTFT per repeat and arm; TPOT rises by 20 % in each."""

    def make(x0_s, x1_s, *, failed=0):
        arms = (PAIR[0].name, x0_s, 0.010), (PAIR[1].name, x1_s, 0.012)
        points, rows = [], []
        for name, values, tpot in arms:
            for repeat, ttft in enumerate(values):
                p = make_point(name, repeat=repeat)
                points.append(p)
                rows.append(make_row(p, "a", 2, ttft=ttft, tpot=tpot, status="timeout" if repeat < failed else "ok"))
        return deltas(make_frame(*rows), points), points

    return make


def cell_of(frame, points, *, w_tpot=1.0, fallback="pd"):
    text = compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=w_tpot, fallback=fallback)
    (cell,) = [c for c in DecisionTable.from_json(text).cells if c.visited]
    return cell


X0 = (0.20, 0.22, 0.18, 0.21, 0.19, 0.20)
X1 = (0.10, 0.12, 0.09, 0.10, 0.11, 0.08)


def test_repeats_give_an_interval_and_fewer_give_none_and_say_so(repeated):
    frame, points = repeated(X0, X1)
    row = frame.iloc[0]
    assert row["n_repeats"] == 6
    assert row["delta_ttft_low"] < row["delta_ttft"] < row["delta_ttft_high"]
    cell = cell_of(frame, points)
    assert (cell.certainty, cell.decision, cell.n_repeats) == ("decided", "local", 6)
    assert cell.score_interval[0] > 0
    assert cell.probability > 0.99
    few, points = repeated(X0[: MIN_REPEATS - 1], X1[: MIN_REPEATS - 1])
    assert few[["delta_ttft_low", "delta_ttft_high"]].isna().all(axis=None)
    assert few["delta_ttft_se"].notna().all()
    cell = cell_of(few, points)
    assert (cell.certainty, cell.decision, cell.evidence, cell.n_repeats) == (
        "no_interval", "local", "simulated", MIN_REPEATS - 1,
    )  # fmt: skip
    assert (cell.score_interval, cell.delta_ttft_interval, cell.probability) == (None, None, None)


def test_one_repeat_decides_as_ever_and_is_loudly_without_interval(repeated):
    frame, points = repeated(X0[:1], X1[:1])
    assert frame["delta_ttft_se"].isna().all()
    text = compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1)
    (warning,) = doubts(DecisionTable.from_json(text))
    assert "1 of 1 cells with evidence: NO INTERVAL" in warning
    assert "repeats: 5 or more: small/tiny/8" in warning


def test_b31_a_tie_takes_the_fallback_and_is_reported(repeated):
    frame, points = repeated(X0, X1)
    # delta_ttft is 0.5 and delta_tpot 0.2: S is 0 at w_tpot 2.5.
    for w_tpot, fallback in itertools.product((2.45, 2.55), ("pd", "local")):
        cell = cell_of(frame, points, w_tpot=w_tpot, fallback=fallback)
        assert (cell.certainty, cell.decision, cell.rule, cell.evidence) == ("tie", fallback, "equation1", "simulated")
        assert cell.score_interval[0] < 0 < cell.score_interval[1]
    text = compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=2.45, fallback="local")
    table = DecisionTable.from_json(text)
    assert table.reason(cell).endswith("small/tiny/8 simulated equation1 tie")
    assert ["the fallback 'local' answers" in line for line in doubts(table)] == [True]
    assert cell_of(frame, points, w_tpot=9.0, fallback="local").decision == "pd"


def test_a_side_whose_success_may_be_on_either_side_of_the_bound_is_unclear(repeated):
    frame, points = repeated((0.2,) * 8, (0.1,) * 8, failed=1)
    assert frame["success_x0_se"].iloc[0] > 0
    text = compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1, success_bound=0.8)
    (cell,) = [c for c in DecisionTable.from_json(text).cells if c.visited]
    assert (cell.certainty, cell.decision) == ("success_unclear", "local")
    assert "cannot be told from the bound 0.8" in doubts(DecisionTable.from_json(text))[0]


def test_reweighing_gives_the_intervals_that_compiling_gives(repeated):
    frame, points = repeated(X0, X1)
    first, second = (compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=w) for w in (1, 2.45))
    assert reweigh(first, 1, 2.45) == second
    assert reweigh(second, 1, 1) == first


def test_the_share_of_local_tells_its_band_of_ties(repeated):
    frame, points = repeated(X0, X1)
    text = compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1)
    shares = local_share(text, [1, 2.45, 9])
    assert shares["n_tie"].tolist() == [0, 1, 0]
    assert shares["local_ratio"].tolist() == [1, 0, 0]
    assert shares["local_low_ratio"].tolist() == [1, 0, 0]
    assert shares["local_high_ratio"].tolist() == [1, 1, 0]


def test_a_cell_of_several_workloads_has_the_error_of_their_weighted_mean(make_point, make_lengths):
    both = [make_lengths("a", (100, 100), (16, 32)), make_lengths("b", (50, 50), (16, 32))]
    points = [make_point(arm.name, workload=w) for arm in PAIR for w in both]
    base = {
        "baseline": "1P_3D", "candidate": "1P_3pD", "qps": 8.0, "ttft_x0_s": 0.2, "ttft_x1_s": 0.1, "tpot_x0_s": 0.01,
        "tpot_x1_s": 0.012, "success_x0_ratio": 1.0, "success_x1_ratio": 1.0, "success_x0_se": 0.0, "success_x1_se": 0.0,
        "delta_correlation": 0.5, "delta_tpot_se": 0.02, "n_pairs": 5,
    }  # fmt: skip
    rows = [
        base | {"workload": "a", "delta_ttft_se": 0.03, "n_repeats": 9},
        base | {"workload": "b", "delta_ttft_se": 0.04, "n_repeats": 6},
    ]
    cell = cell_of(pd.DataFrame(rows, columns=list(DELTA_FIELDS)), points)
    assert cell.delta_ttft_se == pytest.approx(0.5 * math.hypot(0.03, 0.04))
    assert cell.delta_tpot_se == pytest.approx(0.5 * math.hypot(0.02, 0.02))
    assert cell.delta_correlation == pytest.approx(
        0.5 * (0.03 + 0.04) * 0.02 / (math.hypot(0.03, 0.04) * math.hypot(0.02, 0.02))
    )
    assert cell.n_repeats == 6


def test_a_table_of_the_schema_before_intervals_still_loads_and_reweighs(repeated):
    frame, points = repeated(X0, X1)
    content = json.loads(compile_table(frame, points, pair=PAIR, w_ttft=1, w_tpot=1))
    added = {"certainty", "n_repeats", "score_interval", "delta_ttft_se", "delta_tpot_se", "delta_correlation",
             "success_x0_se", "success_x1_se"}  # fmt: skip
    old = content | {"schema_version": "1.0", "cells": [
        {k: None if k.endswith("interval") or k == "probability" else v for k, v in c.items() if k not in added}
        for c in content["cells"]
    ]}  # fmt: skip
    del old["rules"]["min_repeats"], old["content_hash"]
    from ppd_bench.core.point import content_hash

    text = json.dumps(old | {"content_hash": content_hash(old)})
    assert {c.certainty for c in DecisionTable.from_json(text).cells} == {None}
    again = DecisionTable.from_json(reweigh(text, 1, 2))
    assert (again.schema_version, again.rules.min_repeats) == ("1.1", MIN_REPEATS)
    assert {c.certainty for c in again.cells if c.visited} == {"no_interval"}


def test_same_repeats_give_the_same_bytes_whatever_the_order_of_points(repeated):
    frame, points = repeated(X0, X1)
    again, _ = repeated(X0, X1)
    texts = {compile_table(f, p, pair=PAIR, w_ttft=1, w_tpot=1) for f, p in ((frame, points), (again, points[::-1]))}
    assert len(texts) == 1


@settings(max_examples=20)
@given(arm)
def test_every_interval_holds_its_own_figure(rows):
    tops, bottoms = tallies(rows)
    group = np.zeros(len(rows), dtype=np.int64)
    figures, covariance = figures_with_covariance(tops, bottoms, group, 1)
    half = half_width(np.sqrt(np.diag(covariance[0])), np.full(4, len(rows)), min_repeats=2)
    assert np.isfinite(figures).all()
    assert (half >= 0).all()


def test_paired_deltas_have_a_field_for_each_column():
    from ppd_bench.core.results import PairedDelta

    assert tuple(f.name for f in dataclasses.fields(PairedDelta)) == DELTA_FIELDS
