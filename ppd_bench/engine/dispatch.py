"""Carry out one Decision on engines: P leg, hand-off and D leg, or one leg. Used by every client that routes.

Nothing outlives the request but, where D may not have taken up a handle yet, its leg for ``RELEASE_S``: D then tells P to
free the blocks, which otherwise stay pinned until the lease ends (ROUTER.md B9, B10).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from mypy_extensions import mypyc_attr

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route
from ppd_bench.core.errors import EngineError
from ppd_bench.engine.client import COMPLETIONS, Client, Flow, Limits
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
from ppd_bench.engine.leg_bytes import leg_bytes
from ppd_bench.engine.stream import CompletionReader, Failure, StreamOutcome, never_sent

RELEASE_S = 0.15
"""How long a D leg that nobody waits for stays open, so that D has read the handle (B9), and closes within 200 ms (B10)."""

FALLBACK_LOCAL = "pd_fallback_local"
"""The path of a turn that was to go through P and was prefilled on D because P failed. Never recorded as ``pd`` (B12)."""


NO_ADDRS: Mapping[int, str] = {}


class Engines(NamedTuple):
    """The engines of a topology, in the order of its workers, and the hand-off between them.

    ``bootstrap_addrs``: by worker index, for Mooncake. ``lease_s``: how long P holds KV (vLLM: kv_lease_duration).
    """

    endpoints: tuple[Endpoint, ...]
    connector: str = "NixlConnector"
    lease_s: float = 30.0
    bootstrap_addrs: Mapping[int, str] = NO_ADDRS


NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Request(NamedTuple):
    """What a client asks. ``request_id`` must be unique: legs are told apart by suffixes to it (B8).

    ``raw``: the bytes that ``body`` was read from, where there are such; a generating leg then carries them as they are.
    """

    request_id: str
    body: Mapping[str, Any]
    raw: bytes | None = None
    path: str = COMPLETIONS
    headers: Mapping[str, str] = NO_HEADERS


class LegLimits(NamedTuple):
    """Per-leg deadlines (B16): durations in seconds, beside ``deadline_s``, the whole request's instant.

    Where P answers just before ``deadline_s``, D has ``RELEASE_S`` from then all the same.
    """

    deadline_s: float = float("inf")
    connect_s: float = 10.0
    prefill_s: float = float("inf")
    first_byte_s: float = float("inf")
    idle_s: float = float("inf")


class Fallbacks(NamedTuple):
    """What may be tried when a leg fails before the client saw a byte (B12, B13). The default, strict, is nothing.

    ``prefillers``/``decoders``: further workers in order, replicas among the latter for a replica's turn; ``local``: prefill on D
    when no P works. A local turn whose D fails goes through P to another D, which holds nothing of it.
    """

    prefillers: tuple[int, ...] = ()
    decoders: tuple[int, ...] = ()
    local: bool = False


STRICT = Fallbacks()


@mypyc_attr(allow_interpreted_subclasses=True)
class Observer:
    """Told what happens to a dispatched request, as it happens. This one cares for nothing; override what is of interest."""

    @property
    def answered(self) -> bool | None:
        """Whether the client has seen something of an answer, after which nothing is tried again (B13). Null leaves that to the
        legs' outcomes, where a head counts as an answer."""
        return None

    def on_moved(self, decision: Decision) -> None:
        """A fallback changed where the request goes, before its next leg is sent."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers of a generating leg's answer arrived; its body, from here on, goes to ``tap``."""

    def on_leg(self, worker: int, outcome: StreamOutcome) -> None:
        """A leg ended, in whatever way but by cancelling."""


UNOBSERVED = Observer()


