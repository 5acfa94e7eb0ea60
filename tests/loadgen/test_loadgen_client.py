"""The HTTP client against a fake engine on a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import perf_counter

import orjson
import pytest
from fake_engine import Behaviour, FakeEngine, answer_ids
from loadgen_cases import body_of, run, until

import ppd_bench.engine.client as client_module
from ppd_bench.core.enums import Status
from ppd_bench.engine.client import Client, Limits
from ppd_bench.engine.stream import Failure


def test_a_connection_is_used_again_and_forgotten_when_it_has_been_idle_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        fake = await FakeEngine().start()
        async with Client(perf_counter) as client:
            for _ in range(3):
                assert (await client.post(fake.host, fake.port, orjson.dumps(body_of()))).ok
            assert client.n_connections_opened == 1
            monkeypatch.setattr(client_module, "MAX_IDLE_S", 0.0)
            assert (await client.post(fake.host, fake.port, orjson.dumps(body_of()))).ok
            assert client.n_connections_opened == 2
        await until(lambda: not fake._connections)
        await fake.stop()

    run(main())


def test_there_is_no_connection_cap() -> None:
    async def main() -> None:
        fake = await FakeEngine(behaviour=Behaviour(prefill_s=0.3)).start()
        async with Client(perf_counter) as client:
            body = orjson.dumps(body_of(n_tokens=1))
            outcomes = await asyncio.gather(*(client.post(fake.host, fake.port, body) for _ in range(150)))
            assert all(outcome.ok for outcome in outcomes)
            assert client.n_connections_opened == 150
        await fake.stop()

    run(main())


def test_an_answer_comes_back_with_the_ids_that_were_generated_and_exact_times() -> None:
    async def main() -> None:
        fake = await FakeEngine().start()
        async with Client(perf_counter) as client:
            outcome = await client.post(fake.host, fake.port, orjson.dumps(body_of()), request_id="r1")
        assert outcome.token_ids == tuple(answer_ids(list(range(64)), 8))
        assert outcome.token_times_s == sorted(outcome.chunk_times_s)
        assert (outcome.prompt_tokens, outcome.cached_tokens, fake.request_ids) == (64, 0, ["r1"])
        await fake.stop()

    run(main())


def test_cancelling_closes_the_connection_at_once_and_the_engine_stops_working() -> None:
    async def main() -> None:
        fake = await FakeEngine(behaviour=Behaviour(step_s=0.05)).start()
        async with Client(perf_counter) as client:
            task = asyncio.create_task(client.post(fake.host, fake.port, orjson.dumps(body_of(n_tokens=100))))
            await until(lambda: fake.running)
            task.cancel()
            cancelled_s = perf_counter()
            await until(lambda: not fake.running)
            assert perf_counter() - cancelled_s < 0.2
            assert fake.counts.n_aborted == 1
            with pytest.raises(asyncio.CancelledError):
                await task
        await fake.stop()

    run(main())


def test_a_deadline_ends_the_answer_with_what_arrived_and_aborts_it_on_the_engine() -> None:
    async def main() -> None:
        fake = await FakeEngine(behaviour=Behaviour(step_s=0.03)).start()
        async with Client(perf_counter) as client:
            limits = Limits(deadline_s=perf_counter() + 0.2)
            outcome = await client.post(fake.host, fake.port, orjson.dumps(body_of(n_tokens=100)), limits=limits)
            assert (outcome.status, outcome.failure) == (Status.TIMEOUT, Failure.TIMEOUT)
            assert 0.0 <= outcome.end_s - limits.deadline_s < 0.05
            assert 1 <= outcome.n_tokens <= 7
            await until(lambda: not fake.running)
        assert fake.counts.n_aborted == 1
        await fake.stop()

    run(main())


def test_tokens_stamped_after_the_deadline_are_late_even_if_the_client_slept_through_it() -> None:
    events = b'data: {"choices":[{"token_ids":[1],"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(events)}\r\n\r\n".encode()

    def answer(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(head + events)
            peer.recv(1000)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = threading.Thread(target=answer, args=(listener,))
            server.start()
            async with Client(perf_counter) as client:
                limits = Limits(deadline_s=perf_counter() + 0.1)
                port = listener.getsockname()[1]
                outcome = await client.post("127.0.0.1", port, b"{}", limits=limits, on_sent=lambda _: time.sleep(0.2))
            await asyncio.to_thread(server.join, 5.0)
        assert (outcome.status, outcome.n_tokens) == (Status.TIMEOUT, 1)
        assert outcome.message == "the last token came after the deadline"

    run(main())


def test_a_port_that_nobody_listens_on_is_unreachable_and_was_never_sent() -> None:
    async def main() -> None:
        fake = await FakeEngine().start()
        await fake.stop()
        async with Client(perf_counter) as client:
            outcome = await client.post(fake.host, fake.port, b"{}")
        assert (outcome.status, outcome.failure, outcome.sent_s) == (Status.ERROR, Failure.UNREACHABLE, None)
        assert str(fake.port) in str(outcome.message)

    run(main())


@asynccontextmanager
async def server_that_says(answer: bytes, *, then_closes: bool) -> AsyncIterator[int]:
    """A server that answers the first request on each connection with these bytes; gives its port."""
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(answer)
        if not then_closes:
            with suppress(ConnectionError):
                await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    await ended.wait()
    server.close()


def test_something_that_does_not_speak_http_is_malformed() -> None:
    async def main() -> None:
        async with server_that_says(b"SSH-2.0-x\r\n\r\n", then_closes=False) as port, Client(perf_counter) as client:
            outcome = await client.post("127.0.0.1", port, b"{}")
        assert (outcome.status, outcome.failure) == (Status.ERROR, Failure.MALFORMED)

    run(main())


def test_an_answer_of_the_wrong_json_shape_is_malformed() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 23\r\n\r\n"

    async def main() -> None:
        async with (
            server_that_says(head + b'data: {"choices":[3]}\n\n', then_closes=False) as port,
            Client(perf_counter) as client,
        ):
            outcome = await client.post("127.0.0.1", port, b"{}", limits=Limits(deadline_s=perf_counter() + 2.0))
        assert (outcome.status, outcome.failure) == (Status.ERROR, Failure.MALFORMED)

    run(main())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    answer = (
        b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"choices":[{"text":"a","finish_reason":"stop"}]}'
    )

    async def main() -> None:
        async with server_that_says(answer, then_closes=True) as port, Client(perf_counter) as client:
            outcome = await client.post("127.0.0.1", port, b"{}")
        assert (outcome.ok, outcome.text) == (True, "a")

    run(main())


def test_a_tap_sees_the_body_as_it_came() -> None:
    async def main() -> None:
        fake = await FakeEngine().start()
        pieces: list[bytes] = []
        async with Client(perf_counter) as client:
            assert (await client.post(fake.host, fake.port, orjson.dumps(body_of(n_tokens=3)), tap=pieces.append)).ok
        assert len(pieces) == 5
        assert pieces[0].startswith(b"data: {")
        assert pieces[-1] == b"data: [DONE]\n\n"
        await fake.stop()

    run(main())
