"""The router's pure parts: withheld usage, what an answer said, requests as they are read, stages that add up."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.decision import Decision
from ppd_bench.core.enums import Route, Status
from ppd_bench.engine.dispatch import FALLBACK_LOCAL, Dispatched
from ppd_bench.engine.stream import RelayReader, StreamOutcome
from ppd_bench.policy.query import RouteQuery
from ppd_bench.router.answer import AnswerCollector
from ppd_bench.router.asked import Asked, BadRequest, forwarded_headers, read_asked, tenant_of
from ppd_bench.router.chain import AnswerMessage
from ppd_bench.router.decision_log import ROUTER_COLUMNS
from ppd_bench.router.http_request import HttpRequest
from ppd_bench.router.turn_record import Origin, TurnRecord, reason_class, table_part
from ppd_bench.router.usage_filter import UsageFilter

USAGE = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
TOKENS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"say \\"usage\\""},"finish_reason":null}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\xc3\xa9"},"finish_reason":"stop"}]}\n\n',
]
DONE = b"data: [DONE]\n\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.integers(0, 1000), max_size=12), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_b4_the_usage_chunk_is_taken_out_wherever_the_stream_is_cut(places: list[int], end: bytes) -> None:
    stream = b"".join([*TOKENS, USAGE, DONE]).replace(b"\n\n", end)
    wanted = b"".join([*TOKENS, DONE]).replace(b"\n\n", end)
    usage = UsageFilter()
    assert b"".join([*(usage.feed(piece) for piece in cut(stream, places)), usage.rest()]) == wanted


def test_b4_whole_events_pass_at_once_and_as_the_same_object() -> None:
    usage = UsageFilter()
    assert usage.feed(TOKENS[0]) is TOKENS[0]
    assert usage.feed(TOKENS[1]) is TOKENS[1]  # a usage of null is none
    assert usage.feed(TOKENS[2][:20]) == b""
    assert usage.feed(TOKENS[2][20:]) == TOKENS[2]


def test_a_usage_that_comes_with_a_choice_is_left_alone() -> None:
    event = b'data: {"choices":[{"index":0,"text":"x"}],"usage":{"completion_tokens":1}}\n\n'
    assert UsageFilter().feed(event) == event


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(1, 100))
def test_an_answer_is_collected_wherever_its_stream_is_cut(places: list[int], n: int) -> None:
    words = [
        b'data: {"choices":[{"index":0,"delta":{"content":"w%d "},"finish_reason":null}]}\n\n' % i for i in range(n)
    ]
    collector = AnswerCollector(streamed=True)
    for piece in cut(b"".join([*TOKENS, *words, USAGE, DONE]), places):
        collector.feed(piece)
    found = collector.take()
    assert found == AnswerMessage(
        content='say "usage"é' + "".join(f"w{i} " for i in range(n)), tool_calls=[], token_ids=[]
    )


def test_a_tool_call_is_put_together_from_its_pieces() -> None:
    deltas = [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    collector = AnswerCollector(streamed=True)
    for delta in deltas:
        collector.feed(b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n")
    found = collector.take()
    assert found is not None
    assert found.content == ""
    assert found.tool_calls == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    plain = AnswerCollector(streamed=False)
    plain.feed(orjson.dumps({"choices": [{"index": 0, "message": {"content": None, "tool_calls": found.tool_calls}}]}))
    assert plain.take() == found


def test_of_several_choices_nobody_knows_with_which_the_client_goes_on() -> None:
    collector = AnswerCollector(streamed=False)
    collector.feed(b'{"choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}]}')
    assert collector.take() is None


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"{", "not JSON"),
        (b"[1]", "object"),
        (b'{"stream_options": "x"}', "object or null"),
        (b'{"n": "2"}', "whole number"),
        (b'{"best_of": 1.5}', "whole number"),
    ],
)
def test_a_body_that_cannot_be_understood_is_refused_in_words(raw: bytes, word: str) -> None:
    found = read_asked(raw)
    assert isinstance(found, BadRequest)
    assert word in found.message


@pytest.mark.parametrize(
    ("body", "declared"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 20}, 9),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": -1}, None),
    ],
)
def test_the_declared_output_is_the_smallest_that_the_client_gave(
    body: dict[str, object], declared: int | None
) -> None:
    found = read_asked(orjson.dumps(body))
    assert isinstance(found, Asked)
    assert found.max_output_tokens == declared


@given(st.recursive(st.none() | st.booleans() | st.integers(0, 5) | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["prompt", "messages", "n", "stream", "stream_options", "include_usage", "max_tokens", "echo"]), inner
)))  # fmt: skip
def test_any_json_is_read_without_an_exception(content: object) -> None:
    assert isinstance(read_asked(orjson.dumps(content)), Asked | BadRequest)


def request_with(*headers: tuple[str, str]) -> HttpRequest:
    return HttpRequest(method="POST", path="/", query="", headers=headers, body=b"", peer="")


def test_keys_go_to_engines_and_name_a_tenant_without_being_told() -> None:
    request = request_with(
        ("authorization", "Bearer secret"), ("x-request-id", "mine"), ("connection", "x-hop"), ("x-hop", "1"),
        ("accept-encoding", "br"), ("x-tag", "a"), ("x-tag", "b"), ("host", "router"), ("content-length", "5"),
    )  # fmt: skip
    assert forwarded_headers(request.headers) == {"authorization": "Bearer secret", "x-tag": "a, b"}
    assert tenant_of(request) not in ("", "Bearer secret")
    assert tenant_of(request) != tenant_of(request_with(("authorization", "Bearer other")))
    assert tenant_of(request_with()) == ""


def outcome(sent_s: float, end_s: float) -> StreamOutcome:
    return RelayReader().outcome(sent_s=sent_s, end_s=end_s, broken=None)


def record(went: Dispatched | None, **more: object) -> TurnRecord:
    return TurnRecord(
        request_id="r-1", client_request_id="c", path="/v1/completions", request_bytes=5, received_unix_s=0.0,
        received_s=10.0, decided_s=10.001, went=went, done_s=12.0, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def went(path: str, prefill: StreamOutcome | None, done_s: float | None, sent_s: float | None) -> Dispatched:
    return Dispatched(
        path=path, prefill_worker=0, decode_worker=1, outcome=outcome(sent_s or 0.0, 11.999), prefill=prefill,
        prefill_done_s=done_s, decode_sent_s=sent_s, counters=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dispatched", "names"),
    [
        (
            went("pd", outcome(10.002, 10.5), 10.5, 10.501),
            ["decide", "to_prefill", "prefill", "to_decode", "first_byte", "stream"],
        ),
        (went("local", None, None, 10.002), ["decide", "to_decode", "first_byte", "stream"]),
        (went(FALLBACK_LOCAL, outcome(10.002, 10.4), None, 10.4), ["decide", "to_decode", "first_byte", "stream"]),
        (went("pd", outcome(10.002, 10.5), None, None), ["decide", "first_byte", "stream"]),
        (None, ["decide", "first_byte", "stream"]),
    ],
)
def test_b35_the_stages_that_a_turn_had_add_up_to_its_whole_time(
    dispatched: Dispatched | None, names: list[str]
) -> None:
    found = record(dispatched, first_byte_s=11.0).stages()
    assert list(found) == names
    assert min(found.values()) >= 0.0
    assert sum(found.values()) == pytest.approx(2.0, abs=1e-9)


def test_the_routers_own_time_is_what_no_engine_spent() -> None:
    turn = record(went("pd", outcome(10.002, 10.5), 10.5, 10.501), first_byte_s=11.0)
    assert turn.overhead_s(turn.stages()) == pytest.approx(0.001 + 0.001 + 0.001 + 0.001)


def test_b35_a_row_has_known_columns_only_and_names_its_table() -> None:
    query = RouteQuery("r-1", "s", 2, 100, 20, 50)
    reason = "table 0123 large/tiny/8 measured equation1 off-grid kv-pressed"
    turn = record(
        went("local", None, None, 10.002), query=query, decision=Decision(Route.LOCAL, 1, 1, reason), status=Status.OK
    )
    row = turn.row(Origin(topology="1P_1D", worker_ids=["P0", "D0"], start_s=10.0))
    from ppd_bench.core.record import RECORD_FIELDS

    assert set(row) <= {*RECORD_FIELDS, *ROUTER_COLUMNS}
    wanted = {
        "table_hash": "0123",
        "cell": "large/tiny/8",
        "evidence": "measured",
        "rule": "equation1",
        "off_grid": True,
    }
    assert {name: row[name] for name in wanted} == wanted
    assert (row["x"], row["route"], row["decode_worker"], row["t_recv_s"]) == (1, "local", "D0", 0.0)


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("turn-1", "turn-1"),
        ("no-kv pinned-gone", "no-kv"),
        ("table 01 large/tiny/8 measured equation1", "table equation1"),
        ("unsplittable_n", "unsplittable_n"),
    ],
)
def test_a_reason_becomes_a_label_that_takes_few_values(reason: str, label: str) -> None:
    assert reason_class(reason) == label
    assert bool(table_part(reason)) == reason.startswith("table")
