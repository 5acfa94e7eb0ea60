"""Many conversations through a router whose clients hang up and whose engines fail in every way, while tables change under it.

    python tests/router/soak.py [--requests 20000] [--seed 0]

What must hold in the end: every request got its whole answer once, or was told that it did not; no conversation was decoded on
two engines at a time; all counters are back at zero; engines hold nothing; the log has every turn; memory is flat.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fakes")]

import orjson  # noqa: E402
import uvloop  # noqa: E402
from fake_engine import Behaviour, FakeEngine, answer_ids  # noqa: E402
from router_cases import Rig, routing, until  # noqa: E402
from router_tables import a_table  # noqa: E402

from ppd_bench.engine.client import Client, Limits  # noqa: E402
from ppd_bench.engine.stream import Failure, StreamOutcome  # noqa: E402

TOPOLOGY = "2P_3D"
LEASE_S = 3.0
SETTINGS = {
    "connect_s": 1.0, "prefill_s": 2.0, "first_byte_s": 2.0, "idle_s": 0.6, "answer_s": 4.0, "n_retries": 2, "max_sessions": 1000,
}  # fmt: skip
TOLD = frozenset({Failure.HTTP, Failure.ERROR_EVENT})
"""How a client may be told that it gets no answer; anything else is a silent end."""

FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 500}, {"status": 503}, {"die_after": 0}, {"die_after": 2}, {"error_after": 1}, {"cut_after": 2},
    {"stall_after": 1}, {"hang": True}, {"drop_params": ("remote_host",)}, {"error_in_200": True}, {"prefill_s": 0.2},
    {"stop_short": 1},
)  # fmt: skip


@dataclass
class Tally:
    """What happened, and every breach of what must hold."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)
    n_sent: int = 0
    n_tables: int = 0
    rss_mib: list[float] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    n_looks: int = 0
    most_open: int = 0


def healthy() -> Behaviour:
    return Behaviour(prefill_s=0.001, step_s=0.001, lease_s=LEASE_S)


