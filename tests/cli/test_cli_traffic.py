"""``replay`` and ``study`` on the command line: what they print says what it is worth, and mistakes are told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ppd_bench.cli import replay, study
from ppd_bench.core.errors import SpecError
from ppd_bench.workload.agentic import FORMAT, NOTES, agentic_rows
from ppd_bench.workload.traces.writer import write_rows


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    replay.register(made)
    study.register(made)
    return made


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl"
    with path.open("wb") as file:
        write_rows(file, "jsonl", FORMAT, agentic_rows(15, seed=1), NOTES)
    return path


def test_a_replay_prints_results_stages_and_what_was_left_out(app: typer.Typer, trace: Path, tmp_path: Path) -> None:
    arguments = [
        "--topologies",
        "2R,1P_1D",
        "--max-request-tokens",
        "30000",
        "--jobs",
        "1",
        "--no-report",
        "--time-scale",
        "100",
    ]
    done = CliRunner().invoke(app, ["replay", str(trace), *arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "simulated: no number below was measured" in done.output
    assert "Where TTFT goes, p50 and share of all TTFT (simulated)" in done.output
    assert "prompt and answer over the token cap" in done.output
    assert (tmp_path / "run" / "requests.csv").is_file()


def test_an_unknown_loop_is_told(app: typer.Typer, trace: Path) -> None:
    failed = CliRunner().invoke(app, ["replay", str(trace), "--loop", "sideways"])
    assert isinstance(failed.exception, SpecError)
    assert "allowed: timestamps, completion" in str(failed.exception)


def test_a_study_prints_simulated_beside_published(app: typer.Typer, trace: Path, tmp_path: Path) -> None:
    arguments = ["study", "agentic", str(trace), "--no-sweeps", "--jobs", "1", "--out", str(tmp_path / "study")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "no number below was measured" in done.output
    assert "3.1 Main comparison: simulated (published)" in done.output
    assert "Why simulated and published differ:" in done.output
    assert (tmp_path / "study" / "study.html").is_file()


def test_an_unknown_placement_is_told_once_by_its_own_name(app: typer.Typer, trace: Path) -> None:
    failed = CliRunner().invoke(app, ["replay", str(trace), "--placement", "nearest"])
    assert isinstance(failed.exception, SpecError)
    (problem,) = failed.exception.problems
    assert problem.startswith("command line: --placement 'nearest' is not known; allowed: round_robin")
