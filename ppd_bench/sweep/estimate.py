"""What a sweep would cost, before anything runs. Expectations from stated assumptions, not measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppd_bench.core.point import Point
from ppd_bench.core.topology import parse_topology

LAUNCH_S = 120.0
"""Start of all engines of one layout: process, weights from a local disk, graph capture and a first real generation."""

RESET_S = 3.0
"""Between two points of a layout: let engines become idle, empty their prefix caches, read their counters."""

DRAIN_TPOT_S = 0.015
"""Seconds per generated token while the last conversation of a point finishes; its prefills are counted as nothing."""

ASSUMPTIONS = (
    f"{LAUNCH_S:g} s to launch a layout (LAUNCH_S)",
    f"{RESET_S:g} s to reset engines between points (RESET_S)",
    f"{DRAIN_TPOT_S:g} s per token for the last conversation of a point to finish, at most its timeouts (DRAIN_TPOT_S)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Counts of a sweep, and its expected cost live and simulated.

    ``expected_conversations`` and ``expected_turns`` are means of the arrival process. ``wall_s`` and ``gpu_seconds``
    are for a live run, one layout at a time; a layout is charged for the GPUs it uses. ``assumptions`` are to be shown.
    """

    n_points: int
    n_configurations: int
    n_layouts: int
    layouts: tuple[str, ...]
    n_workloads: int
    n_qps: int
    n_repeats: int
    expected_conversations: float
    expected_turns: float
    wall_s: float
    gpu_seconds: float
    simulated_wall_s: float
    assumptions: tuple[str, ...]


def estimate(points: Sequence[Point], *, simulated_turns_per_cpu_s: float, n_processes: int = 1) -> Estimate:
    """Add up the points; ``simulated_turns_per_cpu_s`` is the simulator's stated speed on one core."""
    n_gpus = {p.topology: parse_topology(p.topology).n_gpus for p in points}
    layouts = {parse_topology(name).layout.name: parse_topology(name).n_gpus for name in n_gpus}
    conversations = [point.qps * point.duration_s for point in points]
    turns = sum(n * point.workload.turns_per_session for n, point in zip(conversations, points, strict=True))
    point_walls_s = [(point, point.duration_s + drain_s(point) + RESET_S) for point in points]
    return Estimate(
        n_points=len(points),
        n_configurations=len(n_gpus),
        n_layouts=len(layouts),
        layouts=tuple(layouts),
        n_workloads=len({point.workload for point in points}),
        n_qps=len({point.qps for point in points}),
        n_repeats=len({point.repeat for point in points}),
        expected_conversations=sum(conversations),
        expected_turns=turns,
        wall_s=len(layouts) * LAUNCH_S + sum(wall_s for _, wall_s in point_walls_s),
        gpu_seconds=LAUNCH_S * sum(layouts.values()) + sum(n_gpus[p.topology] * wall_s for p, wall_s in point_walls_s),
        simulated_wall_s=turns / (simulated_turns_per_cpu_s * n_processes),
        assumptions=ASSUMPTIONS,
    )


def point_gpu_seconds(point: Point) -> float:
    """Expected cost of one live point, without launches."""
    return parse_topology(point.topology).n_gpus * (point.duration_s + drain_s(point) + RESET_S)


def drain_s(point: Point) -> float:
    """Expected seconds from the end of arrivals to the last token: the life of one conversation."""
    workload = point.workload
    if workload.traffic is None:
        generation_s = sum(min(turn.output_tokens * DRAIN_TPOT_S, point.timeout_s) for turn in workload.turns)
    else:
        generation_s = workload.output_tokens_per_session * DRAIN_TPOT_S
    return generation_s + point.think_time_s * (workload.turns_per_session - 1.0)
