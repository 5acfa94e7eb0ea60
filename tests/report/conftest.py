"""Fabricated summaries and records of a paper-shaped run: smooth, plausible numbers that are nobody's measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.compile_table import compile_table
from ppd_bench.analysis.metrics import delta_tpot, delta_ttft
from ppd_bench.analysis.pairing import pair_arms
from ppd_bench.core.enums import Executor
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.topology import PAPER_TOPOLOGIES, parse_topology
from ppd_bench.core.workload import TurnLengths, WorkloadSpec
from ppd_bench.report.findings import find
from ppd_bench.report.plots import Plot, standard_plots

TURN_2 = {
    "tiny": (16, 32, "decode_heavy"),
    "short_gen": (32, 256, "decode_heavy"),
    "long_gen": (32, 512, "decode_heavy"),
    "very_long_gen": (64, 1024, "decode_heavy"),
    "small_bal": (64, 64, "balanced"),
    "mid_bal": (128, 128, "balanced"),
    "mid_paste": (256, 64, "prefill_heavy"),
    "big_paste": (512, 64, "prefill_heavy"),
    "huge_paste": (1024, 32, "prefill_heavy"),
}
TURN_1 = {"small": (128, 128), "large": (1024, 1024)}
WORKLOADS = tuple((f"{first}_{second}", first, second) for first in TURN_1 for second in TURN_2)
PAPER_QPS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)


def _point(topology: str, first: str, second: str, qps: float, repeat: int) -> Iterator[dict[str, Any]]:
    t = parse_topology(topology)
    n_in, n_out, category = TURN_2[second]
    context = sum(TURN_1[first])
    x = t.node_x_ratio
    n_decoders = t.n_decoders + t.n_replica
    decode_load = qps * (n_out + TURN_1[first][1]) / (n_decoders * 5200)
    prefill_load = qps * (TURN_1[first][0] + n_in) / ((t.n_prefill + t.n_replica) * 24000)
    share_pd = 0.0 if x is None else (1 - x) * t.n_decoders / n_decoders
    ttft = 0.030 + n_in * 2e-5 + share_pd * (0.085 + context * 1e-5) * (1 + 3 * decode_load)
    ttft *= 1 + 2 * prefill_load**2 + 6 * max(0.0, decode_load - 0.8) ** 2
    ttft = min(ttft, 24.0)
    tpot = 0.0074 * (1 + 0.5 * decode_load) * (1 + 0.35 * (1 - share_pd) * prefill_load + 0.2 * t.n_replica / 4)
    n = max(1, round(10 * qps))
    success = float(np.clip(1.25 - 0.3 * decode_load, 0, 1))
    for slice_, n_turns, factor in (("all", 2 * n, 1.1), ("turn1", n, 1.2), ("turn2plus", n, 1.0)):
        n_ok = int(n_turns * success)
        here = factor if n_ok else np.nan
        tokens = {"all": n_out + TURN_1[first][1], "turn1": TURN_1[first][1], "turn2plus": n_out}[slice_]
        span = 10 + tokens * tpot + 2
        yield {
            "point_id": f"{topology}-{first}-{second}-{qps}-{repeat}",
            "executor": "sim",
            "topology": topology,
            "configuration": topology,
            "policy": "node",
            "category": t.category,
            "layout": t.layout.name,
            "node_x_ratio": x,
            "request_x_ratio": np.nan,
            "realised_x_ratio": x,
            "model": "llama-3.1-8b",
            "gpu": "h100-80g",
            "workload": f"{first}_{second}",
            "workload_category": category,
            "qps": qps,
            "repeat": repeat,
            "slice": slice_,
            "n_scheduled": n_turns,
            "n_ok": n_ok,
            "n_timeout": n_turns - n_ok,
            "n_error": 0,
            "n_aborted": 0,
            "n_unsent": 0,
            "success_ratio": n_ok / n_turns,
            "offered_rps": n_turns / 10,
            "achieved_rps": n_ok / span,
            "ttft_mean_s": ttft * here,
            "ttft_p50_s": ttft * here * 0.95,
            "ttft_p90_s": ttft * here * 1.5,
            "ttft_p95_s": ttft * here * 1.8,
            "ttft_p99_s": ttft * here * (2.2 + decode_load),
            "tpot_mean_s": tpot * here / factor,
            "tpot_p50_s": tpot * here / factor,
            "tpot_p90_s": tpot * here / factor * 1.1,
            "tpot_p95_s": tpot * here / factor * 1.2,
            "tpot_p99_s": tpot * here / factor * 1.4,
            "e2e_mean_s": (ttft + tpot * tokens) * here,
            "e2e_p50_s": (ttft + tpot * tokens) * here,
            "e2e_p90_s": (ttft + tpot * tokens) * here * 1.1,
            "e2e_p95_s": (ttft + tpot * tokens) * here * 1.2,
            "e2e_p99_s": (ttft + tpot * tokens) * here * 1.3,
            "n_null_tpot": 0,
            "itl_mean_s": tpot * here,
            "itl_max_s": tpot * here * 8,
            "send_lag_p99_s": 0.0,
            "throughput_tokens_per_s": n_ok * tokens / span if n_ok else 0.0,
            "span_s": span,
            "drain_s": span - 10,
            "goodput_rps": np.nan,
            "prefix_hit_ratio": 0.5,
            "transferred_tokens": 100 * n_ok,
            "transfer_bytes": 100 * n_ok * 131072,
            "n_preemptions": 0,
            "valid": n_ok > 0,
            "invalid_reasons": "" if n_ok else "no turn succeeded",
        }


def make_summaries(
    topologies: Sequence[str] = PAPER_TOPOLOGIES,
    workloads: Sequence[str] | None = None,
    qps: Sequence[float] = PAPER_QPS,
    n_repeats: int = 1,
) -> pd.DataFrame:
    """Three slices for every (topology, workload, QPS, repeat)."""
    chosen = [w for w in WORKLOADS if workloads is None or w[0] in workloads]
    return pd.DataFrame(
        [
            row
            for topology in topologies
            for _, first, second in chosen
            for level in qps
            for repeat in range(n_repeats)
            for row in _point(topology, first, second, level, repeat)
        ]
    )


def all_failed(summaries: pd.DataFrame) -> pd.DataFrame:
    """The same run in which no turn succeeded."""
    failed = summaries.copy()
    latencies = [c for c in failed.columns if c.endswith("_s") and c not in ("span_s", "drain_s")]
    failed[latencies] = np.nan
    failed["throughput_tokens_per_s"] = 0.0
    failed["n_timeout"] = failed["n_scheduled"]
    failed[["n_ok", "success_ratio"]] = 0
    failed["valid"] = False
    failed["invalid_reasons"] = "no turn succeeded"
    return failed


def make_points(summaries: pd.DataFrame) -> list[Point]:
    """The points behind fabricated summaries, without their ids."""
    cells = summaries[["topology", "workload", "workload_category", "qps", "repeat"]].drop_duplicates()
    return [_make_point(row) for row in cells.itertuples(index=False)]


def _make_point(row: Any) -> Point:
    first, second = row.workload.split("_", 1)
    turns = tuple(TurnLengths(input_tokens=i, output_tokens=o) for i, o in (TURN_1[first], TURN_2[second][:2]))
    workload = WorkloadSpec(name=row.workload, category=row.workload_category, turns=turns, max_output_tokens=1024)
    return Point(
        topology=row.topology,
        model="llama-3.1-8b",
        gpu="h100-80g",
        workload=workload,
        qps=row.qps,
        duration_s=10.0,
        timeout_s=30.0,
        think_time_s=0.0,
        seed=0,
        repeat=row.repeat,
        executor=Executor.SIM,
        policy=PolicySpec(),
        placement=PlacementSpec(),
        engine=EngineSettings(),
        engine_version="fabricated",
        sim=SimSettings(),
    )


def make_deltas(summaries: pd.DataFrame) -> pd.DataFrame:
    """Paired deltas from the means of the summaries (one repeat)."""
    later = summaries[summaries["slice"] == "turn2plus"].set_index(["topology", "workload", "qps"])
    rows = []
    for pair in pair_arms(make_points(summaries)):
        names = [arm.name for arm in pair]
        x0, x1 = (later.loc[name] for name in names)
        for cell in x0.index.intersection(x1.index):
            a, b = x0.loc[cell], x1.loc[cell]
            rows.append(
                {
                    "baseline": names[0],
                    "candidate": names[1],
                    "workload": cell[0],
                    "qps": cell[1],
                    "ttft_x0_s": a["ttft_mean_s"],
                    "ttft_x1_s": b["ttft_mean_s"],
                    "tpot_x0_s": a["tpot_mean_s"],
                    "tpot_x1_s": b["tpot_mean_s"],
                    "success_x0_ratio": a["success_ratio"],
                    "success_x1_ratio": b["success_ratio"],
                    "delta_ttft": delta_ttft(a["ttft_mean_s"], b["ttft_mean_s"]),
                    "delta_tpot": delta_tpot(a["tpot_mean_s"], b["tpot_mean_s"]),
                    "n_pairs": int(min(a["n_ok"], b["n_ok"])),
                }
            )
    return pd.DataFrame(rows)


def make_tables(summaries: pd.DataFrame, *, w_ttft: float = 1.0, w_tpot: float = 3.0) -> list[str]:
    """One decision table text per pair of the summaries."""
    points = make_points(summaries)
    deltas = make_deltas(summaries)
    return [compile_table(deltas, points, pair=pair, w_ttft=w_ttft, w_tpot=w_tpot) for pair in pair_arms(points)]


@pytest.fixture(scope="session")
def paper_summaries() -> pd.DataFrame:
    return make_summaries()


@pytest.fixture(scope="session")
def paired_summaries() -> pd.DataFrame:
    """Two pairs and a replica over three workloads and three levels: small enough to draw often."""
    return make_summaries(
        ("4R", "1P_3D", "1P_3pD", "1R_1P_2D", "1R_1P_2pD"),
        ("small_tiny", "small_mid_bal", "large_huge_paste"),
        (2.0, 8.0, 20.0),
    )


@pytest.fixture(scope="session")
def table_texts(paired_summaries: pd.DataFrame) -> list[str]:
    return make_tables(paired_summaries)


@pytest.fixture(scope="session")
def plots(paired_summaries: pd.DataFrame, table_texts: list[str]) -> list[Plot]:
    """The standard plots, drawn once; tests only read them."""
    return standard_plots(find(paired_summaries), table_texts, run_name="demo")


@pytest.fixture(scope="session")
def paired_deltas(paired_summaries: pd.DataFrame) -> pd.DataFrame:
    return make_deltas(paired_summaries)


@pytest.fixture(scope="session")
def build() -> Callable[..., pd.DataFrame]:
    return make_summaries


@pytest.fixture(scope="session")
def fail() -> Callable[[pd.DataFrame], pd.DataFrame]:
    return all_failed


PARTIAL_RUNS: dict[str, dict[str, Any]] = {
    "one point": {"topologies": ("1P_3D",), "workloads": ("small_tiny",), "qps": (2.0,)},
    "one workload": {
        "topologies": ("4R", "2P_2D", "2P_1D_1pD"),
        "workloads": ("large_huge_paste",),
        "qps": (1.0, 8.0),
    },
    "two repeats of one category": {
        "topologies": ("1P_3D", "1P_3pD"),
        "workloads": ("small_mid_bal", "large_mid_bal"),
        "qps": (3.0,),
        "n_repeats": 2,
    },
    "only hybrids": {"topologies": ("1R_1P_2D", "1R_1P_2pD"), "workloads": ("small_tiny",), "qps": (2.0, 6.0)},
    "eight GPUs": {"topologies": ("8R", "6P_2D", "4P_4D", "4P_4pD"), "workloads": ("small_tiny",), "qps": (2.0, 8.0)},
}


@pytest.fixture(params=[*PARTIAL_RUNS, "all failed", "empty"])
def partial_summaries(request: pytest.FixtureRequest) -> pd.DataFrame:
    """Runs of every awkward shape."""
    if request.param == "empty":
        return make_summaries(("4R",), ("small_tiny",), (1.0,)).iloc[:0]
    if request.param == "all failed":
        return all_failed(make_summaries(("4R", "1P_3D", "1P_3pD"), ("small_tiny",), (2.0, 8.0)))
    return make_summaries(**PARTIAL_RUNS[request.param])
