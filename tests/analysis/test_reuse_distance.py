"""Hit ratio against cache size: against an LRU cache that is played block by block, and samples against what is exact."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import B, blocks_of, mooncake_rows, random_traces, rows_of, slow_lru_tokens

from ppd_bench.analysis.reuse import hit_blocks, hit_tokens
from ppd_bench.analysis.reuse_distance import (
    Curve,
    default_rate,
    lru_curve,
    n_greater_before,
    reuse_distances,
)
from ppd_bench.analysis.trace_blocks import TraceBlocks, number_blocks


@pytest.fixture(scope="module")
def mooncake(shared: Path) -> TraceBlocks:
    return number_blocks(mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl"), block_tokens=512)


@pytest.fixture(scope="module")
def exact(mooncake: TraceBlocks) -> Curve:
    return lru_curve(mooncake)


@settings(max_examples=200)
@given(random_traces(), st.integers(0, 40))
def test_every_cache_size_hits_what_an_lru_cache_of_that_size_hits(trace: TraceBlocks, n_blocks: int) -> None:
    distances = reuse_distances(trace)
    found = distances.hit_ratios(np.array([float(B * n_blocks)]))[0]
    assert found == pytest.approx(slow_lru_tokens(trace, n_blocks) / int(trace.prompt_tokens.sum()))


@given(random_traces())
def test_the_curve_rises_to_the_hit_ratio_without_bound(trace: TraceBlocks) -> None:
    curve = lru_curve(trace)
    ratios = [point.hit_ratio for point in curve.points]
    assert curve.exact
    assert ratios == sorted(ratios)
    unbound = hit_tokens(trace, hit_blocks(trace)).sum() / trace.prompt_tokens.sum()
    assert ratios[-1] == pytest.approx(unbound)
    assert [size for _, size in curve.quantiles_tokens] == sorted(size for _, size in curve.quantiles_tokens)


def test_distances_by_hand() -> None:
    """AB, then X, then AB again: A and X are younger than B, so B needs three blocks, and A, youngest of AB, needs two."""
    distances = reuse_distances(blocks_of("AB", "X", "AB"))
    assert distances.blocks.tolist() == [2.0, 3.0]
    assert distances.hit_ratios(np.array([3.0, 4.0, 8.0, 12.0, 1e9])).tolist() == pytest.approx(
        [0, 0, 4 / 20, 8 / 20, 8 / 20]
    )
    assert distances.quantile_tokens(0.5) == 8.0
    assert distances.quantile_tokens(0.9) == 12.0


def test_a_prompt_that_names_a_block_twice_uses_it_once() -> None:
    rows = rows_of([(None, "AB"), (None, "AB")])
    a, b = rows[0].block_ids
    trace = number_blocks([rows[0]._replace(block_ids=array("q", [a, b, a])), rows[1]], block_tokens=B)
    assert reuse_distances(trace).blocks.tolist() == [1.0, 2.0]


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=60))
def test_greater_values_before_are_counted(values: list[int]) -> None:
    expected = [sum(other > value for other in values[:k]) for k, value in enumerate(values)]
    assert n_greater_before(np.array(values, dtype=np.int64)).tolist() == expected


@pytest.mark.parametrize("capacity_blocks", [16, 1024, 8192, 65536])
def test_the_mooncake_curve_is_that_of_a_played_cache(
    mooncake: TraceBlocks, exact: Curve, capacity_blocks: int
) -> None:
    found = {point.capacity_tokens: point.hit_ratio for point in exact.points}
    played = slow_lru_tokens(mooncake, capacity_blocks) / int(mooncake.prompt_tokens.sum())
    assert found[512.0 * capacity_blocks] == pytest.approx(played, abs=1e-12)


@pytest.mark.parametrize("rate", [0.5, 0.2, 0.05])
def test_a_sample_is_as_near_as_its_standard_error_says(mooncake: TraceBlocks, exact: Curve, rate: float) -> None:
    sampled = lru_curve(mooncake, rate=rate)
    truth = {point.capacity_tokens: point.hit_ratio for point in exact.points}
    assert not sampled.exact
    assert sampled.points[0].capacity_tokens >= 512 / rate
    both = [
        (p.hit_ratio - truth[p.capacity_tokens], p.standard_error) for p in sampled.points if p.capacity_tokens in truth
    ]
    assert len(both) > 10
    # Four parts give a rough standard error: three of them, and what is left of the last digit.
    assert all(error is not None and abs(off) <= 3 * error + 0.002 for off, error in both)
    assert abs(sampled.points[-1].hit_ratio - exact.points[-1].hit_ratio) < 1e-9


def test_the_mean_of_many_samples_is_the_truth(exact: Curve, mooncake: TraceBlocks) -> None:
    """Renumbering the blocks draws another sample."""
    sizes = np.array([2.0**21, 2.0**22, 2.0**23])
    truth = reuse_distances(mooncake).hit_ratios(sizes)
    found = []
    for seed in range(12):
        renumbered = np.random.default_rng(seed).permutation(mooncake.n_blocks).astype(np.int32)
        other = _with_blocks(mooncake, renumbered)
        found.append(reuse_distances(other, rate=0.1).hit_ratios(sizes))
    spread = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - truth) < 4 * spread + 1e-4).all()


def _with_blocks(trace: TraceBlocks, renumbered: np.ndarray) -> TraceBlocks:
    return TraceBlocks(
        block_tokens=trace.block_tokens, has_sessions=trace.has_sessions, row=trace.row,
        prompt_tokens=trace.prompt_tokens, output_tokens=trace.output_tokens, arrival_s=trace.arrival_s,
        session=trace.session, offsets=trace.offsets, blocks=renumbered[trace.blocks], block_ids=trace.block_ids,
    )  # fmt: skip


def test_a_trace_is_exact_until_it_is_large(mooncake: TraceBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_rate(mooncake) == 1.0
    monkeypatch.setattr("ppd_bench.analysis.reuse_distance.EXACT_BLOCK_USES", 100_000)
    monkeypatch.setattr("ppd_bench.analysis.reuse_distance.SAMPLED_BLOCK_USES", 50_000)
    assert default_rate(mooncake) == 50_000 / mooncake.blocks.size
    assert not lru_curve(mooncake).exact
