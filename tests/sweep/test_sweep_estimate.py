"""The price of a sweep, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ppd_bench.core.enums import Executor
from ppd_bench.sweep.estimate import ASSUMPTIONS, DRAIN_TPOT_S, LAUNCH_S, RESET_S, Estimate, estimate
from ppd_bench.sweep.expand import expand
from ppd_bench.sweep.spec import SweepSpec

Load = Callable[..., SweepSpec]


def estimate_of(spec: SweepSpec, *, n_processes: int = 1) -> Estimate:
    points = expand(spec, executor=Executor.LIVE, engine_version="v", profile_hash="")
    return estimate(points, simulated_turns_per_cpu_s=10_000, n_processes=n_processes)


def test_the_papers_sweep_is_counted_in_all_its_dimensions(bundled: Load) -> None:
    found = estimate_of(bundled("paper"), n_processes=2)
    assert (found.n_points, found.n_configurations, found.n_layouts) == (3060, 17, 7)
    assert (found.n_workloads, found.n_qps, found.n_repeats) == (18, 10, 1)
    assert found.layouts == ("4R", "1P_3D", "2P_2D", "3P_1D", "1R_1P_2D", "1R_2P_1D", "2R_1P_1D")
    assert found.expected_conversations == pytest.approx(79.5 * 10 * 17 * 18)
    assert found.expected_turns == pytest.approx(486_540)
    assert found.simulated_wall_s == pytest.approx(486_540 / 20_000)


def test_a_live_run_costs_windows_drains_resets_and_launches(load: Load) -> None:
    """small_tiny generates 128 + 32 tokens; 2R takes 2 GPUs and 1P_3D takes 4; one think time of 2 s."""
    found = estimate_of(load(topologies="[2R, 1P_3D]", qps="[1, 2, 4]", think_time="2s"))
    point_s = 10 + (128 + 32) * DRAIN_TPOT_S + 2 + RESET_S
    assert found.wall_s == pytest.approx(2 * LAUNCH_S + 6 * point_s)
    assert found.gpu_seconds == pytest.approx((2 + 4) * (LAUNCH_S + 3 * point_s))


def test_a_drain_is_bounded_by_the_timeouts(load: Load) -> None:
    found = estimate_of(load(topologies="[4R]", qps="[1]", timeout="0.5s"))
    assert found.wall_s == pytest.approx(LAUNCH_S + 10 + (0.5 + 32 * DRAIN_TPOT_S) + RESET_S)


def test_configurations_of_one_layout_share_its_launch(load: Load) -> None:
    found = estimate_of(load(topologies="[1P_3D, 4R, 1P_3pD]", qps="[1]"))
    assert (found.n_configurations, found.n_layouts, found.layouts) == (3, 2, ("1P_3D", "4R"))


def test_every_assumption_is_told_with_its_value(load: Load) -> None:
    assert estimate_of(load()).assumptions == ASSUMPTIONS
    for value, sentence in zip((LAUNCH_S, RESET_S, DRAIN_TPOT_S), ASSUMPTIONS, strict=True):
        assert sentence.startswith(f"{value:g} s ")


def test_no_points_cost_nothing() -> None:
    assert estimate((), simulated_turns_per_cpu_s=1).wall_s == 0
