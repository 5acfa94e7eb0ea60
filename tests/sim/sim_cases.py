"""Random points for property tests: every topology, hand-off, limit and shortage, with time-outs at every phase."""

from __future__ import annotations

from hypothesis import strategies as st
from sim_points import make_point, session, workload

from ppd_bench.core.point import PlacementSpec, Point, PolicySpec, SimSettings
from ppd_bench.core.workload import Session

TOPOLOGIES = ["1R", "4R", "1P_1D", "1P_3D", "3P_1D", "1P_2pD", "2P_1D_1pD", "1R_1P_2pD"]
SPREADING = ["round_robin", "least_inflight", "least_tokens", "least_kv_usage", "cache_aware"]
CASE = tuple[Point, list[Session], int]


@st.composite
def cases(draw: st.DrawFn, round_numbers: bool) -> CASE:
    """A point, its conversations, and KV blocks per engine, from ample to so few that preemption is the rule.

    ``round_numbers``: every duration is a multiple of 1/64 s, so that events fall on the same instant all the time.
    """
    n_blocks = draw(st.sampled_from([12, 20, 40, 80, 2000]))
    block_size = draw(st.sampled_from([4, 16]))
    sessions = draw(_sessions(n_blocks * block_size, round_numbers))
    quick = {"step_overhead_s": 0.0, "sequence_overhead_s": 0.0, "router_overhead_s": 0.0}
    sim = SimSettings(
        snapshot_interval_s=draw(st.sampled_from([0.125, 0.25])),
        snapshot_delay_s=draw(st.sampled_from([0.0, 0.125])),
        receiver_cost_s=draw(st.sampled_from([0.0, 0.125])),
        visit_overhead_s=draw(st.sampled_from([0.0, 0.015625, 0.25])),
        **(quick if round_numbers else {}),
    )
    placement = PlacementSpec(
        prefill=draw(st.sampled_from(SPREADING)),
        decode=draw(st.sampled_from(SPREADING)),
        replica=draw(st.sampled_from(SPREADING)),
        sticky=draw(st.booleans()),
    )
    point = make_point(
        draw(st.sampled_from(TOPOLOGIES)),
        workload((1, 1)),
        timeout_s=draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 30.0])),
        policy=PolicySpec(decider=draw(st.sampled_from(["node", "always_pd", "always_local"]))),
        placement=placement,
        sim=sim,
        handoff=draw(st.sampled_from(["push_blocking", "pull_async"])),
        max_model_len=100_000,
        block_size=block_size,
        prefix_caching=draw(st.booleans()),
        max_num_seqs=draw(st.sampled_from([1, 3, 64])),
        max_num_batched_tokens=draw(st.sampled_from([64, 128, 2048])),
        kv_link_bytes_per_s=draw(st.sampled_from([None, 1e8, 2.0**27])),
        kv_link_latency_s=draw(st.sampled_from([0.0, 0.0005, 0.25])),
        kv_lease_s=draw(st.sampled_from([0.125, 0.5, 30.0])),
    )
    return point, sessions, n_blocks


@st.composite
def _sessions(draw: st.DrawFn, max_tokens: int, round_numbers: bool) -> list[Session]:
    instants = st.integers(0, 12).map(lambda k: k / 8) if round_numbers else st.floats(0.0, 2.0)
    found = []
    for i in range(draw(st.integers(1, 10))):
        n_turns = draw(st.integers(1, 3))
        part = max(1, max_tokens // (2 * n_turns))
        lengths = st.tuples(st.integers(1, part), st.integers(1, min(150, part)))
        turns = draw(st.lists(lengths, min_size=n_turns, max_size=n_turns))
        found.append(session(f"s{i}", draw(instants), *turns, think_time_s=draw(st.sampled_from([0.0, 0.25]))))
    return found
