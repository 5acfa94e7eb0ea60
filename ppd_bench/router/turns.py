"""One turn's life: recognise, size, decide, dispatch, relay, remember."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route, Status
from ppd_bench.engine.client import Flow
from ppd_bench.engine.dispatch import FALLBACK_LOCAL, Dispatched, Fallbacks, LegLimits, Observer, Request, dispatch
from ppd_bench.engine.stream import Failure, RelayReader, StreamOutcome
from ppd_bench.policy.events import Finished, PrefillDone, Sent
from ppd_bench.policy.policy import NOTE_KV_PRESSED
from ppd_bench.policy.query import RouteQuery
from ppd_bench.router.asked import Asked, BadRequest, forwarded_headers, read_asked, tenant_of
from ppd_bench.router.http_request import Headers, HttpRequest, error_body
from ppd_bench.router.identity import Identity
from ppd_bench.router.relay import CLIENT_CLOSED, JSON_TYPE, AnswerRelay, Told
from ppd_bench.router.responder import Responder
from ppd_bench.router.state import RouterState
from ppd_bench.router.turn_record import TurnRecord, reason_class, table_part

NAMED_BY_CLIENT = frozenset({"header", "body", "session_params"})
"""Sources of an identity under which the next turn is found without knowing what this one answered."""

ENGINE_FAULTS = frozenset(
    {
        Failure.UNREACHABLE,
        Failure.DISCONNECTED,
        Failure.TIMEOUT,
        Failure.ERROR_EVENT,
        Failure.MALFORMED,
        Failure.TRUNCATED,
    }
)
"""Failures that speak against an engine (B14, B15); an HTTP status does from 500."""

P_GONE = " p-gone"
"""Added to the reason of a turn that the policy sent through P when there was none."""

ROLE_WORDS = {"R": "replica (R)", "P": "prefill engine (P)", "D": "decode engine (D)", "pD": "decode engine (D)"}


async def serve_turn(state: RouterState, request: HttpRequest, responder: Responder) -> None:
    """Answer one chat or completion request. Cancelled when the client goes: every leg is closed and the turn recorded."""
    turn = Turn(state, request, responder)
    try:
        await turn.run()
    except asyncio.CancelledError:
        turn.on_client_gone()
        raise
    finally:
        turn.close()


class Turn(Observer):
    """One request on its way; use ``serve_turn``."""

    def __init__(self, state: RouterState, request: HttpRequest, responder: Responder) -> None:
        state.n_requests += 1
        request_id = f"{state.name}-{state.n_requests}"
        self._state = state
        self._request = request
        self._responder = responder
        self._asked: Asked | None = None
        self._identity: Identity | None = None
        self._relay: AnswerRelay | None = None
        self._is_sent = False
        self.record = TurnRecord(
            request_id=request_id,
            client_request_id=request.header("x-request-id") or request_id,
            path=request.path,
            request_bytes=len(request.body),
            received_unix_s=state.wall(),
            received_s=state.clock(),
        )

    async def run(self) -> None:
        """Everything up to the end of the answer."""
        asked = read_asked(self._request.body)
        if isinstance(asked, BadRequest):
            self._refuse(asked.status, asked.message, "bad_request", param=asked.param)
            return
        self._asked = asked
        decision = self._decide(asked, self._recognise(asked))
        decision, problem = self._eligible(decision)
        if problem is not None:
            self._refuse(503, problem, "no_engine")
            return
        if self._state.settings.shed and decision.reason.endswith(NOTE_KV_PRESSED):
            self._count("shed")
            self._refuse(503, "every decode engine is short of KV memory; send the request again later", "shed")
            return
        self._send(decision)
        went = await self._dispatch(asked, decision)
        self._end(self._named(went))

    # -- before ------------------------------------------------------------------------------------------------------

    def _recognise(self, asked: Asked) -> RouteQuery:
        """Whose turn it is and how long (B18, B25)."""
        state, request = self._state, self._request
        self._identity = identity = state.identifier.identify(
            headers=dict(request.headers), body=asked.body, now_s=state.now_s(), tenant=tenant_of(request)
        )
        self.record.identity = identity.source
        size = state.sizer.size(identity, asked.body)
        self.record.query = query = RouteQuery(
            request_id=self.record.request_id,
            session_id=identity.session_id,
            turn=identity.turn,
            context_tokens=size.context_tokens,
            input_tokens=size.input_tokens,
            max_output_tokens=asked.max_output_tokens or state.settings.default_output_tokens,
        )
        return query

    def _decide(self, asked: Asked, query: RouteQuery) -> Decision:
        """What the policy says, but for requests that must stay in one place (B3)."""
        state = self._state
        now_s = state.now_s()
        view = state.ledger.view(now_s, query.session_id)
        decision = state.policies.now.policy.decide(query, view)
        if state.record is not None:
            state.record((query, now_s, decision))
        self.record.session_rps = view.session_rps
        if asked.counter is not None and decision.route is Route.PD:
            self._count(asked.counter)
            decision = _in_place(decision, asked.counter)
        self.record.decision = decision
        return decision

    def _eligible(self, decision: Decision) -> tuple[Decision, str | None]:
        """The decision as it can be carried out now, or which role is missing (B17)."""
        fleet = self._state.fleet
        if not fleet.available(decision.decode_worker):
            return decision, self._missing(decision.decode_worker)
        if decision.route is Route.PD and not fleet.available(decision.prefill_worker):
            if not self._state.settings.local_fallback:
                return decision, self._missing(decision.prefill_worker)
            self._count("prefill_gone")
            decision = _in_place(decision, decision.reason + P_GONE)
        return decision, None

    def _missing(self, worker: int) -> str:
        role = self._state.topology.workers[worker].role
        return f"no {ROLE_WORDS[role]} is available now; send the request again later"

    def _send(self, decision: Decision) -> None:
        """From here on the turn counts as in flight, until ``close``."""
        record, state = self.record, self._state
        record.decision, record.decided_s = decision, state.clock()
        self._is_sent = True
        state.open_turns.add(record.request_id)
        self._observe_sent(decision)
        part = table_part(decision.reason)
        state.metrics.on_decision(
            decision.route.value,
            reason_class(decision.reason),
            part.get("evidence"),
            bool(part.get("off_grid")),
            record.decided_s - record.received_s,
        )

    def _observe_sent(self, decision: Decision) -> None:
        query = self.record.query
        assert query is not None
        self._state.observe(
            Sent(
                self._state.now_s(),
                query.request_id,
                query.session_id,
                query.turn,
                query.prompt_tokens,
                query.max_output_tokens,
                decision,
            )
        )

    # -- the legs ----------------------------------------------------------------------------------------------------

    async def _dispatch(self, asked: Asked, decision: Decision) -> Dispatched:
        state = self._state
        self._relay = relay = AnswerRelay(
            self._responder,
            clock=state.clock,
            withhold_usage=asked.withhold_usage,
            collect=self.record.identity not in NAMED_BY_CLIENT,
        )
        relay.headers = self._headers(decision)
        flow = Flow()
        self._responder.on_pressure(flow.pause, flow.resume)
        return await dispatch(
            state.client,
            state.fleet.engines(),
            decision,
            Request(
                request_id=self.record.request_id,
                body=asked.body,
                raw=self._request.body,
                path=self._request.path,
                headers=forwarded_headers(self._request.headers),
            ),
            limits=self._limits(asked),
            fallbacks=self._fallbacks(decision),
            on_prefilled=self._on_prefilled,
            tap=relay.tap,
            observer=self,
            flow=flow,
            reader=RelayReader,
        )

    def _limits(self, asked: Asked) -> LegLimits:
        """A plain answer comes whole, after as long as it takes: only its deadline can tell that it hangs (B16)."""
        settings = self._state.settings
        if not asked.streamed:
            deadline_s = self.record.received_s + settings.answer_s
            return LegLimits(deadline_s=deadline_s, connect_s=settings.connect_s, prefill_s=settings.prefill_s)
        return settings.stream_limits

    def _fallbacks(self, decision: Decision) -> Fallbacks:
        """Other workers that are there, the least busy first (B12, B13)."""
        state = self._state
        fleet = state.policies.now.policy.fleet
        local = state.settings.local_fallback
        if decision.route is Route.REPLICA:
            return Fallbacks(decoders=self._others(fleet.replicas, decision.decode_worker))
        first = decision.prefill_worker if decision.route is Route.PD else -1
        return Fallbacks(
            prefillers=self._others(fleet.prefillers, first),
            decoders=self._others(fleet.decoders, decision.decode_worker),
            local=local,
        )

    def _others(self, workers: tuple[int, ...], but: int) -> tuple[int, ...]:
        state = self._state
        there = [worker for worker in workers if worker != but and state.fleet.available(worker)]
        if len(there) > 1:
            there.sort(key=state.ledger.n_inflight.__getitem__)
        return tuple(there[: state.settings.n_retries])

    @property
    def answered(self) -> bool:
        """Whether the client has seen something of an answer (B13)."""
        return self._responder.started

    def on_moved(self, decision: Decision) -> None:
        """A fallback: the Ledger must count where the turn is."""
        self._observe_sent(decision)
        if self._relay is not None:
            self._relay.headers = self._headers(decision)

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        if self._relay is not None:
            self._relay.on_head(status, headers)

    def on_leg(self, worker: int, outcome: StreamOutcome) -> None:
        """What the leg says of its engine (B14, B15)."""
        fleet = self._state.fleet
        if outcome.failure in ENGINE_FAULTS or (outcome.http_status or 0) >= 500 or _is_empty(outcome):
            fleet.on_failure(worker, outcome.message or outcome.status.value)
        else:
            fleet.on_success(worker)

    def _on_prefilled(self, at_s: float) -> None:
        self._state.observe(PrefillDone(at_s - self._state.origin.start_s, self.record.request_id))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _named(self, went: Dispatched) -> Dispatched:
        """A turn that was to go through a P that was gone is recorded as what it is (B12)."""
        decision = self.record.decision
        moved = decision is not None and decision.reason.endswith(P_GONE) and went.path == Route.LOCAL.value
        return went._replace(path=FALLBACK_LOCAL) if moved else went

    def _end(self, went: Dispatched) -> None:
        """Finish the answer, and remember how it went."""
        record, outcome = self.record, went.outcome
        assert self._relay is not None
        record.went = went
        for counter in went.counters:
            self._count(counter)
        ok = is_answer(outcome)
        record.http_status, told = self._relay.end(went, complete=ok)
        record.first_byte_s = self._relay.first_byte_s
        if told is Told.ANSWER:
            record.status = Status.OK
            self._learn(outcome)
        else:
            record.status = outcome.status if outcome.status is not Status.OK else Status.ERROR
            record.failure = outcome.failure.value if outcome.failure is not None else "error"
            record.message = outcome.message

    def _learn(self, outcome: StreamOutcome) -> None:
        """A completed answer moves the conversation on (B23)."""
        state, identity, asked = self._state, self._identity, self._asked
        assert identity is not None
        assert asked is not None
        collected = self._relay.collected.take() if self._relay is not None and self._relay.collected else None
        state.identifier.answered(identity, body=asked.body, answer=collected, now_s=state.now_s())
        state.sizer.answered(identity, asked.body, outcome)

    def on_client_gone(self) -> None:
        """The client went, or the router is stopping and cuts what is left."""
        record = self.record
        record.status, record.http_status = Status.ABORTED, CLIENT_CLOSED
        if self._responder.gone:
            record.failure, record.message = "client_gone", "the client went before its answer was complete"
        else:
            record.failure, record.message = "router_stopping", "the router stopped before the answer was complete"
        if self._relay is not None:
            record.first_byte_s = self._relay.first_byte_s
            self._relay.cut_short(503, record.message)

    def close(self) -> None:
        """Bookkeeping that every turn gets, however it ended."""
        state, record = self._state, self.record
        record.done_s = state.clock()
        record.answer_bytes = self._responder.n_body_bytes
        outcome = record.went.outcome if record.went is not None else None
        ok = record.status is Status.OK
        if self._is_sent:
            state.open_turns.discard(record.request_id)
            n_prompt = (outcome.prompt_tokens or 0) if outcome is not None else 0
            n_tokens = outcome.n_tokens if outcome is not None else 0
            state.observe(Finished(state.now_s(), record.request_id, ok, n_tokens, n_prompt))
        if self._identity is not None and not ok:
            state.identifier.abandoned(self._identity)
        self._measure()
        if state.log is not None:
            state.log.add(lambda: record.row(state.origin))

    def _measure(self) -> None:
        record, metrics = self.record, self._state.metrics
        metrics.on_request(record.path, record.http_status)
        metrics.on_turn(record.route or "none", record.status.value, record.failure)
        if record.decided_s is not None:
            stages = record.stages()
            metrics.on_stages(stages, record.overhead_s(stages))
        if record.status is Status.OK and record.first_byte_s is not None:
            metrics.on_first_byte(record.route or "none", record.first_byte_s - record.received_s)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _count(self, counter: str) -> None:
        self.record.counters = (*self.record.counters, counter)
        self._state.metrics.on_event(counter)

    def _headers(self, decision: Decision) -> Headers:
        """Headers of the router's own: the client's request id, and what was decided where that is wanted (B36)."""
        own: Headers = (("x-request-id", self.record.client_request_id),)
        query = self.record.query
        if not self._state.settings.explain or query is None:
            return own
        ids = self._state.origin.worker_ids
        reason = self.record.decision.reason if self.record.decision is not None else decision.reason
        return (
            *own,
            ("x-ppd-route", decision.route.value),
            ("x-ppd-prefill-worker", ids[decision.prefill_worker]),
            ("x-ppd-decode-worker", ids[decision.decode_worker]),
            ("x-ppd-reason", reason),
            ("x-ppd-session", query.session_id),
            ("x-ppd-turn", str(query.turn)),
        )

    def _refuse(self, status: int, message: str, failure: str, *, param: str | None = None) -> None:
        """Answer without asking any engine."""
        record = self.record
        record.http_status, record.failure, record.message = status, failure, message
        headers: Headers = (JSON_TYPE, ("x-request-id", record.client_request_id))
        if status == 503:
            headers = (*headers, ("retry-after", str(self._state.settings.retry_after_s)))
        text = message if param is None else f"{param}: {message}"
        self._responder.send(status, headers, error_body(status, text, param=param))


def _is_empty(outcome: StreamOutcome) -> bool:
    """Whether an engine answered nothing at all, not even that it has nothing to say."""
    return outcome.failure is Failure.EMPTY and outcome.finish_reason is None


def is_answer(outcome: StreamOutcome) -> bool:
    """Whether the client got a whole answer. One without a token, which a load generator rejects, is one too."""
    return outcome.ok or (outcome.failure is Failure.EMPTY and outcome.finish_reason is not None)


def _in_place(decision: Decision, reason: str) -> Decision:
    """The same decode worker, which also prefills."""
    worker = decision.decode_worker
    return Decision(route=Route.LOCAL, prefill_worker=worker, decode_worker=worker, reason=reason)
