"""Is an engine there? Only a real generation says so; and only a transfer that moved tokens says that P and D have met."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
import orjson

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Role, Route
from ppd_bench.core.errors import NotReady
from ppd_bench.engine.client import Client, Limits
from ppd_bench.engine.control import explain
from ppd_bench.engine.dispatch import Engines, LegLimits, Request, dispatch
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.metrics import counters_between, scrape

PROBE_PROMPT = (17, 18, 19, 20, 21, 22, 23, 24)
PROBE_LIMIT_S = 60.0
"""One probe on a starting engine: the first batch of a CPU engine can take tens of seconds."""

WARM_LIMIT_S = 60.0
WARM_ATTEMPTS = 3
"""A cold handshake under load can fail, and the request with it (a ZeroMQ time-out of 5 s)."""

FIRST_TOKEN_ID, N_TOKEN_IDS = 16, 100
"""Ids for prompts of our own: low ones, which every vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmTransfer:
    """A P x D pair that has met. ``seconds`` is the whole turn, ``moved_tokens`` what D's own counter says."""

    prefill_worker: str
    decode_worker: str
    seconds: float
    moved_tokens: int


async def failure_to_generate(
    client: Client, endpoint: Endpoint, *, limit_s: float = PROBE_LIMIT_S, headers: Mapping[str, str] | None = None
) -> str | None:
    """Ask for two tokens. Null when they came, else why not, in words. ``headers``: a key, where engines want one."""
    body = orjson.dumps(_body(PROBE_PROMPT))
    limits = Limits(deadline_s=client.clock() + limit_s, connect_s=min(limit_s, 5.0))
    outcome = await client.post(endpoint.host, endpoint.port, body, request_id="probe", limits=limits, headers=headers)
    if outcome.ok:
        return None
    return outcome.message or outcome.status.value


async def warm_pairs(
    client: Client,
    control: httpx.AsyncClient,
    engines: Engines,
    *,
    block_size: int,
    nonce: int,
    among: frozenset[str] | None = None,
    limit_s: float = WARM_LIMIT_S,
) -> tuple[WarmTransfer, ...]:
    """One transfer for every P x D pair, one after another. ``nonce`` makes the prompts new to the engines' caches.

    ``among``: only pairs with one of these workers.

    Raises:
        NotReady: a pair that does not transfer, with what it said.
    """
    transfers = []
    for number, (p, d) in enumerate(pairs(engines.endpoints)):
        if among is None or among & {engines.endpoints[p].worker_id, engines.endpoints[d].worker_id}:
            prompts = (warm_prompt(block_size, (nonce, number, attempt)) for attempt in range(WARM_ATTEMPTS))
            transfers.append(await _warm_pair(client, control, engines, (p, d), prompts, limit_s))
    return tuple(transfers)


def pairs(endpoints: Sequence[Endpoint]) -> Iterator[tuple[int, int]]:
    """Indices of every (P, D)."""
    by_role = {role: [i for i, e in enumerate(endpoints) if e.role is role] for role in (Role.PREFILL, Role.DECODE)}
    return itertools.product(by_role[Role.PREFILL], by_role[Role.DECODE])


def warm_prompt(block_size: int, key: tuple[int, int, int]) -> list[int]:
    """Two full blocks and one token, which differ in the first block for every key."""
    digits = [FIRST_TOKEN_ID + number // N_TOKEN_IDS**place % N_TOKEN_IDS for number in key for place in range(2)]
    n_tokens = 2 * block_size + 1
    return (digits + [FIRST_TOKEN_ID + i % N_TOKEN_IDS for i in range(n_tokens)])[:n_tokens]


async def _warm_pair(
    client: Client,
    control: httpx.AsyncClient,
    engines: Engines,
    pair: tuple[int, int],
    prompts: Iterator[list[int]],
    limit_s: float,
) -> WarmTransfer:
    problem = ""
    for prompt in prompts:
        result = await _transfer(client, control, engines, pair, prompt, limit_s)
        if isinstance(result, WarmTransfer):
            return result
        problem = result
    p, d = (engines.endpoints[index].worker_id for index in pair)
    raise NotReady(
        f"no KV went from {p} to {d} in {WARM_ATTEMPTS} attempts: {problem}; look at the logs of both, and check that "
        f"they run the same model and the connector {engines.connector}"
    )


async def _transfer(
    client: Client,
    control: httpx.AsyncClient,
    engines: Engines,
    pair: tuple[int, int],
    prompt: list[int],
    limit_s: float,
) -> WarmTransfer | str:
    """One turn through P and D; what was wrong with it, in words, where no KV moved."""
    p, d = (engines.endpoints[index] for index in pair)
    decision = Decision(Route.PD, *pair, "warm transfer")
    key = "-".join(map(str, prompt[:6]))
    request = Request(request_id=f"warm-{p.worker_id}-{d.worker_id}-{key}", body=_body(prompt))
    before = await scrape(control, d)
    started_s = client.clock()
    done = await dispatch(client, engines, decision, request, limits=LegLimits(deadline_s=started_s + limit_s))
    if not done.outcome.ok:
        return done.outcome.message or done.outcome.status.value
    moved = counters_between(before, await scrape(control, d)).external_kv_transfer_tokens
    if not moved:
        counted = "counts no prompt tokens by source" if moved is None else "pulled nothing"
        return f"both answered, but {d.worker_id} {counted}"
    return WarmTransfer(
        prefill_worker=p.worker_id,
        decode_worker=d.worker_id,
        seconds=client.clock() - started_s,
        moved_tokens=int(moved),
    )


async def mooncake_engine_id(control: httpx.AsyncClient, endpoint: Endpoint, bootstrap_addr: str) -> str:
    """The name under which a Mooncake P is registered at its bootstrap server, which D must be told.

    Follows vLLM 0.32's source (GET /query: data-parallel rank to entry); not tried on real Mooncake engines.

    Raises:
        NotReady: the bootstrap server does not say.
    """
    with explain(endpoint, f"ask {bootstrap_addr} for its engine id"):
        answer = await control.get(f"{bootstrap_addr}/query")
        answer.raise_for_status()
        return str(answer.json()["0"]["engine_id"])


def _body(prompt: Sequence[int]) -> dict[str, object]:
    return {"prompt": list(prompt), "max_tokens": 2, "min_tokens": 2, "ignore_eos": True, "temperature": 0, "seed": 0}
