"""What relays use of the engine room: a reader that parses less, a flow that can be held up, bodies that keep their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Role, Route
from ppd_bench.engine.client import Client, Flow, Limits
from ppd_bench.engine.dispatch import Engines, LegLimits, Request, dispatch
from ppd_bench.engine.endpoints import Endpoint
from ppd_bench.engine.leg_bytes import leg_bytes
from ppd_bench.engine.stream import CompletionReader, Failure, RelayReader, StreamOutcome

HOST = "127.0.0.1"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
ANSWER = b'{"choices":[{"text":" a","finish_reason":"length"}],"usage":{"completion_tokens":1}}'

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def run(main: Coroutine[Any, Any, None], within_s: float = 20.0) -> None:
    asyncio.run(asyncio.wait_for(main, within_s))


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


@asynccontextmanager
async def engine(script: Script) -> AsyncIterator[int]:
    """A server that plays ``script`` once per connection, and its port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(talk, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return await reader.readexactly(length)


# -- the reader --------------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from([" a", "x" * 50, '"error"', "[DONE]", '"finish_reason":"stop"', "data: {\n\n", "\u4f60", "\\"])


def event_of(text: str, *, chat: bool, finish: str | None = None, spaced: bool = False, nulls: bool = True) -> bytes:
    words = {"delta": {"content": text}} if chat else {"text": text}
    event: dict[str, Any] = {"id": "c", "choices": [{"index": 0, **words, "finish_reason": finish}]}
    if nulls:
        event["usage"] = None
    data = orjson.dumps(event)
    return b"data: " + (data.replace(b'":', b'": ') if spaced and b"\\" not in data else data) + b"\n\n"


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """A stream of any length, of the completions or the chat API, that ends well or not."""
    chat, spaced, nulls = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    texts = draw(st.lists(TEXTS, min_size=1, max_size=12))
    body = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n' if chat else b""
    body += b"".join(event_of(text, chat=chat, spaced=spaced, nulls=nulls) for text in texts)
    end = draw(st.sampled_from(["well", "error", "cut", "aborted", "broken"]))
    if end == "error":
        return body + b'data: {"error":{"message":"out of memory"}}\n\ndata: [DONE]\n\n'
    if end == "broken":
        return body + b'data: {"choices":[{"te\n\n'
    if end == "cut":
        return body
    body += event_of(" z", chat=chat, finish="length" if end == "well" else "abort", spaced=spaced, nulls=nulls)
    if draw(st.booleans()):
        usage = {"prompt_tokens": 7, "completion_tokens": len(texts) + 1, "prompt_tokens_details": {"cached_tokens": 3}}
        body += b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"
    return body + b"data: [DONE]\n\n"


def read(reader: CompletionReader, pieces: Sequence[bytes]) -> StreamOutcome:
    reader.on_head(200, {"content-type": "text/event-stream"}, 0.0)
    for now_s, piece in enumerate(pieces):
        reader.on_body(piece, float(now_s))
    reader.complete = True
    return reader.outcome(sent_s=0.0, end_s=float(len(pieces)), broken=None)


def told(outcome: StreamOutcome) -> dict[str, Any]:
    """What both readers must agree on."""
    names = (
        "status",
        "failure",
        "message",
        "http_status",
        "n_tokens",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
    )
    return {name: getattr(outcome, name) for name in (*names, "completion_tokens", "first_token_s", "last_token_s")}


@given(answers(), st.data())
def test_a_relays_reader_says_the_same_of_an_answer_however_it_is_cut(body: bytes, data: st.DataObject) -> None:
    events = [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]
    if data.draw(st.booleans()):  # whole events, some together
        pieces, left = [], list(events)
        while left:
            n = data.draw(st.integers(1, 4))
            pieces.append(b"".join(left[:n]))
            left = left[n:]
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    exact, light = read(CompletionReader(), pieces), read(RelayReader(), pieces)
    assert told(light) == told(exact)
    assert (light.text, light.token_ids, light.exact) == ("", (), False)
    assert sum(light.chunk_tokens) == sum(exact.chunk_tokens)


def test_a_relays_reader_does_not_grow_with_the_answer() -> None:
    token, end = event_of(" a", chat=False), event_of(" z", chat=False, finish="stop") + b"data: [DONE]\n\n"
    outcome = read(RelayReader(), [token] * 1000 + [end])
    assert outcome.chunk_times_s == (0.0, 999.0, 1000.0)
    assert outcome.chunk_tokens == (1, 999, 1)


def test_a_relays_reader_does_not_parse_events_between_the_first_token_and_the_end() -> None:
    plain = event_of(" a", chat=False)
    unreadable = b'data: {"choices":[{"finish_reason":null,,,}\n\n'  # proof that nobody looked inside
    end = event_of(" z", chat=False, finish="stop") + b"data: [DONE]\n\n"
    assert read(RelayReader(), [plain, unreadable, end]).ok
    assert read(RelayReader(), [unreadable, plain, end]).failure is Failure.MALFORMED


def test_an_answer_that_is_no_stream_is_read_as_ever() -> None:
    reader = RelayReader()
    reader.on_head(200, {"content-type": "application/json"}, 0.0)
    reader.on_body(ANSWER, 1.0)
    reader.complete = True
    outcome = reader.outcome(sent_s=0.0, end_s=1.0, broken=None)
    assert (outcome.ok, outcome.text, outcome.completion_tokens) == (True, " a", 1)


# -- bodies ------------------------------------------------------------------------------------------------------------

VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), st.lists, max_leaves=4)
BODIES = st.dictionaries(st.text(min_size=1, max_size=3), VALUES, min_size=1, max_size=5)


