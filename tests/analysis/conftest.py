"""Builders of fabricated points and records. Session-scoped: they are pure functions, and hypothesis needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from ppd_bench.core.enums import Executor
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.record import RECORD_FIELDS
from ppd_bench.core.workload import TurnLengths, WorkloadSpec

PointMaker = Callable[..., Point]
RowMaker = Callable[..., dict[str, Any]]
FrameMaker = Callable[..., pd.DataFrame]

TURN1 = {"small": (128, 128), "large": (1024, 1024)}
TURN2 = {
    "tiny": (16, 32), "short_gen": (32, 256), "long_gen": (32, 512), "very_long_gen": (64, 1024), "small_bal": (64, 64),
    "mid_bal": (128, 128), "mid_paste": (256, 64), "big_paste": (512, 64), "huge_paste": (1024, 32),
}  # fmt: skip


def workload(turn1: str = "small", turn2: str = "tiny") -> WorkloadSpec:
    (in1, out1), (in2, out2) = TURN1[turn1], TURN2[turn2]
    return lengths(f"{turn1}_{turn2}", (in1, out1), (in2, out2))


def lengths(name: str, *turns: tuple[int, int], category: str = "decode_heavy") -> WorkloadSpec:
    spelled = tuple(TurnLengths(input_tokens=i, output_tokens=o) for i, o in turns)
    return WorkloadSpec(name=name, category=category, turns=spelled, max_output_tokens=2048)


@pytest.fixture(scope="session")
def make_workload() -> Callable[..., WorkloadSpec]:
    return workload


@pytest.fixture(scope="session")
def make_lengths() -> Callable[..., WorkloadSpec]:
    return lengths


@pytest.fixture(scope="session")
def make_point() -> PointMaker:
    def make(topology: str = "1P_3D", **changes: Any) -> Point:
        content: dict[str, Any] = {
            "topology": topology,
            "model": "Llama-3.1-8B",
            "gpu": "H100-80G",
            "workload": workload(),
            "qps": 8.0,
            "duration_s": 10.0,
            "timeout_s": 30.0,
            "think_time_s": 0.0,
            "seed": 0,
            "repeat": 0,
            "executor": Executor.SIM,
            "policy": PolicySpec(),
            "placement": PlacementSpec(),
            "engine": EngineSettings(),
            "engine_version": "sim-1",
            "sim": SimSettings(),
        }
        return Point(**(content | changes))

    return make


@pytest.fixture(scope="session")
def make_row() -> RowMaker:
    def make(point: Point, session: str = "s0", turn: int = 1, **changes: Any) -> dict[str, Any]:
        """One ok turn: sent at ``at``, first token ``ttft`` later, ``n`` tokens ``tpot`` apart."""
        at, ttft, tpot, n = (changes.pop(k, d) for k, d in (("at", 0.0), ("ttft", 0.1), ("tpot", 0.01), ("n", 11)))
        asked = point.workload.turns[turn - 1]
        row: dict[str, Any] = dict.fromkeys(RECORD_FIELDS)
        row |= {
            "point_id": point.point_id,
            "executor": point.executor.value,
            "topology": point.topology,
            "workload": point.workload.name,
            "qps": point.qps,
            "repeat": point.repeat,
            "request_id": f"{session}-{turn}",
            "session_id": session,
            "turn": turn,
            "context_tokens": point.workload.context_tokens(turn),
            "input_tokens": asked.input_tokens,
            "output_tokens": asked.output_tokens,
            "max_output_tokens": 2048,
            "generated_tokens": n,
            "route": "pd",
            "scheduled_s": at,
            "sent_s": at,
            "first_token_s": at + ttft,
            "last_token_s": at + ttft + tpot * (n - 1),
            "itl_count": max(n - 1, 0),
            "itl_mean_s": tpot,
            "itl_max_s": tpot,
            "n_preemptions": 0,
            "status": "ok",
        }
        return row | changes

    return make


@pytest.fixture(scope="session")
def make_frame() -> FrameMaker:
    def make(*rows: dict[str, Any]) -> pd.DataFrame:
        frame = pd.DataFrame(list(rows), columns=list(RECORD_FIELDS))
        labels = ["point_id", "executor", "topology", "workload", "session_id", "request_id", "route", "status"]
        return frame.astype(dict.fromkeys(labels, "str"))

    return make
