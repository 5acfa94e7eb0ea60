"""Which cell gets the next repeat."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.analysis.refine import (
    MIN_POOL,
    Candidate,
    next_round,
    round_allotment,
    standing,
    value_per_gpu_s,
)


def deltas(scores: list[float], n: list[float], se: float = 0.05, strain: float = 1.0) -> pd.DataFrame:
    """Cells whose S is ``scores`` under weights 1 and 0."""
    k = len(scores)
    return pd.DataFrame(
        {
            "baseline": ["2P_2D"] * k,
            "workload": ["w"] * k,
            **{f"{name}_{arm}_s": [strain] * k for name in ("ttft", "tpot") for arm in ("x0", "x1")},
            "n_repeats": n,
            "delta_ttft": scores,
            "delta_tpot": [0.0] * k,
            "delta_ttft_se": [se if count >= 2 else np.nan for count in n],
            "delta_tpot_se": [0.0] * k,
            "delta_correlation": [0.0] * k,
            "success_x0_ratio": [1.0] * k,
            "success_x1_ratio": [1.0] * k,
            "success_x0_se": [0.0 if count >= 2 else np.nan for count in n],
            "success_x1_se": [0.0 if count >= 2 else np.nan for count in n],
        }
    )


def judge(frame: pd.DataFrame):  # type: ignore[no-untyped-def]
    return standing(frame, w_ttft=1.0, w_tpot=0.0, success_bound=0.95)


def test_the_cell_nearest_to_zero_comes_first_and_a_certain_one_does_not_come() -> None:
    frame = deltas([0.9, 0.02, -0.3, 0.05], [3.0] * 4)
    found = judge(frame)
    assert list(found.side) == ["local", "local", "pd", "local"]
    chosen = next_round(
        found, np.full(4, 3.0), [Candidate(i, 100.0) for i in range(4)], confidence=0.95, allotment_gpu_s=250.0
    )
    assert [c.row for c in chosen] == [1, 3]


def test_a_cheaper_repeat_of_the_same_doubt_comes_first() -> None:
    found = judge(deltas([0.02, 0.02, 0.5], [3.0] * 3))
    cells = [Candidate(0, 400.0), Candidate(1, 100.0)]
    assert value_per_gpu_s(found, np.full(3, 3.0), cells[1]) == pytest.approx(
        4 * value_per_gpu_s(found, np.full(3, 3.0), cells[0])
    )
    assert next_round(found, np.full(3, 3.0), cells, confidence=0.95, allotment_gpu_s=400.0) == [cells[1]]


def test_nothing_is_sure_before_a_strain_has_been_repeated_and_scouts_come_first() -> None:
    frame = pd.concat(
        [deltas([0.01, 0.02, 0.03, 0.04], [2.0] * 4), deltas([5.0] * 6, [1.0] * 6, strain=2.0)], ignore_index=True
    )
    found = judge(frame)
    assert (found.confidence[4:] == 0).all()
    assert (found.confidence[:4] > 0).all()
    n = frame["n_repeats"].to_numpy()
    chosen = next_round(
        found, n, [Candidate(i, 1.0) for i in range(10)], confidence=0.95, allotment_gpu_s=MIN_POOL + 1.0
    )
    assert [c.row for c in chosen[:MIN_POOL]] == [4, 5, 6]
    assert chosen[MIN_POOL].row == 0


def test_a_side_that_fails_decides_and_doubt_about_failing_costs_most() -> None:
    frame = deltas([0.5, 0.5, 0.5], [5.0] * 3, se=0.01)
    frame.loc[0, "success_x1_ratio"] = 0.2
    frame.loc[1, "success_x1_ratio"] = 0.952
    found = judge(frame)
    assert found.side[0] == "pd"
    assert found.confidence[0] > 0.99
    assert found.loss.argmax() == 1


def test_a_cell_without_a_common_turn_is_unknown_and_is_asked_for() -> None:
    frame = deltas([0.5, np.nan, 0.5, 0.5], [3.0, 0.0, 3.0, 3.0])
    frame.loc[1, ["success_x0_ratio", "success_x1_ratio"]] = np.nan
    found = judge(frame)
    assert found.side[1] == "none"
    assert found.confidence[1] == 0
    assert found.loss.argmax() == 1


@given(coarse=st.floats(1, 1e6), launch=st.floats(0, 1e5), budget=st.one_of(st.none(), st.floats(0, 1e7)))
def test_an_allotment_never_passes_the_budget_and_launches_take_a_quarter_at_most_where_they_can(
    coarse: float, launch: float, budget: float | None
) -> None:
    found = round_allotment(coarse, launch, budget)
    assert found >= 0
    if budget is not None:
        rest = max(budget - coarse, 0.0)
        assert found <= rest
        if rest >= 4 * launch:
            assert launch <= 0.25 * found * (1 + 1e-9)


def test_repeats_where_they_matter_decide_as_well_as_five_of_everything_at_a_third_of_the_cost() -> None:
    """Cells of made-up normal scores: a check of the rule alone. Simulated engines are in tests/benchmarks/bench_refine.py."""
    rng = np.random.default_rng(3)
    truth = rng.normal(0, 0.4, 200)
    draws = truth[:, None] + rng.normal(0, 0.1, (200, 20))

    def seen(n: np.ndarray) -> pd.DataFrame:
        kept = [draws[c, :k] for c, k in enumerate(n.astype(int))]
        frame = deltas([float(k.mean()) for k in kept], list(n))
        frame["delta_ttft_se"] = [k.std(ddof=1) / np.sqrt(len(k) - 1) if len(k) > 1 else np.nan for k in kept]
        return frame

    n = np.ones(200)
    while n.sum() <= 0.35 * 5 * 200 - 25:
        chosen = next_round(
            judge(seen(n)), n, [Candidate(i, 1.0) for i in range(200)], confidence=0.99, allotment_gpu_s=25.0
        )
        n[[c.row for c in chosen]] += 1
    right = ((judge(seen(n)).side == "local") == (truth > 0)).mean()
    everything = ((judge(seen(np.full(200, 5.0))).side == "local") == (truth > 0)).mean()
    assert n.sum() <= 350
    assert right >= everything - 0.005
    assert right > ((judge(seen(np.ones(200))).side == "local") == (truth > 0)).mean()
