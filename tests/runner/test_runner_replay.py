"""A replay leaves an ordinary run folder, every request's stages, and an account of what was left out."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
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


def test_what_is_wrong_with_a_trace_is_told_of_the_trace(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        prepare_replay(ReplayRequest(trace=tmp_path / "nothere.jsonl"))
    (problem,) = caught.value.problems
    assert problem == f"command line: {tmp_path}/nothere.jsonl: cannot be read (No such file or directory)"


def test_an_invalid_point_is_called_so_where_its_figures_stand(trace: Path, tmp_path: Path, quiet) -> None:
    request = ReplayRequest(
        trace=trace, out=tmp_path / "run", max_inflight_sessions=3, time_scale=2000.0, with_report=False, n_processes=1,
        overrides={"topologies": ["2R"]},
    )  # fmt: skip
    _, found = run_replay(prepare_replay(request), quiet)
    (good, _), (bad, _) = (
        breakdown_tables(found),
        breakdown_tables([dataclasses.replace(found[0], invalid="an engine died")]),
    )
    assert (good.rows[0][0], good.note) == ("2R", "")
    assert (bad.rows[0][0], bad.note) == ("2R (invalid)", "2R is invalid: an engine died.")


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


@contextmanager
def router_program(engines: Path, topology: str, folder: Path) -> Iterator[str]:
    """The router as users start it, and its address."""
    code = "from ppd_bench.cli.main import main; main()"
    asked = ["router", "--topology", topology, "--endpoints", str(engines), "--port", "0", "--log", str(folder / "log")]
    log = folder / "router.txt"
    with (
        log.open("wb") as out,
        subprocess.Popen([sys.executable, "-c", code, *asked], stdout=out, stderr=out) as program,
    ):
        try:
            end_s = time.monotonic() + 60.0
            while (found := re.search(r"listening on (http://\S+)", log.read_text())) is None:
                assert time.monotonic() < end_s, log.read_text()
                assert program.poll() is None, log.read_text()
                time.sleep(0.05)
            while httpx.get(f"{found[1]}/ready", trust_env=False).status_code != 200:
                assert time.monotonic() < end_s, "the router did not become ready"
                time.sleep(0.05)
            yield found[1]
        finally:
            program.terminate()
            program.wait(30)


@pytest.mark.parametrize("topology", ["2R", "1P_1D"])
def test_a_replay_through_a_router_program_reaches_its_engines_with_its_conversations(
    topology: str, tmp_path: Path, quiet
) -> None:
    rows = [
        TraceRow(3 * s + k, f"s{s}.t{k}", f"s{s}", k + 1, 0.05 * s if k == 0 else None, None if k == 0 else 0.01,
                 128 + 48 * k, 4, array("q", [1, 2 + s, *range(9 + 10 * s, 9 + 10 * s + k)]), None)
        for s in range(4) for k in range(3)
    ]  # fmt: skip
    trace, sweep = tmp_path / "talks.jsonl", tmp_path / "tiny.yaml"
    with trace.open("wb") as file:
        write_rows(file, "jsonl", FORMAT, rows, NOTES)
    sweep.write_text(LIVE.replace("[2R]", f"[{topology}]").replace("replica: cache_aware, ", ""))
    with Fakes("RR" if topology == "2R" else "PD") as engines:
        listed = engines.write(tmp_path / "engines.yaml")
        with router_program(listed, topology, tmp_path) as via:
            request = ReplayRequest(
                trace=trace, sweep=str(sweep), out=tmp_path / "run", with_report=False, loop="completion",
                overrides={"topologies": [topology]}, live=LiveOptions(endpoints=listed, via=via),
            )  # fmt: skip
            outcome, (found,) = run_replay(prepare_replay(request), quiet)
        reached = sum(engine.counts.n_completed for engine in engines.engines)
    assert (found.evidence, found.n_ok, found.n_scheduled) == ("measured", 12, 12)
    assert [one for one in problems_of(open_run(outcome.folder)).values() if "late" not in one] == []
    entries = [
        json.loads(line) for path in (tmp_path / "log").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    turns = [entry for entry in entries if "kind" not in entry and entry["max_output_tokens"] == 4]
    assert len(turns) == 12
    assert {entry["route"] for entry in turns} == ({"replica"} if topology == "2R" else {"pd"})
    per_session = Counter(entry["session_id"] for entry in turns)
    assert sorted(per_session.values()) == [3, 3, 3, 3], "a conversation of the trace is one to the router"
    assert reached >= 12 * (1 if topology == "2R" else 2)


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
