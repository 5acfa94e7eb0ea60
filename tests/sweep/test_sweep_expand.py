"""Points: complete, unique, in launch order, and paired by what arms share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from ppd_bench.core.enums import Executor
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.topology import PAPER_TOPOLOGIES, parse_topology
from ppd_bench.core.workload import TurnLengths
from ppd_bench.sweep.expand import by_layout, expand
from ppd_bench.sweep.spec import SweepSpec
from ppd_bench.workload.generate import generate_sessions

Load = Callable[..., SweepSpec]

PINNED = ("13035d18215f30b9", "2839df54176c0342")


def points_of(spec: SweepSpec, executor: Executor = Executor.SIM) -> tuple[Point, ...]:
    return expand(spec, executor=executor, engine_version="sim-1", profile_hash="abc")


@pytest.fixture
def paper_points(bundled: Load) -> tuple[Point, ...]:
    return points_of(bundled("paper"))


def test_the_papers_sweep_has_3060_points_with_ids_of_their_own(paper_points: tuple[Point, ...]) -> None:
    assert len(paper_points) == 17 * 18 * 10 == 3060
    assert len({point.point_id for point in paper_points}) == 3060


def test_points_of_a_layout_and_of_a_topology_stand_together(paper_points: tuple[Point, ...]) -> None:
    layouts = [name for name, _ in itertools.groupby(parse_topology(p.topology).layout.name for p in paper_points)]
    assert layouts == ["4R", "1P_3D", "2P_2D", "3P_1D", "1R_1P_2D", "1R_2P_1D", "2R_1P_1D"]
    topologies = [name for name, _ in itertools.groupby(p.topology for p in paper_points)]
    assert sorted(topologies) == sorted(PAPER_TOPOLOGIES)


def test_layouts_keep_the_order_of_the_file() -> None:
    assert by_layout(("1P_2D", "4R", "1P_2pD", "1P_1D_1pD")) == ("1P_2D", "1P_2pD", "1P_1D_1pD", "4R")


def test_repeats_are_counted_from_zero_and_go_round_all_cells(load: Load) -> None:
    points = points_of(load(repeats="2", topologies="[4R]", workloads="[small_tiny, large_tiny]", qps="[1, 2]"))
    assert [(p.repeat, p.workload.name, p.qps) for p in points] == [
        (0, "small_tiny", 1.0), (0, "small_tiny", 2.0), (0, "large_tiny", 1.0), (0, "large_tiny", 2.0),
        (1, "small_tiny", 1.0), (1, "small_tiny", 2.0), (1, "large_tiny", 1.0), (1, "large_tiny", 2.0),
    ]  # fmt: skip
    assert len({p.point_id for p in points}) == 8


def test_more_repeats_keep_the_points_that_were_there(load: Load) -> None:
    few, many = (points_of(load(repeats=n)) for n in ("1", "3"))
    assert {p.point_id for p in few} < {p.point_id for p in many}


def test_expansion_is_reproducible_down_to_the_id(load: Load) -> None:
    """Pinned: a change of identity makes every existing run folder unusable and must be meant."""
    first = points_of(load(), Executor.LIVE)[0]
    assert (first.topology, first.qps) == ("4R", 1.0)
    assert (first.point_id, first.pair_key) == PINNED
    assert points_of(load()) == points_of(load())


def test_both_arms_of_a_pair_have_one_pair_key_and_the_same_turns(paper_points: tuple[Point, ...]) -> None:
    cells: dict[tuple[str, float], set[str]] = {}
    for point in paper_points:
        cells.setdefault((point.workload.name, point.qps), set()).add(point.pair_key)
    assert len(cells) == 180
    assert all(len(keys) == 1 for keys in cells.values())
    assert len(set().union(*cells.values())) == 180
    cell = [p for p in paper_points if (p.workload.name, p.qps) == ("large_tiny", 2.0)]
    drawn = {
        generate_sessions(
            p.workload, qps=p.qps, duration_s=p.duration_s, think_time_s=p.think_time_s, seed=p.seed, repeat=p.repeat
        )
        for p in cell
    }
    assert len(cell) == 17
    assert len(drawn) == 1


def test_simulated_and_live_points_pair_and_only_simulated_ones_carry_the_profile(load: Load) -> None:
    sim, live = points_of(load())[0], points_of(load(), Executor.LIVE)[0]
    assert sim.sim is not None
    assert sim.sim.profile_hash == "abc"
    assert live.sim is None
    assert sim.pair_key == live.pair_key
    assert sim.point_id != live.point_id


CHANGES = {
    "topology": "1P_3D",
    "model": "other",
    "gpu": "h200",
    "qps": 3.0,
    "duration_s": 11.0,
    "timeout_s": 31.0,
    "think_time_s": 1.0,
    "seed": 1,
    "repeat": 1,
    "executor": Executor.LIVE,
    "policy": PolicySpec(decider="always_pd"),
    "placement": PlacementSpec(sticky=False),
    "engine": EngineSettings(block_size=32),
    "engine_version": "sim-2",
    "sim": SimSettings(receiver_cost_s=0.1),
}
SHARED_BY_ARMS = {"topology", "policy", "placement", "executor", "engine_version", "sim"}


def test_a_points_id_changes_with_every_field_and_its_pair_key_with_what_arms_share(load: Load) -> None:
    point = points_of(load())[0]
    turns = (*point.workload.turns, TurnLengths(input_tokens=1, output_tokens=1))
    changes = {**CHANGES, "workload": dataclasses.replace(point.workload, turns=turns)}
    assert set(changes) == {field.name for field in dataclasses.fields(Point)}
    ids = {point.point_id}
    for name, value in changes.items():
        other = dataclasses.replace(point, **{name: value})
        assert other.point_id not in ids, name
        assert (other.pair_key == point.pair_key) == (name in SHARED_BY_ARMS), name
        ids.add(other.point_id)
