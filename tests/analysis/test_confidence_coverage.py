"""Intervals against the truth of the simulator under load. The long version is tests/benchmarks/bench_coverage.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ppd_bench.analysis.confidence import MIN_REPEATS

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from bench_coverage import CellOf, Pool, coverage, decisions, pool_of, truth_of

N_POOL = 240
LIGHT = CellOf(baseline="2P_2D", workload="large_huge_paste", qps=2.0)
LOADED = CellOf(baseline="1P_3D", workload="large_huge_paste", qps=5.0, gpu="a100-80g")
"""Its P is near its capacity: the mean TTFT at x=0 is four times that of an idle system."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[LIGHT, LOADED], ids=["light", "near saturation"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return pool_of(request.param, N_POOL)


# 93 to 97 %, and one point for a truth and trials that come from N_POOL repeats.
LOW, HIGH = 0.92, 0.98


@pytest.mark.parametrize("n", [MIN_REPEATS, 8, 12])
def test_intervals_hold_the_truth_as_often_as_they_say(pool: Pool, n: int) -> None:
    found = coverage(pool, n, 2000, np.random.default_rng(0), w_tpot=3.0)
    assert ((found >= LOW) & (found <= HIGH)).all(), found


def test_a_decision_at_the_point_of_indifference_is_rarely_called_certain(pool: Pool) -> None:
    ttft, tpot = pool.truth
    w_tpot = ttft / tpot  # S is 0: either sign is wrong
    assert abs(truth_of(pool, w_tpot)[2]) < 1e-9
    assert sum(decisions(pool, MIN_REPEATS, 2000, np.random.default_rng(1), w_tpot)) < 0.08


def test_a_clear_difference_is_found_and_hardly_ever_with_the_wrong_sign(pool: Pool) -> None:
    right, wrong = decisions(pool, MIN_REPEATS, 2000, np.random.default_rng(2), w_tpot=1.0)
    assert right > 0.95
    assert wrong == 0.0
