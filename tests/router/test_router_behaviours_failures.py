"""ROUTER.md B9 to B17: clients and engines that vanish, fail, hang or are not there."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import pytest
from fake_engine import answer_ids
from router_cases import PROMPT, Rig, events_of, on, raw_request, text_of, until

ROUTED_TO_P = {"decider": "always_pd"}
BODY: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "max_tokens": 200, "stream": True}


async def hang_up(rig: Rig, when: Any, body: dict[str, Any] | None = None) -> float:
    """Send a request and close the connection as soon as something is true; when that was."""
    _, writer = await asyncio.open_connection("127.0.0.1", rig.running.port)
    writer.write(raw_request("/v1/completions", body or BODY))
    await until(when)
    writer.transport.abort()
    return perf_counter()


def nothing_is_open(rig: Rig) -> bool:
    view = rig.state.ledger.view(rig.state.now_s(), "")
    return not any(view.n_inflight) and not any(view.inflight_tokens) and not rig.state.open_turns


def test_b9_a_client_that_vanishes_in_prefill_leaves_nothing_on_p() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        await hang_up(rig, lambda: p.running)
        await until(lambda: not p.running, within_s=0.5)
        await asyncio.sleep(0.4)
        assert (p.counts.n_aborted, dict(p.pinned), d.counts.n_requests) == (1, {}, 0)
        assert nothing_is_open(rig)
        row = await rig.row()
        assert (row["status"], row["failure"], row["http_status"]) == ("aborted", "client_gone", 499)

    on("1P_1D", check, prefill_s=0.3)


def test_b9_a_client_that_vanishes_once_p_has_answered_still_has_d_free_ps_blocks() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        await hang_up(rig, lambda: p.counts.n_completed)
        await until(lambda: d.counts.n_requests and not p.pinned and not d.running, within_s=1.0)
        assert nothing_is_open(rig)

    on("1P_1D", check, step_s=0.05)


@pytest.mark.parametrize("decider", ["always_pd", "always_local"])
@pytest.mark.parametrize("first_token", [False, True])
def test_b10_a_client_that_vanishes_while_d_works_has_its_leg_closed_at_once(decider: str, first_token: bool) -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        await rig.complete(session="s")
        d.behaviour.prefill_s = 0.05 if first_token else 5.0
        n_before = d.counts.n_requests
        gone_s = await hang_up(
            rig,
            lambda: d._decoding if first_token else d.counts.n_requests > n_before,
            {**BODY, "prompt": [*PROMPT, 5]},
        )
        await until(lambda: not d.running, within_s=1.0)
        assert perf_counter() - gone_s < 0.5
        assert not rig.engines[0].pinned
        assert nothing_is_open(rig)

    on("1P_1D", check, decider=decider, step_s=0.02)


def test_b11_counters_return_to_zero_after_any_mix() -> None:
    async def check(rig: Rig) -> None:
        p0, p1, d0, d1 = rig.engines
        scripts: list[tuple[Any, dict[str, Any]]] = [
            (p0, {"status": 500}), (d0, {"die_after": 2}), (d1, {"error_after": 1}), (d0, {"status": 503}),
            (d1, {"cut_after": 3}), (p1, {"drop_params": ("remote_port",)}), (d0, {"stop_short": 3}),
        ]  # fmt: skip
        asks = []
        for i in range(42):
            engine, script = scripts[i % len(scripts)]
            for name, value in script.items():
                setattr(engine.behaviour, name, value)
            asks.append(asyncio.ensure_future(rig.complete([i, *PROMPT], session=f"s{i % 9}", stream=i % 2 == 0)))
            if i % 6 == 5:
                asks.append(asyncio.ensure_future(hang_up(rig, lambda: True)))
            await asyncio.sleep(0.01)
            for name in script:
                setattr(engine.behaviour, name, type(engine.behaviour)().__dict__[name])
        await asyncio.gather(*asks)
        await until(lambda: nothing_is_open(rig))
        assert rig.running.server.n_open_requests == 0
        await until(lambda: not any(engine.running for engine in rig.engines))

    on("2P_2D", check, decider="always_local")


def test_b12_a_failing_p_is_replaced_by_the_next() -> None:
    async def check(rig: Rig) -> None:
        p0, p1, _ = rig.engines
        p0.behaviour.status = 500
        assert (await rig.complete()).status_code == 200
        row = await rig.row()
        assert (row["route"], row["prefill_worker"], row["counters"]) == ("pd", "P1", ["prefill_retry"])
        assert p1.counts.n_requests == 1

    on("2P_1D", check)


@pytest.mark.parametrize("dead", [False, True])
def test_b12_where_no_p_works_d_prefills_and_the_path_says_so(dead: bool) -> None:
    async def check(rig: Rig) -> None:
        p0, p1, d = rig.engines
        for p in (p0, p1):
            p.behaviour.status = 500
            if dead:
                await p.stop()
        assert (await rig.complete()).status_code == 200
        row = await rig.row()
        assert (row["route"], row["decided_route"], row["prefill_worker"]) == ("pd_fallback_local", "pd", "D0")
        assert d.counts.sources["local_compute"] == 64
        assert rig.metric("turns_total", path="pd_fallback_local", outcome="ok") == 1.0
        assert rig.metric("turns_total", path="pd", outcome="ok") == 0.0

    on("2P_1D", check)


def test_b12_where_d_may_not_prefill_a_failing_p_is_a_503() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        p.behaviour.status = 500
        answer = await rig.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == 503
        assert d.counts.n_requests == 0

    on("1P_1D", check, settings={"local_fallback": False})


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_b12_a_4xx_of_p_is_returned_as_it_is_and_nobody_else_is_asked(status: int) -> None:
    async def check(rig: Rig) -> None:
        p0, p1, d = rig.engines
        p0.behaviour.status = status
        answer = await rig.complete()
        assert (answer.status_code, answer.json()) == (status, {"error": {"message": "scripted failure"}})
        assert (p1.counts.n_requests, d.counts.n_requests) == (0, 0)
        assert (await rig.row())["http_status"] == status

    on("2P_1D", check)


def test_b13_the_status_of_a_failing_d_is_preserved() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        d.behaviour.status = 503
        answer = await rig.complete(stream=True)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert answer.json() == {"error": {"message": "scripted failure"}}
        d.behaviour.status = 500
        assert (await rig.complete()).status_code == 500

    on("1P_1D", check)


@pytest.mark.parametrize("how", ["503", "dead", "no body", "resets"])
@pytest.mark.parametrize("decider", ["always_pd", "always_local"])
def test_b13_a_d_that_fails_before_the_first_byte_is_replaced_with_a_new_p_leg(how: str, decider: str) -> None:
    async def check(rig: Rig) -> None:
        p, d0, d1 = rig.engines
        await rig.complete(session="s")
        first, other = (d0, d1) if d0.counts.n_requests else (d1, d0)
        n_p = p.counts.n_requests
        if how == "dead":
            await first.stop()
        elif how == "503":
            first.behaviour.status = 503
        else:
            first.behaviour.die_after = 0  # the head of the stream was sent, and nothing after it
        answer = await rig.complete([*PROMPT, 1, 2, 3], session="s", stream=how != "resets")
        assert answer.status_code == 200
        assert other.counts.n_completed == 1
        row = await rig.row(2)
        assert (row["route"], row["counters"][-1], row["decode_worker"]) == ("pd", "decode_retry", other.name)
        assert p.counts.n_requests - n_p == {"always_pd": 2, "always_local": 1}[decider]
        assert other.bodies[0]["kv_transfer_params"]["remote_request_id"] == p.request_ids[-1]
        if how != "dead" and decider == "always_pd":
            handles = [d.bodies[-1]["kv_transfer_params"]["remote_request_id"] for d in (first, other)]
            assert len(set(handles)) == 2

    on("1P_2D", check, decider=decider)


@pytest.mark.parametrize(
    "script", [{"die_after": 3}, {"cut_after": 3}, {"error_after": 3}], ids=["resets", "ends early", "says error"]
)
def test_b13_after_the_first_byte_nothing_is_tried_again_and_the_client_is_told(script: dict[str, int]) -> None:
    async def check(rig: Rig) -> None:
        p, d0, d1 = rig.engines
        for d in (d0, d1):
            for name, value in script.items():
                setattr(d.behaviour, name, value)
        answer = await rig.complete(stream=True)
        assert answer.status_code == 200
        events = events_of(answer)
        assert [event for event in events if event != "[DONE]" and "error" in event] != []
        assert len([event for event in events if event != "[DONE]" and event.get("choices")]) == 3  # exactly once
        assert (p.counts.n_requests, d0.counts.n_requests + d1.counts.n_requests) == (1, 1)
        row = await rig.row()
        assert (row["status"], row["http_status"]) == ("error", 200)
        assert text_of(answer) == "".join(f" t{t}" for t in answer_ids(PROMPT, 3))

    on("1P_2D", check, **ROUTED_TO_P)


def test_b13_a_plain_answer_that_breaks_off_has_shown_the_client_nothing_and_is_tried_again() -> None:
    async def check(rig: Rig) -> None:
        for engine in rig.engines[1:]:
            engine.behaviour.error_in_200 = True
        assert (await rig.complete()).status_code == 400  # what the error itself says
        rig.engines[2].behaviour.error_in_200 = rig.engines[1].behaviour.error_in_200 = False
        assert (await rig.complete()).status_code == 200

    on("1P_2D", check)


def test_b14_an_error_inside_a_200_is_a_failure_in_counts_and_against_the_engine() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        d.behaviour.error_after = 1
        answer = await rig.complete(stream=True)
        errors = [event for event in events_of(answer) if event != "[DONE]" and "error" in event]
        assert [error["error"]["message"] for error in errors] == ["scripted error event"]  # the engine's own, once
        d.behaviour.error_after, d.behaviour.error_in_200 = None, True
        plain = await rig.complete()
        assert (plain.status_code, plain.json()["message"]) == (400, "scripted error")
        assert rig.metric("failures_total", kind="error_event") == 2.0
        assert rig.metric("turns_total", outcome="ok") == 0.0
        await rig.complete()
        assert not rig.state.fleet.available(1)  # three in a row

    on("1P_1D", check)


def test_b15_an_open_breaker_stops_dispatch_and_a_generation_closes_it() -> None:
    async def check(rig: Rig) -> None:
        p, d = rig.engines
        p.behaviour.status = 500
        for _ in range(3):
            await rig.complete()
        assert not rig.state.fleet.available(0)
        n_p, n_d = p.counts.n_requests, d.counts.n_requests
        assert (await rig.complete()).status_code == 503
        assert d.counts.n_requests == n_d  # an open P stops D too
        assert rig.metric("worker_available", worker="P0") == 0.0
        assert p.counts.n_requests - n_p <= 1  # at most a probe
        p.behaviour.status = None
        await until(lambda: rig.state.fleet.available(0), within_s=10.0)
        assert (await rig.complete()).status_code == 200

    on("1P_1D", check, settings={"local_fallback": False})


def test_b15_ready_means_that_a_token_came_through_every_role() -> None:
    async def check(rig: Rig) -> None:
        assert (await rig.http.get("/ready")).json() == {"ready": True, "problems": {}}
        r, p, d = rig.engines
        assert (r.counts.n_requests > 0, p.counts.n_requests > 0, d.counts.n_requests > 0) == (True, True, True)
        n = p.counts.n_requests
        await asyncio.gather(*(rig.http.get("/ready") for _ in range(5)))
        assert p.counts.n_requests == n  # it is remembered for a moment
        p.behaviour.status = 500
        assert (await rig.http.get("/health")).status_code == 200
        await asyncio.sleep(0.3)
        answer = await rig.http.get("/ready")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert "P to D" in answer.json()["problems"]

    on("1R_1P_1D", check, settings={"ready_cache_s": 0.2})


@pytest.mark.parametrize(
    ("which", "script"),
    [(0, {"hang": True}), (1, {"hang": True}), (1, {"stall_after": 0})],
    ids=["P hangs", "D hangs", "D hangs after its head"],
)
def test_b16_a_hanging_engine_is_a_504_in_the_configured_time(which: int, script: dict[str, Any]) -> None:
    async def check(rig: Rig) -> None:
        for name, value in script.items():
            setattr(rig.engines[which].behaviour, name, value)
        began_s = perf_counter()
        answer = await rig.complete(stream=True)
        assert answer.status_code == 504
        assert 0.2 <= perf_counter() - began_s < 2.0
        assert (await rig.row())["failure"] == "timeout"
        await until(lambda: not rig.engines[which].running)

    on("1P_1D", check, settings={"prefill_s": 0.3, "first_byte_s": 0.3, "idle_s": 0.3})


def test_b16_a_plain_answer_has_its_deadline_and_a_silent_stream_ends_in_an_error_event() -> None:
    async def check(rig: Rig) -> None:
        d = rig.engines[1]
        d.behaviour.stall_after = 2
        answer = await rig.complete(stream=True)
        assert (answer.status_code, events_of(answer)[-1]["error"]["code"]) == (200, 504)
        d.behaviour.stall_after, d.behaviour.hang = None, True
        assert (await rig.complete()).status_code == 504

    on("1P_1D", check, settings={"idle_s": 0.3, "answer_s": 0.5})


@pytest.mark.parametrize(("gone", "role"), [((0, 1), "prefill engine (P)"), ((2, 3), "decode engine (D)")])
def test_b17_where_a_role_is_missing_the_answer_names_it_at_once(gone: tuple[int, ...], role: str) -> None:
    async def check(rig: Rig) -> None:
        for worker in gone:
            await rig.engines[worker].stop()
        await until(lambda: not any(rig.state.fleet.available(worker) for worker in gone), within_s=10.0)
        began_s = perf_counter()
        answer = await rig.complete()
        assert perf_counter() - began_s < 1.0
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert role in answer.json()["error"]["message"]
        assert (await rig.row())["failure"] == "no_engine"

    on("2P_2D", check, settings={"local_fallback": False})


def test_b17_where_only_p_is_missing_d_may_prefill() -> None:
    async def check(rig: Rig) -> None:
        await rig.engines[0].stop()
        await until(lambda: not rig.state.fleet.available(0), within_s=10.0)
        assert (await rig.complete()).status_code == 200
        row = await rig.row()
        assert (row["route"], row["reason"], row["counters"]) == (
            "pd_fallback_local",
            "turn-1 p-gone",
            ["prefill_gone"],
        )

    on("1P_1D", check)
