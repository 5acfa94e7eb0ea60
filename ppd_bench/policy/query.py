"""What a policy is asked and what it may know. Nothing here holds the true output length (I6)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppd_bench.core.enums import Role
from ppd_bench.core.topology import Topology


class RouteQuery(NamedTuple):
    """One turn that wants a route. ``max_output_tokens`` is what the client declared.

    ``block_ids``: content ids of the prompt's blocks of ``block_tokens`` tokens, each standing for its whole prefix, where the
    router sees them (recorded traffic with ids); empty elsewhere.
    """

    request_id: str
    session_id: str
    turn: int
    context_tokens: int
    input_tokens: int
    max_output_tokens: int
    block_ids: Sequence[int] = ()
    block_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens + self.input_tokens


class SessionView(NamedTuple):
    """What is known of a conversation with at least one finished turn.

    ``decode_worker``: where it last decoded. ``known_tokens[w]``: tokens of its history that worker w is believed to hold.
    ``mean_output_tokens``: mean length of its finished answers. ``n_inflight``: its turns dispatched and not ended: while there
    is one, what the workers will hold is not certain (ROUTER.md B23).
    """

    n_finished: int
    decode_worker: int
    known_tokens: tuple[int, ...]
    mean_output_tokens: float
    n_inflight: int = 0


class RouterView(NamedTuple):
    """A router's knowledge at one instant; every tuple is indexed by worker (order of ``Topology.workers``).

    ``n_inflight``: requests dispatched and not finished there. ``inflight_tokens``: their prompt tokens plus expected output.
    ``n_legs`` / ``n_first_legs``: legs ever dispatched, of any turn / of first turns. ``kv_usage_ratio``: last snapshot, null
    before the first. ``session_rps``: conversations started per second over the sliding window. ``n_waiting_capacity``: requests
    that lacked room in the KV cache at the last snapshot. ``available``: false for a worker that is gone; empty where none is.
    ``prefix_blocks``: leading blocks of the query's prompt that the worker was sent before; empty without content ids.
    """

    now_s: float
    n_inflight: tuple[int, ...]
    inflight_tokens: tuple[int, ...]
    n_legs: tuple[int, ...]
    n_first_legs: tuple[int, ...]
    kv_usage_ratio: tuple[float | None, ...]
    session_rps: float
    session: SessionView | None
    n_waiting_capacity: tuple[int, ...] = ()
    available: tuple[bool, ...] = ()
    prefix_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Worker indices by what a policy does with them."""

    worker_ids: tuple[str, ...]
    replicas: tuple[int, ...]
    prefillers: tuple[int, ...]
    decoders: tuple[int, ...]
    local_decoders: frozenset[int]


def fleet_of(topology: Topology) -> Fleet:
    """The fleet of a topology; ``decoders`` holds D and pD, ``local_decoders`` only pD."""
    roles = [worker.role for worker in topology.workers]
    return Fleet(
        worker_ids=tuple(worker.worker_id for worker in topology.workers),
        replicas=tuple(i for i, role in enumerate(roles) if role is Role.REPLICA),
        prefillers=tuple(i for i, role in enumerate(roles) if role is Role.PREFILL),
        decoders=tuple(i for i, role in enumerate(roles) if role in (Role.DECODE, Role.DECODE_LOCAL)),
        local_decoders=frozenset(i for i, role in enumerate(roles) if role is Role.DECODE_LOCAL),
    )


def expected_output_tokens(query: RouteQuery, view: RouterView) -> float:
    """Mean of the conversation's finished answers, at most what the client declared; the declared cap where none finished."""
    if view.session is None:
        return float(query.max_output_tokens)
    return min(view.session.mean_output_tokens, float(query.max_output_tokens))


def stable_unit(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone, on every platform and in every process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / float(1 << 56)