def rss_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Soak:
    """One run over a rig."""

    def __init__(self, rig: Rig, table: Path, *, n_requests: int, n_clients: int, seed: int) -> None:
        self.tally = Tally()
        self._rig = rig
        self._table = table
        self._n_requests = n_requests
        self._n_clients = n_clients
        self._random = random.Random(seed)
        self._n_conversations = 0

    async def run(self) -> Tally:
        chaos = [
            asyncio.ensure_future(work())
            for work in (self._break_things, self._break_things, self._change_tables, self._look, self._forget)
        ]
        async with Client(perf_counter) as client:
            await asyncio.gather(*(self._converse(client) for _ in range(self._n_clients)))
        for task in chaos:
            task.cancel()
        found = await asyncio.gather(*chaos, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                raise error
        await self._settle()
        return self.tally

    # -- clients -----------------------------------------------------------------------------------------------------

    async def _converse(self, client: Client) -> None:
        """Conversation after conversation, each until it ends, fails or its client hangs up."""
        while self.tally.n_sent < self._n_requests:
            self._n_conversations += 1
            number = self._n_conversations
            prompt = [number % 1000, number // 1000, *range(self._random.randrange(10, 60))]
            for _ in range(self._random.randrange(1, 6)):
                answered = await self._turn(client, number, prompt)
                if answered is None:
                    break
                prompt = [*prompt, *answered, *range(self._random.randrange(3, 30))]

    async def _turn(self, client: Client, conversation: int, prompt: list[int]) -> list[int] | None:
        """The answer's tokens; null where there is none."""
        self.tally.n_sent += 1
        n = self._random.randrange(1, 12)
        stream = self._random.random() < 0.7
        body = {"model": "fake", "prompt": prompt, "max_tokens": n, "stream": stream, "return_token_ids": True}
        self.tally.live[conversation] = len(prompt)
        ask = asyncio.ensure_future(
            client.post(
                "127.0.0.1",
                self._rig.running.port,
                orjson.dumps(body),
                request_id=f"c{conversation}",
                headers={"X-Session-Id": f"soak-{conversation}"} if conversation % 3 else {},
                limits=Limits(deadline_s=perf_counter() + 30.0),
            )
        )
        if self._random.random() < 0.08:
            return await self._hang_up(ask, conversation)
        outcome = await ask
        del self.tally.live[conversation]
        return self._judge(outcome, answer_ids(prompt, n))

    async def _hang_up(self, ask: asyncio.Future[StreamOutcome], conversation: int) -> None:
        done, _ = await asyncio.wait([ask], timeout=self._random.random() * 0.03)
        del self.tally.live[conversation]
        self.tally.outcomes["client hung up" if not done else "client got it before"] += 1
        if not done:
            ask.cancel()

    def _judge(self, outcome: StreamOutcome, expected: list[int]) -> list[int] | None:
        found = list(outcome.token_ids)
        if outcome.ok:
            self.tally.outcomes["ok"] += 1
            if found != expected[: len(found)] or len(found) < len(expected) - 1:
                self.tally.breaches.append(f"answer {found} instead of {expected}")
            return found
        self.tally.outcomes[f"told: {outcome.failure} {outcome.http_status}"] += 1
        if outcome.failure not in TOLD and not (outcome.failure is Failure.EMPTY and outcome.finish_reason):
            self.tally.breaches.append(f"a silent end: {outcome.failure}: {outcome.message}")
        if found != expected[: len(found)]:
            self.tally.breaches.append(
                f"a broken answer that is not the beginning of the right one: {found} of {expected}"
            )
        return None

    # -- chaos -------------------------------------------------------------------------------------------------------

    async def _break_things(self) -> None:
        while True:
            await asyncio.sleep(self._random.random() * 0.15)
            engine = self._random.choice(self._rig.engines)
            if self._random.random() < 0.06:
                await self._restart(engine)
                continue
            fault = self._random.choice(FAULTS)
            self.tally.faults[", ".join(f"{k}={v}" for k, v in fault.items())] += 1
            for name, value in fault.items():
                setattr(engine.behaviour, name, value)
            await asyncio.sleep(self._random.random() * 0.12)
            engine.behaviour = healthy()

    async def _restart(self, engine: FakeEngine) -> None:
        self.tally.faults["restart"] += 1
        port = engine.port
        await engine.stop()
        engine.running.clear()
        await asyncio.sleep(self._random.random() * 0.4)
        while True:
            try:
                await engine.start(port)
                return
            except OSError:  # some connection has the port meanwhile
                await asyncio.sleep(0.2)

    async def _change_tables(self) -> None:
        while True:
            await asyncio.sleep(1.0 + self._random.random())
            self.tally.n_tables += 1
            text = self._random.choice([a_table("local", layout=TOPOLOGY), a_table("pd", layout=TOPOLOGY), "{"])
            new = self._table.with_suffix(".new")
            new.write_text(text)
            new.replace(self._table)

    async def _look(self) -> None:
        """A conversation that a client waits for is decoded on one engine at a time."""
        while True:
            await asyncio.sleep(0.004)
            self.tally.n_looks += 1
            self.tally.most_open = max(self.tally.most_open, len(self._rig.state.open_turns))
            homes: dict[tuple[int, int], set[str]] = {}
            for engine in self._rig.named("D0", "D1", "D2"):
                for job in engine.running:
                    homes.setdefault((job.prompt[0] + 1000 * job.prompt[1], len(job.prompt)), set()).add(engine.name)
            for (conversation, length), where in homes.items():
                if len(where) > 1 and self.tally.live.get(conversation) == length:
                    self.tally.breaches.append(f"conversation {conversation} on {sorted(where)} at a time")

    async def _forget(self) -> None:
        """What fakes and the rig write down for tests would look like a leak."""
        marks = [self._n_requests // 4, self._n_requests // 2, 3 * self._n_requests // 4]
        while True:
            await asyncio.sleep(0.1)
            for engine in self._rig.engines:
                engine.bodies.clear()
                engine.request_ids.clear()
                engine.headers.clear()
                engine.cached.clear() if len(engine.cached) > 5_000 else None
            self._rig.entries.clear()
            if marks and self.tally.n_sent >= marks[0]:
                marks.pop(0)
                self.tally.rss_mib.append(rss_mib())

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        rig, state = self._rig, self._rig.state
        breaches = self.tally.breaches
        for engine in rig.engines:
            engine.behaviour = healthy()
        self.tally.rss_mib.append(rss_mib())
        try:
            await until(
                lambda: not any(engine.running or engine.pinned for engine in rig.engines), within_s=LEASE_S + 3.0
            )
        except AssertionError:
            held = {engine.name: (len(engine.running), len(engine.pinned)) for engine in rig.engines}
            breaches.append(f"engines still hold something (running, pinned): {held}")
        view = state.ledger.view(state.now_s(), "")
        if any(view.n_inflight) or any(view.inflight_tokens) or state.open_turns:
            breaches.append(
                f"counters: {view.n_inflight} {view.inflight_tokens}, open turns {sorted(state.open_turns)[:5]}"
            )
        if rig.running.server.n_open_requests:
            breaches.append(f"{rig.running.server.n_open_requests} requests are still open")
        assert state.log is not None
        log = state.log
        await until(lambda: log.n_written + log.n_dropped >= state.n_requests, within_s=5.0)
        if log.n_dropped or log.n_written != state.n_requests + 1:  # and one line for the first table
            n_tables = state.policies.n_reloads + 1
            if log.n_dropped or log.n_written != state.n_requests + n_tables:
                breaches.append(f"log: {log.n_written} lines, {log.n_dropped} lost, of {state.n_requests} turns")


async def soak(folder: Path, *, n_requests: int, n_clients: int = 24, seed: int = 0) -> dict[str, Any]:
    """Run one and give its figures."""
    table = folder / "table.json"
    table.write_text(a_table("local", layout=TOPOLOGY))
    began_s = perf_counter()
    async with routing(TOPOLOGY, settings=SETTINGS, table=table, lease_s=LEASE_S) as rig:
        for engine in rig.engines:
            engine.behaviour = healthy()
        tally = await Soak(rig, table, n_requests=n_requests, n_clients=n_clients, seed=seed).run()
        events = {
            name: int(rig.metric("events_total", event=name))
            for name in (
                "prefill_retry",
                "decode_retry",
                "handoff_incomplete",
                "handle_abandoned",
                "prefill_gone",
                "handle_expired",
            )
        }
        paths = {
            path: int(rig.metric("turns_total", path=path, outcome="ok"))
            for path in ("pd", "local", "pd_fallback_local")
        }
        box, state = rig.state.policies, rig.state
        return {
            "seconds": round(perf_counter() - began_s, 1),
            "requests": tally.n_sent,
            "reached_the_router": state.n_requests,
            "outcomes": dict(tally.outcomes.most_common()),
            "ok_by_path": paths,
            "on_the_way": events,
            "faults": dict(tally.faults.most_common()),
            "table_files_written": tally.n_tables,
            "tables_taken": box.n_reloads,
            "tables_refused": box.n_refusals,
            "looks_for_two_homes": tally.n_looks,
            "most_open_turns": tally.most_open,
            "rss_mib": [round(value, 1) for value in tally.rss_mib],
            "sessions_kept": state.ledger.n_sessions,
            "n_breaches": len(tally.breaches),
            "breaches": tally.breaches[:10],
        }


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(
            soak(Path(folder), n_requests=options.requests, n_clients=options.clients, seed=options.seed)
        )
    print(json.dumps(figures, indent=1))
    sys.exit(1 if figures["n_breaches"] else 0)


if __name__ == "__main__":
    main()
