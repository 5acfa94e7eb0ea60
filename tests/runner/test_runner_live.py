"""Live sweeps against fake engines on real sockets: the same records, proven paths, deaths survived."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from live_cases import SWEEP, Fakes, Watcher, leave_an_orphan, live_sweep

from ppd_bench.core.errors import LaunchError, NotReady, SpecError
from ppd_bench.engine.gpu import GpuGauges
from ppd_bench.engine.metrics import EngineCounters, EngineGauges, EngineScrape
from ppd_bench.engine.proc_fs import identify
from ppd_bench.loadgen.lateness import ClientLateness, Lateness
from ppd_bench.runner.checks import problems_of, record_checks, write_engine_metrics
from ppd_bench.runner.listeners import TurnStatistics
from ppd_bench.runner.live import LiveOptions, live_options
from ppd_bench.runner.live_points import Played, sample_row
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import SweepRequest, evidence_line, prepare, run_sweep
from ppd_bench.runner.tables import load_table
from ppd_bench.store.frames import read_frame
from ppd_bench.store.read import read_records


@pytest.fixture
def pair() -> Iterator[Fakes]:
    with Fakes("PD") as fakes:
        yield fakes


def contradicted(run: Path) -> list[str]:
    """What is against the run's points, but for lateness, which only says that the test machine is busy."""
    told = [problem for problems in problems_of(open_run(run)).values() for problem in problems.split("; ")]
    return [problem for problem in told if not problem.startswith("client late")]


def test_both_arms_on_running_engines_give_measured_records_and_a_measured_table(tmp_path, pair, quiet) -> None:
    prepared = prepare(live_sweep(tmp_path, pair, "1P_1D, 1P_1pD"))
    assert evidence_line(prepared).startswith("executor: live (engines were given on the command line); measured")
    run_sweep(prepared, quiet)
    records = read_records(tmp_path / "run")
    assert set(records["executor"]) == {"live"}
    assert set(records["status"]) == {"ok"}
    followups = records[records["turn"] == 2].groupby("topology", observed=True)
    assert {name: set(part["route"]) for name, part in followups} == {"1P_1D": {"pd"}, "1P_1pD": {"local"}}
    assert (records["generated_tokens"] == records["output_tokens"]).all()
    assert records["itl_s"].map(len).eq(records["itl_count"]).all()
    assert contradicted(tmp_path / "run") == []
    from ppd_bench.runner.artefacts import TableOptions, write_tables

    table = load_table(write_tables(open_run(tmp_path / "run"), TableOptions())[0])
    assert (table.domain.executor, table.domain.gpu) == ("measured", "cpu")


def test_live_and_simulated_records_of_one_sweep_have_one_schema_and_the_same_turns(tmp_path, pair, quiet) -> None:
    request = live_sweep(tmp_path, pair, "1P_1D")
    run_sweep(prepare(request), quiet)
    simulated = SweepRequest(
        source=request.source, out=tmp_path / "sim", overrides={"executor": "sim", "gpu": "h100-80g"}, with_report=False
    )
    run_sweep(prepare(simulated), type(quiet)())
    live, sim = read_records(tmp_path / "run"), read_records(tmp_path / "sim")
    assert list(live.columns) == list(sim.columns)
    told = ["request_id", "session_id", "turn", "context_tokens", "input_tokens", "output_tokens"]
    pd.testing.assert_frame_equal(live[told], sim[told])
    first = live["turn"] == 1
    pd.testing.assert_series_equal(live.loc[first, "scheduled_s"], sim.loc[first, "scheduled_s"])


def test_two_client_processes_play_a_sweep_as_one_does(tmp_path, pair, quiet) -> None:
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D, 1P_1pD", clients=2)), quiet)
    records = read_records(tmp_path / "run")
    assert set(records["status"]) == {"ok"}
    followups = records[records["turn"] == 2].groupby("topology", observed=True)
    assert {name: set(part["route"]) for name, part in followups} == {"1P_1D": {"pd"}, "1P_1pD": {"local"}}
    assert list(records["session_id"]) == list(records.sort_values(["topology", "session_id", "turn"])["session_id"])
    assert contradicted(tmp_path / "run") == []
    checks = [json.loads(line) for line in (tmp_path / "run/checks.jsonl").read_text().splitlines()]
    assert [check["n_clients"] for check in checks] == [2, 2]
    assert all(check["lateness"]["decision"]["p99_s"] is not None for check in checks)


def test_a_watcher_is_told_of_points_turns_and_verdicts(tmp_path, pair) -> None:
    pair.engines[1].behaviour.prefill_s = 0.7
    watcher = Watcher()
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D")), watcher)
    names = [name for name, _ in watcher.events if name != "stage"]
    assert names[:2] == ["started", "point_started"]
    assert names[-2:] == ["point_judged", "point_done"]
    assert set(names[2:-2]) == {"turns"}
    last = watcher.of("turns")[-1]
    assert isinstance(last, TurnStatistics)
    ((topology, n_turns),) = watcher.of("point_started")
    assert (topology, last.n_turns, last.n_failed) == ("1P_1D", n_turns, 0)
    assert 0 < last.n_ended <= n_turns
    assert last.ttft_median_s is not None
    assert last.ttft_median_s > 0.7
    again = Watcher()
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D")), again)
    assert again.of("kept") == [(n_turns, n_turns)]


