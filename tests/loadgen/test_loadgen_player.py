"""Playing points on fake engines: open loop, exact prompts, conservation, parity, aborts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import pytest
from fake_engine import FakeEngine, answer_ids
from loadgen_cases import SETTINGS, endpoint_of, fakes, make_point, play, rows_of, run, sessions_of, until

import ppd_bench.loadgen.player as player_module
from ppd_bench.core.enums import Status
from ppd_bench.core.errors import LaunchError, SpecError
from ppd_bench.core.point import PlacementSpec, Point, PolicySpec
from ppd_bench.core.record import RECORD_FIELDS
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.metrics import EngineGauges
from ppd_bench.engine.stream import CompletionReader, Failure
from ppd_bench.loadgen.player import LiveResult, PlaySettings, Verdict, judge
from ppd_bench.loadgen.prompts import new_ids
from ppd_bench.loadgen.routing import Log, Scrape
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import make_policy
from ppd_bench.policy.query import RouteQuery

SEND_SLACK_S = 0.2
"""How late a busy machine may send."""

Check = Callable[[list[FakeEngine], LiveResult, list[dict[str, Any]]], None]


def played(
    point: Point,
    arrivals_s: list[float],
    check: Check,
    *,
    before: Callable[[list[FakeEngine]], object] = lambda engines: None,
    during: Callable[[list[FakeEngine]], Awaitable[None]] | None = None,
    scrape: Scrape | None = None,
    settings: PlaySettings = SETTINGS,
    **behaviour: Any,
) -> None:
    """Play a point on fakes of its topology and check what came of it."""

    async def main() -> None:
        async with fakes(point.topology, **behaviour) as (engines, target):
            before(engines)
            task = asyncio.ensure_future(
                play(point, sessions_of(point, arrivals_s), target, scrape=scrape, settings=settings)
            )
            if during is not None:
                await during(engines)
            result = await task
            check(engines, result, rows_of(result.columns))
            await until(lambda: not any(engine.running or engine.pinned for engine in engines), within_s=0.5)

    run(main())


def conserves(rows: list[dict[str, Any]], point: Point) -> None:
    """I1 and I2 of every row."""
    for row in rows:
        assert row["status"] in set(Status)
        assert (row["message"] is None) == (row["status"] == "ok")
        assert (row["generated_tokens"] == row["output_tokens"]) == (row["status"] == "ok")
        assert (row["sent_s"] is None) == (row["status"] == "unsent")
        times = [row[f"{name}_s"] for name in ("scheduled", "sent", "prefill_done", "first_token", "last_token", "end")]
        known = [t for t in times if t is not None]
        assert known == sorted(known)
        if row["status"] == "ok":
            assert row["last_token_s"] - row["sent_s"] <= point.timeout_s
            assert row["itl_count"] == len(row["itl_s"]) == row["generated_tokens"] - 1
            assert sum(row["itl_s"]) == pytest.approx(row["last_token_s"] - row["first_token_s"], abs=1e-9)


# -- records and paths ---------------------------------------------------------------------------------------------------


def test_a_pd_point_goes_through_p_in_both_turns_and_says_so() -> None:
    point = make_point("1P_1D")

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        p, d = engines
        assert tuple(result.columns) == RECORD_FIELDS
        assert [(r["request_id"], r["status"]) for r in rows] == [
            ("s0.t1", "ok"),
            ("s0.t2", "ok"),
            ("s1.t1", "ok"),
            ("s1.t2", "ok"),
        ]
        assert {(r["route"], r["prefill_worker"], r["decode_worker"]) for r in rows} == {("pd", "P0", "D0")}
        assert {(r["executor"], r["topology"], r["point_id"]) for r in rows} == {("live", "1P_1D", point.point_id)}
        # Turn 2: P holds turn 1's prompt (64 of 92 tokens); D lacks all but the 4 blocks of its history.
        assert [r["prefill_cached_tokens"] for r in rows] == [0, 64, 0, 64]
        assert {r["cached_tokens"] for r in rows} == {None}
        assert d.counts.sources["external_kv_transfer"] == 2 * (64 + 28)
        assert d.counts.sources["local_compute"] == 0
        assert p.counts.n_requests == d.counts.n_requests == 4
        conserves(rows, point)

    played(point, [0.0, 0.05], check)


def test_a_local_point_leaves_p_alone_in_turn_2_and_hits_the_history_on_d() -> None:
    point = make_point("1P_1pD")

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        p, d = engines
        assert [(r["route"], r["prefill_worker"], r["reason"]) for r in rows] == [
            ("pd", "P0", "turn-1"),
            ("local", "D0", "node-pD"),
        ]
        assert (rows[1]["cached_tokens"], rows[1]["prefill_cached_tokens"], rows[1]["prefill_done_s"]) == (
            64,
            None,
            None,
        )
        assert d.counts.sources == {"external_kv_transfer": 64, "local_cache_hit": 64, "local_compute": 28}
        assert p.counts.n_requests == 1
        conserves(rows, point)

    played(point, [0.0], check)


def test_replicas_share_conversations_and_keep_their_turns() -> None:
    point = make_point("2R")

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        assert {r["route"] for r in rows} == {"replica"}
        assert [engine.counts.n_requests for engine in engines] == [4, 4]
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            assert first["decode_worker"] == second["decode_worker"]
        assert [r["cached_tokens"] for r in rows] == [0, 64] * 4
        conserves(rows, point)

    played(point, [0.0] * 4, check, prefill_s=0.03)


def test_turn_2_carries_turn_1s_prompt_the_generated_ids_and_new_ids() -> None:
    point = make_point("1R")
    session = sessions_of(point, [0.0])[0]
    first, fresh = new_ids(session, point_id=point.point_id, ids=SETTINGS.token_ids)

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        one, two = (body["prompt"] for body in engines[0].bodies)
        assert one == first
        assert two == first + answer_ids(first, 8) + fresh
        assert [len(one), len(two)] == [64, 64 + 8 + 20]

    played(point, [0.0], check)


def test_everything_can_go_to_one_router() -> None:
    point = make_point("1P_1D")

    async def main() -> None:
        router = await FakeEngine("router").start()
        result = await play(point, sessions_of(point, [0.0, 0.0]), endpoint_of(router))
        rows = rows_of(result.columns)
        assert [r["status"] for r in rows] == ["ok"] * 4
        assert {(r["route"], r["decode_worker"]) for r in rows} == {(None, None)}
        assert (router.counts.n_requests, result.log) == (4, [])
        conserves(rows, point)
        await router.stop()

    run(main())


# -- open loop -----------------------------------------------------------------------------------------------------------


def test_slow_engines_do_not_delay_what_others_send() -> None:
    point = make_point("1R")
    arrivals_s = [0.02 * i for i in range(20)]

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        firsts = rows[::2]
        assert [r["scheduled_s"] for r in firsts] == arrivals_s
        assert all(0.0 <= r["sent_s"] - r["scheduled_s"] < SEND_SLACK_S for r in rows)
        assert max(r["sent_s"] for r in firsts) < min(r["first_token_s"] for r in firsts)
        assert result.lateness.send.n == 40
        assert result.lateness.send.max_s == max(r["sent_s"] - r["scheduled_s"] for r in rows)
        assert result.lateness.loop.n > 10
        conserves(rows, point)

    played(point, arrivals_s, check, prefill_s=0.6)


def test_a_later_turn_is_due_at_the_last_token_plus_think_time() -> None:
    point = make_point("1R", think_time_s=0.15)

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            assert second["scheduled_s"] == pytest.approx(first["last_token_s"] + 0.15, abs=1e-9)
            assert 0.0 <= second["sent_s"] - second["scheduled_s"] < SEND_SLACK_S

    played(point, [0.0, 0.1], check)


def test_each_turn_is_told_as_it_ends() -> None:
    point = make_point("1R")

    async def main() -> None:
        told: list[tuple[str, Status, float | None]] = []
        async with fakes("1R") as (_, target):
            sessions = sessions_of(point, [0.0, 0.2])
            result = await play(
                point,
                sessions,
                target,
                on_turn=lambda turn: told.append((turn.request_id, turn.status, turn.end_s)),
            )
        assert [request_id for request_id, _, _ in told] == ["s0.t1", "s0.t2", "s1.t1", "s1.t2"]
        assert [end_s for _, _, end_s in told] == result.columns["end_s"]
        assert {status for _, status, _ in told} == {Status.OK}

    run(main())


def test_a_point_may_start_at_an_instant_that_several_processes_share() -> None:
    point = make_point("1R")

    async def main() -> None:
        async with fakes("1R") as (_, target):
            start_s = perf_counter() + 0.2
            result = await play(point, sessions_of(point, [0.0]), target, start_s=start_s)
        assert 0.0 <= result.columns["sent_s"][0] < SEND_SLACK_S

    run(main())


# -- failures ------------------------------------------------------------------------------------------------------------


def test_a_timeout_fails_the_turn_at_its_instant_and_leaves_the_next_unsent() -> None:
    point = make_point("1P_1D", timeout_s=0.3)

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        first, second = rows
        assert (first["status"], second["status"]) == ("timeout", "unsent")
        assert str(first["message"]).startswith("no last token within 0.3 s of sending")
        assert 0.3 <= first["end_s"] - first["sent_s"] < 0.3 + SEND_SLACK_S
        assert (second["scheduled_s"], second["sent_s"], second["route"]) == (None, None, None)
        assert engines[1].counts.n_aborted == 1
        assert first["generated_tokens"] < 8
        conserves(rows, point)

    played(point, [0.0], check, step_s=0.06)


def test_a_p_that_answers_500_fails_its_turns_with_its_message() -> None:
    point = make_point("1P_1D")

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        assert [r["status"] for r in rows] == ["error", "unsent"] * 2
        assert rows[0]["message"] == "HTTP 500: scripted failure"
        assert (rows[0]["route"], rows[0]["prefill_done_s"], rows[0]["generated_tokens"]) == ("pd", None, 0)
        assert [engine.counts.n_requests for engine in engines] == [2, 0]
        conserves(rows, point)

    played(point, [0.0, 0.0], check, before=lambda engines: setattr(engines[0].behaviour, "status", 500))


def test_a_d_that_dies_midway_fails_what_it_had_and_nothing_hangs() -> None:
    point = make_point("1P_1D")

    async def kill_d(engines: list[FakeEngine]) -> None:
        await until(lambda: engines[1]._decoding)
        await asyncio.sleep(0.05)
        await engines[1].stop()

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        assert [r["status"] for r in rows] == ["error", "unsent"] * 3
        assert "closed before the answer was complete" in rows[0]["message"]
        assert 0 < rows[0]["generated_tokens"] < 8
        assert "no connection" in rows[4]["message"]
        assert max(r["end_s"] for r in rows if r["end_s"]) < 1.0
        conserves(rows, point)
        for timer in [timer for _, timer in engines[0].pinned.values()]:
            timer.cancel()  # the turn that met a dead D leaves its blocks to the lease
        engines[0].pinned.clear()

    played(point, [0.0, 0.0, 0.4], check, during=kill_d, step_s=0.03)


@pytest.mark.parametrize("short", [1, 8])
def test_fewer_tokens_than_asked_is_a_failure(short: int) -> None:
    point = make_point("1R", lengths=((16, 9), (4, 2)))

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        assert [r["status"] for r in rows] == ["error", "unsent"]
        assert rows[0]["message"] == f"{9 - short} of 9 tokens, finish_reason 'length'"
        assert result.misanswers == (f"s0.t1: {rows[0]['message']}",)
        conserves(rows, point)

    played(point, [0.0], check, stop_short=short)


def test_a_prompt_that_the_server_counts_otherwise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    point = make_point("1R")
    monkeypatch.setattr(player_module, "new_ids", lambda *_, **__: [[1] * 63, [1] * 20])

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        assert rows[0]["message"] == "the server counted 63 prompt tokens of 64 sent"

    played(point, [0.0], check)


def test_stopping_the_player_closes_every_connection() -> None:
    point = make_point("1P_1D")

    async def main() -> None:
        async with fakes("1P_1D", step_s=0.05) as (engines, target):
            task = asyncio.ensure_future(play(point, sessions_of(point, [0.0, 0.1, 9.0]), target))
            await until(lambda: len(engines[1].running) == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not any(e._connections or e.pinned for e in engines), within_s=0.3)

    run(main())


@pytest.mark.parametrize(("timeout_s", "status"), [(1.0, Status.OK), (0.999, Status.TIMEOUT)])
def test_a_last_token_exactly_at_the_timeout_is_in_time(timeout_s: float, status: Status) -> None:
    turn = sessions_of(make_point("1R"), [0.0])[0][1]
    reader = CompletionReader()
    reader.on_head(200, {"content-type": "text/event-stream"}, 10.0)
    reader.on_body(b'data: {"choices":[{"token_ids":[1,2,3,4],"finish_reason":"length"}]}\n\n', 11.0)
    reader.on_body(b'data: {"choices":[],"usage":{"prompt_tokens":92,"completion_tokens":4}}\n\ndata: [DONE]\n\n', 11.5)
    reader.complete = True
    outcome = reader.outcome(sent_s=10.0, end_s=11.5, broken=None)
    assert judge(turn, outcome, 10.0, timeout_s)[0] is status


def test_an_answer_that_ends_in_order_without_a_token_is_no_failure_of_load() -> None:
    turn = sessions_of(make_point("1R"), [0.0])[0][1]

    def verdict(*pieces: bytes, complete: bool = True) -> Verdict:
        reader = CompletionReader()
        reader.on_head(200, {"content-type": "text/event-stream"}, 10.0)
        for piece in pieces:
            reader.on_body(piece, 10.5)
        reader.complete = complete
        broken = None if complete else (Failure.DISCONNECTED, "the connection closed")
        return judge(turn, reader.outcome(sent_s=10.0, end_s=10.5, broken=broken), 10.0, 1.0)

    ended = b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    assert verdict(ended).misanswered
    assert verdict().misanswered
    assert not verdict(b"data: [DONE]\n\n").misanswered  # cut off: no reason was given for its end
    error = verdict(b'data: {"error":{"message":"overloaded"}}\n\ndata: [DONE]\n\n')
    assert (error.status, error.misanswered) == (Status.ERROR, False)
    assert not verdict(complete=False).misanswered


# -- parity --------------------------------------------------------------------------------------------------------------


def replayed(log: Log, point: Point) -> tuple[int, int]:
    """Decisions of the log that a fresh Ledger and policy take alike, and decisions in all."""
    topology = parse_topology(point.topology)
    ledger, policy = Ledger(topology), make_policy(topology, point.policy, point.placement, point.decision_seed)
    same = total = 0
    for entry in log:
        if isinstance(entry[0], RouteQuery):
            query, now_s, decision = entry
            total += 1
            same += policy.decide(query, ledger.view(now_s, query.session_id)) == decision
        else:
            ledger.observe(entry)
    return same, total


@pytest.mark.parametrize(
    ("policy", "placement"),
    [
        (PolicySpec(), PlacementSpec()),
        (PolicySpec(decider="fraction", params=(("x", 0.5),)), PlacementSpec(decode="least_tokens")),
        (PolicySpec(decider="threshold"), PlacementSpec(decode="session_affinity", prefill="least_tokens")),
        (PolicySpec(decider="always_local"), PlacementSpec(decode="cache_aware", prefill="cache_aware", sticky=False)),
        (PolicySpec(decider="always_pd"), PlacementSpec(decode="least_kv_usage", replica="least_kv_usage")),
    ],
    ids=lambda spec: getattr(spec, "decider", getattr(spec, "decode", "")),
)
def test_i7_the_log_replayed_gives_the_same_decisions(policy: PolicySpec, placement: PlacementSpec) -> None:
    point = make_point("1R_2P_1D_1pD", policy=policy, placement=placement, timeout_s=0.8)

    async def scrape(endpoint: Endpoint) -> EngineGauges | None:
        return None if endpoint.worker_id == "P0" else EngineGauges(kv_cache_usage_ratio=endpoint.port % 7 / 10)

    def check(engines: list[FakeEngine], result: LiveResult, rows: list[dict[str, Any]]) -> None:
        n_sent = sum(r["sent_s"] is not None for r in rows)
        assert replayed(result.log, point) == (n_sent, n_sent)
        assert {r["status"] for r in rows} == {"ok", "error", "unsent"}
        kinds = [type(entry).__name__ for entry in result.log]
        assert kinds.count("Sent") == kinds.count("Finished") == n_sent
        assert kinds.count("PrefillDone") == sum(r["prefill_done_s"] is not None for r in rows)
        assert ("WorkerSnapshot" in kinds) == (placement.decode == "least_kv_usage")
        times = [entry[1] if isinstance(entry[0], RouteQuery) else entry[0] for entry in result.log]
        assert times == sorted(times)
        conserves(rows, point)

    def break_one(engines: list[FakeEngine]) -> None:
        engines[-1].behaviour.die_after = 3

    often = dataclasses.replace(SETTINGS, snapshot_interval_s=0.05)
    played(point, [0.02 * i for i in range(16)], check, before=break_one, scrape=scrape, settings=often)


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "connector", "n_engines", "error", "words"),
    [
        ({}, "NixlConnector", 1, SpecError, "2 workers, but 1 engines"),
        ({"placement": PlacementSpec(decode="least_kv_usage")}, "NixlConnector", 2, SpecError, "KV usage"),
        ({}, "P2pNcclConnector", 2, LaunchError, "no KV hand-off is known"),
    ],
)
def test_what_cannot_be_played_is_refused_before_anything_is_sent(
    changes: dict[str, Any], connector: str, n_engines: int, error: type[Exception], words: str
) -> None:
    async def main() -> None:
        async with fakes("1P_1D") as (engines, target):
            point = make_point("1P_1D", **changes)
            wrong = Engines(endpoints=target.endpoints[:n_engines], connector=connector)
            with pytest.raises(error, match=words):
                await play(point, sessions_of(point, [0.0]), wrong)
            assert [engine.counts.n_requests for engine in engines] == [0] * 2

    run(main())
