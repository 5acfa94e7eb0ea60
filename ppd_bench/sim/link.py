"""KV transfers between workers: two disciplines, one interface.

``SharedLink`` (pull_async): every transfer starts at once; a worker's outgoing and incoming bandwidth is shared equally by
its concurrent transfers. ``SerialLink`` (push_blocking): one sender per P and one receiver per D, each serving one transfer
at a time in order. Both add a fixed latency, and optionally Equation 2's emulation of a slower link (paper, B.6): an extra
delay of max(0, B / emulated - B / real) on the receiving side.
"""

from __future__ import annotations

from collections import deque


class Transfer:
    """One KV transfer. ``owner`` is the caller's index of the turn; times are null (-1) until they happen."""

    def __init__(self, owner: int, source: int, target: int, n_bytes: float) -> None:
        self.owner = owner
        self.source = source
        self.target = target
        self.n_bytes = n_bytes
        self.start_s = -1.0
        self.done_s = -1.0
        self.finished = False
        self.remaining = n_bytes  # bytes still to move (SharedLink)
        self.moved = False  # bytes have arrived, the tail (latency, emulation) is running


class Link:
    """Interface. ``next_s`` is the instant of the next change, infinity without one; ``advance`` returns what is done."""

    def __init__(self, bytes_per_s: float, latency_s: float, emulated_bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.emulated_bytes_per_s = emulated_bytes_per_s  # 0 means no emulation
        self.next_s = float("inf")

    def tail_s(self, n_bytes: float) -> float:
        """Latency plus Equation 2's extra delay, seconds."""
        if self.emulated_bytes_per_s <= 0.0:
            return self.latency_s
        extra = n_bytes / self.emulated_bytes_per_s - n_bytes / self.bytes_per_s
        return self.latency_s + max(0.0, extra)

    def start(self, transfer: Transfer, now_s: float) -> None:
        """Queue a transfer."""
        raise NotImplementedError

    def advance(self, now_s: float) -> list[Transfer]:
        """Move to ``now_s`` (at most ``next_s``); returns the transfers that are done, in order."""
        raise NotImplementedError


class SerialLink(Link):
    """One sender per source, one receiver per target; a sender's queue is FIFO and its head waits for the receiver."""

    def __init__(self, n_workers: int, bytes_per_s: float, latency_s: float, emulated_bytes_per_s: float) -> None:
        super().__init__(bytes_per_s, latency_s, emulated_bytes_per_s)
        self._queues: list[deque[Transfer]] = [deque() for _ in range(n_workers)]
        self._sending: list[Transfer | None] = [None] * n_workers
        self._receiving: list[bool] = [False] * n_workers
        self._waiting: list[deque[int]] = [deque() for _ in range(n_workers)]  # sources waiting for a target

    def start(self, transfer: Transfer, now_s: float) -> None:
        self._queues[transfer.source].append(transfer)
        if len(self._queues[transfer.source]) == 1:
            self._offer(transfer.source, now_s)

    def _offer(self, source: int, now_s: float) -> None:
        """The head of a sender's queue asks for its receiver."""
        target = self._queues[source][0].target
        if self._receiving[target]:
            self._waiting[target].append(source)
        else:
            self._begin(source, now_s)

    def _begin(self, source: int, now_s: float) -> None:
        transfer = self._queues[source][0]
        transfer.start_s = now_s
        transfer.done_s = now_s + transfer.n_bytes / self.bytes_per_s + self.tail_s(transfer.n_bytes)
        self._sending[source] = transfer
        self._receiving[transfer.target] = True
        self.next_s = min(self.next_s, transfer.done_s)

    def advance(self, now_s: float) -> list[Transfer]:
        done: list[Transfer] = []
        for source in range(len(self._sending)):
            transfer = self._sending[source]
            if transfer is not None and transfer.done_s <= now_s:
                transfer.finished = True
                done.append(transfer)
                self._sending[source] = None
                self._receiving[transfer.target] = False
                self._queues[source].popleft()
        for transfer in done:
            waiting = self._waiting[transfer.target]
            if waiting and not self._receiving[transfer.target]:
                self._begin(waiting.popleft(), now_s)
        for transfer in done:
            if self._queues[transfer.source] and self._sending[transfer.source] is None:
                self._offer(transfer.source, now_s)
        self._update()
        return done

    def _update(self) -> None:
        self.next_s = float("inf")
        for transfer in self._sending:
            if transfer is not None and transfer.done_s < self.next_s:
                self.next_s = transfer.done_s


class SharedLink(Link):
    """Concurrent transfers share bandwidth: a transfer's rate is the smaller share of its source's and its target's."""

    def __init__(self, n_workers: int, bytes_per_s: float, latency_s: float, emulated_bytes_per_s: float) -> None:
        super().__init__(bytes_per_s, latency_s, emulated_bytes_per_s)
        self._out = [0] * n_workers
        self._in = [0] * n_workers
        self._active: list[Transfer] = []
        self._now_s = 0.0

    def _rate(self, transfer: Transfer) -> float:
        return self.bytes_per_s / max(self._out[transfer.source], self._in[transfer.target])

    def start(self, transfer: Transfer, now_s: float) -> None:
        self._move(now_s)
        transfer.start_s = now_s
        self._active.append(transfer)
        self._out[transfer.source] += 1
        self._in[transfer.target] += 1
        self._update()

    def _move(self, now_s: float) -> None:
        elapsed = now_s - self._now_s
        self._now_s = now_s
        for transfer in self._active:
            if not transfer.moved:
                transfer.remaining -= elapsed * self._rate(transfer)

    def advance(self, now_s: float) -> list[Transfer]:
        self._move(now_s)
        done: list[Transfer] = []
        arrived: list[Transfer] = []
        for transfer in self._active:
            if transfer.moved:
                if transfer.done_s <= now_s:
                    transfer.finished = True
                    done.append(transfer)
            elif transfer.remaining <= 1.0 or now_s + transfer.remaining / self._rate(transfer) <= now_s:
                arrived.append(transfer)  # what is left is rounding: below one byte, or below the clock's resolution
        for transfer in arrived:
            transfer.moved = True
            transfer.done_s = now_s + self.tail_s(transfer.n_bytes)
            self._out[transfer.source] -= 1
            self._in[transfer.target] -= 1
        if done:
            self._active = [transfer for transfer in self._active if not transfer.finished]
        self._update()
        return done

    def _update(self) -> None:
        self.next_s = float("inf")
        for transfer in self._active:
            at = transfer.done_s if transfer.moved else self._now_s + transfer.remaining / self._rate(transfer)
            if at < self.next_s:
                self.next_s = at
