"""The fleet over fake engines on real sockets: breakers, probes, restarts, heartbeats and files, without traffic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import orjson
import pytest
import yaml
from fake_engine import Behaviour, FakeEngine

from ppd_bench.core.errors import SpecError
from ppd_bench.core.topology import parse_topology
from ppd_bench.engine.client import Client
from ppd_bench.engine.control import control_client
from ppd_bench.policy.events import Event, WorkerAvailability, WorkerReset, WorkerSnapshot
from ppd_bench.policy.ledger import Ledger
from ppd_bench.router.breaker import BreakerSettings
from ppd_bench.router.discovery import EndpointsFile, HeartbeatListener, send_heartbeats
from ppd_bench.router.fleet import Fleet, FleetSettings

FAST = FleetSettings(
    scrape_s=0.05,
    scrape_limit_s=1.0,
    probe_s=0.3,
    probe_limit_s=0.5,
    look_s=0.05,
    settle_s=0.4,
    silence_s=0.5,
    breaker=BreakerSettings(n_failures=3, open_s=0.1, max_open_s=0.2),
)


class MuteEngine(FakeEngine):
    """One that does not tell when it started."""

    def metrics(self) -> str:
        return "\n".join(line for line in super().metrics().splitlines() if "start_time" not in line) + "\n"


@dataclass
class Rig:
    """A fleet that runs, its engines by worker id, and what it told."""

    fleet: Fleet
    engines: dict[str, FakeEngine]
    ledger: Ledger
    events: list[Event] = field(default_factory=list)

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def n_probes(self, worker_id: str) -> int:
        return self.engines[worker_id].counts.n_requests

    def worker(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = self.fleet.status()["workers"][index]
        return found


async def until(condition: Callable[[], object], within_s: float = 8.0) -> None:
    end_s = perf_counter() + within_s
    while not condition():
        assert perf_counter() < end_s, "it did not happen in time"
        await asyncio.sleep(0.005)


def write(path: Path, engines: list[FakeEngine]) -> None:
    listed = [{"role": e.name[0], "url": f"http://{e.host}:{e.port}"} for e in engines]
    path.write_text(yaml.safe_dump({"engines": listed}))


@asynccontextmanager
async def watching(topology: str, fleet_of: Callable[..., Fleet], engines: list[FakeEngine]) -> AsyncIterator[Rig]:
    ledger, events = Ledger(parse_topology(topology)), []

    def take(event: Event) -> None:
        events.append(event)
        ledger.observe(event)

    async with Client(perf_counter) as client, control_client() as control:
        fleet = fleet_of(
            parse_topology(topology), client=client, control=control, clock=perf_counter, on_event=take, settings=FAST
        )
        running = asyncio.ensure_future(fleet.run())
        try:
            yield Rig(fleet, {e.name: e for e in engines}, ledger, events)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for engine in engines:
                await engine.stop()


def on_file(
    topology: str, check: Callable[[Rig, Path], Awaitable[None]], folder: Path, kind: type[FakeEngine] = FakeEngine
) -> None:
    async def main() -> None:
        names = [worker.worker_id for worker in parse_topology(topology).workers]
        engines = [await kind(name, behaviour=Behaviour()).start() for name in names]
        path = folder / "endpoints.yaml"
        write(path, engines)
        async with watching(topology, lambda t, **more: Fleet(t, file=EndpointsFile(path), **more), engines) as rig:
            await check(rig, path)

    asyncio.run(asyncio.wait_for(main(), 30.0))


# -- engines of a file -----------------------------------------------------------------------------------------------


def test_engines_of_a_file_take_the_workers_places_in_its_order_and_are_probed(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        assert [rig.fleet.available(w) for w in range(3)] == [True] * 3
        ports = [endpoint.port for endpoint in rig.fleet.engines().endpoints]
        assert ports == [rig.engines[name].port for name in ("P0", "D0", "D1")]
        await until(lambda: all(rig.worker(w)["proven"] for w in range(3)))
        await until(lambda: {s.worker for s in rig.told(WorkerSnapshot)} == {0, 1, 2})
        assert rig.told(WorkerAvailability) == []
        assert rig.told(WorkerReset) == []

    on_file("1P_1D_1pD", check, tmp_path)


def test_a_router_does_not_start_with_a_file_of_another_layout(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("engines: [{role: P, url: 'http://a:1'}, {role: D, url: 'http://a:2'}]")
    with pytest.raises(SpecError, match="needs the layout 2P_2D"):
        Fleet(
            parse_topology("2P_2D"),
            client=None,  # type: ignore[arg-type]
            control=None,  # type: ignore[arg-type]
            clock=perf_counter,
            on_event=lambda event: None,
            file=EndpointsFile(path),
        )


def test_b15_k_failed_turns_open_the_breaker_and_a_generation_closes_it(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(1)["proven"])
        rig.engines["D0"].behaviour.status = 500
        for _ in range(2):
            rig.fleet.on_failure(1, "HTTP 500")
        rig.fleet.on_success(1)
        for _ in range(2):
            rig.fleet.on_failure(1, "HTTP 500")
        assert rig.fleet.available(1)
        rig.fleet.on_failure(1, "HTTP 500")
        assert (rig.fleet.available(1), rig.fleet.breaker_state(1)) == (False, "open")
        assert rig.told(WorkerAvailability)[-1][1:] == (1, False)
        n = rig.n_probes("D0")
        await until(lambda: rig.n_probes("D0") >= n + 3)  # it is asked again and again
        assert not rig.fleet.available(1)
        rig.engines["D0"].behaviour.status = None
        await until(lambda: rig.fleet.available(1))
        assert rig.told(WorkerAvailability)[-1][1:] == (1, True)
        assert rig.ledger.view(0.0, "").available == (True, True)
        assert rig.told(WorkerReset) == []  # the same process: what it holds it still holds

    on_file("1P_1D", check, tmp_path)


def test_b15_health_is_not_enough_an_engine_that_hangs_in_generations_is_taken_out(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(0)["proven"])
        rig.engines["P0"].behaviour.hang = True  # /health and /metrics answer as before
        await until(lambda: not rig.fleet.available(0))
        assert rig.fleet.available(1)
        rig.engines["P0"].behaviour.hang = False
        await until(lambda: rig.fleet.available(0))

    on_file("1P_1D", check, tmp_path)


def test_b39_an_engine_of_a_file_that_dies_is_noticed_without_traffic_and_holds_nothing_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(1)["proven"] and rig.told(WorkerSnapshot))
        d = rig.engines["D0"]
        port = d.port
        await d.stop()
        await until(lambda: not rig.fleet.available(1))
        assert rig.told(WorkerAvailability)[-1][1:] == (1, False)
        d.start_s += 1.0
        await d.start(port)
        await until(lambda: rig.fleet.available(1))
        assert [event.worker for event in rig.told(WorkerReset)] == [1]
        assert rig.told(WorkerAvailability)[-1][1:] == (1, True)

    on_file("1P_1D", check, tmp_path)


def test_b24_a_restart_between_two_scrapes_is_told_before_the_engine_gets_turns(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(1)["engine_start_unix_s"] is not None and rig.worker(1)["proven"])
        rig.engines["D0"].behaviour.hang = True
        rig.engines["D0"].start_s += 100.0
        await until(lambda: rig.told(WorkerReset))
        assert not rig.fleet.available(1)  # it has to generate first
        rig.engines["D0"].behaviour.hang = False
        await until(lambda: rig.fleet.available(1))
        assert len(rig.told(WorkerReset)) == 1

    on_file("1P_1D", check, tmp_path)


def test_b24_an_engine_that_does_not_tell_when_it_started_is_believed_to_hold_nothing_after_it_was_away(
    tmp_path: Path,
) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(1)["proven"] and len(rig.told(WorkerSnapshot)) > 1)
        d = rig.engines["D0"]
        port = d.port
        await d.stop()
        await until(lambda: not rig.fleet.available(1))
        assert rig.told(WorkerReset) == []
        await d.start(port)
        await until(lambda: rig.fleet.available(1))
        assert {event.worker for event in rig.told(WorkerReset)} == {1}

    on_file("1P_1D", check, tmp_path, MuteEngine)


def test_b24_a_cache_reset_that_the_fleet_is_told_of_goes_on_to_the_ledger(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        rig.fleet.on_cache_reset(1)
        assert [event.worker for event in rig.told(WorkerReset)] == [1]
        assert rig.fleet.available(1)

    on_file("1P_1D", check, tmp_path)


def test_an_engine_without_metrics_or_with_odd_ones_is_judged_by_its_generations(tmp_path: Path) -> None:
    class Odd(FakeEngine):
        def metrics(self) -> str:
            if self.name == "P0":
                return "vllm:kv_cache_usage_perc much\n"
            return 'vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting_by_reason{reason="capacity"} NaN\n'

    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.n_probes("P0") >= 3 and rig.n_probes("D0") >= 2)
        assert (rig.fleet.available(0), rig.fleet.available(1)) == (True, True)
        assert rig.told(WorkerSnapshot) == []
        await rig.engines["P0"].stop()
        await until(lambda: not rig.fleet.available(0))

    on_file("1P_1D", check, tmp_path, Odd)


def test_engines_that_generate_are_not_probed_as_well(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(0)["proven"] and rig.worker(1)["proven"])
        n_p, n_d = rig.n_probes("P0"), rig.n_probes("D0")
        for _ in range(20):
            rig.fleet.on_success(0)
            await asyncio.sleep(0.05)
        assert rig.n_probes("P0") == n_p
        assert rig.n_probes("D0") > n_d  # idle, and so asked

    on_file("1P_1D", check, tmp_path)


def test_snapshots_carry_kv_usage_and_who_waits_for_capacity(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        rig.engines["D0"].behaviour.kv_usage = 0.75
        rig.engines["D0"].behaviour.n_waiting_capacity = 3
        await until(lambda: rig.ledger.view(0.0, "").n_waiting_capacity[1] == 3)
        assert rig.ledger.view(0.0, "").kv_usage_ratio[1] == 0.75

    on_file("1P_1D", check, tmp_path)


def test_a_changed_file_replaces_engines_and_a_bad_one_keeps_the_old_and_says_so(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(2)["proven"])
        new = await FakeEngine("D2").start()
        p, old, kept = (rig.engines[name] for name in ("P0", "D0", "D1"))
        try:
            path.write_text("engines: [")
            await until(lambda: rig.fleet.status()["endpoints_file"]["problem"])
            assert all(rig.fleet.available(worker) for worker in range(3))
            write(path, [p, kept, new])
            await until(lambda: rig.fleet.engines().endpoints[1].port == new.port)
            assert rig.fleet.engines().endpoints[2].port == kept.port  # D1 keeps its place
            await until(lambda: rig.fleet.available(1))
            assert {event.worker for event in rig.told(WorkerReset)} == {1}
            assert rig.fleet.status()["endpoints_file"]["problem"] is None
            write(path, [p, kept])
            await until(lambda: not rig.fleet.available(1))
            assert rig.worker(1)["url"] is None
            write(path, [p, kept, new, old])
            await until(lambda: rig.fleet.available(1))
            assert len(rig.fleet.status()["spares"]) == 1
        finally:
            await new.stop()

    on_file("1P_2D", check, tmp_path)


# -- engines that announce themselves --------------------------------------------------------------------------------


def on_heartbeats(topology: str, names: list[str], check: Callable[[Rig, HeartbeatListener], Awaitable[None]]) -> None:
    pytest.importorskip("zmq", reason="heartbeats need msgpack and pyzmq")

    async def main() -> None:
        engines = [await FakeEngine(name).start() for name in names]
        listener = HeartbeatListener(port=0)
        listener.open()
        async with watching(topology, lambda t, **more: Fleet(t, listener=listener, **more), engines) as rig:
            await check(rig, listener)

    asyncio.run(asyncio.wait_for(main(), 30.0))


def announce(engine: FakeEngine, listener: HeartbeatListener, **more: Any) -> asyncio.Task[None]:
    goodbye = more.pop("say_goodbye", True)
    beat = {"type": engine.name[0], "http_address": f"{engine.host}:{engine.port}", "zmq_address": "", **more}
    return asyncio.ensure_future(
        send_heartbeats((listener.host, listener.port), beat, every_s=0.1, say_goodbye=goodbye)
    )


async def end(*senders: asyncio.Task[None]) -> None:
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)


def test_engines_that_announce_themselves_fill_the_places_of_their_role_once_they_generate() -> None:
    async def check(rig: Rig, listener: HeartbeatListener) -> None:
        await until(lambda: len(rig.told(WorkerAvailability)) == 3)
        assert not any(rig.fleet.available(worker) for worker in range(3))
        assert [endpoint.port for endpoint in rig.fleet.engines().endpoints] == [0, 0, 0]
        rig.engines["D0"].behaviour.status = 503  # as while a model loads
        senders = [announce(engine, listener) for engine in rig.engines.values()]
        await until(lambda: sum(rig.fleet.available(worker) for worker in range(3)) == 2)
        assert rig.fleet.available(0)
        rig.engines["D0"].behaviour.status = None
        await until(lambda: all(rig.fleet.available(worker) for worker in range(3)))
        roles = [endpoint.role.value for endpoint in rig.fleet.engines().endpoints]
        assert roles == ["P", "D", "D"]
        await end(*senders)

    on_heartbeats("1P_1D_1pD", ["P0", "D0", "D1"], check)


def test_b39_heartbeats_expire_by_a_timer_and_a_goodbye_counts_at_once() -> None:
    async def check(rig: Rig, listener: HeartbeatListener) -> None:
        p, d = (announce(rig.engines[name], listener, say_goodbye=name == "P0") for name in ("P0", "D0"))
        await until(lambda: rig.fleet.available(0) and rig.fleet.available(1))
        began_s = perf_counter()
        await end(p)
        await until(lambda: not rig.fleet.available(0))
        said_s = perf_counter() - began_s
        assert said_s < FAST.silence_s - 0.1
        await end(d)  # silent, though it still answers
        await until(lambda: not rig.fleet.available(1))
        assert perf_counter() - began_s - said_s >= FAST.silence_s - 0.2
        back = announce(rig.engines["D0"], listener)
        await until(lambda: rig.fleet.available(1))
        await end(back)

    on_heartbeats("1P_1D", ["P0", "D0"], check)


def test_b24_a_heartbeat_with_another_start_time_is_another_process() -> None:
    async def check(rig: Rig, listener: HeartbeatListener) -> None:
        p, d = (announce(rig.engines[name], listener, start_time=1) for name in ("P0", "D0"))
        await until(lambda: rig.fleet.available(0) and rig.fleet.available(1))
        n = len(rig.told(WorkerReset))
        await end(d)
        d = announce(rig.engines["D0"], listener, start_time=2)
        await until(lambda: len(rig.told(WorkerReset)) > n and rig.fleet.available(1))
        assert {event.worker for event in rig.told(WorkerReset)[n:]} == {1}
        await end(p, d)

    on_heartbeats("1P_1D", ["P0", "D0"], check)


def test_a_files_engines_keep_their_places_beside_those_that_announce_themselves(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="heartbeats need msgpack and pyzmq")

    async def main() -> None:
        engines = [await FakeEngine(name).start() for name in ("P0", "D0", "D1")]
        write(tmp_path / "e.yaml", engines[:2])
        listener = HeartbeatListener(port=0)
        listener.open()

        def fleet_of(topology: Any, **more: Any) -> Fleet:
            return Fleet(topology, file=EndpointsFile(tmp_path / "e.yaml"), listener=listener, **more)

        async with watching("1P_2D", fleet_of, engines) as rig:
            await until(lambda: rig.told(WorkerAvailability))
            assert [rig.fleet.available(worker) for worker in range(3)] == [True, True, False]
            senders = [announce(engine, listener, start_time=7) for engine in engines]
            await until(lambda: rig.fleet.available(2))
            assert [e.port for e in rig.fleet.engines().endpoints] == [e.port for e in engines]
            await end(*senders)
            await until(lambda: not rig.fleet.available(2))
            assert [rig.fleet.available(worker) for worker in range(2)] == [True, True]
            senders = [announce(engines[1], listener, start_time=8)]  # a restart that only the heartbeat shows
            await until(lambda: any(event.worker == 1 for event in rig.told(WorkerReset)))
            await until(lambda: rig.fleet.available(1))
            await end(*senders)

    asyncio.run(asyncio.wait_for(main(), 30.0))


def test_b21_places_are_the_same_whatever_the_order_of_arrival_and_spares_step_in() -> None:
    async def check(rig: Rig, listener: HeartbeatListener) -> None:
        senders = {name: announce(engine, listener) for name, engine in rig.engines.items()}
        await until(lambda: all(rig.fleet.available(worker) for worker in range(3)))
        ports = [endpoint.port for endpoint in rig.fleet.engines().endpoints]
        await until(lambda: len(rig.fleet.status()["spares"]) == 1)
        name = next(name for name, engine in rig.engines.items() if engine.port == ports[1])
        await end(senders.pop(name))
        await until(lambda: rig.fleet.engines().endpoints[1].port not in (0, ports[1]))
        await until(lambda: rig.fleet.available(1))
        assert rig.fleet.engines().endpoints[2].port == ports[2]  # the other D stays where it is
        assert rig.told(WorkerReset)[-1].worker == 1
        await end(*senders.values())

    on_heartbeats("1P_2D", ["P0", "D0", "D1", "D2"], check)


def test_status_is_json_and_names_what_is_wrong(tmp_path: Path) -> None:
    async def check(rig: Rig, path: Path) -> None:
        await until(lambda: rig.worker(1)["kv_usage_ratio"] is not None and rig.worker(1)["proven"])
        await rig.engines["D0"].stop()
        await until(lambda: not rig.fleet.available(1))
        status = orjson.loads(orjson.dumps(rig.fleet.status()))
        assert "no connection" in status["workers"][1]["problem"]
        assert status["workers"][1]["breaker"] in ("open", "half_open")
        assert status["workers"][0]["problem"] is None
        assert status["heartbeats"] is None

    on_file("1P_1D", check, tmp_path)
