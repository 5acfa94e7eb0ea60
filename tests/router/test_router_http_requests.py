"""Requests as they come over a raw socket: well formed, odd, hostile."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson
import pytest
from http_cases import Wire, ask, echo, get, post, run, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_bench.router.http_server import HttpRequest, Responder, end_to_end_headers


def error_of(body: bytes) -> str:
    """The message of an error in OpenAI's form, whose shape is checked on the way."""
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def test_a_request_reaches_its_handler_as_it_was_sent() -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            status, headers, body = await ask(
                port, post(b"x" * 2048, "X-Thing: a: b ", "X-Empty:", path="/v1/x?q=%20a#f")
            )
        heard = orjson.loads(body)
        assert (status, heard["method"], heard["n"]) == (200, "POST", 2048)
        assert (heard["path"], heard["query"]) == ("/v1/x", "q=%20a#f")
        assert ["x-thing", "a: b"] in heard["headers"]
        assert ["x-empty", ""] in heard["headers"]
        assert headers["content-length"] == str(len(body))

    run(main())


def test_the_absolute_form_of_a_target_is_its_path() -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            _, _, body = await ask(port, get("http://router:1/v1/models?limit=2"))
        assert (orjson.loads(body)["path"], orjson.loads(body)["query"]) == ("/v1/models", "limit=2")

    run(main())


