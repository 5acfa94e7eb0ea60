"""Prompts: exact lengths, nothing shared between conversations or points, ids within bounds."""

from __future__ import annotations

import dataclasses
from array import array

from hypothesis import given
from hypothesis import strategies as st
from loadgen_cases import make_point, sessions_of

from ppd_bench.core.workload import Turn
from ppd_bench.loadgen.prompts import TokenRange, completion_body, is_open_loop, new_ids, token_range, traced_ids


@given(st.integers(min_value=16, max_value=200_000))
def test_prompts_stay_clear_of_both_ends_of_a_vocabulary(vocab_size: int) -> None:
    ids = token_range(vocab_size)
    assert 0 < ids.low < ids.high < vocab_size


def test_llamas_special_tokens_are_never_drawn() -> None:
    assert token_range(128_256).high <= 128_000


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4))
def test_every_turn_has_exactly_its_new_tokens_within_bounds(lengths: list[int]) -> None:
    point = make_point("1R", lengths=[(n, 1) for n in lengths])
    drawn = new_ids(sessions_of(point, [0.0])[0], point_id="p", ids=TokenRange(low=10, high=20))
    assert [len(ids) for ids in drawn] == lengths
    assert {i for ids in drawn for i in ids} <= set(range(10, 20))


def test_ids_follow_from_point_and_conversation_and_from_nothing_else() -> None:
    point = make_point("1R")
    first, second = sessions_of(point, [0.0, 1.0])
    ids = token_range(1000)
    drawn = new_ids(first, point_id="p", ids=ids)
    assert drawn == new_ids(first, point_id="p", ids=ids)
    others = [new_ids(second, point_id="p", ids=ids), new_ids(first, point_id="q", ids=ids)]
    heads = {tuple(one[0][:16]) for one in (drawn, *others)}
    assert len(heads) == 3


def test_a_request_asks_for_exactly_the_tokens_of_the_turn() -> None:
    turn = sessions_of(make_point("1R"), [0.0])[0][1]
    assert completion_body(turn, [1, 2], model="m", seed=3) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 4,
        "min_tokens": 4,
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


IDS = TokenRange(low=100, high=32_000)


def traced(name: str, block_ids: tuple[int, ...], prompt: int, block_tokens: int = 64) -> Turn:
    """A request of recorded content."""
    return Turn(
        request_id=name, session_id=name, turn=1, scheduled_s=0.0, think_time_s=None, context_tokens=0, input_tokens=prompt,
        output_tokens=1, max_output_tokens=1, block_ids=array("q", block_ids), block_tokens=block_tokens,
    )  # fmt: skip


def prompt_of(turn: Turn, point_id: str = "p") -> list[int]:
    return traced_ids(turn, point_id=point_id, block_size=16, ids=IDS)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=0, max_size=6, unique=True),
    st.integers(0, 63),
    st.sampled_from([16, 64, 512]),
)
def test_recorded_prompts_have_exactly_their_tokens_within_bounds(ids: list[int], tail: int, block_tokens: int) -> None:
    n = len(ids) * block_tokens + tail
    if n:
        drawn = prompt_of(traced("a", tuple(ids), n, block_tokens))
        assert len(drawn) == n
        assert all(IDS.low <= i < IDS.high for i in drawn)


def test_equal_block_ids_are_equal_tokens_and_nothing_else_is() -> None:
    one, two = prompt_of(traced("a", (5, -6, 7), 200)), prompt_of(traced("b", (5, -6, 8), 200))
    assert one[:128] == two[:128]
    assert one[128:192] != two[128:192]
    assert one[192:] != two[192:], "what has no id is private"
    blocks = [tuple(prompt_of(traced("c", (i,), 64))) for i in range(-300, 300)]
    assert len(set(blocks)) == 600
    starts = [block[:2] for block in blocks]
    assert len(set(starts)) > 590, "near ids do not begin alike"


def test_a_partial_last_block_is_the_beginning_of_the_whole_one() -> None:
    assert prompt_of(traced("a", (5, 6), 100)) == prompt_of(traced("b", (5, 6), 128))[:100]


def test_no_point_finds_what_another_left_in_a_cache() -> None:
    turn = traced("a", (5, 6), 128)
    assert prompt_of(turn) == prompt_of(turn)
    assert prompt_of(turn, "p")[:16] != prompt_of(turn, "q")[:16]


def test_recorded_content_is_not_drawn_before_the_start() -> None:
    assert new_ids((traced("a", (5, 6), 128),), point_id="p", ids=IDS) == []


def test_in_an_open_loop_new_ids_stand_for_the_answers_that_nobody_knows_yet() -> None:
    first, second, third = sessions_of(make_point("1R", lengths=[(10, 4), (6, 3), (5, 2)]), [0.0])[0]
    loop = (first, *(dataclasses.replace(turn, scheduled_s=1.0, think_time_s=None) for turn in (second, third)))
    assert is_open_loop(loop)
    assert [len(ids) for ids in new_ids(loop, point_id="p", ids=IDS)] == [10, 10, 8]
