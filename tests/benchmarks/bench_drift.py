"""How often ``table check`` cries wolf, and how soon it finds a drift, on simulated traffic.

    python tests/benchmarks/bench_drift.py [--trials 200] [--repeats 60] [--windows 20]

A table of one layout is built from simulated repeats. Traffic of the same cells under other seeds comes in windows (one
repeat each, 10 s), drawn anew in every trial from a pool: as measured (the control), over a link of a tenth and of a
hundredth of the speed, with a larger step overhead, and with contexts twice as long. Printed: the share of trials with any
alarm in so many windows, looked at after every window, and the windows until then. The tolerance is 25 %; alpha 5 % for the
whole table.
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
import pandas as pd

from ppd_bench.analysis.compile_table import compile_table
from ppd_bench.analysis.drift import TURN_FIELDS, DriftOptions, check_drift
from ppd_bench.analysis.metrics import with_latencies
from ppd_bench.analysis.pairing import deltas
from ppd_bench.core.enums import Executor
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.topology import parse_topology
from ppd_bench.core.workload import TurnLengths, WorkloadSpec
from ppd_bench.policy.table import DecisionTable
from ppd_bench.sim.simulate import simulate
from ppd_bench.workload.generate import generate_sessions
from ppd_bench.workload.library import find_workload

LAYOUT = "1P_3D"
WORKLOADS = ("large_mid_paste", "large_tiny", "small_small_bal")
QPS = (2.0, 8.0)
TABLE_REPEATS = 10
LONG_CONTEXT_TOKENS = 2600
LOOKS = (5, 10, 20)


def points(repeats: range, *, engine: EngineSettings, sim: SimSettings, double: bool) -> list[Point]:
    arms = (LAYOUT, parse_topology(LAYOUT).all_local.name)
    return [
        Point(
            topology=arm, model="llama-3.1-8b", gpu="h100-80g", workload=_workload(name, 2 if double else 1),
            qps=qps, duration_s=10.0, timeout_s=30.0, think_time_s=0.0, seed=0, repeat=repeat, executor=Executor.SIM,
            policy=PolicySpec(), placement=PlacementSpec(), engine=engine, engine_version="bench", sim=sim,
        )
        for arm in arms for name in WORKLOADS for qps in QPS for repeat in repeats
    ]  # fmt: skip


def _workload(name: str, factor: int) -> WorkloadSpec:
    """The large ones with a context so long that twice as much is of a class that the table did not see."""
    spec = find_workload(name)
    first, *others = spec.turns
    context = max(spec.context_tokens(2), LONG_CONTEXT_TOKENS if name.startswith("large") else 0)
    longer = TurnLengths(input_tokens=factor * context - first.output_tokens, output_tokens=first.output_tokens)
    return dataclasses.replace(spec, turns=(longer, *others))


def records_of(chosen: list[Point]) -> pd.DataFrame:
    frames = []
    for p in chosen:
        sessions = generate_sessions(
            p.workload, qps=p.qps, duration_s=p.duration_s, think_time_s=0.0, seed=0, repeat=p.repeat
        )
        if sessions:
            frames.append(pd.DataFrame(simulate(p, sessions, MODELS[p.model])))
    return pd.concat(frames, ignore_index=True)


def table() -> DecisionTable:
    chosen = points(range(TABLE_REPEATS), engine=EngineSettings(), sim=SimSettings(), double=False)
    found = deltas(records_of(chosen), chosen)
    pair = (parse_topology(LAYOUT), parse_topology(LAYOUT).all_local)
    return DecisionTable.from_json(compile_table(found, chosen, pair=pair, w_ttft=1.0, w_tpot=1.0))


def turns_of(chosen: list[Point], against: DecisionTable) -> pd.DataFrame:
    """Follow-up turns; ``repeat`` says which window of the pool they are of."""
    known = {p.point_id: p for p in chosen}
    records = with_latencies(records_of(chosen))
    later = records[records["turn"] >= 2]
    rows = []
    for r in later.to_dict("records"):
        p = known[r["point_id"]]
        lengths = {name: int(r[name]) for name in ("context_tokens", "input_tokens", "output_tokens")}
        rows.append({
            **lengths, "qps": p.qps, "cell": against.lookup(**lengths, qps=p.qps).key, "x": int(r["route"] == "local"),
            "covered": against.covers(**lengths, qps=p.qps), "ttft_s": r["ttft_s"], "tpot_s": r["tpot_s"],
            "session": f"{r['point_id']} {r['session_id']}", "repeat": p.repeat,
        })  # fmt: skip
    return pd.DataFrame(rows)


def alarms(
    pool: pd.DataFrame, against: DecisionTable, n_windows: int, n_trials: int, tolerance_ratio: float
) -> tuple[np.ndarray, np.ndarray]:
    """Windows until the first alarm in every trial (infinite without): of a cell's latencies, and of the domain."""
    rng = np.random.default_rng(4)
    by_repeat = {int(repeat): group for repeat, group in pool.groupby("repeat")}
    repeats = np.array(list(by_repeat))
    cells, domain = np.full(n_trials, np.inf), np.full(n_trials, np.inf)
    for trial in range(n_trials):
        drawn = rng.choice(repeats, n_windows, replace=False)
        frame = pd.concat([by_repeat[int(r)].assign(window=i) for i, r in enumerate(drawn)], ignore_index=True)
        report = check_drift(against, frame[list(TURN_FIELDS)], DriftOptions(tolerance_ratio=tolerance_ratio))
        cells[trial] = report.cells["at"].astype(float).min() if report.drifted_cells else np.inf
        if report.outside.at is not None:
            first = frame.drop_duplicates("session")
            domain[trial] = first["window"].iloc[report.outside.at - 1] + 1
    return cells, domain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--windows", type=int, default=20)
    options = parser.parse_args()
    against = table()
    n_cells = sum(cell.visited for cell in against.cells)
    print(f"simulated: {LAYOUT}, {n_cells} measured cells of {TABLE_REPEATS} repeats, {options.trials} trials")
    plain, own = EngineSettings(), SimSettings()
    slow = dataclasses.replace(own, step_overhead_s=own.step_overhead_s * 4)
    cases = {
        "control: nothing changed": (plain, own, False),
        "the control with a tolerance of 5 %": (plain, own, False),
        "link at a tenth (15 GB/s)": (dataclasses.replace(plain, kv_link_bytes_per_s=15e9), own, False),
        "link at a hundredth (1.5 GB/s)": (dataclasses.replace(plain, kv_link_bytes_per_s=1.5e9), own, False),
        "step overhead 4.8 ms for 1.2 ms": (plain, slow, False),
        "contexts twice as long": (plain, own, True),
    }
    print(
        f"  {'traffic':36}"
        + "".join(f"alarm in {n} windows   " for n in LOOKS)
        + "median windows   by latency   by domain"
    )
    for name, (engine, sim, double) in cases.items():
        chosen = points(range(1000, 1000 + options.repeats), engine=engine, sim=sim, double=double)
        tolerance = 0.05 if "tolerance" in name else 0.25
        cells, domain = alarms(turns_of(chosen, against), against, options.windows, options.trials, tolerance)
        first = np.minimum(cells, domain)
        told = "".join(f"{np.mean(first <= n):19.1%}   " for n in LOOKS)
        median = np.median(first)
        print(f"  {name:36}{told}{median if np.isfinite(median) else '–':>14}   {np.mean(np.isfinite(cells)):10.1%}"
              f"   {np.mean(np.isfinite(domain)):9.1%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
