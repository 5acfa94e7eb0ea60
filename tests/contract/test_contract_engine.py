"""What this project relies on in an engine, checked on the fakes that most tests use and on real vLLM alike."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest
from contract_lab import BLOCK, MAX_MODEL_LEN, Lab

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route, Status
from ppd_bench.engine.caches import RESET, reset_caches
from ppd_bench.engine.client import Client, Limits
from ppd_bench.engine.dispatch import LegLimits, Request, dispatch
from ppd_bench.engine.doctor import endpoint_facts, endpoint_findings
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.metrics import COUNTERS, EngineCounters, EngineScrape, counters_between, scrape
from ppd_bench.engine.stream import Failure, StreamOutcome
from ppd_bench.runner.proof import PROOF_COUNTERS

NUMBERS = itertools.count(1)


def new_prompt(n_tokens: int) -> list[int]:
    """A prompt whose first block no cache has seen."""
    number = next(NUMBERS)
    return [20 + number % 900, 20 + number * 7 % 900, *(20 + (number + i) % 900 for i in range(n_tokens - 2))]


def full_blocks(n_tokens: int) -> int:
    return n_tokens // BLOCK * BLOCK


def body_of(prompt: list[int], n_tokens: int, **more: Any) -> dict[str, Any]:
    forced = {"max_tokens": n_tokens, "min_tokens": n_tokens, "ignore_eos": True, "temperature": 0.0, "seed": 0}
    return {"prompt": prompt, **forced, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True}, **more}  # fmt: skip


async def completed(client: Client, endpoint: Endpoint, body: dict[str, Any]) -> StreamOutcome:
    limits = Limits(deadline_s=client.clock() + 60.0)
    outcome = await client.post(endpoint.host, endpoint.port, orjson.dumps(body), limits=limits)
    assert outcome.ok, outcome.message
    return outcome


async def moved_by(
    control: httpx.AsyncClient, lab: Lab, work: Awaitable[Any]
) -> tuple[Any, EngineCounters, EngineCounters]:
    """A result, and what P and D counted meanwhile."""
    before = [await scrape(control, endpoint) for endpoint in lab.engines.endpoints]
    result = await work
    after = [await scrape(control, endpoint) for endpoint in lab.engines.endpoints]
    p, d = map(counters_between, before, after)
    return result, p, d


async def settled(read: Callable[[], Awaitable[EngineScrape]], idle: Callable[[EngineScrape], bool]) -> EngineScrape:
    """The first reading that is idle; engines publish their gauges a little later. The last one where none is."""
    reading = await read()
    for _ in range(50):
        if idle(reading):
            break
        await asyncio.sleep(0.2)
        reading = await read()
    return reading


# -- answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["p", "d"])
def test_a_stream_has_the_asked_tokens_with_ids_a_reason_and_usage_at_its_end(lab: Lab, role: str) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        prompt = new_prompt(40)
        outcome = await completed(client, getattr(lab, role), body_of(prompt, 9))
        assert (outcome.n_tokens, len(outcome.token_ids), outcome.completion_tokens) == (9, 9, 9)
        assert outcome.exact
        assert outcome.token_times_s is not None
        assert len(outcome.token_times_s) == 9
        assert outcome.finish_reason == "length"
        assert outcome.prompt_tokens == 40

    lab.do(work)


def test_an_answer_that_is_not_streamed_says_the_same(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        body = body_of(new_prompt(40), 9, stream=False)
        del body["stream_options"]
        outcome = await completed(client, lab.d, body)
        assert (outcome.n_tokens, len(outcome.token_ids), outcome.completion_tokens) == (9, 9, 9)
        assert outcome.finish_reason == "length"
        assert (outcome.prompt_tokens, outcome.exact) == (40, False)  # no token has an instant of its own

    lab.do(work)


@pytest.mark.parametrize("n_tokens", [1, 2, 33])
def test_min_tokens_and_ignore_eos_force_the_length(lab: Lab, n_tokens: int) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        assert (await completed(client, lab.d, body_of(new_prompt(5), n_tokens))).n_tokens == n_tokens

    lab.do(work)


# -- prefix cache --------------------------------------------------------------------------------------------------------


def test_a_new_prompt_hits_nothing_and_the_same_prompt_hits_its_full_blocks_but_for_the_last_token(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        prompt = new_prompt(4 * BLOCK)
        first = await completed(client, lab.d, body_of(prompt, 2))
        second, _, d = await moved_by(control, lab, completed(client, lab.d, body_of(prompt, 2)))
        assert first.cached_tokens == 0
        assert second.cached_tokens == 3 * BLOCK  # one token at least is computed, and blocks are whole
        assert d.local_cache_hit_tokens == 3 * BLOCK
        assert d.local_compute_tokens == BLOCK
        assert d.external_kv_transfer_tokens == 0

    lab.do(work)


def test_a_follow_up_hits_its_history_the_generated_ids_included(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        prompt = new_prompt(60)
        answer = await completed(client, lab.d, body_of(prompt, 10))
        history = [*prompt, *answer.token_ids]
        outcome = await completed(client, lab.d, body_of([*history, *new_prompt(11)], 2))
        # The last generated token was sampled and never computed.
        assert outcome.cached_tokens == full_blocks(len(history) - 1)
        assert outcome.prompt_tokens == 81

    lab.do(work)


def test_a_reset_answers_with_success_in_its_body_and_empties_the_cache(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        prompt = new_prompt(4 * BLOCK)
        await completed(client, lab.d, body_of(prompt, 2))
        answer = await control.post(f"{lab.d.url}{RESET}", params={"reset_external": "true"})
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert (await completed(client, lab.d, body_of(prompt, 2))).cached_tokens == 0
        assert await reset_caches(control, lab.engines.endpoints) == ()

    lab.do(work)


# -- hand-off ------------------------------------------------------------------------------------------------------------


def test_a_hand_off_computes_on_p_moves_bytes_to_d_and_the_next_turn_needs_neither(lab: Lab) -> None:
    async def through(client: Client, route: Route, prefill: int, prompt: list[int], key: str) -> StreamOutcome:
        done = await dispatch(
            client,
            lab.engines,
            Decision(route, prefill, 1, "contract"),
            Request(request_id=f"contract-{key}-{prompt[0]}-{prompt[1]}", body=body_of(prompt, 6)),
            limits=LegLimits(deadline_s=client.clock() + 60.0),
        )
        assert done.outcome.ok, done.outcome.message
        return done.outcome

    async def work(client: Client, control: httpx.AsyncClient) -> None:
        prompt = new_prompt(3 * BLOCK)
        first, p, d = await moved_by(control, lab, through(client, Route.PD, 0, prompt, "one"))
        assert (first.n_tokens, first.prompt_tokens) == (6, 3 * BLOCK)
        assert p.local_compute_tokens == 3 * BLOCK
        assert d.external_kv_transfer_tokens == 3 * BLOCK
        assert d.local_compute_tokens == 0
        assert (d.transferred_bytes or 0) > 0
        follow_up = [*prompt, *first.token_ids, *new_prompt(20)]
        second, p, d = await moved_by(control, lab, through(client, Route.LOCAL, 1, follow_up, "two"))
        assert second.cached_tokens == 3 * BLOCK
        assert (p.local_compute_tokens, p.local_cache_hit_tokens) == (0, 0)
        assert (d.external_kv_transfer_tokens, d.transferred_bytes) == (0, 0)
        assert d.local_cache_hit_tokens == 3 * BLOCK

    lab.do(work)


def test_ps_answer_carries_a_handle_only_when_it_is_asked_for(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        body = body_of(new_prompt(2 * BLOCK), 1, stream=False)
        del body["stream_options"]
        assert not (await completed(client, lab.p, body)).kv_transfer_params

    lab.do(work)


# -- pages ---------------------------------------------------------------------------------------------------------------


def test_metrics_have_the_names_that_proofs_and_policies_read(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        await completed(client, lab.d, body_of(new_prompt(40), 2))
        reading = await scrape(control, lab.d)
        assert None not in [getattr(reading.counters, name) for name in PROOF_COUNTERS]
        gauges = reading.gauges
        assert None not in (gauges.kv_cache_usage_ratio, gauges.n_running, gauges.n_waiting)
        if lab.kind == "real":
            missing = [name for name in COUNTERS if getattr(reading.counters, name) is None]
            assert missing == []
            assert reading.engine_start_s is not None

    lab.do(work)


def test_doctor_finds_nothing_wrong_and_health_version_and_models_answer(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        facts = [await endpoint_facts(control, endpoint) for endpoint in lab.engines.endpoints]
        assert [finding.level for finding in endpoint_findings(facts)] == ["ok", "ok"]
        for page in ("/health", "/version", "/v1/models"):
            assert (await control.get(f"{lab.d.url}{page}")).status_code == 200
        assert (await control.get(f"{lab.d.url}/v1/models")).json()["data"][0]["id"]
        assert (await control.get(f"{lab.d.url}/nowhere")).status_code == 404

    lab.do(work)


# -- errors and ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [b"{", b'{"prompt":[1,2],"max_tokens":"many"}', b'{"prompt":[1,2],"max_tokens":-1}'])
def test_a_bad_body_is_answered_with_400_and_an_openai_error(lab: Lab, bad: bytes) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        answer = await control.post(
            f"{lab.d.url}/v1/completions", content=bad, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
        outcome = await client.post(lab.d.host, lab.d.port, bad)
        assert (outcome.status, outcome.failure, outcome.http_status) == (Status.ERROR, Failure.HTTP, 400)

    lab.do(work)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_prompt_that_is_too_long_is_refused_with_400_before_any_token(lab: Lab, streamed: bool) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        body = orjson.dumps({"prompt": new_prompt(MAX_MODEL_LEN + 1), "max_tokens": 4, "stream": streamed})
        outcome = await client.post(lab.d.host, lab.d.port, body)
        assert (outcome.http_status, outcome.n_tokens) == (400, 0)
        assert str(MAX_MODEL_LEN) in str(outcome.message)

    lab.do(work)


def test_closing_the_connection_aborts_the_request_and_frees_its_kv(lab: Lab) -> None:
    async def work(client: Client, control: httpx.AsyncClient) -> None:
        async def read() -> EngineScrape:
            return await scrape(control, lab.d)

        def idle(reading: EngineScrape) -> bool:
            return reading.gauges.n_running == 0 and not reading.gauges.kv_cache_usage_ratio

        assert idle(await settled(read, idle))
        task = asyncio.ensure_future(completed(client, lab.d, body_of(new_prompt(100), 800)))
        busy = await settled(read, lambda reading: bool(reading.gauges.kv_cache_usage_ratio))
        assert busy.gauges.n_running == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert idle(await settled(read, idle))

    lab.do(work)
