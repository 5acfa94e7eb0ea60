"""The processes that ``bench_router.py`` measures against: fast fake engines, a bare relay on our parts, others on other servers.

::

    python router_peers.py engines STEP_S          # prints the ports of P and D
    python router_peers.py bare P_PORT D_PORT      # prints its port
    python router_peers.py aiohttp P_PORT D_PORT   # prints its port; needs aiohttp
    python router_peers.py uvicorn P_PORT D_PORT   # prints its port; needs uvicorn and aiohttp

The engines are no models of vLLM (``tests/fakes/fake_engine.py`` is one): they answer from prepared bytes, so that they are
faster than any router. D streams ``max_tokens`` events, one per write, all streams in one step; with a step of 0, as fast as
it can.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

import httptools
import orjson
import uvloop

HOST = "127.0.0.1"
EVENT = (
    b'data: {"id":"cmpl-b6a1f0c2d3e4f5a6b7c8d9e0","object":"text_completion","created":1767225600,"model":"fake","choices":'
    b'[{"index":0,"text":" token","logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":null}],"usage":null}\n\n'
)
USAGE = (
    b'data: {"id":"cmpl-b6a1f0c2d3e4f5a6b7c8d9e0","object":"text_completion","created":1767225600,"model":"fake","choices":[],'
    b'"usage":{"prompt_tokens":512,"total_tokens":513,"completion_tokens":%d,"prompt_tokens_details":null}}\n\n'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


TOKEN = _chunk(EVENT % b"null")
LAST_TOKEN = _chunk(EVENT % b'"length"')
DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def prefill_answer(port: int) -> dict[str, Any]:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-p",
        "remote_request_id": "cmpl-p",
        "remote_block_ids": list(range(32)),
        "remote_host": HOST,
        "remote_port": port,
        "tp_size": 1,
    }
    choice = {"index": 0, "text": " token", "finish_reason": "length", "logprobs": None}
    usage = {"prompt_tokens": 512, "total_tokens": 513, "completion_tokens": 1}
    return {
        "id": "cmpl-p",
        "object": "text_completion",
        "choices": [choice],
        "usage": usage,
        "kv_transfer_params": params,
    }


class Steps:
    """Moves all streams of an engine on by one event per step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next_s = 0.0
        self.streams: list[EngineConnection] = []

    def add(self, stream: EngineConnection) -> None:
        self.streams.append(stream)
        if len(self.streams) == 1:
            self._next_s = asyncio.get_running_loop().time()
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        if self._step_s:
            loop.call_at(self._next_s, self._step)
        else:
            loop.call_later(0, self._step)

    def _step(self) -> None:
        self._next_s += self._step_s
        self.streams = [stream for stream in self.streams if stream.step()]
        if self.streams:
            self._arm()