def test_engines_readings_are_stored_beside_the_records(tmp_path, pair, quiet) -> None:
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D")), quiet)
    metrics = pd.read_parquet(tmp_path / "run/engine_metrics.parquet")
    assert set(metrics["worker_id"]) == {"P0", "D0"}
    assert metrics["kv_cache_usage_ratio"].notna().all()


def test_gpu_readings_stand_beside_an_engines_own_with_their_ids_and_units(tmp_path, pair, quiet) -> None:
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D")), quiet)
    run = open_run(tmp_path / "run")
    assert pd.read_parquet(run.path / "engine_metrics.parquet")["gpu_ids"].isna().all()  # engines that run elsewhere
    gpu = GpuGauges(gpu_ids="0,1", gpu_utilization_ratio=0.5, gpu_memory_used_bytes=7.0)
    scraped = EngineScrape(engine_start_s=None, gauges=EngineGauges(n_running=3.0), counters=EngineCounters())
    point = run.points[0]
    late = Lateness(n=1, median_s=0.0, p99_s=0.0, max_s=0.0)
    played = Played(
        point=point, columns={}, problems=(), lateness=ClientLateness(send=late, loop=late, decision=late), n_clients=1,
        samples=(sample_row(point.point_id, "D0", 1.5, scraped, gpu), sample_row(point.point_id, "P0", 1.6, scraped, None)),
    )  # fmt: skip
    record_checks(run.path, played)
    (path,) = write_engine_metrics(run)
    metrics, described = read_frame(path, "engine_metrics")
    seen = metrics[["worker_id", "gpu_ids", "gpu_utilization_ratio", "gpu_memory_used_bytes", "n_running"]]
    assert seen.iloc[0].to_list() == ["D0", "0,1", 0.5, 7.0, 3.0]
    assert seen.iloc[1, 1:4].isna().all()
    assert [described.units[name] for name in seen.columns] == ["", "", "1", "bytes", "1"]


def test_a_path_that_the_counters_contradict_makes_the_point_invalid_with_the_reason(tmp_path, pair, quiet) -> None:
    decode = pair.engines[1]

    def pretend(*_: object) -> bytes:  # as if D computed every prompt itself
        text = type(decode).metrics(decode)
        return text.replace("external_kv_transfer", "elsewhere")  # type: ignore[return-value]

    decode.metrics = pretend  # type: ignore[method-assign, assignment]
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D")), quiet)
    summaries = summaries_of(open_run(tmp_path / "run"))
    assert not summaries["valid"].any()
    assert summaries["invalid_reasons"].str.contains("D0: path not proven").all()


def test_failures_are_rows_and_a_point_without_success_is_invalid(tmp_path, pair, quiet) -> None:
    pair.engines[1].behaviour.status = 503
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D")), quiet)
    records = read_records(tmp_path / "run")
    assert set(records["status"]) == {"error", "unsent"}
    assert not summaries_of(open_run(tmp_path / "run"))["valid"].any()


def test_a_live_sweep_resumes_where_it_was(tmp_path, pair, quiet) -> None:
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D, 1P_1pD")), quiet)
    again = type(quiet)()
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D, 1P_1pD")), again)
    assert again.begun == (2, 2)
    assert len((tmp_path / "run/checks.jsonl").read_text().splitlines()) == 2
    json.loads((tmp_path / "run/checks.jsonl").read_text().splitlines()[0])


def test_endpoints_must_serve_every_topology_and_answer(tmp_path, pair) -> None:
    with pytest.raises(SpecError, match="2P_2D"):
        prepare(live_sweep(tmp_path, pair, "2P_2D"))
    pair.run(pair.engines[0].stop())
    with pytest.raises(NotReady, match="P0"):
        prepare(live_sweep(tmp_path, pair, "1P_1D"))


def test_orphans_are_shown_before_the_machine_is_checked_and_ended_where_that_is_wanted(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    pid = leave_an_orphan(tmp_path / "state/ppd-bench/engines")
    sweep = tmp_path / "live.yaml"
    sweep.write_text(SWEEP.format(topologies="1P_1D"))
    request = SweepRequest(source=str(sweep), live=LiveOptions(device="cpu", engine_python=Path("/nowhere/python")))
    asked: list[list[str]] = []

    def answer(end: bool):
        return lambda orphans: asked.append([o.engine.worker_id for o in orphans]) or end

    for end in (False, True, True):
        with pytest.raises(
            LaunchError, match="/nowhere/python"
        ):  # whatever was answered, the sweep goes on to its checks
            prepare(request, end_orphans=answer(end))
    assert asked == [["D0"], ["D0"]]
    assert identify(pid) is None
    prepare(dataclasses.replace(request, live=LiveOptions(), overrides={"executor": "sim", "gpu": "h100-80g"}))


def test_a_launch_without_vllm_or_without_weights_is_refused_before_anything_starts(tmp_path) -> None:
    sweep = tmp_path / "live.yaml"
    sweep.write_text(SWEEP.format(topologies="1P_1D"))
    with pytest.raises(LaunchError, match=r"vllm|interpreter"):
        prepare(SweepRequest(source=str(sweep), out=tmp_path / "run", live=LiveOptions(device="cpu")))
    assert not (tmp_path / "run").exists()
    with pytest.raises(SpecError, match="cuda, cpu"):
        live_options("tpu", None, None, None, None)
    for given in ("0", "-1", "two", ""):
        with pytest.raises(SpecError, match="1 or more, auto"):
            live_options("cpu", None, None, None, None, given)
    assert [live_options("cpu", None, None, None, None, given).clients for given in ("1", "3", "auto")] == [1, 3, 0]
