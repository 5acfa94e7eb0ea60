"""Fitting: known truths are found again, stalls do not decide, and thin data are refused with what they lack."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.calibration import (
    MIN_TURNS,
    Parameter,
    Turns,
    fit,
    lacking,
    sees_transfers,
    transfer_line,
)
from ppd_bench.analysis.metrics import Floats

TRUTH = {"visit_s": 0.02, "token_s": 5e-5, "step_s": 0.008}
START = {"visit_s": 0.005, "token_s": 2e-4, "step_s": 0.003}
RNG = np.random.default_rng(7)
TOKENS = RNG.integers(16, 2048, 120).astype(np.float64)
PARAMETERS = [Parameter(name=name, unit="s", start=start, meaning="") for name, start in START.items()]


def predict(values: dict[str, float]) -> Mapping[str, Floats]:
    """An engine without queues."""
    ttft = values["visit_s"] + values["token_s"] * TOKENS
    return {"ttft_s": ttft, "tpot_s": np.full(len(TOKENS), values["step_s"])}


def turns_of(latencies: Mapping[str, Floats]) -> Turns:
    n = len(TOKENS)
    point = np.where(np.arange(n) < n // 2, "a", "b")
    return Turns(pd.DataFrame({**latencies, "point_id": point, "turn": 1 + np.arange(n) % 2}))


def test_a_known_truth_is_found_again() -> None:
    found = fit(PARAMETERS, predict, turns_of(predict(TRUTH)))
    assert found.values() == pytest.approx(TRUTH, rel=0.01)
    assert found.loss_after < 1e-4 * found.loss_before
    assert all(estimate.identified for estimate in found.estimates)


def test_stalls_of_the_machine_do_not_decide() -> None:
    measured = {name: values * RNG.lognormal(0, 0.05, len(values)) for name, values in predict(TRUTH).items()}
    stalled = RNG.random(len(TOKENS)) < 0.05
    measured = {name: np.where(stalled, 8 * values, values) for name, values in measured.items()}
    found = fit(PARAMETERS, predict, turns_of(measured))
    assert found.values() == pytest.approx(TRUTH, rel=0.35)
    naive = np.polyfit(TOKENS, measured["ttft_s"], 1)
    assert abs(found.values()["token_s"] / TRUTH["token_s"] - 1) < abs(naive[0] / TRUTH["token_s"] - 1)


def test_what_the_data_do_not_tell_stays_where_it_began_and_is_said() -> None:
    idle = Parameter(name="nothing", unit="s", start=0.5, meaning="")
    found = fit([*PARAMETERS, idle], predict, turns_of(predict({**TRUTH, "step_s": 0.0081})))
    (estimate,) = [e for e in found.estimates if e.name == "nothing"]
    assert estimate.value == pytest.approx(0.5, rel=1e-6)

    measured = {name: values * RNG.lognormal(0, 0.3, len(values)) for name, values in predict(TRUTH).items()}
    noisy = fit([*PARAMETERS, idle], predict, turns_of(measured))
    assert [e.name for e in noisy.estimates if not e.identified] == ["nothing"]


def test_a_turn_that_the_simulator_fails_counts_against_it() -> None:
    measured = turns_of(predict(TRUTH))
    failed = {name: np.where(np.arange(len(values)) < 10, np.nan, values) for name, values in predict(TRUTH).items()}
    assert np.isfinite(measured.residuals(failed)).all()
    assert (measured.residuals(failed) ** 2).sum() > 0.1
    assert (measured.residuals(predict(TRUTH)) ** 2).sum() == pytest.approx(0, abs=1e-20)


def test_every_group_of_turns_weighs_the_same_however_many_turns_it_has() -> None:
    off = {"ttft_s": np.full(100, 1.1), "tpot_s": np.full(100, 1.1)}
    latencies = {name: np.ones(100) for name in off}
    few = pd.DataFrame({**latencies, "point_id": ["a"] * 90 + ["b"] * 10, "turn": 1})
    even = pd.DataFrame({**latencies, "point_id": ["a"] * 50 + ["b"] * 50, "turn": 1})
    first, second = (float((Turns(frame).residuals(off) ** 2).sum()) for frame in (few, even))
    assert first == pytest.approx(second)


def records(n: int, *, tokens: tuple[int, ...] = (64, 512), n_pd: int = 0, cached: int = 0) -> pd.DataFrame:
    route = np.where(np.arange(n) < n_pd, "pd", "local")
    return pd.DataFrame(
        {
            "context_tokens": 0,
            "input_tokens": np.resize(tokens, n),
            "route": route,
            "prefill_cached_tokens": np.where(route == "pd", cached, np.nan),
            "cached_tokens": np.where(route == "pd", np.nan, cached),
        }
    )


def test_thin_data_are_refused_with_everything_that_they_lack() -> None:
    assert lacking(records(MIN_TURNS)) == []
    problems = lacking(records(20, tokens=(64,), n_pd=18))
    assert [p.split(",")[0].split(":")[0] for p in problems] == [
        "20 successful turns", "all prefills are of about 64 tokens", "2 turns were prefilled where they decode",
    ]  # fmt: skip
    assert "2R" in problems[2]
    assert "0 successful turns" in lacking(records(0))[0]


def test_what_was_cached_was_not_prefilled() -> None:
    """Prompts of 512 and 560 tokens of which 500 are cached are prefills of 12 and 60."""
    assert lacking(records(MIN_TURNS, tokens=(512, 560)))
    assert not lacking(records(MIN_TURNS, tokens=(512, 560), cached=500))


def test_transfers_are_fitted_where_enough_turns_went_through_p() -> None:
    assert not sees_transfers(records(60, n_pd=9))
    assert sees_transfers(records(60, n_pd=10))


def readings(base_s: float, bytes_per_s: float) -> pd.DataFrame:
    """Counters of two engines; the second was busy before the point began."""
    n = np.cumsum([0, 1, 2, 0, 3, 1])
    n_bytes = np.cumsum([0, 1e6, 8e6, 0, 3e6, 9e6])
    seconds = base_s * n + n_bytes / bytes_per_s
    frame = pd.DataFrame({"time_s": range(6), "n_transfers": n, "transferred_bytes": n_bytes, "transfer_s": seconds})
    later = frame.assign(worker_id="D1", n_transfers=n + 50, transfer_s=seconds + 9.0)
    return pd.concat([frame.assign(worker_id="D0"), later]).assign(point_id="p")


def test_the_engines_own_counters_give_base_and_rate_of_a_transfer() -> None:
    line = transfer_line(readings(0.004, 2e9))
    assert line is not None
    assert (line.n_transfers, line.base_s) == (14, pytest.approx(0.004))
    assert line.bytes_per_s == pytest.approx(2e9)
    assert line.mean_s == pytest.approx(0.004 + line.mean_bytes / 2e9)


def test_without_transfers_there_is_no_line_and_where_size_does_not_matter_no_rate() -> None:
    idle = readings(0.004, 2e9).assign(n_transfers=np.nan)
    assert transfer_line(idle) is None
    line = transfer_line(readings(0.004, 1e30))
    assert line is not None
    assert line.bytes_per_s is None or line.bytes_per_s > 1e15
