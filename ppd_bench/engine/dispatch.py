"""Carry out one Decision on engines: P leg, hand-off and D leg, or one leg. Used by every client that routes.

Nothing outlives the request but, where D may not have taken up a handle yet, its leg for ``RELEASE_S``: D then tells P to
free the blocks, which otherwise stay pinned until the lease ends (ROUTER.md B9, B10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.errors import EngineError
from ppd_bench.engine.client import COMPLETIONS, Client, Limits
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.handoff import (
    Handoff,
    Peer,
    Refused,
    decode_body,
    find_connector,
    plain_body,
    prefill_body,
    take_handoff,
    unsplittable,
)
from ppd_bench.engine.stream import Failure, StreamOutcome, never_sent

RELEASE_S = 0.15
"""How long a D leg that nobody waits for stays open, so that D has read the handle (B9), and closes within 200 ms (B10)."""

FALLBACK_LOCAL = "pd_fallback_local"
"""The path of a turn that was to go through P and was prefilled on D because P failed. Never recorded as ``pd`` (B12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a topology, in the order of its workers, and the hand-off between them.

    ``bootstrap_addrs``: by worker index, for Mooncake. ``lease_s``: how long P holds KV (vLLM: kv_lease_duration).
    """

    endpoints: tuple[Endpoint, ...]
    connector: str = "NixlConnector"
    lease_s: float = 30.0
    bootstrap_addrs: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks. ``request_id`` must be unique: legs are told apart by suffixes to it (B8)."""

    request_id: str
    body: Mapping[str, Any]
    path: str = COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegLimits:
    """Per-leg deadlines (B16): durations in seconds, beside ``deadline_s``, the whole request's instant.

    Where P answers just before ``deadline_s``, D has ``RELEASE_S`` from then all the same.
    """

    deadline_s: float = float("inf")
    connect_s: float = 10.0
    prefill_s: float = float("inf")
    first_byte_s: float = float("inf")
    idle_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallbacks:
    """What may be tried when a leg fails before the client saw a byte (B12, B13). The default, strict, is nothing.

    ``prefillers``/``decoders``: further workers in order; ``local``: prefill on D when no P works.
    """

    prefillers: tuple[int, ...] = ()
    decoders: tuple[int, ...] = ()
    local: bool = False


STRICT = Fallbacks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """How a decision went. ``path``: the route taken, or ``pd_fallback_local``.

    ``outcome``: the leg that generated, or the one that failed. ``prefill``: the last P leg; null without one.
    ``prefill_done_s``: when the P leg used had answered. ``decode_sent_s``: when the generating leg was sent. Both null where it
    did not come to that. ``counters``: names of what went wrong on the way.
    """

    path: str
    prefill_worker: int
    decode_worker: int
    outcome: StreamOutcome
    prefill: StreamOutcome | None
    prefill_done_s: float | None
    decode_sent_s: float | None
    counters: tuple[str, ...]


async def dispatch(
    client: Client,
    engines: Engines,
    decision: Decision,
    request: Request,
    *,
    limits: LegLimits,
    fallbacks: Fallbacks = STRICT,
    on_prefilled: Callable[[float], None] | None = None,
    tap: Callable[[bytes], None] | None = None,
) -> Dispatched:
    """Run one request as decided. Failures are in the result; cancelling closes every connection of the request.

    ``on_prefilled`` gets the instant at which P answered well; ``tap`` the bytes of the generating leg as they arrive.

    Raises:
        EngineError: the route cannot be dispatched, or the connector has no hand-off.
    """
    if decision.route not in _ROUTES:
        raise EngineError(f"route {decision.route.value!r} cannot be dispatched: streamed answers carry no KV handle")
    run = _Run(
        client=client,
        engines=engines,
        request=request,
        limits=limits,
        fallbacks=fallbacks,
        on_prefilled=on_prefilled,
        tap=tap,
        path=decision.route.value,
        prefill_worker=decision.prefill_worker,
        decode_worker=decision.decode_worker,
    )
    outcome = await _ROUTES[decision.route](run)
    return Dispatched(
        path=run.path,
        prefill_worker=run.prefill_worker,
        decode_worker=run.decode_worker,
        outcome=outcome,
        prefill=run.prefill,
        prefill_done_s=run.prefill_done_s,
        decode_sent_s=run.decode_sent_s,
        counters=tuple(run.counters),
    )


@dataclass(kw_only=True)
class _Run:
    """The state of one dispatch."""

    client: Client
    engines: Engines
    request: Request
    limits: LegLimits
    fallbacks: Fallbacks
    on_prefilled: Callable[[float], None] | None
    tap: Callable[[bytes], None] | None
    path: str
    prefill_worker: int
    decode_worker: int
    prefill: StreamOutcome | None = None
    prefill_done_s: float | None = None
    decode_sent_s: float | None = None
    decode_tried: bool = False
    counters: list[str] = field(default_factory=list)
    n_legs: int = 0

    def leg_id(self, letter: str) -> str:
        """Unique per leg, retries included (B8)."""
        self.n_legs += 1
        return f"{self.request.request_id}-{letter}{self.n_legs}"

    # -- routes ------------------------------------------------------------------------------------------------------

    async def direct(self) -> StreamOutcome:
        """One leg on the decode worker."""
        self.prefill_worker = self.decode_worker
        return await self._generate(plain_body(self.request.body))

    async def through_prefill(self) -> StreamOutcome:
        """P leg, then D leg; each decode worker that is tried gets a P leg of its own (B13)."""
        problem = unsplittable(self.request.body)
        if problem is not None:
            self.counters.append(problem)
            return await self._without_prefill(
                self._failed(f"the request cannot go through P and D as one ({problem})")
            )
        outcome = await self._pair()
        for decoder in self.fallbacks.decoders:
            if self.path == FALLBACK_LOCAL or not self.decode_tried or not _may_go_elsewhere(outcome):
                break
            self.counters.append("decode_retry")
            self.decode_worker = decoder
            outcome = await self._pair()
        return outcome

    async def _pair(self) -> StreamOutcome:
        self.decode_tried = False
        handoff = await self._first_handoff()
        if isinstance(handoff, StreamOutcome):
            return handoff if _is_final(handoff) else await self._without_prefill(handoff)
        body = decode_body(self.request.body, handoff, request_id=self.request.request_id, now_s=self.client.clock())
        if isinstance(body, Refused):
            self.counters.append(body.reason.value)
            return await self._without_prefill(self._failed(body.message))
        return await self._generate(body, holds_handle=True)

    async def _without_prefill(self, failed: StreamOutcome) -> StreamOutcome:
        if not self.fallbacks.local:
            return failed
        self.path = FALLBACK_LOCAL
        return await self.direct()

    # -- legs --------------------------------------------------------------------------------------------------------

    async def _first_handoff(self) -> Handoff | StreamOutcome:
        """The first complete handle from the decided P and its stand-ins, or how the last of them failed."""
        for attempt, worker in enumerate((self.prefill_worker, *self.fallbacks.prefillers)):
            if attempt:
                self.counters.append("prefill_retry")
            self.prefill_worker = worker
            found = await self._prefill()
            if isinstance(found, Handoff) or _is_final(found):
                return found
        return found

    async def _prefill(self) -> Handoff | StreamOutcome:
        connector = find_connector(self.engines.connector)
        endpoint = self.engines.endpoints[self.prefill_worker]
        leg_id = self.leg_id("p")
        now_s = self.client.clock()
        deadline_s = min(self.limits.deadline_s, now_s + self.limits.prefill_s)
        body = orjson.dumps(prefill_body(self.request.body, connector, transfer_id=leg_id))
        limits = Limits(deadline_s=deadline_s, connect_s=self.limits.connect_s)
        self.prefill = outcome = await self._post(endpoint, body, leg_id, limits)
        if not outcome.ok:
            return outcome
        handoff = take_handoff(
            connector,
            outcome.kv_transfer_params,
            body=self.request.body,
            request_id=self.request.request_id,
            transfer_id=leg_id,
            peer=Peer(
                engine_id=endpoint.engine_id, bootstrap_addr=self.engines.bootstrap_addrs.get(self.prefill_worker)
            ),
            received_s=outcome.end_s,
            lease_s=self.engines.lease_s,
        )
        if isinstance(handoff, Refused):
            self.counters.append(handoff.reason.value)
            return self._failed(handoff.message)
        self.prefill_done_s = outcome.end_s
        if self.on_prefilled is not None:
            self.on_prefilled(outcome.end_s)
        return handoff

    async def _generate(self, body: Mapping[str, Any], *, holds_handle: bool = False) -> StreamOutcome:
        endpoint = self.engines.endpoints[self.decode_worker]
        limits = self._generate_limits(holds_handle)
        self.decode_sent_s, self.decode_tried = None, True
        leg = self._post(
            endpoint, orjson.dumps(body), self.leg_id("d"), limits, on_sent=self._on_decode_sent, tap=self.tap
        )
        if not holds_handle:
            return await leg
        task = asyncio.get_running_loop().create_task(leg)
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            since_s = self.client.clock() if self.decode_sent_s is None else self.decode_sent_s
            self.client.leave(task, since_s + RELEASE_S - self.client.clock())
            raise
        if self.decode_sent_s is None:
            self.counters.append("handle_abandoned")
        return outcome

    def _on_decode_sent(self, now_s: float) -> None:
        self.decode_sent_s = now_s

    def _generate_limits(self, holds_handle: bool) -> Limits:
        limits = self.limits
        earliest_s = self.client.clock() + RELEASE_S if holds_handle else 0.0
        return Limits(
            deadline_s=max(limits.deadline_s, earliest_s),
            connect_s=limits.connect_s,
            first_byte_s=limits.first_byte_s,
            idle_s=limits.idle_s,
        )

    async def _post(
        self,
        endpoint: Endpoint,
        body: bytes,
        leg_id: str,
        limits: Limits,
        *,
        on_sent: Callable[[float], None] | None = None,
        tap: Callable[[bytes], None] | None = None,
    ) -> StreamOutcome:
        return await self.client.post(
            endpoint.host,
            endpoint.port,
            body,
            path=self.request.path,
            request_id=leg_id,
            headers=self.request.headers,
            limits=limits,
            on_sent=on_sent,
            tap=tap,
        )

    def _failed(self, message: str) -> StreamOutcome:
        return never_sent(Failure.HANDOFF, message, self.client.clock())


def _is_final(outcome: StreamOutcome) -> bool:
    """Whether a failed P leg ends the request: the client's own fault (4xx), or no time left."""
    client_fault = outcome.http_status is not None and 400 <= outcome.http_status < 500
    return outcome.failure is Failure.TIMEOUT or client_fault


def _may_go_elsewhere(outcome: StreamOutcome) -> bool:
    """Whether a D leg failed before the client saw anything of an answer, for a reason that another D may not have."""
    if outcome.ok or _is_final(outcome):
        return False
    return outcome.first_byte_s is None or outcome.failure is Failure.HTTP


_ROUTES = {Route.PD: _Run.through_prefill, Route.LOCAL: _Run.direct, Route.REPLICA: _Run.direct}
