"""Points, engines and requests that the tests of this folder share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from fake_engine import Behaviour, FakeEngine

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Executor, Role, Route
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import parse_topology
from ppd_bench.core.workload import Session, Turn, TurnLengths, WorkloadSpec
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.loadgen.player import LiveResult, PlaySettings, play_point
from ppd_bench.loadgen.prompts import token_range

SETTINGS = PlaySettings(served_model="fake", token_ids=token_range(1000))
LENGTHS = ((64, 8), (20, 4))
"""Input and output tokens of two turns; with blocks of 16, turn 2's history of 72 tokens is 4 full blocks and 8 tokens."""


def make_point(topology: str, **changes: Any) -> Point:
    lengths = changes.pop("lengths", LENGTHS)
    turns = tuple(TurnLengths(input_tokens=i, output_tokens=o) for i, o in lengths)
    workload = WorkloadSpec(name="w", category="balanced", turns=turns, max_output_tokens=max(o for _, o in lengths))
    content: dict[str, Any] = {
        "topology": topology,
        "model": "fake",
        "gpu": "cpu",
        "workload": workload,
        "qps": 20.0,
        "duration_s": 1.0,
        "timeout_s": 5.0,
        "think_time_s": 0.0,
        "seed": 0,
        "repeat": 0,
        "executor": Executor.LIVE,
        "policy": PolicySpec(),
        "placement": PlacementSpec(),
        "engine": EngineSettings(kv_connector="NixlConnector", handoff="pull_async"),
        "engine_version": "fake",
    }
    return Point(**{**content, **changes})


def sessions_of(point: Point, arrivals_s: Sequence[float]) -> list[Session]:
    spec = point.workload
    return [
        tuple(
            Turn(
                request_id=f"s{s}.t{k}",
                session_id=f"s{s}",
                turn=k,
                scheduled_s=at_s if k == 1 else None,
                think_time_s=None if k == 1 else point.think_time_s,
                context_tokens=spec.context_tokens(k),
                input_tokens=spec.turns[k - 1].input_tokens,
                output_tokens=spec.turns[k - 1].output_tokens,
                max_output_tokens=spec.max_output_tokens,
            )
            for k in range(1, len(spec.turns) + 1)
        )
        for s, at_s in enumerate(arrivals_s)
    ]


def endpoint_of(fake: FakeEngine, role: Role = Role.REPLICA) -> Endpoint:
    return Endpoint(worker_id=fake.name, role=role, host=fake.host, port=fake.port)


@asynccontextmanager
async def fakes(topology: str, **behaviour: Any) -> AsyncIterator[tuple[list[FakeEngine], Engines]]:
    """One fake per worker of the topology, and the engines that they are."""
    workers = parse_topology(topology).workers
    engines = [await FakeEngine(w.worker_id, behaviour=Behaviour(**behaviour)).start() for w in workers]
    endpoints = tuple(endpoint_of(fake, w.role) for fake, w in zip(engines, workers, strict=True))
    try:
        yield engines, Engines(endpoints=endpoints)
    finally:
        for fake in engines:
            await fake.stop()


async def play(point: Point, sessions: Sequence[Session], engines: Engines | Endpoint, **more: Any) -> LiveResult:
    return await play_point(
        point, sessions, engines, clock=perf_counter, settings=more.pop("settings", SETTINGS), **more
    )


def run(main: Coroutine[Any, Any, None], within_s: float = 20.0) -> None:
    """Run a test's coroutine; one that hangs fails."""
    asyncio.run(asyncio.wait_for(main, within_s))


async def until(condition: Callable[[], object], within_s: float = 2.0) -> None:
    """Wait for something to become true; fail when it does not in time."""
    end_s = perf_counter() + within_s
    while not condition():
        assert perf_counter() < end_s, "it did not happen in time"
        await asyncio.sleep(0.005)


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


PD = Decision(route=Route.PD, prefill_worker=0, decode_worker=1, reason="test")
LOCAL = Decision(route=Route.LOCAL, prefill_worker=1, decode_worker=1, reason="test")


def body_of(n_prompt: int = 64, n_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": list(range(n_prompt)), "max_tokens": n_tokens, "stream": True, **more}
