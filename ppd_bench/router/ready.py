"""Is the router ready? Only an answer that came through every role says so (ROUTER.md B15)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Role, Route
from ppd_bench.engine.dispatch import LegLimits, Request, dispatch
from ppd_bench.engine.readiness import PROBE_PROMPT
from ppd_bench.router.state import RouterState

DECODERS = (Role.DECODE, Role.DECODE_LOCAL)


class Readiness:
    """Generates a token through P and D, and on R, and remembers for a moment what came of it.

    ``check`` gives what is wrong by path, empty when nothing is. Callers at the same time share one generation.
    """

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._lock = asyncio.Lock()
        self._found: Mapping[str, str] = {}
        self._found_s = float("-inf")
        self._n = 0

    async def check(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """``headers``: those of the asking client that engines may want, such as a key."""
        async with self._lock:
            if self._state.clock() - self._found_s > self._state.settings.ready_cache_s:
                self._found = await self._generate(headers)
                self._found_s = self._state.clock()
            return self._found

    async def _generate(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        roles = {worker.role for worker in self._state.topology.workers}
        paths: list[tuple[str, Sequence[Role], Sequence[Role], Route]] = []
        if Role.PREFILL in roles:
            paths.append(("P to D", (Role.PREFILL,), DECODERS, Route.PD))
        if Role.REPLICA in roles:
            paths.append(("R", (Role.REPLICA,), (Role.REPLICA,), Route.REPLICA))
        problems = {}
        for name, first, last, route in paths:
            problem = await self._try(self._there(first), self._there(last), route, headers)
            if problem is not None:
                problems[name] = problem
        return problems

    def _there(self, roles: Sequence[Role]) -> list[int]:
        workers = self._state.topology.workers
        return [i for i, w in enumerate(workers) if w.role in roles and self._state.fleet.available(i)]

    async def _try(
        self, first: Sequence[int], last: Sequence[int], route: Route, headers: Mapping[str, str]
    ) -> str | None:
        """Null when a pair of these answered, else why the last one that was asked did not."""
        state = self._state
        problem = "no engine of this role is available"
        pairs = zip(first, last, strict=True) if route is Route.REPLICA else ((p, d) for p in first for d in last)
        for prefiller, decoder in pairs:
            self._n += 1
            went = await dispatch(
                state.client,
                state.fleet.engines(),
                Decision(route, prefiller, decoder, "readiness"),
                Request(request_id=f"{state.name}-ready-{self._n}", body=_body(), headers=headers),
                limits=LegLimits(deadline_s=state.clock() + state.settings.ready_limit_s),
            )
            if went.outcome.ok:
                return None
            problem = went.outcome.message or went.outcome.status.value
        return problem


def _body() -> Mapping[str, object]:
    return {"prompt": list(PROBE_PROMPT), "max_tokens": 1, "temperature": 0, "seed": 0}
