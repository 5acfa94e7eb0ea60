"""A replay leaves an ordinary run folder, every request's stages, and an account of what was left out."""

from __future__ import annotations

from array import array
from pathlib import Path

import pandas as pd
import pytest
from live_cases import Fakes

from ppd_bench.analysis.breakdown import STAGES
from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow
from ppd_bench.runner.checks import problems_of
from ppd_bench.runner.live import LiveOptions
from ppd_bench.runner.replay import REQUESTS_FILE, ReplayRequest, breakdown_tables, prepare_replay, run_replay
from ppd_bench.runner.runs import open_run
from ppd_bench.store.read import read_records
from ppd_bench.workload.agentic import FORMAT, NOTES, agentic_rows
from ppd_bench.workload.traces.writer import write_rows


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "some agents.jsonl"
    with path.open("wb") as file:
        write_rows(file, "jsonl", FORMAT, agentic_rows(25, seed=5), NOTES)
    return path


def test_a_replay_is_a_run_with_every_requests_stages(trace: Path, tmp_path: Path, quiet) -> None:
    request = ReplayRequest(
        trace=trace, out=tmp_path / "run", max_inflight_sessions=3, time_scale=2000.0, with_report=False, n_processes=1,
        overrides={"topologies": ["2R", "1P_1D"]},
    )  # fmt: skip
    prepared = prepare_replay(request)
    assert prepared.name == "replay-some-agents-sim"
    outcome, found = run_replay(prepared, quiet)
    assert [one.configuration for one in found] == ["2R", "1P_1D"]
    for one in found:
        assert one.evidence == "simulated"
        assert one.n_ok == one.n_scheduled >= 25
        assert one.start_wait_s > 0.0
        assert sum(stage.ttft_share_ratio for stage in one.stages) == pytest.approx(1.0)
    table = pd.read_csv(outcome.folder / REQUESTS_FILE)
    assert len(table) == sum(one.n_scheduled for one in found)
    assert table[list(STAGES)].sum(axis=1).to_numpy() == pytest.approx(table["ttft_s"].to_numpy())
    texts = breakdown_tables(found)
    assert all(len(row) == len(text.head) for text in texts for row in text.rows)
    assert all("simulated" in text.caption for text in texts)


def test_a_replay_at_a_rate_draws_whole_conversations(trace: Path, tmp_path: Path, quiet) -> None:
    request = ReplayRequest(
        trace=trace, out=tmp_path / "run", qps=2.0, with_report=False, n_processes=1,
        overrides={"topologies": ["2R"], "duration": 5.0},
    )  # fmt: skip
    prepared = prepare_replay(request)
    assert [(point.qps, point.duration_s) for point in prepared.points] == [(2.0, 5.0)]
    _, (found,) = run_replay(prepared, quiet)
    assert found.n_ok == found.n_scheduled > 0
    assert found.start_wait_s == 0.0


def test_an_open_loop_of_a_trace_without_instants_is_refused(trace: Path) -> None:
    with pytest.raises(SpecError, match="its loop is completion"):
        prepare_replay(ReplayRequest(trace=trace, loop="timestamps"))


def test_recorded_arrivals_that_are_not_there_are_refused_before_a_folder_is_made(shared: Path, tmp_path: Path) -> None:
    chat = shared / "data" / "chat" / "dialogstudio_ShareGPT_original_example.json"
    with pytest.raises(SpecError, match=r"--qps; in a sweep file arrivals: poisson"):
        prepare_replay(ReplayRequest(trace=chat, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_router_alone_is_refused(trace: Path) -> None:
    with pytest.raises(SpecError, match="--via needs --endpoints"):
        prepare_replay(ReplayRequest(trace=trace, live=LiveOptions(via="http://127.0.0.1:9")))


LIVE = """
name: tiny
gpus: 4
gpu: cpu
model: tiny-llama
topologies: [2R]
workloads: [cpu_chat]
qps: [1]
timeout: 20s
placement: {replica: cache_aware, sticky: false}
engine: {max_model_len: 1024, kv_connector: NixlConnector, handoff: pull_async}
"""


def test_a_replay_on_running_engines_is_measured_and_shares_what_the_trace_shared(tmp_path: Path, quiet) -> None:
    rows = [
        TraceRow(k, f"s{k}.t1", f"s{k}", 1, 0.1 * k, None, 200 + k, 5, array("q", [1, 2, 3 + k]), None) for k in range(6)
    ]  # fmt: skip
    trace, sweep = tmp_path / "small.jsonl", tmp_path / "tiny.yaml"
    with trace.open("wb") as file:
        write_rows(file, "jsonl", FORMAT, rows, NOTES)
    sweep.write_text(LIVE)
    with Fakes("RR") as engines:
        request = ReplayRequest(
            trace=trace, sweep=str(sweep), out=tmp_path / "run", with_report=False, loop="timestamps",
            live=LiveOptions(endpoints=engines.write(tmp_path / "engines.yaml")),
        )  # fmt: skip
        prepared = prepare_replay(request)
        assert prepared.name == "replay-small-live"
        outcome, (found,) = run_replay(prepared, quiet)
    assert (found.evidence, found.n_ok, found.n_scheduled) == ("measured", 6, 6)
    records = read_records(outcome.folder)
    assert sorted(records["cached_tokens"]) == [0, 128, 128, 128, 128, 128]
    assert len(set(records["decode_worker"])) == 1, "the router saw that the beginning is the same"
    assert [one for one in problems_of(open_run(outcome.folder)).values() if "late" not in one] == []


@pytest.mark.parametrize(
    "name",
    [
        "mooncake/conversation_trace.jsonl",
        "agentic_code",
        "chat/sharegpt_conv_128.json",
        "azure/AzureLLMInferenceTrace_code.csv",
    ],
)
def test_recorded_traffic_of_every_kind_is_replayed(name: str, shared: Path, tmp_path: Path, quiet) -> None:
    request = ReplayRequest(
        trace=shared / "data" / name, out=tmp_path / "run", max_requests=60, qps=1.0, with_report=False, n_processes=1,
        overrides={"topologies": ["4R"], "duration": 20.0},
    )  # fmt: skip
    _, (found,) = run_replay(prepare_replay(request), quiet)
    assert found.n_ok > 0
