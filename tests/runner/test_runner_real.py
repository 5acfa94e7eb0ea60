"""Sweeps on real vLLM engines with the tiny model on this machine's CPU: both arms, replicas, four engines, proven paths.

Latencies are not judged: all engines and the client share the cores. What is judged is which path every turn took, by the
engines' own counters, and that an engine that is killed costs its point and no more.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from ppd_bench.analysis.summary import SEND_LAG_LIMIT_S
from ppd_bench.runner.artefacts import TableOptions, write_tables
from ppd_bench.runner.checks import problems_of
from ppd_bench.runner.live import LiveOptions
from ppd_bench.runner.runs import open_run
from ppd_bench.runner.summaries import summaries_of
from ppd_bench.runner.sweep import SweepRequest, prepare, run_sweep
from ppd_bench.runner.tables import load_table
from ppd_bench.store.read import read_records

ENGINE_PYTHON = os.environ.get("PPD_BENCH_ENGINE_PYTHON")
CPU_SWEEP = Path(__file__).resolve().parent.parent.parent / "sweeps" / "cpu.yaml"
LATE = ("send lag", "client late")
"""Reasons that a busy machine gives; they make a point invalid, rightly, and say nothing of its paths."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(ENGINE_PYTHON is None, reason="PPD_BENCH_ENGINE_PYTHON names no interpreter with vLLM"),
]


class Told:
    """A listener that prints, for CI's log, and calls back when a point has been played."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def started(self, n_points: int, n_finished: int) -> None:
        print(f"{n_points} points, {n_finished} there", flush=True)

    def point_done(self, point: object, n_turns: int, n_ok: int) -> None:
        print(f"a point is done: {n_ok} of {n_turns} turns ok", flush=True)

    def stage(self, text: str) -> None:
        self.stages.append(text)
        print(text, flush=True)


def cpu_request(out: Path, **overrides: object) -> SweepRequest:
    live = LiveOptions(device="cpu", engine_python=Path(str(ENGINE_PYTHON)))
    small = {"workloads": ["cpu_chat"], "qps": [0.5], "duration": "12s", **overrides}
    return SweepRequest(source=str(CPU_SWEEP), out=out, overrides=small, live=live, with_report=False)


def played(out: Path, told: Told, **overrides: object) -> pd.DataFrame:
    """The records of a sweep whose every path was proven."""
    run_sweep(prepare(cpu_request(out, **overrides)), told)
    assert problems_without_lateness(out) == {}
    records = read_records(out)
    assert set(records["status"]) == {"ok"}
    assert (records["generated_tokens"] == records["output_tokens"]).all()
    return records


def problems_without_lateness(out: Path) -> dict[str, str]:
    problems = problems_of(open_run(out))
    return {point: told for point, told in problems.items() if not all(w.startswith(LATE) for w in told.split("; "))}


def routes(records: pd.DataFrame) -> dict[str, set[str]]:
    followups = records[records["turn"] > 1]
    return {name: set(part["route"]) for name, part in followups.groupby("topology", observed=True)}


def test_replicas_and_one_pair_take_the_paths_that_they_should(tmp_path: Path) -> None:
    records = played(tmp_path / "run", Told(), topologies=["2R", "1P_1D", "1P_1pD"])
    assert routes(records) == {"2R": {"replica"}, "1P_1D": {"pd"}, "1P_1pD": {"local"}}
    local = records[(records["topology"] == "1P_1pD") & (records["turn"] == 2)]
    # 160 tokens of history, the last not computed: 4 full blocks of 32 are found again
    assert (local["cached_tokens"] == 128).all()
    metrics = pd.read_parquet(tmp_path / "run/engine_metrics.parquet")
    assert metrics.groupby("worker_id")["external_kv_transfer_tokens"].max().get("D0", 0) > 0


def test_four_engines_give_a_table_and_mixed_paths(tmp_path: Path) -> None:
    both = tmp_path / "both"
    records = played(both, Told(), topologies=["2P_2D", "2P_2pD"])
    assert routes(records) == {"2P_2D": {"pd"}, "2P_2pD": {"local"}}
    table = load_table(write_tables(open_run(both), TableOptions(max_unknown_ratio=1.0))[0])
    assert (table.domain.gpu, table.domain.executor, table.domain.layout) == ("cpu", "measured", "2P_2D")
    visited = [cell for cell in table.cells if cell.visited]
    assert len(visited) == 1
    assert visited[0].n_pairs == (records["topology"] == "2P_2D").sum() / 2
    mixed = played(tmp_path / "mixed", Told(), topologies=["2P_2D"], duration="20s",
                   policy={"decider": "fraction", "x": 0.5})  # fmt: skip
    assert routes(mixed) == {"2P_2D": {"pd", "local"}}


@pytest.mark.parametrize("victim", ["D0", "P0"])
def test_a_killed_engine_costs_its_point_and_comes_back(victim: str, tmp_path: Path) -> None:
    told = Told()
    out = tmp_path / "run"
    killed: list[int] = []

    def kill_an_engine() -> None:
        until = time.monotonic() + 600
        while not any(text.startswith("1P_1D warm:") for text in told.stages) and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(6.0)
        pid = next(int(t.rsplit(" ", 1)[1]) for t in told.stages if t.startswith(f"{victim} starting: pid "))
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = threading.Thread(target=kill_an_engine, daemon=True)
    killer.start()
    # The lease: what a dead D leaves on P stays there so long, and the next point's cache reset waits for it.
    run_sweep(prepare(cpu_request(out, topologies=["1P_1D", "1P_1pD"], duration="20s", timeout="60s",
                                  engine={"kv_lease": "40s"})), told)  # fmt: skip
    killer.join(10)
    assert killed
    summaries = summaries_of(open_run(out))
    first = summaries[(summaries["topology"] == "1P_1D") & (summaries["slice"] == "all")]
    assert f"{victim}: engine died during the point" in first["invalid_reasons"].item()
    assert not first["valid"].item()
    records = read_records(out)
    dead = records[records["topology"] == "1P_1D"]
    assert {"error"} <= set(dead["status"]) <= {"ok", "error", "timeout", "unsent"}
    assert (dead["end_s"] - dead["sent_s"]).max() <= 60.0 + SEND_LAG_LIMIT_S + 1.0  # nothing waits beyond its time-out
    assert set(records.loc[records["topology"] == "1P_1pD", "status"]) == {"ok"}
