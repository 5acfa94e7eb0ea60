"""Where to spend GPU time, on the command line: refine, goals, capacity, table check."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd_bench.cli.errors import guarded
from ppd_bench.cli.main import app

GRID = [
    "--topologies",
    "4R,1P_3D,1P_3pD",
    "--workloads",
    "small_tiny,small_mid_bal",
    "--qps",
    "1,4",
    "--duration",
    "2s",
]
SIM = ["--executor", "sim", "--jobs", "1"]


def ppd_bench(*arguments: str) -> int:
    code = 0

    def run() -> None:
        nonlocal code
        code = app(list(arguments), standalone_mode=False) or 0

    return guarded(run) or code


def test_a_refined_sweep_tells_its_rounds_and_leaves_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--refine", "--for-table", "--repeats", "3", "--out", "run"]
    assert ppd_bench("sweep", *GRID, *SIM, *more) == 0
    told = capsys.readouterr().out
    assert "at most 24 points" in told
    assert "round 0: 0 of 4 cells decided" in told
    assert "stopped:" in told
    assert "warning: this run was refined" in told
    assert (tmp_path / "run/plots/refine.png").exists()
    assert "Certainty against GPU-seconds" in (tmp_path / "run/report.html").read_text()


def test_options_that_contradict_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ppd_bench("sweep", *GRID, "--executor", "sim", "--budget", "100") == 2
    assert "give both" in capsys.readouterr().err
    assert ppd_bench("plan", *GRID, "--for-table", "--for-split") == 2
    assert "give one" in capsys.readouterr().err


def test_plan_prices_the_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert ppd_bench("plan", *GRID, "--executor", "sim") == 0
    told = capsys.readouterr().out
    assert "--for-table: a decision table needs 2 configurations" in told
    assert "--for-split: a choice of split needs 3 configurations" in told


def test_capacity_prints_a_row_per_configuration_and_check_reads_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    where = ["--topologies", "1P_3D,1P_3pD", "--workloads", "small_tiny", "--duration", "2s"]
    found = ppd_bench(
        "capacity", *where, *SIM, "--ttft", "0.2", "--start", "8", "--highest", "16", "--repeats", "1", "--out", "cap"
    )
    assert found == 0
    told = capsys.readouterr().out
    assert "simulated: highest QPS with p99 TTFT 200 ms" in told
    assert "1P_3pD" in told
    assert "1 repeat of 2 s of arrivals" in told
    for name in ("capacity.csv", "loads.csv"):
        head, *rows = (tmp_path / "cap" / name).read_text().splitlines()
        assert head.endswith(",evidence")
        assert rows
        assert all(row.endswith(",simulated") for row in rows)
    assert ppd_bench("build-table", "cap") == 0
    assert ppd_bench("table", "check", "cap/tables/1P_3D.json", "--records", "cap") == 0
    told = capsys.readouterr().out
    assert "no cell is further from the table" in told
    assert (tmp_path / "cap/drift/drift.json").exists()
