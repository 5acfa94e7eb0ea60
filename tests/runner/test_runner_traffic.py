"""Recorded traffic as points: identity by content, one set of conversations for both executors, sweeps on datasets."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path

import pytest

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow
from ppd_bench.policy.table import DecisionTable
from ppd_bench.runner.live import LiveOptions
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.runner.traffic import TrafficWish, read_traffic, sessions_of
from ppd_bench.workload.agentic import FORMAT, NOTES, agentic_rows
from ppd_bench.workload.traces.writer import write_rows

SWEEP = """
name: traced
gpus: 4
gpu: h100-80g
model: llama-3.1-8b
topologies: [4R, 2P_2D]
workloads:
  - small_tiny
  - {{dataset: {path}, name: drawn}}
  - {{dataset: {path}, name: recorded, arrivals: recorded, time_scale: 100, max_inflight_sessions: 4}}
qps: [1, 2]
duration: 5s
timeout: 60s
engine: {{max_model_len: 100000, gpu_memory_utilization: 0.9}}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl"
    with path.open("wb") as file:
        write_rows(file, "jsonl", FORMAT, agentic_rows(30, seed=3), NOTES)
    return path


@pytest.fixture
def sweep_file(trace: Path, tmp_path: Path) -> Path:
    path = tmp_path / "traced.yaml"
    path.write_text(SWEEP.format(path=trace))
    return path


