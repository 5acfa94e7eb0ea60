"""``calibrate`` and ``compare`` end to end, on a run of the simulator whose truth is known and is not the built-in profile."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.metrics import labels
from ppd_bench.core.errors import SpecError, StoreError
from ppd_bench.core.fitted_profile import parse_fitted_profile
from ppd_bench.core.point import SimSettings
from ppd_bench.runner.calibrate import HELD_OUT, REPEATED, CalibrateRequest, Calibration, calibrate
from ppd_bench.runner.compare import compare
from ppd_bench.runner.fitting import Played, fit_simulator
from ppd_bench.runner.runs import Run, open_run
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.runner.traffic import sessions_of
from ppd_bench.sim.step_tables.smooth import smooth_table, step_table_text
from ppd_bench.store.read import read_records

pytestmark = pytest.mark.slow

SWEEP = """
name: truth
gpus: 2
gpu: h100-80g
model: llama-3.1-8b
topologies: [2R, 1P_1D]
workloads: [small_tiny, large_mid_paste]
qps: [1, 4]
duration: 4s
engine: {handoff: pull_async}
simulator:
"""
TRUTH = {"floor_s": 0.012, "token_s": 5e-5, "context_s": 9e-8, "pair_s": 2e-9}
OVERHEADS = "  step_overhead: 3ms\n  visit_overhead: 40ms\n  transfer_base: 30ms\n  transfer_bandwidth: 2GB/s\n"
HOLDOUT = ("qps=4 workload=large_mid_paste", "qps=1 workload=small_tiny")
"""Fixed before anything was fitted: every configuration at half of its (workload, QPS)."""


class Silent:
    """A listener that shows nothing."""

    def started(self, n_points: int, n_finished: int) -> None: ...

    def point_done(self, point: object, n_turns: int, n_ok: int) -> None: ...

    def stage(self, text: str) -> None: ...


def swept(folder: Path, name: str, simulator: str, *, sweep: str = SWEEP) -> Path:
    """A finished run of the simulator."""
    file = folder / f"{name}.yaml"
    file.write_text(sweep.replace("name: truth", f"name: {name}") + simulator)
    request = SweepRequest(source=str(file), out=folder / name, n_processes=1, with_report=False)
    run_sweep(prepare(request), Silent())
    return folder / name


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the simulator with another step surface and other overheads."""
    folder = tmp_path_factory.mktemp("truth")
    (folder / "table.json").write_text(step_table_text(smooth_table(**TRUTH, name="truth", source="made up")))
    return swept(folder, "truth", f"  step_table: {folder / 'table.json'}\n{OVERHEADS}")


@pytest.fixture(scope="module")
def done(truth: Path) -> Calibration:
    return calibrate(CalibrateRequest(run=truth, holdout=HOLDOUT, beside=truth))


def errors_of(done: Calibration, which: str) -> pd.DataFrame:
    table = done.table[(done.table["set"] == which) & (done.table["slice"] == "all")]
    return table.set_index(["metric", "statistic"])


def test_the_held_out_points_of_a_known_truth_are_predicted(done: Calibration) -> None:
    before, after = (errors_of(done, which)["median_absolute_error_ratio"] for which in ("built-in profile", HELD_OUT))
    print(f"\nmedian absolute errors of means\n{pd.DataFrame({'built-in': before, 'held out': after})}")
    for metric, bound in (("ttft", 0.04), ("tpot", 0.03), ("e2e", 0.03)):
        assert before[metric, "mean"] > 0.4
        assert after[metric, "mean"] < bound
        assert after[metric, "p90"] < 2 * bound
    assert errors_of(done, HELD_OUT)["n_points"].max() == 4


def test_the_constants_of_a_known_truth_are_found_where_the_data_tell_them(done: Calibration) -> None:
    found = done.fit.values()
    assert found["visit_overhead_s"] == pytest.approx(0.04, rel=0.15)
    assert found["transfer_base_s"] == pytest.approx(0.03, rel=0.3)
    assert found["transfer_bytes_per_s"] == pytest.approx(2e9, rel=0.3)
    assert found["floor_s"] + found["step_overhead_s"] == pytest.approx(0.015, rel=0.05)
    assert found["token_s"] == pytest.approx(TRUTH["token_s"], rel=0.15)


def test_a_run_beside_itself_differs_by_nothing(done: Calibration) -> None:
    assert (errors_of(done, REPEATED)["worst_error_ratio"].dropna() == 0).all()


def test_the_profile_says_what_it_rests_on_and_is_the_same_file_twice(
    truth: Path, done: Calibration, tmp_path: Path
) -> None:
    text = done.paths[0].read_text()
    assert parse_fitted_profile(text, file="p") == done.profile
    basis = json.loads(text)["basis"]
    assert basis["evidence"] == "simulated"
    assert (basis["n_points"], len(basis["held_out"])) == (4, 4)
    assert {"machine", "versions", "inputs_hash", "parameters", "errors"} <= set(basis)
    few = CalibrateRequest(run=truth, points=("topology=2R",), max_steps=2)
    first, again = (calibrate(dataclasses.replace(few, out=tmp_path / name)) for name in ("first", "again"))
    assert again.paths[0].read_bytes() == first.paths[0].read_bytes()
    assert not any(name.startswith("transfer") for name in first.fit.values())
    assert {path.name for path in again.paths} == {"profile.json", "errors.csv", "compared.png", "compared.svg"}


