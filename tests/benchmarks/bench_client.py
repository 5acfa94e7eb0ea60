"""What the load generator's HTTP client costs and how exactly it sees token gaps.

::

    python tests/benchmarks/bench_client.py [--streams 400] [--step-ms 20] [--seconds 5] [--peers] [--clients 2]

A fake engine in a process of its own paces ``streams`` answers, one token each per step, and notes when it wrote each chunk. The
client's error is |gap as the client stamped it - gap as the fake wrote it|, pooled over tokens; the loop is uvloop's where it
is installed. ``--peers`` measures asyncio's own loop, aiohttp and httpx (where installed) in the same way. ``--clients`` plays
the same streams as a point, with one client process and with that many (``loadgen.clients``); chunks per second then include
the first prefills, and CPU is that of the clients alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import orjson
import uvloop

from ppd_bench.core.enums import Executor, Role
from ppd_bench.core.point import EngineSettings, PlacementSpec, Point, PolicySpec
from ppd_bench.core.workload import Session, Turn, TurnLengths, WorkloadSpec
from ppd_bench.engine.client import Client
from ppd_bench.engine.dispatch import Engines
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.loadgen.clients import ClientPool
from ppd_bench.loadgen.player import PlaySettings
from ppd_bench.loadgen.prompts import token_range

FAKE = Path(__file__).resolve().parent.parent / "fakes" / "fake_engine.py"
HOST = "127.0.0.1"
N_PLAIN = 2000
PLAIN_AT_ONCE = 32

Stream = Callable[[str, bytes], Awaitable[list[float]]]
"""Plays one stream (request id, body) and returns when each token arrived."""


@dataclass(frozen=True)
class Figures:
    name: str
    chunks_per_s: float
    cpu_us_per_chunk: float
    error_median_ms: float
    error_p99_ms: float

    def line(self) -> str:
        return (
            f"{self.name:24} {self.chunks_per_s:9,.0f} chunks/s  {self.cpu_us_per_chunk:6.1f} us CPU/chunk "
            f"({1e6 / self.cpu_us_per_chunk:8,.0f}/s per core)  gap error median {self.error_median_ms:6.3f} ms, "
            f"p99 {self.error_p99_ms:6.3f} ms"
        )


def start_fake(step_s: float) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, str(FAKE), "R0", "0", str(step_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def send_times(port: int) -> dict[str, list[float]]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/fake/state") as answer:
        times: dict[str, list[float]] = json.load(answer)["send_times_s"]
    return times


def body_of(index: int, n_tokens: int, *, stream: bool = True) -> bytes:
    return orjson.dumps({"model": "fake", "prompt": [index] * 32, "max_tokens": n_tokens, "stream": stream})


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(name: str, port: int, stream: Stream, n_streams: int, n_tokens: int) -> Figures:
    ids = [f"{name}-{index}" for index in range(n_streams)]
    began_s, began_cpu_s = perf_counter(), cpu_s()
    seen = await asyncio.gather(*(stream(key, body_of(i, n_tokens)) for i, key in enumerate(ids)))
    wall_s, used_s = perf_counter() - began_s, cpu_s() - began_cpu_s
    written = await asyncio.to_thread(send_times, port)
    errors = np.concatenate([np.abs(np.diff(s) - np.diff(written[k])) for k, s in zip(ids, seen, strict=True)])
    n = n_streams * n_tokens
    median, p99 = np.quantile(errors, (0.5, 0.99)) * 1e3
    return Figures(name, n / wall_s, used_s / n * 1e6, median, p99)


async def ours(name: str, port: int, n_streams: int, n_tokens: int) -> Figures:
    async with Client(perf_counter) as client:

        async def stream(key: str, body: bytes) -> list[float]:
            outcome = await client.post(HOST, port, body, request_id=key)
            times_s = outcome.token_times_s
            assert times_s is not None, outcome.message
            return times_s

        return await measure(name, port, stream, n_streams, n_tokens)


async def plain_requests(port: int) -> tuple[float, float]:
    """Plain one-token answers, 32 at once: requests per second, and CPU seconds per request."""
    async with Client(perf_counter) as client:
        left = iter(range(N_PLAIN))

        async def worker() -> None:
            for index in left:
                outcome = await client.post(HOST, port, body_of(index, 1, stream=False))
                assert outcome.ok, outcome.message

        began_s, began_cpu_s = perf_counter(), cpu_s()
        await asyncio.gather(*(worker() for _ in range(PLAIN_AT_ONCE)))
        return N_PLAIN / (perf_counter() - began_s), (cpu_s() - began_cpu_s) / N_PLAIN


async def peer_aiohttp(name: str, port: int, n_streams: int, n_tokens: int) -> Figures:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def stream(key: str, body: bytes) -> list[float]:
            times = []
            headers = {"X-Request-Id": key, "Content-Type": "application/json"}
            async with session.post(f"http://{HOST}:{port}/v1/completions", data=body, headers=headers) as answer:
                async for line in answer.content:
                    now_s = perf_counter()
                    if line.startswith(b"data: {") and orjson.loads(line[6:])["choices"]:
                        times.append(now_s)
            return times

        return await measure(name, port, stream, n_streams, n_tokens)


async def peer_httpx(name: str, port: int, n_streams: int, n_tokens: int) -> Figures:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as session:

        async def stream(key: str, body: bytes) -> list[float]:
            times = []
            headers = {"X-Request-Id": key, "Content-Type": "application/json"}
            url = f"http://{HOST}:{port}/v1/completions"
            async with session.stream("POST", url, content=body, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    now_s = perf_counter()
                    if line.startswith("data: {") and orjson.loads(line[6:])["choices"]:
                        times.append(now_s)
            return times

        return await measure(name, port, stream, n_streams, n_tokens)


async def pooled(port: int, n_clients: int, n_streams: int, n_tokens: int) -> Figures:
    """The streams as the conversations of a point, played by client processes. Gaps are those of the records."""
    point, sessions = streams_point(n_streams, n_tokens)
    engine = Endpoint(worker_id="R0", role=Role.REPLICA, host=HOST, port=port)
    settings = PlaySettings(served_model="fake", token_ids=token_range(1000))
    async with ClientPool(n_clients) as pool:
        await pool.play_point(
            point, sessions[:n_clients], Engines(endpoints=(engine,)), clock=perf_counter, settings=settings
        )
        began_s, began_cpu_s = perf_counter(), cpu_s_of(pool.pids)
        result = await pool.play_point(
            point, sessions, Engines(endpoints=(engine,)), clock=perf_counter, settings=settings
        )
        wall_s, used_s = perf_counter() - began_s, cpu_s_of(pool.pids) - began_cpu_s
    rows = zip(result.columns["request_id"], result.columns["itl_s"], strict=True)
    written = await asyncio.to_thread(send_times, port)
    gaps = {request_id: np.diff(written[f"{point.point_id}.{request_id}-d1"][-n_tokens:]) for request_id, _ in rows}
    rows = zip(result.columns["request_id"], result.columns["itl_s"], strict=True)
    errors = np.concatenate([np.abs(np.asarray(seen) - gaps[request_id]) for request_id, seen in rows])
    n = n_streams * n_tokens
    median, p99 = np.quantile(errors, (0.5, 0.99)) * 1e3
    waits = result.lateness.decision
    print(f"  {n_clients} client process(es): decision wait median {waits.median_s}, p99 {waits.p99_s} s; "
          f"loop late p99 {result.lateness.loop.p99_s} s")  # fmt: skip
    return Figures(f"ppd-bench, {n_clients} clients", n / wall_s, used_s / n * 1e6, median, p99)


def streams_point(n_streams: int, n_tokens: int) -> tuple[Point, list[Session]]:
    """One-turn conversations that all arrive at once."""
    workload = WorkloadSpec(
        name="streams",
        category="decode_heavy",
        turns=(TurnLengths(input_tokens=32, output_tokens=n_tokens),),
        max_output_tokens=n_tokens,
    )
    point = Point(
        topology="1R", model="fake", gpu="cpu", workload=workload, qps=1.0, duration_s=1.0, timeout_s=600.0,
        think_time_s=0.0, seed=0, repeat=0, executor=Executor.LIVE, policy=PolicySpec(), placement=PlacementSpec(),
        engine=EngineSettings(), engine_version="fake",
    )  # fmt: skip
    turns = [
        Turn(
            request_id=f"s{i}.t1", session_id=f"s{i}", turn=1, scheduled_s=0.0, think_time_s=None, context_tokens=0,
            input_tokens=32, output_tokens=n_tokens, max_output_tokens=n_tokens,
        )
        for i in range(n_streams)
    ]  # fmt: skip
    return point, [(turn,) for turn in turns]


def cpu_s_of(pids: Iterable[int | None]) -> float:
    """User and system seconds of other processes."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return sum(int(t) for pair in ticks for t in pair) / os.sysconf("SC_CLK_TCK")


