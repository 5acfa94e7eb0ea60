"""A fake vLLM engine over real sockets: the OpenAI completions and chat APIs, NIXL-like hand-offs between fakes, prefix-cache
bookkeeping by blocks, /metrics with vLLM's names, /reset_prefix_cache, /health, and scripted delays and faults.

Answers are a function of the prompt (``answer_ids``), one token per stream and step, all streams of an engine in one step, as
vLLM does it. Text has tokens too (``fake_text``); an answer's text is read back as its own ids. Where tools are offered and the
last message speaks of one by name, the answer calls it. A model named ``shape:NAME`` plays a script of ``stream_shapes``. Tests
read counters from attributes, or from another process by ``/fake/state``. Run as a program it serves one engine:
``python fake_engine.py R 0 0.02``.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson
from fake_job import Behaviour, Job, answer_ids
from fake_requests import read_body, refusal

__all__ = ["Behaviour", "Counts", "FakeEngine", "answer_ids"]

TOTAL_BLOCKS = 10_000


@dataclass
class Counts:
    """What happened. ``sources`` are vLLM's prompt_tokens_by_source."""

    n_requests: int = 0
    n_completed: int = 0
    n_aborted: int = 0
    n_refused: int = 0
    n_expired: int = 0
    n_resets: int = 0
    n_listed: int = 0
    bytes_pulled: int = 0
    sources: Counter[str] = field(default_factory=Counter)


