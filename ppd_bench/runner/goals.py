"""What a sweep is for, and the topologies that this needs.

A decision table compares x=0 with x=1 of one layout, so nothing else adds to it. A choice of split compares these with replicas
and hybrids too. The configurations between x=0 and x=1 of a layout without replicas serve neither.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ppd_bench.core.errors import SpecError
from ppd_bench.core.topology import Topology, parse_topology
from ppd_bench.sweep.spec import SweepSpec

Goal = Literal["table", "split"]


def for_goal(spec: SweepSpec, goal: Goal | None) -> SweepSpec:
    """The sweep with the topologies that its goal needs; null keeps all.

    Raises:
        SpecError: none is left, or the policy is not the one that makes arms of topologies.
    """
    if goal is None:
        return spec
    if spec.policy.decider != "node":
        raise SpecError(
            f"command line: --for-{goal} needs --policy node, where x is in the topology's name; this sweep has "
            f"{spec.policy.decider}"
        )
    kept = topologies_for(spec.topologies, goal)
    if not kept:
        raise SpecError(
            f"command line: --for-{goal}: none of {', '.join(spec.topologies)} serves it: a table needs a layout with both an "
            "all-D and an all-pD configuration, such as 2P_2D and 2P_2pD"
        )
    return dataclasses.replace(spec, topologies=kept)


def topologies_for(names: tuple[str, ...], goal: Goal) -> tuple[str, ...]:
    """Those of the names that the goal needs, in their order."""
    found = [parse_topology(name) for name in names]
    arms = {arm.name for x0 in found if _is_x0(x0) and x0.all_local in found for arm in (x0, x0.all_local)}
    return tuple(t.name for t in found if t.name in arms or (goal == "split" and t.n_replica))


def _is_x0(topology: Topology) -> bool:
    return bool(topology.n_decode and topology.n_prefill and not topology.n_decode_local)
