"""One simulated vLLM V1 engine: waiting queue, token budget, chunked prefill, KV blocks, preemption by recompute.

The order of work follows vllm/v1/core/sched/scheduler.py: running decodes first, then running prefills, then waiting requests
first come first served while budget, sequence slots and KV blocks last. A request whose KV comes from P (``remote``) is
admitted when its whole prompt fits.

Decodes advance one token per step, always all of them (vLLM demands max_num_batched_tokens >= max_num_seqs), so a decode
sequence is an offset to the step counter: a step costs O(1) however large the batch. Stretches of pure decode steps run in one
loop (``stretch_cap`` steps at most) and are cut back when something arrives; ``stretch_cap`` 1 is the plain stepper.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from ppd_bench.sim.cost import StepCost
from ppd_bench.sim.kv import KvPool, Match
from ppd_bench.sim.link import Transfer
from ppd_bench.sim.seq import DECODING, DONE, HELD, LOCAL, PREFILLING, PULL, PULLING, WAITING, Seq


class Worker:
    """An engine. The caller delivers requests and calls ``finish_step`` when ``busy_until_s`` is reached."""

    def __init__(
        self,
        *,
        index: int,
        pool: KvPool,
        cost: StepCost,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        step_overhead_s: float,
        sequence_overhead_s: float,
        receiver_cost_s: float,
        stretch_cap: int,
    ) -> None:
        self.index = index
        self.pool = pool
        self.cost = cost
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.step_overhead_s = step_overhead_s
        self.sequence_overhead_s = sequence_overhead_s
        self.receiver_cost_s = receiver_cost_s
        self.stretch_cap = stretch_cap
        self.waiting: deque[Seq] = deque()
        self.running: dict[Seq, None] = {}  # in order of admission
        self.prefilling: list[Seq] = []
        self.scheduled: list[Seq] = []  # prefills of the step in progress
        self.step_end_s: list[float] = []
        self.n_done = 0  # steps finished
        self.busy = False
        self.busy_until_s = 0.0
        self.blocked_on: list[Transfer] = []  # transfers that the step in progress waits for
        self.blocked_since_s = 0.0
        self.blocked_s = 0.0
        self.n_step_receives = 0
        self.n_preempted = 0
        self.busy_s = 0.0  # of steps, from their first to their last instant; waiting for transfers is ``blocked_s``
        self.n_pulling = 0
        self.version = 0
        self.pulls: list[Seq] = []  # admitted, transfer to be started by the caller
        self.head_blocked = False
        self._n_decoding = 0
        self._context_base = 0
        self._phases: list[int] = [0] * block_size
        self._finishes: list[tuple[int, int, Seq]] = []
        self._n_finishes = 0

    # -- arrivals and departures -------------------------------------------------------------------------------------

    def add(self, seq: Seq) -> None:
        """A request arrives at the end of the queue."""
        self.waiting.append(seq)

    def pulled(self, seq: Seq) -> None:
        """The KV of an admitted request has arrived; it runs in the next step."""
        self.n_pulling -= 1
        seq.state = WAITING
        seq.loaded = True
        seq.computed = seq.prompt_tokens - 1
        self._requeue(seq)

    def _requeue(self, seq: Seq) -> None:
        """To the head of the queue, but behind those whose KV has arrived: they hold their blocks already."""
        n_loaded = 0
        while n_loaded < len(self.waiting) and self.waiting[n_loaded].loaded:
            n_loaded += 1
        self.waiting.insert(n_loaded, seq)

    def abort(self, seq: Seq) -> bool:
        """Drop a request. True if it is in the running step: its blocks stay until ``sweep_aborted`` after that step."""
        seq.aborted = True
        if self.busy and (seq.state == DECODING or (seq.state == PREFILLING and seq in self.scheduled)):
            return True
        self._remove(seq)
        return False

    def _remove(self, seq: Seq) -> None:
        if seq.state == WAITING:
            if seq in self.waiting:  # it may still be on its way here
                self.waiting.remove(seq)
        elif seq.state in (PREFILLING, DECODING):
            self._leave_running(seq)
        elif seq.state == PULLING:
            self.n_pulling -= 1
        self.release(seq)

    def _leave_running(self, seq: Seq) -> None:
        del self.running[seq]
        if seq.state == PREFILLING:
            self.prefilling.remove(seq)
        else:
            self._freeze(seq)

    def release(self, seq: Seq) -> None:
        """Cache the full blocks of a sequence and let go of all its blocks."""
        self._share(seq)
        self.pool.release(seq.run, seq.n_private)
        seq.run = None
        seq.n_shared = 0
        seq.n_private = 0
        seq.state = DONE

    # -- decode bookkeeping: sequences as offsets to the step counter -------------------------------------------------

    def _join_decode(self, seq: Seq) -> None:
        """From the next step on the sequence decodes; it has ``n_tokens`` tokens, all but the last in KV."""
        seq.state = DECODING
        seq.join_step = self.n_done
        self._n_decoding += 1
        self._context_base += seq.n_tokens - seq.join_step
        self._phases[(seq.join_step + 1 - seq.n_tokens) % self.block_size] += 1
        self._n_finishes += 1
        last_step = seq.join_step + seq.target_tokens - seq.n_tokens - 1
        heappush(self._finishes, (last_step, self._n_finishes, seq))

    def _freeze(self, seq: Seq) -> None:
        """Take a decoding sequence out, with its counters brought up to date."""
        self._n_decoding -= 1
        self._context_base -= seq.n_tokens - seq.join_step
        self._phases[(seq.join_step + 1 - seq.n_tokens) % self.block_size] -= 1
        seq.n_tokens += self.n_done - seq.join_step
        seq.computed = seq.n_tokens - 1
        seq.n_private = -(-seq.computed // self.block_size) - seq.n_shared
        seq.spans.append(self.n_done - 1)

    def tokens_of(self, seq: Seq, now_s: float) -> int:
        """Tokens that a sequence has generated by ``now_s``, in whatever state it is."""
        n = seq.n_tokens - seq.prompt_tokens
        return n + self.last_step_at(now_s) + 1 - seq.join_step if seq.state == DECODING else n

    def last_step_at(self, now_s: float) -> int:
        """Index of the last step that ended by ``now_s``."""
        step = self.n_done - 1
        if self.busy and not self.blocked_on:
            while step + 1 < len(self.step_end_s) and self.step_end_s[step + 1] <= now_s:
                step += 1
        return step

    def used_blocks_at(self, now_s: float) -> int:
        """Blocks in use now, those of the step that is running included: a stretch takes its later ones at its end."""
        used = self.pool.used
        if self.busy and not self.blocked_on:
            running = min(self.last_step_at(now_s) + 1, len(self.step_end_s) - 1)
            for step in range(self.n_done + 1, running + 1):
                used += self._phases[step % self.block_size]
        return used

    def busy_s_at(self, now_s: float) -> float:
        """Seconds of steps up to now."""
        return self.busy_s - (self.busy_until_s - now_s if self.busy and not self.blocked_on else 0.0)

    # -- steps -------------------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> bool:
        """Begin a step if there is work. True when the worker became busy (or blocked on transfers)."""
        self.scheduled.clear()
        self.n_step_receives = 0
        if not self.running and not self.waiting:
            return False
        n_preempted = self.n_preempted
        self._reserve_decode_blocks()
        budget = self.max_num_batched_tokens - self._n_decoding
        for seq in list(self.prefilling):
            if seq.state == PREFILLING:
                budget -= self._schedule_chunk(seq, budget)
        self.head_blocked = False
        if n_preempted == self.n_preempted or not (self.scheduled or self._n_decoding):
            self._admit(budget)
        if not self.scheduled and not self._n_decoding:
            return False
        for seq in self.scheduled:
            if seq.start_s < 0.0:
                seq.start_s = now_s
        self.busy = True
        self.version += 1
        if self.blocked_on:
            self.blocked_since_s = now_s
        else:
            self._time(now_s)
        return True

    def unblock(self, now_s: float) -> None:
        """The transfers that the step waited for are done: the step runs now."""
        self.blocked_on.clear()
        self.blocked_s += now_s - self.blocked_since_s
        self.version += 1
        self._time(now_s)

    def _reserve_decode_blocks(self) -> None:
        """Blocks for one decode step; preempts the youngest until they fit."""
        while not self.pool.allocate(self._phases[self.n_done % self.block_size]):
            self._preempt(False)

    def _preempt(self, reserved: bool) -> None:
        """Recompute preemption of the youngest running sequence: its full blocks stay cached until they are needed.

        ``reserved``: blocks of this step's decodes are taken already, so a decode that leaves gives its new one back.
        """
        seq = next(reversed(self.running))
        phase = (seq.join_step + 1 - seq.n_tokens) % self.block_size
        if reserved and seq.state == DECODING and phase == self.n_done % self.block_size:
            self.pool.release(None, 1)
        self._leave_running(seq)
        self.release(seq)
        seq.state = WAITING
        seq.computed = 0
        seq.remote = LOCAL
        seq.loaded = False
        seq.n_preempted += 1
        self.n_preempted += 1
        self._requeue(seq)

    def _schedule_chunk(self, seq: Seq, budget: int) -> int:
        """Schedule the next chunk of a running prefill; returns its tokens (0 when budget or blocks lack).

        Blocks come from the youngest, and that may be this one itself, as in vLLM.
        """
        n = min(seq.n_tokens - seq.computed, budget)
        if n <= 0:
            return 0
        need = -(-(seq.computed + n) // self.block_size) - seq.n_shared - seq.n_private
        while not self.pool.allocate(need):
            self._preempt(True)
            if seq.state != PREFILLING:
                return 0
        seq.n_private += need
        seq.chunk = n
        self.scheduled.append(seq)
        return n

    def _admit(self, budget: int) -> None:
        while self.waiting and budget > 0:
            if len(self.running) >= self.max_num_seqs:
                self.head_blocked = True
                return
            n = self._admit_one(self.waiting[0], budget)
            if n < 0:
                self.head_blocked = True
                return
            budget -= n

    def _admit_one(self, seq: Seq, budget: int) -> int:
        """Admit the head of the queue; returns the tokens scheduled (0 for a pull), -1 when its blocks do not fit."""
        if seq.loaded:
            self._run(seq, 1)
            return 1
        match = self.pool.match(seq.chain, (seq.n_tokens - 1) // self.block_size)
        hit = match.n_blocks * self.block_size
        n = seq.n_tokens - hit if seq.remote else min(seq.n_tokens - hit, budget)
        need = -(-(hit + n) // self.block_size) - match.n_blocks
        if need + match.n_idle > self.pool.available():
            return -1
        self._take(seq, match, need)
        if seq.remote == PULL:
            self.waiting.popleft()
            seq.state = PULLING
            self.n_pulling += 1
            self.pulls.append(seq)
            return 0
        if seq.remote:
            seq.computed = seq.prompt_tokens - 1
            n = 1
            self.n_step_receives += 1
            if seq.transfer is not None and not seq.transfer.finished:
                self.blocked_on.append(seq.transfer)
        self._run(seq, n)
        return n

    def _take(self, seq: Seq, match: Match, need: int) -> None:
        seq.run = self.pool.acquire(match)
        self.pool.allocate(need)
        seq.n_shared = match.n_blocks
        seq.n_private = need
        seq.computed = match.n_blocks * self.block_size
        if seq.hit_tokens < 0:
            seq.hit_tokens = seq.computed

    def _run(self, seq: Seq, n: int) -> None:
        self.waiting.popleft()
        self.running[seq] = None
        self.prefilling.append(seq)
        self.scheduled.append(seq)
        seq.state = PREFILLING
        seq.chunk = n

    def _time(self, now_s: float) -> None:
        """Compute the ends of the step, or of the stretch of decode steps, that begins now."""
        if self.scheduled:
            end_s = now_s + self._mixed_s()
            self.step_end_s.append(end_s)
        else:
            end_s = self._stretch(now_s, self._stretch_steps())
        self.busy_until_s = end_s
        self.busy_s += end_s - now_s

    def _mixed_s(self) -> float:
        tokens = 0
        context = 0
        attention = 0.0
        for seq in self.scheduled:
            n = seq.chunk
            tokens += n
            context += seq.computed + n
            attention += n * seq.computed + 0.5 * n * n
        n_decode = self._n_decoding
        seconds = self.cost.mixed_s(
            tokens, len(self.scheduled), attention, context, n_decode, self._context_base + n_decode * self.n_done
        )
        seconds += self.step_overhead_s + self.sequence_overhead_s * (n_decode + len(self.scheduled))
        return seconds + self.receiver_cost_s * self.n_step_receives

    def _stretch_steps(self) -> int:
        """How many pure decode steps can run before anything but an arrival changes: a finish, or lack of blocks.

        Blocks of the first step are reserved already. A blocked head of the queue stays blocked, since decodes only take
        blocks; a head that was merely not looked at (after a preemption) is looked at in the next step.
        """
        if self.waiting and not self.head_blocked:
            return 1
        while self._finishes[0][2].state != DECODING or self._finishes[0][2].aborted:
            heappop(self._finishes)
        limit = min(self.stretch_cap, self._finishes[0][0] - self.n_done + 1)
        n_decode = self._n_decoding
        if (limit // self.block_size + 1) * n_decode <= self.pool.available():
            return limit
        need = 0
        for k in range(1, limit):
            need += self._phases[(self.n_done + k) % self.block_size]
            if need > self.pool.available():
                return k
        return limit

    def _stretch(self, now_s: float, n_steps: int) -> float:
        """Ends of ``n_steps`` pure decode steps, appended to ``step_end_s``; the arithmetic of each is that of one alone."""
        n = self._n_decoding
        line = self.cost.decode_line(n)
        a1 = line.a1
        b1 = line.b1
        a2 = line.a2
        b2 = line.b2
        overhead_s = self.step_overhead_s + self.sequence_overhead_s * n
        context = float(self._context_base + n * self.n_done)
        increment = float(n)
        ends = self.step_end_s
        end_s = now_s
        for _ in range(n_steps):
            seconds = a1 + b1 * context
            other = a2 + b2 * context
            if other > seconds:
                seconds = other
            end_s = end_s + (seconds + overhead_s)
            ends.append(end_s)
            context += increment
        return end_s

    def cut(self, now_s: float, passed: bool) -> bool:
        """Something arrived: cut a stretch in progress back to the step that is running now. True if its end changed.

        ``passed``: a step that ends at this very instant is over already, by the order of events at equal times.
        """
        ends = self.step_end_s
        if self.blocked_on or len(ends) - self.n_done <= 1:
            return False
        low = self.n_done
        high = len(ends) - 1
        while low < high:  # first step that is not over
            middle = (low + high) // 2
            if ends[middle] > now_s or (ends[middle] == now_s and not passed):
                high = middle
            else:
                low = middle + 1
        if low == len(ends) - 1:
            return False
        del ends[low + 1 :]
        self.busy_s -= self.busy_until_s - ends[low]
        self.busy_until_s = ends[low]
        self.version += 1
        return True

    def finish_step(self) -> list[Seq]:
        """The step (or stretch) is over. Returns the sequences that got their last token, in order; blocks still held."""
        last = len(self.step_end_s) - 1
        self._grow_blocks(last)
        self.n_done = last + 1
        self.busy = False
        finished = self._finish_decodes(last)
        for seq in self.scheduled:
            self._finish_chunk(seq, last, finished)
        return finished

    def _grow_blocks(self, last: int) -> None:
        """Blocks of the stretch's later steps (those of its first were reserved when it began)."""
        n_later = last - self.n_done
        if n_later <= 0:
            return
        whole = n_later // self.block_size
        need = whole * self._n_decoding
        for step in range(self.n_done + 1 + whole * self.block_size, last + 1):
            need += self._phases[step % self.block_size]
        self.pool.allocate(need)

    def _finish_decodes(self, last: int) -> list[Seq]:
        finished: list[Seq] = []
        heap = self._finishes
        while heap and heap[0][0] <= last:
            seq = heappop(heap)[2]
            if (
                seq.state == DECODING
                and not seq.aborted
                and seq.n_tokens + last + 1 - seq.join_step == seq.target_tokens
            ):
                self._leave_running(seq)
                seq.state = HELD
                finished.append(seq)
        return finished

    def _finish_chunk(self, seq: Seq, last: int, finished: list[Seq]) -> None:
        seq.computed += seq.chunk
        if seq.aborted or seq.computed < seq.n_tokens:
            return
        self._share(seq)  # full prompt blocks become findable when they are computed, not only when the sequence ends
        self.prefilling.remove(seq)
        seq.n_tokens += 1
        if seq.first_step < 0:
            seq.first_step = last
        seq.spans.append(last)
        if seq.n_tokens == seq.target_tokens:
            seq.spans.append(last)
            del self.running[seq]
            seq.state = HELD
            finished.append(seq)
        else:
            self._join_decode(seq)

    def _share(self, seq: Seq) -> None:
        run, shared = self.pool.extend(seq.run, seq.chain, seq.n_shared, seq.computed // self.block_size)
        seq.n_private -= shared - seq.n_shared
        seq.run = run
        seq.n_shared = shared

    def sweep_aborted(self, seqs: list[Seq]) -> None:
        """Remove sequences that were aborted while a step ran."""
        for seq in seqs:
            if seq.state != DONE:
                self._remove(seq)
