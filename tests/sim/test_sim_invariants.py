"""ARCHITECTURE.md's invariants over random points."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_cases import CASE, cases
from sim_points import LLAMA, cluster_of, make_point, rows_of, session, use_blocks, watch, workload

import ppd_bench
from ppd_bench.core.enums import Status
from ppd_bench.core.point import PlacementSpec, PolicySpec, SimSettings
from ppd_bench.core.topology import PAPER_TOPOLOGIES, parse_topology
from ppd_bench.policy.axes import PAPER_AXES
from ppd_bench.policy.deciders import DECIDERS
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.placements import PLACEMENTS
from ppd_bench.policy.policy import make_policy
from ppd_bench.policy.query import RouteQuery, RouterView, SessionView, stable_unit
from ppd_bench.policy.table import Cell, DecisionTable, Domain, Rules, Weights, cell_key
from ppd_bench.sim.cluster import Cluster
from ppd_bench.sim.recording import to_columns
from ppd_bench.sim.simulate import simulate
from ppd_bench.sim.worker import Worker
from ppd_bench.workload.generate import generate_sessions

NO_HEALTH_CHECK = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def _rows(case: CASE) -> list[dict[str, Any]]:
    point, sessions, n_blocks = case
    with pytest.MonkeyPatch.context() as patch:
        use_blocks(patch, n_blocks)
        return rows_of(to_columns(point, cluster_of(point, sessions), keep_gaps=True))


@settings(max_examples=60, **NO_HEALTH_CHECK)
@given(cases(round_numbers=False))
def test_i1_every_scheduled_turn_is_ok_or_failed_and_tokens_are_accounted_for(case: CASE) -> None:
    rows = _rows(case)
    assert [row["request_id"] for row in rows] == [turn.request_id for one in case[1] for turn in one]
    previous: dict[str, str] = {}
    for row in rows:
        assert row["status"] in ("ok", "timeout", "unsent")
        before = previous.get(row["session_id"], "ok")
        assert (row["status"] == "unsent") == (before != "ok")
        previous[row["session_id"]] = row["status"]
        assert (row["generated_tokens"] == row["output_tokens"]) == (row["status"] == "ok")
        assert row["itl_count"] == len(row["itl_s"] or []) == max(0, row["generated_tokens"] - 1)
        assert (row["message"] is None) == (row["status"] == "ok")


@settings(max_examples=60, **NO_HEALTH_CHECK)
@given(cases(round_numbers=False))
def test_i2_recorded_stages_follow_their_causes(case: CASE) -> None:
    timeout_s = case[0].timeout_s
    for row in _rows(case):
        legs = [row["prefill_start_s"], row["prefill_done_s"], row["transfer_start_s"], row["transfer_done_s"]]
        to_client = [row["first_token_s"], row["last_token_s"]]
        paths = [
            [row["scheduled_s"], row["sent_s"], *legs, *to_client],
            [row["sent_s"], *legs[:2], row["decode_start_s"], *to_client, row["end_s"]],
            [row["sent_s"], *legs],  # a push goes on after the client has given up
        ]
        for path in paths:
            known = [instant for instant in path if instant is not None]
            assert known == sorted(known)
        if row["status"] == "ok":
            assert row["end_s"] == row["last_token_s"]
            assert row["end_s"] - row["sent_s"] <= timeout_s + 1e-9
            assert (row["prefill_done_s"] is None) == (row["route"] in ("local", "replica"))
        if row["status"] == "timeout":
            assert row["end_s"] == pytest.approx(row["sent_s"] + timeout_s)
        if row["first_token_s"] is not None:
            assert row["first_token_s"] > row["decode_start_s"]


def _assert_no_worker_idles(worker: Worker) -> None:
    """I9: an idle engine has nothing running, and the head of its queue does not fit."""
    if worker.busy:
        return
    assert not worker.running
    if worker.waiting:
        head = worker.waiting[0]
        assert not head.loaded
        match = worker.pool.match(head.chain, (head.n_tokens - 1) // worker.block_size)
        tokens = head.n_tokens
        if not head.remote:
            tokens = min(tokens, match.n_blocks * worker.block_size + worker.max_num_batched_tokens)
        need = -(-tokens // worker.block_size) - match.n_blocks + match.n_idle
        assert need > worker.pool.available()


@settings(max_examples=60, **NO_HEALTH_CHECK)
@given(cases(round_numbers=False))
def test_i3_i4_i9_after_every_event(case: CASE) -> None:
    """The clock never goes back, every pool's account is right, and no worker is idle with work that it could do."""
    point, sessions, n_blocks = case
    clock = [0.0]

    def observe(cluster: Cluster) -> None:
        assert cluster.now_s >= clock[0]
        clock[0] = cluster.now_s
        for worker in cluster.workers:
            worker.pool.check()
            assert worker.pool.used + worker.pool.cached + worker.pool.free == n_blocks
            _assert_no_worker_idles(worker)

    with pytest.MonkeyPatch.context() as patch:
        use_blocks(patch, n_blocks)
        watch(patch, observe)
        cluster_of(point, sessions)
    assert clock[0] > 0.0


