"""The path of traces that one machine does not hold: partitions that never meet, through Parquet, give the same hits."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import mooncake_rows, random_traces

from ppd_bench.analysis.reuse import hit_blocks
from ppd_bench.analysis.reuse_partitioned import LEADING_SQL, leading, missing, partition_of
from ppd_bench.analysis.trace_blocks import TraceBlocks, number_blocks

N_PARTITIONS = 7


def uses_of(trace: TraceBlocks) -> pl.DataFrame:
    """Step 1: one row per block of every prompt."""
    n_blocks = np.diff(trace.offsets)
    return pl.DataFrame(
        {
            "request": np.repeat(np.arange(trace.n_requests), n_blocks),
            "block_id": trace.block_ids[trace.blocks],
            "position": np.arange(trace.blocks.size) - np.repeat(trace.offsets[:-1], n_blocks),
        }
    )


def partitioned_hits(uses: pl.DataFrame, n_blocks: np.ndarray, n_partitions: int) -> list[int]:
    """Steps 2 and 3; each partition sees its own uses alone."""
    parts = partition_of(uses["block_id"].to_numpy(), n_partitions)
    ends = []
    for k in range(n_partitions):
        own = uses.filter(pl.Series(parts == k))
        ends.append(own.filter(pl.Series(missing(own["block_id"].to_numpy(), own["request"].to_numpy()))))
    found = pl.concat(ends)
    return leading(n_blocks, found["request"].to_numpy(), found["position"].to_numpy()).tolist()


@given(random_traces(), st.integers(1, 5))
def test_partitions_in_any_order_give_the_hits_of_the_whole(trace: TraceBlocks, n: int) -> None:
    shuffled = uses_of(trace).sample(fraction=1.0, shuffle=True, seed=1)
    assert partitioned_hits(shuffled, np.diff(trace.offsets), n) == hit_blocks(trace).tolist()


def test_the_mooncake_trace_through_parquet_in_partitions_and_in_sql(shared: Path, tmp_path: Path) -> None:
    trace = number_blocks(mooncake_rows(shared / "data/mooncake/conversation_trace.jsonl"), block_tokens=512)
    n_blocks, expected = np.diff(trace.offsets), hit_blocks(trace).tolist()
    uses_of(trace).write_parquet(tmp_path / "uses.parquet")
    assert partitioned_hits(pl.read_parquet(tmp_path / "uses.parquet"), n_blocks, N_PARTITIONS) == expected
    pl.DataFrame({"request": np.arange(trace.n_requests), "n_blocks": n_blocks}).write_parquet(
        tmp_path / "requests.parquet"
    )
    with duckdb.connect() as database:
        for name, table in (("block_uses", "uses"), ("requests", "requests")):
            database.execute(f"CREATE VIEW {name} AS FROM read_parquet('{tmp_path / table}.parquet')")
        rows = database.execute(LEADING_SQL).fetchall()
    assert [hits for _, hits in rows] == expected


@pytest.mark.parametrize("stride", [1, 512, 1 << 33])
def test_partitions_are_even(stride: int) -> None:
    sizes = np.bincount(partition_of(np.arange(70_000) * stride, N_PARTITIONS))
    assert sizes.min() > 0.9 * 10_000
    assert sizes.max() < 1.1 * 10_000
