"""Clients that vanish or dawdle, and a server that stops."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import uvloop
from http_cases import HOST, PLAIN, Wire, ask, echo, get, post, run, serving, until

from ppd_bench.core.errors import EngineError
from ppd_bench.router.http_server import HttpRequest, HttpServer, Responder


class Steps:
    """A handler that streams until it is told to stop, and notes how it ended."""

    def __init__(self) -> None:
        self.go_on = True
        self.cancelled_s: float | None = None
        self.n_done = 0
        self.responders: list[Responder] = []

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        self.responders.append(responder)
        try:
            if request.path != "/silent":
                responder.start(200, PLAIN)
            while self.go_on:
                if responder.started:
                    responder.write(b"step")
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled_s = perf_counter()
            raise
        responder.finish()
        self.n_done += 1


LEAVING: dict[str, Callable[[Wire], None]] = {
    "by reset": lambda wire: wire.writer.transport.abort(),
    "by closing": lambda wire: wire.writer.close(),
    "by ending its side": lambda wire: wire.writer.write_eof(),
}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("path", ["/silent", "/stream"])
@pytest.mark.parametrize("leaves", LEAVING)
def test_b9_b10_a_handler_is_cancelled_at_once_when_its_client_leaves(leaves: str, path: str, loop: str) -> None:
    async def main() -> None:
        steps = Steps()
        async with serving(steps) as (server, port):
            wire = await Wire.open(port)
            wire.send(get(path))
            await until(lambda: steps.responders)
            await asyncio.sleep(0.03)
            left_s = perf_counter()
            LEAVING[leaves](wire)
            await until(lambda: steps.cancelled_s is not None)
            assert steps.cancelled_s is not None
            assert steps.cancelled_s - left_s < 0.2
            await until(lambda: server.n_open_requests == 0 and server.n_connections == 0)
            assert steps.responders[0].gone
            wire.close()

    if loop == "uvloop":
        uvloop.run(asyncio.wait_for(main(), 20))
    else:
        run(main())


def test_a_handler_that_goes_on_after_its_client_has_gone_writes_into_the_void() -> None:
    async def main() -> None:
        ended: list[int] = []

        async def stubborn(request: HttpRequest, responder: Responder) -> None:
            responder.start(200, PLAIN)
            while not responder.gone:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    await asyncio.sleep(0)
            responder.write(b"x" * 1000)
            await responder.drained()
            responder.finish()
            ended.append(responder.n_body_bytes)

        async with serving(stubborn) as (server, port):
            wire = await Wire.open(port)
            wire.send(get())
            await wire.reader.readuntil(b"\r\n\r\n")
            wire.close()
            await until(lambda: ended and server.n_open_requests == 0)
        assert ended == [0]

    run(main())


def test_bookkeeping_after_an_answer_is_not_cancelled_by_a_client_that_leaves_with_it() -> None:
    async def main() -> None:
        booked: list[str] = []

        async def book(request: HttpRequest, responder: Responder) -> None:
            responder.send(200, PLAIN, b"done")
            await asyncio.sleep(0.05)
            booked.append(request.path)

        async with serving(book) as (server, port):
            assert (await ask(port, get("/a")))[0] == 200
            await until(lambda: server.n_connections == 0)
            assert server.n_open_requests == 1
            await until(lambda: booked == ["/a"])

    run(main())


def test_requests_sent_ahead_by_a_client_that_leaves_are_not_begun() -> None:
    async def main() -> None:
        steps = Steps()
        async with serving(steps) as (server, port):
            wire = await Wire.open(port)
            wire.send(get() * 5)
            await until(lambda: steps.responders)
            wire.close()
            await until(lambda: server.n_open_requests == 0)
            await asyncio.sleep(0.02)
        assert len(steps.responders) == 1

    run(main())


# -- dawdlers ----------------------------------------------------------------------------------------------------------


def test_a_head_that_drips_in_is_given_up() -> None:
    async def main() -> None:
        async with serving(echo, head_timeout_s=0.2) as (_, port):
            wire = await Wire.open(port)
            status = None
            for byte in get("/", "X: " + "y" * 1000):
                wire.send(bytes([byte]))
                await asyncio.sleep(0.01)
                if wire.reader._buffer:  # type: ignore[attr-defined]
                    status, headers, _ = await wire.answer()
                    break
            assert (status, headers["connection"]) == (408, "close")
            wire.close()

    run(main())


def test_a_body_that_never_comes_is_given_up() -> None:
    async def main() -> None:
        async with serving(echo, body_timeout_s=0.2) as (_, port):
            status, headers, body = await ask(port, get("/", "Content-Length: 5", method="POST") + b"abc")
        assert (status, headers["connection"]) == (408, "close")
        assert b"its body did not arrive in time" in body

    run(main())


@pytest.mark.parametrize("sent", [b"", get()])
def test_an_idle_connection_is_closed_without_a_word(sent: bytes) -> None:
    async def main() -> None:
        async with serving(echo, head_timeout_s=0.2, idle_timeout_s=0.2) as (server, port):
            wire = await Wire.open(port)
            wire.send(sent)
            if sent:
                assert (await wire.answer())[0] == 200
            assert await wire.rest() == b""
            wire.close()
            await until(lambda: server.n_connections == 0)

    run(main())


def test_an_answer_may_take_longer_than_every_timeout_for_requests() -> None:
    async def main() -> None:
        async def slow(request: HttpRequest, responder: Responder) -> None:
            await asyncio.sleep(0.6)
            await echo(request, responder)

        async with serving(slow, head_timeout_s=0.1, body_timeout_s=0.1, idle_timeout_s=0.1) as (_, port):
            assert (await ask(port, post(b"x")))[0] == 200

    run(main())


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_b40_a_drain_lets_streams_finish_closes_idle_connections_and_accepts_nothing() -> None:
    async def main() -> None:
        steps = Steps()
        server = HttpServer(steps, clock=perf_counter)
        port = await server.start(HOST, 0)
        idle, streaming = await Wire.open(port), await Wire.open(port)
        streaming.send(get())
        await until(lambda: server.n_open_requests == 1 and server.n_connections == 2)
        drain = asyncio.create_task(server.drain(10.0))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await Wire.open(port)
        steps.go_on = False
        _, _, body = await streaming.answer()
        assert body
        assert set(body) == set(b"step")
        assert await streaming.rest() == b""
        assert await drain is True
        assert (server.n_open_requests, server.n_connections, steps.n_done) == (0, 0, 1)
        for wire in (idle, streaming):
            wire.close()

    run(main())


def test_b40_what_does_not_finish_in_time_is_cut_and_said_so() -> None:
    async def main() -> None:
        steps = Steps()
        async with serving(steps) as (server, port):
            streaming, silent = await Wire.open(port), await Wire.open(port)
            streaming.send(get())
            silent.send(get("/silent"))
            await until(lambda: server.n_open_requests == 2)
            began_s = perf_counter()
            assert await server.drain(0.2) is False
            assert perf_counter() - began_s < 5
            assert (server.n_open_requests, server.n_connections) == (0, 0)
            assert (await silent.answer())[0] == 503
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await streaming.answer()
            for wire in (silent, streaming):
                wire.close()

    run(main())


def test_b40_bookkeeping_after_answers_ends_before_a_drain_does() -> None:
    async def main() -> None:
        booked: list[str] = []

        async def book(request: HttpRequest, responder: Responder) -> None:
            responder.send(200, PLAIN, b"done")
            await asyncio.sleep(0.1)
            booked.append(request.path)

        server = HttpServer(book, clock=perf_counter)
        port = await server.start(HOST, 0)
        assert (await ask(port, get("/a")))[0] == 200
        assert await server.drain(5.0) is True
        assert booked == ["/a"]

    run(main())


def test_an_address_in_use_is_said_with_what_to_do() -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            with pytest.raises(EngineError, match=f"cannot listen on {HOST}:{port}.*choose another"):
                await HttpServer(echo, clock=perf_counter).start(HOST, port)

    run(main())


def test_tls_is_served_with_a_context(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl, which makes the test's certificate, is absent")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    client_side = ssl.create_default_context(cafile=str(certificate))
    client_side.check_hostname = False

    async def main() -> None:
        server = HttpServer(echo, clock=perf_counter)
        port = await server.start(HOST, 0, ssl=server_side)
        wire = await Wire.open(port, ssl=client_side)
        wire.send(post(b"x" * 300_000))
        assert (await wire.answer())[0] == 200
        wire.send(b"no HTTP\r\n\r\n")
        assert (await wire.answer())[0] == 400
        wire.close()
        await server.drain(1.0)

    run(main())
