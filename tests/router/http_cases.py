"""A server on a real socket, raw clients, and handlers that the tests of the HTTP server share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import orjson

from ppd_bench.router.http_server import Handler, HttpRequest, HttpServer, Responder

HOST = "127.0.0.1"
PLAIN = (("content-type", "text/plain"),)


def run(main: Coroutine[Any, Any, None], within_s: float = 20.0) -> None:
    """Run a test's coroutine; one that hangs fails."""
    asyncio.run(asyncio.wait_for(main, within_s))


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait for something to become true; fail when it does not in time."""
    end_s = perf_counter() + within_s
    while not condition():
        assert perf_counter() < end_s, "it did not happen in time"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(handler: Handler, **limits: Any) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server with this handler, and its port."""
    server = HttpServer(handler, clock=perf_counter, **limits)
    port = await server.start(HOST, 0)
    try:
        yield server, port
    finally:
        await server.drain(0.0)


async def echo(request: HttpRequest, responder: Responder) -> None:
    """Says what it was asked."""
    heard = {"method": request.method, "path": request.path, "query": request.query, "n": len(request.body)}
    responder.send(200, (("content-type", "application/json"),), orjson.dumps({**heard, "headers": request.headers}))


@dataclass
class Wire:
    """A raw client connection that can read HTTP answers. ``buffer``: bytes read and not used yet."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    buffer: bytes = field(default=b"")

    @classmethod
    async def open(cls, port: int, **more: Any) -> Wire:
        return cls(*await asyncio.open_connection(HOST, port, **more))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return await self.reader.read(-1)

    async def answer(self, *, head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body. ``head``: the request was HEAD."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
        if head or status in (100, 204, 304):
            return status, headers, b""
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") == "chunked":
            return status, headers, b"".join([chunk async for chunk in self.chunks()])
        return status, headers, await self.reader.read(-1)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The chunks of a body as they were framed."""
        while True:
            n = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            piece = (await self.reader.readexactly(n + 2))[:-2]
            if n == 0:
                return
            yield piece

    def close(self) -> None:
        self.writer.transport.abort()


def get(path: str = "/", *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: router", *headers, "", ""]).encode("latin-1")


def post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    return get(path, f"Content-Length: {len(body)}", *headers, method="POST") + body


async def ask(port: int, data: bytes, **more: Any) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    wire = await Wire.open(port)
    wire.send(data)
    try:
        return await wire.answer(**more)
    finally:
        wire.close()


def small_socket(port: int) -> socket.socket:
    """A connected client socket with a receive buffer so small that an unread answer soon presses."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((HOST, port))
    client.setblocking(False)
    return client