@given(BODIES, BODIES, st.sampled_from(["", " ", "\n\t"]))
def test_a_leg_that_only_adds_carries_the_clients_bytes_as_they_are(
    body: dict[str, Any], more: dict[str, Any], space: str
) -> None:
    raw = (space + orjson.dumps(body).decode()[:-1] + space + "}" + space).encode()
    leg = {**more, **body}
    data = leg_bytes(leg, body, raw)
    assert orjson.loads(data) == leg
    assert data.endswith(raw.lstrip()[1:])


@given(BODIES, BODIES)
def test_a_leg_that_changes_or_drops_something_is_encoded_anew(body: dict[str, Any], more: dict[str, Any]) -> None:
    for leg in ({**body, **more}, more):
        assert orjson.loads(leg_bytes(leg, body, orjson.dumps(body))) == leg


def test_digits_that_a_float_cannot_hold_survive() -> None:
    raw = b'{"seed": 123456789012345678901234567890, "temperature": 1.00}'
    leg = {**orjson.loads(raw), "kv_transfer_params": {"a": 1}}
    assert leg_bytes(leg, orjson.loads(raw), raw) == b'{"kv_transfer_params":{"a":1},' + raw[1:]


# -- the flow ----------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_held_up_waits_at_the_engine_and_comes_whole_afterwards() -> None:
    n_written = 0
    piece = event_of("x" * 60_000, chat=False)

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_written
        await read_request(reader)
        writer.write(STREAM)
        for _ in range(400):
            writer.write(chunk(piece))
            n_written += len(piece)
            await writer.drain()
        writer.write(chunk(event_of(" z", chat=False, finish="stop") + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async def main() -> None:
        flow, n_read = Flow(), 0

        def tap(data: bytes) -> None:
            nonlocal n_read
            n_read += len(data)
            if n_read < 200_000:
                flow.pause()

        async with engine(pour) as port, Client(perf_counter) as client:
            limits = Limits(idle_s=0.3)
            asked = client.post(HOST, port, b"{}", tap=tap, flow=flow, reader=RelayReader, limits=limits)
            task = asyncio.create_task(asked)
            await asyncio.sleep(0.8)  # longer than idle_s: silence that we asked for is nobody's fault
            held, held_read = n_written, n_read
            await asyncio.sleep(0.1)
            assert (n_written, n_read) == (held, held_read)
            assert held < 400 * len(piece)
            flow.resume()
            outcome = await task
        assert outcome.ok, outcome.message
        assert n_read > 400 * len(piece)

    run(main())


def test_a_flow_that_was_held_up_before_the_answer_holds_it_up_and_one_left_held_up_does_not_spoil_the_connection() -> (
    None
):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(PLAIN % (len(ANSWER), ANSWER))

    async def main() -> None:
        async with engine(serve) as port, Client(perf_counter) as client:
            flow = Flow()
            flow.pause()
            task = asyncio.create_task(client.post(HOST, port, b"{}", flow=flow))
            await asyncio.sleep(0.1)
            assert not task.done()
            flow.resume()
            assert (await task).ok
            held = Flow()
            outcome = await client.post(HOST, port, b"{}", flow=held, tap=lambda piece: held.pause())
            assert outcome.ok
            assert (await client.post(HOST, port, b"{}")).ok
            assert client.n_connections_opened == 1

    run(main())


# -- the client --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", ["on_head", "tap"])
def test_what_a_relay_raises_is_raised_to_it_and_to_nobody_else(culprit: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(PLAIN % (len(ANSWER), ANSWER))

    def broken(*_: object) -> None:
        raise LookupError("broken relay")

    async def main() -> None:
        async with engine(serve) as port, Client(perf_counter) as client:
            calls: dict[str, Any] = {culprit: broken}
            good = [client.post(HOST, port, b"{}") for _ in range(3)]
            results = await asyncio.gather(client.post(HOST, port, b"{}", **calls), *good, return_exceptions=True)
            assert isinstance(results[0], LookupError)
            assert all(isinstance(result, StreamOutcome) and result.ok for result in results[1:])

    run(main())


def test_answers_that_only_announce_another_are_passed_over() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n")
        writer.write(PLAIN % (len(ANSWER), ANSWER))
        await reader.read()

    async def main() -> None:
        heads: list[int] = []
        async with engine(serve) as port, Client(perf_counter) as client:
            outcome = await client.post(HOST, port, b"{}", on_head=lambda status, headers: heads.append(status))
        assert (outcome.ok, heads) == (True, [200])

    run(main())


def test_a_connection_on_which_more_came_than_the_answer_is_not_used_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(PLAIN % (len(ANSWER), ANSWER) + PLAIN % (4, b"evil"))

    async def main() -> None:
        tapped: list[bytes] = []
        async with engine(serve) as port, Client(perf_counter) as client:
            for _ in range(2):
                assert (await client.post(HOST, port, b"{}", tap=tapped.append)).ok
            assert client.n_connections_opened == 2
        assert tapped == [ANSWER, ANSWER]

    run(main())


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("release_s", [0.0, 0.15])
def test_a_request_whose_caller_leaves_while_it_connects_is_sent_only_where_something_is_to_be_released(
    release_s: float, rounds: int
) -> None:
    async def main() -> None:
        bodies: list[bytes] = []
        closed: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            bodies.append(await read_request(reader))
            closed.append(await reader.read())

        async with engine(serve) as port, Client(perf_counter) as client:
            task = asyncio.create_task(client.post(HOST, port, b"{}", release_s=release_s))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left_s = perf_counter()
            while not closed and perf_counter() - left_s < 1.0 and (release_s or perf_counter() - left_s < 0.2):
                await asyncio.sleep(0.01)
            if release_s:
                assert (bodies, closed) == ([b"{}"], [b""])
                assert perf_counter() - left_s < 0.8
            else:
                assert bodies == [] or closed == [b""]

    run(main())


def test_an_exchange_that_may_be_released_late_keeps_its_connection_like_any_other() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(PLAIN % (len(ANSWER), ANSWER))

    async def main() -> None:
        async with engine(serve) as port, Client(perf_counter) as client:
            assert (await client.post(HOST, port, b"{}", release_s=0.15)).ok
            assert (await client.post(HOST, port, b"{}", release_s=0.15)).ok
            assert client.n_connections_opened == 1

    run(main())


def test_b9_a_handle_that_comes_in_the_moment_in_which_its_client_leaves_is_still_given_to_d() -> None:
    handle = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r", "remote_block_ids": [1]}
    answer = (
        ANSWER[:-1] + b',"kv_transfer_params":' + orjson.dumps({**handle, "remote_host": HOST, "remote_port": 1}) + b"}"
    )

    async def main() -> None:
        answered = False
        given: list[dict[str, Any]] = []
        closed: list[bytes] = []
        tasks: list[asyncio.Task[Any]] = []

        async def prefill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal answered
            await read_request(reader)
            answered = True
            writer.write(PLAIN % (len(answer), answer))
            await reader.read()

        async def decode(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            given.append(orjson.loads(await read_request(reader))["kv_transfer_params"])
            closed.append(await reader.read())

        def clock() -> float:
            """The client stamps P's answer first thing: in the round after that it parses it, and the task is cancelled."""
            nonlocal answered
            if answered:
                answered = False
                asyncio.get_running_loop().call_soon(tasks[0].cancel)
            return perf_counter()

        async with engine(prefill) as p_port, engine(decode) as d_port, Client(clock) as client:
            endpoints = tuple(
                Endpoint(worker_id=name, role=role, host=HOST, port=port)
                for name, role, port in (("P0", Role.PREFILL, p_port), ("D0", Role.DECODE, d_port))
            )
            decision = Decision(route=Route.PD, prefill_worker=0, decode_worker=1, reason="test")
            request = Request(request_id="r", body={"prompt": "a", "stream": True})
            run_it = dispatch(client, Engines(endpoints=endpoints), decision, request, limits=LegLimits())
            tasks.append(asyncio.create_task(run_it))
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            end_s = perf_counter() + 5.0
            while not closed and perf_counter() < end_s:
                await asyncio.sleep(0.01)
        assert [params["remote_request_id"] for params in given] == ["r"]
        assert closed == [b""]

    run(main())
