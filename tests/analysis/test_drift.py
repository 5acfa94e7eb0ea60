"""Sequential tests of drift: what they hold at every look."""

from __future__ import annotations

import numpy as np
import pytest

from ppd_bench.analysis.drift import DriftOptions, running_evidence, running_share_evidence
from ppd_bench.core.errors import SpecError

BAND = 0.2


def share_that_alarms(shift: float, n: int, alpha: float, trials: int = 1500) -> float:
    rng = np.random.default_rng(11)
    draws = rng.normal(shift, 0.3, (trials, n))
    return float(np.mean([running_evidence(row, BAND).max() >= 1 / alpha for row in draws]))


def test_a_mean_at_the_edge_of_the_tolerance_alarms_no_more_often_than_stated_over_all_looks() -> None:
    assert share_that_alarms(BAND, 150, 0.05) <= 0.05
    assert share_that_alarms(-BAND, 150, 0.05) <= 0.05


def test_a_mean_within_the_tolerance_hardly_ever_alarms_and_a_far_one_always_does() -> None:
    assert share_that_alarms(0.0, 150, 0.05) <= 0.01
    assert share_that_alarms(0.8, 30, 0.001) >= 0.99
    assert share_that_alarms(-0.8, 30, 0.001) >= 0.99


def test_a_share_at_the_bound_alarms_no_more_often_than_stated_over_all_looks() -> None:
    rng = np.random.default_rng(12)
    quiet = rng.random((1500, 300)) < 0.05
    assert np.mean([running_share_evidence(row, 0.05).max() >= 20 for row in quiet]) <= 0.05
    loud = rng.random((300, 300)) < 0.2
    assert np.mean([running_share_evidence(row, 0.05).max() >= 1000 for row in loud]) >= 0.95


def test_no_values_are_no_evidence() -> None:
    assert running_evidence(np.array([]), BAND).size == 0
    assert running_share_evidence(np.array([], dtype=bool), 0.05).size == 0
    assert (running_evidence(np.array([9.0, 9.0]), BAND) == 0).all()


def test_every_unusable_number_is_named() -> None:
    with pytest.raises(SpecError) as error:
        DriftOptions(alpha=0.0, tolerance_ratio=-1.0, outside_ratio=1.0).check()
    assert len(error.value.problems) == 3