class Dispatched(NamedTuple):
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
    observer: Observer = UNOBSERVED,
    flow: Flow | None = None,
    reader: type[CompletionReader] = CompletionReader,
) -> Dispatched:
    """Run one request as decided. Failures are in the result; cancelling closes every connection of the request.

    ``on_prefilled`` gets the instant at which P answered well; ``tap`` the bytes of the generating leg as they arrive;
    ``observer`` is told of everything else. ``flow`` can hold the generating leg up; ``reader`` reads its answer.

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
        observer=observer,
        flow=flow,
        reader=reader,
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


@dataclass(kw_only=True, slots=True)
class _Run:
    """The state of one dispatch."""

    client: Client
    engines: Engines
    request: Request
    limits: LegLimits
    fallbacks: Fallbacks
    on_prefilled: Callable[[float], None] | None
    tap: Callable[[bytes], None] | None
    observer: Observer
    flow: Flow | None
    reader: type[CompletionReader]
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

    async def in_one_place(self) -> StreamOutcome:
        """One leg; where that fails, another worker: through P where there is one, for the other holds no KV of the turn."""
        route = Route(self.path)
        outcome = await self.direct()
        through_p = bool(self.fallbacks.prefillers) and unsplittable(self.request.body) is None
        for worker in self.fallbacks.decoders:
            if not self.decode_tried or not self._may_go_elsewhere(outcome):
                break
            self.counters.append("decode_retry")
            if through_p and route is Route.LOCAL:
                self.path = Route.PD.value
                self._move(Route.PD, self.fallbacks.prefillers[0], worker)
                outcome = await self._pair(self.fallbacks.prefillers)
            else:
                self._move(route, worker, worker)
                outcome = await self.direct()
        return outcome

    async def through_prefill(self) -> StreamOutcome:
        """P leg, then D leg; each decode worker that is tried gets a P leg of its own (B13)."""
        problem = unsplittable(self.request.body)
        if problem is not None:
            self.counters.append(problem)
            return await self._without_prefill(
                self._failed(f"the request cannot go through P and D as one ({problem})")
            )
        outcome = await self._pair((self.prefill_worker, *self.fallbacks.prefillers))
        for decoder in self.fallbacks.decoders:
            if self.path == FALLBACK_LOCAL or not self.decode_tried or not self._may_go_elsewhere(outcome):
                break
            self.counters.append("decode_retry")
            self._move(Route.PD, self.prefill_worker, decoder)
            outcome = await self._pair((self.prefill_worker, *self.fallbacks.prefillers))
        return outcome

    async def _pair(self, prefillers: Sequence[int]) -> StreamOutcome:
        self.decode_tried, self.prefill_done_s, self.decode_sent_s = False, None, None
        handoff = await self._first_handoff(prefillers)
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
        self._move(Route.LOCAL, self.decode_worker, self.decode_worker)
        return await self.direct()

    def _move(self, route: Route, prefill_worker: int, decode_worker: int) -> None:
        self.prefill_worker, self.decode_worker = prefill_worker, decode_worker
        self.observer.on_moved(Decision(route, prefill_worker, decode_worker, "fallback"))

    def _may_go_elsewhere(self, outcome: StreamOutcome) -> bool:
        """Whether a D leg failed before the client saw anything of an answer, for a reason that another D may not have."""
        if outcome.ok or _is_final(outcome):
            return False
        if self.observer.answered is not None:
            return not self.observer.answered
        return outcome.first_byte_s is None or outcome.failure is Failure.HTTP

    # -- legs --------------------------------------------------------------------------------------------------------

    async def _first_handoff(self, prefillers: Sequence[int]) -> Handoff | StreamOutcome:
        """The first complete handle of these, the decided P first, or how the last of them failed."""
        tried: list[int] = []
        for worker in prefillers:
            if worker in tried:
                continue
            tried.append(worker)
            if len(tried) > 1:
                self.counters.append("prefill_retry")
                self._move(Route.PD, worker, self.decode_worker)
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
        self.prefill = outcome = await self._post(self.prefill_worker, body, leg_id, limits)
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
        limits = self._generate_limits(holds_handle)
        self._begin_decode()
        content = leg_bytes(body, self.request.body, self.request.raw)
        release_s = RELEASE_S if holds_handle else 0.0
        leg_id = self.leg_id("d")
        outcome = await self._post(self.decode_worker, content, leg_id, limits, generates=True, release_s=release_s)
        if holds_handle and self.decode_sent_s is None:
            self.counters.append("handle_abandoned")
        return outcome

    def _begin_decode(self) -> None:
        # Not inside _generate: a type checker, and so a compiled module, would hold it to be null there until the end.
        self.decode_sent_s, self.decode_tried = None, True

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
        worker: int,
        body: bytes,
        leg_id: str,
        limits: Limits,
        *,
        generates: bool = False,
        release_s: float = 0.0,
    ) -> StreamOutcome:
        endpoint = self.engines.endpoints[worker]
        outcome = await self.client.post(
            endpoint.host,
            endpoint.port,
            body,
            path=self.request.path,
            request_id=leg_id,
            headers=self.request.headers,
            limits=limits,
            on_sent=self._on_decode_sent if generates else None,
            on_head=self.observer.on_head if generates else None,
            tap=self.tap if generates else None,
            flow=self.flow if generates else None,
            reader=self.reader if generates else CompletionReader,
            release_s=release_s,
        )
        self.observer.on_leg(worker, outcome)
        return outcome

    def _failed(self, message: str) -> StreamOutcome:
        return never_sent(Failure.HANDOFF, message, self.client.clock())


def _is_final(outcome: StreamOutcome) -> bool:
    """Whether a failed P leg ends the request: the client's own fault (4xx), or no time left."""
    client_fault = outcome.http_status is not None and 400 <= outcome.http_status < 500
    return outcome.failure is Failure.TIMEOUT or client_fault


_ROUTES = {Route.PD: _Run.through_prefill, Route.LOCAL: _Run.in_one_place, Route.REPLICA: _Run.in_one_place}
