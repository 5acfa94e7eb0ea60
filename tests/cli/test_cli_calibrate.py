"""``calibrate`` and ``compare`` as a user meets them: what they print, and one message for every mistake."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ppd_bench.cli.calibrate import register
from ppd_bench.core.errors import SpecError
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import write_summaries
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.store import layout
from ppd_bench.store.journal import append_entry

SWEEP = """
name: small
gpus: 2
gpu: h100-80g
model: llama-3.1-8b
topologies: [2R]
workloads: [small_tiny, large_big_paste]
qps: [4]
duration: 5s
simulator: {visit_overhead: 40ms}
"""


class Silent:
    """A listener that shows nothing."""

    def started(self, n_points: int, n_finished: int) -> None: ...

    def point_done(self, point: object, n_turns: int, n_ok: int) -> None: ...

    def stage(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "small.yaml").write_text(SWEEP)
    request = SweepRequest(source=str(folder / "small.yaml"), out=folder / "run", n_processes=1, with_report=False)
    run_sweep(prepare(request), Silent())
    return folder / "run"


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    register(made)
    return made


def test_calibrate_prints_parameters_errors_and_where_the_profile_is(
    app: typer.Typer, run: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(
        app, ["calibrate", str(run), "--out", str(tmp_path), "--name", "mine", "--max-steps", "2"]
    )
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "run small-sim: simulated; 2 points and " in done.output
    assert any("visit_overhead_s" in line and "0.015 s" in line for line in lines)
    assert [line for line in lines if line.startswith("Errors")] == [
        line for line in lines if line.startswith(("Errors, built-in profile", "Errors, fitted points"))
    ]
    assert "the run is simulated: the profile says how the simulator sees itself" in " ".join(done.output.split())
    assert f"wrote {tmp_path}/profile.json" in done.output.replace("\n", "")
    assert '"name": "mine"' in (tmp_path / "profile.json").read_text()


def test_the_profile_goes_where_a_sweep_file_will_look_for_it(app: typer.Typer, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    done = CliRunner().invoke(app, ["calibrate", str(run), "--out", str(out), "--max-steps", "1"])
    assert done.exit_code == 0, done.output
    assert out.is_file()
    assert (run / "calibration/errors.csv").exists()
    file = tmp_path / "again.yaml"
    file.write_text(SWEEP.replace("simulator: {visit_overhead: 40ms}", f"simulator: {{profile: {out}}}"))
    assert prepare(SweepRequest(source=str(file), out=tmp_path / "again")).points


def test_compare_prints_a_table_for_every_slice(app: typer.Typer, run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(run), str(run), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    titles = [line.strip() for line in done.output.splitlines() if line.startswith("Errors")]
    assert titles == ["Errors, all", "Errors, turn1", "Errors, turn2plus"]
    assert done.output.count("throughput") == 3
    assert "+0.0%" in done.output
    assert (tmp_path / "errors.csv").exists()


def test_two_runs_of_one_name_are_told_apart_by_their_folders(app: typer.Typer, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "again"
    shutil.copytree(run, other)
    done = CliRunner().invoke(app, ["compare", str(run), str(other), "--out", str(tmp_path / "out")])
    told = "".join(done.output.split())
    assert f"reference:runsmall-sim({run}),simulated;againstit:runsmall-sim({other}),simulated;2pointsinboth" in told


def test_points_that_are_invalid_in_one_run_are_not_compared_and_are_said(
    app: typer.Typer, run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "doubted"
    shutil.copytree(run, other)
    opened = open_run(other)
    append_entry(
        other / layout.CHECKS, {"point_id": opened.points[0].point_id, "problems": ["an engine died"], "lateness": {}}
    )
    write_summaries(opened)
    done = CliRunner().invoke(app, ["compare", str(run), str(other), "--out", str(tmp_path / "out")])
    told = " ".join(done.output.split())
    assert "simulated; 1 point in both" in told
    assert "left out, because invalid in one of the runs: 1 common point" in told


def test_a_mistake_reaches_the_user_as_an_error_of_its_kind(app: typer.Typer, run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", str(run), "--points", "qps=9", "--out", str(tmp_path / "no")])
    assert isinstance(done.exception, SpecError)
    assert "the run has 4" in str(done.exception)
    assert not (tmp_path / "no").exists()
