"""What the agentic study compares: arms, and the mechanisms that are swept around them, as simulated points."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppd_bench.core.enums import Executor
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.profiles import ModelProfile
from ppd_bench.core.workload import WorkloadSpec
from ppd_bench.sim.profile import SIM_VERSION, find_hardware, kv_capacity_blocks, profile_hash

ROUND_ROBIN = PlacementSpec(prefill="round_robin", decode="round_robin", replica="round_robin", sticky=False)
CACHE_AWARE = PlacementSpec(prefill="cache_aware", decode="cache_aware", replica="cache_aware", sticky=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve. ``key`` is its name in files, and in the published figures."""

    key: str
    label: str
    topology: str
    placement: PlacementSpec
    dispatch: str = "await"


REPLICAS_ROUND_ROBIN = Arm(key="8R_round_robin", label="8R, round robin", topology="8R", placement=ROUND_ROBIN)
REPLICAS = Arm(key="8R_cache_aware", label="8R, cache-aware", topology="8R", placement=CACHE_AWARE)
EVEN = Arm(key="4P_4D", label="4P_4D, cache-aware", topology="4P_4D", placement=CACHE_AWARE)
FEW_D = Arm(key="6P_2D", label="6P_2D, cache-aware", topology="6P_2D", placement=CACHE_AWARE)
FEW_D_AT_ONCE = Arm(
    key="6P_2D_fire_and_forget",
    label="6P_2D, fire and forget",
    topology="6P_2D",
    placement=CACHE_AWARE,
    dispatch="fire_and_forget",
)
MAIN_ARMS = (REPLICAS_ROUND_ROBIN, REPLICAS, EVEN, FEW_D, FEW_D_AT_ONCE)

N_GPUS = 8
DECODE_COUNTS = (1, 2, 3, 4)
REUSE_RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
INFLIGHT = (4, 8, 16, 32, 64)
CAPACITY_STEPS = 6
CAPACITY_MOST = 4.0
"""KV capacity is swept from what the longest request needs to this multiple of what the GPU's memory leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all points share. ``max_model_len`` is the longest request, so that capacity can be as scarce as one engine takes."""

    gpu: str
    model: ModelProfile
    workload: WorkloadSpec
    qps: float
    duration_s: float
    timeout_s: float
    seed: int
    max_inflight_sessions: int
    sim: SimSettings

    @property
    def engine(self) -> EngineSettings:
        block_size = 16
        return EngineSettings(
            gpu_memory_utilization_ratio=0.9,
            block_size=block_size,
            max_model_len=-(-self.workload.longest_tokens // block_size) * block_size,
            kv_connector="MooncakeConnector",
            handoff="pull_async",
            kv_lease_s=480.0,
        )

    @property
    def capacity_tokens(self) -> int:
        """KV tokens of one engine, as its memory leaves them.

        Raises:
            SpecError: the longest request does not fit.
        """
        blocks = kv_capacity_blocks(find_hardware(self.gpu), self.model, self.engine, self.sim, 1)
        return blocks * self.engine.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point and what it is for: a part of the study, and the value of what that part sweeps (null in the comparison)."""

    part: str
    arm: Arm
    value: float | None
    point: Point


def cases(setup: Setup, *, with_sweeps: bool) -> list[Case]:
    """All points of the study; a point that several parts need occurs in each, with one ``point_id``.

    Raises:
        SpecError: the longest request does not fit into an engine.
    """
    found = [Case(part="main", arm=arm, value=None, point=_point(setup, arm)) for arm in MAIN_ARMS]
    if with_sweeps:
        found += [*_capacity(setup), *_decode_share(setup), *_reuse(setup), *_inflight(setup)]
    return found


def _capacity(setup: Setup) -> Iterator[Case]:
    for tokens in capacities(setup.capacity_tokens, setup.engine.max_model_len):
        for arm in (REPLICAS, FEW_D, FEW_D_AT_ONCE):
            point = _point(setup, arm, capacity_tokens=None if tokens == setup.capacity_tokens else tokens)
            yield Case(part="kv_capacity", arm=arm, value=float(tokens), point=point)


def capacities(given_tokens: int, least_tokens: int) -> list[int]:
    """Ascending, in whole blocks of 16: from ``least_tokens`` to ``CAPACITY_MOST`` times what is given, which is among them."""
    most = CAPACITY_MOST * given_tokens
    factor = (most / least_tokens) ** (1.0 / (CAPACITY_STEPS - 1))
    steps = [least_tokens, *(int(least_tokens * factor**k) // 16 * 16 for k in range(1, CAPACITY_STEPS))]
    return sorted({*steps, given_tokens})


def _decode_share(setup: Setup) -> Iterator[Case]:
    for n_decode in DECODE_COUNTS:
        topology = f"{N_GPUS - n_decode}P_{n_decode}D"
        for like in (FEW_D, FEW_D_AT_ONCE):
            arm = dataclasses.replace(like, topology=topology)
            yield Case(part="decode_share", arm=arm, value=float(n_decode), point=_point(setup, arm))


def _reuse(setup: Setup) -> Iterator[Case]:
    for ratio in REUSE_RATIOS:
        for arm in (REPLICAS_ROUND_ROBIN, REPLICAS, FEW_D):
            yield Case(part="reuse", arm=arm, value=ratio, point=_point(setup, arm, reuse_ratio=ratio))


def _inflight(setup: Setup) -> Iterator[Case]:
    for n in INFLIGHT:
        for arm in (REPLICAS, FEW_D, FEW_D_AT_ONCE):
            yield Case(part="in_flight", arm=arm, value=float(n), point=_point(setup, arm, inflight=n))


def _point(
    setup: Setup,
    arm: Arm,
    *,
    capacity_tokens: int | None = None,
    reuse_ratio: float = 1.0,
    inflight: int | None = None,
) -> Point:
    traffic = setup.workload.traffic
    assert traffic is not None
    traffic = dataclasses.replace(
        traffic, reuse_ratio=reuse_ratio, max_inflight_sessions=inflight or setup.max_inflight_sessions
    )
    sim = dataclasses.replace(
        setup.sim,
        kv_capacity_tokens=capacity_tokens if capacity_tokens is not None else setup.sim.kv_capacity_tokens,
        profile_hash=profile_hash(setup.gpu, setup.model, setup.sim),
    )
    return Point(
        topology=arm.topology,
        model=setup.model.name,
        gpu=setup.gpu,
        workload=dataclasses.replace(setup.workload, traffic=traffic),
        qps=setup.qps,
        duration_s=setup.duration_s,
        timeout_s=setup.timeout_s,
        think_time_s=0.0,
        seed=setup.seed,
        repeat=0,
        executor=Executor.SIM,
        policy=PolicySpec(),
        placement=arm.placement,
        engine=dataclasses.replace(setup.engine, dispatch=arm.dispatch),
        engine_version=SIM_VERSION,
        sim=sim,
    )


def unique_points(found: Sequence[Case]) -> list[Point]:
    """Each point once, in order."""
    return list({case.point.point_id: case.point for case in found}.values())
