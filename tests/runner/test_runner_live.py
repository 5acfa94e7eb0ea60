"""Live sweeps against fake engines on real sockets: the same records, proven paths, deaths survived."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fakes"))
from fake_engine import Behaviour, FakeEngine

from ppd_bench.core.errors import LaunchError, NotReady, SpecError
from ppd_bench.runner.checks import problems_of
from ppd_bench.runner.live import LiveOptions, live_options
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import SweepRequest, evidence_line, prepare, run_sweep
from ppd_bench.runner.tables import load_table
from ppd_bench.store.read import read_records

SWEEP = """
name: live
gpus: 4
gpu: cpu
model: tiny-llama
topologies: [{topologies}]
workloads: [cpu_chat]
qps: [20]
duration: 500ms
timeout: 20s
engine: {{max_model_len: 1024, kv_connector: NixlConnector, handoff: pull_async}}
"""


class Fakes:
    """Fake engines in a thread of their own, so that the sweep's event loop does not share theirs."""

    def __init__(self, roles: str) -> None:
        self.engines = [FakeEngine(f"{role}{i}", behaviour=Behaviour()) for i, role in enumerate(roles)]
        self.roles = roles
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Fakes:
        self._thread.start()
        for engine in self.engines:
            self.run(engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            self.run(engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def run(self, work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    def write(self, path: Path) -> Path:
        entries = "".join(
            f"  - {{role: {role}, url: 'http://127.0.0.1:{engine.port}'}}\n"
            for role, engine in zip(self.roles, self.engines, strict=True)
        )
        path.write_text(f"engines:\n{entries}")
        return path


@pytest.fixture
def pair() -> Iterator[Fakes]:
    with Fakes("PD") as fakes:
        yield fakes


def live_sweep(tmp_path: Path, fakes: Fakes, topologies: str, **more: object) -> SweepRequest:
    sweep = tmp_path / "live.yaml"
    sweep.write_text(SWEEP.format(topologies=topologies))
    live = LiveOptions(endpoints=fakes.write(tmp_path / "engines.yaml"))
    return SweepRequest(source=str(sweep), out=tmp_path / "run", live=live, with_report=False, **more)  # type: ignore[arg-type]


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


def test_engines_readings_are_stored_beside_the_records(tmp_path, pair, quiet) -> None:
    run_sweep(prepare(live_sweep(tmp_path, pair, "1P_1D")), quiet)
    metrics = pd.read_parquet(tmp_path / "run/engine_metrics.parquet")
    assert set(metrics["worker_id"]) == {"P0", "D0"}
    assert metrics["kv_cache_usage_ratio"].notna().all()


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


def test_a_launch_without_vllm_or_without_weights_is_refused_before_anything_starts(tmp_path) -> None:
    sweep = tmp_path / "live.yaml"
    sweep.write_text(SWEEP.format(topologies="1P_1D"))
    with pytest.raises(LaunchError, match=r"vllm|interpreter"):
        prepare(SweepRequest(source=str(sweep), out=tmp_path / "run", live=LiveOptions(device="cpu")))
    assert not (tmp_path / "run").exists()
    with pytest.raises(SpecError, match="cuda, cpu"):
        live_options("tpu", None, None, None, None)