def test_traffic_is_identified_by_content_and_not_by_place(trace: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "agents.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(trace.read_bytes())
    here, there = (read_traffic(TrafficWish(path=path)) for path in (trace, moved))
    assert here.workload == there.workload
    moved.write_bytes(trace.read_bytes() + trace.read_bytes().splitlines(keepends=True)[-1])
    assert read_traffic(TrafficWish(path=moved)).spec.sha256 != here.spec.sha256


def test_a_sweep_can_name_a_dataset_beside_synthetic_workloads(sweep_file: Path, tmp_path: Path, quiet) -> None:
    prepared = prepare(SweepRequest(source=str(sweep_file), out=tmp_path / "run", with_report=False))
    by_name: dict[str, set[float]] = {}
    for point in prepared.points:
        by_name.setdefault(point.workload.name, set()).add(point.qps)
    assert by_name["small_tiny"] == by_name["drawn"] == {1.0, 2.0}
    (rate,) = by_name["recorded"]
    traffic = next(p.workload.traffic for p in prepared.points if p.workload.name == "recorded")
    assert traffic is not None
    assert rate == pytest.approx(traffic.figures.n_sessions / (traffic.figures.duration_s / 100))
    outcome = run_sweep(prepared, quiet)
    run = open_run(outcome.folder)
    assert {point.point_id for point in run.points} == {point.point_id for point in prepared.points}
    summary = summaries_of(run)
    overall = summary[summary["slice"] == "all"]
    assert (overall["n_ok"] > 0).all()
    assert (overall.loc[overall["workload"] == "recorded", "n_scheduled"] == traffic.figures.n_requests).all()
    told = [warning for warning in outcome.warnings if "requests read" in warning]
    assert told
    assert "agents.jsonl" in told[0]


def test_wrong_keys_of_a_dataset_are_all_told_with_their_place(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SWEEP.format(path=trace).replace("name: drawn", "name: drawn, arivals: poisson, time_scale: -1"))
    with pytest.raises(SpecError) as caught:
        prepare(SweepRequest(source=str(path)))
    text = str(caught.value)
    assert "bad.yaml: workloads[1]" in text
    assert "did you mean 'arrivals'" in text
    assert "time_scale" in text


def test_requests_that_no_engine_takes_are_left_out_and_counted(sweep_file: Path, tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(sweep_file.read_text().replace("100000", "20000"))
    prepared = prepare(SweepRequest(source=str(path)))
    (_, dropped) = next(iter(prepared.traffics[0].counts.dropped.items()))
    assert dropped > 0
    assert all(p.workload.longest_tokens <= 20_000 for p in prepared.points)


def test_a_file_that_changed_under_a_run_is_refused(sweep_file: Path, trace: Path) -> None:
    prepared = prepare(SweepRequest(source=str(sweep_file)))
    point = next(point for point in prepared.points if point.workload.name == "drawn")
    trace.write_bytes(trace.read_bytes() + b"\n")
    with pytest.raises(SpecError, match="has changed since it was read"):
        sessions_of(dataclasses.replace(point, seed=99), prepared.spec.sources)
    with pytest.raises(SpecError, match="not at hand"):
        sessions_of(point, ())


def test_both_executors_get_the_same_conversations(sweep_file: Path) -> None:
    prepared = prepare(SweepRequest(source=str(sweep_file)))
    drawn = [point for point in prepared.points if point.workload.name == "drawn" and point.qps == 2.0]
    assert len(drawn) == 2
    one, two = (sessions_of(point, prepared.spec.sources) for point in drawn)
    assert one == two
    assert len(one) > 0


def test_fire_and_forget_is_not_for_engines(sweep_file: Path, tmp_path: Path) -> None:
    from ppd_bench.core.errors import LaunchError

    path = tmp_path / "told.yaml"
    text = sweep_file.read_text().replace("engine: {", "engine: {handoff: pull_async, dispatch: fire_and_forget, ")
    path.write_text(text.replace("timeout: 60s", "timeout: 60s\nexecutor: live"))
    with pytest.raises(LaunchError, match="simulated only"):
        prepare(SweepRequest(source=str(path), live=LiveOptions(endpoints=tmp_path / "none.yaml")))


ARMS = """
name: arms
gpus: 4
gpu: h100-80g
model: llama-3.1-8b
topologies: [2P_2D, 2P_2pD]
workloads: [{{dataset: {path}, name: talk}}]
qps: [1, 2]
duration: 4s
timeout: 60s
engine: {{max_model_len: 100000, gpu_memory_utilization: 0.9}}
"""


def arms_on(path: Path, tmp_path: Path) -> SweepRequest:
    sweep = tmp_path / "arms.yaml"
    sweep.write_text(ARMS.format(path=path))
    return SweepRequest(source=str(sweep), out=tmp_path / "run", n_processes=1)


def test_recorded_traffic_ends_in_a_table_whose_cell_is_its_mean_follow_up_turn(tmp_path: Path, quiet) -> None:
    trace = tmp_path / "talks.jsonl"
    rows = [
        TraceRow(3 * s + k, f"s{s}.t{k}", f"s{s}", k + 1, None, None, 300 * (k + 1) + s, 40 + k, array("q"), None)
        for s in range(8)
        for k in range(3)
    ]
    with trace.open("wb") as file:
        write_rows(file, "jsonl", dataclasses.replace(FORMAT, block_tokens=None, tail=None, id_scope=None), rows, NOTES)
    prepared = prepare(arms_on(trace, tmp_path))
    sessions = prepared.traffics[0].recording.families
    followups = [row for family in sessions for thread in family for row in thread.rows[1:]]
    followup = prepared.points[0].workload.followup
    assert followup is not None
    assert followup[2] == round(sum(row.output_tokens for row in followups) / len(followups))
    assert sum(followup[:2]) == pytest.approx(sum(row.prompt_tokens for row in followups) / len(followups), abs=1.5)
    outcome = run_sweep(prepared, quiet)
    table = DecisionTable.from_json((outcome.folder / "tables" / "2P_2D.json").read_text())
    visited = [cell for cell in table.cells if cell.visited]
    assert [(cell.workloads, cell.qps) for cell in visited] == [(("talk",), 1.0), (("talk",), 2.0)]
    assert {cell.type for cell in visited} == {f"{followup[1]}to{followup[2]}"}
    assert all(cell.delta_ttft is not None for cell in visited)
    assert any(
        "talk: recorded traffic; all of its follow-up turns are averaged" in warning for warning in outcome.warnings
    )
    assert (outcome.folder / "report.html").exists()


def test_traffic_without_follow_up_turns_ends_in_a_report_without_a_table(tmp_path: Path, quiet) -> None:
    lines = [f"2023-11-16 18:15:{k:02d}.0000000,{100 + k},{5 + k}\n" for k in range(30)]
    path = tmp_path / "single.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    prepared = prepare(arms_on(path, tmp_path))
    assert prepared.points[0].workload.followup is None
    outcome = run_sweep(prepared, quiet)
    assert any("no decision table" in warning and "two turns or more" in warning for warning in outcome.warnings)
    assert (outcome.folder / "report.html").exists()
    assert not (outcome.folder / "tables").exists()


def test_conversations_that_come_at_no_rate_get_no_cell_of_a_table(tmp_path: Path, shared: Path, quiet) -> None:
    chat = shared / "data" / "chat" / "dialogstudio_ShareGPT_original_example.json"
    request = arms_on(chat, tmp_path)
    sweep = tmp_path / "arms.yaml"
    sweep.write_text(
        sweep.read_text().replace("name: talk", "name: talk, arrivals: recorded, max_inflight_sessions: 2")
    )
    prepared = prepare(request)
    assert prepared.points[0].workload.followup is not None
    outcome = run_sweep(prepared, quiet)
    assert any("no decision table" in warning for warning in outcome.warnings)
    assert any("estimated, not from a tokenizer" in warning for warning in outcome.warnings)
    page = (outcome.folder / "report.html").read_text()
    assert f"{chat.name}, read as sharegpt, blocks of 16, tokens estimated" in page
