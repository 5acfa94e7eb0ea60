"""From recorded rows to conversations: what is played, when, and that nothing is lost without a reason."""

from __future__ import annotations

import dataclasses
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow
from ppd_bench.core.workload import Session, TrafficSpec
from ppd_bench.workload.agentic import BLOCK_TOKENS, agentic_rows
from ppd_bench.workload.thinning import Thinning
from ppd_bench.workload.traffic import (
    NO_OUTPUT,
    NO_PARENT,
    OVER_REQUESTS,
    SHRUNK,
    TOO_LONG,
    Recording,
    record,
    traffic_sessions,
)


def row(
    name: str,
    turn: int = 1,
    *,
    prompt: int = 100,
    output: int = 10,
    arrival_s: float | None = None,
    delay_s: float | None = None,
    ids: tuple[int, ...] = (),
    parent: str | None = None,
) -> TraceRow:
    """A request ``NAME.tTURN`` of session NAME."""
    return TraceRow(0, f"{name}.t{turn}", name, turn, arrival_s, delay_s, prompt, output, array("q", ids), parent)


def spec_of(recording: Recording, **changes: object) -> TrafficSpec:
    base = TrafficSpec(
        source="t.jsonl", sha256="0", reading="test", sessions="none", loop="completion", figures=recording.figures
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def play(
    rows: list[TraceRow], *, block_tokens: int | None = None, qps: float = 1.0, **changes: object
) -> tuple[Session, ...]:
    recording = record(rows, block_tokens=block_tokens)
    return traffic_sessions(
        recording, spec_of(recording, **changes), qps=qps, duration_s=30.0, think_time_s=7.0, seed=0, repeat=0,
        max_output_tokens=2048,
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 40), st.integers(0, 5)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 300),
    st.integers(1, 20),
)
def test_rows_read_are_rows_kept_and_rows_dropped_by_reason(
    drawn: list[tuple[int, int, int, int]], max_tokens: int, max_requests: int
) -> None:
    turns: dict[int, int] = {}
    rows = []
    for session, prompt, output, parent in drawn:
        turns[session] = turns.get(session, 0) + 1
        started_by = f"s{parent}.t1" if turns[session] == 1 and parent < session else None
        rows.append(row(f"s{session}", turns[session], prompt=prompt, output=output, parent=started_by))
    recording = record(rows, block_tokens=None, max_request_tokens=max_tokens, max_requests=max_requests)
    played = [one.request_id for family in recording.families for thread in family for one in thread.rows]
    assert len(set(played)) == len(played) == recording.counts.n_kept
    assert recording.counts.n_read == len(rows) == recording.counts.n_kept + recording.counts.n_dropped


def test_what_is_left_out_is_named() -> None:
    rows = [
        row("a", 1, prompt=50),
        row("a", 2, prompt=55),  # shorter than 50 + 10
        row("b", 1, prompt=900),
        row("c", 1, parent="b.t1"),
        row("d", 1, output=0),
        row("e", 1),
        row("f", 1),
    ]
    recording = record(rows, block_tokens=None, max_request_tokens=500, max_requests=2)
    assert recording.counts.dropped == {TOO_LONG: 1, NO_OUTPUT: 1, SHRUNK: 1, NO_PARENT: 1, OVER_REQUESTS: 1}
    assert [family[0].session_id for family in recording.families] == ["a", "e"]


def test_nothing_to_play_says_why() -> None:
    with pytest.raises(SpecError, match="no request of the trace can be played: 1 x no output tokens"):
        _ = record([row("a", output=0)], block_tokens=None).figures


def test_an_open_loop_sends_every_request_at_its_instant_divided_by_the_scale() -> None:
    (a, b) = play(
        [row("a", arrival_s=3.0), row("b", arrival_s=4.0), row("a", 2, prompt=200, arrival_s=9.0)],
        loop="timestamps", time_scale=2.0,
    )  # fmt: skip
    assert [(turn.scheduled_s, turn.think_time_s) for turn in (*a, *b)] == [(0.0, None), (3.0, None), (0.5, None)]


def test_dependent_turns_follow_recorded_pauses_or_else_come_not_before_their_instant() -> None:
    (a,), (b,) = (
        play([row("a", arrival_s=5.0), row("a", 2, prompt=200, delay_s=6.0)], time_scale=3.0),
        play([row("b", arrival_s=5.0), row("b", 2, prompt=200, arrival_s=11.0)], time_scale=3.0),
    )
    assert [(turn.scheduled_s, turn.think_time_s) for turn in a] == [(0.0, None), (None, 2.0)]
    assert [(turn.scheduled_s, turn.think_time_s) for turn in b] == [(0.0, None), (2.0, 0.0)]


def test_without_any_time_the_points_think_time_counts() -> None:
    sessions = play([row("a"), row("a", 2, prompt=200)], arrivals="poisson")
    assert {turns[1].think_time_s for turns in sessions} == {7.0}


def test_what_a_request_started_follows_it_and_is_placed_behind_it() -> None:
    rows = [row("child", 1, parent="a.t2", delay_s=4.0), row("a", 1), row("a", 2, prompt=300, delay_s=1.0)]
    one, child = play(rows, max_inflight_sessions=1)
    assert [turn.request_id for turn in one] == ["a.t1", "a.t2"]
    assert (child[0].after, child[0].think_time_s, child[0].scheduled_s) == ("a.t2", 4.0, None)


