"""What a router spends before a turn's first leg, and what a conversation costs it in memory, with many conversations.

    python tests/benchmarks/bench_decisions.py [TABLE.json] [--sessions 100000]

A turn: recognise (chat of two turns, or a client's id), size, view, decide, and tell the Ledger. Microseconds of CPU, median and
p99 (what other processes take of shared cores is not meant); memory is what Python allocated for the Ledger, the table of
identities and the sizes, by tracemalloc. The last figure is one full pass of the cycle collector over all of it.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppd_bench.core.point import PlacementSpec, PolicySpec
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.stream import CompletionReader, StreamOutcome
from ppd_bench.policy.events import Finished, PrefillDone, Sent
from ppd_bench.policy.ledger import Ledger
from ppd_bench.policy.policy import make_policy
from ppd_bench.policy.query import RouteQuery
from ppd_bench.router.identity import Identifier
from ppd_bench.router.prompt_size import PromptSizer

N_TIMED = 20_000
ANSWER = "An answer of some sixty characters, as a model may well give."


def outcome(prompt_tokens: int) -> StreamOutcome:
    reader = CompletionReader()
    reader.on_head(200, {"content-type": "application/json"}, 0.0)
    usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":15}' % prompt_tokens
    reader.on_body(b'{"choices":[{"index":0,"text":"x","finish_reason":"stop"}],%b}' % usage, 0.0)
    reader.complete = True
    return reader.outcome(sent_s=0.0, end_s=1.0, broken=None)


class Desk:
    """The router's tables, without its sockets."""

    def __init__(self, spec: PolicySpec, layout: str, n_sessions: int) -> None:
        topology = parse_topology(layout)
        self.policy = make_policy(topology, spec, PlacementSpec(), 0)
        self.ledger = Ledger(topology)
        self.identifier = Identifier(max_sessions=2 * n_sessions)
        self.sizer = PromptSizer()
        self.outcomes = {n: outcome(300 * n) for n in (1, 2)}

    def turn(self, session: int, number: int, now_s: float, *, by_id: bool) -> None:
        messages: list[Mapping[str, Any]] = [
            {"role": "user", "content": f"I am user {session}. " + "Tell me more. " * 20}
        ]
        if number == 2:
            messages += [
                {"role": "assistant", "content": ANSWER},
                {"role": "user", "content": "And what follows from that?"},
            ]
        body = {"model": "m", "messages": messages, "max_tokens": 256}
        headers = {"x-session-id": f"session-{session}"} if by_id else {}
        identity = self.identifier.identify(headers=headers, body=body, now_s=now_s)
        size = self.sizer.size(identity, body)
        request_id = f"r-{session}-{number}"
        query = RouteQuery(request_id, identity.session_id, identity.turn, size.context_tokens, size.input_tokens, 256)
        decision = self.policy.decide(query, self.ledger.view(now_s, identity.session_id))
        self.ledger.observe(
            Sent(now_s, request_id, identity.session_id, identity.turn, query.prompt_tokens, 256, decision)
        )
        self.decided_ns = time.thread_time_ns()
        self.ledger.observe(PrefillDone(now_s, request_id))
        self.ledger.observe(Finished(now_s, request_id, True, 15, 300 * number))
        self.identifier.answered(identity, body=body, answer=ANSWER, now_s=now_s)
        self.sizer.answered(identity, body, self.outcomes[number])


def timed(what: str, act: Callable[[int], int]) -> None:
    """Print the median and p99 of ``act(i)``, nanoseconds."""
    spent_us = np.array([act(i) / 1e3 for i in range(N_TIMED)])
    print(f"{what}: median {np.median(spent_us):.1f} us, p99 {np.quantile(spent_us, 0.99):.1f} us", flush=True)


def bench(spec: PolicySpec, layout: str, n_sessions: int, *, by_id: bool) -> None:
    gc.collect()
    tracemalloc.start()
    desk = Desk(spec, layout, n_sessions)
    before = tracemalloc.get_traced_memory()[0]
    for session in range(n_sessions):
        desk.turn(session, 1, session * 1e-3, by_id=by_id)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    name = f"{spec.decider}, {'client ids' if by_id else 'by history'}"
    print(f"{name}: {n_sessions:,} conversations, {used / 1e6:.1f} MB, {used / n_sessions:.0f} bytes each", flush=True)

    def act(i: int) -> int:
        began_ns = time.thread_time_ns()
        desk.turn(i * 7919 % n_sessions, 2, n_sessions * 1e-3 + i * 1e-3, by_id=by_id)
        return desk.decided_ns - began_ns

    gc.disable()  # as a router of one process would be well advised to, or to freeze what it has
    timed(f"{name}: recognise, size and decide with {desk.ledger.n_sessions:,} conversations", act)
    gc.enable()
    began_ns = time.thread_time_ns()
    gc.collect()
    print(f"{name}: a full collection takes {(time.thread_time_ns() - began_ns) / 1e6:.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path)
    parser.add_argument("--sessions", type=int, default=100_000)
    options = parser.parse_args()
    spec, layout = PolicySpec(decider="always_local"), "2P_2D"
    if options.table is not None:
        from ppd_bench.policy.table import DecisionTable

        text = options.table.read_text(encoding="utf-8")
        spec, layout = PolicySpec(decider="table", table_json=text), DecisionTable.from_json(text).domain.layout
    for by_id in (False, True):
        bench(spec, layout, options.sessions, by_id=by_id)


if __name__ == "__main__":
    main()