@pytest.mark.parametrize("n_bytes", [0, 1, 8 * 1024 * 1024])
def test_a_body_of_any_size_arrives_whole(n_bytes: int) -> None:
    async def main() -> None:
        seen = []

        async def keep(request: HttpRequest, responder: Responder) -> None:
            seen.append(request.body)
            responder.send(200, (), b"")

        body = bytes(range(256)) * (n_bytes // 256) if n_bytes > 1 else b"x" * n_bytes
        async with serving(keep) as (_, port):
            assert (await ask(port, post(body)))[0] == 200
        assert seen == [body]

    run(main())


@settings(max_examples=20)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.integers(1, 7))
def test_a_chunked_body_cut_anywhere_arrives_whole(pieces: list[bytes], step: int) -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            wire = await Wire.open(port)
            data = get("/", "Transfer-Encoding: chunked", method="POST")
            data += b"".join(b"%x;note=1\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\nX-Trailer: late\r\n\r\n"
            for begin in range(0, len(data), step):
                wire.send(data[begin : begin + step])
                if begin % 60 < step:
                    await asyncio.sleep(0)
            status, _, body = await wire.answer()
            wire.close()
        heard = orjson.loads(body)
        assert (status, heard["n"]) == (200, sum(map(len, pieces)))
        assert "x-trailer" not in dict(heard["headers"])

    run(main())


REFUSED = {
    "both lengths": (get("/", "Content-Length: 3", "Transfer-Encoding: chunked", method="POST") + b"0\r\n\r\n", 400),
    "both lengths, the other way round": (
        get("/", "Transfer-Encoding: chunked", "Content-Length: 3", method="POST") + b"0\r\n\r\n",
        400,
    ),
    "two lengths": (get("/", "Content-Length: 3", "Content-Length: 4", method="POST") + b"abcd", 400),
    "a list of lengths": (get("/", "Content-Length: 3, 3", method="POST") + b"abc", 400),
    "a signed length": (get("/", "Content-Length: +3", method="POST") + b"abc", 400),
    "a negative length": (get("/", "Content-Length: -1", method="POST"), 400),
    "a length beyond counting": (get("/", "Content-Length: 99999999999999999999999", method="POST"), 400),
    "a coding that hides chunked": (get("/", "Transfer-Encoding: xchunked", method="POST") + b"0\r\n\r\n", 501),
    "a coding before chunked": (get("/", "Transfer-Encoding: gzip, chunked", method="POST") + b"0\r\n\r\n", 501),
    "a second coding": (
        get("/", "Transfer-Encoding: chunked", "Transfer-Encoding: identity", method="POST") + b"0\r\n\r\n",
        400,
    ),
    "chunked in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a chunk size that is none": (get("/", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n", 400),
    "a chunk size beyond counting": (get("/", "Transfer-Encoding: chunked", method="POST") + b"f" * 18 + b"\r\n", 400),
    "a space before the colon": (b"POST / HTTP/1.1\r\nHost : a\r\nContent-Length : 0\r\n\r\n", 400),
    "a folded header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", 400),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "a bare carriage return": (b"GET / HTTP/1.1\r\nHost: a\rX: y\r\n\r\n", 400),
    "a zero byte": (b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no method": (b"PROMPT / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "HTTP/2 without asking": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/2.0 as a word": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "HTTP/9.9": (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 400),
    "a tunnel": (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "an expectation that nobody knows": (post(b"x", "Expect: miracles"), 417),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_two_readers_could_read_differently_is_refused_and_its_connection_closed(name: str) -> None:
    data, expected = REFUSED[name]

    async def main() -> None:
        seen = []

        async def keep(request: HttpRequest, responder: Responder) -> None:
            seen.append(request)
            responder.send(200, (), b"")

        async with serving(keep) as (server, port):
            wire = await Wire.open(port)
            wire.send(data)
            status, headers, body = await wire.answer()
            assert (status, headers["connection"]) == (expected, "close")
            assert error_of(body)
            wire.send(get("/smuggled"))
            assert await wire.rest() == b""
            wire.close()
        assert (seen, dict(server.n_refused)) == ([], {expected: 1})

    run(main())


def test_a_body_above_the_limit_is_refused_before_it_is_sent() -> None:
    async def main() -> None:
        async with serving(echo, max_body_bytes=1000) as (_, port):
            status, _, body = await ask(port, get("/", "Content-Length: 1001", "Expect: 100-continue", method="POST"))
            assert status == 413
            assert "1000 bytes" in error_of(body)
            assert (await ask(port, post(b"x" * 1000)))[0] == 200

    run(main())


def test_a_client_that_sends_on_after_a_refusal_still_reads_it() -> None:
    async def main() -> None:
        async with serving(echo, max_body_bytes=1000) as (_, port):
            wire = await Wire.open(port)
            wire.send(post(b"x" * 4_000_000))
            assert (await wire.answer())[0] == 413
            wire.close()

    run(main())


@pytest.mark.parametrize("chunk", [1, 400])
def test_a_chunked_body_above_the_limit_is_refused_in_whatever_pieces(chunk: int) -> None:
    async def main() -> None:
        async with serving(echo, max_body_bytes=1000, max_head_bytes=1000) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/", "Transfer-Encoding: chunked", method="POST"))
            wire.send(b"%x\r\n%b\r\n" % (chunk, b"x" * chunk) * (4000 // chunk))
            assert (await wire.answer())[0] == 413
            wire.close()

    run(main())


def test_headers_above_the_limit_are_refused_even_when_they_never_end() -> None:
    async def main() -> None:
        async with serving(echo, max_head_bytes=2000) as (_, port):
            assert (await ask(port, get("/", "X: " + "y" * 2000)))[0] == 431
            assert (await ask(port, get("/" + "y" * 2000)))[0] == 431
            wire = await Wire.open(port)
            wire.send(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
            for _ in range(30):
                wire.send(b"y" * 100)
                await asyncio.sleep(0)
            assert (await wire.answer())[0] == 431
            wire.close()
            assert (await ask(port, get("/", "X: " + "y" * 1500)))[0] == 200

    run(main())


def test_trailers_without_end_are_refused() -> None:
    async def main() -> None:
        async with serving(echo, max_body_bytes=1000, max_head_bytes=1000) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/", "Transfer-Encoding: chunked", method="POST") + b"0\r\n")
            for _ in range(40):
                wire.send(b"X-Trailer: " + b"y" * 89 + b"\r\n")
                await asyncio.sleep(0)
            assert (await wire.answer())[0] == 413
            wire.close()

    run(main())


def test_a_client_that_waits_for_100_continue_is_told_to_go_on() -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/", "Content-Length: 5", "Expect: 100-Continue", method="POST"))
            assert (await wire.answer())[0] == 100
            wire.send(b"hello")
            assert (await wire.answer())[0] == 200
            wire.close()

    run(main())


def test_a_client_that_waits_for_100_continue_behind_another_request_is_told_when_its_turn_has_come() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def wait(request: HttpRequest, responder: Responder) -> None:
            await go.wait()
            await echo(request, responder)

        async with serving(wait) as (_, port):
            wire = await Wire.open(port)
            wire.send(get("/first") + get("/second", "Content-Length: 5", "Expect: 100-continue", method="POST"))
            await asyncio.sleep(0.02)
            go.set()
            assert [(await wire.answer())[0] for _ in range(2)] == [200, 100]
            wire.send(b"hello")
            assert (await wire.answer())[0] == 200
            wire.close()

    run(main())


def test_an_offer_of_another_protocol_is_ignored_body_and_all() -> None:
    async def main() -> None:
        async with serving(echo) as (_, port):
            wire = await Wire.open(port)
            offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAA")
            wire.send(post(b"hello", *offer) + get("/next"))
            status, _, body = await wire.answer()
            heard = orjson.loads(body)
            assert (status, heard["n"]) == (200, 5)
            assert not {"upgrade", "connection", "http2-settings"} & set(dict(heard["headers"]))
            assert orjson.loads((await wire.answer())[2])["path"] == "/next"
            wire.close()

    run(main())


WELL_FORMED = (
    get("/a")
    + post(b"body", path="/b")
    + get("/c", "Transfer-Encoding: chunked", method="POST")
    + b"2\r\nxy\r\n0\r\n\r\n"
)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, len(WELL_FORMED)), st.integers(0, 6), st.binary(max_size=4)), max_size=4),
    st.integers(1, len(WELL_FORMED)),
)
def test_whatever_comes_is_answered_or_closed_and_troubles_nobody_else(
    changes: list[tuple[int, int, bytes]], step: int
) -> None:
    data = WELL_FORMED
    for at, n, instead in changes:
        data = data[:at] + instead + data[at + n :]

    async def main() -> None:
        troubles: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
        async with serving(echo, head_timeout_s=0.1, body_timeout_s=0.1, idle_timeout_s=0.1) as (server, port):
            wire = await Wire.open(port)
            for begin in range(0, len(data), step):
                wire.send(data[begin : begin + step])
                await asyncio.sleep(0)
            with suppress(ConnectionResetError):
                said = await wire.rest()
                assert said == b"" or said.startswith(b"HTTP/1.1 ")
                if not changes:
                    assert said.count(b"HTTP/1.1 200 OK") == 3
            wire.close()
            assert (await ask(port, get("/other")))[0] == 200
            assert server.n_open_requests == 0
        assert troubles == []

    run(main())


def test_a_request_shows_neither_keys_nor_prompts() -> None:
    request = HttpRequest(
        method="POST", path="/v1/x", query="", headers=(("authorization", "secret"),), body=b"prompt", peer=""
    )
    assert repr(request) == "HttpRequest(POST /v1/x, 6 bytes)"
    assert (request.header("authorization"), request.header("x")) == ("secret", None)


def test_headers_of_one_connection_are_not_relayed() -> None:
    mine = [("content-type", "text/event-stream"), ("x-a", "1"), ("set-cookie", "a"), ("set-cookie", "b")]
    hops = [("connection", "close, X-Mine"), ("x-mine", "1"), ("keep-alive", "5"), ("transfer-encoding", "chunked")]
    framing = [("content-length", "3"), ("host", "d"), ("te", "trailers"), ("upgrade", "h2c"), ("trailer", "x")]
    assert end_to_end_headers([*hops, *mine, *framing]) == mine
