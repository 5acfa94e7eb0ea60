"""Prompts: exact lengths, nothing shared between conversations or points, ids within bounds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen_cases import make_point, sessions_of

from ppd_bench.core.errors import SpecError
from ppd_bench.loadgen.prompts import TokenRange, completion_body, new_ids, token_range


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


def test_traces_with_block_ids_are_refused_with_a_way_out() -> None:
    session = sessions_of(make_point("1R"), [0.0])[0]
    traced = (dataclasses.replace(session[0], block_ids=(1, 2)), *session[1:])
    with pytest.raises(SpecError, match="--executor sim"):
        new_ids(traced, point_id="p", ids=token_range(1000))
