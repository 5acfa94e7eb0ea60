"""What the load generator's HTTP client costs and how exactly it sees token gaps.

::

    python tests/benchmarks/bench_client.py [--streams 400] [--step-ms 20] [--seconds 5] [--peers]

A fake engine in a process of its own paces ``streams`` answers, one token each per step, and notes when it wrote each chunk. The
client's error is |gap as the client stamped it - gap as the fake wrote it|, pooled over tokens; the loop is uvloop's where it
is installed. ``--peers`` measures asyncio's own loop, aiohttp and httpx (where installed) in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import orjson
import uvloop

from ppd_bench.engine.client import Client

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


PEERS = {"aiohttp, uvloop": peer_aiohttp, "httpx, uvloop": peer_httpx}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    n_tokens = round(options.seconds * 1e3 / options.step_ms)
    fake, port = start_fake(options.step_ms / 1e3)
    try:
        arguments = port, options.streams, n_tokens
        print(f"{options.streams} streams, one token each per {options.step_ms:g} ms, {n_tokens} tokens")
        print(uvloop.run(ours("ppd-bench, uvloop", *arguments)).line())
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
