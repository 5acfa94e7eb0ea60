"""``calibrate`` and ``compare`` as a user meets them: what they print, and one message for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ppd_bench.cli.calibrate import register
from ppd_bench.core.errors import SpecError
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep

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
    assert f"wrote {tmp_path}/profile.json" in done.output.replace("\n", "")
    assert '"name": "mine"' in (tmp_path / "profile.json").read_text()


def test_compare_prints_a_table_for_every_slice(app: typer.Typer, run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(run), str(run), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    titles = [line.strip() for line in done.output.splitlines() if line.startswith("Errors")]
    assert titles == ["Errors, all", "Errors, turn1", "Errors, turn2plus"]
    assert done.output.count("throughput") == 3
    assert "+0.0%" in done.output
    assert (tmp_path / "errors.csv").exists()


def test_a_mistake_reaches_the_user_as_an_error_of_its_kind(app: typer.Typer, run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", str(run), "--points", "qps=9", "--out", str(tmp_path / "no")])
    assert isinstance(done.exception, SpecError)
    assert "the run has 4" in str(done.exception)
    assert not (tmp_path / "no").exists()