PEERS = {"aiohttp, uvloop": peer_aiohttp, "httpx, uvloop": peer_httpx}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--clients", type=int, default=0)
    options = parser.parse_args()
    n_tokens = round(options.seconds * 1e3 / options.step_ms)
    fake, port = start_fake(options.step_ms / 1e3)
    try:
        arguments = port, options.streams, n_tokens
        print(f"{options.streams} streams, one token each per {options.step_ms:g} ms, {n_tokens} tokens")
        print(uvloop.run(ours("ppd-bench, uvloop", *arguments)).line())
        for n_clients in (1, options.clients) if options.clients else ():
            print(uvloop.run(pooled(port, n_clients, options.streams, n_tokens)).line())
        if options.peers:
            print(asyncio.run(ours("ppd-bench, asyncio", *arguments)).line())
            for name, peer in PEERS.items():
                try:
                    print(uvloop.run(peer(name, *arguments)).line())
                except ImportError as error:
                    print(f"{name}: skipped, {error}")
    finally:
        fake.kill()
        fake.wait()
    fake, port = start_fake(0.0)
    try:
        print(uvloop.run(ours("ppd-bench, unpaced", port, 50, 400)).line())
        rate_rps, cost_s = uvloop.run(plain_requests(port))
        print(f"plain requests, {PLAIN_AT_ONCE} at once: {rate_rps:,.0f} requests/s, {cost_s * 1e6:.0f} us CPU each")
    finally:
        fake.kill()
        fake.wait()


if __name__ == "__main__":
    main()
