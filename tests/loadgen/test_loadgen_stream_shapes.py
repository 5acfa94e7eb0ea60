"""Every row of the list of streams that benchmark clients get wrong, over real sockets, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import orjson
import pytest
import uvloop
from fake_engine import FakeEngine
from stream_shapes import SHAPES

from ppd_bench.core.enums import Status
from ppd_bench.engine.client import Client, Limits
from ppd_bench.engine.stream import Failure, StreamOutcome

SLACK_S = 0.15
"""How late a busy machine may stamp."""
STALL_LIMIT_S = 0.4

Outcomes = dict[str, StreamOutcome]


async def _play_all() -> tuple[Outcomes, FakeEngine]:
    fake = await FakeEngine().start()
    async with Client(perf_counter) as client:

        async def one(shape: str) -> StreamOutcome:
            body = orjson.dumps({"model": f"shape:{shape}", "stream": True})
            return await client.post(
                fake.host, fake.port, body, limits=Limits(first_byte_s=STALL_LIMIT_S, idle_s=STALL_LIMIT_S)
            )

        outcomes = dict(zip(SHAPES, await asyncio.gather(*map(one, SHAPES)), strict=True))
    await fake.stop()
    return outcomes, fake


@pytest.fixture(scope="module", params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def played(request: pytest.FixtureRequest) -> tuple[Outcomes, FakeEngine]:
    run: Callable[[Any], tuple[Outcomes, FakeEngine]] = request.param
    return run(_play_all())


@pytest.fixture
def outcomes(played: tuple[Outcomes, FakeEngine]) -> Outcomes:
    return played[0]


def _since_sent(outcome: StreamOutcome, time_s: float | None) -> float:
    assert outcome.sent_s is not None
    assert time_s is not None
    return time_s - outcome.sent_s


def _is_at(outcome: StreamOutcome, time_s: float | None, expected_s: float) -> bool:
    return expected_s - 0.002 <= _since_sent(outcome, time_s) <= expected_s + SLACK_S


def _check_five_tokens(outcome: StreamOutcome, first_s: float) -> None:
    assert (outcome.status, outcome.failure, outcome.message) == (Status.OK, None, None)
    assert outcome.n_tokens == 5
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (3, 5, 2)
    assert _is_at(outcome, outcome.first_token_s, first_s)
    assert _is_at(outcome, outcome.last_token_s, first_s + 0.08)
    assert outcome.token_times_s is not None
    assert len(outcome.token_times_s) == 5


@pytest.mark.parametrize(
    ("row", "first_s"),
    [
        ("1", 0.11),
        ("2", 0.11),
        ("3", 0.1),
        ("5", 0.1),
        ("10", 0.1),
        ("10-cr", 0.1),
        ("11", 0.1),
        ("12", 0.1),
        ("13", 0.1),
    ],
)
def test_five_tokens_are_seen_whatever_surrounds_them(outcomes: Outcomes, row: str, first_s: float) -> None:
    _check_five_tokens(outcomes[row], first_s)


def test_row_1_and_2_an_empty_first_chunk_is_no_token(outcomes: Outcomes) -> None:
    for row in ("1", "2"):
        assert _since_sent(outcomes[row], outcomes[row].first_byte_s) < 0.1
        assert _since_sent(outcomes[row], outcomes[row].first_token_s) > 0.1


def test_row_3_reasoning_counts_as_tokens_but_is_not_the_answer(outcomes: Outcomes) -> None:
    assert outcomes["3"].text == " thr fou fiv"


def test_row_4_tokens_are_counted_by_the_server_and_gaps_between_chunks_are_no_token_gaps(outcomes: Outcomes) -> None:
    outcome = outcomes["4"]
    assert outcome.ok
    assert outcome.n_tokens == 10
    assert len(outcome.chunk_times_s) == 2
    assert outcome.token_times_s is None


def test_row_4_with_token_ids_tokens_of_one_chunk_arrive_together(outcomes: Outcomes) -> None:
    outcome = outcomes["4-ids"]
    assert (outcome.n_tokens, outcome.chunk_tokens, outcome.token_ids) == (10, (5, 5), tuple(range(1, 11)))
    times = outcome.token_times_s
    assert times is not None
    assert [b - a > 0 for a, b in pairwise(times)] == [False] * 4 + [True] + [False] * 4


def test_row_6_an_error_event_inside_a_200_stream_is_a_failure_with_the_servers_message(outcomes: Outcomes) -> None:
    outcome = outcomes["6"]
    assert (outcome.status, outcome.failure, outcome.http_status) == (Status.ERROR, Failure.ERROR_EVENT, 200)
    assert "kv transfer failed" in str(outcome.message)
    assert (outcome.n_tokens, len(outcome.chunk_times_s)) == (3, 3)


def test_row_7_a_clean_end_without_finish_reason_is_a_truncation(outcomes: Outcomes) -> None:
    outcome = outcomes["7"]
    assert (outcome.status, outcome.failure, outcome.n_tokens) == (Status.ERROR, Failure.TRUNCATED, 3)


@pytest.mark.parametrize("row", ["8", "8-eof"])
def test_row_8_a_lost_connection_keeps_the_times_of_what_arrived(outcomes: Outcomes, row: str) -> None:
    outcome = outcomes[row]
    assert (outcome.status, outcome.failure, outcome.n_tokens) == (Status.ERROR, Failure.DISCONNECTED, 3)
    assert _is_at(outcome, outcome.first_token_s, 0.1)
    assert _is_at(outcome, outcome.last_token_s, 0.14)


@pytest.mark.parametrize("row", ["9", "9-stream"])
def test_row_9_an_empty_200_is_a_failure(outcomes: Outcomes, row: str) -> None:
    outcome = outcomes[row]
    assert (outcome.status, outcome.failure, outcome.http_status) == (Status.ERROR, Failure.EMPTY, 200)
    assert (outcome.n_tokens, outcome.first_token_s) == (0, None)


def test_row_13_the_answer_ends_at_its_last_token_and_not_with_the_usage_chunk(outcomes: Outcomes) -> None:
    outcome = outcomes["13"]
    assert outcome.last_token_s is not None
    assert outcome.end_s - outcome.last_token_s > 0.29


def test_row_14_events_cut_anywhere_keep_their_bytes_and_their_instants(outcomes: Outcomes) -> None:
    outcome = outcomes["14"]
    assert outcome.ok
    assert outcome.text == "h\u00e9llo two thr fou fiv"
    assert _is_at(outcome, outcome.first_token_s, 0.1)
    assert outcome.chunk_tokens == (1, 1, 1, 1, 1)
    assert len(set(outcome.chunk_times_s)) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_row_15_an_overloaded_server_is_asked_once(played: tuple[Outcomes, FakeEngine], status: int) -> None:
    outcomes, fake = played
    outcome = outcomes[f"15-{status}"]
    assert (outcome.status, outcome.failure, outcome.http_status) == (Status.ERROR, Failure.HTTP, status)
    assert outcome.message == f"HTTP {status}: overloaded (Retry-After: 1)"
    assert sum(body["model"] == f"shape:15-{status}" for body in fake.bodies) == 1


def test_row_16_silence_is_a_timeout_with_what_arrived(outcomes: Outcomes) -> None:
    silent, stalled = outcomes["16-silent"], outcomes["16-stall"]
    for outcome, end_s, n_tokens in ((silent, STALL_LIMIT_S, 0), (stalled, 0.12 + STALL_LIMIT_S, 2)):
        assert (outcome.status, outcome.failure, outcome.n_tokens) == (Status.TIMEOUT, Failure.TIMEOUT, n_tokens)
        assert _is_at(outcome, outcome.end_s, end_s)
    assert silent.first_token_s is None
    assert _is_at(stalled, stalled.last_token_s, 0.12)


def test_row_17_a_short_answer_is_recorded_as_short(outcomes: Outcomes) -> None:
    outcome = outcomes["17"]
    assert (outcome.ok, outcome.n_tokens, outcome.finish_reason) == (True, 3, "stop")


def test_a_connection_is_closed_at_once_when_its_stream_is_given_up(played: tuple[Outcomes, FakeEngine]) -> None:
    assert not played[1]._connections
