"""Run one Point on the simulator: ``simulate(point, sessions, model) -> Columns``. Same inputs, same bytes (I5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppd_bench.core.errors import SpecError
from ppd_bench.core.point import Point, SimSettings
from ppd_bench.core.profiles import HardwareProfile, ModelProfile
from ppd_bench.core.record import Columns
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.core.workload import Session, Turn
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import make_policy
from ppd_bench.sim.cluster import Cluster, ClusterSettings
from ppd_bench.sim.kv import Chain, KvPool
from ppd_bench.sim.link import Link, SerialLink, SharedLink
from ppd_bench.sim.profile import find_hardware, kv_capacity_blocks, link_bytes_per_s, make_cost
from ppd_bench.sim.recording import to_columns
from ppd_bench.sim.worker import Worker

STRETCH_CAP = 96
"""Decode steps computed ahead at most. Only speed depends on it; larger wastes more when an arrival cuts the stretch."""

HANDOFFS = ("push_blocking", "pull_async")
"""Names of the hand-off models; see ``sim.link`` and ``sim.worker``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """How to run, without effect on results: ``stretch_cap`` 1 is the plain stepper; ``log`` keeps the router's log."""

    stretch_cap: int = STRETCH_CAP
    keep_gaps: bool = False
    keep_log: bool = False


def simulate(
    point: Point, sessions: Sequence[Session], model: ModelProfile, options: SimOptions | None = None
) -> Columns:
    """Simulate a point to its end and return its records by column, in order of (session, turn).

    Raises:
        SpecError: the model does not fit the GPU, or a conversation is longer than ``max_model_len``.
    """
    options = options or SimOptions()
    cluster = run_cluster(point, sessions, model, options)
    return to_columns(point, cluster, keep_gaps=options.keep_gaps)


def run_cluster(point: Point, sessions: Sequence[Session], model: ModelProfile, options: SimOptions) -> Cluster:
    """The finished cluster of a point, for those who want more than records (engine state, router log)."""
    _check_lengths(point, sessions)
    topology = parse_topology(point.topology)
    hardware = find_hardware(point.gpu)
    sim = point.sim or SimSettings()
    cluster = Cluster(
        workers=_workers(point, topology, hardware, model, sim, options.stretch_cap),
        link=_link(point, topology, hardware),
        policy=make_policy(topology, point.policy, point.placement, point.decision_seed),
        ledger=Ledger(topology),
        settings=ClusterSettings(
            timeout_s=point.timeout_s,
            visit_overhead_s=sim.visit_overhead_s,
            router_overhead_s=sim.router_overhead_s,
            push=point.engine.handoff == "push_blocking",
            kv_bytes_per_token=model.kv_bytes_per_token,
            kv_lease_s=point.engine.kv_lease_s,
            snapshot_interval_s=sim.snapshot_interval_s,
            snapshot_delay_s=sim.snapshot_delay_s,
        ),
        log=[] if options.keep_log else None,
    )
    cluster.load(tuple(sessions), chains_of(sessions, point.engine.block_size))
    cluster.run()
    return cluster


def _check_lengths(point: Point, sessions: Sequence[Session]) -> None:
    limit = point.engine.max_model_len
    for session in sessions:
        longest = max(turn.prompt_tokens + turn.output_tokens for turn in session)
        if longest > limit:
            raise SpecError(
                f"workload {point.workload.name!r}: a conversation reaches {longest} tokens, more than "
                f"engine.max_model_len {limit}"
            )


def _workers(
    point: Point, topology: Topology, hardware: HardwareProfile, model: ModelProfile, sim: SimSettings, stretch_cap: int
) -> list[Worker]:
    engine = point.engine
    cost = make_cost(hardware, model, topology.tensor_parallel_size, sim.cost_model, sim.step_table_json)
    n_blocks = kv_capacity_blocks(hardware, model, engine, sim, topology.tensor_parallel_size)
    return [
        Worker(
            index=index,
            pool=KvPool(n_blocks, engine.prefix_caching),
            cost=cost,
            block_size=engine.block_size,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            step_overhead_s=sim.step_overhead_s,
            sequence_overhead_s=sim.sequence_overhead_s,
            receiver_cost_s=sim.receiver_cost_s,
            stretch_cap=stretch_cap,
        )
        for index in range(topology.n_workers)
    ]


def _link(point: Point, topology: Topology, hardware: HardwareProfile) -> Link:
    kinds: dict[str, Any] = {"push_blocking": SerialLink, "pull_async": SharedLink}
    if point.engine.handoff not in kinds:
        raise SpecError(f"engine.handoff {point.engine.handoff!r} is not known; allowed: {', '.join(kinds)}")
    rate = link_bytes_per_s(point, hardware) * topology.tensor_parallel_size  # every shard has its own link
    emulated = point.engine.emulated_link_bytes_per_s or 0.0
    link: Link = kinds[point.engine.handoff](topology.n_workers, rate, point.engine.kv_link_latency_s, emulated)
    return link


def chains_of(sessions: Sequence[Session], block_size: int) -> list[list[Chain]]:
    """Block ids of every turn's prompt and answer: ``chains[s][k]``.

    A conversation without trace ids is one private run of consecutive ids. Traced prompts share ids where their leading block
    ids are equal, whatever conversation they belong to. An answer has the ids that the next prompt gives it where that prompt
    continues this one, and private ids otherwise.
    """
    ids = _BlockIds()
    return [ids.private(s, block_size) if s[0].block_ids is None else ids.traced(s, block_size) for s in sessions]


class _BlockIds:
    """Deals out block ids; equal (prefix, content) gets the equal id."""

    def __init__(self) -> None:
        self._next = 0
        self._known: dict[tuple[int, int], int] = {}

    def _take(self, n: int) -> int:
        first = self._next
        self._next += n
        return first

    def private(self, session: Session, block_size: int) -> list[Chain]:
        longest = max(turn.prompt_tokens + turn.output_tokens for turn in session)
        n = -(-longest // block_size)
        first = self._take(n)
        return [[(first, first + n)] for _ in session]

    def traced(self, session: Session, block_size: int) -> list[Chain]:
        following = [*(turn.block_ids or () for turn in session[1:]), ()]
        return [self._traced_turn(turn, after, block_size) for turn, after in zip(session, following, strict=True)]

    def _traced_turn(self, turn: Turn, following: tuple[int, ...], block_size: int) -> Chain:
        block_ids = turn.block_ids or ()
        if following[: len(block_ids)] == block_ids:
            block_ids = following[: max(len(block_ids), (turn.prompt_tokens + turn.output_tokens) // block_size)]
        chain: Chain = []
        parent = -1
        for content in block_ids:
            known = self._known.get((parent, content))
            if known is None:
                known = self._take(1)
                self._known[(parent, content)] = known
            _append_ids(chain, known, 1)
            parent = known
        n_tail = turn.output_tokens // block_size + 2
        _append_ids(chain, self._take(n_tail), n_tail)
        return chain


def _append_ids(chain: Chain, first: int, n: int) -> None:
    """Consecutive ids are always one range: a run of cached blocks is never cut by a range's end (``KvPool.match``)."""
    if chain and chain[-1][1] == first:
        chain[-1] = (chain[-1][0], first + n)
    else:
        chain.append((first, first + n))


def with_profile_hash(settings: SimSettings, value: str) -> SimSettings:
    """The settings as they go into a Point."""
    return dataclasses.replace(settings, profile_hash=value)
