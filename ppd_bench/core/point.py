"""A Point: one measurement, complete in itself, with an identity that follows from its content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ppd_bench.core.enums import Executor
from ppd_bench.core.workload import WorkloadSpec

Params = tuple[tuple[str, float | int | str | bool], ...]
"""Named parameters of a policy, sorted by name, hashable."""


def added(default: Any) -> Any:
    """A field that came after runs had been stored: at its default it is not part of an identity, so that their ids stay."""
    return field(default=default, metadata={"added": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """The route decider and its parameters. ``table_json`` is the text of a decision table, for decider ``table`` only."""

    decider: str = "node"
    params: Params = ()
    table_json: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSpec:
    """How workers are chosen. Names from ``policy.placements``.

    ``sticky``: follow-up turns decode where the conversation decoded before, whatever route their prefill takes.
    In hybrids a conversation goes to R with probability nR / (nR + nD), hashed on its id.
    """

    prefill: str = "round_robin"
    decode: str = "least_inflight"
    replica: str = "least_inflight"
    sticky: bool = True
    params: Params = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Engine flags and hand-off model that both arms of a pair share (part of ``pair_key``).

    ``handoff``: ``push_blocking`` (the paper's P2P NCCL connector) or ``pull_async`` (NIXL); see ``sim.handoff``.
    ``dispatch``: ``await`` tells D of a turn when P has answered; ``fire_and_forget`` tells both at once, so that D holds KV
    memory from the start (with ``pull_async``). ``kv_link_bytes_per_s`` null takes the GPU profile's.
    ``emulated_link_bytes_per_s`` adds Equation 2's delay.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    block_size: int = 16
    gpu_memory_utilization_ratio: float = 0.85
    max_model_len: int = 8192
    prefix_caching: bool = True
    kv_connector: str = "P2pNcclConnector"
    handoff: str = "push_blocking"
    dispatch: str = added("await")
    kv_link_bytes_per_s: float | None = None
    kv_link_latency_s: float = 0.0005
    emulated_link_bytes_per_s: float | None = None
    kv_lease_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """Named parameters of the simulator that a compute model misses (COST_MODEL.md, 'Overheads').

    ``cost_model``: ``auto`` takes the step table of (gpu, model) where there is one, else the roofline; ``aiconfigurator`` one
    that is fitted to that package's kernels.
    ``step_table_json``: text of a user's own step surface (``sim.step_tables``), null for the built-in ones.
    ``receiver_cost_s``: hypothesis, seconds that a receiver of ``push_blocking`` spends on each transfer; default 0.
    ``kv_capacity_tokens``: of one engine, in place of what its memory leaves; null computes it.
    ``transfer_base_s`` and ``transfer_bytes_per_s``: what a transfer takes, in place of ``engine.kv_link_latency_s`` and of the
    link's rate, which are settings of engines and part of ``pair_key``; null takes those. ``fitted_profile`` names the profile
    (``core.fitted_profile``) that figures came from, empty where none did.
    ``activation_reserve_bytes``: fitted on the two KV capacities of COST_MODEL.md (H100 432,992 and H200 882,732 tokens at 0.9).
    """

    cost_model: str = "auto"
    step_table_json: str | None = None
    step_overhead_s: float = 0.0012
    sequence_overhead_s: float = 7.5e-6
    visit_overhead_s: float = 0.015
    router_overhead_s: float = 0.001
    receiver_cost_s: float = 0.0
    transfer_base_s: float | None = added(None)
    transfer_bytes_per_s: float | None = added(None)
    kv_capacity_tokens: int | None = added(None)
    activation_reserve_bytes: int = 4_100_000_000
    snapshot_interval_s: float = 1.0
    snapshot_delay_s: float = 0.01
    fitted_profile: str = added("")
    profile_hash: str = ""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One (configuration, workload, QPS, repeat) to run, with everything that can change its result.

    Not slotted, so that its identities, which every room asks for, are computed once.

    ``qps`` is conversations per second; ``engine_version`` names the vLLM version or the simulator's version.
    ``sim`` is null for live points.
    """

    topology: str
    model: str
    gpu: str
    workload: WorkloadSpec
    qps: float
    duration_s: float
    timeout_s: float
    think_time_s: float
    seed: int
    repeat: int
    executor: Executor
    policy: PolicySpec
    placement: PlacementSpec
    engine: EngineSettings
    engine_version: str
    sim: SimSettings | None = None

    @cached_property
    def point_id(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON."""
        return content_hash(plain(self))

    @cached_property
    def pair_key(self) -> str:
        """The same hash without what may differ between two arms or executors of one comparison."""
        content = plain(self)
        for name in ("topology", "policy", "placement", "executor", "engine_version", "sim"):
            del content[name]
        return content_hash(content)

    @cached_property
    def decision_seed(self) -> int:
        """Seed of hashed decisions: the same in every configuration of a (workload, QPS, repeat), another in each of those.

        Conversations of different cells share their ids, so hashing ids with the sweep's seed alone would send the same
        ones the same way in every cell, and a sample of cells would not average the luck of a few ids out.
        """
        return int(content_hash([self.seed, self.workload.name, self.qps, self.repeat]), 16) >> 1

    @property
    def request_x_ratio(self) -> float | None:
        """Request-level x asked for, where the decider is ``fraction``; else null (GLOSSARY: x)."""
        x = dict(self.policy.params).get("x")
        return float(x) if self.policy.decider == "fraction" and x is not None else None


def plain(value: Any) -> Any:
    """Frozen dataclasses and tuples as dictionaries and lists, for JSON; what ``dataclasses.asdict`` gives, without copies, and
    without ``added`` fields that are at their default."""
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        content = {name: getattr(value, name) for name in fields}
        return {name: plain(v) for name, v in content.items() if not _is_left_out(fields[name], v)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _is_left_out(described: Any, value: Any) -> bool:
    return "added" in described.metadata and value == described.default


def canonical_json(content: Any) -> str:
    """Sorted keys, no spaces, no NaN: equal content gives equal text."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(content: Any) -> str:
    """16 hex digits of the SHA-256 of ``canonical_json(content)``."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]