def test_a_sweep_with_the_profile_is_compared_with_the_run_that_it_came_from(
    truth: Path, done: Calibration, tmp_path: Path
) -> None:
    run = swept(tmp_path, "fitted", f"  profile: {done.paths[0]}\n")
    assert open_run(run).points[0].sim.fitted_profile == done.profile.label  # type: ignore[union-attr]
    found = compare(truth, run, tmp_path / "compared")
    means = found.table[(found.table["slice"] == "all") & (found.table["statistic"] == "mean")]
    assert set(means["n_points"]) == {8}
    assert (means["median_absolute_error_ratio"] < 0.04).all()
    assert all(path.stat().st_size > 1000 for path in found.paths)
    assert {"measured", "simulated"} >= set(pd.read_csv(found.paths[0])["reference_evidence"])
    assert "8 points in both" in found.headline
    assert found.notes == ()


def test_noise_and_stalls_do_not_spoil_the_prediction(truth: Path) -> None:
    """Every latency is off by 15 % at random, and one turn in 25 stalls for half a second."""
    run = open_run(truth)
    points = [p for p in run.points if p.qps == 1.0]
    records = noisy(ok_records(run, [p.point_id for p in points]), np.random.default_rng(3))
    played = [Played(point=p, sessions=sessions_of(p)) for p in points]
    fitted = fit_simulator(played, records, run.spec.model_profile, start=SimSettings(), source="test")
    found = fitted.fit.values()
    assert found["visit_overhead_s"] == pytest.approx(0.04, rel=0.25)
    assert found["floor_s"] + found["step_overhead_s"] == pytest.approx(0.015, rel=0.1)


def ok_records(run: Run, point_ids: list[str]) -> pd.DataFrame:
    records = read_records(run.path, point_ids=point_ids)
    return records[labels(records, "status", "ok")].reset_index(drop=True)


def noisy(records: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    n = len(records)
    stall = np.where(rng.random(n) < 0.04, 0.5, 0.0)
    ttft = (records["first_token_s"] - records["sent_s"]) * rng.lognormal(0, 0.15, n) + stall
    decode = (records["last_token_s"] - records["first_token_s"]) * rng.lognormal(0, 0.15, n)
    first = records["sent_s"] + ttft
    return records.assign(first_token_s=first, last_token_s=first + decode)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"points": ("topology=4R",)}, r"no point has topology '4R'; the run has 2R, 1P_1D"),
        ({"points": ("speed=1",)}, "KEY topology, workload, qps, repeat"),
        ({"holdout": ("qps=7",)}, "--holdout: no point has qps '7'; the run has 1, 4"),
        ({"holdout": ("topology=2R,1P_1D",)}, "no valid point is left"),
        ({"points": ("topology=1P_1D",)}, "a visit and a KV transfer cannot be told apart: add a topology with R or pD"),
        ({"points": ("topology=2R qps=1 workload=small_tiny",)}, "too little to calibrate on: .* turns, 60 are needed"),
    ],
)  # fmt: skip
def test_what_cannot_be_fitted_is_refused_with_what_lacks(
    truth: Path, change: dict[str, tuple[str, ...]], told: str
) -> None:
    with pytest.raises(SpecError, match=told):
        calibrate(dataclasses.replace(CalibrateRequest(run=truth), **change))  # type: ignore[arg-type]


def test_several_mistakes_in_filters_are_told_at_once(truth: Path) -> None:
    with pytest.raises(SpecError) as refused:
        calibrate(CalibrateRequest(run=truth, points=("qps=9 topology=4R x",)))
    assert len(refused.value.problems) == 3


def test_points_of_several_tensor_parallel_sizes_are_not_fitted_together(tmp_path: Path) -> None:
    sweep = SWEEP.replace("gpus: 2", "gpus: 4").replace("[2R, 1P_1D]", "['2R', '2R@tp2']")
    run = swept(tmp_path, "sizes", "  step_overhead: 2ms\n", sweep=sweep)
    with pytest.raises(SpecError, match=r"tensor parallel sizes 1, 2: .* choose one with --points"):
        calibrate(CalibrateRequest(run=run))


def test_runs_of_other_sweeps_are_not_compared(truth: Path, tmp_path: Path) -> None:
    other = swept(tmp_path, "other", "  step_overhead: 2ms\n", sweep=SWEEP.replace("duration: 4s", "duration: 3s"))
    with pytest.raises(SpecError, match=r"duration_s differs: 4\.0 in the first, 3\.0 in the second"):
        compare(truth, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(StoreError):
        compare(truth, tmp_path / "nowhere", tmp_path / "out")


def test_a_run_of_fewer_points_is_compared_on_those_and_the_rest_is_said(truth: Path, tmp_path: Path) -> None:
    fewer = swept(tmp_path, "fewer", "  step_overhead: 2ms\n", sweep=SWEEP.replace("qps: [1, 4]", "qps: [4]"))
    found = compare(truth, fewer, tmp_path / "out")
    assert found.notes == ("in run truth-sim alone: 4 points of 8",)
