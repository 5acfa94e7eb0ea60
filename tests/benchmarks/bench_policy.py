"""What a decision costs: table look-up, and view plus decide plus observe of a whole turn, with many live conversations.

    python tests/benchmarks/bench_policy.py [TABLE.json] [--sessions 100000]

Without a table only the policies that need none are timed. Microseconds, median and p99.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import parse_topology
from ppd_bench.policy.events import Finished, PrefillDone, Sent
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import Policy, make_policy
from ppd_bench.policy.query import RouteQuery
from ppd_bench.policy.table import DecisionTable

N_TIMED = 20_000


def timed(what: str, act: Callable[[int], None]) -> None:
    """Print the median and p99 of ``act(i)``."""
    spent_us = np.empty(N_TIMED)
    for i in range(N_TIMED):
        began = time.perf_counter_ns()
        act(i)
        spent_us[i] = (time.perf_counter_ns() - began) / 1e3
    print(f"{what}: median {np.median(spent_us):.2f} us, p99 {np.quantile(spent_us, 0.99):.2f} us", flush=True)


def turn(policy: Policy, ledger: Ledger, session: int, number: int, now_s: float) -> None:
    """One whole turn of a conversation, as an executor would report it."""
    request_id, session_id = f"s{session}.t{number}", f"s{session}"
    query = RouteQuery(
        request_id=request_id, session_id=session_id, turn=number, context_tokens=1152 * (number - 1), input_tokens=256,
        max_output_tokens=2048,
    )  # fmt: skip
    decision = policy.decide(query, ledger.view(now_s, session_id))
    ledger.observe(Sent(now_s, request_id, session_id, number, query.prompt_tokens, 2048, decision))
    ledger.observe(PrefillDone(now_s + 0.02, request_id))
    ledger.observe(Finished(now_s + 1.0, request_id, True, 128))


def bench_policy(spec: PolicySpec, placement: PlacementSpec, n_sessions: int, layout: str) -> None:
    topology = parse_topology(layout)
    policy, ledger = make_policy(topology, spec, placement, 0), Ledger(topology)
    for session in range(n_sessions):
        turn(policy, ledger, session, 1, session * 1e-3)
    name = f"{spec.decider}, {placement.decode}: a whole turn with {ledger.n_sessions:,} conversations"
    timed(name, lambda i: turn(policy, ledger, i * 7919 % n_sessions, 2, n_sessions * 1e-3 + i * 1e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path)
    parser.add_argument("--sessions", type=int, default=100_000)
    options = parser.parse_args()
    bench_policy(PolicySpec(), PlacementSpec(), options.sessions, "2P_2pD")
    cache_aware = PlacementSpec(decode="cache_aware", replica="cache_aware", sticky=False)
    bench_policy(PolicySpec(), cache_aware, options.sessions, "2P_2pD")
    if options.table:
        text = options.table.read_text(encoding="utf-8")
        table = DecisionTable.from_json(text)
        lengths = np.random.default_rng(0).integers(1, 5000, size=(N_TIMED, 3)).tolist()
        timed("table look-up, new lengths every time", lambda i: _look_up(table, lengths[i]))
        timed("table look-up, repeating lengths", lambda i: _look_up(table, lengths[i % 500]))
        bench_policy(
            PolicySpec(decider="table", table_json=text), PlacementSpec(), options.sessions, table.domain.layout
        )


def _look_up(table: DecisionTable, lengths: list[int]) -> None:
    table.lookup(context_tokens=lengths[0], input_tokens=lengths[1], output_tokens=lengths[2], qps=8.0)


if __name__ == "__main__":
    main()