class EngineConnection(asyncio.Protocol):
    def __init__(self, answer: bytes, steps: Steps) -> None:
        self._answer = answer
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._body: list[bytes] = []
        self._left = self._n = 0
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = -1

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if b"completions" not in self._url:
            page = b'{"object":"list","data":[{"id":"fake","object":"model"}]}' if b"models" in self._url else b"{}"
            self._send(page)
            return
        asked = orjson.loads(body)
        if asked.get("stream"):
            self._left = self._n = asked["max_tokens"]
            self._transport.write(STREAM_HEAD)
            self._steps.add(self)
        else:
            self._send(self._answer)

    def _send(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def step(self) -> bool:
        if self._paused or self._left < 0:
            return self._left >= 0
        self._left -= 1
        if self._left:
            self._transport.write(TOKEN)
            return True
        self._transport.write(LAST_TOKEN)
        self._transport.write(_chunk(USAGE % self._n) + DONE)
        return False


async def engines(step_s: float) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for _ in "PD":
        steps, answer = Steps(step_s), bytearray()
        server = await loop.create_server(
            lambda a=answer, s=steps: EngineConnection(bytes(a), s), HOST, 0, backlog=4096
        )
        ports.append(server.sockets[0].getsockname()[1])
        answer += orjson.dumps(prefill_answer(ports[0]))
    print(*ports, flush=True)
    await asyncio.Event().wait()


async def bare(p_port: int, d_port: int) -> None:
    """The least that a router on our server and dispatch does: parse the body, two legs, relay."""
    from ppd_bench.core.decision import Decision
    from ppd_bench.core.enums import Role, Route
    from ppd_bench.engine.client import Client, Flow
    from ppd_bench.engine.dispatch import Engines, LegLimits, Observer, Request, dispatch
    from ppd_bench.engine.endpoints import Endpoint
    from ppd_bench.engine.stream import RelayReader
    from ppd_bench.router.http_server import HttpRequest, HttpServer, Responder, end_to_end_headers

    fleet = Engines(
        endpoints=(
            Endpoint(worker_id="P0", role=Role.PREFILL, host=HOST, port=p_port),
            Endpoint(worker_id="D0", role=Role.DECODE, host=HOST, port=d_port),
        )
    )
    decision = Decision(route=Route.PD, prefill_worker=0, decode_worker=1, reason="bench")
    client, limits, count = Client(perf_counter), LegLimits(), iter(range(10**9))

    class Start(Observer):
        def __init__(self, responder: Responder) -> None:
            self.responder = responder

        def on_head(self, status: int, headers: Any) -> None:
            self.responder.start(status, end_to_end_headers(list(headers.items())))

    async def relay(request: HttpRequest, responder: Responder) -> None:
        body, flow = request.body, Flow()
        responder.on_pressure(flow.pause, flow.resume)
        asked = Request(request_id=f"bench-{next(count)}", body=orjson.loads(body), raw=body, path=request.path)
        tap, observer = responder.write, Start(responder)
        await dispatch(
            client, fleet, decision, asked, limits=limits, tap=tap, observer=observer, flow=flow, reader=RelayReader
        )
        responder.finish()

    print(await HttpServer(relay, clock=perf_counter).start(HOST, 0), flush=True)
    await asyncio.Event().wait()


class TwoLegs:
    """P and D through aiohttp's client, for relays on other servers than ours."""

    def __init__(self, p_port: int, d_port: int) -> None:
        import aiohttp

        no_limit = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=no_limit)
        self._p, self._d = f"http://{HOST}:{p_port}", f"http://{HOST}:{d_port}"

    async def __call__(
        self, path: str, raw: bytes, start: Callable[[int, str], Awaitable[Any]]
    ) -> AsyncIterator[bytes]:
        """The pieces of D's answer; ``start`` gets status and content type before the first."""
        body, headers = orjson.loads(raw), {"content-type": "application/json"}
        asks = {"do_remote_decode": True, "do_remote_prefill": False}
        first = orjson.dumps({**body, "stream": False, "max_tokens": 1, "kv_transfer_params": asks})
        async with self._session.post(self._p + path, data=first, headers=headers) as p:
            handle = orjson.loads(await p.read())["kv_transfer_params"]
        second = orjson.dumps({**body, "kv_transfer_params": handle})
        async with self._session.post(self._d + path, data=second, headers=headers) as d:
            await start(d.status, d.headers["content-type"])
            async for piece in d.content.iter_any():
                yield piece


async def on_aiohttp(p_port: int, d_port: int) -> None:
    """The same on aiohttp's server and client."""
    from aiohttp import web

    legs = TwoLegs(p_port, d_port)

    async def relay(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()

        async def start(status: int, kind: str) -> None:
            answer.set_status(status)
            answer.headers["content-type"] = kind
            await answer.prepare(request)

        async for piece in legs(request.path, await request.read(), start):
            await answer.write(piece)
        await answer.write_eof()
        return answer

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", relay)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def on_uvicorn(p_port: int, d_port: int) -> None:
    """The same on uvicorn (httptools, uvloop) as a bare ASGI application, with aiohttp's client."""
    import uvicorn

    legs = TwoLegs(p_port, d_port)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message["body"], message.get("more_body", False)

        async def start(status: int, kind: str) -> None:
            headers = [(b"content-type", kind.encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})

        async for piece in legs(scope["path"], raw, start):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        app, host=HOST, port=0, http="httptools", log_level="error", lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


RELAYS: dict[str, Callable[[int, int], Awaitable[None]]] = {"bare": bare, "aiohttp": on_aiohttp, "uvicorn": on_uvicorn}

if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "engines":
        uvloop.run(engines(float(arguments[0])))
    else:
        uvloop.run(RELAYS[what](int(arguments[0]), int(arguments[1])))  # type: ignore[arg-type]