class FakeEngine:
    """One engine on a loopback port. Use ``await start()`` and ``await stop()``."""

    def __init__(self, name: str = "R0", *, block_size: int = 16, behaviour: Behaviour | None = None) -> None:
        self.name = name
        self.engine_id = f"engine-{name}"
        self.block_size = block_size
        self.behaviour = behaviour or Behaviour()
        self.counts = Counts()
        self.bodies: list[dict[str, Any]] = []
        self.request_ids: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.start_s = 1_000_000.0
        self.host = "127.0.0.1"
        self.port = 0
        self.send_times_s: dict[str, list[float]] | None = None
        self.cached: set[int] = set()
        self.pinned: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self.running: set[Job] = set()
        self._decoding: list[Job] = []
        self._tick: asyncio.TimerHandle | None = None
        self._next_tick_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    def forget(self) -> None:
        """As if nothing had been asked so far; what the cache holds stays."""
        self.counts = Counts()
        self.bodies.clear()
        self.request_ids.clear()
        self.headers.clear()

    async def start(self, port: int = 0) -> FakeEngine:
        self.start_s += 1.0
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self.host, port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Gone as after kill -9: the port is closed and every connection reset."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.reset()
        if self._tick is not None:
            self._tick.cancel()
        for _, timer in self.pinned.values():
            timer.cancel()
        self.pinned.clear()
        self.cached.clear()
        self._tick = None
        self._decoding.clear()
        await asyncio.sleep(0)

    @property
    def kv_usage(self) -> float:
        pinned = sum(n for n, _ in self.pinned.values())
        return (pinned + sum(job.n_blocks for job in self.running)) / TOTAL_BLOCKS

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def block_keys(self, ids: list[int]) -> list[int]:
        keys, parent, size = [], 0, self.block_size
        for i in range(0, len(ids) - size + 1, size):
            parent = hash((parent, tuple(ids[i : i + size])))
            keys.append(parent)
        return keys

    def hit_tokens(self, ids: list[int]) -> int:
        n = 0
        for key in self.block_keys(ids):
            if key not in self.cached:
                break
            n += self.block_size
        return min(n, (len(ids) - 1) // self.block_size * self.block_size)

    # -- hand-off ----------------------------------------------------------------------------------------------------

    def pin(self, request_id: str, n_blocks: int) -> None:
        timer = asyncio.get_running_loop().call_later(self.behaviour.lease_s, self._expire, request_id)
        self.pinned[request_id] = (n_blocks, timer)

    def _expire(self, request_id: str) -> None:
        self.counts.n_expired += 1
        del self.pinned[request_id]

    def unpin(self, request_id: str) -> bool:
        held = self.pinned.pop(request_id, None)
        if held is not None:
            held[1].cancel()
        return held is not None

    # -- steps -------------------------------------------------------------------------------------------------------

    def decode(self, job: Job) -> None:
        self._decoding.append(job)
        if self._tick is None:
            self._next_tick_s = asyncio.get_running_loop().time()
            self._arm()

    def _arm(self) -> None:
        self._tick = asyncio.get_running_loop().call_at(self._next_tick_s, self._step)

    def _step(self) -> None:
        self._decoding = [job for job in self._decoding if job.step()]
        self._next_tick_s += self.behaviour.step_s
        if self._decoding:
            self._arm()
        else:
            self._tick = None

    # -- pages -------------------------------------------------------------------------------------------------------

    def metrics(self) -> str:
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        lines = [f'vllm:prompt_tokens_by_source_total{{source="{s}"}} {self.counts.sources[s]}' for s in sources]
        lines += [
            f"process_start_time_seconds {self.start_s}",
            f"vllm:kv_cache_usage_perc {self.kv_usage if self.behaviour.kv_usage is None else self.behaviour.kv_usage}",
            f"vllm:num_requests_running {len(self.running)}",
            "vllm:num_requests_waiting 0",
            f'vllm:num_requests_waiting_by_reason{{reason="capacity"}} {self.behaviour.n_waiting_capacity}',
            f"vllm:nixl_bytes_transferred_sum {self.counts.bytes_pulled}",
            f"vllm:nixl_num_kv_expired_reqs_total {self.counts.n_expired}",
            "vllm:num_preemptions_total 0",
        ]
        return "\n".join(lines) + "\n"

    def state(self) -> dict[str, Any]:
        counts = self.counts
        return {
            **counts.__dict__,
            "sources": dict(counts.sources),
            "running": len(self.running),
            "send_times_s": self.send_times_s,
        }


class _Connection(asyncio.Protocol):
    """One client connection; requests one after another."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.transport: Any = None
        self._parser = httptools.HttpRequestParser(self)
        self._job: Job | None = None
        self._new_request()

    def _new_request(self) -> None:
        self._url, self._body = b"", []
        self._headers: dict[str, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.engine._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine._connections.discard(self)
        if self._job is not None:
            self._job.abort()

    def reset(self) -> None:
        self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, body, headers = self._url.decode().partition("?")[0], b"".join(self._body), self._headers
        self._new_request()
        page = _PAGES.get(path)
        key = self.engine.behaviour.api_key
        if self.engine.behaviour.sick and page is not None:
            self.answer(500, b"sick")
        elif key is not None and path.startswith("/v1/") and headers.get("authorization") != f"Bearer {key}":
            self.answer(401, b'{"error":{"message":"Unauthorized"}}')
        elif page is not None:
            self.answer(*page(self.engine, body))
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self.engine.headers.append(headers)
            request = read_body(body, self.engine.behaviour.max_model_len)
            if isinstance(request, str):
                self.answer(400, refusal(request))
                return
            self._job = Job(self, request, headers.get("x-request-id", ""), is_chat="chat" in path)
            self._job.begin()
        else:
            self.answer(404, b'{"detail":"Not Found"}')

    def answer(self, status: int, body: bytes, extra: str = "", kind: str = "application/json") -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self.transport.write(head.encode() + body)

    def start_stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def chunk(self, piece: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end_stream(self) -> None:
        self.transport.write(b"0\r\n\r\n")

    def forget(self) -> None:
        self._job = None


def _pull(engine: FakeEngine, body: bytes) -> tuple[int, bytes]:
    return (200 if engine.unpin(orjson.loads(body)["remote_request_id"]) else 410), b"{}"


def _reset(engine: FakeEngine, body: bytes) -> tuple[int, bytes]:
    engine.counts.n_resets += 1
    engine.cached.clear()
    return 200, b'{"success":true}'


def _models(engine: FakeEngine) -> tuple[int, bytes]:
    engine.counts.n_listed += 1
    return 200, b'{"object":"list","data":[{"id":"fake","object":"model"}]}'


_PAGES: dict[str, Callable[[FakeEngine, bytes], tuple[Any, ...]]] = {
    "/health": lambda engine, body: (200, b""),
    "/version": lambda engine, body: (200, b'{"version":"0.32.0+fake"}'),
    "/v1/models": lambda engine, body: _models(engine),
    "/metrics": lambda engine, body: (200, engine.metrics().encode(), "", "text/plain"),
    "/reset_prefix_cache": _reset,
    "/fake/pull": _pull,
    "/fake/state": lambda engine, body: (200, orjson.dumps(engine.state())),
}


async def _serve(name: str, port: int, step_s: float) -> None:
    engine = FakeEngine(name, behaviour=Behaviour(step_s=step_s))
    engine.send_times_s = {}
    await engine.start(port)
    print(engine.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
