"""Answers as they leave: framing, order, and what happens to handlers that misbehave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from http_cases import PLAIN, Wire, ask, echo, get, post, run, serving, small_socket, until
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_bench.router.http_server import HttpRequest, Responder


def test_a_connection_serves_one_request_after_another() -> None:
    async def main() -> None:
        async with serving(echo) as (server, port):
            wire = await Wire.open(port)
            for path in ("/1", "/2", "/3"):
                wire.send(get(path))
                _, headers, body = await wire.answer()
                assert orjson.loads(body)["path"] == path
                assert "connection" not in headers
            assert server.n_connections == 1
            wire.close()

    run(main())


def test_requests_sent_ahead_are_answered_one_at_a_time_in_their_order() -> None:
    async def main() -> None:
        running: list[str] = []
        most = 0

        async def slow_first(request: HttpRequest, responder: Responder) -> None:
            nonlocal most
            running.append(request.path)
            most = max(most, len(running))
            await asyncio.sleep(0.02 if request.path == "/0" else 0)
            running.remove(request.path)
            await echo(request, responder)

        async with serving(slow_first) as (_, port):
            wire = await Wire.open(port)
            wire.send(b"".join(get(f"/{i}") for i in range(20)))
            paths = [orjson.loads((await wire.answer())[2])["path"] for _ in range(20)]
            wire.close()
        assert (paths, most) == ([f"/{i}" for i in range(20)], 1)

    run(main())


def test_requests_far_ahead_wait_in_the_kernel_and_are_answered_all_the_same() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def wait(request: HttpRequest, responder: Responder) -> None:
            await go.wait()
            await echo(request, responder)

        async with serving(wait) as (server, port):
            wire = await Wire.open(port)
            for _ in range(60):
                wire.send(post(b"x" * 100_000))
            await asyncio.sleep(0.1)
            (connection,) = server._serving.connections
            assert connection._n_ahead_bytes < 1_000_000
            go.set()
            assert [(await wire.answer())[0] for _ in range(60)] == [200] * 60
            wire.close()

    run(main())


def test_a_request_sent_ahead_of_a_bad_one_is_answered_before_that_is_refused() -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/good") + b"GET / HTTP/1.1\r\n\r\n" + get("/never"))
            assert [(await wire.answer())[0] for _ in range(2)] == [200, 400]
            assert await wire.rest() == b""
            wire.close()

    run(main())


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=300), max_size=12))
def test_pieces_of_a_stream_leave_as_chunks_in_their_order_each_for_itself(pieces: list[bytes]) -> None:
    async def main() -> None:
        async def stream(request: HttpRequest, responder: Responder) -> None:
            responder.start(200, PLAIN)
            for piece in pieces:
                responder.write(piece)
                await asyncio.sleep(0)
            responder.finish()
            assert responder.n_body_bytes == sum(map(len, pieces))

        async with serving(stream) as (_, port):
            wire = await Wire.open(port)
            wire.send(get())
            head = await wire.reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked\r\n" in head
            assert [chunk async for chunk in wire.chunks()] == [piece for piece in pieces if piece]
            wire.close()

    run(main())


def test_headers_leave_before_a_body_that_is_late() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def late(request: HttpRequest, responder: Responder) -> None:
            responder.start(200, PLAIN)
            await go.wait()
            responder.finish()

        async with serving(late) as (_, port):
            wire = await Wire.open(port)
            wire.send(get())
            assert b"200 OK" in await wire.reader.readuntil(b"\r\n\r\n")
            go.set()
            assert [chunk async for chunk in wire.chunks()] == []
            wire.close()

    run(main())


def test_head_and_no_content_have_headers_and_no_body() -> None:
    async def main() -> None:
        async def answer(request: HttpRequest, responder: Responder) -> None:
            if request.path == "/stream":
                responder.start(200, PLAIN)
                responder.write(b"piece")
                responder.finish()
            else:
                responder.send(
                    204 if request.path == "/none" else 200, PLAIN, b"" if request.path == "/none" else b"body"
                )

        async with serving(answer) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/", method="HEAD") + get("/stream", method="HEAD") + get("/none") + get("/"))
            assert (await wire.answer(head=True))[1]["content-length"] == "4"
            assert (await wire.answer(head=True))[1]["transfer-encoding"] == "chunked"
            assert "content-length" not in (await wire.answer())[1]
            assert (await wire.answer())[2] == b"body"
            wire.close()

    run(main())


@pytest.mark.parametrize("path", ["/v1/models", "*"])
def test_options_are_the_handlers_own_affair(path: str) -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            heard = orjson.loads((await ask(port, get(path, method="OPTIONS")))[2])
        assert (heard["method"], heard["path"]) == ("OPTIONS", path)

    run(main())


def test_http_1_0_is_answered_without_chunks_and_closed_unless_it_asks_to_keep() -> None:
    async def main() -> None:
        async def stream(request: HttpRequest, responder: Responder) -> None:
            responder.start(200, PLAIN, length=4 if request.path == "/known" else None)
            responder.write(b"ab")
            responder.write(b"cd")
            responder.finish()

        async with serving(stream) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/known", "Connection: keep-alive", version="1.0"))
            assert (await wire.answer())[1:] == (
                {"content-type": "text/plain", "content-length": "4", "connection": "keep-alive"},
                b"abcd",
            )
            wire.send(get("/", "Connection: keep-alive", version="1.0"))
            status, headers, body = await wire.answer()
            assert (status, headers, body) == (200, {"content-type": "text/plain", "connection": "close"}, b"abcd")
            wire.close()
            assert (await ask(port, b"GET /known HTTP/1.0\r\n\r\n"))[1]["connection"] == "close"

    run(main())


def test_a_client_that_asks_to_close_is_closed_and_what_it_sends_after_that_is_nobodys() -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/last", "Connection: close") + get("/after"))
            status, headers, _ = await wire.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await wire.rest() == b""
            wire.close()

    run(main())


# -- handlers that misbehave -------------------------------------------------------------------------------------------


def too_long(responder: Responder) -> None:
    responder.start(200, (), length=2)
    responder.write(b"abc")


def too_short(responder: Responder) -> None:
    responder.start(200, (), length=5)
    responder.write(b"abc")
    responder.finish()


def half(responder: Responder) -> None:
    responder.start(200, ())
    responder.write(b"abc")


def raises_at_once(responder: Responder) -> None:
    raise ValueError("secret detail")


def raises_midway(responder: Responder) -> None:
    half(responder)
    raise ValueError("secret detail")


def says_nothing(responder: Responder) -> None:
    pass


def splits_the_head(responder: Responder) -> None:
    responder.send(200, (("x-id", "a\r\nset-cookie: b"),), b"")


def splits_the_head_with_a_carriage_return(responder: Responder) -> None:
    responder.start(200, (("x-id", "a\rb"),))


def beyond_latin_1(responder: Responder) -> None:
    responder.send(200, (("x-id", "\u4f60"),), b"")


def starts_twice(responder: Responder) -> None:
    responder.start(200, ())
    responder.start(200, ())


@pytest.mark.parametrize(
    "handle", [raises_at_once, says_nothing, splits_the_head, splits_the_head_with_a_carriage_return, beyond_latin_1]
)
def test_a_handler_that_fails_before_it_answers_gives_a_500_that_tells_no_details(handle: Callable[..., None]) -> None:
    async def main() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

        async def handler(request: HttpRequest, responder: Responder) -> None:
            handle(responder)

        async with serving(handler) as (server, port):
            status, headers, body = await ask(port, get())
            assert (status, headers["connection"]) == (500, "close")
            assert orjson.loads(body)["error"]["code"] == 500
            assert b"secret" not in body
            await until(lambda: server.n_open_requests == 0)
        assert len(told) == (handle is not says_nothing)

    run(main())


@pytest.mark.parametrize("handle", [raises_midway, half, too_short, too_long, starts_twice])
def test_a_handler_that_fails_after_it_began_ends_the_connection_so_that_the_answer_cannot_pass_for_whole(
    handle: Callable[..., None],
) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

        async def handler(request: HttpRequest, responder: Responder) -> None:
            handle(responder)

        async with serving(handler) as (server, port):
            wire = await Wire.open(port)
            wire.send(get())
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await wire.answer()
            wire.close()
            await until(lambda: server.n_open_requests == 0 and server.n_connections == 0)

    run(main())


# -- slow clients ------------------------------------------------------------------------------------------------------


def test_a_slow_client_presses_its_handler_and_nobody_else_and_memory_stays_bounded() -> None:
    async def main() -> None:
        n_written, pressed, relieved = 0, [], []
        piece = b"x" * 16_384

        async def pour(request: HttpRequest, responder: Responder) -> None:
            nonlocal n_written
            if request.path == "/quick":
                await echo(request, responder)
                return
            responder.on_pressure(lambda: pressed.append(1), lambda: relieved.append(1))
            responder.start(200, PLAIN)
            for _ in range(2000):
                responder.write(piece)
                n_written += len(piece)
                await responder.drained()
            responder.finish()

        async with serving(pour) as (server, port):
            client = small_socket(port)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, get("/pour"))
            await until(lambda: pressed)
            seen = n_written
            (connection,) = server._serving.connections
            assert (await ask(port, get("/quick")))[0] == 200
            assert n_written == seen
            assert connection._transport is not None
            assert connection._transport.get_write_buffer_size() < 400_000
            n_read = 0
            while n_read < 2000 * len(piece):
                n_read += len(await loop.sock_recv(client, 1 << 20))
            client.close()
        assert n_written == 2000 * len(piece)
        assert len(relieved) == len(pressed)

    run(main())


def test_a_client_that_leaves_its_answer_unread_for_too_long_is_cut_and_its_handler_cancelled() -> None:
    async def main() -> None:
        cancelled = asyncio.Event()

        async def pour(request: HttpRequest, responder: Responder) -> None:
            responder.start(200, PLAIN)
            try:
                while True:
                    responder.write(b"x" * 65_536)
                    await responder.drained()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with serving(pour, stall_timeout_s=0.2) as (server, port):
            client = small_socket(port)
            await asyncio.get_running_loop().sock_sendall(client, get())
            await asyncio.wait_for(cancelled.wait(), 5)
            await until(lambda: server.n_connections == 0)
            client.close()

    run(main())


def test_the_whole_of_an_answer_reaches_a_client_that_reads_late() -> None:
    async def main() -> None:
        body = bytes(range(256)) * 8192

        async def big(request: HttpRequest, responder: Responder) -> None:
            responder.send(200, PLAIN, body)

        async with serving(big) as (server, port):
            client = small_socket(port)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, get("/", "Connection: close"))
            await until(lambda: server.n_open_requests == 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            seen = bytearray()
            while piece := await loop.sock_recv(client, 1 << 20):
                seen += piece
            client.close()
        assert seen.endswith(b"\r\n\r\n" + body)

    run(main())
