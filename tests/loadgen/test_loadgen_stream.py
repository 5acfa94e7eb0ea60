"""The reader of answers, without sockets."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.enums import Status
from ppd_bench.engine.stream import CompletionReader, EventDecoder, Failure, StreamOutcome

SSE = {"content-type": "text/event-stream; charset=utf-8"}
LINE = st.text(alphabet=st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), max_size=8)


@given(st.lists(LINE, max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_do_not_depend_on_how_their_bytes_are_cut(texts: list[str], newline: str, data: st.DataObject) -> None:
    stream = "".join(f"id: 1{newline}: ping{newline}data: {t}{newline}data:2{newline}{newline}" for t in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = EventDecoder()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event for piece in pieces for event in decoder.feed(piece)] == [f"{t}\n2".encode() for t in texts]


def test_several_data_lines_of_one_event_are_joined() -> None:
    assert EventDecoder().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]


def read(*events: Any, done: bool = True) -> StreamOutcome:
    reader = CompletionReader()
    reader.on_head(200, SSE, 0.0)
    for i, event in enumerate(events):
        reader.on_body(b"data: " + orjson.dumps(event) + b"\n\n", float(i))
    if done:
        reader.on_body(b"data: [DONE]\n\n", 99.0)
    reader.complete = True
    return reader.outcome(sent_s=0.0, end_s=100.0, broken=None)


def choice(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish, **more}]}


def test_a_token_whose_text_is_held_back_counts_by_its_id() -> None:
    outcome = read(choice("", token_ids=[7]), choice("\u00e9", "length", token_ids=[8]))
    assert (outcome.first_token_s, outcome.n_tokens, outcome.token_ids) == (0.0, 2, (7, 8))


def test_a_token_whose_text_is_held_back_counts_by_running_usage() -> None:
    outcome = read(
        {**choice(""), "usage": {"completion_tokens": 0}},
        {**choice(""), "usage": {"completion_tokens": 1}},
        {**choice("ab", "stop"), "usage": {"completion_tokens": 2}},
    )
    assert outcome.token_times_s == [1.0, 2.0]


def test_a_final_usage_corrects_the_count_but_not_the_last_tokens_time() -> None:
    outcome = read(choice("abc"), choice("def"), {**choice("", "stop"), "usage": {"completion_tokens": 10}})
    assert (outcome.n_tokens, outcome.last_token_s, outcome.token_times_s) == (10, 1.0, None)


def test_without_any_count_by_the_server_gaps_are_unknown() -> None:
    outcome = read(choice("a"), choice("b", "stop"))
    assert (outcome.ok, outcome.n_tokens, outcome.exact, outcome.token_times_s) == (True, 2, False, None)


def test_a_missing_done_is_a_truncation_even_after_a_finish_reason() -> None:
    assert read(choice("a", "stop"), done=False).failure is Failure.TRUNCATED


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_aborted_is_a_failure(reason: str) -> None:
    outcome = read(choice("a", reason))
    assert (outcome.status, outcome.failure) == (Status.ERROR, Failure.TRUNCATED)


def test_an_event_that_is_not_json_is_a_failure() -> None:
    reader = CompletionReader()
    reader.on_head(200, SSE, 0.0)
    reader.on_body(b"data: <html>\n\ndata: [DONE]\n\n", 1.0)
    reader.complete = True
    outcome = reader.outcome(sent_s=0.0, end_s=2.0, broken=None)
    assert (outcome.failure, outcome.message) == (Failure.MALFORMED, "an event is not a JSON object: <html>")


def test_a_plain_answer_gives_its_handle_usage_and_ids() -> None:
    reader = CompletionReader()
    reader.on_head(200, {"content-type": "application/json"}, 0.0)
    answer = {
        "choices": [{"text": "x", "finish_reason": "length", "token_ids": [3], "prompt_token_ids": [1, 2]}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": None},
        "kv_transfer_params": {"do_remote_prefill": True},
    }
    reader.on_body(orjson.dumps(answer), 1.0)
    reader.complete = True
    outcome = reader.outcome(sent_s=0.0, end_s=2.0, broken=None)
    assert outcome.ok
    assert outcome.kv_transfer_params == {"do_remote_prefill": True}
    assert (outcome.token_ids, outcome.prompt_token_ids, outcome.cached_tokens) == ((3,), (1, 2), None)
