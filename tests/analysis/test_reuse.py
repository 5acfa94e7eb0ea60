"""Prefix reuse without bound: the known values of a public trace, slow references, and every figure's own formula by hand."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import B, blocks_of, mooncake_rows, prompts_of, random_traces, rows_of, slow_leading

from ppd_bench.analysis import trace_blocks
from ppd_bench.analysis.block_index import BlockIndex
from ppd_bench.analysis.reuse import Reuse, block_weights, hit_blocks, reuse, session_hit_blocks
from ppd_bench.analysis.trace_blocks import TraceBlocks, number_blocks
from ppd_bench.analysis.trace_sessions import ChainSessions
from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow


@pytest.fixture(scope="module")
def mooncake(shared: Path) -> Reuse:
    return reuse(number_blocks(mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl"), block_tokens=512))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("hit_ratio", 0.3736),
        ("full_block_hit_ratio", 0.3734),
        ("mean_request_block_hit_ratio", 0.384),
        ("shared_anywhere_ratio", 0.530),
    ],
)
def test_the_known_values_of_the_mooncake_trace_come_out_to_the_digit(mooncake: Reuse, name: str, known: float) -> None:
    digits = len(f"{known}") - 2
    assert round(getattr(mooncake, name), digits) == known


def test_the_mooncake_trace_has_one_block_in_every_prompt(mooncake: Reuse) -> None:
    assert (mooncake.n_requests, mooncake.prompt_tokens) == (12_031, 144_793_823)
    hottest = mooncake.hottest[0]
    assert (hottest.block_id, hottest.n_requests, hottest.position) == (0, 12_031, 0)
    assert mooncake.hottest[1].n_requests < 100
    assert mooncake.intra_session_ratio is None


def test_requests_drawn_at_random_lose_the_reuse(shared: Path) -> None:
    """Why a sample takes whole sessions: the known trap, as a bad example."""
    trace = number_blocks(mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl"), block_tokens=512)
    drawn = [sorted(random.Random(seed).sample(range(trace.n_requests), 1000)) for seed in range(40, 50)]
    ratios = [reuse(trace.select(np.array(requests))).hit_ratio for requests in drawn]
    assert round(ratios[2], 3) == 0.072  # the known value is one draw, the one of seed 42; others lie higher
    assert max(ratios) < 0.15


def test_the_five_figures_differ_and_each_is_its_formula() -> None:
    found = reuse(blocks_of("ABc", "ABCd", "XY", "ABC"))
    # Prompts 9, 13, 8 and 12 tokens; hit blocks 0, 2, 0, 3; AB in three prompts, ABC in two, ABc, ABCd, X and XY in one.
    assert found.prompt_tokens == 42
    assert found.hit_ratio == pytest.approx((8 + 12) / 42)
    assert found.full_block_hit_ratio == pytest.approx((8 + 12) / 42)
    assert found.mean_request_hit_ratio == pytest.approx((0 + 8 / 13 + 0 + 1) / 4)
    assert found.mean_request_block_hit_ratio == pytest.approx((0 + 2 / 4 + 0 + 1) / 4)
    assert found.shared_anywhere_ratio == pytest.approx((8 + 12 + 0 + 12) / 42)
    assert found.shared_block_ratio == pytest.approx(3 / 7)
    assert (found.n_block_uses, found.n_blocks) == (12, 7)


def test_a_partial_last_block_counts_where_it_has_an_id_but_not_among_full_blocks() -> None:
    found = reuse(blocks_of("ABc", "ABc"))
    assert found.hit_ratio == pytest.approx(9 / 18)
    assert found.full_block_hit_ratio == pytest.approx(8 / 18)


def test_only_the_leading_run_of_held_blocks_hits() -> None:
    """Not chained, so no real trace: the middle block is new and the last is not."""
    rows = rows_of([(None, "ABC")])
    first, second, third = rows[0].block_ids
    rows.append(rows[0]._replace(row=1, arrival_s=1.0, block_ids=array("q", [first, 99, third])))
    trace = number_blocks(rows, block_tokens=B)
    assert hit_blocks(trace).tolist() == [0, 1]
    assert second in trace.block_ids


def test_reuse_inside_a_session_and_across_sessions_add_up() -> None:
    found = reuse(blocks_of(("s", "AB"), ("t", "ABC"), ("s", "ABCD"), ("t", "ABCE"), (None, "AX")))
    # Hits 0, 2, 3, 3, 1; inside the session 0, 0, 2, 3, 0.
    assert found.hit_ratio == pytest.approx(9 / 15)
    assert found.intra_session_ratio == pytest.approx(5 / 15)
    assert found.cross_session_ratio == pytest.approx(4 / 15)
    assert found.n_sessions == 3


@given(random_traces())
def test_hits_are_those_of_sets(trace: TraceBlocks) -> None:
    assert hit_blocks(trace).tolist() == slow_leading(trace)
    alone = slow_leading(trace, per_session=True)
    assert session_hit_blocks(trace).tolist() == alone


@given(random_traces(), st.integers(1, 9))
def test_working_in_small_pieces_changes_nothing(trace: TraceBlocks, piece_ids: int) -> None:
    whole = reuse(trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_blocks, "PIECE_IDS", piece_ids)
        patch.setattr("ppd_bench.analysis.reuse.PIECE_IDS", piece_ids)
        assert [p.start for p in trace.pieces()] == [0, *[p.end for p in trace.pieces()][:-1]]
        assert reuse(trace) == whole


@given(random_traces())
def test_ratios_are_ordered_and_the_weights_are_the_tokens_in_blocks(trace: TraceBlocks) -> None:
    found = reuse(trace)
    assert 0.0 <= (found.intra_session_ratio or 0.0) <= found.hit_ratio <= found.shared_anywhere_ratio <= 1.0
    assert found.full_block_hit_ratio <= found.hit_ratio
    weights = sum(int(block_weights(trace, piece).sum()) for piece in trace.pieces())
    assert weights == sum(min(prompt, B * len(blocks)) for _, prompt, blocks in prompts_of(trace))


def test_requests_are_taken_in_order_of_arrival() -> None:
    early, late = rows_of([(None, "AB"), (None, "ABC")])
    backwards = [late._replace(row=0), early._replace(row=1)]
    trace = number_blocks(backwards, block_tokens=B)
    assert trace.row.tolist() == [1, 0]
    assert hit_blocks(trace).tolist() == [0, 2]
    untimed = number_blocks([row._replace(arrival_s=None) for row in backwards], block_tokens=B)
    assert untimed.row.tolist() == [0, 1]
    assert hit_blocks(untimed).tolist() == [0, 2]


def test_a_trace_without_blocks_is_refused() -> None:
    with pytest.raises(SpecError, match="no request has block ids"):
        number_blocks([TraceRow(0, "r", None, None, 0.0, None, 10, 1, ())], block_tokens=B)
    with pytest.raises(SpecError, match="no requests"):
        number_blocks([], block_tokens=B)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), max_size=6), st.integers(1, 50))
def test_blocks_are_numbered_in_order_of_first_appearance(batches: list[list[int]], modulus: int) -> None:
    """Few distinct ids collide and repeat; any 64-bit id is allowed."""
    index = BlockIndex()
    known: dict[int, int] = {}
    for batch in ([i % modulus if i % 2 else i for i in batch] for batch in batches):
        numbers = index.number(np.array(batch, dtype=np.int64))
        assert numbers.tolist() == [known.setdefault(block_id, len(known)) for block_id in batch]
    assert index.ids.tolist() == list(known)


@pytest.mark.parametrize("stride", [1, 512, 1 << 20, 1 << 40])
def test_the_index_grows_and_finds_everything_again(stride: int) -> None:
    index = BlockIndex()
    ids = np.arange(200_000, dtype=np.int64) * stride
    first = index.number(ids)
    assert first.tolist() == list(range(200_000))
    assert (index.number(ids[::-1]) == first[::-1]).all()
    assert index.number(ids + 1 if stride > 1 else ids + 200_000).min() == 200_000


@given(random_traces(), st.data())
def test_a_selection_holds_its_requests_as_they_were(trace: TraceBlocks, data: st.DataObject) -> None:
    requests = data.draw(st.lists(st.integers(0, trace.n_requests - 1), max_size=10))
    prompts = list(prompts_of(trace))
    assert list(prompts_of(trace.select(np.array(requests, dtype=np.int64)))) == [prompts[k] for k in requests]


def test_derived_sessions_of_the_mooncake_trace_hold_most_of_its_reuse(shared: Path) -> None:
    derived = ChainSessions(512)
    rows = mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl")
    found = reuse(number_blocks((r._replace(session_id=f"{derived.add(r)}") for r in rows), block_tokens=512))
    assert found.n_sessions == derived.n_sessions
    assert found.intra_session_ratio is not None
    assert 0.8 < found.intra_session_ratio / found.hit_ratio < 0.9


def test_an_empty_selection_is_no_error() -> None:
    trace = blocks_of("AB", "ABC")
    nothing = trace.select(np.empty(0, dtype=np.int64))
    assert hit_blocks(nothing).size == 0
    assert nothing.has_arrivals is False
    assert replace(nothing, has_sessions=True).n_requests == 0
