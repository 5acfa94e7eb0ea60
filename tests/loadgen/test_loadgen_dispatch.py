"""Carrying out decisions on fake engines, with the engines' counters as proof of the path (ROUTER.md B8 to B13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import pytest
from fake_engine import FakeEngine, answer_ids
from loadgen_cases import LOCAL, PD, body_of, fakes, run, until

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route, Status
from ppd_bench.core.errors import EngineError
from ppd_bench.engine.client import Client
from ppd_bench.engine.dispatch import Dispatched, Engines, Fallbacks, LegLimits, Request, dispatch
from ppd_bench.engine.stream import Failure

Dispatch = Callable[..., Awaitable[Dispatched]]
Check = Callable[[list[FakeEngine], Dispatch], Awaitable[None]]

PROMPT = list(range(64))


def on(topology: str, check: Check, *, lease_s: float = 30.0, **behaviour: Any) -> None:
    """Run a check on fakes; its ``run(decision, ...)`` dispatches one request."""

    async def main() -> None:
        async with fakes(topology, **behaviour) as (engines, target), Client(perf_counter) as client:
            target = Engines(endpoints=target.endpoints, lease_s=lease_s)
            serial = iter(range(100))

            async def run_one(decision: Decision, body: dict[str, Any] | None = None, **more: Any) -> Dispatched:
                request = Request(request_id=f"r{next(serial)}", body=body or body_of())
                return await dispatch(client, target, decision, request, limits=more.pop("limits", LegLimits()), **more)

            await check(engines, run_one)

    run(main())


def test_a_pd_turn_is_prefilled_on_p_pulled_by_d_and_freed_on_p() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        at_s: list[float] = []
        went = await run(PD, on_prefilled=at_s.append)
        assert went.outcome.ok
        assert went.outcome.token_ids == tuple(answer_ids(PROMPT, 8))
        assert (went.path, went.prefill_worker, went.decode_worker, went.counters) == ("pd", 0, 1, ())
        assert (p.counts.sources["local_compute"], p.counts.n_requests) == (64, 1)
        assert d.counts.sources == {"external_kv_transfer": 64, "local_cache_hit": 0}
        assert d.counts.bytes_pulled == 64 * 1024
        assert not p.pinned
        assert [went.prefill_done_s] == at_s
        assert went.prefill is not None
        assert went.prefill.sent_s is not None
        assert went.decode_sent_s is not None
        assert went.outcome.first_token_s is not None
        assert went.prefill.sent_s < at_s[0] <= went.decode_sent_s < went.outcome.first_token_s

    on("1P_1D", check)


def test_a_local_turn_never_touches_p_and_hits_the_history_on_d() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        first = await run(PD)
        history = [*PROMPT, *first.outcome.token_ids]
        d.counts.sources.clear()
        went = await run(LOCAL, {**body_of(), "prompt": history + [5] * 20})
        assert (went.outcome.ok, went.path, went.prefill, went.prefill_worker) == (True, "local", None, 1)
        assert d.counts.sources == {"local_cache_hit": 64, "local_compute": 28}
        assert went.outcome.cached_tokens == 64
        assert p.counts.n_requests == 1

    on("1P_1D", check)


def test_a_second_pd_turn_moves_only_the_blocks_that_d_lacks() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        d = engines[1]
        first = await run(PD)
        d.counts.sources.clear()
        await run(PD, {**body_of(), "prompt": [*PROMPT, *first.outcome.token_ids, *[5] * 20]})
        assert d.counts.sources == {"local_cache_hit": 64, "external_kv_transfer": 28}

    on("1P_1D", check)


def test_b8_every_leg_has_an_id_of_its_own() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        for decision in (PD, PD, LOCAL):
            await run(decision)
        ids = [i for engine in engines for i in engine.request_ids]
        assert sorted(ids) == ["r0-d2", "r0-p1", "r1-d2", "r1-p1", "r2-d1"]

    on("1P_1D", check)


def test_b9_a_client_that_vanishes_in_prefill_leaves_nothing_on_p() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        task = asyncio.ensure_future(run(PD))
        await until(lambda: p.running)
        task.cancel()
        await until(lambda: not p.running, within_s=0.2)
        await asyncio.sleep(0.4)
        assert (p.counts.n_aborted, dict(p.pinned), d.counts.n_requests) == (1, {}, 0)
        assert task.cancelled()

    on("1P_1D", check, prefill_s=0.3)


def test_b9_a_client_that_vanishes_as_p_answers_still_has_d_free_ps_blocks() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        tasks: list[asyncio.Future[Dispatched]] = []
        tasks.append(asyncio.ensure_future(run(PD, body_of(n_tokens=500), on_prefilled=lambda _: tasks[0].cancel())))
        await until(lambda: d.counts.n_requests == 1)
        await until(lambda: not p.pinned and not d.running, within_s=0.3)
        assert tasks[0].cancelled()
        assert d.counts.n_aborted == 1

    on("1P_1D", check)


def test_b10_a_client_that_vanishes_while_d_generates_closes_ds_connection_at_once() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        d = engines[1]
        for decision in (PD, LOCAL):
            task = asyncio.ensure_future(run(decision, body_of(n_tokens=500)))
            await until(lambda: d._decoding)
            await asyncio.sleep(0.2)
            task.cancel()
            await until(lambda: not d.running, within_s=0.2)
        assert d.counts.n_aborted == 2

    on("1P_1D", check, step_s=0.01)


def test_a_deadline_in_either_leg_is_a_timeout_that_frees_both_engines() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        for slow in (p, d):
            slow.behaviour.prefill_s = 60.0
            went = await run(PD, limits=LegLimits(deadline_s=perf_counter() + 0.3))
            assert (went.outcome.status, went.path) == (Status.TIMEOUT, "pd")
            await until(lambda: not p.running and not d.running and not p.pinned, within_s=0.2)
            slow.behaviour.prefill_s = 0.0
        assert (p.counts.n_aborted, d.counts.n_aborted, d.counts.n_requests) == (1, 1, 1)

    on("1P_1D", check)


def test_b9_a_handle_that_comes_at_the_deadline_is_still_given_to_d() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        deadline_s = perf_counter() + 0.1
        late = run(
            PD, body_of(n_tokens=500), limits=LegLimits(deadline_s=deadline_s), on_prefilled=lambda _: time.sleep(0.15)
        )
        assert (await late).outcome.status is Status.TIMEOUT
        await until(lambda: not p.pinned and not d.running, within_s=0.1)
        assert d.counts.n_requests == 1
        assert perf_counter() - deadline_s < 0.4

    on("1P_1D", check)


def test_b12_strict_a_failing_p_fails_the_turn_once_and_d_is_not_asked() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        p.behaviour.status = 500
        went = await run(PD)
        assert (went.outcome.status, went.outcome.http_status, went.path) == (Status.ERROR, 500, "pd")
        assert (went.prefill_done_s, went.decode_sent_s) == (None, None)
        assert (p.counts.n_requests, d.counts.n_requests) == (1, 0)

    on("1P_1D", check)


def test_b12_a_failing_p_is_replaced_by_the_next_and_then_by_local_prefill() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p0, p1, d = engines
        p0.behaviour.status = 500
        decision = PD._replace(decode_worker=2)
        fallbacks = Fallbacks(prefillers=(1,), local=True)
        went = await run(decision, fallbacks=fallbacks)
        assert (went.outcome.ok, went.path, went.prefill_worker) == (True, "pd", 1)
        assert went.counters == ("prefill_retry",)
        await p1.stop()
        went = await run(decision, {**body_of(), "prompt": [7] * 64}, fallbacks=fallbacks)
        assert (went.outcome.ok, went.path, went.prefill_worker) == (True, "pd_fallback_local", 2)
        assert d.counts.sources["local_compute"] == 64

    on("2P_1D", check)


def test_b12_a_4xx_of_p_is_returned_as_it_is_and_nobody_else_is_asked() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p0, p1, d = engines
        p0.behaviour.status = 400
        went = await run(PD._replace(decode_worker=2), fallbacks=Fallbacks(prefillers=(1,), local=True))
        assert (went.outcome.http_status, went.path) == (400, "pd")
        assert (p1.counts.n_requests, d.counts.n_requests) == (0, 0)

    on("2P_1D", check)


def test_b2_an_incomplete_handle_never_reaches_d() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        p.behaviour.drop_params = ("remote_host",)
        went = await run(PD)
        assert (went.outcome.failure, went.counters) == (Failure.HANDOFF, ("handoff_incomplete",))
        assert "remote_host" in str(went.outcome.message)
        assert d.counts.n_requests == 0
        went = await run(PD, fallbacks=Fallbacks(local=True))
        assert (went.outcome.ok, went.path) == (True, "pd_fallback_local")
        assert d.bodies[0].get("kv_transfer_params") is None

    on("1P_1D", check)


def test_b6_a_handle_whose_lease_is_over_never_reaches_d() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        went = await run(PD)
        assert (went.outcome.failure, went.counters) == (Failure.HANDOFF, ("handle_expired",))
        assert engines[1].counts.n_requests == 0

    on("1P_1D", check, lease_s=0.5)


def test_b3_a_list_of_prompts_never_goes_through_p_and_d_as_one() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        went = await run(PD, {**body_of(), "prompt": [[1, 2], [3]]})
        assert (went.outcome.failure, went.counters) == (Failure.HANDOFF, ("unsplittable_prompt_list",))
        assert [engine.counts.n_requests for engine in engines] == [0, 0]

    on("1P_1D", check)


def test_b13_strict_a_dead_d_fails_the_turn_and_says_that_a_handle_was_abandoned() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        await engines[1].stop()
        went = await run(PD)
        assert (went.outcome.failure, went.counters) == (Failure.UNREACHABLE, ("handle_abandoned",))

    on("1P_1D", check)


@pytest.mark.parametrize("dead", [True, False])
def test_b13_another_d_is_tried_with_a_new_p_leg(dead: bool) -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d0, d1 = engines
        if dead:
            await d0.stop()
        else:
            d0.behaviour.status = 503
        went = await run(PD, fallbacks=Fallbacks(decoders=(2,)))
        assert (went.outcome.ok, went.path, went.decode_worker) == (True, "pd", 2)
        assert "decode_retry" in went.counters
        assert p.counts.n_requests == 2
        assert d1.bodies[0]["kv_transfer_params"]["remote_request_id"] == "r0-p3"

    on("1P_2D", check)


def test_b13_after_the_first_token_nothing_is_tried_again() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d0, d1 = engines
        d0.behaviour.die_after = 2
        went = await run(PD, fallbacks=Fallbacks(decoders=(2,), local=True))
        assert (went.outcome.failure, went.outcome.n_tokens) == (Failure.DISCONNECTED, 2)
        assert (p.counts.n_requests, d1.counts.n_requests) == (1, 0)

    on("1P_2D", check)


def test_b16_each_leg_has_its_own_deadline() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        p, d = engines
        p.behaviour.hang = True
        began_s = perf_counter()
        went = await run(PD, limits=LegLimits(prefill_s=0.1))
        assert went.outcome.status is Status.TIMEOUT
        p.behaviour.hang, d.behaviour.hang = False, True
        went = await run(PD, limits=LegLimits(first_byte_s=0.1))
        assert went.outcome.status is Status.TIMEOUT
        assert perf_counter() - began_s < 0.5

    on("1P_1D", check)


def test_a_read_back_cannot_be_dispatched() -> None:
    async def check(engines: list[FakeEngine], run: Dispatch) -> None:
        with pytest.raises(EngineError, match="pd_readback"):
            await run(PD._replace(route=Route.PD_READBACK))

    on("1P_1D", check)
