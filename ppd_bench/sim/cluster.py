"""The event loop: clients, router, engines and KV transfers of one point.

Event order at equal times is by rank (I3): a transfer's end, a request entering an engine, a client sending, a step's end,
a time-out. Heap keys are (time_s, rank, serial), with the serial counted per instance; steps go by worker index instead, so
that the order does not depend on when a stretch was computed.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route, Status
from ppd_bench.core.workload import Session
from ppd_bench.policy.events import Event, Finished, PrefillDone, Sent, WorkerSnapshot
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import Policy
from ppd_bench.policy.query import RouteQuery
from ppd_bench.sim.kv import Chain
from ppd_bench.sim.link import Link, Transfer
from ppd_bench.sim.seq import DONE, HELD, LOCAL, PULL, PULLING, PUSH, WAITING, Seq
from ppd_bench.sim.trip import ClusterSettings, Gauge, Trip
from ppd_bench.sim.worker import Worker

TRANSFER = 0
ENTER = 1
SEND = 2
STEP = 3
TIMEOUT = 4
LEASE = 5
SNAPSHOT = 6
GAUGE = 7


class Cluster:
    """Runs the turns of one point to their end. ``log`` collects queries, decisions and events when it is not null."""

    def __init__(
        self,
        workers: list[Worker],
        link: Link,
        policy: Policy,
        ledger: Ledger,
        settings: ClusterSettings,
        log: list[tuple[RouteQuery, float, Decision] | Event] | None = None,
    ) -> None:
        self.workers = workers
        self.link = link
        self.policy = policy
        self.ledger = ledger
        self.settings = settings
        self.log = log
        self.trips: list[Trip] = []
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._serial = 0
        self._order = -1  # rank, and worker within rank STEP, of the latest event in order at this instant
        self._n_open = 0
        self._link_event_s = float("inf")
        self._entering: dict[int, Seq] = {}
        self._snapshots: dict[int, WorkerSnapshot] = {}
        self._aborted: list[list[Seq]] = [[] for _ in workers]
        self.gauges: list[Gauge] = []
        self._n_family: list[int] = []  # by family: turns that are scheduled and not over
        self._n_inflight_families = 0
        self._held_back: deque[int] = deque()  # first turns that wait for another conversation's end

    def load(self, sessions: tuple[Session, ...], chains: list[list[Chain]]) -> None:
        """Schedule every conversation. ``chains[s][k]`` is the content of turn k of session s, prompt and answer.

        A conversation that another one's request starts comes behind that one.
        """
        by_id: dict[str, int] = {}
        for session, session_chains in zip(sessions, chains, strict=True):
            after = session[0].after
            before = by_id.get(after, -1) if after is not None else -1
            family = self.trips[before].family if before >= 0 else len(self._n_family)
            if before < 0:
                self._n_family.append(0)
            for turn, chain in zip(session, session_chains, strict=True):
                trip = Trip(len(self.trips), turn, chain, family)
                self.trips.append(trip)
                by_id[turn.request_id] = trip.index
                if turn.think_time_s is not None and before >= 0:
                    self.trips[before].following.append(trip.index)
                elif turn.scheduled_s is not None:
                    self._schedule_send(trip, turn.scheduled_s)
                before = trip.index

    def run(self) -> None:
        """Process events until nothing is left."""
        if self.policy.needs_snapshots and self._n_open:
            self._push(self.settings.snapshot_interval_s, SNAPSHOT, -1, 0)
        if self.settings.gauge_interval_s > 0.0:
            self._push(self.settings.gauge_interval_s, GAUGE, 0, 0)
        while self._heap:
            self.next_event()

    def next_event(self) -> None:
        """Process one event."""
        time_s, rank, _, a, b = heappop(self._heap)
        order = rank * len(self.workers) + (a if rank == STEP else 0)
        if time_s > self.now_s or order > self._order:
            self._order = order
        self.now_s = time_s
        if rank == STEP:
            worker = self.workers[a]
            if worker.version == b:
                self._on_step(worker)
        elif rank == ENTER:
            self._on_enter(a)
        elif rank == SEND:
            if b or not self._is_held_back(self.trips[a]):
                self._on_send(self.trips[a])
        elif rank == TRANSFER:
            self._on_link()
        elif rank == TIMEOUT:
            self._on_timeout(self.trips[a])
        elif rank == LEASE:
            self._on_lease(self.trips[a])
        elif rank == SNAPSHOT:
            self._on_snapshot(a)
        else:
            self._on_gauge()

    def _push(self, time_s: float, rank: int, a: int, b: int) -> None:
        self._serial += 1
        heappush(self._heap, (time_s, rank, self._serial, a, b))

    def _push_step(self, worker: Worker) -> None:
        heappush(self._heap, (worker.busy_until_s, STEP, worker.index, worker.index, worker.version))

    # -- clients and router ------------------------------------------------------------------------------------------

    def _schedule_send(self, trip: Trip, time_s: float) -> None:
        trip.scheduled_s = time_s
        self._n_open += 1
        self._n_family[trip.family] += 1
        self._push(time_s, SEND, trip.index, 0)

    def _is_held_back(self, trip: Trip) -> bool:
        """Whether a conversation must wait to begin, for as many as may be are under way."""
        limit = self.settings.max_inflight_sessions
        if not limit or trip.turn.turn > 1 or trip.turn.after is not None:
            return False
        if self._n_inflight_families >= limit:
            self._held_back.append(trip.index)
            return True
        self._n_inflight_families += 1
        return False

    def _leave_family(self, trip: Trip) -> None:
        """A turn is over; with the last of its conversation and of those that it started, the next one may begin."""
        self._n_family[trip.family] -= 1
        if self._n_family[trip.family] or not self.settings.max_inflight_sessions:
            return
        if self._held_back:
            self._push(self.now_s, SEND, self._held_back.popleft(), 1)
        else:
            self._n_inflight_families -= 1

    def _on_send(self, trip: Trip) -> None:
        now_s = self.now_s
        turn = trip.turn
        query = RouteQuery(
            request_id=turn.request_id,
            session_id=turn.session_id,
            turn=turn.turn,
            context_tokens=turn.context_tokens,
            input_tokens=turn.input_tokens,
            max_output_tokens=turn.max_output_tokens,
            block_ids=turn.block_ids or (),
            block_tokens=turn.block_tokens or self.workers[0].block_size,
        )
        decision = self.policy.decide(query, self.ledger.view(now_s, turn.session_id, query.block_ids))
        if self.log is not None:
            self.log.append((query, now_s, decision))
        trip.decision = decision
        trip.sent_s = now_s
        trip.status = Status.OK  # until something else happens
        prompt = turn.context_tokens + turn.input_tokens
        self._observe(
            Sent(
                now_s,
                turn.request_id,
                turn.session_id,
                turn.turn,
                prompt,
                turn.max_output_tokens,
                decision,
                query.block_ids,
            )
        )
        # One place for the comparison (I2, GLOSSARY: timeout): last token - sent > timeout, so a tie is no time-out.
        self._push(now_s + self.settings.timeout_s, TIMEOUT, trip.index, 0)
        delay_s = self.settings.router_overhead_s + self.settings.visit_overhead_s
        if decision.route is Route.PD or decision.route is Route.PD_READBACK:
            trip.prefill = Seq(trip.index, trip.chain, prompt, prompt + 1, LOCAL)
            self._enter(trip.prefill, decision.prefill_worker, now_s + delay_s)
            if self.settings.dispatch_both:
                self._tell_decoder(trip, decision, now_s + delay_s)
        else:
            trip.decode = Seq(trip.index, trip.chain, prompt, prompt + turn.output_tokens, LOCAL)
            self._enter(trip.decode, decision.decode_worker, now_s + delay_s)

    def _observe(self, event: Event) -> None:
        self.ledger.observe(event)
        if self.log is not None:
            self.log.append(event)

    def _enter(self, seq: Seq, worker: int, time_s: float) -> None:
        self._push(time_s, ENTER, self._serial, worker)
        self._entering[self._serial - 1] = seq

    def _on_enter(self, key: int) -> None:
        seq = self._entering.pop(key)
        if seq.aborted:
            return
        worker = self.workers[self._worker_of(seq)]
        worker.add(seq)
        self._touch(worker)

    def _worker_of(self, seq: Seq) -> int:
        trip = self.trips[seq.owner]
        assert trip.decision is not None
        return trip.decision.prefill_worker if seq is trip.prefill else trip.decision.decode_worker

    # -- engines -----------------------------------------------------------------------------------------------------

    def _touch(self, worker: Worker) -> None:
        """A worker's queue or memory changed: cut its stretch, or start a step if it is idle (I9)."""
        if worker.busy:
            if worker.cut(self.now_s, self._order > STEP * len(self.workers) + worker.index):
                self._push_step(worker)
        elif worker.start(self.now_s) and not worker.blocked_on:
            self._push_step(worker)
        if worker.pulls:
            self._start_pulls(worker)

    def _on_step(self, worker: Worker) -> None:
        for seq in worker.finish_step():
            trip = self.trips[seq.owner]
            if seq is trip.prefill:
                self._on_prefilled(trip, seq)
            else:
                self._on_decoded(trip, seq, worker)
        aborted = self._aborted[worker.index]
        if aborted:
            worker.sweep_aborted(aborted)
            aborted.clear()
        self._touch(worker)

    def _on_prefilled(self, trip: Trip, seq: Seq) -> None:
        """P has the prompt's KV and one token: its blocks are held until D has them. D gets the turn after its visit."""
        now_s = self.now_s
        decision = trip.decision
        assert decision is not None
        trip.prefill_done_s = now_s
        trip.prefilled = True
        self._observe(PrefillDone(now_s, trip.turn.request_id))
        if not self.settings.dispatch_both:
            self._tell_decoder(trip, decision, now_s + self.settings.visit_overhead_s)
        transfer = trip.transfer
        assert transfer is not None
        if self.settings.push:
            self.link.start(transfer, now_s)
            self._schedule_link()
        elif now_s + self.settings.kv_lease_s < trip.sent_s + self.settings.timeout_s:
            self._push(now_s + self.settings.kv_lease_s, LEASE, trip.index, 0)
        decode = trip.decode
        if self.settings.dispatch_both and decode is not None and decode.state == PULLING:
            self._start_pull(trip, decode)
            self._schedule_link()

    def _tell_decoder(self, trip: Trip, decision: Decision, time_s: float) -> None:
        """D gets the turn at ``time_s``, with its KV to come from P."""
        prompt = trip.turn.context_tokens + trip.turn.input_tokens
        remote = PUSH if self.settings.push else PULL
        decode = Seq(trip.index, trip.chain, prompt, prompt + trip.turn.output_tokens, remote)
        n_bytes = float(prompt * self.settings.kv_bytes_per_token)
        transfer = Transfer(trip.index, decision.prefill_worker, decision.decode_worker, n_bytes)
        decode.transfer = transfer
        trip.decode = decode
        trip.transfer = transfer
        trip.transfer_tokens = prompt
        self._enter(decode, decision.decode_worker, time_s)

    def _start_pulls(self, worker: Worker) -> None:
        """Admitted requests pull the blocks that D lacks; with nothing lacking, P is told and nothing moves.

        A request that P has not prefilled yet holds its blocks and waits.
        """
        pulls = worker.pulls
        worker.pulls = []
        loaded = False
        for seq in pulls:
            trip = self.trips[seq.owner]
            if trip.prefilled:
                self._start_pull(trip, seq)
                loaded = True
        if loaded:
            self._schedule_link()

    def _start_pull(self, trip: Trip, seq: Seq) -> None:
        transfer = seq.transfer
        assert transfer is not None
        trip.transfer_tokens = max(0, seq.prompt_tokens - seq.computed)
        transfer.n_bytes = float(trip.transfer_tokens * self.settings.kv_bytes_per_token)
        transfer.remaining = transfer.n_bytes
        self.link.start(transfer, self.now_s)

    def _on_decoded(self, trip: Trip, seq: Seq, worker: Worker) -> None:
        worker.release(seq)
        now_s = self.now_s
        trip.end_s = now_s
        trip.generated_tokens = trip.turn.output_tokens
        trip.last_step = worker.n_done - 1
        self._close(trip)
        for index in trip.following:
            turn = self.trips[index].turn
            due_s = now_s + (turn.think_time_s or 0.0)
            self._schedule_send(self.trips[index], max(due_s, turn.scheduled_s or 0.0))
        self._leave_family(trip)

    def _close(self, trip: Trip) -> None:
        self._n_open -= 1
        ok = trip.status is Status.OK
        self._observe(Finished(self.now_s, trip.turn.request_id, ok, trip.generated_tokens))

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _schedule_link(self) -> None:
        if self.link.next_s < self._link_event_s:
            self._link_event_s = self.link.next_s
            self._push(self.link.next_s, TRANSFER, 0, 0)

    def _on_link(self) -> None:
        if self.now_s != self._link_event_s:
            return  # an earlier change made this event out of date
        self._link_event_s = float("inf")
        if self.link.next_s <= self.now_s:
            for transfer in self.link.advance(self.now_s):
                self._on_transferred(transfer)
        self._schedule_link()

    def _on_transferred(self, transfer: Transfer) -> None:
        """P may reuse its blocks; D may use the KV."""
        trip = self.trips[transfer.owner]
        prefill_worker = self.workers[transfer.source]
        if trip.prefill is not None and trip.prefill.state == HELD:
            prefill_worker.release(trip.prefill)
            self._touch(prefill_worker)
        worker = self.workers[transfer.target]
        seq = trip.decode
        if seq is not None and seq.state == PULLING:
            worker.pulled(seq)
            self._touch(worker)
        elif worker.blocked_on and all(t.finished for t in worker.blocked_on):
            worker.unblock(self.now_s)
            self._push_step(worker)

    # -- failures ----------------------------------------------------------------------------------------------------

    def _on_timeout(self, trip: Trip) -> None:
        """The client gives up: the turn fails and is aborted on every engine at this instant."""
        if trip.end_s >= 0.0:
            return
        trip.status = Status.TIMEOUT
        trip.message = f"no last token within {self.settings.timeout_s:g} s of sending"
        trip.end_s = self.now_s
        decode = trip.decode
        if decode is not None:
            worker = self.workers[self._worker_of(decode)]
            trip.generated_tokens = worker.tokens_of(decode, self.now_s)
            trip.last_step = worker.last_step_at(self.now_s)
        for seq in (trip.prefill, decode):
            if seq is not None and seq.state != DONE:
                self._abort(trip, seq)
        self._close(trip)
        self._leave_family(trip)

    def _abort(self, trip: Trip, seq: Seq) -> None:
        worker = self.workers[self._worker_of(seq)]
        if seq is trip.prefill and seq.state == HELD:
            self._abandon(trip)
            return
        if worker.abort(seq):
            self._aborted[worker.index].append(seq)
        self._touch(worker)

    def _abandon(self, trip: Trip) -> None:
        """P has finished and cannot be called back: its blocks wait for the transfer under way, or for the lease."""
        transfer = trip.transfer
        if not self.settings.push and transfer is not None and transfer.start_s < 0.0:
            self._push(max(self.now_s, trip.prefill_done_s + self.settings.kv_lease_s), LEASE, trip.index, 0)

    def _on_lease(self, trip: Trip) -> None:
        """P takes its blocks back from a turn that D has not begun to pull; D computes the prompt itself."""
        transfer, prefill, decode = trip.transfer, trip.prefill, trip.decode
        if prefill is None or decode is None or prefill.state != HELD or transfer is None or transfer.start_s >= 0.0:
            return
        worker = self.workers[self._worker_of(prefill)]
        worker.release(prefill)
        self._touch(worker)
        if decode.state == WAITING:
            decode.remote = LOCAL
            self._touch(self.workers[self._worker_of(decode)])

    # -- gauges ------------------------------------------------------------------------------------------------------

    def _on_snapshot(self, key: int) -> None:
        """Scrape all workers (key -1), or deliver one scrape that was taken ``snapshot_delay_s`` ago."""
        if key >= 0:
            self._observe(self._snapshots.pop(key))
            return
        for worker in self.workers:
            at_s = self.now_s + self.settings.snapshot_delay_s
            usage = worker.used_blocks_at(self.now_s) / worker.pool.total
            self._push(at_s, SNAPSHOT, self._serial, 0)
            self._snapshots[self._serial - 1] = WorkerSnapshot(at_s, worker.index, usage)
        if self._n_open:
            self._push(self.now_s + self.settings.snapshot_interval_s, SNAPSHOT, -1, 0)

    def _on_gauge(self) -> None:
        """Keep what every engine looks like. Nothing depends on it."""
        now_s = self.now_s
        for worker in self.workers:
            usage = worker.used_blocks_at(now_s) / worker.pool.total
            n_waiting = len(worker.waiting) + worker.n_pulling
            gauge = Gauge(now_s, worker.index, usage, len(worker.running), n_waiting, worker.busy_s_at(now_s))
            self.gauges.append(gauge)
        if self._n_open:
            self._push(now_s + self.settings.gauge_interval_s, GAUGE, 0, 0)
