"""Several client processes for one point: one schedule, one start, one Ledger, the records of one process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from fake_engine import FakeEngine
from loadgen_cases import SETTINGS, endpoint_of, fakes, make_point, rows_of, run, sessions_of, until
from test_loadgen_player import SEND_SLACK_S, conserves, replayed

from ppd_bench.core.errors import PpdBenchError, SpecError
from ppd_bench.core.point import PlacementSpec, Point, PolicySpec
from ppd_bench.core.workload import Session
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.loadgen.clients import CHUNKS_PER_S, ClientPool, clients_needed, dealt_to
from ppd_bench.loadgen.lateness import NO_LATENESS, lateness_of, worst_of
from ppd_bench.loadgen.player import LiveResult, play_point

WITHIN_S = 60.0


async def play_with(pool: ClientPool, point: Point, sessions: Sequence[Session], target: Engines | Endpoint,
                    **more: Any) -> LiveResult:  # fmt: skip
    return await pool.play_point(point, sessions, target, clock=monotonic, settings=SETTINGS, **more)


def gone(pid: int | None) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_two_clients_give_the_records_and_the_decisions_of_one() -> None:
    point = make_point("2P_2D", placement=PlacementSpec(decode="round_robin"), lengths=((64, 8), (20, 4), (16, 2)))
    sessions = sessions_of(point, [0.15 * i for i in range(8)])
    told = ("request_id", "session_id", "turn", "status", "prefill_worker", "decode_worker", "route", "reason",
            "generated_tokens", "itl_count", "prefill_cached_tokens")  # fmt: skip

    async def main() -> None:
        async with fakes("2P_2D") as (_, target):
            alone = await play_point(point, sessions, target, clock=monotonic, settings=SETTINGS)
        async with ClientPool(2) as pool, fakes("2P_2D") as (_, target):
            ended: list[str] = []
            shared = await play_with(pool, point, sessions, target, on_turn=lambda turn: ended.append(turn.request_id))
        one, two = rows_of(alone.columns), rows_of(shared.columns)
        # Conversations follow one another, so that turn after turn meets the same Ledger in both.
        assert [[row[name] for name in told] for row in two] == [[row[name] for name in told] for row in one]
        assert {row["decode_worker"] for row in two} == {"D0", "D1"}
        assert sorted(ended) == sorted(row["request_id"] for row in two)
        assert replayed(shared.log, point) == (24, 24)
        conserves(two, point)
        first = [row for row in two if row["turn"] == 1]
        assert [row["scheduled_s"] for row in first] == [0.15 * i for i in range(8)]
        assert all(0.0 <= row["sent_s"] - row["scheduled_s"] < SEND_SLACK_S for row in two)
        assert shared.lateness.decision.n == 12
        assert shared.lateness.send.n == 12
        assert alone.lateness.decision.n == 0

    run(main(), WITHIN_S)


@pytest.mark.parametrize(
    ("policy", "placement"),
    [
        (PolicySpec(), PlacementSpec()),
        (PolicySpec(decider="fraction", params=(("x", 0.5),)), PlacementSpec(decode="least_tokens")),
        (PolicySpec(decider="always_local"), PlacementSpec(decode="cache_aware", prefill="round_robin", sticky=False)),
    ],
    ids=lambda spec: getattr(spec, "decider", ""),
)
def test_one_ledger_decides_for_all_clients_and_its_log_replays(policy: PolicySpec, placement: PlacementSpec) -> None:
    point = make_point("1R_2P_1D_1pD", policy=policy, placement=placement)

    async def main() -> None:
        async with ClientPool(2) as pool, fakes(point.topology) as (engines, target):
            engines[-1].behaviour.die_after = 3
            result = await play_with(pool, point, sessions_of(point, [0.02 * i for i in range(12)]), target)
        rows = rows_of(result.columns)
        n_sent = sum(row["sent_s"] is not None for row in rows)
        assert replayed(result.log, point) == (n_sent, n_sent)
        assert {"ok", "error"} <= {row["status"] for row in rows}
        conserves(rows, point)

    run(main(), WITHIN_S)


def test_a_pool_plays_point_after_point_with_as_many_clients_as_each_needs() -> None:
    async def main() -> None:
        async with ClientPool(2) as pool, fakes("1R") as (engines, target):
            for n_clients, arrivals in ((1, [0.0]), (2, [0.0, 0.0, 0.01]), (2, [])):
                point = make_point("1R", seed=len(arrivals))
                result = await play_with(pool, point, sessions_of(point, arrivals), target, n_clients=n_clients)
                assert result.columns["status"] == ["ok"] * 2 * len(arrivals)
            assert engines[0].counts.n_completed == 8
            pids = pool.pids
        assert all(map(gone, pids))

    run(main(), WITHIN_S)


def test_several_clients_can_send_to_one_router() -> None:
    point = make_point("1P_1D")

    async def main() -> None:
        router = await FakeEngine("router").start()
        async with ClientPool(2) as pool:
            result = await play_with(pool, point, sessions_of(point, [0.0] * 3), endpoint_of(router))
        assert result.columns["status"] == ["ok"] * 6
        assert (router.counts.n_requests, result.log, result.lateness.decision.n) == (6, [], 0)
        await router.stop()

    run(main(), WITHIN_S)


def test_a_client_that_is_killed_ends_the_play_with_a_message_and_leaves_nothing_open() -> None:
    point = make_point("1R", lengths=((16, 500),), timeout_s=60.0)

    async def main() -> None:
        async with fakes("1R", step_s=0.05) as (engines, target):
            async with ClientPool(2) as pool:
                play = asyncio.ensure_future(play_with(pool, point, sessions_of(point, [0.0, 0.0]), target))
                await until(lambda: len(engines[0].running) == 2, 20.0)
                pids = pool.pids
                os.kill(pids[1] or 0, signal.SIGKILL)
                with pytest.raises(PpdBenchError, match=r"client process 2 died .* the same command again"):
                    await play
            assert all(map(gone, pids))
            await until(lambda: not engines[0]._connections)

    run(main(), WITHIN_S)


def test_stopping_the_play_ends_the_clients_and_their_requests_at_once() -> None:
    point = make_point("1R", lengths=((16, 500),), timeout_s=60.0)

    async def main() -> None:
        async with fakes("1R", step_s=0.05) as (engines, target):

            async def play() -> None:
                async with ClientPool(2) as pool:
                    pids.extend(pool.pids)
                    await play_with(pool, point, sessions_of(point, [0.0, 0.0]), target)

            pids: list[int | None] = []
            task = asyncio.ensure_future(play())
            await until(lambda: len(engines[0].running) == 2, 20.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert all(map(gone, pids))
            await until(lambda: not engines[0]._connections)

    run(main(), WITHIN_S)


OWNER = """
import asyncio
from ppd_bench.loadgen.clients import ClientPool

