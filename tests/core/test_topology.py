"""Topologies are values: names parse, format and lay out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.errors import SpecError
from ppd_bench.core.topology import PAPER_TOPOLOGIES, Topology, parse_topology

counts = st.integers(0, 9)


@given(counts, counts, counts, counts, st.integers(1, 8))
def test_parse_and_format_are_inverse(r: int, p: int, d: int, local: int, tp: int) -> None:
    try:
        topology = Topology(n_replica=r, n_prefill=p, n_decode=d, n_decode_local=local, tensor_parallel_size=tp)
    except SpecError:
        assert bool(p) != bool(d + local) or r + p + d + local == 0
        return
    assert parse_topology(topology.name) == topology
    assert topology.n_gpus == (r + p + d + local) * tp


@pytest.mark.parametrize(
    "name",
    ["", "4", "R", "0R", "04R", "4r", "3D_1P", "1P_1P_2D", "1P", "3D", "1P_3D@", "1P_3D@tp0", "1P_3D@tp1", "1P_3D@TP2",
     "1P-3D", " 4R", "4R ", "1pD_1P", "1D_1pD", "4R_", "1P_3D@tp2@tp2", "1P__3D", "-1R"],
)  # fmt: skip
def test_names_outside_the_grammar_are_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(SpecError, match=r"allowed|canonical|lacks"):
        parse_topology(name)


def test_a_wrong_order_is_answered_with_the_canonical_name() -> None:
    with pytest.raises(SpecError, match="write '1P_3D'"):
        parse_topology("3D_1P")


def test_the_papers_17_configurations_need_7_layouts() -> None:
    topologies = [parse_topology(name) for name in PAPER_TOPOLOGIES]
    assert len(set(PAPER_TOPOLOGIES)) == 17
    assert all(t.n_gpus == 4 for t in topologies)
    assert {t.layout.name for t in topologies} == {
        "4R", "1P_3D", "2P_2D", "3P_1D", "1R_1P_2D", "1R_2P_1D", "2R_1P_1D",
    }  # fmt: skip
    categories = [t.category for t in topologies]
    assert [categories.count(c) for c in ("replica", "x0", "x1", "partial", "hybrid")] == [1, 3, 3, 3, 7]


def test_d_and_pd_are_the_same_processes() -> None:
    x0, mixed = parse_topology("1P_3D"), parse_topology("1P_1D_2pD")
    assert [w.worker_id for w in x0.workers] == [w.worker_id for w in mixed.workers] == ["P0", "D0", "D1", "D2"]
    assert [w.role for w in mixed.workers] == ["P", "D", "pD", "pD"]
    assert mixed.node_x_ratio == pytest.approx(2 / 3)
    assert x0.node_x_ratio == 0.0
    assert parse_topology("4R").node_x_ratio is None


def test_tensor_parallel_workers_get_consecutive_gpus() -> None:
    workers = parse_topology("1R_1P_1D@tp2").workers
    assert [w.gpu_ids for w in workers] == [(0, 1), (2, 3), (4, 5)]
