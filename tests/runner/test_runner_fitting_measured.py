"""Calibration on a real run: 300 requests on vLLM 0.19, Llama-3.1-8B on one RTX PRO 6000 (../shared/data/measured).

The fit sees TTFT and TPOT of the first 150 requests and the arrival times and lengths of all; the second 150, which queue for up
to 20 s, are predicted. It starts from a roofline with the H100's efficiencies, not from the profile of this GPU, whose own were
fitted on the same half. Measured TTFT is first_token_ts - queued_ts, inside the engine.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppd_bench.analysis.metrics import with_latencies
from ppd_bench.core.enums import Executor
from ppd_bench.core.hardware import HARDWARE
from ppd_bench.core.models import MODELS
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.workload import Turn, TurnLengths, WorkloadSpec
from ppd_bench.runner.fitting import Fitted, Played, fit_simulator, predicted
from ppd_bench.sim.profile import roofline
from ppd_bench.sim.step_tables.smooth import smooth_numbers, smooth_table, step_table_text

RUN = Path(__file__).resolve().parents[3] / "shared" / "data" / "measured" / "rtxpro6000_llama31_8b" / "requests.jsonl"
LLAMA = MODELS["llama-3.1-8b"]
HALF = 150
POINT = Point(
    topology="1R",
    model=LLAMA.name,
    gpu="rtx-pro-6000",
    workload=WorkloadSpec(
        name="measured", category="balanced", turns=(TurnLengths(input_tokens=1, output_tokens=1),), max_output_tokens=4096
    ),
    qps=1.0,
    duration_s=10.0,
    timeout_s=1e6,
    think_time_s=0.0,
    seed=0,
    repeat=0,
    executor=Executor.LIVE,
    policy=PolicySpec(),
    placement=PlacementSpec(),
    engine=EngineSettings(max_num_seqs=128, max_num_batched_tokens=2048, gpu_memory_utilization_ratio=0.9),
    engine_version="vllm 0.19",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RUN.is_file(), reason="needs ../shared/data/measured beside the repository"),
]


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """One record per request."""
    rows = pd.DataFrame(map(json.loads, RUN.read_text(encoding="utf-8").splitlines()))
    start_s = rows["queued_ts"].min()
    return pd.DataFrame(
        {
            "point_id": POINT.point_id,
            "session_id": [f"r{i:03d}" for i in range(len(rows))],
            "turn": 1,
            "context_tokens": 0,
            "input_tokens": rows["input_toks"],
            "output_tokens": rows["output_toks"],
            "generated_tokens": rows["output_toks"],
            "route": "replica",
            "scheduled_s": rows["queued_ts"] - start_s,
            "sent_s": rows["queued_ts"] - start_s,
            "first_token_s": rows["first_token_ts"] - start_s,
            "last_token_s": rows["last_token_ts"] - start_s,
            "status": "ok",
        }
    )


@pytest.fixture(scope="module")
def played(measured: pd.DataFrame) -> list[Played]:
    turns = [
        Turn(
            request_id=row.session_id, session_id=row.session_id, turn=1, scheduled_s=row.sent_s, think_time_s=None,
            context_tokens=0, input_tokens=row.input_tokens, output_tokens=row.output_tokens, max_output_tokens=4096,
        )
        for row in measured.itertuples()
    ]  # fmt: skip
    return [Played(point=POINT, sessions=[(turn,) for turn in turns])]


@pytest.fixture(scope="module")
def start() -> SimSettings:
    """What is believed of the GPU without a run: its peaks, and what kernels of another GPU reach of theirs."""
    names = ("compute_efficiency_ratio", "weight_bandwidth_ratio", "kv_bandwidth_ratio")
    h100 = {name: getattr(HARDWARE["h100-80g"], name) for name in names}
    numbers = smooth_numbers(roofline(dataclasses.replace(HARDWARE[POINT.gpu], **h100), LLAMA, 1))
    table = smooth_table(**numbers, name="start", source="peaks of the RTX PRO 6000, efficiencies of the H100")
    return SimSettings(step_table_json=step_table_text(table), router_overhead_s=0.0)


@pytest.fixture(scope="module")
def fitted(measured: pd.DataFrame, played: list[Played], start: SimSettings) -> Fitted:
    return fit_simulator(played, measured[:HALF], LLAMA, start=start, source="first half")


def mean_errors(measured: pd.DataFrame, played: list[Played], settings: SimSettings, part: slice) -> dict[str, float]:
    ((_, columns),) = predicted(played, settings, LLAMA)
    found = with_latencies(pd.DataFrame(columns)).set_index("session_id").loc[measured["session_id"]]
    truth = with_latencies(measured)
    names = ("ttft_s", "tpot_s", "e2e_s")
    return {n: float(found[n].to_numpy()[part].mean() / truth[n].to_numpy()[part].mean() - 1) for n in names}


def test_the_second_half_is_predicted_from_the_first(
    measured: pd.DataFrame, played: list[Played], start: SimSettings, fitted: Fitted
) -> None:
    first, second = slice(0, HALF), slice(HALF, None)
    before = mean_errors(measured, played, start, second)
    within = mean_errors(measured, played, fitted.settings, first)
    after = mean_errors(measured, played, fitted.settings, second)
    print(f"\nbefore the fit, second half: {before}\nfirst half: {within}\nsecond half: {after}")
    assert abs(after["ttft_s"]) < 0.03
    assert abs(after["tpot_s"]) < 0.03
    assert abs(after["e2e_s"]) < 0.03
    assert abs(before["tpot_s"]) > 3 * abs(after["tpot_s"])


def test_every_fitted_number_is_of_the_size_that_such_a_gpu_has(fitted: Fitted) -> None:
    values = fitted.fit.values()
    print(f"\n{values}, {fitted.fit.n_predictions} simulations")
    gpu = HARDWARE[POINT.gpu]
    assert values["token_s"] > LLAMA.flop_per_token / gpu.peak_flop_per_s
    assert values["context_s"] > LLAMA.kv_bytes_per_token / gpu.memory_bandwidth_bytes_per_s
    assert 0.005 < values["floor_s"] + values["step_overhead_s"] < 0.02
    assert np.isfinite([e.error_ratio for e in fitted.fit.estimates]).all()
