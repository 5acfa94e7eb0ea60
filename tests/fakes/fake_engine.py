"""A fake vLLM engine over real sockets: the OpenAI completions API with token ids, NIXL-like hand-offs between fakes,
prefix-cache bookkeeping by blocks, /metrics with vLLM's names, /reset_prefix_cache, /health, and scripted delays and faults.

Answers are a function of the prompt (``answer_ids``), one token per stream and step, all streams of an engine in one step, as
vLLM does it. A model named ``shape:NAME`` plays a script of ``stream_shapes``. Tests read counters from attributes, or from
another process by ``/fake/state``. Run as a program it serves one engine: ``python fake_engine.py R 0 0.02``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httptools
import orjson
from stream_shapes import SHAPES, Step

VOCABULARY = 1000
KV_BYTES_PER_TOKEN = 1024
TOTAL_BLOCKS = 10_000
NIXL_KEYS = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")


def answer_ids(prompt: list[int], n: int) -> list[int]:
    """The n tokens that every fake generates after this prompt."""
    start = zlib.crc32(array("q", prompt).tobytes())
    return [(start + 7919 * i) % VOCABULARY for i in range(n)]


@dataclass
class Behaviour:
    """What tests script. ``status``: answer every completion with it. ``hang``: never answer. ``die_after``: reset every
    stream after so many tokens. ``stop_short``: end answers so many tokens early. ``drop_params``: keys that P leaves out."""

    prefill_s: float = 0.002
    prefill_s_per_token: float = 0.0
    step_s: float = 0.002
    lease_s: float = 30.0
    status: int | None = None
    hang: bool = False
    die_after: int | None = None
    stop_short: int = 0
    drop_params: tuple[str, ...] = ()


@dataclass
class Counts:
    """What happened. ``sources`` are vLLM's prompt_tokens_by_source."""

    n_requests: int = 0
    n_completed: int = 0
    n_aborted: int = 0
    n_refused: int = 0
    n_expired: int = 0
    n_resets: int = 0
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
        self.host = "127.0.0.1"
        self.port = 0
        self.send_times_s: dict[str, list[float]] | None = None
        self.cached: set[int] = set()
        self.pinned: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        self.running: set[_Job] = set()
        self._decoding: list[_Job] = []
        self._tick: asyncio.TimerHandle | None = None
        self._next_tick_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def start(self, port: int = 0) -> FakeEngine:
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

    def decode(self, job: _Job) -> None:
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
            f"vllm:kv_cache_usage_perc {self.kv_usage}",
            f"vllm:num_requests_running {len(self.running)}",
            "vllm:num_requests_waiting 0",
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
        self._job: _Job | None = None
        self._new_request()

    def _new_request(self) -> None:
        self._url, self._body, self._request_id = b"", [], ""

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
        if name.lower() == b"x-request-id":
            self._request_id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, body, request_id = self._url.decode().partition("?")[0], b"".join(self._body), self._request_id
        self._new_request()
        page = _PAGES.get(path)
        if page is not None:
            self.answer(*page(self.engine, body))
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self._job = _Job(self, orjson.loads(body), request_id)
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


_PAGES: dict[str, Callable[[FakeEngine, bytes], tuple[Any, ...]]] = {
    "/health": lambda engine, body: (200, b""),
    "/version": lambda engine, body: (200, b'{"version":"0.32.0+fake"}'),
    "/v1/models": lambda engine, body: (200, b'{"object":"list","data":[{"id":"fake","object":"model"}]}'),
    "/metrics": lambda engine, body: (200, engine.metrics().encode(), "", "text/plain"),
    "/reset_prefix_cache": _reset,
    "/fake/pull": _pull,
    "/fake/state": lambda engine, body: (200, orjson.dumps(engine.state())),
}


