"""The step surface of four numbers beside measured and computed ones, and fitted transfers in the simulator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.optimize import minimize
from sim_points import LLAMA, make_point, rows_of, session, workload

from ppd_bench.core.hardware import HARDWARE
from ppd_bench.core.point import SimSettings
from ppd_bench.sim.cost import TableCost
from ppd_bench.sim.profile import profile_hash, roofline
from ppd_bench.sim.simulate import simulate
from ppd_bench.sim.step_tables import STEP_TABLES, parse_step_table
from ppd_bench.sim.step_tables.smooth import SMOOTHNESS, smooth_numbers, smooth_table, step_table_text

H100 = STEP_TABLES["h100-80g", "llama-3.1-8b"]


def table_of(numbers: dict[str, float]) -> TableCost:
    table = smooth_table(**numbers, name="t", source="test")
    return TableCost(list(table.knots), table.decode, table.prefill)


def worst_of_best(k: float) -> float:
    """The largest relative error over the knots of the measured surface, with the best floor and slope."""
    tokens, seconds = np.array(H100.knots).T

    def worst(x: np.ndarray) -> float:
        return float(np.max(np.abs(((np.exp(x[0]) ** k + (np.exp(x[1]) * tokens) ** k) ** (1 / k)) / seconds - 1)))

    found = minimize(worst, np.log([6e-3, 2e-5]), method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-5})
    return float(found.fun)


def test_its_smoothness_suits_the_measured_surface_better_than_a_roofs_corner() -> None:
    smooth, sharp = worst_of_best(SMOOTHNESS), worst_of_best(40.0)
    print(f"\nworst error at a knot of the measured H100 surface: smooth {smooth:.1%}, sharp {sharp:.1%}")
    assert smooth < 0.12
    assert sharp > 1.3 * smooth


def test_numbers_of_a_smooth_surface_are_found_in_it_again() -> None:
    numbers = {"floor_s": 0.006, "token_s": 2e-5, "context_s": 4e-8, "pair_s": 9e-10}
    assert smooth_numbers(table_of(numbers)) == pytest.approx(numbers, rel=0.01)


def test_numbers_of_a_roofline_are_its_rates() -> None:
    gpu = HARDWARE["rtx-pro-6000"]
    numbers = smooth_numbers(roofline(gpu, LLAMA, 1))
    rate = gpu.peak_flop_per_s * gpu.compute_efficiency_ratio
    assert numbers["token_s"] == pytest.approx(LLAMA.flop_per_token / rate, rel=1e-3)
    assert numbers["pair_s"] == pytest.approx(LLAMA.flop_per_pair / rate, rel=1e-3)


def test_its_text_is_a_step_table_as_users_bring_it() -> None:
    table = smooth_table(floor_s=0.006, token_s=2e-5, context_s=4e-8, pair_s=9e-10, name="t", source="test")
    assert parse_step_table(step_table_text(table), file="t.json") == table


def ttft_of(sim: SimSettings) -> float:
    point = make_point("1P_1D", workload((1024, 8)), handoff="pull_async", kv_link_bytes_per_s=1e9, sim=sim)
    (row,) = rows_of(simulate(point, [session("a", 0.0, (1024, 8))], LLAMA))
    return float(row["first_token_s"] - row["sent_s"])


def test_a_fitted_transfer_takes_its_base_and_its_bytes_instead_of_the_links() -> None:
    n_bytes = 1024 * LLAMA.kv_bytes_per_token
    plain = ttft_of(SimSettings())
    fitted = ttft_of(SimSettings(transfer_base_s=0.05, transfer_bytes_per_s=4e9))
    assert fitted - plain == pytest.approx(0.05 - 0.0005 + n_bytes / 4e9 - n_bytes / 1e9, abs=1e-6)
    assert ttft_of(SimSettings(transfer_base_s=0.0)) == pytest.approx(plain - 0.0005, abs=1e-6)


def test_a_fitted_profile_changes_the_point_and_the_profile_hash_and_not_the_pair_key() -> None:
    plain, fitted = SimSettings(), SimSettings(transfer_base_s=0.05, fitted_profile="mine (abc)")
    first, second = (make_point("1P_1D", workload((8, 8)), sim=sim) for sim in (plain, fitted))
    assert first.point_id != second.point_id
    assert first.pair_key == second.pair_key
    assert profile_hash("h100-80g", LLAMA, plain) != profile_hash("h100-80g", LLAMA, fitted)
    assert dataclasses.replace(first, sim=fitted) == second