def test_context_is_the_turn_before_or_what_ids_say_is_left_of_it() -> None:
    rows = [
        row("a", 1, prompt=70, output=8, ids=(1, 2, 3, 4)),
        row("a", 2, prompt=100, output=8, ids=(1, 2, 3, 4, 5, 6)),  # goes on
        row("a", 3, prompt=60, output=8, ids=(1, 2, 9)),  # kept two blocks
    ]
    (turns,) = play(rows, block_tokens=16, max_inflight_sessions=1)
    assert [turn.context_tokens for turn in turns] == [0, 78, 32]
    assert [turn.prompt_tokens for turn in turns] == [70, 100, 60]
    assert {turn.block_tokens for turn in turns} == {16}


def test_drawn_arrivals_are_the_same_for_the_same_seed_and_use_every_conversation_before_any_again() -> None:
    rows = [row(name, ids=(k, k + 50)) for k, name in enumerate("abcde")]
    sessions = play(rows, block_tokens=64, arrivals="poisson", qps=0.5)
    assert sessions == play(rows, block_tokens=64, arrivals="poisson", qps=0.5)
    names = [session[0].session_id for session in sessions]
    assert len(names) > 5
    assert {*names[:5]} == {*"abcde"}
    assert all(name.startswith("c1.") for name in names[5:10])
    starts = [session[0].scheduled_s or 0.0 for session in sessions]
    assert starts == sorted(starts)
    assert 0.0 <= starts[0] <= starts[-1] < 30.0


def test_a_conversation_that_is_drawn_again_has_content_of_its_own_and_shares_as_before() -> None:
    sessions = play([row("a", ids=(1, 2)), row("b", ids=(1, 3))], block_tokens=50, arrivals="poisson", qps=1.0)
    copies: dict[int, list[tuple[int, ...]]] = {}
    for number, session in enumerate(sessions):
        copies.setdefault(number // 2, []).append(tuple(session[0].block_ids or ()))
    seen: set[int] = set()
    for both in copies.values():
        ids = {i for one in both for i in one}
        assert not ids & seen
        seen |= ids
        if len(both) == 2:
            assert both[0][0] == both[1][0]
            assert both[0][1] != both[1][1]


def test_request_ids_are_unique_however_often_a_conversation_is_drawn() -> None:
    sessions = play([row("a"), row("a", 2, prompt=200)], arrivals="poisson", qps=2.0)
    ids = [turn.request_id for session in sessions for turn in session]
    assert len(ids) == len(set(ids)) > 20


def test_names_that_no_header_can_carry_are_replaced() -> None:
    rows = [row("täglich\r\nX: 1"), row("täglich\r\nX: 1", 2, prompt=200), row("plain", parent="täglich\r\nX: 1.t2")]
    one, child = play(rows, arrivals="recorded", max_inflight_sessions=1)
    assert all(turn.request_id.isascii() and turn.request_id.isprintable() for turn in one)
    assert len({turn.session_id for turn in one}) == 1
    assert child[0].after == one[1].request_id


def test_traffic_that_cannot_be_played_as_asked_is_refused_with_a_way_out() -> None:
    with pytest.raises(SpecError, match="no arrival times: give a rate"):
        play([row("a")])
    with pytest.raises(SpecError, match="its loop is completion"):
        play([row("a", arrival_s=1.0), row("a", 2, prompt=200, delay_s=1.0)], loop="timestamps")
    with pytest.raises(SpecError, match="take one of them"):
        play([row("a", arrival_s=1.0)], loop="timestamps", max_inflight_sessions=3)


def _possible(rows: list[TraceRow]) -> float:
    """Share of blocks that are not seen for the first time: what an infinite cache finds."""
    n_blocks = sum(len(one.block_ids) for one in rows)
    return 1.0 - len({i for one in rows for i in one.block_ids}) / n_blocks


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_thinned_traffic_keeps_its_share_of_reuse_and_every_length(ratio: float) -> None:
    rows = list(agentic_rows(300, seed=1))
    thinned = list(Thinning(ratio).rows(rows))
    assert [(one.prompt_tokens, len(one.block_ids)) for one in thinned] == [
        (one.prompt_tokens, len(one.block_ids)) for one in rows
    ]
    assert _possible(thinned) == pytest.approx(ratio * _possible(rows), abs=0.02)


def test_the_generated_trace_is_reproducible_and_near_the_published_quantiles() -> None:
    """Agentic study, Section 1: input mean 33.6k, p50 20k, p90 88k; output mean 445, p50 80; 90 % of sessions have one turn."""
    rows = list(agentic_rows(5000, seed=0))
    assert rows[:40] == list(agentic_rows(5000, seed=0))[:40]
    assert rows[0] != next(iter(agentic_rows(5000, seed=1)))
    prompts = sorted(one.prompt_tokens for one in rows)
    outputs = sorted(one.output_tokens for one in rows)
    assert sum(prompts) / len(rows) == pytest.approx(33_600, rel=0.15)
    assert prompts[len(rows) // 2] == pytest.approx(20_000, rel=0.35)
    assert prompts[len(rows) * 9 // 10] == pytest.approx(88_000, rel=0.15)
    assert sum(outputs) / len(rows) == pytest.approx(445, rel=0.15)
    assert outputs[len(rows) // 2] == pytest.approx(80, rel=0.1)
    turns: dict[str, int] = {}
    for one in rows:
        turns[str(one.session_id)] = turns.get(str(one.session_id), 0) + 1
        assert len(one.block_ids) == one.prompt_tokens // BLOCK_TOKENS
    assert sum(n == 1 for n in turns.values()) / len(turns) == pytest.approx(0.9, abs=0.02)
    assert not math.isnan(_possible(rows))
