"""Recorded traffic on engines: prompts that share what the trace shared, open loops, places for conversations, sub-agents."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from typing import Any

import pytest
from fake_engine import FakeEngine
from loadgen_cases import SETTINGS, fakes, make_point, rows_of, sessions_of

from ppd_bench.core.point import PlacementSpec, Point
from ppd_bench.core.workload import Session, TrafficFigures, TrafficSpec, Turn
from ppd_bench.loadgen.clients import ClientPool, dealt_to
from ppd_bench.loadgen.player import LiveResult, play_point

FIGURES = TrafficFigures(
    n_sessions=1, n_requests=1, duration_s=0.0, prompt_tokens=1.0, output_tokens=1.0, longest_tokens=1
)


def recorded(point: Point, *, inflight: int | None = None) -> Point:
    """The point, with recorded traffic."""
    traffic = TrafficSpec(
        source="t", sha256="0", reading="t", sessions="none", loop="completion", figures=FIGURES, max_inflight_sessions=inflight
    )  # fmt: skip
    return dataclasses.replace(point, workload=dataclasses.replace(point.workload, turns=(), traffic=traffic))


def request(
    name: str,
    turn: int = 1,
    *,
    at_s: float | None = 0.0,
    think_s: float | None = None,
    ids: tuple[int, ...] = (1, 2),
    prompt: int = 64,
    output: int = 4,
    after: str | None = None,
) -> Turn:
    return Turn(
        request_id=f"{name}.t{turn}", session_id=name, turn=turn, scheduled_s=at_s, think_time_s=think_s, context_tokens=0,
        input_tokens=prompt, output_tokens=output, max_output_tokens=64, block_ids=array("q", ids), block_tokens=32, after=after,
    )  # fmt: skip


def play(
    point: Point, sessions: list[Session], **behaviour: Any
) -> tuple[list[FakeEngine], LiveResult, dict[str, dict[str, Any]]]:
    async def main() -> tuple[list[FakeEngine], LiveResult]:
        async with fakes(point.topology, **behaviour) as (engines, target):
            result = await play_point(point, sessions, target, clock=time.monotonic, settings=SETTINGS)
            return engines, result

    engines, result = asyncio.run(asyncio.wait_for(main(), 20.0))
    return engines, result, {row["request_id"]: row for row in rows_of(result.columns)}


def test_prompts_share_what_the_trace_shared_and_no_answer() -> None:
    sessions = [
        (request("a", ids=(1, 2), prompt=64),),
        (request("b", at_s=0.2, ids=(1, 3), prompt=64),),
        (request("c", at_s=0.4, ids=(1, 2, 4), prompt=96),),
    ]
    _, _, rows = play(recorded(make_point("1R")), sessions)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert [rows[f"{name}.t1"]["cached_tokens"] for name in "abc"] == [0, 32, 64]


def test_cache_aware_placement_follows_content_ids_on_engines_too() -> None:
    placement = PlacementSpec(replica="cache_aware", sticky=False)
    sessions = [(request(f"s{k}", at_s=0.1 * k, ids=(10 * (k % 2), 10 * (k % 2) + 1)),) for k in range(6)]
    _, result, rows = play(recorded(make_point("2R", placement=placement)), sessions)
    for kind in range(2):
        assert len({rows[f"s{k}.t1"]["decode_worker"] for k in range(kind, 6, 2)}) == 1
    queries = [entry[0] for entry in result.log if len(entry) == 3 and hasattr(entry[0], "block_ids")]
    assert all(query.block_tokens == 32 for query in queries)


def test_in_an_open_loop_a_turn_does_not_wait_for_the_one_before() -> None:
    session = (request("a", output=30), request("a", 2, at_s=0.05, ids=(1, 2, 3), prompt=96))
    _, _, rows = play(recorded(make_point("1R")), [session], step_s=0.02)
    assert rows["a.t2"]["sent_s"] < rows["a.t1"]["last_token_s"]
    assert rows["a.t2"]["sent_s"] == pytest.approx(0.05, abs=0.04)


def test_in_an_open_loop_of_private_content_prompts_have_their_length() -> None:
    first, second = sessions_of(make_point("1R"), [0.0])[0]
    _, _, rows = play(
        make_point("1R"), [(first, dataclasses.replace(second, scheduled_s=0.02, think_time_s=None))], step_s=0.01
    )
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_a_conversation_that_is_held_back_starts_when_another_ends_and_the_client_is_not_late() -> None:
    sessions = [(request(name, at_s=0.0, output=8),) for name in "abc"]
    _, result, rows = play(recorded(make_point("1R"), inflight=1), sessions, step_s=0.02)
    first, second, third = (rows[f"{name}.t1"] for name in "abc")
    assert [row["scheduled_s"] for row in (first, second, third)] == [0.0, 0.0, 0.0]
    assert first["end_s"] <= second["sent_s"] < second["end_s"] <= third["sent_s"]
    assert (result.lateness.send.p99_s or 0.0) < third["sent_s"] / 2


def test_what_a_request_starts_follows_its_end_and_not_its_failure() -> None:
    child = (request("b", at_s=None, think_s=0.05, after="a.t1"),)
    _, _, rows = play(recorded(make_point("1R")), [(request("a"),), child])
    assert rows["b.t1"]["sent_s"] >= rows["a.t1"]["last_token_s"] + 0.05
    late = (request("a", output=60),)
    _, _, rows = play(recorded(make_point("1R", timeout_s=0.2)), [late, child], step_s=0.02)
    assert (rows["a.t1"]["status"], rows["b.t1"]["status"]) == ("timeout", "unsent")


def test_clients_get_conversations_with_those_that_they_start() -> None:
    sessions = [
        (request("a"),),
        (request("b", after="a.t1"),),
        (request("c"),),
        (request("d", after="b.t1"),),
        (request("e"),),
    ]
    dealt = [[session[0].session_id for session in dealt_to(number, 2, sessions)] for number in range(2)]
    assert dealt == [["a", "b", "d", "e"], ["c"]]


@pytest.mark.slow
def test_several_processes_play_recorded_traffic_as_one_does() -> None:
    point = recorded(make_point("1R"))
    sessions = [(request("a"),), (request("b", at_s=None, think_s=0.05, after="a.t1"),), (request("c", at_s=0.05),)]

    async def main() -> dict[str, dict[str, Any]]:
        async with fakes("1R") as (_, target), ClientPool(2) as pool:
            result = await pool.play_point(point, sessions, target, clock=time.monotonic, settings=SETTINGS)
            return {row["request_id"]: row for row in rows_of(result.columns)}

    rows = asyncio.run(main())
    assert [*rows] == ["a.t1", "b.t1", "c.t1"]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert rows["b.t1"]["sent_s"] >= rows["a.t1"]["last_token_s"] + 0.05