PROGRAM = """
import hashlib, sys
sys.path[:0] = sys.argv[1:]
from test_sim_invariants import hash_of_some_points
print(hash_of_some_points())
"""


def hash_of_some_points() -> str:
    """A hash of the records of three points, for comparison between processes."""
    digest = hashlib.sha256()
    for topology, handoff, decode in (
        ("2P_1D_1pD", "push_blocking", "least_inflight"),
        ("1R_1P_2D", "pull_async", "cache_aware"),
        ("4R", "push_blocking", "least_kv_usage"),
    ):
        work = workload((512, 60), (128, 90), (64, 30))
        placement = PlacementSpec(decode=decode, replica=decode, sticky=False)
        point = make_point(topology, work, qps=6.0, timeout_s=6.0, placement=placement, handoff=handoff)
        turns = generate_sessions(work, qps=6.0, duration_s=4.0, think_time_s=0.1, seed=3, repeat=0)
        digest.update(json.dumps(simulate(point, turns, LLAMA)).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("hash_seed", ["0", "4321"])
def test_i5_the_same_points_give_the_same_bytes_in_a_fresh_process(hash_seed: str) -> None:
    paths = [str(Path(ppd_bench.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    program = [sys.executable, "-c", PROGRAM, *paths]
    child = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert child.stdout.strip() == hash_of_some_points()


def test_i6_no_policy_is_told_the_true_output_length() -> None:
    fields = {name for kind in (RouteQuery, RouterView, SessionView) for name in kind._fields}
    assert "max_output_tokens" in fields
    assert not {name for name in fields if "output" in name} - {"max_output_tokens", "mean_output_tokens"}


@settings(max_examples=30, **NO_HEALTH_CHECK)
@given(cases(round_numbers=False), st.integers(0, 9), st.integers(0, 2), st.integers(1, 200))
def test_i6_what_a_turn_will_generate_changes_nothing_before_it_has_ended(
    case: CASE, which: int, turn: int, output_tokens: int
) -> None:
    point, sessions, n_blocks = case
    chosen = sessions[which % len(sessions)]
    k = turn % len(chosen)
    spare = n_blocks * point.engine.block_size - chosen[-1].prompt_tokens - chosen[-1].output_tokens
    new_output = min(output_tokens, chosen[k].output_tokens + spare)
    changed = list(chosen)
    changed[k] = dataclasses.replace(chosen[k], output_tokens=new_output)
    for later in range(k + 1, len(chosen)):
        context = chosen[later].context_tokens + new_output - chosen[k].output_tokens
        changed[later] = dataclasses.replace(chosen[later], context_tokens=context)
    others = [tuple(changed) if one is chosen else one for one in sessions]
    with pytest.MonkeyPatch.context() as patch:
        use_blocks(patch, n_blocks)
        one, two = cluster_of(point, sessions), cluster_of(point, others)
    ends = [t.end_s for c in (one, two) for t in c.trips if t.turn.request_id == chosen[k].request_id and t.end_s >= 0]
    until_s = min(ends, default=float("inf"))
    assert _decisions(one, until_s) == _decisions(two, until_s)


def _decisions(cluster: Cluster, until_s: float) -> list[Any]:
    assert cluster.log is not None
    return [entry for entry in cluster.log if type(entry) is tuple and entry[1] < until_s]


def _table_json() -> str:
    """A table whose decisions differ from cell to cell without a pattern."""
    cells = tuple(
        Cell(
            key=cell_key(context.name, kind.name, qps),
            context=context.name,
            type=kind.name,
            qps=qps,
            workloads=("test",),
            decision="local" if stable_unit(context.name, kind.name, qps) < 0.5 else "pd",
            evidence="simulated",
            rule="equation1",
            score=0.0,
            delta_ttft=0.0,
            delta_tpot=0.0,
            ttft_x0_s=1.0,
            ttft_x1_s=1.0,
            tpot_x0_s=1.0,
            tpot_x1_s=1.0,
            success_x0_ratio=1.0,
            success_x1_ratio=1.0,
            n_pairs=1,
        )
        for context, kind, qps in product(PAPER_AXES.contexts, PAPER_AXES.types, PAPER_AXES.qps)
    )
    domain = Domain(
        model="llama-3.1-8b",
        gpu="h100-80g",
        layout="2P_2D",
        baseline="2P_2D",
        candidate="2P_2pD",
        executor="simulated",
        engine_version="sim",
        kv_connector="P2pNcclConnector",
        handoff="push_blocking",
        timeout_s=30.0,
    )
    return DecisionTable(
        domain=domain,
        axes=PAPER_AXES,
        weights=Weights(w_ttft=1.0, w_tpot=1.0),
        rules=Rules(success_bound=0.95, fallback="pd", max_unknown_ratio=0.5),
        inputs_hash="0" * 16,
        cells=cells,
    ).to_json()


PARAMS = {"fraction": (("x", 0.5),), "threshold": (("max_uncached_tokens", 40),)}


@pytest.mark.parametrize("decider", DECIDERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("sticky", [True, False])
def test_i7_a_log_replayed_through_a_fresh_ledger_and_policy_gives_its_decisions(
    decider: str, placement: str, sticky: bool
) -> None:
    policy = PolicySpec(
        decider=decider, params=PARAMS.get(decider, ()), table_json=_table_json() if decider == "table" else None
    )
    spec = PlacementSpec(prefill=placement, decode=placement, replica=placement, sticky=sticky)
    work = workload((100, 20), (30, 40), (60, 10))
    sim = SimSettings(snapshot_interval_s=0.2)
    point = make_point("1R_2P_1D_2pD", work, timeout_s=3.0, policy=policy, placement=spec, sim=sim, seed=5)
    sessions = list(generate_sessions(work, qps=8.0, duration_s=3.0, think_time_s=0.2, seed=1, repeat=0))
    sessions.append(session("lost", 1.0, (3000, 900), (10, 10)))  # its first turn times out
    log = cluster_of(point, sessions).log
    assert log is not None
    topology = parse_topology(point.topology)
    ledger, fresh = Ledger(topology), make_policy(topology, policy, spec, point.decision_seed)
    n_decisions = 0
    for entry in log:
        if type(entry) is tuple:  # events are named tuples
            query, now_s, decision = entry
            assert fresh.decide(query, ledger.view(now_s, query.session_id)) == decision
            n_decisions += 1
        else:
            ledger.observe(entry)
    n_turns = sum(trip.status is not Status.UNSENT for trip in cluster_of(point, sessions).trips)
    assert n_decisions == n_turns >= 40


def test_i7_the_policies_of_that_test_take_every_route() -> None:
    """Else it would prove little: with ``node`` and not sticky there are replica, pd and local turns."""
    work = workload((100, 20), (30, 40), (60, 10))
    point = make_point("1R_2P_1D_2pD", work, timeout_s=3.0, seed=5)
    sessions = generate_sessions(work, qps=8.0, duration_s=3.0, think_time_s=0.2, seed=1, repeat=0)
    assert set(simulate(point, sessions, LLAMA)["route"]) == {"replica", "pd", "local"}


def test_i8_every_configuration_sees_the_same_turns() -> None:
    work = workload((512, 60), (128, 90))
    sessions = generate_sessions(work, qps=4.0, duration_s=3.0, think_time_s=0.0, seed=0, repeat=0)
    names = ("request_id", "session_id", "turn", "context_tokens", "input_tokens", "output_tokens", "max_output_tokens")
    seen = []
    for topology in PAPER_TOPOLOGIES:
        columns = simulate(make_point(topology, work, qps=4.0), sessions, LLAMA)
        firsts = [t for t, turn in zip(columns["scheduled_s"], columns["turn"], strict=True) if turn == 1]
        seen.append(([columns[name] for name in names], firsts))
    assert len(seen[0][1]) >= 5
    assert all(one == two for one, two in pairwise(seen))


def test_a_run_is_not_changed_by_the_run_before_it() -> None:
    """Cost models cache, ids count: nothing of that may leak into the next point of the same process."""
    assert hash_of_some_points() == hash_of_some_points()
