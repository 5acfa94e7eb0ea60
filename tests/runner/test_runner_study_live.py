"""The study's arms on engines that run: only those of the engines' layout, measured, beside the simulated ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from live_cases import Fakes

from ppd_bench.core.errors import SpecError
from ppd_bench.runner.study import StudyRequest, run_study
from ppd_bench.runner.study_words import main_tables
from ppd_bench.workload.agentic import FORMAT, NOTES, agentic_rows
from ppd_bench.workload.traces.writer import write_rows

SWEEP = """
name: ours
gpus: 8
gpu: cpu
model: tiny-llama
topologies: [8R]
workloads: [cpu_chat]
qps: [1]
timeout: 20s
engine: {max_model_len: 1024, kv_connector: NixlConnector, handoff: pull_async}
"""


def request(tmp_path: Path, endpoints: Path) -> StudyRequest:
    trace, sweep = tmp_path / "agents.jsonl", tmp_path / "ours.yaml"
    with trace.open("wb") as file:
        rows = [
            row._replace(prompt_tokens=40 + 16 * row.turn, output_tokens=3, block_ids=row.block_ids[: 2 + row.turn])
            for row in agentic_rows(12, seed=5)
        ]
        write_rows(file, "jsonl", FORMAT, rows, NOTES)
    sweep.write_text(SWEEP)
    return StudyRequest(
        trace=trace, n_requests=12, time_scale=1e6, gpu="cpu", model="tiny-llama", n_processes=1, with_sweeps=False,
        out=tmp_path / "study", endpoints=endpoints, sweep=str(sweep), timeout_s=20.0,
    )  # fmt: skip


def test_arms_of_the_engines_layout_are_measured_beside_the_simulated_ones(tmp_path: Path) -> None:
    told: list[str] = []
    with Fakes("RRRRRRRR") as engines:
        asked = request(tmp_path, engines.write(tmp_path / "engines.yaml"))
        study = run_study("agentic", asked, told.append)
        before = (study.folder / "measured.csv").read_bytes()
        again = run_study("agentic", asked, told.append)
    assert [one.case.arm.key for one in study.measured] == ["8R_round_robin", "8R_cache_aware"]
    for one in study.measured:
        assert one.figures.summary["n_ok"] == one.figures.summary["n_scheduled"] >= 12
        assert one.case.point.executor.evidence == "measured"
        assert (one.folder / "records.parquet").exists()
    rows = list(csv.DictReader((study.folder / "measured.csv").read_text().splitlines()))
    assert {row["evidence"] for row in rows} == {"measured"}
    assert {row["busy_all_ratio"] for row in rows} == {""}, "engines do not tell how long their steps took"
    assert {row["evidence"] for row in csv.DictReader((study.folder / "main.csv").read_text().splitlines())} == {
        "simulated"
    }
    measured = [table for table in main_tables(study) if "measured on the engines given" in table.caption]
    assert [table.caption[:3] for table in measured] == ["3.1", "3.2", "3.3"]
    stages = dict(zip(measured[2].head, measured[2].rows[0], strict=True))
    assert (stages["prefill"], stages["unsplit"]) == ("–", "100.0 %"), "what engines do not tell is no 0"
    assert "no number below was measured" not in study.evidence_line
    assert "measured/8R_cache_aware" in json.loads((study.folder / "study.json").read_text())["figures"]
    assert (again.folder / "measured.csv").read_bytes() == before, "arms that are done are kept"
    assert any("was played before" in text for text in told)


def test_a_split_is_measured_with_its_hand_off_and_telling_d_at_once_is_not(tmp_path: Path) -> None:
    with Fakes("PPPPPPDD") as engines:
        asked = request(tmp_path, engines.write(tmp_path / "engines.yaml"))
        study = run_study("agentic", asked, lambda text: None)
    (one,) = study.measured
    assert one.case.arm.key == "6P_2D"
    assert one.figures.summary["n_ok"] == one.figures.summary["n_scheduled"]
    assert {load.role for load in one.figures.loads} == {"all", "P", "D"}


def test_engines_that_are_no_arm_are_refused_before_anything_is_played(tmp_path: Path) -> None:
    with Fakes("RR") as engines:
        asked = request(tmp_path, engines.write(tmp_path / "engines.yaml"))
        with pytest.raises(SpecError, match="these engines are 2R, and the study compares 8R, 4P_4D, 6P_2D"):
            run_study("agentic", asked, lambda text: None)
    assert not (tmp_path / "study" / "measured").exists()