async def main():
    async with ClientPool(1) as pool:
        print(*pool.pids, flush=True)
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_clients_end_with_the_first_process_however_it_ends(tmp_path: Path) -> None:
    (tmp_path / "owner.py").write_text(OWNER)
    owner = subprocess.Popen([sys.executable, str(tmp_path / "owner.py")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid)
    owner.kill()
    owner.communicate()
    until_s = monotonic() + 20.0
    while not gone(pid) and monotonic() < until_s:
        sleep(0.05)
    assert gone(pid)


def test_what_one_process_refuses_several_refuse_with_the_same_error() -> None:
    async def main() -> None:
        async with ClientPool(1) as pool, fakes("1P_1D") as (_, target):
            point = make_point("1P_1D")
            one = Engines(endpoints=target.endpoints[:1])
            with pytest.raises(SpecError, match="2 workers, but 1 engines"):
                await play_with(pool, point, sessions_of(point, [0.0]), one)

    run(main(), WITHIN_S)


def test_the_latest_of_several_processes_speaks_for_all() -> None:
    good = lateness_of([0.001] * 99)
    bad = lateness_of([0.001, 0.2])
    assert worst_of([good, bad, NO_LATENESS]) is bad
    assert worst_of([]) == worst_of([NO_LATENESS]) == NO_LATENESS


def test_conversations_are_dealt_in_turn_and_those_that_they_start_stay_with_them() -> None:
    sessions = sessions_of(make_point("1R"), [0.0] * 6)
    child = (dataclasses.replace(sessions[3][0], after="s1.t1"), *sessions[3][1:])
    grandchild = (dataclasses.replace(sessions[4][0], after="s3.t2"),)
    given = [*sessions[:3], child, grandchild, sessions[5]]
    hands = [dealt_to(number, 2, given) for number in range(2)]
    assert [[session[0].session_id for session in hand] for hand in hands] == [["s0", "s2"], ["s1", "s3", "s4", "s5"]]
    assert dealt_to(0, 1, given) == given
    assert dealt_to(1, 2, []) == []


def test_the_clients_that_a_point_needs_follow_from_the_tokens_that_it_offers() -> None:
    tokens = ((1000, 256), (200, 44))
    at_limit = CHUNKS_PER_S / 300
    assert [clients_needed(make_point("1R", lengths=tokens, qps=at_limit * f)) for f in (0.01, 1.0, 1.01, 2.5)] == [
        1, 1, 2, 3,
    ]  # fmt: skip
