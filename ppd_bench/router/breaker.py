"""A circuit breaker: after some failures in a row an engine gets no turns until a generation of ours succeeds (ROUTER.md B15).

A state machine without a clock: instants come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """closed: turns go there. open: none do. half_open: none do, and a probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """``n_failures`` in a row open it; those older than ``memory_s`` are forgotten.

    The first probe comes after ``open_s``, each further one after twice the time, at most ``max_open_s``. It goes on so where the
    breaker opens again within ``memory_s``: an engine may pass every probe and fail every turn.
    """

    n_failures: int = 3
    memory_s: float = 60.0
    open_s: float = 1.0
    max_open_s: float = 15.0


class Breaker:
    """The breaker of one engine."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self.reset()

    def reset(self) -> None:
        """As for an engine of which nothing is known."""
        self.state = BreakerState.CLOSED
        self.n_failures = 0
        self.n_opened = 0
        self._last_failure_s = self._closed_s = float("-inf")
        self._wait_s = self._settings.open_s
        self._probe_s = float("inf")

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def failed(self, now_s: float) -> None:
        """A turn failed. While a probe is under way only the probe counts."""
        if now_s - self._last_failure_s > self._settings.memory_s:
            self.n_failures = 0
        self._last_failure_s = now_s
        self.n_failures += 1
        if self.is_closed and self.n_failures >= self._settings.n_failures:
            again = now_s - self._closed_s <= self._settings.memory_s
            self._wait_s = min(2.0 * self._wait_s, self._settings.max_open_s) if again else self._settings.open_s
            self.n_opened += 1
            self._open(now_s)

    def succeeded(self) -> None:
        """A turn succeeded. While the breaker is not closed that says nothing: the turn began before."""
        if self.is_closed:
            self.n_failures = 0

    def probe_at_s(self) -> float:
        """When a probe is due; infinity while none is."""
        return self._probe_s if self.state is BreakerState.OPEN else float("inf")

    def probing(self) -> None:
        """A probe has begun."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def probe_failed(self, now_s: float) -> None:
        """A probe's generation did not succeed: the next one comes after twice the time."""
        if self.state is not BreakerState.HALF_OPEN:
            self.failed(now_s)
            return
        self.n_failures += 1
        self._wait_s = min(2.0 * self._wait_s, self._settings.max_open_s)
        self._open(now_s)

    def probed(self, now_s: float) -> None:
        """A probe's generation succeeded: turns may go there again."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED
            self.n_failures = 0
            self._closed_s = now_s

    def _open(self, now_s: float) -> None:
        self.state = BreakerState.OPEN
        self._probe_s = now_s + self._wait_s
