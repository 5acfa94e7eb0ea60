"""One worker's place in a router's fleet, and what is known of the engine that has it. No IO, no clock."""

from __future__ import annotations

import asyncio

from ppd_bench.core.enums import Role
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.metrics import EngineScrape
from ppd_bench.router.breaker import Breaker
from ppd_bench.router.discovery import Member

NOWHERE = ("127.0.0.1", 0)
"""The address of a worker without an engine: nothing can be reached there, and trying fails at once."""


class Slot:
    """A place, with an engine (``member``) or without.

    ``is_trusted``: turns may go there. An engine of the file that the router started with is trusted until a probe denies it,
    every other one only once it ``is_proven``, which a generation does. ``maybe_new``: it could not be reached since the last
    scrape, so that another process may answer there by now. ``alive_s``: when it last was known to generate. ``said``: the
    availability that the Ledger was told last. ``wake``: look at it now.
    """

    __slots__ = (
        "alive_s",
        "breaker",
        "endpoint",
        "is_proven",
        "is_trusted",
        "maybe_new",
        "member",
        "problem",
        "role",
        "said",
        "scraped",
        "start_s",
        "wake",
        "worker",
    )

    def __init__(self, worker: int, worker_id: str, role: Role, breaker: Breaker) -> None:
        self.worker = worker
        self.role = role
        self.breaker = breaker
        self.said = True  # what a Ledger believes of a worker that it has heard nothing of
        self.wake = asyncio.Event()
        self.endpoint = Endpoint(worker_id=worker_id, role=role, host=NOWHERE[0], port=NOWHERE[1])
        self.member: Member | None = None
        self.forget()

    def forget(self) -> None:
        """As for a process of which nothing is known."""
        self.is_trusted = self.is_proven = self.maybe_new = False
        self.alive_s = float("-inf")
        self.start_s: float | None = None
        self.scraped: EngineScrape | None = None
        self.problem: str | None = None
        self.breaker.reset()

    @property
    def is_available(self) -> bool:
        """Whether turns may be sent there."""
        return self.member is not None and self.is_trusted and self.breaker.is_closed

    def take(self, member: Member | None) -> None:
        """Another engine in this place, or none, or the same one of which more is known."""
        self.member = member
        host, port = NOWHERE if member is None else member.address
        engine_id = None if member is None else member.engine_id
        worker_id = self.endpoint.worker_id
        self.endpoint = Endpoint(worker_id=worker_id, role=self.role, host=host, port=port, engine_id=engine_id)

    def has_restarted(self, found: EngineScrape) -> bool:
        """Whether a scrape comes from another process than the one before. An engine that does not tell when it started may have,
        if it could not be reached in between."""
        if found.engine_start_s is None or self.start_s is None:
            return self.maybe_new and self.scraped is not None
        return found.engine_start_s != self.start_s

    def has_generated(self, found: EngineScrape) -> bool:
        """Whether tokens came out of it since the scrape before."""
        before = self.scraped.counters.generated_tokens if self.scraped is not None else None
        after = found.counters.generated_tokens
        return before is not None and after is not None and after > before


def is_other(before: Member, after: Member) -> bool:
    """Whether two announcements are of different processes, as far as they tell."""
    told = ((before.engine_id, after.engine_id), (before.start_s, after.start_s))
    return before.address != after.address or any(a is not None and b is not None and a != b for a, b in told)


def of_the_same(before: Member, after: Member) -> Member:
    """The later announcement with what only the earlier one told, if both may be of one process."""
    if is_other(before, after):
        return after
    return Member(
        role=after.role,
        host=after.host,
        port=after.port,
        engine_id=after.engine_id or before.engine_id,
        start_s=before.start_s if after.start_s is None else after.start_s,
    )