class _Job:
    """One completion request."""

    def __init__(self, connection: _Connection, body: dict[str, Any], request_id: str) -> None:
        self.connection = connection
        self.engine = connection.engine
        self.body = body
        self.request_id = request_id
        self.params: dict[str, Any] = body.get("kv_transfer_params") or {}
        self.prompt: list[int] = body.get("prompt") or []
        self.n_blocks = 0
        self.answer: list[int] = []
        self.position = 0
        self.cached = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._pull: asyncio.Task[None] | None = None

    def begin(self) -> None:
        engine, behaviour = self.engine, self.engine.behaviour
        engine.counts.n_requests += 1
        engine.bodies.append(self.body)
        engine.request_ids.append(self.request_id)
        model = str(self.body.get("model"))
        if model.startswith("shape:"):
            self._play(SHAPES[model.removeprefix("shape:")])
        elif behaviour.status is not None:
            self.connection.answer(behaviour.status, b'{"error":{"message":"scripted failure"}}')
            self.connection.forget()
        elif not behaviour.hang:
            self._admit()

    def _later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, action, *arguments))

    # -- scripts -----------------------------------------------------------------------------------------------------

    def _play(self, steps: tuple[Step, ...]) -> None:
        actions: dict[str, Callable[..., None]] = {
            "raw": lambda piece: self.connection.transport.write(piece),
            "head": lambda _: self.connection.start_stream(),
            "chunk": self.connection.chunk,
            "end": lambda _: self.connection.end_stream(),
            "close": lambda _: self.connection.transport.close(),
            "reset": lambda _: self.connection.reset(),
        }
        for at_s, action, piece in steps:
            self._later(at_s, actions[action], piece)

    # -- an engine's work --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        engine = self.engine
        missing = [key for key in NIXL_KEYS if self.params.get(key) is None]
        if self.params.get("do_remote_prefill") and missing:
            engine.counts.n_refused += 1
            self.connection.answer(500, json.dumps({"error": {"message": f"incomplete hand-off: {missing}"}}).encode())
            self.connection.forget()
            return
        engine.running.add(self)
        n = int(self.body["max_tokens"])
        self.n_blocks = -(-(len(self.prompt) + n) // engine.block_size)
        self.answer = answer_ids(self.prompt, n)[: max(0, n - engine.behaviour.stop_short)]
        self.cached = engine.hit_tokens(self.prompt) if self.prompt else 0
        if self.body.get("stream"):
            self.connection.start_stream()
        if self.params.get("do_remote_prefill"):
            self._pull = asyncio.get_running_loop().create_task(self._pull_kv())
        else:
            engine.counts.sources["local_cache_hit"] += self.cached
            engine.counts.sources["local_compute"] += len(self.prompt) - self.cached
            self._prefill(len(self.prompt) - self.cached)

    def _prefill(self, n_tokens: int) -> None:
        behaviour = self.engine.behaviour
        self._later(behaviour.prefill_s + behaviour.prefill_s_per_token * n_tokens, self._prefilled)

    def _prefilled(self) -> None:
        self.engine.cached.update(self.engine.block_keys(self.prompt))
        self.engine.decode(self)

    async def _pull_kv(self) -> None:
        """Read the lacking blocks from P and tell it to free them, which the fake does with one small HTTP call."""
        held = await self._tell_prefiller()
        lacking = len(self.prompt) - self.cached if held else 0
        counts = self.engine.counts
        counts.sources["external_kv_transfer"] += lacking
        counts.sources["local_cache_hit"] += self.cached
        counts.bytes_pulled += lacking * KV_BYTES_PER_TOKEN
        self.cached = int(self.params.get("fake_cached_tokens", 0))
        self._prefill(0)

    async def _tell_prefiller(self) -> bool:
        body = json.dumps({"remote_request_id": self.params["remote_request_id"]}).encode()
        try:
            reader, writer = await asyncio.open_connection(self.params["remote_host"], self.params["remote_port"])
        except OSError:
            return False
        writer.write(b"POST /fake/pull HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        status = await reader.readline()
        writer.close()
        return b" 200 " in status

    def step(self) -> bool:
        """Generate one token; false when there is nothing more to do."""
        if self not in self.engine.running:
            return False
        if self.engine.behaviour.die_after == self.position:
            self.connection.reset()
            return False
        self.position += 1
        if self.body.get("stream"):
            self._send_token()
        if self.position < len(self.answer):
            return True
        self._finish()
        return False

    def _send_token(self) -> None:
        token = self.answer[self.position - 1]
        finish = b'"length"' if self.position == len(self.answer) else b"null"
        if self.engine.send_times_s is not None:
            self.engine.send_times_s.setdefault(self.request_id, []).append(perf_counter())
        self.connection.chunk(
            b'data: {"id":"cmpl-fake","object":"text_completion","created":1,"model":"fake","choices":[{"index":0,"text":" t%d",'
            b'"logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":[%d]}]}\n\n' % (token, finish, token)
        )

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.answer),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _finish(self) -> None:
        engine = self.engine
        engine.running.discard(self)
        engine.counts.n_completed += 1
        engine.cached.update(engine.block_keys(self.prompt + self.answer[:-1]))
        if self.body.get("stream"):
            self.connection.chunk(b'data: {"choices":[],"usage":%b}\n\n' % orjson.dumps(self._usage()))
            self.connection.chunk(b"data: [DONE]\n\n")
            self.connection.end_stream()
        else:
            self.connection.answer(200, orjson.dumps(self._plain_answer()))
        self.connection.forget()

    def _plain_answer(self) -> dict[str, Any]:
        choice = {"index": 0, "text": " t" * len(self.answer), "finish_reason": "length", "token_ids": self.answer}
        answer = {"object": "text_completion", "choices": [choice], "usage": self._usage()}
        return {**answer, "kv_transfer_params": self._hand_off() if self.params.get("do_remote_decode") else None}

    def _hand_off(self) -> dict[str, Any]:
        engine = self.engine
        n_blocks = -(-len(self.prompt) // engine.block_size)
        engine.pin(self.request_id, n_blocks)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": list(range(n_blocks)),
            "remote_host": engine.host,
            "remote_port": engine.port,
            "tp_size": 1,
            "fake_cached_tokens": self.cached,
        }
        return {key: value for key, value in params.items() if key not in engine.behaviour.drop_params}

    def abort(self) -> None:
        """The client has gone: stop working for it, and let P free what was not pulled yet."""
        for timer in self._timers:
            timer.cancel()
        self.engine.counts.n_aborted += 1
        self.engine.running.discard(self)


async def _serve(name: str, port: int, step_s: float) -> None:
    engine = FakeEngine(name, behaviour=Behaviour(step_s=step_s))
    engine.send_times_s = {}
    await engine.start(port)
    print(engine.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
